"""Knowledge graphs on disk: what is read, and what is written for LightRAG.

| source | form |
| --- | --- |
| triples | .jsonl and .json (lists or {"head", "relation", "tail"}); .tsv, .txt with two tabs |
| 2WikiMultihopQA | official JSON: the `evidences` of all its questions |
| MuSiQue's OpenIE rows, HippoRAG's file | JSON rows {"title", "text", "extracted_triples"}, or under "docs" |
| custom_kg | LightRAG's JSON {"chunks", "entities", "relationships"} |
| LightRAG, nano-graphrag | .graphml, or their working folder with it (and vdb_entities.json) |
| CoDEx | a folder with codex-<size>_{train,valid,test}.txt, or the repository's `data` |

Everything becomes a networkx.MultiDiGraph: nodes carry `kind` and `description`, edges `relation` and
`description`; what came from LightRAG also `weight`, `keywords`, `source_id` and `file_path`. Two edges
between a pair stay two. graph.graph holds `directed` (whether an edge is a fact of its head alone),
`left_out` (what could not be used, counted), `chunks` (rows {"content", "source_id"}: the texts behind the
graph) and `quotes` (whether names keep their double quotes).

LightRAG holds one undirected edge a pair. write_graphml joins parallel edges as LightRAG does and keeps the
single ones, with their direction, beside them in a field of our own, `facts`.
"""

import io
import json
import math
import re
from collections import Counter
from pathlib import Path

import networkx

from common.files import write_atomic, write_json

GRAPHML = "graph_chunk_entity_relation.graphml"  # the names of a LightRAG working folder
VECTORS = "vdb_entities.json"
CHUNKS = "kv_store_text_chunks.json"
CUSTOM_KG = "custom_kg.json"
SEP = "<SEP>"  # LightRAG's, between the values of one field
EDGE_FIELDS = ("description", "keywords", "weight", "source_id", "file_path")
KINDS_OF_FILE = ".graphml, .jsonl, .json, .tsv or .txt"
# (XML's ParseError is a SyntaxError)
UNREADABLE = (OSError, SyntaxError, LookupError, ValueError, RecursionError, networkx.NetworkXError)


class GraphError(ValueError):
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


def graph_of_triples(rows):
    """rows: (head, relation, tail) strings. A triple given twice is one edge."""
    graph = empty_graph(directed=True)
    for head, relation, tail in rows:
        graph.add_edge(head, tail, relation, relation=relation, description="")
    return graph


# ---------------------------------------------------------------- GraphML

def read_graphml(path):
    """LightRAG's (undirected), nano-graphrag's or our own file. Names lose the literal quotes of older files,
    many-valued fields their <SEP>."""
    try:
        read = networkx.read_graphml(path)
    except UNREADABLE as error:
        raise GraphError(f"{path}: not a GraphML file ({type(error).__name__}: {error})") from None
    ours = "fivehop" in read.graph  # names as they were, quotes and all
    if any(not plain(name, ours) for name in read):
        raise GraphError(f"{path}: a node without a name")
    directed = read.is_directed()
    if ours:
        directed = read.graph["fivehop"] == "directed"
    graph = empty_graph(directed)
    graph.graph["quotes"] = ours
    names = {name: name if ours else plain(name) for name in read}
    for name, node in read.nodes(data=True):
        kind = plain(node.get("entity_type"), ours)
        description = plain(node.get("description"), ours)
        graph.add_node(names[name], kind=kind, description=description, **_sources(node))
    single = []
    for head, tail, edge in read.edges(data=True):
        if ours and "facts" in edge:
            single += _facts(path, edge["facts"], graph)
        else:
            _add_lightrag_edge(graph, names[head], names[tail], edge, ours)
    for _, head, relation, tail, fields in sorted(single, key=lambda fact: fact[0]):
        add_edge(graph, head, tail, relation, **fields)
    return graph


def _add_lightrag_edge(graph, head, tail, edge, quotes=False):
    keywords = plain(edge.get("keywords"), quotes)
    relation = keywords or plain(edge.get("relation"), quotes) or "related to"
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
    return {key: str(row[key]) for key in ("source_id", "file_path") if row.get(key)}


def _facts(path, text, graph):
    """[(number, head, relation, tail, fields)] of the field `facts`."""
    try:
        facts = []
        for number, head, relation, tail, fields in json.loads(text):
            known = head in graph and tail in graph
            if not known or not isinstance(relation, str) or not isinstance(fields["description"], str):
                raise ValueError
            known_fields = {key: fields[key] for key in EDGE_FIELDS if key in fields}
            facts.append((int(number), head, relation, tail, known_fields))
        return facts
    except (ValueError, TypeError, KeyError, RecursionError):
        raise GraphError(f"{path}: a field `facts` that is damaged: {text[:60]}") from None


