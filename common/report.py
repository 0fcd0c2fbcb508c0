"""What a run leaves behind: its folder, the line a step prints, curves, the table of results.

    runs/<script>/<name>/  config.json  metrics.jsonl  samples.jsonl  eval_<set>.json  curves.png  trajectories.html  checkpoint/
    python -m common.report RUN                    writes its page and curves anew
    python -m common.report RUN RUN …              curves over one another, and a table with paired differences
    python -m common.report RUN --explain ID       one question's trajectories on the terminal
    python -m common.report RUN --export FOLDER    its configuration, metrics and predictions, as results/ keeps them

Everything is JSON or PNG and can be read without this code. metrics.jsonl has one object a step with keys under
reward/ rollout/ train/ eval/ time/ mem/ (the README explains each).
"""

import base64
import fcntl
import gzip
import hashlib
import html
import importlib.util
import io
import json
import math
import os
import re
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common.curves import draw_curves
from common.metrics import paired_difference, seed_interval, summarize

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

    The constructor checks and writes nothing; `create` writes config.json once everything else has loaded, and keeps other
    processes out until this one ends. `id` names the run in its checkpoints, `saved` is the configuration it was begun with."""

    def __init__(self, root, script, name, config, resume=False, free_to_change=()):
        if name != Path(name).name or name.startswith(".") or "\\" in name:
            raise RunError(f"--name {name}: the name of a folder in {root}/{script}, without slashes or a dot before it")
        self.path, self.config, self.resume, self.trackers = Path(root) / script / name, config, resume, []
        file = self.path / "config.json"
        if not resume and begun(self.path):
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        if resume and not file.exists():
            raise RunError(f"--resume: {self.path} holds no run (no config.json)")
        self.saved = read_json(file, dict) if resume else {}
        self.id = self.saved.get("run_id") or os.urandom(8).hex()
        older = [key for key in config if key not in self.saved and key not in free_to_change] if resume else []
        if older:
            raise RunError(f"--resume: {self.path} is a run of an older version of this script (no {older[0]} in its config.json)")
        for key, value in config.items() if resume else ():
            if key not in free_to_change and self.saved.get(key) != json.loads(json.dumps(value)):
                flag = "--" + key.replace("_", "-")
                raise RunError(f"--resume: this run was started with {key} = {self.saved.get(key)!r}, not {value!r}; leave {flag} as it was")

    def create(self, **facts):
        """Makes the folder. facts: what else config.json keeps of the process that began the run."""
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
        write_atomic(self.path / "config.json", json.dumps(self.config | {"run_id": self.id} | facts, indent=1))

    def rewind(self, step, more=()):
        """Drops the lines of steps after `step`, which a killed run may have written past its last checkpoint. more: other such files."""
        for name in ("metrics.jsonl", "samples.jsonl", *more):  # (a line that cannot be read is an error: nothing is dropped)
            rows = read_jsonl(self.path / name)
            odd = next((i for i, r in enumerate(rows, 1) if not isinstance(r, dict) or not isinstance(r.get("step"), int)), None)
            if odd:
                raise RunError(f"{self.path / name}: line {odd} has no step; nothing was changed")
            rows = [r for r in rows if r["step"] <= step]
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


def read_json(path, kind):
    """The value of a JSON file that must be a `kind` (dict or list); RunError names the file where it is missing or damaged."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(f"{path} is missing: restore it, or start anew with another --name") from error
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}): restore it, or start anew with another --name") from error
    if not isinstance(value, kind):
        raise RunError(f"{path} is damaged (no {'object' if kind is dict else 'list'}): restore it, or start anew with another --name")
    return value


def read_evaluation(path):
    """{"summary", "predictions"} of an eval_<set>.json."""
    value = read_json(path, dict)
    if not isinstance(value.get("summary"), dict) or not isinstance(value.get("predictions"), list):
        raise RunError(f"{path} is damaged (no summary and predictions): restore it, or start anew with another --name")
    return value


def read_jsonl(path):
    """Rows of a JSON-lines file, .gz too; a last line cut off by a kill is left out. No file: no rows."""
    path = Path(path)
    try:
        opened = gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8", newline="\n")
        with opened as f:
            lines = f.read().split("\n")  # (splitlines would also cut at U+2028)
    except FileNotFoundError:
        lines = []
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise RunError(f"{path} is damaged ({type(error).__name__}); nothing was changed") from error
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows += [json.loads(line)] if line else []
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RunError(f"{path}: line {number} is not valid JSON ({error.msg}); nothing was changed") from error
    return rows


