"""How much memory a run wants, before anything is loaded: `estimate` in numbers, `check` refuses in words.

Counted from the model's configuration: its parameters and their moments; beside them what an update holds
(gradients, bf16 copies, activations and logits of a micro-batch) or what a rollout does (the sampler's
weights, its caches), whichever is more. What PyTorch rounds up and leaves unused comes on top, some 10 %.
"""

import functools
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import transformers

from common import distributed
from common.engine import MAX_BATCH, PREFILL
from common.files import warn
from common.model import default_device, find_model, head_dim

LOGIT_TILE = 2 * 512 * 2**20  # the kernels' tile of logits, and its softmax
KEPT_LOGITS = 2.0 * 2**30     # of kernels.turn_logprob: larger gradients of logits are computed again
CHUNK = 4096                  # rows of fp32 logits at a time where there are no kernels


@dataclass
class Estimate:
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
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention=config.num_attention_heads * head_dim(config),    # width of all query heads
        keys=key_heads * head_dim(config),
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        weights=sum(p.numel() for p in model.parameters()),
        matrices=sum(m.weight.numel() for m in linear),             # of the weights, in the layers
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        adapters=sum(m.in_features + m.out_features for m in linear),   # a rank of LoRA
        tied=head.weight is model.get_input_embeddings().weight,
    )


def estimate(shape, cfg, cuda, ranks=1, frozen=0, longest=8192, sampled=.4, trains=True):
    """Estimate of one of `ranks` processes that share weights and moments. cfg: flags.PolicyFlags.

    frozen: models of this size beside the policy: reference, scorer, sampler. longest: tokens of a sequence.
    sampled: share of the tokens that the policy samples, the rest being prompts and passages.
    trains: False = weights that are only sampled; every rank has them whole."""
    s = shape
    in_bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and cuda
    width = 2 if in_bf16 else 4
    if not trains:
        loaded = width if cfg.engine == "vllm" else 4  # (run.load_policy)
        rollout = sampling(s, cfg, cuda, in_bf16, 1, longest)
        return Estimate({"weights": loaded * s.weights}, {}, rollout)
    trained = s.adapters * cfg.lora if cfg.lora else s.weights
    base = s.weights if cfg.lora else 0
    held = {
        "trained weights": 4 * trained / ranks,
        "weights below adapters": width * base / ranks,
        "moments": (2.03 if cfg.optimizer == "adamw8bit" else 8) * trained / ranks,
        "frozen models": width * s.weights * frozen / ranks,
    }
    flex = cuda  # FlexAttention
    layer = cfg.micro_tokens * layer_activations(s, in_bf16, flex)
    copies = 2 * s.matrices * (in_bf16 and not cfg.lora and ranks == 1)  # one layer's where they are cut
    head = logits(s, int(cfg.micro_tokens * sampled), cuda)
    update = {"gradients": 4 * trained / ranks}
    if cfg.share_prefixes == "on" and not flex:  # a mask of bits, and as numbers: on a CPU every layer's own
        pack = min(cfg.micro_tokens, 4 * s.hidden)  # model.pack_tokens
        update["attention mask"] = cfg.micro_tokens * pack * (3 + width * s.layers)
    if ranks > 1:  # FSDP puts together embedding and head, whole all the time, and a layer
        ends = s.vocabulary * s.hidden * (1 if s.tied else 2)
        update["gathered weights"] = 4 * (ends + s.matrices / s.layers) * (1 if cfg.lora else 2)
    if cuda:  # layers are computed again: forward pass, head and a layer's backward pass, one after the other
        update["inputs of layers"] = cfg.micro_tokens * s.layers * 4 * s.hidden
        update["bf16 copies, logits, or a layer"] = max(copies, head, 1.5 * layer)
    else:
        update["activations"] = s.layers * layer
        update["bf16 copies and logits"] = copies + head
    return Estimate(held, update, sampling(s, cfg, cuda, in_bf16, ranks, longest))