def write_graphml(graph, path):
    """A file that LightRAG loads: an undirected graph without parallel edges, with the fields it reads."""
    pairs = networkx.Graph(fivehop="directed" if graph.graph["directed"] else "undirected")
    for name, node in graph.nodes(data=True):
        pairs.add_node(_xml(name), **_xml_fields(_entity(name, node)))
    edges = {}  # pair -> [(number, head, tail, edge)]
    for number, (head, tail, edge) in enumerate(graph.edges(data=True)):
        pair = (tail, head) if (tail, head) in edges else (head, tail)
        edges.setdefault(pair, []).append((number, head, tail, edge))
    for (head, tail), parallel in edges.items():
        rows = [_relationship(h, t, edge) for _, h, t, edge in parallel]
        fields = {
            "weight": sum(row["weight"] for row in rows),
            "description": _joined(rows, "description", SEP),
            "keywords": _joined(rows, "keywords", ","),
            "source_id": _joined(rows, "source_id", SEP),
            "file_path": _joined(rows, "file_path", SEP),
        }
        if graph.graph["directed"] or len(parallel) > 1:
            facts = [[n, _xml(h), e["relation"], _xml(t), _fields(e)] for n, h, t, e in parallel]
            fields["facts"] = json.dumps(facts)
        pairs.add_edge(_xml(head), _xml(tail), **_xml_fields(fields))
    written = io.BytesIO()
    networkx.write_graphml_xml(pairs, written)
    write_atomic(path, written.getvalue().decode("utf-8"))


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


def _fields(edge):
    return {key: edge[key] for key in EDGE_FIELDS if key in edge}


def _joined(rows, key, separator):
    return separator.join(dict.fromkeys(row[key] for row in rows if row[key]))


def _xml(text):
    """What XML 1.0 can hold."""
    return re.sub("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)


def _xml_fields(fields):
    return {key: _xml(value) if isinstance(value, str) else value for key, value in fields.items()}


# ---------------------------------------------------------------- JSON, and lines

def read_file(path):
    """The graph of a file; what is in a .json decides how it is read."""
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix == ".graphml" and path.is_file():
        return read_graphml(path)
    if suffix != ".json":
        return graph_of_triples(read_triples(path))
    value = _json(path, _text(path))
    if isinstance(value, dict) and value.keys() & {"entities", "relationships"}:
        return _custom_kg(path, value)
    if isinstance(value, dict) and "docs" in value:
        value = value["docs"]
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict) and "extracted_triples" in first:
        return _openie(path, value)
    if isinstance(first, dict) and "evidences" in first:
        return _evidences(path, value)
    return graph_of_triples(_triples(path, value))


def _text(path):
    if not path.is_file():
        raise GraphError(f"--graph {path}: no such file ({KINDS_OF_FILE}; or 'evidences')")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraphError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except OSError as error:
        raise GraphError(f"{path}: cannot be read ({error.strerror})") from None


def _json(path, text):
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GraphError(f"{path}: not valid JSON: {error}") from None


def read_triples(path):
    """[(head, relation, tail)] of a JSON list, JSONL or tab-separated file."""
    path = Path(path)
    text = _text(path)
    if path.suffix.lower() == ".json":
        return _triples(path, _json(path, text))
    rows = [line for line in text.split("\n") if line.strip()]
    if path.suffix.lower() == ".jsonl":
        return _triples(path, rows, json.loads)
    return _triples(path, rows, _tabs)


def _tabs(line):
    return line.rstrip("\r").split("\t")


def _triples(path, rows, read=None):
    if not isinstance(rows, list):
        raise GraphError(f"{path}: expected a list of triples")
    triples = []
    for number, row in enumerate(rows, 1):
        try:
            triples.append(triple(read(row) if read else row))
        except (ValueError, RecursionError):
            raise GraphError(f"{path}: record {number}: "
                             "expected head, relation and tail, three strings") from None
    return triples


def triple(row):
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


def _rows_of(path, row, number, field):
    """The list in a field of a record."""
    found = row.get(field) if isinstance(row, dict) else None
    if not isinstance(found, list):
        raise GraphError(f"{path}: record {number}: expected a list in `{field}`")
    return found


def _usable(rows, left_out):
    """The triples among rows; others are counted."""
    found = []
    for row in rows:
        try:
            found.append(triple(row))
        except ValueError:
            left_out["triples without three parts"] += 1
    return found


def _openie(path, rows):
    """Triples that a model extracted from passages: some have two or four parts. The passage is the
    description of the entity that it is named after."""
    left_out = Counter()
    triples = []
    for number, row in enumerate(rows, 1):
        triples += _usable(_rows_of(path, row, number, "extracted_triples"), left_out)
    graph = graph_of_triples(triples)
    graph.graph["left_out"] = left_out
    for row in rows:
        if row.get("title") in graph:
            graph.nodes[row["title"]]["description"] = plain(row.get("text"), quotes=True)
    return graph


def _evidences(path, rows):
    left_out = Counter()
    triples = []
    for number, row in enumerate(rows, 1):
        triples += _usable(_rows_of(path, row, number, "evidences"), left_out)
    graph = graph_of_triples(triples)
    graph.graph["left_out"] = left_out
    return graph


# ---------------------------------------------------------------- custom_kg

