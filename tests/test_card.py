"""The model card in a checkpoint: plain transformers load it, with the prompt and the stops that it names."""

import ast
import re
from types import SimpleNamespace as Made

import pytest

import at2po
from common import metrics, rollout, splits
from common import model as models
from common.agent import Player
from common.engine import TransformersEngine
from common.files import read_json
from common.report import card
from tests.lifting import run

SMALL = ("--world plain --steps 1 --questions-per-step 2 --mini-batch 1 --chains 2 --rounds 1 --expand 2 "
         "--eval-limit 6 --name card --out").split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    at2po.main([*SMALL, str(out)])
    return out / "at2po/card/checkpoint"


def code_of(text):
    return re.search(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[1]


def value_of(name, code):
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == name:
            return ast.literal_eval(node.value)


def test_the_card_says_what_was_trained_and_what_it_scored(checkpoint):
    text = (checkpoint / "README.md").read_text()
    summary = read_json(checkpoint.parent / "eval_test.json", dict)["summary"]
    assert metrics.summary_line("test", summary) in text and summary["n"] == 6
    assert "1 steps on world from the embedded world's tiny policy" in text


def test_plain_transformers_answer_with_prompt_and_stops_of_the_card(checkpoint):
    code = code_of((checkpoint / "README.md").read_text())
    said = run(checkpoint, code).strip()
    prompt, stops = value_of("prompt", code), value_of("stops", code)
    assert stops == ["</search>", "</answer>"]
    assert said.endswith(tuple(stops))
    cfg = at2po.parse_args(SMALL[:-1])
    model, tokenizer = models.load_policy(checkpoint)
    _, [test] = splits.load_splits(cfg, "")
    prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert prompt_ids == at2po.render_prompt(tokenizer, test.questions[0].question, "chat")

    def agent(policy, search):
        return at2po.play(Player(policy, search, prompt_ids, cfg, 0, 0.0), at2po.Node(), "greedy")

    policy = rollout.Policy(model, tokenizer, TransformersEngine(model, tokenizer))
    assert rollout.run_alone(agent, policy, test.retriever).turns()[0].text == said


def test_a_question_cannot_leave_its_quotes(tmp_path):
    asked = 'a"""\n```\n# b\n```python\nimport os\n'
    place = tmp_path / "run/checkpoint"
    place.mkdir(parents=True)
    (place / "trainer.json").write_text('{"step": 3}')
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
