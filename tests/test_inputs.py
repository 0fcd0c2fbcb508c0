"""A run's inputs are known by what they hold: on --resume, in tables, and while another process writes."""

from dataclasses import replace

import pytest

import at2po
import omne_r1
from common import folder, report, run
from common.files import RunError, write_json
from common.folder import open_folder
from common.page import writer
from common.report import card
from tests.conftest import forked, write
from tests.test_report import evaluation, make_run


@pytest.fixture
def begun(tmp_path):
    """A run's flags, whose folder was begun, and the files that it reads."""
    files = {
        "data": write(tmp_path / "q.jsonl", [{"question": "Who?", "answer": "Bo"}] * 3),
        "corpus": write(tmp_path / "c.jsonl", [{"id": "1", "contents": "T\nText"}]),
        "warmup_data": write(tmp_path / "w.jsonl", [{"conversations": []}]),
        "model": tmp_path / "model" / "pytorch_model.bin",
        "retriever": tmp_path / "encoder" / "0_Transformer" / "model.safetensors",
        "eval_data": write(tmp_path / "e.jsonl", [{"question": "Where?", "answer": "Bo"}])}
    for name in ("model", "retriever"):
        files[name].parent.mkdir(parents=True)
        files[name].write_bytes(b"weights")
    cfg = replace(
        at2po.Config(), data=str(files["data"]), corpus=str(files["corpus"]), out=str(tmp_path / "runs"),
        warmup_data=f"{files['warmup_data']},{files['data']}", model=str(files["model"].parent),
        retriever=f"dense:{files['retriever'].parents[1]}@HNSW32", name="a",
        eval_data=f"nq,{files['eval_data']}")
    open_folder(cfg, "at2po", "a").create()
    return replace(cfg, resume=True), files


@pytest.mark.parametrize("flag", ["data", "corpus", "warmup_data", "model", "retriever", "eval_data"])
@pytest.mark.parametrize("how", ["grown", "of the same size"])
def test_a_run_goes_on_with_the_inputs_that_it_began_with_alone(begun, flag, how):
    cfg, files = begun
    again = open_folder(cfg, "at2po", "a")
    assert len(again.inputs) == 7 and again.saved["inputs"] == again.inputs
    file = files[flag]
    before = file.read_bytes()
    file.write_bytes(before + b"\n{}" if how == "grown" else before.replace(b"t", b"x"))
    with pytest.raises(RunError, match="has changed since this run began: restore it, or start") as error:
        open_folder(cfg, "at2po", "a")
    named = {"model": "model", "retriever": "encoder"}.get(flag, file.name)
    assert f"{named} has changed" in str(error.value)
    file.write_bytes(before)  # restored, at another time
    open_folder(cfg, "at2po", "a")
    write_json(again.path / "config.json", again.saved | {"inputs": [3]})
    with pytest.raises(RunError, match="damaged"):
        open_folder(cfg, "at2po", "a")


def test_graphs_are_inputs_by_their_files(tmp_path):
    graph = write(tmp_path / "g.jsonl", [["a", "b", "c"]])
    first = folder.inputs_of(vars(replace(omne_r1.Config(), graph=f"cs={graph},law=http://here/x")))
    assert list(first) == [f"--graph {graph}"]
    write(graph, [["a", "b", "d"]])
    assert folder.inputs_of({"graph": f"cs={graph}"}) != first
    assert folder.inputs_of({"data": "world", "corpus": "contexts", "retriever": "bm25", "model": ""}) == {}


def test_each_evaluation_says_what_it_read(tmp_path, monkeypatch):
    run_folder = folder.RunFolder(tmp_path, "s", "a", {"corpus": str(write(tmp_path / "c.jsonl", [1]))})
    run_folder.path.mkdir(parents=True)
    monkeypatch.setattr(card, "write", lambda *_: None)
    split = type("Split", (), {"name": "dev", "questions": []})
    summary = {"n": 1, "em": 0, "em_low": 0, "em_high": 0}
    evaluating = run.Run(at2po.Config())
    evaluating.folder = run_folder
    found = evaluating.evaluate(evals=[split], evaluate=lambda *_: ([{"id": "1", "em": 0}], dict(summary)))
    assert found["dev"]["summary"]["inputs"] == run_folder.inputs
    assert [*run_folder.inputs] == [f"--corpus {tmp_path / 'c.jsonl'}"]


