"""Where sampler and trainer differ: --sampler-correction against numbers worked by hand, in the loss of every
script."""

import math
from types import SimpleNamespace

import pytest
import torch

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import guards, rollout, run, training
from common.training import corrected_advantages, sampler_ratios
from common.world import tiny
from tests.test_bi_rar import one_step
from tests.test_omne_r1 import learned

# two turns of two and one tokens, an observation between them; the second row is one turn
MASK = torch.tensor([[0, 1, 1, 0, 1], [0, 1, 1, 1, 0]]).bool()
TURNS = torch.tensor([[-1, 0, 0, -1, 1], [-1, 0, 0, 0, -1]])


def batch_of(ratios, **more):
    """A batch whose tokens have these ratios of trainer to sampler; garbage where nothing was sampled."""
    ratios = torch.tensor(ratios, dtype=torch.double)
    old = torch.where(MASK, -1.0, 0.0).double()
    return SimpleNamespace(
        remember_old=lambda *_: None, old_logprobs=old, rollout_logprobs=old - ratios.log(),
        response_mask=MASK, turn_ids=TURNS,
        advantages=torch.tensor([[0, 1.0, 1.0, 0, -2.0], [0, 3.0, 3.0, 3.0, 0]]).double(), **more)


RATIOS = [[9.0, 1.5, 0.8, 9.0, 3.0], [9.0, 1.2, 1.3, 1.4, 9.0]]
WEIGHTS = [[1, 1.5, 0.8, 1, 2], [1, 1.2, 1.3, 1.4, 1]]    # 3 is cut


def test_weights_by_hand():
    batch = batch_of(RATIOS)
    weights = sampler_ratios(batch)
    torch.testing.assert_close(weights, torch.tensor(WEIGHTS).double(), rtol=1e-6, atol=0)
    assert torch.equal(corrected_advantages(batch, "token"), batch.advantages * weights)
    assert corrected_advantages(batch, "none") is batch.advantages
    # a token that the sampler gave nothing is cut, and no log-prob learns through its weight
    batch.rollout_logprobs[0, 1] = -math.inf
    batch.old_logprobs.requires_grad_()
    weights = sampler_ratios(batch)
    assert weights[0, 1] == 2 and torch.isfinite(weights).all() and not weights.requires_grad
    batch.rollout_logprobs = batch.old_logprobs.detach()
    assert (sampler_ratios(batch) == 1).all()


# ---- where it enters the losses

def moved(batch):
    """Log-probs after some updates, on both sides of the clip window, and reference log-probs."""
    g = torch.Generator().manual_seed(0)
    step = torch.randn(MASK.shape, generator=g, dtype=torch.double)
    batch.ref_logprobs = batch.old_logprobs + 0.5 * step.flip(0) * MASK
    return (batch.old_logprobs + 0.4 * step * MASK).requires_grad_()


def test_grpo_weighs_the_surrogate_and_not_the_kl_term():
    dual_clip = 1.1
    batch = batch_of(RATIOS)
    new = moved(batch)
    w = sampler_ratios(batch)
    A = batch.advantages
    r = (new - batch.old_logprobs).exp()
    surrogate = torch.minimum(r * A, r.clamp(.9, 1.1) * A)
    surrogate = torch.where(A < 0, torch.maximum(surrogate, dual_clip * A), surrogate)
    d = batch.ref_logprobs - new
    objective = w * surrogate - .3 * (d.exp() - d - 1)
    expected = -(objective * MASK).sum() / 6
    loss, stats = training.grpo_loss(
        new, batch.old_logprobs, corrected_advantages(batch, "token"), MASK, 1 / 6, .1, .1, .3,
        batch.ref_logprobs, dual_clip)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, new, retain_graph=True)[0] for x in (loss, expected)))
    plain = training.grpo_loss(new, batch.old_logprobs, A, MASK, 1 / 6, .1, .1)[1]
    assert stats["clipped_tokens"] == plain["clipped_tokens"] > 0    # the clip decisions stay


