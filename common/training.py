"""The policy's weights: loading, token log-probs, the optimizer, checkpoints, and the tiny policy of the embedded world."""

import fcntl
import functools
import hashlib
import json
import math
import os
import shutil
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from common import hub
from kernels.turn_logprob import turn_logprob


class ModelError(RuntimeError):
    """A model or checkpoint that cannot be used; the message says what to do."""


# ---------------------------------------------------------------- loading

def find_model(name):
    """Folder or hub id that `from_pretrained` can be given; refuses at once what is no model, or a checkpoint of ours whose files are
    not as they were saved, before anything large is read."""
    name = find_checkpoint(name) or name
    try:
        found = hub.locate(str(name))
    except hub.HubError as error:
        raise ModelError(str(error)) from error
    if Path(found).is_dir() and not any((Path(found) / f).exists() for f in ("config.json", "adapter_config.json")):
        raise ModelError(f"{name}: a folder without config.json: no model in Hugging Face form (config.json, *.safetensors, tokenizer files)")
    check_files(found)
    return found


def check_files(folder):
    """ModelError where a checkpoint's files are not those that were saved (one without digests, of an older version, passes)."""
    try:
        saved = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))["sha256"].items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return
    for name, digest in saved:
        file = Path(folder) / name
        if not file.is_file() or _digest(str(file), file.stat().st_mtime_ns, file.stat().st_size) != digest:
            what = "changed since it was saved" if file.is_file() else "missing"
            raise ModelError(f"{folder}: the checkpoint is damaged ({name} is {what}); restore it, or start anew with another --name and --checkpoint")


def _load_error(name, error):
    what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    if Path(name).is_dir():
        return ModelError(f"{name}: this folder's model or tokenizer cannot be read: a file is missing, damaged, or of another kind ({what})")
    return ModelError(f"{name}: the hub's model or tokenizer did not load ({what})")


