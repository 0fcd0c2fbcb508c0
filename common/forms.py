"""The form of what is read back from a run's files, which a hand or a disk may have changed.

A form is a type (float: whole numbers too); several, of which one has to fit (None: it may be missing);
[form]: a list of such; {key: form}: an object, "*" its other keys, "key?" one that may be missing, but is not
null. What the files mean: docs/runs.md. Imports nothing of ours."""

from fnmatch import fnmatch
from pathlib import Path


def of(form, keys):
    """{key: the form} of keys in a row."""
    return dict.fromkeys(keys.split(), form)


ANY = object
TEXT = (str, None)
NODE = {"id": int, "parents": [int], "how?": [str]}
NODE |= of(TEXT, "text observation label") | of(float, "d_TA? d_TQ?")
GROUP = {
    "nodes?": [NODE],
    "trajectories?": [{"path": [int], "reward": float, "why?": [str]}],
    "hops?": int,
    "gold?": [str],
    "evidence?": ([[str]], [str]),  # [title, sentence]; of older runs the sentence alone
}
GROUP |= of(TEXT, "question_id question answer problem") | of(str, "type?")
SUMMARY = of(float, "em? *") | of({"n": int, "em": float}, "two_way? open?")
SUMMARY |= {"n?": int, "names?": {"*": str}, "reading?": {"*": float}, "inputs?": {"*": str}}
SUMMARY |= of(TEXT, "set search")
SUMMARY |= of(ANY, "by_type by_hops ends faults patterns first_wrong recall_at ranks")
PREDICTION = GROUP | {"id?": str} | of(float, "em? em_valid? f1? searches? tokens? read? copied?")
BARE = {"id?": str, "em?": float, "nodes": None}  # a prediction that the page does not show
EVALUATION = {"summary": SUMMARY, "predictions": ([PREDICTION], [BARE])}
CONVERSATION = {"conversations": [of(str, "from value")]}
FORMS = {  # of a file, of .jsonl a line
    "config.json": {"changed?": [str], "threads?": int, "inputs?": {"*": str}} | of(TEXT, "run_id machine"),
    "metrics.json": {"*": [str]},
    "metrics.jsonl": {"step": int, "*": (float, None)},
    "samples.jsonl": {"step": int} | GROUP,
    "trainer.json": {"step": int, "run": TEXT, "digests?": {"*": str}, "*": float},
    "*rows.json": [[[int]]],
    "sampled.jsonl": {"id": str, "row": (CONVERSATION, None)},
    "answers.jsonl": of(str, "key text"),
    "said_*.jsonl": of(str, "key text stop_reason"),
    "*.verdicts.jsonl": of(str, "key text"),
}
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


def misfit(value, form, depth=0):
    """(where, what it should be) of the first part of a JSON value that has another form; None where all
    fits. Of a value that should be an object and is none, what is missing in it is told.

    >>> misfit({"a": [{"b": 1}, {"b": "1"}]}, {"a": [{"b": float}]}), misfit([1], {"step": int})
    (('a[1].b', 'a number'), ('step', 'a whole number'))
    """
    if isinstance(form, tuple):
        faults = [misfit(value, one, depth) for one in form]
        return None if None in faults else max(faults, key=lambda fault: len(fault[0]))  # that fits furthest
    if form is ANY:
        form = {dict: {}, list: [ANY]}.get(type(value), ANY)
    kind = type(form) if isinstance(form, (dict, list)) else form
    if kind is int and isinstance(value, int) and abs(value) >= 2**63:
        return "", WORDS[int]
    if not (value is None if kind is None else isinstance(value, (float, int) if kind is float else kind)):
        missing = misfit({}, form) if kind is dict and not depth else None
        return missing or ("", WORDS[kind])
    if depth == DEEPEST:
        return "", "less nested"
    for key, part, own in _parts(value, form):
        fault = misfit(part, own, depth + 1)
        if fault:
            where = f"{key}.{fault[0]}".replace(".[", "[").strip(".")
            return where, fault[1]
    return None


def _parts(value, form):
    """(name, value, form) of each part of a list or an object."""
    if isinstance(form, list):
        for i, part in enumerate(value):
            yield f"[{i}]", part, form[0]
    elif isinstance(form, dict):
        for key, own in form.items():
            name = key.removesuffix("?")
            if name in value or key == name != "*":
                yield name, value.get(name), own
        for key, part in value.items():
            if key not in form and f"{key}?" not in form:
                yield key, part, form.get("*", ANY)
