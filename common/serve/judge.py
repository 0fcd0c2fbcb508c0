"""Free answers judged by a language model, as papers do that enforce no format.

    judge = Judge("http://127.0.0.1:8000/v1", "deepseek-reasoner")
    judge.verdicts([(question, gold, answer), …], progress)    ->  [(True, "reason") or (None, "why not")]

The model is given question, gold answer and prediction, and says whether the prediction is right. What it
says is read as JSON and never evaluated; an answer that cannot be read is no verdict, and counted. Verdicts
can be kept as soon as they are given, so that nothing is asked for twice where the judge goes down.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import data, metrics
from common.files import Keyed, Progress, RunError, say, write_atomic
from common.graphs import teacher
from common.rollout import stable_seed

PROMPT = """\
You will see a question, its golden answer and a predicted answer. Judge whether the predicted answer is \
correct: it is, if it gives the golden answer, in whatever words.

Here is the real data:
Question: {question}
Golden answer: {gold}
Predicted answer: {answer}

Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object:
{"correct": true or false, "reason": "your reason"}
"""
MOST = 8000  # characters of an answer that are judged


def filled(prompt, **texts):
    """The prompt with {name} filled in, all at once: what a text holds is never filled in.

    >>> filled('{a} {b} {"c"}', a="{b}", b="2")
    '{b} 2 {"c"}'
    """
    names = "|".join(texts)
    return re.sub(rf"{{({names})}}", lambda found: texts[found[1]], prompt)


class Judge:
    """url: an OpenAI-compatible endpoint, up to and with "/v1"; its key comes from OPENAI_API_KEY."""

    def __init__(self, url, model):
        self.chat = teacher.ChatTeacher(url, model)
        self.chat.flag = "--judge"
        self.kept = None

    def keep(self, file):
        """From here on verdicts are on file as soon as they are given; what stands there is not asked for."""
        self.kept = Keyed(file)

    def verdict(self, question, gold, answer, number=0):
        """(whether it is right, why), (None, why not) where the judge cannot be understood. number: tells
        answers apart that are the same."""
        prompt = filled(PROMPT, question=question, gold=gold, answer=answer[:MOST])
        key = str(stable_seed(self.chat.model, number, prompt))
        row = self.kept.get(key) if self.kept else None
        if row is None:
            right, why = self._ask(prompt)
            row = {"key": key, "correct": right, "reason": why}
            if self.kept and right is not None:
                self.kept.add(row)
        return row["correct"], row["reason"]

    def _ask(self, prompt):
        try:
            value = teacher.read_object(self.chat.ask(prompt))
        except teacher.BadAnswer as error:
            return None, error.reason
        if not isinstance(value.get("correct"), bool):
            return None, "no verdict"
        return value["correct"], str(value.get("reason", ""))

    def verdicts(self, asked, progress):
        """In the order of [(question, gold, answer)]. RunError where none of the first thirty could be
        understood: more are not asked for before one could."""
        numbered = list(enumerate(asked))
        found = []
        with ThreadPoolExecutor(self.chat.concurrency) as pool:
            for part in (numbered[:teacher.NEVER_READ], numbered[teacher.NEVER_READ:]):
                for one in pool.map(lambda pair: self.verdict(*pair[1], pair[0]), part):
                    found.append(one)
                    progress(len(found), len(asked))
                if found and all(right is None for right, _ in found):
                    raise RunError(f"--judge {self.chat.url}: none of {len(found)} verdicts could be read; "
                                   f"the first one: {found[0][1]}")
        return found


def read_answers(file):
    """[(question, gold, answer)] of JSON lines: question, golden_answer and answer, or UltraDomain's input,
    answers and any one field that ends in _answer."""
    found = []
    for number, row in data.read_records(file):
        row = row if isinstance(row, dict) else {}
        question = row.get("question", row.get("input"))
        gold = row.get("golden_answer", row.get("answers"))
        gold = gold[0] if isinstance(gold, list) and gold else gold
        own = [name for name in row if name.endswith("_answer") and name != "golden_answer"]
        answer = row.get("answer", row[own[0]] if own else None)
        if not all(isinstance(text, str) for text in (question, gold, answer)):
            raise data.DataError(f"{file}: line {number}: expected question, golden_answer and answer")
        found.append((question, gold, answer))
    if not found:
        raise data.DataError(f"{file}: no answer")
    return found


def score_answers(file, judge):
    """Answers made elsewhere, judged; the verdicts stand in a file beside theirs. Those that were given
    before the judge went down are in another, until all are there."""
    file = Path(file)
    asked = read_answers(file)
    unfinished = file.with_suffix(".verdicts.jsonl")
    judge.keep(unfinished)
    with Progress("verdicts") as progress:
        verdicts = judge.verdicts(asked, progress)
    rows = []
    for (question, gold, answer), (right, why) in zip(asked, verdicts, strict=True):
        rows.append({"question": question, "golden_answer": gold, "answer": answer, "correct": right,
                     "reason": why})
    out = file.with_suffix(".judged.jsonl")
    write_atomic(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    judge.kept.close()
    unfinished.unlink()
    mean, low, high = metrics.bootstrap_interval([float(bool(right)) for right, _ in verdicts])
    unread = sum(right is None for right, _ in verdicts)
    say(f"{len(rows)} answers: {mean:.3f} [{low:.3f}, {high:.3f}] right; {unread} verdicts could not be read "
        f"and count as wrong: {out}")
