"""What at2po.py compares AT2PO with: GRPO, DAPO, GSPO, AEPO and Tree-GRPO, at the same cost in tokens; and
Figure 8's control. GSPO's loss is AT2PO's with one turn per sequence; the others have GRPO's
(common/training.py).

AEPO (Dong et al. 2025) is from its authors' code, with App. B.4's numbers: 8 chains begin (their script has
enable_dynamic_rollouts off). Their code has advantages by entropy, their script leaves them off; here they
are on. Their entropy is the updated weights', standardised in a micro-batch; here the sampling weights', in
an update. Their uncertainty of a turn is that of its first 20 tokens' ten likeliest, compared with what its
slot first held; here of the sampled ones, compared with its chain's own first turn. A search too many ends
the chain in their code.
"""

import asyncio
import math
from dataclasses import dataclass, field, replace

import torch

from common import chat, flags, training


@dataclass(frozen=True)
class Baseline:
    """What a word of --loss sets: defaults of flags, and what no flag sets."""

    flags: dict = field(default_factory=dict)
    token_mean: bool = False  # the loss is the mean of all tokens; False = of sequences, AT2PO's Eq 6
    dual_clip: float = 0.0    # bound of a token's term where its advantage is negative, 0 = none
    soft_clip: bool = False   # tokens past the clip window keep a gradient


BASELINES = {  # AT2PO, App. B.4; the authors' GRPO has a token mean and a dual clip of 3
    "grpo": Baseline(dict(expansion="none", clip_low=0.2, clip_high=0.2, kl_coef=1e-3)),
    "dapo": Baseline(dict(expansion="none", clip_low=0.2, clip_high=0.28), token_mean=True),
    "gspo": Baseline(dict(expansion="none", clip_low=3e-4, clip_high=4e-4)),
    # App. B.4's beam_size 2: a chain goes on twice
    "aepo": Baseline(dict(expansion="branches", clip_low=0.2, clip_high=0.2, chains=8, credit="outcome"),
                     token_mean=True, dual_clip=3.0, soft_clip=True),
}
NO_TREE = ("none", "branches")  # expansions that make a baseline's group; the others a tree
TOKEN_RATIOS = ("grpo", "dapo", "aepo")  # GSPO has one ratio per sequence
DRAWN_PER_LEARNED = 3  # DAPO: questions sampled for each that is learned from


def defaults(given, in_world=False):
    """{flag: default} that --loss sets. given: flags as typed.

    >>> defaults({"--loss": "gspo"}), defaults({}, in_world=True)
    ({'expansion': 'none', 'clip_low': 0.0003, 'clip_high': 0.0004}, {})
    """
    loss = given.get("--loss", "atpo")
    baseline = BASELINES.get(loss, Baseline())
    found = dict(baseline.flags)
    if in_world and loss == "gspo":  # ten times the paper's, as for ATPO
        found |= dict(clip_low=3e-3, clip_high=4e-3)
    return found


def check(cfg):
    """Refuses a KL term where the loss has none, and a question with one sample."""
    if cfg.kl_coef and cfg.loss != "grpo":
        flags.refuse("kl_coef", cfg.kl_coef, f"goes with --loss grpo; {cfg.loss} has no KL term (Eq 8-11)")
    if cfg.retokenize and cfg.sampler_correction != "none":
        flags.refuse("sampler_correction", cfg.sampler_correction, "not with --retokenize: nobody sampled it")
    if cfg.expansion in NO_TREE and cfg.group_size == 1:
        flags.refuse("group_size", 1, "at least 2: a group's samples are compared")
    if cfg.expansion not in NO_TREE and cfg.chains + cfg.rounds * cfg.expand == 1:
        flags.refuse("chains", 1, "at least 2 leaves per tree: they are compared")


def token_loss(logprobs, batch, advantages, cfg, num_sequences, num_tokens):
    """(loss, stats) of GRPO, DAPO or AEPO for a micro-batch; the mini-batch has these sequences, tokens."""
    baseline = BASELINES[cfg.loss]
    weights = training.sequence_weights(batch.response_mask, num_sequences)
    if baseline.token_mean:
        weights = 1 / num_tokens
    return training.grpo_loss(
        logprobs, batch.old_logprobs, advantages, batch.response_mask, weights, cfg.clip_low, cfg.clip_high,
        cfg.kl_coef, batch.ref_logprobs, baseline.dual_clip, baseline.soft_clip)


class TokenBudget:
    """Sampled tokens at which training ends (--token-budget). auto: what chains in groups of --group-size
    would have sampled in all steps, at the mean length that this run's own chains have so far. So a tree and
    a group are compared at equal cost. `spent` is kept in checkpoints.

    questions_per_step: that are sampled; DAPO learns from a part of them."""

    def __init__(self, cfg):
        self.cfg = cfg
        self.questions_per_step = cfg.questions_per_step
        if cfg.loss == "dapo":
            self.questions_per_step *= DRAWN_PER_LEARNED
        self.spent = {"tokens": 0, "baseline_tokens": 0.0}

    def limit(self, step):
        """Tokens, as far as it is known after a step; infinite = none."""
        if self.cfg.token_budget != "auto":
            return self.cfg.token_budget or math.inf
        if step == 0:
            return math.inf
        return self.cfg.steps * self.spent["baseline_tokens"] / step

    def share(self, step):
        """How much of the training is done after a step, of 1."""
        return max(step / max(1, self.cfg.steps), self.spent["tokens"] / self.limit(step))

    def add(self, row):
        """Counts a step; row: its metrics."""
        self.spent["tokens"] += row["rollout/tokens"]
        trajectories = self.questions_per_step * self.cfg.group_size
        self.spent["baseline_tokens"] += trajectories * row["rollout/chain_tokens"]
        row["rollout/tokens_total"] = self.spent["tokens"]


