"""Trajectories that call tools as records for the page.

label(turn) -> what a turn is called there, such as the tool that it calls: the script knows its tags."""

from common import data
from common.call_metrics import is_standard
from common.files import read_jsonl
from common.page import record


def nodes_of(trajectory, first, label, tokenizer):
    """A trajectory's turns as nodes below the question."""
    nodes = []
    parents = [0]
    for k, turn in enumerate(trajectory.turns, first):
        nodes.append(record.turn_node(k, parents, turn, tokenizer, label=label(turn)))
        parents = [k]
    return nodes


def group_record(trajectories, question, label, tokenizer=None, **extra):
    """Trajectories of one question."""
    nodes = [record.root_node()]
    done = []
    for t in trajectories:
        own = nodes_of(t, len(nodes), label, tokenizer)
        nodes += own
        path = [0, *(node["id"] for node in own)]
        done.append(record.outcome(t, path, reasons(t.info, question.answers[0])))
    return record.group(question, nodes, done, **extra)


def reasons(info, gold):
    """Lines that say what led to a reward."""
    said = [
        f"accuracy: {info.answer!r} against {gold!r}: {info.em:g}",
        f"rounds in the right form: {info.format:.2f}; calls made before: {info.repetitions}",
        f"tools called: {info.pattern}",
    ]
    faults = [f"{name} {count}" for name, count in info.faults.items()]
    if faults:
        said.append("faults: " + ", ".join(faults))
    return said


def sample_record(policy, done, questions, step, group_size, label):
    """The step's first question with different rewards, else its first."""
    starts = range(0, len(done), group_size)
    groups = [done[i:i + group_size] for i in starts]
    rewards = [[t.reward for t in group] for group in groups]
    i = record.first_with_spread(rewards)
    more = {"step": step, "prompt_ids": groups[i][0].prompt_ids}
    return group_record(groups[i], questions[i], label, policy.tokenizer, **more)


def prediction(trajectory, question, label):
    """A row of eval_<set>.json."""
    names = "answer problem em normalised f1 searches repetitions pattern faults"
    row = {"id": question.id}
    for name in names.split():
        row[name] = getattr(trajectory.info, name)
    row["standard"] = float(is_standard(trajectory))
    row["rounds"] = len(trajectory.turns)
    row["tokens"] = trajectory.sampled_tokens
    return row | group_record([trajectory], question, label)


def keep_learned(folder, policy, examples, label):
    """samples.jsonl of a run folder: the first and the last conversation as they are trained on."""
    if read_jsonl(folder.path / "samples.jsonl"):
        return
    shown = []
    for t in examples[:1] + examples[-1:]:
        question = data.Question(t.question_id, t.question_id, [""])
        nodes = [record.root_node(), *nodes_of(t, 1, label, policy.tokenizer)]
        path = [node["id"] for node in nodes]
        outcome = record.outcome(t, path, [f"from: {t.info.source}"])
        more = {"step": 0, "prompt_ids": t.prompt_ids}
        shown.append(record.group(question, nodes, [outcome], **more))
    folder.append("samples.jsonl", shown)
