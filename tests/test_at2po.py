"""Reward, credit and losses of AT2PO against numbers worked by hand from the equations."""

import asyncio
import math
import random
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import at2po
from at2po import Config, Node, Trajectory, Turn
from common import rollout, training
from common.of_at2po import baselines, trees
from common.run import Run
from common.world import tiny
from tests.conftest import sampled_logprobs

CFG = Config()


def turn(entropy, text="", observation=""):
    return Turn([1, 2], [-entropy, -entropy], "", text, [], observation)


def tree(spec, parent=None):
    """spec: (entropy, reward) of a leaf or (entropy, [specs]) of an inner turn."""
    node = Node(turn(spec[0]), parent)
    if isinstance(spec[1], list):
        node.children = [tree(s, node) for s in spec[1]]
    else:
        node.done = True
        node.trajectory = Trajectory("q", [0], node.turns(), spec[1])
    return node


def root_of(*specs):
    root = Node()
    root.children = [tree(s, root) for s in specs]
    return root


def right_or_wrong(root, penalty=0.0):
    """The tree with its rewards as exact matches; penalty: off the reward of its first leaf."""
    for leaf in root.leaves():
        leaf.trajectory.info.em_valid = leaf.trajectory.reward
    root.leaves()[0].trajectory.reward -= penalty
    return root


# ---- credit


@pytest.mark.parametrize("loss, expansion, std", [
    ("atpo", "entropy", .1875 ** .5), ("atpo", "none", .5), ("grpo", "entropy", .5), ("gspo", "none", .5)])
def test_atpo_on_trees_alone_divides_by_the_population_s_std(loss, expansion, std):
    root = root_of((0, 1.0), (0, 0.0), (0, 0.0), (0, 0.0))
    at2po.assign_advantages(root, replace(CFG, loss=loss, expansion=expansion))
    advantages = [leaf.advantage for leaf in root.children]
    assert advantages == pytest.approx([.75 / std, *[-.25 / std] * 3], rel=1e-4)


@pytest.mark.parametrize("rule, entropies, below_a, of_a_and_b", [
    # Eq 3: H / sum of H. In logarithms of 2, 4, 16: a softmax of these would be 1/5, 4/5
    ("child-weighted", (math.log(4), math.log(16)), (1 / 3, 2 / 3), (1 / 4, 3 / 4)),
    ("child-weighted", (0.0, .3), (0, 1), (1 / 4, 3 / 4)),
    ("child-weighted", (0.0, 0.0), (1 / 2, 1 / 2), (1 / 4, 3 / 4)),  # 0 / 0: equal
    ("child-softmax", (math.log(4), math.log(16)), (1 / 5, 4 / 5), (1 / (1 + math.exp(.2)), None)),
    ("child-mean", (math.log(4), math.log(16)), (1 / 2, 1 / 2), (1 / 2, 1 / 2)),
    ("leaf-mean", (math.log(4), math.log(16)), (1 / 2, 1 / 2), (2 / 5, 3 / 5)),
])
def test_values(rule, entropies, below_a, of_a_and_b):
    """Leaves 1, 0 below a (entropy .1), 1, 0, 0 below b (.3): mean 2/5, population std sqrt(6)/5, so the
    values are 3 / sqrt(6) and -2 / sqrt(6)."""
    leaves_of_a = [(entropies[0], 1.0), (entropies[1], 0.0)]
    root = root_of((.1, leaves_of_a), (.3, [(.2, 1.0), (.2, 0.0), (.2, 0.0)]))
    at2po.assign_advantages(root, replace(CFG, value=rule))
    a, b = root.children
    right, wrong = 3 / math.sqrt(6), -2 / math.sqrt(6)
    assert a.value == pytest.approx(below_a[0] * right + below_a[1] * wrong, rel=1e-4)
    assert b.value == pytest.approx((right + 2 * wrong) / 3, rel=1e-4)
    share = of_a_and_b[0]
    assert root.value == pytest.approx(share * a.value + (1 - share) * b.value, rel=1e-4, abs=1e-6)
    assert a.advantage == a.value and a.children[0].advantage == pytest.approx(right, rel=1e-4)
    assert root.weights == pytest.approx((share, 1 - share))


