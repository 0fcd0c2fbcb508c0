"""Trajectories that call tools (omne_r1.py): the names of their numbers, and their records for the page.

label(turn) -> what a turn is called on the page, such as the tool that it calls; the script knows its tags.
"""

import re
from collections import Counter
from dataclasses import dataclass

from common import data, metrics, rollout, training
from common.files import read_jsonl, say
from common.guards import POLICY, STEP, UPDATE, Metric
from common.page import record

PPO = POLICY | {
    "rollout/searches": Metric("calls per trajectory, also those that nobody could read", "calls"),
    "reward/rounds": Metric("share of rounds in the right form, mean of the trajectories", "answers"),
    "train/ref_kl": Metric("mean log-ratio of the sampling weights to the first ones, before the update"),
    "rollout/repetitions": Metric("calls per trajectory that were made before", "calls", "again {:.2f}"),
    "rollout/standard": Metric(
        "share of trajectories that call entity_matcher once, then node_info alone", "answers"),
    "train/value_loss": Metric("mean squared error of the critic", "critic", "value {:.3f}"),
    "train/explained_variance": Metric(
        "share of the returns' variance that the critic explains", "critic"),
}
del PPO["rollout/flat_groups"]  # advantages are not compared within groups

SFT = STEP | UPDATE | {
    "train/loss": Metric("the weighted loss, mean of the updates", "weighted loss", "loss {:.4f}"),
    "sft/weight": Metric("mean weight of a learned token", line="weight {:.2f}"),
    "sft/tokens": Metric("tokens that the step's updates learned from"),
}
NUMBERS = ("em", "normalised", "f1", "searches", "rounds", "tokens", "repetitions", "standard")
DIRECT_NUMBERS = tuple(name for name in NUMBERS if name != "rounds")


# ---------------------------------------------------------------- numbers

def step_row(done, batches, questions, tools, step, cfg, label):
    """What a step's row tells of its trajectories and of their credit, with a record for the page. cfg:
    omne_r1.Config."""
    credit = credit_of(batches, cfg.gamma, cfg.lam)
    return {
        "sample": sample_record(done, questions, step, cfg.group_size, label, credit),
        **critic_metrics(batches),
        **rollout.means(done),
        "reward/rounds": rollout.mean(t.info.format for t in done),
        "rollout/tokens": sum(t.sampled_tokens for t in done),
        "rollout/entropy": rollout.entropy([turn for t in done for turn in t.turns]),
        "rollout/repetitions": rollout.mean(t.info.repetitions for t in done),
        "rollout/standard": rollout.mean(is_standard(t) for t in done),
        **rollout.search_repairs(tools),
    }


def critic_metrics(batches):
    """Over the sampled tokens of all ranks: how much of the returns' variance the critic explains, and how
    far the sampling weights are from the reference."""
    errors = training.sampled(batches, lambda b: b.returns - b.values)
    spread = training.sampled(batches, lambda b: b.returns).var(correction=0)
    row = {"train/explained_variance": 0.0}
    if spread > 1e-12:
        row["train/explained_variance"] = float(1 - errors.var(correction=0) / spread)
    if batches[0].ref_logprobs is not None:
        log_ratios = training.sampled(batches, lambda b: b.old_logprobs - b.ref_logprobs)
        row["train/ref_kl"] = float(log_ratios.mean())
    return row


def update_metrics(meter):
    """Of a step's updates: with omne_r1.ppo_loss, or supervised ones with weights."""
    row, sums = meter.means(), meter.total
    if not sums.get("tokens"):  # no update was finite
        return row
    if "value_sum" in sums:
        row["train/value_loss"] = sums["value_sum"] / sums["tokens"]
    else:
        row |= {"sft/weight": sums["weight"] / sums["tokens"], "sft/tokens": sums["tokens"]}
    return row


def patterns_and_faults(rows):
    """What the summary of an evaluation's rows says besides their means."""
    faults = sum((Counter(row["faults"]) for row in rows), Counter())
    return {"faults": dict(sorted(faults.items())), "patterns": by_pattern(rows)} | by_standard(rows)


def by_standard(rows):
    """EM of the prediction rows that are "standard" and of the others, with intervals."""
    summary = {}
    for key, standard in (("em_standard", True), ("em_other", False)):
        ems = [row["em"] for row in rows if bool(row["standard"]) == standard]
        if ems:
            summary |= metrics.with_interval(key, ems)
    return summary


def by_pattern(rows):
    """The ten most frequent patterns of prediction rows: {pattern: [share, EM within it]}.

    >>> by_pattern([{"pattern": "mna", "em": 1}, {"pattern": "mna", "em": 0}, {"pattern": "a", "em": 0}])
    {'mna': [0.6667, 0.5], 'a': [0.3333, 0.0]}
    """
    ems = {}
    for row in rows:
        ems.setdefault(row["pattern"], []).append(row["em"])
    frequent = sorted(ems, key=lambda pattern: (-len(ems[pattern]), pattern))
    table = {}
    for pattern in frequent[:10]:
        count = len(ems[pattern])
        table[pattern] = [round(count / len(rows), 4), round(sum(ems[pattern]) / count, 4)]
    return table


