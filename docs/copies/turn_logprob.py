import torch
from turn_logprob import turn_logprob

torch.manual_seed(0)
hidden, head = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
target = torch.tensor([3, 0, 10, 5, 5])
found = turn_logprob(hidden, head, target).logprobs
wanted = (hidden @ head.T).log_softmax(1)[range(5), target]
assert torch.allclose(found, wanted, atol=1e-6)
g = torch.randn(5)
ours = torch.autograd.grad((found * g).sum(), [hidden, head])
theirs = torch.autograd.grad((wanted * g).sum(), [hidden, head])
assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs))
print("log-probs", found.tolist())
