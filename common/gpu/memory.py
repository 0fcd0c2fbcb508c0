"""Whether a training fits into memory, before anything is loaded: weights, moments and gradients against what
is free. What a sampler takes (--cache-gb, twice, and a copy of the weights) is not counted."""

import functools
import sys

import psutil
import torch
import transformers

from common import distributed
from common.model import default_device, find_model

ACTIVATIONS = 81    # bytes that a layer keeps for each token and hidden unit on a GPU: rough
FULL = .9           # of a device, before PyTorch rounds up
REMEDIES = {
    "cpu": "--precision bf16 --lora 16 (adapters on a frozen base), a smaller model",
    "cuda": "--lora 64 (adapters on a frozen base), --optimizer adamw8bit (a quarter of the moments), "
            "more GPUs (torchrun --nproc-per-node N)",
}


def skeleton(config):
    """A model of this configuration, with shapes and no numbers."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def count(model, cfg, device, ranks=1, num_frozen=0):
    """(bytes of weights and moments, of gradients) in one of `ranks` processes, which share them.

    model: its skeleton. cfg: flags.PolicyFlags. num_frozen: models of this size beside the policy: reference,
    scorer, sampler."""
    weights = trained = sum(p.numel() for p in model.parameters())
    head = model.get_output_embeddings()
    if cfg.lora:
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        trained = cfg.lora * sum(m.in_features + m.out_features for m in linear)
    in_bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and device == "cuda"
    fixed = num_frozen + bool(cfg.lora)  # the base below adapters
    moments = 2.03 if cfg.optimizer == "adamw8bit" else 8
    held = (4 + moments) * trained + (2 if in_bf16 else 4) * fixed * weights
    return held / ranks, 4 * trained / ranks


@functools.cache
def device_bytes():
    """What there is for this program when it first asks: of a GPU's memory, else of this machine's."""
    if default_device() == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return psutil.virtual_memory().available


def check(cfg, name, num_frozen=0):
    """Ends the program where the device cannot hold what the training of `name` (folder or hub id) holds. A
    folder of adapters alone is not counted.

    Returns whether activations have to be computed again in the backward pass: where a GPU has no room."""
    device = default_device()
    try:
        config = transformers.AutoConfig.from_pretrained(find_model(name), trust_remote_code=False)
        model = skeleton(config)
    except (AttributeError, ValueError, OSError, KeyError, RuntimeError):  # loading says what it is
        return device == "cuda"
    have = device_bytes()
    held, gradients = count(model, cfg, device, distributed.world(), num_frozen)
    wanted = held + gradients
    if wanted > have:
        sys.exit(f"error: {name} with these flags wants {wanted / 1e9:.1f} GB for weights, moments and "
                 f"gradients; {have / 1e9:.1f} GB are free here. Try {REMEDIES[device]}")
    config = config.get_text_config()
    wanted += ACTIVATIONS * cfg.micro_tokens * config.num_hidden_layers * config.hidden_size
    if not cfg.lora:  # autocast's copies in bf16
        wanted += 2 * model.num_parameters()
    return device == "cuda" and wanted > FULL * have
