"""Trees of turns (at2po.Node) in numbers, and as records for the page. cfg is at2po.Config."""

import re

import torch

from common import model as models
from common import rollout, tool_search, training
from common.guards import POLICY, Metric
from common.page import record

# ---------------------------------------------------------------- metrics of a step

METRICS = POLICY | {
    "rollout/leaves": Metric("trajectories of the step"),
    "rollout/tokens_total": Metric("tokens sampled so far; --token-budget ends training by it"),
    "rollout/chain_tokens": Metric("sampled tokens of a chain, before anything is branched"),
    "rollout/cut_off": Metric("share of trajectories that ran out of --max-response, in a turn or with a "
                              "search result that did not fit"),
    "train/turn_entropy": Metric("how evenly updates after the first are spread over turns, 0 to 1 (Eq 13)"),
}


def step_metrics(roots, meter, retriever):
    """A step's row: of its trees, of its updates (training.Meter), of a search server."""
    row = meter.means() | rollout_metrics(roots) | rollout.search_repairs(retriever)
    if "spreads" in meter.total:
        row["train/turn_entropy"] = rollout.mean(meter.total["spreads"])
    return row


def rollout_metrics(roots):
    """Means over the step's leaves, and the sampled tokens its trees really cost."""
    nodes = [n for root in roots for n in root.nodes()[1:]]
    turns = [n.turn for n in nodes]
    leaves = [n for n in nodes if n.done]
    done = [leaf.trajectory for leaf in leaves]
    # the trajectories that a tree begins with, before anything is branched
    chains = [leaf.trajectory for leaf in leaves if leaf.name.startswith("chain") and "." not in leaf.name]
    return rollout.means(done) | {
        "rollout/leaves": len(done),
        "rollout/tokens": sum(len(turn.ids) for turn in turns),
        "rollout/chain_tokens": rollout.mean(t.sampled_tokens for t in chains),
        "rollout/entropy": rollout.entropy(turns),
        "rollout/cut_off": rollout.mean(t.turns[-1].stop_reason == "length" for t in done),
        # of all that were sampled, DAPO's left out ones too
        "rollout/flat_groups": 1 - rollout.mean(training.has_spread(root.rewards()) for root in roots),
    }


def show_results(folder, averages, after, before=None):
    """Averages over several sets, and a table of what training moved. after, before: of Run.evaluate."""
    from common import report
    if before:
        report.show_averages(before, averages, ", before training")
    report.show_averages(after, averages)
    if before:
        compared = {"before": [(folder, "before")], "after": [folder]}
        columns = {"searches": ("eval", "searches", ".2f")}
        report.method_table(None, str(folder), compared, "before", columns=columns, means=False)


# ---------------------------------------------------------------- records

def how(node, root, value_rule, advantage_rule, credit):
    """How a turn's value and advantage came about (Eq 3, Table 2), with the numbers put in.

    value_rule, advantage_rule, credit: at2po.Config's."""
    rewards = root.rewards()
    if not training.has_spread(rewards):
        return [f"all {len(rewards)} leaves have reward {rewards[0]:g}: no advantage, nothing to learn"]
    if not any(leaf.value for leaf in root.leaves()):
        return ["the step does not learn from this tree (--loss dapo chooses)"]
    mean = sum(rewards) / len(rewards)
    found = f"V = {node.value:.3f}"
    if node.done:
        # std, read back from the farthest leaf: the least rounding
        far = max(root.leaves(), key=lambda leaf: abs(leaf.value))
        std = (far.trajectory.reward - mean) / far.value
        numbers = f"({node.trajectory.reward:g} - {mean:.3f}) / {std:.3f}"
        lines = [f"{found} = (R - mean) / std of {len(rewards)} leaves = {numbers}"]
    elif len(node.children) == 1:
        lines = [f"{found}, that of its one child"]
    else:
        lines = [f"{found} = {weighted(node, value_rule)}"]
    kinds = {
        "value": "V",
        "td": f"V - V(parent) = {node.value:.3f} - ({node.parent.value:.3f})",
        "global": f"V - V(root) = {node.value:.3f} - ({root.value:.3f})",
        "combined": "(V - V(parent)) + (V - V(root)) = "
                    f"{node.value - node.parent.value:.3f} + ({node.value - root.value:.3f})",
    }
    if credit == "turn":
        lines.append(f"A = {node.advantage:.3f} = {kinds[advantage_rule]}")
    elif credit == "outcome":
        lines.append("A = V of the leaf, for all turns before it (--credit outcome)")
    return lines


