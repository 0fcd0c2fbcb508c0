"""Answers judged by a model, answers from memory."""

import json

import pytest

import omne_r1
from common.files import RunError, read_jsonl
from common.of_omne import judge
from common.serve import chat_client
from common.world import tiny
from tests.conftest import write
from tests.served_model import Model


@pytest.fixture(autouse=True)
def one_at_a_time(monkeypatch):
    monkeypatch.setattr(chat_client.Chat, "concurrency", 1)
    monkeypatch.setattr(chat_client, "RETRIES", 0)


def prompts_of(model):
    return [request["messages"][0]["content"] for request in model.requests]


def verdict(right):
    return json.dumps({"correct": right, "reason": "because"})


def scored(tmp_path, model, answers):
    """The rows that judging these answers leaves."""
    rows = [{"question": "q %s", "golden_answer": "g", "answer": answer} for answer in answers]
    file = write(tmp_path / "answers.jsonl", rows)
    judge.score_answers(file, model.url, "r1")
    return read_jsonl(tmp_path / "answers.judged.jsonl")


def test_a_verdict_is_read_and_never_evaluated(tmp_path, capsys):
    model = Model(verdict(True), verdict(False), "__import__('os')", '{"correct": "yes"}')
    rows = scored(tmp_path, model, ["a %s", "b", "c", "d"])
    assert [row["correct"] for row in rows] == [True, False, None, None]
    assert rows[0] == {"question": "q %s", "golden_answer": "g", "answer": "a %s", "correct": True,
                       "reason": "because"}
    # text from outside cannot fill in what comes after it
    assert "Question: q %s\nGolden answer: g\nPredicted answer: a %s" in prompts_of(model)[0]
    said_there = capsys.readouterr().out
    assert "4 answers: 0.250" in said_there and "2 verdicts could not be read" in said_there


def test_a_judge_that_was_never_understood_is_asked_no_more_after_thirty(tmp_path):
    model = Model("well")
    with pytest.raises(RunError, match="judge http.*: 30 unusable answers in a row"):
        scored(tmp_path, model, [f"a{i}" for i in range(300)])
    assert len(model.requests) >= 30


def test_a_line_that_is_no_answer_is_named(tmp_path):
    file = tmp_path / "answers.jsonl"
    file.write_text('{"question": "q"}\n')
    with pytest.raises(SystemExit, match="line 1: expected question, golden_answer and answer"):
        judge.main([str(file), "http://127.0.0.1:9/v1"])


def test_a_score_goes_on_where_the_judge_went_down(tmp_path):
    answers = [f"a{i}" for i in range(4)]
    first, second = Model(verdict(True), "well", verdict(False), (500, "down")), Model(verdict(False))
    with pytest.raises(RunError, match="HTTP 500 down"):
        scored(tmp_path, first, answers)
    assert len(first.requests) == 4 and not (tmp_path / "answers.judged.jsonl").exists()
    rows = scored(tmp_path, second, answers)
    asked = prompts_of(first)
    assert prompts_of(second) == [asked[1], asked[3]]  # (what could not be read is asked for again)
    assert [row["correct"] for row in rows] == [True, False, False, False]
    assert {f.name for f in tmp_path.iterdir()} == {"answers.jsonl", "answers.judged.jsonl"}


def test_answers_from_memory_are_evaluated_and_then_judged(tmp_path):
    tokenizer = tiny.tiny_tokenizer(["Rome", "France", "Who"], ["<think>", "</think>"])
    tiny.tiny_model(tokenizer, width=32).save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    triples, questions = tmp_path / "geo.jsonl", tmp_path / "questions.jsonl"
    triples.write_text('["Rome", "capital of", "Italy"]\n')
    texts = ["Who?", "Who Rome?"]
    rows = [{"id": text, "graph_type": "geo", "question": text, "golden_answer": "France", "hops": 1}
            for text in texts]
    write(questions, rows)
    omne_r1.main(["--model", str(tmp_path / "policy"), "--graph", f"geo={triples}", "--graph-encoder=",
                  "--stage", "direct", "--eval-data", str(questions), "--max-turn", "5",
                  "--out", str(tmp_path), "--name", "a"])
    file = tmp_path / "omne_r1/a-direct/eval_1-2-hop.json"
    found = json.loads(file.read_text())
    assert found["summary"]["em"] == 0 and all(row["nodes"][1]["tokens"] for row in found["predictions"])
    table = json.loads((tmp_path / "omne_r1/a-table.json").read_text())
    assert [row[:4] for row in table["rows"]] == [["direct", "1-2-hop", 2, ".260"]]
    model = Model(verdict(True))
    judge.main([str(file), model.url])
    rows = read_jsonl(file.with_suffix(".judged.jsonl"))
    assert [(row["question"], row["golden_answer"], row["correct"]) for row in rows] == [
        (text, "France", True) for text in texts]
    assert len(model.requests) == 2
