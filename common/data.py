"""Questions and corpora in the public formats.

docs/data.md has a record of every form. A name of the hub is one of HUB, or dataset_id[:config[:split]].
A bad record raises DataError naming file, record and field; skip_bad=True counts and skips it, also a line
of JSON that is damaged or no UTF-8. formats.py makes Questions of records.
"""

import csv
import gzip
import hashlib
import itertools
import os
import random
import re
import sys
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from common import formats, metrics
from common.files import UserError, locate, looks_like_path
from common.formats import Question as Question
from common.formats import parse_question as parse_question
from common.passages import titled, unquoted


@dataclass
class Split:
    """Questions with a search over them."""
    name: str
    questions: list
    retriever: object     # with search(queries, k); None where nothing is searched
    graph: object = None  # kg.KnowledgeGraph, where there is one
    evaluated: frozenset = frozenset()  # fingerprints of all that is evaluated, which nothing may learn


class DataError(UserError):
    """A file, record or field that cannot be used, with where it is and what was expected."""


# ---------------------------------------------------------------- the hub

FLASHRAG = "RUC-NLPIR/FlashRAG_datasets"
HUB = {  # name -> (hub id, config, its splits: "train" trains, the last is the one that Search-R1 evaluates)
    "nq": (FLASHRAG, "nq", ("train", "dev", "test")),
    "triviaqa": (FLASHRAG, "triviaqa", ("train", "dev", "test")),
    "popqa": (FLASHRAG, "popqa", ("test",)),
    "hotpotqa": (FLASHRAG, "hotpotqa", ("train", "dev")),
    "2wiki": (FLASHRAG, "2wikimultihopqa", ("train", "dev")),
    "musique": (FLASHRAG, "musique", ("train", "dev")),
    "bamboogle": (FLASHRAG, "bamboogle", ("test",)),
    "search-r1": ("PeterJinGo/nq_hotpotqa_train", None, ("train", "test")),
}


def _named(source):
    """(name in HUB, split or "") of "hotpotqa" and "hotpotqa-dev"; None where it is no such name."""
    if source in HUB:
        return source, ""
    name, _, split = source.rpartition("-")
    return (name, split) if name in HUB and split in ("train", "dev", "test") else None


def hub_split(source, role):
    """(hub id, config, split) of a hub name.

    Of the names in HUB, training takes the training split and no other. A split that is spelled out behind a
    hub id is taken as it is in either role; left out, it is "train" for training and "test" for evaluation.

    >>> hub_split("nq", "train")[2], hub_split("nq", "evaluation")[2], hub_split("a/b:c", "evaluation")
    ('train', 'test', ('a/b', 'c', 'test'))
    """
    if not _named(source):
        repository, config, split = (source.split(":", 2) + ["", ""])[:3]
        return repository, config or None, split or ("train" if role == "train" else "test")
    name, split = _named(source)
    repository, config, splits = HUB[name]
    split = split or ("train" if role == "train" else splits[-1])
    if split not in splits:
        raise DataError(f"{source}: {name} has no {split} split, only {', '.join(splits)}")
    if role == "train" and split != "train":
        others = ", ".join(n for n in HUB if "train" in HUB[n][2])
        raise DataError(f"{source}: not a training split, but one to evaluate on; train on {others}")
    return repository, config, split


def _from_hub(source, role):
    """The rows of a data set of the hub, a memory-mapped table."""
    repository, config, split = hub_split(source, role)
    names = ", ".join(["world", *HUB])
    advice = (f"Give --data or --eval-data a file ({FORMATS}), a hub id owner/name[:config[:split]], or one "
              f"of {names}")
    if not _named(source) and looks_like_path(repository):  # the hub is not asked
        raise DataError(f"{source}: no such file here. {advice}")
    try:
        import datasets
        return datasets.load_dataset(locate(repository, "dataset"), config, split=split)
    except Exception as error:  # whatever `datasets` raises, the user needs the same remedy
        what = f"{type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:200]}"
        raise DataError(f"{source}: the hub data set {repository!r}, config {config}, split {split} did not "
                        f"load ({what}). {advice}") from error


# ---------------------------------------------------------------- files

