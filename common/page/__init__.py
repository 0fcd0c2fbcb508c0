"""trajectories.html of a run folder: one self-contained file that runs no text of a model."""

import base64
import hashlib
import html
import json
import math
import re
from pathlib import Path

from common.files import read_jsonl, write_atomic
from common.report import evaluations, interval

HERE = Path(__file__).parent


def write_page(folder):
    """The page: sampled groups of training, 400 final predictions of a set, and the folder's curves.png.
    Returns its path."""
    folder = Path(folder)
    rows = read_jsonl(folder / "metrics.jsonl")
    groups = _training_groups(folder)
    summaries = []
    for name, result in evaluations(folder).items():
        shown = result["predictions"][:400]
        groups += [g | {"where": name} for g in shown if "nodes" in g]
        s = result["summary"]
        summaries.append(f"{name} EM {interval(s)} n {s['n']}")
    if rows:
        summaries.append(f"{len(rows)} steps")
    title = f"{folder.parent.name} / {folder.name}"
    content = {
        "title": title,
        "summary": " · ".join(summaries),
        "config": json.loads((folder / "config.json").read_text()),
        "groups": [_for_the_page(g) for g in groups],
        "curves": _curves(folder),
    }
    script = (HERE / "trajectories.js").read_text(encoding="utf-8")
    digest = hashlib.sha256(script.encode()).digest()
    packed = json.dumps(finite(content), ensure_ascii=False, allow_nan=False)
    fill = {
        "TITLE": html.escape(title),
        "DATA": packed.replace("<", "\\u003c"),
        "SCRIPT": script,
        "SCRIPT_HASH": "sha256-" + base64.b64encode(digest).decode(),
    }
    template = (HERE / "trajectories.html").read_text(encoding="utf-8")
    page = re.sub("@(TITLE|DATA|SCRIPT|SCRIPT_HASH)@", lambda m: fill[m[1]], template)
    write_atomic(folder / "trajectories.html", page)
    return folder / "trajectories.html"


def _training_groups(folder):
    """At most 60 of samples.jsonl, evenly spaced, the newest first."""
    samples = read_jsonl(folder / "samples.jsonl")
    groups = [g for g in samples if g.get("nodes") and g.get("trajectories")]
    keep = {round(i * (len(groups) - 1) / 59) for i in range(60)}
    kept = [g | {"where": "training"} for i, g in enumerate(groups) if i in keep]
    return kept[::-1]


def _for_the_page(group):
    """Without token ids, and with log-probs as short as anyone reads them."""
    nodes = []
    for node in group["nodes"]:
        node = {k: v for k, v in node.items() if k not in ("ids", "observation_ids")}
        if "logprobs" in node:
            node["logprobs"] = [round(x, 3) for x in node["logprobs"]]
        nodes.append(node)
    rest = {k: v for k, v in group.items() if k != "prompt_ids"}
    return rest | {"id": group["question_id"], "nodes": nodes}


def _curves(folder):
    """The run's curves.png as the page carries it, where there is one."""
    image = folder / "curves.png"
    if not image.exists():
        return ""
    return "data:image/png;base64," + base64.b64encode(image.read_bytes()).decode()


def finite(value):
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
