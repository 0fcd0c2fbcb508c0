"""One model of two, tensor by tensor, as files of safetensors."""

import json
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import checkpoint
from common import model as models


def combine(forward, backward, mix, out):
    """mix(a, b) of the tensors of two folders, in fp32, one shard in memory; stored as forward is, which also
    gives all else. Returns `out`.

    ModelError: not of one architecture, adapters, damaged files."""
    forward, backward, out = Path(forward), Path(backward), Path(out)
    if out.resolve() in (forward.resolve(), backward.resolve()):
        raise models.ModelError(f"cannot merge into {out}: it is one of the two; choose another --name")
    ours, theirs = files_of_one_architecture(forward, backward)
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for file in dict.fromkeys(ours.values()):
        merged = {}
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  (safe_open is no dict)
                with safe_open(theirs[name], "pt") as g:
                    a, b = f.get_tensor(name), g.get_tensor(name)
                if a.shape != b.shape:
                    raise models.ModelError(f"cannot merge: {name} is {tuple(a.shape)} in {forward} and "
                                            f"{tuple(b.shape)} in {backward}")
                merged[name] = mix(a.float(), b.float()).to(a.dtype) if a.is_floating_point() else a
        save_file(merged, str(new / file.name), metadata={"format": "pt"})
    for file in forward.iterdir():
        ours_alone = file.name in ("trainer.json", "recipe.json")
        if file.suffix in (".json", ".jinja", ".txt", ".model") and not ours_alone:
            shutil.copyfile(file, new / file.name)
    if out.exists():
        shutil.rmtree(out)
    new.rename(out)
    return out


def weight_files(folder):
    """{tensor name: safetensors file} of a Hugging Face folder, sharded or not."""
    folder = Path(folder)
    if (folder / "adapter_config.json").exists():
        raise models.ModelError(f"{folder}: LoRA adapters do not average to the average of what they do; "
                                "merge each into its base first (merge_and_unload)")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in files.items()}
    if not (folder / "config.json").exists():
        raise models.ModelError(f"{folder}: no config.json; merging reads Hugging Face folders")
    if not (folder / "model.safetensors").exists():
        raise models.ModelError(f"{folder}: no model.safetensors and no model.safetensors.index.json; "
                                "merging reads Hugging Face folders")
    try:
        with safe_open(folder / "model.safetensors", "pt") as f:
            return dict.fromkeys(f.keys(), folder / "model.safetensors")
    except SafetensorError as error:
        raise models.ModelError(f"{folder}/model.safetensors cannot be read ({error})") from error


def files_of_one_architecture(forward, backward):
    """weight_files of both, which must be as they were saved and hold the same tensors."""
    for folder in (forward, backward):
        checkpoint.check_files(folder)
    ours, theirs = weight_files(forward), weight_files(backward)
    configs = [json.loads((f / "config.json").read_text()) for f in (forward, backward)]
    kinds = [config.get("architectures") for config in configs]
    odd = sorted(set(ours) ^ set(theirs))[:3]
    if kinds[0] != kinds[1] or odd:
        only = f"; only in one: {odd}" if odd else ""
        raise models.ModelError(f"cannot merge {forward} ({kinds[0]}) and {backward} ({kinds[1]}): not one "
                                f"architecture{only}")
    return ours, theirs