GZIP = b"\x1f\x8b"  # how such a file begins, whatever it is called
DAMAGED = (gzip.BadGzipFile, EOFError, zlib.error)
FORMATS = ".json, .jsonl, .csv, .tsv or .parquet, each also as .gz"
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


def suffix_of(path):
    """
    >>> suffix_of("a/b.JSONL.gz"), suffix_of("v1.0")
    ('.jsonl', '.0')
    """
    return Path(str(path).lower().removesuffix(".gz")).suffix


def read_records(path):
    """(number from 1, record) of each record of a file; one that cannot be decoded is a ValueError saying so.
    Raises DataError where the whole file cannot be read."""
    suffix = suffix_of(path)
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: its name ends in none of the formats that can be read: {FORMATS}")
    with open(path, "rb") as file:
        opened = gzip.open if file.read(2) == GZIP else open
    how = {"mode": "rb"}
    if suffix in (".csv", ".tsv"):
        how = {"mode": "rt", "encoding": "utf-8-sig", "newline": ""}
    read = {".parquet": _parquet, ".csv": _table, ".tsv": _table, ".json": _json}.get(suffix, _lines)
    try:
        with opened(path, **how) as file:
            yield from read(path, file)
    except DAMAGED as error:
        raise DataError(f"{path}: damaged gzip file ({error})") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error})") from None


def _parquet(path, file):
    import pyarrow.parquet
    try:
        batches = pyarrow.parquet.ParquetFile(file).iter_batches(10_000)
        rows = (row for batch in map(_as_written, batches) for row in batch.to_pylist())
        yield from enumerate(rows, 1)
    except (pyarrow.ArrowException, OSError) as error:  # OSError: damaged pages
        why = str(error).splitlines()[0][:200]
        raise DataError(f"{path}: not a parquet file, or a damaged one ({why})") from None


def _as_written(batch):
    """The batch with float16 and float32 as text: Python would read .1 as 0.10000000149011612."""
    import pyarrow
    for place, column in enumerate(batch.schema):
        if column.type in (pyarrow.float16(), pyarrow.float32()):
            batch = batch.set_column(place, column.name, batch.column(place).cast(pyarrow.string()))
    return batch


def _table(path, file):
    """Rows by the names of the header. A row of a TSV is a line."""
    csv.field_size_limit(2**31 - 1)
    if suffix_of(path) == ".tsv":
        rows = map(cells_of, file)
    else:
        first = file.readline()
        separator = max(",;\t", key=first.count)  # (spreadsheets write any of these)
        told = re.fullmatch("sep=(.)\r?\n", first)  # Excel's word for itself
        if told:
            separator = told[1]
        else:
            file.seek(0)
        rows = csv.reader(file, delimiter=separator, strict=True, skipinitialspace=True)
    try:
        header = next(rows, [])
        named = [name for name in header if name.strip()]  # (spreadsheets leave columns without a name)
        if len(set(named)) < len(named):
            raise DataError(f"{path}: its header names a column twice ({', '.join(header)}): rename one, or "
                            "delete it")
        for number, cells in enumerate(filter(None, rows), 1):
            row = {name: cell_of(name, text) for name, text in zip(header, cells)}
            if any(cells[len(header):]):
                row = ValueError(f"more cells than the {len(header)} of the header")
            yield number, row
    except csv.Error as error:
        raise DataError(f"{path}: not a table: line {rows.line_num}: {error} (a quote inside a quoted cell "
                        "is written twice)") from None


def cell_of(name, text):
    """A cell as JSON has it. Undoes pandas: 1984.0, of a column with a gap, is 1984; an answer True true."""
    bare = text.strip().lower()
    if re.fullmatch(r"[+-]?[0-9]{1,300}\.0", bare):
        return bare[:-2]
    if bare in ("true", "false") and name.strip().lower() in formats.ANSWERED:
        return bare == "true"
    return text


def cells_of(line):
    '''The cells of a line of a TSV, whose quotes are text where they do not stand around whole cells.

    >>> cells_of('"a, ""b"""\\t"c"'), cells_of('"a" b\\t"c"')
    (['a, "b"', 'c'], ['"a" b', '"c"'])
    '''
    line = line.rstrip("\r\n")
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.split("\t")


