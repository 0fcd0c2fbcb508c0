"""How much memory a run wants, before anything is loaded: `estimate` in numbers, `check` refuses in words.

What is sure is counted from the model's configuration: weights, moments and gradients; the sampler's weights
and caches. The activations of a micro-batch are one rough factor. An update and a rollout never lie in memory
together, so the larger one counts. What PyTorch rounds up and leaves unused comes on top, some 10 %.
"""

import functools
import sys
from types import SimpleNamespace
from typing import NamedTuple

import torch
import transformers

from common import distributed
from common.engine import MAX_BATCH
from common.files import warn
from common.model import default_device, find_model, head_dim

# bytes that a layer's forward and backward pass keep for each token and hidden unit: rough
ACTIVATIONS = {"cuda": 81, "cpu": 120}
RECOMPUTED = 6      # where only the layers' inputs are kept, and the rest is computed again
LOGITS = 14         # bytes for each token and word of a vocabulary, on a CPU: rough, most if all were sampled
FULL = .9           # of a device, before PyTorch rounds up
REMEDIES = ("--lora 64 (adapters on a frozen base), --optimizer adamw8bit (a quarter of the moments), a "
            "smaller --micro-tokens or --cache-gb, more GPUs (torchrun --nproc-per-node N)")


class Estimate(NamedTuple):
    """Bytes by what they are for."""
    held: dict       # all the time
    update: dict     # beside it in an update
    rollout: dict    # beside it in a rollout

    @property
    def peak(self):
        return sum(self.held.values()) + max(sum(self.update.values()), sum(self.rollout.values()))


def shape_of(config):
    """What the estimate asks of a decoder, counted on a model that has no numbers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config = config.get_text_config()
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return SimpleNamespace(
        widths=config.num_hidden_layers * config.hidden_size,
        keys=config.num_hidden_layers * key_heads * head_dim(config),
        positions=config.max_position_embeddings,
        vocabulary=head.weight.shape[0],
        weights=sum(p.numel() for p in model.parameters()),
        adapters=sum(m.in_features + m.out_features for m in linear),   # a rank of LoRA
    )


def estimate(shape, cfg, device, ranks=1, frozen=0, longest=8192, trains=True, recomputes=True):
    """Estimate of one of `ranks` processes that share weights and moments. cfg: flags.PolicyFlags.

    frozen: models of this size beside the policy: reference, scorer, sampler. longest: tokens of a sequence.
    trains: False = weights that are only sampled; every rank has them whole. recomputes: activations, on a
    GPU."""
    vllm = cfg.engine == "vllm"
    in_bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and device == "cuda"
    width = 2 if in_bf16 else 4
    sampled_in = 2 if vllm and device == "cuda" else width  # whatever --precision says
    # vLLM takes its caches at once, for sequences as long as the model knows; as much again for what is done
    most = MAX_BATCH * (shape.positions if vllm else longest) * 2 * shape.keys * sampled_in
    rollout = {"keys and values": 2 * min(cfg.cache_gb * 2**30, most)}
    if vllm:
        rollout["the sampler's weights"] = sampled_in * shape.weights
    elif in_bf16 and not cfg.lora:  # ours shares the trainer's, but for copies of fp32 matrices
        rollout["the sampler's weights"] = 2 * shape.weights
    if not trains:
        return Estimate({"weights": (width if vllm else 4) * shape.weights}, {}, rollout)  # (Run.policy)
    if ranks > 1 and not vllm:  # the trainer's are cut
        rollout["the sampler's whole weights"] = (width if cfg.lora else 4) * shape.weights
    trained = shape.adapters * cfg.lora if cfg.lora else shape.weights
    held = {
        "trained weights": 4 * trained / ranks,
        "weights below adapters": width * shape.weights / ranks if cfg.lora else 0,
        "moments": (2.03 if cfg.optimizer == "adamw8bit" else 8) * trained / ranks,
        "frozen models": width * shape.weights * frozen / ranks,
    }
    bytes_each = RECOMPUTED if recomputes and device == "cuda" else ACTIVATIONS[device]
    update = {
        "gradients": 4 * trained / ranks,
        "activations, roughly": bytes_each * cfg.micro_tokens * shape.widths,
    }
    if device == "cpu":  # (turn_logprob_reference takes 4,096 rows at a time)
        update["logits, roughly"] = LOGITS * min(cfg.micro_tokens, 4096) * shape.vocabulary
    if in_bf16 and not cfg.lora and ranks == 1:  # one layer's where they are cut
        update["bf16 copies"] = 2 * shape.weights
    return Estimate(held, update, rollout)


@functools.cache
def device_bytes():
    """What there is for this program when it first asks: of a GPU's memory, else of this machine's."""
    if default_device() == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    with open("/proc/meminfo") as f:
        lines = dict(line.split(":") for line in f)
    return int(lines["MemAvailable"].split()[0]) * 1024


def check(cfg, name, frozen=0, longest=8192, trains=True):
    """Ends the program where the device cannot hold the training of `name` (folder or hub id), with so many
    frozen models beside it, or, where it is not trained, its sampling. On a CPU it is ended for weights,
    moments and gradients alone, and warned of the rest: small runs seldom reach limits on tokens and caches.

    Returns whether a GPU has room for the activations of its updates, so that none is computed again. Says
    nothing of adapters alone, and where a system does not tell its memory."""
    try:
        config = transformers.AutoConfig.from_pretrained(find_model(name), trust_remote_code=False)
        shape = shape_of(config)
        have = device_bytes()
    except (AttributeError, ValueError, OSError, KeyError, RuntimeError):  # loading says what it is
        return False
    device = default_device()
    count = functools.partial(estimate, shape, cfg, device, distributed.world(), frozen, longest, trains)
    found = count()
    parts = found.held | found.update | found.rollout
    largest = sorted(parts, key=parts.get, reverse=True)[:4]
    told = ", ".join(f"{what} {parts[what] / 1e9:.1f}" for what in largest)
    said = f"about {found.peak / 1e9:.1f} GB, here are {have / 1e9:.1f}; {told}. Try {REMEDIES}"
    sure = sum(found.held.values()) + found.update.get("gradients", 0)
    if sure > have or device == "cuda" and found.peak > have:
        sys.exit(f"error: {name} with these flags wants {said}")
    if found.peak > have:
        warn(f"{name} may want {said}")
    return trains and device == "cuda" and count(recomputes=False).peak < FULL * have
