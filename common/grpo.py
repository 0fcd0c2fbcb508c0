"""GRPO (Shao et al. 2024, arXiv 2402.03300) as papers use it that take it as given: advantages within a group
of samples of one question, a clipped ratio a token, a KL term. A paper's own variant of it stays in its
script."""

import math

import torch


def group_advantages(rewards):
    """(R - mean) / (sample std + 1e-6) in a group; zeros where all rewards are one (to 1e-9).

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


def first_with_spread(groups):
    """Index of the first group of rewards that differ, which is worth looking at; 0 where there is none.

    >>> first_with_spread([[1, 1], [0, 1]])
    1
    """
    for i, rewards in enumerate(groups):
        if has_spread(rewards):
            return i
    return 0


def grpo_loss(logprobs, old_logprobs, advantages, response_mask, weights,
              clip_low=.2, clip_high=.2, kl_coef=0.0, ref_logprobs=None, dual_clip=0.0, soft_clip=False):
    """minus sum_t w_t [min(r_t A_t, clip(r_t) A_t) - kl_coef KL_t]; all (B, T), position t speaks of token t.

    weights: what a token counts in the mean; see sequence_weights.
    KL_t: the k3 estimate of KL(pi || pi_ref).
    dual_clip: where A < 0, no token's term falls below dual_clip * A.
    soft_clip: above the window the value is clipped, but its gradient stays that of 1 + clip_high times the
    log-prob (AEPO, Dong et al. 2025). Returns (loss, stats)."""
    check_shapes(logprobs, advantages, response_mask)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if soft_clip:
        one = (log_ratio - log_ratio.detach()).exp()  # whose gradient is the log-prob's
        clipped = torch.where(ratio > 1 + clip_high, (1 + clip_high) * one, clipped)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip:
        floor = dual_clip * advantages
        raised = torch.maximum(objective, floor)
        objective = torch.where(advantages < 0, raised, objective)
    if kl_coef:
        to_ref = torch.where(response_mask, ref_logprobs - logprobs, 0.0)
        kl = to_ref.exp() - to_ref - 1
        objective = objective - kl_coef * kl
    loss = -(objective * weights * response_mask).sum()

    cut = (ratio < 1 - clip_low) & (advantages < 0)
    if not soft_clip:  # which keeps the gradient
        cut |= (ratio > 1 + clip_high) & (advantages > 0)
    return loss, loss_stats(log_ratio, cut, response_mask, ratio)


def sequence_mean(x, response_mask, num_sequences=None):
    """(1 / sequences) sum_i (1 / |y_i|) sum_t x[i, t] over the sampled tokens of (B, T).

    num_sequences: of the whole mini-batch, where this is a part of it."""
    tokens = response_mask.sum(1).clamp(min=1)
    per_sequence = (x * response_mask).sum(1) / tokens
    return per_sequence.sum() / (num_sequences or len(x))


def sequence_weights(response_mask, num_sequences=None):
    """(B, 1): what a token counts in sequence_mean, 1 / (sequences |y_i|)."""
    tokens = response_mask.sum(1, keepdim=True)
    sequences = num_sequences or len(response_mask)
    return 1 / (tokens.clamp(min=1) * sequences)


def check_shapes(logprobs, advantages, response_mask):
    """Says in words what a broadcast would hide."""
    if advantages.shape != logprobs.shape:
        raise ValueError(f"advantages {tuple(advantages.shape)}: one a token, {tuple(logprobs.shape)} like "
                         "logprobs; of one a sequence make advantages[:, None].expand_as(logprobs)")
    if not response_mask.any():
        raise ValueError("the policy sampled no token of this batch (response_mask is all 0): there is "
                         "nothing to learn")


def loss_stats(log_ratio, clipped, response_mask, ratio):
    """Sums over the sampled tokens of (B, T) tensors, for training.Meter, and the largest ratio."""
    log_ratio = log_ratio.detach()[response_mask]    # (tokens,)
    clipped = clipped.detach()[response_mask]
    ratio = ratio.detach()[response_mask]
    return {
        "tokens": len(ratio),
        "clipped_tokens": int(clipped.sum()),
        "kl_sum": float(-log_ratio.sum()),
        "ratio_sum": float(ratio.sum()),
        "ratio_max": float(ratio.max()),
    }