def is_standard(trajectory):
    """Whether entity_matcher was called once, then node_info alone (sec. 4.2.4)."""
    return bool(re.fullmatch("mn+a", trajectory.info.pattern))


# ---------------------------------------------------------------- records

def group_record(trajectories, question, label, credit=None, **extra):
    """Trajectories of one question. credit: {(id(trajectory), turn): what credit_of says of it}."""
    def of_turn(t, k):
        return {"label": label(t.turns[k]), **(credit or {}).get((id(t), k), {})}

    return record.group_of(question, trajectories, of_turn, reasons, **extra)


def credit_of(batches, gamma, lam):
    """{(id(trajectory), turn): value and advantage of a round, and how they came about} of this rank's
    batches, whose advantages are whitened."""
    credit = {}
    for b in batches:
        for i, trajectory in enumerate(b.trajectories):
            for k, turn in enumerate(trajectory.turns):
                tokens = b.turn_ids[i] == k
                if not tokens.any():
                    continue
                value = float(b.values[i][tokens][0])
                returned = float(b.returns[i][tokens][0])
                advantage = float(b.advantages[i][tokens].mean())
                credit[id(trajectory), k] = {
                    "value": value,
                    "advantage": advantage,
                    "how": [
                        f"GAE (gamma {gamma:g}, lambda {lam:g}) at its first token: A = return - V = "
                        f"{returned:.3f} - ({value:.3f}) = {returned - value:.3f}",
                        f"mean of its {len(turn.ids)} tokens, whitened over the step: {advantage:.3f}",
                    ],
                }
    return credit


def reasons(trajectory, question):
    """Lines that say what led to a reward."""
    info = trajectory.info
    said = [
        f"accuracy: {info.answer!r} against {question.answers[0]!r}: {info.em:g}",
        f"rounds in the right form: {info.format:.2f}; calls made before: {info.repetitions}",
        f"pattern of its calls: {info.pattern}",  # docs/runs.md has the letters
    ]
    faults = [f"{name} {count}" for name, count in info.faults.items()]
    if faults:
        said.append("faults: " + ", ".join(faults))
    return said


def sample_record(done, questions, step, group_size, label, credit):
    """The step's first question with different rewards, else its first. credit: see credit_of."""
    groups = [done[i:i + group_size] for i in range(0, len(done), group_size)]
    i = record.first_with_spread([[t.reward for t in group] for group in groups])
    beside = ["value", "value V of the critic"]
    return group_record(groups[i], questions[i], label, credit, step=step, beside=beside)


def prediction(trajectory, question, label):
    """A row of eval_<set>.json."""
    names = "answer problem em normalised f1 searches repetitions pattern faults"
    row = record.row(
        question, trajectory.info, names, tokens=trajectory.sampled_tokens, rounds=len(trajectory.turns),
        standard=float(is_standard(trajectory)))
    return row | group_record([trajectory], question, label)


def direct_row(trajectory, question):
    """The same of an answer without calls."""
    names = "answer problem em normalised f1 searches repetitions"
    row = record.row(question, trajectory.info, names, tokens=trajectory.sampled_tokens, standard=0.0)
    return row | record.group_of(question, [trajectory], lambda t, k: {}, lambda t, q: [])


# ---------------------------------------------------------------- conversations to learn from

@dataclass
class Taught(rollout.Outcome):
    source: str = ""    # where the conversation is from: "sampled", "template" or a file's word


def to_learn(folder, examples, max_length, label):
    """The trajectories of at most so many tokens; the others are counted. samples.jsonl of the run folder
    shows the first and the last as they are trained on."""
    fit = [t for t in examples if t.length <= max_length]
    if not fit:
        raise data.DataError(f"no conversation fits into {max_length:,} tokens")
    if len(fit) < len(examples):
        say(f"sft: {len(examples) - len(fit)} of {len(examples)} conversations are over {max_length:,} "
            "tokens and left out")
    sources = Counter(t.info.source for t in fit)
    say("sft: " + ", ".join(f"{n} {source or 'given'}" for source, n in sources.items()))
    if not read_jsonl(folder.path / "samples.jsonl"):
        for t in fit[:1] + fit[-1:]:
            shown = record.group_of(
                data.Question(t.question_id, t.question_id, [""]),
                [t],
                lambda t, k: {"label": label(t.turns[k])},
                lambda t, q: [f"from: {t.info.source}"],
                step=0)
            folder.append("samples.jsonl", [shown])
    return fit
