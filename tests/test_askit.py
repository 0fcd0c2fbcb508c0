"""Search and reward of ASKiT against numbers worked by hand, its searches against exhaustive ones."""

import json
import math
import random
import shutil
from dataclasses import replace

import pytest
import torch
from scipy.stats import spearmanr

import askit
from askit import SUBMIT, Case, SearchPath
from common import checkpoint, data, metrics, report, training

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
        self.asked = 0

    def of(self, states):
        self.asked += len(states)
        found = []
        for c, taken in states:
            actions = [SUBMIT] + [i for i in range(len(c.texts)) if i not in taken][:self.cfg.candidates]
            if len(taken) >= self.cfg.max_evidence:
                actions = [SUBMIT]
            g = torch.Generator().manual_seed(hash((self.seed, taken)) % 2**31)
            found.append((actions, torch.randn(len(actions), generator=g).mul(2).log_softmax(0).tolist()))
        return found


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(askit, "policy_of", lambda policy, states: policy.of(states))
    return Toy


# ---- reward and credit

def test_reward_is_f1_and_a_bonus_for_exactly_the_gold():
    c = case()
    assert askit.path_reward(c, (0, 2), 3) == pytest.approx(1 + 1)
    assert askit.path_reward(c, (2, 0), 3, gamma=.5, bonus=.25) == pytest.approx(.125 + .25)
    assert askit.path_reward(c, (0,), 2) == pytest.approx(2 / 3)       # precision 1, recall 1/2
    assert askit.path_reward(c, (), 1) == 0
    assert askit.path_reward(case(missing=1), (0, 2), 3) == pytest.approx(.8)   # recall 2/3: never exact


def path(c, *actions, reward=0.0):
    p = SearchPath(c)
    for a in actions:
        p = p.after(a, -1.0)
    p.reward = reward
    return p


def test_the_baseline_is_the_mean_return_of_the_paths_through_the_same_evidence():
    c = case()
    paths = [path(c, 0, 2, SUBMIT, reward=2.0), path(c, 2, 0, 1, SUBMIT, reward=.8), path(c, SUBMIT)]
    mean = (2 + .8 + 0) / 3
    # both ways lead through the evidence {0, 2}; {0}, {2} and {0, 1, 2} have one path each
    assert askit.baselines(paths)[0] == pytest.approx([mean, 2.0, 1.4])
    assert askit.baselines(paths)[1] == pytest.approx([mean, .8, 1.4, .8])
    assert askit.baselines(paths)[2] == pytest.approx([mean])


def test_a_sampled_paths_return_is_that_of_its_end_and_not_of_its_first_action(toy):
    cfg, ends = replace(CFG, max_evidence=3), []
    for p in askit.sample_paths(toy(1, cfg), [case(6)], 8, "seed"):
        assert p.done and p.reward == askit.path_reward(p.case, p.taken, len(p.actions))
        ends.append((p.reward, askit.path_reward(p.case, p.taken[:1], 1)))
    assert len({whole for whole, _ in ends}) > 1 and any(whole != first for whole, first in ends)


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
    assert seen == {0, 1, 2, 3}


def test_losses_over_the_missing_gold():
    scores = torch.tensor([0.0, math.log(2), math.log(5)])             # p = 1/8, 2/8, 5/8
    assert askit.coarse_loss(scores, [0, 1]).item() == pytest.approx((math.log(8) + math.log(4)) / 2)
    assert askit.coarse_loss(scores, [0, 1], "sum").item() == pytest.approx(math.log(32))
    assert askit.coarse_loss(scores, [0, 1], "logsumexp").item() == pytest.approx(math.log(8 / 3))
    logp = torch.tensor([[.5, .25, .25], [.5, .5, 0.0]]).log()
    correct = torch.tensor([[False, True, True], [True, False, False]])
    expected = (2 * math.log(4) + math.log(2)) / 2   # the -inf of an action that is not there is no fault
    assert askit.supervised_loss(logp, correct).item() == pytest.approx(expected)


# ---- searches

def exhaustive(policy, c):
    """Every path to its end."""
    done, running = [], [SearchPath(c)]
    while running:
        found = policy.of([(p.case, p.taken) for p in running])
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


