"""What a number of a step is called and shown as, and guards: what goes wrong in reinforcement learning of
language models, seen in these numbers, said with cause and remedy.

    METRICS = STEP | ROLLOUT | UPDATE | {
        "reward/d_TA": Metric("mean distance to the answer", panel="distances"),
    }
    row |= guards.watch(row, earlier, say, METRICS)   # row: this step's metrics; earlier: the steps before it

The progress line, the curves and docs/runs.md know no other names. No guard changes a run.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

# ---------------------------------------------------------------- metrics

class Metric(NamedTuple):
    words: str         # what it is
    panel: str = ""    # the panel of curves.png that it is drawn in; empty = in none
    line: str = ""     # how the line of a step shows it, such as "em {:.3f}"; empty = not at all
    label: str = ""    # its name in the panel's legend; empty = the key behind its "/", in words


ANSWERS = "answers"
FORM = "format"
SECONDS = "seconds per step"

# of every step, whatever is trained
STEP = {
    "reward/mean": Metric("mean reward", "reward", "reward {:.3f}", "reward"),
    "eval/em": Metric("exact match of an evaluation between steps, mean of the sets",
                      ANSWERS, label="EM, test"),
    "time/elapsed": Metric("seconds since the run was begun or resumed"),
    "time/left": Metric("seconds left, at the pace so far"),
    "time/threads": Metric("CPU threads, at the first step of a process"),
    "mem/gpu_gb": Metric("most GPU memory that was in use, GB", line="{:.1f} GB"),
}

# of a step that samples trajectories from a language model
ROLLOUT = {
    "reward/em": Metric("share of trajectories with the right answer", ANSWERS, "em {:.3f}",
                        "EM, training"),
    "reward/format": Metric("share of trajectories in the paper's format", FORM, "format {:.2f}"),
    "rollout/tokens": Metric("tokens sampled in this step"),
    "rollout/response_tokens": Metric("sampled tokens per trajectory",
                                      "sampled tokens per response", "len {:.0f}"),
    "rollout/turns": Metric("turns per trajectory", "searches and turns", "turns {:.1f}"),
    "rollout/searches": Metric("searches per trajectory that brought a result", "searches and turns"),
    "rollout/entropy": Metric("mean -log pi of the sampled tokens, nats",
                              "entropy (nats per token)", "ent {:.3f}"),
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
    "train/ratio": Metric("mean ratio of new to old probabilities", "update: ratio, new to old",
                          label="mean"),
    "train/ratio_max": Metric("the largest ratio of the step", "update: ratio, new to old",
                              label="largest"),
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
                                SECONDS, label="old log-probs"),
}

# said once, before the first evaluation and the first step
EVALUATION = (
    "An evaluation's line has 95 % intervals. Answer read = a gold answer stands in what was read; EM there: "
    "of these questions; copied right = the given answer stands in question or passages.")
LEGEND = (
    "A step's line has means: reward; em = right ones; format = valid ones; len, turns = sampled tokens and "
    "turns per trajectory; ent = entropy, nats per token; kl = how far updates moved; clip = tokens cut off; "
    "gnorm = gradient norm; roll, train = seconds.")


def panels(metrics):
    """{panel: {key: label}} of a table of metrics, or of metrics.json, in the table's order."""
    found = {}
    for key, metric in metrics.items():
        metric = Metric(*metric)
        if metric.panel:
            labels = found.setdefault(metric.panel, {})
            labels[key] = metric.label or key.split("/", 1)[-1].replace("_", " ")
    return found


# ---------------------------------------------------------------- guards

NO_FORMAT = (
    "No answer is in the paper's format, so reinforcement learning has nothing to start from. Warm up first: "
    "--warmup-data FILE, real questions with gold evidence or conversations in this format (--collect writes "
    "them); or start from weights that know it (--checkpoint)")
WINDOW = 3          # steps whose mean is judged, so that one odd batch says nothing
# nats between sampler and trainer, on average, that rounding explains: fp32 gives 1e-6 on the tiny policy and
# 1e-5 on 135M weights. In bf16, on text that was sampled: our engine .004 on Qwen2.5-Coder-0.5B, .023 on
# SmolLM2-135M; all of the model in bf16, as vLLM has it, .020 and .047. Old weights: 5e-3 and more
DRIFT_LIMIT = {"fp32": 1e-4, "bf16": .1}


@dataclass
class Seen:
    row: dict
    earlier: list
    precision: str = "fp32"     # of the products of sampler and trainer, the coarser of the two

    def recent(self, key):
        """Mean of the last three steps; None where none has the key."""
        return mean_of([*self.earlier, self.row][-WINDOW:], key)

    def start(self, key):
        return mean_of([*self.earlier, self.row][:WINDOW], key)

    @property
    def some_steps(self):
        return len(self.earlier) + 1 >= WINDOW

    @property
    def settled(self):
        """Whether there is a beginning to compare with."""
        return len(self.earlier) >= 2 * WINDOW


