"""What a run is, over a script of ten lines: it resumes bit for bit, survives a kill, ends with its budget,
and refuses in one line what it cannot go on from."""

import json
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import at2po
from common import checkpoint, data, guards, kg, metrics, rollout, training
from common import model as models
from common.files import RunError, read_jsonl
from common.folder import RunFolder, known_as
from common.run import Run, program
from common.world import tiny
from tests.conftest import forked, rows_of

TOKENIZER = tiny.tiny_tokenizer(["a", "b"], [])
QUESTION = data.Question("1", "Who?", ["Ada"])
INPUTS = {"evaluated": [QUESTION], "learned": [QUESTION], "corpus": []}


def evaluate(policy, split, cfg, progress):
    """An answer that any other weight changes."""
    answer = f"{sum(float(p.detach().double().abs().sum()) for p in policy.model.parameters()):.12f}"
    row = {"id": "q", "question": "?", "gold": ["x"], "answer": answer, "problem": "", "type": "", "hops": 1,
           "em": 0.0, "f1": 0.0, "searches": 0, "tokens": 1}
    return [row], metrics.summarize([row])


@program()
def ten_lines(argv):
    cfg = at2po.parse_args(argv)
    run = Run(cfg, "at2po", guards.STEP, free=["token_budget"])
    model = tiny.tiny_model(TOKENIZER, width=32, seed=cfg.seed)
    if run.folder.start:
        model = models.load_policy(str(run.folder.start))[0]
    policy = rollout.Policy(model, TOKENIZER, SimpleNamespace(sleep=lambda: None))
    optimizer, spent = training.make_optimizer(model, cfg.lr), {"tokens": 0}
    budget = cfg.token_budget if isinstance(cfg.token_budget, int) else 1e9
    evaluated = data.Split("test", INPUTS["evaluated"], SimpleNamespace(corpus=INPUTS["corpus"]))
    learned = data.Split("train", INPUTS["learned"], None)
    with run.stage("ten lines", policy, [evaluated], evaluate, learned=learned):
        if not run.folder.start:
            run.evaluate("_before")
        for step, row in run.steps(policy, optimizer, cfg.steps, state=spent,
                                   share=lambda step: max(step / cfg.steps, spent["tokens"] / budget)):
            loss = model(torch.tensor([[0, 1, step % 3, 2]])).logits.std()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            spent["tokens"] += 100 + step
            row |= {"reward/mean": loss.item(), "rollout/tokens_total": spent["tokens"]}
            row["sample"] = {"step": step, "nodes": [], "trajectories": []}
        run.evaluate()


def begin(out, *flags):
    ten_lines(["--out", str(out), "--name", "a", "--lr", "1e-3", *map(str, flags)])


def refuse(message, out, *flags):
    with pytest.raises(SystemExit, match=re.escape(message)):
        begin(out, *flags)


