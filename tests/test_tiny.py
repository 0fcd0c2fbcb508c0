"""Start weights and the code that made them belong together.

Where the first two tests fail, something makes other weights than those in common/world/start: the world, the
demonstrations, a script's rendering, the model or the warm-up. If that is wanted, change tiny.VERSION and run
`python -m common.world make`."""

import json

import pytest
import torch

from common import model as models
from common.of_askit import tiny_encoders
from common.world import __main__ as start_weights
from common.world import tiny

READY = {" ".join(command): command for command in start_weights.commands()}
STEPS = {"at2po --world hard": start_weights.STEPS}  # model and warm-up are those of all; ten show the rest
LEARNED = {name: command for name, command in READY.items() if "plain" not in name}
commands = pytest.mark.parametrize("command", READY.values(), ids=list(READY))


def about(command):
    """(the tiny.Making of what a command starts from, what recipe.json says of the weights)."""
    making = start_weights.making_of(command)
    folder = tiny.folder_of(making)
    assert folder.parent == tiny.START, "recipe, words or tags are not those of the start weights"
    return making, json.loads((folder / "recipe.json").read_text())


@commands
def test_start_weights_go_with_recipe_words_and_demonstrations(command):
    making, kept = about(command)
    assert kept["command"] == command
    assert making.fingerprint() == kept["demonstrations"]


@pytest.mark.parametrize("command", [
    pytest.param(command, id=name, marks=[] if name == "at2po --world hard" else pytest.mark.slow)
    for name, command in LEARNED.items()])
def test_the_first_warm_up_steps_have_the_losses_of_the_start_weights(command):
    making, kept = about(command)
    _, _, losses = making.learn(STEPS.get(" ".join(command), 10))
    assert losses == pytest.approx(kept["losses"][:len(losses)], rel=2e-3)


@commands
def test_start_weights_are_bf16_and_train_in_fp32(command):
    folder = tiny.folder_of(start_weights.making_of(command))
    model, tokenizer = tiny_encoders.tiny_t5() if command == ["askit"] else models.load_policy(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(tokenizer) == model.config.vocab_size
    for parameter in model.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float())


def test_they_are_small():
    sizes = [file.stat().st_size for file in tiny.START.rglob("*")]
    assert sum(sizes) < 8e6


def test_another_recipe_makes_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tiny.folder_of(start_weights.making_of(["at2po", "--warmup-steps", "2"]))
    assert folder.parent == tmp_path / "fivehop"


@pytest.mark.parametrize("flags", ["--top-k 2", "--world hard:elastic=.3"])
def test_other_flags_are_another_recipe(flags):
    ready = {json.dumps(about(command)[1]["recipe"]) for command in READY.values()}
    other = start_weights.making_of(["at2po", *flags.split()])
    assert json.dumps(other.full_recipe()) not in ready
