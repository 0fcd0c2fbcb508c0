"""Numbers that are only reported, and what --seed and defaults have to change: each worked by hand, since a
run that is compared with itself shows none of them."""

import asyncio
import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import data, guards, kg, metrics, report, rollout, training
from common import model as models
from common import run as runs
from common.engine import TransformersEngine
from common.of_askit import encoders, evidence, tiny_encoders
from common.of_at2po import baselines, trees
from common.of_mygo import records as of_mygo
from common.of_omne import records as of_omne
from common.rollout import Outcome, Trajectory, Turn
from common.warmup import warmup
from common.world import hard, tiny
from tests.test_at2po import CFG, Node, root_of, turn

TOKENS = tiny.tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>"])


def played(em, *turns, problem="", reward=0.0):
    return Trajectory("q", [7] * 90, list(turns), reward, info=Outcome("x", problem, em=em))


# ---- every step's line

def test_a_step_s_line_by_hand():
    long = Turn([1] * 9, [-.1] * 9, "", "", "seen", [5, 5, 5])
    short = Turn([1], [-2.0], "", "")
    done = [played(1.0, long, problem="think tags not paired"), played(0.0, short)]
    row = rollout.means(done)
    assert (row["reward/em"], row["reward/format"]) == (.5, .5)  # em whatever the format
    assert row["rollout/response_tokens"] == 5                   # what was observed is no response
    assert rollout.entropy([long, short]) == pytest.approx(.29)  # of tokens, no mean of turns
    clipped, mask = torch.tensor([True, False]), torch.tensor([True, True])
    stats = training.loss_stats(torch.tensor([.1, -.3]), clipped, mask, torch.tensor([1.1, .7]))
    meter = training.Meter()
    meter.add(torch.tensor(1.0), stats)
    meter.end_update(1.0)
    means = meter.means()
    assert means["train/kl"] == pytest.approx(.1) and means["train/clip_fraction"] == .5
    assert means["train/ratio"] == pytest.approx(.9) and means["train/ratio_max"] == pytest.approx(1.1)


def test_how_far_right_and_wrong_tokens_moved_by_hand(monkeypatch):
    """Two tokens with a positive advantage, one with a negative one, one with none, one that was not sampled;
    a filler of another rank counts nothing."""
    batch = SimpleNamespace(
        old_logprobs=torch.tensor([[-1.0, -2.0, -1.0, -1.0, 0.0]]),
        advantages=torch.tensor([[.5, .5, -2.0, 0.0, .5]]),
        response_mask=torch.tensor([[True, True, True, True, False]]),
        weight=1.0)
    new = torch.tensor([[-1.2, -2.4, -1.5, -7.0, -9.0]])
    monkeypatch.setattr(training, "token_logprobs", lambda model, b, temperature: new)
    filler = SimpleNamespace(**vars(batch) | {"weight": 0.0})
    row = training.moved(None, [batch, filler])
    assert row == pytest.approx({"train/right_moved": -.3, "train/wrong_moved": -.5})
    batch.advantages = -batch.advantages.abs()
    assert list(training.moved(None, [batch])) == ["train/wrong_moved"]


def test_an_update_that_is_skipped_counts_in_no_mean():
    meter = training.Meter()
    for loss, norm in ((1.0, 2.0), (math.nan, 3.0), (3.0, 4.0)):
        meter.add(torch.tensor(loss), {"tokens": 1})
        meter.end_update(norm)
    row = meter.means()
    assert (row["train/loss"], row["train/grad_norm"], row["train/not_finite"]) == (2, 3, 1)


def test_the_chains_of_a_tree_are_those_before_anything_is_branched():
    """They are what --token-budget auto measures a baseline's cost by."""
    root = Node()
    for name, tokens in (("chain0", 2), ("chain1", 4), ("chain0.0-0", 9), (".0-1", 9)):
        leaf = Node(Turn([1] * tokens, [-1.0] * tokens, "", ""), root, name, done=True)
        leaf.trajectory = played(1.0, leaf.turn)
        root.children.append(leaf)
    row = trees.rollout_metrics([root])
    assert row["rollout/chain_tokens"] == 3 and row["rollout/tokens"] == 24 and row["rollout/leaves"] == 4


