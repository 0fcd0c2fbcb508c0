"""Search: BM25, dense vectors or another process, behind one call.

    retriever.search(queries, k) -> list[list[Passage]]

    --retriever bm25                               in memory (bm25s)
    --retriever dense:intfloat/e5-base-v2          sentence-transformers + FAISS; any hub id or folder
    --retriever dense:intfloat/e5-base-v2@HNSW32   any FAISS index factory string (default Flat)
    --retriever http://127.0.0.1:8000              a server in Search-R1's form (ours, Search-R1's, verl's)
    --retriever own:examples.calculator:Calculator a class of yours with `search`, and without a corpus

The HTTP form: POST /retrieve {"queries": […], "topk": k, "return_scores": true}
-> {"result": [[{"document": {"id", "contents"}, "score"}]]}, contents = '"title"\\ntext'. serve/server.py
answers it.
"""

import functools
import importlib
import itertools
import os
import re
import threading
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import cache, http_client
from common.files import HubError, UserError, locate, say
from common.http_client import RETRIES


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


class BM25Retriever:
    """Okapi BM25 (k1 1.5, b .75, Lucene's idf) over the `tokens` of title, counted twice, and text.

    Title and text are tokenised apart, so a title of nothing but stop words keeps them ("It"). A query of
    nothing but stop words finds such titles."""

    def __init__(self, corpus):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # bm25s starts JAX where it is; it would take the GPU
        import bm25s
        if not len(corpus):
            raise RetrieverError("the corpus is empty: there is nothing to search")
        self.corpus = corpus
        numbers = {}  # token -> its number: 21 million passages as strings would not fit
        rows = []
        for row in corpus:
            title = tokens(row["title"])
            words = title + title + tokens(row["text"])
            rows.append([numbers.setdefault(word, len(numbers)) for word in words])
        if not numbers:
            raise RetrieverError("the corpus has no words to index: are its texts empty?")
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


# ---------------------------------------------------------------- encoders

@functools.cache
def load_encoder(name):
    """One SentenceTransformer a name and process; a folder asks no network. Raises HubError.

    Pooling and normalisation come from the model's own modules.json. A folder without one gets mean pooling,
    or its first token where it holds a model of the bge family."""
    found = locate(name)
    try:
        import faiss  # noqa: F401  (which will hold its vectors)
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise HubError(f"{name}: an encoder wants sentence-transformers and faiss ({error}): pip install "
                       "-r requirements.txt, or the extra [dense]") from error
    try:
        encoder = SentenceTransformer(found, local_files_only=Path(found).is_dir())
    except Exception as error:  # format errors of every kind have the same remedy
        raise HubError(f"{name}: the encoder did not load ({type(error).__name__}); "
                       "give a folder or a hub id with a sentence-transformers model") from error
    bare = Path(found).is_dir() and not (Path(found) / "modules.json").exists()
    if bare and _called(name).startswith("bge-"):
        encoder[1].pooling_mode = "cls"
    return encoder


ENCODING = threading.Lock()  # a server asks from several threads, a fast tokenizer bears one


def encode(encoder, texts, prefix, task, progress=False):
    """(n, d) float32, rows of length 1. task: "query" or "document", for models that have layers for each."""
    with ENCODING:
        vectors = encoder.encode(texts, prompt=prefix, task=task, batch_size=64,
                                 normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=progress)
    return vectors.astype("float32")


WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PREFIXES = {  # encoders without prompts of their own, by whole names: (before queries, before passages)
    r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?": ("query: ", "passage: "),
    r"multilingual-e5-large-instruct|e5-mistral-7b-instruct": (WEB_SEARCH, ""),
    r"bge-(small|base|large)-en(-v1\.5)?": ("Represent this sentence for searching relevant passages: ", ""),
    r"bge-(small|base|large)-zh(-v1\.5)?": ("为这个句子生成表示以用于检索相关文章：", ""),
}


@functools.cache
def prefixes(name, encoder):
    """(what stands before queries, what stands before passages) for an encoder, and says so once: its own
    prompts where it has some, else those of its name in PREFIXES, else nothing."""
    own = {use: text for use, text in encoder.prompts.items() if text}
    passages = own.get("document") or own.get("passage") or own.get("corpus") or ""
    found = own.get("query", ""), passages
    source = "its own prompts"
    if not any(found):
        source = f"its name is not known; its prompts: {', '.join(own) or 'none'}"
        for pattern, those in PREFIXES.items():
            if re.fullmatch(pattern, _called(name)):
                found, source = those, f"those of {_called(name)}"
    say(f"encoder {name}: {found[0]!r} before queries, {found[1]!r} before passages and names ({source})")
    return found


def _called(name):
    """A model's own name in small letters, without its owner.

    >>> _called("models--intfloat--e5-base-v2/snapshots/0a1b"), _called("BAAI/bge-m3/")
    ('e5-base-v2', 'bge-m3')
    """
    path = re.sub("/snapshots/[^/]+$", "", str(Path(name).expanduser().absolute()))
    return re.split("/|--", path)[-1].lower()


# ---------------------------------------------------------------- dense vectors

def kept_vectors(path, make):
    """(n, d) vectors mapped into memory from a file, which is made once of make()'s."""
    def write(part):
        with part.open("wb") as file:
            np.save(file, make(), allow_pickle=False)
    return np.load(cache.made_once(path, write), mmap_mode="c", allow_pickle=False)


PIECE = 100_000          # passages that are encoded at a time
MAX_TOKENS = 256         # of a passage or query that are read
MEMORY_ONLY_BELOW = 200  # passages: such an index is built faster than it is found on disk


