"""Tables of methods over seeds: which runs they make, what they show of them, what a failed one says."""

import json
import os
import shlex
import sys
from dataclasses import asdict

import pytest

import at2po
from common import ladder, metrics
from common.files import RunError
from common.report import mean_along
from common.report.__main__ import compare
from tests.test_report import make_run


def finished(folder, ems, before, steps):
    """A run folder as a run leaves it."""
    make_run(folder, [], rows=steps, test_before=before, test=ems)
    (folder / "config.json").write_text("{}")
    (folder / "trajectories.html").touch()


def lines_of(path):
    table = json.loads(path.read_text())
    return [dict(zip(table["header"], line, strict=True)) for line in table["rows"]]


def small_table(tmp_path):
    """({row: {seed: folder}}, recipe) of three methods over two seeds."""
    steps = [{"step": n, "rollout/tokens": 100, "rollout/tokens_total": 100 * n, "reward/mean": .1 * n,
              "rollout/entropy": 1 / n, "train/clip_fraction": .2, "train/ratio_max": n, "reward/format": 1.0,
              "rollout/flat_groups": .5} for n in (1, 2, 3, 4)]
    steps[1]["eval/em"] = .25
    folders = {"a": {}, "b": {}, "c": {}}
    for seed, ems in enumerate([([0, 0, 1, 0], [1, 0, 1, 0], [1, 1, 1, 0]),
                                ([0, 1, 0, 0], [1, 1, 0, 1], [1, 1, 0, 0])]):
        for label, values in zip("abc", ems, strict=True):
            folder = tmp_path / f"x-{label}-seed{seed}"
            finished(folder, values, [0, 0, 0, 1], steps)
            folders[label][seed] = folder
    recipe = ladder.read_tables("at2po")["table1"]
    rows = {"start": {"when": "before", "paper": "0.5"}, "a": {"paper": "1.0"}, "b": {}, "c": {}}
    return folders, recipe | {"rows": rows}


def test_a_table_by_hand(tmp_path, drawn, capsys):
    folders, recipe = small_table(tmp_path)
    half = {"half": {0: folders["a"][0], 1: tmp_path / "nowhere"}}
    ladder.show(tmp_path / "x", "x", recipe | {"rows": recipe["rows"] | {"half": {}}}, folders | half)
    assert "half is left out" in " ".join(capsys.readouterr().out.split())
    lines = lines_of(tmp_path / "x-table.json")
    assert [line["method"] for line in lines] == ["start", "a", "b", "c"]
    assert [line["paper"] for line in lines] == ["0.5", "1.0", "", ""]
    assert [line["minus"] for line in lines] == ["", "start", "a", "b"]
    assert lines[2]["EM by seed"] == "0.500 0.750" and lines[2]["n"] == 4
    # a question counts once, with its mean over the seeds
    assert lines[2]["by question"] == metrics.signed(metrics.bootstrap_interval([1, 0, 0, .5]))
    # seeds: +.25 and +.5, Student's t with one degree of freedom
    assert lines[2]["by seed"] == "+0.375 [-1.213, +1.963]"
    assert lines[0]["tokens"] == "" and lines[1]["tokens"] == "400"
    assert (lines[1]["clip"], lines[1]["largest ratio"], lines[1]["entropy"]) == ("0.200", "4.0", "0.250")
    # over tokens: .25 up to the middle, then on to the end's .25; b's, to .5 and .75
    assert lines[0]["along the run"] == "" and lines[1]["along the run minus"] == ""
    assert lines[1]["along the run"] == "0.250"  # equal ones say nothing of their spread
    assert lines[2]["along the run"].startswith("0.344 [")
    assert lines[2]["along the run minus"].startswith("+0.094 [")
    assert (tmp_path / "x-curves.png").stat().st_size > 5000
    ladder.show(tmp_path / "x", "x", recipe | {"minus": "a"}, folders)
    lines = lines_of(tmp_path / "x-table.json")
    assert [line["minus"] for line in lines] == ["a", "", "a", "a"]
    assert lines[3]["by seed"].startswith("+0.375 [")


