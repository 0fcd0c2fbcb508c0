"""Questions and corpora in the public formats.

| source | form |
| --- | --- |
| HotpotQA, 2WikiMultihopQA | official JSON (a list) and their hub layout (dict-of-lists context) |
| MuSiQue | official JSONL |
| NQ, TriviaQA, PopQA, Bamboogle, … | FlashRAG JSONL {id, question, golden_answers, metadata}, NQ-open JSONL, CSV |
| QALD-10 | official JSON {questions: [{id, question, answers}]}, and ToG's list with labels and topic entities |
| Search-R1, verl | parquet {prompt, reward_model.ground_truth} |
| hub | a short name of HUB, or dataset_id[:config[:split]] through `datasets` |
| corpus | JSONL {id, contents} with contents = '"title"\\ntext', {id, title, text}, JSON lists of them; "contexts" = pooled from questions |

A bad record raises DataError naming file, record and field; skip_bad=True counts and skips it.
"""

import csv
import io
import itertools
import json
import random
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

# paper's name -> (hub id, config, split); splits as Search-R1 evaluates them: test, else dev
HUB = {
    "hotpotqa": ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", "train"), "hotpotqa-dev": ("RUC-NLPIR/FlashRAG_datasets", "hotpotqa", "dev"),
    "2wiki": ("RUC-NLPIR/FlashRAG_datasets", "2wikimultihopqa", "train"), "2wiki-dev": ("RUC-NLPIR/FlashRAG_datasets", "2wikimultihopqa", "dev"),
    "musique": ("RUC-NLPIR/FlashRAG_datasets", "musique", "train"), "musique-dev": ("RUC-NLPIR/FlashRAG_datasets", "musique", "dev"),
    "bamboogle": ("RUC-NLPIR/FlashRAG_datasets", "bamboogle", "test"), "nq": ("RUC-NLPIR/FlashRAG_datasets", "nq", "test"),
    "triviaqa": ("RUC-NLPIR/FlashRAG_datasets", "triviaqa", "test"), "popqa": ("RUC-NLPIR/FlashRAG_datasets", "popqa", "test"),
    "search-r1": ("PeterJinGo/nq_hotpotqa_train", None, "train"),
}


class DataError(ValueError):
    """A file, record or field that cannot be used, with where it is and what was expected."""


@dataclass
class Question:
    id: str
    question: str
    answers: list[str]                       # gold answer and aliases, never empty
    type: str = ""                           # bridge, comparison, compositional, …
    hops: int = 0                            # 0 = the data set does not say
    supporting_facts: list = field(default_factory=list)  # [title, sentence index]
    context: list = field(default_factory=list)           # [title, [sentences]]
    evidences: list = field(default_factory=list)         # [subject, relation, object]
    entities: list = field(default_factory=list)          # [name, id] of topic entities, where the data set names them


def _strings(value):
    """Gold answers of any layout as a list of non-empty strings."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [str(v) for v in value if v is not None and str(v).strip()]
    return [str(value)] if value is not None and str(value).strip() else []


def _parse_qald(row, number):
    """QALD-10. ToG's form has labels; the official one gives entities as Wikidata ids, numbers and dates as they are, yes or no for ASK."""
    if "qid_topic_entity" in row:
        answers = _strings(list(dict(row["answer"]).values()))
        return Question(f"qald-{number}", row["question"], answers, entities=[[name, qid] for qid, name in row["qid_topic_entity"].items()])
    text = next((q["string"] for q in row["question"] if q["language"] == "en"), "")
    values = [b["value"] for a in row["answers"] for r in a.get("results", {}).get("bindings", []) for b in r.values() if b["value"]]
    found = [str(v).rsplit("/entity/", 1)[-1] for v in values]
    return Question(str(row["id"]), text, found + ["yes" if str(a["boolean"]).lower() == "true" else "no" for a in row["answers"] if "boolean" in a])