def test_rewards_that_hardly_differ_still_do():
    assert training.has_spread([.9513, .9577, .9530]) and not training.has_spread([.5, .5])


def test_mygo_counts_first_attempts_in_rewards_and_all_in_tokens_and_shares():
    def attempt(reward):
        t = played(reward, Turn([1, 2], [-1.0] * 2, "", ""), reward=reward)
        t.info = mygo_mujica.PlannerInfo("x", em=reward, tokens=2, workers=[[]])
        return t

    groups = [[attempt(0.0), attempt(1.0), attempt(1.0)], [attempt(1.0)]]
    chosen = [groups[0][1:], groups[1]]
    questions = [data.Question("q", "?", ["x"])] * 2
    row = of_mygo.of_step(1, "mygo", {"K": .5, "tokens": 8}, questions, groups, chosen, None)
    assert row["reward/mean"] == .5 and row["select/accepted"] == .75 and row["rollout/tokens"] == 8


def test_explained_variance_is_of_errors_about_their_mean():
    batch = SimpleNamespace(
        returns=torch.tensor([[1.0, 3.0]]), values=torch.tensor([[0.0, 2.0]]), weight=1.0, ref_logprobs=None,
        response_mask=torch.ones(1, 2, dtype=torch.bool))  # off by 1 everywhere: the variance is explained
    assert of_omne.critic_metrics([batch])["train/explained_variance"] == 1


def test_read_is_what_was_observed_and_not_what_was_asked():
    def row(observation):
        nodes = [{"observation": observation}]
        return {"question": "Who is Ada?", "gold": ["Ada"], "answer": "Ada", "nodes": nodes}

    rows = [row("Bo."), row("Ada.")]
    runs.fill_in_reading(rows, TOKENS)
    assert [(r["read"], r["copied"]) for r in rows] == [(0, 1), (1, 1)]


# ---- credit and losses

def test_leaf_mean_of_an_inner_turn_is_over_its_leaves():
    """One child that has three leaves: rewards 1, 0, 0 below it and 1 beside; values 1, -1, -1, 1."""
    root = root_of((0, [(0, [(0, 1.0), (0, 0.0), (0, 0.0)])]), (0, 1.0))
    at2po.assign_advantages(root, replace(CFG, value="leaf-mean"))
    first = root.children[0]
    assert first.value == first.children[0].value == pytest.approx(-1 / 3, rel=1e-4)
    assert root.value == pytest.approx(0, abs=1e-6)


def test_dapo_s_penalty_is_of_the_response_without_its_prompt():
    root = Node()
    leaf = Node(Turn([1] * 600, [-1.0] * 600, "", ""), root, done=True)  # of 700, behind a prompt of 90
    root.children = [leaf]
    leaf.trajectory = played(1.0, leaf.turn, reward=1.0)
    leaf.trajectory.info.em_valid = 1.0
    baselines.learned_from([root], at2po.Config(loss="dapo", max_response=700))
    assert leaf.trajectory.reward == 1


def test_aepo_s_entropies_are_of_what_was_drawn_from_at_the_run_s_temperature():
    model = tiny.tiny_model(TOKENS, width=32)
    trajectory = Trajectory("q", [3, 4], [Turn([5, 6], [-1.0] * 2, "", "")], advantages=[1.0])
    batch, = training.prepare(model, None, [trajectory], 100, temperature=.6, entropies=True)
    with torch.no_grad():
        logits = model(torch.tensor([[3, 4, 5, 6]])).logits[0, 1:3, :len(TOKENS)].float() / .6
    p = logits.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    torch.testing.assert_close(batch.entropies[0, 2:4], expected, rtol=1e-4, atol=1e-5)


def test_the_reference_of_adapters_is_the_base_below_them(tmp_path):
    base = tiny.tiny_model(TOKENS, width=32)
    base.save_pretrained(tmp_path)
    TOKENS.save_pretrained(tmp_path)
    torch.manual_seed(0)
    model = models.load_model(tmp_path, lora=4)
    layer = next(m for m in model.modules() if hasattr(m, "lora_B"))
    assert layer.scaling["default"] == 2  # alpha = 2 rank
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=.5)
    trajectory = Trajectory("q", [3, 4], [Turn([5, 6], [-1.0] * 2, "", "")], advantages=[1.0])
    reference = models.load_reference(model, str(tmp_path), 4)
    batch, = training.prepare(model, reference, [trajectory], 100)
    own, = training.prepare(base, None, [trajectory], 100)
    torch.testing.assert_close(batch.ref_logprobs, own.old_logprobs, rtol=1e-4, atol=1e-5)
    assert (batch.old_logprobs - batch.ref_logprobs).abs().max() > .01


