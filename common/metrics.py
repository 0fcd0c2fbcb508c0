"""Answer and evidence scores, equal to the official scripts, and the statistics that go with them.

Normalisation is SQuAD's (Rajpurkar et al., 2016), which hotpot_evaluate_v1.py, 2wikimultihop_evaluate.py,
MuSiQue's evaluate_v1.0.py and Search-R1's qa_em.py share: lower case, no punctuation, no a/an/the, single
spaces.

Evidence has three rules: HotpotQA's facts are compared as they are, MuSiQue's paragraphs by index, and
2Wiki's facts without case, its triples without case and punctuation (wiki_fact, evidence_scores_2wiki).
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
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def exact_match(prediction, golds):
    """1.0 if the normalised prediction equals any normalised gold answer (str or list of str), else 0.0."""
    if isinstance(golds, str):
        golds = [golds]
    prediction = normalize_answer(prediction)
    return float(any(prediction == normalize_answer(gold) for gold in golds))


def f1(prediction, golds, yes_no_rule=True):
    """Token F1, the best over the gold answers."""
    if isinstance(golds, str):
        golds = [golds]
    scores = [f1_precision_recall(prediction, gold, yes_no_rule) for gold in golds]
    return max(score for score, _, _ in scores)


def f1_precision_recall(prediction, gold, yes_no_rule=True):
    """(f1, precision, recall) of tokens against one gold answer.

    yes_no_rule: HotpotQA's and 2Wiki's scripts give 0 when yes, no or noanswer meets anything else; MuSiQue's
    has no such rule, and scores 1 when both sides are empty after normalisation (pass False)."""
    prediction = normalize_answer(prediction)
    gold = normalize_answer(gold)
    if yes_no_rule and prediction != gold:
        if {prediction, gold} & {"yes", "no", "noanswer"}:
            return 0.0, 0.0, 0.0
    p = prediction.split()
    g = gold.split()
    if not yes_no_rule and (not p or not g):
        score = float(p == g)
        return score, score, score
    common = Counter(p) & Counter(g)
    same = common.total()
    if same == 0:
        return 0.0, 0.0, 0.0
    precision = same / len(p)
    recall = same / len(g)
    return _harmonic(precision, recall), precision, recall


def evidence_scores(predicted, gold):
    """(em, f1, precision, recall) of two sets of supporting facts [title, sentence] or paragraph indices.

    As update_sp of hotpot_evaluate_v1.py: f1 is 0 where nothing is shared, em asks for equal sets. MuSiQue's
    script compares paragraphs' indices (Question.support_paragraphs), because two of them may have one
    title."""
    def facts(given):
        return {tuple(x) if isinstance(x, list) else x for x in given}

    predicted = facts(predicted)
    gold = facts(gold)
    right = len(predicted & gold)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / len(gold) if gold else 0.0
    return float(predicted == gold), _harmonic(precision, recall), precision, recall


def _harmonic(precision, recall):
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def bootstrap_interval(values, inside=None):
    """(mean, low, high): 95 % percentile interval of the mean, questions drawn anew 2000 times; values (n,).

    inside (n,): the mean is of those values alone; how many they are varies, too."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    inside = np.ones(n, dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    if not inside.any():
        return float("nan"), float("nan"), float("nan")
    values = np.where(inside, values, 0.0)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, n, (2000, n))
    counts = inside[rows].sum(1)
    some = counts > 0
    means = values[rows].sum(1)[some] / counts[some]
    ends = [(1 - .95) / 2, (1 + .95) / 2]
    low, high = np.quantile(means, ends)
    return float(values.sum() / inside.sum()), float(low), float(high)


def by_standard(rows):
    """EM of the prediction rows that are "standard" and of the others, with intervals."""
    ems = [row["em"] for row in rows]
    inside = [row["standard"] == 1 for row in rows]
    outside = [not one for one in inside]
    found = {}
    for key, part in (("em_standard", inside), ("em_other", outside)):
        if any(part):
            mean, low, high = bootstrap_interval(ems, part)
            found |= {key: mean, f"{key}_low": low, f"{key}_high": high}
    return found


def by_pattern(rows):
    """The ten most frequent patterns of prediction rows: {pattern: [share, EM within it]}.

    >>> by_pattern([{"pattern": "mna", "em": 1}, {"pattern": "mna", "em": 0}, {"pattern": "a", "em": 0}])
    {'mna': [0.6667, 0.5], 'a': [0.3333, 0.0]}
    """
    of = {}
    for row in rows:
        of.setdefault(row["pattern"], []).append(row["em"])
    frequent = sorted(of, key=lambda pattern: (-len(of[pattern]), pattern))
    table = {}
    for pattern in frequent[:10]:
        share = len(of[pattern]) / len(rows)
        em = _mean(of[pattern])
        table[pattern] = [round(share, 4), round(em, 4)]
    return table