def sampling(s, cfg, cuda, in_bf16, ranks, longest):
    """What a rollout holds beside the policy. vLLM: all weights, and caches at once, for sequences as long as
    the model knows. Our engine shares the trainer's weights, but for bf16 copies of fp32 matrices."""
    vllm = cfg.engine == "vllm"
    in_bf16 = in_bf16 or vllm and cuda  # whatever --precision says
    width = 2 if in_bf16 else 4
    a_token = 2 * s.layers * s.keys * width
    most = MAX_BATCH * (s.positions if vllm else longest) * a_token
    caches = 2 * min(cfg.cache_gb * 2**30, most)  # of running sequences, and of finished turns
    if vllm:
        return {"the sampler's weights": width * s.weights, "keys and values": caches}
    weights = 0
    if ranks > 1:  # the trainer's are cut
        weights = (width if cfg.lora else 4) * s.weights
    if in_bf16 and not cfg.lora:
        weights += 2 * s.matrices + (2 if cuda else 4) * s.vocabulary * s.hidden  # a CPU's head is fp32
    mask = s.attention // s.keys * longest * (1 + width)  # bits, and the numbers PyTorch makes of them
    layer = width * (3 * s.inner + 2 * (s.attention + s.keys))
    reading = PREFILL * (4 * 4 * s.hidden + layer + mask)  # before caches have grown
    return {
        "the sampler's weights": weights,
        "keys and values": caches,
        "reading prompts": max(0, reading - caches / 2),
    }


def layer_activations(s, in_bf16, flex=False):
    """What a layer keeps of a token for its backward pass. flex: FlexAttention, which reads keys and values
    as they are; else they are repeated for all heads."""
    width = 2 if in_bf16 else 4
    inputs = 5 if in_bf16 else 2    # of q, k, v, gate and up: in bf16 each keeps a copy of its own
    normed = (4 + width) * (s.attention + s.keys) if s.head_norms else 0
    return (
        4 * 4 * s.hidden                               # of two norms what comes in, and that scaled; fp32
        + width * (inputs * s.hidden + s.attention)    # inputs of linear maps, and of the output map
        + normed
        + width * (s.attention + 2 * (s.keys if flex else s.attention))    # queries, keys, values
        + width * 4 * s.inner                          # gate, up, activation, their product
    )


def logits(s, rows, kernels):
    """Of the rows that the policy sampled: tiles, and what backward keeps; in plain PyTorch logits, their
    exponents and gradients (four times), and the head's gradient before it is added up."""
    if kernels:
        return min(LOGIT_TILE, 8 * rows * s.vocabulary) + min(KEPT_LOGITS, 2 * rows * s.vocabulary)
    return 4 * (4 * min(rows, CHUNK) + s.hidden) * s.vocabulary


# ---------------------------------------------------------------- a run

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

    Says nothing of adapters alone, and where a system does not tell its memory."""
    try:
        config = transformers.AutoConfig.from_pretrained(find_model(name), trust_remote_code=False)
        shape = shape_of(config)
        have = device_bytes()
    except (AttributeError, ValueError, OSError, KeyError, RuntimeError):  # loading says what it is
        return
    cuda = default_device() == "cuda"
    found = estimate(shape, cfg, cuda, distributed.world(), frozen, longest, trains=trains)
    if found.peak <= have:
        return
    said = f"about {found.peak / 1e9:.1f} GB, here are {have / 1e9:.1f}; {remedies(cfg, found)}"
    sure = sum(found.held.values()) + found.update.get("gradients", 0)
    if cuda or sure > have:
        sys.exit(f"error: {name} with these flags wants {said}")
    warn(f"{name} may want {said}")


def remedies(cfg, found):
    """The largest parts, and what to turn, largest gain first."""
    parts = found.held | found.update | found.rollout
    largest = sorted(parts, key=parts.get, reverse=True)[:4]
    told = ", ".join(f"{what} {parts[what] / 1e9:.1f}" for what in largest)
    ways = []
    if not cfg.lora and found.update:
        ways.append("--lora 64 (adapters on a frozen base)")
        if cfg.optimizer == "adamw" and distributed.world() == 1:
            ways.append("--optimizer adamw8bit (saves three quarters of the moments)")
    if found.update.get("activations", found.update.get("inputs of layers", 0)) > .1 * found.peak:
        ways.append(f"--micro-tokens {cfg.micro_tokens // 2}")
    if found.rollout["keys and values"] > .2 * found.peak:
        ways.append(f"--cache-gb {cfg.cache_gb / 2:g}")
    ways.append("more GPUs (torchrun --nproc-per-node N)")
    return f"{told}. Try {'; '.join(ways)}"