class DenseRetriever:
    """Cosine similarity of sentence-transformers vectors in a FAISS index, on the GPUs if FAISS sees any.

    index: a FAISS index factory string. Of an IVF index a query reads a quarter of the lists, at least 8 and
    at most 256: what lies in others is missed (2 of 32 lists lost .13 of Flat's recall on 2Wiki and
    HotpotQA). The index is cached under a hash of all that it is made of."""

    def __init__(self, corpus, model, index="Flat", cache_dir=None):
        if not len(corpus):
            raise RetrieverError("the corpus is empty: there is nothing to search")
        self.corpus = corpus
        self.lock = threading.Lock()  # a server asks from many threads, and FAISS on a GPU knows one
        try:
            self.encoder = load_encoder(model)
        except HubError as error:
            raise RetrieverError(f"--retriever dense:{error}") from error
        import faiss
        self.query_prefix, self.passage_prefix = prefixes(model, self.encoder)
        self.encoder.max_seq_length = min(MAX_TOKENS, self.encoder.max_seq_length or MAX_TOKENS)

        empty = self._make(faiss, index)  # what cannot be is refused before hours of encoding
        if len(corpus) < MEMORY_ONLY_BELOW:
            self.index = self._fill(empty, index)
            return
        made_of = [model, cache.digest(model), self.passage_prefix, index, MAX_TOKENS]
        name = cache.key(itertools.chain(made_of, map(_read, corpus)))

        def write(part):
            faiss.write_index(self._fill(empty, index), str(part))

        path = cache.made_once(Path(cache_dir or cache.folder()) / f"dense-{name}.faiss", write)
        self.index = faiss.read_index(str(path))
        if getattr(faiss, "get_num_gpus", int)() and not index.startswith("HNSW"):
            options = faiss.GpuMultipleClonerOptions()
            options.shard = index == "Flat"  # divided among the GPUs; any other kind is copied to each
            self.index = faiss.index_cpu_to_all_gpus(self.index, co=options)

    def _make(self, faiss, spec):
        dimension = encode(self.encoder, ["x"], self.passage_prefix, "document").shape[1]
        try:
            index = faiss.index_factory(dimension, spec, faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as error:
            raise _refused(spec, error) from error
        lists = faiss.try_extract_index_ivf(index)  # also behind a transform (PCA64,IVF32,Flat)
        if lists is not None:
            lists.nprobe = min(lists.nlist, max(8, min(lists.nlist // 4, 256)))
        return index

    def _fill(self, index, spec):
        """Encodes and adds PIECE passages at a time; what needs training first sees a sample of as many."""
        numbers = range(len(self.corpus))
        if not index.is_trained:
            sample = self._encode_passages(numbers[::-(-len(self.corpus) // PIECE)])
            try:
                index.train(sample)
            except RuntimeError as error:
                raise _refused(spec, error) from error
        for start in range(0, len(self.corpus), PIECE):
            index.add(self._encode_passages(numbers[start:start + PIECE]))
        return index

    def _encode_passages(self, numbers):
        texts = [_read(self.corpus[i]) for i in numbers]
        return encode(self.encoder, texts, self.passage_prefix, "document", progress=len(texts) > 500)

    def search(self, queries, k):
        """At most k passages a query, best first; an approximate index may find fewer."""
        if not len(queries):
            return []
        with self.lock:
            vectors = encode(self.encoder, queries, self.query_prefix, "query")
            scores, ids = self.index.search(vectors, min(k, len(self.corpus)))  # (queries, k); -1: none found
        results = []
        for row in zip(scores, ids, strict=True):
            found = [(score, int(i)) for score, i in zip(*row, strict=True) if i >= 0]
            results.append([_passage(self.corpus[i], score) for score, i in found])
        return results


def _read(row):
    """A passage as an encoder reads it."""
    return f"{row['title']}\n{row['text']}"


def _refused(spec, error):
    reason = str(error).splitlines()[-1][:200]
    return RetrieverError(f"--retriever dense:MODEL@{spec}: FAISS refuses this index ({reason}); try Flat, "
                          "SQfp16, HNSW32, or IVF<lists>,SQ8 with fewer lists than passages")


MAX_QUERY = 4000       # characters: an encoder reads about 1,000 (256 tokens), servers refuse too long ones
QUERIES_A_REQUEST = 256


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
        results = []
        for start in range(0, len(queries), QUERIES_A_REQUEST):
            some = queries[start:start + QUERIES_A_REQUEST]
            results += self._search(some, k)
        return results

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
            if document["contents"] is None:
                self.repair("passages without contents")
                continue
            title, _, text = self.text(document["contents"], "passages").partition("\n")
            number = document.get("id")
            name = "" if number is None else self.text(str(number), "passages")
            score = self._score(hit.get("score", 0.0))
            found.append(Passage(name, title.strip('"'), text or title, score))
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


def make_retriever(spec, corpus):
    """The retriever that `--retriever spec` names. corpus: rows of load_corpus; a server needs none."""
    if spec.startswith(("http://", "https://")):
        return HTTPRetriever(spec)
    if spec.startswith("own:"):
        return _own(spec)
    if spec == "bm25":
        return BM25Retriever(corpus)
    if spec.startswith("dense:"):
        model, _, index = spec.removeprefix("dense:").partition("@")
        return DenseRetriever(corpus, model, index or "Flat")
    raise RetrieverError(f"--retriever {spec}: expected bm25, dense:MODEL, dense:MODEL@INDEX, "
                         "http://HOST:PORT or own:MODULE:CLASS")


def _own(spec):
    module, _, name = spec.removeprefix("own:").partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
        made.search = _checked(spec, made.search)
    except Exception as error:  # of whatever a stranger wrote
        raise RetrieverError(f"--retriever {spec}: {type(error).__name__}: {error}; expected "
                             "own:MODULE:CLASS, importable from here, with search(queries, k)") from error
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
