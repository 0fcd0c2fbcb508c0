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
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction, golds):
    """1.0 if the normalised prediction equals any normalised gold answer (str or list of str), else 0.0."""
    golds = [golds] if isinstance(golds, str) else golds
    return float(any(normalize_answer(prediction) == normalize_answer(g) for g in golds))


def f1(prediction, golds, yes_no_rule=True):
    """Token F1, the best over the gold answers."""
    golds = [golds] if isinstance(golds, str) else golds
    return max(f1_precision_recall(prediction, gold, yes_no_rule)[0] for gold in golds)


def f1_precision_recall(prediction, gold, yes_no_rule=True):
    """(f1, precision, recall) of tokens against one gold answer.

    yes_no_rule: HotpotQA's and 2Wiki's scripts give 0 when yes, no or noanswer meets anything else; MuSiQue's
    has no such rule, and scores 1 when both sides are empty after normalisation (pass False)."""
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


def evidence_scores(predicted, gold, normalize=None):
    """(em, f1, precision, recall) of two sets of supporting facts [title, sentence] or paragraph indices.

    As update_sp of hotpot_evaluate_v1.py: f1 is 0 where nothing is shared, em asks for equal sets. HotpotQA's
    titles are compared as they are, 2Wiki's with normalize=wiki_fact; MuSiQue's script compares paragraphs'
    indices (Question.support_paragraphs), because two of them may have one title.

    normalize: applied to each fact, after repeated ones have gone, as 2Wiki's script does.
    """
    def facts(given):
        distinct = dict.fromkeys(tuple(x) if isinstance(x, (list, tuple)) else x for x in given)
        return [normalize(x) for x in distinct] if normalize else list(distinct)

    predicted, gold = facts(predicted), facts(gold)
    right = sum(x in gold for x in predicted)
    missed = sum(x not in predicted for x in gold)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / (right + missed) if gold else 0.0
    return float(right == len(predicted) and not missed), _harmonic(precision, recall), precision, recall


def _harmonic(precision, recall):
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


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
    return tuple(" ".join(part.lower().translate(_PUNCTUATION).split()) for part in triple)


def evidence_scores_2wiki(predicted, gold, gold_ids=(), aliases=None):
    """(em, f1, precision, recall) of evidence triples, as 2wikimultihop_evaluate_v1.1.py.

    gold_ids: Question.evidences_id; aliases: data.load_aliases(…). A gold triple is then met by any other
    name of its subject or its object. Two predictions that meet one gold triple by two names count twice,
    there and here, so recall can pass 1."""
    predicted = set(map(wiki_triple, predicted))
    accepted = []  # for each gold triple, what counts as it
    for number, (subject, relation, object_) in enumerate(gold):
        subjects, objects = {subject}, {object_}
        if aliases and gold_ids:
            subject_id, _, object_id = gold_ids[number]
            subjects.update(aliases.get(subject_id, ()))
            objects.update(aliases.get(object_id, ()))
        accepted.append({wiki_triple((s, relation, o)) for s in subjects for o in objects})
    right = sum(any(triple in names for names in accepted) for triple in predicted)
    precision = right / len(predicted) if predicted else 0.0
    recall = right / len(accepted) if accepted else 0.0
    return float(right == len(predicted) == len(accepted)), _harmonic(precision, recall), precision, recall


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


def seed_interval(values, level=0.95):
    """(mean, low, high) of one number a seed: Student's t, the seed being the unit. Training again is what a claim about methods has
    to survive; an interval over questions of the same runs does not hold that spread.

    >>> [round(x, 2) for x in seed_interval([.70, .72, .74])]
    [0.72, 0.67, 0.77]
    """
    from scipy.stats import t
    values = np.asarray(values, dtype=float)
    half = t.ppf((1 + level) / 2, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(values.mean() - half), float(values.mean() + half)


def is_two_way(row):
    """Whether the question itself offers its answer: a comparison ("Which came first, A or B?") or yes/no.

    Guessing is right half the time there, so a mean over all questions hides what a policy can find out."""
    golds = {normalize_answer(gold) for gold in row.get("gold") or ()}
    return "comparison" in str(row.get("type") or "").lower() or bool(golds & {"yes", "no"})


def summarize(rows, keys=("em", "f1", "searches", "tokens"), by=("type", "hops")):
    """Means with intervals of prediction rows, share in the right format, and EM by type and hop count.

    "em" is that of the extracted answer, whatever its format; "em_valid", where all rows have it, is 0 where
    the format is wrong. "two_way" and "open" part the questions that offer their answer from the others
    (is_two_way; rows with "type" or "gold"); a part without questions is left out, as in "by_type"."""
    summary = {"n": len(rows), "format": sum(not r["problem"] for r in rows) / len(rows)}
    if all("em_valid" in r for r in rows) and "em_valid" not in keys:
        keys = (*keys, "em_valid")
    for key in keys:
        mean, low, high = bootstrap_interval([r[key] for r in rows])
        summary |= {key: mean, key + "_low": low, key + "_high": high}
    for field in by:
        values = sorted({r[field] for r in rows})
        groups = {v: [r["em"] for r in rows if r[field] == v] for v in values}
        summary[f"by_{field}"] = {str(v): _part(ems) for v, ems in groups.items()}
    if all("type" in r or "gold" in r for r in rows):
        parts = {"two_way": [r["em"] for r in rows if is_two_way(r)],
                 "open": [r["em"] for r in rows if not is_two_way(r)]}
        summary |= {name: _part(ems) for name, ems in parts.items() if ems}
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
    return micro, sum(s[key] for s in summaries) / len(summaries)
