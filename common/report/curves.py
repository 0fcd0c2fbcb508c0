"""Curves of runs as pictures: of one, or of several over one another. A script's METRICS name the panels; the
page of a run draws the same ones itself (common/page/curves.js)."""

import math
import os
from pathlib import Path

import pandas as pd

from common import guards
from common.files import read_json, say
from common.report import committed, steps_of

# ---------------------------------------------------------------- panels

ONE_LINE = .01  # between the values of two curves, on average: nobody tells them apart


def panels_of(*folders):
    """{panel: {key: label}} of the folders' metrics."""
    found = {}
    for folder in folders:
        name = committed.name_of(folder)
        file = Path(folder) / "metrics.json"
        metrics = {}
        if name:
            metrics = committed.runs()[name]["metrics"]
        elif file.exists():
            metrics = read_json(file, dict)
        for panel, keys in guards.panels(metrics).items():
            found.setdefault(panel, {}).update(keys)
    return found


def with_data(panels, runs):
    """The panels that runs (see draw_curves) have data for. A reward that is exact match shares its panel."""
    rows = []
    for seeds in runs.values():
        for own in seeds:
            rows += own
    data = pd.DataFrame(rows).dropna(axis=1, how="all")
    found = {}
    for name, keys in panels.items():
        if keys.keys() & set(data):
            found[name] = dict(keys)
    if {"reward/mean", "reward/em"} <= set(data):
        apart = data["reward/mean"] - data["reward/em"]
        if apart.abs().mean() < ONE_LINE and "reward" in found:
            del found["reward"]
            found[guards.ANSWERS]["reward/em"] += " = reward"
    return found


# ---------------------------------------------------------------- pictures

SHARES = ("answers", "format", "groups without spread")  # panels from 0 to 1
# of Okabe and Ito: told apart without red and green, and in print
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", ":", "-.")
PANEL = 3.3, 2.3     # inches: a panel is as wide as a paper's column
MANY = 60            # steps; of more the line is a mean over the steps around, and the data is thin behind it
FONT = {"font.size": 9, "axes.titlesize": 9, "legend.fontsize": 8, "axes.spines.top": False,
        "axes.spines.right": False, "svg.hashsalt": "fivehop", "svg.fonttype": "none"}

# a legend's place, in two columns
ABOVE = {
    "loc": "lower left",
    "bbox_to_anchor": (-.02, .98),
    "ncols": 2,
    "frameon": False,
    "borderpad": 0,
    "labelspacing": .2,
    "handlelength": 1.4,
    "columnspacing": 1,
}


def draw_curves(runs, path, title, panels):
    """Curves of {label: [metrics rows of a seed]}: a line through the data, of several seeds through their
    mean, with a band from the lowest seed to the highest; dots = evaluations of all seeds. One run: a colour
    per key; several: a colour per run, a line style per key.

    panels: {title: {key: label}}, those without data are left out. path: ends in .png, .pdf or .svg."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    panels = with_data(panels, runs)
    lines = math.ceil(len(panels) / 4) or 1
    widest = math.ceil(len(panels) / lines) or 1
    with plt.rc_context(FONT):
        size = PANEL[0] * max(2, widest), PANEL[1] * lines + .6
        figure, axes = plt.subplots(lines, widest, squeeze=False, figsize=size, layout="constrained")
        for axis in axes.flat[len(panels):]:
            axis.remove()
        for axis, (name, keys) in zip(axes.flat, panels.items(), strict=False):
            _draw_panel(plt, axis, name, keys, runs)
        for axis in figure.axes[-widest:]:
            axis.set_xlabel("step")
        figure.suptitle(title, x=.01, ha="left", fontsize=11)
        if len(runs) > 1:
            swatches = []
            for i in range(len(runs)):
                swatches.append(plt.Line2D([], [], color=colour_of(i), linewidth=3))
            figure.legend(swatches, runs, loc="outside lower left", frameon=False, ncols=widest + 1)
        save(figure, path)
        plt.close(figure)


def colour_of(number):
    return COLOURS[number % len(COLOURS)]


def save(figure, path):
    """Writes a figure whole or not at all."""
    path = Path(path)
    part = path.with_suffix(f".tmp{path.suffix}")
    figure.savefig(part, dpi=200)
    os.replace(part, path)


def _draw_panel(plt, axis, name, keys, runs):
    legend = {}
    for i, seeds in enumerate(runs.values()):
        for k, (key, label) in enumerate(keys.items()):
            look = {"color": colour_of(k), "linestyle": "-"}
            if len(runs) > 1:
                look = {"color": colour_of(i), "linestyle": STYLES[k % len(STYLES)]}
            drawn = _curve(axis, seeds, key, look)
            if drawn:
                colour = look["color"] if len(runs) == 1 else "grey"
                looks = {"linestyle": drawn.get_linestyle(), "marker": drawn.get_marker(), "markersize": 4}
                legend.setdefault(label, plt.Line2D([], [], color=colour, **looks))
    axis.set_title(name, loc="left")
    axis.xaxis.get_major_locator().set_params(integer=True, nbins=5)
    axis.grid(alpha=.25)
    if name in SHARES:
        axis.set_ylim(-.02, 1.02)
    elif axis.lines and "ratio" not in name:
        low, high = axis.dataLim.intervaly
        if low >= 0:
            axis.set_ylim(0, 1.08 * high or 1)
    if len(keys) > 1 and legend:  # above the panel, where no line runs
        lines = math.ceil(len(legend) / 2)
        axis.set_title(name, loc="left", pad=6 + 11 * lines)
        axis.legend(legend.values(), legend, **ABOVE)


def _curve(axis, seeds, key, look):
    """The line of a key, or None where no seed has it."""
    lines = []
    for rows in seeds:
        points = {row["step"]: row[key] for row in rows if row.get(key) is not None}
        if points:
            lines.append(pd.Series(points))
    if not lines:
        return None
    every = pd.concat(lines, axis=1).sort_index()
    common = every.dropna().index
    if len(lines) > 1:  # between its own points each seed is a straight line
        every = every.interpolate("index", limit_area="inside").dropna()
        low, high = every.min(axis=1), every.max(axis=1)
        axis.fill_between(every.index, low, high, color=look["color"], alpha=.18, linewidth=0)
    mean = every.mean(axis=1)
    if key.startswith("eval/"):
        dots = list(mean.index.isin(common))
        look = look | {"marker": "o", "markersize": 4, "markevery": dots}
        return axis.plot(mean.index, mean, linewidth=1.2, **look)[0]
    if len(mean) > MANY:
        axis.plot(mean.index, mean, color=look["color"], alpha=.3, linewidth=.8)
        around = 2 * (len(mean) // MANY) + 1
        mean = mean.rolling(around, center=True).mean().fillna(mean)
    return axis.plot(mean.index, mean, linewidth=1.6, **look)[0]


def draw_methods(path, title, methods):
    """<path>-curves.png of {label: [run folder per seed]}, where two or more were trained by reward."""
    curves = {}
    for label, folders in methods.items():
        steps = [steps_of(folder) for folder in folders]
        if any("reward/mean" in row for rows in steps for row in rows):
            curves[label] = steps
    if len(curves) > 1:  # one stage's stand in its own folder
        panels = panels_of(*(folder for label in curves for folder in methods[label]))
        draw_curves(curves, f"{path}-curves.png", title, panels)
        say(f"curves: {path}-curves.png")
