"""What is told of planners and their workers (mygo_mujica.py): the numbers of an iteration and a guard over
them, records for the page."""

from collections import Counter

from common import metrics, rollout
from common.files import read_jsonl
from common.guards import POLICY, Metric
from common.page import record

# ---------------------------------------------------------------- numbers of an iteration

CHOICE = "threshold K, share chosen"
BY_THRESHOLD = ("mygo", "offline", "fixed")
METRICS = POLICY | {
    "rollout/searches": Metric("sub-questions per trajectory, also those that found nothing to read",
                               "searches and turns"),
    "rollout/tokens_total": Metric("tokens sampled so far; --token-budget ends training by it"),
    "train/tokens": Metric("tokens that the step's updates learned from"),
    "select/threshold": Metric("K of the iteration", CHOICE, "K {:.2f}"),
    "select/accepted": Metric("share of the attempts that were chosen to learn from", CHOICE),
    "select/attempts": Metric("attempts of the iteration", line="attempts {:.0f}"),
    "select/trajectories": Metric("attempts that were chosen", line="chosen {:.0f}"),
    "select/examples": Metric("conversations of planners and workers among them"),
    "faults/no_action": Metric("planner turns that neither ask nor answer; other faults likewise"),
}


def of_step(step, stage, state, questions, groups, selected, retriever):
    """What a step's row tells of what was sampled and chosen: means over its attempts, faults counted, a
    question for the page. Rewards are those of the first attempts where further ones go to the questions that
    need them. state: K of the iteration, tokens sampled so far."""
    sampled = [t for group in groups for t in group]
    turns = [turn for t in sampled for c in (t, *workers_of(t)) for turn in c.turns]
    picked = [t for group in selected for t in group]
    tokens = sum(t.info.tokens for t in sampled)
    row = rollout.means(sampled)
    if stage in BY_THRESHOLD:
        first = rollout.means([group[0] for group in groups])
        row |= {key: value for key, value in first.items() if key.startswith("reward/")}
        row["select/threshold"] = state["K"]
    if stage == "grpo":
        row["rollout/flat_groups"] = 1 - rollout.mean(map(bool, selected))
    row |= {
        "rollout/tokens": tokens,
        "rollout/tokens_total": state["tokens"],
        "rollout/response_tokens": tokens / len(sampled),
        "rollout/entropy": rollout.entropy(turns),
        "select/attempts": len(sampled),
        "select/trajectories": len(picked),
        "select/accepted": len(picked) / len(sampled),
        "select/examples": sum(1 + sum(bool(w.turns) for w in workers_of(t)) for t in picked),
        "sample": sample_record(questions, groups, selected, stage, state["K"], step),
    }
    faults = sum_of_faults(t.info.faults for t in sampled)
    row |= {f"faults/{name.replace(' ', '_')}": n for name, n in faults.items()}
    return row | rollout.search_repairs(retriever)


def workers_of(attempt):
    return [worker for layer in attempt.info.workers for worker in layer]


def count_faults(info, faults):
    """Adds to a planner's info.faults those of its last turn: of its text, of its calls, of its workers."""
    *before, calls = info.calls
    again = len(calls) - len(set(calls).difference(*before))  # in an earlier turn, or twice in this one
    info.faults += faults + Counter({"asked again": again})
    info.faults += Counter(f"worker: {w.info.problem}" for w in info.workers[-1] if w.info.problem)


def sum_of_faults(every):
    """{what went wrong: how often}, of the faults of all attempts."""
    return dict(sorted(sum(every, Counter()).items()))


def update_metrics(meter, optimizer):
    """The means of a step's updates, and what they were made of."""
    tokens = meter.total.get("tokens", 0)
    return {"train/tokens": tokens, "train/lr": optimizer.param_groups[0]["lr"]} | meter.means()


def few_are_chosen(seen):
    """A guard: hardly any attempt is chosen."""
    now, recent = seen.row.get("select/accepted"), seen.recent("select/accepted")
    if now is not None and (now == 0 or seen.some_steps and recent < 0.02):
        return (f"only {now:.1%} of the attempts were chosen to learn from. Warm up longer "
                "(--sft-trajectories), take easier questions (--data), or allow more attempts "
                "(--max-attempts). --stage fixed and offline may begin lower (--threshold, "
                "--offline-threshold)")


GUARD = {"selection": few_are_chosen}


def budget_is_spent(folder, tokens):
    """Whether a run that goes on has sampled so many in training already."""
    rows = read_jsonl(folder.path / "metrics.jsonl")
    return bool(rows) and 0 < tokens <= (rows[-1].get("rollout/tokens_total") or 0)


