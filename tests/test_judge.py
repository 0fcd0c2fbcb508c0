"""Answers judged by a model, answers from memory, thoughts written by a teacher."""

import json

import pytest

import omne_r1
from common import data, kg, rollout, run
from common.engine import TransformersEngine
from common.files import Keyed, RunError, read_jsonl
from common.graphs import graph_questions, kg_tools, synthesis
from common.graphs.conversations import thoughts_by_teacher
from common.serve import chat_client, judge

PATH = [["Rome", "capital of", "Italy"], ["Italy", "neighbour of", "France"]]
QUESTION = data.Question("q1", "What is the neighbour of the country of Rome?", ["France"], type="geo",
                         hops=2, evidences=PATH)


@pytest.fixture
def said(monkeypatch):
    """said(answers): what the model says, in turn, an exception where it says nothing; returns the prompts
    that it was given."""
    def script(*answers):
        prompts, left = [], list(answers)

        def ask(self, prompt):
            prompts.append(prompt)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(chat_client.Chat, "ask", ask)
        monkeypatch.setattr(chat_client.Chat, "concurrency", 1)
        return prompts

    return script


def verdict(right):
    return json.dumps({"correct": right, "reason": "because"})


def judged(asked, file):
    return judge.verdicts("http://127.0.0.1:9/v1", "r1", asked, file, rollout.no_progress)


def test_a_verdict_is_read_and_never_evaluated(said, tmp_path):
    prompts = said(verdict(True), verdict(False), "__import__('os')", '{"correct": "yes"}')
    found = judged([("q {gold}", "g", f"a{i} {{answer}}") for i in range(4)], tmp_path / "verdicts.jsonl")
    assert [right for right, _ in found] == [True, False, None, None]
    # text from outside cannot fill in what comes after it
    assert "Question: q {gold}\nGolden answer: g\nPredicted answer: a0 {answer}" in prompts[0]


def test_a_judge_that_is_never_understood_stops_it(said, tmp_path):
    said("well")
    with pytest.raises(RunError, match="none of 2 verdicts could be read"):
        judged([("q", "g", "a")] * 2, tmp_path / "verdicts.jsonl")


def test_a_judge_that_was_never_understood_is_asked_no_more_after_thirty(said, tmp_path):
    prompts = said("well")
    asked = [("q", "g", f"a{i}") for i in range(300)]
    with pytest.raises(RunError, match="none of 30 verdicts could be read"):
        judged(asked, tmp_path / "verdicts.jsonl")
    assert len(prompts) == 30
    said(verdict(True), "well")
    found = judged(asked, tmp_path / "verdicts.jsonl")
    assert len(found) == 300


