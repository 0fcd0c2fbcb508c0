"""The conversations that stage 2 of Omne-R1 learns from, on file: a user's, or those of a folder that keeps
what they were made with; and thoughts that a language model writes for them.

    sft-data/  settings.json  sampled.jsonl  answers.jsonl  sharegpt.jsonl  dataset_info.json"""

import re
from functools import partial

from common import chat, data
from common.files import RunError, read_json, write_json, write_jsonl
from common.graphs.graph_questions import GRAPH_TYPE
from common.serve.chat_client import UNREADABLE, BadAnswer, filled, read_object
from common.warmup import sharegpt

FIELDS = ("id", "graph_type", "question")
MAKES_ROWS = (
    "sft_sampled", "sft_templates", "teacher", "teacher_model", "seed", "train_hops", "graph", "data",
    "matches", "max_edges", "max_words", "max_rounds", "max_turn", "max_train_turn", "temperature")


def read(file):
    """The rows of a file; DataError names one that is none."""
    rows = sharegpt.read(file, FIELDS)
    for number, row in enumerate(rows, 1):
        if not re.fullmatch(GRAPH_TYPE, row["graph_type"]):
            raise data.DataError(f"{file}: row {number}: a graph_type is letters, digits, . - _")
    return rows


def are_made(cfg, folder):
    """Whether a folder has its rows; RunError where it was begun with other settings."""
    made_with = {name: getattr(cfg, name) for name in MAKES_ROWS}
    settings = folder / "settings.json"
    if settings.exists() and read_json(settings, dict) != made_with:
        raise RunError(f"{folder} was made with other settings than {made_with} (settings.json): choose "
                       "another --name, or give --sft-data FILE")
    return (folder / "sharegpt.jsonl").exists()


def begin(cfg, folder):
    """Notes the settings first, so that an interrupted run goes on with the same ones alone."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", {name: getattr(cfg, name) for name in MAKES_ROWS})


def write(folder, rows):
    """The rows, and the file that tells LLaMA-Factory of them."""
    if not rows:
        raise RunError("nothing to learn from: stage 1 has no trajectory with reward 1, and no question has "
                       "a known path for a template")
    write_json(folder / "dataset_info.json", sharegpt.dataset_info("omne_r1"))
    write_jsonl(folder / "sharegpt.jsonl", rows)


# ---------------------------------------------------------------- thoughts of a language model

THOUGHTS = """\
Below are a question, its answer, and the calls that find it in a knowledge graph, each with what the tool \
said. Write the thought that leads to each call, and one that leads to the answer. A thought knows what was \
said before it and nothing that comes later; it says what was learned and what to do next.

Question: {question}
Answer: {answer}
{steps}

Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object \
with {count} texts:
{"thoughts": ["thought", ...]}
"""


def read_thoughts(text, count):
    """Raises BadAnswer."""
    thoughts = read_object(text).get("thoughts")
    if not isinstance(thoughts, list) or len(thoughts) != count:
        raise BadAnswer(UNREADABLE, f"not {count} thoughts")
    thoughts = [chat.no_tags(str(thought)).strip() for thought in thoughts]
    if not all(thoughts):
        raise BadAnswer(UNREADABLE, "an empty thought")
    return thoughts


def thoughts_by_teacher(teacher, answers):
    """think_of(question, calls, what the tools said) -> a thought for each call and one for the answer, None
    where the model's answer cannot be read. (The paper does not print its prompt: THOUGHTS is ours.)

    teacher: a synthesis.Teacher. answers: a files.Keyed of what it said."""
    def think_of(question, calls, shown):
        steps = []
        for number, (call, text) in enumerate(zip(calls, shown, strict=True), 1):
            steps.append(f"{number}. {call.tool}({call.node_name!r})\n{text}")
        count = len(calls) + 1
        prompt = filled(
            THOUGHTS,
            question=question.question,
            answer=question.answers[0],
            steps="\n".join(steps),
            count=str(count),
        )
        try:
            return teacher.asked(question.id, prompt, partial(read_thoughts, count=count), answers)
        except BadAnswer:
            return None

    return think_of
