"""The graph server.

    python -m common.serve.graph --graph cs=FILE,legal=FOLDER --port 8100

| path | body | answer |
| --- | --- | --- |
| POST /{graph_type}/get_precise_entity_names | {"node_name": …} | {"rendered_content": …} |
| POST /{graph_type}/get_node | {"node_name": …, "question": ""} | {"rendered_content": …} |
| GET /health | | {"status": "ok", "graphs": […]} |

node_name may be a list of names, with a list of as many questions or one for all: the answer is then a list
of texts. A name that there is not has a text as well, a graph that there is not is 404. Names are cut, bodies
and connections limited as http_server.py says.
"""

import argparse
import sys
from typing import Annotated

from fastapi import HTTPException
from pydantic import AfterValidator, BaseModel, Field, model_validator

from common import kg
from common.files import RunError, UserError, say
from common.graphs import kg_files
from common.graphs.kg_tools import ENTITY_MATCHER, MATCHES, NODE_INFO, Call, LocalTools
from common.serve import http_server
from common.serve.http_server import MAX_BODY, PATIENCE, readable

Text = Annotated[str, AfterValidator(readable)]
TextList = Annotated[list[Text], Field(max_length=4096)]


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


def make_app(tools, k=MATCHES, max_body=MAX_BODY, patience=PATIENCE):
    """The FastAPI application of LocalTools. k: how many entities entity_matcher shows."""
    app = http_server.application("fivehop graphs", max_body, patience)
    for graph in tools.graphs.values():
        graph.match([""])  # the index stands before the first question, and so do the printed names
        graph.named("")

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


def main(arguments=None):
    """Serves graphs over HTTP."""
    parser = argparse.ArgumentParser(prog="python -m common.serve.graph", description=main.__doc__)
    parser.add_argument("--graph", required=True, help="NAME=FILE,NAME=FILE, a file, or a folder of graphs")
    parser.add_argument("--graph-encoder", default="", help="a sentence-transformers model; default tf-idf")
    parser.add_argument("--matches", type=int, default=MATCHES, help="entities that entity_matcher shows")
    parser.add_argument("--max-edges", type=int, default=kg.MAX_EDGES, help="of one node")
    parser.add_argument("--max-words", type=int, default=kg.MAX_WORDS, help="of one answer")
    http_server.address_flags(parser, 8100)
    args = parser.parse_args(arguments)
    try:
        serve(args)
    except UserError as error:
        sys.exit("error: " + " ".join(str(error).split()))
    except KeyboardInterrupt:
        pass


def described(graph):
    """Its size, and what was left out of it."""
    words = [f"{len(graph.graph):,} entities, {graph.graph.number_of_edges():,} edges"]
    words += [f"left out: {count:,} {what}" for what, count in graph.left_out.items()]
    return "; ".join(words)


def serve(args):
    http_server.check_port(args.port)
    if min(args.matches, args.max_edges, args.max_words) < 1:
        raise RunError("--matches, --max-edges and --max-words: 1 or more")
    listener = http_server.bind(args.host, args.port)
    graphs = kg_files.load_graphs(args.graph, args.graph_encoder)
    app = make_app(LocalTools(graphs, args.max_edges, args.max_words), args.matches)
    for name, graph in graphs.items():
        say(f"{name}: {described(graph)}")
    http_server.run(app, listener, args, f"{len(graphs)} graphs ({', '.join(graphs)})")


if __name__ == "__main__":
    main()
