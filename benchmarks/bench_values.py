"""What a turn is worth, by a tree and by many rollouts: how far AT2PO's values are to be trusted.

    python -m benchmarks.bench_values                          # about ten minutes on one core
    python -m benchmarks.bench_values --world plain --questions 4 --rollouts 16

Grows trees with the policy that training starts from, plays on from every turn --rollouts times, and prints
the correlation of each value rule of Table 2 (and of a leaf's own outcome) with the share of these that end
right; for the paper's tree of 22 leaves and for one with fewer chains. Beside it: how often a turn's value is
not its leaf's (where turn credit and outcome credit differ), and how often a turn sampled anew is the same
word for word, expanded by entropy or at random.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

import at2po
from common import rollout, run, tree_metrics
from common.files import Progress, table, write_json
from common.world import hard
from common.world.splits import world_split

SHAPES = ((10, 6, 2), (4, 6, 3))  # M, N, L: the paper's, and that of --world hard
RULES = ("child-weighted", "child-mean", "leaf-mean")


def worth_of_turns(policy, split, roots, questions, cfg, rollouts):
    """{node: share of `rollouts` from the state behind it that end right} of all turns but answers."""
    search = rollout.BatchedSearch(split.retriever)
    agents, owners = [], []
    for root, question in zip(roots, questions, strict=True):
        prompt_ids = at2po.render_prompt(policy.tokenizer, question.question, cfg.prompt_form)
        for node in root.nodes()[1:]:
            if node.done:
                continue
            for k in range(rollouts):
                start = at2po.Node(node.turn, node.parent)  # the tree itself stays as it is
                path = f"{node.path}/{len(node.lineage())}/worth{k}"
                agents.append(ends_right(policy, search, question, prompt_ids, start, path, cfg))
                owners.append(node)
    with Progress("playing on from every turn") as progress:
        right = rollout.run_agents(agents, policy.engine, search, progress)
    worth = {}
    for node, em in zip(owners, right, strict=True):
        worth.setdefault(node, []).append(em)
    return {node: rollout.mean(ems) for node, ems in worth.items()}


async def ends_right(policy, search, question, prompt_ids, start, path, cfg):
    seed = rollout.stable_seed(cfg.seed, "worth", question.id)
    leaf = await at2po.play(policy, search, prompt_ids, start, path, cfg, seed, cfg.temperature)
    made = rollout.Trajectory(question.id, prompt_ids, leaf.turns())
    return at2po.score(made, question, cfg).reward


def correlations(roots, worth, cfg):
    """{rule: correlation of its values with `worth`, over the turns of trees whose leaves differ}"""
    found = {}
    for rule in RULES:
        ruled = replace(cfg, value=rule)
        learned = [root for root in roots if at2po.assign_advantages(root, ruled)]
        values = {}
        for root in learned:
            for node in root.nodes():
                values[node] = node.value
        found[rule] = within_trees(learned, worth, values)
    outcome = {}
    for root in learned:
        for leaf in root.leaves():
            for n in leaf.lineage():
                outcome.setdefault(n, leaf.trajectory.reward)  # of one leaf below it
    found["outcome of one leaf"] = within_trees(learned, worth, outcome)
    return found


def within_trees(roots, worth, values):
    """Correlation over turns, both sides less their tree's mean: which turn of a tree is better."""
    xs, ys = [], []
    for root in roots:
        nodes = [n for n in root.nodes() if n in worth]
        if len(nodes) < 2:
            continue
        x = np.array([values[n] for n in nodes])
        y = np.array([worth[n] for n in nodes])
        xs.append(x - x.mean())
        ys.append(y - y.mean())
    xs = np.concatenate(xs)
    ys = np.concatenate(ys)
    return float(np.corrcoef(xs, ys)[0, 1])


def mechanisms(roots, cfg):
    """[share of turns whose value is not their leaf's, share of turns sampled anew that came out the same]"""
    learned = [root for root in roots if at2po.assign_advantages(root, cfg)]
    differs = tree_metrics.credit_metrics(learned)["rollout/turn_differs"]
    alike = []
    for root in roots:
        alike += tree_metrics.resampled_alike(root)
    return [f"{differs:.2f}", f"{rollout.mean(alike):.2f}"]


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--world", default="hard")
    parser.add_argument("--questions", type=int, default=14)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    base = at2po.parse_args(["--world", args.world])
    policy = run.load_policy(base, at2po.tiny_policy(base), trains=False)
    policy.engine.sync(policy.model)
    split = world_split("train", questions=200, level=hard.parse(args.world))
    questions = split.questions[:args.questions]
    rows = []
    for chains, expand, rounds in SHAPES:
        shape = f"{chains}, {expand}, {rounds}"
        cfg = replace(base, chains=chains, expand=expand, rounds=rounds)
        for expansion in ("entropy", "random"):
            cfg = replace(cfg, expansion=expansion)
            roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, 0)
            numbers = [shape, expansion, *mechanisms(roots, cfg)]
            if expansion == "entropy":
                worth = worth_of_turns(policy, split, roots, questions, cfg, args.rollouts)
                found = correlations(roots, worth, cfg)
                numbers += [f"{r:.2f}" for r in found.values()]
            else:
                numbers += [""] * (len(RULES) + 1)
            rows.append(numbers)
    header = ["M, N, L", "expansion", "value not the leaf's", "same turn again", *found]
    table(f"{len(questions)} trees, correlation with {args.rollouts} rollouts a turn", header, rows)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows})


if __name__ == "__main__":
    main()
