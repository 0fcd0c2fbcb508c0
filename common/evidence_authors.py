"""ASKiT's PPO as its authors' code has it, measured beside the paper's: the return of one action, and a
baseline of greedy paths after every candidate."""

import math
from dataclasses import replace

from common.evidence import ASK, SUBMIT, SearchPath


def action_returns(path, cfg, path_reward):
    """The reward of the evidence after each action, without a bonus for submitting. path_reward(case, steps,
    cfg)."""
    no_bonus = replace(cfg, bonus=0.0)
    found = []
    for t, action in enumerate(path.actions):
        steps = path.steps[: path.first + t + 1]
        found.append(path_reward(path.case, steps, no_bonus if action == SUBMIT else cfg))
    return found


def candidate_baselines(paths, policy_of, returns_after):
    """b(s) before each action of each path: mean over what may be done there, weighed by pi(a|s), of the
    return after it. Asking is left out. policy_of(states) -> [(actions, log-probs)]; returns_after(paths of
    one more action) -> returns."""
    states = list(dict.fromkeys(s for p in paths for s in p.states()))
    starts, weights = [], []
    for state, (actions, logprobs) in zip(states, policy_of(states), strict=True):
        for a, x in zip(actions, logprobs, strict=True):
            if a != ASK:
                start = SearchPath(*state, len(state[1]))
                starts.append(start.after(a, x))
                weights.append((state, math.exp(x)))
    value, total = dict.fromkeys(states, 0.0), dict.fromkeys(states, 0.0)
    for (state, weight), r in zip(weights, returns_after(starts), strict=True):
        value[state] += weight * r
        total[state] += weight
    baseline = {s: value[s] / total[s] for s in states}
    return [[baseline[s] for s in p.states()] for p in paths]
