"""What an update needs: batches with the log-probs of the sampling weights, GRPO's advantages and loss, the
optimizer, and the step's means.

GRPO (Shao et al. 2024, arXiv 2402.03300) is here in the form that papers build on: advantages within a
group of samples of one question, a clipped ratio per token, a KL term. AEPO's soft clip and verl's dual clip
are options of it; any other loss stands in its paper's script.
"""

import functools
import math
import operator
import time

import torch

from common import distributed
from common.files import Progress
from common.model import (
    hidden_states,
    reference_weights,
    shares_prefixes,
    token_entropies,
    token_logprobs,
    turn_logprobs,
)
from common.rollout import collate, micro_batches, portions

# ---------------------------------------------------------------- batches

def collate_parts(model, trajectories, micro_tokens, share_prefixes="on"):
    """[Batch] of at most micro_tokens packed tokens each; trajectories that share a start are side by side.
    Each rank has a part; one with fewer batches repeats the shortest trajectory, with weight 0."""
    share = shares_prefixes(model, share_prefixes)
    own = portions(trajectories, distributed.world())[distributed.rank()]
    parts = micro_batches(own, micro_tokens, share)
    most = max(distributed.gather([len(parts)]))
    batches = []
    for number in range(most):
        learned = number < len(parts)
        part = parts[number] if learned else [min(trajectories, key=lambda t: t.length)]
        batch = collate(part, share, micro_tokens)
        batch.weight = float(learned)
        batches.append(batch.to(model.device))
    return batches


def prepare(model, reference, trajectories, micro_tokens, share_prefixes="on", temperature=1.0,
            entropies=False, old=True):
    """[Batch] with old_logprobs, of the weights that sampled them (call it before any update), and, unless
    `reference` is None, ref_logprobs; where asked for, entropies too. Trajectories carry their advantages
    already. old: False = left to the first update's own pass, which has the sampling weights."""
    batches = collate_parts(model, trajectories, micro_tokens, share_prefixes)
    for batch in batches:
        with torch.no_grad():
            hidden = hidden_states(model, batch) if entropies else None
            if old or entropies:
                batch.remember_old(*turn_logprobs(model, batch, temperature, hidden))
            if entropies:
                batch.entropies = token_entropies(model, batch, temperature, hidden)
            if reference is not None:
                with reference_weights(model, reference) as frozen:
                    batch.ref_logprobs = token_logprobs(frozen, batch, temperature)
    return batches


# ---------------------------------------------------------------- where sampler and trainer differ

MAX_RATIO = 2.0  # verl's default, TRL's at first


def sampler_ratios(batch):
    """(B, T) min(pi_trainer / pi_sampler, 2) of each sampled token, 1 elsewhere: truncated importance
    sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl), since the same weights round differently in
    the engine. Little variance; biased, since a token's prefix stays the sampler's."""
    log_ratio = batch.old_logprobs - batch.rollout_logprobs
    log_ratio = torch.where(batch.response_mask, log_ratio, 0.0)                    # (B, T)
    return log_ratio.exp().clamp(max=MAX_RATIO).detach()


def corrected_advantages(batch, kind):
    """batch.advantages (B, T), times sampler_ratios with --sampler-correction token.

    For w > 0, min(r w A, clip(r) w A) = w min(r A, clip(r) A), and a dual clip's bound moves along: so each
    token's surrogate is weighed, its clip decision stays, and KL and value terms are left alone."""
    return batch.advantages if kind == "none" else batch.advantages * sampler_ratios(batch)


# ---------------------------------------------------------------- advantages and loss

