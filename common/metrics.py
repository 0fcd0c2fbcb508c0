"""Answer and evidence scores, equal to the official scripts, and the statistics that go with them.

Normalisation is SQuAD's (Rajpurkar et al., 2016), which hotpot_evaluate_v1.py, 2wikimultihop_evaluate.py, MuSiQue's
evaluate_v1.0.py and Search-R1's qa_em.py share: lower case, no punctuation, no a/an/the, single spaces.
"""

import re
import string
from collections import Counter

import numpy as np

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text):
    """
    >>> normalize_answer("The  Beatles!")
    'beatles'
    """
    text = text.lower().translate(_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction, golds):
    """1.0 if the normalised prediction equals any normalised gold answer (str or list of str), else 0.0."""
    golds = [golds] if isinstance(golds, str) else golds
    return float(any(normalize_answer(prediction) == normalize_answer(g) for g in golds))


def f1(prediction, golds, yes_no_rule=True):
    """Token F1, the best over the gold answers."""
    return max(f1_precision_recall(prediction, g, yes_no_rule)[0] for g in ([golds] if isinstance(golds, str) else golds))


def f1_precision_recall(prediction, gold, yes_no_rule=True):
    """(f1, precision, recall) of tokens against one gold answer.

    yes_no_rule: HotpotQA's and 2Wiki's scripts give 0 when yes, no or noanswer meets anything else; MuSiQue's has no
    such rule, and scores 1 when both sides are empty after normalisation (pass False)."""
    prediction, gold = normalize_answer(prediction), normalize_answer(gold)
    if yes_no_rule and prediction != gold and {prediction, gold} & {"yes", "no", "noanswer"}:
        return 0.0, 0.0, 0.0
    p, g = prediction.split(), gold.split()
    if not yes_no_rule and (not p or not g):
        return (float(p == g),) * 3
    same = sum((Counter(p) & Counter(g)).values())
    if same == 0:
        return 0.0, 0.0, 0.0
    precision, recall = same / len(p), same / len(g)
    return 2 * precision * recall / (precision + recall), precision, recall


def evidence_scores(predicted, gold):
    """(em, f1, precision, recall) of two sets: supporting facts [title, sentence], evidence triples, paragraph indices.

    As update_sp of hotpot_evaluate_v1.py: f1 is 0 where nothing is shared, em asks for equal sets."""
    predicted, gold = ({tuple(x) if isinstance(x, (list, tuple)) else x for x in xs} for xs in (predicted, gold))
    shared = len(predicted & gold)
    precision = shared / len(predicted) if predicted else 0.0
    recall = shared / len(gold) if gold else 0.0
    score = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return float(predicted == gold), score, precision, recall


def bootstrap_interval(values, level=0.95, draws=2000, seed=0):
    """(mean, low, high): percentile interval of the mean under resampling of questions; values (n,)."""
    values = np.asarray(values, dtype=float)
    if len(values) == 0:
        return float("nan"), float("nan"), float("nan")
    rows = np.random.default_rng(seed).integers(0, len(values), (draws, len(values)))
    low, high = np.quantile(values[rows].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return float(values.mean()), float(low), float(high)


def paired_difference(before, after, level=0.95, seed=0):
    """(mean difference, low, high) of two score lists over the same questions in the same order."""
    if len(before) != len(after):
        raise ValueError(f"paired scores differ in length: {len(before)} and {len(after)}")
    return bootstrap_interval(np.asarray(after, float) - np.asarray(before, float), level, seed=seed)


def summarize(rows, keys=("em", "f1", "searches", "tokens"), by=("type", "hops")):
    """Means with intervals of prediction rows, share in the right format, and EM by type and hop count."""
    summary = {"n": len(rows), "format": sum(not r["problem"] for r in rows) / len(rows)}
    for key in keys:
        summary[key], summary[key + "_low"], summary[key + "_high"] = bootstrap_interval([r[key] for r in rows])
    for field in by:
        groups = {v: [r["em"] for r in rows if r[field] == v] for v in sorted({r[field] for r in rows})}
        summary[f"by_{field}"] = {str(v): {"n": len(x), "em": sum(x) / len(x)} for v, x in groups.items()}
    return summary
