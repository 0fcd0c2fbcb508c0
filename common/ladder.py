"""Several methods over several seeds: every run a process of its own, as many at once as there are cores,
each resumed where it stopped; then one table, paper beside ours, and two figures.

    rows = {"GRPO": Row(("--loss", "grpo"), "45.42"), "ATPO": Row(("--loss", "atpo"), "47.75")}
    ladder.run(cfg, "at2po", "ladder", rows, argv, at2po.parse_args)
"""

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from common import process
from common.files import RunError, clock, read_json, read_jsonl, say, table, write_json
from common.metrics import paired_difference, seed_interval
from common.report import scores
from common.results import evaluations, mean_along, mean_em, signed, with_evaluations

SWITCHES = ("ladder", "schemes", "baselines", "resume")  # not handed on, nor are these with their values:
VALUED = ("seeds", "seed", "name", "stage")
# of a run's config.json, what need not be the table's
FREE = ("resume", "out", "log", "save_every", "search_timeout", "search_retries")


@dataclass(frozen=True)
class Row:
    flags: tuple = ()  # what makes this method
    paper: str = ""    # the paper's number
    minus: str = ""    # the row that it is set against; empty = the one before


def run(cfg, script, table_name, rows, argv, parse, before=None):
    """Runs what is missing of `rows` {label: Row} for cfg.seeds seeds, and shows what came out.

    argv: the command line without @FILEs, whose other flags every run gets. parse: of such a line, the
    script's. before: (label, Row) of a line with the evaluations that the runs began with.
    Runs are called <name>-<label>-seed<seed>, so that tables share those of one label. Writes
    <out>/<script>/<name>-<table name>-table.json, -curves.png and -turns.png."""
    base = Path(cfg.out) / script
    name = cfg.name
    seeds = range(cfg.seed, cfg.seed + cfg.seeds)
    jobs = {}
    for seed in seeds:
        for label in rows:
            jobs[label, seed] = base / f"{name}-{slug(label)}-seed{seed}"
    shared = without_own(argv)
    commands = []
    for (label, seed), folder in jobs.items():
        given = [*shared, *rows[label].flags, "--seed", str(seed), "--name", folder.name]
        if (folder / "config.json").exists():
            refuse_other_settings(folder, asdict(parse(given)))
            given.append("--resume")
        if not is_done(folder):
            commands.append((folder, [sys.executable, sys.argv[0], *given]))
    say(f"{name}-{table_name}: {len(jobs)} runs, {len(jobs) - len(commands)} of them done before")
    try:
        all_at_once(commands, len(process.own_cores()))
    except KeyboardInterrupt as stop:
        say("interrupted; what the runs have written is kept: the same command goes on with it")
        sys.exit(143 if isinstance(stop, process.Terminated) else 130)
    folders = {label: [jobs[label, seed] for seed in seeds] for label in rows}
    show(base / f"{name}-{table_name}", rows, folders, before)


def is_done(folder):
    """Whether a run, or what was exported of one, has come to its end: all its sets are evaluated."""
    return any((folder / name).exists() for name in ("results.json", "summary.json"))


def refuse_other_settings(folder, config):
    """RunError: a table must not mix settings. What an older version did not have is not compared."""
    saved = read_json(folder / "config.json", dict)
    for key, value in config.items():
        if key not in FREE and key in saved and saved[key] != json.loads(json.dumps(value)):
            raise RunError(f"{folder} was made with {key} = {saved[key]!r}, this table is for {value!r}: "
                           "give the same flags, or another --name")


def slug(label):
    """
    >>> slug("random tree, GRPO")
    'random-tree-grpo'
    """
    return re.sub(r"\W+", "-", label.lower()).strip("-")


def without_own(argv):
    """argv without the flags that make a table and those that it sets for each run.

    >>> without_own(["--ladder", "--seeds", "5", "--lr=1e-4", "--name=x", "--resume", "--world", "hard"])
    ['--lr=1e-4', '--world', 'hard']
    """
    kept = []
    words = iter(argv)
    for word in words:
        flag, equals, _ = word.removeprefix("--").partition("=")
        if not word.startswith("--") or flag not in SWITCHES + VALUED:
            kept.append(word)
        elif flag in VALUED and not equals:
            next(words, None)
    return kept


# ---------------------------------------------------------------- processes

