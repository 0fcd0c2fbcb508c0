"""Every kernel against its peers, one table:

    python -m benchmarks.bench_kernels [--model qwen3-4b] [--rows 8192] … > results/kernels/mine.md

On a CUDA device: forward and backward from hidden states to per-token log-probs with an arbitrary upstream
gradient. Peers run where they are installed (pip install liger-kernel==0.8.5 trl==1.16.0
cut-cross-entropy==25.1.1); a peer that is missing or fails is listed with its reason. Each provider sees the
full rows (unsampled ones get gradient 0) and the compacted ones, providers interleaved. Time: median of CUDA
events. Memory: peak above what the inputs hold.

Anywhere: the share of clip decisions that differ from fp64's, for our logits and for logits in bf16.
"""

import math
import platform
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import tyro

from kernels.turn_logprob import matmul_fp32, triton, turn_logprob

CHUNK = 32768  # of the peers that take one: the faster of those tried
HEADS = {  # (hidden size, vocabulary)
    "qwen3-0.6b": (1024, 151936),
    "qwen3-4b": (2560, 151936),
    "qwen3-8b": (4096, 151936),
    "small": (64, 2048),
}


# ---------------------------------------------------------------- inputs

def make_rows(rows, hidden, vocabulary, device, dtype, seed=0):
    """Hidden states, head, and targets sampled from the model; the hidden states pull so hard that the mean
    log-prob is near -0.3, as of a trained policy (peers that skip tiny gradients, and all effects of
    precision, depend on it)."""
    g = torch.Generator(device=device).manual_seed(seed)
    base = torch.randn(vocabulary, hidden, generator=g, device=device)
    base = base / hidden ** .5
    favourite = torch.randint(vocabulary, (rows,), generator=g, device=device)
    W = base.to(dtype)
    pull = torch.rand(rows, 1, generator=g, device=device) + 1.2
    noise = torch.randn(rows, hidden, generator=g, device=device)
    x = noise + pull * math.log(vocabulary) * base[favourite]
    x = x.to(dtype)
    target = torch.empty(rows, dtype=torch.long, device=device)
    for part in torch.arange(rows, device=device).split(1024):
        p = matmul_fp32(x[part], W.T).softmax(1)
        drawn = torch.multinomial(p, 1, generator=g)
        target[part] = drawn[:, 0]
    return x, W, target


def clip_flips(turns=300, V=2000, H=128, device="cpu", clip=(3e-3, 4e-3), seed=0):
    """Share of turns whose clip decision differs from fp64's, for our fp32 logits and for logits rounded to
    bf16. Turns have log-normal lengths around 50; the new hidden states differ from the old ones so that
    turn-mean ratios lie near the window."""
    g = torch.Generator().manual_seed(seed)
    log_length = torch.randn(turns, generator=g) * .6 + math.log(50)
    lengths = torch.exp(log_length).long().clamp(2, 400)
    zero = torch.zeros(1, dtype=torch.long)
    turn_ptr = torch.cat([zero, lengths.cumsum(0)]).to(device)
    tokens = int(lengths.sum())
    x, W, target = make_rows(tokens, H, V, device, torch.bfloat16, seed)
    drift = torch.randn(turns, H, generator=g).to(device)
    drift = drift.repeat_interleave(lengths.to(device), 0) * .05
    scale = 1 + .002 * torch.randn(tokens, 1, generator=g).to(device)
    new = (x.float() * scale + drift).to(torch.bfloat16)
    backend = "triton" if torch.device(device).type == "cuda" else "torch"

    def ours(hidden):
        return turn_logprob(hidden, W, target, backend=backend).logprobs

    def rounded(hidden):
        logits = matmul_fp32(hidden, W.T).bfloat16().float()
        chosen = logits.gather(1, target[:, None])[:, 0]
        return chosen - logits.logsumexp(1)

    def exact(hidden):
        logprobs = []
        for rows in torch.arange(len(hidden), device=device).split(2048):
            logits = hidden[rows].double() @ W.double().T
            z = logits.log_softmax(1)
            chosen = z.gather(1, target[rows, None])
            logprobs.append(chosen[:, 0])
        return torch.cat(logprobs)

    def decisions(logprobs):
        change = logprobs(new) - logprobs(x)
        delta = torch.segment_reduce(change.double(), "mean", offsets=turn_ptr, axis=0)
        ratio = delta.exp()
        low, high = clip
        return (ratio > 1 + high).int() - (ratio < 1 - low).int()

    truth = decisions(exact)

    def share(logprobs):
        flipped = decisions(logprobs) != truth
        return float(flipped.double().mean())

    return {
        "ours": share(ours),
        "bf16 logits": share(rounded),
        "outside the window": float((truth != 0).double().mean()),
    }


