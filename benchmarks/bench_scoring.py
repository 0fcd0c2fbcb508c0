"""Bi-RAR's information distance: packed scoring against the straightforward loop. python -m benchmarks.bench_scoring [--questions 16]

The straightforward loop is Eq 2-4 as written: eight likelihoods a step, a forward pass each. Ours scores the same steps (those of right
trajectories of one training step in the embedded world, and all of them). Prints one Markdown table; figures are of this machine and run.
"""

import argparse
import platform
import time

import torch
import transformers

import bi_rar
from common import rollout, task, training
from common.engine import TransformersEngine


@torch.no_grad()
def straightforward(scorer, tokenizer, jobs):
    """{job: (d_TA, d_TQ)} by eight forward passes a step."""
    def bits(scored, *context):
        line = tokenizer("\n", add_special_tokens=False)["input_ids"]
        before = [i for c in context for i in [*c, *line]]
        logits = scorer(torch.tensor([before + scored], device=scorer.device)).logits[0].float()
        logprobs = logits.log_softmax(-1)[len(before) - 1:-1].gather(1, torch.tensor(scored, device=scorer.device)[:, None])
        return -float(logprobs.double().sum()) / 0.6931471805599453
    found = {}
    for job in jobs:
        Q, A = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in job[:2])
        T = list(job[2])
        found[job] = (bi_rar.information_distance(bits(T, Q, A), bits(A, Q, T), bits(T, Q), bits(A, Q)),
                      bi_rar.information_distance(bits(T, Q, A), bits(Q, A, T), bits(T, A), bits(Q, A)))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    cfg = bi_rar.parse_args([])
    model, tokenizer = training.load_policy(bi_rar.tiny_policy(cfg))
    split = task.world_split("train", questions=2000)
    policy = bi_rar.Policy(TransformersEngine(model, tokenizer, cfg.max_batch), tokenizer, rollout.BatchedSearch(split.retriever))
    questions = split.questions[:args.questions]
    groups = bi_rar.rollout_groups(policy, questions, cfg, 0)
    steps = lambda keep: [(q.question, q.answers[0], tuple(turn.ids)) for g, q in zip(groups, questions, strict=True)  # noqa: E731
                          for t in g if keep(t) for turn in t.turns]
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}; {args.questions} questions x "
          f"{cfg.group_size} chains\n")
    print("| steps | how many | different | straightforward: steps/s | ours: steps/s | ratio | largest difference of d |\n|---|---|---|---|---|---|---|")
    for name, jobs in (("of right trajectories", steps(lambda t: t.info["em"])), ("all", steps(lambda t: True))):
        times = {"loop": [], "ours": []}
        for _ in range(args.repeats):
            for how, score in (("loop", lambda: straightforward(model, tokenizer, jobs)), ("ours", lambda: bi_rar.step_distances(model, tokenizer, jobs, cfg))):  # noqa: B023
                started = time.perf_counter()
                result = score()
                times[how].append(time.perf_counter() - started)
                times[how + " result"] = result
        loop, ours = (len(jobs) / sorted(times[k])[args.repeats // 2] for k in ("loop", "ours"))
        gap = max(abs(a - b) for j in set(jobs) for a, b in zip(times["loop result"][j], times["ours result"][j], strict=True))
        print(f"| {name} | {len(jobs)} | {len(set(jobs))} | {loop:.0f} | {ours:.0f} | {ours / loop:.1f} | {gap:.1e} |")


if __name__ == "__main__":
    main()