def test_atpo_weighs_each_turn_by_the_mean_over_its_tokens():
    batch = batch_of(RATIOS)
    new = moved(batch)
    batch.old_turn_logprobs, _ = training.turn_sums(batch.old_logprobs, MASK, TURNS)
    turn_logprobs, _ = training.turn_sums(new, MASK, TURNS)
    cfg = at2po.Config(sampler_correction="token", clip_low=.1, clip_high=.05)  # both bounds act
    loss, _ = at2po.policy_loss(new, turn_logprobs, batch, cfg, 2, 6)
    w = sampler_ratios(batch)
    log_ratio = (new - batch.old_logprobs).detach()
    expected = 0
    for b in range(2):
        for t in MASK[b].nonzero()[:, 0]:
            turn = TURNS[b] == TURNS[b, t]
            s = log_ratio[b, turn].mean().exp() * (new[b, t] - new[b, t].detach()).exp()
            A = batch.advantages[b, t]
            term = torch.minimum(s * A, s.clamp(.9, 1.05) * A)
            expected = expected - w[b, turn].mean() * term / MASK[b].sum() / 2
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, new, retain_graph=True)[0] for x in (loss, expected)))


def groups(model, lag):
    """Two samples of one question, which the sampler gave `lag` nats per token less than the model does."""
    made = []
    for reward, turns in ((1.0, [[5, 6, 7], [8, 9, 5]]), (0.0, [[9, 8, 6], [5, 5, 7]])):
        turns = [rollout.Turn(ids, [0.0] * len(ids), "", "", [4]) for ids in turns]
        info = mygo_mujica.PlannerInfo(em=reward, tokens=6)
        made.append(rollout.Trajectory("q", [3, 4], turns, reward, info=info))
    batch = rollout.collate(made)
    with torch.no_grad():
        logprobs = training.token_logprobs(model, batch)
    for b, t in enumerate(made):
        for k, turn in enumerate(t.turns):
            turn.logprobs = (logprobs[b][batch.turn_ids[b] == k] - lag).tolist()
    return [made]


def of_bi_rar(model, optimizer, groups, **more):
    return one_step(model, None, optimizer, groups, bi_rar.Config(kl_coef=0.0, group_size=2, **more))


def of_mujica(model, optimizer, groups, **more):
    for group in groups:
        mygo_mujica.assign_advantages(group)
    cfg = mygo_mujica.Config(kl_coef=0.0, **more)
    return mygo_mujica.ratio_update(model, None, optimizer, groups, cfg)


def of_omne(model, optimizer, groups, **more):
    cfg = omne_r1.Config(value_coef=0.0, kl_coef=0.0, **more)
    for t in groups[0]:
        t.info = omne_r1.Result()
    return learned(model, tiny.tiny_tokenizer(["w"], []), cfg, lambda: groups[0])[0]


@pytest.mark.parametrize("update", [of_bi_rar, of_mujica, of_omne])
def test_a_sampler_that_lags_evenly_scales_the_gradient_of_the_other_scripts(update):
    """All token ratios are 1.5."""
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>"])

    def norm(lag, **more):
        model = tiny.tiny_model(tokenizer, width=32)
        optimizer = torch.optim.SGD(model.parameters(), 0.0)
        return update(model, optimizer, groups(model, lag), **more)

    plain = norm(math.log(1.5))
    assert not {"train/sampler_ratio", "train/sampler_truncated"} & set(plain)
    assert plain["train/grad_norm"] == norm(0.0)["train/grad_norm"] > 0
    row = norm(math.log(1.5), sampler_correction="token")
    assert row["train/grad_norm"] == pytest.approx(1.5 * plain["train/grad_norm"], rel=1e-4)
    assert row["train/sampler_ratio"] == pytest.approx(1.5, rel=1e-4)
    assert row["train/sampler_truncated"] == 0
    same = norm(0.0, sampler_correction="token")
    assert same["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-5)
    assert same["train/sampler_ratio"] == pytest.approx(1, abs=1e-5)


# ---- what a run says

def test_the_drift_guard_goes_by_the_coarser_precision_of_sampler_and_trainer(monkeypatch):
    for precision, mean, fires in (
            ("fp32", 1e-5, False), ("fp32", 5e-3, True), ("bf16", .03, False), ("bf16", .2, True)):
        said = []
        guards.watch({"rollout/logprob_drift_mean": mean}, [], said.append, guards.RATIO, precision=precision)
        said = "".join(said)
        assert ("--sampler-correction" in said and f"{precision} explains" in said) == fires
    for device, precision, engine, expected in (
            ("cpu", "auto", "transformers", "fp32"), ("cpu", "bf16", "transformers", "bf16"),
            ("cpu", "auto", "vllm", "fp32"), ("cuda", "auto", "transformers", "bf16"),
            ("cuda", "fp32", "transformers", "fp32"), ("cuda", "fp32", "vllm", "bf16")):
        monkeypatch.setattr(run.models, "default_device", lambda device=device: device)
        assert run.coarsest_precision(at2po.Config(precision=precision, engine=engine)) == expected
