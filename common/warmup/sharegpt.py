"""Conversations as ShareGPT rows, which LLaMA-Factory and others train on: human (or observation) and gpt in
turn, gpt is learned. `--collect FILE` writes them, `--warmup-data FILE` learns them."""

import itertools
from collections import Counter
from pathlib import Path

from common import data, distributed
from common.files import Lines, say, warn
from common.formats import fingerprint
from common.metrics import stands_in

LONGEST = 60  # words of a question that is looked for in a prompt's lines


def dataset_info(name):
    """dataset_info.json of LLaMA-Factory for a sharegpt.jsonl. A row's `tools` are not named: its system text
    holds their schemas already, and the trainer would write them there again."""
    columns = {"messages": "conversations", "system": "system"}
    return {name: {"file_name": "sharegpt.jsonl", "formatting": "sharegpt", "columns": columns}}


def row(trajectory, system, request, shown=str, **more):
    """A trajectory that began with `system` and the user's `request`. Observations are the human's, as
    shown(observation) gives them back. more: what else the row says."""
    said = [{"from": "human", "value": request}]
    for turn in trajectory.turns:
        said.append({"from": "gpt", "value": turn.text})
        said.append({"from": "human", "value": shown(turn.observation)})
    return {
        **more,
        "id": trajectory.question_id,
        "system": system,
        "conversations": said[:-1],
    }


# ---------------------------------------------------------------- --collect

def collect(file, trajectories, questions, rows_of):
    """Adds the right trajectories of an evaluation to a file, and says how many they are and why not more.

    rows_of(trajectory, question) -> rows, the script's. The row of a policy's own conversation has "script",
    and is learned in that script's prompt and tags."""
    rows, fate, unread = [], Counter(), 0
    for trajectory, question in zip(trajectories, questions, strict=True):
        why = why_not(trajectory)
        fate[why] += 1
        if not why:
            rows += rows_of(trajectory, question)
            read = " ".join(turn.observation for turn in trajectory.turns)
            unread += not stands_in(question.answers, read)
    right = fate.pop("", 0)
    told = f"{right} of {len(trajectories)} trajectories are right"
    if unread:
        told += f" (of {unread} nothing that was read has the answer)"
    told += "".join(f"; {n}: {why}" for why, n in fate.most_common())
    if not rows:
        advice = "look at what it wrote: eval_*.json, or the page"  # a format rule may be the server's doing
        if fate.most_common(1)[0][0] == WRONG:
            advice = "ask a stronger model"
        return warn(f"{told}. Nothing was written to {file}: {advice}")
    distributed.once(_add, file, rows)
    say(f"{file}: {told}. --warmup-data {file} learns them")


def _add(file, rows):
    lines = Lines(Path(file).expanduser())
    for made in rows:
        lines.add(made)
    lines.close()


WRONG = "wrong answer"


def why_not(trajectory):
    """Why nobody should learn from a trajectory; empty where somebody may."""
    info = trajectory.info
    if info.problem:
        return info.problem
    if info.em < 1:
        return WRONG
    if any(turn.stop_reason == "length" for turn in trajectory.turns):
        return "a turn was cut off"
    if info.searches < len(trajectory.turns) - 1:
        return "a turn that neither searched nor answered"
    return ""


# ---------------------------------------------------------------- reading

def is_file(file):
    """Whether the first record of a file is a conversation."""
    path = Path(file).expanduser()
    if not path.is_file():
        return False
    for _, first in data.read_records(path):
        return isinstance(first, dict) and ("conversations" in first or "messages" in first)
    return False


FROM = {"user": "human", "assistant": "gpt", "tool": "observation"}


def of_messages(row):
    """A row of OpenAI's {"messages": [{"role", "content"}]} as ShareGPT has it; any other as it is."""
    said = row.get("messages")
    if "conversations" in row or not isinstance(said, list) or not all(isinstance(m, dict) for m in said):
        return row
    told = [m.get("content") for m in said if m.get("role") == "system"]
    turns = [{"from": FROM.get(m.get("role")), "value": m.get("content")} for m in said]
    return {"system": "".join(map(str, told)), **row, "conversations": turns[len(told):]}


def read(file, names):
    """The rows of a file, checked: human first, gpt at every second place, gpt last. names: other fields that
    have to be texts."""
    rows = []
    for number, row in data.read_records(Path(file)):
        row = of_messages(row) if isinstance(row, dict) else {}
        needed = ("script", "id", "question", "system") if "script" in row else names  # --collect's rows
        said = [m for m in row.get("conversations") or () if isinstance(m, dict)]
        texts = [*map(row.get, needed), *(m.get("value") for m in said)]
        whole = in_turn([m.get("from") for m in said]) and all(isinstance(text, str) for text in texts)
        if not whole or not all(m["value"].strip() for m in said[1::2]):
            raise data.DataError(f"{file}: line {number}: expected {', '.join(needed)} and conversations: "
                                 "human, gpt, observation, gpt and so on, none of gpt's blank")
        rows.append(row)
    if not rows:
        raise data.DataError(f"{file}: no conversation")
    return rows


def questions_in(row):
    """Fingerprints of what a row may ask: its `question`, where we wrote one; else, since prompts put words
    before a question or behind it, whatever begins or ends a line of its human's, or lies between two ends of
    lines or sentences."""
    if isinstance(row.get("question"), str):
        return {fingerprint(row["question"])}
    found = set()
    for message in row["conversations"]:
        lines = message["value"].splitlines() if message["from"] == "human" else []
        words, ends = [], [0]
        for line in lines:
            of_line = line.split()
            for n in range(1, min(len(of_line), LONGEST) + 1):
                found |= {fingerprint(" ".join(of_line[:n])), fingerprint(" ".join(of_line[-n:]))}
            ends += [len(words) + n for n, word in enumerate(of_line, 1) if word[-1] in ".?!:。？！："]
            words += of_line
            ends.append(len(words))
        for first, last in itertools.combinations(dict.fromkeys(ends), 2):
            if last - first <= 3 * LONGEST:
                found.add(fingerprint(" ".join(words[first:last])))
    return found


def in_turn(roles):
    """
    >>> in_turn(["human", "gpt", "observation", "gpt"]), in_turn(["human", "gpt", "gpt"])
    (True, False)
    """
    if not roles or len(roles) % 2 or roles[0] != "human":
        return False
    return all(r == "gpt" for r in roles[1::2]) and all(r in ("observation", "human") for r in roles[2::2])
