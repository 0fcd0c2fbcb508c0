"""The numbers of trajectories that call tools (omne_r1.judge), and of learning from conversations."""

import re
from collections import Counter

from common import metrics, rollout
from common.files import warn
from common.guards import Metric

# of a step that samples
CALLS = {
    "rollout/searches": Metric("calls a trajectory, also those that nobody could read", "calls"),
    "reward/normalised": Metric("share of answers that are right under SQuAD's normalisation"),
    "reward/rounds": Metric("share of rounds in the right form, mean of the trajectories", "answers"),
    "train/ref_kl": Metric("mean log-ratio of the sampling weights to the first ones, before the update"),
    "rollout/repetitions": Metric("calls a trajectory that were made before", "calls", "again {:.2f}"),
    "rollout/standard": Metric(
        "share of trajectories that call entity_matcher once, then node_info alone", "answers"),
    "rollout/faults": Metric("calls a trajectory that could not be made", "calls"),
    "rollout/lost": Metric(
        "trajectories that were not learned from: a tool's server failed; only where there are any"),
    "train/value_loss": Metric("mean squared error of the critic", "critic", "value {:.3f}"),
    "train/explained_variance": Metric(
        "share of the returns' variance that the critic explains", "critic"),
}

# of a step of weighted supervised updates
WEIGHTED = {
    "train/loss": Metric("the weighted loss, mean of the updates", "weighted loss", "loss {:.4f}"),
    "train/lr": Metric("learning rate of the step's last update"),
    "sft/weight": Metric("mean weight of a learned token"),
    "sft/tokens": Metric("tokens that the step's updates learned from"),
}


def rollout_metrics(done):
    """Means over the step's trajectories."""
    return {
        **rollout.means(done),
        "reward/rounds": rollout.mean(t.info.format for t in done),
        "reward/normalised": rollout.mean(t.info.normalised for t in done),
        "rollout/tokens": sum(t.sampled_tokens for t in done),
        "rollout/entropy": rollout.entropy([turn for t in done for turn in t.turns]),
        "rollout/repetitions": rollout.mean(t.info.repetitions for t in done),
        "rollout/standard": rollout.mean(is_standard(t) for t in done),
        "rollout/faults": rollout.mean(sum(t.info.faults.values()) for t in done),
    }


def summary(rows, done, name):
    """Of an evaluation's rows and the trajectories that they are of; name: the set's."""
    faults = sum((Counter(t.info.faults) for t in done), Counter())
    about = {"faults": dict(sorted(faults.items())), "patterns": metrics.by_pattern(rows)}
    lost = sum(t.info.lost for t in done)
    if lost:
        about["lost"] = lost
        warn(f"{name}: a tool's server failed in {lost} of {len(done)} trajectories: they count as wrong")
    keys = ("em", "normalised", "f1", "searches", "rounds", "tokens", "repetitions", "standard")
    return about | metrics.summarize(rows, keys) | metrics.by_standard(rows)


def is_standard(trajectory):
    """Whether entity_matcher was called once, then node_info alone (sec. 4.2.4)."""
    return bool(re.fullmatch("mn+a", trajectory.info.pattern))