@pytest.mark.parametrize("rule, value", [("child-mean", (1 / 3 - 1) / 2), ("leaf-mean", 0)])
def test_child_mean_and_leaf_mean_differ_on_uneven_trees(rule, value):
    root = root_of((0, [(0, 1.0), (0, 1.0), (0, 0.0)]), (0, 0.0))  # mean 1/2, std 1/2: z = 1, 1, -1, -1
    at2po.assign_advantages(root, replace(CFG, value=rule))
    assert root.value == pytest.approx(value, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize(
    "kind, expected", [("value", 1.0), ("td", 2 / 3), ("global", 4 / 3), ("combined", 2.0)]
)
def test_advantages(kind, expected):
    root = root_of((0, [(0, 1.0), (0, 1.0), (0, 0.0)]), (0, 0.0))
    at2po.assign_advantages(root, replace(CFG, value="child-mean", advantage=kind))
    # V = 1, V(parent) = 1/3, V(root) = -1/3
    assert root.children[0].children[0].advantage == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rule", ["child-weighted", "child-softmax", "child-mean", "leaf-mean"])
def test_a_turn_tells_how_its_value_came_about(rule):
    cfg = replace(CFG, value=rule, advantage="td")
    root = root_of((0, [(0, 1.0), (math.log(3), 0.0), (.5, 0.0)]), (math.log(2), [(0, .4)]))
    at2po.assign_advantages(root, cfg)
    a, b = root.children

    def how(node, root):
        return trees.how(node, root, cfg.value, cfg.advantage, cfg.credit)

    value, advantage = how(a, root)
    assert value.startswith(f"V = {a.value:.3f} = ")
    # the terms that are shown are the value; children of one value are one
    terms = re.findall(r"([.\d]+) \(([-.\d]+)\)", value)
    total = sum(float(weight) * float(of_child) for weight, of_child in terms)
    assert len(terms) == 2 and total == pytest.approx(a.value, abs=2e-3)
    words = re.fullmatch(r"A = (\S+) = V - V\(parent\) = (\S+) - \((\S+)\)", advantage).groups()
    shown, of_turn, of_parent = map(float, words)
    assert shown == pytest.approx(of_turn - of_parent, abs=2e-3)
    assert shown == pytest.approx(a.advantage, abs=2e-3)
    assert "that of its one child" in how(b, root)[0]
    for leaf in root.leaves():
        reward, mean, std = re.search(r"\((\S+) - (\S+)\) / (\S+)$", how(leaf, root)[0]).groups()
        assert (float(reward) - float(mean)) / float(std) == pytest.approx(leaf.value, abs=1e-2)
    flat = root_of((0, [(0, 1.0), (1, 1.0)]), (0, 1.0))
    at2po.assign_advantages(flat, cfg)
    assert all(n.advantage == 0 for n in flat.nodes())
    assert all(leaf.trajectory.advantages == [] for leaf in flat.leaves())
    assert how(flat.children[0], flat) == ["all 3 leaves have reward 1: no advantage, nothing to learn"]
    left_out = root_of((0, 1.0), (0, 0.0))  # as DAPO leaves a tree out
    said, = how(left_out.children[0], left_out)
    assert "does not learn from this tree" in said


WORDS = tiny.tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>"])


def trained(monkeypatch, roots, model, reference=None, **settings):
    """The metrics of a step of at2po.train on trees that have their rewards."""
    for root in roots:
        for leaf in root.leaves():
            leaf.trajectory.prompt_ids = [3, 4]
    row = {}
    questions = [at2po.data.Question(str(i), "Who?", ["x"]) for i in range(len(roots))]
    cfg = replace(CFG, questions_per_step=len(roots), mini_batch=2, steps=1, **settings)
    monkeypatch.setattr(at2po, "rollout_trees", lambda *a: list(roots))
    monkeypatch.setattr(at2po, "score_trees", lambda *a: None)
    run = SimpleNamespace(cfg=cfg, steps=lambda *a, **k: [(1, row)], sampling=lambda *a: nullcontext())
    policy = rollout.Policy(model, WORDS, mock.Mock())
    at2po.train(run, policy, reference, at2po.data.Split("train", questions, None))
    return row


def test_a_step_of_flat_trees_alone_updates_nothing(monkeypatch):
    row = trained(monkeypatch, [root_of((0, 1.0), (0, 1.0))], tiny.tiny_model(WORDS, width=32))
    assert row["train/updates"] == 0 and row["rollout/flat_groups"] == 1


def grown():
    """Three trees, the second one flat, whose turns have tokens of their own."""
    rng = random.Random(0)
    roots = [
        root_of((.1, [(.2, 1.0), (.7, [(.3, 0.0)])]), (.4, 0.0)), root_of((.1, 1.0), (.2, 1.0)),
        root_of((.5, 0.0), (.6, [(.2, 1.0), (.3, 0.0)]))]
    for root in map(right_or_wrong, roots):
        for node in root.nodes()[1:]:
            node.turn.ids = [rng.randrange(6, 40) for _ in range(rng.choice((1, 2, 4)))]
            node.turn.logprobs = [-node.turn.entropy] * len(node.turn.ids)
            node.turn.observation_ids = [] if node.done else [5]
    return roots


def ratios(loss, log_ratio, turns):
    """Of each token, (T,): a token's own, or that of its turn or sequence with the gradient of its own."""
    if loss in ("grpo", "dapo"):
        return log_ratio.exp()
    groups = turns if loss == "atpo" else [0 * k for k in turns]
    means = []
    for own in groups:
        same = torch.tensor([k == own for k in groups])
        means.append(log_ratio.detach()[same].mean())
    return torch.stack(means).exp() * (log_ratio - log_ratio.detach()).exp()


@pytest.mark.parametrize("loss", ["atpo", "gspo", "grpo", "dapo"])
def test_a_training_step_is_its_loss_written_out(loss, monkeypatch):
    """Two mini-batches twice over, one with a flat tree, at temperature .7, in plain PyTorch: what is
    averaged over, the old log-probs of before the first update, the KL term, the clipped gradient."""
    settings = dict(loss=loss, clip_low=.02, clip_high=.03, temperature=.7, epochs=2, kl_coef=0.0)
    if loss == "grpo":
        settings["kl_coef"] = .1
    if loss == "gspo":  # one ratio and one advantage per sequence
        settings["credit"] = "outcome"
    model, expected, initial = (tiny.tiny_model(WORDS, width=32, seed=seed) for seed in (0, 0, 1))
    monkeypatch.setattr(training, "make_optimizer", lambda m, *a, **k: torch.optim.SGD(m.parameters(), .5))
    largest = 1.0
    if loss != "atpo":  # with a clipped gradient the loss's scale is lost
        largest = 1e9
        monkeypatch.setattr(training, "clip_gradient", partial(training.clip_gradient, max_norm=largest))
    roots = grown()
    if loss == "dapo":  # which takes flat trees last: one mini-batch with a flat one
        roots = roots[:2]
    row = trained(monkeypatch, roots, model, settings["kl_coef"] and initial or None, **settings)

    logprobs = partial(sampled_logprobs, vocabulary=len(WORDS), temperature=.7)
    optimizer = torch.optim.SGD(expected.parameters(), .5)
    old = {leaf: logprobs(expected, leaf.trajectory).detach() for root in roots for leaf in root.leaves()}
    for part in (roots[:2], roots[2:]) * 2:
        leaves = [leaf for root in part for leaf in root.leaves()]
        tokens = sum(leaf.trajectory.sampled_tokens for leaf in leaves)
        total = 0.0
        for leaf in leaves:
            t = leaf.trajectory
            if len(set(t.advantages)) == 0:
                continue
            turns = [k for k, turn in enumerate(t.turns) for _ in turn.ids]
            A = torch.tensor([t.advantages[k] for k in turns])
            new = logprobs(expected, t)
            r = ratios(loss, new - old[leaf], turns)
            objective = torch.minimum(r * A, r.clamp(.98, 1.03) * A)
            if loss == "grpo":
                to_ref = logprobs(initial, t).detach() - new
                objective = objective - .1 * (to_ref.exp() - to_ref - 1)
            total = total - objective.sum() / (tokens if loss == "dapo" else len(turns) * len(leaves))
        if not isinstance(total, float):
            total.backward()
            torch.nn.utils.clip_grad_norm_(expected.parameters(), largest)
            optimizer.step()
            optimizer.zero_grad()
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, other, atol=2e-5, rtol=1e-4)
    assert row["rollout/flat_groups"] == pytest.approx(1 / len(roots)) and row["train/updates"] > 1
    assert "train/first_ratio" not in row  # 1 by construction: its own pass gives its old log-probs
    assert row["train/clip_fraction"] > 0
    assert 0 < row["train/turn_entropy"] < .9999  # of what has moved: in the first update it is 1 or 0


