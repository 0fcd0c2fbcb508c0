"""A plot of distances along trajectories (bi_rar.py)."""

import pandas as pd

from common.report import evaluations

LINES = (
    (1, "right", "#1d7f4c"),
    (0, "wrong", "#b3372f"),
)


def plot_distances(runs, path):
    """Both distances along right and wrong trajectories, mean and interquartile range a step, of {label: run
    folder} (merged left out)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    trained = [label for label in runs if not label.startswith("lambda")]
    runs = {label: runs[label] for label in trained} or runs
    figure, axes = plt.subplots(
        2,
        len(runs),
        figsize=(4.2 * len(runs), 6),
        layout="constrained",
        squeeze=False,
        sharey="row",
        sharex=True,
    )
    for column, (label, folder) in zip(axes.T, runs.items(), strict=True):
        rows = []
        for evaluation in evaluations(folder).values():
            rows += evaluation["predictions"]
        column[0].set_title(label, loc="left")
        column[1].set_xlabel("step (turn)")
        for axis, key in zip(column, ("d_TA", "d_TQ"), strict=True):
            draw_distances(axis, rows, key)
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
            axis.grid(alpha=0.25)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("distance to the answer")
    axes[1][0].set_ylabel("distance to the question")
    if axes[0][0].lines:
        axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_distances(axis, rows, key):
    """Of right and of wrong trajectories, steps that at least five of them have."""
    for right, name, colour in LINES:
        distances = []
        for row in rows:
            if row["em"] == right:
                scored = [node[key] for node in row["nodes"] if key in node]
                distances.append(scored)
        steps = pd.DataFrame(distances, dtype=float)
        steps = steps.dropna(axis=1, thresh=5)
        if steps.empty:
            continue
        x = steps.columns + 1
        axis.plot(x, steps.mean(), "o-", color=colour, label=name)
        low = steps.quantile(.25)
        high = steps.quantile(.75)
        axis.fill_between(x, low, high, color=colour, alpha=.15)
