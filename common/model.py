"""The policy's weights: loading and checking a model, the log-probs of its tokens, its reference."""

import math
import random
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from safetensors import SafetensorError, safe_open
from torch.nn.utils.rnn import pad_sequence

from common import cache, chat, checkpoint, distributed, files, rollout, tree_blocks
from common.checkpoint import ModelError
from common.rollout import Trajectory, Turn
from kernels.turn_logprob import take, turn_logprob

# nats per token, on average, by which a forward pass of ours may differ from the model's own in fp32
SAME = 1e-4


# ---------------------------------------------------------------- loading

def find_start(cfg):
    """find_model of --checkpoint or --model, whose flag an error names."""
    try:
        return find_model(cfg.checkpoint or cfg.model)
    except files.UserError as error:
        raise ModelError(f"--{'checkpoint' if cfg.checkpoint else 'model'} {error}") from error


def find_model(name):
    """Folder or hub id that `from_pretrained` can be given. A run folder is refused."""
    name = checkpoint.find(name) or name
    found = files.locate(str(name))
    if checkpoint.find(Path(found) / "checkpoint"):
        raise ModelError(f"{name}: a run folder; the weights are in {name}/checkpoint")
    configs = Path(found) / "config.json", Path(found) / "adapter_config.json"
    if Path(found).is_dir() and not any(file.exists() for file in configs):
        raise ModelError(f"{name}: a folder without a model (no config.json)")
    return found


def load_error(name, error):
    return ModelError(f"{name}: its model or tokenizer cannot be read: a file is missing, damaged, or of "
                      f"another kind ({type(error).__name__}: {files.one_line(error)[:200]})")


def load_whole(cls, name, may_lack=lambda key: False, may_have=lambda key: False, **how):
    """cls.from_pretrained(name): a model all of whose weights are the folder's. transformers draws those that
    a folder lacks at random, and leaves out those that the model has no place for: both are ModelErrors, but
    for keys that may_lack or may_have accepts."""
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    if getattr(config, "quantization_config", None):
        raise ModelError(f"{name}: its weights are quantised, so neither exact nor trainable here: take the "
                         "model that they were made of")
    model, found = cls.from_pretrained(
        name,
        output_loading_info=True,
        trust_remote_code=False,   # no code of strangers,
        use_safetensors=True,      # and no pickle
        **how,
    )
    lacking = [key for key in found["missing_keys"] if not may_lack(key)]
    refuse_other_keys(name, lacking, [key for key in found["unexpected_keys"] if not may_have(key)])
    return model


def refuse_other_keys(name, lacking, more):
    for keys, what in ((lacking, "lacks"), (more, "has weights that its model does not:")):
        if keys:
            few = ", ".join(sorted(keys)[:3])
            raise ModelError(f"{name} {what} {few} ({len(keys)} in all). Was it saved through a wrapper "
                             "(torch.compile, DDP, an adapter), or in part?")


def with_adapters(name, **how):
    """The model of a folder of adapters, on its base."""
    import peft
    base = find_model(peft.PeftConfig.from_pretrained(name).base_model_name_or_path)
    model = load_whole(transformers.AutoModelForCausalLM, base, **how)
    model = peft.PeftModelForCausalLM.from_pretrained(model, name, is_trainable=True)
    needed = set(peft.get_peft_model_state_dict(model))
    with safe_open(str(Path(name) / "adapter_model.safetensors"), "pt") as file:
        found = set(file.keys())
    refuse_other_keys(name, needed - found, found - needed)
    return model