def test_a_regenerated_turn_is_grown_from_the_state_before_it(monkeypatch):
    """Chains of three turns with entropies .2, .9 and .1; asked for: (the node it begins at, name). The last
    turn is an answer. A sibling costs .05."""
    asked = []

    async def play_from(node, name):
        asked.append((node, name))
        for entropy in (.2, .9, .1)[len(node.turns()):]:
            node.children.append(Node(turn(entropy), node, name))
            node = node.children[-1]
        node.done = True

    root = asyncio.run(at2po.grow_tree(play_from, replace(CFG, chains=2, rounds=2, expand=3), 0))
    a, b = root.children[:2]
    assert asked == [
        (root, "chain0"), (root, "chain1"),
        (a, "chain0.0-0"), (b, "chain1.0-1"), (root, "chain0.0-2"),
        # alone, the second turn of the new chain has .9; those of a have a sibling each, new and old: .85
        (root.children[2], "chain0.0-2.1-0"), (a, "chain0.1-1"), (a, "chain0.0-0.1-2")]
    assert [len(n.children) for n in (root, a, b, root.children[2])] == [3, 4, 2, 2]
    assert len(root.leaves()) == 2 + 2 * 3
    # of one chain there are three to choose from: the fourth is the first again; a round draws by itself
    draws = []
    choose = at2po.choose_nodes
    monkeypatch.setattr(at2po, "choose_nodes", lambda *a: draws.append(a[2].random()) or choose(*a))
    root = asyncio.run(at2po.grow_tree(play_from, replace(CFG, chains=1, rounds=2, expand=4), 0))
    assert [n.name for n in root.children[0].children[:3]] == ["chain0", "chain0.0-0", "chain0.0-3"]
    assert draws[0] != draws[1]