# ---------------------------------------------------------------- providers
#
# (x, W, target) -> log-probs, differentiable

def naive(x, W, target):
    """What most training code does: bf16 logits, then log-softmax in fp32."""
    logprobs = (x @ W.T).float().log_softmax(-1)
    return logprobs.gather(1, target[:, None])[:, 0]


def reason(error):
    """An exception as the table's note: its kind and first line."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:100]}"


def providers():
    """{name: function or the reason why it is missing}."""
    def ours(x, W, t):
        return turn_logprob(x, W, t).logprobs

    def nothing_kept(x, W, t):
        with patch.object(sys.modules["kernels.turn_logprob"], "KEPT_BYTES", 0):
            return ours(x, W, t)

    table = {
        "ours": ours,
        "ours, nothing kept": nothing_kept,
        "naive bf16": naive,
        "naive bf16, torch.compile": torch.compile(naive, dynamic=False),
    }

    def peer(name, load):
        try:
            table[name] = load()
        except Exception as error:  # whatever its import raises is the reason that the table gives
            table[name] = reason(error)

    def trl():
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as F
        return lambda x, W, t: F.apply(x, W, None, t, 1.0, CHUNK, None, 1.0, ())[0]

    def liger_flce():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as F
        how = (None, None, -100, 0.0, 0.0, "none", None, False, torch.float32)  # dW summed in fp32, as ours
        return lambda x, W, t: -F.apply(x, W, t, *how)[0]

    def liger_chunked():
        from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction as F
        return lambda x, W, t: F.apply(x, W, t, None, 1.0, CHUNK)

    def cce():
        from cut_cross_entropy import linear_cross_entropy
        return lambda x, W, t: -linear_cross_entropy(x, W, t, reduction="none").float()

    peer("TRL 1.16 chunked log-prob", trl)
    peer("Liger fused linear CE", liger_flce)
    peer("Liger chunked log-prob", liger_chunked)
    peer("cut-cross-entropy", cce)
    return table


# ---------------------------------------------------------------- measuring on a GPU

def run_once(provider, x, W, target, g):
    """One forward and backward; returns (logp, dX, dW)."""
    x = x.detach().requires_grad_()
    W = W.detach().requires_grad_()
    logp = provider(x, W, target)
    loss = (logp * g).sum()
    dx, dW = torch.autograd.grad(loss, (x, W))
    return logp.detach(), dx, dW


def exact(x, W, target, g, chunk=256):
    """(logp, dX, dW) in fp64 of the upstream gradient g."""
    W = W.double()
    logp = []
    dx = []
    dW = torch.zeros_like(W)
    chunks = zip(
        x.double().split(chunk),
        target.split(chunk),
        g.double().split(chunk),
        strict=True)
    for a, t, u in chunks:
        z = (a @ W.T).log_softmax(1)
        chosen = z.gather(1, t[:, None])
        logp.append(chosen[:, 0])
        p = z.exp_()
        minus_one = -torch.ones_like(z[:, :1])
        p.scatter_add_(1, t[:, None], minus_one)
        p.mul_(-u[:, None])
        dx.append(p @ W)
        dW.addmm_(p.T, a)
    return torch.cat(logp), torch.cat(dx), dW


def gpu_inputs(head, rows, fraction):
    """({"compacted" or "full": (x, W, target, g)}, which rows were sampled)."""
    H, V = HEADS[head]
    x, W, target = make_rows(rows, H, V, "cuda", torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(1)
    g = torch.randn(rows, device="cuda", generator=generator) / rows
    generator = torch.Generator().manual_seed(1)
    sampled = torch.randperm(rows, generator=generator)[:int(rows * fraction)]
    sampled = sampled.sort().values.cuda()
    g = g * torch.zeros(rows, device="cuda").index_fill_(0, sampled, 1.0)
    compacted = (x[sampled], W, target[sampled], g[sampled])
    return {"compacted": compacted, "full": (x, W, target, g)}, sampled


def bench_gpu(head, rows, fraction, repeats, warmup=5):
    """Yields the rows of the table for one shape: every provider, with compacted and then with full rows."""
    inputs, sampled = gpu_inputs(head, rows, fraction)
    truth = exact(*inputs["compacted"])
    for form, args in inputs.items():
        compared = slice(None) if form == "compacted" else sampled
        found = []
        live = []
        for name, provider in providers().items():
            row = {"provider": name, "fed": form}
            found.append(row)
            if isinstance(provider, str):
                row["note"] = provider
                continue
            try:
                measure_once(row, provider, args, compared, truth)
                live.append((provider, row, []))
            except Exception as error:  # an out-of-memory or a peer's own failure is a result
                row["note"] = reason(error)
                torch.cuda.empty_cache()
        for i in range(warmup + repeats):
            for provider, _, times in live:
                milliseconds = timed(provider, args)
                if i >= warmup:
                    times.append(milliseconds)
        for _, row, times in live:
            row["ms"] = sorted(times)[repeats // 2]
        yield found


def measure_once(row, provider, args, compared, truth):
    """Fills a provider's row with its peak memory, its errors on the `compared` rows against fp64, and
    whether a second run is bit for bit the first."""
    torch._dynamo.reset()
    run_once(provider, *args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    logp, dx, dW = run_once(provider, *args)
    peak = torch.cuda.max_memory_allocated()
    row["memory GB"] = (peak - held) / 1e9
    exact_logp, exact_dx, exact_dW = truth
    difference = logp[compared].double() - exact_logp
    row |= {
        "logp error": float(difference.abs().max()),
        "dX error": relative(dx[compared], exact_dx),
        "dW error": relative(dW, exact_dW),
    }
    again = run_once(provider, *args)
    pairs = zip((logp, dx, dW), again, strict=True)
    row["bit equal"] = all(torch.equal(a, b) for a, b in pairs)


def relative(a, b):
    difference = a.double() - b
    return float(difference.norm() / b.norm())


def timed(provider, args):
    """Milliseconds of one forward and backward."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    run_once(provider, *args)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


