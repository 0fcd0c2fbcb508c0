"""turn_logprob: hidden states and the head's weight to the log-prob of one token a row, summed over turns,
without the logits in memory.

The maths. x (N, H) hidden states, W (V, H) the head, y (N,) the sampled tokens, T the temperature:

    z_tj = x_t . W_j / T                      logits, formed in fp32 whatever x and W are
    lse_t = log sum_j exp z_tj
    logp_t = z_ty - lse_t                     entropy_t = lse_t - sum_j p_tj z_tj,   p = exp(z - lse)

For any upstream gradient g_t = dL/dlogp_t, with P'_tj = p_tj - [j = y_t] ("softmax minus one-hot"):

    dX_t = -(g_t / T) (P' W)_t                dW = P'^T X',   X'_t = -(g_t / T) x_t

P' does not know g. That matters here: the coefficient of a token in a turn-level objective depends on the
whole turn, so it is unknown while its logits are at hand. Forward writes P' in the operands' dtype, and three
matrix products do in all; g enters on the (N, H) side of two of them. The subtraction is done in fp32, before
rounding: where p_y is near 1, p_y - 1 of a rounded p_y has no correct digit.

Why fp32 logits: ATPO clips turn-mean ratios at 3e-3 and 4e-3, GSPO at 3e-4 and 4e-4; logits rounded to bf16
are off by more, and decide wrongly what is clipped (tests/test_kernels.py counts it).

                    matrix products   memory beyond x, W, dX, dW
    P' is kept      3                 N V itemsize for P', one tile of fp32 logits
    recomputed      4                 one tile of fp32 logits and one of P'
    without grad    1                 one tile of fp32 logits
    W is frozen     2                 one (N, H) and, on a CPU, a tile that its cache holds
P' is kept where it fits into KEPT_BYTES. A tile of logits has TILE_BYTES.

Large products are the vendor library's (torch.mm with fp32 output); what is ours are the passes over a tile,
one read each, as Triton kernels: `_stats_kernel`, `_gradient_kernel`, and `_turn_sum_kernel`. No atomics, no
host reads, the same bits in every run.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this platform: the PyTorch paths remain
    triton = None

TILE_BYTES = 512 * 2**20
KEPT_BYTES = 2 * 2**30
CACHED_BYTES = 4 * 2**20    # of fp32 logits that a CPU's cache holds
BLOCK = 8192                # columns a program reads at once; 8 warps hold them in registers without spilling


class TurnLogprob(NamedTuple):
    logprobs: torch.Tensor               # (N,) fp32, nats
    entropy: torch.Tensor | None         # (N,) fp32, nats; a metric, without gradient
    turn_sums: torch.Tensor | None       # (K,) fp32 sums of logprobs over turns


# ---------------------------------------------------------------- reference

def turn_logprob_reference(hidden, weight, target_ids, temperature=1.0, chunk=4096):
    """The same in plain PyTorch: (N,) log-probs. Logits are formed in fp32, `chunk` rows at a time, and
    recomputed in backward."""
    def some(rows, target):
        logits = rows.float() @ weight.float().T / temperature             # (chunk, V)
        chosen = logits.gather(1, target[:, None])[:, 0]
        return chosen - logits.logsumexp(1)

    if len(hidden) <= chunk and weight.shape[0] < 8192:
        return some(hidden, target_ids)
    parts = []
    for rows, target in zip(hidden.split(chunk), target_ids.split(chunk), strict=True):
        parts.append(checkpoint(some, rows, target, use_reentrant=False))
    return torch.cat(parts)


# ---------------------------------------------------------------- kernels: one read of a tile of logits each

if triton is not None:
    @triton.jit
    def _stats_kernel(logits, target, logprobs, lse, entropy,
                      stride, inv_temperature,
                      V: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr):
        """One program a row: running maximum m, S = sum exp(z - m), U = sum exp(z - m) (z - m), and z_y."""
        row = tl.program_id(0).to(tl.int64)
        y = tl.load(target + row)
        m = -1e30  # not -inf: 0 * inf would be nan
        S = 0.0
        U = 0.0
        z_y = -float("inf")
        for start in range(0, V, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < V
            at = logits + row * stride + column
            z = tl.load(at, mask=inside, other=-float("inf"))
            z = z.to(tl.float32) * inv_temperature
            m_new = tl.maximum(m, tl.max(z, 0))
            e = tl.exp(z - m_new)
            shrink = tl.exp(m - m_new)
            if ENTROPY:
                U = (U + S * (m - m_new)) * shrink  # sum e (z - m_new)
                terms = tl.where(e > 0, e * (z - m_new), 0.0)
                U = U + tl.sum(terms, 0)
            S = S * shrink + tl.sum(e, 0)
            m = m_new
            at_y = tl.where(column == y, z, -float("inf"))
            z_y = tl.maximum(z_y, tl.max(at_y, 0))
        log_sum = m + tl.log(S)
        tl.store(lse + row, log_sum)
        tl.store(logprobs + row, z_y - log_sum)
        if ENTROPY:
            tl.store(entropy + row, tl.log(S) - U / S)

    @triton.jit
    def _gradient_kernel(logits, target, lse, out,
                         stride, out_stride, first, V, inv_temperature,
                         BLOCK: tl.constexpr):
        """One program a row and block of columns: P' = exp(z - lse) - [j = y], subtracted in fp32.
        `first`: vocabulary id of column 0."""
        blocks = tl.cdiv(V, BLOCK)
        row = (tl.program_id(0) // blocks).to(tl.int64)
        block = tl.program_id(0) % blocks
        column = block * BLOCK + tl.arange(0, BLOCK)
        inside = column < V
        at = logits + row * stride + column
        z = tl.load(at, mask=inside, other=-float("inf"))
        z = z.to(tl.float32) * inv_temperature
        p = tl.exp(z - tl.load(lse + row))
        is_y = column + first == tl.load(target + row)
        p = p - tl.where(is_y, 1.0, 0.0)
        at = out + row * out_stride + column
        tl.store(at, p.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _turn_sum_kernel(x, turn_ptr, out, BLOCK: tl.constexpr):
        """One program a turn: the sum of x over rows turn_ptr[k] to turn_ptr[k + 1], in a fixed order."""
        k = tl.program_id(0)
        row = tl.load(turn_ptr + k)
        end = tl.load(turn_ptr + k + 1)
        total = tl.zeros((BLOCK,), tl.float32)
        while row < end:
            at = row + tl.arange(0, BLOCK)
            total += tl.load(x + at, mask=at < end, other=0.0)
            row += BLOCK
        tl.store(out + k, tl.sum(total, 0))


def on_device(x):
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def row_stats(logits, target, inv_temperature, entropy, backend):
    """(logp, lse, entropy or None), each (n,) fp32, of a tile of raw logits (n, V) fp32."""
    if backend == "torch":
        z = logits * inv_temperature
        lse = z.logsumexp(1)
        z_y = z.gather(1, target[:, None])[:, 0]
        logp = z_y - lse
        if not entropy:
            return logp, lse, None
        p = (z - lse[:, None]).exp()
        ent = lse - torch.where(p > 0, p * z, 0.0).sum(1)
        return logp, lse, ent
    logp = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    lse = torch.empty_like(logp)
    ent = torch.empty_like(logp)
    if len(logits):
        with on_device(logits):
            _stats_kernel[(len(logits),)](
                logits, target, logp, lse, ent,
                logits.stride(0), inv_temperature,
                V=logits.shape[1], ENTROPY=entropy,
                BLOCK=BLOCK, num_warps=8)
    return logp, lse, ent if entropy else None


def softmax_minus_one_hot(logits, target, lse, first, inv_temperature, out, backend):
    """Writes P' of a tile of raw logits (n, V) fp32, whose first column is vocabulary id `first`, into out
    (n, V) of any float dtype."""
    n, V = logits.shape
    if backend == "torch":
        p = (logits * inv_temperature - lse[:, None]).exp()
        column = torch.arange(first, first + V, device=logits.device)
        one_hot = column == target[:, None]
        return out.copy_(p - one_hot.float())
    if n:
        with on_device(logits):
            _gradient_kernel[(n * triton.cdiv(V, BLOCK),)](
                logits, target, lse, out,
                logits.stride(0), out.stride(0), first, V, inv_temperature,
                BLOCK=BLOCK, num_warps=8)
    return out


def take(x, index):
    """x[index], the same in each run: where an index occurs twice, the backward pass adds in one order. (On a
    CPU that of x[index] adds in several threads at once; on CUDA that of index_select does.)"""
    if x.is_cuda:
        return x[index]
    return x.index_select(0, index.flatten()).view(*index.shape, *x.shape[1:])


def matmul_fp32(a, b):
    """a @ b with fp32 accumulation and output; half-precision operands stay what they are where the library
    can (CUDA)."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    if a.dtype == torch.bfloat16:
        return matmul_of_bf16(a.float(), b.float())
    return a.float() @ b.float()


