"""What results/ keeps: runs that can be read by name, and a page whose numbers are computed from them."""

import json
import re
from fnmatch import fnmatch

import pytest

from common import ladder, metrics, report
from common.report import __main__ as comparison
from common.report import committed
from docs import claims, pack, real_curve
from tests.conftest import ROOT
from tests.test_report import exported

RESULTS = ROOT / "results"


@pytest.fixture(scope="module")
def parts():
    """[(paper's part of claims.toml, [(row, what was measured)])]"""
    return [(paper, part, [(row, claims.measured(row)) for row in part["rows"]])
            for paper, part in claims.read().items()]


def test_the_tables_of_the_page_are_those_of_the_runs(parts):
    text = (RESULTS / "README.md").read_text()
    tables = {paper: claims.table(rows) for paper, _, rows in parts}
    assert text == claims.page(text, tables), "results/README.md is not what python -m docs.claims writes"
    assert len(text.encode()) <= 12 * 1024
    for _, part, rows in parts:
        assert len(rows) <= 12, part["title"]


@pytest.mark.parametrize("plot, wanted", [("claims", "plot"), ("claims_first", "first")])
def test_a_plot_has_each_claim_of_the_tables_in_order(parts, plot, wanted):
    words = re.findall(r"<text [^>]*>([^<]*)</text>", (RESULTS / f"{plot}.svg").read_text())
    drawn = iter(words)
    numbers = []
    verdicts = []
    for _, _, rows in parts:
        for row, found in rows:
            if wanted in row:
                assert row["plot"] in drawn, row["plot"]  # behind those before it
                numbers.append(claims.number(claims.towards(row, found)[0], "+"))
                verdicts.append(claims.verdict(row, found))
    assert [word for word in words if re.fullmatch(r"[+-]\.\d{3}", word)] == numbers
    assert [word for word in words if word in claims.COLOURS] == verdicts


# EM by seed as the notes print it, per page: how many kinds of runs, and what they are called
BY_SEED = {
    "at2po": (25, ["hard/at2po/printed-*", "hard/at2po/frozen-*"]),
    "bi_rar": (12, ["hard/bi_rar/seed*", "hard/bi_rar/lists/lists-seed*"]),
    "mygo_mujica": (19, [f"hard/mygo_mujica/{name}" for name in (
        "seed1?-*", "fixed??-seed1?-*", "constant*", "thin*", "fresh-seed*-mygo", "fresh[9s]*", "star16*")]),
    "askit": (6, ["askit/seed*-supervised", "askit/seed?-ppo", "askit/answer?-ppo", "demo/askit/longer-seed*",
                  "demo/askit/*seed*-sqg"]),
    "omne_r1": (12, ["demo/omne_r1/*"])}


def kinds(*patterns):
    """Patterns of those committed runs, one for all seeds of a kind."""
    runs = [committed.name_of(run) for pattern in patterns for run in committed.matching(RESULTS / pattern)]
    return sorted({re.sub(r"(seed|answer)(1?)\d", r"\1\2?", name) for name in runs})


@pytest.mark.parametrize("page", BY_SEED)
def test_scores_by_seed_in_the_notes_are_those_of_the_runs(page):
    text = (RESULTS / f"notes/{page}.md").read_text()
    assert len(text.encode()) <= 15 * 1024
    count, patterns = BY_SEED[page]
    found = kinds(*patterns)
    assert len(found) == count, found
    for pattern in found:
        runs = committed.matching(RESULTS / pattern)
        assert len(runs) > 2, pattern
        runs.sort(key=lambda run: int(re.search(r"(?:seed|answer)(\d+)", run.name)[1]))
        found = [committed.runs()[committed.name_of(run)]["evaluations"]["after"] for run in runs]
        for name in found[0]:
            if name in ("test", "test-replace", "test-replace-keep", "test-append", "1-2-hop", "3-hop"):
                printed = " ".join(claims.number(sets[name]["em"]) for sets in found)
                assert printed in text, (pattern, name, printed)


# Means over seeds that stand in a note's sentences alone: how many kinds of runs, and of which sets
BY_MEAN = {
    "at2po": (7, ["at2po/*", "hard/at2po/random-tree-grpo-2e-4-*", "hard/at2po/tables-*"], ["test"]),
    "bi_rar": (7, ["bi_rar/*"], ["test"]),
    "mygo_mujica": (14, ["mygo_mujica/*"], ["test", "other-relations"]),
    "omne_r1": (4, ["omne_r1/seed*-sft-w[01]", "omne_r1/seed*-sft-w0*1"], ["1-2-hop"])}


