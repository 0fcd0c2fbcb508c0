"""Checkpoints: model in Hugging Face form, optimizer.safetensors (of several ranks one each), trainer.json
with a digest of every file. The new one is complete on disk before the old one goes; `find` knows what a kill
between two renames left."""

import glob
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import cache, distributed, forms
from common.files import UserError, say


class ModelError(UserError):
    """A model or checkpoint that cannot be used; the message says what to do."""


REMEDY = "restore it, or start anew with another --name and --checkpoint"


def steps_between(save_every, model, optimizer):
    """Steps from one checkpoint to the next: --save-every, of whose auto flags.py has the rule."""
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
    folder = Path(folder)
    moments = distributed.collect(_moments(model, optimizer), by_all=True)
    weights = None
    if distributed.world() > 1:
        weights = distributed.collect(model.state_dict(keep_vars=True))
    part = f"-{distributed.rank() + 1}-of-{distributed.world()}" if distributed.world() > 1 else ""
    new = [_beside(folder, "new", find(folder))] if distributed.rank() == 0 else []
    new = distributed.gather(new)[0]
    try:
        new.mkdir(parents=True, exist_ok=True)
        file = new / f"optimizer{part}.safetensors"
        save_file(moments, str(file))
        _to_disk(file)
        distributed.once(_write, new, model, weights, tokenizer, state)
        distributed.once(_put, new, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ModelError(f"cannot save {folder}: {error}. What was saved before is untouched; free some "
                         "space and use --resume") from error


def _write(new, model, weights, tokenizer, state):
    """weights: whole, where those of the model are cut."""
    if weights is None:
        model.save_pretrained(new)
    else:
        model.save_pretrained(new, state_dict=weights)
    tokenizer.save_pretrained(new)
    digests = {str(file.relative_to(new)): cache.digest(file) for file in _files(new)}
    digests.pop("README.md", None)  # adapters come with one, and the card of the run replaces it
    for file in _files(new):
        _to_disk(file)
    (new / "trainer.json").write_text(json.dumps({**state, "digests": digests}, indent=1))
    _to_disk(new / "trainer.json")


def _to_disk(file):
    with open(file, "rb") as f:
        os.fsync(f.fileno())


def _put(new, folder):
    """Puts the new checkpoint into the old one's place. An old one that cannot be deleted (another process
    reads it, over NFS) stays beside it."""
    if folder.exists():
        folder.rename(_beside(folder, "old"))
    new.rename(folder)
    for path in _left_of(folder):
        shutil.rmtree(path, ignore_errors=True)


def _beside(folder, word, kept=None):
    """A free name: checkpoint.old, or checkpoint.old1 where that cannot be deleted or is to be kept."""
    for n in itertools.count():
        path = folder.with_name(f"{folder.name}.{word}{n or ''}")
        if path != kept:
            shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return path


def _left_of(folder):
    """The new and old ones that stand beside a checkpoint."""
    there = folder.parent.glob(f"{glob.escape(folder.name)}.*") if folder.name else ()
    return sorted(path for path in there if re.fullmatch(r"\.(new|old)\d*", path.suffix))


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
    """The newest whole one of the folder itself and what a kill between the two renames left beside it; None
    where nothing was saved."""
    folder = Path(folder)
    there = [path for path in (folder, *_left_of(folder)) if (path / "trainer.json").exists()]
    if len(there) < 2:  # (whoever reads it says what is wrong with it)
        return there[0] if there else None

    def worth(path):
        try:
            return read_state(path)["step"]
        except ModelError:
            return -1
    return max(there, key=worth)


def _files(folder):
    return sorted(f for f in Path(folder).rglob("*") if f.is_file())


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
    digests = state.get("digests")
    if state["step"] < 0 or digests is None:
        raise ModelError(f"{damaged} (trainer.json has no step and digests); {REMEDY}")
    for name, digest in digests.items():
        file = Path(folder) / name
        if not file.is_file():
            raise ModelError(f"{damaged} ({name} is missing); {REMEDY}")
        if cache.digest(file) != digest:
            raise ModelError(f"{damaged} ({name} is changed since it was saved); {REMEDY}")
    return state


def load_training_state(folder, model, optimizer):
    """Fills the optimizer from a checkpoint (checked before by read_state) and returns its trainer.json."""
    state = read_state(folder)
    parameters = dict(model.named_parameters())
    for file in sorted(Path(folder).glob("optimizer*.safetensors")):
        with safe_open(str(file), "pt") as saved:
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
    return state