def load_tokenizer(name):
    name = find_model(name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for damaged files
        raise load_error(name, error) from error
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):  # transformers makes an empty one
        raise ModelError(f"{name}: a model without a tokenizer: copy its tokenizer files there")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def default_device():
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(name, lora=0, device=None, recomputes=False, precision="auto", frozen=False):
    """Policy of a folder (also of LoRA adapters, which keep their rank) or hub id, in fp32 master weights. It
    attends to trees by common/tree_blocks.py, on a GPU by common/gpu/tree_attention.py where its heads are
    wide enough for that.

    lora: rank of new adapters on all linear layers (alpha = 2 rank); 0 trains all weights.
    recomputes: activations, in the backward pass.
    precision: of the products, fp32 | bf16 | auto = bf16 on a GPU.
    frozen: nothing is trained. Untrained weights (of a frozen model, the base below adapters) are held in
        bf16 where the products are."""
    name = find_model(name)
    device = device or default_device()
    in_bf16 = precision == "bf16" or precision == "auto" and device != "cpu"
    how = {
        "dtype": torch.bfloat16 if in_bf16 and (lora or frozen) else torch.float32,
        "attn_implementation": "sdpa",
    }
    try:
        if (Path(name) / "adapter_config.json").exists():
            model = with_adapters(name, **how)
        else:
            model = load_whole(transformers.AutoModelForCausalLM, name, **how)
        if lora and not hasattr(model, "peft_config"):
            from peft import LoraConfig, get_peft_model
            model = get_peft_model(model, LoraConfig(
                r=lora, lora_alpha=2 * lora, target_modules="all-linear", task_type="CAUSAL_LM"))
    except (OSError, ValueError, SafetensorError, KeyError, RuntimeError) as error:
        raise load_error(name, error) from error
    for layer in model.modules():
        if hasattr(layer, "cast_input_dtype_enabled"):  # autocast would undo peft's cast to fp32
            layer.cast_input_dtype_enabled = False
    if recomputes:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # seen in long sequences alone
        raise ModelError(f"{name}: its positions ({rope['rope_type']}) turn otherwise in a longer sequence, "
                         "so a sample would depend on the others of its batch")
    remove_dropout(model)
    model.in_bf16 = in_bf16
    model = unmapped(model.to(device))
    model.shares_prefixes = attends_to_all(model.config)
    if model.shares_prefixes:
        tree_blocks.attach(model)  # (on a GPU for check_training_pass alone)
        if device != "cpu" and head_dim(model.config) >= 16:  # FlexAttention's smallest
            flex()
            model.set_attn_implementation("tree")
    return model.requires_grad_(False) if frozen else model


def unmapped(model):
    """The model with weights of its own where they are a file's. PyTorch puts its own at multiples of 64
    bytes, and those of a file lie anywhere; a CPU then adds in another order, and a resumed run differs in
    the last digits. Nor can what is mapped be deleted over NFS, when the next checkpoint takes its place."""
    if model.device.type == "cpu":
        for p in model.parameters():
            p.data = p.data.clone()
    return model


def remove_dropout(model):
    """Sets every rate of dropout to 0, that of adapters too, whatever its field is called: a ratio of
    log-probs is one of two policies only where neither draws."""
    configs = [model.config, model.config.get_text_config(), *getattr(model, "peft_config", {}).values()]
    for holder in (*model.modules(), *configs):
        for field, value in list(vars(holder).items()):
            is_rate = "drop" in field or field == "p" and isinstance(holder, torch.nn.Dropout)
            if is_rate and isinstance(value, float):
                setattr(holder, field, 0.0)


def shares_prefixes(model, flag):
    """Whether shared starts are computed once: with --share-prefixes on, where its layers can."""
    return flag == "on" and getattr(model, "shares_prefixes", True)


def head_dim(config):
    config = config.get_text_config()
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_heads(config):
    """Of keys and values, which several query heads may share."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def computes_in_bf16(model):
    """Whether its products are of bf16 numbers: as load_model set it; of other models, where on a GPU."""
    return getattr(model, "in_bf16", model.device.type == "cuda")


def computing(model):
    """The context of its forward passes."""
    if computes_in_bf16(model):
        # autocast would keep copies of all layers, of which FSDP makes one whole at a time
        keep = distributed.world() == 1
        return torch.autocast(model.device.type, torch.bfloat16, cache_enabled=keep)
    return nullcontext()


def positions(config):
    """Tokens of the longest sequence that a model was made for; infinite where it does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf


def attends_to_all(config):
    """Whether every layer is known to attend to all that stands before a token: without linear attention,
    and without a window that is shorter than the longest sequence."""
    longest = positions(config)
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None) or math.inf
    # without layer_types the window alone decides
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"]) - {"full_attention"}
    return not kinds or kinds == {"sliding_attention"} and window >= longest


