"""What is told of ASKiT's searches: metrics, predictions, records for the page, evidence taken by a rule. A
path is askit.SearchPath, a move of it a sentence's number or a sub-question."""

import itertools
import math
from collections import Counter

from common import metrics, retriever
from common.files import console, plain, say
from common.guards import ANSWERS, RATIO, SECONDS, STEP, UPDATE, Metric
from common.of_askit.evidence import ASK, SUBMIT, about, evidence_scores
from common.page import record
from common.rollout import mean

# ---------------------------------------------------------------- metrics of a step

NO_SAMPLES = ("rollout/flat_groups", "train/sampler")  # of scripts that sample a language model
RATIOS = {key: metric for key, metric in RATIO.items() if not key.startswith(NO_SAMPLES)}
PPO = STEP | UPDATE | RATIOS | {
    "reward/em": Metric("share of paths that end with exactly the gold evidence", ANSWERS, "em {:.3f}",
                        "EM, training"),
    "reward/f1": Metric("F1 of the evidence that a path ends with", ANSWERS, "f1 {:.3f}"),
    "path/sentences": Metric("sentences that a path ends with", "sentences a path", "sentences {:.2f}"),
    "path/entropy": Metric("mean -log pi of the actions, nats", "entropy (nats an action)", "ent {:.3f}"),
    "time/rollout": Metric("seconds of sampling paths", SECONDS, "roll {:.1f}s"),
}

SUPERVISED = STEP | UPDATE | {
    "train/loss": Metric("the supervised loss, mean of the updates", "supervised loss", "loss {:.3f}"),
    "pretrain/validation_loss": Metric(
        "the supervised loss of questions that are not trained on (--validate)",
        "supervised loss", "validation {:.3f}", "validation"),
    "pretrain/right": Metric(
        "share of states whose best choice is right; of tokens with p over a half",
        ANSWERS, "right {:.3f}"),
}


def path_metrics(paths):
    """Means over the step's paths."""
    scores = [evidence_scores(p.case, p.taken) for p in paths]
    actions = sum(len(p.actions) for p in paths)
    return {
        "reward/mean": mean(p.reward for p in paths),
        "reward/em": mean(em for em, *_ in scores),
        "reward/f1": mean(f1 for _, f1, *_ in scores),
        "path/sentences": mean(len(p.taken) for p in paths),
        "path/entropy": -sum(p.logprob for p in paths) / actions,
    }


# ---------------------------------------------------------------- records for the page

def path_nodes(policy, path, first=1, credit=()):
    """A node for each action, with what else was offered. credit: (R_t, A_t) of each."""
    case, nodes = path.case, []
    for t, (state, action) in enumerate(zip(path.states(), path.actions, strict=True)):
        label = text = "submit"
        if action >= 0:
            label, text = case.facts[action][0], case.texts[action]
        elif action == ASK:
            label, text = "asks", f"asks: {path.moves[path.given + t]}"
        node = {
            "id": first + t,
            "parents": [first + t - 1 if t else 0],
            "label": label,
            "text": text,
            "probability": math.exp(path.logprobs[t]),
            "gold": action in case.gold,
            "how": lines_of_offered(policy, state, action),
        }
        if credit:
            reward, advantage = credit[t]
            node["advantage"] = advantage
            node["how"].append(
                f"A = R - b(s) = {reward:.3f} - {reward - advantage:.3f} = {advantage:.3f}, b the mean "
                "return of other paths through this evidence")
        nodes.append(node)
    return nodes


def lines_of_offered(policy, state, action):
    """Lines of the actions of a state and their probabilities, the likeliest first; gold is starred."""
    case, moves = state
    known = policy.cache.get(state)
    if not known and action < 0:
        # sub-questions search elsewhere: the policy sees none of them, and took no sentence itself
        known = policy.cache.get((case, tuple(m for m in moves if isinstance(m, int))))
    if not known:
        return []
    lines = [f"{len(known[0])} actions were offered (* gold), p = softmax of their scores:"]
    for a, x in sorted(zip(*known, strict=True), key=lambda pair: -pair[1]):
        mark = "* " if a in case.gold else ""
        name = "submit" if a == SUBMIT else case.texts[a]
        taken = " <- taken" if a == action else ""
        lines.append(f"p {math.exp(x):.3f}  {mark}{name}{taken}")
    return lines


def group_record(policy, paths, credits=None, **extra):
    """Paths of one question for the page. credits: of each path, (R_t, A_t) of each action."""
    case = paths[0].case
    nodes, done = [record.root_node()], []
    for n, p in enumerate(paths):
        credit = credits[n] if credits else ()
        mine = path_nodes(policy, p, len(nodes), credit)
        nodes += mine
        em, f1, precision, recall = evidence_scores(case, p.taken)
        right = len(case.gold.intersection(p.taken))
        done.append({
            "path": [0, *(node["id"] for node in mine)],
            "reward": p.reward,
            "answer": f"{right} of {len(case.gold_facts)} gold sentences, {len(p.taken) - right} others",
            "problem": "",
            "correct": em == 1,
            "why": [
                f"F1 {f1:.2f}, precision {precision:.2f}, recall {recall:.2f}",
                f"{ending(case, p.taken)}, log p {p.logprob:.2f}",
            ],
        })
    return record.group(case.question, nodes, done, beside=["probability", "probability"], **extra)


def sample_record(policy, paths, size, step, returns, advantages):
    """The step's first question whose paths have different rewards; `size` paths per question. returns,
    advantages: of each path, R_t and A_t of each action."""
    rewards = [p.reward for p in paths]
    begin = size * record.first_with_spread([rewards[i:i + size] for i in range(0, len(paths), size)])
    shown = range(begin, begin + size)
    credits = [list(zip(returns[n], advantages[n], strict=True)) for n in shown]
    return group_record(policy, [paths[n] for n in shown], credits, step=step)


