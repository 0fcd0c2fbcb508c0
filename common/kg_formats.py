"""Knowledge graphs on disk: every form that is read.

| source | form |
| --- | --- |
| triples | .jsonl and .json (lists or {"head", "relation", "tail"}); .tsv, .txt with two tabs |
| 2WikiMultihopQA | official JSON: the `evidences` of all its questions |
| custom_kg | LightRAG's JSON {"chunks", "entities", "relationships"} |
| LightRAG, nano-graphrag | .graphml, or their working folder with it (and vdb_entities.json) |
| networkx, Neo4j, Gephi, yEd | .graphml with names of nodes and relations of edges as attributes |

What comes of them is described in kg_lightrag.py, which reads LightRAG's own files.
"""

import json
from collections import Counter
from pathlib import Path

from common.kg_lightrag import GraphError, empty_graph, graph_of_custom_kg, read_graphml

GRAPHML = "graph_chunk_entity_relation.graphml"  # the names of a LightRAG working folder
VECTORS = "vdb_entities.json"
KINDS_OF_FILE = ".graphml, .jsonl, .json, .tsv or .txt"


def graph_of_triples(rows):
    """rows: (head, relation, tail) strings. A triple given twice is one edge."""
    graph = empty_graph(directed=True)
    for head, relation, tail in rows:
        graph.add_edge(head, tail, relation, relation=relation, description="")
    return graph


# ---------------------------------------------------------------- files

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
        return graph_of_custom_kg(path, value)
    first = value[0] if isinstance(value, list) and value else None
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


def _evidences(path, rows):
    """The triples of all questions; those without three parts are counted."""
    left_out = Counter()
    triples = []
    for number, row in enumerate(rows, 1):
        found = row.get("evidences") if isinstance(row, dict) else None
        if not isinstance(found, list):
            raise GraphError(f"{path}: record {number}: expected a list in `evidences`")
        for evidence in found:
            try:
                triples.append(triple(evidence))
            except ValueError:
                left_out["triples without three parts"] += 1
    graph = graph_of_triples(triples)
    graph.graph["left_out"] = left_out
    return graph


# ---------------------------------------------------------------- folders

def read_folder(folder):
    """The graph of a LightRAG working folder. (Its vectors are kg_vectors' to read.)"""
    if not is_graph_folder(folder):
        raise GraphError(f"{folder}: a folder without {GRAPHML}")
    return read_graphml(Path(folder) / GRAPHML)


def is_graph_folder(folder):
    return (Path(folder) / GRAPHML).is_file()
