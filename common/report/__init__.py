"""Run folders read again, and the runs that results/ keeps, by name: evaluations, tables with intervals.
There is one table, method_table: a line a method (or stage, or run) and set. Curves are in curves.py; the
command line, `python -m common.report RUN RUN …`, is in __main__.py.
"""

import itertools
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pandas as pd

from common.files import one_line, read_evaluations, read_json, read_jsonl, say, warn, write_json
from common.formats import fingerprint
from common.metrics import (
    bootstrap_interval,
    interval,
    mean_em,
    seed_interval,
    signed,
    summarize,
    summary_line,
)
from common.report import committed

# ---------------------------------------------------------------- reading


def config_of(folder):
    """The flags of a run folder or of a committed run; None where it has none."""
    name = committed.name_of(folder)
    if name:
        return committed.config(name)
    file = Path(folder) / "config.json"
    return read_json(file, dict) if file.exists() else None


def steps_of(folder):
    """Its metrics, a dictionary a step."""
    name = committed.name_of(folder)
    return committed.steps(name) if name else read_jsonl(Path(folder) / "metrics.jsonl")


def evaluations(folder, when=""):
    """{set: {"summary", "predictions"}} of its final evaluations, or of those `when` ("before", "step10")."""
    name = committed.name_of(folder)
    if name:
        return committed.evaluations(name, when or "after")
    return read_evaluations(folder, when)


def with_evaluations(folder):
    """Rows of metrics.jsonl, with the mean EM of the evaluations before the first step and after the last."""
    rows = steps_of(folder)
    before = em_of(evaluations(folder, "before"))
    after = em_of(evaluations(folder))
    if before:
        rows = [{"step": 0, **before}, *rows]
    if after and rows:
        rows[-1] = rows[-1] | after
    return rows


def em_of(found):
    """{"eval/em": mean EM of evaluations}, of one set with the ends of its interval; {} without any."""
    em = mean_em(found)
    if em is None:
        return {}
    if len(found) > 1:
        return {"eval/em": em}
    summary, = (result["summary"] for result in found.values())
    ends = {f"eval/em_{end}": summary[f"em_{end}"] for end in ("low", "high") if f"em_{end}" in summary}
    return {"eval/em": em, **ends}


def mean_along(folder):
    """EM along a run: the mean over the tokens sampled so far, a straight line between evaluations, the one
    before the first step among them. None where there are fewer than two evaluations, or no tokens."""
    steps = pd.DataFrame(with_evaluations(folder)).reindex(columns=["rollout/tokens", "eval/em"])
    tokens = steps["rollout/tokens"].fillna(0).cumsum()
    there = steps["eval/em"].notna()
    length = np.ptp(tokens[there]) if there.any() else 0
    if not length:
        return None
    return float(np.trapezoid(steps["eval/em"][there], tokens[there]) / length)


# ---------------------------------------------------------------- as text

def verdict(gain):
    """What the interval of a difference allows to say.

    >>> verdict((.1, .05, .15)), verdict((-.1, -.15, -.05)), verdict((.1, -.05, .25))
    ('up', 'down', 'unclear')
    """
    _, low, high = gain
    if low > 0:
        return "up"
    return "down" if high < 0 else "unclear"


def show(title, rows):
    """A table on the terminal without empty columns, in parts where it is wider than a hundred. What is the
    same in each line, how many questions and the other of the differences, stands above it."""
    frame = pd.DataFrame(rows).map(one_line)
    if frame["n"].nunique() == 1:
        title += f"; n {frame.pop('n')[0]}"
    others = set(frame["minus"]) - {""}
    if len(others) == 1:
        frame = frame.drop(columns="minus").rename(columns={"by question": f"minus {min(others)}"})
    frame = frame.loc[:, (frame != "").any()].set_index(["method", "set"])
    say(f"{one_line(title)}\n{frame.to_string(line_width=100, sparsify=False)}")


def over_seeds(values, form=".3f"):
    """The mean with Student's interval; of one seed, or of equal ones, without; "" where there is none."""
    if differ(values):
        return signed(seed_interval(values), form)
    return f"{values.iloc[0]:{form}}" if len(values) else ""


def differ(values):
    """Whether seeds have different values: of equal ones nothing is known of their spread."""
    return len(values) > 1 and np.ptp(values) > 1e-9


# ---------------------------------------------------------------- one run

def show_averages(results, groups, when=""):
    """A line for each average over several sets {label: set names}, weighted by questions, if all are there.
    when: of which evaluation, behind the label."""
    for label, names in groups.items():
        there = [results[name]["predictions"] for name in names if name in results]
        if len(there) == len(names):
            say(summary_line(f"{label}{when}", summarize(list(itertools.chain(*there)))))


# ---------------------------------------------------------------- methods, stages or runs

