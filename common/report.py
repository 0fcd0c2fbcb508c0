"""What a run leaves behind: its folder, the line a step prints, curves, the table of results.

    runs/<script>/<name>/  config.json  metrics.jsonl  samples.jsonl  eval_<set>.json  curves.png  trajectories.html  checkpoint/
    python -m common.report RUN                    writes its page and curves anew
    python -m common.report RUN RUN …              curves over one another, and a table with paired differences
    python -m common.report RUN --explain ID       one question's trajectories on the terminal

Everything is JSON or PNG and can be read without this code. metrics.jsonl has one object a step with keys under
reward/ rollout/ train/ eval/ time/ mem/ (the README explains each).
"""

import base64
import fcntl
import hashlib
import html
import importlib.util
import io
import json
import math
import os
import re
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.curves import draw_curves

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:  # logs are not cut at 80 columns
    console.width = 160


def warn(message):
    console.print(message, style="yellow", markup=False)


def plain(text):
    """Text of a model or a passage for the terminal: one line, no control characters, no markup."""
    return escape(re.sub(r"[\x00-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", " ".join(str(text).split())))


class RunError(RuntimeError):
    """The run folder cannot be used as asked; the message says which flag to change."""


def write_atomic(path, text):
    """The file is the old one or the new one, never a part; a full disk leaves the old one."""
    path, temporary = Path(path), ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}. What was written before is untouched") from error


