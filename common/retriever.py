"""Search: BM25, dense vectors or another process, behind one call.

    retriever.search(queries, k) -> list[list[Passage]]

    --retriever bm25                               a small corpus in memory (bm25s), a mapped one on disk
    --retriever dense:intfloat/e5-base-v2          sentence-transformers + FAISS; any hub id or folder
    --retriever dense:MODEL@wiki-18-e5             a folder of common.vectors, or a FAISS file
    --retriever dense:MODEL@HNSW32                 any FAISS index factory string
    --retriever http://127.0.0.1:8000              a server in Search-R1's form (ours, Search-R1's, verl's)
    --retriever own:examples.calculator:Calculator a class of yours with `search`, and without a corpus

The HTTP form: POST /retrieve {"queries": […], "topk": k, "return_scores": true}
-> {"result": [[{"document": {"id", "contents"}, "score"}]]}, contents = '"title"\\ntext'. serve/server.py
answers it.
"""

import importlib
import os
import re
import shutil
import sys
import threading
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import cache, http_client, vectors
from common.files import Progress, UserError
from common.http_client import RETRIES
from common.sentences import Encoder


class RetrieverError(UserError):
    """What cannot be searched, or not so; the message names the remedy."""


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str
    score: float = 0.0


def _passage(row, score):
    return Passage(row["id"], row["title"], row["text"], float(score))


