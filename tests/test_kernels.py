"""Kernels against fp64: values, gradients, clip decisions, hostile inputs; compiled for three architectures.

Without a GPU the Triton kernels run in Triton's interpreter (conftest.py sets TRITON_INTERPRET), which is
exact for the row passes; bf16 products then go through fp32, as on the CPU path."""

import importlib
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import at2po
import mygo_mujica
import omne_r1
from common import model as models
from common import training
from common.rollout import Trajectory, Turn, collate
from common.world.tiny import tiny_model, tiny_tokenizer
from kernels import weighted_ce
from kernels.turn_logprob import take, turn_logprob, turn_sum
from kernels.weighted_ce import weighted_cross_entropy

pytestmark = pytest.mark.usefixtures("the_device_is_there_for_what_compiles")
ours = importlib.import_module("kernels.turn_logprob")  # the module: `kernels.turn_logprob` is the function
ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
there = pytest.mark.skipif(ours.triton is None, reason="Triton is not installed")
interpreted = [there] if DEVICE == "cuda" else [there, pytest.mark.interpreter]
BACKENDS = ["torch", pytest.param("triton", marks=there)]
LATER = ["torch", pytest.param("triton", marks=interpreted)]  # on a CPU its second half, not by default


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Tiles of a few rows and blocks of a few columns, so that every loop runs several times."""
    monkeypatch.setattr(ours, "TILE_BYTES", 20_000)
    monkeypatch.setattr(ours, "BLOCK", 64)


@pytest.fixture(params=["kept", "recomputed"])
def kept(request, monkeypatch):
    """Whether P' of the small problems here fits into KEPT_BYTES."""
    if request.param == "recomputed":
        monkeypatch.setattr(ours, "KEPT_BYTES", 0)


def problem(N=37, H=16, V=301, dtype=torch.float32, seed=0, sharp=3.0):
    """Hidden states, head, sampled targets (most of them probable) and a non-uniform upstream gradient."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(N, H, generator=g).to(dtype)
    W = (sharp * torch.randn(V, H, generator=g) / H**0.5).to(dtype)
    target = torch.zeros(0, dtype=torch.long)
    if N:
        target = torch.multinomial((x.float() @ W.float().T).softmax(1), 1, generator=g)[:, 0]
    up = torch.randn(N, generator=g) * torch.rand(N, generator=g)
    return x.to(DEVICE), W.to(DEVICE), target.to(DEVICE), up.to(DEVICE)


def exact(x, W, target, up, temperature=1.0):
    """logp, entropy, dX, dW in fp64 by autograd."""
    x, W = x.double().requires_grad_(), W.double().requires_grad_()
    logprobs = (x @ W.T / temperature).log_softmax(1)
    logp = logprobs.gather(1, target[:, None])[:, 0]
    entropy = -(logprobs.exp() * logprobs).nan_to_num().sum(1)
    return logp.detach(), entropy.detach(), *torch.autograd.grad((logp * up).sum(), (x, W))


def measured(x, W, target, up, **options):
    x, W = x.detach().clone().requires_grad_(), W.detach().clone().requires_grad_()
    out = turn_logprob(x, W, target, entropy=True, **options)
    return out.logprobs.detach(), out.entropy, *torch.autograd.grad((out.logprobs * up).sum(), (x, W))


def off(a, b):
    """Relative error of a tensor, by norm."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def check(x, W, target, up, temperature=1.0, **options):
    """Asserts the limits of the issue: 1e-5 for fp32; for bf16 operands 1e-4, dX 3e-3, dW 4e-3."""
    coarse = x.dtype != torch.float32
    expected, found = (
        exact(x, W, target, up, temperature), measured(x, W, target, up, temperature=temperature, **options))
    assert found[2].dtype == x.dtype and found[3].dtype == W.dtype
    limit = 1e-4 if coarse else 1e-5
    # the interpreter truncates to bf16 where a GPU rounds to nearest
    cut = 2 if options.get("backend") == "triton" and DEVICE == "cpu" else 1
    assert (found[0] - expected[0]).abs().max() < limit and (found[1] - expected[1]).abs().max() < limit * 10
    assert off(found[2], expected[2]) < (3e-3 * cut if coarse else 1e-5), off(found[2], expected[2])
    assert off(found[3], expected[3]) < (4e-3 * cut if coarse else 1e-5), off(found[3], expected[3])


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients_equal_fp64(backend, dtype, kept):
    check(*problem(dtype=dtype), backend=backend)
    check(*problem(dtype=dtype, seed=1), backend=backend, temperature=0.7)