@contextmanager
def attending(model, implementation):
    """Its decoder attends by another of transformers' implementations in the body."""
    config = model.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation = implementation
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def in_fp32(model):
    """The model computes in fp32 in the body. Weights held in bf16 are widened while their module computes:
    all at once would be twice the memory of a frozen base."""
    def cast(weights, dtype):
        def hook(*_):
            for p in weights:
                p.data = p.data.to(dtype)
        return hook

    hooks = []
    for module in model.modules():
        held = [p for p in module.parameters(recurse=False) if p.dtype == torch.bfloat16]
        if held:
            hooks.append(module.register_forward_pre_hook(cast(held, torch.float32)))
            hooks.append(module.register_forward_hook(cast(held, torch.bfloat16), always_call=True))
    in_bf16 = model.in_bf16
    model.in_bf16 = False
    try:
        yield
    finally:
        model.in_bf16 = in_bf16
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def plain_logprobs(model, *trajectories):
    """log pi of the tokens after their prompts, (n,) fp32, by the model's own forward pass: eager attention,
    in the precision of its weights."""
    model.eval()
    with attending(model, "eager"):
        rows = [plain_token_logprobs(model, [t], vocabulary=model.vocabulary)[0] for t in trajectories]
    return torch.cat([row[len(t.prompt_ids):] for row, t in zip(rows, trajectories, strict=True)])


def probe_ids(tokenizer, n, seed):
    """n ids of text, drawn at random."""
    added, _ = chat.added_tokens(tokenizer)
    text = [i for i in tokenizer.get_vocab().values() if i not in added]
    return random.Random(seed).choices(sorted(text), k=n)


def probe(tokenizer):
    """Two trajectories of random ids, of different length, which share a start."""
    def turn(n, seed):
        return Turn(probe_ids(tokenizer, n, seed), [0.0] * n, "", "")

    prompt = probe_ids(tokenizer, 8, "prompt")
    first = turn(8, "first")
    return [Trajectory("", prompt, [first, turn(n, n)]) for n in (8, 3)]


def check_training_pass(name, model, tokenizer):
    """Refuses a model whose log-probs training would compute otherwise than its own forward pass does.

    In fp32, whatever the model computes in: on such ids bf16 moves the log-probs of Qwen2.5-0.5B, whose keys
    have large biases, by .06 to .17 nats on average, as much as many a fault would."""
    rows = probe(tokenizer)
    # (FlexAttention's kernel would be compiled in fp32 for this alone; with gradient, so that recomputed
    # activations are checked, too)
    trees = "blocks" if model.shares_prefixes else "sdpa"
    with in_fp32(model), attending(model, trees), torch.enable_grad():
        batch = rollout.collate(rows, model.shares_prefixes).to(model.device)
        found = token_logprobs(model, batch).detach()
        own = plain_logprobs(model, *rows)
    refuse_other_numbers(name, "training", own, found[batch.response_mask])


def refuse_other_numbers(name, what, own, other, most=SAME, remedy=""):
    """ModelError where the model's own log-probs and those of `what` differ by more than `most` nats on
    average."""
    apart = (own - other).abs().mean().item()
    if not apart <= most:
        raise ModelError(f"{name}: {what} gives its tokens other log-probs than its own forward pass, by "
                         f"{apart:.2g} nats on average ({most:g} is rounding): it has parts that {what} does "
                         f"not know{remedy}")


def load_policy(name, lora=0, **how):
    """(model, tokenizer); how: of load_model."""
    tokenizer = load_tokenizer(name)
    model = load_model(name, lora, **how)
    rows = model.get_output_embeddings().weight.shape[0]
    model.vocabulary = vocabulary_of(tokenizer)
    if rows < model.vocabulary:
        raise ModelError(f"{name}: the tokenizer has {model.vocabulary} ids, the model {rows}: weights and "
                         "tokenizer of different models")
    check_training_pass(name, model, tokenizer)
    if model.device.type == "cuda" and model.in_bf16:  # (in fp32 the engine shares these layers)
        for layer in model.get_decoder().layers:
            layer.compile(dynamic=True)
    return model, tokenizer


