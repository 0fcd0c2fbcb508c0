"""Checkpoints: model in Hugging Face form, optimizer.safetensors (of several ranks one each), trainer.json.
The new one is complete on disk before the old one goes; `find` knows what a kill between two renames left."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import distributed
from common.files import REMEDY, UserError, read_json, say


class ModelError(UserError):
    """A model or checkpoint that cannot be used; the message says what to do."""


def steps_between(save_every, model, optimizer):
    """Steps from one checkpoint to the next: --save-every, or auto by size (flags.py)."""
    if save_every != "auto":
        return save_every
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = 8 if isinstance(optimizer, torch.optim.AdamW) else 2
    gb = trained * (4 + moments) / 1e9
    steps = 1 if gb < 1 else max(10, round(gb / 4))
    if steps > 1:
        say(f"A checkpoint has {gb:.0f} GB: one is saved every {steps} steps, and at the end (--save-every).")
    return steps


def save(folder, model, tokenizer, optimizer, state):
    """Replaces the checkpoint as a whole. state: plain JSON with "step".

    A failed save leaves the old one as it was. Tensors are whole, as one process has them. Moments, two
    thirds of the bytes, are written by all ranks, a part and a file each; weights by the first, so that every
    checkpoint is a model in Hugging Face form."""
    moments = distributed.collect(_moments(model, optimizer), by_all=True)
    weights = None
    part = ""
    if distributed.world() > 1:
        weights = distributed.collect(model.state_dict(keep_vars=True))
        part = f"-{distributed.rank() + 1}-of-{distributed.world()}"
    new = Path(f"{folder}.new")
    distributed.once(_make_room, new, Path(folder))
    try:
        new.mkdir(parents=True, exist_ok=True)
        file = new / f"optimizer{part}.safetensors"
        save_file(moments, str(file), {"step": str(state["step"])})
        _to_disk(file)
        distributed.once(_write, new, model, weights, tokenizer, state)
        distributed.once(_put, new, Path(folder))
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ModelError(f"cannot save {folder}: {error}. What was saved before is untouched") from error


def _write(new, model, weights, tokenizer, state):
    """weights: gathered, if the model is sharded; else None."""
    if weights is None:
        model.save_pretrained(new)
    else:
        model.save_pretrained(new, state_dict=weights)
    tokenizer.save_pretrained(new)
    for file in new.rglob("*"):
        if file.is_file():
            _to_disk(file)
    (new / "trainer.json").write_text(json.dumps(state, indent=1))  # the last one: it is whole
    _to_disk(new / "trainer.json")


def _to_disk(file):
    with open(file, "rb") as f:
        os.fsync(f.fileno())


def _make_room(new, folder):
    """Nothing is at `new` then. What a kill between two renames left there, the newest, is put in place."""
    if find(folder) == new:
        _put(new, folder)
    shutil.rmtree(new, ignore_errors=True)


def _put(new, folder):
    """Puts the new checkpoint into the old one's place."""
    old = Path(f"{folder}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _moments(model, optimizer):
    """{"<parameter>/<name>": tensor} of the optimizer's state."""
    moments = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            value = torch.as_tensor(value)              # bitsandbytes counts steps in plain numbers
            small = value.numel() <= 256                # and has tables that all parameters share
            moments[f"{name}/{key}"] = value.clone() if small else value.contiguous()
    return moments


def find(folder):
    """The newest whole one: the folder, or what a kill between two renames left beside it; None where nothing
    was saved."""
    for path in (Path(folder), Path(f"{folder}.new"), Path(f"{folder}.old")):
        if (path / "trainer.json").exists():
            return path
    return None


def mark_as_trained(source, made):
    """Weights that are made of a checkpoint's have learned, too, which splits.has_learned sees by this."""
    told = Path(source) / "trainer.json"
    if told.exists():
        shutil.copy(told, made)


def load_training_state(folder, model, optimizer):
    """Fills the optimizer from a checkpoint and returns its trainer.json. ModelError where
    trainer.json and moments are of different steps, or a file is gone or damaged."""
    state = read_json(Path(folder) / "trainer.json", dict)
    files = sorted(Path(folder).glob("optimizer*.safetensors"))
    ranks = {int(file.stem.rpartition("-of-")[2]) for file in files if "-of-" in file.stem} or {1}
    if "step" not in state or {len(files)} != ranks:
        raise ModelError(f"--resume: {folder} lacks moments of the optimizer, or trainer.json its step: "
                         f"{REMEDY}")
    try:
        for file in files:
            _fill(file, state["step"], model, optimizer)
    except (SafetensorError, KeyError) as error:
        raise ModelError(f"--resume: {file} is damaged, or of another model ({error}): {REMEDY}") from error
    return state


def _fill(file, step, model, optimizer):
    """The optimizer's moments, from a file."""
    parameters = dict(model.named_parameters())
    with safe_open(str(file), "pt") as saved:
        of_step = (saved.metadata() or {}).get("step", str(step))  # (older checkpoints do not tell)
        if of_step != str(step):
            raise ModelError(f"--resume: {file} is of step {of_step}, trainer.json of step {step}: {REMEDY}")
        for key in saved.keys():
            name, _, what = key.rpartition("/")
            p = parameters[name]
            value = saved.get_tensor(key).clone()  # (what is mapped cannot be deleted over NFS)
            if what == "step":
                value = value if isinstance(optimizer, torch.optim.AdamW) else int(value)
            elif value.shape == p.shape:
                value = distributed.cut_like(value.to(p.device), p)
            else:
                value = value.to(p.device)
            optimizer.state[p][what] = value
