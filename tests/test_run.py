"""What a run is, over a script of ten lines: it resumes bit for bit, survives a kill, ends with its budget,
and refuses in one line what it cannot go on from."""

import json
import math
import random
import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import at2po
from common import cache, checkpoint, data, files, guards, ladder, metrics, report, rollout, training
from common import model as models
from common.files import UserError, read_jsonl
from common.folder import open_folder, opened
from common.of_at2po import baselines
from common.of_mygo import records
from common.report import __main__ as comparison
from common.run import Run, program, tell_what_next, what_is_saved
from common.world import tiny
from tests.conftest import forked, rows_of

TOKENIZER = tiny.tiny_tokenizer(["a", "b"], [])


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
    with run.stage("ten lines", policy, [data.Split("test", [], None)], evaluate, cfg.steps):
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
    saved = checkpoint.read_state(checkpoint.find(killed / "checkpoint"))["step"]
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
    assert said.count("eval test (n 1)") == 3


def test_a_run_killed_before_its_first_checkpoint_begins_again_and_says_so(tmp_path, one_step, capsys):
    shutil.rmtree(one_step / "checkpoint")
    (one_step / "eval_test.json").unlink()
    change(one_step, "config.json", edited(threads=7, date="2026-01-31", save_every=10))
    begin(tmp_path, "--steps", 1, "--save-every", 10, "--resume")
    said = capsys.readouterr().out
    assert "no checkpoint was saved before it stopped" in said
    assert "was begun with threads 7, now" in said and "was begun with date 2026-01-31, now" in said
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


def edited(**keys):
    return lambda old: json.dumps(json.loads(old) | keys).encode()


def flipped(old):
    return old[:-4000] + bytes(b ^ 255 for b in old[-4000:])


@pytest.mark.parametrize("name, value, message", [
    ("checkpoint/trainer.json", "[1]", "the checkpoint is damaged (trainer.json has no step"),
    ("checkpoint/trainer.json", edited(step="x"), "the checkpoint is damaged (trainer.json has no step"),
    ("checkpoint/trainer.json", edited(step=-5), "the checkpoint is damaged (trainer.json has no step"),
    ("checkpoint/trainer.json", "{", "the checkpoint is damaged (trainer.json: JSONDecodeError)"),
    ("checkpoint/trainer.json", None, "its checkpoint/ is gone"),
    ("checkpoint/trainer.json", edited(run="another"), "checkpoint of another run"),
    ("checkpoint", None, "its checkpoint/ is gone"),
    ("checkpoint/model.safetensors", flipped, "model.safetensors is changed since it was saved"),
    ("checkpoint/optimizer.safetensors", None, "optimizer.safetensors is missing"),
    ("checkpoint/tokenizer.json", lambda old: old[:100], "tokenizer.json is changed since it was saved"),
    ("config.json", "[]", "config.json is damaged (no object)"),
    ("config.json", "{", "config.json is damaged (JSONDecodeError)"),
    ("eval_test_before.json", lambda old: old[:50], "eval_test_before.json is damaged"),
    ("eval_test_before.json", "{}", "eval_test_before.json is damaged (no summary"),
    ("metrics.jsonl", lambda old: b'{"loss": 1}\n' + old, "line 1 has no step; nothing was changed"),
    ("metrics.jsonl", lambda old: old + b'{"step": "3"}\n', "metrics.jsonl: line 2 has no step"),
    ("metrics.jsonl", lambda old: b"garbage\n" + old, "metrics.jsonl: line 1 is not valid JSON"),
    ("metrics.jsonl", "", "checkpoint of step 1, and metrics.jsonl ends at step 0"),
    ("metrics.jsonl", None, "metrics.jsonl ends at step 0"),
    ("checkpoint/trainer.json", edited(step=2), "checkpoint of step 2, and metrics.jsonl ends at step 1"),
    ("samples.jsonl", "[1]\n", "samples.jsonl: line 1 has no step"),
    ("samples.jsonl", lambda old: b"\xff\xfe" + old, "samples.jsonl is damaged (UnicodeDecodeError)")])
def test_resuming_a_damaged_run_is_one_line_and_changes_nothing(tmp_path, one_step, name, value, message):
    change(one_step, name, value)
    before = contents(one_step)
    refuse(message, tmp_path, "--steps", 2, "--resume")
    assert before == contents(one_step)


