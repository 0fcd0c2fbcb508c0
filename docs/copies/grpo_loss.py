"""Two sequences of one and two tokens. The second is clipped at 1.2 in one token; KL of ln 2 in each."""
import math

import torch
from grpo_loss import grpo_loss, sequence_weights

mask = torch.tensor([[False, True, False], [False, True, True]])
old = torch.full((2, 3), -1.0)
moved = torch.tensor([[0, 0, 0], [0, 0, 1]]).bool()
logprobs = torch.where(moved, old + math.log(1.5), old).requires_grad_()
advantages = torch.tensor([[0.0, -0.5, 0.0], [0.0, 1.0, 1.0]])
ref = logprobs.detach() - math.log(2)
loss, stats = grpo_loss(logprobs, old, advantages, mask, sequence_weights(mask), .2, .2, .1, ref)
loss.backward()
kl = .5 + math.log(2) - 1
assert abs(loss.item() - (-(-.5 + (1.0 + 1.2) / 2) / 2 + .1 * kl)) < 1e-6
# d/dlogp: -weight (ratio A - kl_coef (1 - exp(to_ref))), and nothing of A where the ratio is clipped
by_hand = torch.tensor([[0, -.5 * (-.5 - .05), 0], [0, -.25 * (1 - .05), .25 * .05]])
assert torch.allclose(logprobs.grad, by_hand, atol=1e-6), logprobs.grad
assert stats["tokens"] == 3 and stats["clipped_tokens"] == 1 and abs(stats["ratio_max"] - 1.5) < 1e-5
try:
    grpo_loss(logprobs, old, torch.ones(2), mask, 1.0)
    raise SystemExit("advantages of another shape were taken")
except ValueError as refused:
    assert "one per token" in str(refused)
print(f"loss {loss.item():.4f}, {stats['clipped_tokens']} of {stats['tokens']} tokens clipped")