def test_path_advantages_by_credit():
    root = root_of((0, [(0, 1.0), (0, 0.0)]), (0, 0.0))
    leaf = root.leaves()[0]

    def of_path(**options):
        at2po.assign_advantages(root, replace(CFG, **options))
        return leaf.trajectory.advantages

    assert of_path() == [root.children[0].advantage, leaf.advantage] and leaf.advantage != 0
    assert of_path(credit="outcome") == [leaf.value] * 2
    assert [len(leaf.trajectory.advantages) for leaf in root.leaves()] == [2, 2, 1]


def test_tree_grpo_adds_the_value_within_a_chain_s_own_leaves():
    # three leaves below the first chain (rewards 1, 0, 0), one beside it (1)
    root = root_of((0, [(0, 1.0), (0, 0.0), (0, 0.0)]), (0, 1.0))
    at2po.assign_advantages(root, replace(CFG, credit="tree-grpo"))
    over_all = [1, -1, -1, 1]                                   # mean 1/2, population std 1/2
    within = [2 ** .5, -(2 ** -.5), -(2 ** -.5), 0]             # mean 1/3, std sqrt(2)/3; alone: nothing
    for leaf, a, b in zip(root.leaves(), over_all, within, strict=True):
        assert leaf.trajectory.advantages == pytest.approx([a + b] * len(leaf.lineage()), abs=1e-4)


def test_dynamic_sampling_takes_trees_with_different_rewards_first():
    flat = [right_or_wrong(root_of((0, 1.0), (0, 1.0))) for _ in range(3)]
    spread = [right_or_wrong(root_of((0, 1.0), (0, 0.0))) for _ in range(3)]
    roots = [flat[0], spread[0], flat[1], spread[1], flat[2], spread[2]]
    for loss, number, chosen in (
            ("dapo", 2, spread[:2]), ("dapo", 4, [*spread, flat[0]]), ("atpo", 2, roots)):
        assert baselines.learned_from(roots, at2po.Config(loss=loss, questions_per_step=number)) == chosen
    for loss, questions in (("dapo", 6), ("atpo", 2)):
        budget = baselines.TokenBudget(at2po.Config(loss=loss, questions_per_step=2))
        assert budget.questions_per_step == questions
    # right answers tell, not the penalty of what is too long
    all_wrong = right_or_wrong(root_of((0, 0.0), (0, 0.0)), penalty=.5)
    assert training.has_spread(all_wrong.rewards())
    dapo = at2po.Config(loss="dapo", questions_per_step=2)
    assert baselines.learned_from([all_wrong, spread[0]], dapo) == [spread[0]]
    assert baselines.learned_from([all_wrong], dapo) == []


def test_dapo_s_settings_are_those_of_its_row():
    cfg = at2po.parse_args(["--model", "m", "--data", "q.jsonl", "--loss", "dapo"])
    assert (cfg.clip_low, cfg.clip_high, cfg.kl_coef) == (.2, .28, 0)
    assert (cfg.expansion, cfg.name, baselines.DRAWN_PER_LEARNED) == ("none", "dapo-m-q-seed0", 3)
    assert baselines.BASELINES["dapo"].token_mean and not baselines.BASELINES["dapo"].dual_clip


