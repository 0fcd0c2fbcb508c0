"""A GGUF file, as llama.cpp reads them, as a folder in Hugging Face form that every script can train.

    python -m common.warmup.gguf model.gguf FOLDER

transformers reads GGUF and turns quantised weights back into numbers, but refuses to save what it read: its
configuration still says "quantised". So the weights go into a new model of the same configuration."""

import argparse
from pathlib import Path

import torch
import transformers

from common import process
from common.checkpoint import ModelError
from common.files import UserError, say


def convert(file, folder):
    """Writes config.json, model.safetensors (fp32) and the tokenizer's files of a GGUF file; returns the
    number of weights. The tokenizer is rebuilt from the file's own table; what GGUF does not keep of the
    original's (rules for cutting text before it is looked up) is transformers' default."""
    file, folder = Path(file), Path(folder)
    if not file.is_file():
        raise ModelError(f"{file}: no such file")
    if folder.exists() and any(folder.iterdir()):
        raise ModelError(f"{folder} is there and not empty: nothing was written; choose another folder")
    where = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        read = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except ImportError as error:
        raise ModelError(f"{file}: reading GGUF needs the package gguf: pip install gguf") from error
    except (OSError, ValueError, LookupError, RuntimeError) as error:
        what = " ".join(str(error).split())[:200]
        raise ModelError(f"{file}: transformers cannot read it ({type(error).__name__}: {what})") from error
    config = read.config.to_dict()
    for name in ("quantization_config", "_name_or_path"):
        config.pop(name, None)
    model = type(read)(type(read.config).from_dict(config))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    end = read.config.eos_token_id
    if isinstance(end, int):  # some versions of transformers take it for the tokenizer from elsewhere
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(end)
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(unfinished)
    model.save_pretrained(unfinished)
    unfinished.rename(folder)  # an empty one may be there
    return sum(p.numel() for p in model.parameters())


def main(argv=None):
    """`python -m common.warmup.gguf x.gguf FOLDER`"""
    parser = argparse.ArgumentParser(prog="python -m common.warmup.gguf", description=main.__doc__)
    parser.add_argument("file")
    parser.add_argument("folder")
    given = parser.parse_args(argv)
    with process.ends_cleanly((UserError, OSError), lambda: "nothing was written"):
        say(f"reading {given.file} (a minute or two)")
        weights = convert(given.file, given.folder)
        say(f"{given.folder}: {weights / 1e6:,.1f} M weights; use it as --model {given.folder}")


if __name__ == "__main__":
    main()