def matmul_of_bf16(a, b):
    """a @ b of fp32 operands on a CPU as products of bf16 numbers, accumulated in fp32: exact where the
    operands are bf16 numbers, and two to four times as fast where the CPU multiplies those (AMX)."""
    precision = torch.backends.mkldnn.matmul
    before = precision.fp32_precision
    precision.fp32_precision = "bf16"
    try:
        return a @ b
    finally:
        precision.fp32_precision = before


def matmul_into(out, a, b):
    """out = a @ b, accumulated in fp32, in the dtype of out; on CUDA the library writes it in place."""
    if a.is_cuda and out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        out.copy_(matmul_fp32(a, b))


# ---------------------------------------------------------------- forward and backward over tiles

def tile_size(bytes_each):
    """How many rows or columns of so many bytes make a tile; a multiple of 128, which suits matrix
    products."""
    n = max(1, TILE_BYTES // bytes_each)
    return n if n < 128 else n - n % 128


def forward_tiles(x, W, target, inv_temperature, needs_grad, entropy, backend):
    """(logp (N,), lse (N,), entropy or None, P' (N, V) or None), a tile of whole rows at a time. P' is kept
    where backward needs it and it fits."""
    N, V = len(x), len(W)
    keep = needs_grad and 0 < N * V * x.element_size() <= KEPT_BYTES
    kept = x.new_empty(N, V) if keep else None
    tile = tile_size(4 * V)
    parts = []
    for start in range(0, N, tile):
        end = min(start + tile, N)
        y = target[start:end]
        logits = matmul_fp32(x[start:end], W.T)                            # (tile, V)
        stats = row_stats(logits, y, inv_temperature, entropy, backend)
        parts.append(stats)
        if keep:
            softmax_minus_one_hot(logits, y, stats[1], 0, inv_temperature, kept[start:end], backend)
        del logits
    if not parts:
        empty = x.new_empty(0, dtype=torch.float32)
        parts = [(empty, empty, empty)]
    logp, lse, ent = zip(*parts, strict=True)
    ent = torch.cat(ent) if entropy else None
    return torch.cat(logp), torch.cat(lse), ent, kept


def backward_tiles(x, W, target, lse, kept, coefficient, inv_temperature, need_x, need_w, w_dtype, backend):
    """(dX (N, H) fp32, dW (V, H) in w_dtype): coefficient_t (P' W)_t and P'^T (coefficient x).

    Tiles of the vocabulary: every tile of dW is complete when it is written, and dX is the only sum over
    tiles."""
    V = len(W)
    coefficient = coefficient[:, None]
    dx = dw = weighted = None
    if need_x:
        dx = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    if need_w:
        dw = torch.empty(W.shape, dtype=w_dtype, device=x.device)
        weighted = (coefficient * x.float()).to(x.dtype)                   # (N, H)
    tile = V                                                               # P' is read where it lies
    if kept is None:
        tile = tile_size(4 * max(1, x.shape[1], len(x)))                   # of dW, and of logits or P'
    for first in range(0, V, tile):
        columns = slice(first, min(first + tile, V))
        if kept is not None:
            p = kept
        else:
            logits = matmul_fp32(x, W[columns].T)                          # (N, tile)
            p = x.new_empty(logits.shape)
            softmax_minus_one_hot(logits, target, lse, first, inv_temperature, p, backend)
            del logits
        if need_x:
            dx += matmul_fp32(p, W[columns])
        if need_w:
            matmul_into(dw[columns], p.T, weighted)
        del p
    if need_x:
        dx.mul_(coefficient)
    return dx, dw


class _LinearLogprob(torch.autograd.Function):
    """x (N, H), weight (V, H), target (N,) -> logp (N,), entropy (N,) or (0,)."""

    @staticmethod
    def forward(ctx, x, weight, target, inv_temperature, entropy, needs_grad, backend):
        logp, lse, ent, kept = forward_tiles(
            x, weight.to(x.dtype), target, inv_temperature, needs_grad, entropy, backend)
        ctx.save_for_backward(x, weight, target, lse, kept)
        ctx.options = inv_temperature, backend
        if not entropy:
            ent = logp.new_empty(0)
        ctx.mark_non_differentiable(ent)
        return logp, ent

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g, _):
        x, weight, target, lse, kept = ctx.saved_tensors
        inv_temperature, backend = ctx.options
        need_x, need_w = ctx.needs_input_grad[:2]
        with torch.autocast(x.device.type, enabled=False):
            dx, dw = backward_tiles(
                x, weight.to(x.dtype), target, lse, kept, -inv_temperature * g, inv_temperature,
                need_x, need_w, weight.dtype, backend)
        dx = dx.to(x.dtype) if need_x else None
        return dx, dw, None, None, None, None, None