# ---- expansion


@pytest.mark.parametrize("a, b, c, d, chosen", [
    # scores: a and b have two siblings beside them, c two answers, d none: .4 .7 .62 .65, the root -.1
    (.5, .8, .72, .65, "b d c a root b"),
    # the root's penalty counts its chains less one, -.1; c's -.06 is above it, -.11 below
    (.03, .02, .04, .01, "d c a b root d"), (.03, .02, -.01, .01, "d a b root c"),
])
def test_expansion_takes_the_most_uncertain_turns_less_their_siblings_and_repeats_from_the_top(
        a, b, c, d, chosen):
    """Algorithm 1, line 11: H(n) - alpha |children(n.parent)|. Answers, of entropy 9, are never chosen."""
    answer = (9.0, 0.0)
    root = root_of((a, [(d, [answer])]), (b, [(c, [answer]), answer, answer]), answer)
    first, second, _ = root.children
    names = {"root": root, "a": first, "b": second, "c": second.children[0], "d": first.children[0]}
    chosen = [names[name] for name in chosen.split()]
    assert at2po.choose_nodes(root, replace(CFG, expand=len(chosen)), random.Random(0)) == chosen


def test_a_tree_whose_chains_all_answered_gets_fresh_chains_from_the_root():
    root = root_of((1, 0.0), (1, 1.0))
    assert at2po.choose_nodes(root, CFG, random.Random(0)) == [root] * CFG.expand


def test_random_expansion_is_seeded_without_replacement_and_knows_the_root():
    root = root_of(*[(0, [(0, 0.0)]) for _ in range(9)])

    def draw(seed):
        return at2po.choose_nodes(root, replace(CFG, expansion="random"), random.Random(seed))

    assert draw(1) == draw(1) and draw(1) != draw(2)
    assert all(len(set(map(id, draw(seed)))) == CFG.expand for seed in range(50))
    assert any(root in draw(seed) for seed in range(50))
    assert not any(n.done for seed in range(50) for n in draw(seed))


def test_the_budget_of_a_tree_is_that_of_the_baselines_chains():
    cfg = at2po.Config(token_budget="auto", steps=10, group_size=4, questions_per_step=3)
    budget = baselines.TokenBudget(cfg)
    assert budget.limit(0) == math.inf and budget.share(0) == 0
    for _ in range(2):  # steps of three questions, trees of 600 tokens in all
        row = {"rollout/tokens": 600, "rollout/chain_tokens": 50.0}
        budget.add(row)
    assert budget.spent == {"tokens": 1200, "baseline_tokens": 2 * 3 * 4 * 50}
    assert row["rollout/tokens_total"] == 1200
    assert budget.limit(2) == 10 * 3 * 4 * 50
    assert budget.share(2) == 1200 / 6000 == 2 / 10  # as steps have it; then the larger of both
    budget.spent["tokens"] = 3000
    assert budget.share(2) == .5
    for given, limit in ((0, math.inf), (7, 7)):
        assert baselines.TokenBudget(replace(cfg, token_budget=given)).limit(2) == limit


# ---- loss

MASK = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]).bool()
TURNS = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [-1, 0, -1, -1, -1, -1, -1]])


def loss_inputs():
    g = torch.Generator().manual_seed(0)
    old = torch.where(MASK, -torch.rand(2, 7, generator=g, dtype=torch.double), 0.0)
    new = old + torch.where(MASK, 0.02 * torch.randn(2, 7, generator=g, dtype=torch.double), 0.0)
    advantages = torch.where(MASK, torch.randn(2, 7, generator=g, dtype=torch.double), 0.0)
    return new.requires_grad_(), old, advantages


@pytest.mark.parametrize("loss", ["atpo", "grpo"])
def test_a_huge_ratio_stays_finite(loss):
    one = torch.ones(1, 1)
    last = 0 * one.long() if loss == "atpo" else 1  # turn_ids, or what the token counts
    function = at2po.atpo_loss if loss == "atpo" else training.grpo_loss
    found, _ = function(0 * one, -200 * one, -one, one.bool(), last)
    assert found == pytest.approx(math.exp(10))