def group_advantages(rewards):
    """(R - mean) / (sample std + 1e-6) in a group; zeros where all rewards are equal (to 1e-9).

    >>> [round(a, 3) for a in group_advantages([1.0, 0.0, 0.0])]
    [1.155, -0.577, -0.577]
    """
    if not has_spread(rewards):
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    squares = [(r - mean) ** 2 for r in rewards]
    std = math.sqrt(sum(squares) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def has_spread(rewards):
    """Whether the rewards of a group differ: only then is there something to learn from it."""
    return max(rewards) - min(rewards) > 1e-9


def grpo_loss(logprobs, old_logprobs, advantages, response_mask, weights,
              clip_low=.2, clip_high=.2, kl_coef=0.0, ref_logprobs=None, dual_clip=0.0, soft_clip=False):
    """minus sum_t w_t [min(r_t A_t, clip(r_t) A_t) - kl_coef KL_t]; all (B, T), position t speaks of token t.

    r_t = exp(logprobs - old_logprobs). weights: what a token counts in the mean; see sequence_weights.
    KL_t: the k3 estimate of KL(pi || pi_ref).
    dual_clip: where A < 0, no token's term falls below dual_clip * A.
    soft_clip: above the window the value is (1 + clip_high) A, its gradient (1 + clip_high) A grad log pi and
    not 0 (AEPO, Dong et al. 2025). Returns (loss, stats)."""
    given = {"old_logprobs": old_logprobs, "advantages": advantages}
    if kl_coef:
        given["ref_logprobs"] = ref_logprobs
    response_mask = per_token(logprobs, response_mask, **given)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.clamp(max=10).exp()  # finite
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if soft_clip:
        one = (log_ratio - log_ratio.detach()).exp()  # 1, with the log-prob's gradient
        clipped = torch.where(ratio > 1 + clip_high, (1 + clip_high) * one, clipped)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        raised = torch.maximum(objective, dual_clip * advantages)
        objective = torch.where(advantages < 0, raised, objective)
    if kl_coef:
        to_ref = torch.where(response_mask, ref_logprobs - logprobs, 0.0)
        kl = to_ref.exp() - to_ref - 1
        objective = objective - kl_coef * kl
    loss = -torch.where(response_mask, objective * weights, 0.0).sum()

    cut = (ratio < 1 - clip_low) & (advantages < 0)
    if not soft_clip:  # (a soft clip keeps the gradient)
        cut |= (ratio > 1 + clip_high) & (advantages > 0)
    return loss, loss_stats(log_ratio, cut, response_mask, ratio)


def sequence_weights(response_mask, num_sequences=None):
    """(B, 1): what a token counts in a mean over sequences of means over their tokens, 1 / (sequences |y_i|).
    num_sequences: of the whole mini-batch, of which this may be a part."""
    tokens = response_mask.bool().sum(1, keepdim=True).clamp(min=1)
    return 1 / (tokens * (num_sequences or len(response_mask)))


def turn_sums(x, response_mask, turn_ids):
    """Sums of x (B, T) over the sampled tokens of each turn, (B, K), and the number of those tokens."""
    zeros = x.new_zeros(len(x), max(1, int(turn_ids.max()) + 1))
    index = turn_ids.clamp(min=0)
    x = torch.where(response_mask.bool(), x, 0.0)
    return zeros.scatter_add(1, index, x), zeros.scatter_add(1, index, response_mask.to(x.dtype))


def per_token(logprobs, response_mask, **others):
    """The mask as bool, whatever its dtype. ValueError for what a broadcast or rounding would hide: a tensor
    that is not (B, T) as logprobs, log-probs in 16 bits, a sampled token that belongs to no turn."""
    for name, tensor in {"logprobs": logprobs, "response_mask": response_mask, **others}.items():
        if name.endswith("logprobs") and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{name} are {tensor.dtype}, rounded by more than a clip window: take the "
                             "log-softmax of logits.float()")
        if tensor.shape != logprobs.shape:
            raise ValueError(f"{name} {tuple(tensor.shape)}: one per token, {tuple(logprobs.shape)} like "
                             f"logprobs; of one per sequence make {name}[:, None].expand_as(logprobs)")
    response_mask = response_mask.bool()
    if "turn_ids" in others and (others["turn_ids"][response_mask] < 0).any():
        raise ValueError("turn_ids: -1 at a sampled token; number the turns of a row from 0")
    return response_mask


def loss_stats(log_ratio, clipped, tokens, ratio):
    """Sums over a micro-batch's sampled tokens, and a maximum. Per token (tokens: the mask), or per turn:
    log_ratio its sum, ratio the exp of its mean, tokens its length."""
    real = tokens > 0
    tokens, ratio = tokens[real], ratio.detach()[real]
    return {
        "tokens": int(tokens.sum()),
        "clipped_tokens": int(tokens[clipped[real]].sum()),
        "kl_sum": float(-log_ratio.detach()[real].sum()),
        "ratio_sum": float((tokens * ratio).sum()),
        "ratio_max": float(ratio.max()) if len(ratio) else 0.0,
    }


# ---------------------------------------------------------------- optimizer

def make_optimizer(model, lr, weight_decay=0.01, betas=(0.9, 0.999), kind="adamw"):
    """AdamW on the trainable weights; vectors (norms, biases) are not decayed (ours).

    kind: adamw8bit = with moments in 8 bits (bitsandbytes), for all but tensors below 4,096 numbers."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    if kind == "adamw8bit":
        import bitsandbytes
        return bitsandbytes.optim.AdamW8bit(groups, lr=lr, betas=betas)
    # on a GPU one tensor at a time: all at once takes another copy of the weights
    at_once = False if trained and trained[0].is_cuda else None
    return torch.optim.AdamW(groups, lr=lr, betas=betas, foreach=at_once)


def cosine_lr(step, total, peak, final=0.0, warmup=0):
    """Linear warm-up, then half a cosine from peak to final. step: from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    share = min(1, (step - warmup) / max(1, total - warmup))
    height = 1 + math.cos(math.pi * share)
    return final + (peak - final) * height / 2


def warmup_factor(done, share):
    """What a step's learning rate is multiplied by: it rises evenly over the first `share` of the training
    (--lr-warmup), so that Adam's first updates are small, and is 1 from there on. done: how much of the
    training, of 1, is done after this step.

    >>> [warmup_factor(done, .2) for done in (.1, .2, .3)], warmup_factor(.1, 0)
    ([0.5, 1.0, 1.0], 1.0)
    """
    return min(1.0, done / share) if share else 1.0


