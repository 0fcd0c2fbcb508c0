"""What a number of a step is called and shown as. Each script joins these tables with its own and hands the
result around; the progress line, the curves, the guards and docs/runs.md know no other names.

    METRICS = STEP | ROLLOUT | UPDATE | {
        "reward/d_TA": Metric("mean distance to the answer", panel="distances"),
    }
"""

from typing import NamedTuple


class Metric(NamedTuple):
    words: str         # what it is
    panel: str = ""    # the panel of curves.png that it is drawn in; empty = in none
    line: str = ""     # how the line of a step shows it, such as "em {:.3f}"; empty = not at all
    label: str = ""    # its name in the panel's legend; empty = the key behind its "/"


ANSWERS = "answers"
SECONDS = "seconds a step"

# of every step, whatever is trained
STEP = {
    "reward/mean": Metric("mean reward", ANSWERS, "reward {:.3f}", "reward"),
    "eval/em": Metric("exact match of an evaluation between steps, mean of the sets",
                      ANSWERS, label="test em"),
    "time/elapsed": Metric("seconds since the run was begun or resumed"),
    "time/left": Metric("seconds left, at the pace so far"),
    "time/threads": Metric("CPU threads, at the first step of a process"),
    "mem/gpu_gb": Metric("most GPU memory that was in use, GB", line="{:.1f} GB"),
}

# of a step that samples trajectories from a language model
ROLLOUT = {
    "reward/em": Metric("share of trajectories with the right answer", ANSWERS, "em {:.3f}"),
    "reward/format": Metric("share of trajectories in the paper's format", ANSWERS, "format {:.2f}"),
    "rollout/tokens": Metric("tokens sampled in this step"),
    "rollout/response_tokens": Metric("sampled tokens a trajectory",
                                      "sampled tokens a response", "len {:.0f}"),
    "rollout/turns": Metric("turns a trajectory", "searches and turns", "turns {:.1f}"),
    "rollout/searches": Metric("searches a trajectory that brought a result", "searches and turns"),
    "rollout/entropy": Metric("mean -log pi of the sampled tokens, nats",
                              "entropy (nats a token)", "ent {:.3f}"),
    "rollout/search_repairs": Metric("answers of a search server that had to be mended, so far"),
    "time/rollout": Metric("seconds of sampling, searches included", SECONDS, "roll {:.1f}s"),
}

# of a step that updates a language model
UPDATE = {
    "train/loss": Metric("the loss, mean of the updates; near 0 is normal, since advantages have mean 0"),
    "train/grad_norm": Metric("norm of the gradient before clipping, mean of the updates",
                              "update: gradient norm", "gnorm {:.2f}"),
    "train/updates": Metric("updates made"),
    "train/not_finite": Metric("updates skipped because loss or gradient was not finite"),
    "time/train": Metric("seconds of forward and backward passes and updates", SECONDS, "train {:.1f}s"),
}

# of an update with the ratio of new to old probabilities
RATIO = {
    "train/kl": Metric("mean log pi_old - log pi_new of the sampled tokens", line="kl {:.4f}"),
    "train/clip_fraction": Metric("share of sampled tokens whose gradient the clip window cuts off",
                                  "update: clip fraction", "clip {:.2f}"),
    "train/ratio": Metric("mean ratio of new to old probabilities", "update: ratio, new to old"),
    "train/ratio_max": Metric("the largest ratio of the step", "update: ratio, new to old"),
    "train/first_ratio": Metric("mean ratio of the first update; 1, since nothing was updated before it"),
    "rollout/logprob_drift_mean": Metric("mean difference of log-probs between sampler and trainer, nats"),
    "rollout/logprob_drift_max": Metric("the largest such difference"),
    "train/sampler_ratio": Metric("mean ratio of trainer to sampler probabilities, each at most 2; only with "
                                  "--sampler-correction"),
    "train/sampler_truncated": Metric("share of sampled tokens whose ratio was cut to 2; only with "
                                      "--sampler-correction"),
    "rollout/flat_groups": Metric("share of questions whose samples all have one reward",
                                  "groups without spread"),
    "time/old_logprobs": Metric("seconds for the log-probs of the sampling and the reference weights",
                                SECONDS),
}


def panels(metrics):
    """{panel: {key: label}} of a table of metrics, or of metrics.json, in the table's order."""
    found = {}
    for key, metric in metrics.items():
        metric = Metric(*metric)
        if metric.panel:
            labels = found.setdefault(metric.panel, {})
            labels[key] = metric.label or key.split("/", 1)[1]
    return found