def test_the_loss_over_turns_by_hand():
    """Two sequences of 4 and 2 tokens begin with one turn, of 2, which is clipped where it is praised; the
    second has no other. Gradients are Eq 12's, of a turn's summed log-prob: s_k A_k / |y|."""
    log_ratio = torch.tensor([[.4, -.1], [.4, 0]], dtype=torch.double, requires_grad=True)
    advantages = torch.tensor([[2.0, -1.0], [-3.0, 5.0]])
    tokens = torch.tensor([[2.0, 2.0], [2.0, 0.0]])
    loss, stats = at2po.turn_loss(log_ratio, advantages, tokens, .1, .1)
    up, down = math.exp(.2), math.exp(-.05)  # the ratios of means
    assert float(loss.detach()) == pytest.approx((-2 * 1.1 * 2 / 4 + down * 2 / 4 + 3 * up) / 2)
    expected = [[0, down / 4 / 2], [3 * up / 2 / 2, 0]]
    assert torch.autograd.grad(loss, log_ratio)[0].tolist() == [pytest.approx(row) for row in expected]
    assert (stats["tokens"], stats["clipped_tokens"]) == (6, 2)
    assert stats["kl_sum"] == pytest.approx(-.7) and stats["ratio_max"] == pytest.approx(up)
    assert stats["ratio_sum"] == pytest.approx(4 * up + 2 * down)


def stop_gradient_form(new, old, advantages, mask, turn_ids, low, high, num_sequences):
    """Eq 10-11 as they are printed, token by token: s_kt = sg[s_k] pi_t / sg[pi_t]."""
    total = 0.0
    for b in range(len(new)):
        for k in range(int(turn_ids.max()) + 1):
            here = mask[b] & (turn_ids[b] == k)
            if not here.any():
                continue
            delta = (new[b] - old[b])[here]
            s = (delta.mean().detach() + delta - delta.detach()).exp()
            A = advantages[b, here]
            objective = torch.minimum(s * A, s.clamp(1 - low, 1 + high) * A)
            total = total - objective.sum() / mask[b].sum()
    return total / num_sequences


def test_the_loss_over_turns_is_the_printed_one_in_value_and_gradient():
    """Of batches with empty turns, clipped on both sides, whole and in micro-batches; GSPO is one turn."""
    g = torch.Generator().manual_seed(0)
    clipped = set()
    for n in range(60):
        B, T, K = 1 + n % 5, 4 + n % 23, 1 + n % 6
        turn_ids = torch.randint(-1, K, (B, T), generator=g)
        turn_ids[0, -1] = 0
        turn_ids = turn_ids.sort(1).values
        if n % 4 == 0:
            turn_ids = turn_ids.clamp(max=0)
        mask = turn_ids >= 0
        old = -torch.rand(B, T, generator=g, dtype=torch.double)
        new = old + (.001, .01, .3)[n % 3] * torch.randn(B, T, generator=g, dtype=torch.double)
        new.requires_grad_()
        of_turn = torch.randn(B, K, generator=g, dtype=torch.double)
        advantages = of_turn.gather(1, turn_ids.clamp(min=0))
        inputs = (new, old, advantages, mask, turn_ids)
        printed = stop_gradient_form(*inputs, .02, .027, B + 2)
        parts = [at2po.atpo_loss(*(x[b:b + 1] for x in inputs), .02, .027, B + 2) for b in range(B)]
        for loss in (at2po.atpo_loss(*inputs, .02, .027, B + 2)[0], sum(part for part, _ in parts)):
            torch.testing.assert_close(loss, printed, rtol=0, atol=1e-12)
            gradients = (torch.autograd.grad(x, new, retain_graph=True)[0] for x in (loss, printed))
            torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
        clipped |= {stats["clipped_tokens"] > 0 for _, stats in parts}
    assert clipped == {True, False}


def grpo_loss(new, old, advantages, mask, turn_ids=None):
    return training.grpo_loss(new, old, advantages, mask, training.sequence_weights(mask))


def atpo_loss(new, old, advantages, mask, turn_ids=TURNS):
    return at2po.atpo_loss(new, old, advantages, mask, turn_ids)


LOSSES = pytest.mark.parametrize("loss", [atpo_loss, grpo_loss])


@LOSSES
def test_what_a_broadcast_or_rounding_would_hide_is_refused_in_words(loss):
    new, old, advantages = loss_inputs()
    for wrong, words in (
        ((new, old, advantages[:, 1], MASK), r"advantages \(2,\): one per token, \(2, 7\)"),
        ((new, old[:, :1], advantages, MASK), r"old_logprobs \(2, 1\)"),
        ((new, old, advantages, MASK[:, 1:]), r"response_mask \(2, 6\)"),
        ((new.bfloat16(), old, advantages, MASK), "^logprobs are torch.bfloat16"),
        ((new, old.bfloat16(), advantages, MASK), "old_logprobs are torch.bfloat16")):
        with pytest.raises(ValueError, match=words):
            loss(*wrong)


