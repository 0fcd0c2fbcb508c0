"""How much memory a run wants, before anything is loaded: `estimate` in numbers, `check` refuses in words.

Counted from the model's configuration: its parameters and their moments; beside them what an update holds
(gradients, bf16 copies, activations and logits of a micro-batch) or what a rollout does (the sampler's
copies, its caches), whichever is more. What PyTorch rounds up and leaves unused comes on top, some 10 %.
"""

import functools
import sys
from dataclasses import dataclass

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

    def table(self):
        """[(when, what, GB)] of all that is not nothing."""
        rows = []
        for when in ("held", "update", "rollout"):
            for what, size in getattr(self, when).items():
                if size:
                    rows.append((when, what, size / 1e9))
        return rows


@dataclass
class Shape:
    """What the estimate asks of a configuration."""
    layers: int
    hidden: int
    attention: int      # width of all query heads
    keys: int           # of all key heads
    inner: int
    vocabulary: int
    positions: int      # of the longest sequence
    weights: int        # all parameters
    matrices: int       # of those, in the layers' linear maps
    head_norms: bool    # whether queries and keys are normed
    adapters: int       # a rank of LoRA
    tied: bool          # whether the head's weight is the embedding's


def shape_of(config):
    """The Shape of a decoder, counted on a model that has no numbers."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    config = config.get_text_config()
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        attention=config.num_attention_heads * head_dim(config),
        keys=(getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * head_dim(config),
        inner=config.intermediate_size,
        vocabulary=config.vocab_size,
        positions=config.max_position_embeddings,
        weights=sum(p.numel() for p in model.parameters()),
        matrices=sum(m.weight.numel() for m in linear),
        head_norms=any(name.endswith("q_norm") for name, _ in model.named_modules()),
        adapters=sum(m.in_features + m.out_features for m in linear),
        tied=head.weight is model.get_input_embeddings().weight,
    )


def estimate(shape, cfg, cuda, ranks=1, frozen=0, sampled=.4, trains=True):
    """Estimate of cfg (flags.PolicyFlags) for one of `ranks` processes that share weights and moments.

    frozen: models of this size beside the policy: reference, scorer, sampler.
    sampled: share of the tokens that the policy samples, the rest being prompts and passages.
    trains: False = weights that are only sampled; every rank has them whole."""
    s = shape
    in_bf16 = cfg.precision == "bf16" or cfg.precision == "auto" and cuda
    if not trains:
        narrow = in_bf16 and cfg.engine == "vllm"  # (run.load_policy)
        return Estimate(
            {"weights": (2 if narrow else 4) * s.weights}, {}, sampling(s, cfg, cuda, in_bf16, 1))
    checkpointing = cfg.gradient_checkpointing == "on" or cfg.gradient_checkpointing == "auto" and cuda
    trained = s.adapters * cfg.lora if cfg.lora else s.weights
    base = s.weights if cfg.lora else 0
    moments = 2.03 if cfg.optimizer == "adamw8bit" else 8
    held = {
        "trained weights (fp32)": 4 * trained / ranks,
        "weights below adapters": (2 if in_bf16 else 4) * base / ranks,
        "moments": moments * trained / ranks,
        "frozen models": (2 if in_bf16 else 4) * s.weights * frozen / ranks,
    }
    copies = 2 * s.matrices * (in_bf16 and not cfg.lora and ranks == 1)  # one layer's where they are cut
    flex = cuda
    layer = cfg.micro_tokens * layer_activations(s, in_bf16, flex)
    head = logits(s, int(cfg.micro_tokens * sampled), cuda and cfg.kernels != "off")
    update = {
        "gradients": 4 * trained / ranks,
        "attention mask": mask_bytes(s, cfg, cuda, in_bf16, 1 if checkpointing else s.layers),
        "gathered embedding, head and layer, with gradients": gathered(s, cfg) if ranks > 1 else 0,
    }
    if checkpointing:  # a forward pass, the head and a layer's backward pass come one after the other
        update["inputs of layers"] = cfg.micro_tokens * s.layers * 4 * s.hidden
        update["bf16 copies, logits, or a layer"] = max(copies, head, 1.5 * layer)
    else:
        update["activations"] = s.layers * layer
        update["bf16 copies and logits"] = copies + head
    return Estimate(held, update, sampling(s, cfg, cuda, in_bf16, ranks))


def sampling(s, cfg, cuda, in_bf16, ranks):
    """What a rollout holds beside the policy."""
    if cfg.engine == "vllm" and cuda:
        in_bf16 = True  # whatever --precision says
    found = {
        "the sampler's weights": sampler_weights(s, cfg, cuda, in_bf16, ranks),
        "keys and values": caches(s, cfg, in_bf16),
    }
    if cfg.engine != "vllm":  # prompts are read before turns are finished, whose cache then comes
        found["reading prompts"] = max(0, reading(s, cfg, in_bf16) - found["keys and values"] / 2)
    return found


def gathered(s, cfg):
    """What FSDP puts together on each rank while it computes: embedding and head, whole all the time, and a
    layer; gradients of as much where they are trained."""
    ends = s.vocabulary * s.hidden * (1 if s.tied else 2)
    layer = s.matrices / s.layers
    return 4 * (ends + layer) * (1 if cfg.lora else 2)


def sampler_weights(s, cfg, cuda, in_bf16, ranks):
    """vLLM has all of them; ours shares the trainer's, but for bf16 copies of matrices that are fp32."""
    if cfg.engine == "vllm":
        return (2 if in_bf16 else 4) * s.weights
    whole = 0 if ranks == 1 else (2 if cfg.lora and in_bf16 else 4) * s.weights  # the trainer's are cut
    if cfg.lora or not in_bf16:
        return whole
    return whole + 2 * s.matrices + (2 if cuda else 4) * s.vocabulary * s.hidden  # a CPU's head is fp32