@pytest.mark.parametrize("backend", LATER)
@pytest.mark.parametrize(
    "shape",
    [dict(N=1), dict(V=63), dict(V=64), dict(V=65), dict(V=7), dict(N=2, H=3, V=1001), dict(N=130, V=129)])
def test_ragged_shapes(backend, shape, kept):
    check(*problem(**shape), backend=backend)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_no_rows(backend):
    x, W, target, up = problem(N=0)
    logp, _, dx, dw = measured(x, W, target, up, backend=backend)
    assert logp.shape == (0,) and dx.shape == x.shape and not dw.any()


@pytest.mark.parametrize("backend", LATER)
def test_hostile_inputs(backend, kept, monkeypatch):
    monkeypatch.setattr(ours, "BLOCK", 256)
    for shift in (120.0, -120.0):  # all logits far from 0: only differences count
        x, W, target, up = problem(H=17)
        x[:, -1], W[:, -1] = 1.0, shift
        expected, found = exact(x, W, target, up), measured(x, W, target, up, backend=backend)
        assert (found[0] - expected[0]).abs().max() < 1e-4 and off(found[3], expected[3]) < 1e-4
        # (the last column is 120 times a sum that cancels)
        assert off(found[2][:, :-1], expected[2][:, :-1]) < 1e-4
    x, W, target, up = problem(sharp=60.0)  # rows with all probability in one place
    expected, found = exact(x, W, target, up), measured(x, W, target, up, backend=backend)
    assert expected[0].abs().min() < 1e-9 and (found[0] - expected[0]).abs().max() < 1e-4
    assert all(torch.isfinite(gradient).all() for gradient in found[2:])
    x, W, target, up = problem()
    target[:] = len(W) - 1
    check(x, W, target, up, backend=backend)
    x, W, target, up = problem()
    # not contiguous
    check(x.repeat_interleave(2, 1)[:, ::2], W.T.contiguous().T, target, up, backend=backend)


@pytest.mark.parametrize("backend", LATER)
def test_rows_with_minus_infinity(backend):
    logits = torch.randn(5, 150, device=DEVICE)
    logits[:, 100:] = -torch.inf
    logits[0, :99] = -torch.inf  # one finite logit
    target = torch.tensor([99, 3, 4, 5, 99], device=DEVICE)
    logp, lse, entropy = ours.row_stats(logits, target, 1.0, True, backend)
    distribution = torch.distributions.Categorical(logits=logits[:, :100].double())
    torch.testing.assert_close(logp.double(), distribution.log_prob(target), atol=1e-6, rtol=1e-6)
    expected = -(distribution.probs * distribution.probs.clamp(min=1e-300).log()).sum(1)
    torch.testing.assert_close(entropy.double(), expected, atol=1e-5, rtol=1e-5)
    p = ours.softmax_minus_one_hot(logits, target, lse, 0, 1.0, torch.full_like(logits, torch.nan), backend)
    assert torch.isfinite(p).all() and p.sum(1).abs().max() < 1e-5 and not p[:, 100:].any()