def paired_difference(before, after):
    """(mean difference, low, high) of two score lists over the same questions in the same order."""
    if len(before) != len(after):
        raise ValueError(f"paired scores differ in length: {len(before)} and {len(after)}")
    before = np.asarray(before, float)
    after = np.asarray(after, float)
    return bootstrap_interval(after - before)


def seed_interval(values):
    """(mean, low, high) of one number a seed: 95 % interval of Student's t. Training again is what a claim
    about methods has to survive; an interval over questions of the same runs does not hold that spread.

    >>> [round(x, 2) for x in seed_interval([.70, .72, .74])]
    [0.72, 0.67, 0.77]
    """
    from scipy.stats import t
    values = np.asarray(values, dtype=float)
    n = len(values)
    mean = values.mean()
    factor = t.ppf((1 + .95) / 2, n - 1)
    half = factor * values.std(ddof=1) / np.sqrt(n)
    return float(mean), float(mean - half), float(mean + half)


def is_two_way(row):
    """Whether the question itself offers its answer: a comparison ("Which came first, A or B?") or yes/no. A
    comparison that asks what two things have in common offers nothing.

    Guessing is right half the time there, so a mean over all questions hides what a policy can find out. Rows
    without their texts say it themselves."""
    if "two_way" in row:
        return bool(row["two_way"])
    golds = row.get("gold") or ()
    if {"yes", "no"} & set(map(normalize_answer, golds)):
        return True
    compares = "comparison" in str(row.get("type") or "").lower()
    return compares and (not row.get("question") or stands_in(golds, row["question"]))


def stands_in(golds, text):
    """Whether a gold answer stands in a text, both normalised, as whole words.

    >>> stands_in(["The Beatles"], "It was by Beatles, in 1965."), stands_in(["art"], "Bart left.")
    (True, False)
    """
    text = f" {normalize_answer(text)} "
    golds = filter(None, map(normalize_answer, golds))
    return any(f" {gold} " in text for gold in golds)


def reading(rows):
    """What tells searching from reading, of the questions that do not offer their answer: the share in whose
    observations a gold answer stood ("read"), and EM where it did and where it did not; and copying from
    both: of the answers given, the share that stand as they are in the question or in an observation."""
    rows = [r for r in rows if not is_two_way(r)]
    if not rows:
        return {}
    numbers = {
        "read": [r["read"] for r in rows],
        "em_read": [r["em"] for r in rows if r["read"] == 1],
        "em_not_read": [r["em"] for r in rows if r["read"] == 0],
        "copied": [r["copied"] for r in rows if "copied" in r],
    }
    means = {name: _mean(of) for name, of in numbers.items() if of}
    return {"reading": {"n": len(rows)} | means}


def summarize(rows, keys=("em", "f1", "searches", "tokens")):
    """Means with intervals of prediction rows, share in the right format, and EM by type and hop count.

    "em" is that of the extracted answer, whatever its format; "em_valid" is 0 where the format is wrong.
    "two_way" and "open" part the questions that offer their answer from the others (is_two_way). "guess": EM
    of somebody who draws lots between two answers where two are offered, and knows nothing else. Searches for
    evidence (rows with "sentences") have no format, and lots find none: no "format" and no "guess"."""
    summary = {"n": len(rows)}
    from_evidence = all("sentences" in r for r in rows)
    if not from_evidence:
        summary["format"] = sum(not r["problem"] for r in rows) / len(rows)
    if all("em_valid" in r for r in rows):
        keys = (*keys, "em_valid")
    for key in keys:
        values = [r[key] for r in rows]
        mean, low, high = bootstrap_interval(values)
        summary |= {key: mean, f"{key}_low": low, f"{key}_high": high}
    for field in ("type", "hops"):
        labels = [r[field] for r in rows]
        summary[f"by_{field}"] = _parts(rows, labels)
    if all("type" in r or "gold" in r for r in rows):
        two_way = [is_two_way(r) for r in rows]
        labels = ["two_way" if offered else "open" for offered in two_way]
        summary |= _parts(rows, labels)
        if not from_evidence:
            summary["guess"] = sum(two_way) / 2 / len(rows)
    if all("read" in r for r in rows):
        summary |= reading(rows)
    return summary


def _parts(rows, labels):
    """{label: {"n", "em"}} of the rows with each label."""
    of = {}
    for label, row in zip(labels, rows, strict=True):
        of.setdefault(label, []).append(row["em"])
    parts = {}
    for label, ems in sorted(of.items()):
        parts[str(label)] = {"n": len(ems), "em": _mean(ems)}
    return parts


def _mean(values):
    return sum(values) / len(values)
