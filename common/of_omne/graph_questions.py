"""Questions that are asked of graphs: where they come from (files, a teacher, the embedded world), the tools
that answer for the graphs. cfg is omne_r1.Config.

    task, evals = load(cfg)    questions that are made are kept in <name>-questions/

A question is a data.Question whose `type` is the graph that it is asked of; `evidences` are the edges of its
path, where that is known. On file it is a line of what synthesis.py writes:

    {"id": "cs-1", "graph_type": "cs", "question": "…", "golden_answer": "…", "path": […], "relations": […]}

of which path and relations may be missing.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

from common import data, splits
from common.files import read_json, say, write_json
from common.formats import fingerprint, read_field, text_of, texts_of, whole
from common.graphs.kg_files import GRAPH_NAME, load_graphs
from common.graphs.kg_tools import LocalTools
from common.of_omne.plumbing import folder_of
from common.rollout import stable_seed

TRAINED_DOMAINS = ("film", "music", "literature")  # the world's test has one more


TEXTS = ("id", "graph_type", "question", "golden_answer")


def question_of(row, graphs=None):
    """A row as a data.Question; its path ends at the answer. ValueError says why it is none. graphs: names of
    those there are; None where nobody knows."""
    texts = [read_field(row, name, text_of) or "" for name in TEXTS]
    if not all(map(str.strip, texts)):
        raise ValueError(f"expected a text in each of {', '.join(TEXTS)}")
    number, graph_type, question, answer = texts
    if not re.fullmatch(GRAPH_NAME, graph_type):
        raise ValueError("a graph_type is letters, digits, . - _")
    if graphs is not None and graph_type not in graphs:
        raise ValueError(f"there is no graph {graph_type}: --graph has {', '.join(graphs)}")
    path, relations = (read_field(row, name, texts_of) or [] for name in ("path", "relations"))
    if answer in path:
        path = path[:path.index(answer) + 1]
    edges = [list(edge) for edge in zip(path, relations, path[1:])]
    hops = read_field(row, "hops", whole) or max(1, len(path) - 1)
    return data.Question(number, question, [answer], type=graph_type, hops=hops, evidences=edges)


def read_questions(file, graphs=None):
    """The questions of a file."""
    found = []
    for number, row in data.read_records(Path(file)):
        try:
            found.append(question_of(row if isinstance(row, dict) else {}, graphs))
        except ValueError as error:
            raise data.DataError(f"{file}: line {number}: {error}") from None
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


def fewer(tasks, count):
    """The tasks with `count` questions in all, for a curve."""
    each = max(1, count // len(tasks))
    return [replace(task, questions=some(task.questions, each)) for task in tasks]


def held_out(question):
    """Whether a question of a file is among the tenth that is evaluated: all that start from one node are on
    one side."""
    start = question.evidences[0][0] if question.evidences else fingerprint(question.question)
    return stable_seed("held out", start) % 10 == 0


def apart(questions, tools, limit=0, seed=0, evaluated=frozenset()):
    """Splits for evaluation: questions with one or two hops and with more, at most `limit` each (0 = all).
    Their retriever is the tools."""
    found = []
    for name, hops in (("1-2-hop", "12"), ("3-hop", "3")):
        drawn = splits.drawn([q for q in questions if has_hops(q, hops)], limit, seed)
        if drawn:
            found.append(data.Split(name, drawn, tools, evaluated=evaluated))
    return found


# ---------------------------------------------------------------- where a run's come from

def load_tools(cfg):
    if cfg.data == "world":
        graphs = graphs_of_world("test")
    else:
        graphs = load_graphs(cfg.graph, cfg.graph_encoder)
    return LocalTools(graphs, cfg.max_edges)


def asked(cfg):
    """(tools, the question of --ask). Where there are several graphs the text is TYPE: QUESTION."""
    tools = load_tools(cfg)
    known = list(tools.graphs or ["graph"])
    graph_type, _, question = cfg.ask.partition(": ")
    if graph_type not in known:
        graph_type, question = known[0], cfg.ask
    return tools, data.Question("ask", question, [""], type=graph_type)


def load(cfg):
    """(training split or None, evaluation splits)"""
    folder = folder_of(cfg, "questions")
    if cfg.data == "world":
        train, evals = load_world(cfg, folder)
    else:
        train, evals = load_files(cfg, folder)
    if train:
        train.questions = [q for q in train.questions if has_hops(q, cfg.train_hops)]
        if not train.questions:
            raise data.DataError(f"--train-hops {cfg.train_hops}: no training question has so many")
    return train, evals


def load_files(cfg, folder):
    """The splits of --data and --eval-data; where neither names a file the questions are made. Of a file of
    one's own a tenth is held out."""
    tools = load_tools(cfg)
    if cfg.stage not in ("synthesize", "direct"):  # they search for nothing
        tools.prepare()
    alone = cfg.eval_only and not cfg.collect   # evaluates and learns nothing
    train, test = [], []
    if cfg.data:
        train = read_questions(cfg.data, tools.graphs)
    elif not (alone and cfg.eval_data):
        train, test = make_questions(cfg, folder, tools.graphs)
    for file in filter(None, cfg.eval_data.split(",")):
        test += read_questions(file, tools.graphs)
    if not test and alone and not splits.has_learned(cfg):
        train, test = [], train
    if not test:
        test = [q for q in train if held_out(q)]
        say(f"{cfg.data}: {len(test)} of {len(train)} questions are held out, by a hash of where they start")
        if len(test) in (0, len(train)):
            raise data.DataError(f"{cfg.data}: too few questions to hold a tenth out; give --eval-data")
    data.tell_apart(list({id(q): q for q in (*train, *test)}.values()))
    evaluated = splits.fingerprints({"": test})
    if alone:
        train = []
    if train:
        train = splits.unseen(cfg.data or "questions that were made", train, evaluated)
        if not train:
            raise data.DataError(f"{cfg.data}: all its questions are evaluated, so nothing is left to learn "
                                 "from; give --eval-data other questions")
        train = some(train, cfg.limit or len(train))
    if cfg.collect:  # from what a run learns from, never from what it is tested on
        return None, apart(train, tools)
    split = None
    if train:
        split = data.Split("train", train, tools, evaluated=evaluated)
    return split, apart(test, tools, cfg.eval_limit, cfg.seed, evaluated)


