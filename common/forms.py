"""The form of what is read back from a run's files, which a hand or a disk may have changed.

A form is a type; several, of which one has to fit (None: it may be missing); [form]: a list of such; [form,
form]: a list of these two; {key: form}: an object, "*" its other keys, "key?" one that may be missing, but is
not null. What the files mean: docs/runs.md. Imports nothing of ours."""

from fnmatch import fnmatch
from pathlib import Path


def of(form, keys):
    """{key: the form} of keys in a row."""
    return dict.fromkeys(keys.split(), form)


ANY = object
NUMBER = (float, int)
TEXT = (str, None)
EVIDENCE = ([[str]], [str])  # [title, sentence]; of older runs the sentence alone
NODE = {"id": int, "parents": [int], "how?": [str]}
NODE |= of(TEXT, "text observation label")
NODE |= of(NUMBER, "d_TA? d_TQ?")
TRAJECTORY = {"path": [int], "reward": NUMBER, "why?": [str]}
GROUP = {"nodes?": [NODE], "trajectories?": [TRAJECTORY], "hops?": int}
GROUP |= of(TEXT, "question_id question type")
GROUP |= of([str], "gold?") | of(EVIDENCE, "evidence?")
BARE = {"id?": str, "em?": NUMBER, "nodes": None}  # a prediction that the page does not show
PREDICTION = BARE | {
    "nodes": [NODE],
    "trajectories": [TRAJECTORY],
    "hops?": int,
}
PREDICTION |= of(str, "question type")
PREDICTION |= of(TEXT, "answer problem")
PREDICTION |= of([str], "gold")
PREDICTION |= of(EVIDENCE, "evidence?")
PREDICTION |= of(NUMBER, "em_valid? f1? searches? tokens? read? copied?")
PART = {"n": int, "em": NUMBER}
INPUTS = {"*": str}
SUMMARY = {
    "n?": int,
    "em?": NUMBER,
    "names?": {"*": str},
    "reading?": {"*": NUMBER},
    "inputs?": INPUTS,
    "*": NUMBER,
}
SUMMARY |= of(PART, "two_way? open?")
SUMMARY |= of(TEXT, "set search")
SUMMARY |= of(ANY, "by_type by_hops ends faults patterns first_wrong recall_at ranks")
CONFIG = {"changed?": [str], "threads?": int, "inputs?": INPUTS}
CONFIG |= of(TEXT, "run_id machine")
CONVERSATION = {"conversations": [of(str, "from value")]}
FORMS = {  # of a file, of .jsonl a line
    "config.json": CONFIG,
    "metrics.json": {"*": [str, str, str, str]},
    "metrics.jsonl": {"step": int, "*": (*NUMBER, None)},
    "samples.jsonl": {"step": int} | GROUP,
    "trainer.json": {
        "step": int,
        "digests?": {"*": str},
        "sha256?": {"*": str},  # of checkpoints of before
        "run": TEXT,
        "*": NUMBER,
    },
    "*rows.json": [[[int], [int]]],
    "sampled.jsonl": {"id": str, "row": (CONVERSATION, None)},
    "answers.jsonl": of(str, "key text"),
    "said_*.jsonl": of(str, "key text stop_reason"),
    "*.verdicts.jsonl": of(str, "key reason") | {"correct": (bool, None)},
    "sharegpt.jsonl": {},
    "demonstrations.jsonl": {},
}
EVALUATION = {"summary": SUMMARY, "predictions": ([PREDICTION], [BARE])}
DEEPEST = 50  # lists and objects in one another
WORDS = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    None: "null",
}


def form_of(path):
    """The form that a file has by its name."""
    return next((form for name, form in FORMS.items() if fnmatch(Path(path).name, name)), ANY)


def misfit(value, form):
    """(where, what it should be) of the first part of a JSON value that has another form; None where all
    fits. Of a value that should be an object and is none, what is missing in it is told.

    >>> misfit({"a": [{"b": 1}, {"b": "1"}]}, {"a": [{"b": NUMBER}]}), misfit([1], {"step": int})
    (('a[1].b', 'a number'), ('step', 'a whole number'))
    """
    if isinstance(form, dict) and not isinstance(value, dict):
        return misfit({}, form) or ("", WORDS[dict])
    fault = _fault(value, form, 0)
    return fault and ("".join(fault[0]).strip("."), fault[1])


def _fault(value, form, depth):
    """([keys that lead there], what should stand there), or None."""
    if isinstance(form, tuple):
        faults = []
        for one in form:
            faults.append(_fault(value, one, depth))
            if faults[-1] is None:
                return None
        return max(faults, key=lambda fault: len(fault[0]))  # of the form that fits furthest
    if form is ANY and isinstance(value, (dict, list)):
        form = {} if isinstance(value, dict) else [ANY]
    if not isinstance(form, (dict, list)):
        fits = value is None if form is None else isinstance(value, form)
        fits = fits and (form is not int or abs(value) < 2**63)
        return None if fits else ([], WORDS[form])
    if not isinstance(value, type(form)):
        return [], WORDS[type(form)]
    if isinstance(form, list) and len(value) != len(form) > 1:
        return [], f"a list of {len(form)}"
    if depth == DEEPEST:
        return [], "less nested"
    for key, part, own in _parts(value, form):
        fault = _fault(part, own, depth + 1)
        if fault:
            return [key, *fault[0]], fault[1]
    return None


def _parts(value, form):
    """(name, value, form) of each part of a list or an object."""
    if isinstance(form, list):
        for i, part in enumerate(value):
            yield f"[{i}]", part, form[min(i, len(form) - 1)]
        return
    others = form.get("*", ANY)
    for key, own in form.items():
        name = key.removesuffix("?")
        if name in value or key == name != "*":
            yield f".{name}", value.get(name), own
    for key, part in value.items():
        if key not in form and f"{key}?" not in form:
            yield f".{key}", part, others
