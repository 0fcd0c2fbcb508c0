"""What an update needs: batches with the log-probs of the sampling weights, the optimizer,
and the step's means."""

import functools
import math
import time

import torch
from safetensors.torch import save_file

from common import distributed
from common.files import Progress
from common.model import hidden_states, pack_tokens, reference_weights, token_entropies, token_logprobs
from common.rollout import collate, micro_batches, portions

# ---------------------------------------------------------------- batches

def collate_parts(trajectories, cfg, model):
    """[Batch] of at most cfg.micro_tokens packed tokens each,
    in an order that keeps shared prefixes together.

    Of several ranks each gets a part of the trajectories, in equally many batches: those with fewer repeat
    the shortest trajectory with weight 0."""
    share = cfg.share_prefixes == "on"
    pack = pack_tokens(model, cfg.micro_tokens)
    own = portions(trajectories, distributed.world())[distributed.rank()]
    parts = micro_batches(own, cfg.micro_tokens, share)
    most = max(distributed.gather([len(parts)]))
    batches = []
    for number in range(most):
        learned = number < len(parts)
        part = parts[number] if learned else [min(trajectories, key=lambda t: t.length)]
        batch = collate(part, share, pack)
        batch.weight = float(learned)
        batches.append(batch.to(model.device))
    return batches


def prepare(model, reference, trajectories, cfg, entropies=False):
    """[Batch] with old_logprobs, of the weights that sampled them (call it before any update), and, unless
    `reference` is None, ref_logprobs; where asked for, entropies too. Trajectories carry their advantages
    already."""
    batches = collate_parts(trajectories, cfg, model)
    for batch in batches:
        with torch.no_grad():
            hidden = hidden_states(model, batch) if entropies else None
            batch.old_logprobs = token_logprobs(model, batch, cfg.temperature, cfg.kernels, hidden)
            if entropies:
                batch.entropies = token_entropies(model, batch, cfg.temperature, cfg.kernels, hidden)
            if reference is not None:
                with reference_weights(model, reference) as frozen:
                    batch.ref_logprobs = token_logprobs(frozen, batch, cfg.temperature, cfg.kernels)
    return batches


# ---------------------------------------------------------------- where sampler and trainer differ

MAX_RATIO = 2.0  # verl's default, TRL's first


def sampler_ratios(batch, kind):
    """(B, T) min(pi_trainer / pi_sampler, 2) of each sampled token: what its term of the loss is worth; 1
    elsewhere. None for the kind "none".

    Truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl), as in TRL
    (vllm_importance_sampling_correction) and verl (rollout_is). Same weights round differently in the engine,
    so trajectories are drawn from another distribution than old_logprobs says. Little variance; biased, since
    the rest of a token's turn stays the sampler's."""
    if kind == "none":
        return None
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    log_ratio = torch.where(batch.response_mask, log_ratio, 0.0)                    # (B, T)
    return log_ratio.exp().clamp(max=MAX_RATIO).detach()


def corrected_advantages(batch, kind):
    """batch.advantages (B, T) times sampler_ratios; themselves for "none".

    For w > 0, min(r w A, clip(r) w A) = w min(r A, clip(r) A), and a dual clip's bound moves along: so each
    token's surrogate is weighed, its clip decision stays, and KL and value terms are left alone."""
    ratios = sampler_ratios(batch, kind)
    return batch.advantages if ratios is None else batch.advantages * ratios


# ---------------------------------------------------------------- optimizer

def make_optimizer(model, lr, weight_decay=0.01, betas=(0.9, 0.999), kind="adamw"):
    """AdamW on the trainable weights; vectors (norms, biases) are not decayed (ours).

    kind: adamw8bit = with moments in 8 bits (bitsandbytes), for all but tensors below 4,096 numbers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if kind == "adamw8bit":
        import bitsandbytes
        return bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas)
    # on a GPU a tensor at a time: all at once takes another copy of the weights
    at_once = False if trained and trained[0].is_cuda else None
    return torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=at_once)


def cosine_lr(step, total, peak, final=0.0, warmup=0):
    """Linear warm-up, then half a cosine from peak to final."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    share = min(1, share)
    height = 1 + math.cos(math.pi * share)
    return final + (peak - final) * height / 2


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_step(model, optimizer, max_norm=1.0, loss=0.0):
    """Clips, steps, clears; returns the gradient norm before clipping,
    or NaN where it or the loss is not finite: then nothing was updated."""
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(with_gradient, max_norm)
    norm = float(distributed.whole(norm))
    finite = math.isfinite(norm) and math.isfinite(loss)
    if finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm if finite else math.nan


