"""A checkpoint is replaced as a whole; nothing of it stays mapped."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from common import checkpoint, training
from common import model as models
from common.checkpoint import ModelError
from common.world import tiny


@pytest.fixture
def policy(tmp_path):
    """(model, tokenizer, optimizer after an update, save(step), the checkpoint's folder)."""
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(70)], [])
    model = tiny.tiny_model(tokenizer, width=32)
    optimizer = training.make_optimizer(model, 1e-3)
    model(torch.arange(8)[None]).logits.sum().backward()
    optimizer.step()
    folder = tmp_path / "run/checkpoint"

    def save(step):
        checkpoint.save(folder, model, tokenizer, optimizer, {"step": step})
    return model, optimizer, save, folder


def step_of(folder):
    return json.loads((checkpoint.find(folder) / "trainer.json").read_text())["step"]


def test_a_kill_at_any_moment_leaves_a_whole_one_that_is_found_and_replaced(policy):
    *_, save, folder = policy
    save(1)
    save(2)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"] and step_of(folder) == 2
    old, new = (folder.with_name(f"checkpoint.{word}") for word in ("old", "new"))
    shutil.copytree(folder, new)
    (new / "trainer.json").unlink()  # not yet whole
    assert checkpoint.find(folder) == folder
    (new / "trainer.json").write_text('{"step": 3}')
    folder.rename(old)  # between the two renames
    assert checkpoint.find(folder) == new
    save(4)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"] and step_of(folder) == 4


def test_a_save_that_fails_after_such_a_kill_leaves_the_newest_one(policy, monkeypatch):
    *_, save, folder = policy
    save(1)
    shutil.copytree(folder, folder.with_name("checkpoint.new"))
    (folder.with_name("checkpoint.new") / "trainer.json").write_text('{"step": 2}')
    folder.rename(folder.with_name("checkpoint.old"))
    monkeypatch.setattr(checkpoint, "save_file", lambda *_: open("/nosuch/file"))
    with pytest.raises(ModelError, match="No such file"):
        save(3)
    assert step_of(folder) == 2


def test_moments_of_a_rank_that_are_gone_are_missed(policy):
    model, optimizer, save, folder = policy
    save(1)
    moments = folder / "optimizer.safetensors"
    shutil.copy(moments, folder / "optimizer-1-of-2.safetensors")
    shutil.move(moments, folder / "optimizer-2-of-2.safetensors")
    assert checkpoint.load_training_state(folder, model, optimizer)["step"] == 1
    (folder / "optimizer-2-of-2.safetensors").unlink()
    with pytest.raises(ModelError, match="lacks moments"):
        checkpoint.load_training_state(folder, model, optimizer)


def test_a_failed_save_leaves_the_old_one(policy, monkeypatch):
    *_, save, folder = policy
    save(1)

    def full(*_):
        raise OSError(28, "No space left")
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ModelError, match="No space left. What was saved before is untouched"):
        save(2)
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"] and step_of(folder) == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="Linux tells what is mapped")
def test_nothing_of_a_checkpoint_stays_mapped(policy):
    _, _, save, folder = policy
    save(1)
    model = models.load_model(str(folder), device="cpu")
    optimizer = training.make_optimizer(model, 1e-3)
    assert checkpoint.load_training_state(folder, model, optimizer)["step"] == 1
    assert len(optimizer.state) > 5
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("billions, bits8, steps", [
    (.0005, False, 1), (.08, False, 1), (.5, False, 10), (4.02, False, 12), (14.8, False, 44),
    (14.8, True, 22)])
def test_large_checkpoints_are_saved_rarely(billions, bits8, steps, capsys):
    with torch.device("meta"):
        model = torch.nn.Linear(int(billions * 1e6), 1000, bias=False)
        frozen = torch.nn.Linear(10**7, 1000, bias=False).requires_grad_(False)  # (below adapters)
        both = torch.nn.ModuleList([model, frozen])
    optimizer = torch.optim.SGD(both.parameters()) if bits8 else torch.optim.AdamW(both.parameters())
    assert checkpoint.steps_between("auto", both, optimizer) == steps
    assert (f"every {steps} steps" in capsys.readouterr().out) == (steps > 1)
    for given in (0, 7):
        assert checkpoint.steps_between(given, both, optimizer) == given
