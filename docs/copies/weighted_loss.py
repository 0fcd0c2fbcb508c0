"""Labels: not learned, <think> 5 </think>, then two tokens; tags of one id and of two."""
import torch
from weighted_loss import think_weights, weighted_loss

one = think_weights(torch.tensor([[-100, 1, 5, 2, 6, 7]]), [1], [2], .1)
two = think_weights(torch.tensor([[1, 1, 5, 2, 2, 7]]), [1, 1], [2, 2], .1)
assert torch.allclose(one, torch.tensor([[1, .1, .1, .1, 1, 1]]))
assert torch.allclose(two, torch.tensor([[.1, .1, .1, .1, .1, 1]]))
weights = torch.where(torch.tensor([[False, True, True, True, True, True]]), one, 0.0)
logprobs = torch.full((1, 6), -2.0, requires_grad=True)
loss = weighted_loss(logprobs, weights, float(weights.sum()))
loss.backward()
assert abs(loss.item() - 2) < 1e-6
assert torch.allclose(logprobs.grad, -torch.tensor([[0, .1, .1, .1, 1, 1]]) / 2.3, atol=1e-6)
assert weighted_loss(logprobs, 0 * weights, 0.0).item() == 0
print("weights", one.tolist())
