"""What --sampler-correction does where sampler and trainer differ: python -m benchmarks.bench_correction

The embedded world, GRPO on chains, the tiny policy. What samples is a copy of the policy whose matrices were
noised until its log-probs are so many nats off on average, or rounded to bf16. Printed:

gradient  of one step, sampled by the copy, against that on policy with the same questions. Expectations
          are wanted, so each is drawn several times over, and what one replicate drew is multiplied with
          what others drew alone: then noise leaves no bias in cosine, norm and distance. A replicate and
          its partner on policy use the same random numbers. "noise": how far one replicate is from their
          mean; all lengths in those of the gradient on policy. +-: jackknife over replicates.
EM        of the trainer's own weights after some steps, with new noise in every one
"""

import argparse
import copy
from dataclasses import replace

import torch

import at2po
from benchmarks.bench_kernels import markdown
from common import data, metrics, rollout, splits, training
from common import model as models
from common.engine import TransformersEngine

KINDS = ("none", "token")


# ---------------------------------------------------------------- what samples

def noised(model, scale, seed):
    """A copy with Gaussian noise in its matrices, `scale` of each one's own spread."""
    g = torch.Generator().manual_seed(seed)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            if p.ndim >= 2:
                p += scale * p.std() * torch.randn(p.shape, generator=g)
    return other


def rounded(model):
    """A copy whose weights went through bf16."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(p.bfloat16())
    return other


def policy_of(model, tokenizer, cfg):
    engine = TransformersEngine(
        model,
        tokenizer,
        cfg.max_batch,
        cfg.cache_gb,
        cfg.cache_gb,
    )
    return rollout.Policy(model, tokenizer, engine)


def scale_of_drift(model, roots, cfg, wanted):
    """The noise that changes the log-probs of these samples by `wanted` nats on average."""
    batches = training.prepare(model, None, at2po.trajectories_of(roots), cfg)
    low = 0.0
    high = 1.0
    for _ in range(10):
        middle = (low + high) / 2
        other = noised(model, middle, seed=1)
        off = []
        for b in batches:
            with torch.no_grad():
                logprobs = models.token_logprobs(other, b, cfg.temperature, cfg.kernels)
            difference = logprobs - b.old_logprobs
            off.append(difference[b.response_mask].abs())
        if torch.cat(off).mean() > wanted:
            high = middle
        else:
            low = middle
    return low


# ---------------------------------------------------------------- the gradient of one step

def gradients(model, roots, cfg):
    """({kind: gradient as one vector}, {kind: the meter's row}) of samples, before any update."""
    learn = [root for root in roots if at2po.assign_advantages(root, cfg)]
    trajectories = at2po.trajectories_of(learn)
    batches = training.prepare(model, None, trajectories, cfg)
    count = len(at2po.trajectories_of(roots))
    weights = [p for p in model.parameters() if p.requires_grad]
    found = dict.fromkeys(KINDS, 0)
    for b in batches:
        logprobs = models.token_logprobs(model, b, cfg.temperature, cfg.kernels)
        for kind in KINDS:
            corrected = replace(cfg, sampler_correction=kind)
            loss, _ = at2po.policy_loss(logprobs, b, corrected, count, count)
            parts = torch.autograd.grad(loss, weights, retain_graph=True)
            whole = torch.cat([p.flatten() for p in parts])
            found[kind] = found[kind] + whole.double()
    rows = {}
    for kind in KINDS:
        meter = training.Meter(batches, correction=kind)
        rows[kind] = meter.means()
    return found, rows


def across(a, b):
    """Mean of a_r . b_s over replicates r != s, (R, D) each: the noise's own square is not in it."""
    R = len(a)
    products = a @ b.T
    return (products.sum() - products.trace()) / (R * (R - 1))


def compare(g, exact):
    """What stands in the table: g and exact are (R, D) replicates."""
    size = root(across(exact, exact))
    own = root(across(g, g))
    apart = g - exact
    scatter = g - g.mean(0)
    squares = scatter.square().sum(1)
    return {
        "cosine": across(g, exact) / (own * size),
        "norm": own / size,
        "distance": root(across(apart, apart)) / size,
        "noise": root(squares.mean()) / size,
    }


def root(x):
    return x.clamp(min=1e-30).sqrt()


def with_errors(g, exact):
    """compare, each number with its jackknife error."""
    whole = compare(g, exact)
    R = len(g)
    without = []
    for r in range(R):
        kept = [i for i in range(R) if i != r]
        without.append(compare(g[kept], exact[kept]))
    shown = {}
    for name, value in whole.items():
        left = torch.stack([w[name] for w in without])
        variance = left.var(correction=0)
        error = root((R - 1) * variance)
        shown[name] = f"{value:.3f} ± {error:.3f}"
    return shown


def bias_rows(model, tokenizer, split, samplers, cfg, args):
    questions = split.questions[:args.questions]

    def replicates(sampler):
        policy = policy_of(sampler, tokenizer, cfg)
        made = []
        told = {}
        for r in range(args.replicates):
            roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, step=r)
            found, told = gradients(model, roots, cfg)
            made.append(found)
        stacked = {}
        for kind in KINDS:
            stacked[kind] = torch.stack([found[kind] for found in made])
        return stacked, told

    on_policy, _ = replicates(model)
    exact = on_policy["none"]
    print("on policy", with_errors(exact, exact), flush=True)
    for name, sampler in samplers.items():
        made, told = replicates(sampler)
        for kind in KINDS:
            row = told[kind]
            yield {
                "sampler": name,
                "drift": f"{row['rollout/logprob_drift_mean']:.4f}",
                "correction": kind,
                "mean ratio": row.get("train/sampler_ratio"),
                "cut": row.get("train/sampler_truncated"),
                **with_errors(made[kind], exact),
            }


# ---------------------------------------------------------------- EM after some steps

def trained_em(start, tokenizer, split, test, cfg, scale, args):
    """[EM of each test question] after args.steps with new noise in each."""
    model = copy.deepcopy(start)
    optimizer = training.make_optimizer(model, args.lr, cfg.weight_decay)
    for step in range(1, args.steps + 1):
        questions = data.batch_of_step(
            split.questions,
            step,
            cfg.questions_per_step,
            cfg.seed,
        )
        sampler = noised(model, scale, seed=step) if scale else model
        policy = policy_of(sampler, tokenizer, cfg)
        roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, step)
        at2po.update(model, None, optimizer, roots, cfg)
    rows, _ = at2po.evaluate(policy_of(model, tokenizer, cfg), test, cfg)
    return [row["em"] for row in rows]