def test_a_reference_is_a_number_per_token_and_a_rule_has_a_name():
    new, old, advantages = loss_inputs()
    with pytest.raises(ValueError, match=r"ref_logprobs \(2, 1\)"):
        training.grpo_loss(new, old, advantages, MASK, 1, kl_coef=.1, ref_logprobs=old[:, :1])
    root = at2po.Node(children=[at2po.Node(Turn([1], [-.5], "", ""), done=True)])
    with pytest.raises(ValueError, match="rule child_mean: child-weighted, child-softmax"):
        at2po.node_value(root, "child_mean")


def test_a_sampled_token_belongs_to_a_turn():
    new, old, advantages = loss_inputs()
    for turn_ids, words in ((TURNS[:1], r"turn_ids \(1, 7\)"), (0 * TURNS - 1, "turn_ids: -1")):
        with pytest.raises(ValueError, match=words):
            at2po.atpo_loss(new, old, advantages, MASK, turn_ids)


@LOSSES
def test_a_part_of_a_mini_batch_may_have_no_sampled_token(loss):
    new, old, advantages = loss_inputs()
    value, stats = loss(new, old, advantages * torch.nan, torch.zeros_like(MASK))
    value.backward()
    assert value == stats["tokens"] == stats["ratio_max"] == 0 and not new.grad.any()


def test_grpos_dual_clip_bounds_what_a_negative_advantage_can_cost():
    new, old = torch.full((1, 2), math.log(.9)), torch.full((1, 2), math.log(.1))
    mask, advantages = torch.ones(1, 2).bool(), torch.tensor([[-2.0, 2.0]])
    # ratio 9: min gives -18 and 1.2 * 2
    for dual_clip, lowest in ((0.0, 18), (3.0, 6)):
        loss, _ = training.grpo_loss(new, old, advantages, mask, 1 / 2, .2, .2, dual_clip=dual_clip)
        assert loss.item() == pytest.approx((lowest - 2.4) / 2)


@pytest.mark.parametrize("junk", [float("nan"), float("-inf"), 1e30, 7.5])
@LOSSES
def test_what_stands_at_unsampled_positions_and_padding_reaches_neither_loss_nor_gradient(loss, junk):
    def pad(x, value):
        return torch.cat([x, torch.full((2, 3), value, dtype=x.dtype)], 1)

    def dirty(x, value):
        return pad(torch.where(MASK, x.detach(), value), value)

    new, old, advantages = loss_inputs()
    clean, _ = loss(new, old, advantages, MASK, TURNS)
    other = dirty(new, junk).requires_grad_()
    again, stats = loss(other, dirty(old, junk), dirty(advantages, 5.0), pad(MASK, False), pad(TURNS, -1))
    torch.testing.assert_close(clean, again, rtol=1e-12, atol=0)
    assert all(math.isfinite(v) for v in stats.values())
    gradient, found = torch.autograd.grad(clean, new)[0], torch.autograd.grad(again, other)[0]
    torch.testing.assert_close(gradient, found[:, :7], rtol=1e-12, atol=0)
    assert not found[:, 7:].any()


def test_parts_of_a_mini_batch_add_up():
    inputs = [*loss_inputs(), MASK, TURNS]
    whole = at2po.atpo_loss(*inputs)[0]
    parts = [at2po.atpo_loss(*(x[b:b + 1] for x in inputs), num_sequences=2)[0] for b in range(2)]
    torch.testing.assert_close(sum(parts), whole)


def entropy_share(*shares):
    p = torch.tensor(shares).double().softmax(0)
    return float(-(p * p.log()).sum() / math.log(len(shares)))


