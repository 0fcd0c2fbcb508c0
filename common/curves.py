"""curves.png: the metrics of a run, or of several over one another."""

import os
from pathlib import Path

PANELS = (("answers", ("reward/mean", "reward/em", "reward/format", "eval/em")), ("entropy (nats a token)", ("rollout/entropy",)),
          ("searches and turns", ("rollout/searches", "rollout/turns")), ("sampled tokens a response", ("rollout/response_tokens", "rollout/tokens_right")),
          ("distances of right steps", ("reward/d_TA", "reward/d_TQ")), ("update: clip fraction", ("train/clip_fraction",)),
          ("update: ratio, new to old", ("train/ratio", "train/ratio_max")), ("update: gradient norm", ("train/grad_norm",)),
          ("groups without spread", ("rollout/flat_groups",)), ("threshold K, share chosen", ("select/threshold", "select/accepted")),
          ("seconds a step", ("time/rollout", "time/scoring", "time/old_logprobs", "time/train")))


def draw_curves(runs, path, title, ink=None):
    """Curves of {label: metrics rows}: thin = each step, thick = running mean, dots = evaluations. One run: a colour a key; several: a
    colour a run, a line style a key. path: a file name that ends in .png, .pdf or .svg, or a binary file. ink: colour of text on a
    transparent ground; None = black on white."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    colours = {} if ink is None else {f"{part}.{kind}": ink for part in ("xtick", "ytick", "axes", "text") for kind in ("color", "edgecolor", "labelcolor")
                                      if f"{part}.{kind}" in plt.rcParams}
    with plt.rc_context(colours | ({} if ink is None else {"axes.titlecolor": ink})):
        panels = [(name, keys) for name, keys in PANELS if any(r.get(k) is not None for rows in runs.values() for r in rows for k in keys)]
        columns = max(1, -(-len(panels) // 2))
        figure, axes = plt.subplots(2, columns, figsize=(4.25 * columns, 7.2), layout="constrained", squeeze=False)
        for axis in axes.flat[len(panels):]:
            axis.axis("off")
        for axis, (name, keys) in zip(axes.flat, panels, strict=False):
            for i, rows in enumerate(runs.values()):
                for k, key in enumerate(keys):
                    points = [(r["step"], r[key]) for r in rows if r.get(key) is not None]
                    if points:
                        label = {"reward/mean": "reward", "eval/em": "test em"}.get(key, key.split("/", 1)[1])
                        colour, style = (f"C{k}", "-") if len(runs) == 1 else (f"C{i}", ("-", "--", ":", "-.")[k])
                        _curve(axis, points, key, label, colour, style)
            axis.set_title(name, fontsize=11, loc="left")
            axis.grid(alpha=.25)
            axis.spines[["top", "right"]].set_visible(False)
            if name in ("answers", "groups without spread"):
                axis.set_ylim(-.02, 1.02)
            elif axis.lines and "ratio" not in name:
                axis.set_ylim(bottom=0)
            named = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
            if len(keys) > 1 and named:
                styles = [plt.Line2D([], [], color=line.get_color() if len(runs) == 1 else "grey", linestyle=line.get_linestyle(), marker=line.get_marker())
                          for line in named.values()]
                axis.legend(styles, named, frameon=False, fontsize=9 if len(runs) == 1 else 8)
        for axis in axes[1]:
            axis.set_xlabel("step")
        figure.suptitle(title, x=.01, ha="left", fontsize=13)
        if len(runs) > 1:
            swatches = [plt.Line2D([], [], color=f"C{i}", linewidth=3) for i in range(len(runs))]
            figure.legend(swatches, runs, loc="outside upper right", ncols=len(runs), frameon=False)
        target = path if hasattr(path, "write") else Path(path).with_suffix(".tmp" + Path(path).suffix)
        figure.savefig(target, dpi=110, transparent=ink is not None)
        plt.close(figure)
    if target is not path:
        os.replace(target, path)


def _curve(axis, points, key, label, colour, style):
    x, y = zip(*points, strict=True)
    if key.startswith("eval/"):
        axis.plot(x, y, "o--", color=colour, label=label, markersize=7)
        return
    axis.plot(x, y, color=colour, alpha=.3, linewidth=1)
    mean, smooth = y[0], []
    for value in y:
        mean = .7 * mean + .3 * value
        smooth.append(mean)
    axis.plot(x, smooth, style, color=colour, linewidth=2, label=label)