def retokenize(tokenizer, root):
    """--retokenize, Figure 8's control: a tree's turns as their texts are encoded, which need not be what was
    sampled (App. C). Their entropies stay."""
    for node in root.nodes()[1:]:
        ids = chat.encode(tokenizer, tokenizer.decode(node.turn.ids))[1]
        if ids != node.turn.ids:
            node.turn = replace(node.turn, ids=ids, logprobs=[-node.turn.entropy] * len(ids))


# ---------------------------------------------------------------- DAPO (Yu et al. 2025)

def overlong_penalty(length, limit):
    """DAPO's soft punishment (Yu et al. 2025, Eq 13): nothing up to limit - buffer tokens, then down to -1.
    The buffer has 2,000 tokens (App. B.4), and a seventh of the limit in the embedded world.

    >>> [overlong_penalty(n, 700) for n in (500, 650, 700)], overlong_penalty(5192, 6192)
    ([0.0, -0.5, -1.0], -0.5)
    """
    buffer = 2000 if limit > 2000 else limit / 7
    return max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def learned_from(roots, cfg):
    """The trees that a step learns from: all, but for DAPO. It first subtracts the overlong penalty from
    rewards, in place, so that the step's metrics see it, too. Its dynamic sampling (Eq 11) then takes the
    first trees of which some answers are right and some wrong, and flat ones where there are not enough. It
    does not learn from what the overlong penalty or the format alone tells apart."""
    if cfg.loss != "dapo":
        return roots
    informative, flat = [], []
    for root in roots:
        for leaf in root.leaves():
            length = leaf.trajectory.length - len(leaf.trajectory.prompt_ids)
            leaf.trajectory.reward += overlong_penalty(length, cfg.max_response)
        if training.has_spread([leaf.trajectory.info.em_valid for leaf in root.leaves()]):
            informative.append(root)
        elif not training.has_spread(root.rewards()):
            flat.append(root)
    return [*informative, *flat][:cfg.questions_per_step]


# ---------------------------------------------------------------- AEPO (Dong et al. 2025)

# App. B.4: branch_probability .5, entropy_weight .2; penalty: authors' code
BRANCHING = dict(threshold=.5, entropy=.2, penalty=.05)
ENTROPY_WEIGHT = .2  # in the advantages | authors' code


async def grow_aepo(next_turn, root, cfg, rng, vocabulary):
    """The root of AEPO's group, grown a turn at a time: --chains begin, and after each search a chain may go
    on twice. That is likelier the more uncertain its turn was than its first, and less likely the more often
    in a row the question has branched. Once all have ended, fresh chains fill the group, one by one."""
    def uncertainty(turn):  # of the first 20 tokens, in units of a uniform distribution's entropy
        return -sum(turn.logprobs[:20]) / math.log(vocabulary)

    going = {f"chain{m}": root for m in range(min(cfg.chains, cfg.group_size))}  # sample -> where it stands
    begun, in_a_row = len(going), 0
    first = {}  # sample -> uncertainty of its own first turn
    while going:
        next_turns = [next_turn(node, name) for name, node in going.items()]
        nodes = await asyncio.gather(*next_turns)
        going = {n.name: n for n in nodes if not n.done}
        new = {}
        for name, node in going.items():
            if begun + len(new) == cfg.group_size:
                break
            now = uncertainty(node.turn)
            more = now - first.setdefault(name, now)
            drawn = rng.random() + BRANCHING["entropy"] * more
            drawn *= max(0, 1 - BRANCHING["penalty"] * in_a_row)
            if drawn >= BRANCHING["threshold"]:
                new[f"{name}.{len(node.turns())}"] = node
        if not going and begun < cfg.group_size:
            new = {f"fresh{begun}": root}
        in_a_row = in_a_row + 1 if new else 0
        begun += len(new)
        going |= new
    return root


def balance_entropy(loss, batches):
    """AEPO alone: A (1 + .2 z), z being the entropy of the token's distribution, standardised over the
    sampled tokens that an update learns from: what the policy was uncertain of counts for more."""
    if loss != "aepo" or not batches:
        return
    entropies = training.sampled(batches, lambda b: b.entropies)
    mean = float(entropies.mean())
    std = float(entropies.std(correction=0)) or 1.0
    for b in batches:
        z = torch.where(b.response_mask, (b.entropies - mean) / std, 0.0)
        b.advantages = b.advantages * (1 + ENTROPY_WEIGHT * z)


# ---------------------------------------------------------------- Tree-GRPO (Ji et al. 2025)
# --loss grpo --expansion random --credit tree-grpo

def tree_grpo_credit(root, leaf_values):
    """Gives all turns of a trajectory its leaf's value in the tree, plus its value among the leaves below the
    same first turn (their tree is what grew from one chain); nothing more where it is the only one.
    leaf_values(rewards): standardises them."""
    for first in root.children:
        leaves = first.leaves()
        within = leaf_values(first.rewards())
        for leaf, value in zip(leaves, within, strict=True):
            leaf.trajectory.advantages = [leaf.value + value] * len(leaf.lineage())