# ---------------------------------------------------------------- tables

COLUMNS = (
    "provider", "fed", "ms", "memory GB", "logp error", "dX error", "dW error", "bit equal", "note")


def markdown(rows, columns):
    def cell(value):
        if value is None:
            return ""
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [cell(row.get(c)) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions():
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    device = f"{platform.machine()}, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return (f"{device}; torch {torch.__version__}; triton {triton.__version__ if triton else 'none'}; "
            f"commit {done.stdout.strip() or 'unknown'}")


@dataclass
class Args:
    model: tuple[Literal[tuple(HEADS)], ...] = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    rows: int = 8192
    fraction: tuple[float, ...] = (1.0, .4)  # of rows that the policy sampled
    repeats: int = 30


def main():
    args = tyro.cli(Args, description=__doc__)
    cuda = torch.cuda.is_available()
    say = partial(print, flush=True)  # a device that dies takes nothing along
    say(versions())
    say("\nClip decisions that differ from fp64's, share of turns (window 3e-3 / 4e-3):\n")
    size = dict(device="cuda", V=151936, H=1024) if cuda else {}
    flips = clip_flips(**size)
    say(markdown([flips], tuple(flips)))
    if not cuda:
        say("\nNo CUDA device: the table of kernels and peers was not measured.")
        return
    for head in args.model:
        for fraction in args.fraction:
            say(f"\n{head}, {args.rows} rows, {fraction:.0%} of them sampled:\n")
            for found in bench_gpu(head, args.rows, fraction, args.repeats):
                say(markdown(found, COLUMNS) + "\n")


if __name__ == "__main__":
    main()