@pytest.mark.parametrize("backend", LATER)
def test_probable_tokens_keep_their_gradient_in_bf16(backend, kept, monkeypatch):
    """p_y between .99 and .999: p_y - 1 of a rounded p_y would have no correct digit."""
    monkeypatch.setattr(ours, "BLOCK", 512)
    monkeypatch.setattr(ours, "TILE_BYTES", 200_000)
    x, W, target, up = problem(N=200, V=500, sharp=6.0, dtype=torch.bfloat16)
    target = (x.float() @ W.float().T).argmax(1)
    logp, _, expected, _ = exact(x, W, target, up)
    found = measured(x, W, target, up, backend=backend)[2]
    rows = ((logp > -0.01) & (logp < -0.001)).nonzero()[:, 0]
    assert len(rows) >= 3 and max(off(found[i], expected[i]) for i in rows) < 1e-2


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, torch.bfloat16])
def test_a_mask_may_have_any_dtype(dtype):
    """Rows of 300 sampled tokens, which bfloat16 cannot count."""
    generator = torch.Generator().manual_seed(3)
    B, T, H, V = 2, 301, 4, 7
    draw = torch.randn(6, B, T, generator=generator)
    old, ref, rewards, values, advantages, noise = draw.double()
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[:, 0] = False
    mask[1, 200] = False
    turns = torch.where(mask, torch.arange(T) // 100, -1)
    hidden = torch.randn(B, T, H, generator=generator)
    head = torch.randn(V, H, generator=generator)
    labels = torch.randint(V, (B, T), generator=generator)
    turn_ptr = torch.tensor([0, 100, int(mask.sum())])

    def numbers(given):
        new = (old + .1 * noise).requires_grad_()
        weights = training.sequence_weights(given)
        losses = [
            at2po.atpo_loss(new, old, advantages, given, turns, .1, .1)[0],
            training.grpo_loss(new, old, advantages, given, weights, kl_coef=.1, ref_logprobs=ref)[0],
            at2po.update_spread(new.detach() - old, given, turns),
            *omne_r1.ppo_loss(new, old, advantages, new, rewards, given, .1, 5)[:2],
            mygo_mujica.mle_loss(new, given, 5), *omne_r1.gae(rewards, new, given, .9, .8)[0],
            weighted_cross_entropy(hidden, head, labels, given),
            turn_logprob(hidden, head, labels[mask], rows=given, turn_ptr=turn_ptr).turn_sums]
        gradient, = torch.autograd.grad(sum(loss.sum() for loss in losses), new)
        return [loss.detach() for loss in losses], gradient

    for one, other in zip(numbers(mask), numbers(mask.to(dtype)), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    flat = mask.to(dtype).flatten()
    if dtype in (torch.bool, torch.float32, torch.bfloat16):  # a row of whole numbers are indices
        assert turn_logprob(hidden, head, labels[mask], rows=flat).logprobs.shape == (mask.sum(),)


@pytest.mark.parametrize("junk", [math.nan, -math.inf])
def test_no_loss_reads_what_was_not_sampled(junk):
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]]).bool()
    turns = torch.where(mask, torch.tensor([0, 0, 0, 1, 1]), -1)
    clean = torch.linspace(-2, -.1, 10).reshape(2, 5)
    for loss in (
        lambda x: mygo_mujica.mle_loss(x, mask, 5),
        lambda x: omne_r1.weighted_loss(x, mask / 2, 2.5),
        lambda x: at2po.update_spread(x.detach(), mask, turns).sum() + 0 * x[mask].sum(),
    ):
        found = []
        for elsewhere in (0.0, junk):
            x = torch.where(mask, clean, elsewhere).requires_grad_()
            found.append((loss(x), torch.autograd.grad(loss(x), x)[0]))
        torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_rows_that_occur_twice_and_gradients_that_are_nothing(backend, kept):
    x, W, target, up = problem()
    # one twice, as siblings have a predecessor in common
    rows = torch.tensor([3, 3, 0, 36, 20, 5], device=DEVICE)
    tokens, g = target[:6], up[:6].clone()
    g[2] = 0
    a, b = x.clone().requires_grad_(), W.clone().requires_grad_()
    logp = turn_logprob(a.view(1, *a.shape), b, tokens, rows=rows, backend=backend).logprobs
    da, db = torch.autograd.grad((logp * g).sum(), (a, b))
    c, d = x.double().requires_grad_(), W.double().requires_grad_()
    expected = (c[rows] @ d.T).log_softmax(1).gather(1, tokens[:, None])[:, 0]
    dc, dd = torch.autograd.grad((expected * g).sum(), (c, d))
    assert off(da, dc) < 1e-5 and off(db, dd) < 1e-5


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's road")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cached", [4 * 2**20, 0])  # one tile, or some of 256 columns
def test_a_head_that_learns_nothing_on_a_cpu(dtype, cached, monkeypatch):
    monkeypatch.setattr(ours, "CACHED_BYTES", cached)
    for shape in (dict(N=40, V=1000), dict(N=1, V=7), dict(N=3, V=256), dict(N=40, V=1000, seed=1)):
        x, W, target, up = problem(dtype=dtype, **shape)
        for temperature in (1.0, .6):
            logp, _, dx, _ = exact(x, W, target, up, temperature)
            x.requires_grad_()
            out = turn_logprob(x, W, target, temperature=temperature)
            assert type(out.logprobs.grad_fn).__name__ == "_FrozenHeadBackward"
            found, = torch.autograd.grad((out.logprobs * up).sum(), x)
            x.requires_grad_(False)
            assert (out.logprobs - logp).abs().max() < (1e-5 if dtype == torch.float32 else 1e-4)
            assert found.dtype == dtype and off(found, dx) < (1e-5 if dtype == torch.float32 else 3e-3)
            with torch.no_grad():
                assert torch.equal(turn_logprob(x, W, target, temperature=temperature).logprobs, out.logprobs)
    nothing = turn_logprob(x[:0].requires_grad_(), W, target[:0]).logprobs
    assert nothing.shape == (0,) and nothing.requires_grad


