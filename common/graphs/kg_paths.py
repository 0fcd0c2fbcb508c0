"""Paths in a knowledge graph that questions are made of: where they may start, and what makes one unfit.

    seeds(graph)                           where a path may start (Omne-R1, section 2)
    split_seeds(graph)                     the same, apart for training and test
    fault(graph, kind, path, q, answer)    why a path and its question are no question, or None
    reached(graph, start, relations)       where a sequence of relation labels leads

A path is a list of names. An edge joins two nodes from either end, as the tools show it; where a directed
graph's edge is gone against its direction, its label is "inverse of …".
"""

import re
import unicodedata

from common import kg
from common.rollout import stable_seed

DEPTH = 3        # sec. 2: of the ball around a seed node
SMALLEST = 20    # sec. 2: nodes of a ball
LARGEST = 400    # sec. 2
SEED = 0         # of what is drawn at random
KINDS = {"12": (2, 3), "3": (4, 6)}  # nodes of a path: 1/2-hop; 3+-hop ("at least 4": that 6 is most is ours)
INVERSE = "inverse of "

UNKNOWN = "node not in the graph"
TWICE = "node twice in the path"
APART = "path not connected"
ELSEWHERE = "answer not in the path"
SHORT = "path too short"
LONG = "path too long"
NO_START = "start node not named"
INNER = "inner node named"
TOLD = "answer named"
AMBIGUOUS = "another node reached"
OF_THE_PATH = (UNKNOWN, TWICE, APART, ELSEWHERE, SHORT, LONG)  # the other rules are of the question

# letters with no space between words: Thai, Lao, Tibetan, Myanmar; Khmer; Han and Kana; and Hangul, whose
# particles stand at a name
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u2e80-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff\uac00-\ud7ff"
SPACED = rf"[^\W{UNSPACED}]"
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2010\u2011\u2013", "''\"\"---")


# ---------------------------------------------------------------- seeds

def ball(graph, start, depth=DEPTH, largest=None):
    """{node: its distance from start}, nearest first, edges gone either way; None where it has more than
    `largest` nodes."""
    edges = graph.graph
    found = {start: 0}
    rim = [start]
    for distance in range(1, depth + 1):
        further = []
        for node in rim:
            for other in (*edges.successors(node), *edges.predecessors(node)):
                if other not in found:
                    found[other] = distance
                    further.append(other)
            if largest is not None and len(found) > largest:
                return None
        rim = further
    return found


def seeds(graph, largest=LARGEST, among=None):
    """The nodes, in the graph's order, whose ball of depth 3 reaches that depth and has this many nodes
    (the start is one of them). among: the names that are looked at; default all."""
    found = []
    for node in graph.graph:
        if among is not None and node not in among:
            continue
        around = ball(graph, node, DEPTH, largest)
        if around is not None and len(around) >= SMALLEST and max(around.values()) == DEPTH:
            found.append(node)
    return found


def split_seeds(graph, test_share=0.1, largest=LARGEST):
    """(seeds for training, seeds for testing), by a hash of the name: a node's side does not depend on what
    else is in the graph."""
    train = []
    test = []
    for node in seeds(graph, largest):
        drawn = stable_seed(SEED, "test", node) / 2 ** 63  # in [0, 1)
        side = test if drawn < test_share else train
        side.append(node)
    return train, test


# ---------------------------------------------------------------- along a path

def steps(graph, node):
    """[(relation, node it leads to)]: the node's facts and, in a directed graph, those it is the tail of."""
    found = [(relation, tail) for _, relation, tail in graph.facts(node)]
    if graph.graph.graph.get("directed", True):
        for head, _, relation in graph.graph.in_edges(node, data="relation"):
            found.append((INVERSE + relation, head))
    return found


def relations_along(graph, path):
    """The label of each step, of parallel edges the first; None for a step that no edge makes."""
    labels = []
    for here, there in zip(path, path[1:], strict=False):
        found = [relation for relation, other in steps(graph, here) if other == there]
        labels.append(found[0] if found else None)
    return labels


def reached(graph, start, relations):
    """The nodes at the end of this sequence of labels. The start is none of them: a question names it."""
    here = {start}
    for label in relations:
        here = {there for node in here for relation, there in steps(graph, node) if relation == label}
    return here - {start}


# ---------------------------------------------------------------- names in a question

def fold(text):
    """
    >>> fold("Fianna  FÁIL\\u2019s"), fold("Straße")
    ("fianna fail's", 'strasse')
    """
    parts = unicodedata.normalize("NFKD", kg.one_line(text).translate(QUOTES))
    bare = "".join(c for c in parts if not unicodedata.combining(c))
    return unicodedata.normalize("NFC", bare).casefold()  # (NFKD takes syllables of Hangul apart)


def as_words(name):
    """A pattern of the name between word boundaries, which UNSPACED letters have on either side of them."""
    begins = rf"(?:(?=[{UNSPACED}])|(?<!{SPACED}))"
    ends = rf"(?:(?<=[{UNSPACED}])|(?!{SPACED}))"
    return begins + re.escape(name) + ends


def is_named(name, question):
    """Whether the name stands in the question as a word, case and accents apart. A name in brackets behind it
    may be missing: the paper's example has "Colony Collapse Disorder (CCD)" so.

    >>> is_named("Hive", "Whose hives?"), is_named("hive", "Whose HIVE's?"), is_named("C++ (85)", "Why C++?")
    (False, True, True)
    >>> is_named("上海", "他在上海出生吗？"), is_named("Ann", "谁是Ann的姑姑？")
    (True, True)
    """
    question = fold(question)
    name = fold(name)
    for form in (name, re.sub(r"\s*\([^()]*\)$", "", name)):
        if form and re.search(as_words(form), question):
            return True
    return False


# ---------------------------------------------------------------- what makes a draft unfit

def fault(graph, kind, path, question, answer):
    """(rule, reason) of the first rule that is broken, those OF_THE_PATH first; None where there is none."""
    for node in path:
        if node not in graph:
            return UNKNOWN, f"The graph has no node '{node}'."
    for place, node in enumerate(path):
        if node in path[:place]:
            return TWICE, f"The path has the node '{node}' twice."
    labels = relations_along(graph, path)
    if None in labels:
        place = labels.index(None)
        return APART, f"No edge of the graph joins '{path[place]}' and '{path[place + 1]}'."
    if answer not in path:
        return ELSEWHERE, f"The answer '{answer}' is not a node of the path."
    fewest, most = KINDS[kind]
    if len(path) < fewest:
        return SHORT, f"The path has {len(path)} nodes; it should have at least {fewest}."
    if len(path) > most:
        return LONG, f"The path has {len(path)} nodes; it should have at most {most}."
    if not is_named(path[0], question):
        return NO_START, (f"The question does not name the starting node '{path[0]}', "
                          "so the answerer does not know where to search from.")
    for node in path[1:]:
        if node != answer and is_named(node, question):
            return INNER, (f"The question reveals the name of a middle node '{node}' in the path, "
                           "which should be hidden according to the requirements.")
    if is_named(answer, question):
        return TOLD, f"The question reveals the name of the answer node '{answer}', which should be hidden."
    return None


def other_answers(graph, path, relations, answer):
    """The nodes other than the answer that the labels up to it lead to as well, by name."""
    upto = path.index(answer)
    return sorted(reached(graph, path[0], relations[:upto]) - {answer})
