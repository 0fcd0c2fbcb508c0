"""docs/copy.md: Bi-RAR's reward and GRPO's loss, lifted into an empty folder, run with PyTorch alone."""

import json
import math

import pytest

from tests.lifting import lift, run

REWARD = "FARTHEST information_distance ReasoningStep complexities distances step_reward cascade"
LOSS = "grpo_loss sequence_weights check_shapes loss_stats"


def test_the_reward(tmp_path):
    """Q = 0 1, A = 2, T = 3 4, the line break 9, under a table of bigrams: K(T) is 4 bits, K(A) 2, K(Q) 5."""
    lift(tmp_path, "piece.py", "import math\nfrom typing import NamedTuple\n\nimport torch\n", bi_rar=REWARD)
    printed = run(tmp_path, """
import json
from types import SimpleNamespace
import torch
from piece import *

table = torch.zeros(10, 10)
table[9, 0], table[9, 2], table[9, 3], table[0, 1], table[3, 4] = 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 2
table[:, 8] = 1 - table.sum(1)

class Model:
    device = "cpu"
    def __call__(self, input_ids):
        return SimpleNamespace(logits=table[input_ids].log())

K = complexities(Model(), ReasoningStep((0, 1), (2,), (3, 4)), [9])
d_TA, d_TQ = distances(K)
print(json.dumps([K, d_TA, d_TQ, cascade([step_reward(d_TA), step_reward(d_TQ)])]))
""")
    K, d_TA, d_TQ, reward = json.loads(printed)
    assert K == pytest.approx(
        {"T|QA": 4, "A|QT": 2, "Q|AT": 5, "T|Q": 4, "A|Q": 2, "T|A": 4, "Q|A": 5}, rel=1e-5)
    assert (d_TA, d_TQ) == pytest.approx((1, 1), rel=1e-5)
    assert reward == pytest.approx(1 - (1 - math.exp(-1)) ** 2, rel=1e-5)


def test_the_loss(tmp_path):
    """Two sequences of one and two tokens. The second is clipped at 1.2 in one token; KL of ln 2 in each."""
    lift(tmp_path, "piece.py", "import torch\n", common__training=LOSS)
    printed = run(tmp_path, """
import json, math
import torch
from piece import *

mask = torch.tensor([[False, True, False], [False, True, True]])
old = torch.full((2, 3), -1.0)
logprobs = torch.where(torch.tensor([[0, 0, 0], [0, 0, 1]]).bool(), old + math.log(1.5), old).requires_grad_()
advantages = torch.tensor([[0.0, -0.5, 0.0], [0.0, 1.0, 1.0]])
ref = logprobs.detach() - math.log(2)
loss, stats = grpo_loss(logprobs, old, advantages, mask, sequence_weights(mask), .2, .2, .1, ref)
loss.backward()
try:
    grpo_loss(logprobs, old, torch.ones(2), mask, 1.0)
    refused = ""
except ValueError as error:
    refused = str(error)
print(json.dumps([float(loss.detach()), logprobs.grad.tolist(), stats, refused]))
""")
    loss, gradient, stats, refused = json.loads(printed)
    kl = .5 + math.log(2) - 1
    assert loss == pytest.approx(-(-.5 + (1.0 + 1.2) / 2) / 2 + .1 * kl)
    # d/dlogp: -weight (ratio A - kl_coef (1 - exp(to_ref))), and nothing of A where the ratio is clipped
    assert gradient[0] == pytest.approx([0, -.5 * (-.5 - .05), 0])
    assert gradient[1] == pytest.approx([0, -.25 * (1 - .05), .25 * .05])
    assert stats["tokens"] == 3 and stats["clipped_tokens"] == 1 and stats["ratio_max"] == pytest.approx(1.5)
    assert "one a token" in refused
