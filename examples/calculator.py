"""A tool of your own in AT2PO: half a million weights learn what to ask a calculator.

    python -m examples.calculator [flags of at2po.py]        # two CPU cores, two minutes

at2po.py's agent asks whatever has `search(queries, k)`; here it is arithmetic. Half of the operators in the
demonstrations are drawn at random, and training mends that.
"""

import operator
import random
import re
import sys

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import at2po
from common import data, rollout, run
from common.folder import open_folder
from common.retriever import Passage
from common.warmup import scripted
from common.world import tiny

SIGNS = {"plus": "+", "times": "*", "modulo": "%"}
APPLY = {"+": operator.add, "*": operator.mul, "%": operator.mod}
TAGS = [*at2po.THINK, *at2po.SEARCH, *at2po.RESULT, *at2po.ANSWER, "\\boxed{", "}"]


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


def solved(text, sign_of):
    """(queries, result) of a question, its operations one after the other. sign_of(word) is the operator."""
    value, *rest = re.findall(r"\d+|plus|times|modulo", text)
    queries = []
    for word, number in zip(rest[::2], rest[1::2], strict=True):
        queries.append(f"{value} {sign_of(word)} {number}")
        value = Calculator().result(queries[-1])
    return queries, value


def question(n):
    """The n-th: "What is 7 plus 3 then times 4 ?"."""
    rng = random.Random(n)
    a, b, c = (rng.randrange(2, 10) for _ in range(3))
    first, second = rng.choices(list(SIGNS), k=2)
    text = f"What is {a} {first} {b} then {second} {c} ?"
    _, answer = solved(text, SIGNS.get)
    return data.Question(str(n), text, [answer])


def demonstration(tokenizer, asked, cfg):
    """Half of its operators are drawn at random. The agent itself plays it, in its own format."""
    rng = random.Random(asked.id)

    def drawn(word):
        return rng.choice([SIGNS[word], rng.choice("+*%")])

    queries, value = solved(asked.question, drawn)
    lines = []
    for query in queries:
        said = f"<think> so </think> <search> {query} </search>"
        lines.append(("</search>", said))
    said = f"<think> so </think> <answer> \\boxed{{ {value} }} </answer>"
    lines.append(("</answer>", said))
    prompt_ids = at2po.render_prompt(tokenizer, asked.question, cfg.prompt_form)

    def agent(policy, search):
        return at2po.play(policy, search, prompt_ids, cfg, 0, 1.0, at2po.Node(), "demonstration")

    leaf = scripted.play(tokenizer, lines, Calculator(), agent)
    return rollout.Trajectory(asked.id, prompt_ids, leaf.turns())


def warmed_up(cfg):
    """(model, tokenizer) after a warm-up on eight demonstrations a step."""
    words = 'What is then ? so result nothing Page : "'.split()
    words += [*SIGNS, *SIGNS.values()]
    words += map(str, range(1000))
    tokenizer = tiny.tiny_tokenizer(words, TAGS)
    model = tiny.tiny_model(tokenizer)
    batches = []
    for step in range(cfg.warmup_steps):
        numbers = range(-8 * step - 8, -8 * step)
        batch = [demonstration(tokenizer, question(n), cfg) for n in numbers]
        batches.append(rollout.collate(batch))
    tiny.warm_up(model, batches, cfg.warmup_steps)
    return model, tokenizer


def sets():
    """(questions to train on, others to test on)"""
    train = list(map(question, range(1000)))
    seen = {q.question for q in train}
    test = [q for q in map(question, range(1000, 1300)) if q.question not in seen]
    tool = Calculator()
    return data.Split("train", train, tool), data.Split("test", test, tool)


def main(argv=None):
    with run.program():
        usual = "--world plain --warmup-steps 400 --steps 20".split()
        given = sys.argv[1:] if argv is None else argv
        cfg = at2po.parse_args([*usual, *given])
        folder = open_folder(cfg, "calculator", cfg.name)
        recipe = {"script": "calculator", "steps": cfg.warmup_steps}
        start = folder.start
        if not start:
            start = tiny.cached_policy(recipe, lambda: warmed_up(cfg))
        policy = run.load_policy(cfg, start)
        train, test = sets()
        with run.stage(cfg, folder, at2po.METRICS, "AT2PO with a calculator"):
            run.evaluate_all(cfg, folder, policy, [test], at2po.evaluate, "_before")
            at2po.train(cfg, folder, policy, None, train, None)
            run.evaluate_all(cfg, folder, policy, [test], at2po.evaluate)


if __name__ == "__main__":
    main()
