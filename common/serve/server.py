"""The servers of searches and of graphs.

    python -m common.serve search --corpus wiki-18.jsonl --retriever bm25 --port 8000
    python -m common.serve graph --graph cs=FILE,legal=FOLDER --port 8100

docs/data.md has their requests and answers: those of Search-R1, verl, SkyRL, ReSearch and R1-Searcher.
A count of null or 0 is the default. A list may be empty: Search-R1's client sends one when nobody searches.
node_name may be a list of names, with a list of as many questions or one for all: the answer is then a list
of texts. A name that there is not has a text as well, a graph that there is not is 404.

A query or name is cut to MAX_QUERY characters, and half a character in it replaced: one bad query, written by
a policy, must not cost the others their answers. Bodies have no limit: serve to whom you trust.
"""

import asyncio
import socket
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import AfterValidator, BaseModel, Field, model_validator

from common import kg
from common.data import load_corpus
from common.files import UserError, one_line, say
from common.graphs import kg_files
from common.graphs.kg_tools import ENTITY_MATCHER, MATCHES, NODE_INFO, Call, LocalTools
from common.http_client import BROKEN
from common.retriever import make_retriever

MAX_QUERY = 20_000      # characters
Text = Annotated[str, AfterValidator(lambda text: BROKEN.sub("\ufffd", text[:MAX_QUERY]))]
TextList = Annotated[list[Text], Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, le=1000)] | None


# ---------------------------------------------------------------- searches

class Retrieve(BaseModel):
    queries: TextList | None = None
    query: Text | None = None
    topk: Count = None
    topk_rerank: None = None  # this server does not rerank, and says so
    return_scores: bool = False

    @model_validator(mode="after")
    def one_form(self):
        if (self.queries is None) == (self.query is None):
            raise ValueError("give queries (a list) or query (a string)")
        return self


class OneOrSeveral(BaseModel):
    query: Text | TextList
    top_n: Count = None
    return_score: bool = False


class Queries(BaseModel):
    queries: TextList
    k: Count = None


def document(passage):
    return {"id": passage.id, "contents": f'"{passage.title}"\n{passage.text}'}


def scored(passage):
    return {"document": document(passage), "score": passage.score}


class Joined:
    """A retriever of many requests: those that wait while it searches go into its next call, in order."""

    def __init__(self, retriever):
        self.retriever = retriever
        self.waiting = []
        self.work = None

    async def search(self, queries, k):
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((queries, k, answer))
        if self.work is None or self.work.done():
            self.work = asyncio.create_task(self._work())
        return await answer

    async def _work(self):
        while self.waiting:
            taken, self.waiting = self.waiting, []
            for k in dict.fromkeys(k for _, k, _ in taken):  # (for another k, an index may find others)
                await self._answer([(queries, answer) for queries, its_k, answer in taken if its_k == k], k)

    async def _answer(self, taken, k):
        together = [query for queries, _ in taken for query in queries]
        try:
            found = await asyncio.to_thread(self.retriever.search, together, k)
        except Exception as error:  # one bad request must not cost the others their answers
            if len(taken) == 1:
                taken[0][1].set_exception(error)
                return
            for one in taken:
                await self._answer([one], k)
            return
        for queries, answer in taken:
            if not answer.done():  # (the server may be ending)
                answer.set_result(found[:len(queries)])
            found = found[len(queries):]


def search_app(retriever):
    """The FastAPI application of a retriever."""
    joined = Joined(retriever)
    app = FastAPI(title="fivehop retriever")

    @app.get("/health")
    def health():
        return {"status": "ok"}

    @app.post("/retrieve")
    async def retrieve(request: Retrieve):
        queries = request.queries if request.query is None else [request.query]
        results = await joined.search(queries, request.topk or 3)
        row = scored if request.return_scores else document
        return {"result": [[row(p) for p in hits] for hits in results]}

    @app.post("/search")
    @app.post("/batch_search")
    async def search(request: OneOrSeveral):
        several = isinstance(request.query, list)
        results = await joined.search(request.query if several else [request.query], request.top_n or 10)
        documents = [[document(p) for p in hits] for hits in results]
        scores = [[p.score for p in hits] for hits in results]
        if not several:
            documents, scores = documents[0], scores[0]
        return [documents, scores] if request.return_score else documents

    @app.post("/queries")
    async def queries(request: Queries):
        results = await joined.search(request.queries, request.k or 3)
        answers = [[document(p)["contents"] for p in hits] for hits in results]
        return {"queries": request.queries, "answers": answers}

    return app


# ---------------------------------------------------------------- graphs

