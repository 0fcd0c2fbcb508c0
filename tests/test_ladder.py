"""Tables of methods over seeds: which runs they make, what they show of them, what a failed one says; and the
best weights of a run kept beside the last."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

import at2po
from common import checkpoint, keep_best, ladder, report
from common.at2po_tables import TABLES
from common.files import RunError, read_jsonl
from common.ladder import Row
from common.results import evaluations, mean_along
from common.world.splits import world_split
from tests.test_scripts import TINY

ROOT = Path(__file__).resolve().parents[1]


def finished(folder, ems, before, steps):
    """A run folder as a run leaves it."""
    folder.mkdir(parents=True)

    def result(values):
        rows = [{"id": str(i), "em": em, "f1": em, "searches": 2 + em, "tokens": 9.0}
                for i, em in enumerate(values)]
        mean = sum(values) / len(values)
        return {"summary": {"em": mean, "n": len(rows)}, "predictions": rows}

    (folder / "eval_test.json").write_text(json.dumps(result(ems)))
    (folder / "eval_test_before.json").write_text(json.dumps(result(before)))
    (folder / "config.json").write_text("{}")
    (folder / "results.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))


def test_a_table_by_hand(tmp_path, capsys):
    steps = [{"step": n, "rollout/tokens": 100, "rollout/tokens_total": 100 * n, "reward/em": .1 * n,
              "rollout/entropy": 1 / n, "train/clip_fraction": .2, "train/ratio_max": n, "reward/format": 1.0,
              "rollout/flat_groups": .5} for n in (1, 2, 3, 4)]
    steps[1]["eval/em"] = .25
    folders = {"a": [], "b": [], "c": []}
    for seed, (a, b, c) in enumerate([([0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]),
                                      ([0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 0, 0])]):
        for label, ems in zip("abc", (a, b, c), strict=True):
            folder = tmp_path / f"x-{label}-seed{seed}"
            finished(folder, ems, [0, 0, 0, 1], steps)
            folders[label].append(folder)
    rows = {"a": Row((), "1.0"), "b": Row(()), "c": Row((), "", "a")}
    ladder.show(tmp_path / "x", rows, folders, ("start", Row((), "0.5")))
    table = json.loads((tmp_path / "x-table.json").read_text())
    lines = [dict(zip(table["header"], line, strict=True)) for line in table["rows"]]
    assert [line["method"] for line in lines] == ["start", "a", "b", "c"]
    assert [line["paper"] for line in lines] == ["0.5", "1.0", "", ""]
    assert [line["minus"] for line in lines] == ["", "", "a", "a"]
    assert lines[2]["EM by seed"] == "0.500 0.750"
    assert lines[2]["paired by question"].startswith("+0.375 [")
    # seeds: +.25 and +.5, Student's t with one degree of freedom
    assert lines[2]["paired by seed"] == "+0.375 [-1.213, +1.963]"
    assert lines[3]["paired by seed"].startswith("+0.375 [")
    assert lines[0]["tokens"] == "" and lines[1]["tokens"] == "400"
    assert (lines[1]["clip"], lines[1]["largest ratio"], lines[1]["entropy"]) == ("0.200", "4.0", "0.250")
    # over tokens: .25 up to the middle, then on to the end's .25; b's, to .5 and .75
    assert lines[1]["mean along the run"] == "0.250 [0.250, 0.250]"
    assert lines[2]["mean along the run"].startswith("0.344 [")
    assert lines[2]["the same, paired by seed"].startswith("+0.094 [")
    for name in ("x-curves.png", "x-turns.png"):
        assert (tmp_path / name).stat().st_size > 5000
    capsys.readouterr()
    runs = [f for label in "ab" for f in folders[label]]
    report.compare_seeds({f.name: evaluations(f) for f in runs}, "em", {f.name: mean_along(f) for f in runs})
    said = capsys.readouterr().out
    assert "EM along the run" in said and "+0.094 [" in said


def test_em_along_a_run_is_a_mean_over_tokens_whatever_its_steps(tmp_path):
    """Half the tokens at once or in four steps, an evaluation more or less: a straight line has one mean."""
    def step(n, tokens, **more):
        return {"step": n, "rollout/tokens": tokens} | more

    few = [step(1, 200), step(2, 200)]
    many = [step(n, 100, **{"eval/em": n / 4}) for n in (1, 2, 3, 4)]  # the last one is the end's
    uneven = [step(1, 10, **{"eval/em": 1 / 40}), step(2, 390)]
    for name, steps in (("few", few), ("many", many), ("uneven", uneven)):
        finished(tmp_path / name, [1, 1], [0, 0], steps)
        assert mean_along(tmp_path / name) == pytest.approx(.5), name
    finished(tmp_path / "none", [1], [0], [])
    assert mean_along(tmp_path / "none") is None


def test_every_run_of_a_table_gets_the_other_flags_and_is_made_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ladder, "all_at_once", lambda commands, most: asked.extend(commands))
    monkeypatch.setattr(ladder, "show", lambda path, rows, folders, before: asked.append((path, folders)))
    cfg = SimpleNamespace(out=str(tmp_path), name="t", seed=3, seeds=2)
    finished(tmp_path / "at2po/t-two-words-seed3", [1], [0], [])
    begun = tmp_path / "at2po/t-one-seed4"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    rows = {"one": Row(("--lr", "1e-3")), "two, words": Row()}
    given = "--ladder --seeds 2 --seed=3 --name t --world hard --lr 1e-4".split()
    ladder.run(cfg, "at2po", "ladder", rows, given, at2po.parse_args)
    *commands, (path, folders) = asked
    assert path == tmp_path / "at2po/t-ladder"
    assert folders["two, words"] == [tmp_path / f"at2po/t-two-words-seed{s}" for s in (3, 4)]
    flags = {folder.name: command[2:] for folder, command in commands}
    shared = ["--world", "hard", "--lr", "1e-4"]
    assert flags == {
        "t-one-seed3": [*shared, "--lr", "1e-3", "--seed", "3", "--name", "t-one-seed3"],
        "t-one-seed4": [*shared, "--lr", "1e-3", "--seed", "4", "--name", "t-one-seed4", "--resume"],
        "t-two-words-seed4": [*shared, "--seed", "4", "--name", "t-two-words-seed4"],
    }


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(commands, most):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "all_at_once", interrupted)
    cfg = SimpleNamespace(out=str(tmp_path), name="t", seed=0, seeds=1)
    with pytest.raises(SystemExit) as stop:
        ladder.run(cfg, "at2po", "ladder", {"one": Row()}, [], at2po.parse_args)
    assert stop.value.code == 130 and "the same command goes on" in capsys.readouterr().out


def test_a_table_takes_no_run_of_other_settings_and_no_half_of_one(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(ladder, "all_at_once", lambda commands, most: asked.extend(commands))
    monkeypatch.setattr(ladder, "show", lambda *given: None)
    cfg = SimpleNamespace(out=str(tmp_path), name="t", seed=0, seeds=1)
    folder = tmp_path / "at2po/t-one-seed0"
    finished(folder, [1], [0], [])
    made = asdict(at2po.parse_args(["--seed", "0", "--name", "t-one-seed0", "--out", "elsewhere"]))
    (folder / "config.json").write_text(json.dumps(made | {"run_id": "x", "threads": 1}))
    ladder.run(cfg, "at2po", "ladder", {"one": Row()}, [], at2po.parse_args)
    assert asked == []
    with pytest.raises(RunError, match="was made with lr = 0.0001, this table is for 0.5: give the same"):
        ladder.run(cfg, "at2po", "ladder", {"one": Row(("--lr", ".5"))}, [], at2po.parse_args)
    (folder / "results.json").unlink()  # killed between two sets
    ladder.run(cfg, "at2po", "ladder", {"one": Row()}, [], at2po.parse_args)
    assert [command[-1] for _, command in asked] == ["--resume"]


def test_the_flags_of_a_file_reach_every_run(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(ladder, "run", lambda *told, before: given.append(told[4]))
    file = tmp_path / "a.args"
    file.write_text("--world-size .5 --ladder")
    at2po.main([f"@{file}", "--seeds", "2"])
    assert given == [["--world-size", ".5", "--ladder", "--seeds", "2"]]
    assert ladder.without_own(given[0]) == ["--world-size", ".5"]


def test_a_run_that_fails_ends_the_table_with_what_it_said(tmp_path):
    sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no such thing')"]
    with pytest.raises(RunError, match="bad failed .error: no such thing.*bad.log"):
        ladder.all_at_once([(tmp_path / "good", sleeping), (tmp_path / "bad", failing)], 2)


@pytest.mark.parametrize("table, labels", [("ladder", 4), ("schemes", 12), ("baselines", 7)])
def test_the_flags_of_every_row_are_ones_that_the_script_takes(table, labels):
    rows = TABLES[table]
    assert len(rows) == labels and "AT2PO" in rows
    configs = {label: at2po.parse_args(["--world", "hard", *row.flags]) for label, row in rows.items()}
    told = [(c.loss, c.rollout, c.expansion, c.credit, c.value, c.advantage, c.kl_coef)
            for c in configs.values()]
    assert len(set(told)) == labels  # no two rows are one method
    for c in configs.values():
        assert c.lr == (1e-4 if c.loss in at2po.TOKEN_RATIOS else 2e-4)
    for row in rows.values():
        assert not row.minus or row.minus in rows


@pytest.mark.slow
def test_a_small_ladder_from_the_command_line(tmp_path, monkeypatch):
    command = [*TINY, "--ladder", "--seed", "1", "--steps", "1", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [str(ROOT / "at2po.py"), *command])
    monkeypatch.setitem(TABLES, "ladder", {k: TABLES["ladder"][k] for k in ("random tree, GRPO", "AT2PO")})
    at2po.main(command)
    base = tmp_path / "at2po"
    table = json.loads((base / "tables-ladder-table.json").read_text())
    assert [line[0] for line in table["rows"]] == ["ReAct", *TABLES["ladder"]]
    assert all(len(line[2].split()) == 1 for line in table["rows"])
    config = json.loads((base / "tables-random-tree-grpo-seed1/config.json").read_text())
    assert (config["loss"], config["expansion"], config["credit"], config["seed"]) == (
        "grpo", "random", "outcome", 1)


# ---------------------------------------------------------------- --keep best

def test_the_best_weights_of_a_run_are_kept_and_evaluated(tmp_path, monkeypatch):
    scores = {"_step1": .2, "_step2": .9, "_step3": .1, "_last": .3}

    def known(cfg, folder, policy, sets, evaluate, when=""):
        found = real(cfg, folder, policy, sets, evaluate, when)
        for s in sets:
            if when in scores:
                assert s.name == "dev"  # what chooses is not what is tested on
                found[s.name]["summary"]["em"] = scores[when]
        return found

    real = at2po.run.evaluate_all
    monkeypatch.setattr(at2po.run, "evaluate_all", known)
    at2po.main([*TINY, "--steps", "4", "--eval-every", "1", "--keep", "best", "--out", str(tmp_path),
                "--name", "kept"])
    folder = tmp_path / "at2po/kept"
    assert checkpoint.read_state(folder / "best")["step"] == 2
    assert checkpoint.read_state(checkpoint.find(folder / "checkpoint"))["best"] == .9
    assert [row.get("eval/em") for row in read_jsonl(folder / "metrics.jsonl")] == [.2, .9, .1, None]
    assert set(evaluations(folder)) == {"test"}  # the choice among weights is no result
    # what is evaluated at the end are the weights of step 2
    at2po.main([*TINY, "--eval-only", "--checkpoint", str(folder / "best"), "--out", str(tmp_path),
                "--name", "again"])
    ours, again = (json.loads((tmp_path / f"at2po/{name}/eval_test.json").read_text())
                   for name in ("kept", "again"))
    assert [p["answer"] for p in ours["predictions"]] == [p["answer"] for p in again["predictions"]]


def test_keeping_the_best_needs_a_set_that_chooses():
    with pytest.raises(SystemExit, match="--keep best needs --eval-every"):
        at2po.parse_args(["--keep", "best", "--eval-every", "0"])
    with pytest.raises(SystemExit, match="--keep-data"):
        at2po.parse_args(["--model", "x", "--keep", "best", "--eval-every", "5"])
    split = world_split("train", questions=4)
    cfg = at2po.parse_args(["--keep", "best", "--eval-every", "5", "--eval-limit", "3"])
    chooser = keep_best.set_that_chooses(cfg, split)
    assert chooser.name == "dev" and len(chooser.questions) == 3
