"""8-bit Adam: near Adam, and a checkpoint from which it goes on bit for bit."""

import math

import pytest
import torch

from common import checkpoint, training
from common.model import token_logprobs
from common.rollout import Trajectory, Turn, collate
from common.world import tiny

WORDS = [f"w{i}" for i in range(60)]


def policy():
    tokenizer = tiny.tiny_tokenizer(WORDS, ["<a>"])
    return tiny.tiny_model(tokenizer, width=96), tokenizer


def step(model, optimizer, seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 60, (40,), generator=g).tolist()
    batch = collate([Trajectory("q", [5, 6, 7], [Turn(ids, [-1.0] * 40, "", "")])])
    loss = -token_logprobs(model, batch).sum() / 40
    loss.backward()
    training.clip_gradient(model)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def test_it_learns_as_adam_does_in_a_quarter_of_the_memory():
    losses = {}
    bytes_held = {}
    for kind in ("adamw", "adamw8bit"):
        model, _ = policy()
        optimizer = training.make_optimizer(model, 3e-3, kind=kind)
        losses[kind] = [step(model, optimizer, seed=i % 2) for i in range(12)]
        p = model.get_decoder().layers[0].mlp.up_proj.weight
        state = [torch.as_tensor(value) for value in optimizer.state[p].values()]
        bytes_held[kind] = sum(t.numel() * t.element_size() for t in state if t.shape == p.shape)
    assert losses["adamw8bit"][0] == losses["adamw"][0]
    assert losses["adamw8bit"][-1] == pytest.approx(losses["adamw"][-1], rel=.1)
    assert losses["adamw8bit"][-1] < losses["adamw8bit"][0] / 1.5
    assert bytes_held["adamw8bit"] * 4 == bytes_held["adamw"]


def test_matrices_decay_and_vectors_do_not():
    model, _ = policy()
    optimizer = training.make_optimizer(model, 1e-3, weight_decay=.1)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decays) == len(list(model.parameters()))
    assert all(decays[p] == (.1 if p.ndim > 1 else 0) for p in model.parameters())
    assert {p.ndim for p in decays} == {1, 2}


def test_a_rate_rises_and_falls_as_half_a_cosine():
    rates = [training.cosine_lr(step, 10, 1.0, .2, warmup=2) for step in range(11)]
    assert rates[:3] == [.5, 1.0, 1.0] and rates[6] == pytest.approx(.6) and rates[10] == pytest.approx(.2)
    assert rates[4] == pytest.approx(.2 + .8 * (1 + math.cos(math.pi / 4)) / 2)
    assert training.cosine_lr(15, 10, 1.0, .2) == .2


def test_two_steps_and_two_more_equal_four_bit_for_bit(tmp_path):
    """(tests/test_run.py has AdamW itself.)"""
    model, tokenizer = policy()
    optimizer = training.make_optimizer(model, 3e-3, kind="adamw8bit")
    for i in range(2):
        step(model, optimizer, i)
    checkpoint.save(tmp_path / "c", model, tokenizer, optimizer, {"step": 2, "run": "x"})
    other = type(model).from_pretrained(tmp_path / "c", attn_implementation="blocks")
    restored = training.make_optimizer(other, 3e-3, kind="adamw8bit")
    checkpoint.load_training_state(tmp_path / "c", other, restored)
    for i in range(2, 4):
        assert step(model, optimizer, i) == step(other, restored, i)
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name