def set_warmup_lr(optimizer, done, share):
    """Sets each learning rate to what the optimizer was made with, times `warmup_factor`."""
    factor = warmup_factor(done, share)
    for group in optimizer.param_groups:
        made_with = group.setdefault("made_with", group["lr"])
        group["lr"] = made_with * factor


def set_lr(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradient(model, max_norm=1.0):
    """The gradient's norm, of all ranks, before it was scaled down to max_norm."""
    with_gradient = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(with_gradient, max_norm)
    return float(distributed.whole(norm))


# ---------------------------------------------------------------- the means of a step

class Meter:
    """Adds up a step's updates: `add` takes a micro-batch's loss and sums, `end_update` ends one,
    `means` are the step's metrics, of all ranks: over all its tokens; loss and norm over its updates.

    batches: those learned from; `means` also says how far engine and trainer differ in them.
    correction: --sampler-correction. epochs: passes over the batches."""

    def __init__(self, batches=(), correction="none", epochs=1):
        self.progress = Progress("update, micro-batches")
        self.added = 0
        self.expected = epochs * len(batches)
        self.began = time.time()
        self.norms = []
        self.update = {}     # sums of the update under way
        self.total = {}      # of those that were made
        self.row = {}        # metrics that do not wait for the step's end
        self.batches, self.correction = batches, correction
        # whether the first update's own pass gives its old log-probs: its ratios are then 1 whatever it does
        self.own_first = any(batch.old_logprobs is None for batch in batches)

    def add(self, loss, stats, weight=1.0):
        """stats: sums over sampled tokens, with "tokens", and maxima (ending in _max). weight: the batch's;
        0 = another rank adds it."""
        self.added += 1
        self.progress(self.added, self.expected)
        if weight:
            stats = {**stats, "loss": float(loss.detach())}
            self.update = _merged(self.update, stats)

    def end_update(self, norm):
        """Records an update. True where the optimizer may step, on all ranks or on none: False where loss or
        gradient is not a number. norm: the gradient's, before clipping."""
        parts = distributed.gather([self.update])
        update = functools.reduce(_merged, parts)
        self.update = {}
        if "ratio_sum" in update and not self.own_first:
            # keeps that of the first update: nothing was updated before, so it should be 1
            self.row.setdefault("train/first_ratio", update["ratio_sum"] / update["tokens"])
        if math.isfinite(norm) and math.isfinite(update["loss"]):
            self.norms.append(norm)
            self.total = _merged(self.total, update)
            return True
        self.norms.append(math.nan)
        return False

    def means(self):
        """The step's metrics; time/train: seconds since this meter was made."""
        finite = [n for n in self.norms if math.isfinite(n)]
        row = {
            **self.row,
            **differences(self.batches, self.correction),
            "time/train": time.time() - self.began,
            "train/updates": len(finite),
            "train/not_finite": len(self.norms) - len(finite),
        }
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


def differences(batches, correction):
    """Metrics of how far engine and trainer differ in batches that have their old log-probs."""
    drift = sampled(batches, lambda b: (b.old_logprobs - b.rollout_logprobs).abs())
    if drift is None:
        return {}
    row = {"rollout/logprob_drift_mean": float(drift.mean()), "rollout/logprob_drift_max": float(drift.max())}
    if correction != "none":
        ratios = sampled(batches, sampler_ratios)
        row["train/sampler_ratio"] = float(ratios.mean())
        row["train/sampler_truncated"] = float((ratios >= MAX_RATIO).float().mean())
    return row


@torch.no_grad()
def moved(model, batches, temperature=1.0):
    """{"train/right_moved", "train/wrong_moved"}: by how much a step's updates changed the log-probs of the
    sampled tokens of these batches, mean nats per token with an advantage above 0 and below 0; a key is left
    out where there is no such token. All other numbers of a step are of the weights before its last
    update. Right ones that fall are likelihood displacement (Deng et al. 2025, arXiv 2505.18830)."""
    sums = dict.fromkeys(("right", "right_tokens", "wrong", "wrong_tokens"), 0.0)
    for batch in batches:
        change = token_logprobs(model, batch, temperature) - batch.old_logprobs     # (B, T)
        for name, sign in (("right", 1), ("wrong", -1)):
            chosen = change[batch.response_mask & (sign * batch.advantages > 0)]
            if batch.weight:  # 0 = another rank adds it
                sums[name] += float(chosen.sum())
                sums[f"{name}_tokens"] += len(chosen)
    sums = functools.reduce(_merged, distributed.gather([sums]))
    return {f"train/{name}_moved": sums[name] / sums[f"{name}_tokens"]
            for name in ("right", "wrong") if sums[f"{name}_tokens"]}


def sampled(batches, of_batch):
    """One vector of what of_batch(batch), (B, T), says of the sampled tokens that all ranks learn from;
    None where there are none."""
    parts = [of_batch(b)[b.response_mask].cpu() for b in batches if b.weight]
    parts = distributed.gather(parts)
    return torch.cat(parts) if parts else None


def _merged(a, b):
    merged = dict(a)
    for key, value in b.items():
        join = max if key.endswith("_max") else operator.add
        merged[key] = join(a[key], value) if key in a else value
    return merged