def _custom_kg(path, value):
    graph = empty_graph(directed=value.get("directed") is True)
    for field, names in (("entities", ("entity_name",)), ("relationships", ("src_id", "tgt_id"))):
        for number, row in enumerate(value.get(field) or [], 1):
            given = [row.get(name) if isinstance(row, dict) else None for name in names]
            if not all(isinstance(name, str) and name.strip() for name in given):
                expected = " and ".join(names)
                raise GraphError(f"{path}: record {number} of {field}: expected {expected}, with text")
            if field == "entities":
                description = plain(row.get("description"), quotes=True)
                kind = plain(row.get("entity_type"), quotes=True)
                graph.add_node(given[0], kind=kind, description=description, **_sources(row))
            else:
                _add_lightrag_edge(graph, *given, row, quotes=True)
    chunks = value.get("chunks") or []
    graph.graph["chunks"] = [chunk for chunk in chunks if isinstance(chunk, dict) and "content" in chunk]
    return graph


def write_custom_kg(graph, path):
    """What LightRAG's insert_custom_kg takes; two edges between a pair are two rows (it keeps the last)."""
    value = {
        "directed": graph.graph["directed"],  # LightRAG has no direction and looks past this
        "chunks": graph.graph["chunks"],
        "entities": [],
        "relationships": [],
    }
    for name, node in graph.nodes(data=True):
        row = _entity(name, node)
        row["entity_name"] = row.pop("entity_id")
        value["entities"].append(row)
    for head, tail, edge in graph.edges(data=True):
        value["relationships"].append(_relationship(head, tail, edge))
    write_json(path, value)


# ---------------------------------------------------------------- folders

def read_folder(folder):
    """The graph of a LightRAG working folder or of CoDEx. (Its vectors are kg_vectors' to read.)"""
    folder = Path(folder)
    if (folder / GRAPHML).is_file():
        graph = read_graphml(folder / GRAPHML)
        if (folder / CHUNKS).is_file():
            graph.graph["chunks"] = _chunks(folder / CHUNKS)
        return graph
    if _codex_files(folder):
        return _codex(folder)
    raise GraphError(f"{folder}: a folder with neither {GRAPHML} nor CoDEx's triples "
                     "(codex-<size>_train.txt)")


def is_graph_folder(folder):
    return (Path(folder) / GRAPHML).is_file() or bool(_codex_files(folder))


def _chunks(path):
    """The texts of LightRAG's store, as custom_kg has them."""
    store = _json(path, _text(path))
    if not isinstance(store, dict):
        raise GraphError(f"{path}: expected an object of chunks")
    chunks = []
    for number, row in store.items():
        if isinstance(row, dict) and isinstance(row.get("content"), str):
            chunks.append({"content": row["content"], "source_id": number})
    return chunks


def _codex_files(folder):
    """The files of triples, training first."""
    found = []
    for split in ("train", "valid", "test"):
        found += sorted(Path(folder).glob(f"codex-*_{split}.txt"))
        found += sorted(Path(folder).glob(f"triples/codex-*/{split}.txt"))
    return found


def _codex(folder):
    """All splits of one size. Entities and relations are named by their English labels where the folder has
    them, else by their ids; an entity's kind is its first type."""
    files = _codex_files(folder)
    sizes = {re.search(r"codex-(\w+?)(_|/)", file.as_posix())[1] for file in files}
    if len(sizes) > 1:
        raise GraphError(f"{folder}: CoDEx of several sizes ({', '.join(sorted(sizes))}): "
                         "leave one in the folder")
    entities = _labels(folder, "entities_en.json", "entities/en/entities.json")
    relations = _labels(folder, "relations_en.json", "relations/en/relations.json")
    types = _labels(folder, "types_en.json", "types/en/types.json")
    types_of = _first_json(folder, "entity2types.json", "types/entity2types.json")
    twice = Counter(row["label"] for row in entities.values())

    def name(number):
        label = entities.get(number, {}).get("label", number)
        return f"{label} ({number})" if twice[label] > 1 else label

    rows = [row for file in files for row in read_triples(file)]
    triples = []
    for head, relation, tail in rows:
        relation = relations.get(relation, {}).get("label", relation)
        triples.append((name(head), relation, name(tail)))
    graph = graph_of_triples(triples)
    for number in {number for head, _, tail in rows for number in (head, tail)}:
        node = graph.nodes[name(number)]
        kinds = [types[t]["label"] for t in types_of.get(number, []) if t in types]
        node["kind"] = kinds[0] if kinds else ""
        node["description"] = plain(entities.get(number, {}).get("description"), quotes=True)
    return graph


def _first_json(folder, *paths):
    """The object in the first of these files that is there; {} where none is."""
    for path in paths:
        path = Path(folder) / path
        if path.is_file():
            value = _json(path, _text(path))
            if not isinstance(value, dict):
                raise GraphError(f"{path}: expected an object")
            return value
    return {}


def _labels(folder, *paths):
    """{id: {"label", "description"}} without those that have no label."""
    rows = _first_json(folder, *paths)
    return {number: row for number, row in rows.items() if isinstance(row, dict) and row.get("label")}
