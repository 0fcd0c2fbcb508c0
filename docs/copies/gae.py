"""gamma .5, lambda .5; an observation between the two sampled tokens, which is not read."""
import torch
from gae import gae

mask = torch.tensor([[False, True, False, True]])
rewards = torch.tensor([[9.0, 0.0, 9.0, 1.0]])
values = torch.tensor([[7.0, 0.5, 7.0, 0.2]])
advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
last = 1 - .2
first = .5 * .2 - .5 + .25 * last
assert torch.allclose(advantages, torch.tensor([[0, first, 0, last]]), atol=1e-6)
assert torch.allclose(returns, torch.tensor([[0, first + .5, 0, 1]]), atol=1e-6)
print("advantages", advantages.tolist(), "returns", returns.tolist())
