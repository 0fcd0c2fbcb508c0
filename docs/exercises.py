"""Checks of the three exercises in docs/walkthrough.md: each says "right" to the right answer alone, and else
"not yet" with what to look at. tests/test_notebook.py has right answers and wrong ones."""

import math
import random

import torch

import at2po
from common.rollout import Trajectory, Turn, collate


def _grown(rng, depth=0):
    """A node of a tree that is drawn at random, of one to four children and three turns at most."""
    entropy = rng.uniform(.1, 2)
    node = at2po.Node(Turn([1], [-entropy], "", ""), done=depth == 3 or depth > 0 and rng.random() < .3)
    node.value = rng.choice([-1.4, .2, .7])
    if not node.done:
        for _ in range(rng.randrange(1, 5)):
            child = _grown(rng, depth + 1)
            child.parent = node
            node.children.append(child)
    return node


def best_continuation(value):
    """Exercise 1. value(node) is the answer."""
    rng = random.Random(0)
    for _ in range(20):
        tree = _grown(rng)
        for node in tree.nodes():
            found, wanted = value(node), max(leaf.value for leaf in node.leaves())
            if not math.isclose(found, wanted, abs_tol=1e-6):
                return (f"not yet: the best that came after a turn is worth {wanted:+.2f}, "
                        f"and your value of the turn is {found:+.2f}")
    return "right: a turn is no longer blamed for what one of its continuations did wrong"


def _batch():
    """Two rows of different length, one with an observation between its turns, one that ends in one."""
    first = Turn([5, 6], [-.5, -.5], "", "", observation_ids=[7, 8, 9])
    rows = [
        Trajectory("", [1, 2, 3], [first, Turn([10], [-.5], "", "")], advantages=[2.0, -1.0]),
        Trajectory("", [1, 2], [first], advantages=[1.0]),
    ]
    return collate(rows)


def observations_in_the_mask(mask_of):
    """Exercise 2. mask_of(batch) is the answer."""
    batch = _batch()
    before = batch.response_mask.clone()
    wanted = torch.zeros_like(before)
    for row, trajectory in enumerate(batch.trajectories):
        wanted[row, len(trajectory.prompt_ids):trajectory.length] = True
    mask = mask_of(batch)
    if not torch.equal(batch.response_mask, before):
        return "not yet: the batch itself was changed; answer with a mask of its own"
    if not torch.equal(mask, wanted):
        row, place = (mask != wanted).nonzero()[0].tolist()
        part = "is padding or prompt"
        if wanted[row, place]:
            part = "was written by the search or by the policy, and your mask leaves it out"
        return f"not yet: token {place} of row {row} {part}"
    clipped = []
    for sampled in (before, mask):
        turns = batch.turn_ids.clamp(min=0)
        old = torch.zeros(before.shape)
        new = torch.where(before & (turns == 0), .2, 0.0)       # every token of turn 0 has moved by .2
        _, stats = at2po.atpo_loss(new, old, batch.advantages.clamp(min=1), sampled, turns, .15, .15)
        clipped.append(stats["clipped_tokens"])
    trained_on = int((mask & ~before).sum())
    return (f"right: {trained_on} tokens of the search are trained on, and where {clipped[0]} tokens were "
            f"clipped, {clipped[1]} are: what did not move dilutes a turn's ratio")


def unlearn(loss):
    """Exercise 3. loss(logprobs, old_logprobs, advantages, response_mask, turn_ids, clip_low, clip_high) is
    the answer."""
    generator = torch.Generator().manual_seed(0)
    turns = torch.tensor([[0, 0, -1, 1, 1], [0, -1, 1, 2, -1]])
    mask = turns >= 0
    for _ in range(5):
        old = -torch.rand(2, 5, generator=generator)
        new = old + torch.randn(2, 5, generator=generator) * .4
        new.requires_grad_()
        advantages = torch.randn(2, 3, generator=generator).gather(1, turns.clamp(min=0)) * mask
        window = mask, turns, .2, .2
        found = loss(new, old, advantages, *window)
        if not torch.allclose(_gradient(found, new), _gradient(_atpo(new, old, -advantages, *window), new)):
            if torch.allclose(found, -_atpo(new, old, advantages, *window)):
                return ("not yet: that clips at the wrong side. Which bound of Eq 10 should stop a turn "
                        "that is less likely already?")
            return "not yet: the gradient is another; what was rewarded should become less likely"
    return "right: the sign belongs to the advantages, inside the minimum of Eq 10"


def _atpo(*given):
    return at2po.atpo_loss(*given)[0]


def _gradient(loss, logprobs):
    """Zeros where the loss does not depend on them."""
    if not loss.requires_grad:
        return torch.zeros_like(logprobs)
    return torch.autograd.grad(loss, logprobs, allow_unused=True, materialize_grads=True)[0]
