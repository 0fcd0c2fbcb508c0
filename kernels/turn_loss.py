"""The turn-clipped policy loss (AT2PO's Eq 10-11) in one step a turn, where a loop over turns, or (B, T) tensors, would be the cost.

Tokens of one turn have one ratio and one advantage, hence one clip decision: past the sums over tokens, everything is computed once a
span of tokens that share sequence, turn and advantage. Plain PyTorch; exact also where advantages differ within a turn. at2po.py has the
formula itself, and a test that both are equal."""

from typing import NamedTuple

import torch


class Spans(NamedTuple):
    """A batch in runs of tokens that share sequence, turn and advantage; M of them were sampled by the policy."""
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
    first = torch.ones(B * T, dtype=torch.bool, device=turn_ids.device)
    torch.ne(turn_ids.flatten()[1:], turn_ids.flatten()[:-1], out=first[1:])
    for x in (response_mask.flatten(), advantages.flatten()):
        first[1:] |= x[1:] != x[:-1]
    first.view(B, T)[:, 0] = True
    start = first.nonzero()[:, 0]
    offsets = torch.cat([start, start.new_tensor([B * T])])
    sampled = response_mask.flatten()[start].nonzero()[:, 0]
    start, tokens = start[sampled], offsets.diff()[sampled].to(advantages.dtype)
    sequence = start // T
    turn = torch.unique(sequence * T + turn_ids.flatten()[start], return_inverse=True)[1]
    turn_tokens, response_tokens = (torch.bincount(key, tokens)[key] for key in (turn, sequence))
    return Spans(offsets, sampled, advantages.flatten()[start], tokens, turn, turn_tokens, tokens / response_tokens)


def turn_loss(logprobs, old_logprobs, spans, clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """The loss of (B, T) log-probs over a batch's spans; num_sequences: of the whole mini-batch, where this is a part of it."""
    new, old = (_span_sums(x, spans) for x in (logprobs, old_logprobs))                # (M,)
    turn_log_ratio = torch.zeros_like(old).index_add(0, spans.turn, new.detach() - old)[spans.turn] / spans.turn_tokens
    log_s = turn_log_ratio + (new - new.detach()) / spans.tokens     # value log s_k, gradient of the span's mean log-prob
    s = log_s.clamp(max=10).exp()
    objective = torch.minimum(s * spans.advantage, s.clamp(1 - clip_low, 1 + clip_high) * spans.advantage)
    return -(objective * spans.share).sum() / (num_sequences or len(logprobs))


def _span_sums(x, spans):
    return torch.segment_reduce(x.flatten(), "sum", offsets=spans.offsets, unsafe=True, initial=0)[spans.sampled]
