"""The embedded world on file, and the start weights that come with the project:

    python -m common.world --split test --out DIR     # 2Wiki-style questions, Search-R1 corpus, triples
    python -m common.world make                       # all start weights, forty minutes on one thread
    python -m common.world make at2po --world hard    # what this command starts from

Start weights lie in common/world/start/<script>-<level>, rounded to bf16. Beside them, recipe.json has the
recipe they go by, the command, a hash of the first demonstrations and the losses of the first warm-up steps.
tests/test_tiny.py holds these against the code.
"""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import tyro

from common.files import say
from common.world import SPLITS, make_world, tiny

STEPS = 30  # of which the losses are kept


def making_of(command):
    """The tiny.Making of what a script starts from. command: its name and flags, a list."""
    script, *flags = command
    if command == ["askit"]:
        return importlib.import_module("common.of_askit.tiny_t5").T5Making()
    module = importlib.import_module(script)  # (the one place that looks up to scripts and drawers)
    with mock.patch.object(tiny, "folder_of", lambda making: making):
        return module.tiny_policy(module.parse_args(flags))


def commands():
    """Those whose start weights come with the project."""
    files = sorted(tiny.START.glob("*/recipe.json"))
    return [json.loads(file.read_text())["command"] for file in files]


def make(command):
    """command: [] = every one there is."""
    wanted = [command] if command else commands()
    for command in wanted:
        making = making_of(command)
        model, tokenizer, losses = making.learn()
        write(making, command, model, tokenizer, losses)


def write(making, command, model, tokenizer, losses):
    """The folder of made weights, rounded to bf16; an older one is replaced."""
    level = re.sub(r"[^\w.=]+", "-", making.recipe.world)
    about = {
        "command": command,
        "recipe": making.full_recipe(),
        "demonstrations": making.fingerprint(),
        "losses": [round(loss, 4) for loss in losses[:STEPS]],
    }
    folder = tiny.START / f"{command[0]}-{level}"
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.json").write_text(json.dumps(about) + "\n")
    say(f"start weights: {folder}")


def main(out: Path, split: Literal[SPLITS] = "test", seed: int = 0, questions: int = 400):
    """Writes a split as public-format files, so that it can be used with other code."""
    made = make_world(split, seed, questions)
    made.write(out)
    say(f"{len(made.kinds)} entities, {len(made.triples)} triples, {len(made.questions)} questions -> {out}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["make"]:
        make(sys.argv[2:])
    else:
        tyro.cli(main, prog="python -m common.world")