def _json(path, file):
    """A list of records, an object with such a list, or one record; else records line by line."""
    text = file.read()
    try:
        value = formats.parse_json(text)
    except ValueError as error:
        if "Extra data" not in str(error):
            raise DataError(f"{path}: {error}") from None
        yield from _lines(path, text.splitlines())
        return
    if isinstance(value, dict):
        lists = [value[name] for name in ("data", "Data", "questions") if isinstance(value.get(name), list)]
        value = lists[0] if lists else [value]
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _lines(path, file):
    for number, line in enumerate(file, 1):
        if line.strip():
            try:
                yield number, formats.parse_json(line)
            except ValueError as error:
                yield number, error


# ---------------------------------------------------------------- questions

def load_questions(source, limit=None, skip_bad=False, role="evaluation"):
    """Questions of a path, a hub name or an iterable of rows; at most `limit`.

    role: "train" or "evaluation", which of its splits a hub name stands for (hub_split). A file, and rows,
    are what they are in either role. An answer of punctuation and articles alone (NQ has a few) would reward
    saying nothing: training leaves it out, evaluation keeps it, so that n stays the official one; both say
    so."""
    name = str(source) if isinstance(source, (str, Path)) else "records"
    questions = []
    bad = 0
    reason = ""
    void = []  # records whose answer would reward saying nothing
    for number, row in _rows_of(source, role):
        if limit is not None and len(questions) >= limit:
            break
        try:
            if isinstance(row, ValueError):  # it could not be decoded
                raise row
            question = parse_question(row)
            if not any(map(metrics.normalize_answer, question.answers)):
                void.append(number)
                if role == "train":
                    continue
            questions.append(question)
        except ValueError as error:
            if not skip_bad:
                remedy = "(--skip-bad leaves such records out)"
                raise DataError(f"{name}: record {number}: {error} {remedy}") from None
            bad += 1
            reason = f": record {number}: {error}"
    if bad:
        print(f"{name}: skipped {bad} bad records; the last{reason}", file=sys.stderr)
    if void:
        fate = "left out" if role == "train" else "kept"
        print(f"{name}: {fate}: {len(void)} whose answer has no word that counts, so that an empty prediction"
              f" would be right; the first: record {void[0]}", file=sys.stderr)
    if not questions:
        raise DataError(f"{name}: no questions in it{reason}")
    tell_apart(questions)
    return questions


def _rows_of(source, role):
    """(number, record or the ValueError in its place) of what load_questions is given."""
    if not isinstance(source, (str, Path)):
        return enumerate(source, 1)
    path = Path(os.path.expanduser(source))
    if path.is_file():
        return read_records(path)
    if path.is_dir() and not _named(str(source)):
        raise DataError(f"{path} is a folder; give one file")
    if suffix_of(path) in SUFFIXES:
        raise DataError(f"{path}: no such file")
    return enumerate(_from_hub(str(source), role), 1)


def same_in_both_roles(source):
    """Whether --data and --eval-data read the same questions of it: of a file, and of a hub id with its split
    spelled out."""
    if Path(os.path.expanduser(source)).is_file():
        return True
    return not _named(source) and hub_split(source, "train") == hub_split(source, "evaluation")


def tell_apart(questions):
    """Ids key seeds and predictions: a repeated id gets its question's fingerprint, a repeated question also
    its count. Where they stand in the file does not matter."""
    rows = Counter(q.id for q in questions)
    met = Counter()
    for q in questions:
        if rows[q.id] > 1:
            mark = formats.fingerprint(q.question)
            q.id = mark if q.id == mark else f"{q.id}-{mark}"
        met[q.id] += 1
        if met[q.id] > 1:
            q.id = f"{q.id}#{met[q.id]}"


def shuffled_forever(items, seed):
    """The items for ever, shuffled anew each epoch."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed}/{epoch}").sample(items, len(items))


def batch_of_step(items, step, size, seed):
    """The items of training step 1, 2, …: epoch after epoch, each shuffled anew; a resumed run draws what the
    first would have."""
    forever = shuffled_forever(items, seed)
    return list(itertools.islice(forever, (step - 1) * size, step * size))


# ---------------------------------------------------------------- corpora

def pool_contexts(questions):
    """Every distinct passage of the questions' own contexts as corpus rows, in order of appearance."""
    rows = []
    seen = set()
    for q in questions:
        for title, sentences in q.context:
            text = " ".join(s.strip() for s in sentences)
            if (title, text) not in seen:
                seen.add((title, text))
                rows.append({"id": str(len(rows)), "title": title, "text": text})
    if not rows:
        raise DataError("--corpus contexts: the questions carry no contexts to pool; give a corpus file "
                        "(JSONL with id, contents)")
    return rows