class _FrozenHead(torch.autograd.Function):
    """x (N, H), weight (V, H) that learns nothing, target (N,) -> logp (N,), on a CPU.

    d logp_t / dx_t = (W_y - sum_j p_tj W_j) / T does not know g, so forward sums it up beside the softmax,
    a tile of columns at a time. The target's own column is left out of the sums: so 1 - p_y, the others'
    share, has all its digits."""

    @staticmethod
    def forward(ctx, x, weight, target, inv_temperature, needs_grad):
        N = len(x)
        of_target = weight[target].float()                                 # (N, H)
        z_y = (x.float() * of_target).sum(1) * inv_temperature
        most = torch.full((N,), -torch.inf)                                # logit of the other columns so far
        total = torch.zeros(N)                                             # sum_j exp(z_j - most)
        mixed = torch.zeros(x.shape)                                       # sum_j exp(z_j - most) W_j
        tile = max(256, CACHED_BYTES // (4 * max(1, N)) // 256 * 256)
        for first in range(0, len(weight), tile):
            W = weight[first:first + tile]
            z = matmul_fp32(x, W.T).mul_(inv_temperature)                  # (N, tile)
            here = ((target >= first) & (target < first + len(W))).nonzero()[:, 0]
            z[here, target[here] - first] = -torch.inf
            before, most = most, torch.maximum(most, z.amax(1))
            shrink = (before - most).exp().nan_to_num_()                   # (-inf - -inf: nothing yet)
            z.sub_(most.clamp(min=-1e30)[:, None]).exp_()
            total = total * shrink + z.sum(1)
            if needs_grad:
                mixed.mul_(shrink[:, None]).add_(z.to(x.dtype) @ W)
        others = most + total.log()
        lse = torch.logaddexp(others, z_y)
        if needs_grad:
            slope = of_target * (others - lse).exp()[:, None] - mixed * (most - lse).exp()[:, None]
            ctx.save_for_backward(slope * inv_temperature)
        ctx.dtype = x.dtype
        return z_y - lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        slope, = ctx.saved_tensors
        return (g[:, None] * slope).to(ctx.dtype), None, None, None, None


class _TurnSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, turn_ptr):
        ctx.save_for_backward(turn_ptr)
        ctx.rows = len(x)
        turns = len(turn_ptr) - 1
        out = torch.empty(turns, dtype=torch.float32, device=x.device)
        if turns:
            x = x.contiguous()
            turn_ptr = turn_ptr.contiguous()
            with on_device(x):
                _turn_sum_kernel[(turns,)](x, turn_ptr, out, BLOCK=256, num_warps=4)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        turn_ptr, = ctx.saved_tensors
        lengths = turn_ptr.diff()
        return torch.repeat_interleave(g, lengths, output_size=ctx.rows), None