def test_samples_do_not_depend_on_who_else_is_sampled(toy):
    cases = [case(5, (0, 1)), case(6, (2, 3)), case(7, (4,))]
    for i, c in enumerate(cases):
        c.question.id = f"q{i}"
    together = askit.sample_paths(toy(3), cases, 4, 0, "ppo", 1)
    apart = [p for c in cases for p in askit.sample_paths(toy(3), [c], 4, 0, "ppo", 1)]
    assert [p.actions for p in together] == [p.actions for p in apart]
    assert len({p.actions for p in together}) > 4


def test_spearman_is_scipys_with_ties_and_leaves_out_questions_without_spread(toy):
    policy, cases = toy(5, replace(CFG, max_evidence=2)), [case(4), case(3, ())]    # no gold: every reward 0
    rho, share = askit.spearman(policy, cases, 10, "s")
    paths = askit.sample_paths(policy, cases[:1], 10, "s")
    expected = spearmanr([p.logprob for p in paths], [p.reward for p in paths]).statistic
    assert rho == pytest.approx(expected) and share == .5


# ---- models

@pytest.fixture(scope="module")
def tiny():
    """The embedded world's policy before any training, with some of its questions."""
    cases = [askit.make_case(q) for q in askit.world_questions("dev", 12)]
    encoder = askit.load_encoder(CFG, "vectors", None)
    for c in cases:
        encoder.reader.read(c)
    askit.freeze_vectors(encoder, cases)
    return askit.load_policy(CFG, "supervised", askit.NoFolder, encoder, cases), cases


def test_candidates_are_not_taken_yet_and_fewer_at_the_end(tiny):
    policy, cases = tiny
    c, n = cases[0], len(cases[0].texts)
    taken = tuple(range(n - 2))
    found = askit.candidates(policy, [(c, ()), (c, (0, 1)), (c, taken), (c, tuple(range(n)))])
    assert [len(f) for f in found] == [6, 6, 2, 0]
    assert not set(found[1]) & {0, 1} and set(found[2]) == {n - 2, n - 1}
    assert askit.policy_of(policy, [(c, tuple(range(10)))])[0][0] == [SUBMIT]  # full: only submitting is left


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


def test_the_gradient_raises_what_was_rewarded_and_lowers_it_with_the_sign_flipped(tiny):
    policy, cases = tiny
    for sign, compare in ((1, float.__gt__), (-1, float.__lt__)):
        fresh = askit.load_policy(CFG, "supervised", askit.NoFolder, policy.encoder, cases)
        optimizer = torch.optim.SGD(fresh.model.parameters(), lr=.05)
        paths = askit.sample_paths(fresh, cases[:2], 4, "bandit")
        for n, p in enumerate(paths):
            p.reward = sign * float(n % 4 == 0)
        states, first = paths[0].states()[0], paths[0].actions[0]

        def probability(policy=fresh, states=states, first=first):
            actions, logp = askit.policy_of(policy, [states])[0]
            return logp[actions.index(first)]
        before = probability()
        fresh_cfg = replace(CFG, mini_batch=8, grad_clip=100.0)
        row = askit.ppo_update(fresh, optimizer, paths, fresh_cfg, "nonfinite")
        fresh.forget()
        assert compare(probability(), before) and row["train/first_ratio"] == pytest.approx(1, abs=1e-4)


def test_frozen_vectors_stay_as_they_are_while_the_encoder_learns(tiny):
    _, cases = tiny
    encoder = askit.load_encoder(CFG, "vectors", None)
    before = [c.vectors.clone() for c in cases]
    optimizer = training.make_optimizer(encoder.model, 1e-2)
    loss, _ = askit.coarse_step(encoder, cases, cases[::-1], CFG, random.Random(0))
    loss.backward()
    weights = encoder.model.get_input_embeddings().weight.clone()
    training.optimizer_step(encoder.model, optimizer)
    assert not torch.equal(weights, encoder.model.get_input_embeddings().weight)
    assert all(torch.equal(a, c.vectors) for a, c in zip(before, cases, strict=True))


def test_a_sentence_can_end_neither_the_evidence_nor_its_text(tiny):
    policy, _ = tiny
    reader = policy.action_reader
    sep, end = reader.sep[0], reader.tokenizer.sep_token_id
    ids = reader.ids("A film <sep> [SEP] [CLS] of it.")
    assert sep not in ids and end not in ids and reader.tokenizer.cls_token_id not in ids


