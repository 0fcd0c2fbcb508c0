"""Draws results/real/first.png of the runs that results/ keeps: python -m docs.real_curve

Three arms with one model, over sampled tokens: exact match on held-out questions, greedy and at temperature 1
(a dot per evaluation, 95 % interval over questions), and the reward while training (means of eight steps and
their 95 % intervals)."""

import pandas as pd

from common.files import say
from common.report import committed, curves

REAL = committed.RESULTS / "real"
# {arm: (its run, {step: run evaluated then, greedy}, {step: pattern of runs evaluated at temperature 1})}
ARMS = {
    "GRPO": (
        "first-grpo-48",
        {0: "first-grpo", 20: "first-grpo", 40: "first-grpo-40", 48: "first-grpo-48"},
        {0: "first-start-sampled-all*", 20: "first-grpo-sampled*", 40: "first-grpo-40-sampled*",
         48: "first-grpo-48-sampled*"},
    ),
    "AT2PO": (
        "first-at2po-48",
        {0: "first-at2po", 20: "first-at2po", 48: "first-at2po-48"},
        {0: "first-start-sampled-all*", 20: "first-at2po-sampled*", 48: "first-at2po-48-sampled*"},
    ),
    "Mujica-MyGO": (
        "first-mygo-25",
        {0: "first-mygo-25", 9: "first-mygo", 25: "first-mygo-25"},
        {0: "first-mygo-start-sampled-all*", 9: "first-mygo-sampled*", 25: "first-mygo-25-sampled*"},
    ),
}
PANELS = "exact match, greedy", "exact match, sampled at temperature 1", "reward while training"
STEPS = 8  # of training in a mean
LOOK = {"marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1.4}


def mean_and_error(values):
    """(mean, half a 95 % interval) of independent values."""
    return values.mean(), 1.96 * values.std() / len(values) ** .5


def exact_match(pattern, when):
    """Several draws of a question count as one value, their mean."""
    rows = []
    for path in committed.matching(REAL / pattern):
        rows += committed.evaluations(committed.name_of(path), when)["dev"]["predictions"]
    return mean_and_error(pd.DataFrame(rows).groupby("id")["em"].mean())


def draw_arm(axes, arm, colour):
    run, greedy, sampled = ARMS[arm]
    steps = pd.DataFrame(committed.steps(f"real/{run}")).set_index("step")
    thousands = {0: 0.0, **(steps["rollout/tokens_total"] / 1000)}
    panels = [[], [], []]  # of (x, y, error)
    for step, name in greedy.items():
        panels[0].append((thousands[step], *exact_match(name, "after" if step else "before")))
    for step, pattern in sampled.items():
        panels[1].append((thousands[step], *exact_match(pattern, "after")))
    for first in range(0, len(steps) - STEPS + 1, STEPS):
        part = steps.iloc[first:first + STEPS]
        middle = part["rollout/tokens_total"].mean() / 1000
        panels[2].append((middle, *mean_and_error(part["reward/mean"])))
    for axis, points, top in zip(axes, panels, (.6, .6, 1), strict=True):
        axis.set_ylim(0, top)
        axis.errorbar(*zip(*points, strict=True), color=colour, label=arm, **LOOK)


def main():
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    with plt.rc_context(curves.FONT):
        figure, axes = plt.subplots(1, 3, figsize=(9.9, 2.9), layout="constrained", sharex=True)
        for number, arm in enumerate(ARMS):
            draw_arm(axes, arm, curves.colour_of(number))
        for axis, title in zip(axes, PANELS, strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel("thousand sampled tokens")
            axis.grid(alpha=.25)
        axes[2].legend(frameon=False, loc="lower right")
        figure.savefig(REAL / "first.png", dpi=200)
    say(f"curves: {REAL / 'first.png'}")


if __name__ == "__main__":
    main()
