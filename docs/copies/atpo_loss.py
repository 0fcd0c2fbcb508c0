"""The numbers of docs/walkthrough.md: turn 0 has ratio sqrt(1.25) and is clipped at 1.1, turn 1 has 1.2
and A < 0; the gradient of its token is 1.2 / 3."""
import math

import torch
from atpo_loss import atpo_loss, update_spread

log = math.log
old = torch.tensor([[log(.4), log(.5), 0.0, log(.5)]])
new = torch.tensor([[log(.5), log(.5), 0.0, log(.6)]], requires_grad=True)
mask = torch.tensor([[True, True, False, True]])
turns = torch.tensor([[0, 0, -1, 1]])
advantages = torch.tensor([[2.0, 2.0, 0.0, -1.0]])
loss, stats = atpo_loss(new, old, advantages, mask, turns, clip_low=.2, clip_high=.1)
assert abs(loss.item() + (2 * 2.2 - 1.2) / 3) < 1e-6 and stats["clipped_tokens"] == 2
gradient = torch.autograd.grad(loss, new)[0][0]
assert torch.allclose(gradient, torch.tensor([0, 0, 0, .4])), gradient
even = torch.tensor([[.1, .1, 0, .2]])
assert abs(update_spread(even, mask, turns).item() - 1) < 1e-6
print(f"loss {loss.item():.4f}; turn 0 is clipped and moves nothing, turn 1's token has gradient "
      f"{gradient[3].item():.1f} and becomes less likely")
