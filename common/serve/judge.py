"""Free answers judged by a language model, as papers do that enforce no format.

    verdicts("http://127.0.0.1:8000/v1", "deepseek-reasoner", [(question, gold, answer), …], file, progress)
    ->  [(True, "reason") or (None, "why not")]

The model is given question, gold answer and prediction, and says whether the prediction is right. An answer
that cannot be read is no verdict, and counted.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from common import data, metrics
from common.files import Keyed, Progress, RunError, say, write_jsonl
from common.rollout import stable_seed
from common.serve.chat_client import NEVER_READ, UNREADABLE, BadAnswer, Chat, filled, read_object

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


def verdicts(url, model, asked, file, progress):
    """[(whether it is right, why)] of [(question, gold, answer)]; (None, why not) where the judge cannot be
    understood.

    url: an OpenAI-compatible service, up to and with "/v1". file keeps every verdict as soon as it is given,
    and what stands there is not asked for. RunError where none of the first thirty could be understood."""
    chat = Chat(url, model, "--judge", "judge")
    numbered = list(enumerate(asked))
    found = []

    def verdict(pair):
        number, (question, gold, answer) = pair
        prompt = filled(PROMPT, question=question, gold=gold, answer=answer[:MOST])
        key = str(stable_seed(model, number, prompt))  # (the same answer twice is judged twice)
        try:
            row = kept.of(key, lambda: read_verdict(chat.ask(prompt)))
        except BadAnswer as error:
            return None, error.reason
        return row["correct"], row["reason"]

    with closing(Keyed(file)) as kept, ThreadPoolExecutor(chat.concurrency) as pool:
        for part in (numbered[:NEVER_READ], numbered[NEVER_READ:]):  # no more, where none could be read
            for one in pool.map(verdict, part):
                found.append(one)
                progress(len(found), len(asked))
            if found and all(right is None for right, _ in found):
                _, reason = found[0]
                raise RunError(
                    f"--judge {url}: none of {len(found)} verdicts could be read; the first one: {reason}")
    return found


def read_verdict(text):
    """{"correct", "reason"}. Raises BadAnswer."""
    value = read_object(text)
    right = value.get("correct")
    if not isinstance(right, bool):
        raise BadAnswer(UNREADABLE, "no verdict")
    return {"correct": right, "reason": str(value.get("reason", ""))}


def read_answers(file):
    """[(question, gold, answer)] of JSON lines: question, golden_answer and answer, or UltraDomain's input,
    answers and any one field that ends in _answer."""
    found = []
    for number, row in data.read_records(file):
        if not isinstance(row, dict):
            row = {}
        own = [row[name] for name in row if name.endswith("_answer") and name != "golden_answer"]
        gold = row.get("golden_answer", row.get("answers"))
        if isinstance(gold, list):
            gold = next(iter(gold), None)
        texts = row.get("question", row.get("input")), gold, row.get("answer", next(iter(own), None))
        if not all(isinstance(text, str) for text in texts):
            raise data.DataError(f"{file}: line {number}: expected question, golden_answer and answer")
        found.append(texts)
    if not found:
        raise data.DataError(f"{file}: no answer")
    return found


def score_answers(file, url, model):
    """Answers made elsewhere, judged: <file>.judged.jsonl. What was judged before the judge went down is in
    another file, until all of it is there."""
    file = Path(file)
    asked = read_answers(file)
    unfinished = file.with_suffix(".verdicts.jsonl")
    with Progress("verdicts") as progress:
        found = verdicts(url, model, asked, unfinished, progress)
    rows = []
    for (question, gold, answer), (right, why) in zip(asked, found, strict=True):
        row = {"question": question, "golden_answer": gold, "answer": answer, "correct": right}
        rows.append(row | {"reason": why})
    out = file.with_suffix(".judged.jsonl")
    write_jsonl(out, rows)
    unfinished.unlink()
    mean, low, high = metrics.bootstrap_interval([float(bool(right)) for right, _ in found])
    unread = sum(right is None for right, _ in found)
    say(f"{len(rows)} answers: {mean:.3f} [{low:.3f}, {high:.3f}] right; {unread} verdicts could not be "
        f"read and count as wrong: {out}")
