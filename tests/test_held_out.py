"""What is evaluated is never learned: not from --data, not from a warm-up, not from collected rows."""

import json
import random

import pytest

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import data, rollout, splits
from common.formats import fingerprint
from common.of_askit import evidence
from common.of_omne import graph_questions, plumbing
from common.warmup import warmup
from tests.test_warmup import HOTPOT, MUSIQUE, WIKI, write

CONTEXT = [["Hill", ["It is a film.", "Bo made it."]]]


def rows_of(n, **more):
    return [{"question": f"Who made the Hill {i}?", "answer": f"Bo {i}", "context": CONTEXT,
             "supporting_facts": [["Hill", 1]], **more} for i in range(n)]


def sides(*flags):
    """(texts of the questions that are learned, of those that are asked, all fingerprints evaluated)"""
    cfg = at2po.parse_args(["--model", "m", "--corpus", "contexts", "--retriever", "bm25", *flags])
    train, evals = splits.load_splits(cfg, at2po.PAPER_EVAL)
    learned = train.questions if train else []
    asked = [q for split in evals for q in split.questions]
    return [q.question for q in learned], [q.question for q in asked], evals[0].evaluated


def held(rows):
    questions = data.load_questions(rows)
    return {fingerprint(q.question) for q in splits.held_out("f", questions)[0]}