class Question(BaseModel):
    node_name: Text | TextList
    question: Text | TextList = ""

    @model_validator(mode="after")
    def one_question_a_name(self):
        if isinstance(self.question, list):
            names = self.node_name if isinstance(self.node_name, list) else None
            if names is None or len(names) != len(self.question):
                raise ValueError("as many questions as names, or one text")
        return self

    def calls(self, tool, graph_type):
        names = self.node_name if isinstance(self.node_name, list) else [self.node_name]
        questions = self.question
        if isinstance(questions, str):
            questions = [questions] * len(names)
        return [Call(tool, name, graph_type, q) for name, q in zip(names, questions, strict=True)]


def graph_app(tools, k=MATCHES):
    """The FastAPI application of LocalTools. k: how many entities entity_matcher shows."""
    app = FastAPI(title="fivehop graphs")
    tools.prepare()

    def answer(tool, graph_type, asked):
        if graph_type not in tools.graphs:
            raise HTTPException(404, kg.render_unknown_graph(graph_type, tools.graphs))
        texts = tools.search(asked.calls(tool, graph_type), k)
        return {"rendered_content": texts if isinstance(asked.node_name, list) else texts[0]}

    @app.get("/health")
    def health():
        return {"status": "ok", "graphs": list(tools.graphs)}

    @app.post("/{graph_type}/get_precise_entity_names")
    def get_precise_entity_names(graph_type: str, asked: Question):
        return answer(ENTITY_MATCHER, graph_type, asked)

    @app.post("/{graph_type}/get_node")
    def get_node(graph_type: str, asked: Question):
        return answer(NODE_INFO, graph_type, asked)

    return app


# ---------------------------------------------------------------- the commands

@dataclass
class Search:
    """Serves a corpus, or searches it once."""
    corpus: str                 # JSONL with id, contents
    query: str = ""             # searches for this, shows three passages and ends
    skip_bad: bool = False      # leave bad records out, and count them
    retriever: str = "bm25"     # bm25, dense:MODEL or dense:MODEL@INDEX (docs/data.md)
    host: str = "127.0.0.1"     # loopback unless told otherwise
    port: int = 8000            # 0: any that is free

    def app(self):
        """(application, what it serves)"""
        corpus, retriever = self.made()
        return search_app(retriever), f"{len(corpus):,} passages ({self.retriever})"

    def made(self):
        corpus = load_corpus(self.corpus, self.skip_bad)
        return corpus, make_retriever(self.retriever, corpus)


@dataclass
class Graph:
    """Serves graphs."""
    graph: str                           # NAME=FILE,NAME=FILE, a file, or a folder of graphs
    graph_encoder: str = ""              # a sentence-transformers model; default tf-idf
    matches: int = MATCHES               # entities that entity_matcher shows
    max_edges: int = kg.MAX_EDGES        # of one node
    max_words: int = kg.MAX_WORDS        # of one answer
    host: str = "127.0.0.1"              # loopback unless told otherwise
    port: int = 8100                     # 0: any that is free

    def app(self):
        """(application, what it serves)"""
        graphs = kg_files.load_graphs(self.graph, self.graph_encoder)
        app = graph_app(LocalTools(graphs, self.max_edges, self.max_words), self.matches)
        for name, graph in graphs.items():
            say(f"{name}: {len(graph.graph):,} entities, {graph.graph.number_of_edges():,} edges")
        return app, f"{len(graphs)} graphs ({', '.join(graphs)})"


def main(arguments=None):
    command = tyro.cli(Search | Graph, prog="python -m common.serve", args=arguments)
    try:
        if isinstance(command, Search) and command.query:
            show(command)
        else:
            serve(command)
    except (UserError, OSError) as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except KeyboardInterrupt:
        pass


def show(command):
    """The passages that a --query finds, best first."""
    corpus, retriever = command.made()
    say(f"{len(corpus):,} passages ({command.retriever})")
    for number, passage in enumerate(retriever.search([command.query], 3)[0], 1):
        say(f"{number}. {one_line(passage.title)}: {one_line(passage.text)[:200]}")


def serve(command):
    """Says what it serves, and where, and serves it until it is stopped."""
    config = uvicorn.Config(None, command.host, command.port, log_level="warning")
    family = socket.AF_INET6 if ":" in command.host else socket.AF_INET
    try:
        both = command.host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server((command.host, command.port), family=family, dualstack_ipv6=both)
    except OSError as error:
        sys.exit(f"error: --host {command.host} --port {command.port}: {error.strerror}; choose another "
                 "port, or 0 for any that is free")
    # it listens at once: clients wait while the index is made
    config.app, what = command.app()
    path = "/retrieve" if isinstance(command, Search) else ""
    port = listener.getsockname()[1]
    print(f"serving {what} at http://{command.host}:{port}{path}", flush=True)
    if path:
        asked = """-H 'content-type: application/json' -d '{"queries": ["…"], "topk": 3}'"""
        print(f"ask it: curl -s http://{command.host}:{port}{path} {asked}", flush=True)
    uvicorn.Server(config).run([listener])
