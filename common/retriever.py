"""Search: BM25, dense vectors or another process, behind one call.

    retriever.search(queries, k) -> list[list[Passage]]

docs/data.md has the forms of --retriever. Over HTTP it is Search-R1's: serve/search_client.py asks,
serve/server.py answers.
"""

import importlib
import os
import re
import shutil
import sys
import unicodedata

import numpy as np

from common import cache
from common.files import Progress
from common.passages import Passage as Passage
from common.passages import RetrieverError, found_in, identity

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
    found = np.flatnonzero(scores >= limit)
    return found[np.argsort(-scores[found], kind="stable")][:k]


NO_WORDS = "the corpus has no words to index: are its texts empty?"


class BM25Retriever:
    """Okapi BM25 (k1 1.5, b .75, Lucene's idf) over the `tokens` of title, counted twice, and text.

    Title and text are tokenised apart, so a title of nothing but stop words keeps them ("It"). A query of
    nothing but stop words finds such titles. In memory, for corpora that are there too: a million passages
    would take 4 GB and two minutes at each start, and 8 ms per question."""

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
            results.append([found_in(self.corpus[int(i)], scores[i]) for i in found])
        return results


HEAP = 500_000_000  # bytes of an index that are gathered before they are written


class BM25OnDisk:
    """For mapped corpora: an index of tantivy's, made once in the cache, mapped, a few ms per question.

    It skips what cannot be among the best. k1 is 1.2, b .75 (tantivy has no other); beside BM25Retriever's
    words titles are a field of their own at half weight (recall@3 of gold pages .644 -> .666, 1,932 questions
    of HotpotQA, 2Wiki and MuSiQue; at 10 no difference)."""
    fields = {"words": 1.0, "title": 0.5}

    def __init__(self, corpus):
        import tantivy
        self.corpus = corpus
        builder = tantivy.SchemaBuilder()
        for field in self.fields:
            builder.add_text_field(field, tokenizer_name="whitespace", index_option="freq")
        builder.add_integer_field("row", fast=True)
        self.schema = builder.build()
        name = cache.key([identity(corpus), tantivy.__version__, *self.fields])
        self.path = cache.made_once(cache.folder() / f"bm25-{name}", self._write)
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
        return [found_in(self.corpus[row], score) for row, (score, _) in zip(rows, hits, strict=True)]


def make_retriever(spec, corpus, few=False):
    """The retriever that `--retriever spec` names. corpus: rows of load_corpus; a server needs none. few:
    they are a question's own passages, for which no index is made."""
    if spec.startswith(("http://", "https://")):
        from common.serve.search_client import HTTPRetriever
        return HTTPRetriever(spec)
    if spec.startswith("own:"):
        return Own(spec)
    if spec == "bm25":
        return BM25Retriever(corpus) if isinstance(corpus, list) else BM25OnDisk(corpus)
    if spec.startswith("dense:"):
        model, _, index = spec.removeprefix("dense:").partition("@")
        from common.vectors import dense
        return dense.Nearest(corpus, model) if few else dense.DenseRetriever(corpus, model, index)
    raise RetrieverError(f"--retriever {spec}: expected bm25, dense:MODEL, dense:MODEL@INDEX, "
                         "http://HOST:PORT or own:MODULE:CLASS")


class Own:
    """A retriever of the user's: what it raises or returns otherwise is named, passages beyond k are cut."""

    def __init__(self, spec):
        self.spec = spec
        module, _, name = spec.removeprefix("own:").partition(":")
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # last: no file there takes the place of a module that is needed
        try:
            self.made = getattr(importlib.import_module(module), name)()
        except Exception as error:  # of whatever a stranger wrote
            raise RetrieverError(f"--retriever {spec}: {type(error).__name__}: {error}; expected own:MODULE:"
                                 "CLASS, a module in this folder, with search(queries, k)") from error

    def search(self, queries, k):
        try:
            found = [list(passages)[:k] for passages in self.made.search(queries, k)]
            passages = [Passage(p.id, p.title, p.text, p.score) for p in sum(found, [])]
            if len(found) != len(queries) or not all(isinstance(p.text, str) for p in passages):
                raise TypeError(f"{len(found)} lists for {len(queries)} queries")
        except Exception as error:  # of whatever a stranger wrote
            raise RetrieverError(f"--retriever {self.spec}: {type(error).__name__}: {error}; search(queries, "
                                 "k) has to return, for each query, a list of Passage") from error
        return found
