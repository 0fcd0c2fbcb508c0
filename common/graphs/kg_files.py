"""Knowledge graphs on disk: every form that is read.

Triples, 2WikiMultihopQA's evidences, and GraphML of LightRAG, networkx, Neo4j, Gephi and yEd: docs/data.md,
section Graphs. What comes of them is described in kg.py. Two edges between a pair that differ in their words
stay two.
"""

import csv
import json
import re
from collections import Counter
from pathlib import Path

import networkx

from common.formats import _text as text_of
from common.kg import GraphError, KnowledgeGraph, empty_graph, graph_of_triples

GRAPHML = "graph_chunk_entity_relation.graphml"  # of a LightRAG working folder
GRAPH_NAME = r"[\w.-]+"  # it may stand in a prompt
KINDS_OF_FILE = ".graphml, .jsonl, .json, .tsv or .txt"
# (XML's ParseError is a SyntaxError)
UNREADABLE = (OSError, SyntaxError, LookupError, ValueError, RecursionError, networkx.NetworkXError)


def load_graphs(spec, encoder=""):
    """{graph_type: KnowledgeGraph} of "cs=FILE,legal=FILE", of a folder of graphs (named by their files and
    folders), or of one graph (named by its own)."""
    found = {}
    for name, source in named_sources(spec):
        if not re.fullmatch(GRAPH_NAME, name) or not str(source):
            raise GraphError(f"--graph {name}={source}: expected NAME=FILE, "
                             "and a name of letters, digits, . - _")
        if name in found:
            raise GraphError(f"--graph: two graphs with the name {name}: {found[name]} and {source}")
        found[name] = source
    return {name: load_graph(source, encoder) for name, source in found.items()}


def named_sources(spec):
    """[(name, file or folder)]"""
    path = Path(spec)
    if path.name == GRAPHML and path.is_file():
        path = path.parent
    pairs = []
    if is_graph_folder(path):
        pairs.append((path.resolve().name, path))
    elif path.is_dir():
        for entry in sorted(path.iterdir()):
            if entry.suffix.lower() in (".graphml", ".json", ".jsonl", ".tsv"):
                pairs.append((entry.stem, entry))
            elif is_graph_folder(entry):
                pairs.append((entry.name, entry))
        if not pairs:
            raise GraphError(f"{spec}: no graph in this folder ({KINDS_OF_FILE}, or folders)")
    elif "=" in spec and not path.exists():
        for part in spec.split(","):
            name, _, source = part.partition("=")
            pairs.append((name.strip(), source.strip()))
    else:
        pairs.append((path.stem, path))     # what is not there, load_graph refuses
    return pairs


def is_graph_folder(folder):
    return (folder / GRAPHML).is_file()


def load_graph(path, encoder=""):
    """KnowledgeGraph of a file, or of a LightRAG working folder."""
    path = Path(path)
    if path.is_dir():
        if not is_graph_folder(path):
            raise GraphError(f"{path}: a folder without {GRAPHML}")
        graph = read_graphml(path / GRAPHML)
    elif not path.is_file():
        raise GraphError(f"--graph {path}: no such file ({KINDS_OF_FILE}; or 'evidences')")
    else:
        graph = read_file(path)
    if not graph.number_of_nodes():
        raise GraphError(f"{path}: the graph is empty: it has no entity")
    return KnowledgeGraph(graph, encoder)


def graph_of(source, questions):
    """The graph of a file or folder, or, of "evidences", the questions' own gold triples (2Wiki)."""
    if source != "evidences":
        graph = load_graph(source)
        graph.say_left_out(source)
        return graph
    triples = [tuple(e) for q in questions for e in q.evidences]
    if not triples:
        raise GraphError("--graph evidences: the questions carry no evidences (2Wiki's official files do); "
                         "give a file of triples")
    return KnowledgeGraph.from_triples(triples)