@pytest.mark.skipif(DEVICE != "cpu", reason="a CPU's road")
def test_a_confident_token_s_gradient_has_its_digits():
    """p_y = 1 - 5e-9: rounded to fp32 it is 1, and 1 - p_y nothing."""
    x = torch.eye(4)[:1] * 20
    W = torch.eye(4)
    target = torch.tensor([0])
    _, _, expected, _ = exact(x, W, target, torch.ones(1))
    found, = torch.autograd.grad(turn_logprob(x.requires_grad_(), W, target).logprobs.sum(), x)
    assert 0 < expected[0, 0] < 1e-8 and off(found, expected) < 1e-5


@pytest.mark.parametrize("backend", LATER)
def test_autograd_manners(backend):
    x, W, target, up = problem(dtype=torch.bfloat16)
    x.requires_grad_()
    out = turn_logprob(x, W, target, backend=backend)  # LoRA: a frozen head
    (first,) = torch.autograd.grad((out.logprobs * up).sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad((out.logprobs * up).sum(), x)
    assert torch.equal(first, again)
    with torch.no_grad():
        assert torch.equal(turn_logprob(x, W, target, backend=backend).logprobs, out.logprobs)
        assert out.logprobs.requires_grad
    with torch.autocast(DEVICE, torch.bfloat16):  # a head with fp32 master weights under autocast
        master = W.float().requires_grad_()
        inside = turn_logprob(x, master, target, backend=backend).logprobs
        assert torch.equal(inside, out.logprobs)
        assert torch.autograd.grad(inside.sum(), master)[0].dtype == torch.float32
    E = torch.randn(50, 8, device=DEVICE, requires_grad=True)  # tied embeddings: one tensor, two gradients
    ids = torch.arange(20, device=DEVICE)
    torch.testing.assert_close(
        torch.autograd.grad(turn_logprob(E[ids], E, ids + 5, backend=backend).logprobs.sum(), E)[0],
        torch.autograd.grad((E[ids] @ E.T).log_softmax(1).gather(1, ids[:, None] + 5).sum(), E)[0], atol=1e-5,
        rtol=1e-4)


@pytest.mark.parametrize("backend", LATER)
def test_default_dtype_and_strided_turns(backend):
    x, W, target, up = problem(N=30, V=50)
    turn_ptr = torch.tensor([0, -1, 10, -1, 30], device=DEVICE)[::2]
    expected = turn_logprob(x, W, target, turn_ptr=turn_ptr.contiguous(), backend=backend)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = turn_logprob(x, W, target, turn_ptr=turn_ptr, backend=backend)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.logprobs.dtype == torch.float32
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.turn_sums, expected.turn_sums)


@pytest.mark.parametrize("backend", LATER)
def test_two_runs_are_bit_equal(backend):
    p = problem(dtype=torch.bfloat16)
    assert all(
        torch.equal(a, b)
        for a, b in zip(measured(*p, backend=backend), measured(*p, backend=backend), strict=True))


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_turn_sums(backend):
    x, W, target, up = problem(N=700, H=4, V=9)
    turn_ptr = torch.tensor([0, 1, 1, 300, 556, 700], device=DEVICE)  # one token, none, many
    x.requires_grad_()
    out = turn_logprob(x, W, target, turn_ptr=turn_ptr, backend=backend)
    expected = torch.stack(
        [out.logprobs[a:b].double().sum() for a, b in zip(turn_ptr[:-1], turn_ptr[1:], strict=True)])
    torch.testing.assert_close(out.turn_sums.double(), expected, atol=1e-4, rtol=1e-6)
    g = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], device=DEVICE)
    (dx,) = torch.autograd.grad((out.turn_sums * g).sum(), x)
    up = g.repeat_interleave(turn_ptr.diff())
    assert off(dx, exact(x, W, target, up)[2]) < 1e-5
    if backend != "reference":
        empty = torch.ones(0, device=DEVICE), torch.tensor([0, 0], device=DEVICE)
        assert turn_sum(*empty, backend).tolist() == [0.0]


