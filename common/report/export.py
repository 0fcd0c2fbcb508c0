"""The trajectories of a run folder in the forms of others, a JSON object a line:

    python -m common.report RUN --export openai    messages, as OpenAI's chat and most trainers have them
    python -m common.report RUN --export atif      the Agent Trajectory Interchange Format, ATIF-v1.7

They hold what was sampled in training (samples.jsonl) and the evaluations before and after it. Results of
searches, which stand inside the assistant's text where a script writes tags, are the user's messages in the
one, observations in the other. The page opens both (`add a file`), whoever wrote them."""

from pathlib import Path

from common.files import RunError, read_jsonl, say, write_jsonl
from common.report import config_of, evaluations

VERSION = "ATIF-v1.7"
FORMS = ("openai", "atif")


def export(folder, form):
    """Writes <folder>/trajectories.<form>.jsonl; returns its path."""
    folder = Path(folder)
    config = config_of(folder) or {}
    named = (config.get(key) for key in ("checkpoint", "model", "policy_model"))
    model = next(filter(None, named), "tiny policy")
    rows = []
    for where, group in groups_of(folder):
        nodes = {node["id"]: node for node in group["nodes"]}
        for number, t in enumerate(group["trajectories"]):
            turns = [nodes[id] for id in t["path"] if nodes[id].get("text")]
            facts = {
                "id": f"{group['question_id']}-{where}-{number}",
                "where": where,
                "question": group["question"],
                "gold": group["gold"],
                **{key: t.get(key) for key in ("answer", "reward", "correct", "problem")},
            }
            if form == "openai":
                rows.append(facts | {"messages": messages_of(group["question"], turns)})
            else:
                rows.append(atif_of(facts, turns, folder.parent.name, model))
    if not rows:
        raise RunError(f"{folder} keeps no trajectories (of committed runs there are scores alone)")
    out = folder / f"trajectories.{form}.jsonl"
    write_jsonl(out, rows)
    say(f"{out}: {len(rows)} trajectories")
    return out


def groups_of(folder):
    """(where it was sampled, a group of common/page/record.py) of all that the folder holds."""
    for group in read_jsonl(folder / "samples.jsonl"):
        yield f"step{group['step']}", group
    for when in ("before", ""):
        for name, result in evaluations(folder, when).items():
            for row in (row for row in result["predictions"] if row.get("nodes")):
                yield f"{name}-{when or 'after'}", row


def messages_of(question, turns):
    messages = [{"role": "user", "content": question}]
    for turn in turns:
        messages.append({"role": "assistant", "content": turn["text"]})
        if turn.get("observation"):
            messages.append({"role": "user", "content": turn["observation"]})
    return messages


def atif_of(facts, turns, script, model):
    steps = [{"step_id": 1, "source": "user", "message": facts["question"]}]
    for turn in turns:
        step = {"step_id": len(steps) + 1, "source": "agent", "message": turn["text"]}
        if turn.get("observation"):
            step["observation"] = {"results": [{"content": turn["observation"]}]}
        metrics = {"completion_tokens": turn.get("tokens")}
        if "ids" in turn:  # of training: what was sampled, to the token
            metrics |= {"completion_token_ids": turn["ids"], "logprobs": turn["logprobs"]}
        step["metrics"] = {key: value for key, value in metrics.items() if value is not None}
        if "advantage" in turn:
            step["extra"] = {"advantage": turn["advantage"]}
        steps.append(step)
    return {
        "schema_version": VERSION,
        "session_id": facts["id"],
        "trajectory_id": facts["id"],
        "agent": {"name": script, "version": "0.1.0", "model_name": model},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {key: value for key, value in facts.items() if key != "id"},
    }