def test_seeds_of_runs_are_compared_as_those_of_a_table_are(tmp_path, capsys):
    folders, _ = small_table(tmp_path)
    compare([f for label in "ab" for f in folders[label].values()], tmp_path / "c.png")
    said = " ".join(capsys.readouterr().out.split())
    assert "EM along the run" in said and "+0.094 [" in said and "+0.375 [-1.213, +1.963]" in said


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


@pytest.fixture
def asked(monkeypatch):
    """The commands that a table would run, as (run folder, command), and what it shows."""
    found = []
    monkeypatch.setattr(ladder, "one_by_one", lambda commands: found.extend(commands.items()))
    monkeypatch.setattr(ladder, "show", lambda path, title, recipe, methods: found.append((path, methods)))
    return found


def table_of(monkeypatch, **rows):
    """A recipe of one table."""
    recipe = {"columns": {}, "stages": [], "rows": rows}
    monkeypatch.setattr(ladder, "read_tables", lambda script: {"table1": recipe})


def test_every_run_of_a_table_gets_the_other_flags_and_is_made_once(tmp_path, monkeypatch, asked):
    table_of(monkeypatch, one={"flags": "--lr 1e-3"}, **{"two, words": {}})
    finished(tmp_path / "at2po/t-two-words-seed3", [1], [0], [])
    begun = tmp_path / "at2po/t-one-seed4"
    begun.mkdir()
    (begun / "config.json").write_text("{}")
    given = ["at2po", "table1", "--seeds", "2", "--seed=3", "--name", "t", "--out", str(tmp_path)]
    ladder.main([*given, "--", "--world", "hard", "--lr", "1e-4"])
    *commands, (path, methods) = asked
    assert path == tmp_path / "at2po/t-table1"
    assert methods["two, words"] == {s: tmp_path / f"at2po/t-two-words-seed{s}" for s in (3, 4)}
    assert all(command[:2] == [sys.executable, at2po.__file__] for _, command in commands)
    flags = {folder.name: command[2:] for folder, command in commands}
    shared = ["--world", "hard", "--lr", "1e-4"]
    out = ["--out", str(tmp_path)]
    assert flags == {
        "t-one-seed3": [*shared, "--lr", "1e-3", "--seed", "3", "--name", "t-one-seed3", *out],
        "t-one-seed4": [*shared, "--lr", "1e-3", "--seed", "4", "--name", "t-one-seed4", *out, "--resume"],
        "t-two-words-seed4": [*shared, "--seed", "4", "--name", "t-two-words-seed4", *out]}


def test_rows_may_be_stages_of_one_run_which_is_made_first(tmp_path, asked):
    table = ["omne_r1", "table5", "--name", "t", "--out", str(tmp_path)]
    ladder.main([*table, "--", "--steps", "3"])
    (first, command), *others, (_, methods) = asked
    assert first == tmp_path / "omne_r1/t-seed0"
    assert command[2:] == [
        "--steps", "3", "--stage", "all", "--seed", "0", "--name", "t-seed0", "--out", str(tmp_path)]
    assert methods["base"] == {0: tmp_path / "omne_r1/t-seed0-base"}
    assert methods["w.1"] == {0: tmp_path / "omne_r1/t-w-1-seed0-sft-think"}
    assert [folder.name for folder, _ in others] == [
        f"t-{w}-seed0" for w in ("w1", "w-8", "w-2", "w-1", "w-05", "w-01", "w-001", "w0")]
    rows = f"{first}-sft-data/sharegpt.jsonl"
    assert others[3][1][2:10] == [
        "--steps", "3", "--stage", "sft", "--sft-data", rows, "--think-weight", ".1"]
    asked.clear()
    for stage in ("base", "stage1", "sft-think", "sft-no-think", "rl-think"):  # killed in the last one
        finished(tmp_path / f"omne_r1/t-seed0-{stage}", [1], [0], [])
    ladder.main(table)
    assert asked[0][0] == first and asked[0][1][-1] == "--resume"
    asked.clear()
    finished(tmp_path / "omne_r1/t-seed0-rl-no-think", [1], [0], [])
    ladder.main(table)
    assert len(asked) == 9 and asked[0][0].name == "t-w1-seed0"


