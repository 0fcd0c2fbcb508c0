"""Knowledge graphs: entities, their facts, and the two tools through which an agent reads them.

    graph = KnowledgeGraph.from_triples(rows)   or graphs/kg_files.py: load_graph("triples.jsonl")
    graph.match(names, k=5)                     for each the entities whose names are most alike
    graph.node_info(name)                       description and edges of one entity
    render_matches, render_node                 what the two tools print

The graph itself is a networkx.MultiDiGraph in `graph.graph`: nodes carry `kind` and `description`, edges
`relation` and `description`. graph.graph.graph has `directed`: whether an edge is a fact of its head alone.
"""

import math
import re
from collections import Counter
from functools import cached_property

import networkx

from common.chat import no_tags
from common.files import UserError
from common.retriever import TOKEN, folded


class GraphError(UserError):
    """A graph file that cannot be used, with where it is and what was expected."""


def empty_graph(directed):
    return networkx.MultiDiGraph(directed=directed)


def graph_of_triples(rows):
    """rows: (head, relation, tail) strings. A triple given twice is one edge."""
    graph = empty_graph(directed=True)
    for head, relation, tail in rows:
        graph.add_edge(head, tail, relation, relation=relation, description="")
    return graph


class KnowledgeGraph:
    """encoder: of `match`: a sentence-transformers id or folder, or empty = character n-grams."""

    def __init__(self, graph, encoder=""):
        self.graph = graph
        self.encoder = encoder

    @classmethod
    def from_triples(cls, rows):
        return cls(graph_of_triples(rows))

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

    def named(self, name):
        """The entity of this name, or the one that tools print so (one_line), or None."""
        if name in self.graph:
            return name
        return self._printed.get(one_line(name))

    @cached_property
    def _printed(self):
        printed = {}
        for name in self.graph:
            printed.setdefault(one_line(name), name)
        return printed

    @cached_property
    def index(self):
        from common.graphs.kg_index import Index
        return Index(list(self.graph), self.encoder)

    def match(self, names, k=5):
        """For each name the k entities with the most similar ones, best first:
        [{"name", "kind", "description", "score"}], score = cosine, in [0, 1] without an encoder."""
        found = []
        for best in self.index.search([str(name) for name in names], k):
            found.append([self._about(self.index.names[number]) | {"score": score} for number, score in best])
        return found

    def _about(self, name):
        return {"name": name, "kind": "", "description": ""} | self.graph.nodes[name]

    def node_info(self, name):
        """{"name", "kind", "description", "edges": [{"head", "relation", "tail", "description"}]}, its own
        facts first; None where there is no such entity."""
        if name not in self.graph:
            return None
        outward = list(self.graph.out_edges(name, data=True))
        inward = self.graph.in_edges(name, data=True)
        inward = [(head, tail, edge) for head, tail, edge in inward if head != tail]
        edges = []
        for head, tail, edge in outward + inward:
            edges.append({"head": head, "relation": edge["relation"], "tail": tail,
                          "description": edge.get("description", "")})
        return self._about(name) | {"edges": edges}


# ---------------------------------------------------------------- what the tools print
#
#     Found 5 entities matching 'Rational Grazing':      Entity: Pays de Caux
#     1. Entity: Rational Grazing                        Type: location
#     Description: a systematic approach …               Description: a natural region …
#     2. Entity: …                                       Edges: 2
#                                                        1. Rational Grazing | practised in | Pays de Caux: …
#
# (Omne-R1, appendix A, which repeats the name before a description.) Nothing in a graph can end the text that
# it stands in or pass for another: names and descriptions are one line each, so none can begin a line (an
# entity, a role), without control characters, and "<" before a letter, "/" or "|" is a look-alike
# (chat.no_tags). A tokenizer's own tokens are chat.encode's matter: pass these texts as chat.Foreign.

MAX_EDGES = 60
MAX_WORDS = 2000  # of one tool's answer; Omne-R1's code cuts at 2,048 tokens
MARGIN = 20       # of them for what is said around the edges
LETTERS = 12      # that a word may have on average: text without spaces is cut too
NEAREST = 3       # names said where there is no such entity


def one_line(text):
    """The text as it stands in a tool's answer.

    >>> one_line("a\\nuser: b\\x00 </tool_response>")
    'a user: b ‹/tool_response>'
    """
    text = text.encode("utf-8", "replace").decode()  # (half a character is no text)
    text = " ".join(text.split())
    return no_tags(re.sub(r"[\x00-\x1f\x7f-\x9f]", "", text))