def clock(seconds):
    """
    >>> clock(42), clock(188), clock(7500)
    ('42s', '3m08s', '2h05m')
    """
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    return f"{seconds // 60}m{seconds % 60:02d}s" if seconds < 3600 else f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Pace:
    """Time since a run was begun or resumed, and what is left: pace.times(share of the run that is done)."""

    def __init__(self, share):
        self.began, self.first, self.threads = time.time(), share, None

    def times(self, share, threads=None):
        """{"time/elapsed", "time/left"} in seconds; with `threads` on the first call also that number."""
        elapsed = time.time() - self.began
        row = {"time/elapsed": elapsed, "time/left": elapsed * max(0.0, 1 - share) / max(share - self.first, 1e-9)}
        if threads and self.threads is None:
            self.threads = row["time/threads"] = threads
        return row


class Progress:
    """A long piece of work, done of total: a live line on a terminal, a line every 20 seconds in a log."""

    def __init__(self, what, every=20.0):
        self.what, self.every, self.began = what, every, time.time()
        self.said, self.status = self.began, console.status(what) if console.is_terminal else None

    def __enter__(self):
        if self.status:
            self.status.start()
        return self

    def __exit__(self, *_):
        if self.status:
            self.status.stop()

    def __call__(self, done, total):
        now = time.time()
        left = f", {clock((now - self.began) * (total - done) / done)} left" if done else ""
        line = f"{self.what}: {done}/{total}, {clock(now - self.began)}{left}"
        if self.status:
            self.status.update(line)
        elif now - self.said > self.every:
            self.said = now
            console.print(line, markup=False)


def step_line(step, total, m):
    """One line a step. Means over the whole step."""
    parts = [f"step {step}/{total}", f"reward {m['reward/mean']:.3f}", f"em {m['reward/em']:.3f}", f"format {m['reward/format']:.2f}",
             f"len {m['rollout/response_tokens']:.0f}", f"turns {m['rollout/turns']:.1f}", f"ent {m['rollout/entropy']:.3f}"]
    if "train/kl" in m:
        parts += [f"kl {m['train/kl']:.4f}", f"clip {m['train/clip_fraction']:.2f}", f"gnorm {m.get('train/grad_norm', float('nan')):.2f}"]
    elif not m.get("train/updates"):
        parts.append("no update")
    parts.append(f"roll {m['time/rollout']:.1f}s train {m['time/old_logprobs'] + m['time/train']:.1f}s")
    parts += [f"{m['mem/gpu_gb']:.1f} GB"] if "mem/gpu_gb" in m else []
    parts += [f"{clock(m['time/elapsed'])}, {clock(m['time/left'])} left"] if "time/left" in m else []
    parts += [f"threads {m['time/threads']}"] if "time/threads" in m else []
    return " | ".join(parts)


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


def begun(folder):
    """Whether a run folder holds anything but the lock of a run that wrote nothing."""
    return Path(folder).is_dir() and any(f.name != ".lock" for f in Path(folder).iterdir())


def what_is_saved(cfg, script, pattern):
    """For Ctrl-C and SIGTERM: how far the run folders of a configuration are, and how to go on. pattern: of their names."""
    if cfg is None or cfg.ask:
        return "nothing was written"
    folders = [f.parent for f in sorted((Path(cfg.out) / script).glob(f"{pattern}/config.json"))]
    if not folders:
        return "nothing was written to the run folder yet"
    steps = []
    for folder in folders:
        saved = [folder / f"checkpoint{end}/trainer.json" for end in ("", ".new", ".old")]
        state = next((f for f in saved if f.exists()), None)
        steps += [f"{folder}: checkpoint of step {read_json(state, dict).get('step')}"] if state else []
    return f"{'; '.join(steps) or 'no checkpoint yet'}; go on with the same command and --resume --name {cfg.name}"


def show_averages(results, groups):
    """A line for each average over several sets."""
    for label, result in pool(results, groups).items():
        s = result["summary"]
        console.print(f"{label} (n {s['n']}): EM {s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}] | format {s['format']:.2f}", markup=False)