def test_answers_made_elsewhere_are_scored_beside_their_file(said, tmp_path, capsys):
    said(verdict(True), verdict(False))
    file = tmp_path / "answers.jsonl"
    rows = [{"question": "q", "golden_answer": "g", "answer": "a"},
            {"input": "q", "answers": ["g"], "lightrag_answer": "a"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    judge.score_answers(file, "http://127.0.0.1:9/v1", "r1")
    assert [row["correct"] for row in read_jsonl(tmp_path / "answers.judged.jsonl")] == [True, False]
    assert "2 answers: 0.500" in capsys.readouterr().out
    file.write_text('{"question": "q"}\n')
    with pytest.raises(data.DataError, match="line 1: expected question, golden_answer and answer"):
        judge.score_answers(file, "http://127.0.0.1:9/v1", "r1")


def test_a_score_goes_on_where_the_judge_went_down(said, tmp_path):
    file = tmp_path / "answers.jsonl"
    rows = [{"question": "q", "golden_answer": "g", "answer": f"a{i}"} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first = said(verdict(True), "well", verdict(False), RunError("down"))
    with pytest.raises(RunError, match="down"):
        judge.score_answers(file, "http://127.0.0.1:9/v1", "r1")
    assert len(first) == 4 and not (tmp_path / "answers.judged.jsonl").exists()
    second = said(verdict(False))
    judge.score_answers(file, "http://127.0.0.1:9/v1", "r1")
    # (what could not be read is asked for again)
    assert second == [first[1], first[3]]
    found = [row["correct"] for row in read_jsonl(tmp_path / "answers.judged.jsonl")]
    assert found == [True, False, False, False]
    assert {f.name for f in tmp_path.iterdir()} == {"answers.jsonl", "answers.judged.jsonl"}


def tools():
    graph = kg.KnowledgeGraph.from_triples([tuple(edge) for edge in PATH])
    return kg_tools.LocalTools({"geo": graph})


def test_a_teacher_writes_a_thought_a_turn_and_is_asked_once(said, tmp_path):
    place = graph_questions.Task("train", [QUESTION], tools())
    cfg = omne_r1.replace(omne_r1.parse_args([]), sft_templates=5, teacher="http://127.0.0.1:9/v1")
    prompts = said(json.dumps({"thoughts": ["find <b> it", "read", "read on", "done"]}))
    asked = synthesis.Teacher("http://127.0.0.1:9/v1", "r1")

    def rows():
        answers = Keyed(tmp_path / "answers.jsonl")
        found = omne_r1.template_rows(
            cfg, place, thoughts_by_teacher(asked, answers), rollout.no_progress)
        answers.close()
        return found

    said_by_gpt = [m["value"] for m in rows()[0]["conversations"] if m["from"] == "gpt"]
    assert len(said_by_gpt) == 4 and said_by_gpt[0].startswith("<think> find ")
    assert said_by_gpt[-1] == "<think> done </think> <answer> France </answer>"
    assert "node_info('Italy')" in prompts[0] and "{steps}" not in prompts[0]
    assert rows() and len(prompts) == 1
    (tmp_path / "answers.jsonl").unlink()
    said('{"thoughts": ["too few"]}')
    assert rows() == []  # left out, and counted
    (tmp_path / "answers.jsonl").unlink()
    place.questions = [omne_r1.replace(QUESTION, id=str(i), question=f"{i}?") for i in range(300)]
    cfg = omne_r1.replace(cfg, sft_templates=300)
    prompts = said("well")
    with pytest.raises(RunError, match="30 unusable answers in a row"):
        rows()
    assert 29 <= len(prompts) < 29 + 8  # one was unusable before; as many as are asked at a time


@pytest.fixture
def direct(tmp_path):
    """direct(questions, flags): --stage direct on these, with a tiny policy of random weights."""
    folder = tmp_path / "policy"
    from common.world import tiny
    tokenizer = tiny.tiny_tokenizer(["Rome", "France", "Who"], ["<think>", "</think>"])
    tiny.tiny_model(tokenizer, width=32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    triples = tmp_path / "geo.jsonl"
    triples.write_text("".join(json.dumps(edge) + "\n" for edge in PATH))

    def run(texts, *args):
        questions = tmp_path / "questions.jsonl"
        rows = [{"id": str(i), "graph_type": "geo", "question": text, "golden_answer": "France", "hops": 1}
                for i, text in enumerate(texts)]
        questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
        omne_r1.main(["--model", str(folder), "--graph", f"geo={triples}", "--graph-encoder=",
                      "--stage", "direct", "--eval-data", str(questions), "--max-turn", "5",
                      "--out", str(tmp_path), "--judge", "http://127.0.0.1:9/v1", "--name", "a", *args])
        return tmp_path / "omne_r1"

    return run


def test_answers_from_memory_are_judged(said, direct):
    said(verdict(True))
    base = direct(["Who?"])
    found = json.loads((base / "a-direct/eval_1-2-hop.json").read_text())
    assert found["summary"]["em"] == 1 and found["summary"]["judge"] == "deepseek-reasoner"
    assert found["predictions"][0]["trajectories"][0]["why"] == ["judge: because"]
    table = json.loads((base / "a-table.json").read_text())
    assert [row[:4] for row in table["rows"]] == [["direct", "1-2-hop", 1, ".260"]]


def test_what_was_said_before_the_judge_went_down_is_not_said_again(said, direct, monkeypatch):
    texts = ["Who?", "Who Rome?", "Who France?"]
    first = said(verdict(True), RunError("no judge at http://127.0.0.1:9/v1"))
    with pytest.raises(SystemExit, match="no judge at"):
        direct(texts)
    assert len(first) >= 2
    generated = []
    monkeypatch.setattr(TransformersEngine, "generate", lambda *a, **k: generated.append(a))
    monkeypatch.setattr(run, "check_engine", lambda *_: None)
    second = said(verdict(False))
    base = direct(texts, "--resume")
    assert not generated and len(second) == 2 and first[0] not in second
    found = json.loads((base / "a-direct/eval_1-2-hop.json").read_text())
    assert [row["em"] for row in found["predictions"]] == [1, 0, 0]
    assert all(row["nodes"][1]["tokens"] for row in found["predictions"])