COLUMNS = {  # header: (how, key, form), see _cells
    "F1": ("eval", "f1", ".3f"),
    "tokens": ("eval", "tokens", ".1f"),
    "searches": ("eval", "searches", ".2f"),
    "sampled in training": ("sum", "rollout/tokens", ",.0f"),
    "training s": ("sum", "time/rollout time/train", ".0f"),
}


class Run(NamedTuple):
    folder: Path
    sets: dict      # its evaluations, without those whose em is something else (summary's "names")
    steps: list     # rows of metrics.jsonl


def read_run(folder):
    """The Run of a folder, or of (folder, when)."""
    folder, when = folder if isinstance(folder, tuple) else (folder, "")
    steps = [] if when else steps_of(folder)
    sets = {}
    for name, result in evaluations(folder, when).items():
        if "names" not in result["summary"]:
            sets[name] = result
    return Run(Path(folder), sets, steps)


def read_methods(title, methods):
    """{label: {seed: Run}} of method_table's methods."""
    runs = {}
    for label, folders in methods.items():
        seeds = folders if isinstance(folders, dict) else dict(enumerate(folders))
        read = {seed: read_run(folder) for seed, folder in seeds.items()}
        evaluated = [bool(run.sets) for run in read.values()]
        if read and all(evaluated):
            runs[label] = read
            warn_of_other_settings(label, seeds.values())
        elif any(evaluated):
            warn(f"{title}: {label} is left out, for not every seed of it is evaluated")
    return runs


# of config.json, what the seeds of a method may have each for itself
OF_A_SEED = {"seed", "name", "out", "resume", "log", "save_every", "eval_every", "changed", "threads", "date",
             "machine", "program", "inputs", "cache_gb", "micro_tokens", "checkpoint", "before", "collect"}


def warn_of_other_settings(label, folders, of_a_stage=()):
    """Says which settings the runs of one method, or the stages of one run, do not share. folders: also
    (folder, when), see evaluations."""
    folders = [folder[0] if isinstance(folder, tuple) else folder for folder in folders]
    configs = list(filter(None, map(config_of, folders)))
    keys = set.intersection(*map(set, configs)) if configs else set()
    for key in sorted(keys - OF_A_SEED - set(of_a_stage)):
        values = list(dict.fromkeys(str(config[key]) for config in configs))
        if len(values) > 1:
            warn(f"{label}: runs of one line differ in {key}: {one_line(' | '.join(values))}")


def method_table(path, title, methods, minus="", paper=None, columns=COLUMNS, means=True):
    """<path>-table.json (none without a path) of {label: [run folder per seed]} or {label: {seed: folder}}: a
    line a method and set, and for the plain mean of several sets (not without `means`). A method that lacks
    an evaluation is left out.

    folder: or (folder, when), see evaluations. minus: the method that the others are set against, or {label:
    its own other one}. paper(label, sets) -> the paper's number for these sets, or "". columns: {header:
    (how, key, form)}, see _cells."""
    runs = read_methods(title, methods)
    rows = []
    averages = []
    for label, own in runs.items():
        other = minus.get(label, "") if isinstance(minus, dict) else minus
        base = runs.get(other, {}) if other != label else {}
        sets = {}
        for run in own.values():
            sets |= dict.fromkeys(run.sets)
        groups = [[name] for name in sets]
        if means and len(sets) > 1:
            groups.append(list(sets))
        for names in groups:
            row = _row(label, own, base, other, names)
            if not row:
                continue
            row["paper"] = paper(label, names) if paper else ""
            for name, column in columns.items():
                row |= _cells(name, *column, own, base, names)
            (rows if len(names) == 1 else averages).append(row)
    rows += averages
    if not rows:
        return warn(f"{title}: no evaluation, no table")
    several = any(len(own) > 1 for own in runs.values())
    units = "over questions or, of several seeds, over seeds" if several else "over questions"
    show(f"{title}: 95 % intervals, {units}", rows)
    table = {"header": list(rows[0]), "rows": [list(row.values()) for row in rows]}
    if path:
        write_json(f"{path}-table.json", table)
        say(f"table: {path}-table.json")
    return table


