"""Reading a run folder: its evaluations, what its metrics are called, averages over sets."""

import itertools
import re
from pathlib import Path

from common import metric_table
from common.files import read_evaluation, read_json, read_jsonl
from common.metrics import summarize

LEFT = ("em", "f1", "searches", "tokens")  # what a summary is made of where a script names nothing else


def evaluations(folder, when=""):
    """{set: {"summary", "predictions"}} of a run folder's final evaluations,
    or of those `when` ("before", "step10"; "last": of --keep best, by the set that chooses).

    Of an exported run (results/) they are read from predictions.jsonl.gz, and summarised anew."""
    folder = Path(folder)
    found = {}
    for file in sorted(folder.glob("eval_*.json")):
        parts = re.fullmatch(r"eval_(.*?)(_(before|last|step\d+))?\.json", file.name)
        name, _, suffix = parts.groups()
        if (suffix or "") == when:
            found[name] = read_evaluation(file)
    for row in read_jsonl(folder / "predictions.jsonl.gz"):
        if row["when"] == (when or "after"):
            result = found.setdefault(row["set"], {"summary": None, "predictions": []})
            result["predictions"].append(row)
    for result in found.values():
        if not result["summary"]:
            rows = result["predictions"]
            keys = [k for k in LEFT if all(k in row for row in rows)]
            result["summary"] = summarize(rows, keys)
    return found


def with_evaluations(folder):
    """Rows of metrics.jsonl, with the mean EM of the evaluations before the first step and after the last."""
    rows = read_jsonl(Path(folder) / "metrics.jsonl")
    before = mean_em(evaluations(folder, "before"))
    after = mean_em(evaluations(folder))
    if before is not None:
        rows = [{"step": 0, "eval/em": before}, *rows]
    if after is not None and rows:
        rows[-1] = rows[-1] | {"eval/em": after}
    return rows


def mean_along(folder):
    """EM along a run: the mean over the tokens sampled so far, a straight line between evaluations, the one
    before the first step among them. None where there are fewer than two evaluations, or no tokens."""
    points = []
    tokens = 0
    for row in with_evaluations(folder):
        tokens += row.get("rollout/tokens", 0)
        if "eval/em" in row:
            points.append((tokens, row["eval/em"]))
    if len(points) < 2 or points[-1][0] == points[0][0]:
        return None
    area = 0.0
    for (begin, first), (end, last) in itertools.pairwise(points):
        area += (end - begin) * (first + last) / 2
    return area / (points[-1][0] - points[0][0])


def mean_em(found):
    """Mean EM of evaluations {set: {"summary", …}}, but for those whose answers a rule gave ("by_rule"); None
    without any."""
    ems = [r["summary"]["em"] for r in found.values() if not r["summary"].get("by_rule")]
    return sum(ems) / len(ems) if ems else None


def panels_of(*folders):
    """{panel: {key: label}} from the folders' metrics.json;
    a run without one has a panel for each kind of metric."""
    found = {}
    for folder in map(Path, folders):
        if (folder / "metrics.json").exists():
            panels = metric_table.panels(read_json(folder / "metrics.json", dict))
        else:
            panels = _by_prefix(read_jsonl(folder / "metrics.jsonl"))
        for name, keys in panels.items():
            found.setdefault(name, {}).update(keys)
    return found


def _by_prefix(rows):
    """
    >>> _by_prefix([{"step": 1, "reward/em": .5, "rollout/tokens": 9}])
    {'reward': {'reward/em': 'em'}, 'rollout': {'rollout/tokens': 'tokens'}}
    """
    panels = {}
    for key in dict.fromkeys(k for row in rows for k in row):
        if "/" in key and not key.startswith("guard/"):
            kind, name = key.split("/", 1)
            panels.setdefault(kind, {})[key] = name
    return panels


def pool(results, groups):
    """{label: {"summary", "predictions"}} of all questions of the sets in each group {label: set names}:
    an average weighted by questions. A group of which fewer than two sets are there has none."""
    pooled = {}
    for label, names in dict(groups).items():
        there = [n for n in names if n in results]
        if len(there) > 1:
            rows = [row for n in there for row in results[n]["predictions"]]
            pooled[label] = {"summary": summarize(rows), "predictions": rows}
    return pooled


# ---------------------------------------------------------------- as text

def interval(summary, key="em"):
    """
    >>> interval({"em": .5, "em_low": .25, "em_high": .75})
    '0.500 [0.250, 0.750]'
    """
    return f"{summary[key]:.3f} [{summary[key + '_low']:.3f}, {summary[key + '_high']:.3f}]"


def signed(gain, form="+.3f"):
    """
    >>> signed((.1, .05, .15))
    '+0.100 [+0.050, +0.150]'
    """
    mean, low, high = gain
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def summary_line(name, summary):
    """One line of an evaluation; "names": what its em and f1 are, where they are something else."""
    names = {"em": "EM", "f1": "F1"} | summary.get("names", {})
    line = f"eval {name} (n {summary['n']}): {names['em']} {interval(summary)}"
    if "em_valid" in summary:
        line += f" (in valid format {summary['em_valid']:.3f})"
    forms = {
        "f1": names["f1"] + " {:.3f}",
        "searches": "searches {:.2f}",
        "tokens": "tokens {:.0f}",
        "precision": "precision {:.3f}",
        "recall": "recall {:.3f}",
        "sentences": "sentences {:.2f}",
        "format": "format {:.2f}",
    }
    for key, form in forms.items():
        if key in summary:
            line += " | " + form.format(summary[key])
    return line + told_apart(summary)


def told_apart(summary):
    """Behind an evaluation's line: two-way questions beside the others, where there are such, and EM of the
    others where their answer stood in what was read."""
    line = ""
    if "two_way" in summary:
        two_way, others = summary["two_way"], summary.get("open")
        line += f" | two-way {two_way['em']:.3f} (n {two_way['n']})"
        if others:
            line += f", others {others['em']:.3f} (n {others['n']})"
        line += f", guessing {summary['guess']:.3f}" if "guess" in summary else ""
    if "reading" in summary:
        parts = summary["reading"]
        line += f" | answer read {parts['read']:.2f}"
        if "em_read" in parts:
            line += f", EM there {parts['em_read']:.3f}"
        if "copied" in parts:
            line += f", answers copied right {parts['copied']:.2f}"
    return line