def read_file(path):
    """What is in a .json decides how it is read."""
    suffix = path.suffix.lower()
    if suffix == ".graphml":
        return read_graphml(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
        rows = text.split("\n")
        if suffix == ".json":
            rows = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise GraphError(f"{path}: not valid {suffix.removeprefix('.')}: {error}") from None
    if not isinstance(rows, list):
        raise GraphError(f"{path}: expected a list of triples")
    if rows and isinstance(rows[0], dict) and "evidences" in rows[0]:
        return _of_evidences(path, rows)
    triples = []
    for number, row in enumerate(rows, 1):
        if suffix != ".json" and not row.strip():
            continue
        try:
            if suffix == ".jsonl":
                row = json.loads(row)
            elif suffix != ".json":
                row = _cells(row.rstrip("\r"))
            triples.append(triple(row))
        except (ValueError, RecursionError):
            raise GraphError(f"{path}: record {number}: "
                             "expected head, relation and tail, three strings") from None
    if triples and {part.lower() for part in triples[0]} <= HEADER:
        del triples[0]
    return graph_of_triples(triples)


HEADER = {"head", "subject", "source", "relation", "relationship", "predicate", "tail", "object", "target"}


def _cells(line):
    """Of a line of a TSV, whose quotes are text where they do not stand around whole cells."""
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return line.split("\t")


def triple(row):
    """(head, relation, tail) of a list or an object. Raises ValueError."""
    if isinstance(row, dict):
        row = [row.get(name) for name in ("head", "relation", "tail")]
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[1], str):
        raise ValueError
    # (half a surrogate pair is no text)
    parts = [text_of(part, "triple").strip().encode("utf-8", "replace").decode() for part in row]
    if not all(parts):
        raise ValueError
    return tuple(parts)


def _of_evidences(path, rows):
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


# ---------------------------------------------------------------- GraphML

# where other programs keep them, the first that is filled; case does not matter
NAMES = ("entity_id", "entity_name", "name", "label", "title")
RELATIONS = ("keywords", "relation", "relationship", "predicate", "label", "edge label", "type",
             "interaction")
NUMBER = re.compile(r"(?=.*\d|.*://)\S+")  # "n0", "17", "http://example.org/Oslo": ids that are no names


def read_graphml(path):
    """LightRAG's (undirected) or nano-graphrag's file, or one of networkx, Neo4j, Gephi, yEd. Nodes without a
    name are left out and counted."""
    try:
        read = networkx.read_graphml(path)
    except UNREADABLE as error:
        raise GraphError(f"{path}: not a GraphML file ({type(error).__name__}: {error})") from None
    lightrag = any("entity_type" in node for _, node in read.nodes(data=True))
    graph = empty_graph(read.is_directed())
    left_out = graph.graph["left_out"]
    times = Counter(map(plain, read))
    names = {}  # by their ids, which mostly are names
    for number in read:
        if plain(number):
            names[number] = plain(number)
            if times[plain(number)] > 1:  # ("Heroes" with quotes is another than Heroes)
                names[number] = " ".join(number.split())
    if not lightrag:
        names = _names_behind_numbers(path, read) or names
    for number, node in read.nodes(data=True):
        if number not in names:
            left_out["nodes without a name"] += 1
            continue
        kind, description = plain(node.get("entity_type")), plain(node.get("description"))
        graph.add_node(names[number], kind=kind, description=description)
    unnamed = 0
    for head, tail, edge in read.edges(data=True):
        if head not in names or tail not in names:
            left_out["edges of nodes without a name"] += 1
            continue
        relation = _first(edge, RELATIONS)
        unnamed += not relation
        words = relation or "related to", plain(edge.get("description"))  # given twice it is one edge
        graph.add_edge(names[head], names[tail], words, relation=words[0], description=words[1])
    if unnamed and not lightrag:
        left_out['relations without a name ("related to" stands for them)'] = unnamed
        if unnamed == read.number_of_edges():
            attributes = _attributes(edge for *_, edge in read.edges(data=True))
            raise GraphError(f"{path}: no edge has one of {', '.join(RELATIONS)}, which would name its "
                             f"relation; its edges have {attributes}")
    return graph


def plain(text):
    """One line without LightRAG's <SEP> between the values of a field, and without the double quotes that
    nano-graphrag puts around every field."""
    text = str("" if text is None else text).replace("<SEP>", " ").replace('"', "")
    return " ".join(text.split())


def _names_behind_numbers(path, read):
    """{id: name} of the nodes that have one, where nearly all ids are numbers; {} where ids are names. Nodes
    of one name keep their ids behind it."""
    numbers = sum(bool(NUMBER.fullmatch(number)) for number in read)
    if numbers < .9 * len(read) or not len(read):
        return {}
    found = {}
    for number, node in read.nodes(data=True):
        name = _first(node, NAMES)
        if name:
            found[number] = name
    if not found:
        attributes = _attributes(node for _, node in read.nodes(data=True))
        raise GraphError(f"{path}: ids such as {next(iter(read))} are no names, and no node has one of "
                         f"{', '.join(NAMES)}; its nodes have {attributes}")
    times = Counter(found.values())
    for number, name in found.items():
        if times[name] > 1:
            found[number] = f"{name} ({number})"
    return found


def _attributes(rows):
    return ", ".join(sorted({key for row in rows for key in row} - {"id"})) or "no attributes"


def _first(row, keys):
    row = {key.lower(): value for key, value in row.items()}
    found = (plain(row.get(key)) for key in keys)
    return next(filter(None, found), "")