def reading(s, cfg, in_bf16):
    """A forward pass of our own engine over prompts, without gradients: the stream, a layer, and a mask that
    PyTorch turns into numbers."""
    narrow = 2 if in_bf16 else 4
    mask = s.attention // s.keys * longest_sequence(cfg) * (1 + narrow)
    layer = narrow * (3 * s.inner + 2 * (s.attention + s.keys))
    return PREFILL * (4 * 4 * s.hidden + layer + mask)


def layer_activations(s, in_bf16, flex=False):
    """What a layer keeps of a token for its backward pass. flex: FlexAttention, which reads keys and values
    as they are; else they are repeated for all heads."""
    narrow = 2 if in_bf16 else 4
    inputs = 5 if in_bf16 else 2    # of q, k, v, gate and up: in bf16 each keeps a copy of its own
    normed = (4 + narrow) * (s.attention + s.keys) if s.head_norms else 0
    return (
        4 * 4 * s.hidden                                # of two norms what comes in, and that scaled; fp32
        + narrow * (inputs * s.hidden + s.attention)    # inputs of linear maps, and of the output map
        + normed
        + narrow * (s.attention + 2 * (s.keys if flex else s.attention))    # queries, keys, values
        + narrow * 4 * s.inner                          # gate, up, activation, their product
    )


def mask_bytes(s, cfg, cuda, in_bf16, layers):
    """Of a dense mask of whole packs while it is made, and as the numbers that PyTorch turns it into, of
    which every layer keeps its own on a CPU; none where FlexAttention is used."""
    if cfg.share_prefixes == "off" or cuda:
        return 0
    pack = min(cfg.micro_tokens, 4 * s.hidden)  # model.pack_tokens
    packs = cfg.micro_tokens // pack
    numbers = 2 if in_bf16 else 4
    numbers *= 1 if cuda else layers
    return packs * pack ** 2 * (3 + numbers)


