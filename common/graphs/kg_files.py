"""Knowledge graphs on disk: every form that is read.

Triples, 2WikiMultihopQA's evidences, and GraphML of LightRAG, networkx, Neo4j, Gephi and yEd: docs/data.md,
section Graphs. What comes of them is described in kg.py. Two edges between a pair that differ in their words
stay two.
"""

import re
import unicodedata
from collections import Counter
from pathlib import Path

import networkx

from common import data
from common.files import say
from common.formats import NOT_SO, text_of
from common.kg import GraphError, KnowledgeGraph, empty_graph, graph_of_triples

GRAPHML = "graph_chunk_entity_relation.graphml"  # of a LightRAG working folder
GRAPH_NAME = r"[\w.-]+"  # it may stand in a prompt
KINDS_OF_FILE = ".graphml, .jsonl, .json, .tsv or .txt"
# (XML's ParseError is a SyntaxError)
UNREADABLE = (SyntaxError, LookupError, ValueError, RecursionError, networkx.NetworkXError)


def load_graphs(spec, encoder=""):
    """{graph_type: KnowledgeGraph} of "cs=FILE,legal=FILE", of a folder of graphs (named by their files and
    folders), or of one graph (named by its own)."""
    path = Path(spec)
    if "=" in spec and not path.exists():
        pairs = [part.strip().partition("=")[::2] for part in spec.split(",")]
    elif path.is_dir() and not is_graph_folder(path):
        pairs = []
        for entry in sorted(path.iterdir()):
            if entry.suffix.lower() in (".graphml", ".json", ".jsonl", ".tsv") or is_graph_folder(entry):
                pairs.append((name_of(entry), entry))
    else:
        pairs = [(name_of(path), path)]
    found = {}
    for name, source in pairs:
        if not re.fullmatch(GRAPH_NAME, name) or not source or name in found:
            raise GraphError(f"--graph {name}={source}: expected NAME=FILE, names of letters, digits, . - _, "
                             "and each name once")
        found[name] = source
    if not found:
        raise GraphError(f"{spec}: no graph in this folder ({KINDS_OF_FILE}, or folders)")
    return {name: load_graph(source, encoder) for name, source in found.items()}


def name_of(path):
    return path.resolve().name if path.is_dir() else path.stem


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
        raise GraphError(f"{path}: the graph is empty: it has no entity, or none with a name")
    return KnowledgeGraph(graph, encoder)


def graph_of(source, questions):
    """The graph of a file or folder, or, of "evidences", the questions' own gold triples (2Wiki)."""
    if source != "evidences":
        return load_graph(source)
    triples = [tuple(e) for q in questions for e in q.evidences]
    if not triples:
        raise GraphError("--graph evidences: the questions carry no evidences (2Wiki's official files do); "
                         "give a file of triples")
    return KnowledgeGraph.from_triples(triples)


def read_file(path):
    """Of triples, of 2WikiMultihopQA's questions, or GraphML. A first row of column names is left out."""
    suffix = path.suffix.lower()
    if suffix == ".graphml":
        return read_graphml(path)
    if suffix in (".json", ".jsonl"):
        records = data.read_records(path)
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except UnicodeDecodeError as error:
            raise GraphError(f"{path}: not UTF-8 text ({error})") from None
        records = ((number, data.cells_of(line)) for number, line in enumerate(lines, 1) if line.strip())
    triples, left_out = [], Counter()
    for number, row in records:
        try:
            if isinstance(row, dict) and "evidences" in row:
                found = list(filter(None, map(triple, row["evidences"])))
                left_out["triples without three parts"] += len(row["evidences"]) - len(found)
            else:
                found = [triple(row)]
        except TypeError:
            found = [None]
        if None in found:
            raise GraphError(f"{path}: record {number}: expected head, relation and tail, three strings")
        triples += found
    if triples and {part.lower() for part in triples[0]} <= HEADER:
        del triples[0]
    whole = [found for found in triples if not MISSING & set(found)]
    left_out["triples with a part that is missing (nan, None)"] = len(triples) - len(whole)
    tell(path, left_out)
    return graph_of_triples(whole)


def tell(path, left_out):
    for what, count in left_out.items():
        if count:
            say(f"{path}: left out: {count:,} {what}")


HEADER = {"head", "subject", "source", "relation", "relationship", "predicate", "tail", "object", "target",
          "h", "r", "t", "from", "rel", "to", "node1", "label", "node2", "s", "p", "o"}
MISSING = {"nan", "NaN", "None", "null", "<NA>"}  # as tables write what is not there


def triple(row):
    """(head, relation, tail) of a list or an object, None where it has other parts."""
    if isinstance(row, dict):
        row = [row.get(name) for name in ("head", "relation", "tail")]
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[1], str):
        return None
    try:
        parts = [text_of(part).strip() for part in row]
    except NOT_SO:
        return None
    return tuple(parts) if all(parts) else None


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
    left_out = Counter()
    names = names_of(read, lightrag)
    for number, node in read.nodes(data=True):
        if not names[number]:
            left_out["nodes without a name"] += 1
            continue
        kind, description = plain(node.get("entity_type")), plain(node.get("description"))
        graph.add_node(names[number], kind=kind, description=description)
    unnamed = 0
    for head, tail, edge in read.edges(data=True):
        if not names[head] or not names[tail]:
            left_out["edges of nodes without a name"] += 1
            continue
        relation = _first(edge, RELATIONS)
        unnamed += not relation
        words = relation or "related to", plain(edge.get("description"))  # given twice it is one edge
        graph.add_edge(names[head], names[tail], words, relation=words[0], description=words[1])
    if unnamed and not lightrag:
        left_out['relations without a name ("related to" stands for them)'] = unnamed
        if unnamed == read.number_of_edges():
            raise GraphError(f"{path}: no edge has one of {', '.join(RELATIONS)}, to name its relation")
    tell(path, left_out)
    return graph


def names_of(read, lightrag):
    """{id: name}. Ids mostly are names; where nearly all are numbers the names are among the attributes, and
    nodes of one name keep their ids behind it. An attribute with one value for most nodes is their kind."""
    numbers = sum(bool(NUMBER.fullmatch(number)) for number in read)
    names = {number: _first(node, NAMES) for number, node in read.nodes(data=True)}
    named = list(filter(None, names.values()))
    if lightrag or numbers < .9 * len(read) or 2 * len(set(named)) <= len(named):
        return {number: plain(number) for number in read}
    times = Counter(names.values())
    for number, name in names.items():
        if name and times[name] > 1:
            names[number] = f"{name} ({number})"
    return names


def plain(text):
    """One line without LightRAG's <SEP> between the values of a field, and without the double quotes that
    nano-graphrag puts around every field."""
    text = str("" if text is None else text).replace("<SEP>", " ").replace('"', "")
    return " ".join(unicodedata.normalize("NFC", text).split())


def _first(row, keys):
    row = {key.lower(): value for key, value in row.items()}
    found = (plain(row.get(key)) for key in keys)
    return next(filter(None, found), "")
