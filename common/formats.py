"""A record of any public layout -> Question. docs/data.md has an example of each.

A value of the wrong type is an error that names its field, never its repr or its characters: a gold answer
"{'value': 'a'}", or a passage "O n e  s e n t e n c e", would train and score a run without a word.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass, field

from common.metrics import normalize_answer


@dataclass
class Question:
    """A question with its gold answers and, where the data set has them, its gold evidence.

    MuSiQue's supporting paragraphs are scored by their indices, `support_paragraphs`, as its script does. In
    `supporting_facts` each is [title, 0] (a paragraph counts as one sentence): two paragraphs with one title,
    which MuSiQue has, are equal there."""
    id: str
    question: str
    answers: list[str]                       # gold answer and aliases, never empty
    type: str = ""                           # bridge, comparison, compositional, …
    hops: int = 0                            # 0 = the data set does not say
    supporting_facts: list = field(default_factory=list)    # [title, sentence index]
    context: list = field(default_factory=list)             # [title, [sentences]]
    evidences: list = field(default_factory=list)           # [subject, relation, object]
    entities: list = field(default_factory=list)            # [name, id] of topic entities, where known
    support_paragraphs: list = field(default_factory=list)  # MuSiQue: idx of each supporting paragraph
    decomposition: list = field(default_factory=list)       # MuSiQue: {question, answer, paragraph_…idx}


def parse_question(row):
    """One record of any supported layout -> Question. Raises ValueError naming the field."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {shown(row)}")
    record = lowered(row)
    if "qid_topic_entity" in record:
        return _parse_tog(record)
    if "reward_model" in record:
        return _parse_verl(record)
    for names in (ASKED, ANSWERED):
        if not record.keys() & set(names):
            found = ", ".join(repr(str(name)[:40]) for name in list(row)[:20])
            raise ValueError(f"field '{names[0]}' is missing: there are {found or 'none'}; rename to "
                             f"question (or {ASKED[1]}) and answer (or {', '.join(ANSWERED[1:])})")
    return _parse_plain(record)


# ---------------------------------------------------------------- values

def shown(value):
    """What a value is, in words that fit into an error's line."""
    if isinstance(value, str):
        return f"the text {value[:40]!r}"
    if isinstance(value, (type(None), bool, int, float)):
        return json.dumps(value)
    kind = type(value)
    return {dict: "an object", list: "a list", tuple: "a list"}.get(kind, kind.__name__)


def wrong(name, expected, value):
    return ValueError(f"field '{name}': expected {expected}, got {shown(value)}")


def parse_json(text):
    """json.loads, without halves of surrogate pairs, which are no text. Raises ValueError."""
    try:
        value = json.loads(text)
        if "\\ud" in text.lower():
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-8", "replace"))
        return value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def from_json(value):
    """The list or object that a text is (a table's cell, a column of objects as text); else the value."""
    if not isinstance(value, str) or not re.match(r"\s*[\[{]", value):
        return value
    try:
        return parse_json(value)
    except ValueError:
        return value


def lowered(record):
    """The record, its fields by their names in small letters too: "Title", "ID".

    >>> lowered({"Title": "Oslo"})
    {'title': 'Oslo', 'Title': 'Oslo'}
    """
    return {str(name).strip().lower(): value for name, value in record.items()} | record


def _dig(record, *path):
    """The value under nested keys. The error names the way to what is missing."""
    for depth, key in enumerate(path):
        record = _object(record, ".".join(path[:depth]))
        if key not in record:
            raise ValueError(f"field '{'.'.join(path[:depth + 1])}' is missing")
        record = record[key]
    return record


def _object(value, name):
    return _of(dict, value, name, "an object")


def _list(value, name, expected="a list"):
    return _of((list, tuple), value, name, expected)


def _of(kind, value, name, expected):
    found = value if kind is str else from_json(value)
    if not isinstance(found, kind):
        raise wrong(name, expected, value)
    return found


def _is_number(value):
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return isinstance(value, int) or math.isfinite(value)  # (an integer may be too large for a float)


def _text(value, name):
    """Text, or a number as text. Tables turn 1984 into 1984.0, and normalisation would turn that into 19840:
    an integral number is written without a point.

    >>> _text(1984.0, "answer"), _text(2.5, "answer")
    ('1984', '2.5')
    """
    if isinstance(value, str):
        return value
    if not _is_number(value):
        raise wrong(name, "text", value)
    if value == int(value):
        value = int(value)
    return str(value)


def _whole(value, name):
    """A whole number; a table's cell has it as text."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if not _is_number(value) or value != int(value):
        raise wrong(name, "a whole number", value)
    return int(value)


def _question(value, name):
    if not _of(str, value, name, "text").strip():
        raise ValueError(f"field '{name}' is empty")
    return value


def fingerprint(question):
    """16 letters that stand for a question, whatever its case, blanks and punctuation.

    >>> fingerprint("Who wrote the  Silent Harbor?") == fingerprint("who wrote Silent Harbor")
    True
    """
    words = normalize_answer(question) or question
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


def _identity(question, *values):
    """The first id that is there (0 is one), else the question's fingerprint: a place in a file would be
    another question's after a shuffle."""
    for value in values:
        if value is not None and value != "":
            return _text(value, "id")
    return fingerprint(question)


