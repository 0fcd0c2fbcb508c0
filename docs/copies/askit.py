import math

import torch

import askit as piece


class Cfg:
    baseline_rollouts = 3


class Question:
    def __init__(self, id):
        self.id = id


class Case:
    def __init__(self, number, gold):
        self.number = number
        self.gold = frozenset(gold)
        self.question = Question(f"q{number}")


class Policy:
    cfg = None

    def __init__(self):
        torch.manual_seed(0)
        self.submit = torch.zeros(4).requires_grad_()
        self.take = torch.randn(2, 5).requires_grad_()
        self.forget()

    def forget(self):
        self.cache = {}


def same(found, wanted):
    return all(abs(a - b) < 1e-6 for a, b in zip(found, wanted, strict=True))


# ppo_loss by hand: A > 0 is clipped at 1.2; A < 0 and r above: min takes -1.5; r below: clipped at .8
new = torch.tensor([1.5, 1.5, .5]).log()
advantages = torch.tensor([1.0, -1.0, -1.0])
loss, stats = piece.ppo_loss(new, torch.zeros(3), advantages, 2, clip=.2)
assert same([loss.item()], [-(1.2 - 1.5 - .8) / 2])
assert stats["clipped_tokens"] == 2

# a beam of one is greedy; one as wide as the tree finds the likeliest of all 86 paths
policy = Policy()
cases = [Case(0, {1, 2}), Case(1, {0, 4})]
for case in cases:
    one, = piece.beam_search(policy, [case], 1)
    greedy, = piece.greedy_paths(policy, [case])
    assert one.actions == greedy.actions
    every = piece.grow_beams(policy, [case], 1000)[0]
    assert len({path.actions for path in every}) == 1 + 5 + 20 + 60
    assert same([sum(math.exp(path.logprob) for path in every)], [1])
    best, = piece.beam_search(policy, [case], 1000)
    assert best.logprob == max(path.logprob for path in every)

# baselines by hand: both ways lead through {1, 2}; a policy that submits at once pays what is there
lifted = piece.policy_of
piece.policy_of = lambda policy, states: [([piece.SUBMIT], [0.0])] * len(states)
paths = []
for moves in (1, 2), (2, 1, 0), ():
    path = piece.SearchPath(cases[0])
    for move in (*moves, piece.SUBMIT):
        path = path.after(move, -1.0)
    paths.append(path)
first, second, third = piece.baselines(policy, paths, 1)
assert same(first, [.4, 2 / 3, .8])
assert same(second, [1, 2 / 3, 2, .8])
assert same(third, [1.4])
piece.policy_of = lifted


def update(policy, optimizer, paths, advantages):
    rows = piece.actions_taken(policy, paths, advantages)
    for part in piece.state_batches(rows, None):
        _, _, chosen, old, credit = zip(*part, strict=True)
        logp = piece.log_policy(policy, part)
        logp = logp[range(len(part)), chosen]
        loss, _ = piece.ppo_loss(logp, torch.tensor(old), torch.tensor(credit), len(paths))
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


optimizer = torch.optim.Adam([policy.submit, policy.take], lr=.2)
means = []
for step in range(25):
    policy.forget()
    paths = piece.sample_paths(policy, cases, 6, 0, step)
    means.append(sum(path.reward for path in paths) / len(paths))
    advantages = piece.advantages_of(policy, paths, Cfg, 0, step)
    update(policy, optimizer, paths, advantages)
policy.forget()
for path in piece.greedy_paths(policy, cases):
    assert set(path.taken) == path.case.gold, path.taken
assert means[0] < .8, means
print("mean reward by step", [round(mean, 2) for mean in means])
