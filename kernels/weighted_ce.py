"""Weighted-mask cross entropy from hidden states: Omne-R1's Algorithm 1 (stage 2), where thoughts count for
less than actions.

    L = sum_t w_t (-logp_t) / sum_t w_t

over labels that are not ignored; w from `<think>` to `</think>`, 1 elsewhere.

The coefficients w are known before the first product, so forward computes the gradient as well, in the same
pass over the logits (see turn_logprob.py for P' and the tiles): dX_t = w_t (P' W)_t / sum w and
dW = P'^T (w x) / sum w. The weights enter on the (N, H) side and the sum divides once, in fp32, at the end.
Rows of weight 0 are left out before any product.
"""

import torch

from kernels.turn_logprob import _backend, backward_tiles, forward_tiles, turn_logprob_reference


def think_weights(labels, start_ids, end_ids, weight):
    """Algorithm 1, lines 3-15: (B, T) fp32 weights, `weight` from each start tag to the first end tag behind
    it, tags included, 1 elsewhere.

    labels (B, T): token ids, ignored ones negative. start_ids, end_ids: the ids of the tags, one or several
    each, as the tokenizer splits them. A start without an end changes nothing. A start in an ignored part is
    not seen, as in the paper (it searches the labels)."""
    start = torch.as_tensor(start_ids)
    end = torch.as_tensor(end_ids)
    if not start.numel() or not end.numel():
        raise ValueError("think_weights needs at least one id for each tag")
    weights = torch.ones(labels.shape, dtype=torch.float32)
    for b, row in enumerate(labels.cpu()):
        ends = _occurrences(row, end)
        for s in _occurrences(row, start):
            later = [e for e in ends if e >= s]
            if later:
                stop = later[0] + len(end)
                weights[b, s:stop] = weight
    return weights.to(labels.device)


def _occurrences(row, ids):
    """Positions at which the ids stand in the row (T,)."""
    if len(row) < len(ids):
        return []
    windows = row.unfold(0, len(ids), 1)
    equal = (windows == ids).all(1)
    return equal.nonzero()[:, 0].tolist()


class _WeightedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, w, inv_total, grad, backend):
        # (needs_input_grad is True under no_grad, too)
        need_x = grad and ctx.needs_input_grad[0]
        need_w = grad and ctx.needs_input_grad[1]
        W = weight.to(x.dtype)
        logp, lse, _, kept = forward_tiles(x, W, target, 1.0, need_x or need_w, False, backend)
        dx = dw = None
        if need_x or need_w:
            dx, dw = backward_tiles(
                x, W, target, lse, kept, w, 1.0, need_x, need_w, torch.float32, backend)
        ctx.save_for_backward(dx, dw, inv_total)
        ctx.dtypes = x.dtype, weight.dtype
        weighted = (w * logp).sum()
        return -weighted * inv_total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        # in fp32: rounded once, after the upstream gradient (a loss scale) is known
        *gradients, inv_total = ctx.saved_tensors
        scaled = []
        for d, dtype in zip(gradients, ctx.dtypes, strict=True):
            if d is not None:
                out = torch.empty_like(d, dtype=dtype)
                d = torch.mul(d, g * inv_total, out=out)
            scaled.append(d)
        return *scaled, None, None, None, None, None


def weighted_cross_entropy(hidden, weight, labels, weights,
                           total=None, *, backend="auto"):
    """sum of w (-log p(label)) / total, a scalar in fp32 with gradients to hidden and weight.

    hidden (..., H), each predicting the label at its place (shift before you call: hidden[:, :-1],
    labels[:, 1:], weights[:, 1:]); weight (V, H); labels (...), negative where nothing is learned;
    weights (...) >= 0, of any dtype, so a mask too. total: the sum of weights over the *whole* batch, all
    micro-batches and ranks, as a number or a tensor; None takes this call's own. A total of at most 1e-8
    gives 0, with zero gradients. Labels and weights that are still on the CPU are compacted there; on the
    device that takes one host read."""
    places = hidden.shape[:-1]
    if places != labels.shape or labels.shape != weights.shape:
        raise ValueError(f"hidden {tuple(places)}, labels {tuple(labels.shape)} and "
                         f"weights {tuple(weights.shape)} must agree")
    width = hidden.shape[-1]
    x = hidden.reshape(-1, width)
    labels = labels.reshape(-1)
    weights = weights.reshape(-1).float()
    weights = weights * (labels >= 0)
    rows = weights.nonzero()[:, 0]
    target = labels[rows]
    w = weights[rows]
    if not w.is_cuda and len(rows) and float(w.min()) < 0:
        raise ValueError("weights must not be negative")
    if total is None:
        total = weights.sum()
    total = torch.as_tensor(total, dtype=torch.float32)

    rows = rows.to(x.device, non_blocking=True)
    target = target.to(x.device, non_blocking=True)
    w = w.to(x.device, non_blocking=True)
    total = total.to(x.device, non_blocking=True)
    inv_total = 1 / total.clamp(min=1e-8)
    inv_total = torch.where(total > 1e-8, inv_total, 0.0)
    backend = _backend(x, backend)
    with torch.autocast(x.device.type, enabled=False):
        if not len(rows):
            no_x = x[:0].float()
            no_weight = weight[:0].float()
            return no_x.sum() + no_weight.sum()
        x = x[rows]
        if backend == "reference":
            logp = turn_logprob_reference(x, weight, target)
            weighted = (w * logp).sum()
            return -weighted * inv_total
        grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
        return _WeightedCrossEntropy.apply(
            x, weight, target, w, inv_total, grad, backend)
