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
    rows = piece.actions_taken(policy, paths, advantages)
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
print("mean reward by step", [round(mean, 2) for mean in means])
