"""Attention over packed prefix trees on a CPU: query i sees key j where j <= i < end[j] (rollout.Batch.end).
A block of queries reads only the keys that some query of it sees, so nothing is computed for other branches;
scores are fp32, and recomputed in the backward pass (as in FlashAttention, Dao et al. 2022, Algorithm 4).

transformers knows it as attn_implementation="blocks"; `end` (P, 1, 1, N) goes through its models as the
attention mask. With any other mask it is scaled dot-product attention. On a GPU common/gpu/tree_attention.py
does the same by FlexAttention.
"""

import functools
from typing import NamedTuple

import torch

from kernels.turn_logprob import matmul_of_bf16

BLOCK = 64  # queries


class Block(NamedTuple):
    pack: int
    rows: slice             # its queries
    keys: torch.Tensor      # (k,) places of what some of them see
    hidden: torch.Tensor    # (q, k) bool: which does not see which


@functools.lru_cache(maxsize=1)  # all layers of a pass ask for the same tensor
def blocks_of(end):
    """[Block] of `end` (P, 1, 1, N)."""
    blocks = []
    for pack, ends in enumerate(end[:, 0, 0].cpu()):
        for first in range(0, len(ends), BLOCK):
            last = min(first + BLOCK, len(ends))
            query = torch.arange(first, last)[:, None]
            keys = (ends[:last] > first).nonzero()[:, 0]
            behind = keys > query
            over = ends[keys] <= query
            hidden = (behind | over).to(end.device)
            blocks.append(Block(pack, slice(first, last), keys.to(end.device), hidden))
    return blocks


def product(a, b):
    """a @ b in fp32."""
    if a.dtype == torch.bfloat16:
        return matmul_of_bf16(a.float(), b.float())
    return a @ b


def queries(x, block):
    """A block's rows of x (P, h, group, N, dim): (h, group * q, dim), since a group shares its keys."""
    rows = x[block.pack, :, :, block.rows]
    return rows.flatten(1, 2)


def write(out, block, rows):
    """`queries` the other way."""
    place = out[block.pack, :, :, block.rows]
    place.copy_(rows.view(place.shape))


def seen(x, block):
    """What a block sees of x (P, h, N, dim): (h, k, dim)."""
    return x[block.pack].index_select(1, block.keys)


def weights(q, k, block, scale):
    """softmax over the keys, (h, group * q, k) fp32."""
    scores = product(q, k.mT)
    scores.mul_(scale)
    by_query = scores.view(len(k), -1, *block.hidden.shape)
    by_query.masked_fill_(block.hidden, -torch.inf)
    return scores.softmax(-1)


class _Blocks(torch.autograd.Function):
    """query (P, h, group, N, dim), key and value (P, h, N, dim), end (P, 1, 1, N) -> as query."""

    @staticmethod
    def forward(ctx, query, key, value, end, scale):
        out = torch.empty_like(query)
        for block in blocks_of(end):
            q = queries(query, block)
            k = seen(key, block)
            v = seen(value, block)
            w = weights(q, k, block, scale)
            write(out, block, w.to(v.dtype) @ v)
        ctx.save_for_backward(query, key, value, end, out)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, end, out = ctx.saved_tensors
        dquery = torch.empty_like(query)
        dkey = torch.zeros(key.shape, device=key.device)       # fp32: sums over blocks
        dvalue = torch.zeros_like(dkey)
        mean = (grad.float() * out.float()).sum(-1, True)      # sum_k w_k dw_k, of every query
        for block in blocks_of(end):
            q = queries(query, block)
            g = queries(grad, block)
            k = seen(key, block)
            v = seen(value, block)
            w = weights(q, k, block, ctx.scale)
            dscores = product(g, v.mT)                         # dw
            dscores.sub_(queries(mean, block))
            dscores.mul_(w).mul_(ctx.scale)
            dscores = dscores.to(q.dtype)
            write(dquery, block, dscores @ k)
            dk = dscores.mT @ q
            dv = w.to(g.dtype).mT @ g
            dkey[block.pack].index_add_(1, block.keys, dk.float())
            dvalue[block.pack].index_add_(1, block.keys, dv.float())
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), None, None


def block_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """query (P, heads, N, dim), key and value (P, key heads, N, dim) -> (P, N, heads, dim)."""
    if attention_mask is None or attention_mask.dtype != torch.long:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    P, heads, N, dim = query.shape
    # a norm of fp32 weights gives fp32; blocks are taken from what lies in its order
    query, key, value = (x.to(value.dtype).contiguous() for x in (query, key, value))
    query = query.view(P, key.shape[1], -1, N, dim)
    with torch.autocast(query.device.type, enabled=False):
        out = _Blocks.apply(query, key, value, attention_mask, scaling or dim**-.5)
    return out.view(P, heads, N, dim).transpose(1, 2).contiguous(), None


def attach(model):
    """The model attends by blocks from here on."""
    from transformers import AttentionInterface, AttentionMaskInterface  # (seconds: not for a wrong flag)
    from transformers.masking_utils import sdpa_mask
    AttentionInterface.register("blocks", torch.compiler.disable(block_attention))
    AttentionMaskInterface.register("blocks", sdpa_mask)
    model.set_attn_implementation("blocks")
