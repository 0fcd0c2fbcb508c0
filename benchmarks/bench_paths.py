"""Searches of ASKiT: all states of all paths scored in one call with a cache, without the cache, a state at a
time, as the authors' code does, and each pair of a state and a sentence by itself.

    python -m benchmarks.bench_paths                            # scorers as they begin, the embedded world
    python -m benchmarks.bench_paths --run runs/askit/seed0     # those of a run
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

import askit
from common import checkpoint
from common.files import say, table
from common.of_askit import evidence


def load(run, questions):
    """The policy of a run's stages, or a new one, with so many questions of the test world."""
    cfg = askit.parse_args([])
    questions = evidence.world_questions("test", questions)
    found, _ = evidence.make_cases("test", questions, cfg.candidates)
    coarse = run and checkpoint.find(Path(f"{run}-coarse/checkpoint"))
    encoder = askit.load_encoder(cfg, coarse)
    evidence.tokenize(encoder.pair_tokenizer, found)
    evidence.freeze_vectors(askit.load_encoder(cfg, ""), found)
    source = run and checkpoint.find(Path(f"{run}-ppo/checkpoint"))
    return askit.load_policy(cfg, source, encoder, found), found


class Scoring:
    """Stands in for askit.policy_of and counts: states asked for, states and pairs scored."""

    def __init__(self, cached, together, pairwise=False):
        self.cached, self.together, self.pairwise = cached, together, pairwise
        self.policy_of, self.log_policy = askit.policy_of, askit.log_policy
        self.asked = self.scored = self.pairs = 0

    def of(self, policy, states):
        self.asked += len(states)
        if self.together:
            return self.found(policy, states)
        return [self.found(policy, [s])[0] for s in states]

    def found(self, policy, states):
        if not self.cached:
            policy.forget()
            policy.coarse_cache = {}
        return self.policy_of(policy, states)

    def log(self, policy, rows):
        self.scored += len(rows)
        self.pairs += sum(1 + len(offered) for _, offered in rows)
        if self.pairwise:
            return a_pair_at_a_time(policy, rows)
        return self.log_policy(policy, rows)


def a_pair_at_a_time(policy, rows):
    """askit.log_policy, each sentence scored in a forward pass of its own."""
    [((case, moves), actions, *_)] = rows
    action, submit = policy.action_tokenizer, policy.submit_tokenizer
    device = policy.model.action.device
    question, sentences = case.tokens["submit"]
    taken = [sentences[i] for i in askit.evidence_of(moves)]
    out = policy.model.submit(**submit.batch([(question, submit.joined(taken) if taken else [])], device))
    logits = [-(out.start_logits[:, 0] + out.end_logits[:, 0]) / 2]
    state = askit.state_ids(action, case, moves)
    for a in actions:
        pair = (state, case.tokens["action"][1][a])
        logits.append(policy.model.action(**action.batch([pair], device)).logits[:, 0])
    return torch.stack(logits, 1).log_softmax(-1)


def measure(policy, cases, size, scoring):
    """Seconds of a PPO step's searches: `size` paths a question and fresh ones for their baselines; then a
    beam of 4, as in evaluation."""
    policy.forget()
    policy.coarse_cache = {}
    askit.policy_of, askit.log_policy = scoring.of, scoring.log
    began = time.perf_counter()
    paths = askit.sample_paths(policy, cases, size, "bench")
    askit.baselines(policy, paths, policy.cfg.baseline_rollouts, "bench")
    askit.beam_search(policy, cases, policy.cfg.beam)
    seconds = time.perf_counter() - began
    askit.policy_of, askit.log_policy = scoring.policy_of, scoring.log_policy
    return seconds


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", default="", help="run folders without -coarse, -ppo; empty = new models"
    )
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--size", type=int, default=6, help="paths a question")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    policy, cases = load(args.run, args.questions)
    ways = {
        "all together, cached": (True, True),
        "all together, no cache": (False, True),
        "a state at a time": (False, False),
        "a pair at a time": (False, False, True),
    }
    times = {name: [] for name in ways}
    counts = {}
    # in turn, so that other work on the machine meets all of them
    for _ in range(args.repeats):
        for name, how in ways.items():
            counts[name] = Scoring(*how)
            times[name].append(measure(policy, cases, args.size, counts[name]))
    header = ["", "seconds", "questions/s", "states asked", "scored", "pairs/s", "hit rate", "times slower"]
    fastest = statistics.median(times["all together, cached"])
    rows = []
    for name, c in counts.items():
        seconds = statistics.median(times[name])
        rows.append([
            name, f"{seconds:.2f}", f"{len(cases) / seconds:.1f}", c.asked, c.scored,
            f"{c.pairs / seconds:.0f}", f"{1 - c.scored / c.asked:.2f}", f"{seconds / fastest:.1f}"])
    table(f"{len(cases)} questions, {args.size} paths each, {torch.get_num_threads()} threads", header, rows)
    say("medians; the same paths in all rows")


if __name__ == "__main__":
    main()