def end_of_sequence(model, tokenizer):
    """The ids that end a sequence: the model's, the tokenizer's, and the token with which the chat template
    closes a turn (base models often have another end)."""
    eos = getattr(model.generation_config, "eos_token_id", None)
    ends = set(eos if isinstance(eos, list) else [eos])
    return (ends | {tokenizer.eos_token_id, chat.end_of_turn(tokenizer)}) - {None}


def describe(name, model):
    """One line: size and place."""
    weights, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    line = f"{name}: {weights / 1e6:,.2f} M weights on {model.device}"
    if trained < weights:
        line += f", {trained / 1e6:,.2f} M are trained"
    if not model.shares_prefixes:
        line += "; its layers cannot share prefixes, so every trajectory is computed whole"
    return line


# ---------------------------------------------------------------- log-probs

def hidden_states(model, batch):
    """The decoder's last hidden states over the packs of a rollout.Batch, (P, N, H); in bf16 where it
    computes in bf16, as the head's product takes them (fp32 master weights leave the last norm in fp32)."""
    # transformers recomputes activations in train mode only; there is no dropout (remove_dropout)
    model.train(torch.is_grad_enabled())
    decoder = model.get_decoder()
    P, N = batch.packed_ids.shape
    is_flex = decoder.config._attn_implementation == "tree"
    length = N
    if is_flex:
        length = flex().padded_length(N)
    elif model.device.type == "cpu" and computes_in_bf16(model):
        # oneDNN makes and keeps a product for every shape (135M weights: .05 GB a length)
        length = -(-N // 64) * 64
    padding = (0, length - N)
    ids = F.pad(batch.packed_ids, padding)                      # (P, length)
    positions = F.pad(batch.positions, padding)
    if is_flex:
        mask = flex().block_mask(batch.end, length)
    elif batch.is_tree:
        end = torch.arange(1, length + 1, device=ids.device).repeat(P, 1)
        end[:, :N] = batch.end                                  # padding sees itself
        mask = end[:, None, None]                               # (P, 1, 1, length), as it is for tree_blocks
    else:
        column = torch.arange(length, device=ids.device)
        mask = (column < batch.lengths[:, None]).long()         # (P, length), causal
    with computing(model):
        hidden = decoder(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
        ).last_hidden_state[:, :N]
    return hidden.to(torch.bfloat16) if computes_in_bf16(model) else hidden


def flex():
    from common.gpu import tree_attention  # which transformers knows as "tree" from here on
    return tree_attention


def plain_token_logprobs(model, trajectories, temperature=1.0, vocabulary=None):
    """The same as token_logprobs in plain transformers: one row per trajectory, nothing shared or packed.

    model: a causal language model. trajectories: prompt_ids, and turns with the ids that were sampled and the
    observation_ids that followed. vocabulary: ids from there on only pad the head. Returns (B, T) fp32:
    position t speaks of token t, 0 where the policy sampled nothing."""
    rows = []
    masks = []
    for trajectory in trajectories:
        ids = list(trajectory.prompt_ids)
        mask = [False] * len(ids)
        for turn in trajectory.turns:
            ids += turn.ids + turn.observation_ids
            mask += [True] * len(turn.ids) + [False] * len(turn.observation_ids)
        rows.append(torch.tensor(ids, device=model.device))
        masks.append(torch.tensor(mask, device=model.device))
    ids = pad_sequence(rows, batch_first=True)                                      # (B, T)
    sampled = pad_sequence(masks, batch_first=True)                                 # (B, T) bool
    real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)   # 0 = padding
    logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits
    logits = logits[:, :-1, :vocabulary].float() / temperature                      # (B, T - 1, V)
    of_next = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]           # (B, T - 1)
    return torch.where(sampled, F.pad(of_next, (1, 0)), 0.0)