class RunFolder:
    """runs/<script>/<name>. A new run never overwrites one that exists; a resumed one must be configured as it was.

    The constructor checks and writes nothing; `create` writes config.json once everything else has loaded, and keeps other processes out
    until this one ends."""

    def __init__(self, root, script, name, config, resume=False, free_to_change=()):
        self.path, self.config, self.resume, self.trackers = Path(root) / script / name, config, resume, []
        file = self.path / "config.json"
        if not resume and self.path.exists() and any(f.name != ".lock" for f in self.path.iterdir()):
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        if resume:
            if not file.exists():
                raise RunError(f"--resume: {self.path} holds no run (no config.json)")
            try:
                saved = dict(json.loads(file.read_text()))
            except ValueError as error:
                raise RunError(f"--resume: {file} is damaged ({error}); start anew with another --name") from error
            for key, value in config.items():
                if key not in free_to_change and saved.get(key) != json.loads(json.dumps(value)):
                    raise RunError(f"--resume: this run was started with {key} = {saved.get(key)!r}, not {value!r}; leave --{key.replace('_', '-')} as it was")

    def create(self):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise RunError(f"cannot create {self.path}: {error.strerror}") from error
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise RunError(f"another process is writing to {self.path}: wait for it, or choose another --name") from error
        except OSError:
            warn(f"{self.path}: this file system has no locks; see that no other process writes there")
        if not self.resume and (self.path / "config.json").exists():  # begun and ended while this one was loading
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        write_atomic(self.path / "config.json", json.dumps(self.config, indent=1))

    def rewind(self, step, more=()):
        """Drops the lines of steps after `step`, which a killed run may have written past its last checkpoint. more: other such files."""
        for name in ("metrics.jsonl", "samples.jsonl", *more):  # (a line that cannot be read is an error: nothing is dropped)
            rows = [r for r in read_jsonl(self.path / name) if r["step"] <= step]
            write_atomic(self.path / name, "".join(json.dumps(r) + "\n" for r in rows))

    def append(self, name, rows):
        """Adds rows to metrics.jsonl or samples.jsonl, flushed to disk."""
        try:
            with open(self.path / name, "a", encoding="utf-8", errors="replace") as f:
                f.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
                f.flush()
                os.fsync(f.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from error

    def write(self, name, value):
        write_atomic(self.path / name, json.dumps(value, indent=1, ensure_ascii=False))

    def log(self, row):
        """A line of metrics.jsonl, and the same to the trackers of --log."""
        self.append("metrics.jsonl", [row])
        for tracker in self.trackers:
            tracker({k: v for k, v in row.items() if k != "step"}, row["step"])


def check_trackers(names):
    """Refuses what --log cannot be, before a run begins."""
    for name in filter(None, names.split(",")):
        if name not in ("tensorboard", "wandb"):
            raise RunError(f"--log {name}: tensorboard, wandb, or both with a comma")
        if not importlib.util.find_spec(name):
            raise RunError(f"--log {name}: not installed here; pip install {name}")


def open_trackers(names, run):
    """[function of (numbers, step)] for --log tensorboard,wandb. Weights & Biases writes offline unless WANDB_MODE says otherwise: no account needed."""
    check_trackers(names)
    trackers = []
    if "tensorboard" in names.split(","):
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(run.path / "tensorboard")
        trackers.append(lambda row, step: ([writer.add_scalar(k, v, step) for k, v in row.items()], writer.flush()))
    if "wandb" in names.split(","):
        import wandb
        session = wandb.init(project=run.path.parent.name, name=run.path.name, dir=str(run.path), config=run.config,
                             mode=os.environ.get("WANDB_MODE", "offline"), reinit=True)
        trackers.append(lambda row, step: session.log(row, step=step))
    return trackers


def read_jsonl(path):
    """Rows of a JSON-lines file; a last line cut off by a kill is left out. No file: no rows."""
    lines = Path(path).read_text(encoding="utf-8").split("\n") if Path(path).exists() else []  # (splitlines would also cut at U+2028)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RunError(f"{path}: line {number} is not valid JSON ({error.msg}); nothing was changed") from error
    return rows


def step_line(step, total, m):
    """One line a step. Means over the whole step."""
    parts = [f"step {step}/{total}", f"reward {m['reward/mean']:.3f}", f"em {m['reward/em']:.3f}", f"format {m['reward/format']:.2f}",
             f"len {m['rollout/response_tokens']:.0f}", f"turns {m['rollout/turns']:.1f}", f"ent {m['rollout/entropy']:.3f}"]
    if "train/kl" in m:
        parts += [f"kl {m['train/kl']:.4f}", f"clip {m['train/clip_fraction']:.2f}", f"gnorm {m.get('train/grad_norm', float('nan')):.2f}"]
    parts.append(f"roll {m['time/rollout']:.1f}s train {m['time/train']:.1f}s")
    return " | ".join(parts + ([f"{m['mem/gpu_gb']:.1f} GB"] if "mem/gpu_gb" in m else []))


# ---------------------------------------------------------------- trajectories: one form for every script
#
# A group is a question with the trajectories sampled for it, as plain JSON; the page, `explain` and the terminal know no paper:
#   question_id question type hops gold evidence step    evidence: gold sentences, marked where they are observed
#   nodes         [{id, parents [ids], text, observation, entropy, …}]     what else a script adds is shown as it is
#   trajectories  [{path [node ids], reward, answer, problem, correct, why [lines]}]

def pieces(tokenizer, ids, text):
    """The text cut where its tokens begin; joined they are the text. Special tokens that decoding leaves out become empty."""
    starts, at = [], 0
    for token in ids:
        piece = tokenizer.decode([token]).strip()
        found = text.find(piece, at) if piece else -1
        starts.append(found if 0 <= found <= at + 8 else at)
        at = starts[-1] + (len(piece) if starts[-1] == found else 0)
    return [text[0 if i == 0 else start:starts[i + 1] if i + 1 < len(starts) else None] for i, start in enumerate(starts)]


def turn_node(number, parents, turn, tokenizer=None, **extra):
    """A rollout.Turn as a node; with a tokenizer also the ids that were trained on, their log-probs and their pieces of text."""
    node = {"id": number, "parents": parents, "text": turn.text, "observation": turn.observation, "stopped by": turn.stop_reason,
            "tokens": len(turn.ids), "entropy": round(turn.entropy, 4), **extra}
    if tokenizer is not None:
        node |= {"ids": turn.ids, "observation_ids": turn.observation_ids, "logprobs": turn.logprobs, "pieces": pieces(tokenizer, turn.ids, turn.text)}
    return node


def group(question, nodes, trajectories, **extra):
    """The record of a data.Question, its nodes and trajectories."""
    return {"question_id": question.id, "question": question.question, "type": question.type, "hops": question.hops, "gold": question.answers,
            "evidence": gold_sentences(question), "nodes": nodes, "trajectories": trajectories, **extra}


def gold_sentences(question):
    """The sentences that the question's supporting facts name, where the question carries its contexts."""
    context = {title: sentences for title, sentences in question.context}
    return [context[t][i].strip() for t, i in question.supporting_facts if t in context and isinstance(i, int) and 0 <= i < len(context[t])]


def explain(record, index):
    """One trajectory on the terminal: turns, what the script knows of each, and why the reward is what it is."""
    t, by_id = record["trajectories"][index], {n["id"]: n for n in record["nodes"]}
    console.print(f"[bold]{plain(record['question'])}[/bold]  gold: {plain(' | '.join(record['gold']))}")
    for k in t["path"]:
        node = by_id[k]
        if not node.get("text"):
            continue
        hidden = ("id", "parents", "text", "observation", "ids", "observation_ids", "logprobs", "pieces", "label")
        facts = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in node.items() if key not in hidden)
        console.print(f"  [cyan]{plain(facts)}[/cyan]")
        console.print(f"    {plain(node['text'])}")
        if node.get("observation"):
            console.print(f"    [dim]{plain(node['observation'][:400])}[/dim]")
    for line in [f"reward {t['reward']:g}, answer: {t['answer']}", *t.get("why", ())]:
        console.print(f"  {plain(line)}")


