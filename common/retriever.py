"""Search: BM25, dense vectors or another process, behind one call.

    retriever.search(queries, k) -> list[list[Passage]]

    --retriever bm25                                in memory (bm25s)
    --retriever dense:intfloat/e5-base-v2           sentence-transformers + FAISS; any hub id or folder
    --retriever dense:intfloat/e5-base-v2@HNSW32    any FAISS index factory string: SQfp16, IVF4096,SQ8, HNSW64 … (default Flat)
    --retriever http://127.0.0.1:8000               a server in Search-R1's form (ours, Search-R1's, verl's)

    python -m common.retriever serve --corpus wiki-18.jsonl --retriever bm25 --port 8000

The HTTP form, ours and the client's: POST /retrieve {"queries": […], "topk": k, "return_scores": true} ->
{"result": [[{"document": {"id", "contents"}, "score"}]]}, contents = '"title"\\ntext'. The server also answers SkyRL's "query",
ReSearch's /search and /batch_search, and R1-Searcher's /queries.
"""

import argparse
import functools
import hashlib
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlparse

import numpy as np


class RetrieverError(RuntimeError):
    """The search service cannot be used; the message names the address and the remedy."""


@dataclass(frozen=True)
class Passage:
    id: str
    title: str
    text: str
    score: float = 0.0


def _passage(row, score):
    return Passage(row["id"], row["title"], row["text"], float(score))


class BM25Retriever:
    """Okapi BM25 (k1 1.5, b .75, Lucene's idf) over "title title text"; words in lower case, no stemming."""

    def __init__(self, corpus):
        import bm25s
        if not len(corpus):
            raise RetrieverError("the corpus is empty: there is nothing to search")
        self.corpus, self.bm25s = corpus, bm25s
        self.index = bm25s.BM25()
        tokens = self._tokens([f"{row['title']} {row['title']} {row['text']}" for row in corpus])  # a word of the title counts twice
        if not any(tokens):
            raise RetrieverError("the corpus has no words to index: are its texts empty?")
        self.index.index(tokens, show_progress=False)

    def _tokens(self, texts):
        return self.bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)

    def search(self, queries, k):
        """list of at most k passages a query, best first; passages that share no word with the query are left out."""
        k = min(k, len(self.corpus))
        results = []
        for tokens in self._tokens(list(queries)):
            scores = self.index.get_scores(tokens) if tokens else np.zeros(len(self.corpus))
            best = np.lexsort((np.arange(len(scores)), -scores))[:k] if k * 20 > len(scores) else self._top(scores, k)
            results.append([_passage(self.corpus[int(i)], scores[i]) for i in best if scores[i] > 0])
        return results

    @staticmethod
    def _top(scores, k):
        """Indices of the k best, ties by order in the corpus."""
        limit = np.partition(scores, -k)[-k]
        best = np.flatnonzero(scores >= limit)
        return best[np.lexsort((best, -scores[best]))][:k]


MEMORY_ONLY_BELOW = 200  # passages: such an index is built faster than it is found on disk


@functools.cache
def load_encoder(model):
    """One SentenceTransformer a model and process, however many small corpora it encodes."""
    from sentence_transformers import SentenceTransformer
    return SentenceTransformer(model)


# how an encoder wants its input: (query prefix, passage prefix), by what its name contains
PREFIXES = {"e5": ("query: ", "passage: "), "bge": ("Represent this sentence for searching relevant passages: ", "")}