# ---------------------------------------------------------------- the means of a step

class Meter:
    """Adds up a step's updates: `add` takes a micro-batch's loss and sums, `step` makes the update,
    `means` are the step's metrics, of all ranks.

    What is summed over tokens is divided by all the step's tokens: never a mean of means.
    An update whose loss or gradient is not finite is skipped, its batches kept in
    `keep`_<update>_<i>.safetensors. correction: of --sampler-correction, which is then reported. epochs:
    passes over the batches, for whoever waits."""

    def __init__(self, batches=(), keep="nonfinite", correction="none", epochs=1):
        self.keep = keep
        self.progress = Progress("update, micro-batches", live=False)
        self.added = 0
        self.expected = epochs * len(batches)
        self.began = time.time()
        self.norms = []
        self.update = {}     # sums of the update under way
        self.total = {}      # of those that were made
        self.first_ratio = None
        self.drift = _sampled(batches, lambda b: (b.old_logprobs - b.rollout_logprobs).abs())
        self.sampler_ratios = None
        if correction != "none":
            self.sampler_ratios = _sampled(batches, lambda b: sampler_ratios(b, correction))

    def add(self, loss, stats, weight=1.0):
        """stats: sums over sampled tokens, with "tokens", and maxima (ending in _max). weight: the batch's;
        0 = another rank adds it."""
        self.added += 1
        self.progress(self.added, self.expected)
        if weight:
            stats = {**stats, "loss": float(loss.detach())}
            self.update = _merged(self.update, stats)

    def step(self, model, optimizer, grad_clip, batches):
        """One update from the gradients of these batches, on all ranks or on none."""
        parts = distributed.gather([self.update])
        self.update = functools.reduce(_merged, parts)
        if self.first_ratio is None and "ratio_sum" in self.update:
            # nothing was updated before: it should be 1
            self.first_ratio = self.update["ratio_sum"] / self.update["tokens"]
        norm = optimizer_step(model, optimizer, grad_clip, self.update["loss"])
        self.norms.append(norm)
        if math.isfinite(norm):
            self.total = _merged(self.total, self.update)
        else:
            for i, batch in enumerate(batches):
                number = i * distributed.world() + distributed.rank()
                if batch.weight:
                    save_batch(f"{self.keep}_{len(self.norms)}_{number}.safetensors", batch)
        self.update = {}

    def means(self):
        """The step's metrics under train/, the drift of log-probs,
        and the seconds since this meter was made."""
        finite = [n for n in self.norms if math.isfinite(n)]
        row = {"time/train": time.time() - self.began}
        if self.drift is not None:
            row["rollout/logprob_drift_mean"] = float(self.drift.mean())
            row["rollout/logprob_drift_max"] = float(self.drift.max())
        if self.sampler_ratios is not None:
            truncated = self.sampler_ratios >= MAX_RATIO
            row["train/sampler_ratio"] = float(self.sampler_ratios.mean())
            row["train/sampler_truncated"] = float(truncated.float().mean())
        row["train/updates"] = len(finite)
        row["train/not_finite"] = len(self.norms) - len(finite)
        if self.first_ratio is not None:
            row["train/first_ratio"] = self.first_ratio
        if finite:
            row["train/loss"] = self.total["loss"] / len(finite)
            row["train/grad_norm"] = sum(finite) / len(finite)
        sums = {"clip_fraction": "clipped_tokens", "kl": "kl_sum", "ratio": "ratio_sum"}
        for mean, total in sums.items():
            if total in self.total:
                row[f"train/{mean}"] = self.total[total] / self.total["tokens"]
        if "ratio_max" in self.total:
            row["train/ratio_max"] = self.total["ratio_max"]
        return row


def _sampled(batches, of_batch):
    """One vector of what of_batch(batch), (B, T), says of the sampled tokens that all ranks learn from;
    None where there are none."""
    parts = [of_batch(b)[b.response_mask].cpu() for b in batches if b.weight]
    parts = distributed.gather(parts)
    return torch.cat(parts) if parts else None


def _merged(a, b):
    merged = dict(a)
    for key, value in b.items():
        if key.endswith("_max"):
            merged[key] = max(a.get(key, value), value)
        else:
            merged[key] = a.get(key, 0) + value
    return merged


def save_batch(path, batch):
    """What an update saw, as (B, T) tensors in a safetensors file."""
    names = ("input_ids", "response_mask", "turn_ids", "rollout_logprobs", "advantages", "old_logprobs")
    tensors = {}
    for name in names:
        tensor = getattr(batch, name)
        if tensor is not None:
            tensors[name] = tensor.contiguous().cpu()
    save_file(tensors, str(path))