def _rows(value, name, shape, *columns):
    """[(a, b, …)] of [[a, b], …], of [{"a": …, "b": …}, …] and of the hub's {"a": […], "b": […]}.

    columns: the names that a column goes by; None among them = it may be missing, and is None then.

    >>> _rows({"title": ["T"], "sent_id": [3]}, "supporting_facts", "", ("title",), ("sent_id", "sent_idx"))
    [('T', 3)]
    """
    def pick(record, names):
        key = next((n for n in names if n in record), None)
        if key is None and None not in names:
            raise ValueError(f"field '{name}.{names[0]}' is missing")
        return record.get(key)

    if value is None or value == "":  # (a table's empty cell)
        return []
    if isinstance(value, dict):
        lists = [_list(pick(value, names), f"{name}.{names[0]}") for names in columns]
        if len(set(map(len, lists))) > 1:
            raise ValueError(f"field '{name}': its lists differ in length")
        return list(zip(*lists))
    rows = []
    for item in _list(value, name, shape):
        if isinstance(item, dict):
            item = [pick(item, names) for names in columns]
        if not isinstance(item, (list, tuple)) or len(item) != len(columns):
            raise wrong(name, shape, item)
        rows.append(tuple(item))
    return rows


# ---------------------------------------------------------------- gold answers

ANSWERED = ("answer", "golden_answers", "possible_answers", "answers", "answer_aliases", "aliases")


def _answers_of(record, names, within=""):
    """The answers in all of these fields, each once; the first is the main one."""
    found = []
    for name in names:
        found += _answers(record.get(name), within + name)
    return list(dict.fromkeys(found))


def _answers(value, name):
    """Gold answers of any layout as a list of texts that are not blank; true and false are "yes" and "no".

    A list or an object that was written as text (PopQA's possible_answers) is what it says; "[REC]" and
    "[1, 2]" are answers.

    >>> _answers('["a", "b"]', "answer"), _answers("[REC]", "answer"), _answers('{"target": "a"}', "answer")
    (['a', 'b'], ['[REC]'], ['a'])
    """
    if isinstance(value, str) and from_json(value) is value and LIKE_JSON.fullmatch(value.strip()):
        kind = shown({"[": [], "{": {}}[value.strip()[0]])
        raise ValueError(f"field '{name}': {value.strip()[:40]!r} is {kind}, but no JSON")
    if isinstance(value, dict):
        return _answer_object(value, name)
    if not isinstance(value, (list, tuple)):
        value = [value]
    found = []
    for v in value:
        inner = from_json(v)
        if inner is not v and not _is_numbers(inner):
            found += _answers(inner, name)
            continue
        if isinstance(v, bool):
            v = "yes" if v else "no"
        text = "" if v is None else _text(v, name)
        if text.strip():
            found.append(text)
    return found


LIKE_JSON = re.compile(r"""\[\s*['"].*\]|\{\s*['"].*\}""", re.DOTALL)  # (Python's way to write a list)


def _is_numbers(value):
    return isinstance(value, list) and len(value) > 0 and all(map(_is_number, value))


def _answer_object(value, name):
    """The answers in TriviaQA's {"value", "aliases"} (its own files: Value, Aliases), in Search-R1's
    {"target"}."""
    fields = lowered(value)
    names = [key for key in ("value", "target", *ANSWERED) if key in fields]
    if not names or any(isinstance(fields[key], dict) for key in names):
        raise wrong(name, 'text, a list, {"target"} or {"value", "aliases"}', value)
    if fields.get("value") == "<unk>":
        raise ValueError(f"field '{name}': '<unk>' stands for an answer that was not published")
    return _answers_of(fields, names, f"{name}.")


def _golds(answers, name):
    """The answers that a prediction can be compared with: those that normalise to nothing ("!!!", "The The",
    a damaged character) make an empty prediction right, and stay only where there is no other (see
    load_questions)."""
    if not answers:
        raise ValueError(f"field '{name}' is empty: a question without an answer cannot be scored")
    return [a for a in answers if normalize_answer(a)] or answers


# ---------------------------------------------------------------- layouts

def _parse_tog(row):
    """QALD-10 as ToG has it: labels of answers and topic entities by their Wikidata ids."""
    labels = _object(_dig(row, "answer"), "answer")
    answers = _answers(list(labels.values()), "answer")
    topics = _object(row["qid_topic_entity"], "qid_topic_entity")
    entities = [[_text(label, "qid_topic_entity"), qid] for qid, label in topics.items()]
    text = _question(_dig(row, "question"), "question")
    return Question(_identity(text), text, _golds(answers, "answer"), entities=entities)


