"""Attention over packed prefix trees, by FlexAttention: query i sees key j where j <= i < end[j]
(rollout.Batch.end). Blocks of scores in which nothing is seen are not computed; there is no (N, N) mask.

transformers knows it as attn_implementation="tree"; a batch's block mask goes through its models as the
attention mask. On a CPU FlexAttention has no backward: common/tree_blocks.py has the same rule there.
"""

import functools

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from transformers import AttentionInterface

BLOCK = 128  # FlexAttention's


def padded_length(n):
    """The next of eight lengths between two powers of two: few lengths, few compilations.

    >>> [padded_length(n) for n in (1, 200, 1025, 9000, 16384)]
    [128, 256, 1152, 9216, 16384]
    """
    step = max(BLOCK, 2 ** (n - 1).bit_length() // 16)
    return -(-n // step) * step


def block_mask(end, length):
    """BlockMask of the rule for a batch's `end` (P, N) and padding up to `length`, which sees itself.

    Worked out a block at a time, not a score at a time: keys of an earlier block are seen by some query of a
    later one where their largest end lies behind its first query, by all where the smallest lies behind its
    last."""
    P, N = end.shape
    padded = torch.arange(1, length + 1, device=end.device).repeat(P, 1)
    padded[:, :N] = end
    blocks = padded.view(P, 1, 1, -1, BLOCK)                        # ends of each block of keys
    first = torch.arange(0, length, BLOCK, device=end.device)
    query = first[:, None]                                          # first query of a block of them
    earlier = first < query                                         # (blocks of queries, of keys)
    seen_by_some = earlier & (blocks.amax(-1) > query)              # (P, 1, blocks, blocks)
    seen_by_all = earlier & (blocks.amin(-1) >= query + BLOCK)
    in_part = seen_by_some & ~seen_by_all | (first == query)

    def seen(pack, head, i, j):
        return (j <= i) & (i < padded[pack, j])

    return BlockMask.from_kv_blocks(*_listed(in_part), *_listed(seen_by_all), BLOCK, seen)


def _listed(blocks):
    """(how many blocks of keys a block of queries has, their indices first) of a bool matrix."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), order.int()


@functools.cache
def compiled():
    """FlexAttention as one kernel (on a CPU it is computed as written, slowly)."""
    return torch.compile(flex_attention) if torch.cuda.is_available() else flex_attention


@torch.compiler.disable  # what compiles a layer leaves this to compiled()
def tree_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """query (P, heads, N, dim), key and value (P, key heads, N, dim) -> (P, N, heads, dim)."""
    query = query.to(value.dtype)  # norms of fp32 weights leave queries and keys in fp32
    key = key.to(value.dtype)
    shared = query.shape[1] != key.shape[1]
    out = compiled()(query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=shared)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("tree", tree_attention)
