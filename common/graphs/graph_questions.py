"""Questions that are asked of graphs: where they come from, and the tools that answer for the graphs.

A question is a data.Question whose `type` is the graph that it is asked of; `evidences` are the edges of its
path, where that is known. On file it is a line of what common/graphs/synthesis.py writes:

    {"id": "cs-1", "graph_type": "cs", "question": "…", "golden_answer": "…", "path": […], "relations": […]}

of which path and relations may be missing.
"""

import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from common import data
from common.graphs import synthesis
from common.graphs.kg_tools import make_tools
from common.rollout import stable_seed

REMOTE = ("http://", "https://")
GRAPH_TYPE = r"[\w.-]+"  # it stands in the system prompt


@dataclass
class Place:
    """Questions, and the tools on the graphs that they are asked of."""
    name: str
    questions: list
    tools: object


def question_of(row):
    """A row as a data.Question; its path ends at the answer."""
    path = row.get("path", [])
    answer = row["golden_answer"]
    if answer in path:
        path = path[:path.index(answer) + 1]
    edges = zip(path, row.get("relations", []), path[1:], strict=False)
    return data.Question(
        row["id"], row["question"], [answer], type=row["graph_type"],
        hops=row.get("hops") or max(1, len(path) - 1), evidences=[list(edge) for edge in edges])


def fault_of(row, graphs):
    """What is wrong with a row, or ""."""
    for name in ("id", "graph_type", "question", "golden_answer"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"expected a text in `{name}`"
    for name in ("path", "relations"):
        texts = row.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return f"expected a list of texts in `{name}`"
    hops = row.get("hops", 1)
    if not isinstance(hops, int) or hops < 1:
        return "expected a number from 1 in `hops`"
    if not re.fullmatch(GRAPH_TYPE, row["graph_type"]):
        return "a graph_type is letters, digits, . - _"
    if graphs is not None and row["graph_type"] not in graphs:
        return f"there is no graph {row['graph_type']}: --graph has {', '.join(graphs)}"
    return ""


def read_questions(file, graphs=None):
    """The questions of a file. graphs: names of those there are; None where nobody knows."""
    found = []
    for number, row in data.read_records(Path(file)):
        row = row if isinstance(row, dict) else {}
        wrong = fault_of(row, graphs)
        if wrong:
            raise data.DataError(f"{file}: line {number}: {wrong}")
        found.append(question_of(row))
    if not found:
        raise data.DataError(f"{file}: no question")
    return found


def has_hops(question, hops):
    """hops: "12" = one or two, "3" = three and more, "mix" = any."""
    return hops == "mix" or (question.hops < 3) == (hops == "12")


def some(questions, count):
    """`count` of them, drawn at random, the same every time, in their order."""
    if len(questions) <= count:
        return questions
    drawn = set(random.Random(0).sample(range(len(questions)), count))
    return [q for i, q in enumerate(questions) if i in drawn]


def fewer(places, count):
    """The places with `count` questions in all, the same every time, for a curve."""
    each = max(1, count // len(places))
    return [replace(place, questions=some(place.questions, each)) for place in places]


def asked(text, graphs):
    """The question of --ask; graphs: names of those there are. TYPE: QUESTION where there are several."""
    known = list(graphs or ["graph"])
    graph_type, _, question = text.partition(": ")
    if graph_type not in known:
        graph_type, question = known[0], text
    return data.Question("ask", question, [""], type=graph_type)


def held_out(question):
    """Whether a question of a file of one's own is among the tenth that is evaluated: all that start from one
    node are on one side."""
    start = question.evidences[0][0] if question.evidences else question.id
    return stable_seed("held out", start) % 10 == 0


def apart(questions, tools, limit=0):
    """Evaluation Places of questions with one or two hops and with more, of at most limit / 2 each."""
    places = []
    for name, hops in (("1-2-hop", "12"), ("3-hop", "3")):
        of = [q for q in questions if has_hops(q, hops)]
        of = some(of, limit // 2 or 1) if limit else of
        if of:
            places.append(Place(name, of, tools))
    return places


def load_tools(cfg):
    """The tools of --graph."""
    patience = {"timeout": cfg.search_timeout, "retries": cfg.search_retries}
    return make_tools(cfg.graph, cfg.graph_encoder, cfg.max_edges, cfg.max_words, **patience)


def load_places(cfg, make):
    """(training Place or None, evaluation Places) of --data and --eval-data; make(graphs) -> (training, test
    questions) is asked where neither names a file. Of a file of one's own a tenth is held out."""
    tools = load_tools(cfg)
    if not tools.remote and cfg.stage not in ("synthesize", "direct"):  # they search for nothing
        tools.prepare()
    train, test = [], []
    if cfg.data:
        train = read_questions(cfg.data, tools.graphs)
        train = some(train, cfg.limit or len(train))
    elif not (cfg.eval_data and cfg.eval_only):
        train, test = make(tools.graphs)
    if cfg.eval_data:
        test = [q for file in cfg.eval_data.split(",") for q in read_questions(file, tools.graphs)]
    if not test and cfg.eval_only:
        train, test = [], train
    if not test:
        test = [q for q in train if held_out(q)]
        train = [q for q in train if not held_out(q)]
        if not test or not train:
            raise data.DataError(f"{cfg.data}: too few questions to hold a tenth out; give --eval-data")
    return (Place("train", train, tools) if train else None), apart(test, tools, cfg.eval_limit)


def write_questions(folder, graphs, teacher, cfg, count, only=None):
    """Questions along paths of the graphs, `count` a graph and kind, in a folder where a killed run goes
    on."""
    rows = synthesis.synthesize(
        graphs, folder, teacher, count, attempts=cfg.attempts, unique=cfg.unique, only=only,
        largest=cfg.largest_ball)
    kept = Counter()
    found = []
    for row in rows:  # a folder may hold more, of an earlier run
        kept[row["graph_type"], row["kind"]] += 1
        if kept[row["graph_type"], row["kind"]] <= count:
            found.append(question_of(row))
    return found