@pytest.mark.parametrize("page", BY_MEAN)
def test_means_in_the_notes_are_those_of_the_runs(page):
    text = (RESULTS / f"notes/{page}.md").read_text()
    count, patterns, sets = BY_MEAN[page]
    found = kinds(*patterns)
    assert len(found) == count, found
    for pattern in found:
        of_runs = [committed.runs()[committed.name_of(run)]["evaluations"]["after"]
                   for run in committed.matching(RESULTS / pattern)]
        for name in sets:
            mean = claims.number(sum(run[name]["em"] for run in of_runs) / len(of_runs))
            assert mean in text, (pattern, name, mean)


# Differences over seeds as the notes print them, per page: how many, runs, what they are set against
MINUS = {
    "at2po": (5, [("hard/at2po/frozen-*", "hard/at2po/frozen-at2po-seed1?")]),
    "bi_rar": (10, [("hard/bi_rar/seed*", "hard/bi_rar/seed?-baseline"),
                    ("hard/bi_rar/lists/lists-seed*", "hard/bi_rar/lists/lists-seed?-baseline")]),
    "mygo_mujica": (26, [(f"hard/mygo_mujica/{name}", f"hard/mygo_mujica/seed1?-text-{other}")
                         for other in ("star", "mygo")
                         for name in ("seed1?-text-[!sm]*", "fixed??-seed1?-*", "constant*", "thin*")])}


@pytest.mark.parametrize("page", MINUS)
def test_differences_over_seeds_in_the_notes_are_those_of_the_runs(page):
    """To a unit in the last place, where the older program rounded the other way."""
    printed = set()
    text = (RESULTS / f"notes/{page}.md").read_text()
    for numbers in re.findall(r"([+-]?[\d]*\.\d+) \[([+-]?[\d]*\.\d+),\s+([+-]?[\d]*\.\d+)\]", text):
        printed.add(tuple(map(float, numbers)))
    scores = ["em"] + ["along"] * (page == "at2po") + ["searches"] * (page == "bi_rar")
    count, patterns = MINUS[page]
    pairs = {(runs, minus) for pattern, minus in patterns for runs in kinds(pattern) if runs != minus}
    assert len(pairs) == count, pairs
    for runs, minus in sorted(pairs):
        for score in scores:
            if score == "searches" and "initial" in runs:
                continue  # printed without an interval
            row = {"claim": runs, "runs": runs, "minus": minus, "score": score}
            found = claims.measured(row)
            unit = .0101 if score == "searches" else .0011
            ours = found.mean, found.low, found.high
            assert any(all(abs(a - b) < unit for a, b in zip(ours, one, strict=True)) for one in printed), (
                runs, minus, score, claims.ours(found))


def test_what_results_keeps_is_small_and_whole():
    files = list((RESULTS / "runs").iterdir())
    assert len(files) <= 25 and sum(file.stat().st_size for file in files) <= 8e6
    assert len(committed.runs()) > 700
    for name, line in committed.runs().items():
        assert {"seed"} <= committed.config(name).keys() or name.startswith(("real/", "askit-real/")), name
        assert line["machine"] is not None and (RESULTS / f"runs/{line['table']}.parquet").exists()
    for table in {line["table"] for line in committed.runs().values()}:
        rows = committed.table(table)
        assert {"run", "set", "when", "id", "em", "f1"} <= set(rows.column_names)


def test_em_of_kept_answers_is_that_of_their_gold():
    found = committed.matching(RESULTS / "at2po/*")
    assert len(found) == 6
    for run in found:
        for when in ("", "before"):
            result = report.evaluations(run, when)["test"]
            for row in result["predictions"]:
                right = metrics.exact_match(row["answer"], row["gold"]) if row.get("answer") else 0
                assert row["em"] == right
            again = metrics.summarize(result["predictions"])
            assert result["summary"]["em_low"] == pytest.approx(again["em_low"], abs=1e-5)


def test_committed_runs_are_compared_by_name_beside_a_folder(tmp_path, capsys, drawn):
    mine = exported(tmp_path / "mine-seed0", [1, 0, 1, 1])
    comparison.main([str(mine), "results/at2po/atpo-*", "--out", str(tmp_path / "c.png")])
    said = " ".join(capsys.readouterr().out.split())
    assert "atpo-seed2" in said and "mine-seed0" in said and (tmp_path / "c.png").exists()
    with pytest.raises(SystemExit, match="holds no run .*results/ keeps none of that name"):
        comparison.main(["results/at2po/no-such-run"])