def token_logprobs(model, batch, temperature=1.0, hidden=None):
    """log pi of every sampled token, (B, T) fp32 with 0 where the policy sampled nothing.

    batch: rollout.Batch. hidden: hidden_states of the batch, where they were computed already."""
    return by_token(_of_sampled(model, batch, temperature, hidden).logprobs, batch)


def turn_logprobs(model, batch, temperature=1.0, hidden=None):
    """token_logprobs, (B, T), and log pi of every turn, (B, K) fp32: their sums, as the kernel adds them up;
    0 where a trajectory has no such turn."""
    found = _of_sampled(model, batch, temperature, hidden)
    return by_token(found.logprobs, batch), take(with_zero(found.turn_sums), batch.turns)


@torch.no_grad()
def token_entropies(model, batch, temperature=1.0, hidden=None):
    """Entropy of the distribution that every sampled token was drawn from, (B, T) in nats; 0 elsewhere."""
    return by_token(_of_sampled(model, batch, temperature, hidden, entropy=True).entropy, batch)


def _of_sampled(model, batch, temperature, hidden, entropy=False):
    """turn_logprob of the batch's R distinct sampled tokens."""
    return turn_logprob(
        hidden_states(model, batch) if hidden is None else hidden,
        head_rows(model, distributed.whole(model.get_output_embeddings().weight)),
        batch.target,
        rows=batch.predecessor,
        turn_ptr=batch.turn_ptr,
        temperature=temperature,
        entropy=entropy,
    )


def vocabulary_of(tokenizer):
    """How many of a head's rows are tokens: the others pad it to a round number."""
    return max(tokenizer.get_vocab().values()) + 1


def head_rows(model, weight):
    """The head's rows that are tokens of its tokenizer; those that pad it to a round number are never
    sampled."""
    return weight[:getattr(model, "vocabulary", None)]


def token_values(head, batch, hidden):
    """V of the state before every sampled token, (B, T) fp32 with 0 where the policy sampled nothing.

    head: a linear layer from H to 1; it reads the hidden state that predicts the token."""
    before = take(hidden.flatten(0, 1), batch.predecessor)  # (R, H)
    return by_token(head(before.float())[:, 0], batch)


def by_token(rows, batch):
    """(B, T) of one number for each of the batch's R distinct sampled tokens; 0 elsewhere."""
    return take(with_zero(rows), batch.gather)


def with_zero(rows):
    return torch.cat([rows, rows.new_zeros(1)])


# ---------------------------------------------------------------- adapters

def folded(source, out):
    """`source` itself, if it is a whole model; of adapters <out>-<hash of them>, their base with them folded
    in."""
    adapters = Path(source) / "adapter_model.safetensors"
    if not adapters.exists():
        return source

    def write(folder):
        model, tokenizer = load_policy(source)
        rows = probe(tokenizer)
        before = plain_logprobs(model, *rows)
        merged = model.merge_and_unload()
        merged.vocabulary = model.vocabulary
        refuse_other_numbers(source, "folding of adapters", before, plain_logprobs(merged, *rows))
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        checkpoint.mark_as_trained(source, folder)

    return cache.made_once(Path(f"{out}-{cache.digest(adapters)}"), write)


# ---------------------------------------------------------------- reference
#
# None = the loss has no KL term; a frozen model; or the policy itself = the base below its LoRA adapters.

def load_reference(model, source, lora):
    """What a KL term compares `model` with: the weights of `source` that it began as. With adapters it is the
    model without them, so a `source` that is adapters itself is a ModelError."""
    if lora and (Path(source) / "adapter_config.json").exists():
        raise ModelError(f"{source} is an adapter: with --lora the reference would be its base; fold it into "
                         "the base first (merge_and_unload)")
    if lora:
        return model
    precision = "bf16" if computes_in_bf16(model) else "fp32"
    frozen = load_model(source, precision=precision, frozen=True)
    frozen.vocabulary = getattr(model, "vocabulary", None)
    return distributed.shard(frozen)


@contextmanager
def reference_weights(model, reference):
    """The reference as a model to call; adapters are off in the body where it lies below the policy's."""
    if reference is model:
        with model.disable_adapter():
            yield model
    else:
        yield reference