def test_bad_arguments():
    x, W, target, _ = problem()
    for message, arguments, options in (
        ("width 16, weight 15", (x, W[:, 1:], target), {}),
        ("37 rows of hidden states, 36", (x, W, target[1:]), {}),
        ("hidden states in float16", (x.half(), W, target), {}),
        ("backend 'cuda'", (x, W, target), {"backend": "cuda"})):
        with pytest.raises(ValueError, match=message):
            turn_logprob(*arguments, **options)


# ---- clip decisions

def test_no_clip_decision_flips_where_bf16_logits_flip_some():
    """Turn-mean ratios near ATPO's window: decided as in fp64 by us,
    not by a head that rounds its logits to bf16."""
    from benchmarks.bench_kernels import clip_flips
    flips = clip_flips(turns=300, V=2000, H=128, device=DEVICE)
    assert flips["ours"] == 0 and flips["bf16 logits"] > 0.03 and flips["outside the window"] > 0.15, flips


def small_policy(monkeypatch):
    monkeypatch.setattr(ours, "BLOCK", 1024)
    return tiny_model(tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>"]), width=32).to(DEVICE)


@there
def test_a_policy_gradient_through_the_kernels_equals_the_reference(monkeypatch):
    """The seam: token_logprobs with kernels on and off, shared prefixes included,
    the whole model's gradient."""
    model = small_policy(monkeypatch)
    first = Turn([5, 6, 7], [0.0] * 3, "", "", [8, 9])
    batch = collate(
        [Trajectory("q", [4, 5], [first, Turn([9, 6, tail], [0.0] * 3, "", "")]) for tail in (7, 8, 9)]
    ).to(DEVICE)
    advantages = torch.randn(batch.turn_ids.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    gradients, losses = [], []
    for backend in ("triton", "reference"):
        model.zero_grad()
        monkeypatch.setattr(models, "turn_logprob", partial(turn_logprob, backend=backend))
        logprobs = models.token_logprobs(model, batch, 0.9)
        loss, _ = at2po.atpo_loss(
            logprobs, logprobs.detach() - 0.001, advantages, batch.response_mask, batch.turn_ids)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-4, abs=1e-6)
    assert off(*gradients) < (1e-4 if DEVICE == "cpu" else 2e-2)
    assert float(gradients[1].norm()) > 0


@there
@pytest.mark.parametrize("credit", ["turn", "outcome"])
@pytest.mark.parametrize("share", [True, False])
def test_atpo_s_loss_through_the_kernels_turn_sums_equals_the_formula(monkeypatch, share, credit):
    """Two trees whose leaves share turns, in several packs, padded; a third was flat, and counts. With credit
    by outcome a shared turn has another advantage in each leaf."""
    monkeypatch.setattr(models, "turn_logprob", partial(turn_logprob, backend="triton"))
    model = small_policy(monkeypatch)
    g = torch.Generator().manual_seed(0)

    def turn(n):
        return Turn(torch.randint(4, 40, (n,), generator=g).tolist(), [0.0] * n, "", "", [8, 9])

    leaves = []
    for sign in (1.0, -1.0):
        first, second = turn(7), turn(3)
        for n in (4, 9, 2):
            leaf = Trajectory("q", [4, 5], [first, second, turn(n)])
            leaf.advantages = [sign, -sign / 2, 2 * sign]
            if credit == "outcome":
                leaf.advantages = [n - 5.0] * 3
            leaves.append(leaf)
    batch = collate(leaves, share, pack_tokens=40).to(DEVICE)
    assert len(batch.packed_ids) > 1 and len(batch.turn_ptr) - 1 == (10 if share else 18)
    rows = models._of_sampled(model, batch, .9, None)
    rows = rows.logprobs.detach() + .03 * torch.randn(len(batch.target), generator=g).to(DEVICE)
    batch.old_logprobs = models.by_token(rows, batch)
    batch.old_turn_logprobs = models.with_zero(turn_sum(rows, batch.turn_ptr))[batch.turns]
    cfg = at2po.Config(clip_low=.005, clip_high=.007)
    losses, gradients = [], []
    for over_turns in (True, False):
        model.zero_grad()
        logprobs, turn_logprobs = models.turn_logprobs(model, batch, .9)
        if over_turns:
            loss, stats = at2po.policy_loss(logprobs, turn_logprobs, batch, cfg, 9, 0)
        else:
            loss, stats = at2po.atpo_loss(
                logprobs, batch.old_logprobs, batch.advantages, batch.response_mask, batch.turn_ids,
                cfg.clip_low, cfg.clip_high, 9)
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        assert 0 < stats["clipped_tokens"] < stats["tokens"] == batch.response_mask.sum()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)
    assert off(*gradients) < (1e-4 if DEVICE == "cpu" else 2e-2) and float(gradients[1].norm()) > 0


