"""The runs that results/ keeps: runs/runs.jsonl has a line per run, runs/<table>.parquet what the runs of a
table predicted. A run is named by its folder, hard/at2po/frozen-gspo-seed10, and report.py reads it
wherever a run folder may stand, as results/hard/at2po/frozen-gspo-seed10. `python -m docs.pack` adds runs.

Lines of runs.jsonl:
- {"settings", "script", "defaults"}: the flags that most runs of one version of a script have;
- {"script", "metrics"}: what their metrics.json says;
- {"run", "table", "settings", "flags", "machine", "commit", "evaluations", "curves"}: a run. Its flags off
  its settings, summaries of its evaluations, and of each metric a list with an entry a step, or one number
  where it is the same at every step.
"""

from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from common.files import read_jsonl

RESULTS = Path(__file__).resolve().parents[2] / "results"
PLACE = ("run", "set", "when")  # columns that say where a prediction belongs


def name_of(folder):
    """The name of the committed run that a path stands for; None of a folder, and of anything else."""
    folder = Path(folder)
    if folder.is_dir() or not folder.absolute().is_relative_to(RESULTS):
        return None
    name = folder.absolute().relative_to(RESULTS).as_posix()
    return name if name in runs() else None


def matching(pattern):
    """Paths of the committed runs that a shell's pattern stands for."""
    pattern = str(Path(pattern).absolute())
    return [RESULTS / name for name in runs() if fnmatch(str(RESULTS / name), pattern)]


@cache
def runs():
    """{name: its line, with all its flags, its script and what its metrics are}"""
    found, settings, metrics = {}, {}, {}
    for line in read_jsonl(RESULTS / "runs/runs.jsonl"):
        if "run" in line:
            own = settings[line["settings"]]
            script = own["script"]
            flags = own["defaults"] | line["flags"]
            found[line["run"]] = line | {"flags": flags, "script": script, "metrics": metrics.get(script, {})}
        elif "defaults" in line:
            settings[line["settings"]] = line
        else:
            metrics[line["script"]] = line["metrics"]
    return found


def forget():
    runs.cache_clear()
    table.cache_clear()


def config(name):
    return dict(runs()[name]["flags"])


def steps(name):
    curves = runs()[name]["curves"]
    rows = [{} for _ in curves.get("step", ())]
    for key, values in curves.items():
        if not isinstance(values, list):
            values = [values] * len(rows)
        for row, value in zip(rows, values, strict=True):
            if value is not None:
                row[key] = value
    return rows


@cache
def table(name):
    import pyarrow.parquet
    return pyarrow.parquet.read_table(RESULTS / f"runs/{name}.parquet")


def evaluations(name, when):
    """{set: {"summary", "predictions"}} of a run, of that time: "before", "after"."""
    import pyarrow.compute as compute
    line = runs()[name]
    summaries = line["evaluations"].get(when, {})
    if not summaries:
        return {}
    found = {name: {"summary": summary, "predictions": []} for name, summary in summaries.items()}
    everything = table(line["table"])
    own = everything.filter(compute.equal(everything["run"], name))
    for row in own.to_pylist():
        if row["when"] == when:
            kept = {key: value for key, value in row.items() if key not in PLACE and value is not None}
            found[row["set"]]["predictions"].append(kept)
    return found
