"""LightRAG's and nano-graphrag's files of a knowledge graph, read and written: GraphML and custom_kg JSON.
GraphML of other programs is read too.

A graph is a networkx.MultiDiGraph: nodes carry `kind` and `description`, edges `relation` and `description`;
what came from LightRAG also `weight`, `keywords`, `source_id` and `file_path`. Two edges between a pair stay
two. graph.graph holds `directed` (whether an edge is a fact of its head alone), `left_out` (what could not be
used, counted), `chunks` (rows {"content", "source_id"}: the texts behind the graph) and `quotes` (whether
names keep their double quotes).

LightRAG holds one undirected edge a pair. write_graphml joins parallel edges as LightRAG does and keeps the
single ones, with their direction, beside them in a field of our own, `facts`. What LightRAG's
insert_custom_kg refuses (version 1.5.7) goes to a key of our own, `beside`.
"""

import io
import json
import math
import re
from collections import Counter

import networkx

from common.files import UserError, write_atomic, write_json

SEP = "<SEP>"  # LightRAG's, between the values of one field
EDGE_FIELDS = ("description", "keywords", "weight", "source_id", "file_path")
# (XML's ParseError is a SyntaxError)
UNREADABLE = (OSError, SyntaxError, LookupError, ValueError, RecursionError, networkx.NetworkXError)


class GraphError(UserError):
    """A graph file that cannot be used, with where it is and what was expected."""


def empty_graph(directed):
    return networkx.MultiDiGraph(directed=directed, left_out=Counter(), chunks=[], quotes=True)


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
    """LightRAG's (undirected), nano-graphrag's or our own file, or one of networkx, Neo4j, Gephi, yEd. Names
    lose the literal quotes of older files, many-valued fields their <SEP>. Nodes without a name are left out
    and counted."""
    read = _networkx_graph(path)
    ours = "fivehop" in read.graph  # names as they were, quotes and all
    lightrag = ours or any("entity_type" in node for _, node in read.nodes(data=True))
    directed = read.is_directed()
    if ours:
        directed = read.graph["fivehop"] == "directed"
    graph = empty_graph(directed)
    graph.graph["quotes"] = ours
    left_out = graph.graph["left_out"]
    names = {name: name if ours else plain(name) for name in read if plain(name, ours)}
    if not lightrag:
        names = _names_behind_numbers(path, read) or names
        _refuse_edges_without_relations(path, read)
    for number, node in read.nodes(data=True):
        if number not in names:
            left_out["nodes without a name"] += 1
            continue
        kind = plain(node.get("entity_type"), ours)
        description = plain(node.get("description"), ours)
        graph.add_node(names[number], kind=kind, description=description, **_sources(node))
    single = []
    for head, tail, edge in read.edges(data=True):
        if head not in names or tail not in names:
            left_out["edges of nodes without a name"] += 1
        elif ours and "facts" in edge:
            single += _facts(path, edge["facts"], graph)
        else:
            _add_lightrag_edge(graph, names[head], names[tail], edge, ours)
            if not lightrag and not _first(edge, RELATIONS):
                left_out['relations without a name ("related to" stands for them)'] += 1
    single.sort(key=lambda fact: fact[0])
    for _, head, relation, tail, fields in single:
        add_edge(graph, head, tail, relation, **fields)
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


def _facts(path, text, graph):
    """[(number, head, relation, tail, fields)] of the field `facts`."""
    try:
        facts = []
        for number, head, relation, tail, fields in json.loads(text):
            known = head in graph and tail in graph
            if not known or not isinstance(relation, str) or not isinstance(fields["description"], str):
                raise ValueError
            fields = {key: fields[key] for key in EDGE_FIELDS if key in fields}
            if "weight" in fields:
                fields["weight"] = _weight(fields)
            facts.append((int(number), head, relation, tail, fields))
        return facts
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GraphError(f"{path}: a field `facts` that is damaged: {text[:60]}") from None


def write_graphml(graph, path):
    """A file that LightRAG loads: an undirected graph without parallel edges, with the fields it reads."""
    directed = graph.graph["directed"]
    written = networkx.Graph(fivehop="directed" if directed else "undirected")
    for name, node in graph.nodes(data=True):
        fields = _entity(name, node)
        written.add_node(_xml(name), **_xml_fields(fields))
    for (head, tail), parallel in _pairs(graph).items():
        fields = _joined(parallel)
        if directed or len(parallel) > 1:
            fields["facts"] = json.dumps([_fact(*edge) for edge in parallel])
        written.add_edge(_xml(head), _xml(tail), **_xml_fields(fields))
    file = io.BytesIO()
    networkx.write_graphml_xml(written, file)
    write_atomic(path, file.getvalue().decode("utf-8"))


def _pairs(graph):
    """{pair of names: [(number, head, tail, edge)]}, the pair as its first edge has it."""
    found = {}
    number = 0
    for head, tail, edge in graph.edges(data=True):
        pair = (head, tail)
        if (tail, head) in found:
            pair = (tail, head)
        found.setdefault(pair, [])
        found[pair].append((number, head, tail, edge))
        number += 1
    return found


