"""The turn-clipped policy loss (AT2PO's Eq 10-11) in one step a turn, where a loop over turns, or (B, T)
tensors, would be the cost.

Tokens of one turn have one ratio and one advantage, hence one clip decision: past the sums over tokens,
everything is computed once a span of tokens that share sequence, turn and advantage. Plain PyTorch; exact
also where advantages differ within a turn. at2po.py has the formula itself, and a test that both are
equal."""

from typing import NamedTuple

import torch


class Spans(NamedTuple):
    """A batch in runs of tokens that share sequence, turn and advantage; M of them were sampled by the
    policy."""
    offsets: torch.Tensor          # (runs + 1,) of all runs in the flattened batch
    sampled: torch.Tensor          # (M,) which of them
    advantage: torch.Tensor        # (M,)
    tokens: torch.Tensor           # (M,)
    turn: torch.Tensor             # (M,) numbered through the batch
    turn_tokens: torch.Tensor      # (M,) of the span's turn
    share: torch.Tensor            # (M,) of its sequence's tokens: tokens / |y_i|


def find_spans(advantages, response_mask, turn_ids):
    """Spans of (B, T) tensors; wanted once a batch, when its advantages are known."""
    B, T = turn_ids.shape
    turn_ids = turn_ids.flatten()
    advantages = advantages.flatten()
    response_mask = response_mask.flatten()
    device = turn_ids.device
    first = torch.ones(B * T, dtype=torch.bool, device=device)
    torch.ne(turn_ids[1:], turn_ids[:-1], out=first[1:])
    for x in (response_mask, advantages):
        first[1:] |= x[1:] != x[:-1]
    first.view(B, T)[:, 0] = True
    start = first.nonzero()[:, 0]
    end = start.new_tensor([B * T])
    offsets = torch.cat([start, end])

    sampled = response_mask[start].nonzero()[:, 0]
    start = start[sampled]
    advantage = advantages[start]
    tokens = offsets.diff()[sampled]
    tokens = tokens.to(advantages.dtype)

    sequence = start // T
    turn = sequence * T + turn_ids[start]
    turn = torch.unique(turn, return_inverse=True)[1]
    turn_tokens = torch.bincount(turn, tokens)[turn]
    response_tokens = torch.bincount(sequence, tokens)[sequence]
    share = tokens / response_tokens
    return Spans(offsets, sampled, advantage, tokens, turn, turn_tokens, share)


def turn_loss(logprobs, old_logprobs, spans,
              clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """The loss of (B, T) log-probs over a batch's spans; num_sequences: of the whole mini-batch, where this
    is a part of it."""
    new = _span_sums(logprobs, spans)                                # (M,)
    old = _span_sums(old_logprobs, spans)
    fixed = new.detach()
    turn_log_ratio = torch.zeros_like(old)
    turn_log_ratio = turn_log_ratio.index_add(0, spans.turn, fixed - old)
    turn_log_ratio = turn_log_ratio[spans.turn] / spans.turn_tokens
    # value log s_k, gradient of the span's mean log-prob
    log_s = turn_log_ratio + (new - fixed) / spans.tokens
    s = log_s.clamp(max=10).exp()
    clipped = s.clamp(1 - clip_low, 1 + clip_high)
    advantage = spans.advantage
    objective = torch.minimum(s * advantage, clipped * advantage)
    total = (objective * spans.share).sum()
    return -total / (num_sequences or len(logprobs))


def _span_sums(x, spans):
    sums = torch.segment_reduce(x.flatten(), "sum", offsets=spans.offsets,
                                unsafe=True, initial=0)
    return sums[spans.sampled]