def table(title, header, rows):
    """A plain table; the same cells as Markdown go into the README."""
    from rich.table import Table
    t = Table(title=plain(title), title_justify="left")
    for i, h in enumerate(header):
        t.add_column(plain(h), justify="left" if i == 0 else "right")
    for row in rows:
        t.add_row(*map(plain, row))
    console.print(t)


def show_results(run, before, after, paired_difference):
    """results.json and the table of a run: {set: {"summary", "predictions"}} before and after, paired on the same questions."""
    rows, cell = [], lambda s, k: f"{s[k]:.3f} [{s[k + '_low']:.3f}, {s[k + '_high']:.3f}]"  # noqa: E731
    for name, b in before.items():
        old, new = b["summary"], after[name]["summary"]
        gain = paired_difference([r["em"] for r in b["predictions"]], [r["em"] for r in after[name]["predictions"]])
        rows.append([name, new["n"], cell(old, "em"), cell(new, "em"), f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}]", f"{new['f1']:.3f}",
                     f"{old['searches']:.2f} → {new['searches']:.2f}", f"{old['tokens']:.0f} → {new['tokens']:.0f}"])
        for by in ("hops", "type"):
            console.print(f"{name} by {by}: " + ", ".join(
                f"{v or '-'} {old['by_' + by][v]['em']:.2f} → {g['em']:.2f} (n {g['n']})" for v, g in new["by_" + by].items()), markup=False)
    header = ["set", "n", "EM before", "EM after", "difference (paired)", "F1", "searches", "tokens"]
    table(f"{run.path}: EM before and after, 95 % intervals", header, rows)
    run.write("results.json", {"header": header, "rows": rows})


def with_evaluations(run, before, after):
    """Rows of metrics.jsonl with the mean EM before the first step and after the last one."""
    rows = read_jsonl(run.path / "metrics.jsonl")
    mean = lambda results: sum(r["summary"]["em"] for r in results.values()) / len(results)  # noqa: E731
    rows = [{"step": 0, "eval/em": mean(before)}] + rows
    return rows[:-1] + [rows[-1] | {"eval/em": mean(after)}]


# ---------------------------------------------------------------- the page