def all_at_once(commands, most):
    """Runs [(run folder, command)] with at most so many at a time, one thread each; what they print goes to
    <run folder>.log. A run that fails ends the others with its last line."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.time()
    waiting = list(commands)
    running = {}
    done = 0
    try:
        while waiting or running:
            while waiting and len(running) < most:
                folder, command = waiting.pop(0)
                folder.parent.mkdir(parents=True, exist_ok=True)
                with open(f"{folder}.log", "a") as log:
                    running[folder] = subprocess.Popen(
                        command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            time.sleep(.2)
            for folder, child in list(running.items()):
                if child.poll() is None:
                    continue
                del running[folder]
                if child.returncode:
                    said = last_line(folder)
                    raise RunError(f"{folder.name} failed ({said}); what it printed: {folder}.log")
                done += 1
                say(f"{done}/{len(commands)} {folder.name}: {clock(time.time() - began)}")
    finally:
        for child in running.values():
            child.terminate()
        for child in running.values():
            child.wait()


def last_line(folder):
    lines = Path(f"{folder}.log").read_text(errors="replace").strip().split("\n")
    return lines[-1]


# ---------------------------------------------------------------- table

def show(path, rows, folders, before=None):
    """The table of {label: Row} over {label: [run folder a seed]}: EM of the last evaluation by seed, its
    mean as a seed interval, and the difference to another row, paired by question and paired by seed."""
    final = {label: [evaluations(f) for f in runs] for label, runs in folders.items()}
    body = []
    if before:
        first = [evaluations(f, "before") for f in next(iter(folders.values()))]
        label, row = before
        body.append(cells(label, row, {label: first}, "", {label: []}))
    other = ""
    for label, row in rows.items():
        other = row.minus or other
        body.append(cells(label, row, final, other if other != label else "", folders))
        other = label
    header = ["method", "paper", "EM by seed", "EM over seeds", "minus", "paired by question",
              "paired by seed", "mean along the run", "the same, paired by seed", *KEPT]
    on_screen = [[line[i] for i in ON_SCREEN] for line in [header, *body]]
    table(f"{path.name}: 95 % intervals", on_screen[0], on_screen[1:])
    write_json(f"{path}-table.json", {"header": header, "rows": body})
    draw(path, folders)
    say(f"table and figures: {path}-table.json, -curves.png, -turns.png")


ON_SCREEN = (0, 1, 3, 4, 5, 6)  # of the columns
KEPT = {  # column: (metric, how its steps become a number, its form)
    "tokens": ("rollout/tokens_total", "last", ",.0f"),
    "clip": ("train/clip_fraction", "mean", ".3f"),
    "largest ratio": ("train/ratio_max", "max", ".1f"),
    "entropy": ("rollout/entropy", "late", ".3f"),
    "format": ("reward/format", "late", ".2f"),
    "flat": ("rollout/flat_groups", "mean", ".2f"),
}


def cells(label, row, final, other, folders):
    """A line of the table: final[label], set against final[other]; folders[label]: its runs."""
    results, runs = final[label], folders[label]
    ems = [mean_em(sets) for sets in results]
    by_seed = " ".join(f"{em:.3f}" for em in ems)
    along = [mean_along(f) for f in runs]
    line = [label, row.paper, by_seed, over_seeds(ems), other]
    if other:
        gains = paired_difference(pooled(final[other]), pooled(results))
        line += [signed(gains), minus(ems, map(mean_em, final[other]))]
        line += [over_seeds(along), minus(along, map(mean_along, folders[other]))]
    else:
        line += ["", "", over_seeds(along), ""]
    steps = [read_jsonl(f / "metrics.jsonl") for f in runs]
    for key, how, form in KEPT.values():
        numbers = [summed_up(column(rows, key), how) for rows in steps]
        numbers = [n for n in numbers if n is not None]
        line.append(f"{sum(numbers) / len(numbers):{form}}" if numbers else "")
    return line


def minus(own, others):
    """The difference paired by seed; "" where a seed has no number."""
    both = list(zip(own, others, strict=True))
    if None in {x for pair in both for x in pair}:
        return ""
    return over_seeds([a - b for a, b in both], "+.3f")


def column(rows, key):
    return [row[key] for row in rows if key in row]


def summed_up(values, how):
    """last, max, mean, or late: the mean of the last quarter; None of nothing."""
    if not values:
        return None
    if how == "last":
        return values[-1]
    if how == "max":
        return max(values)
    late = values[-max(1, len(values) // 4):] if how == "late" else values
    return sum(late) / len(late)


def pooled(results):
    return [em for sets in results for name in sorted(sets) for em in scores(sets[name])]


def over_seeds(values, form=".3f"):
    """The mean with Student's interval; without it for one seed; "" where there is none."""
    if not values or None in values:
        return ""
    if len(values) < 2:
        return f"{values[0]:{form}}"
    return signed(seed_interval(values), form)


# ---------------------------------------------------------------- figures

def draw(path, folders):
    """<path>-curves.png: accuracy and entropy over sampled tokens, a line a method, the mean of its seeds;
    <path>-turns.png: how many searches its trajectories make, of the last evaluation."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for label, runs in folders.items():
        steps = [with_evaluations(f) for f in runs]
        for axis, key in zip(axes, ("eval/em", "rollout/entropy"), strict=True):
            axis.plot(*mean_curve(steps, key), label=label, linewidth=1.8)
    for axis, name in zip(axes, ("EM of evaluations", "nats a sampled token"), strict=True):
        axis.set_xlabel("sampled tokens")
        axis.set_title(name, loc="left")
        axis.grid(alpha=.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(f"{path}-curves.png", dpi=110)
    plt.close(figure)
    figure, axis = plt.subplots(figsize=(7, 3.8), layout="constrained")
    width = .8 / len(folders)
    for i, (label, runs) in enumerate(folders.items()):
        searches = searches_of(runs)
        numbers = range(int(max(searches, default=0)) + 1)
        shares = [searches.count(n) / max(1, len(searches)) for n in numbers]
        left = [n + i * width - .4 for n in numbers]
        axis.bar(left, shares, width, align="edge", label=label)
    axis.set_xlabel("searches of a test trajectory")
    axis.set_ylabel("share")
    axis.legend(frameon=False, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(f"{path}-turns.png", dpi=110)
    plt.close(figure)


def searches_of(runs):
    """Of every trajectory of the runs' last evaluations."""
    found = []
    for folder in runs:
        for result in evaluations(folder).values():
            found += scores(result, "searches")
    return found


def mean_curve(runs, key, points=40):
    """(tokens, values): the mean over runs of [metrics rows], each read at the same numbers of sampled
    tokens."""
    import numpy as np
    curves = []
    for rows in runs:
        there = [row for row in rows if key in row]
        if there:
            tokens = [row.get("rollout/tokens_total", 0) for row in there]
            curves.append((tokens, column(there, key)))
    if not curves:
        return [], []
    first = max(tokens[0] for tokens, _ in curves)
    last = min(tokens[-1] for tokens, _ in curves)
    grid = np.linspace(first, last, points)
    values = [np.interp(grid, *curve) for curve in curves]
    return grid, np.mean(values, axis=0)
