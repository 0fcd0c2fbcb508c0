"""What docs/copy.md offers of askit.py, beam search and PPO, runs in an empty folder with torch alone."""

from tests.lifting import lift, run

IMPORTS = """\
import hashlib
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
from own import log_policy, offers, path_reward, state_batches  # the copyist's
"""
PIECES = {
    "common__evidence": "SUBMIT",  # and ASK, on the same line
    "common__turns": "stable_seed",
    "askit": """SubQuestion evidence_of asked_of policy_of SearchPath finish_paths sample_from sample_paths
        best greedy_paths beam_search grow_beams rewarded returns_of same_state baselines advantages_of
        ppo_loss actions_taken""",
}
# what a copyist brings: cases of five sentences, a policy of a table, a reward
OWN = """
import torch

SUBMIT = -1


def offers(policy, states):
    return [[i for i in range(5) if i not in moves] if len(moves) < 3 else [] for _, moves in states]


def log_policy(policy, rows):
    logits = torch.full((len(rows), 6), -torch.inf)
    for n, ((case, moves), actions, *_) in enumerate(rows):
        logits[n, 0] = policy.submit[len(moves)]
        for column, a in enumerate(actions, 1):
            logits[n, column] = policy.take[case.number, a]
    return logits.log_softmax(-1)


def state_batches(rows, cfg):
    return [rows] if rows else []


def path_reward(case, moves, cfg, t=0):
    right = len(case.gold & set(moves))
    return 2 * right / (len(case.gold) + len(moves)) + float(case.gold == set(moves))
"""
USE = """
import math

import piece
import torch


class Question:
    def __init__(self, id):
        self.id = id


class Case:
    def __init__(self, number, gold):
        self.number, self.gold, self.question = number, frozenset(gold), Question(f"q{number}")


class Policy:
    cfg = None

    def __init__(self):
        torch.manual_seed(0)
        self.submit, self.take = torch.zeros(4).requires_grad_(), torch.randn(2, 5).requires_grad_()
        self.forget()

    def forget(self):
        self.cache = {}


# ppo_loss by hand: A > 0 is clipped at 1.2; A < 0 and r above: min takes -1.5; r below: clipped at .8
new = torch.tensor([math.log(1.5), math.log(1.5), math.log(.5)])
loss, stats = piece.ppo_loss(new, torch.zeros(3), torch.tensor([1.0, -1.0, -1.0]), 2, clip=.2)
assert abs(loss.item() + (1.2 - 1.5 - .8) / 2) < 1e-6 and stats["clipped_tokens"] == 2

# a beam of one is greedy; one as wide as the tree finds the likeliest of all 86 paths
policy, cases = Policy(), [Case(0, {1, 2}), Case(1, {0, 4})]
for case in cases:
    one, = piece.beam_search(policy, [case], 1)
    assert one.actions == piece.greedy_paths(policy, [case])[0].actions
    every = piece.grow_beams(policy, [case], 1000)[0]
    assert len({p.actions for p in every}) == 1 + 5 + 20 + 60
    assert abs(sum(math.exp(p.logprob) for p in every) - 1) < 1e-5
    assert piece.beam_search(policy, [case], 1000)[0].logprob == max(p.logprob for p in every)

# baselines by hand: both ways lead through {1, 2}; a policy that submits at once pays what is there
lifted = piece.policy_of
piece.policy_of = lambda policy, states: [([piece.SUBMIT], [0.0])] * len(states)
paths = [piece.SearchPath(cases[0]) for _ in range(3)]
for n, moves in enumerate([(1, 2), (2, 1, 0), ()]):
    for move in (*moves, piece.SUBMIT):
        paths[n] = paths[n].after(move, -1.0)
values = piece.baselines(policy, paths, 1)
wanted = [[.4, 2 / 3, .8], [1, 2 / 3, 2, .8], [1.4]]
for of, hand in zip(values, wanted, strict=True):
    assert max(abs(b - w) for b, w in zip(of, hand, strict=True)) < 1e-9
piece.policy_of = lifted


def update(policy, optimizer, paths, advantages):
    rows, _ = piece.actions_taken(policy, paths, advantages)
    for part in piece.state_batches(rows, None):
        _, _, chosen, old, credit = zip(*part, strict=True)
        logp = piece.log_policy(policy, part)[range(len(part)), chosen]
        loss, _ = piece.ppo_loss(logp, torch.tensor(old), torch.tensor(credit), len(paths))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


optimizer = torch.optim.Adam([policy.submit, policy.take], lr=.2)
means = []
for step in range(25):
    policy.forget()
    paths = piece.sample_paths(policy, cases, 6, 0, step)
    means.append(sum(p.reward for p in paths) / len(paths))
    update(policy, optimizer, paths, piece.advantages_of(policy, paths, Cfg, 0, step))
policy.forget()
greedy = piece.greedy_paths(policy, cases)
assert means[0] < .8 and [set(p.taken) for p in greedy] == [case.gold for case in cases], (means, greedy)
"""


def test_paths_beams_and_ppo(tmp_path):
    lift(tmp_path, "piece.py", IMPORTS, **PIECES)
    (tmp_path / "own.py").write_text(OWN)
    run(tmp_path, "class Cfg:\n    baseline_rollouts = 3\n" + USE)
