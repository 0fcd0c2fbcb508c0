"""ASKiT's PPO as its authors' code has it, measured beside the paper's: the return of one action, and a
baseline of greedy paths after every candidate."""

import math
from dataclasses import replace

from common.evidence import ASK, SUBMIT, SearchPath


def authors_credit(paths, cfg, path_reward, returns_of, policy_of, finish):
    """(R, b(s)) of every action of every path. --returns path: of whole paths, --returns action: of the
    evidence after one action. path_reward(case, steps, cfg, t); returns_of(path, cfg) -> R of whole paths;
    policy_of(states) -> [(actions, log-probs)]; finish(paths): takes them greedily to their ends."""
    def action_returns(path, cfg):
        """The reward of the evidence after each action, without a bonus for submitting."""
        no_bonus = replace(cfg, bonus=0.0)
        found = []
        for t, action in enumerate(path.actions, path.first):
            own = no_bonus if action == SUBMIT else cfg
            found.append(path_reward(path.case, path.steps[: t + 1], own, t))
        return found

    own_returns = action_returns if cfg.returns == "action" else returns_of

    def returns_after(starts):
        ends = starts if cfg.returns == "action" else finish(starts)
        return [own_returns(p, cfg)[0] for p in ends]

    return [own_returns(p, cfg) for p in paths], candidate_baselines(paths, policy_of, returns_after)


def candidate_baselines(paths, policy_of, returns_after):
    """b(s) before each action of each path: mean over what may be done there, weighed by pi(a|s), of the
    return after it. Asking is left out. returns_after(paths of one more action) -> returns."""
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