def show_results(run, before, after, groups=()):
    """results.json and the table of a run: {set: {"summary", "predictions"}} before and after, paired on the same questions.
    groups: see `pool`; their averages are the last rows."""
    rows, cell = [], lambda s, k: f"{s[k]:.3f} [{s[k + '_low']:.3f}, {s[k + '_high']:.3f}]"  # noqa: E731
    for name, b in before.items():
        for by in ("hops", "type"):
            old, new = b["summary"]["by_" + by], after[name]["summary"]["by_" + by]
            parts = [f"{v or '-'} {old[v]['em']:.2f} → {g['em']:.2f} (n {g['n']})" for v, g in new.items()]
            console.print(f"{name} by {by}: " + ", ".join(parts), markup=False)
    for name, b in {**before, **pool(before, groups)}.items():
        a = {**after, **pool(after, groups)}[name]
        old, new = b["summary"], a["summary"]
        gain = paired_difference([r["em"] for r in b["predictions"]], [r["em"] for r in a["predictions"]])
        rows.append([name, new["n"], cell(old, "em"), cell(new, "em"), f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}]",
                     f"{new['em_valid']:.3f}" if "em_valid" in new else "", f"{new['format']:.2f}", f"{new['f1']:.3f}",
                     f"{old['searches']:.2f} → {new['searches']:.2f}", f"{old['tokens']:.0f} → {new['tokens']:.0f}"])
    header = ["set", "n", "EM before", "EM after", "difference (paired)", "EM in valid format", "format", "F1", "searches", "tokens"]
    table(f"{run.path}: EM before and after, 95 % intervals", header, rows)
    run.write("results.json", {"header": header, "rows": rows})


def pool(results, groups):
    """{label: {"summary", "predictions"}} of all questions of the sets in each group {label: set names}: an average weighted by
    questions. A group of which fewer than two sets are there has none."""
    pooled = {}
    for label, names in dict(groups).items():
        rows = [r for n in names if n in results for r in results[n]["predictions"]]
        if sum(n in results for n in names) > 1:
            pooled[label] = {"summary": summarize(rows), "predictions": rows}
    return pooled


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


def evaluations(folder, when=""):
    """{set: {"summary", "predictions"}} of a run folder's final evaluations, or of those `when` ("before", "step10").
    Of an exported run (results/) they are read from predictions.jsonl.gz, and summarised anew."""
    folder, found = Path(folder), {}
    for file in sorted(folder.glob("eval_*.json")):
        name, _, suffix = re.fullmatch(r"eval_(.*?)(_(before|step\d+))?\.json", file.name).groups()
        if (suffix or "") == when:
            found[name] = read_evaluation(file)
    for row in read_jsonl(folder / "predictions.jsonl.gz"):
        if row["when"] == (when or "after"):
            found.setdefault(row["set"], {"summary": None, "predictions": []})["predictions"].append(row)
    for result in found.values():
        keys = [k for k in ("em", "f1", "searches", "tokens") if all(k in row for row in result["predictions"])]
        result["summary"] = result["summary"] or summarize(result["predictions"], keys)
    return found


EXPORTED = ("id", "question", "gold", "type", "hops", "answer", "problem", "em", "em_valid", "f1", "searches", "tokens", "rounds")


def export(folder, out):
    """What is kept of a run under results/: config.json, metrics.jsonl, and every prediction of the evaluations before and after in
    one compressed table, without the trajectories. Numbers can be recomputed from it; `python -m common.report` reads it."""
    folder, out = Path(folder), Path(out)
    if (out / "config.json").exists():
        raise RunError(f"{out} exists: choose another --export")
    rows = [{"set": name, "when": when or "after"} | {k: row[k] for k in EXPORTED if k in row}
            for when in ("before", "") for name, result in evaluations(folder, when).items() for row in result["predictions"]]
    if not rows:
        raise RunError(f"{folder} has no evaluation to export")
    out.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(out / "predictions.jsonl.gz", "wb", mtime=0) as f:
        f.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    for name in ("metrics.jsonl", "config.json"):
        if (folder / name).exists():
            write_atomic(out / name, (folder / name).read_text(encoding="utf-8"))


# ---------------------------------------------------------------- several runs