# ---------------------------------------------------------------- records

def worker_node(number, parent, worker, with_ids, advantage):
    """A worker as a node; one that had nothing to read sampled nothing."""
    info = worker.info
    label = info.sub_question + (f" [{info.entity}]" if info.entity else "")
    if not worker.turns:
        empty = {"id": number, "parents": [parent], "label": label}
        return empty | {"sampled": False, "observation": info.sentence, "problem": info.problem}
    facts = {"label": label, "role": "worker", "advantage": advantage, "problem": info.problem or None}
    node = record.turn_node(number, [parent], worker.turns[0], with_ids, **facts)
    read = [f"[{i}] {line}" for i, line in enumerate(info.materials)]
    return node | {"observation": "\n".join(["read:", *read])}


def group_record(trajectories, question, chosen_by=None, **extra):
    """Trajectories of one question for the page: the DAG of planner turns and the workers between them.
    chosen_by: (lines that say the rule, trajectory -> what it made of it, the chosen trajectories)."""
    nodes, done, with_ids = [record.root_node()], [], "step" in extra
    for t in trajectories:
        advantage = t.advantages[0] if t.advantages else None
        path, parents = [0], [0]
        turns = zip(t.turns, t.info.workers, strict=True)
        for k, (turn, reports) in enumerate(turns, 1):
            label = "asks: " + "; ".join(w.info.sub_question for w in reports)
            if k == len(t.turns):
                label = f"answer: {t.info.answer or '-'}"
            planner = len(nodes)
            facts = {"label": label, "role": "planner", "advantage": advantage}
            nodes.append(record.turn_node(planner, parents, turn, with_ids, **facts))
            parents = list(range(planner + 1, planner + 1 + len(reports))) or [planner]
            for number, worker in zip(parents, reports, strict=False):
                nodes.append(worker_node(number, planner, worker, with_ids, advantage))
            path += range(planner, len(nodes))
        done.append(record.outcome(t, path, why(t, question, chosen_by)))
    return record.group(question, nodes, done, prompt_ids=trajectories[0].prompt_ids, **extra)


def why(trajectory, question, chosen_by):
    """What led to the reward and to the choice, in words."""
    info = trajectory.info
    strings = record.compared(info.answer, question.answers)
    lines = [f"F1 (sec. 4.1): {strings}: {trajectory.reward:.2f}"]
    if chosen_by:
        rule, passed, chosen = chosen_by
        was = "chosen" if any(trajectory is c for c in chosen) else "not chosen"
        lines += [*rule, f"{passed(trajectory)}{was} to learn from"]
    if info.faults:
        lines.append("counted: " + ", ".join(f"{name} {n}" for name, n in info.faults.items()))
    return lines


def prediction(trajectory, question):
    """A row of eval_<set>.json."""
    # what workers read, not what they say of it
    read = " ".join(line for worker in workers_of(trajectory) for line in worker.info.materials)
    row = record.row(question, trajectory.info, "answer problem em f1 searches tokens faults")
    row |= {"read": float(metrics.stands_in(question.answers, read)), "rounds": len(trajectory.turns)}
    return row | group_record([trajectory], question)


def threshold_in_words(groups, K):
    """How K came about, with the numbers put in (sec. 3.3)."""
    mean_reward = sum(group[0].reward for group in groups) / len(groups)
    risen = (mean_reward + 1) / 2
    formula = f"(mean r of the first attempts {mean_reward:.3f} + r_sup 1) / 2 = {risen:.3f}"
    if K > risen + 1e-5:
        return f"K = {K:.3f} stays from before, since {formula} is lower"
    return f"K = {K:.3f} = {formula}"


def sample_record(questions, groups, selected, stage, K, step):
    """The iteration's first question with different rewards."""
    i = record.first_with_spread([[t.reward for t in group] for group in groups])
    rule = []
    if stage == "mygo":
        rule.append(threshold_in_words(groups, K))
    if stage in BY_THRESHOLD:
        passing = [sum(t.reward > K for t in group) for group in groups]
        rule.append(f"{passing[i]} of {len(groups[i])} attempts of this question pass, of the iteration "
                    f"{sum(passing)} of {sum(map(len, groups))}")

    def passed(trajectory):
        if stage not in BY_THRESHOLD:
            return ""
        sign, said = ("> K", "passes") if trajectory.reward > K else ("<= K", "does not pass")
        return f"r = {trajectory.reward:.3f} {sign} = {K:.3f} {said}, "

    chosen_by = rule, passed, selected[i]
    return group_record(groups[i], questions[i], chosen_by, step=step)
