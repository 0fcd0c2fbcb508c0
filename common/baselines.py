"""What AT2PO is compared with: what --loss sets for GRPO, DAPO, GSPO and AEPO, DAPO's reward and choice of
questions, AEPO's rollout and advantages, Tree-GRPO's credit. GSPO's loss is AT2PO's with one turn a sequence,
that of the others GRPO's (common/training.py).

AEPO (Dong et al. 2025) is from its authors' code: 8 chains begin (their script has enable_dynamic_rollouts
off). Advantages by entropy are there, but their script computes no entropy, so they were off. The entropy is,
in their code, of the weights of the update, standardised in a micro-batch; here of those that sampled, in the
update. A turn's uncertainty is, in their code, that of its first 20 tokens' ten likeliest, compared with what
its slot first held; here of the sampled ones, compared with its chain's own first turn. A search too many
ends the chain in their code.
"""

import asyncio
import math
from dataclasses import dataclass, field

import torch

from common import distributed, training


@dataclass(frozen=True)
class Baseline:
    """What a word of --loss sets: defaults of flags, and what no flag sets."""

    flags: dict = field(default_factory=dict)
    token_mean: bool = False  # the loss is the mean of all tokens; False = of sequences, AT2PO's Eq 6
    dual_clip: float = 0.0    # bound of a token's term where its advantage is negative, 0 = none
    soft_clip: bool = False   # tokens past the clip window keep a gradient


BASELINES = {  # AT2PO, App. B.4; the authors' GRPO has a token mean and a dual clip of 3
    "grpo": Baseline(dict(clip_low=0.2, clip_high=0.2, kl_coef=1e-3)),
    "dapo": Baseline(dict(clip_low=0.2, clip_high=0.28), token_mean=True),
    "gspo": Baseline(dict(clip_low=3e-4, clip_high=4e-4)),
    # authors' code; App. B.4 has lost its numbers
    "aepo": Baseline(
        dict(clip_low=0.2, clip_high=0.2, chains=8, credit="outcome"),
        token_mean=True,
        dual_clip=3.0,
        soft_clip=True,
    ),
}


# ---------------------------------------------------------------- DAPO (Yu et al. 2025)

DRAWN = 3  # questions sampled for each that is learned from


def overlong_penalty(length, limit):
    """DAPO's soft punishment (Yu et al. 2025, Eq 13): nothing up to limit - buffer tokens, then down to -1.
    App. B.4 has lost the buffer's size; 2,000 are in a part of the authors' scripts that is off, and a
    seventh of the limit in the embedded world.

    >>> [overlong_penalty(n, 700) for n in (600, 650, 700)], overlong_penalty(5192, 6192)
    ([0.0, -0.5, -1.0], -0.5)
    """
    buffer = 2000 if limit > 2000 else limit / 7
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def chosen_to_learn(roots, most):
    """Dynamic sampling (DAPO, Eq 11): of a step's trees the first `most` of which some answers are right and
    some wrong, and flat ones where there are not enough. What the overlong penalty alone tells apart is not
    learned from."""
    informative, flat = [], []
    for root in roots:
        if training.has_spread([leaf.trajectory.info.em_valid for leaf in root.leaves()]):
            informative.append(root)
        elif not training.has_spread(root.rewards()):
            flat.append(root)
    return [*informative, *flat][:most]


# ---------------------------------------------------------------- AEPO (Dong et al. 2025)

BRANCHING = dict(threshold=.5, entropy=.2, penalty=.05)  # authors' code
ENTROPY_WEIGHT = .2  # authors' code


async def grow_branches(advance, root, chains, group_size, rng, vocabulary):
    """AEPO's group, grown a turn at a time: `chains` begin, and after each search a chain may go on twice.
    That is likelier the more uncertain its turn was than its first, and less likely the more often in a row
    the question has branched. Once all have ended, fresh chains fill the group, one by one."""
    def uncertainty(turn):  # of the first 20 tokens, in units of a uniform distribution's entropy
        return -sum(turn.logprobs[:20]) / math.log(vocabulary)

    going = {f"chain{m}": root for m in range(min(chains, group_size))}  # path -> where it stands
    begun, in_a_row = len(going), 0
    first = {}  # path -> uncertainty of its own first turn
    while going:
        next_turns = [advance(node, path) for path, node in going.items()]
        nodes = await asyncio.gather(*next_turns)
        going = {n.path: n for n in nodes if not n.done}
        new = {}
        for path, node in going.items():
            if begun + len(new) == group_size:
                break
            now = uncertainty(node.turn)
            more = now - first.setdefault(path, now)
            drawn = rng.random() + BRANCHING["entropy"] * more
            drawn *= max(0, 1 - BRANCHING["penalty"] * in_a_row)
            if drawn >= BRANCHING["threshold"]:
                new[f"{path}.{len(node.turns())}"] = node
        if not going and begun < group_size:
            new = {f"fresh{begun}": root}
        in_a_row = in_a_row + 1 if new else 0
        begun += len(new)
        going |= new


def balance_entropy(batches):
    """AEPO: A (1 + .2 z), z being the entropy of the token's distribution, standardised over the sampled
    tokens that an update learns from: what the policy was uncertain of counts for more."""
    learned = [b for b in batches if b.weight]
    entropies = distributed.of_all_ranks(b.entropies[b.response_mask] for b in learned)
    mean = float(entropies.mean())
    std = float(entropies.std(correction=0)) or 1.0
    for b in batches:
        z = torch.where(b.response_mask, (b.entropies - mean) / std, 0.0)
        b.advantages = b.advantages * (1 + ENTROPY_WEIGHT * z)


# ---------------------------------------------------------------- credit: Tree-GRPO

def values_within_chains(root, leaf_values):
    """{leaf: its value among the leaves below the same first turn}; 0 where it is the only one (Tree-GRPO, Ji
    et al. 2025: its tree is what grew from one chain). leaf_values(rewards): standardises them."""
    found = {}
    for first in root.children:
        leaves = first.leaves()
        rewards = first.rewards()
        found |= dict(zip(leaves, leaf_values(rewards), strict=True))
    return found
