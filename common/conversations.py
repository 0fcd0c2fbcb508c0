"""The conversations that stage 2 of Omne-R1 learns from: a file's, or a folder that keeps what they were made
with, so that they are made once.

    sft-data/  settings.json  sampled.jsonl  answers.jsonl  sharegpt.jsonl  dataset_info.json"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

from common import data
from common.files import Keyed, RunError, read_json, warn, write_atomic, write_json
from common.graphs.graph_questions import GRAPH_TYPE, teacher_of
from common.graphs.teacher import Patience
from common.kg import one_line
from common.path_thoughts import template_calls, thoughts_by_teacher, thoughts_by_template
from common.serve.chat_client import NEVER_READ
from common.warmup import sharegpt

TEACHERS = 8  # requests at a time
FIELDS = ("id", "graph_type", "question")
MAKES_ROWS = (
    "sft_sampled", "sft_templates", "teacher", "teacher_model", "seed", "train_hops", "graph", "data",
    "matches", "max_edges", "max_words", "max_rounds", "max_turn", "max_train_turn", "temperature")


def read_file(file):
    """The rows of --sft-data."""
    rows = sharegpt.read(file, FIELDS)
    for number, row in enumerate(rows, 1):
        if not re.fullmatch(GRAPH_TYPE, row["graph_type"]):
            raise data.DataError(f"{file}: row {number}: a graph_type is letters, digits, . - _")
    return rows


def settings_of(cfg):
    """What decides which rows are made."""
    return {name: getattr(cfg, name) for name in MAKES_ROWS}


def are_made(cfg, folder):
    """Whether a folder has them; RunError where it was made with other settings."""
    made_with = settings_of(cfg)
    settings = folder / "settings.json"
    if settings.exists() and read_json(settings, dict) != made_with:
        raise RunError(f"{folder} was made with other settings than {made_with} (settings.json): choose "
                       "another --name, or give --sft-data FILE")
    return (folder / "sharegpt.jsonl").exists()


def begin(cfg, folder):
    """Makes the folder and notes the settings, so that a killed run goes on with the same ones alone."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "settings.json", settings_of(cfg))


def write(folder, rows):
    """sharegpt.jsonl, and the file that tells LLaMA-Factory of it; RunError where there is no row."""
    if not rows:
        raise RunError("nothing to learn from: stage 1 has no trajectory with reward 1, and no question has "
                       "a known path for a template")
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    write_json(folder / "dataset_info.json", sharegpt.dataset_info("omne_r1"))
    write_atomic(folder / "sharegpt.jsonl", text)


def writer_of(cfg, folder):
    """Who words the thoughts of templates: phrases, or --teacher, whose answers the folder keeps."""
    if cfg.teacher == "template":
        return thoughts_by_template(cfg.seed)
    return thoughts_by_teacher(teacher_of(cfg), Keyed(folder / "answers.jsonl"))


def walked_paths(cfg, questions, tools, writer, progress):
    """[(question, calls, what the tools said, thoughts)] of questions whose paths are known: entity_matcher
    once, then node_info from node to node. writer(question, calls, what the tools said) -> [text], None where
    it cannot. What could not be worded, or does not show its steps, is left out and counted."""
    def walked(question):
        calls = template_calls(question)
        shown = tools.search(calls, cfg.matches)
        fine = None not in shown and steps_are_shown(question, calls, shown)
        return calls, shown, fine, writer(question, calls, shown) if fine else None

    found = []
    patience = Patience()
    number = 0
    with ThreadPoolExecutor(1 if cfg.teacher == "template" else TEACHERS) as pool:
        for part in (questions[:NEVER_READ], questions[NEVER_READ:]):  # no more, where none could be read
            for q, path in zip(part, pool.map(walked, part), strict=True):
                calls, shown, fine, written = path
                number += 1
                progress(number, len(questions))
                if fine and patience.ends(written is not None):
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise RunError(f"--teacher {cfg.teacher}: {patience.bad} answers in a row could not be "
                                   "read")
                if written is not None:
                    found.append((q, calls, shown, written))
    if len(found) < len(questions):
        warn(f"{len(questions) - len(found)} of {len(questions)} templates without thoughts that could be "
             "read, or without a step in what the tools said: left out")
    return found


def steps_are_shown(question, calls, shown):
    """Whether what is asked for next, and the answer, stand in what the tool said before: an answer that is
    cut (--max-edges, --max-words) teaches nobody to know them."""
    named = [*(call.node_name for call in calls[1:]), question.answers[0]]
    return all(one_line(name) in said for name, said in zip(named, shown, strict=True))
