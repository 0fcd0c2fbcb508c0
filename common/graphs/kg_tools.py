"""The two tools of knowledge graphs, asked for many calls at once.

    tools = LocalTools(kg_files.load_graphs("cs=FILE,legal=FOLDER", encoder))
    tools.search([Call("node_info", "Pays de Caux", "agriculture", question)], k=5)  ->  [text]

Every call has a text, also one for a name or a graph that there is not (kg.py). serve/server.py offers them
over HTTP, in the form of the authors' server, to agents other than these.
"""

from dataclasses import dataclass

from common import kg

TOOLS = ENTITY_MATCHER, NODE_INFO = "entity_matcher", "node_info"
MATCHES = 5       # entities that entity_matcher shows
MAX_NAME = 4000   # characters


@dataclass(frozen=True)
class Call:
    """tool: of TOOLS. question: what the agent was asked; it may be empty."""
    tool: str
    node_name: str
    graph_type: str
    question: str = ""


class LocalTools:
    """Both tools on graphs of this process. graphs: {graph_type: KnowledgeGraph}."""

    def __init__(self, graphs, max_edges=kg.MAX_EDGES, max_words=kg.MAX_WORDS):
        self.graphs = graphs
        self.max_edges = max_edges
        self.max_words = max_words

    def prepare(self):
        """Makes what a first search would: it takes long, and an encoder may be missing."""
        for graph in self.graphs.values():
            graph.match([""])
            graph.named("")

    def search(self, calls, k=MATCHES):
        """The texts of calls. k: how many entities entity_matcher shows."""
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
