"""A checkpoint is replaced as a whole, whatever a file system leaves behind; nothing of it stays mapped; what
proves it whole is cheap."""

import os
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


def names(folder):
    return sorted(path.name for path in folder.parent.iterdir())


def cannot_delete(patch, *folders):
    """What a file system does that keeps an open file as .nfs…: rmtree leaves the folder."""
    rmtree = checkpoint.shutil.rmtree
    held = set(folders)

    def kept(path, ignore_errors=False):
        if Path(path) not in held:
            rmtree(path, ignore_errors=ignore_errors)
        elif not ignore_errors:
            raise OSError(39, "Directory not empty")
    patch.setattr(checkpoint.shutil, "rmtree", kept)


@pytest.mark.parametrize("left", [("old",), ("new",), ("old", "new"), ("old", "old1", "new", "new1")])
def test_a_folder_that_cannot_be_deleted_ends_no_run(policy, monkeypatch, left):
    *_, save, folder = policy
    save(1)
    stale = [folder.with_name(f"checkpoint.{word}") for word in left]
    for path in stale:
        path.mkdir()
        (path / ".nfs01").touch()
    cannot_delete(monkeypatch, *stale)
    for step in (2, 3):
        save(step)
        assert checkpoint.find(folder) == folder and checkpoint.read_state(folder)["step"] == step
    assert names(folder) == sorted(["checkpoint", *(path.name for path in stale)])
    monkeypatch.undo()
    save(4)
    assert checkpoint.read_state(folder)["step"] == 4 and len(names(folder)) <= 3


def test_an_old_checkpoint_that_stays_is_not_gone_on_from(policy, monkeypatch):
    *_, save, folder = policy
    save(1)
    cannot_delete(monkeypatch, folder.with_name("checkpoint.old"))
    save(2)
    save(3)
    assert names(folder) == ["checkpoint", "checkpoint.old"]
    assert checkpoint.read_state(folder.with_name("checkpoint.old"))["step"] == 1
    assert checkpoint.read_state(checkpoint.find(folder))["step"] == 3
    folder.rename(folder.with_name("checkpoint.new1"))  # a kill between the two renames
    assert checkpoint.find(folder).name == "checkpoint.new1"
    (folder.with_name("checkpoint.new1") / "model.safetensors").write_bytes(b"cut")
    assert checkpoint.find(folder).name == "checkpoint.old"  # the newest whole one


def test_a_failed_save_keeps_the_checkpoint_that_a_kill_left_under_another_name(policy, monkeypatch):
    *_, save, folder = policy
    save(1)
    folder.rename(folder.with_name("checkpoint.new"))

    def full(*_):
        raise OSError(28, "No space left")
    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(ModelError, match="No space left. What was saved before is untouched"):
        save(2)
    assert names(folder) == ["checkpoint.new"] and checkpoint.read_state(checkpoint.find(folder))["step"] == 1
    monkeypatch.undo()
    save(3)
    assert names(folder) == ["checkpoint"] and checkpoint.read_state(folder)["step"] == 3


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
