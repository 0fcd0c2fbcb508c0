"""Trees of turns (at2po.Node) as records for the page.

label(turn) -> what a turn is called there; why(trajectory, question) -> lines that say what led to its
reward.
"""

from common.page import record


def prediction(trajectory, question, label, why):
    """A row of eval_<set>.json."""
    nodes = []
    for k, turn in enumerate(trajectory.turns):
        parents = [k - 1] if k else []
        said = label(turn)
        node = record.turn_node(k, parents, turn, label=said)
        nodes.append(node)
    path = list(range(len(nodes)))
    reasons = why(trajectory, question)
    done = record.outcome(trajectory, path, reasons)
    shown = record.group(question, nodes, [done])
    row = {"id": question.id, **vars(trajectory.info)}
    row["tokens"] = trajectory.sampled_tokens
    return row | shown


def sample_record(policy, roots, questions, step, cfg, turn_ratios, label, why):
    """The step's first tree with right and wrong leaves: every node with value, advantage, and how far the
    step has moved it (ratio of turn probabilities, new to sampled); ids are those trained on."""
    rewards = [root.rewards() for root in roots]
    shown = record.first_with_spread(rewards)
    root, question = roots[shown], questions[shown]
    leaves = root.leaves()
    number = {node: i for i, node in enumerate(root.nodes())}
    ratios = turn_ratios(policy.model, leaves, cfg)
    above = record.root_node()
    nodes = [above | {"value": root.value}]
    for n in root.nodes()[1:]:
        leaf = next(leaf for leaf in leaves if n in leaf.lineage())
        k = len(n.lineage()) - 1
        ratio = ratios[leaf][k]
        advantages = leaf.trajectory.advantages
        advantage = advantages[k] if advantages else 0.0
        more = {
            "label": label(n.turn),
            "value": n.value,
            "advantage": advantage,
            "ratio": ratio,
            "branched": n.resamples,
        }
        if cfg.loss == "atpo":  # whose ratios are a turn's
            too_high = ratio > 1 + cfg.clip_high and advantage > 0
            too_low = ratio < 1 - cfg.clip_low and advantage < 0
            more["clip window"] = "past" if too_high or too_low else "inside"
        parents = [number[n.parent]]
        own = number[n]
        node = record.turn_node(own, parents, n.turn, policy.tokenizer, **more)
        nodes.append(node)
    done = []
    for leaf in leaves:
        lineage = leaf.lineage()
        path = [0] + [number[n] for n in lineage]
        reasons = why(leaf.trajectory, question)
        done.append(record.outcome(leaf.trajectory, path, reasons))
    first = leaves[0].trajectory
    more = {"step": step, "prompt_ids": first.prompt_ids}
    return record.group(question, nodes, done, **more)
