"""Knowledge graphs: entities, their facts, and the two tools through which an agent reads them.

    load_graph("triples.jsonl")            a file or folder in any form of kg_formats.py
    load_graphs("cs=FILE,legal=FILE")      several, by graph_type; or a folder of graphs
    KnowledgeGraph.from_triples(rows)      (head, relation, tail) of a data set, a file or the embedded world
    KnowledgeGraph.from_graphml(path)      what LightRAG, nano-graphrag and others write
    graph.entity_matcher(name, k=5)        the entities whose names are most alike
    graph.match(names, k=5)                the same for many names at once
    graph.node_info(name)                  description, neighbours and edges of one entity
    graph.facts(name)                      its triples, as head

    python -m common.serve graph --graph cs=FILE,legal=FOLDER   both tools over HTTP: serve/server.py

The graph itself is a networkx.MultiDiGraph in `graph.graph`: nodes carry `kind` and `description`, edges
`relation` and `description`. What the tools print is kg_text.py's.
"""

import re
from collections import Counter
from functools import cached_property
from pathlib import Path

from common import kg_formats, kg_lightrag, kg_text, kg_vectors
from common.files import say
from common.kg_formats import read_triples as read_triples
from common.kg_lightrag import GraphError as GraphError


class KnowledgeGraph:
    """encoder: a sentence-transformers id or folder for entity_matcher; empty = character n-grams (tf-idf),
    which needs no download. stored: the entities' vectors (kg_vectors.Stored). cache: a folder for encoded
    names. left_out counts what the graph was given and cannot use."""

    def __init__(self, graph, encoder="", stored=None, cache=None):
        if not graph.number_of_nodes():
            raise GraphError("the graph is empty: it has no entity")
        if stored is not None:
            kg_vectors.rows_among(stored, list(graph))
        self.graph = graph
        self.encoder = encoder
        self.stored = stored
        self.cache = cache
        self.left_out = Counter(graph.graph.get("left_out", {}))

    @classmethod
    def from_triples(cls, rows, encoder=""):
        """rows: (head, relation, tail) strings. A triple given twice is one edge."""
        return cls(kg_formats.graph_of_triples(rows), encoder)

    @classmethod
    def from_graphml(cls, path, encoder=""):
        """LightRAG's (undirected), nano-graphrag's or another program's file."""
        return cls(kg_lightrag.read_graphml(path), encoder)

    def __contains__(self, name):
        return name in self.graph

    def say_left_out(self, name):
        """Tells what could not be used of the graph that is called so."""
        for what, count in self.left_out.items():
            say(f"{name}: left out: {count:,} {what}")

    def facts(self, name):
        """[(name, relation, tail)], tails in the order they were first named; [] where there is no such
        entity. A LightRAG graph has no direction: there an edge is a fact of both its ends."""
        if name not in self.graph:
            return []
        outward = self.graph.out_edges(name, data="relation")
        found = [(name, relation, tail) for _, tail, relation in outward]
        if not self.graph.graph.get("directed", True):
            for head, _, relation in self.graph.in_edges(name, data="relation"):
                if head != name:
                    found.append((name, relation, head))
        return found

    def named(self, name):
        """The entity of this name, or the one that tools print so (kg_text.one_line); None where there is
        none."""
        if name in self.graph:
            return name
        return self._printed.get(kg_text.one_line(name))

    @cached_property
    def _printed(self):
        printed = {}
        for name in self.graph:
            printed.setdefault(kg_text.one_line(name), name)
        return printed

    @cached_property
    def index(self):
        """kg_vectors.Index of the names."""
        made = kg_vectors.Index(list(self.graph), self.encoder, self.stored, self.cache)
        if made.left_out:
            self.left_out["entities without a vector"] = made.left_out
        if made.encoded:
            say(f"{made.encoded:,} entities without a stored vector are encoded")
        return made

    def match(self, names, k=5):
        """For each name the k entities with the most similar ones, best first:
        [{"name", "kind", "description", "score"}], score = cosine, in [0, 1] without an encoder."""
        found = []
        for best in self.index.search([str(name) for name in names], k):
            row = []
            for number, score in best:
                name = self.index.names[number]
                node = self.graph.nodes[name]
                row.append({"name": name, "kind": node.get("kind", ""),
                            "description": node.get("description", ""),
                            "score": score})
            found.append(row)
        return found

    def entity_matcher(self, name, k=5):
        """`match` of one name."""
        return self.match([name], k)[0]

    def node_info(self, name):
        """{"name", "kind", "description", "neighbours", "edges": [{"head", "relation", "tail",
        "description"}]}, or None where there is no such entity."""
        if name not in self.graph:
            return None
        outward = list(self.graph.out_edges(name, data=True))
        inward = self.graph.in_edges(name, data=True)
        inward = [(head, tail, edge) for head, tail, edge in inward if head != tail]
        edges = []
        neighbours = {}  # in the order they are met
        for head, tail, edge in outward + inward:
            edges.append({"head": head, "relation": edge["relation"], "tail": tail,
                          "description": edge.get("description", "")})
            neighbours[tail if head == name else head] = None
        node = self.graph.nodes[name]
        return {"name": name, "kind": node.get("kind", ""),
                "description": node.get("description", ""),
                "neighbours": list(neighbours), "edges": edges}


def load_graph(path, encoder="", cache=None):
    """KnowledgeGraph of a file or a folder; that of a LightRAG working folder has its vectors."""
    path = Path(path)
    stored = None
    if path.is_dir():
        graph = kg_formats.read_folder(path)
        if (path / kg_formats.VECTORS).is_file():
            stored = kg_vectors.read_nano_vectors(path / kg_formats.VECTORS)
    else:
        graph = kg_formats.read_file(path)
    if not graph.number_of_nodes():
        raise GraphError(f"{path}: the graph is empty: it has no entity")
    return KnowledgeGraph(graph, encoder, stored, cache)


def load_graphs(spec, encoder="", cache=None):
    """{graph_type: KnowledgeGraph} of "cs=FILE,legal=FILE", of a folder of graphs (named by their files and
    folders), or of one graph (named by its own)."""
    sources = {}
    path = Path(spec)
    if path.is_dir() and not kg_formats.is_graph_folder(path):
        for entry in sorted(path.iterdir()):
            is_file = entry.suffix.lower() in (".graphml", ".json", ".jsonl", ".tsv")
            if is_file or kg_formats.is_graph_folder(entry):
                _add_source(sources, entry.stem if is_file else entry.name, entry)
        if not sources:
            raise GraphError(f"{spec}: no graph in this folder ({kg_formats.KINDS_OF_FILE}, or folders)")
    elif path.exists() or "=" not in spec:
        name = path.stem if path.is_file() else path.resolve().name
        if path.name == kg_formats.GRAPHML:
            name = path.resolve().parent.name
        _add_source(sources, name, path)
    else:
        for part in spec.split(","):
            name, _, source = part.partition("=")
            _add_source(sources, name.strip(), source.strip())
    return {name: load_graph(source, encoder, cache) for name, source in sources.items()}


def _add_source(sources, name, source):
    if not re.fullmatch(r"[\w.-]+", name) or not str(source):
        raise GraphError(f"--graph {name}={source}: expected NAME=FILE, and a name of letters, digits, . - _")
    if name in sources:
        raise GraphError(f"--graph: two graphs with the name {name}: {sources[name]} and {source}")
    sources[name] = source