def _parse_verl(row):
    """Search-R1 and verl. Where no field has the question, it stands behind the last "Question:" of the
    prompt's last message; without that word the whole message is the question (as in ARPO's rows)."""
    name = "reward_model.ground_truth"
    answers = _answers(_dig(row, *name.split(".")), name)
    answers += _answers_of(row, ANSWERED)
    extra = _object(row.get("extra_info") or {}, "extra_info")
    question = row.get("question") or extra.get("question")
    if question is None:
        messages = _list(_dig(row, "prompt"), "prompt", "a list of messages")
        last = messages[-1] if messages else None
        content = _dig({"prompt": last}, "prompt", "content")
        question = _question(content, "prompt.content").rsplit("Question:", 1)[-1]
    text = _question(question, "question").strip()
    identity = _identity(text, row.get("id"), extra.get("index"))
    return Question(identity, text, _golds(list(dict.fromkeys(answers)), name))


ASKED = ("question", "input")


def _parse_plain(row):
    """HotpotQA, 2Wiki, MuSiQue, FlashRAG, NQ-open, TriviaQA, PopQA, Bamboogle, UltraDomain."""
    asked = next(k for k in ASKED if k in row)
    text = _question(row[asked], asked)
    answered = next(k for k in ANSWERED if k in row)
    answers = _answers_of(row, ANSWERED)
    ids = [row.get(name) for name in ("_id", "id", "question_id", "idx")]
    identity = _identity(text, *ids)
    question = Question(identity, text, _golds(answers, answered))
    meta = row
    if "golden_answers" in row and row.get("metadata") is not None:
        meta = row | _object(row["metadata"], "metadata")
    question.type = str(meta.get("type") or "")
    _add_facts(question, meta)
    _add_triples(question, meta)
    supporting = _add_decomposition(question, meta)
    if meta.get("paragraphs") is not None:
        _add_paragraphs(question, meta["paragraphs"], "paragraphs")
    elif question.decomposition and meta.get("context") is None:
        _add_paragraphs(question, supporting, "question_decomposition.support_paragraph")
    elif asked != "input":  # (UltraDomain's context is a whole book, yet to be cut into passages)
        passages = _rows(meta.get("context"), "context", "[[title, [sentences]], …]",
                         ("title",), ("sentences", "content"))
        question.context = [[_text(t, "context"), _sentences(s, "context")] for t, s in passages]
    titles = {title for title, _ in question.supporting_facts}
    given = _whole(meta["hops"], "hops") if meta.get("hops") else 0
    steps = len(question.decomposition) or len(question.evidences)
    question.hops = given or steps or len(titles)
    return question


def _add_facts(question, meta):
    facts = _rows(meta.get("supporting_facts"), "supporting_facts", "[[title, sentence index], …]",
                  ("title",), ("sent_id", "sent_idx"))
    for title, index in facts:
        fact = [_text(title, "supporting_facts.title"), _whole(index, "supporting_facts.sent_id")]
        question.supporting_facts.append(fact)


def _add_triples(question, meta):
    triples = _rows(meta.get("evidences"), "evidences", "triples of texts",
                    ("fact", "subject"), ("relation",), ("entity", "object"))
    for triple in triples:
        question.evidences.append([_of(str, part, "evidences", "triples of texts") for part in triple])


def _add_decomposition(question, meta):
    """MuSiQue's steps; returns the paragraphs in them, which are all that FlashRAG keeps of a context."""
    name = "question_decomposition"
    rows = _rows(meta.get(name), name, '[{"question", "answer", "paragraph_support_idx"}, …]',
                 ("question",), ("answer",), ("paragraph_support_idx", None), ("support_paragraph", None))
    supporting = []
    for text, answer, idx, paragraph in rows:
        if paragraph is not None:
            paragraph = _object(paragraph, f"{name}.support_paragraph")
            supporting.append(paragraph | {"is_supporting": True})
            idx = paragraph.get("idx") if idx is None else idx
        question.decomposition.append({
            "question": _text(text, f"{name}.question"),
            "answer": _text(answer, f"{name}.answer"),
            "paragraph_support_idx": None if idx is None else _whole(idx, f"{name}.paragraph_support_idx")})
    return supporting


def _add_paragraphs(question, paragraphs, name):
    """MuSiQue's paragraphs; each counts as one sentence. Those that support are the facts."""
    facts = []
    rows = _rows(paragraphs, name, '[{"idx", "title", "paragraph_text", "is_supporting"}, …]',
                 ("title",), ("paragraph_text", "text"), ("idx", None), ("is_supporting", None))
    for position, (title, text, idx, supporting) in enumerate(rows):
        title = _text(title, f"{name}.title")
        question.context.append([title, _sentences(text, f"{name}.paragraph_text")])
        if supporting not in (None, True, False):  # (the text "False" would count as true)
            raise wrong(f"{name}.is_supporting", "true or false", supporting)
        if supporting:
            facts.append([title, 0])
            question.support_paragraphs.append(position if idx is None else _whole(idx, f"{name}.idx"))
    question.supporting_facts = facts or question.supporting_facts


def _sentences(value, name):
    """A passage's sentences; one text is one sentence."""
    if isinstance(value, str):
        return [value]
    return [_of(str, sentence, name, "sentences") for sentence in _list(value, name, "sentences")]