@pytest.mark.parametrize("n, expected", [(2, 1), (9, 4), (60, 20), (400, 37)])
def test_a_file_holds_out_the_same_questions_in_any_order_and_however_often_they_stand_there(n, expected):
    rows = rows_of(n)
    first = held(rows)
    assert len(first) == expected
    shuffled = random.Random(1).sample(rows, n)
    louder = [row | {"question": f"who made  hill {i}"} for i, row in enumerate(rows)]
    assert held(shuffled) == held(rows + rows) == held(shuffled + rows[:n // 2] * 2) == held(louder) == first


def test_what_is_held_out_of_a_large_file_stays_so_when_it_grows():
    small, large = held(rows_of(400)), held(rows_of(1000))
    assert small < large and len(large) == 102
    for i in range(1000):
        name = fingerprint(rows_of(i + 1)[i]["question"])
        assert (name in large) == (int(name, 16) < 2**64 / 10)  # as each question's own hash says


def test_no_limit_moves_the_border(tmp_path):
    rows = rows_of(80)
    file = write(tmp_path / "q.jsonl", rows + rows[:30] * 2)
    learned, asked, evaluated = sides("--data", file)
    assert len(set(asked)) == len(evaluated) == 20 and not set(asked) & set(learned)
    for flags in (["--eval-limit", "5"], ["--eval-limit", "5", "--seed", "1"], ["--limit", "50"]):
        fewer, some, same = sides("--data", file, *flags)
        assert same == evaluated and set(some) <= set(asked) and set(fewer) <= set(learned)
        assert len(some) == (5 if "--eval-limit" in flags else len(asked))
    collected = sides("--data", file, "--eval-only", "--collect", str(tmp_path / "new"),
                      "--eval-limit", "5")[1]
    assert sorted(collected) == sorted(learned)


def test_fewer_questions_are_drawn_with_the_seed_wherever_they_stand(tmp_path):
    def asked(rows, *flags):
        file = write(tmp_path / "e.jsonl", rows)
        return sides("--data", train, "--eval-data", file, *flags)[1]

    train = write(tmp_path / "t.jsonl", [{"question": f"Where is {i}?", "answer": "Bo"} for i in range(3)])
    rows = rows_of(40)
    few = asked(rows, "--eval-limit", "8")
    assert len(few) == 8 and few != [row["question"] for row in rows[:8]]
    assert asked(rows, "--eval-limit", "8", "--seed", "7") != few
    assert sorted(asked(rows[::-1], "--eval-limit", "8")) == sorted(few)
    assert set(few) < set(asked(rows, "--eval-limit", "16"))


def test_a_checkpoint_is_asked_what_a_run_on_the_file_holds_out(tmp_path, capsys):
    file = write(tmp_path / "q.jsonl", rows_of(50))
    learned, asked, _ = sides("--data", file)
    capsys.readouterr()
    alone = ["--data", file, "--eval-only"]
    assert sides(*alone, "--checkpoint", "m")[1] == asked
    assert "20 of 50 questions are held out" in capsys.readouterr().out
    trained = tmp_path / "checkpoint"
    trained.mkdir()
    (trained / "trainer.json").write_text("{}")
    assert sides(*alone, "--model", str(trained))[1] == asked
    assert sides(*alone, "--warmup-data", file)[1] == asked
    assert len(sides(*alone)[1]) == 50  # a model as it came
    assert len(sides(*alone, "--checkpoint", "m", "--eval-data", file)[1]) == 50
    # and searches the passages that the run searched
    own = write(tmp_path / "own.jsonl", [
        row | {"context": [[f"Hill {i}", ["s"]]]} for i, row in enumerate(rows_of(50))])
    cfg = at2po.parse_args(["--checkpoint", "m", "--corpus", "contexts", "--retriever", "bm25", "--data", own,
                            "--eval-only"])
    assert len(splits.load_splits(cfg, "")[1][0].retriever.corpus) == 50
    # no limit makes the search easier
    fewer = at2po.parse_args(["--model", "m", "--corpus", "contexts", "--retriever", "bm25", "--data", own,
                              "--limit", "5", "--eval-limit", "3"])
    train, [test] = splits.load_splits(fewer, "")
    assert (len(train.questions), len(test.questions), len(test.retriever.corpus)) == (5, 3, 50)


def test_evaluation_data_are_left_out_of_training_and_counted(tmp_path, capsys):
    rows = rows_of(30)
    file, some = write(tmp_path / "q.jsonl", rows), write(tmp_path / "e.jsonl", rows[:10])
    other = [row | {"question": row["question"].upper() + "!"} for row in rows[10:14]]
    for flags in ([], ["--eval-limit", "2"], ["--eval-only", "--collect", str(tmp_path / "c")]):
        others = f"{some},{write(tmp_path / 'o.jsonl', other)}"
        learned, asked, _ = sides("--data", file, "--eval-data", others, *flags)
        learned = asked if "--collect" in flags else learned
        assert learned == [row["question"] for row in rows[14:]]
        assert "left out 14 of 30 questions" in capsys.readouterr().out
    with pytest.raises(data.DataError, match="nothing is left to learn"):
        sides("--data", file, "--eval-data", file)


def test_askit_learns_no_question_that_it_is_asked(tmp_path):
    file = write(tmp_path / "q.jsonl", rows_of(30) * 2)
    cfg = askit.Config(data=file, eval_limit=3, validate=0, candidates=4)
    cases, [test] = evidence.load_cases(cfg, "")
    asked, learned = ({case.question.question for case in some} for some in (test.cases, cases))
    assert len(learned) == 15 and len(test.cases) == 3 and not asked & learned


# ---------------------------------------------------------------- warm-up

@pytest.fixture
def taught(monkeypatch):
    """taught(files, evaluated): what of them is demonstrated, or learned as it stands."""
    def taught(files, evaluated):
        kept = []

        def render(tokenizer, question, demo):
            kept.append(question.question)
            return [rollout.Trajectory("q", [], [])]

        def of_conversation(tokenizer, row, *_):
            kept.append(row["conversations"][0]["value"])
            return rollout.Trajectory("q", [], [])

        monkeypatch.setattr(warmup, "of_conversation", of_conversation)
        monkeypatch.setattr(warmup.chat, "role_marks", lambda tokenizer: set())
        index = splits.retriever.make_retriever("bm25", data.pool_contexts(map(data.parse_question, DEMOS)))
        cfg = at2po.Config(warmup_data=files, micro_tokens=99)
        split = data.Split("x", [], index, evaluated=frozenset(evaluated))
        warmup.examples_of(
            cfg, "at2po", None, split, render=render, reward=lambda *_: 1, reply=None, prompt=None,
            top_k=1)
        return kept
    return taught


DEMOS = [HOTPOT, WIKI, MUSIQUE]


def test_a_warm_up_leaves_out_the_questions_that_are_evaluated(taught, tmp_path, capsys):
    file = write(tmp_path / "w.jsonl", DEMOS)
    evaluated = {fingerprint(WIKI["question"].lower().replace("?", " ?"))}
    assert taught(file, evaluated) == [HOTPOT["question"], MUSIQUE["question"]]
    assert "left out 1 of 3 questions, which are evaluated" in capsys.readouterr().out
    with pytest.raises(data.DataError, match="nothing to learn from in it"):
        taught(file, {fingerprint(row["question"]) for row in DEMOS})


ASKED = "Who made the Hill 3?"


@pytest.mark.parametrize("row", [
    {"script": "at2po", "id": "1", "system": "", "question": "who made Hill 3"},
    {"value": ASKED},
    {"value": f"Answer in short.\nQuestion: {ASKED}\n"},
    {"value": f"Use <search>, then <answer>. The question is this: {ASKED}"},
    {"value": f"{ASKED} Think step by step.\nPut the answer in a box."},
    {"value": f"Question: {ASKED} Answer:"}, {"value": f"Q: {ASKED} Think step by step."},
    {"value": "Which of them\nmade the hill 3?", "asked": "Which of them made the Hill 3?"},
    {"value": "So: who made the\u00a0‘Hill 3’?"},
    {"value": f"Read. {'word ' * 90}it. Say!", "asked": f"{'Word ' * 90}it"},
    {"value": "Hello!", "later": f"And now:\n{ASKED}"}])
def test_conversations_of_evaluated_questions_are_left_out_in_any_prompt(row, taught, tmp_path, capsys):
    row = dict(row)
    first, later = row.pop("value", "as --collect has it"), row.pop("later", "Thanks.")
    asked = row.pop("asked", ASKED)
    row["conversations"] = [
        {"from": "human", "value": first}, {"from": "gpt", "value": "Bo"},
        {"from": "human", "value": later}, {"from": "gpt", "value": ASKED}]
    file = write(tmp_path / "c.jsonl", [row, {"conversations": [
        {"from": "human", "value": "Who made the Hill 4?"}, {"from": "gpt", "value": "Bo"}]}])
    assert taught(file, {fingerprint(asked)}) == ["Who made the Hill 4?"]
    assert "1: their questions are evaluated" in capsys.readouterr().out
    assert len(taught(file, {fingerprint("Who made the Hill 33?")})) == 2


@pytest.mark.parametrize("script", [at2po, bi_rar, mygo_mujica])
def test_every_script_tells_its_warm_up_what_is_evaluated(script, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(warmup, "examples_of", lambda cfg, name, _, split, **__: told.append(split.evaluated))
    monkeypatch.setattr(warmup, "warmed_up", lambda *_: "m")
    monkeypatch.setattr(script.models, "load_tokenizer", lambda *_: None)
    split = data.Split("x", [], None, evaluated=frozenset("e"))
    loads = mygo_mujica.places if script is mygo_mujica else script.splits
    monkeypatch.setattr(loads, "load_splits", lambda *_: (None, [split]))
    script.learn_first(script.Config(), "m")
    assert told == [{"e"}]


def test_a_warm_up_that_left_out_others_is_another(tmp_path):
    def name(ids):
        example = [rollout.Trajectory("q", ids, [])]
        return json.dumps(warmup.recipe_of(at2po.Config(), "at2po", tmp_path, [example], 3))

    assert name([1]) != name([2])


# ---------------------------------------------------------------- Omne-R1

def omne(tmp_path, *flags):
    rows = [{"id": str(i), "graph_type": "film", "question": f"Who made the Hill {i % 40}?",
             "golden_answer": "Bo"} for i in range(60)]
    triples = write(tmp_path / "g.jsonl", [["Hill", "maker", "Bo"]])
    cfg = omne_r1.parse_args([
        "--model", "m", "--graph", f"film={triples}", "--graph-encoder", "", "--data",
        write(tmp_path / "q.jsonl", rows), "--stage", "ppo", "--out", str(tmp_path), *flags])
    task, evals = graph_questions.load(cfg)
    asked = [q.question for t in evals for q in t.questions]
    return [q.question for q in task.questions] if task else [], asked, evals[0].evaluated


def test_omne_r1_learns_no_question_that_it_is_asked(tmp_path):
    learned, asked, evaluated = omne(tmp_path)
    assert asked and not set(asked) & set(learned) and len(learned) + len(asked) == 60
    fewer, some, same = omne(tmp_path, "--limit", "9", "--eval-limit", "4")
    assert same == evaluated and len(fewer) == 9 and set(some) < set(asked)
    assert omne(tmp_path, "--eval-only", "--checkpoint", "m")[1] == asked
    assert len(omne(tmp_path, "--eval-only")[1]) == 60
    assert omne(tmp_path, "--eval-only", "--policy", "http://x", "--policy-model", "m", "--model", "",
                "--collect", str(tmp_path / "c"), "--eval-limit", "4")[1] == learned
    file = write(tmp_path / "e.jsonl", [{"id": "e", "graph_type": "film", "question": "who made Hill 7",
                                         "golden_answer": "Bo"}])
    learned, asked, _ = omne(tmp_path, "--eval-data", file)
    assert asked == ["who made Hill 7"] and len(learned) == 58
    assert omne(tmp_path, "--train-hops", "12")[0] == omne(tmp_path)[0]
    with pytest.raises(data.DataError, match="--train-hops 3: no training question"):
        omne(tmp_path, "--train-hops", "3")


def test_rows_of_stage_2_and_of_a_warm_up_leave_out_what_is_evaluated(tmp_path, monkeypatch, capsys):
    rows = [{"id": "c", "graph_type": "film", "question": f"Who is {i}?", "conversations": [
        {"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Bo"}]} for i in range(4)]
    file = write(tmp_path / "c.jsonl", rows)
    evaluated = {fingerprint("who is 1"), fingerprint("who is 2")}
    cfg = omne_r1.Config(sft_data=file, warmup_data=file)
    task = data.Split("train", [], None, evaluated=evaluated)
    assert [row["question"] for row in omne_r1.sft_rows(cfg, task)] == ["Who is 0?", "Who is 3?"]
    assert "left out 2 of 4 conversations" in capsys.readouterr().out
    made = []
    monkeypatch.setattr(warmup, "warmed_up", lambda cfg, script, source, examples: made.extend(examples))
    monkeypatch.setattr(omne_r1.models, "load_tokenizer", lambda *_: None)
    plumbing.warmed_up(cfg, "m", evaluated, lambda tokenizer, row, *_, **__: row["question"])
    assert made == [["Who is 0?"], ["Who is 3?"]]
    with pytest.raises(data.DataError, match="nothing is left to learn from"):
        plumbing.read_conversations(file, {fingerprint(f"Who is {i}?") for i in range(4)})
