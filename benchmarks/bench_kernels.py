"""Every kernel against its peers, one table:

    python -m benchmarks.bench_kernels [--out results/kernels] [--model qwen3-4b] [--rows 8192] …

On a CUDA device: forward and backward from hidden states to per-token log-probs with an arbitrary upstream
gradient, for the heads of Qwen3-0.6B, 4B and 8B. Peers run where they are installed
(pip install liger-kernel==0.8.5 trl==1.16.0 cut-cross-entropy==25.1.1); a peer that is missing or fails is
listed with its reason. Each provider sees the full rows (unsampled ones get gradient 0) and the compacted
ones, providers interleaved, outputs poisoned before the run. Time: CUDA events, median and 20/80
percentiles. Memory: peak above what the inputs hold. TFLOP/s counts useful work only, 6 N H V of the loss
rows, recomputation not. Floor: that work at 800 TFLOP/s (H100).

On a CPU (or with --loss): the turn-level loss as the formula and from sums over turns, against a loop over
them. Clip decisions flipped against fp64 on both.
"""

import csv
import itertools
import math
import platform
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import torch
import tyro

from kernels.turn_logprob import matmul_fp32, triton, turn_logprob, turn_sum
from kernels.turn_loss import turn_loss

HEADS = {  # (hidden size, vocabulary)
    "qwen3-0.6b": (1024, 151936),
    "qwen3-4b": (2560, 151936),
    "qwen3-8b": (4096, 151936),
    "small": (64, 2048),
}
FLOOR_TFLOPS = 800.0


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


class _Chunked(torch.autograd.Function):
    """Chunks of rows, bf16 logits, recomputed in backward: the plain way to bound memory."""

    @staticmethod
    def forward(ctx, x, W, target, chunk):
        ctx.save_for_backward(x, W, target)
        ctx.chunk = chunk
        logprobs = []
        for p, t in zip(x.split(chunk), target.split(chunk), strict=True):
            logprobs.append(naive(p, W, t))
        return torch.cat(logprobs)

    @staticmethod
    def backward(ctx, g):
        x, W, target = ctx.saved_tensors
        dx = torch.empty_like(x)
        dW = torch.zeros(W.shape, dtype=torch.float32, device=W.device)
        for rows in torch.arange(len(x), device=x.device).split(ctx.chunk):
            p = (x[rows] @ W.T).float().softmax(-1)
            minus_one = -torch.ones_like(p[:, :1])
            p.scatter_add_(1, target[rows, None], minus_one)
            d = (p * -g[rows, None]).to(x.dtype)
            dx[rows] = d @ W
            dW += (d.T @ x[rows]).float()
        return dx, dW.to(W.dtype), None, None


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
        "chunked torch (1024)": lambda x, W, t: _Chunked.apply(x, W, t, 1024),
    }

    def peer(name, load):
        try:
            table[name] = load()
        except Exception as error:  # whatever its import raises is the reason that the table gives
            table[name] = reason(error)

    def trl(chunk):
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction as F
        return lambda x, W, t: F.apply(x, W, None, t, 1.0, chunk, None, 1.0, ())[0]

    def liger_flce():
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as F
        how = (None, None, -100, 0.0, 0.0, "none", None, False, torch.float32)  # dW summed in fp32, as ours
        return lambda x, W, t: -F.apply(x, W, t, *how)[0]

    def liger_scaled():
        import cutlass  # noqa: F401  (its H100 path needs it)
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
            LigerFusedLinearScaledCrossEntropyFunction as F,
        )
        return lambda x, W, t: -F.apply(x, W, t)

    def liger_fallback():
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction as F
        return lambda x, W, t: -F.apply(x, W, t, 1.0, -100, False)

    def liger_chunked(chunk):
        from liger_kernel.chunked_loss.fused_linear_ppo import _ChunkedSelectiveLogProbFunction as F
        return lambda x, W, t: F.apply(x, W, t, None, 1.0, chunk)

    def cce():
        from cut_cross_entropy import linear_cross_entropy
        return lambda x, W, t: -linear_cross_entropy(x, W, t, reduction="none").float()

    for chunk in (8192, 32768):
        peer(f"TRL 1.16 chunked log-prob ({chunk})", lambda chunk=chunk: trl(chunk))
    peer("Liger fused linear CE", liger_flce)
    peer("Liger scaled CE (CuTe)", liger_scaled)
    peer("Liger scaled CE, fallback", liger_fallback)
    for chunk in (4096, 32768):
        peer(f"Liger chunked log-prob ({chunk})", lambda chunk=chunk: liger_chunked(chunk))
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


