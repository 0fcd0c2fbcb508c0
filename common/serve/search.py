"""The search server: every corpus and retriever of ours behind the HTTP forms that agents speak.

    python -m common.serve.search --corpus wiki-18.jsonl --retriever bm25 --port 8000

| path | body | of |
| --- | --- | --- |
| /retrieve | {"queries": […], "topk": 3, "return_scores": false} | Search-R1, verl, ATPO |
| | the same with "query": one string | SkyRL |
| /search, /batch_search | {"query": …, "top_n": 10, "return_score": false} | ReSearch, ReCall |
| /queries | {"queries": […], "k": 3} | R1-Searcher |
| /health | GET | |

A count of null or 0 is the default. A list may be empty: Search-R1's client sends one when nobody searches.
A query is cut to MAX_QUERY characters, and half a character in it replaced: one bad query, written by a
policy, must not cost the others their answers. A body of more than MAX_BODY bytes is 413, and a connection
whose request stands unfinished for PATIENCE seconds is closed.
"""

import argparse
import sys
from typing import Annotated

from fastapi import HTTPException
from pydantic import AfterValidator, BaseModel, Field, model_validator

from common.data import load_corpus
from common.files import UserError
from common.retriever import make_retriever
from common.serve import http_server
from common.serve.http_server import MAX_BODY, PATIENCE, readable

Query = Annotated[str, AfterValidator(readable)]
QueryList = Annotated[list[Query], Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=1000)] | None


class Retrieve(BaseModel):
    queries: QueryList | None = None
    query: Query | None = None
    topk: Count = None
    topk_rerank: int | None = None
    return_scores: bool = False

    @model_validator(mode="after")
    def one_form(self):
        if (self.queries is None) == (self.query is None):
            raise ValueError("give queries (a list) or query (a string)")
        return self


class Search(BaseModel):
    query: Query
    top_n: Count = None
    return_score: bool = False


class BatchSearch(Search):
    query: QueryList


class Queries(BaseModel):
    queries: QueryList
    k: Count = None


def document(passage):
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}


def scored(passage):
    return {"document": document(passage), "score": passage.score}


def make_app(retriever, max_body=MAX_BODY, patience=PATIENCE):
    """The FastAPI application."""
    app = http_server.application("fivehop retriever", max_body, patience)

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.post("/retrieve")
    def retrieve(request: Retrieve):
        if request.topk_rerank is not None:
            raise HTTPException(422, "this server does not rerank; leave topk_rerank out")
        queries = request.queries if request.query is None else [request.query]
        results = retriever.search(queries, request.topk or 3)
        row = scored if request.return_scores else document
        return {"result": [[row(p) for p in hits] for hits in results]}

    @app.post("/search")
    def search(request: Search):
        hits = retriever.search([request.query], request.top_n or 10)[0]
        documents = [document(p) for p in hits]
        return [documents, [p.score for p in hits]] if request.return_score else documents

    @app.post("/batch_search")
    def batch_search(request: BatchSearch):
        results = retriever.search(request.query, request.top_n or 10)
        documents = [[document(p) for p in hits] for hits in results]
        scores = [[p.score for p in hits] for hits in results]
        return [documents, scores] if request.return_score else documents

    @app.post("/queries")
    def queries(request: Queries):
        results = retriever.search(request.queries, request.k or 3)
        answers = [[document(p)["contents"] for p in hits] for hits in results]
        return {"queries": request.queries, "answers": answers}

    return app


def main():
    """Serves a corpus."""
    parser = argparse.ArgumentParser(prog="python -m common.serve.search", description=main.__doc__)
    parser.add_argument("--corpus", required=True, help="JSONL with id, contents")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad records out, and count them")
    parser.add_argument("--retriever", default="bm25", help="bm25, dense:MODEL or dense:MODEL@INDEX")
    parser.add_argument("--query-prefix", default="auto", help="what a dense encoder reads before a query")
    parser.add_argument("--passage-prefix", default="auto", help="and before a passage; auto = as it was "
                        "trained, where its prompts or its name tell")
    http_server.address_flags(parser, 8000)
    args = parser.parse_args()
    http_server.check_port(args.port)
    try:
        serve(args)
    except KeyboardInterrupt:
        pass


def serve(args):
    listener = http_server.bind(args.host, args.port)
    try:
        corpus = load_corpus(args.corpus, args.skip_bad)
        retriever = make_retriever(args.retriever, corpus, query_prefix=args.query_prefix,
                                   passage_prefix=args.passage_prefix)
    except UserError as error:
        sys.exit(f"error: {error}")
    what = f"{len(corpus):,} passages ({args.retriever})"
    http_server.run(make_app(retriever), listener, args, what, "/retrieve")


if __name__ == "__main__":
    main()
