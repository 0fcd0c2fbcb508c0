"""The numbers of a step of trajectories whose turns are scored by distances (bi_rar.py)."""

from common import rollout
from common.guards import SECONDS, Metric

PANEL = "distances of right steps"
DISTANCES = {
    "reward/d_TA": Metric("mean distance of right trajectories' steps to the answer", PANEL),
    "reward/d_TQ": Metric("mean distance of right trajectories' steps to the question", PANEL),
    "reward/cascade": Metric("mean reward of right trajectories"),
    "reward/steps_scored": Metric("different steps whose distances were measured"),
    "rollout/searches_right": Metric("searches of a right trajectory"),
    "rollout/tokens_right": Metric("sampled tokens of a right trajectory", "sampled tokens a response"),
    "time/scoring": Metric("seconds for the distances", SECONDS),
}


def rollout_metrics(groups):
    """Means over the step's trajectories; distances over the steps of those that were scored."""
    done = [t for group in groups for t in group]
    right = [t for t in done if t.info.em]
    scored = [t for t in done if t.info.d_TA is not None]
    row = {
        **rollout.means(done),
        "reward/format": rollout.mean(not (t.info.problem or t.info.invalid) for t in done),
        "rollout/tokens": sum(t.sampled_tokens for t in done),
        "rollout/searches_right": rollout.mean(t.info.searches for t in right),
        "rollout/tokens_right": rollout.mean(t.sampled_tokens for t in right),
        "rollout/entropy": rollout.entropy([turn for t in done for turn in t.turns]),
    }
    if scored:
        row["reward/cascade"] = rollout.mean(t.reward for t in right)
        row["reward/d_TA"] = rollout.mean(d for t in scored for d in t.info.d_TA)
        row["reward/d_TQ"] = rollout.mean(d for t in scored for d in t.info.d_TQ)
    return row