# ---- weighted cross entropy

def algorithm_1(logits, labels, weights):
    """Lines 16-30 of Omne-R1's Algorithm 1, as printed."""
    logits, labels, weights = logits[:, :-1], labels[:, 1:], weights[:, 1:]
    per_token = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=-100).view(labels.shape)
    active = (labels != -100).to(logits.dtype)
    effective = (weights * active).sum()
    return (per_token * weights * active).sum() / effective if effective > 1e-8 else logits.sum() * 0


@pytest.mark.parametrize("backend", [*BACKENDS, "reference"])
def test_weighted_cross_entropy_equals_algorithm_1(backend, kept):
    g = torch.Generator().manual_seed(0)
    hidden, W = torch.randn(3, 20, 16, generator=g).to(DEVICE), torch.randn(301, 16, generator=g).to(DEVICE)
    labels = torch.randint(301, (3, 20), generator=g)
    weights = torch.tensor([1.0, 0.001, 0.0])[torch.randint(3, (3, 20), generator=g)]
    labels[0, :7] = -100
    for place in ("cpu", DEVICE):
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
            h, w = hidden.to(dtype).requires_grad_(), W.to(dtype).requires_grad_()
            loss = weighted_ce.weighted_cross_entropy(
                h[:, :-1], w, labels[:, 1:].to(place), weights[:, 1:].to(place), backend=backend)
            dh, dw = torch.autograd.grad(2 * loss, (h, w))
            e, f = hidden.to(dtype).double().requires_grad_(), W.to(dtype).double().requires_grad_()
            expected = algorithm_1(e @ f.T, labels.to(DEVICE), weights.double().to(DEVICE))
            de, df = torch.autograd.grad(2 * expected, (e, f))
            assert abs(loss.item() - expected.item()) < 1e-4
            assert off(dh, de) < 2 * tolerance
            assert off(dw, df) < 2 * tolerance
            assert dh.dtype == dtype and not dh[:, -1].any()


def spans(row, start, end):
    """Lines 3-15, a list at a time: where each thought begins and ends."""
    found = []
    for s in range(len(row)):
        if row[s:s + len(start)] != start:
            continue
        for e in range(s, len(row)):
            if row[e:e + len(end)] == end:
                found.append((s, e + len(end)))
                break
    return found


def literal_weights(labels, start, end, weight):
    """`weight` at every token of a thought, 1 elsewhere."""
    weights = torch.ones(labels.shape, dtype=torch.float64)
    for i, row in enumerate(labels.tolist()):
        for s, e in spans(row, start, end):
            weights[i, s:e] = weight
    return weights


@pytest.mark.parametrize("backend, start, end", [
    ("torch", [3], [4]), ("reference", [3, 5], [4]),
    pytest.param("triton", [3, 5], [3, 6], marks=interpreted)])