def parse_question(row, number=0):
    """One record of any supported layout -> Question. Raises KeyError(field) or ValueError(message)."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if "qid_topic_entity" in row or isinstance(row.get("question"), list):
        return _checked(_parse_qald(row, number))
    if "reward_model" in row:  # Search-R1 and verl
        truth = row["reward_model"]["ground_truth"]
        answers = _strings(truth["target"] if isinstance(truth, dict) else truth)
        text = row.get("question") or list(row["prompt"])[-1]["content"].rsplit("Question:", 1)[-1]
        return _checked(Question(str(row.get("id") or (row.get("extra_info") or {}).get("index", number)), text.strip(), answers))
    text = row["Question"] if "Question" in row else row["question"]
    if "golden_answers" in row:
        answers, meta = _strings(row["golden_answers"]), row.get("metadata") or {}
    else:
        answers, meta = _strings(row["Answer"] if "Answer" in row else row["answer"]), row
        answers += [a for a in _strings(row.get("answer_aliases")) if a not in answers]
    question = Question(str(row.get("_id") or row.get("id") or row.get("idx", number)), text, answers, str(meta.get("type") or ""), meta.get("hops") or 0)
    facts, context = meta.get("supporting_facts"), meta.get("context")
    if isinstance(facts, dict):  # hub layout
        facts = list(zip(facts["title"], facts.get("sent_id", facts.get("sent_idx", [])), strict=True))
    if isinstance(context, dict):
        context = list(zip(context["title"], context.get("sentences", context.get("content", [])), strict=True))
    if "paragraphs" in row:  # MuSiQue; a paragraph counts as one sentence
        context = [(p["title"], [p["paragraph_text"]]) for p in row["paragraphs"]]
        facts = [(p["title"], 0) for p in row["paragraphs"] if p.get("is_supporting")]
        question.hops = len(row.get("question_decomposition") or [])
    question.supporting_facts = [[str(t), int(i)] for t, i in facts or []]
    if isinstance(context, (list, tuple)):
        question.context = [[str(t), list(s)] for t, s in context]
        if not all(isinstance(sentence, str) for _, sentences in question.context for sentence in sentences):
            raise ValueError("field 'context': sentences must be strings")
    question.evidences = [list(e) for e in meta.get("evidences") or []]
    if not all(len(e) == 3 and all(isinstance(x, str) for x in e) for e in question.evidences):
        raise ValueError("field 'evidences': expected triples of strings")
    if not question.hops:
        question.hops = len(question.evidences) or len({t for t, _ in question.supporting_facts})
    return _checked(question)


def _checked(question):
    if not isinstance(question.question, str) or not question.question.strip():
        raise ValueError("field 'question' is empty")
    if not question.answers:
        raise ValueError("field 'answer' is empty: a question without an answer cannot be scored")
    return question


def _parse_json(text):
    """json.loads, without halves of surrogate pairs, which are no text. Raises ValueError."""
    try:
        value = json.loads(text)
        return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) if "\\ud" in text.lower() else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _rows(path):
    """(record number, row) of a JSON list, JSONL, CSV or parquet file; record numbers count from 1."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        import pyarrow.parquet
        try:
            yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
        except pyarrow.ArrowInvalid as error:
            raise DataError(f"{path}: not a parquet file ({error})") from None
        return
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if suffix == ".csv":
        csv.field_size_limit(2**31 - 1)
        yield from enumerate(csv.DictReader(io.StringIO(text, newline="")), 1)
    elif text.lstrip().startswith("[") or re.match(r'\s*\{\s*"(dataset|questions)"\s*:\s*[\[{]', text):  # a list, or QALD's {"dataset", "questions"}
        try:
            rows = _parse_json(text)
        except ValueError as error:
            raise DataError(f"{path}: not valid JSON: {error}") from None
        rows = rows.get("questions") if isinstance(rows, dict) else rows
        if not isinstance(rows, list):
            raise DataError(f"{path}: field 'questions' is missing, or no list")
        yield from enumerate(rows, 1)
    else:
        for number, line in enumerate(text.split("\n"), 1):  # (splitlines would also cut at U+2028, which JSON allows)
            if line.strip():
                try:
                    row = _parse_json(line)
                except ValueError as error:
                    raise DataError(f"{path}: record {number} is not valid JSON: {error}") from None
                yield number, row