def test_weights_decay_by_default():
    groups = training.make_optimizer(torch.nn.Linear(2, 2), 1e-3).param_groups
    assert [group["weight_decay"] for group in groups] == [.01, 0.0]


# ---- what --seed has to change

def order_of(seed, monkeypatch):
    """The questions of at2po.train's first step."""
    asked = []
    monkeypatch.setattr(at2po, "rollout_trees", lambda p, r, questions, *_: asked.extend(questions) or 1 / 0)
    cfg = replace(CFG, questions_per_step=8, seed=seed)
    questions = [data.Question(str(i), "Who?", ["x"]) for i in range(30)]
    steps = SimpleNamespace(cfg=cfg, steps=lambda *a, **k: [(1, {})], sampling=lambda *a: nullcontext())
    policy = rollout.Policy(tiny.tiny_model(TOKENS, width=32), TOKENS, None)
    with pytest.raises(ZeroDivisionError):
        at2po.train(steps, policy, None, data.Split("train", questions, None))
    return [q.id for q in asked]


def test_another_seed_draws_other_questions(monkeypatch):
    one, again, other = (order_of(seed, monkeypatch) for seed in (0, 0, 1))
    assert one == again and len(set(one)) == 8 and set(one) != set(other)


def test_another_seed_begins_with_other_adapters(tmp_path):
    tiny.tiny_model(TOKENS, width=32).save_pretrained(tmp_path)
    TOKENS.save_pretrained(tmp_path)

    def first(seed):
        cfg = at2po.Config(lora=2, seed=seed, engine="transformers", cache_gb=.1)
        policy = runs.Run(cfg).policy(str(tmp_path), trains=True)
        return next(p for name, p in policy.model.named_parameters() if "lora_A" in name).detach()

    assert torch.equal(first(0), first(0)) and not torch.equal(first(0), first(1))


class Asked:
    """An engine that keeps the seeds that it is given; every turn is a search or a call."""
    busy = False

    def __init__(self, text):
        self.text = text
        self.seeds = []

    def sync(self, model):
        pass

    async def generate(self, prompt_ids, stop=(), max_tokens=0, temperature=1.0, seed=0):
        self.seeds.append(seed)
        ids = TOKENS(self.text)["input_ids"]
        return SimpleNamespace(token_ids=ids, logprobs=[-1.0] * len(ids), stop_reason=stop[0])


@pytest.mark.parametrize("script", [at2po, bi_rar])
def test_turns_and_seeds_of_evaluations_have_seeds_of_their_own(script, monkeypatch):
    said = "<think> a </think> <search> b </search>"
    for place in (rollout, script):
        monkeypatch.setattr(place, "sampled_text", lambda *_: said, raising=False)
    search = SimpleNamespace(search=lambda queries, k: [[] for _ in queries])
    found = []
    for seed in (0, 0, 1):
        engine = Asked("w1 w2")
        cfg = script.Config(seed=seed, max_searches=3)
        made = replace(script.AGENT, prompt=lambda *_: [1, 2])
        split = data.Split("test", [data.Question(str(i), "Who?", ["x"]) for i in range(2)], search)
        made.answers(rollout.Policy(None, TOKENS, engine), split, cfg, rollout.no_progress)
        assert len(set(engine.seeds)) == len(engine.seeds) >= 6
        found.append(sorted(engine.seeds))
    assert found[0] == found[1] != found[2]


def test_the_test_world_of_the_second_level_is_one_that_no_setting_was_chosen_on():
    assert hard.TEST_SEED == 2


# ---- intervals and verdicts

def test_the_verdict_of_several_seeds_goes_by_the_seeds():
    """Three seeds, 50 questions: gains of .3, .0 and .0 by seed, every third question by question."""
    import pandas as pd
    others = pd.DataFrame(np.zeros((50, 3)))
    scores = others.copy()
    scores.iloc[:15, 0] = 1.0
    by_question, by_seed, gain = report.difference(scores, others, 1)
    assert by_question.startswith("+0.100 [+0.0") and by_seed.startswith("+0.100 [-0.330")
    assert gain == pytest.approx((.1, -.330, .530), abs=1e-3)


