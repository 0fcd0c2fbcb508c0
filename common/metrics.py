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
    for gold in golds:
        if normalize_answer(prediction) == normalize_answer(gold):
            return 1.0
    return 0.0


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
    same = sum(common.values())
    if same == 0:
        return 0.0, 0.0, 0.0
    precision = same / len(p)
    recall = same / len(g)
    return _harmonic(precision, recall), precision, recall


def evidence_scores(predicted, gold, normalize=None):
    """(em, f1, precision, recall) of two sets of supporting facts [title, sentence] or paragraph indices.

    As update_sp of hotpot_evaluate_v1.py: f1 is 0 where nothing is shared, em asks for equal sets. HotpotQA's
    titles are compared as they are, 2Wiki's with normalize=wiki_fact; MuSiQue's script compares paragraphs'
    indices (Question.support_paragraphs), because two of them may have one title.

    normalize: applied to each fact, after repeated ones have gone, as 2Wiki's script does.
    """
    def facts(given):
        distinct = {}
        for x in given:
            if isinstance(x, (list, tuple)):
                x = tuple(x)
            distinct[x] = None
        if normalize:
            return [normalize(x) for x in distinct]
        return list(distinct)

    predicted = facts(predicted)
    gold = facts(gold)
    right = sum(x in gold for x in predicted)
    missed = sum(x not in predicted for x in gold)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / (right + missed) if gold else 0.0
    em = float(right == len(predicted) and not missed)
    return em, _harmonic(precision, recall), precision, recall


def _harmonic(precision, recall):
    if precision + recall == 0:
        return 0.0
    return 2 * precision * recall / (precision + recall)


def wiki_fact(fact):
    """A supporting fact as 2Wiki's script compares it.

    >>> wiki_fact(("The Zone (2017 film)", 0))
    ('the zone (2017 film)', 0)
    """
    title, index = fact
    return title.lower(), index


def wiki_triple(triple):
    """An evidence triple as 2Wiki's script compares it: articles stay, unlike in answers.

    >>> wiki_triple(["The Zone", "director", "Denys  Desjardins."])
    ('the zone', 'director', 'denys desjardins')
    """
    parts = []
    for part in triple:
        part = part.lower().translate(_PUNCTUATION)
        parts.append(" ".join(part.split()))
    return tuple(parts)


def evidence_scores_2wiki(predicted, gold, gold_ids=(), aliases=None):
    """(em, f1, precision, recall) of evidence triples, as 2wikimultihop_evaluate_v1.1.py.

    gold_ids: Question.evidences_id; aliases: {Wikidata id: [other names]}. A gold triple is then met by any
    other name of its subject or its object. Two predictions that meet one gold triple by two names count
    twice, there and here, so recall can pass 1."""
    predicted = set(map(wiki_triple, predicted))
    accepted = []  # for each gold triple, what counts as it
    for number, (subject, relation, object_) in enumerate(gold):
        subjects = {subject}
        objects = {object_}
        if aliases and gold_ids:
            subject_id, _, object_id = gold_ids[number]
            subjects.update(aliases.get(subject_id, ()))
            objects.update(aliases.get(object_id, ()))
        names = [(s, relation, o) for s in subjects for o in objects]
        accepted.append(set(map(wiki_triple, names)))
    right = 0
    for triple in predicted:
        right += any(triple in names for names in accepted)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / len(accepted) if accepted else 0.0
    em = float(right == len(predicted) == len(accepted))
    return em, _harmonic(precision, recall), precision, recall


def bootstrap_interval(values, level=0.95, draws=2000, seed=0, inside=None):
    """(mean, low, high): percentile interval of the mean under resampling of questions; values (n,).

    inside (n,): the mean is of those values alone; how many they are varies, too."""
    values = np.asarray(values, dtype=float)
    n = len(values)
    inside = np.ones(n, dtype=bool) if inside is None else np.asarray(inside, dtype=bool)
    if not inside.any():
        return float("nan"), float("nan"), float("nan")
    values = np.where(inside, values, 0.0)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, n, (draws, n))
    counts = inside[rows].sum(1)
    some = counts > 0
    means = values[rows].sum(1)[some] / counts[some]
    ends = [(1 - level) / 2, (1 + level) / 2]
    low, high = np.quantile(means, ends)
    return float(values.sum() / inside.sum()), float(low), float(high)


def by_standard(rows):
    """EM of the prediction rows that are "standard" and of the others, with intervals; without a part that is
    empty."""
    ems = [row["em"] for row in rows]
    inside = [row["standard"] == 1 for row in rows]
    outside = [not one for one in inside]
    found = {}
    for key, part in (("em_standard", inside), ("em_other", outside)):
        if any(part):
            found[key], found[f"{key}_low"], found[f"{key}_high"] = bootstrap_interval(ems, inside=part)
    return found


def by_pattern(rows, most=10):
    """The most frequent patterns of prediction rows: {pattern: [share, EM within it]}.

    >>> by_pattern([{"pattern": "mna", "em": 1}, {"pattern": "mna", "em": 0}, {"pattern": "a", "em": 0}])
    {'mna': [0.6667, 0.5], 'a': [0.3333, 0.0]}
    """
    of = {}
    for row in rows:
        of.setdefault(row["pattern"], []).append(row["em"])
    frequent = sorted(of, key=lambda pattern: (-len(of[pattern]), pattern))
    table = {}
    for pattern in frequent[:most]:
        ems = of[pattern]
        share = len(ems) / len(rows)
        table[pattern] = [round(share, 4), round(sum(ems) / len(ems), 4)]
    return table