def _from_hub(source):
    import datasets
    name, config, split = HUB.get(source) or (source.split(":") + [None, None])[:3]
    try:
        rows = datasets.load_dataset(name, config, split=split or "train")
    except Exception as error:  # whatever the hub client raises, the user needs the same remedy
        raise DataError(f"--data {source}: no such file here, and the hub data set {name!r} did not load "
                        f"({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no message'}). "
                        f"Give a path to a .json, .jsonl, .csv or .parquet file, or one of: world, {', '.join(HUB)}") from error
    yield from enumerate(rows, 1)


def load_questions(source, limit=None, skip_bad=False):
    """Questions of a path, a hub name or an iterable of rows; at most `limit`."""
    if not isinstance(source, (str, Path)):
        name, rows = "records", enumerate(source, 1)
    else:
        path, name = Path(source), str(source)
        if path.is_dir():
            raise DataError(f"{path} is a folder; give one file")
        if not path.exists() and path.suffix in (".json", ".jsonl", ".csv", ".parquet"):
            raise DataError(f"{path}: no such file")
        rows = _rows(path) if path.exists() else _from_hub(str(source))
    questions, bad = [], 0
    for number, row in rows:
        if limit is not None and len(questions) >= limit:
            break
        try:
            questions.append(parse_question(row, number))
        except (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError) as error:
            if isinstance(error, DataError):
                raise
            what = f"field {error} is missing" if isinstance(error, KeyError) else str(error)
            if not skip_bad:
                raise DataError(f"{name}: record {number}: {what} (--skip-bad leaves such records out)") from None
            bad += 1
    if bad:
        print(f"{name}: skipped {bad} bad records", file=sys.stderr)
    if not questions:
        raise DataError(f"{name}: no questions in it")
    seen = set()
    for i, q in enumerate(questions):  # ids key seeds and predictions, so they must differ
        if q.id in seen:
            q.id = f"{q.id}#{i}"
        seen.add(q.id)
    return questions


def shuffled_forever(items, seed):
    """The items for ever, shuffled anew each epoch; the same for the same seed."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}/{epoch}").sample(items, len(items))


def pool_contexts(questions):
    """Every distinct passage of the questions' own contexts as corpus rows, in order of appearance."""
    rows, seen = [], set()
    for q in questions:
        for title, sentences in q.context:
            text = " ".join(s.strip() for s in sentences)
            if (title, text) not in seen:
                seen.add((title, text))
                rows.append({"id": str(len(rows)), "title": title, "text": text})
    if not rows:
        raise DataError("--corpus contexts: the questions carry no contexts to pool; give a corpus file (JSONL with id, contents)")
    return rows


MEMORY_MAP_FROM = 200e6  # bytes of a corpus file


def load_corpus(source):
    """Corpus rows {"id", "title", "text"} of a JSON or JSONL file, as a list (a memory-mapped table past 200 MB)."""
    path = Path(source)
    if not path.exists():
        raise DataError(f"--corpus {source}: no such file (JSONL with id, contents; or 'contexts')")
    if path.is_dir():
        raise DataError(f"--corpus {source} is a folder; give one file")
    if path.stat().st_size > MEMORY_MAP_FROM and path.suffix == ".jsonl":
        import datasets
        table = datasets.load_dataset("json", data_files=str(path), split="train")
        return table.map(lambda row, i: _passage(row, i), with_indices=True, remove_columns=table.column_names)
    rows = []
    for number, row in _rows(path):
        try:
            rows.append(_passage(row, number - 1))
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}: record {number}: expected id and contents (or title and text): {error}") from None
    if not rows:
        raise DataError(f"{path}: the corpus is empty")
    return rows


def _passage(row, number):
    if "contents" in row:
        title, _, text = row["contents"].partition("\n")
        if not text:
            title, text = "", row["contents"]
    else:
        title, text = row.get("title", ""), row["text"]
    return {"id": str(row.get("id", number)), "title": title.strip().strip('"'), "text": text.strip()}
