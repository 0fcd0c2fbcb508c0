"""Bi-RAR's information distance: packed scoring against the straightforward loop.

    python -m benchmarks.bench_scoring [--questions 16]

The straightforward loop is Eq 2-4 as written (bi_rar.complexities): seven likelihoods a reasoning step, a
forward pass each. bi_rar.packed_complexities takes the same ones (those of right trajectories of one training
step in the embedded world, and all of them). Prints one Markdown table; figures are of this machine and run.
"""

import argparse
import platform
import time

import torch
import transformers

import bi_rar
from common import chat
from common.run import Run
from common.world.splits import world_split


def straightforward(scorer, steps, line):
    """{reasoning step: (d_TA, d_TQ)}, a forward pass a term."""
    return {step: bi_rar.distances(bi_rar.complexities(scorer, step, line)) for step in steps}


def packed(scorer, steps, line, cfg):
    found = bi_rar.packed_complexities(scorer, steps, line, cfg)
    return {step: bi_rar.distances(K) for step, K in found.items()}


def timed(function, *args):
    """(result, seconds)"""
    started = time.perf_counter()
    result = function(*args)
    return result, time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    cfg = bi_rar.parse_args(["--world", "plain"])
    policy = Run(cfg).policy(bi_rar.tiny_policy(cfg))
    split = world_split("train", questions=2000)
    questions = split.questions[:args.questions]
    groups = bi_rar.rollout_groups(policy, split.retriever, questions, cfg, 0)
    right = []
    everything = []
    for group, q in zip(groups, questions, strict=True):
        for t in group:
            steps = bi_rar.reasoning_steps_of(t, q, policy.tokenizer, cfg)
            everything += steps
            if t.info.em:
                right += steps
    line = chat.encode(policy.tokenizer, "\n")[1]
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          f"{args.questions} questions x {cfg.group_size} chains\n")
    print("| reasoning steps | how many | different | straightforward: steps/s | ours: steps/s | ratio "
          "| largest difference of d |")
    print("|---|---|---|---|---|---|---|")
    for name, steps in (("of right trajectories", right), ("all", everything)):
        loop_times = []
        our_times = []
        for _ in range(args.repeats):
            theirs, seconds = timed(straightforward, policy.model, steps, line)
            loop_times.append(seconds)
            ours, seconds = timed(packed, policy.model, steps, line, cfg)
            our_times.append(seconds)
        loop = len(steps) / sorted(loop_times)[args.repeats // 2]
        fast = len(steps) / sorted(our_times)[args.repeats // 2]
        different = set(steps)
        gap = 0.0
        for step in different:
            for a, b in zip(theirs[step], ours[step], strict=True):
                gap = max(gap, abs(a - b))
        print(f"| {name} | {len(steps)} | {len(different)} | {loop:.0f} | {fast:.0f} | {fast / loop:.1f} "
              f"| {gap:.1e} |")


if __name__ == "__main__":
    main()
