"""A tool of your own in AT2PO: half a million weights learn what to ask a calculator. Half of the operators
in the demonstrations are drawn at random, and training mends that:

    python -m examples.calculator sums      # writes questions, demonstrations, and a model that knows nothing
    python at2po.py --retriever own:examples.calculator:Calculator --model sums/model \\
        --data sums/train.jsonl --eval-data sums/test.jsonl --warmup-data sums/right.jsonl --warmup-lr 3e-3 \\
        --warmup-steps 400 --steps 20 --questions-per-step 16 --mini-batch 4 --lr 1e-4 --clip-low .03 \\
        --clip-high .04 --prompt-form chat --stop-at-answer --eval-temperature 1 --max-response 700
"""

import itertools
import operator
import random
import re
import sys
from pathlib import Path

import at2po
from common.files import write_jsonl
from common.retriever import Passage
from common.world import tiny

SIGNS = {"plus": "+", "times": "*", "modulo": "%"}
APPLY = {"+": operator.add, "*": operator.mul, "%": operator.mod}


class Calculator:
    """Takes a query such as "12 * 7" and evaluates nothing else. What it cannot read is told, not raised."""

    def search(self, queries, k):
        return [[Passage("", "result", self.result(query))] for query in queries]

    def result(self, query):
        match = re.fullmatch(r"([0-9]{1,3}) ?([+*%]) ?([1-9][0-9]{0,2})", query)
        if not match:
            return "nothing"
        left, sign, right = match.groups()
        return str(APPLY[sign](int(left), int(right)))


def question(n, drawn=0):
    """(the n-th question, its conversation). drawn: how often an operator is drawn at random."""
    rng = random.Random(n)
    value, *rest = map(str, rng.choices(range(2, 10), k=3))
    words = rng.choices(list(SIGNS), k=2)
    asked = f"What is {value} {words[0]} {rest[0]} then {words[1]} {rest[1]} ?"
    said = [asked]
    for word, number in zip(words, rest, strict=True):
        sign = SIGNS[word]
        if rng.random() < drawn:
            sign = rng.choice("+*%")
        query = f"{value} {sign} {number}"
        said.append(f"<think> so </think> <search> {query} </search>")
        [found] = Calculator().search([query], 1)
        said.append(at2po.render_passages(found))
        value = found[0].text
    said.append(f"<think> so </think> <answer> \\boxed{{ {value} }} </answer>")
    roles = itertools.cycle(["human", "gpt"])
    turns = [{"from": role, "value": text} for role, text in zip(roles, said, strict=False)]
    return {"id": str(n), "question": asked, "answer": value}, turns


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    asked = {}
    for n in range(1300):
        q, _ = question(n)
        asked[q["question"]] = q
    asked = list(asked.values())
    write_jsonl(folder / "train.jsonl", asked[:900])
    write_jsonl(folder / "test.jsonl", asked[900:])
    told = [{"conversations": question(-n, drawn=.5)[1]} for n in range(1, 3201)]
    write_jsonl(folder / "right.jsonl", told)
    words = 'What is then ? so result nothing Page : " +'.split()
    words += [*SIGNS, *APPLY]
    words += map(str, range(1000))
    tags = [*at2po.THINK, *at2po.SEARCH, *at2po.RESULT, *at2po.ANSWER, "\\boxed{", "}"]
    tokenizer = tiny.tiny_tokenizer(words, tags)
    tokenizer.save_pretrained(folder / "model")
    tiny.tiny_model(tokenizer).save_pretrained(folder / "model")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m examples.calculator FOLDER")
    main(Path(sys.argv[1]))
