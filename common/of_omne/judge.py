"""Free answers judged by a language model, as papers do that enforce no format (Omne-R1's Tables 2 and 7).

    python -m common.of_omne.judge runs/omne_r1/<name>-direct/eval_3-hop.json http://HOST/v1

The model is given question, gold answer and prediction, and says whether the prediction is right. Where its
answer cannot be read there is no verdict: it is counted, and the prediction is wrong.
"""

import argparse
from contextlib import closing
from pathlib import Path

from common import data, metrics, process
from common.files import Keyed, Progress, UserError, read_json, say, write_jsonl
from common.http_client import Threads
from common.serve.chat_client import UNREADABLE, BadAnswer, Chat, read_object

PROMPT = """\
You will see a question, its golden answer and a predicted answer. Judge whether the predicted answer is \
correct: it is, if it gives the golden answer, in whatever words.

Here is the real data:
Question: %s
Golden answer: %s
Predicted answer: %s

Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object:
{"correct": true or false, "reason": "your reason"}
"""
MOST = 8000  # characters of an answer that are judged


def score_answers(file, url, model):
    """Writes <file>.judged.jsonl. What was judged before the judge went down is in another file, until all
    of it is there."""
    asked = list(enumerate(read_answers(file)))
    chat = Chat(url, model, "judge")
    unfinished = file.with_suffix(".verdicts.jsonl")
    rows = []

    def judged(pair):
        number, (question, gold, answer) = pair
        prompt = PROMPT % (question, gold, answer[:MOST])
        try:
            found = chat.asked(kept, number, prompt, read_verdict)  # (the same answer twice is judged twice)
        except BadAnswer as error:
            found = {"correct": None, "reason": error.reason}
        return {"question": question, "golden_answer": gold, "answer": answer} | found

    with closing(Keyed(unfinished)) as kept, closing(Threads(chat.concurrency)) as threads, \
            Progress("verdicts") as progress:
        for row in threads.map(judged, asked):
            rows.append(row)
            progress(len(rows), len(asked))
    out = file.with_suffix(".judged.jsonl")
    write_jsonl(out, rows)
    unfinished.unlink()
    mean, low, high = metrics.bootstrap_interval([float(row["correct"] is True) for row in rows])
    low = max(0.0, low)
    unread = sum(row["correct"] is None for row in rows)
    say(f"{len(rows)} answers: {mean:.3f} [{low:.3f}, {high:.3f}] right; {unread} verdicts could not be "
        f"read and count as wrong: {out}")


def read_verdict(text):
    """{"correct", "reason"}. Raises BadAnswer."""
    value = read_object(text)
    right = value.get("correct")
    if not isinstance(right, bool):
        raise BadAnswer(UNREADABLE, "no verdict")
    return {"correct": right, "reason": str(value.get("reason", ""))}


def read_answers(file):
    """[(question, gold, answer)] of an eval_<set>.json, or of JSON lines: question, golden_answer, answer."""
    records = data.read_records(file)
    if file.name.startswith("eval_") and file.suffix == ".json":
        records = enumerate(read_json(file, dict)["predictions"], 1)
    found = []
    for number, row in records:
        row = row if isinstance(row, dict) else {}
        texts = row.get("question"), row.get("golden_answer"), row.get("answer")
        if "gold" in row:  # of an evaluation, in which an answer may be missing
            texts = row.get("question"), (row["gold"] or [None])[0], row.get("answer") or ""
        if not all(isinstance(text, str) for text in texts):
            raise data.DataError(f"{file}: line {number}: expected question, golden_answer and answer")
        found.append(texts)
    if not found:
        raise data.DataError(f"{file}: no answer")
    return found


def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m common.of_omne.judge")
    parser.add_argument("file", type=Path, help="an eval_<set>.json, or a question, golden_answer and answer "
                                                "per line")
    parser.add_argument("url", help="the judge: an OpenAI-compatible endpoint (key: OPENAI_API_KEY)")
    parser.add_argument("--model", default="deepseek-reasoner", help="its name there (sec. 4.2.1)")
    given = parser.parse_args(argv)
    with process.ends_cleanly((UserError, OSError), lambda: "the same command asks for the rest"):
        score_answers(given.file, given.url, given.model)


if __name__ == "__main__":
    main()
