"""AEPO (Dong et al. 2025), a baseline of at2po.py: its rollout, its advantages and its clip, by hand."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import at2po
from at2po import Config, Node, Trajectory, Turn
from common import model as models
from common import rollout, training
from common.of_at2po import baselines
from tests.test_engine import random_policy

CFG = Config(expansion="branches", chains=2, group_size=4)
VOCABULARY = 8


def turn(uncertainty):
    """A turn whose first tokens are so uncertain, in units of log(VOCABULARY)."""
    return Turn([1, 2], [-uncertainty * math.log(VOCABULARY), 0.0], "", "")


def certain(path, number):
    return turn(0.0)


def grown(cfg, draws, turns=2, turn_of=certain):
    """The root of a group whose chains end after so many turns. draws: the random numbers, in order;
    turn_of(path, number): a turn."""
    drawn = iter(draws)
    rng = SimpleNamespace(random=lambda: next(drawn))

    async def advance(node, path):
        number = len(node.turns())
        new = Node(turn_of(path, number), node, path, done=number + 1 == turns)
        node.children.append(new)
        return new

    root = Node()
    asyncio.run(baselines.grow_aepo(advance, root, cfg, rng, VOCABULARY))
    return root


def names_of(root):
    return sorted(leaf.name for leaf in root.leaves())


def test_a_branch_shares_the_turns_before_it():
    root = grown(CFG, [.5, .49])
    branch = next(leaf for leaf in root.leaves() if leaf.name == "chain0.1")
    assert branch.parent is next(c for c in root.children if c.name == "chain0")


# chain0 began certain, its branch as uncertain as it stays
RISES = {("chain0", 2): .3, ("chain0.1", 1): .3, ("chain0.1", 2): .3}


@pytest.mark.parametrize("chains, size, turns, draws, uncertain, leaves", [
    # one of two chains branches behind its first turn, at a half; what is left of the group is a fresh chain
    (2, 4, 2, [.5, .49], {}, "chain0 chain0.1 chain1 fresh3"),
    # a group is never larger than its size and always full
    (2, 2, 2, [.9, .9], {}, "chain0 chain1"), (2, 4, 2, [0.0] * 9, {}, "chain0 chain1 fresh2 fresh3"),
    # behind the second turn: .45 + .2 * .3 is above a half, .45 alone is not
    (1, 2, 3, [.1, .45, 0], {("chain0", 1): .3}, "chain0 chain0.2"),
    (1, 2, 3, [.1, .45, 0, 0], {}, "chain0 fresh1"),
    # and one that was as uncertain from the start does not branch more easily
    (1, 2, 3, [.1, .45, 0, 0], {("chain0", 0): .3, ("chain0", 1): .3}, "chain0 fresh1"),
    # in a row it is made less likely: .52 once more is .52 * .95, below a half
    (1, 3, 3, [.52, .52, .1], {}, "chain0 chain0.1 fresh2"),
    (1, 3, 3, [.52, .53, .1], {}, "chain0 chain0.1 chain0.2"),
    # a pause is a new start: not behind the second turn (two chains), so .5 is enough behind the third
    (1, 3, 4, [.5, .1, .1, .5], {}, "chain0 chain0.1 chain0.3"),
    # fresh chains come one by one and branch as others: with two in a row a second fresh one
    (1, 4, 2, [.1, .9], {}, "chain0 fresh1 fresh1.1 fresh3"),
    # a branch is compared with its own first turn: only chain0's rise counts
    (1, 3, 4, [.6, .1, .1, .45, .45], RISES, "chain0 chain0.1 chain0.3"),
    (1, 3, 4, [.6, .1, .1, .1, .45, .1, .1], RISES, "chain0 chain0.1 fresh2"),
])
def test_where_chains_branch(chains, size, turns, draws, uncertain, leaves):
    def turn_of(path, number):
        return turn(uncertain.get((path, number), 0.0))

    root = grown(replace(CFG, chains=chains, group_size=size), draws, turns, turn_of)
    assert names_of(root) == leaves.split()


@pytest.mark.parametrize("tokens, leaves", [(19, ["chain0", "chain0.2"]), (20, ["chain0", "fresh1"])])
def test_uncertainty_is_of_the_first_twenty_tokens(tokens, leaves):
    def turn_of(path, number):
        logprobs = [0.0] * tokens + [-9.0] * number  # uncertain behind the first turn
        return Turn([1] * len(logprobs), logprobs, "", "")

    root = grown(replace(CFG, chains=1, group_size=2), [0.0, .49, 0.0], 3, turn_of)
    assert names_of(root) == leaves


def test_a_clipped_value_keeps_its_gradient_above_the_window_alone():
    new = torch.tensor([[1.5, 1.5, .5, .5, 1.1]]).log().requires_grad_()
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    mask = torch.ones(1, 5).bool()

    def terms(soft_clip):
        loss, _ = training.grpo_loss(new, torch.zeros(1, 5), advantages, mask, 1.0, soft_clip=soft_clip)
        return loss.item(), torch.autograd.grad(loss, new)[0][0].tolist()
    hard_loss, hard = terms(False)
    soft_loss, soft = terms(True)
    # 1.2, -1.5, .5, -.8 and 1.1: the same value
    assert soft_loss == pytest.approx(hard_loss) == pytest.approx(-(1.2 - 1.5 + .5 - .8 + 1.1))
    assert hard == pytest.approx([0, 1.5, -.5, 0, -1.1])
    assert soft == pytest.approx([-1.2, 1.5, -.5, 0, -1.1])


def test_a_ratio_that_is_nothing_leaves_no_hole_in_the_gradient():
    new = torch.full((1, 1), -110.0, requires_grad=True)
    one = torch.ones(1, 1)
    loss, _ = training.grpo_loss(new, torch.zeros(1, 1), one, one.bool(), 1.0, soft_clip=True)
    assert torch.autograd.grad(loss, new)[0].item() == 0


def test_the_loss_of_aepo_is_the_soft_one_and_grpo_s_is_not():
    new = torch.tensor([[math.log(1.5)]]).requires_grad_()
    batch = SimpleNamespace(
        old_logprobs=torch.zeros(1, 1), ref_logprobs=None, advantages=torch.ones(1, 1),
        response_mask=torch.ones(1, 1).bool())
    for loss, gradient in (("aepo", -1.2), ("grpo", 0.0)):
        cfg = at2po.parse_args(["--loss", loss, "--kl-coef", "0"])
        found, _ = at2po.policy_loss(new, None, batch, cfg, 1, 1)
        assert torch.autograd.grad(found, new)[0].item() == pytest.approx(gradient)


def test_advantages_grow_with_a_token_s_entropy():
    def batch(entropies, mask, weight=1.0):
        return SimpleNamespace(
            entropies=torch.tensor([entropies]), response_mask=torch.tensor([mask]).bool(), weight=weight,
            advantages=torch.tensor([[2.0] * len(mask)]) * torch.tensor([mask]))

    one, other = batch([1.0, 9.0, 3.0], [1, 0, 1]), batch([5.0], [1])
    idle = batch([99.0], [1], weight=0.0)  # learned from on another rank
    baselines.balance_entropy("aepo", [one, other, idle])
    z = math.sqrt(1.5)  # of 1, 3 and 5; what was not sampled does not count
    assert one.advantages[0].tolist() == pytest.approx([2 * (1 - .2 * z), 0, 2])
    assert other.advantages[0].tolist() == pytest.approx([2 * (1 + .2 * z)])
    even = batch([2.0, 2.0], [1, 1])
    baselines.balance_entropy("aepo", [even])
    assert even.advantages[0].tolist() == [2.0, 2.0]


def test_entropies_are_those_of_the_whole_distribution():
    model, _ = random_policy(64)
    sampled = [[5, 6, 7], [8, 9]]
    turns = [Turn(sampled[0], [-1.0] * 3, "", "", [1, 2]), Turn(sampled[1], [-1.0] * 2, "", "")]
    batch = rollout.collate([Trajectory("q", [3, 4], turns)])
    found = models.token_entropies(model, batch, temperature=.7)
    ids = [3, 4, *sampled[0], 1, 2, *sampled[1]]
    with torch.no_grad():
        logp = (model(torch.tensor([ids])).logits[0] / .7).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)                      # (T,) of the token behind each
    for t in range(1, len(ids)):
        expected = float(entropy[t - 1]) if batch.response_mask[0, t] else 0.0
        assert float(found[0, t]) == pytest.approx(expected, abs=1e-5)


def test_its_settings_are_those_of_the_authors_code():
    cfg = at2po.parse_args(["--model", "m", "--data", "q.jsonl", "--loss", "aepo"])
    assert (cfg.expansion, cfg.chains, cfg.group_size, cfg.credit) == ("branches", 8, 16, "outcome")
    assert (cfg.clip_low, cfg.clip_high, cfg.kl_coef) == (.2, .2, 0)
    aepo = baselines.BASELINES["aepo"]
    assert (aepo.dual_clip, aepo.token_mean, aepo.soft_clip) == (3.0, True, True)
    assert baselines.ENTROPY_WEIGHT == .2
    assert baselines.BRANCHING == {"threshold": .5, "entropy": .2, "penalty": .05}
