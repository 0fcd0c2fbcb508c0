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
    panel: str = ""    # the panel of the curves that it is drawn in; empty = in none
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
    "train/lr": Metric("learning rate of the step's last update"),
    "time/elapsed": Metric("seconds since the run was begun or resumed"),
    "time/left": Metric("seconds left, at the pace so far"),
    "time/threads": Metric("CPU threads"),
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
    "train/right_moved": Metric("mean change of log-probs by the step's updates, nats per token with a "
                                "positive advantage, in the last mini-batch; at2po.py"),
    "train/wrong_moved": Metric("the same of tokens with a negative advantage"),
    "train/clip_fraction": Metric("share of sampled tokens whose gradient the clip window cuts off",
                                  "update: clip fraction", "clip {:.2f}"),
    "train/ratio": Metric("mean ratio of new to old probabilities", "update: ratio, new to old",
                          label="mean"),
    "train/ratio_max": Metric("the largest ratio of the step", "update: ratio, new to old",
                              label="largest"),
    "train/first_ratio": Metric("mean ratio of the first update, where another pass gave its old log-probs; "
                                "1, since nothing was updated before it"),
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

POLICY = STEP | ROLLOUT | UPDATE | RATIO  # of a step that trains a language model by reward

# said once, behind the first evaluation
EVALUATION = (
    "An evaluation's line has 95 % intervals. Answer read = a gold answer stands in what was read; EM there: "
    "of these questions; copied right = the given answer stands in question or passages.")


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
    "them); longer (--warmup-steps), if it did; or start from weights that know it (--checkpoint)")
WINDOW = 3          # steps whose mean is judged, so that one odd batch says nothing
# nats between sampler and trainer, on average, that rounding explains: fp32 gives 1e-6 on the tiny policy and
# 1e-5 on 135M weights. In bf16, on text that was sampled: our engine .004 on Qwen2.5-Coder-0.5B, .023 on
# SmolLM2-135M; all of the model in bf16, as vLLM has it, .020 and .047. Old weights: 5e-3 and more
DRIFT_LIMIT = {"fp32": 1e-4, "bf16": .1}
# nats per token: the right answers of an update that broke a policy fell by .31 (results/notes/real.md, one
# group); in 38 other groups they moved by -.02 to .07
RIGHT_MOVED = -.1


@dataclass
class Seen:
    """The steps so far. A number that is not there is nan, as are means of none."""
    row: dict                   # this one's
    earlier: list
    precision: str = "fp32"     # of the products of sampler and trainer, the coarser of the two

    def now(self, key):
        return self.row.get(key, math.nan)

    def recent(self, key):
        """Mean of the last three steps."""
        return mean_of([*self.earlier, self.row][-WINDOW:], key)

    def start(self, key):
        return mean_of([*self.earlier, self.row][:WINDOW], key)

    @property
    def some_steps(self):
        return len(self.earlier) + 1 >= WINDOW


def mean_of(rows, key):
    values = [row[key] for row in rows if row.get(key) is not None]
    values = [value for value in values if math.isfinite(value)]
    return sum(values) / len(values) if values else math.nan


def faults(seen):
    """(guard, the metric that it looks at, whether it fires, what it says)"""
    some_steps, settled = seen.some_steps, len(seen.earlier) >= 2 * WINDOW
    finite = map(math.isfinite, (seen.row.get("rollout/entropy", 0), seen.row.get("reward/mean", 0)))
    drift, limit = seen.now("rollout/logprob_drift_mean"), DRIFT_LIMIT[seen.precision]
    ratio, moved = seen.now("train/first_ratio"), seen.recent("train/kl")
    flat, recently_flat = seen.now("rollout/flat_groups"), seen.recent("rollout/flat_groups")
    right = seen.now("train/right_moved")
    valid, valid_before = seen.recent("reward/format"), seen.start("reward/format")
    calls, calls_before = seen.recent("rollout/searches"), seen.start("rollout/searches")
    return (
        ("not_finite", "reward/mean", seen.row.get("train/not_finite") or not all(finite),
         "log-probs, loss or gradient are not finite. Such an update is skipped: lower --lr. Where the "
         "log-probs are not, the weights are ruined: start anew"),
        ("drift", "rollout/logprob_drift_mean", drift > limit,
         f"sampler and trainer differ in the log-probs of the same tokens by {drift:.2g} nats on average, "
         f"and {seen.precision} explains {limit:g}: old weights in the engine, another --temperature or chat "
         "template. What rounding does, --sampler-correction token weighs out"),
        ("first_ratio", "train/first_ratio", abs(ratio - 1) > 1e-3,
         f"the ratio of the first update is {ratio:.4f} and should be 1: the products are too coarse for "
         "the clip window (--precision fp32), or this model draws random numbers in training"),
        ("flat_groups", "rollout/flat_groups", flat == 1 or some_steps and recently_flat > .8,
         f"{flat:.0%} of the groups have one reward for all their samples and teach nothing. All right: take "
         "harder questions (--data); all wrong: warm up longer, or take easier ones; larger groups "
         "(--group-size, --chains) and a higher --temperature give spread"),
        ("format", "reward/format", some_steps and valid < .3 or settled and valid < valid_before - .2,
         f"only {valid:.0%} of the trajectories are in valid format (at the start {valid_before:.0%}); "
         "samples.jsonl has the rule that fails. Warm up, lower --lr, or raise --max-response (--max-turn) "
         "if turns are cut off"),
        ("calls", "rollout/searches", settled and calls < min(.5, .5 * calls_before),
         f"calls fall towards none: {calls_before:.2f} a trajectory at the start, {calls:.2f} now. "
         "Begin with weights that call and are right (--warmup-data, --checkpoint), or lower --lr"),
        ("kl", "train/kl", abs(moved) > .1,
         f"updates of one step move the policy by {moved:.2f} nats per token: the clip window no longer "
         "holds it. Lower --lr, or more questions per update (--mini-batch)"),
        ("right_moved", "train/right_moved", right < RIGHT_MOVED,
         f"the step's updates lowered what was right, by {-right:.2f} nats per token: right and wrong "
         "answers that share their words fall together, and the policy may break. Begin again with a lower "
         "--lr or a --kl-coef"),
    )


def watch(row, earlier, say, metrics, more=None, precision="fp32"):
    """{"guard/<name>": 1 where it fires on this step, else 0}: of `faults`, and of `more`, a script's own
    {name: function of Seen that returns a message or None}. say(message) gets what fired, the first time and
    then every tenth."""
    seen = Seen(row, earlier, precision)
    messages = {name: fired and words for name, key, fired, words in faults(seen) if key in metrics}
    messages |= {name: guard(seen) for name, guard in (more or {}).items()}
    for name, message in messages.items():
        times = sum(r.get(f"guard/{name}") or 0 for r in earlier)
        if message and times % 10 == 0:
            say(f"guard {name}: {message}")
    return {f"guard/{name}": int(bool(message)) for name, message in messages.items()}


def look_at_start(evaluations, say):
    """What evaluations before the first step show, {set: {"summary", …}}: say(message) where nothing can be
    learned."""
    most = max((e["summary"]["format"] for e in evaluations.values()), default=1)
    if most < .02:
        say(f"format {most:.2f} before training: {NO_FORMAT}")