def make_questions(cfg, folder, graphs):
    """(training questions, test questions) along paths of the graphs (sec. 2), from different seed nodes. A
    teacher may begin a path elsewhere near the seed node: test questions that begin where one for training
    does are left out."""
    from common.of_omne import synthesis
    teacher = synthesis.Template()
    if cfg.teacher != "template":
        teacher = synthesis.Teacher(cfg.teacher, cfg.teacher_model)
    count = math.ceil(cfg.per_graph * synthesis.TEST_SHARE)
    train = write_questions(folder / "train", graphs, teacher, cfg, cfg.per_graph, "train")
    test = write_questions(folder / "test", graphs, teacher, cfg, count, "test")

    def start(question):
        return question.type, question.evidences[0][0]

    begun = set(map(start, train))
    kept = [q for q in test if start(q) not in begun]
    if len(kept) < len(test):
        say(f"left out {len(test) - len(kept)} of {len(test)} test questions: their paths begin where one "
            "for training does")
    return train, kept


MAKES_QUESTIONS = ("teacher", "teacher_model", "largest_ball", "unique")


def write_questions(folder, graphs, teacher, cfg, count, side=""):
    """Questions along paths of the graphs, `count` per graph and kind; made once. settings.json says what the
    folder was made with: with other settings the questions are made anew, from the answers that are there.
    side: of the seed nodes (synthesis.seeds)."""
    from common.of_omne import synthesis
    facts = {name: stable_seed(sorted(g.graph.edges(data="relation"))) for name, g in graphs.items()}
    made_with = {name: getattr(cfg, name) for name in MAKES_QUESTIONS} | {"count": count, "facts": facts}
    settings = folder / "settings.json"
    if not settings.exists() or read_json(settings, dict) != made_with:
        starts = {name: synthesis.seeds(graph, cfg.largest_ball, side) for name, graph in graphs.items()}
        synthesis.synthesize(graphs, starts, folder, teacher, count, cfg.unique)
        write_json(settings, made_with)
    return read_questions(folder / "questions.jsonl", graphs)


# ---------------------------------------------------------------- the embedded world

def load_world(cfg, folder):
    """Training on three domains; tests on four, with more of the relations that are rare."""
    from common.of_omne.world_graphs import DOMAINS
    train = world_task(cfg, folder, "train", TRAINED_DOMAINS, cfg.per_graph)
    train.questions = some(train.questions, cfg.limit or len(train.questions))
    names = (cfg.eval_data or "test").split(",")
    limit = cfg.eval_limit or 200
    count = math.ceil(limit / len(DOMAINS))
    evals = []
    for name in names:
        task = world_task(cfg, folder, name, DOMAINS, count)
        parts = apart(task.questions, task.retriever)
        if len(names) > 1:
            parts = [replace(part, name=f"{name}-{part.name}") for part in parts]
        evals += parts
    return train, evals


def graphs_of_world(name, domains=None):
    from common import world
    from common.of_omne import world_graphs
    seed = 1 if name == "test" else 0
    made = world.make_world(name, seed, questions=1)
    return {domain: world_graphs.graph_for(made, domain) for domain in domains or world_graphs.DOMAINS}


def world_task(cfg, folder, name, domains, count):
    from common.of_omne import synthesis, world_graphs
    graphs = graphs_of_world(name, domains)
    teacher = synthesis.Template(world_graphs.wording, world_graphs.weight_of(name), world_graphs.forward)
    questions = write_questions(folder / name, graphs, teacher, cfg, count)
    tools = LocalTools(graphs, cfg.max_edges)
    return data.Split(name, questions, tools)
