"""LightRAG's and nano-graphrag's files of a knowledge graph: GraphML and custom_kg JSON. GraphML of other
programs is read too.

A graph is a networkx.MultiDiGraph: nodes carry `kind` and `description`, edges `relation` and `description`;
what came from LightRAG also `weight`, `keywords`, `source_id` and `file_path`. Two edges between a pair stay
two. graph.graph holds `directed` (whether an edge is a fact of its head alone) and `left_out` (what could not
be used, counted).
"""

import math
import re
from collections import Counter

import networkx

from common.files import UserError

SEP = "<SEP>"  # LightRAG's, between the values of one field
# (XML's ParseError is a SyntaxError)
UNREADABLE = (OSError, SyntaxError, LookupError, ValueError, RecursionError, networkx.NetworkXError)


class GraphError(UserError):
    """A graph file that cannot be used, with where it is and what was expected."""


def empty_graph(directed):
    return networkx.MultiDiGraph(directed=directed, left_out=Counter())


def plain(text, quotes=False):
    """One line without <SEP>; without double quotes too, which nano-graphrag puts around every field, unless
    `quotes` are to stay."""
    text = str("" if text is None else text).replace(SEP, " ")
    if not quotes:
        text = text.replace('"', "")
    return " ".join(text.split())


def add_edge(graph, head, tail, relation, **fields):
    """Adds an edge beside those that are there, unless it is one of them in every field."""
    edge = {"relation": relation, **fields}
    key = relation
    while graph.has_edge(head, tail, key):
        if graph.edges[head, tail, key] == edge:
            return
        key += "'"
    graph.add_edge(head, tail, key, **edge)


# ---------------------------------------------------------------- GraphML

# where other programs keep them, the first that is filled; upper case is the same
NAMES = ("entity_id", "entity_name", "name", "label", "title")
RELATIONS = ("keywords", "relation", "relationship", "predicate", "label", "edge label", "type",
             "interaction")
NUMBER = re.compile(r"(?=.*\d|.*://)\S+")  # "n0", "17", "http://example.org/Oslo": ids that are no names


def read_graphml(path):
    """LightRAG's (undirected) or nano-graphrag's file, or one of networkx, Neo4j, Gephi, yEd. Names lose the
    literal quotes of older files, many-valued fields their <SEP>. Nodes without a name are left out and
    counted."""
    read = _networkx_graph(path)
    lightrag = any("entity_type" in node for _, node in read.nodes(data=True))
    graph = empty_graph(read.is_directed())
    left_out = graph.graph["left_out"]
    names = {name: plain(name) for name in read if plain(name)}
    if not lightrag:
        names = _names_behind_numbers(path, read) or names
        _refuse_edges_without_relations(path, read)
    for number, node in read.nodes(data=True):
        if number not in names:
            left_out["nodes without a name"] += 1
            continue
        kind = plain(node.get("entity_type"))
        description = plain(node.get("description"))
        graph.add_node(names[number], kind=kind, description=description, **_sources(node))
    for head, tail, edge in read.edges(data=True):
        if head not in names or tail not in names:
            left_out["edges of nodes without a name"] += 1
        else:
            _add_lightrag_edge(graph, names[head], names[tail], edge)
            if not lightrag and not _first(edge, RELATIONS):
                left_out['relations without a name ("related to" stands for them)'] += 1
    return graph


def _networkx_graph(path):
    try:
        return networkx.read_graphml(path)
    except UNREADABLE as error:
        nameless = re.match("Unknown key for id (.*)[.]$", str(error))
        if nameless:
            raise GraphError(f'{path}: <key id="{nameless[1]}"> has no attr.name, which would say what it '
                             "holds: write one into the file") from None
        raise GraphError(f"{path}: not a GraphML file ({type(error).__name__}: {error})") from None


def _names_behind_numbers(path, read):
    """{id: name} of the nodes that have one, where nearly all ids are numbers; {} where ids are names. Nodes
    of one name keep their ids behind it."""
    numbers = sum(bool(NUMBER.fullmatch(number)) for number in read)
    if numbers < .9 * len(read) or not len(read):
        return {}
    found = {number: _first(node, NAMES) for number, node in read.nodes(data=True)}
    found = {number: name for number, name in found.items() if name}
    if not found:
        attributes = _attributes(node for _, node in read.nodes(data=True))
        raise GraphError(f"{path}: ids such as {next(iter(read))} are no names, and no node has one of "
                         f"{', '.join(NAMES)}; its nodes have {attributes or 'no attributes'}")
    twice = Counter(found.values())
    return {number: f"{name} ({number})" if twice[name] > 1 else name for number, name in found.items()}


def _refuse_edges_without_relations(path, read):
    """GraphError: edges have attributes, but none that says how their ends are related."""
    edges = [edge for _, _, edge in read.edges(data=True)]
    attributes = _attributes(edges)
    if attributes and not any(_first(edge, (*RELATIONS, "description")) for edge in edges):
        raise GraphError(f"{path}: no edge has one of {', '.join(RELATIONS)}, which would name its relation; "
                         f"its edges have {attributes}")


def _attributes(rows):
    return ", ".join(sorted({key for row in rows for key in row} - {"id"}))


def _first(row, keys, quotes=False):
    """The first text in some attributes, however their names are written."""
    row = {key.lower(): value for key, value in row.items()}
    found = (plain(row.get(key), quotes) for key in keys)
    return next(filter(None, found), "")


def _add_lightrag_edge(graph, head, tail, edge, quotes=False):
    keywords = plain(edge.get("keywords"), quotes)
    relation = _first(edge, RELATIONS, quotes) or "related to"
    description = plain(edge.get("description"), quotes)
    add_edge(graph, head, tail, relation, description=description, keywords=keywords,
             weight=_weight(edge), **_sources(edge))


def _weight(row):
    """A number; 1.0 where there is none."""
    try:
        weight = float(row.get("weight", 1.0))
    except (TypeError, ValueError):
        return 1.0
    return weight if math.isfinite(weight) else 1.0


def _sources(row):
    """Where a node or an edge came from, as LightRAG wrote it."""
    found = {}
    for key in ("source_id", "file_path"):
        if row.get(key):
            found[key] = str(row[key])
    return found


# ---------------------------------------------------------------- custom_kg

def graph_of_custom_kg(path, value):
    """The graph of a custom_kg object. path: where it was read, for errors."""
    graph = empty_graph(directed=False)
    for number, row in enumerate(_rows(path, value, "entities"), 1):
        name, = _names(path, "entities", number, row, "entity_name")
        description = plain(row.get("description"), quotes=True)
        kind = plain(row.get("entity_type"), quotes=True)
        graph.add_node(name, kind=kind, description=description, **_sources(row))
    for number, row in enumerate(_rows(path, value, "relationships"), 1):
        head, tail = _names(path, "relationships", number, row, "src_id", "tgt_id")
        _add_lightrag_edge(graph, head, tail, row, quotes=True)
    return graph


def _rows(path, value, field):
    rows = value.get(field) or []
    if not isinstance(rows, list):
        raise GraphError(f"{path}: expected a list in `{field}`")
    return rows


def _names(path, field, number, row, *keys):
    given = [row.get(key) if isinstance(row, dict) else None for key in keys]
    if not all(isinstance(name, str) and name.strip() for name in given):
        raise GraphError(f"{path}: record {number} of {field}: expected {' and '.join(keys)}, with text")
    return given