def turn_sum(x, turn_ptr, backend="auto"):
    """Sums of x (N,) over turns: row turn_ptr[k] up to turn_ptr[k + 1], turn_ptr (K + 1,) from 0 to N. Empty
    turns sum to 0."""
    if _backend(x, backend) == "triton":
        return _TurnSum.apply(x, turn_ptr)
    offsets = turn_ptr.long()
    return torch.segment_reduce(x, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)


def _backend(x, backend):
    if backend not in ("auto", "triton", "torch", "reference"):
        raise ValueError(f"backend {backend!r}: auto, triton, torch or reference")
    if x.dtype == torch.float16:  # gradients of 1 / tokens would be 0 there
        raise ValueError("hidden states in float16: small gradients would vanish; take bfloat16 or float32")
    if backend == "triton" and triton is None:
        raise ValueError("backend 'triton': Triton is not installed")
    if backend == "auto" and x.is_cuda and triton is not None:
        return "triton"
    if backend == "auto":  # a CPU that multiplies bf16 numbers needs half the time that it needs in fp32
        return "torch" if x.dtype == torch.bfloat16 else "reference"
    return backend


# ---------------------------------------------------------------- public

def turn_logprob(hidden, weight, target_ids, *,
                 rows=None, turn_ptr=None, temperature=1.0, entropy=False, backend="auto"):
    """TurnLogprob of the tokens that follow some hidden states.

    hidden (..., H) and weight (V, H): bf16 or fp32; products take the dtype of hidden (a weight in another
    one is cast for the product and gets its gradient in its own). target_ids (N,): ids in [0, V).
    rows: which hidden states, all by default: indices (N,) into the flattened ones, where one may occur
    twice; or a mask of their places: bool, float, or (B, T) of any dtype.
    turn_ptr (K + 1,): row offsets of turns, for turn_sums.
    entropy: also the entropy of every row, as a metric.
    backend: triton on CUDA; elsewhere _FrozenHead where the weight learns nothing (LoRA), else the
    reference, or for bf16 "torch": the tiles with plain PyTorch passes.
    A weight that needs no gradient skips dW; under no_grad nothing is kept.
    """
    if hidden.shape[-1] != weight.shape[1]:
        raise ValueError(f"hidden has width {hidden.shape[-1]}, weight {weight.shape[1]}")
    x = hidden.reshape(-1, hidden.shape[-1])
    if rows is not None and (rows.ndim > 1 or rows.dtype == torch.bool or rows.is_floating_point()):
        rows = rows.reshape(-1).bool()
    if rows is not None:
        x = x[rows] if rows.dtype == torch.bool else take(x, rows)
    if len(x) != len(target_ids):
        raise ValueError(f"{len(x)} rows of hidden states, {len(target_ids)} target ids")
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    frozen = backend == "auto" and x.device.type == "cpu" and not weight.requires_grad and not entropy
    backend = _backend(x, backend)
    ent = None
    sums = None
    with torch.autocast(x.device.type, enabled=False):
        if frozen:
            logp = _FrozenHead.apply(x, weight.to(x.dtype), target_ids, 1.0 / temperature, needs_grad)
        elif backend == "reference":
            logp = turn_logprob_reference(x, weight, target_ids, temperature)
            if entropy:
                parts = []
                with torch.no_grad():
                    for part in x.split(4096):
                        z = part.float() @ weight.float().T / temperature
                        z = z.log_softmax(1)
                        parts.append(-(z.exp() * z.clamp(min=-1e4)).sum(1))
                    ent = torch.cat(parts)
        else:
            x = x.contiguous()
            target_ids = target_ids.contiguous()
            logp, ent = _LinearLogprob.apply(
                x, weight, target_ids, 1.0 / temperature, entropy, needs_grad, backend)
        if turn_ptr is not None:
            sums = turn_sum(logp, turn_ptr, "torch" if backend == "reference" else backend)
    if not entropy:
        ent = None
    return TurnLogprob(logp, ent, sums)