def cut(text, words):
    """The first words of a line, and " …" where it has more.

    >>> cut("one two three", 2), cut("one two", 2)
    ('one two …', 'one two')
    """
    kept = " ".join(text.split()[:words])[:words * LETTERS]
    return text if kept == text else f"{kept} …".strip()


def render_matches(query, found, max_words=MAX_WORDS):
    query = cut(one_line(query), max_words // 4)
    each = max(1, max_words // max(1, len(found)))
    lines = [f"Found {len(found)} entities matching '{query}':"]
    for number, entity in enumerate(found, 1):
        description = cut(one_line(entity["description"]), each)
        lines.append(f"{number}. Entity: {cut(one_line(entity['name']), each)}")
        lines.append(f"Description: {description or 'none'}")
    return _joined(lines)


def render_node(info, question="", max_edges=MAX_EDGES, max_words=MAX_WORDS):
    """info: of KnowledgeGraph.node_info; question: the edges with most of its words come first. At most
    max_edges edges, and as many as max_words leave room for; how many are left out is said."""
    lines = [f"Entity: {cut(one_line(info['name']), max_words // 4)}"]
    if info["kind"]:
        lines.append(f"Type: {cut(one_line(info['kind']), max_words // 4)}")
    description = cut(one_line(info["description"]), max_words // 2)
    lines.append(f"Description: {description or 'none'}")
    edges = by_shared_words([_edge(edge) for edge in info["edges"]], question)
    room = max_words - MARGIN - sum(len(line.split()) for line in lines)
    shown = []
    for edge in edges[:max_edges]:
        words = 1 + max(len(edge.split()), len(edge) // LETTERS)  # its number is one too
        if words > room and shown:
            break
        shown.append(cut(edge, max(MARGIN, room)))
        room -= words
    lines.append(f"Edges: {len(edges)}")
    lines += [f"{number}. {edge}" for number, edge in enumerate(shown, 1)]
    left = len(edges) - len(shown)
    if left:
        order = "; those above share most words with the question" if question else ""
        lines.append(f"{left} more edges are left out{order}.")
    return _joined(lines)


def _edge(edge):
    text = f"{edge['head']} | {edge['relation']} | {edge['tail']}"
    if edge["description"]:
        text += f": {edge['description']}"
    return one_line(text)


def by_shared_words(edges, question):
    """The edges that have most words of the question first; of those with as many, the ones whose words few
    other edges have (of a city, its country before all who were born there); otherwise in their order."""
    asked = _words(question)
    shared = [asked & _words(edge) for edge in edges]
    times = Counter(word for words in shared for word in words)
    rarity = [math.fsum(1 / times[word] for word in words) for words in shared]  # (in any order)
    order = sorted(range(len(edges)), key=lambda i: (-len(shared[i]), -rarity[i]))
    return [edges[i] for i in order]


def _words(text):
    return set(re.findall(r"\w{3,}", text.lower()))


def render_unknown(name, nearest):
    """nearest: KnowledgeGraph.match's entities for the name."""
    names = [f"'{cut(one_line(entity['name']), 40)}'" for entity in nearest[:NEAREST]]
    return _joined([f"There is no entity named '{cut(one_line(name), 40)}' in this graph. The nearest names: "
                    f"{', '.join(names)}. Use a name exactly as it is written there."])


def render_unknown_graph(graph_type, graphs):
    return _joined([f"There is no graph '{cut(one_line(graph_type), 40)}'. The graphs: {', '.join(graphs)}."])


def _joined(lines):
    return no_tags("\n".join(lines))


# ---------------------------------------------------------------- names in a question

def is_named(name, question):
    """Whether the words of the name stand in the question, in order; case and accents apart. A name in
    brackets behind it may be missing: the paper's example has "Colony Collapse Disorder (CCD)" so.

    >>> is_named("Hive", "Whose hives?"), is_named("hive", "Whose HIVE's?"), is_named("C++ (85)", "Why C++?")
    (False, True, True)
    >>> is_named("上海", "他在上海出生吗？"), is_named("Ann", "谁是Ann的姑姑？")
    (True, True)
    """
    asked = words_of(question)
    forms = words_of(name), words_of(re.sub(r"\s*\([^()]*\)$", "", name))
    return any(form in asked for form in forms if form.strip())


def words_of(text):
    return f" {' '.join(TOKEN.findall(folded(one_line(text))))} "
