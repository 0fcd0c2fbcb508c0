"""The model card in a checkpoint: plain transformers load it, with the prompt and the stops that it names."""

import ast
import re
from types import SimpleNamespace as Made

import pytest
import torch
import transformers

import at2po
from common import metrics, rollout, splits
from common.engine import Generation, TransformersEngine
from common.files import read_evaluation
from common.report import card
from tests.lifting import run

SMALL = ("--world plain --steps 1 --questions-per-step 2 --mini-batch 1 --chains 2 --rounds 1 --expand 2 "
         "--eval-limit 6 --name card --out").split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    at2po.main([*SMALL, str(out)])
    return out / "at2po/card/checkpoint"


class Plain:
    """An engine of transformers' own generate, with the stops of the card."""
    busy = False

    def __init__(self, folder, stops):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.stops = stops

    def say(self, prompt_ids, max_tokens=512):
        def at_a_stop(ids, scores):
            return self.tokenizer.decode(ids[0, len(prompt_ids):]).endswith(tuple(self.stops))
        said = self.model.generate(
            torch.tensor([prompt_ids]), max_new_tokens=max_tokens, do_sample=False,
            stopping_criteria=[at_a_stop])
        return said[0, len(prompt_ids):].tolist()

    async def generate(self, prompt_ids, stop, max_tokens, temperature, seed):
        ids = self.say(prompt_ids, max_tokens)
        text = self.tokenizer.decode(ids)
        found = next((s for s in self.stops if text.endswith(s)), "eos")
        return Generation(ids, [0.0] * len(ids), found)


def code_of(text):
    return re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def value_of(name, code):
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)


def test_the_card_says_what_was_trained_and_what_it_scored(checkpoint):
    text = (checkpoint / "README.md").read_text()
    summary = read_evaluation(checkpoint.parent / "eval_test.json")["summary"]
    assert metrics.summary_line("test", summary) in text and summary["n"] == 6
    assert "on `world`, 1 steps" in text and "by `python " in text


def test_plain_transformers_answer_with_prompt_and_stops_of_the_card(checkpoint):
    code = code_of((checkpoint / "README.md").read_text())
    said = run(checkpoint, code).strip()
    prompt, stops = value_of("prompt", code), value_of("stops", code)
    assert stops == ["</search>", "</answer>"]
    assert said.endswith(tuple(stops))

    cfg = at2po.parse_args(SMALL[:-1])
    plain = Plain(checkpoint, stops)
    prompt_ids = plain.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    _, evals = splits.load_splits(cfg, "")
    assert prompt_ids == at2po.render_prompt(plain.tokenizer, evals[0].questions[0].question, "chat")
    policies = [rollout.Policy(None, plain.tokenizer, plain),
                rollout.Policy(None, plain.tokenizer, TransformersEngine(plain.model, plain.tokenizer))]
    played = []
    for policy in policies:  # the same agent over transformers' generate, and over ours
        def agent(policy, search):
            return at2po.play(at2po.Player(policy, search, prompt_ids, cfg, 0, 0.0), at2po.Node(), "greedy")
        leaf = rollout.run_alone(agent, policy, evals[0].retriever)
        played.append([turn.text for turn in leaf.turns()])
    assert played[0][0] == said
    assert played[0] == played[1] and at2po.boxed(played[0][-1])


def test_a_question_cannot_leave_its_quotes(tmp_path):
    asked = 'a"""\n```\n# b\n```python\nimport os\n'
    place = tmp_path / "run/checkpoint"
    place.mkdir(parents=True)
    state = {"step": 3, "weights": 1, "digests": {}}
    (place / "trainer.json").write_text(str(state).replace("'", '"'))
    tokenizer = Made(decode=lambda ids: asked)
    policy = rollout.Policy(None, tokenizer, Made(asked=([1], ("</a>",))))
    config = {"model": "x/y\n# z", "checkpoint": "", "data": "d`", "seed": 0}
    folder = Made(path=tmp_path / "run", config=config)
    card.write(folder, policy, {})
    text = (place / "README.md").read_text()
    assert value_of("prompt", code_of(text)) == asked
    assert text.count("\n```") == 2 and "\n# b" not in text and "\n# z" not in text


def test_no_card_without_weights_or_a_language_model(tmp_path):
    folder = Made(path=tmp_path, config={})
    card.write(folder, rollout.Policy(None, None, Made(asked=([1], ()))), {})
    card.write(folder, Made(), {})
    assert not list(tmp_path.iterdir())
