"""The policy's weights: finding, loading and describing a model, the log-probs of its tokens,
its reference."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from common import checkpoint, distributed, hub
from common.checkpoint import ModelError
from kernels.turn_logprob import turn_logprob

# ---------------------------------------------------------------- loading

def find_model(name):
    """Folder or hub id that `from_pretrained` can be given.

    Refuses at once what is no model, or a checkpoint of ours whose files are not as they were saved, before
    anything large is read."""
    name = checkpoint.find(name) or name
    try:
        found = hub.locate(str(name))
    except hub.HubError as error:
        raise ModelError(str(error)) from error
    folder = Path(found)
    configs = (folder / "config.json", folder / "adapter_config.json")
    if folder.is_dir() and not any(f.exists() for f in configs):
        raise ModelError(f"{name}: a folder without config.json: no model in Hugging Face form "
                         "(config.json, *.safetensors, tokenizer files)")
    checkpoint.check_files(found)
    return found


def _load_error(name, error):
    message = " ".join(str(error).split())
    what = f"{type(error).__name__}: {message[:200]}"
    if Path(name).is_dir():
        return ModelError(f"{name}: this folder's model or tokenizer cannot be read: a file is missing, "
                          f"damaged, or of another kind ({what})")
    return ModelError(f"{name}: the hub's model or tokenizer did not load ({what})")


def load_tokenizer(name):
    """Tokenizer of a folder or hub id; padding falls back to the end-of-sequence token."""
    name = find_model(name)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions for damaged files
        raise _load_error(name, error) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(name, lora=0, device=None, attn_implementation="sdpa", gradient_checkpointing="off"):
    """Policy of a folder (a LoRA adapter folder included, which keeps its own rank) or hub id,
    in fp32 master weights.

    lora: rank of new adapters on all linear layers (alpha = 2 rank, frozen base in bf16 on a GPU);
        0 trains all weights.
    gradient_checkpointing: recompute activations in backward, a layer at a time;
        auto = where there is a GPU, whose memory is small."""
    name = find_model(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = {
        "dtype": torch.bfloat16 if lora and device != "cpu" else torch.float32,
        "attn_implementation": attn_implementation,
        "trust_remote_code": False,   # no code of strangers,
        "use_safetensors": True,      # and no pickle
    }
    try:
        if (Path(name) / "adapter_config.json").exists():
            from peft import AutoPeftModelForCausalLM
            model = AutoPeftModelForCausalLM.from_pretrained(name, is_trainable=True, **how)
        else:
            model = transformers.AutoModelForCausalLM.from_pretrained(name, **how)
    except (OSError, ValueError, SafetensorError, KeyError, RuntimeError) as error:
        raise _load_error(name, error) from error
    if lora and not hasattr(model, "peft_config"):
        from peft import LoraConfig, get_peft_model
        adapters = LoraConfig(
            r=lora,
            lora_alpha=2 * lora,
            lora_dropout=0.0,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, adapters)
    if gradient_checkpointing == "on" or gradient_checkpointing == "auto" and device != "cpu":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _refuse_unknown_parts(name, model)
    return model.to(device)


def _refuse_unknown_parts(name, model):
    """token_logprobs and the engine compute the head and the attention themselves: only what they know."""
    head = model.get_output_embeddings()
    if getattr(head, "bias", None) is not None or hasattr(head, "base_layer"):
        raise ModelError(f"{name}: its head has a bias or an adapter; token_logprobs knows plain linear "
                         "heads only")
    scales = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
    scaled = [k for k in scales if getattr(model.config, k, None)]
    if scaled:
        raise ModelError(f"{name}: its head scales or caps logits ({', '.join(scaled)}); token_logprobs "
                         "knows plain linear heads only")
    window = getattr(model.config, "sliding_window", None)
    kinds = getattr(model.config, "layer_types", None)
    kinds = kinds or [f"window of {window}"] * bool(window)
    if any(kind != "full_attention" for kind in kinds):
        raise ModelError(f"{name}: it has layers with a sliding window, or without full attention; engine "
                         "and shared prefixes know full attention only")


def load_policy(name, lora=0, gradient_checkpointing="off"):
    """(model, tokenizer) of a folder or hub id."""
    tokenizer = load_tokenizer(name)
    if not tokenizer.chat_template:
        raise ModelError(f"{name}: its tokenizer has no chat template; use an instruction-tuned model, or "
                         "set tokenizer.chat_template and save it")
    model = load_model(name, lora, gradient_checkpointing=gradient_checkpointing)
    rows = model.get_output_embeddings().weight.shape[0]
    if rows < len(tokenizer):
        raise ModelError(f"{name}: the tokenizer has {len(tokenizer)} ids, the model {rows}: weights and "
                         "tokenizer of different models")
    return model, tokenizer


ENCODERS = {  # what a script may want beside a language model
    "encoder": transformers.AutoModel,
    "action": transformers.AutoModelForNextSentencePrediction,
    "submit": transformers.AutoModelForQuestionAnswering,
    "question": transformers.AutoModelForSeq2SeqLM,
}


def load_encoder(name, kind, layers=0, device=None):
    """(model, tokenizer) of a folder or hub id: an encoder with the head `kind` of ENCODERS, in fp32.

    layers: keep the first so many, 0 = all. A head that the folder does not have is a new one, drawn from
    PyTorch's generator."""
    source = find_model(name)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    how = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True}
    if layers:
        how["num_hidden_layers"] = layers
    try:
        model = ENCODERS[kind].from_pretrained(source, **how)
    except (OSError, ValueError, SafetensorError, KeyError, RuntimeError) as error:
        raise _load_error(name, error) from error
    return model.to(device), load_tokenizer(source)


