"""The two tools of knowledge graphs, asked for many calls at once: in this process, or over HTTP.

    tools = make_tools("cs=FILE,legal=FOLDER", encoder)    or make_tools("http://127.0.0.1:8100")
    tools.search([Call("node_info", "Pays de Caux", "agriculture", question)], k=5)  ->  [text]

Every call has a text, also one for a name or a graph that there is not (kg.py). Over HTTP the form is that of
the authors' server, with lists, and with questions, whose words decide which edges come first:

    POST /{graph_type}/get_precise_entity_names, /{graph_type}/get_node    {"node_name": […], "question": […]}
    -> {"rendered_content": […]}
    GET /health -> {"graphs": [names]}
"""

from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from common import http_client, kg
from common.graphs import kg_files
from common.http_client import RETRIES

TOOLS = ENTITY_MATCHER, NODE_INFO = "entity_matcher", "node_info"
PATHS = {ENTITY_MATCHER: "get_precise_entity_names", NODE_INFO: "get_node"}
MATCHES = 5       # entities that entity_matcher shows
MAX_NAME = 4000   # characters
CALLS_A_REQUEST = 256


@dataclass(frozen=True)
class Call:
    """tool: of TOOLS. question: what the agent was asked; it may be empty."""
    tool: str
    node_name: str
    graph_type: str
    question: str = ""


class Tools:
    """What both kinds have: `graphs` by their names."""

    def search(self, calls, k=MATCHES):
        """The texts of calls. k: how many entities entity_matcher shows, where it is not a server's own."""
        groups = {}
        for i, call in enumerate(calls):
            groups.setdefault((call.graph_type, call.tool), []).append(i)
        texts = [""] * len(calls)
        for (graph_type, tool), group in groups.items():
            if graph_type not in self.graphs:
                answers = [kg.render_unknown_graph(graph_type, self.graphs)] * len(group)
            else:
                answers = self.answers(graph_type, tool, [calls[i] for i in group], k)
            for i, answer in zip(group, answers, strict=True):
                texts[i] = answer
        return texts


class LocalTools(Tools):
    """Both tools on graphs of this process. graphs: {graph_type: KnowledgeGraph}."""
    remote = False

    def __init__(self, graphs, max_edges=kg.MAX_EDGES, max_words=kg.MAX_WORDS):
        self.graphs = graphs
        self.max_edges = max_edges
        self.max_words = max_words

    def prepare(self):
        """Makes what a first search would: it takes long, and an encoder may be missing."""
        for graph in self.graphs.values():
            graph.match([""])
            graph.named("")

    def answers(self, graph_type, tool, calls, k):
        graph = self.graphs[graph_type]
        names = [call.node_name[:MAX_NAME] for call in calls]
        if tool == ENTITY_MATCHER:
            found = zip(names, graph.match(names, k), strict=True)
            return [kg.render_matches(name, matches, self.max_words) for name, matches in found]
        known = [graph.named(call.node_name) for call in calls]
        unknown = [name for name, node in zip(names, known, strict=True) if node is None]
        nearest = iter(graph.match(unknown, kg.NEAREST))
        texts = []
        for call, name, node in zip(calls, names, known, strict=True):
            if node is None:
                text = kg.render_unknown(name, next(nearest))
            else:
                text = kg.render_node(graph.node_info(node), call.question, self.max_edges, self.max_words)
            texts.append(text)
        return texts


class HTTPTools(Tools, http_client.Client):
    """Client of a server with these tools. A graph that the server does not have is an answer, as it is in
    this process."""
    what = "graph"
    flag = "--graph"
    failure = kg.GraphError
    remedy = "Start one with `python -m common.serve graph --graph FILE`, or give --graph a file"

    def __init__(self, url, timeout=60.0, retries=RETRIES):
        super().__init__(url, timeout, retries)
        self.graphs = self.patiently(self._graphs)

    def _graphs(self):
        try:
            return list(self.ask("GET", "/health")["graphs"])
        except (KeyError, TypeError):
            raise kg.GraphError(f"{self.url}/health names no graphs. {self.remedy}") from None

    def search(self, calls, k=MATCHES):
        self.cancelled.clear()
        return super().search(calls, k)

    def answers(self, graph_type, tool, calls, k):
        path = f"/{quote(graph_type, safe='')}/{PATHS[tool]}"
        texts = []
        for start in range(0, len(calls), CALLS_A_REQUEST):
            part = calls[start:start + CALLS_A_REQUEST]
            answer = self.patiently(partial(self.ask, "POST", path, self._request(part)))
            texts += self._texts(answer, path, len(part))
        return texts

    def _request(self, calls):
        names = []
        for call in calls:
            self.repair(f"names of more than {MAX_NAME:,} characters", len(call.node_name) > MAX_NAME)
            names.append(self.text(call.node_name[:MAX_NAME], "names"))
        questions = [self.text(call.question[:MAX_NAME], "questions") for call in calls]
        return {"node_name": names, "question": questions}

    def _texts(self, answer, path, expected):
        """The texts of one answer, each as safe as if it had been written here."""
        found = answer.get("rendered_content") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise kg.GraphError(f"{self.url}{path} answered in another form than {{rendered_content: texts}}")
        if len(found) != expected:
            raise kg.GraphError(f"{self.url}{path} answered {len(found)} texts for {expected} names")
        return [kg.harmless_lines(self.text(text, "answers")) for text in found]


def make_tools(spec, encoder="", max_edges=kg.MAX_EDGES):
    if spec.startswith(("http://", "https://")):
        return HTTPTools(spec)
    return LocalTools(kg_files.load_graphs(spec, encoder), max_edges)
