"""What a run leaves behind: its folder, the line a step prints, curves, the table of results.

    runs/<script>/<name>/  config.json  metrics.jsonl  samples.jsonl  eval_<set>.json  curves.png  checkpoint/

Everything is JSON or PNG and can be read without this code. metrics.jsonl has one object a step with keys under
reward/ rollout/ train/ eval/ time/ mem/ (the README explains each).
"""

import json
import os
import tempfile
from pathlib import Path

from rich.console import Console
from rich.markup import escape

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:  # logs are not cut at 80 columns
    console.width = 160


class RunError(RuntimeError):
    """The run folder cannot be used as asked; the message says which flag to change."""


def write_atomic(path, text):
    """The file is the old one or the new one, never a part; a full disk leaves the old one."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}. What was written before is untouched") from error


class RunFolder:
    """runs/<script>/<name>. A new run never overwrites one that exists; a resumed one must be configured as it was.

    The constructor checks and writes nothing; `create` writes config.json once everything else has loaded."""

    def __init__(self, root, script, name, config, resume=False, free_to_change=()):
        self.path, self.config = Path(root) / script / name, config
        file = self.path / "config.json"
        if not resume and self.path.exists() and any(self.path.iterdir()):
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        if resume:
            if not file.exists():
                raise RunError(f"--resume: {self.path} holds no run (no config.json)")
            saved = json.loads(file.read_text())
            for key, value in config.items():
                if key not in free_to_change and saved.get(key) != json.loads(json.dumps(value)):
                    raise RunError(f"--resume: this run was started with {key} = {saved.get(key)!r}, not {value!r}; leave --{key.replace('_', '-')} as it was")

    def create(self):
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot create {self.path}: {error.strerror}") from error
        write_atomic(self.path / "config.json", json.dumps(self.config, indent=1))

    def rewind(self, step):
        """Drops the lines of steps after `step`, which a killed run may have written past its last checkpoint."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            rows = [r for r in read_jsonl(self.path / name) if r["step"] <= step]
            write_atomic(self.path / name, "".join(json.dumps(r) + "\n" for r in rows))

    def append(self, name, rows):
        """Adds rows to metrics.jsonl or samples.jsonl, flushed to disk."""
        try:
            with open(self.path / name, "a", encoding="utf-8") as f:
                f.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
                f.flush()
                os.fsync(f.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from error

    def write(self, name, value):
        write_atomic(self.path / name, json.dumps(value, indent=1, ensure_ascii=False))


def read_jsonl(path):
    """Rows of a JSON-lines file; a last line cut off by a kill is left out. No file: no rows."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").splitlines() if Path(path).exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def step_line(step, total, m):
    """One line a step. Means over the whole step."""
    parts = [f"step {step}/{total}", f"reward {m['reward/mean']:.3f}", f"em {m['reward/em']:.3f}", f"format {m['reward/format']:.2f}",
             f"len {m['rollout/response_tokens']:.0f}", f"turns {m['rollout/turns']:.1f}", f"ent {m['rollout/entropy']:.3f}"]
    if "train/kl" in m:
        parts += [f"kl {m['train/kl']:.4f}", f"clip {m['train/clip_fraction']:.2f}", f"gnorm {m.get('train/grad_norm', float('nan')):.2f}"]
    parts.append(f"roll {m['time/rollout']:.1f}s train {m['time/train']:.1f}s")
    return " | ".join(parts + ([f"{m['mem/gpu_gb']:.1f} GB"] if "mem/gpu_gb" in m else []))


def show_trajectory(prompt, sample):
    """One row of samples.jsonl, turn by turn: observations dimmed, each turn's advantage in the margin."""
    why = f" ({sample['problem']})" if sample["problem"] else ""
    console.print(f"[bold]{escape(' '.join(prompt.split())[-160:])}[/bold]  reward {sample['reward']:g}{escape(why)}")
    for turn in sample["turns"]:
        console.print(f"  [cyan]{turn['advantage']:+8.2f}[/cyan] {escape(' '.join(turn['text'].split()))}")
        if turn["observation"]:
            console.print(f"           [dim]{escape(' '.join(turn['observation'].split())[:400])}[/dim]")


def table(title, header, rows):
    """A plain table; the same cells as Markdown go into the README."""
    from rich.table import Table
    t = Table(title=title, title_justify="left")
    for i, h in enumerate(header):
        t.add_column(h, justify="left" if i == 0 else "right")
    for row in rows:
        t.add_row(*map(str, row))
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


PANELS = (("answers", ("reward/mean", "reward/em", "reward/format", "eval/em")), ("entropy (nats a token)", ("rollout/entropy",)),
          ("searches and turns", ("rollout/searches", "rollout/turns")), ("sampled tokens a response", ("rollout/response_tokens",)),
          ("update: clip fraction", ("train/clip_fraction",)), ("update: gradient norm", ("train/grad_norm",)),
          ("groups without spread", ("rollout/flat_groups",)), ("seconds a step", ("time/rollout", "time/old_logprobs", "time/train")))


def draw_curves(rows, path, title):
    """curves.png of metrics rows: thin = each step, thick = running mean; evaluations as dots."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    if not rows:
        return
    figure, axes = plt.subplots(2, 4, figsize=(17, 7.2), layout="constrained")
    for axis, (name, keys) in zip(axes.flat, PANELS, strict=True):
        for color, key in enumerate(keys):
            points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            label = {"reward/mean": "reward", "eval/em": "test em"}.get(key, key.split("/", 1)[1])
            if key.startswith("eval/"):
                axis.plot(x, y, "o--", color=f"C{color}", label=label, markersize=7)
                continue
            axis.plot(x, y, color=f"C{color}", alpha=.3, linewidth=1)
            mean, smooth = y[0], []
            for value in y:
                mean = .7 * mean + .3 * value
                smooth.append(mean)
            axis.plot(x, smooth, color=f"C{color}", linewidth=2, label=label)
        axis.set_title(name, fontsize=11, loc="left")
        axis.grid(alpha=.25)
        axis.spines[["top", "right"]].set_visible(False)
        if name in ("answers", "groups without spread"):
            axis.set_ylim(-.02, 1.02)
        elif axis.lines:
            axis.set_ylim(bottom=0)
        if len(keys) > 1:
            axis.legend(frameon=False, fontsize=9)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(title, x=.01, ha="left", fontsize=13)
    temporary = Path(path).with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=110)
    os.replace(temporary, path)
    plt.close(figure)
