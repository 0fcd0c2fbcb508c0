"""Answer and evidence scores, equal to the official scripts, and the statistics that go with them.

Normalisation is SQuAD's (Rajpurkar et al., 2016), which hotpot_evaluate_v1.py, 2wikimultihop_evaluate.py,
MuSiQue's evaluate_v1.0.py and Search-R1's qa_em.py share: lower case, no punctuation, no a/an/the, single
spaces.

HotpotQA's and 2Wiki's F1 is 0 where yes, no or noanswer meets anything else; MuSiQue's script has no such
rule, ours has it for all. Where both sides normalise to nothing, F1 is 0 as in HotpotQA's (MuSiQue's: 1).
Evidence is compared as in HotpotQA's, MuSiQue's paragraphs by index.
"""

import re
import string
import unicodedata
from collections import Counter

import numpy as np

# "‹" stands for "<" in what a policy reads (chat.no_tags): in an answer it is the same sign
_PUNCTUATION = str.maketrans("", "", string.punctuation + "‹")
# letters that are written without blanks, or with endings joined to a name
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u31f0-\u31ff\u3400-\u9fff"
                       "\uac00-\ud7a3\uf900-\ufaff\U00020000-\U0003ffff]")


def normalize_answer(text):
    """
    >>> normalize_answer("The  Beatles!")
    'beatles'
    """
    text = unicodedata.normalize("NFC", text).lower().translate(_PUNCTUATION)
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def exact_match(prediction, golds):
    """1.0 if the normalised prediction equals any normalised gold answer (str or list of str), else 0.0."""
    if isinstance(golds, str):
        golds = [golds]
    prediction = normalize_answer(prediction)
    return float(any(prediction == normalize_answer(gold) for gold in golds))


def f1(prediction, golds):
    """Token F1, the best over the gold answers."""
    if isinstance(golds, str):
        golds = [golds]
    prediction = normalize_answer(prediction)
    return max(_token_f1(prediction, normalize_answer(gold)) for gold in golds)


def _token_f1(prediction, gold):
    if prediction != gold and {prediction, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    p = prediction.split()
    g = gold.split()
    common = Counter(p) & Counter(g)
    same = common.total()
    if same == 0:
        return 0.0
    return _harmonic(same / len(p), same / len(g))


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


def bootstrap_interval(values):
    """(mean, low, high): 95 % percentile interval of the mean, questions drawn anew 2000 times. Equal values
    would have no width: they have that of Wilson's interval for none of n.

    >>> [round(x, 2) for x in bootstrap_interval([0, 0])], [round(x, 2) for x in bootstrap_interval([1, 1])]
    ([0.0, -0.66, 0.66], [1.0, 0.34, 1.0])
    """
    values = np.asarray(values, dtype=float)
    n = len(values)
    if (values == values[0]).all():
        half = 1.96**2 / (n + 1.96**2)
        most = max(1.0, abs(values[0]))  # of shares and their differences
        return float(values[0]), float(max(-most, values[0] - half)), float(min(most, values[0] + half))
    rng = np.random.default_rng(0)
    rows = rng.integers(0, n, (2000, n))
    means = values[rows].sum(1) / n
    ends = [(1 - .95) / 2, (1 + .95) / 2]
    low, high = np.quantile(means, ends)
    return float(values.sum() / n), float(low), float(high)


def with_interval(key, values):
    """{key, key_low, key_high} for a summary; of shares from 0 to 1, or of counts from 0."""
    mean, low, high = bootstrap_interval(values)
    low = max(0.0, low)
    return {key: mean, f"{key}_low": low, f"{key}_high": high}


def seed_interval(values):
    """(mean, low, high) of one number per seed: 95 % interval of Student's t. Training again is what a claim
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
    """Whether a gold answer stands in a text, both normalised, as whole words; in scripts without blanks
    between words, as it is.

    >>> stands_in(["The Beatles"], "It was by Beatles, in 1965."), stands_in(["art"], "Bart left.")
    (True, False)
    >>> stands_in(["北京"], "天坛位于北京市。"), stands_in(["서울"], "수도는 서울이다.")
    (True, True)
    """
    text = f" {normalize_answer(text)} "
    golds = filter(None, map(normalize_answer, golds))
    return any((gold if _UNSPACED.search(gold) else f" {gold} ") in text for gold in golds)


def reading(rows):
    """What tells searching from reading, of the questions that do not offer their answer: the share in whose
    observations a gold answer stood ("read"), and EM where it did; and copying from both: of the answers
    given, the share that stand as they are in the question or in an observation."""
    rows = [r for r in rows if not is_two_way(r)]
    numbers = {
        "read": [r["read"] for r in rows],
        "em_read": [r["em"] for r in rows if r["read"] == 1],
        "copied": [r["copied"] for r in rows if "copied" in r],
    }
    means = {name: _mean(of) for name, of in numbers.items() if of}
    return {"reading": {"n": len(rows)} | means} if rows else {}


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
        summary |= with_interval(key, [r[key] for r in rows])
    for field in ("type", "hops"):
        summary[f"by_{field}"] = _parts(rows, [r[field] for r in rows])
    if all("type" in r or "gold" in r for r in rows):
        two_way = [is_two_way(r) for r in rows]
        summary |= _parts(rows, ["two_way" if offered else "open" for offered in two_way])
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


# ---------------------------------------------------------------- as text

def mean_em(found):
    """Mean EM of evaluations {set: {"summary", …}}, but for those whose answers a rule gave ("by_rule"); None
    without any."""
    summaries = [r["summary"] for r in found.values()]
    ems = [s["em"] for s in summaries if "em" in s and not s.get("by_rule")]
    return sum(ems) / len(ems) if ems else None


def interval(summary, key="em"):
    """
    >>> interval({"em": .5, "em_low": .25, "em_high": .75})
    '0.500 [0.250, 0.750]'
    """
    ends = [summary.get(f"{key}_{end}") for end in ("low", "high")]
    if None in ends:
        return f"{summary[key]:.3f}"
    return signed((summary[key], *ends), ".3f")


def signed(gain, form="+.3f"):
    """
    >>> signed((.1, .05, .15))
    '+0.100 [+0.050, +0.150]'
    """
    mean, low, high = gain
    return f"{mean:{form}} [{low:{form}}, {high:{form}}]"


def summary_line(name, summary):
    """One line of an evaluation; "names": what its em and f1 are, where they are something else. Behind it
    two-way questions beside the others, where there are such, and EM of the others where their answer stood
    in what was read."""
    names = {"em": "EM", "f1": "F1"} | summary.get("names", {})
    line = f"eval {name} (n {summary['n']}): {names['em']} {interval(summary)}"
    numbers = summary | summary.get("reading", {})
    if "two_way" not in summary:
        numbers.pop("open", None)
        numbers.pop("guess", None)
    forms = {
        "em_valid": " (in valid format {:.3f})",
        "f1": f" | {names['f1']} {{:.3f}}",
        "searches": " | searches {:.2f}",
        "tokens": " | tokens {:.0f}",
        "precision": " | precision {:.3f}",
        "recall": " | recall {:.3f}",
        "sentences": " | sentences {:.2f}",
        "format": " | format {:.2f}",
        "two_way": " | two-way {0[em]:.3f} (n {0[n]})",
        "open": ", others {0[em]:.3f} (n {0[n]})",
        "guess": ", guessing {:.3f}",
        "read": " | answer read {:.2f}",
        "em_read": ", EM there {:.3f}",
        "copied": ", answers copied right {:.2f}",
    }
    for key, form in forms.items():
        if key in numbers:
            line += form.format(numbers[key])
    return line
