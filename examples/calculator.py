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
from common.retriever import Passage
from common.warmup import scripted
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
        return str(APPLY[match[2]](int(match[1]), int(match[3])))


def question(number):
    """The question of that number: "What is 7 plus 3 then times 4 ?"."""
    rng = random.Random(number)
    first, *numbers = [rng.randrange(2, 10) for _ in range(3)]
    words = rng.choices(list(SIGNS), k=2)
    value = str(first)
    for word, other in zip(words, numbers, strict=True):
        value = Calculator().result(f"{value} {SIGNS[word]} {other}")
    text = f"What is {first} {words[0]} {numbers[0]} then {words[1]} {numbers[1]} ?"
    return data.Question(str(number), text, [value])


def demonstration(tokenizer, asked, flaw_rate, cfg):
    """The agent itself says it, so that nothing else has to know the format."""
    first, *steps = re.findall(r"\d+|plus|times|modulo", asked.question)
    rng = random.Random(asked.id)
    value, lines = first, []
    for word, other in zip(steps[::2], steps[1::2], strict=True):
        if rng.random() < flaw_rate:
            word = rng.choice(list(SIGNS))
        query = f"{value} {SIGNS[word]} {other}"
        value = Calculator().result(query)
        lines.append(("</search>", f"<think> {word} </think> <search> {query} </search>"))
    lines.append(("</answer>", f"<think> so </think> <answer> \\boxed{{ {value} }} </answer>"))
    prompt_ids = at2po.render_prompt(tokenizer, asked.question, cfg.prompt_form)

    def agent(policy, search):
        return at2po.play(policy, search, prompt_ids, cfg, 0, 1.0, at2po.Node(), "demonstration")
    leaf = scripted.play(tokenizer, lines, Calculator(), agent)
    return rollout.Trajectory(asked.id, prompt_ids, leaf.turns())


def warmed_up(cfg):
    """(model, tokenizer) after a warm-up on eight demonstrations a step."""
    words = [*map(str, range(1000)), *SIGNS, *SIGNS.values()]
    words += 'What is then ? so result nothing Page : "'.split()
    tags = [*at2po.THINK, *at2po.SEARCH, *at2po.RESULT, *at2po.ANSWER, "\\boxed{", "}"]
    tokenizer = tiny.tiny_tokenizer(words, tags)
    model = tiny.tiny_model(tokenizer)
    batches = []
    for step in range(cfg.warmup_steps):
        asked = [question(-1 - 8 * step - i) for i in range(8)]
        batches.append(rollout.collate([demonstration(tokenizer, q, .5, cfg) for q in asked]))
    tiny.warm_up(model, batches, cfg.warmup_steps)
    return model, tokenizer


def main(argv=None):
    with run.program():
        given = sys.argv[1:] if argv is None else argv
        cfg = at2po.parse_args(["--world", "plain", "--warmup-steps", "400", "--steps", "20", *given])
        folder = run.open_folder(cfg, "calculator", cfg.name)
        recipe = {"script": "calculator", "steps": cfg.warmup_steps}
        start = folder.start or tiny.cached_policy(recipe, lambda: warmed_up(cfg))
        policy = run.load_policy(cfg, start)
        train = data.Split("train", [question(n) for n in range(1000)], Calculator())
        seen = {q.question for q in train.questions}
        others = [question(n) for n in range(1000, 1300)]
        test = data.Split("test", [q for q in others if q.question not in seen], Calculator())
        with run.stage(cfg, folder, at2po.METRICS, "AT2PO with a calculator"):
            run.evaluate_all(cfg, folder, policy, [test], at2po.evaluate, "_before")
            at2po.train(cfg, folder, policy, None, train, None)
            run.evaluate_all(cfg, folder, policy, [test], at2po.evaluate)


if __name__ == "__main__":
    main()