def _row(label, own, base, other, names):
    """The scores of a line, and its difference: bootstrap over questions for one seed, Student's t for
    several, the seed being the unit. None where no prediction has an EM."""
    scores = scores_of(own, names)
    if scores.empty or len(names) > 1 and any(name not in run.sets for run in own.values() for name in names):
        return None
    means = scores.groupby(level=0).mean().mean()  # of the sets' means; (seeds,)
    value = over_seeds(means)
    if len(means) == 1 and len(names) == 1:
        mean, low, high = bootstrap_interval(scores.iloc[:, 0])
        value = signed((mean, max(0.0, low), high), ".3f")
    others = scores_of(base, names)
    renamed = reworded(own, base, names)
    if renamed:
        warn(f"{label} and {other}: {len(renamed)} questions have one id and other words or gold answers; "
             "not compared")
        others = others.drop(index=renamed, errors="ignore")
    by_question, by_seed, gain = difference(scores, others, len(names))
    return {
        "method": label,
        "set": names[0] if len(names) == 1 else f"mean of {len(names)} sets",
        "n": len(scores),
        "paper": "",
        "EM by seed": " ".join(f"{mean:.3f}" for mean in means) if len(means) > 1 else "",
        "EM": value,
        "minus": other if gain else "",
        "by question": by_question,
        "by seed": by_seed,
        "moved": verdict(gain) if gain else "",
    }


def predictions(run, names):
    """((set, id), prediction) of a Run's sets."""
    for name in names:
        for row in run.sets[name]["predictions"] if name in run.sets else ():
            yield (name, row.get("id")), row


def scores_of(runs, names):
    """EM of the predictions of {seed: Run}, (questions, seeds); questions are (set, id)."""
    columns = {}
    for seed, run in runs.items():
        found = {place: row["em"] for place, row in predictions(run, names) if "em" in row}
        if found:
            columns[seed] = pd.Series(found, dtype=float)
    return pd.DataFrame(columns)


def reworded(own, base, names):
    """[(set, id)] of questions whose words or gold answers are not the same in all runs."""
    words = {}
    for run in (*own.values(), *base.values()):
        for place, row in predictions(run, names):
            if "question" in row:
                words.setdefault(place, set()).add(asked(row))
    return [place for place, said in words.items() if len(said) > 1]


def asked(row):
    """Letters that stand for a prediction's question and its gold answers."""
    return fingerprint(" ".join(map(str, [row.get("question"), *sorted(map(str, row.get("gold") or ()))])))


def difference(scores, others, sets):
    """What the scores have more than the others: (by question, by seed), as text with 95 % intervals, and the
    interval that the verdict goes by. A question counts once, with its mean over the seeds; by seed the seed
    is the unit. sets: how many there are."""
    gains = scores - others.reindex(scores.index)
    gains = gains.dropna(axis=1, how="all").dropna(how="all")
    by_question = by_seed = ""
    gain = None
    several = len(gains.columns) > 1
    if several:
        gains = gains.sort_index()  # the order that the numbers in results/ were drawn in
    if len(gains) and sets == 1:  # a mean of sets is no mean of questions
        gain = bootstrap_interval(gains.mean(axis=1))
        by_question = signed(gain)
        if len(gains) < len(scores):
            by_question += f" (n {len(gains)})"
    if several:
        by_seed = over_seeds(gains.mean(), "+.3f")
        if differ(gains.mean()):
            gain = seed_interval(gains.mean())
        if len(gains.columns) < len(scores.columns):
            by_seed += f" ({len(gains.columns)} seeds)"
    return by_question, by_seed, gain


def _cells(name, how, key, form, own, base, names):
    """{name: what a column shows of a line}: a number, mean over its runs; "" where one has none.

    how: "eval" = of the summaries (form "interval": with it, where there is one); "along" = EM along the run
    and its difference by seed; else of the steps, see summed_up."""
    if how == "along":
        along = _along(own)
        gains = along - _along(base)
        more = over_seeds(gains.dropna(), "+" + form)
        return {name: over_seeds(along.dropna(), form), f"{name} minus": more}
    if how != "eval":
        return {name: _mean([summed_up(run.steps, key.split(), how) for run in own.values()], form)}
    summaries = [run.sets[one]["summary"] for run in own.values() for one in names if one in run.sets]
    if form == "interval":
        if len(summaries) == 1 and key in summaries[0]:
            return {name: interval(summaries[0], key)}
        form = ".3f"
    return {name: _mean([s.get(key) for s in summaries], form)}


def _along(runs):
    found = {seed: mean_along(run.folder) for seed, run in runs.items() if run.steps}
    return pd.Series(found, dtype=float)


def _mean(values, form):
    """
    >>> _mean([1, 2], ".1f"), _mean([1, None], ".1f")
    ('1.5', '')
    """
    return f"{fmean(values):{form}}" if values and None not in values else ""


def summed_up(rows, keys, how):
    """Steps as one number: "sum", "mean", "max", "last", or "late", the mean of the last quarter, of the
    keys' sum; None of nothing."""
    values = pd.DataFrame(rows).reindex(columns=keys).dropna(how="all").sum(axis=1)
    if values.empty:
        return None
    if how == "last":
        return values.iloc[-1]
    if how == "late":
        quarter = max(1, len(values) // 4)
        return values.tail(quarter).mean()
    return values.agg(how)
