"""ATPO's loss (AT2PO, Eq 10-11) as a policy loss of verl 0.9 (verl.trainer.ppo.core_algos).

Import this file where the actor is made, and set in its config

    actor.policy_loss.loss_mode=atpo  actor.loss_agg_mode=seq-mean-token-mean
    actor.clip_ratio_low=3e-3  actor.clip_ratio_high=4e-3

verl keeps no turn ids, so a run of ones in response_mask is taken for a turn. That is right where an
observation stands between any two turns, as in a search agent. Advantages (B, T) are those of verl's
estimator. With GRPO's a turn has its trajectory's; Eq 3 needs trees (at2po.turn_credit).
"""

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch
from verl.trainer.ppo.core_algos import register_policy_loss

import at2po


def turns_of(response_mask):
    """(B, T) the number of each run of ones in its row, -1 elsewhere.

    >>> turns_of(torch.tensor([[1, 1, 0, 1, 0], [0, 1, 0, 0, 1]])).tolist()
    [[0, 0, -1, 1, -1], [-1, 0, -1, -1, 1]]
    """
    mask = response_mask.long()
    begins = mask.diff(dim=1, prepend=torch.zeros_like(mask[:, :1])) == 1
    return torch.where(mask.bool(), begins.cumsum(1) - 1, -1)


@register_policy_loss("atpo")
def policy_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="seq-mean-token-mean",
                config=None, rollout_is_weights=None):
    """(loss, metrics). The mean over sequences is the paper's; another loss_agg_mode is refused."""
    if loss_agg_mode != "seq-mean-token-mean":
        raise ValueError(f"loss_agg_mode {loss_agg_mode}: ATPO takes seq-mean-token-mean")
    whole = config.global_batch_info  # of all micro-batches and ranks; verl adds up their gradients' mean
    num_sequences = whole.get("global_batch_size")
    if num_sequences:
        num_sequences = num_sequences / whole.get("dp_size", 1)
    if rollout_is_weights is not None:
        # w > 0 moves out of the minimum, so a token's weight may stand at its advantage
        advantages = advantages * rollout_is_weights
    loss, stats = at2po.atpo_loss(
        log_prob, old_log_prob, advantages, response_mask, turns_of(response_mask),
        config.clip_ratio_low, config.clip_ratio_high, num_sequences)
    tokens = max(1, stats["tokens"])
    return loss, {
        "actor/pg_clipfrac": stats["clipped_tokens"] / tokens,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/ppo_kl": stats["kl_sum"] / tokens,
    }