def _joined(parallel):
    """The fields of parallel edges in one, as LightRAG joins them."""
    rows = []
    for _, head, tail, edge in parallel:
        rows.append(_relationship(head, tail, edge))
    fields = {"weight": sum(row["weight"] for row in rows)}
    separators = {"description": SEP, "keywords": ",", "source_id": SEP, "file_path": SEP}
    for key, separator in separators.items():
        values = [row[key] for row in rows if row[key]]
        fields[key] = separator.join(dict.fromkeys(values))
    return fields


def _fact(number, head, tail, edge):
    """A single edge, as the field `facts` has it."""
    fields = {key: edge[key] for key in EDGE_FIELDS if key in edge}
    return [number, _xml(head), edge["relation"], _xml(tail), fields]


def _entity(name, node):
    """LightRAG's fields of a node."""
    return {
        "entity_id": name,
        "entity_type": node.get("kind", ""),
        "description": node.get("description", ""),
        "source_id": node.get("source_id", ""),
        "file_path": node.get("file_path", ""),
    }


def _relationship(head, tail, edge):
    """LightRAG's fields of an edge."""
    return {
        "src_id": head,
        "tgt_id": tail,
        "description": edge.get("description", ""),
        "keywords": edge.get("keywords", edge["relation"]),
        "weight": float(edge.get("weight", 1.0)),
        "source_id": edge.get("source_id", ""),
        "file_path": edge.get("file_path", ""),
    }


def _xml(text):
    """What XML 1.0 can hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _xml_fields(fields):
    cleaned = {}
    for key, value in fields.items():
        cleaned[key] = _xml(value) if isinstance(value, str) else value
    return cleaned


# ---------------------------------------------------------------- custom_kg

BESIDE = "beside"  # rows that LightRAG would refuse, with their number among all


def graph_of_custom_kg(path, value):
    """The graph of a custom_kg object. path: where it was read, for errors."""
    graph = empty_graph(directed=value.get("directed") is True)
    for number, row in enumerate(_all_rows(path, value, "entities"), 1):
        name, = _names(path, "entities", number, row, "entity_name")
        description = plain(row.get("description"), quotes=True)
        kind = plain(row.get("entity_type"), quotes=True)
        graph.add_node(name, kind=kind, description=description, **_sources(row))
    for number, row in enumerate(_all_rows(path, value, "relationships"), 1):
        head, tail = _names(path, "relationships", number, row, "src_id", "tgt_id")
        if "weight_given" in row:
            row = {**row, "weight": row["weight_given"]}
        _add_lightrag_edge(graph, head, tail, row, quotes=True)
    for chunk in value.get("chunks") or []:
        if isinstance(chunk, dict) and "content" in chunk:
            graph.graph["chunks"].append(chunk)
    return graph


def _all_rows(path, value, field):
    """The rows of a field, those that stand beside them in their places."""
    try:
        rows = list(value.get(field) or [])
        beside = value.get(BESIDE, {}).get(field, [])
        for row in sorted(beside, key=lambda row: row["number"]):
            rows.insert(row["number"], row)
        return rows
    except (TypeError, AttributeError, KeyError):
        raise GraphError(f"{path}: expected lists in `{field}` and in `{BESIDE}`") from None


def _names(path, field, number, row, *keys):
    given = [row.get(key) if isinstance(row, dict) else None for key in keys]
    if not all(isinstance(name, str) and name.strip() for name in given):
        raise GraphError(f"{path}: record {number} of {field}: expected {' and '.join(keys)}, with text")
    return given


def write_custom_kg(graph, path):
    """What LightRAG's insert_custom_kg takes; two edges between a pair are two rows (it keeps the last).

    Returns how many rows it would refuse."""
    entities = []
    relationships = []
    for name, node in graph.nodes(data=True):
        row = _entity(name, node)
        row["entity_name"] = row.pop("entity_id")
        entities.append((_bare(name) == "", row))
    for head, tail, edge in graph.edges(data=True):
        row = _relationship(head, tail, edge)
        if row["weight"] < 1.0:  # a weight counts sources, one at least
            row = {**row, "weight": 1.0, "weight_given": row["weight"]}
        ends = {_bare(head), _bare(tail)}
        refused = "" in ends or len(ends) < 2
        relationships.append((refused, row))
    fields = {"entities": entities, "relationships": relationships}
    value = {
        "directed": graph.graph["directed"],  # LightRAG has no direction and looks past this
        "chunks": graph.graph["chunks"],
    }
    beside = {}
    for field, rows in fields.items():
        value[field] = []
        beside[field] = []
        for number, (refused, row) in enumerate(rows):
            if refused:
                beside[field].append({"number": number, **row})
            else:
                value[field].append(row)
    write_json(path, {**value, BESIDE: beside})
    return sum(map(len, beside.values()))


def _bare(name):
    """Near what LightRAG makes of a name; "" for what it takes for none: quotes, short numbers.

    >>> _bare("'Ann'"), _bare("12"), _bare("1.25"), _bare("1843"), _bare("No. 1")
    ('Ann', '', '', '1843', 'No. 1')
    """
    name = name.strip(" \t\n\"'\u2018\u2019\u201c\u201d")
    return "" if re.fullmatch(r"\d{1,2}|(?=.*\.)[\d.]{1,5}", name) else name
