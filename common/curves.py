"""curves.png: the metrics of a run, or of several over one another."""

import os
from pathlib import Path

SHARES = ("answers", "groups without spread")  # panels from 0 to 1
STYLES = ("-", "--", ":", "-.", (0, (6, 1, 1, 1, 1, 1)))


def draw_curves(runs, path, title, panels):
    """Curves of {label: metrics rows}: thin = each step, thick = running mean, dots = evaluations.
    One run: a colour a key; several: a colour a run, a line style a key.

    panels: {title: {key: label}}, those without data are left out.
    path: a file name that ends in .png, .pdf or .svg."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    there = set()
    for rows in runs.values():
        for row in rows:
            there |= {key for key, value in row.items() if value is not None}
    panels = {name: keys for name, keys in panels.items() if there & keys.keys()}
    lines = 1 if len(panels) < 2 else 2
    columns = max(1, -(-len(panels) // lines))
    path = Path(path)
    figure, axes = plt.subplots(
        lines, columns,
        figsize=(max(9, 4.25 * columns), 3.6 * lines),
        layout="constrained",
        squeeze=False,
    )
    for axis in axes.flat[len(panels):]:
        axis.axis("off")
    for axis, (name, keys) in zip(axes.flat, panels.items(), strict=False):
        _draw_panel(plt, axis, name, keys, runs)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.suptitle(title, x=.01, ha="left", fontsize=13)
    if len(runs) > 1:
        swatches = []
        for i in range(len(runs)):
            swatches.append(plt.Line2D([], [], color=f"C{i}", linewidth=3))
        aside = columns < 3  # no room for them beside the title
        figure.legend(
            swatches, runs,
            loc="outside right center" if aside else "outside upper right",
            ncols=1 if aside else len(runs),
            frameon=False,
        )
    unfinished = path.with_suffix(".tmp" + path.suffix)
    figure.savefig(unfinished, dpi=110)
    plt.close(figure)
    os.replace(unfinished, path)


def _draw_panel(plt, axis, name, keys, runs):
    for i, rows in enumerate(runs.values()):
        for k, (key, label) in enumerate(keys.items()):
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            if not points:
                continue
            colour = f"C{k}"
            style = "-"
            if len(runs) > 1:
                colour = f"C{i}"
                style = STYLES[k % len(STYLES)]
            _curve(axis, points, key, label, colour, style)
    axis.set_title(name, fontsize=11, loc="left")
    axis.grid(alpha=.25)
    axis.spines[["top", "right"]].set_visible(False)
    if name in SHARES:
        axis.set_ylim(-.02, 1.02)
    elif axis.lines and "ratio" not in name:
        lowest = min(min(line.get_ydata()) for line in axis.lines)
        if lowest >= 0:
            axis.set_ylim(bottom=0)
    named = {}
    for line in axis.lines:
        label = line.get_label()
        if not label.startswith("_"):
            named[label] = line
    if len(keys) > 1 and named:
        swatches = []
        for line in named.values():
            swatches.append(plt.Line2D(
                [], [],
                color=line.get_color() if len(runs) == 1 else "grey",
                linestyle=line.get_linestyle(),
                marker=line.get_marker()))
        fontsize = 9 if len(runs) == 1 else 8
        axis.legend(swatches, named, frameon=False, fontsize=fontsize)


def _curve(axis, points, key, label, colour, style):
    x, y = zip(*points, strict=True)
    if key.startswith("eval/"):
        axis.plot(x, y, "o--", color=colour, label=label, markersize=7)
        return
    axis.plot(x, y, color=colour, alpha=.3, linewidth=1)
    mean = y[0]
    smooth = []
    for value in y:
        mean = .7 * mean + .3 * value
        smooth.append(mean)
    axis.plot(x, smooth, linestyle=style, color=colour, linewidth=2, label=label)


def draw_recall(sets, path):
    """Share of the missing gold among the best k sentences; sets {name: {gold given: [share at k = 1,
    …]}}."""
    figure, axis, save = _figure(path)
    styles = (":", "-", "-.", "--") * len(sets)
    for style, (name, curves) in zip(styles, sets.items(), strict=False):
        for i, (given, shares) in enumerate(curves.items()):
            label = f"{name}, {given} gold given"
            axis.plot(range(1, len(shares) + 1), shares, style, color=f"C{i}", label=label)
    axis.set(xlabel="best k sentences", ylabel="share of the missing gold among them", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(frameon=False)
    save()


def draw_ranks(counts, correlation, path):
    """How often each pair of ranks came: counts[rank of the reward][rank of p], both from the lowest."""
    figure, axis, save = _figure(path)
    points = [(x + 1, y + 1, n) for y, row in enumerate(counts) for x, n in enumerate(row) if n]
    if points:
        x, y, n = zip(*points, strict=True)
        sizes = [400 * count / max(n) for count in n]
        figure.colorbar(axis.scatter(x, y, s=sizes, c=n, cmap="viridis"), label="paths")
    axis.set(
        xlabel="rank of the path's probability",
        ylabel="rank of its reward",
        title=f"mean rank correlation {correlation:.2f}",
    )
    save()


def _figure(path):
    """(figure, axis, function that writes it)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axis = plt.subplots(figsize=(6.4, 4.8), layout="constrained")
    axis.spines[["top", "right"]].set_visible(False)

    def save():
        figure.savefig(path, dpi=110)
        plt.close(figure)

    return figure, axis, save