def show_path(policy, path):
    """A search on the terminal."""
    for node in path_nodes(policy, path):
        console.print(f"[bold]{plain(node['text'])}[/bold]  ({node['probability']:.2f})")
        for line in node["how"][1:]:
            console.print(f"  [dim]{plain(line)}[/dim]")


# ---------------------------------------------------------------- predictions

ENDS = ("exact", "too early", "too late", "wrong path", "unreachable")
SCORES = ("em", "f1", "precision", "recall", "sentences")


def ending(case, taken):
    """How a search ended. too early: nothing wrong, gold missing; too late: all gold, then wrong ones; wrong
    path: a wrong one before all gold was there; unreachable: gold that is not among the sentences is all that
    is missing."""
    right = set(itertools.takewhile(case.gold.__contains__, taken))  # before the first wrong one
    found_all = bool(case.gold) and case.gold <= right
    if len(right) < len(taken):
        return "too late" if found_all else "wrong path"
    if not found_all:
        return "too early"
    reachable = len(case.gold) == len(case.gold_facts)
    return "exact" if reachable else "unreachable"


def prediction(policy, path):
    """A row of eval_<set>.json."""
    case = path.case
    em, f1, precision, recall = evidence_scores(case, path.taken)
    taken = " ".join(case.texts[i] for i in path.taken)
    row = group_record(policy, [path]) | about(case)
    return row | {
        "em": em,
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "sentences": len(path.taken),
        "read": float(metrics.stands_in(case.question.answers, taken)),
        "end": ending(case, path.taken),
        "evidence_found": [list(case.facts[i]) for i in path.taken],
        "sub-questions": path.asked,
        "logprob": path.logprob,
    }


def scored(policy, paths, split, seed):
    """(rows, summary) of paths: the scores of their evidence, and what went wrong. Says how many states were
    shortened since it was last asked."""
    rows = [prediction(policy, p) for p in paths]
    tokenizer = policy.action_tokenizer
    if tokenizer and tokenizer.shortened:
        say(f"  {tokenizer.shortened} times a state left out its oldest sentences (--max-tokens)")
        tokenizer.shortened = 0
    ends = Counter(r["end"] for r in rows)
    shares = {end: ends[end] / len(rows) for end in ENDS}
    rows, summary = summed_up(rows, split, seed, SCORES, search=split.search, ends=shares)
    repeated = redundant(policy.encoder, paths)
    if repeated:
        summary["redundant"], summary["asked"] = mean(repeated), len(repeated) / len(paths)
        say(f"  {summary['asked']:.2f} sub-questions a search, {summary['redundant']:.0%} of them redundant")
    return rows, summary


def summed_up(rows, split, seed, keys, **more):
    """(rows, summary) of an evaluation."""
    return rows, {"set": split.name, "seed": seed} | more | metrics.summarize(rows, keys)


def redundant(encoder, paths):
    """Of each sub-question asked: whether its best sentence, by the encoder, was taken before. This is what
    can be measured of the paper's "answers were already in the evidence" (sec. 5.2.1)."""
    asked = []
    for p in paths:
        for n, move in enumerate(p.moves):
            if isinstance(move, str):
                asked.append((p.case, move, p.moves[:n]))
    texts = [encoder.pair_tokenizer.ids(question) for _, question, _ in asked]
    repeated = []
    for (case, _, before), vector in zip(asked, encoder.encode_all(texts), strict=True):
        best = int((case.vectors @ vector).argmax())
        repeated.append(best in before)
    return repeated


def score_approximations(split, seed, texts):
    """(rows, summary): em and f1 of the words of a text for each case, against its question."""
    rows = []
    for case, text in zip(split.cases, texts, strict=True):
        gold = [case.question.question]
        rows.append(about(case) | {
            "em": metrics.exact_match(text, gold),
            "f1": metrics.f1(text, gold),
            "answer": text,
            "sentences": len(case.gold),
        })
    return summed_up(rows, split, seed, ("em", "f1"))


# ---------------------------------------------------------------- without a policy

def taken_by_rule(split, offers, most, progress):
    """[evidence] of BM25's best two sentences, of the coarse stage's best as many as the mean of gold, or of
    an oracle that takes gold wherever it is offered. offers(states) -> [sentences, best first]."""
    size = round(mean(len(case.gold_facts) for case in split.cases))
    evidence = []
    for case in split.cases:
        if split.search == "bm25":
            sentences = [{"id": str(i), "title": "", "text": text} for i, text in enumerate(case.texts)]
            index = retriever.BM25Retriever(sentences)
            taken = [int(passage.id) for passage in index.search([case.question.question], 2)[0]]
        elif split.search == "coarse":
            taken = offers([(case, ())])[0][:size]
        else:
            taken = offered_gold(case, offers, most)
        evidence.append(tuple(taken))
        progress(len(evidence), len(split.cases))
    return evidence


ORDERS = 1000  # of gold that an oracle tries: all, where there are up to six


def offered_gold(case, offers, most):
    """Gold sentences, at most `most`, each of which is among the candidates when its turn comes: as many as
    any order of them allows."""
    orders = [()]
    for _ in range(min(most, len(case.gold))):
        grown = []
        for taken, sentences in zip(orders, offers([(case, taken) for taken in orders]), strict=True):
            grown += [(*taken, i) for i in sorted(case.gold.intersection(sentences))]
        if not grown:
            break
        orders = grown[:ORDERS]
    return orders[0]
