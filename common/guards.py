"""Guards: what goes wrong in reinforcement learning of language models, seen in the numbers of a step, said with cause and remedy.

    row |= guards.watch(row, earlier, print)      # row: this step's metrics; earlier: those of the steps before it

The counts go to metrics.jsonl as guard/<name> = 1 or 0.

A guard never changes a run, except that an update with a loss or gradient that is not finite is skipped (and its batch kept).
"""

import math

NAMES = ("not_finite", "drift", "first_ratio", "flat_groups", "format", "length", "entropy", "kl", "selection")
NO_FORMAT = ("No answer is in the paper's format: the policy does not know the tags, every reward is that of a bad format, and "
             "reinforcement learning has nothing to start from. Warm it up first on demonstrations in this format (supervised), "
             "or start from weights that know it (--checkpoint)")
WINDOW = 3  # steps whose mean is judged, so that one odd batch says nothing


def _mean(rows, key):
    values = [r[key] for r in rows if isinstance(r.get(key), (int, float)) and math.isfinite(r[key])]
    return sum(values) / len(values) if values else None


def check(row, earlier, drift_limit=.02):
    """[(name, message)] of the guards that fire on this step.

    drift_limit: mean difference of log-probs between sampler and trainer, in nats; bf16 gives about .01, fp32 about 1e-6."""
    fired = []
    recent, start = [*earlier, row][-WINDOW:], [*earlier, row][:WINDOW]
    settled = len(earlier) >= 2 * WINDOW  # trends need a beginning to compare with

    def say(name, message):
        fired.append((name, message))
    if not math.isfinite(row.get("rollout/entropy", 0)) or not math.isfinite(row.get("reward/mean", 0)):
        say("not_finite", "the policy's log-probs are not finite: its weights are ruined. Start anew with a lower --lr")
    if row.get("train/not_finite"):
        say("not_finite", f"{row['train/not_finite']} updates had a loss or gradient that is not finite and were skipped; their batches are in the run folder "
                          "(nonfinite_*.safetensors). Likely too large a step, or an overflow in half precision: lower --lr or --grad-clip")
    drift = row.get("rollout/logprob_drift_mean")
    if drift is not None and drift > drift_limit:
        say("drift", f"sampler and trainer disagree on the log-probs of the same tokens by {drift:.3f} nats on average: old weights in the engine, another "
                     "temperature or chat template, or too coarse a dtype. Ratios start off 1 and clip at random; check --temperature, load weights each step")
    first = row.get("train/first_ratio")
    if first is not None and abs(first - 1) > 1e-3:
        say("first_ratio", f"the ratio of the first update is {first:.4f} and should be 1, since nothing was updated yet: log-probs are not reproducible "
                           "(dropout, kernels that depend on the batch, a dtype too coarse for the clip window); try --kernels off or --share-prefixes off")
    flat = _mean(recent, "rollout/flat_groups")
    if row.get("rollout/flat_groups") == 1:
        say("flat_groups", "every group of this step has one reward for all its samples, so nothing was learned from it. "
                           + (NO_FORMAT if row.get("reward/format") == 0 else "Larger groups, other questions or a higher --temperature give spread"))
    elif flat is not None and len(earlier) + 1 >= WINDOW and flat > .8:
        reward = _mean(recent, "reward/mean") or 0
        what = "all wrong: warm up longer, or take easier questions" if reward < .5 else "all right: take harder questions (--data)"
        say("flat_groups", f"{flat:.0%} of the groups have one reward for all their samples and teach nothing; they are mostly {what}; "
                           "larger groups (--group-size or --chains) or a higher --temperature give more spread")
    form, before = _mean(recent, "reward/format"), _mean(start, "reward/format")
    if form is not None and len(earlier) + 1 >= WINDOW and (form < .3 or settled and form < before - .2):
        say("format", f"only {form:.0%} of the trajectories are in valid format (at the start {before:.0%}): the policy does not know the tags, or is losing "
                      "them. See samples.jsonl for the rule that fails; warm up with demonstrations, lower --lr, or raise --max-response "
                      "(--max-turn) if turns are cut off")
    length, before = _mean(recent, "rollout/response_tokens"), _mean(start, "rollout/response_tokens")
    if settled and before and not .4 <= length / before <= 2.5:
        what = "grow" if length > before else "shrink"
        say("length", f"responses {what}: {before:.0f} tokens at the start, {length:.0f} now. Check that reward does not pay for length (or for "
                      "giving up): lower --lr, raise --kl-coef, or limit --max-response (--max-turn)")
    entropy, before = _mean(recent, "rollout/entropy"), _mean(start, "rollout/entropy")
    if settled and before and (entropy < .1 * before or entropy > 3 * before):
        what = "collapsed: samples of a group are copies, and nothing new is tried" if entropy < before else "blown up: the policy unlearns to write"
        say("entropy", f"entropy has {what} ({before:.3f} nats a token at the start, {entropy:.3f} now). Lower --lr, widen --clip-high (--clip) against "
                       "collapse, "
                       "or narrow the clip window against a blow-up; --temperature is for sampling only")
    kl = _mean(recent, "train/kl")
    if kl is not None and abs(kl) > .1:
        say("kl", f"updates of one step move the policy by {kl:.2f} nats a token: the clip window no longer holds it. Lower --lr, "
                  "or more questions an update (--mini-batch)")
    accepted = _mean(recent, "select/accepted")
    if accepted is not None and (row["select/accepted"] == 0 or len(earlier) + 1 >= WINDOW and accepted < .02):
        say("selection", f"only {row['select/accepted']:.1%} of the attempts were chosen to learn from: hardly any passes the threshold. Warm up longer "
                         "(--sft-trajectories), take easier questions (--data), start lower (--threshold), or allow more attempts (--max-attempts)")
    return fired


def look_at_start(summaries, say):
    """What an evaluation before the first step shows: {set: summary}; say(message) where there is nothing to start from."""
    if summaries and all(s["format"] < .02 for s in summaries.values()):
        say(f"format {max(s['format'] for s in summaries.values()):.2f} before training: {NO_FORMAT}")


def counts(fired):
    """{"guard/<name>": 0 or 1} for metrics.jsonl."""
    names = {name for name, _ in fired}
    return {f"guard/{name}": int(name in names) for name in NAMES}


def watch(row, earlier, say):
    """The counts of this step; say(message) gets what fired, the first time and then every tenth."""
    fired = check(row, earlier)
    for name, message in fired:
        if sum(r.get(f"guard/{name}", 0) for r in earlier) % 10 == 0:
            say(f"guard {name}: {message}")
    return counts(fired)
