"""Bi-RAR's distances as metrics of a training step, as records for the page, and its stages as a table.

step_reward(distance): Eq 7. action(text): a search or an answer, and what it says."""

from pathlib import Path

from common import rollout, training
from common.guards import POLICY, SECONDS, Metric
from common.page import record

# ---------------------------------------------------------------- metrics

PANEL = "distances of right trajectories"
METRICS = POLICY | {
    "reward/d_TA": Metric("mean distance of right trajectories' reasoning steps to the answer", PANEL,
                          label="to the answer"),
    "reward/d_TQ": Metric("mean distance of right trajectories' reasoning steps to the question", PANEL,
                          label="to the question"),
    "reward/cascade": Metric("mean reward of right trajectories"),
    "reward/steps_scored": Metric("different reasoning steps whose distances were measured"),
    "rollout/tokens_right": Metric("sampled tokens of a right trajectory", "sampled tokens per response"),
    "time/scoring": Metric("seconds for the distances", SECONDS),
}


def step_metrics(groups, retriever):
    """Means over the training step's trajectories; distances over those that were measured."""
    done = [t for group in groups for t in group]
    rewards = [[t.reward for t in group] for group in groups]
    with_spread = sum(map(training.has_spread, rewards))
    turns = [turn for t in done for turn in t.turns]
    right = [t for t in done if t.info.em]
    row = rollout.means(done) | rollout.search_repairs(retriever)
    row["rollout/flat_groups"] = 1 - with_spread / len(groups)
    row["rollout/tokens"] = sum(t.sampled_tokens for t in done)
    row["rollout/tokens_right"] = rollout.mean(t.sampled_tokens for t in right)
    row["rollout/entropy"] = rollout.entropy(turns)
    scored = [t for t in done if t.info.d_TA is not None]
    if scored:
        row["reward/cascade"] = rollout.mean(t.reward for t in right)
        row["reward/d_TA"] = rollout.mean(d for t in scored for d in t.info.d_TA)
        row["reward/d_TQ"] = rollout.mean(d for t in scored for d in t.info.d_TQ)
    return row


# ---------------------------------------------------------------- records

CASCADES = {"TA": ("answer", "forward cascade (Eq 5)"), "TQ": ("question", "backward cascade (Eq 6)")}


def cascade_facts(trajectory, step_reward):
    """A dict per turn: its distances, their rewards, what each adds to its cascade, and how."""
    facts = [{} for _ in trajectory.turns]
    for name, (end, words) in CASCADES.items():
        left = 1.0
        along = getattr(trajectory.info, f"d_{name}") or []
        for d, of_turn in zip(along, facts, strict=False):
            r = step_reward(d)
            of_turn[f"d_{name}"] = d
            of_turn[f"r_{name}"] = r
            of_turn[f"cascade_{name}"] = left * r
            of_turn.setdefault("how", []).append(
                f"distance to the {end} d = {d:.3f} (Eq 4), r = exp(-d) = {r:.3f} (Eq 7), adds "
                f"{r:.3f} x {left:.3f} = {left * r:.3f} to the {words}")
            left *= 1 - r
    return facts


def why(trajectory, question, facts):
    """What led to the reward, in words."""
    info = trajectory.info
    equal = "equal" if info.em else "not equal"
    compared = record.compared(info.answer, question.answers)
    lines = [f"exact match: {compared}: {equal}"]
    if info.d_TA is not None:
        for name, (_, words) in CASCADES.items():
            added = [of_turn[f"cascade_{name}"] for of_turn in facts if f"cascade_{name}" in of_turn]
            terms = " + ".join(f"{x:.3f}" for x in added)
            earned = ""
            if abs(trajectory.reward - sum(added)) < 1e-9:
                earned = ", which is the reward"
            lines.append(f"{words}: {terms} = {sum(added):.4f}{earned}")
    return lines


def label(turn, action):
    """What a turn did: its query or its answer."""
    kind, said = action(turn.text)
    return f"search: {said}" if kind == "search" else kind or "invalid"


def group_record(trajectories, question, step_reward, action, **extra):
    """Trajectories of one question for the page."""
    facts = {id(t): cascade_facts(t, step_reward) for t in trajectories}
    rewards = [t.reward for t in trajectories]

    def of_turn(t, k):
        advantage = t.advantages[k] if t.advantages else None
        return {"label": label(t.turns[k], action), "advantage": advantage, **facts[id(t)][k]}

    def reasons(t, question):
        lines = why(t, question, facts[id(t)])
        if t.advantages and len(rewards) > 1:
            mean = sum(rewards) / len(rewards)
            lines.append(
                f"advantage of every turn (Eq 8): (reward {t.reward:.4f} - mean {mean:.4f}) / standard "
                f"deviation of {len(rewards)} = {t.advantages[0]:.3f}")
        return lines

    return record.group_of(question, trajectories, of_turn, reasons,
                           beside=["d_TA", "distance to the answer"], **extra)


def prediction(trajectory, question, step_reward, action):
    """A row of eval_<set>.json."""
    info = trajectory.info
    row = record.row(question, info, "answer problem em f1 searches", tokens=trajectory.sampled_tokens)
    if info.d_TA is not None:
        row |= {"d_TA": info.d_TA, "d_TQ": info.d_TQ}
    done = [label(turn, action) for turn in trajectory.turns if turn.observation]
    searches = [what for what in done if what != "invalid"]
    row["repeats"] = len(searches) - len(set(searches))  # made before, word for word
    return row | group_record([trajectory], question, step_reward, action)


# ---------------------------------------------------------------- the table of all stages

def show_table(cfg, stages):
    """<name>-table.json and <name>-curves.png of the stages that are evaluated, and of the merges."""
    path = Path(cfg.out) / "bi_rar" / cfg.name
    merges = sorted(path.parent.glob(f"{cfg.name}-merged-*"))
    from common import ladder
    ladder.show_table("bi_rar", [path], [*stages, *(m.name.removeprefix(f"{cfg.name}-") for m in merges)])
