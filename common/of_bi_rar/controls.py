"""Two rewards that tell what makes a difference in the cascade: its length, and whose distances it has."""

import random

SEARCH_COST = .05


def charge_searches(right):
    """--stage length: exact match less .05 per search. right: [(trajectory, question)]."""
    for t, _ in right:
        t.reward = 1 - SEARCH_COST * t.info.searches


def permuted(per_trajectory, seed):
    """--stage shuffled: lists of the same lengths, with the distances of all of them permuted at random."""
    shuffled = [d for distances in per_trajectory for d in distances]
    random.Random(seed).shuffle(shuffled)
    found = []
    for distances in per_trajectory:
        found.append(shuffled[:len(distances)])
        shuffled = shuffled[len(distances):]
    return found
