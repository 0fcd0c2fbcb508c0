"""The numbers of a step's trees of turns (at2po.Node)."""

from common import rollout, training
from common.guards import Metric

TREES = {
    "rollout/leaves": Metric("trajectories of the step"),
    "rollout/tokens_total": Metric("tokens sampled so far; --token-budget ends training by it"),
    "rollout/chain_tokens": Metric("sampled tokens of a chain, before anything is branched"),
    "rollout/cut_off": Metric("share of trajectories that ran out of --max-response, in a turn or with a "
                              "search result that did not fit"),
    "rollout/resample_same": Metric("share of turns sampled anew that came out word for word the same"),
    "rollout/turn_differs": Metric("share of turns whose value is not their leaf's, by more than .05, in "
                                   "trees with different rewards"),
    "train/turn_entropy": Metric("how evenly updates after the first are spread over turns, 0 to 1 (Eq "
                                 "13)"),
}


def rollout_metrics(roots):
    """Means over the step's leaves, and the sampled tokens its trees really cost."""
    nodes = [n for root in roots for n in root.nodes()[1:]]
    leaves = [n for n in nodes if n.done]
    done = [leaf.trajectory for leaf in leaves]
    # chains: the trajectories that a tree begins with, before anything is branched
    chains = [leaf.trajectory for leaf in leaves if leaf.path.startswith("chain") and "." not in leaf.path]
    turns = [n.turn for n in nodes]
    same = [alike for root in roots for alike in resampled_alike(root)]
    return {
        **rollout.means(done),
        "rollout/leaves": len(done),
        "rollout/tokens": sum(len(turn.ids) for turn in turns),
        "rollout/chain_tokens": rollout.mean(t.sampled_tokens for t in chains),
        "rollout/entropy": rollout.entropy(turns),
        "rollout/cut_off": rollout.mean(t.turns[-1].stop_reason == "length" for t in done),
        "rollout/flat_groups": 1 - rollout.mean(  # of all that were sampled, DAPO's left out ones too
            training.has_spread(root.rewards()) for root in roots),
        **({"rollout/resample_same": rollout.mean(same)} if same else {}),
    }


def resampled_alike(root):
    """For each turn that was sampled anew: whether its text is that of the turn it stands beside."""
    found = []
    for n in root.nodes()[1:]:
        original, dot, _ = n.path.rpartition(".")
        if dot and n.parent.path != n.path:  # the first turn of a branch
            beside = [c.turn.text for c in n.parent.children if c.path == original]
            found += [n.turn.text == text for text in beside]
    return found


def credit_metrics(roots):
    """What turn credit adds to outcome credit; roots with values."""
    differs = []
    for root in roots:
        for leaf in root.leaves():
            differs += [abs(n.value - leaf.value) > .05 for n in leaf.lineage()]
    return {"rollout/turn_differs": rollout.mean(differs)} if differs else {}
