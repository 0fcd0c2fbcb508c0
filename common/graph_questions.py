"""Questions that are asked of graphs: where they come from, and the tools that answer for the graphs.

A question is a data.Question whose `type` is the graph that it is asked of; `evidences` are the edges of its
path, where that is known. On file it is a line of what common/synthesis.py writes:

    {"id": "cs-1", "graph_type": "cs", "question": "…", "golden_answer": "…", "path": […], "relations": […]}

of which path and relations may be missing.
"""

from dataclasses import dataclass
from pathlib import Path

from common import data, synthesis
from common.kg_tools import make_tools


@dataclass
class Place:
    """Questions, and the tools on the graphs that they are asked of."""
    name: str
    questions: list
    tools: object


def question_of(row):
    """A row as a data.Question."""
    path = row.get("path", [])
    edges = zip(path, row.get("relations", []), path[1:], strict=False)
    return data.Question(
        row["id"], row["question"], [row["golden_answer"]], type=row["graph_type"],
        hops=row.get("hops") or max(1, len(path) - 1), evidences=[list(edge) for edge in edges])


def read_questions(file, graphs=None):
    """The questions of a file. graphs: names of those there are; None where nobody knows."""
    found = []
    for number, row in data.read_records(Path(file)):
        row = row if isinstance(row, dict) else {}
        for name in ("id", "graph_type", "question", "golden_answer"):
            if not isinstance(row.get(name), str):
                raise data.DataError(f"{file}: line {number}: expected a text in `{name}`")
        if graphs is not None and row["graph_type"] not in graphs:
            raise data.DataError(f"{file}: line {number}: there is no graph {row['graph_type']}: --graph has "
                                 f"{', '.join(graphs)}")
        found.append(question_of(row))
    if not found:
        raise data.DataError(f"{file}: no question")
    return found


def has_hops(question, hops):
    """hops: "12" = one or two, "3" = three and more, "mix" = any."""
    return hops == "mix" or (question.hops < 3) == (hops == "12")


def apart(questions, tools, limit=0):
    """Evaluation Places of questions with one or two hops and with more, of at most limit / 2 each."""
    places = []
    for name, hops in (("1-2-hop", "12"), ("3-hop", "3")):
        of = [q for q in questions if has_hops(q, hops)]
        if limit:
            of = of[:max(1, limit // 2)]
        if of:
            places.append(Place(name, of, tools))
    return places


def load_places(cfg, make):
    """(training Place or None, evaluation Places) of --data and --eval-data; make(graphs) -> (training, test
    questions) is asked where neither names a file. Of a file of one's own the last tenth is held out."""
    patience = {"timeout": cfg.search_timeout, "retries": cfg.search_retries}
    tools = make_tools(cfg.graph, cfg.graph_encoder, cfg.max_edges, cfg.max_words, **patience)
    train, test = [], []
    if cfg.data:
        train = read_questions(cfg.data, tools.graphs)[:cfg.limit or None]
    elif not (cfg.eval_data and cfg.eval_only):
        train, test = make(tools.graphs)
    if cfg.eval_data:
        test = [q for file in cfg.eval_data.split(",") for q in read_questions(file, tools.graphs)]
    if not test and cfg.eval_only:
        train, test = [], train
    if not test:
        if len(train) < 2:
            raise data.DataError(f"{cfg.data}: one question cannot be split into training and evaluation; "
                                 "give --eval-data")
        held = max(1, len(train) // 10)
        train, test = train[:-held], train[-held:]
    return (Place("train", train, tools) if train else None), apart(test, tools, cfg.eval_limit)


def write_questions(folder, graphs, teacher, cfg, count, only=None):
    """Questions along paths of the graphs, `count` a graph and kind, in a folder where a killed run goes
    on."""
    rows = synthesis.synthesize(
        graphs, folder, teacher, count, attempts=cfg.attempts, unique=cfg.unique, only=only)
    return [question_of(row) for row in rows]
