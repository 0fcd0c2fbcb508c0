"""docs/at2po.ipynb: made of the walkthrough, and run; its exercises accept the right answers alone."""

import ast
import base64
import json
import math
import re
from pathlib import Path

import pytest

import at2po
from docs import exercises
from docs import notebook as made
from tests.conftest import ROOT


def test_the_notebook_is_that_of_the_walkthrough():
    written = (ROOT / "docs/at2po.ipynb").read_text(encoding="utf-8")
    assert written == made.written(), "docs/at2po.ipynb is not what python -m docs.notebook writes"
    assert len(written) < 150_000
    book = json.loads(written)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    for line in (ROOT / "docs/walkthrough.md").read_text(encoding="utf-8").split("\n"):
        code = line.removeprefix(">>> ").removeprefix("... ")
        if line != "..." and not line.startswith(("```", "![")):
            assert json.dumps(code)[1:-1] in json.dumps(book), line


def test_the_notebook_begins_with_its_title_shows_its_training_and_stays_in_its_boxes():
    first, *cells = json.loads((ROOT / "docs/at2po.ipynb").read_text(encoding="utf-8"))["cells"]
    assert first["source"].startswith("# AT2PO") and "\n## " not in first["source"]
    text = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    assert text.count("$$") == 4 and r"\frac" in text and "* -1.414" not in text
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert max(len(line) for cell in code for line in cell["source"].split("\n")) <= 100
    outputs = [out for cell in code for out in cell["outputs"]]
    assert max(len(line) for out in outputs for line in out.get("text", "").split("\n")) <= 110
    pictures = [base64.b64decode(out["data"]["image/png"]) for out in outputs if "data" in out]
    assert [picture[:4] for picture in pictures] == [b"\x89PNG"] * 2
    printed = next(cell for cell in code if "with_evaluations" in cell["source"])["outputs"][0]["text"]
    assert [int(number) for number in re.findall(r"^step +(\d+)", printed, re.MULTILINE)] == [*range(11)]


def run_cell(source, names):
    """Runs a cell as a notebook does. Returns the value of its last expression."""
    body = ast.parse(source).body
    last = None
    if isinstance(body[-1], ast.Expr):
        last = ast.Expression(body.pop().value)
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return last and eval(compile(last, "cell", "eval"), names)  # noqa: S307  (our own notebook)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capsys):
    """Two of its ten steps."""
    monkeypatch.chdir(ROOT / "docs")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    names = {"__name__": "notebook"}
    for cell in json.loads((ROOT / "docs/at2po.ipynb").read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            continue
        capsys.readouterr()
        shorter = cell["source"].replace('"--steps", "10"', '"--steps", "2"').replace('"60"', '"6"')
        value = run_cell(shorter, names)
        wanted = "".join(out.get("text", "") for out in cell["outputs"])
        if "with_evaluations" in cell["source"]:  # of training, which rounds differently elsewhere
            assert re.findall(r"^step +(\d)", capsys.readouterr().out, re.MULTILINE) == ["0", "1", "2"]
        elif wanted:
            shown = "" if value is None else repr(value) + "\n"
            assert capsys.readouterr().out + shown == wanted
    rows = (Path(names["folder"]) / "at2po/ten/metrics.jsonl").read_text().splitlines()
    assert len(rows) == 2 and math.isfinite(json.loads(rows[-1])["train/loss"])
    page = Path(names["folder"], "at2po/ten/trajectories.html").read_text(encoding="utf-8")
    frame = names["Framed"](page)._repr_html_()
    assert frame.startswith("<iframe srcdoc=") and "&lt;script" in frame and "<script" not in frame


# ---------------------------------------------------------------- exercises

def best(node):
    return node.value if node.done else max(best(child) for child in node.children)


def mean(node):
    values = [mean(child) for child in node.children]
    return node.value if node.done else sum(values) / len(values)


def last_turn_only(node):
    """Best of the children, each worth Eq 3's mean."""
    return node.value if node.done else max(mean(child) for child in node.children)


@pytest.mark.parametrize("answer", [mean, last_turn_only])
def test_the_credit_rule_is_the_best_continuation(answer):
    assert exercises.best_continuation(best).startswith("right")
    assert exercises.best_continuation(answer).startswith("not yet")


def whole_response(batch):
    mask = batch.response_mask.clone()
    for row, trajectory in enumerate(batch.trajectories):
        mask[row, len(trajectory.prompt_ids):trajectory.length] = True
    return mask


def written_in_place(batch):
    batch.response_mask |= whole_response(batch)
    return batch.response_mask


@pytest.mark.parametrize("answer", [lambda batch: batch.response_mask, written_in_place])
def test_the_broken_mask_is_the_whole_response(answer):
    said = exercises.observations_in_the_mask(whole_response)
    assert said.startswith("right: 6 tokens") and "4 tokens were clipped, 0 are" in said
    assert exercises.observations_in_the_mask(answer).startswith("not yet")


def flipped(logprobs, old_logprobs, advantages, *rest):
    return at2po.atpo_loss(logprobs, old_logprobs, -advantages, *rest)[0]


def minus(*given):
    return -at2po.atpo_loss(*given)[0]


def without_the_clip(logprobs, old_logprobs, advantages, mask, turns, clip_low, clip_high):
    return at2po.atpo_loss(logprobs, old_logprobs, -advantages, mask, turns, .99, 99)[0]


def detached(logprobs, *rest):
    return flipped(logprobs.detach(), *rest) + 0 * logprobs.sum()


@pytest.mark.parametrize("answer", [minus, without_the_clip, detached])
def test_the_sign_belongs_to_the_advantages(answer):
    assert exercises.unlearn(flipped).startswith("right")
    assert exercises.unlearn(answer).startswith("not yet")
    assert ("wrong side" in exercises.unlearn(answer)) == (answer is minus)
