"""Does entropy find the turns where it matters? Grows AT2PO's trees with a policy, without training, and
looks at the turns that were sampled again:

    python -m benchmarks.bench_trees QUESTIONS FLAGS OF at2po.py

Intervals: 95 %, bootstrap over trees. right: whether a turn's own chain answered right, whatever was begun
from it later.
"""

import sys

import numpy as np

import at2po
from common import splits
from common.run import Run, program


def heaviest(children, rule):
    """The largest weight of Eq 3, over an equal one."""
    return len(children) * max(at2po.child_weights(children, rule))


def numbers_of(root):
    """{what: its terms} of a tree; of a correlation pairs of numbers."""
    right = {leaf.name: leaf.trajectory.info.em_valid for leaf in root.leaves()}
    inner = [n for n in root.nodes()[1:] if not n.done]
    shared = [n.children for n in inner if len(n.children) > 1]
    chosen, between = [], []  # pairs (turn, fresh sibling), (fresh sibling, another)
    for n in inner:
        # a sibling's chain is named after the turn's: chain3, chain3.0-2
        fresh = [c for c in n.parent.children if c.name.rpartition(".")[0] == n.name]
        chosen += [(n, sibling) for sibling in fresh]
        if len(fresh) > 1:
            between.append(fresh[:2])
    gain = [right[n.name] - right[s.name] for n, s in chosen]
    differs = [bool(difference) for difference in gain]
    entropies = [n.turn.entropy for n, _ in chosen]
    return {
        "inner turns with one child": [len(n.children) == 1 for n in inner],
        "heaviest child over equal: Eq 3": [heaviest(c, "child-weighted") for c in shared],
        "heaviest child over equal: softmax": [heaviest(c, "child-softmax") for c in shared],
        "a fresh sibling is the same turn": [n.turn.ids == s.turn.ids for n, s in chosen],
        "chosen and fresh end differently": differs,
        "right: chosen turn - fresh sibling": gain,
        "right: fresh - another fresh": [right[a.name] - right[b.name] for a, b in between],
        "A: chosen turn - fresh sibling": [n.advantage - s.advantage for n, s in chosen],
        "correlation of H, ending differently": list(zip(entropies, differs, strict=True)),
    }


def statistic(trees):
    """The mean of the terms of some trees; of pairs the correlation."""
    values = np.array(sum(trees, []), dtype=float)
    if values.ndim == 2:
        return float(np.corrcoef(values.T)[0, 1])
    return float(values.mean())


@program()
def main(argv=None):
    limit, *given = argv or sys.argv[1:]
    cfg = at2po.parse_args(given)
    split, _ = splits.load_splits(cfg, at2po.PAPER_EVAL)
    source = cfg.checkpoint or cfg.model or at2po.tiny_policy(cfg)
    policy = Run(cfg).policy(source, trains=False)
    policy.engine.sync(policy.model)
    questions = split.questions[:int(limit)]
    roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, step=1)
    at2po.score_trees(roots, questions, cfg)
    for root in roots:
        at2po.assign_advantages(root, cfg)
    found = [numbers_of(root) for root in roots]
    draws = np.random.default_rng(0).integers(0, len(roots), (2000, len(roots)))
    for name in found[0]:
        terms = [of_tree[name] for of_tree in found]
        values = [statistic([terms[i] for i in draw]) for draw in draws]
        low, high = np.quantile(values, [.025, .975])
        number = sum(len(of_tree) for of_tree in terms)
        print(f"{name:38} {statistic(terms):+.3f} [{low:+.3f}, {high:+.3f}]  of {number}")


if __name__ == "__main__":
    main()
