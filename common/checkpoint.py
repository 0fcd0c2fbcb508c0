"""Checkpoints: model in Hugging Face form, optimizer.safetensors, trainer.json with a digest of every file.
The new one is complete on disk before the old one goes; `find` knows what a kill between two renames left."""

import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import distributed, forms
from common.files import UserError


class ModelError(UserError):
    """A model or checkpoint that cannot be used; the message says what to do."""


REMEDY = "restore it, or start anew with another --name and --checkpoint"


def save(folder, model, tokenizer, optimizer, state):
    """Replaces the checkpoint as a whole. state: plain JSON with "step".

    A failed save leaves the old one as it was. Of several ranks the first writes what all gather: whole
    tensors, as one process has them."""
    moments = distributed.collect(_moments(model, optimizer))
    weights = None
    if distributed.world() > 1:
        weights = distributed.collect(model.state_dict(keep_vars=True))
    distributed.once(_write, Path(folder), model, weights, tokenizer, moments, state)


def _write(folder, model, weights, tokenizer, moments, state):
    """weights: whole, where those of the model are cut."""
    new = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + ".old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        if weights is None:
            model.save_pretrained(new)
        else:
            model.save_pretrained(new, state_dict=weights)
        tokenizer.save_pretrained(new)
        save_file(moments, str(new / "optimizer.safetensors"))
        digests = {str(file.relative_to(new)): _digest(file) for file in _files(new)}
        digests.pop("README.md", None)  # adapters come with one, and the card of the run replaces it
        (new / "trainer.json").write_text(json.dumps({**state, "sha256": digests}, indent=1))
        for path in _files(new):
            with open(path, "rb") as f:
                os.fsync(f.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ModelError(f"cannot save {folder}: {error}. What was saved before is untouched; free some "
                         "space and use --resume") from error
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
    """The folder itself, or what a kill between the two renames left of it; None where nothing was saved."""
    folder = Path(folder)
    new = folder.with_name(folder.name + ".new")
    old = folder.with_name(folder.name + ".old")
    for path in (folder, new, old):
        if (path / "trainer.json").exists():
            return path
    return None


def _files(folder):
    return sorted(f for f in Path(folder).rglob("*") if f.is_file())


def _digest(file):
    stamp = file.stat()
    return _sha256(str(file), stamp.st_mtime_ns, stamp.st_size)


@functools.cache
def _sha256(path, *_stamp):
    """Of a file, read once a process while its time and size stay."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_state(folder):
    """trainer.json of a checkpoint;
    ModelError where it is damaged, or another of its files is not as it was saved."""
    damaged = f"{folder}: the checkpoint is damaged"
    try:
        state = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        what = type(error).__name__
        raise ModelError(f"{damaged} (trainer.json: {what}); {REMEDY}") from error
    found = forms.misfit(state, forms.form_of("trainer.json"))
    if found:
        raise ModelError(f"{damaged} (trainer.json has no {found[0]} that is {found[1]}); {REMEDY}")
    if state["step"] < 0 or not state.get("sha256"):
        raise ModelError(f"{damaged} (trainer.json has no step and sha256); {REMEDY}")
    for name, digest in state["sha256"].items():
        file = Path(folder) / name
        if not file.is_file():
            raise ModelError(f"{damaged} ({name} is missing); {REMEDY}")
        if _digest(file) != digest:
            raise ModelError(f"{damaged} ({name} is changed since it was saved); {REMEDY}")
    return state


def load_training_state(folder, model, optimizer):
    """Fills the optimizer from a checkpoint (checked before by read_state) and returns its trainer.json."""
    state = read_state(folder)
    parameters = dict(model.named_parameters())
    with safe_open(str(Path(folder) / "optimizer.safetensors"), "pt") as saved:
        for key in saved.keys():
            name, _, what = key.rpartition("/")
            p = parameters[name]
            value = saved.get_tensor(key)
            if what == "step":
                value = value if isinstance(optimizer, torch.optim.AdamW) else int(value)
            elif value.shape == p.shape:
                value = distributed.cut_like(value.to(p.device), p)
            else:
                value = value.to(p.device)
            optimizer.state[p][what] = value
    return state
