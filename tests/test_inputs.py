"""What a run reads again: on --resume, in tables, and while another process writes."""

from dataclasses import replace

import pytest

import at2po
from common import folder, report, run
from common.files import RunError, write_json
from common.folder import open_folder
from common.page import writer
from tests.conftest import forked
from tests.test_report import evaluation, make_run


def test_a_run_that_goes_on_reads_what_it_began_with_and_never_asks_it_again(tmp_path):
    going_on = run.Run(at2po.Config(resume=True))
    going_on.folder = folder.RunFolder(tmp_path, "s", "a", {})
    going_on.folder.path.mkdir(parents=True)
    going_on.folder.start = "checkpoint"
    split = type("Split", (), {"name": "dev", "questions": []})
    with pytest.raises(RunError, match="eval_dev_before.json cannot be read"):
        going_on.evaluate("_before", [split], evaluate=None, initial=True)
    told = {"summary": {"n": 1, "em": 1, "format": 1}, "predictions": []}
    write_json(going_on.folder.path / "eval_dev_before.json", told)
    assert going_on.evaluate("_before", [split], evaluate=None, initial=True) == {"dev": told}


# ---------------------------------------------------------------- tables

def evaluated(path, words, right=(1, 1, 1, 1), gold="Ada"):
    """A run that was asked these questions."""
    nodes = [{"id": 0, "parents": [], "text": "", "label": "question"}]
    rows = [{"id": str(i), "question_id": str(i), "question": text, "em": right[i], "nodes": nodes,
             "gold": [gold]} for i, text in enumerate(words)]
    make_run(path, [])
    evaluation(path, "dev", rows)
    return path


WORDS = ["Who made Hill?", "Who made Dale?", "Where is Hill?", "Where is Dale?"]


def test_a_table_compares_no_two_questions_of_one_id(tmp_path, capsys):
    first = evaluated(tmp_path / "a", WORDS)
    same = evaluated(tmp_path / "b", [w.lower() for w in WORDS], right=(1, 1, 0, 0))
    other = evaluated(tmp_path / "c", [*WORDS[:2], *WORDS[:1:-1]], right=(1, 0, 0, 0))
    turned = evaluated(tmp_path / "d", WORDS[::-1])
    gold = evaluated(tmp_path / "e", WORDS, gold="Ada Holt")
    methods = {"a": [first], "b": [same], "c": [other], "d": [turned], "e": [gold]}
    table = report.method_table(None, "t", methods, "a")
    said = " ".join(capsys.readouterr().out.split())
    by_question = {row[0]: row[7] for row in table["rows"]}
    assert by_question["b"].startswith("-0.500 [") and "n" not in by_question["b"]
    assert by_question["c"].startswith("-0.500 [") and by_question["c"].endswith("(n 2)")
    assert by_question["d"] == by_question["e"] == ""
    assert "e and a: 4 questions have one id and other words or gold answers" in said
    assert "c and a: 2 questions have one id and other words" in said
    assert "d and a: 4 questions have one id and other words" in said and "d +0" not in said
    sides = {p.name: report.evaluations(p)["dev"]["predictions"] for p in (first, other)}
    assert [pair["a"]["question"] for pair in writer.paired(sides)] == WORDS[:2]


# ---------------------------------------------------------------- two processes

def test_a_run_is_read_once_no_other_process_writes_it(tmp_path):
    cfg = replace(at2po.Config(), out=str(tmp_path / "runs"), name="a")
    place = tmp_path / "runs/at2po/a"
    open_folder(cfg, "at2po").create()
    cfg = replace(cfg, resume=True)

    def said_by_another():
        child = forked(lambda argv: open_folder(cfg, "at2po"), out=tmp_path / "said")
        child.join()
        assert child.exitcode
        return (tmp_path / "said").read_text()

    held = open_folder(cfg, "at2po")
    (place / "config.json").write_text("half wr")  # nothing is read before it is known to be whole
    assert "another process is writing to" in said_by_another()
    held.lock.close()
    assert "cannot be read" in said_by_another()
