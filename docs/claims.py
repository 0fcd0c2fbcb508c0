"""Makes the tables and the plot of results/README.md from results/claims.toml and the runs that results/
keeps: python -m docs.claims

A row of claims.toml says what a paper claims as a difference that should be above zero:
  runs, minus      patterns of the runs that have it, and of those that do not; of a list the best of each
                   seed; "before" = the same runs before training
  set, minus_set   of which evaluation (test); of another minus_set the questions of set alone
  score            em, or another number of the predictions; "along" = EM along the run; "spearman" = of the
                   summaries, without a difference
  type             questions of this type alone
  effect           the paper's difference, as paper says it
  equal            the claim is that there is no difference
  less             a difference below zero speaks for it
  first            README's plot has it
"""

import re
import tomllib
from functools import cache
from typing import NamedTuple

import pandas as pd

from common import report
from common.files import write_atomic
from common.metrics import seed_interval
from common.report import committed, curves

RESULTS = committed.RESULTS
MARGIN = .03  # two things are equal where the interval of their difference lies within it
WITHIN = "within ±.03 here"
COLOURS = {
    "holds here": "#2F7F6F",
    WITHIN: "#2F7F6F",
    "no difference seen": "#8A8A8A",
    "reversed here": "#7A6A9A",
}
SHOWN = .25  # the plot ends there; what lies beyond it is an arrow
KEY = """difference in accuracy; above 0 speaks for the claim
dot: ours, mean over the seeds · bar: its 95 % interval · arrow: it goes on
tick: the paper's difference (at the edge: beyond it)"""


class Measured(NamedTuple):
    own: float          # means over the seeds
    other: float | None
    mean: float         # their difference, with Student's interval over the seeds
    low: float
    high: float
    seeds: int


def read():
    """{paper: its part of claims.toml}"""
    return tomllib.loads((RESULTS / "claims.toml").read_text(encoding="utf-8"))


# ---------------------------------------------------------------- a row, measured

def by_seed(pattern, row, name, when="after"):
    """{seed: {question: its score}} of the runs of a pattern; one number per seed where a run has it."""
    found = {}
    for folder in committed.matching(RESULTS / pattern):
        seed = re.search(r"seed(\d+)", folder.name) or re.search(r"(\d+)", folder.name)
        found[int(seed[1])] = scores(folder, name, when, row.get("score", "em"), row.get("type"))
    if not found:
        raise ValueError(f"{row['claim']}: no run is called {pattern}")
    return pd.DataFrame(found)


@cache
def scores(folder, name, when, score, kind=None):
    """A run's predictions of an evaluation as {question: score}, of questions of one kind or of all."""
    if score == "along":
        return pd.Series({"": report.mean_along(folder)})
    result = committed.evaluations(committed.name_of(folder), when)[name]
    if score == "spearman":
        return pd.Series({"": result["summary"][score]})
    found = {}
    for row in result["predictions"]:
        if kind is None or row["type"] == kind:
            found[row["id"]] = row[score]
    return pd.Series(found)


def measured(row):
    name = row.get("set", "test")
    own = by_seed(row["runs"], row, name)
    if "minus" not in row:
        mean, low, high = seed_interval(own.mean())
        return Measured(mean, None, mean, low, high, len(own.columns))
    if row["minus"] == "before":
        others = [by_seed(row["runs"], row, name, "before")]
    else:
        patterns = row["minus"] if isinstance(row["minus"], list) else [row["minus"]]
        others = [by_seed(pattern, row, row.get("minus_set", name)) for pattern in patterns]
    means = pd.concat([other.loc[own.index].mean() for other in others], axis=1).max(axis=1)
    gains = (own.mean() - means).dropna()
    there = gains.index
    return Measured(own.mean()[there].mean(), means[there].mean(), *seed_interval(gains), len(gains))


def towards(row, found):
    """(mean, low, high) of the difference, turned so that above zero speaks for the claim."""
    if row.get("less"):
        return -found.mean, -found.high, -found.low
    return found.mean, found.low, found.high


def verdict(row, found):
    """What the interval says of the claim, here: in our world, of half a million weights.

    >>> small, large = Measured(.5, .5, .01, -.02, .02, 5), Measured(.5, .4, -.1, -.2, -.01, 5)
    >>> [verdict(row, found) for found in (small, large) for row in ({}, {"equal": True}, {"less": True})]
    ['no difference seen', 'within ±.03 here', 'no difference seen', \
'reversed here', 'reversed here', 'holds here']
    """
    low, high = towards(row, found)[1:]
    if row.get("equal") and -MARGIN < low and high < MARGIN:
        return WITHIN
    if high < 0:
        return "reversed here"
    if low > 0 and not row.get("equal"):
        return "holds here"
    return "no difference seen"