@pytest.mark.parametrize("weight", [0.1, 0.0])
def test_algorithm_1_whole_on_random_batches_with_tags_of_one_and_several_tokens(backend, start, end, weight):
    """Few tokens, so that tags stand everywhere, in ignored parts too."""
    thoughts = 0
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(3, 7, (4, 40), generator=g)
        labels[torch.rand(4, 40, generator=g) < 0.1] = -100
        hidden = torch.randn(4, 40, 8, generator=g).to(DEVICE).requires_grad_()
        W = torch.randn(11, 8, generator=g).to(DEVICE)
        expected = literal_weights(labels, start, end, weight)
        thoughts += int((expected < 1).sum())
        weights = weighted_ce.think_weights(labels, start, end, weight)
        torch.testing.assert_close(weights.double(), expected, rtol=1e-7, atol=0)
        loss = weighted_ce.weighted_cross_entropy(
            hidden[:, :-1], W, labels[:, 1:].to(DEVICE), weights[:, 1:].to(DEVICE), backend=backend)
        (dh,) = torch.autograd.grad(loss, hidden)
        exact = hidden.detach().double().requires_grad_()
        theirs = algorithm_1(exact @ W.double().T, labels.to(DEVICE), expected.to(DEVICE))
        (de,) = torch.autograd.grad(theirs, exact)
        assert abs(loss.item() - theirs.item()) < 1e-5 and off(dh, de) < 2e-5
        other = torch.where(labels == -100, -1, labels)  # any negative label is ignored
        again = weighted_ce.weighted_cross_entropy(
            hidden[:, :-1], W, other[:, 1:].to(DEVICE), weights[:, 1:].to(DEVICE), backend=backend)
        assert again.item() == loss.item()
        # into a label without weight flows nothing at all, beside labels that are learned
        none = (expected[:, 1:] == 0) | (labels[:, 1:] == -100)
        assert not dh[:, :-1][none.to(DEVICE)].any() and dh[:, :-1][~none.to(DEVICE)].any(-1).all()
    assert thoughts > 5


@pytest.mark.parametrize("backend", [*LATER, "reference"])
def test_weights_are_divided_by_the_global_sum(backend):
    """Two micro-batches with the sum of both give the whole batch's gradient; their own sums would not."""
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 9, 8, generator=g).to(DEVICE)
    W = torch.randn(50, 8, generator=g).to(DEVICE).requires_grad_()
    labels = torch.randint(50, (2, 9), generator=g)
    weights = torch.rand(2, 9, generator=g) * torch.tensor([[1.0], [0.01]])

    def ce(rows, **total):
        given = hidden[rows], W, labels[rows], weights[rows]
        return weighted_ce.weighted_cross_entropy(*given, backend=backend, **total)

    (whole,) = torch.autograd.grad(ce(slice(0, 2)), W)
    (parts,) = torch.autograd.grad(sum(ce(slice(i, i + 1), total=weights.sum()) for i in range(2)), W)
    (own,) = torch.autograd.grad(sum(ce(slice(i, i + 1)) for i in range(2)) / 2, W)
    assert off(parts, whole) < 1e-5 < 0.1 < off(own, whole)


@pytest.mark.parametrize("backend", LATER)
def test_weighted_cross_entropy_without_grad_and_with_a_loss_scale(backend, monkeypatch):
    hidden = torch.randn(9, 8, device=DEVICE).bfloat16().requires_grad_()
    W = torch.randn(50, 8, device=DEVICE).bfloat16().requires_grad_()
    labels, weights = torch.arange(9), torch.ones(9)
    loss = weighted_ce.weighted_cross_entropy(hidden, W, labels, weights, total=1e5, backend=backend)
    (scaled,) = torch.autograd.grad(loss * 65536, hidden)
    exact = hidden.detach().double().requires_grad_()
    logits = exact @ W.detach().double().T
    expected = torch.nn.functional.cross_entropy(logits, labels.to(DEVICE), reduction="sum") / 1e5
    # the interpreter truncates to bf16
    assert off(scaled, torch.autograd.grad(expected * 65536, exact)[0]) < 8e-3
    monkeypatch.setattr(weighted_ce, "backward_tiles", None)  # must not be called
    with torch.no_grad():
        assert float(weighted_ce.weighted_cross_entropy(hidden, W, labels, weights, backend=backend)) > 0


@pytest.mark.parametrize("backend", [*LATER, "reference"])
def test_no_weight_at_all_is_zero_and_connected(backend):
    hidden = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    W = torch.randn(50, 8, device=DEVICE, requires_grad=True)
    ones = torch.ones(4, dtype=torch.long)
    for labels, weights in (
            (-100 * ones, torch.ones(4)), (ones, torch.zeros(4)), (ones, torch.full((4,), 1e-9))):
        loss = weighted_ce.weighted_cross_entropy(hidden, W, labels, weights, backend=backend)
        loss.backward()
        assert float(loss) == 0 and not hidden.grad.any() and not W.grad.any()
    for labels, weights, why in ((ones[1:], torch.ones(4), "must agree"),
                                 (ones, -torch.ones(4), "must not be negative")):
        with pytest.raises(ValueError, match=why):
            weighted_ce.weighted_cross_entropy(hidden, W, labels, weights)