def test_the_ladder_finds_committed_runs_and_refuses_those_of_other_flags():
    folder = RESULTS / "hard/at2po/tables-at2po-seed0"
    assert ladder.is_done(folder) and not ladder.is_done(RESULTS / "hard/at2po/none")
    assert ladder.refuse_other_settings(folder, [folder], {"lr": 2e-4})
    with pytest.raises(ladder.RunError, match="was made with lr"):
        ladder.refuse_other_settings(folder, [folder], {"lr": .5})


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """results/ in an empty folder."""
    monkeypatch.setattr(committed, "RESULTS", tmp_path / "results")
    committed.forget()
    yield tmp_path / "results"
    committed.forget()


def test_packed_runs_have_the_numbers_of_their_folders(tmp_path, elsewhere):
    for seed, ems in enumerate(([1, 1, 0, 1], [1, 0, 0, 1], [1, 1, 1, 1])):
        exported(tmp_path / f"at2po/a-seed{seed}", ems)
    folders = sorted((tmp_path / "at2po").iterdir())
    pack.main(["hard/at2po", *map(str, folders[:2])])
    pack.main(["hard/at2po", *map(str, folders[1:])])  # one of them again
    files = sorted(file.name for file in (elsewhere / "runs").iterdir())
    assert files == ["hard-at2po.parquet", "runs.jsonl"]
    assert len(committed.runs()) == 3
    for folder in folders:
        kept = elsewhere / "hard/at2po" / folder.name
        assert report.config_of(kept) == {"lr": 1e-4}
        for now, then in zip(report.steps_of(kept), report.steps_of(folder), strict=True):
            assert now == {key: pack.rounded(value) for key, value in then.items() if key in now}
            assert {"step", "reward/mean"} <= now.keys()
        for when in ("", "before"):
            ours, theirs = (report.evaluations(one, when)["test"] for one in (kept, folder))
            assert ours["summary"] == pack.rounded(theirs["summary"])
            assert [row["em"] for row in ours["predictions"]] == [row["em"] for row in theirs["predictions"]]
            assert "nodes" not in ours["predictions"][0]


def test_runs_can_be_packed_without_texts_and_always_are_without_paths(tmp_path, elsewhere):
    run = exported(tmp_path / "at2po/a-seed0", [1, 0, 1, 1])
    config = {"model": "/home/me/smollm2", "data": "/x/a.jsonl,/x/y/b.json"}
    (run / "config.json").write_text(json.dumps(config))
    pack.main(["real", str(run), "--without-texts"])
    text = (elsewhere / "runs/runs.jsonl").read_text()
    assert "Who?" not in text and json.loads(text.splitlines()[-1])["run"] == "real/a-seed0"
    assert committed.config("real/a-seed0") == {"model": "smollm2", "data": "a.jsonl,b.json"}
    row = committed.evaluations("real/a-seed0", "after")["test"]["predictions"][0]
    assert not {"question", "gold", "answer"} & row.keys() and row["two_way"] in (0, 1)


# runs of results/demo whose EM, before or after training, README's table of the default commands has
SAID = {
    "before": ["at2po/atpo-seed*"],
    "after": ["at2po/atpo-seed*", "at2po/grpo-seed*", "askit/seed*-supervised", "askit/seed*-ppo",
              *(f"bi_rar/seed*-{name}" for name in ("initial", "forward", "merged-0.5", "baseline")),
              *(f"mygo_mujica/seed*-text-{name}" for name in ("warm-up", "mygo", "grpo")),
              "omne_r1/seed*-base", "omne_r1/seed*-stage1"]}


def test_readme_says_what_the_default_commands_reached():
    text = (ROOT / "README.md").read_text()
    row_of = dict(re.findall(r"^\| `(\w+)\.py` \|(.*)$", text, re.MULTILINE))
    for when, pattern in ((when, pattern) for when, patterns in SAID.items() for pattern in patterns):
        script = pattern.partition("/")[0]
        runs = [name for name in committed.runs() if fnmatch(name, f"demo/{pattern}")]
        sets = [committed.evaluations(name, when) for name in runs]
        name = "1-2-hop" if script == "omne_r1" else "test"
        found = [of_run[name]["summary"]["em"] for of_run in sets]
        mean = sum(found) / len(found)
        assert f"{mean:.2f}".removeprefix("0") in row_of[script], (pattern, when, mean)


def test_the_curve_of_the_real_model_has_the_numbers_of_its_note():
    note = (RESULTS / "notes/real.md").read_text()
    for run, greedy, sampled in real_curve.ARMS.values():
        assert f"real/{run}" in committed.runs()
        *_, greedy_end = greedy.values()
        *_, sampled_end = sampled.values()
        for pattern in (greedy_end, sampled_end):
            mean, error = real_curve.exact_match(pattern, "after")
            assert f"{mean:.3f}".removeprefix("0") in note and .02 < error < .05
