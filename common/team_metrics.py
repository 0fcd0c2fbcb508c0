"""The numbers of an iteration of planners and workers (mygo_mujica.py), and a guard over them."""

from collections import Counter

from common import rollout
from common.guards import Metric

CHOICE = "threshold K, share chosen"
BY_THRESHOLD = ("mygo", "offline", "fixed")
TEAMS = {
    "rollout/searches": Metric("sub-questions a trajectory, also those that found nothing to read",
                               "searches and turns"),
    "rollout/tokens_total": Metric("tokens sampled so far; --token-budget ends training by it"),
    "train/tokens": Metric("tokens that the step's updates learned from"),
    "train/lr": Metric("learning rate of the step's last update"),
    "select/threshold": Metric("K of the iteration", CHOICE, "K {:.2f}"),
    "select/accepted": Metric("share of the attempts that were chosen to learn from", CHOICE),
    "select/attempts": Metric("attempts of the iteration", line="attempts {:.0f}"),
    "select/trajectories": Metric("attempts that were chosen", line="chosen {:.0f}"),
    "select/examples": Metric("conversations of planners and workers among them"),
    "select/questions": Metric("questions with a chosen attempt"),
    "faults/no_action": Metric("planner turns that neither ask nor answer; other faults likewise"),
}


def rollout_metrics(made, chosen, stage, K, examples):
    """Means over the step's trajectories; what was wrong with them, counted; what was chosen of them. Rewards
    are those of the first pass where further attempts go to the questions that need them. examples: what a
    trajectory gives to learn from."""
    done = [t for group in made for t in group]
    fair = [group[0] for group in made] if stage in BY_THRESHOLD else done
    sampled = [turn for t in done for e in examples(t) for turn in e.turns]
    picked = [t for group in chosen for t in group]
    tokens = sum(t.info.tokens for t in done)
    rewards = {key: value for key, value in rollout.means(fair).items() if key.startswith("reward/")}
    row = {
        **rollout.means(done),
        **rewards,
        "rollout/tokens": tokens,
        "rollout/response_tokens": tokens / len(done),
        "rollout/entropy": rollout.entropy(sampled),
        "select/attempts": len(done),
        "select/trajectories": len(picked),
        "select/accepted": len(picked) / len(done),
        "select/examples": sum(len(examples(t)) for t in picked),
        "select/questions": sum(map(bool, chosen)),
    }
    if stage in BY_THRESHOLD:
        row["select/threshold"] = K
    if stage == "grpo":
        row["rollout/flat_groups"] = 1 - row["select/questions"] / len(made)
    faults = sum((Counter(t.info.faults) for t in done), Counter())
    return row | {f"faults/{name.replace(' ', '_')}": n for name, n in sorted(faults.items())}


def few_are_chosen(seen):
    """A guard: hardly any attempt passes the threshold."""
    now, recent = seen.row.get("select/accepted"), seen.recent("select/accepted")
    if now is not None and (now == 0 or seen.some_steps and recent < 0.02):
        return (f"only {now:.1%} of the attempts were chosen to learn from: hardly any passes the threshold. "
                "Warm up longer (--sft-trajectories), take easier questions (--data), start lower "
                "(--threshold), or allow more attempts (--max-attempts)")