STOP_WORDS = frozenset(  # Lucene's English list
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with".split())
UNSPACED = ("\u3005-\u3007\u3041-\u3096\u309d-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
            "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff")                   # ideographs
MARKS = "".join(c for c in map(chr, range(0x300, 0x10000)) if unicodedata.category(c).startswith("M"))
TOKEN = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+(?:[{MARKS}]+[^\W{UNSPACED}]*)*")
ACCENTS = re.compile("[" + "".join(  # 10 to 36: Hebrew points, Arabic vowel signs; from 200 on: accents
    c for c in MARKS if 10 <= unicodedata.combining(c) <= 36 or unicodedata.combining(c) >= 200) + "]")
ENDING = re.compile(r"(?<=\w)['’][sdmt]\b")


def tokens(text):
    """What BM25 counts: runs of word characters (letters, digits, "_") and their marks, without case and
    accents, and not stemmed. One character is enough, else "Henry V" and "Toy Story 3" lose what tells them
    apart.

    Ideographs and kana are written without spaces, so each is a token: two of them are found within a longer
    run. The letter behind the apostrophe of "Alice's" or "don't" is none, an initial is one. Stop words are
    left out unless there is nothing else: "It" and "To Be or Not to Be" are titles.

    >>> tokens("Toy Story 3"), tokens("Alice's A. B. Fisher"), tokens("北京 is It"), tokens("It")
    (['toy', 'story', '3'], ['alice', 'b', 'fisher'], ['北', '京'], ['it'])
    >>> tokens("İstanbul, Besançon und Straße"), tokens("दिल्ली"), tokens("عَاصِمَة")
    (['istanbul', 'besancon', 'und', 'strasse'], ['दिल्ली'], ['عاصمة'])
    """
    found = TOKEN.findall(ENDING.sub("", folded(text)))
    return [word for word in found if word not in STOP_WORDS] or found


def folded(text):
    """Letters in one spelling (NFKC), without case, and without the marks that writers leave out: accents,
    Hebrew points, Arabic vowel signs. Those of kana, Thai and Indian scripts tell words apart and stay."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if text.isascii():
        return text
    letters = ACCENTS.sub("", unicodedata.normalize("NFD", text))
    return unicodedata.normalize("NFC", letters)


def best(scores, k):
    """Indices of the k largest of (n,) scores, the larger first, ties in order; without sorting them all."""
    k = min(k, len(scores))
    if k < 1:
        return np.empty(0, dtype=int)
    limit = np.partition(scores, -k)[-k]
    above = np.flatnonzero(scores > limit)
    level = np.flatnonzero(scores == limit)[:k - len(above)]
    found = np.concatenate([above, level])
    return found[np.lexsort((found, -scores[found]))]


NO_WORDS = "the corpus has no words to index: are its texts empty?"


class BM25Retriever:
    """Okapi BM25 (k1 1.5, b .75, Lucene's idf) over the `tokens` of title, counted twice, and text.

    Title and text are tokenised apart, so a title of nothing but stop words keeps them ("It"). A query of
    nothing but stop words finds such titles. In memory, for corpora that are there too: a million passages
    would take 4 GB and two minutes at each start, and 8 ms a question."""

    def __init__(self, corpus):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s starts JAX where it is; it would take the GPU
        import bm25s
        self.corpus = corpus
        numbers = {}  # token -> its number: 21 million passages as strings would not fit
        rows = []
        for row in corpus:
            title = tokens(row["title"])
            words = title + title + tokens(row["text"])
            rows.append([numbers.setdefault(word, len(numbers)) for word in words])
        if not numbers:
            raise RetrieverError(NO_WORDS)
        self.index = bm25s.BM25()
        self.index.index((rows, numbers), show_progress=False)

    def search(self, queries, k):
        """At most k passages a query, best first; without those that share no word with it."""
        results = []
        for query in queries:
            words = tokens(query)
            if words:
                scores = self.index.get_scores(words)
            else:
                scores = np.zeros(len(self.corpus))
            found = [i for i in best(scores, k) if scores[i] > 0]
            results.append([_passage(self.corpus[int(i)], scores[i]) for i in found])
        return results


HEAP = 500_000_000  # bytes of an index that are gathered before they are written


class BM25OnDisk:
    """For mapped corpora: an index of tantivy's, made once in the cache, mapped, a few ms a question.

    It skips what cannot be among the best. k1 is 1.2, b .75 (tantivy has no other); beside BM25Retriever's
    words titles are a field of their own at half weight (recall@3 of gold pages .644 -> .666, 1,932 questions
    of HotpotQA, 2Wiki and MuSiQue; at 10 no difference)."""
    fields = {"words": 1.0, "title": 0.5}

    def __init__(self, corpus, folder=None):
        import tantivy
        self.corpus = corpus
        builder = tantivy.SchemaBuilder()
        for field in self.fields:
            builder.add_text_field(field, tokenizer_name="whitespace", index_option="freq")
        builder.add_integer_field("row", fast=True)
        self.schema = builder.build()
        name = cache.key([vectors.identity(corpus), tantivy.__version__, *self.fields])
        self.path = cache.made_once((folder or cache.folder()) / f"bm25-{name}", self._write)
        try:
            self.searcher = tantivy.Index.open(str(self.path)).searcher()
        except ValueError as error:
            raise RetrieverError(f"{self.path} is damaged ({error}): delete it, it is made anew") from None

    def _write(self, part):
        import tantivy
        shutil.rmtree(part, ignore_errors=True)  # (what a kill left)
        part.mkdir()
        writer = tantivy.Index(self.schema, path=str(part)).writer(HEAP, 1)
        some = False
        with Progress("indexing") as progress:
            for number, row in enumerate(self.corpus):
                title = tokens(row["title"])
                words = title + title + tokens(row["text"])
                some = some or bool(words)
                writer.add_document(tantivy.Document(
                    words=" ".join(words), title=" ".join(title), row=number))
                if number % 1000 == 0:
                    progress(number, len(self.corpus))
        if not some:
            raise RetrieverError(NO_WORDS)
        writer.commit()
        writer.wait_merging_threads()

    def search(self, queries, k):
        """At most k passages a query, best first; without those that share no word with it."""
        return [self._search(tokens(query), k) for query in queries]

    def _search(self, words, k):
        from tantivy import Occur, Query
        asked = []
        for field, weight in self.fields.items():
            for word in words:
                term = Query.term_query(self.schema, field, word, "freq")
                asked.append((Occur.Should, Query.boost_query(term, weight)))
        hits = self.searcher.search(Query.boolean_query(asked), k, count=False).hits
        rows = self.searcher.fast_field_values("row", [place for _, place in hits])
        return [_passage(self.corpus[row], score) for row, (score, _) in zip(rows, hits, strict=True)]


# ---------------------------------------------------------------- dense vectors

class DenseRetriever:
    """Cosine similarity of sentence-transformers vectors in a FAISS index, on the GPUs if FAISS sees any.

    index: a file of FAISS or a folder of common.vectors; else a string of FAISS's factory, by default one for
    the corpus's size, whose index is made once and kept in the cache."""

    def __init__(self, corpus, model, index="", cache_dir=None):
        self.corpus = corpus
        self.lock = threading.Lock()  # FAISS on a GPU knows one thread
        try:
            self.encoder = Encoder(model)
            self.path = Path(index).expanduser()
            if index and self.path.exists():
                self.index = vectors.opened(self.path, corpus, self.encoder)
            elif "/" in index or index.endswith((".index", ".faiss")):
                raise RetrieverError(f"{model}@{index}: no such file or folder")
            else:
                self.path, self.index = vectors.kept(corpus, self.encoder, index, cache_dir)
        except UserError as error:
            raise RetrieverError(f"--retriever dense:{error}") from error

    def search(self, queries, k):
        """At most k passages a query, best first; an approximate index may find fewer."""
        if not len(queries):
            return []
        with self.lock:
            asked = self.encoder.queries(queries)
            scores, ids = vectors.search(self.index, asked, min(k, len(self.corpus)))  # (queries, k)
        results = []
        for row in zip(scores, ids, strict=True):
            found = [(score, int(i)) for score, i in zip(*row, strict=True) if i >= 0]
            results.append([_passage(self.corpus[i], score) for score, i in found])
        return results


# ---------------------------------------------------------------- another process

MAX_QUERY = 4000       # characters: an encoder reads about 1,000 (256 tokens), servers refuse too long ones
QUERIES_A_REQUEST = 256
UNDER_WAY = 4          # requests at a time: a server joins what waits


class HTTPRetriever(http_client.Client):
    """Client of a server in Search-R1's form.

    What a single passage can have wrong must not end a training run: it is mended, counted in `repaired`, and
    each kind of it said once."""
    what = "search"
    flag = "--retriever"
    failure = RetrieverError
    remedy = ("Start one with `python -m common.serve search --corpus FILE`, or use --retriever bm25 "
              "with --corpus FILE")

    def __init__(self, url, timeout=60.0, retries=RETRIES):
        super().__init__(url.rstrip("/").removesuffix("/retrieve"), timeout, retries)
        # some servers have no /health: a search is the only check that all understand
        self._search(["health check"], 1)

    def search(self, queries, k):
        """At most k passages a query, best first."""
        self.cancelled.clear()
        queries = [self._query(query) for query in queries]
        size = QUERIES_A_REQUEST
        some = [queries[start:start + size] for start in range(0, len(queries), size)]
        with ThreadPoolExecutor(UNDER_WAY) as pool:
            found = list(pool.map(lambda part: self._search(part, k), some))
        return [hits for part in found for hits in part]

    def _search(self, queries, k):
        def ask():
            request = {"queries": queries, "topk": k, "return_scores": True}
            return self._parse(self.ask("POST", "/retrieve", request), len(queries), k)

        return self.patiently(ask)

    def _parse(self, answer, expected, k):
        try:
            results = [self._passages(hits, k) for hits in answer["result"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{self.url}/retrieve answered in another form than Search-R1's "
                                 f"({type(error).__name__}: {error})") from None
        if len(results) != expected:
            raise RetrieverError(f"{self.url}/retrieve answered {len(results)} lists for {expected} queries")
        return results

    def _passages(self, hits, k):
        self.repair("passages beyond the number asked for", len(hits) - k)
        found = []
        for hit in hits[:k]:
            document = hit.get("document", hit)
            text = document["contents"] if "contents" in document else document["text"]
            if text is None:
                self.repair("passages without contents")
                continue
            title = document.get("title")
            if not isinstance(title, str):
                title = ""
            title, text = titled(self.text(title, "passages"), self.text(text, "passages"))
            names = [document[key] for key in ("id", "_id", "docid") if document.get(key) is not None]
            name = self.text(str([*names, ""][0]), "passages")
            found.append(Passage(name, title, text, self._score(hit.get("score", 0.0))))
        return found

    def _score(self, score):
        """A number; 0.0 for what is none. Nothing but the order counts, and that is the server's."""
        if isinstance(score, (int, float)) and abs(score) < 1e300:
            return float(score)
        self.repair("scores that are no numbers")
        return 0.0

    def _query(self, query):
        self.repair(f"queries of more than {MAX_QUERY:,} characters", len(query) > MAX_QUERY)
        return self.text(query[:MAX_QUERY], "queries")


def titled(title, contents):
    """(title, text) of a passage as servers send it: a title of its own, else the first line of `contents`.

    >>> titled("", '"Oslo"\\nA capital.'), titled("Oslo", '"Oslo"\\nA capital.'), titled("", "A line.")
    (('Oslo', 'A capital.'), ('Oslo', 'A capital.'), ('', 'A line.'))
    >>> titled("", '"Heroes" (album)\\nBy Bowie.'), titled("", '"Oslo"\\n')
    (('"Heroes" (album)', 'By Bowie.'), ('Oslo', ''))
    """
    first, broken, rest = contents.partition("\n")
    first = first.strip()
    if first.count('"') == 2 and first[0] == first[-1] == '"':
        first = first[1:-1]
    if title:
        return title, rest if first == title else contents
    return (first, rest) if broken else ("", contents)


def make_retriever(spec, corpus):
    """The retriever that `--retriever spec` names. corpus: rows of load_corpus; a server needs none."""
    if spec.startswith(("http://", "https://")):
        return HTTPRetriever(spec)
    if spec.startswith("own:"):
        return _own(spec)
    if spec == "bm25" or spec.startswith("dense:"):
        if not len(corpus):
            raise RetrieverError("the corpus is empty: there is nothing to search")
    if spec == "bm25":
        return BM25Retriever(corpus) if isinstance(corpus, list) else BM25OnDisk(corpus)
    if spec.startswith("dense:"):
        model, _, index = spec.removeprefix("dense:").partition("@")
        return DenseRetriever(corpus, model, index)
    raise RetrieverError(f"--retriever {spec}: expected bm25, dense:MODEL, dense:MODEL@INDEX, "
                         "http://HOST:PORT or own:MODULE:CLASS")


def _own(spec):
    module, _, name = spec.removeprefix("own:").partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)  # last: no file there takes the place of a module that something else needs
    try:
        made = getattr(importlib.import_module(module), name)()
        made.search = _checked(spec, made.search)
    except Exception as error:  # of whatever a stranger wrote
        raise RetrieverError(f"--retriever {spec}: {type(error).__name__}: {error}; expected "
                             "own:MODULE:CLASS, a module in this folder, with search(queries, k)") from error
    return made


def _checked(spec, search):
    def checked(queries, k):
        found = search(queries, k)
        right = isinstance(found, list) and len(found) == len(queries)
        for passages in found if right else []:
            right = right and isinstance(passages, list) and all(map(_is_passage, passages))
        if not right:
            raise RetrieverError(f"--retriever {spec}: search(queries, k) has to give a list of Passages for "
                                 "each query, whose title and text are texts")
        return found
    return checked


def _is_passage(found):
    return isinstance(found, Passage) and isinstance(found.title, str) and isinstance(found.text, str)
