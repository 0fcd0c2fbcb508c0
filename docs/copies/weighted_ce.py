import torch
from weighted_ce import think_weights, weighted_cross_entropy

labels = torch.tensor([[1, 7, 2, 8, 3]])           # 7 opens a thought, 8 closes it
weights = think_weights(labels, [7], [8], .1)
assert torch.equal(weights, torch.tensor([[1, .1, .1, .1, 1]]))
torch.manual_seed(0)
hidden, head = torch.randn(5, 4), torch.randn(9, 4)
logp = (hidden @ head.T).log_softmax(1)[range(5), labels[0]]
loss = weighted_cross_entropy(hidden, head, labels[0], weights[0])
assert torch.allclose(loss, -(weights[0] * logp).sum() / weights.sum(), atol=1e-6)
print(f"loss {loss.item():.4f}")
