"""What you bring: cases of five sentences, a policy that is a table, and a reward."""
import torch

SUBMIT = -1


def offers(policy, states):
    offered = []
    for _, moves in states:
        left = [i for i in range(5) if i not in moves]
        if len(moves) == 3:
            left = []
        offered.append(left)
    return offered


def log_policy(policy, rows):
    logits = torch.full((len(rows), 6), -torch.inf)
    for n, ((case, moves), actions, *_) in enumerate(rows):
        logits[n, 0] = policy.submit[len(moves)]
        for column, a in enumerate(actions, 1):
            logits[n, column] = policy.take[case.number, a]
    return logits.log_softmax(-1)


def state_batches(rows, cfg):
    return [rows] if rows else []


def path_return(case, moves, cfg, t=0):
    right = len(case.gold & set(moves))
    f1 = 2 * right / (len(case.gold) + len(moves))
    return f1 + float(case.gold == set(moves))
