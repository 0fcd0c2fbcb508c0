"""The search server: every corpus and retriever of ours behind the HTTP forms that agents speak.

    python -m common.retriever serve --corpus wiki-18.jsonl --retriever bm25 --port 8000

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
import asyncio
import functools
import socket
import sys
from typing import Annotated

import h11
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import AfterValidator, BaseModel, Field, model_validator
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.retriever import HALF_CHARACTER, RetrieverError, make_retriever

MAX_QUERY = 20_000      # characters
MAX_BODY = 8_000_000    # bytes
PATIENCE = 20.0         # seconds for the head of a request, and again for its body


def readable(query):
    return HALF_CHARACTER.sub("\ufffd", query[:MAX_QUERY])


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
    app = FastAPI(title="fivehop retriever")
    app.add_middleware(WholeBody, max_body=max_body, patience=patience)

    @app.exception_handler(RequestValidationError)
    def refuse(_, error):  # FastAPI's own repeats the input, which may be NaN or half a character: no JSON
        problems = []
        for e in error.errors():
            problems.append({key: e[key] for key in ("type", "loc", "msg")})
        return JSONResponse({"detail": problems}, 422)

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


class WholeBody:
    """ASGI middleware: reads the body before the application does, unless it is too large or too slow."""

    def __init__(self, app, max_body, patience):
        self.app = app
        self.max_body = max_body
        self.patience = patience

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        body = bytearray()
        more = True
        size = int(Headers(scope=scope).get("content-length", 0))  # an announced excess is not waited for
        try:
            async with asyncio.timeout(self.patience):
                while more and size <= self.max_body:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    more = message.get("more_body", False)
                    size = max(size, len(body))
        except TimeoutError:
            return await self._refuse(408, f"no whole body within {self.patience:g} s", scope, receive, send)
        if size > self.max_body:
            return await self._refuse(413, f"the body is over {self.max_body:,} bytes", scope, receive, send)
        messages = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay():
            return messages.pop() if messages else await receive()

        return await self.app(scope, replay, send)

    @staticmethod
    async def _refuse(status, detail, scope, receive, send):
        response = JSONResponse({"detail": detail}, status, {"connection": "close"})
        await response(scope, receive, send)


class ImpatientProtocol(H11Protocol):
    """uvicorn closes what idles after an answer, but waits for ever for the rest of a request's head."""

    def __init__(self, *args, patience, **kwargs):
        super().__init__(*args, **kwargs)
        self.patience = patience
        self.head_timer = None

    def connection_made(self, transport):
        super().connection_made(transport)
        self._watch()

    def data_received(self, data):
        super().data_received(data)
        self._watch()

    def _watch(self):
        """A timer runs from the first sign of a request until its head is whole; bytes do not rewind it."""
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self.head_timer is None:
            self.head_timer = self.loop.call_later(self.patience, self.transport.close)
        elif not waiting and self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None


class Server(uvicorn.Server):
    """Says when it can be asked."""

    def __init__(self, app, announce="", patience=PATIENCE):
        http = functools.partial(ImpatientProtocol, patience=patience)
        super().__init__(uvicorn.Config(app, http=http, log_level="warning"))
        self.announce = announce

    async def startup(self, sockets=None):
        await super().startup(sockets)
        if self.announce:
            print(self.announce, flush=True)


def bind(host, port):
    """A socket that does not listen yet: the port is free, and clients are refused until the index stands."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        refuse_address(host, port, error)
    return listener


def refuse_address(host, port, error):
    sys.exit(f"error: cannot serve at {host}:{port} ({error.strerror}); give another --host or --port")


def main():
    """Serves a corpus."""
    parser = argparse.ArgumentParser(prog="python -m common.retriever", description=main.__doc__)
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--corpus", required=True, help="JSONL with id, contents")
    parser.add_argument("--retriever", default="bm25", help="bm25, dense:MODEL or dense:MODEL@INDEX")
    parser.add_argument("--host", default="127.0.0.1", help="loopback unless told otherwise")
    parser.add_argument("--port", type=int, default=8000, help="0: any that is free")
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        sys.exit(f"error: --port {args.port}: 0 to 65535")
    try:
        serve(args)
    except KeyboardInterrupt:
        pass


def serve(args):
    from common.data import DataError, load_corpus  # the one place where the server needs files read
    listener = bind(args.host, args.port)
    try:
        corpus = load_corpus(args.corpus)
        retriever = make_retriever(args.retriever, corpus)
    except (DataError, RetrieverError) as error:
        sys.exit(f"error: {error}")
    host = f"[{args.host}]" if ":" in args.host else args.host
    address = f"http://{host}:{listener.getsockname()[1]}/retrieve"
    server = Server(make_app(retriever), f"serving {len(corpus):,} passages ({args.retriever}) at {address}")
    try:
        server.run([listener])
    except OSError as error:  # another server took the port while the index was built
        refuse_address(args.host, args.port, error)


if __name__ == "__main__":
    main()