def write_page(folder, most_groups=60, most_predictions=400):
    """trajectories.html of a run folder: one self-contained file. Sampled groups of training, evenly spaced, and final predictions."""
    folder = Path(folder)
    config, rows = json.loads((folder / "config.json").read_text()), read_jsonl(folder / "metrics.jsonl")
    groups = [g for g in read_jsonl(folder / "samples.jsonl") if g.get("nodes") and g.get("trajectories")]
    keep = {round(i * (len(groups) - 1) / max(1, most_groups - 1)) for i in range(most_groups)}
    groups = [g | {"where": "training"} for i, g in enumerate(groups) if i in keep][::-1]
    summaries = []
    for name, result in evaluations(folder).items():
        s = result["summary"]
        summaries.append(f"{name} EM {s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}] n {s['n']}")
        groups += [g | {"where": name} for g in result["predictions"][:most_predictions] if "nodes" in g]
    private = ("ids", "observation_ids")
    tidy = lambda v: [round(x, 3) for x in v] if isinstance(v, list) and v and isinstance(v[0], float) else v  # noqa: E731
    groups = [{k: v for k, v in g.items() if k != "prompt_ids"} | {
        "id": g["question_id"], "nodes": [{k: tidy(v) for k, v in n.items() if k not in private} for n in g["nodes"]]} for g in groups]
    image = io.BytesIO()
    if rows:
        draw_curves({folder.name: rows}, image, "", ink="#858b96")
    title = f"{folder.parent.name} / {folder.name}"
    data = {"title": title, "summary": " · ".join(summaries + ([f"{len(rows)} steps"] if rows else [])), "config": config, "groups": groups,
            "curves": "data:image/png;base64," + base64.b64encode(image.getvalue()).decode() if rows else ""}
    script = (Path(__file__).parent / "trajectories.js").read_text(encoding="utf-8")
    fill = {"TITLE": html.escape(title), "DATA": json.dumps(finite(data), ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"), "SCRIPT": script,
            "SCRIPT_HASH": "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}
    template = (Path(__file__).parent / "trajectories.html").read_text(encoding="utf-8")
    write_atomic(folder / "trajectories.html", re.sub("@(TITLE|DATA|SCRIPT|SCRIPT_HASH)@", lambda m: fill[m[1]], template))
    return folder / "trajectories.html"


def finite(value):
    """The value with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluations(folder):
    """{set: {"summary", "predictions"}} of the final evaluations in a run folder (those before training and of steps left out)."""
    found = {f.stem.removeprefix("eval_"): f for f in sorted(Path(folder).glob("eval_*.json")) if not re.search(r"_(before|step\d+)$", f.stem)}
    return {name: json.loads(f.read_text(encoding="utf-8")) for name, f in found.items()}


# ---------------------------------------------------------------- several runs

def compare(folders, paired_difference, out="comparison.png"):
    """Curves of several runs over one another, and a table of their final scores, differences paired by question with the first run."""
    names = [f.name if len({g.name for g in folders}) == len(folders) else str(f) for f in folders]
    curves = {n: read_jsonl(f / "metrics.jsonl") for n, f in zip(names, folders, strict=True)}
    if any(curves.values()):
        draw_curves(curves, out, " · ".join(names))
        console.print(f"curves: {out}", markup=False)
    results, rows = [evaluations(f) for f in folders], []
    for name in dict.fromkeys(n for r in results for n in r):
        first = {p["id"]: p["em"] for p in results[0].get(name, {"predictions": []})["predictions"]}
        for run, result in zip(names, results, strict=True):
            if name not in result:
                continue
            s, difference = result[name]["summary"], ""
            pairs = [(first[p["id"]], p["em"]) for p in result[name]["predictions"] if p["id"] in first]
            if result is not results[0] and pairs:
                gain = paired_difference(*map(list, zip(*pairs, strict=True)))
                difference = f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}] (n {len(pairs)})"
            rows.append([name, run, s["n"], f"{s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}]", difference, f"{s['f1']:.3f}", f"{s['searches']:.2f}",
                         f"{s['tokens']:.0f}", sum(r.get("rollout/tokens", 0) for r in curves[run]) or ""])
    if not rows:
        return warn("no final evaluation (eval_<set>.json) in these folders: nothing to compare but curves")
    table("final evaluations", ["set", "run", "n", "EM", "EM minus the first run's (paired)", "F1", "searches", "tokens", "sampled in training"], rows)


def main(argv=None):
    """Command line: pages, comparisons, explanations."""
    import argparse
    import sys

    from common.metrics import paired_difference
    parser = argparse.ArgumentParser(prog="python -m common.report", description="Pages, comparisons and explanations of run folders.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-seed0")
    parser.add_argument("--explain", metavar="ID", help="explain the trajectories of this question; ID/N for one of them")
    parser.add_argument("--out", default="comparison.png", help="where the curves of several runs go: .png, .pdf or .svg")
    args = parser.parse_args(argv)
    if Path(args.out).suffix not in (".png", ".pdf", ".svg"):
        sys.exit(f"error: --out {args.out}: a name that ends in .png, .pdf or .svg")
    for run in args.runs:
        if not (run / "config.json").exists():
            sys.exit(f"error: {run} holds no run (no config.json)")
    if args.explain is not None:
        wanted, _, index = args.explain.rpartition("/") if re.search(r"/\d+$", args.explain) else (args.explain, "", "")
        everything = [g for run in args.runs for g in read_jsonl(run / "samples.jsonl") + [p for e in evaluations(run).values() for p in e["predictions"]]]
        found = [g for g in everything if g.get("question_id") == wanted and "nodes" in g]
        if not found or index and int(index) >= len(found[-1]["trajectories"]):
            known = ", ".join(dict.fromkeys(g["question_id"] for g in everything if "nodes" in g))
            sys.exit(f"error: no such trajectory {args.explain} in {args.runs[0]}; there are {known[:600] or 'none'}")
        for i in [int(index)] if index else range(len(found[-1]["trajectories"])):
            explain(found[-1], i)
    elif len(args.runs) > 1:
        compare(args.runs, paired_difference, args.out)
    else:
        console.print(f"page: {write_page(args.runs[0])}", markup=False)
        rows = read_jsonl(args.runs[0] / "metrics.jsonl")
        if rows:
            draw_curves({args.runs[0].name: rows}, args.runs[0] / "curves.png", args.runs[0].name)


if __name__ == "__main__":
    try:
        main()
    except (RunError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"error: not a run folder of this version, or damaged ({type(error).__name__}: {error})") from error