def mean_of(rows, key):
    values = [row[key] for row in rows if row.get(key) is not None]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else None


# each returns what it has to say, or None

def not_finite(seen):
    skipped = seen.row.get("train/not_finite")
    numbers = [seen.row.get(key, 0) for key in ("rollout/entropy", "reward/mean")]
    if not all(map(math.isfinite, numbers)):
        return "the policy's log-probs are not finite: its weights are ruined. Start anew with a lower --lr"
    if skipped:
        return f"{skipped} updates had a loss or gradient that is not finite and were skipped: lower --lr"


def drift(seen):
    mean = seen.row.get("rollout/logprob_drift_mean", 0)
    limit = DRIFT_LIMIT[seen.precision]
    if mean > limit:
        return (f"sampler and trainer differ in the log-probs of the same tokens by {mean:.2g} nats on "
                f"average, and {seen.precision} explains {limit:g}: old weights in the engine, another "
                "--temperature or chat template. What rounding does, --sampler-correction token weighs out")


def first_ratio(seen):
    first = seen.row.get("train/first_ratio", 1)
    if abs(first - 1) > 1e-3:
        return (f"the ratio of the first update is {first:.4f} and should be 1: the products are too coarse "
                "for the clip window (--precision fp32), or this model draws random numbers in training")


def flat_groups(seen):
    flat = seen.recent("rollout/flat_groups")
    if seen.row.get("rollout/flat_groups") == 1:
        remedy = "Larger groups, other questions or a higher --temperature give spread"
        if seen.row.get("reward/format") == 0:
            remedy = NO_FORMAT
        return "every group has one reward for all its samples: nothing was learned from this step. " + remedy
    if flat is not None and seen.some_steps and flat > .8:
        what = "all right: take harder questions (--data)"
        if (seen.recent("reward/mean") or 0) < .5:
            what = "all wrong: warm up longer, or take easier questions"
        return (f"{flat:.0%} of the groups have one reward for all their samples and teach nothing. They are "
                f"mostly {what}, larger groups (--group-size, --chains) or a higher --temperature")


def bad_format(seen):
    now = seen.recent("reward/format")
    before = seen.start("reward/format")
    if now is None or not seen.some_steps:
        return None
    if now < .3 or seen.settled and now < before - .2:
        return (f"only {now:.0%} of the trajectories are in valid format (at the start {before:.0%}); "
                "samples.jsonl has the rule that fails. Warm up, lower --lr, or raise --max-response "
                "(--max-turn) if turns are cut off")


def calls(seen):
    now = seen.recent("rollout/searches")
    before = seen.start("rollout/searches")
    if seen.settled and now is not None and now < .5 and now < .5 * before:
        return (f"calls fall towards none: {before:.2f} a trajectory at the start, {now:.2f} now. Begin with "
                "weights that call and are right at times (--warmup-data, --checkpoint), or lower --lr")


def kl(seen):
    mean = seen.recent("train/kl") or 0
    if abs(mean) > .1:
        return (f"updates of one step move the policy by {mean:.2f} nats per token: the clip window no "
                "longer holds it. Lower --lr, or more questions per update (--mini-batch)")


GUARDS = {  # name: (the metric that it looks at, what it says)
    "not_finite": ("reward/mean", not_finite),
    "drift": ("rollout/logprob_drift_mean", drift),
    "first_ratio": ("train/first_ratio", first_ratio),
    "flat_groups": ("rollout/flat_groups", flat_groups),
    "format": ("reward/format", bad_format),
    "calls": ("rollout/searches", calls),
    "kl": ("train/kl", kl),
}


def watch(row, earlier, say, metrics, more=None, precision="fp32"):
    """{"guard/<name>": 1 where it fires on this step, else 0} of the guards whose metric is in the script's
    table, and of `more`, its own {name: guard}. say(message) gets what fired, the first time and then every
    tenth."""
    seen = Seen(row, earlier, precision)
    guards = {name: guard for name, (key, guard) in GUARDS.items() if key in metrics}
    fired = {}
    for name, guard in (guards | (more or {})).items():
        message = guard(seen)
        fired[f"guard/{name}"] = int(message is not None)
        times = sum(r.get(f"guard/{name}") or 0 for r in earlier)
        if message and times % 10 == 0:
            say(f"guard {name}: {message}")
    return fired


def look_at_start(evaluations, say):
    """What evaluations before the first step show, {set: {"summary", …}}: say(message) where nothing can be
    learned."""
    most = max((e["summary"]["format"] for e in evaluations.values()), default=1)
    if most < .02:
        say(f"format {most:.2f} before training: {NO_FORMAT}")