MEMORY_MAP_FROM = 200e6  # bytes of a corpus


def load_corpus(source, skip_bad=False):
    """Corpus rows {"id", "title", "text"} of a file or a hub id, as a list, or past 200 MB as a memory-mapped
    table. skip_bad: bad records are left out and counted."""
    path = Path(os.path.expanduser(source))
    if path.is_file():
        stat = path.stat()
        size = stat.st_size
        known_as = f"{path.resolve()}/{size}/{stat.st_mtime_ns}"
        records = path
    else:
        records = _hub_table(source)
        size = records.data.nbytes
        known_as = records._fingerprint
    if size > MEMORY_MAP_FROM and suffix_of(path) != ".json":  # (which is one value)
        rows = _mapped_corpus(path, records, f"{known_as}/{skip_bad}", skip_bad)
    else:
        rows = list(_corpus_rows(path, records, skip_bad))
    if not len(rows):
        raise DataError(f"{path}: the corpus is empty")
    return rows


def _hub_table(source):
    if Path(source).expanduser().is_dir():
        raise DataError(f"--corpus {source} is a folder: make a corpus of its documents by "
                        f"`python -m common.corpus {source} corpus.jsonl`")
    if suffix_of(source) in SUFFIXES or looks_like_path(source.split(":")[0]):
        raise DataError(f"--corpus {source}: no such file (JSONL with id, contents; TSV with id, text, "
                        "title; a hub id owner/name[:config[:split]]; or 'contexts')")
    return _from_hub(source, "train")


def _corpus_rows(path, records, skip_bad):
    """records: the path of a file, or a table."""
    bad = 0
    for number, row in read_records(path) if records == path else enumerate(records, 1):
        try:
            yield _passage(path, number, row)
        except DataError as error:
            if not skip_bad:
                raise DataError(f"{error} (--skip-bad leaves such records out)") from None
            bad += 1
    if bad:
        print(f"{path}: skipped {bad} bad records", file=sys.stderr)


def _mapped_corpus(path, records, known_as, skip_bad):
    """`datasets` keeps the table under a file's place, size and time, or a table's own fingerprint."""
    import datasets
    try:
        return datasets.Dataset.from_generator(
            _corpus_rows,
            features=datasets.Features({name: datasets.Value("string") for name in ("id", "title", "text")}),
            gen_kwargs={"path": path, "records": records, "skip_bad": skip_bad},
            fingerprint=hashlib.sha256(known_as.encode()).hexdigest()[:16])
    except Exception as error:  # its own message says only that it failed
        cause = error.__cause__ or error
        if isinstance(cause, DataError):
            raise cause from None
        raise DataError(f"{path}: not readable ({str(cause).splitlines()[0][:200]})") from error


IDS = ("id", "_id", "docid", "doc_id", "idx")


def _passage(path, number, row):
    """A corpus record as {"id", "title", "text"}; without a title the first line of "contents" is it."""
    where = f"{path}: record {number}"
    if isinstance(row, ValueError):
        raise DataError(f"{where}: {row}")
    row = formats.lowered(row) if isinstance(row, dict) else {}
    if not row.keys() & {"contents", "text"}:
        raise DataError(f"{where}: expected id and contents (or title and text)")
    name = "contents" if "contents" in row else "text"
    title = "" if row.get("title") is None else row["title"]
    text = row[name]
    for key, value in (("title", title), (name, text)):
        if not isinstance(value, str):
            raise DataError(f"{where}: {formats.wrong(key, 'text', value)}")
    title = unquoted(title)
    if name == "contents":
        title, text = titled(title, text)
    there = [row[key] for key in IDS if row.get(key) not in (None, "")]
    identity = there[0] if there else number - 1
    if isinstance(identity, float) and identity.is_integer():
        identity = int(identity)
    return {"id": str(identity), "title": title, "text": text.strip()}
