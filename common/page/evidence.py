"""Searches for evidence (common/evidence.py) as records for the page and for predictions."""

import math

from common import metrics
from common.evidence import ASK, SUBMIT, SubQuestion, ending, evidence_of, evidence_scores
from common.files import console, plain
from common.page import record


def about(case):
    """What every row of a prediction has."""
    q = case.question
    return {
        "id": q.id,
        "question": q.question,
        "gold": q.answers,
        "type": q.type,
        "hops": len(case.gold_facts),
        "answer": None,
        "problem": "",
    }


def path_nodes(policy, path, first=1):
    """A node for each action: the sentence taken, the sub-question or the submission, with what else was
    offered."""
    nodes = []
    steps = [*path.steps[path.first :], *([SUBMIT] if path.done else [])]
    for t, (state, step, logprob) in enumerate(zip(path.states(), steps, path.logprobs, strict=False)):
        case = path.case
        text = case.texts[step] if isinstance(step, int) and step >= 0 else "submit"
        if isinstance(step, SubQuestion):
            text = f"asks: {step.text}"
        label = case.facts[step][0] if isinstance(step, int) and step >= 0 else text.split(":")[0]
        known = policy.cache.get(state)
        if not known and (step == SUBMIT or isinstance(step, SubQuestion)):
            # a policy whose sub-questions search elsewhere: it sees none of them, and took no sentence itself
            known = policy.cache.get((case, evidence_of(state[1])))
        actions, logprobs = known or ([], [])
        offers = []
        for a, x in sorted(zip(actions, logprobs, strict=True), key=lambda pair: -pair[1]):
            mark = "* " if a in case.gold else ""
            name = {SUBMIT: "submit", ASK: "ask"}.get(a) or case.texts[a]
            offers.append(f"{math.exp(x):.3f}  {mark}{name}")
        nodes.append({
            "id": first + t,
            "parents": [first + t - 1 if t else 0],
            "label": label,
            "text": text,
            "observation": "offered (* gold):\n" + "\n".join(offers) if offers else "",
            "probability": math.exp(logprob),
            "gold": step in case.gold,
        })
    return nodes


def group_record(policy, paths, **extra):
    """Paths of one question for the page."""
    case = paths[0].case
    nodes, done = [record.root_node()], []
    for p in paths:
        mine = path_nodes(policy, p, len(nodes))
        nodes += mine
        em, f1, precision, recall = evidence_scores(case, p.steps)
        done.append({
            "path": [0, *(node["id"] for node in mine)],
            "reward": p.reward,
            "answer": f"{len(p.taken)} sentences",
            "problem": "",
            "correct": em == 1,
            "why": [
                f"F1 {f1:.2f}, precision {precision:.2f}, recall {recall:.2f}",
                f"{ending(case, p.taken)[0]}, log p {p.logprob:.2f}",
            ],
        })
    return record.group(case.question, nodes, done, **extra)


def sample_record(policy, paths, size, step):
    """The step's first question whose paths have different rewards; `size` paths a question."""
    groups = [paths[i:i + size] for i in range(0, len(paths), size)]
    mixed = [g for g in groups if len({p.reward for p in g}) > 1]
    return group_record(policy, (mixed or groups)[0], step=step)


def show_path(policy, path):
    """A search on the terminal."""
    for node in path_nodes(policy, path):
        console.print(f"[bold]{plain(node['text'])}[/bold]  ({node['probability']:.2f})")
        for line in node["observation"].split("\n")[1:]:
            console.print(f"  [dim]{plain(line)}[/dim]")


def prediction(policy, path):
    """A row of eval_<set>.json."""
    case = path.case
    em, f1, precision, recall = evidence_scores(case, path.steps)
    end, wrong = ending(case, path.taken)
    taken = " ".join(case.texts[i] for i in path.taken)
    row = group_record(policy, [path]) | about(case)
    return row | {
        "em": em,
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "sentences": len(path.taken),
        "read": float(metrics.stands_in(case.question.answers, taken)),
        "end": end,
        "first_wrong": wrong,
        "evidence_found": [list(case.facts[i]) for i in path.taken],
        "sub-questions": [s.text for s in path.asked],
        "logprob": path.logprob,
    }