def test_a_run_that_goes_on_reads_what_it_began_with_and_never_asks_it_again(tmp_path):
    going_on = run.Run(at2po.Config(resume=True))
    going_on.folder = folder.RunFolder(tmp_path, "s", "a", {})
    going_on.folder.path.mkdir(parents=True)
    going_on.folder.start = "checkpoint"
    split = type("Split", (), {"name": "dev", "questions": []})
    with pytest.raises(RunError, match="eval_dev_before.json is missing: restore it"):
        going_on.evaluate("_before", [split], evaluate=None, initial=True)
    told = {"summary": {"n": 1, "em": 1, "format": 1}, "predictions": []}
    write_json(going_on.folder.path / "eval_dev_before.json", told)
    assert going_on.evaluate("_before", [split], evaluate=None, initial=True) == {"dev": told}


# ---------------------------------------------------------------- tables

def evaluated(path, words, inputs=None, right=(1, 1, 1, 1)):
    """A run that was asked these questions after it had read these inputs."""
    nodes = [{"id": 0, "parents": [], "text": "", "label": "question"}]
    rows = [{"id": str(i), "question_id": str(i), "question": text, "em": right[i], "nodes": nodes}
            for i, text in enumerate(words)]
    make_run(path, [])
    evaluation(path, "dev", rows, inputs=inputs or {})
    return path


WORDS = ["Who made Hill?", "Who made Dale?", "Where is Hill?", "Where is Dale?"]


def test_a_table_compares_no_two_questions_of_one_id(tmp_path, capsys):
    first = evaluated(tmp_path / "a", WORDS)
    same = evaluated(tmp_path / "b", [w.lower() for w in WORDS], right=(1, 1, 0, 0))
    other = evaluated(tmp_path / "c", [*WORDS[:2], *WORDS[:1:-1]], right=(1, 0, 0, 0))
    turned = evaluated(tmp_path / "d", WORDS[::-1])
    table = report.method_table(None, "t", {"a": [first], "b": [same], "c": [other], "d": [turned]}, "a")
    said = " ".join(capsys.readouterr().out.split())
    by_question = {row[0]: row[7] for row in table["rows"]}
    assert by_question["b"].startswith("-0.500 [") and "n" not in by_question["b"]
    assert by_question["c"].startswith("-0.500 [") and by_question["c"].endswith("(n 2)")
    assert by_question["d"] == ""
    assert "c and a: 2 questions have one id and other words" in said
    assert "d and a: 4 questions have one id and other words" in said and "d +0" not in said
    sides = {p.name: report.evaluations(p)["dev"]["predictions"] for p in (first, other)}
    assert [pair["a"]["question"] for pair in writer.paired(sides)] == WORDS[:2]


@pytest.mark.parametrize("flag", ["--corpus", "--graph", "--retriever"])
def test_a_table_says_that_another_corpus_was_searched(flag, tmp_path, capsys):
    def inputs(digest):
        return {f"{flag} c.jsonl": digest, "--model m": digest, "--data q.jsonl": digest}

    first = evaluated(tmp_path / "a", WORDS, inputs("1"))
    same = evaluated(tmp_path / "b", WORDS, inputs("1"), right=(0, 0, 0, 0))
    cut = evaluated(tmp_path / "c", WORDS, inputs("2"), right=(0, 0, 0, 0))
    older = evaluated(tmp_path / "d", WORDS, right=(0, 0, 0, 0))
    table = report.method_table(None, "t", {"a": [first], "b": [same], "c": [cut], "d": [older]}, "a")
    assert [row[6] for row in table["rows"]] == ["", "a", f"a (other {flag})", "a"]
    said = " ".join(capsys.readouterr().out.split())
    assert f"What moved: EM on dev against a (other {flag}): down: c" in said


# ---------------------------------------------------------------- two processes

def test_a_run_is_read_once_no_other_process_writes_it(begun, tmp_path):
    cfg, _ = begun
    place = tmp_path / "runs/at2po/a"

    def said_by_another():
        child = forked(lambda argv: open_folder(cfg, "at2po", "a"), out=tmp_path / "said")
        child.join()
        assert child.exitcode
        return (tmp_path / "said").read_text()

    held = open_folder(cfg, "at2po", "a")
    (place / "config.json").write_text("half wr")  # nothing is read before it is known to be whole
    assert "another process is writing to" in said_by_another()
    held.lock.close()
    assert "damaged" in said_by_another()