def results(folder):
    """All that a run leaves, but for times: rows, evaluations, weights and moments as bytes."""
    left = {name: rows_of(folder / name) for name in ("metrics.jsonl", "samples.jsonl")}
    left |= {file.name: file.read_text() for file in folder.glob("eval_*.json")}
    for name in ("model.safetensors", "optimizer.safetensors"):
        weights = load_file(str(folder / "checkpoint" / name))
        left[name] = {key: weights[key].numpy().tobytes() for key in weights}
    return left


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of one step."""
    out = tmp_path_factory.mktemp("finished")
    begin(out, "--steps", 1)
    return out / "at2po/a"


@pytest.fixture
def one_step(finished, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "at2po/a"))


def test_one_step_and_two_more_equal_three_bit_for_bit(tmp_path, one_step):
    begin(tmp_path, "--steps", 3, "--name", "whole")
    whole = results(tmp_path / "at2po/whole")
    assert [row["rollout/tokens_total"] for row in whole["metrics.jsonl"]] == [101, 203, 306]
    for name in ("metrics.jsonl", "samples.jsonl"):  # as a kill leaves them behind the checkpoint
        with open(one_step / name, "a") as file:
            file.write('{"step": 2}\n')
    (one_step / "eval_test_step2.json").write_text("{}")
    for _ in range(2):  # the second time nothing is left to do: it reports again
        begin(tmp_path, "--steps", 3, "--resume")
        assert results(one_step) == whole


@pytest.mark.kill
def test_a_killed_run_resumes_to_the_same_metrics(tmp_path):
    killed = tmp_path / "at2po/killed"
    flags = ["--out", tmp_path, "--steps", 9, "--lr", "1e-3"]
    child = forked(ten_lines, *flags, "--name", "killed", out=tmp_path / "said")
    while len(read_jsonl(killed / "metrics.jsonl")) < 3 and child.is_alive():
        time.sleep(.001)
    child.kill()
    child.join()
    written = len(read_jsonl(killed / "metrics.jsonl"))
    saved = json.loads((checkpoint.find(killed / "checkpoint") / "trainer.json").read_text())["step"]
    assert 3 <= written < 9 and saved >= written - 1  # at most the current step is lost
    begin(tmp_path, "--steps", 9, "--name", "killed", "--resume", "--token-budget", 10**6)  # which may change
    begin(tmp_path, "--steps", 9, "--name", "whole")
    assert results(killed) == results(tmp_path / "at2po/whole")


def test_the_end_by_its_budget_is_explained(tmp_path, capsys):
    begin(tmp_path, "--steps", 9, "--token-budget", 200, "--eval-every", 1)
    said = capsys.readouterr().out
    assert "training ends after step 2 of at most 9: its budget of sampled tokens is spent" in said
    # the last step's weights are evaluated once, as the final ones
    assert ["eval/em" in row for row in rows_of(tmp_path / "at2po/a/metrics.jsonl")] == [True, False]
    assert len(re.findall(r"eval test.*\(n 1\)", said)) == 3


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_says_so(tmp_path, one_step, capsys):
    shutil.rmtree(one_step / "checkpoint")
    (one_step / "eval_test.json").unlink()
    config = json.loads((one_step / "config.json").read_text()) | {"threads": 7, "date": "2026-01-31"}
    change(one_step, "config.json", json.dumps(config))
    begin(tmp_path, "--steps", 1, "--save-every", 10, "--resume")
    said = capsys.readouterr().out
    assert "no checkpoint was saved before it stopped" in said
    assert "was begun with threads 7:" in said and "was begun with date 2026-01-31:" in said
    assert [row["step"] for row in rows_of(one_step / "metrics.jsonl")] == [1]


def test_runs_are_not_overwritten_and_resume_checks_what_it_resumes(tmp_path, one_step):
    before = contents(one_step)
    refuse("exists: choose another --name, or add --resume", tmp_path, "--steps", 1)
    refuse("was started with lr = 0.001", tmp_path, "--steps", 2, "--resume", "--lr", "1e-4")
    config = one_step / "config.json"
    config.write_text(config.read_text().replace('"engine": "transformers"', '"engine": "vllm"'))
    refuse("started with engine = 'vllm', not", tmp_path, "--resume", "--engine", "transformers")
    config.write_bytes(before[config])
    assert before == contents(one_step)


def change(folder, name, value):
    """Puts a file of a run into a state that no kill leaves behind: None is none, else a text, or a function
    of its bytes."""
    file = folder / name
    if value is None:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    else:
        file.write_bytes(value(file.read_bytes()) if callable(value) else value.encode())


@pytest.mark.parametrize("name, value, message", [
    ("checkpoint", None, "its checkpoint/ is gone"),
    ("config.json", "{", "config.json cannot be read (JSONDecodeError)"),
    ("config.json", "[]", "config.json holds no dict"),
    ("config.json", "[" * 100_000, "config.json cannot be read (RecursionError)"),
    ("metrics.jsonl", lambda old: b"garbage\n" + old, "metrics.jsonl: line 1 is not valid JSON"),
    ("metrics.jsonl", lambda old: b"\xff\xfe\n" + old, "metrics.jsonl: line 1 is not valid JSON")])
def test_resuming_a_damaged_run_is_one_line_and_changes_nothing(tmp_path, one_step, name, value, message):
    change(one_step, name, value)
    before = contents(one_step)
    refuse(message, tmp_path, "--steps", 2, "--resume")
    assert before == contents(one_step)


OTHER = data.Question("1", "Who?", ["Bea"])


@pytest.mark.parametrize("place, value, where", [
    ("evaluated", [OTHER], "test"), ("evaluated", [QUESTION] * 2, "test"), ("learned", [], "train"),
    ("corpus", [{"id": "7", "title": "Oslo", "text": "A town."}], "test")])
def test_a_resumed_run_refuses_other_questions_or_another_corpus(tmp_path, one_step, place, value, where,
                                                                 monkeypatch):
    monkeypatch.setitem(INPUTS, place, value)
    with pytest.raises(SystemExit, match=f"other questions, corpus or graph in {where}: give those again"):
        begin(tmp_path, "--steps", 3, "--resume")


@pytest.mark.parametrize("damage, words", [
    (lambda folder: (folder / "optimizer.safetensors").unlink(), "lacks moments of the optimizer"),
    (lambda folder: change(folder, "trainer.json", "{}"), "or trainer.json its step"),
    (lambda folder: change(folder, "trainer.json", '{"step": 2}'), "is of step 1, trainer.json of step 2"),
    (lambda folder: change(folder, "optimizer.safetensors", "cut"), "is damaged, or of another model")])
def test_a_damaged_checkpoint_is_named_in_one_line(tmp_path, one_step, damage, words):
    damage(one_step / "checkpoint")
    with pytest.raises(SystemExit, match=words):
        begin(tmp_path, "--steps", 3, "--resume")


def test_a_stage_that_is_done_was_done_with_these_questions_and_this_corpus(tmp_path, one_step):
    saved = json.loads((one_step / "config.json").read_text())
    folder = RunFolder(tmp_path, "at2po", "a", saved, resume=True)
    same = data.Split("test", [QUESTION], SimpleNamespace(corpus=[]))
    assert folder.is_done(1, [same]) and not folder.is_done(2, [same])
    corpus = SimpleNamespace(corpus=[{"id": "1", "title": "x", "text": "y"}])
    for other in (data.Split("test", [data.Question("1", "Who?", ["Bo"])], same.retriever),
                  data.Split("test", [QUESTION], corpus)):
        with pytest.raises(RunError, match="begun with other questions, corpus or graph in test"):
            folder.is_done(1, [other])


def test_a_graph_is_part_of_what_is_searched():
    one, other = (kg.KnowledgeGraph.from_triples([["Ann", "maker", tail]]) for tail in ("Bo", "Cy"))
    for split_of in (lambda graph: data.Split("test", [QUESTION], SimpleNamespace(graphs={"g": graph})),
                     lambda graph: data.Split("test", [QUESTION], None, graph=graph)):
        assert known_as(split_of(one)) == known_as(split_of(one)) != known_as(split_of(other))