def test_an_interval_is_of_95_percent():
    mean, low, high = metrics.bootstrap_interval([0, 1] * 200)
    assert mean == .5 and low == pytest.approx(.5 - 1.96 * .025, abs=.004)
    assert high == pytest.approx(.5 + 1.96 * .025, abs=.004)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_of_equal_values_is_wilson_s(value):
    found = metrics.with_interval("em", [value, value])
    end = 1.96**2 / (2 + 1.96**2)
    expected = (0, end) if value == 0 else (1 - end, 1)
    assert (found["em_low"], found["em_high"]) == pytest.approx(expected)


def test_two_passages_of_one_title_are_two():
    q = data.Question("q", "?", ["x"], context=[["A", ["One."]], ["A", ["Two."]], ["B", ["One."]]])
    assert [(row["title"], row["text"]) for row in data.pool_contexts([q])] == [
        ("A", "One."), ("A", "Two."), ("B", "One.")]


def test_sft_s_rate_goes_on_from_one_line_of_metrics_to_the_next(monkeypatch):
    """60 updates, 25 a line: one rise and one cosine over all."""
    rates = []

    def steps(policy, optimizer, total, label):
        return [(step, {}) for step in range(1, total + 1)]

    def set_lr(optimizer, lr):
        rates.append(lr)

    monkeypatch.setattr(training, "set_lr", set_lr)
    monkeypatch.setattr(training, "collate_parts", lambda *_: [])
    monkeypatch.setattr(training, "clip_gradient", lambda *_: 1.0)
    monkeypatch.setattr(training.Meter, "end_update", lambda *_: False)
    monkeypatch.setattr(training.Meter, "means", lambda self: {})
    monkeypatch.setattr(of_omne, "update_metrics", lambda meter: {})
    cfg = omne_r1.Config(sft_lora=0, sft_full_lr=1.0, sft_batch=1, sft_epochs=3)
    policy = rollout.Policy(tiny.tiny_model(TOKENS, width=32), TOKENS, None)
    omne_r1.train_sft(SimpleNamespace(cfg=cfg, steps=steps), policy, [turn(0)] * 20)
    expected = partial(training.cosine_lr, total=60, peak=1.0, warmup=1)
    assert rates == pytest.approx([expected(n) for n in range(60)]) and rates[30] < rates[20] < 1


# ---- what else no run shows when it is compared with itself

def test_attempts_that_are_thrown_away_count_in_mygo_s_budget(monkeypatch):
    def attempt():
        info = mygo_mujica.PlannerInfo(tokens=7, workers=[[]])
        return Trajectory("q", [7], [Turn([1], [-1.0], "", "")], info=info)

    kept = {}

    def steps(policy, optimizer, total, state, share, **_):
        kept.update(state=state)
        return [(1, {})]

    monkeypatch.setattr(mygo_mujica, "sample", lambda *_, **__: ([[attempt(), attempt()]], .5))
    monkeypatch.setattr(mygo_mujica, "select", lambda *_: [])
    monkeypatch.setattr(mygo_mujica, "write_sharegpt", lambda *_: None)
    question = data.Question("q", "?", ["x"])
    monkeypatch.setattr(data, "batch_of_step", lambda *_: [question])
    cfg = mygo_mujica.Config()
    policy = rollout.Policy(tiny.tiny_model(TOKENS, width=32), TOKENS, None)
    run = SimpleNamespace(cfg=cfg, steps=steps, sampling=lambda *_: nullcontext(), folder=None)
    mygo_mujica.train(run, "mygo", policy, policy, None, mygo_mujica.Place("train", [question], None))
    assert kept["state"]["tokens"] == 14