def paired_difference(before, after, level=0.95, seed=0):
    """(mean difference, low, high) of two score lists over the same questions in the same order."""
    if len(before) != len(after):
        raise ValueError(f"paired scores differ in length: {len(before)} and {len(after)}")
    before = np.asarray(before, float)
    after = np.asarray(after, float)
    return bootstrap_interval(after - before, level, seed=seed)


def seed_interval(values, level=0.95):
    """(mean, low, high) of one number a seed: Student's t, the seed being the unit. Training again is what a
    claim about methods has to survive; an interval over questions of the same runs does not hold that spread.

    >>> [round(x, 2) for x in seed_interval([.70, .72, .74])]
    [0.72, 0.67, 0.77]
    """
    from scipy.stats import t
    values = np.asarray(values, dtype=float)
    n = len(values)
    mean = values.mean()
    factor = t.ppf((1 + level) / 2, n - 1)
    half = factor * values.std(ddof=1) / np.sqrt(n)
    return float(mean), float(mean - half), float(mean + half)


def is_two_way(row):
    """Whether the question itself offers its answer: a comparison ("Which came first, A or B?") or yes/no. A
    comparison that asks what two things have in common offers nothing.

    Guessing is right half the time there, so a mean over all questions hides what a policy can find out. Rows
    that were exported without their texts say it themselves."""
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
    return any(f" {normalize_answer(gold)} " in text for gold in golds if normalize_answer(gold))


def reading(rows):
    """What tells searching from reading, of the questions that do not offer their answer: the share in whose
    observations a gold answer stood (rows with "read"), and EM where it did and where it did not; and copying
    from both: of the answers given, the share that stand as they are in the question or in an observation
    (rows with "copied")."""
    rows = [r for r in rows if not is_two_way(r)]
    if not rows:
        return {}
    parts = {"n": len(rows), "read": sum(r["read"] for r in rows) / len(rows)}
    for name, read in (("em_read", 1), ("em_not_read", 0)):
        ems = [r["em"] for r in rows if r["read"] == read]
        if ems:
            parts[name] = sum(ems) / len(ems)
    copied = [r["copied"] for r in rows if "copied" in r]
    if copied:
        parts["copied"] = sum(copied) / len(copied)
    return {"reading": parts}


def summarize(rows, keys=("em", "f1", "searches", "tokens"),
              by=("type", "hops")):
    """Means with intervals of prediction rows, share in the right format, and EM by type and hop count.

    "em" is that of the extracted answer, whatever its format; "em_valid", where all rows have it, is 0 where
    the format is wrong. "two_way" and "open" part the questions that offer their answer from the others
    (is_two_way; rows with "type" or "gold"); a part without questions is left out, as in "by_type". "guess":
    EM of somebody who draws lots between two answers where two are offered, and knows nothing else.
    "reading": see there; rows with "read". Searches for evidence (rows with "sentences") have no format, and
    lots find none: no "format" and no "guess"."""
    summary = {"n": len(rows)}
    from_evidence = all("sentences" in r for r in rows)
    if not from_evidence:
        summary["format"] = sum(not r["problem"] for r in rows) / len(rows)
    if all("em_valid" in r for r in rows) and "em_valid" not in keys:
        keys = (*keys, "em_valid")
    for key in keys:
        values = [r[key] for r in rows]
        mean, low, high = bootstrap_interval(values)
        summary[key] = mean
        summary[key + "_low"] = low
        summary[key + "_high"] = high
    for field in by:
        parts = {}
        for value in sorted({r[field] for r in rows}):
            ems = [r["em"] for r in rows if r[field] == value]
            parts[str(value)] = _part(ems)
        summary[f"by_{field}"] = parts
    if all("type" in r or "gold" in r for r in rows):
        parts = {"two_way": [], "open": []}
        for r in rows:
            name = "two_way" if is_two_way(r) else "open"
            parts[name].append(r["em"])
        for name, ems in parts.items():
            if ems:
                summary[name] = _part(ems)
        if not from_evidence:
            summary["guess"] = len(parts["two_way"]) / 2 / len(rows)
    if all("read" in r for r in rows):
        summary |= reading(rows)
    return summary


def _part(ems):
    return {"n": len(ems), "em": sum(ems) / len(ems)}


def average(summaries, key="em"):
    """(micro, macro) of a score over sets: weighted by their questions, and the plain mean of the sets.

    Papers differ in what their "Avg." is. AT2PO's is the micro one:

    >>> average([{"n": 300, "em": .5}, {"n": 100, "em": .1}])
    (0.4, 0.3)
    """
    summaries = list(summaries)
    total = sum(s["n"] for s in summaries)
    if not total:
        raise ValueError("no questions to average over")
    micro = sum(s["n"] * s[key] for s in summaries) / total
    macro = sum(s[key] for s in summaries) / len(summaries)
    return micro, macro
