"""trajectories.html of a run folder, or of several: one self-contained file that runs no text of a model.

The page knows no paper. Its data is JSON, packed so that a default run stays under 700 KB; trajectories.js
says what an item and its sides are, record.py what a node and a trajectory are."""

import base64
import gzip
import hashlib
import html
import json
import re
from pathlib import Path

import numpy as np

from common.files import read_jsonl, say, write_atomic
from common.metrics import interval
from common.page.record import OF_TOKENS
from common.report import asked, config_of, curves, evaluations, steps_of, with_evaluations

HERE = Path(__file__).parent
GROUPS = 60  # of samples.jsonl that a page holds
QUESTIONS = 400  # of an evaluation
SCRIPTS = ("trajectories.js", "question.js", "tree.js", "curves.js")
WORDS = ("Questions are asked in words that no passage has (mum for mother): nothing but a name can be "
         "copied. Headlines say them plainly.")
OF_INTERVALS = ("eval/em_low", "eval/em_high")
# of config.json: no settings
OF_THE_PROCESS = ("run_id", "inputs", "program", "threads", "machine", "date", "changed")


def draw(folder, title):
    """trajectories.html of a run folder, and curves.png."""
    if read_jsonl(folder / "metrics.jsonl"):
        rows = {folder.name: [with_evaluations(folder)]}
        curves.draw_curves(rows, folder / "curves.png", title, curves.panels_of(folder))
    say(f"page: {write_page(folder)}")


def write_page(folder, how_far=""):
    """The page of one run: sampled groups of training, the questions of its evaluations before and after
    training beside each other, its curves. Returns its path.

    how_far: of a run that goes on. Its page reads itself anew from time to time, and shows the latest
    evaluation between steps."""
    folder = Path(folder)
    rows = steps_of(folder)
    sides = {"before training": evaluations(folder, "before"), "after training": evaluations(folder)}
    evaluated = [row["step"] for row in rows if "eval/em" in row]
    if evaluated and not sides["after training"]:
        sides[f"after step {evaluated[-1]}"] = evaluations(folder, f"step{evaluated[-1]}")
    samples = read_jsonl(folder / "samples.jsonl")
    groups = [{"": g} for g in samples if g.get("nodes") and g.get("trajectories")]
    sets = [("training", groups, GROUPS)]
    latest = {name: when for when, found in sides.items() for name in found}
    summaries = []
    for name, when in latest.items():
        s = sides[when][name]["summary"]
        if "em" in s:
            start = sides["before training"].get(name, {}).get("summary", {})
            since = ""
            if when != "before training" and start.get("n") == s.get("n"):
                since = f"{start['em']:.3f} → "
            summaries.append(f"{name} EM {since}{interval(s)} n {s.get('n', 0)}, {when}")
        of_set = {when: found[name]["predictions"] for when, found in sides.items() if name in found}
        sets.append((name, paired(of_set), QUESTIONS))
    title = f"{folder.parent.name} / {folder.name}"
    configs = {folder.name: config_of(folder)}
    return fill(folder / "trajectories.html", title, sets, configs, {
        "summary": " · ".join(summaries),
        "curves": curves_of({folder.name: folder}),
        "how_far": how_far,
    })


def write_comparison(path, runs, table):
    """The page of {name: run folder}: the questions that all were evaluated on, side by side; table: of their
    differences, {"header", "rows"}."""
    results = {name: evaluations(folder) for name, folder in runs.items()}
    sets = []
    for set_name in set.intersection(*map(set, results.values())):
        sides = {name: found[set_name]["predictions"] for name, found in results.items()}
        sets.append((set_name, paired(sides), QUESTIONS))
    count = sum(len(questions) for _, questions, _ in sets)
    words = f"{count} questions"
    if not count:
        words = "These runs keep no trajectories of questions that all were asked."
    configs = {name: config_of(folder) for name, folder in runs.items()}
    return fill(path, " and ".join(runs), sets, configs, {
        "summary": words,
        "curves": curves_of(runs),
        "table": table and without_empty_columns(table),
    })


# ---------------------------------------------------------------- items