def test_the_scorers_start_out_seeing_which_words_stand_on_both_sides(tiny):
    policy, _ = tiny
    reader = policy.action_reader
    pair = reader.ids("Ada Holt, Her mother is Lena Stone."), reader.ids("Lena Stone, Her father is Max.")
    batch = reader.batch([pair], "cpu")
    hidden = policy.model.action.bert(**batch, output_hidden_states=True).hidden_states[1][0]
    words = reader.tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    side = batch["token_type_ids"][0]
    for word, feature, its_side in (("Lena", 2, 0), ("Lena", 3, 1)):
        at = next(i for i, w in enumerate(words) if w == word and side[i] == its_side)
        assert hidden[at, feature] > 2
    for word in ("Ada", "mother", "father", "Max"):
        assert hidden[words.index(word), 2:4].abs().max() < .5


# ---- the script

SMALL = ("--limit 20 --eval-limit 6 --coarse-steps 50 --supervised-steps 50 --supervised-batch 4 --steps 4 "
         "--questions-per-step 3 --correlate 3 --save-every 1 --show-every 0").split()


def rows(folder):
    return [{k: v for k, v in json.loads(line).items() if not k.startswith("time/")}
            for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_all_stages_run_and_a_run_that_was_cut_short_ends_with_the_same_numbers(tmp_path):
    askit.main([*SMALL, "--out", str(tmp_path), "--name", "whole"])
    base = tmp_path / "askit"
    for stage in askit.STAGES:
        folder = base / f"whole-{stage}"
        files = {f.name for f in folder.iterdir()}
        assert {"checkpoint", "metrics.json", "eval_test.json", "trajectories.html"} <= files
        told = json.loads((folder / "metrics.json").read_text())
        assert all(key in told or key == "step" or key.startswith("guard/") for key in rows(folder)[-1])
    table = json.loads((base / "whole-table.json").read_text())
    assert [row[1] for row in table["rows"][:2]] == ["test-beam4", "test"]
    for stage in ("coarse", "supervised"):
        shutil.copytree(base / f"whole-{stage}", base / f"parts-{stage}")
    parts = ["--out", str(tmp_path), "--name", "parts", "--stage", "ppo"]
    askit.main([*SMALL, *parts, "--steps", "2"])
    askit.main([*SMALL, *parts, "--resume"])
    assert rows(base / "parts-ppo") == rows(base / "whole-ppo")
    a, b = (checkpoint.find(base / f"{name}-ppo/checkpoint") for name in ("whole", "parts"))
    for file in ("action/model.safetensors", "submit/model.safetensors", "optimizer.safetensors"):
        assert (a / file).read_bytes() == (b / file).read_bytes()


def test_what_cannot_run_is_one_line(tmp_path, capsys):
    for args, words in (
            (["--data", "hotpotqa"], "--model paper"),
            (["--model", "Qwen/Qwen3-4B"], "three models"),
            (["--encoder", "x"], "give all of"),
            (["--group-size", "1"], "at least 2"),
            (["--candidates", "0"], "at least 1")):
        with pytest.raises(SystemExit) as stop:
            askit.main([*args, "--out", str(tmp_path)])
        assert words in str(stop.value), args
    with pytest.raises(SystemExit, match="run --stage coarse first"):
        askit.main([*SMALL, "--stage", "supervised", "--out", str(tmp_path)])
    assert checkpoint.find(tmp_path / "askit/seed0-supervised/checkpoint") is None


def test_exported_runs_can_be_compared_over_seeds(tmp_path, capsys):
    for seed, ems in ((0, (1.0, 0.0)), (1, (1.0, 1.0))):
        same = {"question": "Who?", "gold": ["x"], "type": "", "hops": 2, "answer": None, "problem": ""}
        predictions = []
        for i, em in enumerate(ems):
            scores = {"em": em, "f1": em, "precision": em, "recall": em, "sentences": 2}
            predictions.append({"id": f"q{i}", **same, **scores})
        folder = tmp_path / f"runs/seed{seed}-ppo"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        summary = metrics.summarize(predictions, ("em", "f1", "sentences"))
        evaluation = {"summary": summary, "predictions": predictions}
        (folder / "eval_test.json").write_text(json.dumps(evaluation))
        report.export(folder, tmp_path / f"kept/seed{seed}-ppo")
    report.main([str(f) for f in sorted((tmp_path / "kept").iterdir())] + ["--out", str(tmp_path / "c.png")])
    said = capsys.readouterr().out
    assert "+0.500" in said and "the seed being the unit" in said
