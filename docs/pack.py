"""Adds run folders to the runs that results/ keeps (common/report/committed.py says how they lie there):

    python -m docs.pack hard/at2po runs/at2po/mine-seed*       as hard/at2po/mine-seed0 and so on
    python -m docs.pack real runs/at2po/mine --without-texts   of questions that are not yours to give away

A run that is there by its name is replaced. Trajectories, samples and weights are not kept."""

import argparse
import json
import re
from collections import Counter
from pathlib import Path

import pandas as pd

from common import report
from common.files import RunError, read_json, read_jsonl, say, write_atomic
from common.metrics import is_two_way
from common.process import ends_cleanly
from common.report import committed

KEPT = (
    "id", "question", "gold", "answer", "problem", "type", "hops", "two_way", "em", "em_valid", "f1",
    "searches", "tokens", "read", "copied", "rounds", "normalised", "repetitions", "pattern", "standard",
    "precision", "recall", "percentile", "sentences", "end", "first_wrong", "sub-questions", "repeats",
    "d_TA", "d_TQ")
TEXTS = ("question", "gold", "answer", "sub-questions")
NO_FLAGS = ("name", "out", "resume", "ask", "run_id", "inputs", "program", "threads", "machine", "date",
            "changed")
NO_CURVES = ("guard/", "time/elapsed", "time/left", "time/threads", "time/step", "time/old_logprobs", "mem/")


def line_of(run, table, config, steps, evaluations):
    """A run's line of runs.jsonl, with all its flags. evaluations: {"before" or "after": {set: {"summary",
    "predictions"}}}"""
    machine, _, commit = config.get("machine", "").partition("; commit ")
    summaries = {}
    for when, sets in evaluations.items():
        if sets:
            summaries[when] = {}
            for name, result in sets.items():
                summary = {key: value for key, value in result["summary"].items() if key not in NO_FLAGS}
                summaries[when][name] = rounded(summary)
    return {
        "run": run,
        "table": table,
        "flags": {key: without_folders(value) for key, value in config.items() if key not in NO_FLAGS},
        "machine": machine,
        "commit": commit,
        "evaluations": summaries,
        "curves": curves_of(steps),
    }


def without_folders(value):
    """Of absolute paths the last part alone.

    >>> without_folders("/home/me/dev.jsonl,hotpotqa-dev"), without_folders("Qwen/Qwen3-4B")
    ('dev.jsonl,hotpotqa-dev', 'Qwen/Qwen3-4B')
    """
    if not isinstance(value, str):
        return value
    return re.sub(r"(^|,)[/~][^,]*/", r"\1", value)


def curves_of(steps):
    """{key: a value a step} of rows of metrics.jsonl; one value where all are the same."""
    curves = {}
    keys = dict.fromkeys(key for row in steps for key in row)
    for key in keys:
        if key.startswith(NO_CURVES):
            continue
        values = [rounded(row.get(key)) for row in steps]
        if key != "step" and all(value == values[0] for value in values):
            values = values[0]
        curves[key] = values
    return curves


def rounded(value):
    """Numbers to five digits, inside lists and dictionaries, too.

    >>> rounded({"em": 1 / 3, "n": 123456})
    {'em': 0.33333, 'n': 123456}
    """
    if isinstance(value, float):
        short = float(f"{value:.5g}")
        return int(short) if short.is_integer() else short
    if isinstance(value, list):
        return [rounded(one) for one in value]
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return value


def rows_of(run, evaluations, texts=True):
    """What is kept of a run's predictions."""
    rows = []
    for when, sets in evaluations.items():
        for name, result in sets.items():
            for row in result["predictions"]:
                kept = {"run": run, "set": name, "when": when}
                for key in KEPT:
                    if key in row and (texts or key not in TEXTS):
                        kept[key] = row[key]
                kept["two_way"] = float(is_two_way(row))
                rows.append(kept)
    return rows


def with_settings(lines):
    """Lines of settings, and the lines of runs, whose flags become those off their settings. Runs of one
    script with the same names of flags share their settings."""
    groups = {}
    for line in lines:
        script = line.pop("script")
        groups.setdefault((script, tuple(sorted(line["flags"]))), []).append(line)
    settings = []
    for (script, keys), own in groups.items():
        name = f"{script}-{sum(one['script'] == script for one in settings)}"
        defaults = {}
        for key in keys:
            values = Counter(json.dumps(line["flags"][key]) for line in own)
            defaults[key] = json.loads(values.most_common(1)[0][0])
        settings.append({"settings": name, "script": script, "defaults": defaults})
        for line in own:
            line["settings"] = name
            flags = line["flags"]
            for key in keys:
                if flags[key] == defaults[key] and key != "seed":
                    del flags[key]
    return [*settings, *lines]


def write(lines, metrics, tables):
    """runs.jsonl, and <table>.parquet of {table: rows}. Rows of one question stand together, which makes a
    file small; those of a run keep their order."""
    folder = committed.RESULTS / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    out = [{"script": script, "metrics": own} for script, own in metrics.items()]
    out += with_settings(lines)
    texts = [json.dumps(line, ensure_ascii=False, separators=(",", ":")) for line in out]
    write_atomic(folder / "runs.jsonl", "\n".join(texts) + "\n")
    for table, rows in tables.items():
        frame = pd.DataFrame(rows)
        frame["place"] = frame.groupby("run").cumcount()
        frame = frame.sort_values(["place", "run"]).drop(columns="place")
        frame.to_parquet(folder / f"{table}.parquet", index=False, compression="zstd", compression_level=19)
    committed.forget()


def add(table, folders, texts):
    """Reads what is there, puts the run folders in, writes both."""
    lines = {name: line | {"flags": committed.config(name)} for name, line in committed.runs().items()}
    metrics = {line["script"]: line.pop("metrics") for line in lines.values()}
    file = table.replace("/", "-")
    old = committed.table(file).to_pylist() if (committed.RESULTS / f"runs/{file}.parquet").exists() else []
    new = []
    for folder in folders:
        name = f"{table}/{folder.name}"
        found = {"before": report.evaluations(folder, "before"), "after": report.evaluations(folder)}
        if not found["after"]:
            raise RunError(f"{folder} has no final evaluation")
        config = read_json(folder / "config.json", dict)
        line = line_of(name, file, config, read_jsonl(folder / "metrics.jsonl"), found)
        lines[name] = line | {"script": folder.parent.name}
        metrics[folder.parent.name] = read_json(folder / "metrics.json", dict)
        new += rows_of(name, found, texts)
    replaced = {row["run"] for row in new}
    write(list(lines.values()), metrics, {file: [row for row in old if row["run"] not in replaced] + new})
    say(f"{len(folders)} runs: {committed.RESULTS / 'runs'}")


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m docs.pack", description=__doc__.splitlines()[0])
    parser.add_argument("table", help="such as hard/at2po")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-hard-seed0")
    parser.add_argument("--without-texts", action="store_true", help="no questions and answers")
    args = parser.parse_args(argv)
    with ends_cleanly((RunError,)):
        add(args.table, args.runs, not args.without_texts)


if __name__ == "__main__":
    main()