def compare(folders, out="comparison.png"):
    """Curves of several runs over one another, and tables of their final scores: of each run, differences paired by question with the
    first one; and where the names differ by their seed (mygo-seed0, seed1-text-star), of each method over its seeds."""
    names = [f.name if len({g.name for g in folders}) == len(folders) else str(f) for f in folders]
    curves = {n: read_jsonl(f / "metrics.jsonl") for n, f in zip(names, folders, strict=True)}
    if any(curves.values()) and len(folders) > 1:
        draw_curves(curves, out, " · ".join(names))
        console.print(f"curves: {out}", markup=False)
    results = {n: evaluations(f) for n, f in zip(names, folders, strict=True)}
    if not any(results.values()):
        return warn("no final evaluation (eval_<set>.json, predictions.jsonl.gz) in these folders: nothing to compare but curves")
    cell = lambda s, key: f"{s[key]:.3f} [{s[key + '_low']:.3f}, {s[key + '_high']:.3f}]"  # noqa: E731
    rows = []
    for name in dict.fromkeys(n for r in results.values() for n in r):
        first = {p["id"]: p["em"] for p in results[names[0]].get(name, {"predictions": []})["predictions"]}
        for run in (n for n in names if name in results[n]):
            s, difference = results[run][name]["summary"], ""
            pairs = [(first[p["id"]], p["em"]) for p in results[run][name]["predictions"] if p["id"] in first]
            if run != names[0] and pairs:
                gain = paired_difference(*map(list, zip(*pairs, strict=True)))
                difference = f"{gain[0]:+.3f} [{gain[1]:+.3f}, {gain[2]:+.3f}] (n {len(pairs)})"
            before = evaluations(folders[names.index(run)], "before").get(name)
            rows.append([name, run, s["n"], cell(before["summary"], "em") if before else "", cell(s, "em"), difference, f"{s['f1']:.3f}",
                         f"{s['searches']:.2f}" if "searches" in s else "", f"{s['tokens']:.0f}",
                         sum(r.get("rollout/tokens", 0) for r in curves[run]) or ""])
    table("final evaluations: 95 % intervals over questions",
          ["set", "run", "n", "EM before", "EM", "EM minus the first run's (paired)", "F1", "searches", "tokens", "sampled in training"], rows)
    compare_seeds(results)


def compare_seeds(results):
    """A table of methods over seeds, the seed being the unit: {run: {set: {"summary"}}}; nothing where no method has two seeds."""
    methods = {}
    for run, sets in results.items():
        seed = re.search(r"seed(\d+)", run)
        for name, result in sets.items() if seed else ():
            method = run.replace(seed[0], "").strip("-_ ")
            methods.setdefault(name, {}).setdefault(method, {})[int(seed[1])] = result["summary"]["em"]
    rows = []
    for name, by_method in methods.items():
        first = next(iter(by_method.values()))
        for method, em in by_method.items():
            shared, difference = sorted(em.keys() & first.keys()), ""
            if em is not first and len(shared) > 1:
                difference = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*seed_interval([em[s] - first[s] for s in shared]))
            if len(em) > 1:
                rows.append([name, method, len(em), "{:.3f} [{:.3f}, {:.3f}]".format(*seed_interval(list(em.values()))), difference])
    if rows:
        table("over seeds: 95 % intervals of Student's t, the seed being the unit",
              ["set", "method", "seeds", "EM", "EM minus the first method's (paired by seed)"], rows)


def main(argv=None):
    """Command line: pages, comparisons, explanations."""
    import argparse
    import sys
    parser = argparse.ArgumentParser(prog="python -m common.report", description="Pages, comparisons and explanations of run folders.")
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-seed0")
    parser.add_argument("--explain", metavar="ID", help="explain the trajectories of this question; ID/N for one of them")
    parser.add_argument("--export", metavar="FOLDER", help="keep a run's configuration, metrics and predictions there, compressed")
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
    elif args.export:
        if len(args.runs) > 1:
            sys.exit("error: --export takes one run")
        export(args.runs[0], args.export)
        console.print(f"exported to {args.export}", markup=False)
    elif len(args.runs) > 1 or (args.runs[0] / "predictions.jsonl.gz").exists():  # (an exported run has no trajectories for a page)
        compare(args.runs, args.out)
    else:
        console.print(f"page: {write_page(args.runs[0])}", markup=False)
        rows = read_jsonl(args.runs[0] / "metrics.jsonl")
        if rows:
            draw_curves({args.runs[0].name: rows}, args.runs[0] / "curves.png", args.runs[0].name)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        raise SystemExit(f"error: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SystemExit(f"error: not a run folder of this version, or damaged ({type(error).__name__}: {error})") from error
