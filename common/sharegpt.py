"""Conversations as ShareGPT rows, which LLaMA-Factory and others train on:
human and gpt in turn, gpt is learned."""


def dataset_info(name, file="sharegpt.jsonl"):
    """dataset_info.json of LLaMA-Factory for such a file."""
    columns = {"messages": "conversations", "system": "system"}
    return {name: {"file_name": file, "formatting": "sharegpt", "columns": columns}}


def row(trajectory, system, request, step):
    """A trajectory that began with `system` and the user's `request`; observations are the human's."""
    said = [{"from": "human", "value": request}]
    for turn in trajectory.turns:
        said.append({"from": "gpt", "value": turn.text})
        said.append({"from": "human", "value": turn.observation})
    return {
        "step": step,
        "id": trajectory.question_id,
        "system": system,
        "conversations": said[:-1],
    }
