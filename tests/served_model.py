"""An OpenAI-compatible server for tests that says what it is told to. As a program it plays a model that is
right on half of the questions of a file, for at2po.py:

    python -m tests.served_model my.jsonl 8000
"""

import json
import sys
import threading
import zlib

from common import data, process
from common.files import UserError
from common.metrics import stands_in
from tests.conftest import JsonServer


class Model:
    """Answers from a list, the last one for ever; `requests` are those it was sent. An answer: a text, which
    ends where its last tag is left open; a whole choice; (status, body); or a function of the request."""

    def __init__(self, *answers, port=0):
        self.answers = list(answers)
        self.requests = []
        self.server = JsonServer(self.reply, port)
        self.url = f"{self.server.url}/v1"

    @property
    def keys(self):
        return [headers.get("Authorization") for _, headers, _ in self.server.asked]

    def reply(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if callable(answer):
            answer = answer(request)
        if isinstance(answer, tuple):
            return answer[0], answer[1].encode()
        choice = answer if isinstance(answer, dict) else {"finish_reason": "stop"} | {
            "message": {"role": "assistant", "content": answer}}
        return 200, json.dumps({"choices": [choice]}).encode()


def half_right(questions):
    """What Model calls: AT2PO's agent asks it. It searches for the question, quotes the sentence that has the
    answer, and answers; of half of the questions, by their letters, with another question's answer."""
    answers = {q.question: q.answers[0] for q in questions}

    def answer(request):
        said = "".join(message["content"] for message in request["messages"])
        asked = max((q for q in answers if q in said), key=len)
        if "</search>" not in request["messages"][-1]["content"].rpartition(asked)[2]:
            return f"<think> I need to find out: {asked} </think> <search> {asked}"
        gold = answers[asked]
        passage = said.rpartition("<result>")[2].partition("</result>")[0]
        quoted = [s for s in passage.replace("\n", ". ").split(". ") if stands_in([gold], s)]
        found = gold
        if zlib.crc32(asked.encode()) % 2:
            found = next(other for other in answers.values() if other != gold)
        thought = f"{' '.join(quoted[:1])}. So the answer is {found}."
        return f"<think> {thought} </think> <answer> The final answer is \\[ \\boxed{{{found}}} \\] </answer>"

    return answer


if __name__ == "__main__":
    with process.ends_cleanly((UserError, OSError)):
        model = Model(half_right(data.load_questions(sys.argv[1])), port=int(sys.argv[2]))
        print(f"{model.url}, until Ctrl-C or a kill", flush=True)
        threading.Event().wait()