def load_tokenizer(name):
    """Tokenizer of a folder or hub id; padding falls back to the end-of-sequence token."""
    from transformers import AutoTokenizer
    name = find_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for damaged files
        raise _load_error(name, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, lora=0, device=None, attn_implementation="sdpa", gradient_checkpointing="off"):
    """Policy of a folder (a LoRA adapter folder included, which keeps its own rank) or hub id, in fp32 master weights.

    lora: rank of new adapters on all linear layers (alpha = 2 rank, frozen base in bf16 on a GPU); 0 trains all weights.
    gradient_checkpointing: recompute activations in backward, a layer at a time; auto = where there is a GPU, whose memory is small."""
    from transformers import AutoModelForCausalLM
    name = find_model(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if lora and device != "cpu" else torch.float32
    how = {"dtype": dtype, "attn_implementation": attn_implementation, "trust_remote_code": False, "use_safetensors": True}  # no code, no pickle
    try:
        if (Path(name) / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM
            model = AutoPeftModelForCausalLM.from_pretrained(name, is_trainable=True, **how)
        else:
            model = AutoModelForCausalLM.from_pretrained(name, **how)
    except (OSError, ValueError, SafetensorError, KeyError, RuntimeError) as error:
        raise _load_error(name, error) from error
    if lora and not hasattr(model, "peft_config"):
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=lora, lora_alpha=2 * lora, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"))
    if gradient_checkpointing == "on" or gradient_checkpointing == "auto" and device != "cpu":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None or hasattr(head, "base_layer"):
        raise ModelError(f"{name}: its head has a bias or an adapter; token_logprobs knows plain linear heads only")
    scaled = [k for k in ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier") if getattr(model.config, k, None)]
    if scaled:
        raise ModelError(f"{name}: its head scales or caps logits ({', '.join(scaled)}); token_logprobs knows plain linear heads only")
    window = getattr(model.config, "sliding_window", None)
    if any(kind != "full_attention" for kind in getattr(model.config, "layer_types", None) or [f"window of {window}"] * bool(window)):
        raise ModelError(f"{name}: it has layers with a sliding window, or without full attention; engine and shared prefixes know full attention only")
    return model.to(device)


def load_policy(name, lora=0, gradient_checkpointing="off"):
    """(model, tokenizer) of a folder or hub id."""
    tokenizer = load_tokenizer(name)
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: its tokenizer has no chat template; use an instruction-tuned model, or set tokenizer.chat_template and save it")
    model = load_model(name, lora, gradient_checkpointing=gradient_checkpointing)
    if model.get_output_embeddings().weight.shape[0] < len(tokenizer):
        raise ModelError(f"{name}: the tokenizer has {len(tokenizer)} ids, the model {model.get_output_embeddings().weight.shape[0]}: "
                         "weights and tokenizer of different models")
    return model, tokenizer


def describe(name, model):
    """One line: size, place, and GB of weights, gradients and Adam's two moments; activations and the prefix cache come on top."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{name}: {trained / 1e6:,.2f} M weights to train on {model.device}, {(weights + 12 * trained) / 1e9:.2f} GB with gradients and optimizer"


# ---------------------------------------------------------------- log-probs

def token_logprobs(model, batch, temperature=1.0, kernels="auto"):
    """log pi of every sampled token, (B, T) fp32 with 0 where the policy sampled nothing. batch: rollout.Batch.

    kernels: "on" = the Triton path (CUDA), "off" = plain PyTorch, "auto" = on where there is CUDA."""
    model.train(torch.is_grad_enabled())  # transformers recomputes activations in train mode only; the models used have no dropout
    autocast = torch.autocast("cuda", torch.bfloat16) if batch.packed_ids.is_cuda else nullcontext()
    if batch.ancestors is None:
        mask = (batch.segments >= 0).long()                                                   # (P, N), causal
    else:
        mask = batch.attention_mask()                                                         # (P, 1, N, N)
    with autocast:
        hidden = model.get_decoder()(input_ids=batch.packed_ids, attention_mask=mask, position_ids=batch.positions,
                                     use_cache=False).last_hidden_state                       # (P, N, H)
    if batch.packed_ids.is_cuda:  # fp32 master weights leave the last norm in fp32; the head's product takes bf16 operands, fp32 logits
        hidden = hidden.to(torch.bfloat16)
    backend = {"on": "triton", "off": "reference", "auto": "auto"}[kernels]
    logprobs = turn_logprob(hidden, model.get_output_embeddings().weight, batch.target, rows=batch.predecessor, temperature=temperature,
                            backend=backend).logprobs                                         # (R,)
    return torch.cat([logprobs, logprobs.new_zeros(1)])[batch.gather]                         # (B, T)


@contextmanager
def reference_weights(model, frozen=None):
    """The reference policy: the frozen copy, or with LoRA the base model (adapters off)."""
    if frozen is None:
        with model.disable_adapter():
            yield model
    else:
        yield frozen


# ---------------------------------------------------------------- optimizer

def make_optimizer(model, lr, weight_decay=0.01, betas=(0.9, 0.999)):
    """AdamW on the trainable weights; vectors (norms, biases) are not decayed (ours)."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for _, p in named if p.ndim >= 2], "weight_decay": weight_decay},
              {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=betas)


def cosine_lr(step, total, peak, final=0.0, warmup=0):
    """Linear warm-up, then half a cosine from peak to final."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return final + (peak - final) * (1 + math.cos(math.pi * min(1, (step - warmup) / max(1, total - warmup)))) / 2


def optimizer_step(model, optimizer, max_norm=1.0, loss=0.0):
    """Clips, steps, clears; returns the gradient norm before clipping, or NaN where it or the loss is not finite: then nothing was updated."""
    norm = float(torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], max_norm))
    finite = math.isfinite(norm) and math.isfinite(loss)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else math.nan


def save_batch(path, batch, **more):
    """What an update saw, as (B, T) tensors in a safetensors file."""
    tensors = {k: getattr(batch, k) for k in ("input_ids", "response_mask", "turn_ids", "rollout_logprobs")} | more
    save_file({k: v.contiguous().cpu() for k, v in tensors.items()}, str(path))


# ---------------------------------------------------------------- checkpoints

def save_checkpoint(folder, model, tokenizer, optimizer, state):
    """Model in Hugging Face form, optimizer.safetensors and trainer.json (`state`, plain JSON), replaced as a whole.

    The new checkpoint is complete on disk before the old one goes; a failed save leaves the old one as it was."""
    folder = Path(folder)
    new, old = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        model.save_pretrained(new)
        tokenizer.save_pretrained(new)
        moments = {}
        if optimizer is not None:
            by_param = {id(p): n for n, p in model.named_parameters()}
            for p, s in optimizer.state.items():
                moments.update({f"{by_param[id(p)]}/{k}": v.contiguous() for k, v in s.items()})
            save_file(moments, str(new / "optimizer.safetensors"))
        digests = {str(f.relative_to(new)): _digest(str(f), f.stat().st_mtime_ns, f.stat().st_size) for f in _files(new)}
        about = {"weights": sum(p.numel() for p in model.parameters()), "sha256": digests}
        (new / "trainer.json").write_text(json.dumps({**state, **about}, indent=1))
        for path in _files(new):
            with open(path, "rb") as f:
                os.fsync(f.fileno())
    except (OSError, SafetensorError) as error:
        shutil.rmtree(new, ignore_errors=True)
        raise ModelError(f"cannot save {folder}: {error}. What was saved before is untouched; free some space and use --resume") from error
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def find_checkpoint(folder):
    """The folder itself, or what a kill between the two renames left of it; None where nothing was saved."""
    folder = Path(folder)
    for path in (folder, folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")):
        if (path / "trainer.json").exists():
            return path
    return None


def _files(folder):
    return sorted(f for f in Path(folder).rglob("*") if f.is_file())


@functools.cache
def _digest(path, *_stamp):
    """SHA-256 of a file, read once a process while its time and size stay."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_state(folder):
    """trainer.json of a checkpoint; ModelError where it is damaged, or another of its files is not as it was saved."""
    remedy = "restore it, or start anew with another --name and --checkpoint"
    try:
        state = json.loads((Path(folder) / "trainer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: the checkpoint is damaged (trainer.json: {type(error).__name__}); {remedy}") from error
    kinds = {"step": int, "weights": int, "sha256": dict}
    if not isinstance(state, dict) or not all(isinstance(state.get(k), kind) for k, kind in kinds.items()) or state["step"] < 0:
        raise ModelError(f"{folder}: the checkpoint is damaged (trainer.json has no step, weights and sha256); {remedy}")
    check_files(str(folder))
    return state


def load_training_state(folder, model, optimizer):
    """Fills the optimizer from a checkpoint (checked before by read_state) and returns its trainer.json."""
    state = read_state(folder)
    saved = load_file(str(Path(folder) / "optimizer.safetensors"))
    weights = sum(p.numel() for p in model.parameters())
    if state["weights"] != weights:
        raise ModelError(f"{folder}: checkpoint of another model: it was saved with {state['weights']} weights, the model beside it has {weights}")
    for name, p in model.named_parameters():
        if f"{name}/exp_avg" in saved:
            optimizer.state[p] = {k: saved[f"{name}/{k}"].to("cpu" if k == "step" else p.device) for k in ("step", "exp_avg", "exp_avg_sq")}
    return state


# ---------------------------------------------------------------- the tiny policy

def tiny_tokenizer(words, tags):
    """Word-level tokenizer: one id a word, punctuation mark or tag. Its chat template leaves out system messages, since
    the tiny policy learns its format from demonstrations and reads no instructions."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    special = ["[PAD]", "[UNK]", "[EOS]", "[USER]", "[ASSISTANT]"]
    vocabulary = {w: i for i, w in enumerate(dict.fromkeys([*special, *tags, *words]))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(r"[^\w\s]"), "isolated")])
    core.add_special_tokens(special)
    core.add_tokens([AddedToken(t, normalized=False) for t in tags])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]",
                                        extra_special_tokens=["[USER]", "[ASSISTANT]"], clean_up_tokenization_spaces=False)
    tokenizer.chat_template = ("{% for m in messages if m['role'] != 'system' %}{{ '[USER] ' if m['role'] == 'user' else '[ASSISTANT] ' }}{{ m['content'] }}"
                               "{{ ' ' if m['role'] == 'user' else ' [EOS] ' }}{% endfor %}[ASSISTANT]")
    return tokenizer


def tiny_model(tokenizer, width=128, seed=0):
    """A two-layer Qwen3 of about half a million weights. It starts out with the circuit that copying needs (an induction head,
    Olsson et al. 2022), which it would otherwise spend most of its warm-up discovering; training is free to change all of it.

    Layer 1: heads 0 and 1 look one and two tokens back and note what they see (values A, outputs B_0 and B_1).
    Layer 2: looks for the place where the noted token is the present one (queries A, keys B^T) and copies what stands there."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    dim, theta, pairs = width // 4, 500.0, min(6, width // 8)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=dim, max_position_embeddings=2048, tie_word_embeddings=True, attention_bias=True,
                         rope_parameters={"rope_type": "default", "rope_theta": theta}, initializer_range=.04,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
        one, two = (layer.self_attn for layer in model.model.layers)
        for norm in (one.q_norm, one.k_norm, two.q_norm, two.k_norm):
            norm.weight.fill_(1.5)                                         # sharp from the start
        angle = theta ** (-torch.arange(pairs) * 2 / dim)                  # radians a token, of the fast rotary pairs
        one.k_proj.bias[:pairs] = 2
        note = torch.linalg.qr(torch.randn(width, dim)).Q.T                # A, (dim, width), orthonormal rows
        one.v_proj.weight[:dim] = note
        for head, back in enumerate((1, 2)):
            rows = slice(head * dim, (head + 1) * dim)
            one.q_proj.bias[rows][:pairs] = 2 * torch.cos(back * angle)    # turned so that it meets the key `back` tokens ago
            one.q_proj.bias[rows][dim // 2:dim // 2 + pairs] = -2 * torch.sin(back * angle)
            write = torch.linalg.qr(torch.randn(width, dim)).Q             # B, (width, dim), orthonormal columns
            one.o_proj.weight[:, rows] = .1 * write
            two.k_proj.weight[rows] = write.T
            copy = torch.linalg.qr(torch.randn(width, dim)).Q.T
            two.v_proj.weight[rows] = copy
            for query in (2 * head, 2 * head + 1):                         # two query heads share a key head
                two.q_proj.weight[query * dim:(query + 1) * dim] = note
                two.o_proj.weight[:, query * dim:(query + 1) * dim] = .1 * copy.T
    return model


def warm_up(model, batches, total, lr=2e-3, progress=lambda step, loss: None):
    """Supervised training on the sampled tokens of demonstrations; `batches` yields `total` times a rollout.Batch."""
    optimizer = make_optimizer(model, lr, betas=(.9, .98))
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = cosine_lr(step, total, lr, lr / 20, warmup=20)
        batch = batch.to(model.device)
        loss = -token_logprobs(model, batch).sum() / batch.response_mask.sum()
        loss.backward()
        optimizer_step(model, optimizer)
        progress(step, float(loss.detach()))


def cached_policy(recipe, build, cache_dir=None):
    """Folder of the policy that `build() -> (model, tokenizer)` makes, kept under a hash of `recipe` (JSON).

    Two processes that ask at once build it once: the second waits on a lock."""
    cache = Path(cache_dir or os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fivehop"
    cache.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"policy-{digest}"
    with open(cache / f"policy-{digest}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "recipe.json").exists():
            model, tokenizer = build()
            new = Path(tempfile.mkdtemp(dir=cache))
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            (new / "recipe.json").write_text(json.dumps(recipe, indent=1))
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    return folder
