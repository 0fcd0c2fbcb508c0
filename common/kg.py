"""Knowledge graphs: entities, their facts, and the two tools through which an agent reads them.

    KnowledgeGraph.from_triples(rows)      (head, relation, tail) of a data set, a file or the embedded world
    KnowledgeGraph.from_graphml(path)      what LightRAG and nano-graphrag write
    graph.entity_matcher(name, k=5)        the entities whose names are most alike
    graph.node_info(name)                  description, neighbours and edges of one entity
    graph.facts(name)                      its triples, as head

    load_graph("triples.jsonl")            .graphml; .jsonl and .json (lists or {"head", "relation", "tail"});
                                           .tsv, .txt with two tabs

The graph itself is a networkx.MultiDiGraph in `graph.graph`: nodes carry `kind` and `description`, edges
`relation` and `description`.
"""

import json
from functools import cached_property
from pathlib import Path

import networkx

from common import hub


class GraphError(ValueError):
    """A graph file that cannot be used, with where it is and what was expected."""


class KnowledgeGraph:
    """encoder: a sentence-transformers id or folder for entity_matcher; empty = character n-grams (tf-idf),
    which needs no download."""

    def __init__(self, graph, encoder=""):
        if not graph.number_of_nodes():
            raise GraphError("the graph is empty: it has no entity")
        self.graph = graph
        self.encoder = encoder

    @classmethod
    def from_triples(cls, rows, encoder=""):
        """rows: (head, relation, tail) strings. A triple given twice is one edge."""
        graph = networkx.MultiDiGraph()
        for head, relation, tail in rows:
            graph.add_edge(head, tail, relation, relation=relation, description="")
        return cls(graph, encoder)

    @classmethod
    def from_graphml(cls, path, encoder=""):
        """LightRAG's (undirected) or nano-graphrag's file. Names lose the literal quotes of older files;
        many-valued fields their <SEP>."""
        def plain(text):
            text = str(text or "")
            text = text.replace("<SEP>", " ").replace('"', "")
            return " ".join(text.split())

        # (XML's ParseError is a SyntaxError)
        unreadable = (OSError, SyntaxError, LookupError, ValueError, networkx.NetworkXError)
        try:
            read = networkx.read_graphml(path)
        except unreadable as error:
            raise GraphError(f"{path}: not a GraphML file ({type(error).__name__}: {error})") from None
        if any(not str(n).replace('"', "").strip() for n in read):
            raise GraphError(f"{path}: a node without a name")
        graph = networkx.MultiDiGraph()
        for name, node in read.nodes(data=True):
            kind = plain(node.get("entity_type"))
            description = plain(node.get("description"))
            graph.add_node(plain(name), kind=kind, description=description)
        for head, tail, edge in read.edges(data=True):
            relation = plain(edge.get("keywords")) or plain(edge.get("relation")) or "related to"
            description = plain(edge.get("description"))
            graph.add_edge(plain(head), plain(tail), relation,
                           relation=relation, description=description)
        graph.graph["directed"] = read.is_directed()
        return cls(graph, encoder)

    def __contains__(self, name):
        return name in self.graph

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

    @cached_property
    def _vectors(self):
        """(names, encode, (n, d) unit vectors of the names)"""
        names = list(self.graph)
        if self.encoder:
            from sentence_transformers import SentenceTransformer
            try:
                found = hub.locate(self.encoder)
                model = SentenceTransformer(found, local_files_only=Path(found).is_dir())
            except hub.HubError as error:
                raise GraphError(str(error)) from error
            except Exception as error:  # hub, network and format errors all have the same remedy
                raise GraphError(f"encoder {self.encoder} did not load ({type(error).__name__}); "
                                 "give a folder with a sentence-transformers model") from error

            def encode(texts):
                return model.encode(texts, normalize_embeddings=True,
                                    show_progress_bar=len(texts) > 5000)
        else:
            from sklearn.feature_extraction.text import TfidfVectorizer
            tfidf = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3))
            encode = tfidf.fit(names).transform
        return names, encode, encode(names)

    def entity_matcher(self, name, k=5):
        """The k entities with the most similar names, best first:
        [{"name", "kind", "description", "score"}], score = cosine in [0, 1]."""
        names, encode, vectors = self._vectors
        scores = vectors @ encode([str(name)]).T
        if hasattr(scores, "toarray"):
            scores = scores.toarray()
        scores = scores[:, 0]
        best = sorted(range(len(names)), key=lambda i: (-scores[i], i))
        found = []
        for i in best[:k]:
            node = self.graph.nodes[names[i]]
            found.append({"name": names[i], "kind": node.get("kind", ""),
                          "description": node.get("description", ""),
                          "score": float(scores[i])})
        return found

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


def _triple(row):
    """(head, relation, tail) of a list or an object. Raises ValueError."""
    names = ("head", "relation", "tail")
    if isinstance(row, dict) and row.keys() >= set(names):
        row = [row[name] for name in names]
    if not isinstance(row, (list, tuple)) or len(row) != 3:
        raise ValueError
    parts = []
    for part in row:
        if not isinstance(part, str) or not part.strip():
            raise ValueError
        part = part.strip().encode("utf-8", "replace").decode()  # (half a surrogate pair is no text)
        parts.append(part)
    return tuple(parts)


def read_triples(path):
    """[(head, relation, tail)] of a JSON list, JSONL or tab-separated file."""
    path = Path(path)
    if not path.is_file():
        raise GraphError(f"--graph {path}: no such file "
                         "(.graphml, .jsonl, .json, .tsv or .txt; or 'evidences')")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    suffix = path.suffix.lower()
    try:
        if suffix == ".json":
            rows = json.loads(text)
        else:
            rows = [line for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(rows, list):
        raise GraphError(f"{path}: expected a list of triples")
    triples = []
    for number, row in enumerate(rows, 1):
        try:
            if suffix == ".jsonl":
                row = json.loads(row)
            elif suffix != ".json":
                row = row.rstrip("\r").split("\t")
            triples.append(_triple(row))
        except (ValueError, RecursionError):
            raise GraphError(f"{path}: record {number}: "
                             "expected head, relation and tail, three strings") from None
    return triples


def load_graph(path, encoder=""):
    """KnowledgeGraph of a .graphml file or of triples."""
    if Path(path).suffix.lower() == ".graphml" and Path(path).is_file():
        return KnowledgeGraph.from_graphml(path, encoder)
    return KnowledgeGraph.from_triples(read_triples(path), encoder)
