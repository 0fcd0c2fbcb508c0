"""A record of any public layout -> Question. docs/data.md has an example of each.

A value of the wrong type is an error that names its field, never its repr or its characters: a gold answer
"{'value': 'a'}", or a passage "O n e  s e n t e n c e", would train and score a run without a word.
"""

import hashlib
import html
import json
import re
import unicodedata
from dataclasses import dataclass, field
from functools import partial

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
    support_paragraphs: list = field(default_factory=list)  # MuSiQue: idx of each supporting paragraph,
    paragraph_ids: list = field(default_factory=list)       # and of each paragraph of the context
    decomposition: list = field(default_factory=list)       # MuSiQue: {question, answer, paragraph_…idx}


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
    """json.loads of a text or of UTF-8, without halves of surrogate pairs, which are no text. Raises
    ValueError."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text)
        if "\\ud" in text.lower():
            text = json.dumps(value, ensure_ascii=False)
            value = json.loads(text.encode("utf-8", "replace"))
        return value
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None
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


def fingerprint(question):
    """16 letters that stand for a question, whatever its case, blanks, punctuation and form of letters.

    >>> fingerprint("Who wrote the  Silent Harbor?") == fingerprint("who wrote “Silent Harbor”")
    True
    """
    text = question
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        marks = ("P", "Cf")  # punctuation, and what is not seen
        text = "".join(c for c in text if not unicodedata.category(c).startswith(marks))
    words = normalize_answer(text) or question
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


# ---------------------------------------------------------------- fields: these raise what NOT_SO has

NOT_SO = (TypeError, ValueError, LookupError, AttributeError, OverflowError)
ANSWERED = ("answer", "golden_answers", "possible_answers", "answers", "answer_aliases", "aliases")
SHAPES = {
    **dict.fromkeys(ANSWERED, 'text, a list, {"target"} or {"value", "aliases"}'),
    "supporting_facts": "[[title, sentence index], …]",
    "evidences": "[[head, relation, tail], …]",
    "context": "[[title, [sentences]], …]",
    "paragraphs": '[{"idx", "title", "paragraph_text", "is_supporting": true or false}, …]',
    "question_decomposition": '[{"question", "answer", "paragraph_support_idx", "support_paragraph"}, …]',
    "hops": "a whole number",
    "metadata": "an object",
    "extra_info": "an object",
    "qid_topic_entity": "an object of texts",
    "prompt": 'a list of {"content"}',
    "reward_model": '{"ground_truth": an answer}',
}


def read_field(record, name, read):
    """read(the field's value); None where there is none. ValueError, naming the field, where it is not so."""
    value = from_json(record.get(name))
    if value is None or value == "":  # (a table's empty cell)
        return None
    try:
        return read(value)
    except NOT_SO:
        raise wrong(name, SHAPES.get(name, "text"), value) from None


def text_of(value):
    """Text, or a number as text. Tables turn 1984 into 1984.0, and normalisation would turn that into 19840:
    an integral number is written without a point. Letters with their accents are one sign (NFC), as
    tokenizers write them.

    >>> text_of(1984.0), text_of(2.5), len(text_of("Zu\u0308rich"))
    ('1984', '2.5', 6)
    """
    if isinstance(value, str):
        return unicodedata.normalize("NFC", value)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError
    number = int(value)  # (infinity and NaN have none)
    return str(number if number == value else value)


def whole(value):
    """A whole number; a table's cell has it as text."""
    if isinstance(value, bool) or not isinstance(value, str) and int(value) != value:
        raise TypeError
    return int(value)


def kind_of(kind, value):
    """The value, or what its text is, where it is of this kind: the characters of a text are no list."""
    value = from_json(value)
    if not isinstance(value, kind):
        raise TypeError
    return value


def rows_of(value, *columns):
    """[[a, b, …]] of such a list, of [{"a": …, "b": …}, …] and of the hub's {"a": […], "b": […]}. columns:
    the names that each goes by; one that is missing is None.

    >>> rows_of({"title": ["T"], "sent_id": [3]}, ("title",), ("sent_id", "sent_idx"))
    [['T', 3]]
    """
    def pick(record):
        return [next((record[name] for name in names if name in record), None) for names in columns]

    if isinstance(value, dict):
        lists = [kind_of(list, column) for column in pick(value)]
        return list(map(list, zip(*lists, strict=True)))
    found = []
    for item in kind_of((list, tuple), value):
        if isinstance(item, dict):
            item = pick(item)
        found.append(kind_of((list, tuple), item))
    return found


def texts_of(value):
    """A list of texts, such as a passage's sentences; one text is a list of one."""
    if isinstance(value, str):
        return [value]
    return [text_of(sentence) for sentence in kind_of((list, tuple), value)]


# ---------------------------------------------------------------- gold answers

LIKE_JSON = re.compile(r"""\[\s*['"].*\]|\{\s*['"].*\}""", re.DOTALL)  # (Python's way to write a list)


ANSWER_SPLIT = "<|answer_split|>"


def answers_of(value):
    """Gold answers of any layout as a list of texts that are not blank; true and false are "yes" and "no".

    An object is TriviaQA's {"value", "aliases"} or Search-R1's {"target"}; a table's map is one too. A list
    or an object that was written as text (PopQA's possible_answers) is what it says; "[REC]" is an answer,
    and so is an interval. <|answer_split|> stands between answers (DeepResearcher).

    >>> answers_of('["a", "b"]'), answers_of("[REC]"), answers_of('{"target": "a"}'), answers_of([True, 7.0])
    (['a', 'b'], ['[REC]'], ['a'], ['yes', '7'])
    >>> answers_of("[0, 1]"), answers_of("Ann Lee<|answer_split|>A. Lee"), answers_of([("value", "Ann")])
    (['[0, 1]'], ['Ann Lee', 'A. Lee'], ['Ann'])
    """
    said = from_json(value)
    if not (isinstance(value, str) and isinstance(said, list) and not any(isinstance(s, str) for s in said)):
        value = said
    if isinstance(value, str) and ANSWER_SPLIT in value:
        value = value.split(ANSWER_SPLIT)
    if isinstance(value, list) and value and all(isinstance(part, tuple) for part in value):
        value = dict(value)
    if isinstance(value, dict):
        fields = lowered(value)
        value = [fields[name] for name in ("value", "target", *ANSWERED) if name in fields]
        if not value or "<unk>" in value:  # (TriviaQA's for an answer that was not published)
            raise ValueError
    if isinstance(value, (list, tuple)):
        return [answer for part in value for answer in answers_of(part)]
    if isinstance(value, bool):
        value = "yes" if value else "no"
    text = "" if value is None else text_of(value)
    if LIKE_JSON.fullmatch(text.strip()):
        raise ValueError
    return [text] if text.strip() else []


def golds_of(record, *more):
    """The answers in all fields of a record, and more, each once; the first is the main one. Those that
    normalise to nothing ("!!!", "The The", a damaged character) make an empty prediction right, and stay only
    where there is no other (see data.load_questions)."""
    found = [*more]
    for name in ANSWERED:
        found += read_field(record, name, answers_of) or []
    if not found:
        name = next((name for name in ANSWERED if name in record), ANSWERED[0])
        raise ValueError(f"field '{name}' is empty: a question without an answer cannot be scored")
    found = list(dict.fromkeys(found))
    return [answer for answer in found if normalize_answer(answer)] or found


# ---------------------------------------------------------------- layouts

IDS = ("_id", "id", "question_id", "idx")


def parse_question(row):
    """One record of any supported layout -> Question. Raises ValueError naming the field."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {shown(row)}")
    record = lowered(row)
    if "reward_model" in record:
        return _parse_verl(record)
    for names in (("question",), ANSWERED):
        if not record.keys() & set(names):
            found = ", ".join(repr(str(name)[:40]) for name in list(row)[:20])
            raise ValueError(f"field '{names[0]}' is missing: there are {found or 'none'}; rename to "
                             f"question and answer (or {', '.join(ANSWERED[1:])})")
    if "qid_topic_entity" in record:
        return _parse_tog(record)
    return _parse_plain(record)


def _question(record, golds, index=None):
    """A Question without evidence. Its id is the first that is there (0 is one), else its fingerprint: a
    place in a file would be another question's after a shuffle."""
    text = read_field(record, "question", text_of) or ""
    if not text.strip():
        raise wrong("question", "text", record.get("question"))
    ids = [read_field(record, key, text_of) for key in IDS]
    return Question(next(filter(None, [*ids, index]), fingerprint(text)), text, golds)


def _parse_tog(row):
    """QALD-10 as ToG has it: labels of answers and topic entities by their Wikidata ids."""
    def labels(answer):
        return answers_of(list(kind_of(dict, answer).values()))

    def entities(topics):
        return [[text_of(label), number] for number, label in kind_of(dict, topics).items()]

    golds = golds_of({}, *read_field(row, "answer", labels) or [])
    question = _question(row, golds)
    question.entities = read_field(row, "qid_topic_entity", entities) or []
    return question


def _parse_verl(row):
    """Search-R1 and verl. Where no field has the question, it stands behind the first "Question:" that begins
    a sentence of the user's last message; without one the whole message is the question (as in ARPO's
    rows)."""
    def truth(model):
        return answers_of(kind_of(dict, model)["ground_truth"])

    def asked(prompt):
        said = [m["content"] for m in prompt if m.get("role") != "assistant"]  # (which begins its answer)
        return re.split(r"(?:\A|[.!?:\n])\s*Question:", said[-1], maxsplit=1)[-1]

    golds = golds_of(row, *read_field(row, "reward_model", truth) or [])
    extra = read_field(row, "extra_info", partial(kind_of, dict)) or {}
    if "question" not in row:
        row = row | {"question": extra.get("question") or read_field(row, "prompt", asked)}
    question = _question(row, golds, read_field(extra, "index", text_of))
    question.question = question.question.strip()
    return question


def _parse_plain(row):
    """HotpotQA, 2Wiki, MuSiQue, FlashRAG, NQ-open, TriviaQA, PopQA, Bamboogle."""
    meta = row
    if "golden_answers" in row:  # FlashRAG
        meta = row | (read_field(row, "metadata", partial(kind_of, dict)) or {})
    if str(meta.get("answerable")).lower() == "false":  # MuSiQue-Full: what its answer says stands nowhere
        raise ValueError("field 'answerable' is false: no answer can be found, so none is scored")
    question = _question(row, golds_of(row))
    question.type = str(meta.get("type") or "")
    question.supporting_facts = read_field(meta, "supporting_facts", facts_of) or []
    question.evidences = read_field(meta, "evidences", triples_of) or []
    question.decomposition, supporting = read_field(meta, "question_decomposition", steps_of) or ([], [])
    paragraphs = read_field(meta, "paragraphs", paragraphs_of)
    if paragraphs is None and question.decomposition and meta.get("context") is None:
        paragraphs = supporting  # all that FlashRAG keeps of a context
    if paragraphs is None:
        question.context = read_field(meta, "context", passages_of) or []
    else:
        _add_paragraphs(question, paragraphs)
    titles = {title for title, _ in question.supporting_facts}
    steps = len(question.decomposition) or len(question.evidences)
    question.hops = read_field(meta, "hops", whole) or steps or len(titles)
    return question


def facts_of(value):
    found = rows_of(value, ("title",), ("sent_id", "sent_idx"))
    return [[title_of(title), whole(index)] for title, index in found]


def title_of(value):
    """A page's title; HotpotQA has some as HTML writes them, but no text.

    >>> title_of("Lilo &amp; Stitch")
    'Lilo & Stitch'
    """
    return html.unescape(text_of(value))


def triples_of(value):
    found = rows_of(value, ("fact", "subject"), ("relation",), ("entity", "object"))
    return [[text_of(head), text_of(relation), text_of(tail)] for head, relation, tail in found]


def passages_of(value):
    found = rows_of(value, ("title",), ("sentences", "content"))
    return [[title_of(title), texts_of(sentences)] for title, sentences in found]


def paragraphs_of(value):
    """[(title, sentences, idx, whether it supports)] of MuSiQue; a paragraph counts as one sentence."""
    found = []
    names = ("title",), ("paragraph_text", "text"), ("idx",), ("is_supporting",)
    for place, (title, text, idx, supporting) in enumerate(rows_of(value, *names)):
        if supporting not in (None, True, False):  # (the text "False" would count as true)
            raise TypeError
        found.append((title_of(title), texts_of(text), place if idx is None else whole(idx), supporting))
    return found


def steps_of(value):
    """(MuSiQue's steps, the paragraphs in them)"""
    steps, paragraphs = [], []
    names = ("question",), ("answer",), ("paragraph_support_idx",), ("support_paragraph",)
    for text, answer, idx, paragraph in rows_of(value, *names):
        if paragraph is not None:
            paragraph = kind_of(dict, paragraph) | {"is_supporting": True}
            paragraphs.append(paragraph)
            idx = paragraph.get("idx") if idx is None else idx
        steps.append({"question": text_of(text), "answer": text_of(answer),
                      "paragraph_support_idx": None if idx is None else whole(idx)})
    return steps, paragraphs_of(paragraphs)


def _add_paragraphs(question, paragraphs):
    question.context = [[title, sentences] for title, sentences, *_ in paragraphs]
    question.paragraph_ids = [idx for _, _, idx, _ in paragraphs]
    supporting = [(title, idx) for title, _, idx, supports in paragraphs if supports]
    question.support_paragraphs = [idx for _, idx in supporting]
    question.supporting_facts = [[title, 0] for title, _ in supporting] or question.supporting_facts