def count(provider, args):
    """(kernel launches, host syncs) of one forward and backward."""
    import warnings
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        run_once(provider, *args)
        torch.cuda.synchronize()
    events = trace.key_averages()
    launches = sum(e.count for e in events if "aunchKernel" in e.key)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_once(provider, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    syncs = sum("synchroniz" in str(w.message) for w in caught)
    return launches, syncs


def poison():
    """Fills half of the free memory with bytes 255, NaN in every float dtype, so that what a kernel fails to
    write is seen."""
    torch.cuda.empty_cache()  # else the allocator hands out blocks that still hold the last run's results
    free, _ = torch.cuda.mem_get_info()
    half = free // 2
    junk = torch.full((half,), 255, dtype=torch.uint8, device="cuda")
    del junk


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


def gpu_inputs(head, rows, fraction, zero):
    """({"compacted" or "full": (x, W, target, g)}, which rows were sampled)."""
    H, V = HEADS[head]
    x, W, target = make_rows(rows, H, V, "cuda", torch.bfloat16)
    generator = torch.Generator(device="cuda").manual_seed(1)
    g = torch.randn(rows, device="cuda", generator=generator) / rows
    generator = torch.Generator().manual_seed(1)
    sampled = torch.randperm(rows, generator=generator)[:int(rows * fraction)]
    sampled = sampled.sort().values.cuda()
    mask = torch.zeros(rows, device="cuda").index_fill_(0, sampled, 1.0)
    mask[sampled[:int(len(sampled) * zero)]] = 0.0                           # advantage zero, or clipped
    g = g * mask
    compacted = (x[sampled], W, target[sampled], g[sampled])
    return {"compacted": compacted, "full": (x, W, target, g)}, sampled


def bench_gpu(head, rows, fraction, zero, repeats, skip=(), warmup=5):
    """Yields the rows of the table for one shape: every provider, with compacted and then with full rows."""
    inputs, sampled = gpu_inputs(head, rows, fraction, zero)
    truth = exact(*inputs["compacted"])
    H, V = HEADS[head]
    work = 6e-12 * len(sampled) * H * V
    for form, args in inputs.items():
        compared = slice(None) if form == "compacted" else sampled
        found = []
        live = {}
        for name, provider in providers().items():
            row = {
                "head": head, "rows": rows, "loss rows": fraction, "zero": zero,
                "fed": form, "provider": name,
            }
            found.append(row)
            if isinstance(provider, str):
                row["note"] = provider
                continue
            if any(s in name for s in skip):
                row["note"] = "skipped"
                continue
            try:
                measure_once(row, provider, args, compared, truth)
                live[name] = (provider, row, [])
            except Exception as error:  # an out-of-memory or a peer's own failure is a result
                row["note"] = reason(error)
                torch.cuda.empty_cache()
        time_interleaved(live, args, warmup, repeats)
        for provider, row, times in live.values():
            summarize_times(row, sorted(times), work)
            try:
                row["launches"], row["syncs"] = count(provider, args)
            except Exception as error:
                row["note"] = f"not counted: {reason(error)}"
        yield found


def measure_once(row, provider, args, compared, truth):
    """Fills a provider's row with its peak memory, its errors on the `compared` rows against fp64, and
    whether a second run is bit for bit the first."""
    torch._dynamo.reset()
    run_once(provider, *args)
    torch.cuda.synchronize()
    poison()
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


def time_interleaved(live, args, warmup, repeats):
    """Adds the milliseconds of every repeat to {name: (provider, row, times)}; a provider that fails is taken
    out, its row says why."""
    for i in range(warmup + repeats):
        for name, (provider, row, times) in list(live.items()):
            try:
                start = torch.cuda.Event(enable_timing=True)
                end = torch.cuda.Event(enable_timing=True)
                start.record()
                run_once(provider, *args)
                end.record()
                torch.cuda.synchronize()
            except Exception as error:
                row["note"] = reason(error)
                del live[name]
                continue
            if i >= warmup:
                times.append(start.elapsed_time(end))


def summarize_times(row, times, work):
    """Fills a row with percentiles of sorted times and the speed of `work` TFLOP."""
    n = len(times)
    ms = times[n // 2]
    row["ms"] = ms
    row["ms 20%"] = times[n // 5]
    row["ms 80%"] = times[n * 4 // 5]
    row["TFLOP/s"] = work / ms * 1e3
    row["of floor"] = ms / (work / FLOOR_TFLOPS * 1e3)


# ---------------------------------------------------------------- the loss on any device

def loop_loss(logprobs, old_logprobs, advantages, response_mask, turn_ids, clip_low, clip_high):
    """ATPO's loss the way a loop over sequences and turns computes it, with the host reads that such a loop
    makes."""
    total = 0.0
    for b in range(len(logprobs)):
        rows = response_mask[b].nonzero()[:, 0]
        terms = torch.zeros((), dtype=logprobs.dtype, device=logprobs.device)
        for k in range(int(turn_ids[b].max()) + 1):
            where = (turn_ids[b] == k).nonzero()[:, 0]
            if where.numel() == 0:
                continue
            new = logprobs[b, where]
            old = old_logprobs[b, where]
            s = (new - old).mean().detach()
            log_ratio = s + new - new.detach()
            ratio = log_ratio.clamp(max=10).exp()
            clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
            a = advantages[b, where]
            terms = terms - torch.minimum(ratio * a, clipped * a).sum()
            float(s)  # logged a turn
        total = total + terms / rows.numel()
    return total / len(logprobs)


def loss_batch(B, T, turns, device="cpu", dtype=torch.float64, seed=0):
    """Log-probs, old log-probs, advantages (B, T), mask and turn ids of B sequences of `turns` turns with
    observations between."""
    g = torch.Generator().manual_seed(seed)
    turn_ids = torch.full((B, T), -1)
    for b in range(B):
        cuts = torch.randperm(T - 2, generator=g)[:2 * turns] + 1
        cuts = torch.sort(cuts).values.tolist()
        for k in range(turns):
            start, end = cuts[2 * k], cuts[2 * k + 1]
            turn_ids[b, start:end] = k
    mask = turn_ids >= 0
    old = -torch.rand(B, T, generator=g, dtype=dtype) * mask
    change = 5e-2 * torch.randn(B, T, generator=g, dtype=dtype)
    new = (old + change) * mask
    per_turn = torch.randn(B, turns, generator=g, dtype=dtype)
    advantages = per_turn.gather(1, turn_ids.clamp(min=0)) * mask
    return [t.to(device) for t in (new, old, advantages, mask, turn_ids)]


def loss_and_gradient(loss, logprobs, *others):
    """(loss, its gradient): the graph is gone on return, so that its end is timed where it belongs."""
    leaf = logprobs.detach().requires_grad_()
    value = loss(leaf, *others, 3e-3, 4e-3)
    gradient = torch.autograd.grad(value, leaf)[0]
    return value.detach(), gradient


def bench_loss(B=64, T=4096, turns=6, device="cpu", repeats=15):
    """Median seconds of loss and gradient on the same batch, interleaved, and how far each is from the loop
    over turns (fp64).

    formula: at2po.atpo_loss. turn_loss: kernels/turn_loss.py, with the sums. An untimed call precedes each
    timed one: caches and memory are its own."""
    import at2po
    batch = loss_batch(B, T, turns, device)
    *_, mask, turn_ids = batch
    number = torch.arange(B, device=device)[:, None] * turns + turn_ids
    _, lengths = number[mask].unique_consecutive(return_counts=True)
    turn_ptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    row = mask.flatten().cumsum(0).view(B, T) - 1
    gather = torch.where(mask, row, turn_ptr[-1])

    def formula(*args):
        return at2po.atpo_loss(*args)[0]

    def of_sums(new, old, advantages, mask, turn_ids, *clip):
        new, old = (turn_sum(x[mask], turn_ptr, "torch") for x in (new, old))
        return turn_loss(new, old, advantages, mask, gather, turn_ptr, *clip)

    def wait():
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()

    losses = {
        "loop": loop_loss,
        "formula": formula,
        "turn_loss": of_sums,
    }
    seconds = {name: [] for name in losses}
    results = {}
    for _ in range(repeats):
        for name, loss in losses.items():
            loss_and_gradient(loss, *batch)
            wait()
            started = time.perf_counter()
            results[name] = loss_and_gradient(loss, *batch)
            wait()
            seconds[name].append(time.perf_counter() - started)
    medians = {name: sorted(times)[repeats // 2] for name, times in seconds.items()}
    value, gradient = results["loop"]
    rows = []
    for name, (other, its_gradient) in results.items():
        off = (gradient - its_gradient).norm() / gradient.norm()
        rows.append({
            "form": name,
            "seconds": medians[name],
            "loop / this": medians["loop"] / medians[name],
            "loss difference": abs(float(value - other)),
            "gradient difference": float(off),
        })
    return rows


# ---------------------------------------------------------------- tables

COLUMNS = (
    "provider", "fed", "ms", "ms 20%", "ms 80%", "TFLOP/s", "of floor", "memory GB",
    "logp error", "dX error", "dW error", "bit equal", "launches", "syncs", "note")


def markdown(rows, columns):
    def cell(value):
        if value is None:
            return ""
        return f"{value:.3g}" if isinstance(value, float) else str(value)

    lines = []
    lines.append("| " + " | ".join(columns) + " |")
    lines.append("|" + "---|" * len(columns))
    for row in rows:
        cells = [cell(row.get(c)) for c in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def versions():
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=Path(__file__).parent)
        commit = done.stdout.strip()
    except FileNotFoundError:
        commit = ""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        machine = platform.processor() or platform.machine()
        device = f"{machine}, {torch.get_num_threads()} threads"
    return (f"{device}; torch {torch.__version__}; triton {triton.__version__ if triton else 'none'}; "
            f"commit {commit or 'unknown'}")


@dataclass
class Args:
    model: tuple[Literal[tuple(HEADS)], ...] = ("qwen3-0.6b", "qwen3-4b", "qwen3-8b")
    rows: tuple[int, ...] = (8192,)
    fraction: tuple[float, ...] = (1.0, .4)  # of rows that the policy sampled
    zero: tuple[float, ...] = (0.0, .5)      # of those, with upstream gradient 0
    repeats: int = 30
    skip: tuple[str, ...] = ()  # leave out providers whose names contain one of these
    loss: bool = False          # the loss against the loop, and clip decisions, only
    out: Path | None = None     # folder for kernels.md and kernels.csv


def parse_args():
    args = tyro.cli(Args, description=__doc__)
    fractions = all(0 < f <= 1 for f in args.fraction)
    zeros = all(0 <= z < 1 for z in args.zero)
    if min(*args.rows, args.repeats) < 1 or not fractions or not zeros:
        sys.exit("--rows and --repeats at least 1, --fraction above 0 and at most 1, "
                 "--zero at least 0 and below 1")
    if any(int(n * f) < 1 for n in args.rows for f in args.fraction):
        sys.exit("--fraction of --rows leaves no row")
    return args


def main():
    args = parse_args()
    cuda = torch.cuda.is_available()
    text = [versions(), ""]
    rows = []

    def say(line):
        """Prints, and writes what there is so far: a device that dies takes nothing along."""
        print(line, flush=True)
        text.append(line)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "kernels.md").write_text("\n".join(text) + "\n")
            if rows:
                with open(args.out / "kernels.csv", "w", newline="") as f:
                    writer = csv.DictWriter(f, ["head", "rows", "loss rows", "zero", *COLUMNS])
                    writer.writeheader()
                    writer.writerows(rows)

    print(text[0] + "\n", flush=True)
    say("Turn-level loss and gradient in fp64, 64 sequences x 4,096 tokens x 6 turns:\n")
    try:
        found = bench_loss(device="cuda" if cuda else "cpu")
        say(markdown(found, tuple(found[0])))
    except ImportError as error:  # of what at2po.py needs; the kernels need none of it
        say(reason(error))
    say("\nClip decisions that differ from fp64's, share of turns (window 3e-3 / 4e-3):\n")
    size = dict(device="cuda", V=151936, H=1024) if cuda else {}
    flips = clip_flips(**size)
    say(markdown([flips], tuple(flips)))
    if cuda and not args.loss:
        shapes = itertools.product(args.model, args.rows, args.fraction, args.zero)
        for head, n, fraction, zero in shapes:
            say(f"\n{head}, {n} rows, {fraction:.0%} of them sampled, {zero:.0%} of those with gradient 0:\n")
            for found in bench_gpu(head, n, fraction, zero, args.repeats, args.skip):
                rows += found
                say(markdown(found, COLUMNS) + "\n")
    elif not cuda:
        say("\nNo CUDA device: the table of kernels and peers was not measured.")


if __name__ == "__main__":
    main()
