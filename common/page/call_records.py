"""Trajectories that call tools as records for the page.

label(turn) -> what a turn is called there, such as the tool that it calls: the script knows its tags."""

from common import data, grpo
from common.page import record


def nodes_of(trajectory, first, label, tokenizer):
    """A trajectory's turns as nodes below the question."""
    nodes = []
    parents = [0]
    for k, turn in enumerate(trajectory.turns):
        node = record.turn_node(first + k, parents, turn, tokenizer, label=label(turn))
        nodes.append(node)
        parents = [node["id"]]
    return nodes


def group_record(trajectories, question, label, tokenizer=None, **extra):
    """Trajectories of one question."""
    nodes = [record.root_node()]
    done = []
    for t in trajectories:
        own = nodes_of(t, len(nodes), label, tokenizer)
        nodes += own
        info = t.info
        why = [
            f"accuracy: {info['answer']!r} against {question.answers[0]!r}: {info['em']:g}",
            f"rounds in the right form: {info['format']:.2f}; calls made before: {info['repetitions']}",
            f"tools called: {info['pattern']}",
        ]
        if info["faults"]:
            why.append("faults: " + ", ".join(f"{name} {n}" for name, n in info["faults"].items()))
        done.append(record.outcome(t, [0, *(n["id"] for n in own)], why))
    return record.group(question, nodes, done, **extra)


def sample_record(policy, done, questions, step, group_size, label):
    """The step's first question with different rewards, else its first."""
    groups = [done[i:i + group_size] for i in range(0, len(done), group_size)]
    i = grpo.first_with_spread([[t.reward for t in group] for group in groups])
    more = {"step": step, "prompt_ids": groups[i][0].prompt_ids}
    return group_record(groups[i], questions[i], label, policy.tokenizer, **more)


def learned_samples(policy, examples, label):
    """The first and the last conversation as they are trained on."""
    shown = []
    for t in examples[:1] + examples[-1:]:
        question = data.Question(t.question_id, t.question_id, [""])
        nodes = [record.root_node(), *nodes_of(t, 1, label, policy.tokenizer)]
        t.info |= {"answer": None, "problem": "", "em": 0.0}
        outcome = record.outcome(t, [n["id"] for n in nodes], [f"from: {t.info['source']}"])
        shown.append(record.group(question, nodes, [outcome], step=0, prompt_ids=t.prompt_ids))
    return shown