def test_omne_s_turns_have_seeds_of_their_own(monkeypatch):
    async def reply(*_):
        return "seen"

    monkeypatch.setattr(omne_r1, "read_round", lambda text: ("call", None))
    monkeypatch.setattr(omne_r1, "reply_to", reply)
    monkeypatch.setattr(omne_r1, "render_observation", lambda *_: [5])
    monkeypatch.setattr(omne_r1, "result_of", lambda *_: Outcome("x", ""))
    engine = Asked("w1 w2")
    policy = rollout.Policy(None, TOKENS, engine)
    player = SimpleNamespace(cfg=omne_r1.Config(), policy=policy, prompt_ids=[1], search=None, seed=0,
                             temperature=1.0, watch=None)
    asyncio.run(omne_r1.play(player, data.Question("q", "?", ["x"]), "p"))
    assert len(set(engine.seeds)) == len(engine.seeds) == 7


def test_a_text_has_one_vector_whatever_stands_beside_it_and_frozen_ones_have_length_1():
    model, tokenizer = tiny_encoders.tiny_bert("encoder")
    pairs = encoders.PairTokenizer("coarse", tokenizer, 64)
    encoder = encoders.Encoder(model.eval(), pairs, 1000)
    short, long = pairs.ids("film"), pairs.ids("film of a country and a city and a river")
    with torch.no_grad():
        alone, beside = encoder.encode([short])[0], encoder.encode([short, long])[0]
    torch.testing.assert_close(alone, beside, rtol=1e-4, atol=1e-5)
    case = evidence.make_case(data.Question("q", "Who?", ["x"], context=[["A", ["A film.", "A city."]]]))
    evidence.tokenize(pairs, [case])
    evidence.freeze_vectors(encoder, [case])
    assert case.vectors.norm(dim=1).tolist() == pytest.approx([1, 1])


def test_a_warm_up_s_update_is_a_mean_over_all_its_tokens(monkeypatch):
    """In one pass or in three: demonstrations of 2, 9 and 20 tokens, by plain gradient descent."""
    found = []
    monkeypatch.setattr(training, "make_optimizer", lambda m, *a, **k: torch.optim.SGD(m.parameters(), 1.0))
    monkeypatch.setattr(training, "set_lr", lambda *_: None)
    for micro_tokens in (1000, 24):
        model = tiny.tiny_model(TOKENS, width=32)
        examples = [[Trajectory("q", [3, 4], [Turn([5 + n % 9 for n in range(size)], [0.0] * size, "", "")])]
                    for size in (2, 9, 20)]
        cfg = at2po.Config(micro_tokens=micro_tokens)
        run = SimpleNamespace(cfg=cfg, steps=lambda *_, **__: [(1, {})])
        warmup.train(run, 1, rollout.Policy(model, TOKENS, None), examples)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_small_numbers_by_hand():
    rows = {"a": {"summary": {"em": 1.0}}, "b": {"summary": {"em": 0.0, "by_rule": True}}}
    assert metrics.mean_em(rows) == 1
    said = []
    counts = guards.watch({"train/kl": -.2}, [], said.append, {"train/kl": None})
    assert counts["guard/kl"] == 1 and "-0.20 nats" in said[0]
    graph = kg.empty_graph(directed=False)
    graph.add_edge("A", "A", relation="r")
    assert kg.KnowledgeGraph(graph).facts("A") == [("A", "r", "A")]
    paths = [Trajectory("q", [1, 2], [Turn([3] * n, [0.0] * n, "", "")]) for n in (4, 4, 4, 9)]
    parts = rollout.micro_batches(paths, 12, share_prefixes=True)
    assert [len(part) for part in parts] == [2, 1, 1]  # 2 + 4 + 4, then 2 + 4; 2 + 9 alone


def test_seeds_that_are_far_apart_draw_otherwise_and_each_row_has_its_temperature():
    model = tiny.tiny_model(TOKENS, width=32)
    engine = TransformersEngine(model, TOKENS)

    def sampled(*asked):
        agents = [engine.generate([3, 4], max_tokens=20, temperature=t, seed=seed) for seed, t in asked]
        engine.eos = set()
        return [g.token_ids for g in rollout.run_agents(agents, engine, rollout.BatchedSearch(None),
                                                        rollout.no_progress)]

    assert len({tuple(ids) for ids in sampled((1, 1.0), (4097, 1.0), (1 + 2**32, 1.0))}) == 3
    greedy, = sampled((0, 0.0))
    hot, = sampled((5, 3.0))
    assert sampled((0, 0.0), (5, 3.0)) == [greedy, hot]
