"""Bi-RAR's information distance: packed scoring against the straightforward loop.

    python -m benchmarks.bench_scoring [--questions 16]

The straightforward loop is Eq 2-4 as written: eight likelihoods a step, a forward pass each. Ours scores the
same steps (those of right trajectories of one training step in the embedded world, and all of them). Prints
one Markdown table; figures are of this machine and run.
"""

import argparse
import math
import platform
import time

import torch
import transformers

import bi_rar
from common import run
from common.world.splits import world_split


@torch.no_grad()
def straightforward(scorer, tokenizer, jobs):
    """{job: (d_TA, d_TQ)} by eight forward passes a step."""
    line = tokenizer("\n", add_special_tokens=False)["input_ids"]

    def bits(scored, *context):
        before = []
        for part in context:
            before += [*part, *line]
        ids = torch.tensor([before + scored], device=scorer.device)
        logits = scorer(ids).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(before) - 1:-1]
        target = ids[0, len(before):]
        chosen = logprobs.gather(1, target[:, None])
        return -float(chosen.double().sum()) / math.log(2)

    found = {}
    for job in jobs:
        question, answer, turn, _ = job
        Q = tokenizer(question, add_special_tokens=False)["input_ids"]
        A = tokenizer(answer, add_special_tokens=False)["input_ids"]
        T = list(turn)
        to_answer = bi_rar.information_distance(
            bits(T, Q, A), bits(A, Q, T), bits(T, Q), bits(A, Q))
        to_question = bi_rar.information_distance(
            bits(T, Q, A), bits(Q, A, T), bits(T, A), bits(Q, A))
        found[job] = to_answer, to_question
    return found


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
    cfg = bi_rar.parse_args([])
    policy = run.load_policy(cfg, bi_rar.tiny_policy(cfg))
    split = world_split("train", questions=2000)
    questions = split.questions[:args.questions]
    groups = bi_rar.rollout_groups(policy, split.retriever, questions, cfg, 0)
    right = []
    everything = []
    for group, q in zip(groups, questions, strict=True):
        for t in group:
            jobs = [(q.question, q.answers[0], tuple(turn.ids), ()) for turn in t.turns]
            everything += jobs
            if t.info.em:
                right += jobs
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          f"{args.questions} questions x {cfg.group_size} chains\n")
    print("| steps | how many | different | straightforward: steps/s | ours: steps/s | ratio "
          "| largest difference of d |")
    print("|---|---|---|---|---|---|---|")
    for name, jobs in (("of right trajectories", right), ("all", everything)):
        loop_times = []
        our_times = []
        for _ in range(args.repeats):
            theirs, seconds = timed(straightforward, policy.model, policy.tokenizer, jobs)
            loop_times.append(seconds)
            ours, seconds = timed(bi_rar.step_distances, policy.model, policy.tokenizer, jobs, cfg)
            our_times.append(seconds)
        loop = len(jobs) / sorted(loop_times)[args.repeats // 2]
        packed = len(jobs) / sorted(our_times)[args.repeats // 2]
        different = set(jobs)
        gap = 0.0
        for job in different:
            for a, b in zip(theirs[job], ours[job], strict=True):
                gap = max(gap, abs(a - b))
        print(f"| {name} | {len(jobs)} | {len(different)} | {loop:.0f} | {packed:.0f} | {packed / loop:.1f} "
              f"| {gap:.1e} |")


if __name__ == "__main__":
    main()