# ---------------------------------------------------------------- as text

def number(value, sign=""):
    """
    >>> number(.0449), number(-.0449, "+"), number(1.25, "+")
    ('.045', '-.045', '+1.250')
    """
    return re.sub(r"(?<![1-9])0\.", ".", f"{value:{sign}.3f}")


def ours(found):
    interval = f"[{number(found.low, '+')}, {number(found.high, '+')}]"
    if found.other is None:
        return f"{number(found.mean)} [{number(found.low)}, {number(found.high)}]"
    return f"{number(found.own)}, {number(found.other)}: {number(found.mean, '+')} {interval}"


def table(rows):
    lines = [
        "| claim | paper | ours: with, without, difference | verdict | command |",
        "|---|---|---|---|---|",
    ]
    for row, found in rows:
        command = f"`{row['command']}`" if row["command"] else ""
        cells = row["claim"], row["paper"], ours(found), verdict(row, found), command
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text, tables):
    """The README with its tables in their places, <!-- paper --> … <!-- end -->."""
    for paper, made in tables.items():
        before, rest = text.split(f"<!-- {paper} -->\n")
        after = rest.partition("<!-- end -->")[2]
        text = f"{before}<!-- {paper} -->\n{made}\n<!-- end -->{after}"
    return text


# ---------------------------------------------------------------- the plot

def draw(parts, path, wanted="plot"):
    """A dot and a bar per claim about accuracy; a tick is the paper's effect, a word the verdict.
    wanted: the key of the rows that are drawn."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    lines = []
    for part, rows in parts:
        lines.append((part["title"], None, None))
        lines += [(row["plot"], row, found) for row, found in rows if wanted in row]
    with plt.rc_context(curves.FONT | {"font.size": 8}):
        figure, axis = plt.subplots(figsize=(7, .175 * len(lines) + .7), layout="constrained")
        for at, (text, row, found) in enumerate(lines):
            bold = {"fontweight": "bold"} if row is None else {}
            axis.annotate(text, (0, at), (-175, 0), ("axes fraction", "data"), "offset points",
                          va="center", **bold)
            if row:
                draw_row(axis, at, row, found)
        axis.axvline(0, color="black", linewidth=.8)
        axis.set(xlim=(-SHOWN, SHOWN), ylim=(len(lines) - .4, -.6), yticks=[])
        axis.spines["left"].set_visible(False)
        axis.grid(axis="x", alpha=.25)
        axis.set_xlabel(KEY)
        curves.save(figure, path)
        figure.set_layout_engine("none")  # what has been laid out stays
        figure.savefig(path.with_suffix(".svg"), dpi=200, metadata={"Date": None})
        plt.close(figure)


def draw_row(axis, at, row, found):
    said = verdict(row, found)
    colour = COLOURS[said]
    mean, low, high = towards(row, found)
    axis.plot([max(low, -SHOWN), min(high, SHOWN)], [at, at], color=colour, linewidth=1.4,
              solid_capstyle="butt")
    if abs(mean) < SHOWN:
        axis.plot(mean, at, "o", color=colour, markersize=4)
    if low < -SHOWN:
        axis.plot(-SHOWN, at, "<", color=colour, markersize=5, clip_on=False)
    if high > SHOWN:
        axis.plot(SHOWN, at, ">", color=colour, markersize=5, clip_on=False)
    if "effect" in row:
        shown = max(-SHOWN, min(SHOWN, row["effect"]))
        axis.plot(shown, at, "|", color="black", markersize=8, markeredgewidth=1.4, clip_on=False)
    beside = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axis.annotate(number(mean, "+"), (1, at), (40, 0), ha="right", color=colour, **beside)
    axis.annotate(said, (1, at), (46, 0), color=colour, fontweight="bold", **beside)


def main():
    parts = []
    tables = {}
    for paper, part in read().items():
        rows = [(row, measured(row)) for row in part["rows"]]
        parts.append((part, rows))
        tables[paper] = table(rows)
    readme = RESULTS / "README.md"
    write_atomic(readme, page(readme.read_text(encoding="utf-8"), tables))
    draw(parts, RESULTS / "claims.png")
    draw(parts, RESULTS / "claims_first.png", "first")


if __name__ == "__main__":
    main()