def paired(sides):
    """[{side: its prediction}] of the questions that {side: predictions} have in common, by id, words and
    gold answers."""
    by_id = {}
    for name, predictions in sides.items():
        shown = [row for row in predictions if row.get("nodes")]
        by_id[name] = {(row.get("id"), asked(row)): row for row in shown}
    first = next(iter(by_id.values()))
    shared = [id for id in first if all(id in rows for rows in by_id.values())]
    return [{name: rows[id] for name, rows in by_id.items()} for id in shared]


def items_of(sets):
    """(items of [(set, [{side: group}], how many at most)], what is left out, in words); evenly spaced."""
    items, left_out = [], []
    for where, found, most in sets:
        n = len(found)
        places = np.linspace(0, n - 1, min(most, n)).round()
        items += [item(where, found[int(i)]) for i in places]
        if most < n:
            left_out.append(f"{most} of the {n} questions of {where} are here.")
    return items, " ".join(left_out)


def item(where, sides):
    """A question and {side's name: its group} of it."""
    shown = []
    for name, group in sides.items():
        nodes = [{key: node[key] for key in node if key not in OF_TOKENS} for node in group["nodes"]]
        shown.append({
            "name": name,
            "nodes": nodes,
            "trajectories": group.get("trajectories", []),
            "beside": group.get("beside"),
            "prompt": group.get("prompt"),
        })
    names = ("question_id", "question", "type", "hops", "gold", "evidence", "step")
    return {key: group.get(key) for key in names} | {"where": where, "sides": shown}


# ---------------------------------------------------------------- settings, curves, the file

def settings(configs):
    """Rows of {run: config.json}; of one run those come first that are not the paper's, of several those that
    differ."""
    keys = dict.fromkeys(key for config in configs.values() for key in config if key not in OF_THE_PROCESS)
    first, rest = [], []
    for key in keys:
        values = [config.get(key) for config in configs.values()]
        differ = any(value != values[0] for value in values)
        if len(configs) == 1:
            differ = key in next(iter(configs.values())).get("changed", [])
        (first if differ else rest).append([key, *values])
    about = "not the paper's default" if len(configs) == 1 else "different"
    return {"runs": list(configs), "about": about, "first": first, "rest": rest}


def without_empty_columns(table):
    columns = zip(table["header"], *table["rows"], strict=True)
    filled = [column for column in columns if any(column[1:])]
    header, *rows = zip(*filled, strict=True)
    return {"header": header, "rows": rows}


def curves_of(runs):
    """{"panels": {title: {key: label}}, "runs": {name: its rows}} of {name: run folder}."""
    rows = {name: with_evaluations(folder) for name, folder in runs.items()}
    panels = curves.panels_of(*runs.values())
    panels = curves.with_data(panels, {name: [own] for name, own in rows.items()})
    drawn = {"step", *OF_INTERVALS}.union(*panels.values())
    for name, own in rows.items():
        rows[name] = [{key: row[key] for key in drawn & row.keys()} for row in own]
    return {"panels": panels, "runs": rows}


def fill(path, title, sets, configs, content):
    """Writes the page and returns its path. sets: see items_of; configs: see settings."""
    items, left_out = items_of(sets)
    content |= {
        "title": title,
        "items": items,
        "left_out": left_out,
        "settings": settings(configs),
    }
    levels = [config.get("world", "") for config in configs.values() if config.get("data") == "world"]
    if len(levels) == len(configs) and all(level.startswith("hard") for level in levels):
        from common.world import hard
        content["words"] = WORDS
        for item in items:
            item["plainly"] = hard.plainly(item["question"])
    content = json.dumps(content, ensure_ascii=False)
    packed = gzip.compress(content.encode("utf-8", "replace"), mtime=0)
    script = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
    digest = hashlib.sha256(script.encode()).digest()
    parts = {
        "TITLE": html.escape(title),
        "DATA": base64.b64encode(packed).decode(),
        "SCRIPT": script,
        "SCRIPT_HASH": "sha256-" + base64.b64encode(digest).decode(),
    }
    template = (HERE / "trajectories.html").read_text(encoding="utf-8")
    page = re.sub("@(TITLE|DATA|SCRIPT|SCRIPT_HASH)@", lambda m: parts[m[1]], template)
    write_atomic(path, page)
    return path
