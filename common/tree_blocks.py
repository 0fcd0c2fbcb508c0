"""Attention over packed prefix trees on a CPU: query i sees key j where j <= i < end[j] (rollout.Batch.end).
A block of queries reads only the keys that some query of it sees, so nothing is computed for other branches;
scores are fp32, and recomputed in the backward pass (as in FlashAttention, Dao et al. 2022, Algorithm 4).

transformers knows it as attn_implementation="blocks"; `end` (P, 1, 1, N) goes through its models as the
attention mask. With any other mask it is scaled dot-product attention. On a GPU common/gpu/tree_attention.py
does the same by FlexAttention.
"""

import functools

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kernels.turn_logprob import matmul_of_bf16

BLOCK = 64  # queries


@functools.lru_cache(maxsize=1)  # all layers of a pass ask for the same tensor
def plan(end):
    """[(pack, slice of queries, keys that some of them see, (queries, keys) bool: which does not see which)]
    """
    found = []
    for pack, ends in enumerate(end[:, 0, 0].cpu()):
        for first in range(0, len(ends), BLOCK):
            query = torch.arange(first, min(first + BLOCK, len(ends)))
            keys = (ends[:query[-1] + 1] > first).nonzero()[:, 0]
            hidden = (keys > query[:, None]) | (ends[keys] <= query[:, None])
            found.append((pack, slice(first, first + len(query)), keys.to(end.device), hidden.to(end.device)))
    return found


def product(a, b):
    """a @ b in fp32."""
    return matmul_of_bf16(a.float(), b.float()) if a.dtype == torch.bfloat16 else a @ b


def weights(query, key, hidden, scale):
    """softmax over the keys (h, k, dim) for queries (h, group * q, dim), which share keys: (h, group * q, k)
    fp32."""
    scores = product(query, key.transpose(1, 2)).mul_(scale)
    scores.view(len(key), -1, *hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores.softmax(-1)


class _Blocks(torch.autograd.Function):
    """query (P, h, group, N, dim), key and value (P, h, N, dim), end (P, 1, 1, N) -> as query."""

    @staticmethod
    def forward(ctx, query, key, value, end, scale):
        out = torch.empty_like(query)
        for pack, rows, keys, hidden in plan(end):
            q = query[pack, :, :, rows]                                     # (h, group, q, dim)
            w = weights(q.flatten(1, 2), key[pack].index_select(1, keys), hidden, scale)
            out[pack, :, :, rows] = (w.to(value.dtype) @ value[pack].index_select(1, keys)).view(q.shape)
        ctx.save_for_backward(query, key, value, end, out)
        ctx.scale = scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        query, key, value, end, out = ctx.saved_tensors
        dquery = torch.empty_like(query)
        dkey = torch.zeros(key.shape, device=key.device)                    # fp32: sums over blocks
        dvalue = torch.zeros_like(dkey)
        mean = (grad.float() * out.float()).sum(-1)                         # sum_k w_k dw_k, of every query
        for pack, rows, keys, hidden in plan(end):
            q, g = (x[pack, :, :, rows].flatten(1, 2) for x in (query, grad))
            k, v = (x[pack].index_select(1, keys) for x in (key, value))
            w = weights(q, k, hidden, ctx.scale)
            dvalue[pack].index_add_(1, keys, (w.to(g.dtype).transpose(1, 2) @ g).float())
            dscores = product(g, v.transpose(1, 2)).sub_(mean[pack, :, :, rows].flatten(1)[..., None])
            dscores = dscores.mul_(w).mul_(ctx.scale).to(q.dtype)
            dquery[pack, :, :, rows] = (dscores @ k).view(dquery[pack, :, :, rows].shape)
            dkey[pack].index_add_(1, keys, (dscores.transpose(1, 2) @ q).float())
        return dquery, dkey.to(key.dtype), dvalue.to(value.dtype), None, None


@torch.compiler.disable
def block_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """query (P, heads, N, dim), key and value (P, key heads, N, dim) -> (P, N, heads, dim)."""
    if attention_mask is None or attention_mask.dtype != torch.long:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    P, heads, N, dim = query.shape
    query, key = query.to(value.dtype), key.to(value.dtype)  # a norm of fp32 weights gives fp32
    query = query.view(P, key.shape[1], -1, N, dim)
    with torch.autocast(query.device.type, enabled=False):
        out = _Blocks.apply(query, key, value, attention_mask, scaling or dim**-.5)
    return out.view(P, heads, N, dim).transpose(1, 2).contiguous(), None


AttentionInterface.register("blocks", block_attention)
AttentionMaskInterface.register("blocks", sdpa_mask)
