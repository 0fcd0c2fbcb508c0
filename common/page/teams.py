"""Planners and their workers (mygo_mujica.py) as records for the page."""

from common import metrics
from common.page import record


def worker_node(number, parent, worker, tokenizer, advantage):
    """A worker as a node; one that had nothing to read sampled nothing."""
    info = worker.info
    label = info.asked + (f" [{info.entity}]" if info.entity else "")
    if not worker.turns:
        return {
            "id": number,
            "parents": [parent],
            "label": label,
            "sampled": False,
            "observation": info.sentence,
            "problem": info.problem,
        }
    node = record.turn_node(
        number,
        [parent],
        worker.turns[0],
        tokenizer,
        label=label,
        role="worker",
        advantage=advantage,
        problem=info.problem or None,
    )
    read = [f"[{i}] {line}" for i, line in enumerate(info.materials)]
    return node | {"observation": "\n".join(["read:", *read])}


def group_record(trajectories, question, tokenizer=None, chosen_by=None, **extra):
    """Trajectories of one question for the page: the DAG of planner turns and the workers between them.
    chosen_by: (the rule in words, the chosen trajectories)."""
    nodes, done = [record.root_node()], []
    for t in trajectories:
        advantage = t.advantages[0] if t.advantages else None
        path, parents = [0], [0]
        turns = zip(t.turns, t.info.workers, strict=True)
        for k, (turn, reports) in enumerate(turns, 1):
            label = f"plan {k}"
            if k == len(t.turns):
                label = f"answer: {t.info.answer or '-'}"
            planner = len(nodes)
            facts = {"label": label, "role": "planner", "advantage": advantage}
            nodes.append(record.turn_node(planner, parents, turn, tokenizer, **facts))
            parents = list(range(planner + 1, planner + 1 + len(reports))) or [planner]
            for number, worker in zip(parents, reports, strict=False):
                nodes.append(worker_node(number, planner, worker, tokenizer, advantage))
            path += range(planner, len(nodes))
        done.append(record.outcome(t, path, why(t, question, chosen_by)))
    return record.group(question, nodes, done, **extra)


def why(trajectory, question, chosen_by):
    """What led to the reward and to the choice, in words."""
    info = trajectory.info
    strings = record.compared(info.answer, question.answers)
    lines = [f"F1 (sec. 4.1): {strings}: {trajectory.reward:.2f}"]
    if chosen_by:
        rule, chosen = chosen_by
        was = "chosen" if any(trajectory is c for c in chosen) else "not chosen"
        lines.append(f"{rule}{was} to learn from")
    if info.faults:
        counted = [f"{name} {n}" for name, n in info.faults.items()]
        lines.append("counted: " + ", ".join(counted))
    return lines


def prediction(trajectory, question):
    """A row of eval_<set>.json."""
    names = ("answer", "problem", "em", "f1", "searches", "tokens", "faults")
    row = {"id": question.id}
    for name in names:
        row[name] = getattr(trajectory.info, name)
    read = []  # not what workers say of it
    for reports in trajectory.info.workers:
        for worker in reports:
            read += worker.info.materials
    found = metrics.stands_in(question.answers, " ".join(read))
    row["read"] = float(found)
    row["rounds"] = len(trajectory.turns)
    return row | group_record([trajectory], question)


def sample_record(policy, questions, made, chosen, stage, K, step):
    """The iteration's first question with different rewards."""
    rewards = [[t.reward for t in group] for group in made]
    i = record.first_with_spread(rewards)
    rule = f"K of this iteration {K:.3f}: " if stage in ("mygo", "offline") else ""
    more = {"step": step, "prompt_ids": made[i][0].prompt_ids}
    chosen_by = rule, chosen[i]
    return group_record(made[i], questions[i], policy.tokenizer, chosen_by, **more)