def describe(name, model):
    """One line: size, place, and GB of weights, gradients and Adam's two moments;
    activations and the prefix cache come on top."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gigabytes = (weights + 12 * trained) / 1e9
    return (f"{name}: {trained / 1e6:,.2f} M weights to train on {model.device}, "
            f"{gigabytes:.2f} GB with gradients and optimizer")


# ---------------------------------------------------------------- log-probs

def hidden_states(model, batch):
    """The decoder's last hidden states over the packs of a rollout.Batch, (P, N, H); bf16 on a GPU, as the
    head's product takes them (fp32 master weights leave the last norm in fp32), whose logits are fp32."""
    # transformers recomputes activations in train mode only; no model has dropout
    model.train(torch.is_grad_enabled())
    cuda = batch.packed_ids.is_cuda
    if batch.ancestors is None:
        mask = (batch.segments >= 0).long()                 # (P, N), causal
    else:
        mask = batch.attention_mask()                       # (P, 1, N, N)
    precision = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()
    with precision:
        decoder = model.get_decoder()
        hidden = decoder(
            input_ids=batch.packed_ids,
            attention_mask=mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
    return hidden.to(torch.bfloat16) if cuda else hidden


def token_logprobs(model, batch, temperature=1.0, kernels="auto", hidden=None):
    """log pi of every sampled token, (B, T) fp32 with 0 where the policy sampled nothing.

    batch: rollout.Batch.
    kernels: "on" = the Triton path (CUDA), "off" = plain PyTorch, "auto" = on where there is CUDA.
    hidden: hidden_states of the batch, where they were computed already."""
    if hidden is None:
        hidden = hidden_states(model, batch)
    backend = {"on": "triton", "off": "reference", "auto": "auto"}[kernels]
    logprobs = turn_logprob(
        hidden,
        distributed.whole(model.get_output_embeddings().weight),
        batch.target,
        rows=batch.predecessor,
        temperature=temperature,
        backend=backend,
    ).logprobs                                              # (R,)
    return by_token(logprobs, batch)


def token_values(head, batch, hidden):
    """V of the state before every sampled token, (B, T) fp32 with 0 where the policy sampled nothing.

    head: a linear layer from H to 1; it reads the hidden state that predicts the token."""
    before = hidden.flatten(0, 1)[batch.predecessor]        # (R, H)
    return by_token(head(before.float())[:, 0], batch)


def by_token(rows, batch):
    """(B, T) of one number for each of the batch's R distinct sampled tokens; 0 elsewhere."""
    with_zero = torch.cat([rows, rows.new_zeros(1)])
    return with_zero[batch.gather]


# ---------------------------------------------------------------- reference
#
# `reference` is one of three: None = the loss has no KL term; a frozen model = its weights; the policy itself
# = the base model below its LoRA adapters.

def load_reference(model, source, lora):
    """What a KL term compares `model` with: the weights of `source` that it began as."""
    if lora:
        return model
    return distributed.shard(load_model(source).requires_grad_(False))


@contextmanager
def reference_weights(model, reference):
    """The reference as a model to call; adapters are off in the body where it lies below the policy's."""
    if reference is model:
        with model.disable_adapter():
            yield model
    else:
        yield reference