def logits(s, rows, kernels):
    """Of the rows that the policy sampled: tiles, and what backward keeps; in plain PyTorch logits, their
    exponents and gradients (four times), and the head's gradient before it is added up."""
    if kernels:
        return min(LOGIT_TILE, 8 * rows * s.vocabulary) + min(KEPT_LOGITS, 2 * rows * s.vocabulary)
    return 4 * (4 * min(rows, CHUNK) + s.hidden) * s.vocabulary


def longest_sequence(cfg):
    return getattr(cfg, "max_prompt", 4096) + getattr(cfg, "max_response", 4096)


def caches(s, cfg, in_bf16):
    """Of running sequences and of finished turns: --cache-gb each, at most as many as can be; vLLM takes both
    at once, for sequences as long as the model knows."""
    a_token = 2 * s.layers * s.keys * (2 if in_bf16 else 4)
    longest = s.positions if cfg.engine == "vllm" else longest_sequence(cfg)
    return 2 * min(cfg.cache_gb * 2**30, MAX_BATCH * longest * a_token)


# ---------------------------------------------------------------- a run

@functools.cache
def taken_by_others():
    """Bytes of the GPU that were not this program's when it first looked."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def device_bytes():
    """What there is for this program: of a GPU's memory, else what this machine could still give."""
    if default_device() == "cuda":
        return torch.cuda.mem_get_info()[1] - taken_by_others()
    with open("/proc/meminfo") as f:
        lines = dict(line.split(":") for line in f)
    return int(lines["MemAvailable"].split()[0]) * 1024


def check(cfg, name, frozen=None, trains=True):
    """Ends the program where the device cannot hold the training of `name` (folder or hub id), with so many
    frozen models beside it, by default the reference that the flags ask for; or, where it is not trained, its
    sampling. On a CPU it is ended for
    weights, moments and gradients alone, and warned of the rest: limits on tokens and caches are seldom
    reached in small runs, and memory is used as it is wanted.

    Says nothing of adapters alone, and where a system does not tell its memory."""
    try:
        config = transformers.AutoConfig.from_pretrained(find_model(name), trust_remote_code=False)
        shape = shape_of(config)
        have = device_bytes()
    except (AttributeError, ValueError, OSError, KeyError, RuntimeError):  # loading says what it is
        return
    cuda = default_device() == "cuda"
    if frozen is None:
        frozen = int(getattr(cfg, "kl_coef", 0) > 0 and not cfg.lora)
    found = estimate(
        shape, cfg, cuda, distributed.world(), frozen,
        trains=trains,
    )
    if cuda or sum(found.held.values()) + found.update.get("gradients", 0) > have:
        refuse_above(have, found, cfg, name)
    elif found.peak > have:
        warn(f"{name} may want {found.peak / 1e9:.1f} GB, here are {have / 1e9:.1f}: {remedies(cfg, found)}")


def refuse_above(have, found, cfg, name):
    if found.peak <= have:
        return
    rows = "\n".join(f"  {gb:7.2f} GB  {what} ({when})" for when, what, gb in found.table())
    sys.exit(f"error: {name} with these flags wants about {found.peak / 1e9:.1f} GB on a device of "
             f"{have / 1e9:.1f}:\n{rows}\n{remedies(cfg, found)}")


def remedies(cfg, found):
    """What to turn, largest gain first."""
    ways = []
    if not cfg.lora and found.update:
        ways.append("--lora 64 (adapters on a frozen base)")
        if cfg.optimizer == "adamw" and distributed.world() == 1:
            ways.append("--optimizer adamw8bit (saves three quarters of the moments)")
    activations = found.update.get("activations", 0) + found.update.get("inputs of layers", 0)
    if activations > .1 * found.peak:
        ways.append(f"--micro-tokens {cfg.micro_tokens // 2}")
        if "activations" in found.update:
            ways.append("--gradient-checkpointing on")
    if found.rollout["keys and values"] > .2 * found.peak:
        ways.append(f"--cache-gb {cfg.cache_gb / 2:g}")
    ways.append("more GPUs (torchrun --nproc-per-node N)")
    return "try " + "; ".join(ways)