@pytest.mark.parametrize("moved, turns, spread", [
    # 1 for the even sequence, 0 for the one of a single turn
    ([[0, .1, .1, 0, .1, .1, 0], [0, .3, 0, 0, 0, 0, 0]], [[-1, 0, 0, -1, 1, 1, -1], [-1, 0] + [-1] * 5], .5),
    ([[.1, .1, 0], [.1, .1, .1]], [[0, 1, -1], [0, 1, 2]], 1),  # each by its own number of turns
    ([[0, .1, .1, 0, 0, 0]], [[-1, 0, 0, -1, 1, 1]], entropy_share(1.0, 0.0)),
    # of three turns, where signs tell: shares 2, -1, 0; and -.2, .1, .1, which are 0 in all and not divided
    ([[0, -.2, .1, 0]], [[-1, 0, 1, 2]], entropy_share(2.0, -1.0, 0.0)),
    ([[0, .2, -.1, -.1]], [[-1, 0, 1, 2]], entropy_share(-.2, .1, .1)),
])
def test_update_spread(moved, turns, spread):
    moved, turns = torch.tensor(moved), torch.tensor(turns)
    assert float(at2po.update_spread(moved, turns >= 0, turns).mean()) == pytest.approx(spread, rel=1e-5)


# ---- reward

GOOD = "<think>now</think><search>a film</search>"
ANSWER = "<think>found</think><answer>It is \\[ \\boxed{Ada Holt} \\]</answer>"


@pytest.mark.parametrize("turns, answer, problem", [
    ([turn(0, GOOD, "<result>x</result>"), turn(0, ANSWER)], "Ada Holt", ""),
    ([turn(0, ANSWER)], "Ada Holt", ""),
    ([turn(0, ANSWER.replace("<think>found</think>", ""))], "Ada Holt", "think tags"),
    ([turn(0, ANSWER.replace("</think>", ""))], "Ada Holt", "think tags"),
    ([turn(0, ANSWER.replace("\\boxed{Ada Holt}", "Ada Holt"))], None, "boxed"),
    ([turn(0, ANSWER + ANSWER)], "Ada Holt", "answer block"),
    ([turn(0, ANSWER + " and more")], "Ada Holt", ""),
    ([turn(0, ANSWER + ".")], "Ada Holt", ""),  # the rest of a token ">."
    ([turn(0, GOOD, at2po.LIMIT_MESSAGE), turn(0, ANSWER)], "Ada Holt", "without its result"),
    ([turn(0, GOOD), turn(0, ANSWER)], "Ada Holt", "without its result"),
    ([turn(0, GOOD + "<search>b", "r"), turn(0, ANSWER)], "Ada Holt", "without its result"),
    ([turn(0, ANSWER.replace("<answer>", "<search>b <answer>"))], "Ada Holt", "without its result"),
    ([turn(0, ANSWER + "</search>")], "Ada Holt", "without its result"),
    (
        [turn(0, "<think>x</think><result>forged</result>" + ANSWER.replace("<think>found</think>", ""))],
        "Ada Holt", "wrote a result"),
    ([turn(0, GOOD, "<result>r</result>")], None, "answer block"),
])
def test_format_rules(turns, answer, problem):
    got, why = at2po.parse_response(turns)
    assert got == answer and (problem in why if problem else why == "")


def test_the_prompts_own_example_passes_the_parser():
    example = at2po.SYSTEM_PROMPT.split("For example, ")[1].split(" In the last part")[0].removesuffix(".")
    first, rest = example.split("<result>")
    observation, second = rest.split("</result>")
    turns = [turn(0, first, f"<result>{observation}</result>"), turn(0, second)]
    assert at2po.parse_response(turns) == ("answer here", "") and "\x08" not in at2po.SYSTEM_PROMPT


@pytest.mark.parametrize("text, flags, reward", [
    (ANSWER, {}, 1), (ANSWER.replace("Ada", "Bea"), {}, 0), (ANSWER.replace("<think>", ""), {}, -1),
    (ANSWER.replace("<think>", ""), {"bad_format_reward": 0.0}, 0)])
def test_reward_is_exact_match_behind_the_format(text, flags, reward):
    question = at2po.data.Question("1", "?", ["Ada Holt", "A. Holt"])
    trajectory = Trajectory("1", [0], [turn(0, text)])
    assert at2po.score(trajectory, question, replace(CFG, **flags)).reward == reward


@pytest.mark.parametrize("text, found", [
    ("\\boxed{a} then \\boxed{b{c}d}", "b{c}d"), ("\\boxed{open", None), ("none", None)])
def test_boxed(text, found):
    assert at2po.boxed(text) == found


def test_a_run_samples_with_the_current_weights_and_the_engine_sleeps_after_it():
    calls, row = [], {}
    engine = SimpleNamespace(sync=lambda model: calls.append(model), sleep=lambda: calls.append("sleeps"))
    with Run(at2po.Config()).sampling(rollout.Policy("weights", None, engine), row):
        calls.append("samples")
    assert calls == ["weights", "samples", "sleeps"] and row["time/rollout"] >= 0