WEIGHTS = {  # --value
    "child-weighted": "H / sum of H",
    "child-softmax": "softmax(H)",
    "child-mean": "1/n",
    "leaf-mean": "share of the leaves",
}


def weighted(node, rule):
    """The sum of node_value in words; children of one value are one term."""
    terms = {}
    for child, weight in zip(node.children, node.weights, strict=True):
        shown = f"{child.value:.3f}"
        terms[shown] = terms.get(shown, 0.0) + weight
    added = " + ".join(f"{weight:.3f} ({shown})" for shown, weight in terms.items())
    return f"sum of {WEIGHTS[rule]} V over {len(node.children)} children (Eq 3) = {added}"


def why(trajectory, question):
    """What led to the reward, in words: the format rule (Eq 15) and the strings compared (Eq 16)."""
    info = trajectory.info
    lines = [f"format (Eq 15): {info.problem or 'valid'}"]
    if info.answer:
        equal = "equal" if info.em else "not equal"
        counted = ", not counted" if info.problem else ""
        strings = record.compared(info.answer, question.answers)
        lines.append(f"exact match (Eq 16): {strings}: {equal}{counted}")
    return lines


def label(turn):
    """What a turn did: its query, "answer", or why it stopped."""
    queries = re.findall("<search>(.*?)</search>", turn.text, re.DOTALL)
    queries += map(tool_search.query_of, re.findall("<tool_call>(.*?)</tool_call>", turn.text, re.DOTALL))
    if queries:
        return "search: " + queries[-1].strip()
    return "answer" if "<answer>" in turn.text else turn.stop_reason


def prediction(trajectory, question):
    """A row of eval_<set>.json."""
    row = {"id": question.id, **vars(trajectory.info), "tokens": trajectory.sampled_tokens}
    return row | record.group_of(question, [trajectory], lambda t, k: {"label": label(t.turns[k])}, why)


@torch.no_grad()
def turn_ratios(model, leaves, cfg, temperature):
    """{id(turn): ratio of its probability, now to when it was sampled, per token (geometric mean)}"""
    share = models.shares_prefixes(model, cfg.share_prefixes)
    found = {}
    for part in rollout.micro_batches([leaf.trajectory for leaf in leaves], cfg.micro_tokens, share):
        batch = rollout.collate(part, share, cfg.micro_tokens).to(model.device)
        moved = models.token_logprobs(model, batch, temperature) - batch.rollout_logprobs
        total, tokens = training.turn_sums(moved, batch.response_mask, batch.turn_ids)
        ratios = (total / tokens.clamp(min=1)).exp().tolist()  # (leaves, K)
        for t, of_turns in zip(part, ratios, strict=True):
            for turn, ratio in zip(t.turns, of_turns, strict=False):
                found.setdefault(id(turn), ratio)
    return found


def sample_record(policy, roots, questions, step, cfg):
    """The step's first tree with right and wrong leaves: every node with value, advantage, and how far the
    step has moved it (ratio of turn probabilities, new to sampled); ids are those trained on."""
    rewards = [root.rewards() for root in roots]
    shown = record.first_with_spread(rewards)
    root, question = roots[shown], questions[shown]
    leaves = root.leaves()
    ratios = turn_ratios(policy.model, leaves, cfg, cfg.temperature)
    node_of = {id(node.turn): node for node in root.nodes()}

    def of_turn(trajectory, k):
        node = node_of[id(trajectory.turns[k])]
        ratio = ratios[id(node.turn)]
        advantage = trajectory.advantages[k] if trajectory.advantages else 0.0
        told = {
            "label": label(node.turn),
            "value": node.value,
            "advantage": advantage,
            "ratio": ratio,
            "chain": node.name,  # chain3.0-2: a sibling of a turn of chain3, choice 2 of round 0
            "how": how(node, root, cfg.value, cfg.advantage, cfg.credit),
        }
        if cfg.loss == "atpo" and trajectory.advantages:  # the ratios are a turn's
            low, high = 1 - cfg.clip_low, 1 + cfg.clip_high
            past = ratio > high and advantage > 0 or ratio < low and advantage < 0
            verdict = "clipped" if past else "not clipped"
            told["clipped"] = past
            told["how"].append(f"ratio after the step {ratio:.3f}, window {low:g} to {high:g}: {verdict}")
        return told

    more = {"step": step, "beside": ["value", "value V"]}
    trajectories = [leaf.trajectory for leaf in leaves]
    group = record.group_of(question, trajectories, of_turn, why, **more)
    group["nodes"][0]["value"] = root.value
    return group
