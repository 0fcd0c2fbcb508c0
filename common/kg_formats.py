"""Knowledge graphs on disk: every form that is read.

| source | form |
| --- | --- |
| triples | .jsonl and .json (lists or {"head", "relation", "tail"}); .tsv, .txt with two tabs |
| 2WikiMultihopQA | official JSON: the `evidences` of all its questions |
| MuSiQue's OpenIE rows, HippoRAG's file | JSON rows {"title", "text", "extracted_triples"}, or under "docs" |
| custom_kg | LightRAG's JSON {"chunks", "entities", "relationships"} |
| LightRAG, nano-graphrag | .graphml, or their working folder with it (and vdb_entities.json) |
| networkx, Neo4j, Gephi, yEd | .graphml with names of nodes and relations of edges as attributes |
| CoDEx | a folder with codex-<size>_{train,valid,test}.txt, or the repository's `data` |

What comes of them is described in kg_lightrag.py, which reads LightRAG's own files.
"""

import json
import re
from collections import Counter
from pathlib import Path

from common.kg_lightrag import GraphError, empty_graph, graph_of_custom_kg, plain, read_graphml

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


# ---------------------------------------------------------------- folders

def read_folder(folder):
    """The graph of a LightRAG working folder or of CoDEx. (Its vectors are kg_vectors' to read.)"""
    folder = Path(folder)
    if (folder / GRAPHML).is_file():
        return read_graphml(folder / GRAPHML)
    if _codex_files(folder):
        return _codex(folder)
    raise GraphError(f"{folder}: a folder with neither {GRAPHML} nor CoDEx's triples "
                     "(codex-<size>_train.txt)")


def is_graph_folder(folder):
    return (Path(folder) / GRAPHML).is_file() or bool(_codex_files(folder))


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
