"""How much memory a run wants, before anything is loaded: `estimate` in bytes, `check` refuses in words.

Weights, moments, gradients, the sampler's weights and caches are counted; the activations of a micro-batch
are one rough factor. What PyTorch rounds up and leaves unused comes on top, some 10 %."""

import functools
import sys

import psutil
import torch
import transformers

from common import distributed
from common.engine import MAX_BATCH
from common.files import warn
from common.model import default_device, find_model, head_dim, key_heads

# bytes that a layer's forward and backward pass keep for each token and hidden unit: rough
ACTIVATIONS = {"cuda": 81, "cpu": 120}
RECOMPUTED = 6      # where only the layers' inputs are kept, and the rest is computed again
LOGITS = 14         # bytes for each token and word of a vocabulary, on a CPU: rough, most if all were sampled
FULL = .9           # of a device, before PyTorch rounds up
REMEDIES = ("--lora 64 (adapters on a frozen base), --optimizer adamw8bit (a quarter of the moments), a "
            "smaller --micro-tokens or --cache-gb, more GPUs (torchrun --nproc-per-node N)")


def skeleton(config):
    """A model of this configuration, with shapes and no numbers."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def estimate(model, cfg, device, ranks=1, frozen=0, trains=True, recomputes=True):
    """(held, update, rollout), each {what for: bytes}: what one of `ranks` processes, which share weights and
    moments, holds all the time, and what it holds beside that in an update or in a rollout.

    model: its skeleton. cfg: flags.PolicyFlags. frozen: models of this size beside the policy: reference,
    scorer, sampler. trains: False = it is only sampled; every rank has it whole. recomputes: activations, on
    a GPU."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    weights = trained = sum(p.numel() for p in model.parameters())
    if cfg.lora:
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        trained = cfg.lora * sum(m.in_features + m.out_features for m in linear)
    vllm = cfg.engine == "vllm"
    in_bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and device == "cuda"
    width = 2 if in_bf16 else 4
    sampled_in = 2 if vllm and device == "cuda" else width  # whatever --precision says
    per_token = 2 * config.num_hidden_layers * key_heads(config) * head_dim(config) * sampled_in
    most = MAX_BATCH * config.max_position_embeddings * per_token
    rollout = {"keys and values": 2 * min(cfg.cache_gb * 2**30, most)}  # of running sequences, and of others
    if vllm:
        rollout["the sampler's weights"] = sampled_in * weights
    elif in_bf16 and not cfg.lora:  # ours shares the trainer's, but for copies of fp32 matrices
        rollout["the sampler's weights"] = 2 * weights
    if not trains:
        return {"weights": (width if vllm else 4) * weights}, {}, rollout  # (Run.policy)
    if ranks > 1 and not vllm:  # the trainer's are cut
        rollout["the sampler's whole weights"] = (width if cfg.lora else 4) * weights
    held = {
        "trained weights": 4 * trained / ranks,
        "weights below adapters": width * weights / ranks if cfg.lora else 0,
        "moments": (2.03 if cfg.optimizer == "adamw8bit" else 8) * trained / ranks,
        "frozen models": width * weights * frozen / ranks,
    }
    bytes_each = RECOMPUTED if recomputes and device == "cuda" else ACTIVATIONS[device]
    update = {
        "gradients": 4 * trained / ranks,
        "activations, roughly": bytes_each * cfg.micro_tokens * config.num_hidden_layers * config.hidden_size,
    }
    if device == "cpu":  # (turn_logprob_reference takes 4,096 rows at a time)
        update["logits, roughly"] = LOGITS * min(cfg.micro_tokens, 4096) * head.weight.shape[0]
    if in_bf16 and not cfg.lora and ranks == 1:  # one layer's where they are cut
        update["bf16 copies"] = 2 * weights
    return held, update, rollout


def peak(held, update, rollout):
    """Bytes; an update and a rollout never lie in memory together."""
    return sum(held.values()) + max(sum(update.values()), sum(rollout.values()))


@functools.cache
def device_bytes():
    """What there is for this program when it first asks: of a GPU's memory, else of this machine's."""
    if default_device() == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    return psutil.virtual_memory().available


def check(cfg, name, frozen=0, trains=True):
    """Ends the program where the device cannot hold the training of `name` (folder or hub id), or, where it
    is not trained, its sampling; on a CPU for weights, moments and gradients alone, with a warning for the
    rest: small runs seldom reach limits on tokens and caches. A folder of adapters alone is not counted.

    Returns whether activations have to be computed again in the backward pass: where a GPU has no room."""
    device = default_device()
    try:
        config = transformers.AutoConfig.from_pretrained(find_model(name), trust_remote_code=False)
        model = skeleton(config)
    except (AttributeError, ValueError, OSError, KeyError, RuntimeError):  # loading says what it is
        return device == "cuda"
    have = device_bytes()
    count = functools.partial(estimate, model, cfg, device, distributed.world(), frozen, trains)
    held, update, rollout = count()
    wanted = peak(held, update, rollout)
    parts = held | update | rollout
    largest = sorted(parts, key=parts.get, reverse=True)[:4]
    told = ", ".join(f"{what} {parts[what] / 1e9:.1f}" for what in largest)
    said = f"about {wanted / 1e9:.1f} GB, here are {have / 1e9:.1f}; {told}. Try {REMEDIES}"
    sure = sum(held.values()) + update.get("gradients", 0)
    if sure > have or device == "cuda" and wanted > have:
        sys.exit(f"error: {name} with these flags wants {said}")
    if wanted > have and 10 * sure > have:  # a tiny model never fills what it may
        warn(f"{name} may want {said}")
    return trains and device == "cuda" and peak(*count(recomputes=False)) >= FULL * have
