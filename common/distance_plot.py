"""A plot of distances along trajectories (bi_rar.py)."""

from common import rollout
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
        steps = {}
        for p in rows:
            if p["em"] != right:
                continue
            scored = [n[key] for n in p["nodes"] if key in n]
            for k, distance in enumerate(scored, 1):
                steps.setdefault(k, []).append(distance)
        steps = {k: sorted(values) for k, values in steps.items() if len(values) >= 5}
        if not steps:
            continue
        x = list(steps)
        means = [rollout.mean(values) for values in steps.values()]
        axis.plot(x, means, "o-", color=colour, label=name)
        low = [values[len(values) // 4] for values in steps.values()]
        high = [values[len(values) * 3 // 4] for values in steps.values()]
        axis.fill_between(x, low, high, color=colour, alpha=0.15)
