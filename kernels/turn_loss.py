"""AT2PO's loss (Eq 10-11) from sums of log-probs over turns, as turn_logprob gives them.

Tokens of a turn have one ratio s_k and one advantage, hence one clip decision, and a turn that several
sequences share is one row of turn_logprob's. With share = 1 / (tokens of a sequence * sequences):

    L = sum_k [max(s_k, 1 - clip_low) cost_k - min(s_k, 1 + clip_high) gain_k]
    s_k = exp((new_k - old_k) / tokens_k)     gain_k, cost_k: the sums of max(A, 0) share and max(-A, 0) share

at2po.py has the formula itself, and tests/test_kernels.py that both are equal."""

import torch


def turn_loss(turn_sums, old_turn_sums, advantages, response_mask, gather, turn_ptr,
              clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """The loss of K distinct turns, of which a row of the batch has some.

    turn_sums, old_turn_sums (K,): of their log-probs. advantages, response_mask, gather (B, T): gather is the
    row of turn_logprob's that a sampled token has, and turn_ptr[K] elsewhere. turn_ptr (K + 1,): where the
    rows of a turn begin. num_sequences: of the whole mini-batch, where this is a part of it. An advantage has
    to be one in a turn of a sequence."""
    tokens = response_mask.bool().sum(1, keepdim=True).clamp(min=1)
    share = advantages / (tokens * (num_sequences or len(advantages)))             # (B, T)
    turn = torch.searchsorted(turn_ptr, gather, right=True) - 1                    # (B, T), K elsewhere
    none = share.new_zeros(len(turn_ptr))
    gain = none.index_put((turn,), share.clamp(min=0), accumulate=True)[:-1]       # (K,)
    cost = none.index_put((turn,), -share.clamp(max=0), accumulate=True)[:-1]
    log_s = (turn_sums - old_turn_sums) / turn_ptr.diff().clamp(min=1)  # an empty turn has no part in it
    s = log_s.clamp(max=10).exp()
    return (cost * s.clamp(min=1 - clip_low) - gain * s.clamp(max=1 + clip_high)).sum()