def em_rows(model, tokenizer, split, test, scales, cfg, args):
    for name, scale in scales.items():
        kinds = KINDS if scale else ("none",)
        for kind in kinds:
            right = []
            for seed in range(args.seeds):
                seeded = replace(cfg, sampler_correction=kind, seed=seed)
                right.append(trained_em(model, tokenizer, split, test, seeded, scale, args))
            means = [rollout.mean(em) for em in right]
            yield {
                "sampler": name,
                "correction": kind,
                "EM": f"{rollout.mean(means):.3f}",
                "seeds": " ".join(f"{m:.3f}" for m in means),
            }, right


def show_em(rows):
    """The table, each row beside the first: the paired difference over questions of all seeds."""
    base = None
    table = []
    for row, right in rows:
        flat = [em for seed in right for em in seed]
        base = base or flat
        gain, low, high = metrics.paired_difference(base, flat)
        row["against the first"] = f"{gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        table.append(row)
        print(row, flush=True)
    print(markdown(table, list(table[0])))


# ---------------------------------------------------------------- all of it

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--drifts", type=float, nargs="+", default=[.02, .1])
    parser.add_argument("--questions", type=int, default=96)
    parser.add_argument("--replicates", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12, help="of training; 0 = the gradient alone")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--warmup-steps", type=int, default=900)
    args = parser.parse_args(argv)
    flags = f"--loss grpo --kl-coef 0 --eval-limit 400 --warmup-steps {args.warmup_steps}"
    cfg = at2po.parse_args(flags.split())
    split, (test, *_) = splits.load_splits(cfg, "")
    model, tokenizer = models.load_policy(at2po.tiny_policy(cfg))

    policy = policy_of(model, tokenizer, cfg)
    some = split.questions[:16]
    roots = at2po.rollout_trees(policy, split.retriever, some, cfg, step=0)
    scales = {}
    for drift in args.drifts:
        scales[f"noise, {drift:g} nats"] = scale_of_drift(model, roots, cfg, drift)
    print(scales, flush=True)
    if args.replicates:
        samplers = {}
        for name, scale in scales.items():
            samplers[name] = noised(model, scale, seed=1)
        samplers["rounded to bf16"] = rounded(model)
        table = []
        for row in bias_rows(model, tokenizer, split, samplers, cfg, args):
            print(row, flush=True)
            table.append(row)
        print(markdown(table, list(table[0])), flush=True)
    if args.steps:
        scales = {"the policy": 0.0} | scales
        show_em(em_rows(model, tokenizer, split, test, scales, cfg, args))


if __name__ == "__main__":
    main()