def other_forms(value, at=()):
    """(a JSON value with another one somewhere in it, the keys that lead there); of lists the first part."""
    for other in (math.nan, {"a": 1}, [1], "x", "5", None, 10**40, json.loads("[" * 900 + "]" * 900)):
        yield other, at
    parts = value.items() if isinstance(value, dict) else []
    if isinstance(value, list):
        parts = list(enumerate(value))[:1]
    for key, part in parts:
        for changed, place in other_forms(part, (*at, key)):
            whole = value.copy()
            whole[key] = changed
            yield whole, place


def write_run(folder, cfg):
    """What at2po.py leaves, by hand: a step, an evaluation before and after."""
    node = {"id": 1, "parents": [0], "text": "a", "observation": "b", "label": "c", "how": ["d"], "value": .5}
    group = {
        "question_id": "q", "question": "Who?", "type": "", "hops": 1, "gold": ["Ada"], "evidence": ["e"],
        "nodes": [{"id": 0, "parents": [], "label": "question"}, node], "beside": "value",
        "trajectories": [{"path": [0, 1], "reward": 1.0, "answer": "x", "correct": True, "why": ["f"]}]}
    scores = {"em": 1.0, "em_valid": 1.0, "f1": 1.0, "searches": 1, "tokens": 9, "read": 1.0, "copied": 1.0}
    row = {"id": "q", "answer": "x", "problem": "", **scores} | group
    folder.mkdir(parents=True)
    files.write_json(folder / "config.json", asdict(cfg) | {
        "run_id": "r", "threads": 1, "machine": "m", "date": "2026-01-01", "changed": ["lr"]})
    files.write_json(folder / "metrics.json", at2po.METRICS)
    told = {"step": 1, "reward/mean": .5, "rollout/tokens": 9, "rollout/tokens_total": 9, "guard/kl": 0}
    files.write_jsonl(folder / "metrics.jsonl", [told])
    files.write_jsonl(folder / "samples.jsonl", [{"step": 1} | group])
    for name in ("one", "two", "one_before"):
        value = {"summary": metrics.summarize([row]) | {"set": name}, "predictions": [row]}
        files.write_json(folder / f"eval_{name}.json", value)
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint/w").touch()
    saved = {"step": 1, "run": "r", "K": .5, "digests": {"w": cache.digest(folder / "checkpoint/w")}}
    files.write_json(folder / "checkpoint/trainer.json", saved)
    return folder


def read_everything(folder, cfg, other):
    """Who reads a run folder: --resume, the page, ladder and comparisons."""
    begun = open_folder(cfg, "at2po", "a")
    budget = baselines.TokenBudget(at2po.Config(token_budget=9, steps=2, group_size=1))
    budget.spent["tokens"] += checkpoint.read_state(begun.start).get("K", 0)
    assert budget.share(1) > 0
    begun.rewind(1)
    guards.watch({"step": 2}, read_jsonl(folder / "metrics.jsonl"), str, at2po.METRICS)
    records.budget_is_spent(begun, 9)
    results = report.evaluations(folder)
    for name, result in results.items():
        metrics.summary_line(name, result["summary"])
    report.show_averages(results, {"both": list(results)})
    comparison.compare([folder])
    ladder.refuse_other_settings(folder, [folder], asdict(cfg))
    comparison.compare([folder, other], folder / "c.png", page=folder / "c.html")
    tell_what_next()
    what_is_saved()


def test_a_value_of_another_form_changes_nothing_or_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "bootstrap_interval", lambda values: (values.mean(),) * 3)
    monkeypatch.setattr(report, "show", lambda *_: None)
    cfg = at2po.parse_args(["--lr", "1e-3", "--out", str(tmp_path / "runs"), "--name", "a", "--resume"])
    whole, other = (write_run(tmp_path / name / "at2po/a", cfg) for name in ("whole", "other"))
    folder = tmp_path / "runs/at2po/a"
    names = sorted(str(file.relative_to(whole)) for file in whole.rglob("*.json*"))
    refused = set()
    damages = [("", None, ())]
    for name in names:
        of_file = list(other_forms(json.loads((whole / name).read_text())))
        damages += [(name, *damage) for damage in random.Random(name).sample(of_file, 8)]
    for name, damaged, place in damages:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        if name:
            (folder / name).write_text(json.dumps(damaged) + "\n")
        opened.clear()
        try:
            read_everything(folder, cfg, other)
        except UserError as error:
            refused.add(name)
            told = str(error)
            assert "\n" not in told and (str(folder) in told or "--resume:" in told), (name, place, told)
    assert refused == set(names)