class DenseRetriever:
    """Cosine similarity of sentence-transformers vectors in a FAISS index (on the GPUs that FAISS sees, else on the CPU).

    index: a FAISS index factory string. Flat is exact (4 bytes a dimension); SQfp16 and SQ8 halve and quarter it; IVF<lists>,<codes>
    reads 1/16 of its lists; HNSW<links> is a graph. Pooling and normalisation come from the model's own modules.json; a bare
    encoder folder of the e5 family gets mean pooling, one of the bge family its first token. Corpora are encoded in pieces, and the
    index is cached under a hash of both."""

    def __init__(self, corpus, model, index="Flat", cache_dir=None, batch_size=64, max_tokens=256, piece=100_000):
        import faiss
        if not len(corpus):
            raise RetrieverError("the corpus is empty: there is nothing to search")
        self.corpus = corpus
        try:
            self.encoder = load_encoder(model)
        except Exception as error:  # hub, network and format errors all have the same remedy
            raise RetrieverError(f"--retriever dense:{model}: the encoder did not load ({type(error).__name__}); give a folder with a "
                                 "sentence-transformers model, or a hub id where the hub can be reached") from error
        family = next((f for f in PREFIXES if f in Path(model).name.lower()), None)
        self.query_prefix, self.passage_prefix = PREFIXES.get(family, ("", ""))
        if family == "bge" and not (Path(model) / "modules.json").exists() and Path(model).is_dir():
            self.encoder[1].pooling_mode_mean_tokens, self.encoder[1].pooling_mode_cls_token = False, True
        self.encoder.max_seq_length = min(max_tokens, self.encoder.max_seq_length or max_tokens)
        self.batch_size = batch_size
        if len(corpus) < MEMORY_ONLY_BELOW:
            self.index = self._build(faiss, index, piece)
            return
        digest = hashlib.sha256(f"{model}/{index}/{max_tokens}/{len(corpus)}".encode())
        for row in corpus:
            digest.update(f"{row['title']}\n{row['text']}".encode())
        path = Path(cache_dir or Path.home() / ".cache/fivehop") / f"dense-{digest.hexdigest()[:16]}.faiss"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            faiss.write_index(self._build(faiss, index, piece), str(path) + ".tmp")
            Path(str(path) + ".tmp").replace(path)
        self.index = faiss.read_index(str(path))
        if index.startswith("IVF"):
            self.index.nprobe = max(1, self.index.nlist // 16)
        if getattr(faiss, "get_num_gpus", int)() and not index.startswith("HNSW"):
            self.index = faiss.index_cpu_to_all_gpus(self.index)

    def _build(self, faiss, spec, piece):
        """Encodes and adds `piece` passages at a time; an index that needs training sees a spread sample of one piece first."""
        dimension = self.encoder.encode(["x"]).shape[1]
        try:
            index = faiss.index_factory(dimension, spec, faiss.METRIC_INNER_PRODUCT)
            if not index.is_trained:
                index.train(self._encode_passages(range(0, len(self.corpus), -(-len(self.corpus) // piece))))
        except RuntimeError as error:
            raise RetrieverError(f"--retriever dense:MODEL@{spec}: FAISS refuses this index ({str(error).splitlines()[-1][:200]}); try Flat, SQfp16, "
                                 "HNSW32, or IVF<lists>,SQ8 with fewer lists than passages") from error
        for start in range(0, len(self.corpus), piece):
            index.add(self._encode_passages(range(start, min(start + piece, len(self.corpus)))))
        return index

    def _encode_passages(self, numbers):
        rows = [self.corpus[i] for i in numbers]
        return self._encode([f"{self.passage_prefix}{row['title']}\n{row['text']}" for row in rows], progress=True)

    def _encode(self, texts, progress=False):
        return self.encoder.encode(texts, batch_size=self.batch_size, normalize_embeddings=True, convert_to_numpy=True,
                                   show_progress_bar=progress and len(texts) > 500).astype(np.float32)

    def search(self, queries, k):
        """list of at most k passages a query, best first; an approximate index may find fewer."""
        scores, ids = self.index.search(self._encode([self.query_prefix + q for q in queries]), min(k, len(self.corpus)))
        return [[_passage(self.corpus[int(i)], s) for s, i in zip(ss, ii, strict=True) if i >= 0] for ss, ii in zip(scores, ids, strict=True)]


class HTTPRetriever:
    """Client of a server in Search-R1's form. Retries with doubling waits; a loopback address never goes through a proxy."""
    remote = True

    def __init__(self, url, timeout=60.0, retries=4):
        import httpx
        self.url = url.rstrip("/").removesuffix("/retrieve")
        loopback = urlparse(self.url).hostname in ("127.0.0.1", "localhost", "::1")
        self.client = httpx.Client(timeout=timeout, trust_env=not loopback)
        self.retries = retries
        self.search(["health check"], 1)  # some servers have no /health: a search is the only check that all understand

    def search(self, queries, k):
        """list of at most k passages a query, best first; 1,000 queries a request."""
        queries = list(queries)
        return [hits for i in range(0, len(queries), 1000) for hits in self._search(queries[i:i + 1000], k)]

    def _search(self, queries, k):
        import httpx
        for attempt in range(self.retries + 1):
            try:
                reply = self.client.post(self.url + "/retrieve", json={"queries": queries, "topk": k, "return_scores": True})
                if reply.status_code < 500 and reply.status_code != 429:
                    reply.raise_for_status()
                    return self._parse(reply.json(), len(queries))
                problem = f"HTTP {reply.status_code}"
            except httpx.HTTPStatusError as error:
                raise RetrieverError(f"{self.url}/retrieve refused the request: HTTP {error.response.status_code} {error.response.text[:200]}") from None
            except (httpx.TransportError, json.JSONDecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt < self.retries:
                time.sleep(0.5 * 2 ** attempt)
        raise RetrieverError(f"no search service at {self.url} after {self.retries + 1} tries ({problem}). Start one with "
                             "`python -m common.retriever serve --corpus FILE`, or use --retriever bm25")

    def _parse(self, reply, expected):
        try:
            results = [[self._one(hit) for hit in hits] for hits in reply["result"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise RetrieverError(f"{self.url}/retrieve answered in another form than Search-R1's ({type(error).__name__}: {error})") from None
        if len(results) != expected:
            raise RetrieverError(f"{self.url}/retrieve answered {len(results)} lists for {expected} queries")
        return results

    @staticmethod
    def _one(hit):
        document = hit.get("document", hit)
        title, _, text = document["contents"].partition("\n")
        return Passage(str(document.get("id", "")), title.strip('"'), text or title, float(hit.get("score", 0.0)))


def make_retriever(spec, corpus):
    """The retriever that `--retriever spec` names. corpus: rows of load_corpus; a server needs none."""
    if spec.startswith(("http://", "https://")):
        return HTTPRetriever(spec)
    if spec == "bm25":
        return BM25Retriever(corpus)
    if spec.startswith("dense:"):
        model, _, index = spec.removeprefix("dense:").partition("@")
        return DenseRetriever(corpus, model, index or "Flat")
    raise RetrieverError(f"--retriever {spec}: expected bm25, dense:MODEL, dense:MODEL@INDEX or http://HOST:PORT")


def make_app(retriever):
    """FastAPI application: POST /retrieve and GET /health, and the forms that other agents' code speaks."""
    from fastapi import FastAPI, HTTPException
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from pydantic import BaseModel, Field, StringConstraints, model_validator
    Text = Annotated[str, StringConstraints(max_length=20_000)]
    count = lambda default: Field(default, ge=1, le=1000)  # noqa: E731
    document = lambda p: {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}  # noqa: E731

    class Retrieve(BaseModel):             # Search-R1, verl, ATPO: queries; SkyRL: query
        queries: list[Text] = Field([], max_length=4096)
        query: Text | None = None
        topk: int = count(3)
        topk_rerank: int | None = None
        return_scores: bool = False

        @model_validator(mode="after")
        def one_form(self):
            if bool(self.queries) == (self.query is not None):
                raise ValueError("give queries (a list) or query (a string)")
            return self

    class Search(BaseModel):               # ReSearch
        query: Text
        top_n: int = count(3)
        return_score: bool = False

    class BatchSearch(Search):
        query: list[Text] = Field(max_length=4096)

    class Queries(BaseModel):              # R1-Searcher
        queries: list[Text] = Field(max_length=4096)
        k: int = count(3)

    app = FastAPI(title="fivehop retriever")

    @app.exception_handler(RequestValidationError)
    def refuse(_, error):  # FastAPI's own repeats the input, which may be NaN or half a character: no JSON
        return JSONResponse({"detail": [{k: e[k] for k in ("type", "loc", "msg")} for e in error.errors()]}, 422)

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.post("/retrieve")
    def retrieve(request: Retrieve):
        if request.topk_rerank is not None:
            raise HTTPException(422, "this server does not rerank; leave topk_rerank out")
        results = retriever.search([request.query] if request.query is not None else request.queries, request.topk)
        return {"result": [[{"document": document(p), "score": p.score} if request.return_scores else document(p) for p in hits] for hits in results]}

    @app.post("/search")
    def search(request: Search):
        hits = retriever.search([request.query], request.top_n)[0]
        return [[document(p) for p in hits], [p.score for p in hits]] if request.return_score else [document(p) for p in hits]

    @app.post("/batch_search")
    def batch_search(request: BatchSearch):
        results = retriever.search(request.query, request.top_n)
        documents = [[document(p) for p in hits] for hits in results]
        return [documents, [[p.score for p in hits] for hits in results]] if request.return_score else documents

    @app.post("/queries")
    def queries(request: Queries):
        return {"queries": request.queries, "answers": [[document(p)["contents"] for p in hits] for hits in retriever.search(request.queries, request.k)]}

    return app


def main():
    """Serves a corpus."""
    parser = argparse.ArgumentParser(prog="python -m common.retriever", description=main.__doc__)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--corpus", required=True, help="JSONL with id, contents")
    parser.add_argument("--retriever", default="bm25", help="bm25 or dense:MODEL")
    parser.add_argument("--host", default="127.0.0.1", help="loopback unless told otherwise")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    import uvicorn
    if not 0 <= args.port <= 65535:
        sys.exit(f"error: --port {args.port}: 0 to 65535")

    from common.data import DataError, load_corpus  # the one place where this module needs files read
    try:
        retriever = make_retriever(args.retriever, load_corpus(args.corpus))
    except (DataError, RetrieverError) as error:
        sys.exit(f"error: {error}")
    uvicorn.run(make_app(retriever), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