def test_a_tag_is_a_list_or_a_tensor_of_ids_and_never_empty():
    labels, expected = torch.tensor([[1, 8, 2, 9, 8]]), torch.tensor([[1, .1, .1, .1, 1]])
    for start in ([8], torch.tensor([8])):
        torch.testing.assert_close(weighted_ce.think_weights(labels, start, [9], .1), expected)
    assert weighted_ce.think_weights(torch.tensor([[7]]), [7, 8], [7, 9], .1).tolist() == [[1.0]]
    with pytest.raises(ValueError, match="at least one id"):
        weighted_ce.think_weights(labels, [], [9], .1)


# ---- without a GPU: does it compile for one?

COMPILE = """
import importlib, itertools, json, re, subprocess, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pathlib import Path
k = importlib.import_module("kernels.turn_logprob")
rows = dict(logits="*fp32", target="*i64", lse="*fp32", stride="i32", inv_temperature="fp32")
stats = rows | dict(logprobs="*fp32", entropy="*fp32")
gradient = rows | dict(out_stride="i32", first="i32", V="i32")
KERNELS = [
    (k._stats_kernel, stats, dict(V=151936, ENTROPY=True, BLOCK=k.BLOCK), 8),
    (k._stats_kernel, stats, dict(V=50257, ENTROPY=False, BLOCK=k.BLOCK), 8),  # ragged
    *((k._gradient_kernel, gradient | dict(out=f"*{t}"), dict(BLOCK=k.BLOCK), 8)
      for t in ("bf16", "fp16", "fp32")),
    (k._turn_sum_kernel, dict(x="*fp32", turn_ptr="*i64", out="*fp32"), dict(BLOCK=256), 4)]
ptxas = next(Path(triton.__file__).parent.rglob("bin/ptxas*"))
for arch, (fn, signature, constants, warps) in itertools.product(sys.argv[1:], KERNELS):
    signature = {**signature, **{c: "constexpr" for c in constants}}
    compiled = triton.compile(ASTSource(fn, signature,
                                        {(fn.arg_names.index(c),): v for c, v in constants.items()}),
                              target=GPUTarget("cuda", int(arch), 32), options={"num_warps": warps})
    ptx = compiled.asm["ptx"]
    Path("kernel.ptx").write_text(ptx)
    suffix = re.search(r"\\.target (sm_\\w+)", ptx).group(1)
    report = subprocess.run([str(ptxas), "-v", f"-arch={suffix}", "kernel.ptx", "-o", "kernel.cubin"],
                            capture_output=True, text=True)
    text = report.stdout + report.stderr
    print(json.dumps({"arch": suffix, "ok": report.returncode == 0, "f64": ".f64" in ptx,
                      "spills": [int(n) for n in re.findall(r"(\\d+) bytes spill", text)]}))
"""


@there
@pytest.mark.parametrize("archs", [["90"], pytest.param(["80", "100"], marks=pytest.mark.interpreter)])
def test_every_kernel_compiles_without_spills_or_fp64(tmp_path, archs):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILE, *archs]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 6 * len(archs)
    for i, r in enumerate(rows):
        assert r["arch"].startswith(f"sm_{archs[i // 6]}") and r["ok"] and not r["f64"], r
        assert r["spills"] and not any(r["spills"]), r


def test_rows_that_occur_twice_add_in_one_order_in_each_run():
    """With two threads the backward pass of x[index] adds in another order each time."""
    torch.manual_seed(0)
    x, index, grad = torch.randn(2000, 128), torch.randint(0, 300, (30, 30)), torch.randn(30, 30, 128)

    def gradient(rows_of):
        leaf = x.clone().requires_grad_()
        rows_of(leaf, index).backward(grad)
        return leaf.grad

    assert torch.equal(take(x, index), x[index])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = gradient(take)
        assert all(torch.equal(gradient(take), first) for _ in range(50))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(first, gradient(lambda leaf, i: leaf[i]))
