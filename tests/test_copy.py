"""docs/copy.md: every piece is lifted into an empty folder and works there, beside torch alone."""

import pytest

from tests.conftest import ROOT
from tests.lifting import run


def test_the_fused_log_probs_are_one_file(tmp_path):
    (tmp_path / "turn_logprob.py").write_text((ROOT / "kernels/turn_logprob.py").read_text())
    run(tmp_path, """
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
""")


def test_the_weighted_loss_is_two_files(tmp_path):
    for name in ("turn_logprob", "weighted_ce"):
        source = (ROOT / f"kernels/{name}.py").read_text()
        (tmp_path / f"{name}.py").write_text(source.replace("from kernels.", "from "))
    run(tmp_path, """
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
""")


def test_tree_attention_is_one_file(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "tree_attention.py").write_text((ROOT / "common/gpu/tree_attention.py").read_text())
    run(tmp_path, """
import torch
from tree_attention import block_mask, tree_attention
# a prompt, tokens 0 to 2, and two turns behind it, 3 to 4 and 5 to 6, that do not see one another
end = torch.tensor([[7, 7, 7, 5, 5, 7, 7]])
i = torch.arange(7)
seen = (i[None] <= i[:, None]) & (i[:, None] < end[0][None])
assert seen.int().tolist()[5] == [1, 1, 1, 0, 0, 1, 0]
torch.manual_seed(0)
q, k, v = (torch.randn(1, 2, 128, 16) for _ in range(3))
found, _ = tree_attention(None, q, k, v, block_mask(end, 128))
q, k, v = (x[:, :, :7] for x in (q, k, v))
wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
assert torch.allclose(found[:, :7], wanted.transpose(1, 2), atol=1e-5)
""")