@pytest.mark.parametrize("args, words", [
    ("at2po table9", "table9: the tables of at2po are"), ("askit table1", "askit.toml"),
    ("at2po table1 -- --clip-low -2", "--clip-low -2.0")])
def test_what_cannot_be_a_table_is_refused_in_one_line(asked, args, words):
    with pytest.raises(SystemExit, match=words):
        ladder.main(args.split())
    assert asked == []


def test_ctrl_c_says_that_the_same_command_goes_on(tmp_path, monkeypatch, capsys):
    def interrupted(commands):
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "one_by_one", interrupted)
    with pytest.raises(SystemExit) as stop:
        ladder.main(["at2po", "table1", "--out", str(tmp_path)])
    assert stop.value.code == 130 and "the same command goes on" in capsys.readouterr().err


def test_a_table_takes_no_run_of_other_settings_and_no_half_of_one(tmp_path, monkeypatch, asked):
    table_of(monkeypatch, one={})
    table = ["at2po", "table1", "--name", "t", "--out", str(tmp_path)]
    folder = tmp_path / "at2po/t-one-seed0"
    finished(folder, [1], [0], [])
    made = asdict(at2po.parse_args(["--seed", "0", "--name", "t-one-seed0", "--out", "elsewhere"]))
    (folder / "config.json").write_text(json.dumps(made | {"run_id": "x", "threads": 1}))
    ladder.main(table)
    assert len(asked) == 1  # the table
    with pytest.raises(SystemExit, match="was made with lr = 0.0002, this table is for 0.5"):
        ladder.main([*table, "--", "--lr", ".5"])
    (folder / "trajectories.html").unlink()  # killed between two sets
    ladder.main(table)
    assert asked[1][1][-1] == "--resume"
    (folder / "trajectories.html").write_text("")
    os.utime(folder / "trajectories.html", (0, 0))  # of fewer steps
    ladder.main(table)
    assert asked[3][1][-1] == "--resume"
    (folder / "trajectories.html").write_text("")
    assert ladder.is_done(folder)
    (folder / "eval_test.json").unlink()  # killed after an evaluation between steps
    assert not ladder.is_done(folder)


def test_a_run_that_fails_ends_the_table_with_what_it_said(tmp_path):
    failing = [sys.executable, "-c", "import sys; sys.exit('error: no such thing')"]
    never = [sys.executable, "-c", f"open({str(tmp_path / 'begun')!r}, 'w')"]
    with pytest.raises(RunError, match="bad failed: .*no such thing"):
        ladder.one_by_one({tmp_path / "bad": failing, tmp_path / "next": never})
    assert not (tmp_path / "begun").exists()


@pytest.mark.parametrize("table, labels", [("table1", 4), ("table2", 13), ("table4", 7)])
def test_the_flags_of_every_row_are_ones_that_the_script_takes(table, labels):
    recipe = ladder.read_tables("at2po")[table]
    flags = {}
    for label, row in recipe["rows"].items():
        if "when" not in row:
            flags[label] = shlex.split(row.get("flags", ""))
    assert len(flags) == labels and "AT2PO" in flags
    configs = {label: at2po.parse_args(["--world", "hard", *given]) for label, given in flags.items()}
    told = [(c.loss, c.expansion, c.credit, c.value, c.advantage, c.kl_coef) for c in configs.values()]
    assert len(set(told)) == labels  # no two rows are one method
    for c in configs.values():
        assert c.lr == (1e-4 if c.loss in at2po.baselines.TOKEN_RATIOS else 2e-4)
    assert recipe.get("minus", "AT2PO") in flags
