"""Where a run's graphs and questions come from: files, a teacher, or the embedded world.

    place, evals = load(cfg, folder)    what is made lies in the folder, where a killed run goes on
"""

import math
from dataclasses import replace

from common import data, flags, world
from common.files import say
from common.graphs import graph_questions, synthesis
from common.graphs.graph_questions import REMOTE, Place, apart, write_questions
from common.graphs.kg_tools import LocalTools
from common.graphs.teacher import ChatTeacher, Template
from common.world import graphs as world_graphs

TRAINED_DOMAINS = ("film", "music", "literature")  # the test has one more


def check(cfg):
    """Refuses graphs, questions and models that do not go together."""
    if not 0 < cfg.test_share < 1:
        flags.refuse("test_share", cfg.test_share, "above 0 and below 1")
    needs_model = not cfg.score and cfg.stage != "synthesize"
    if needs_model and cfg.policy:
        flags.needs_a_model(cfg)
    if cfg.score and not cfg.judge:
        flags.refuse("score", cfg.score, "needs --judge URL")
    if cfg.data == "world":
        if cfg.graph:
            flags.refuse("graph", cfg.graph, "not with --data world, which has its own")
        return
    if not cfg.graph and not cfg.score:
        flags.refuse("graph", cfg.graph, "needed with --model or --data: NAME=FILE,…, a folder of graphs, or "
                                         "http://HOST:PORT")
    if needs_model and not (cfg.model or cfg.checkpoint or cfg.policy):
        flags.refuse("model", cfg.model, "needed with --graph (or --checkpoint)")
    asked = cfg.data or cfg.ask or cfg.eval_only and cfg.eval_data
    if cfg.graph.startswith(REMOTE) and not asked:
        flags.refuse("graph", cfg.graph, "a server answers calls; its questions stand in a --data FILE")


def load(cfg, folder):
    """(training Place or None, evaluation Places)"""
    if cfg.data == "world":
        return load_world(cfg, folder)

    def make(graphs):
        return make_questions(cfg, folder, graphs)

    return graph_questions.load_places(cfg, make)


def load_tools(cfg):
    """The tools that --ask calls."""
    if cfg.data != "world":
        return graph_questions.load_tools(cfg)
    graphs = graphs_of_world(cfg, "test", world_graphs.DOMAINS)
    return LocalTools(graphs, cfg.max_edges, cfg.max_words)


def teacher_of(cfg):
    """Who words questions and thoughts."""
    if cfg.teacher == "template":
        return Template()
    return ChatTeacher(cfg.teacher, cfg.teacher_model)


def make_questions(cfg, folder, graphs):
    """(training questions, test questions) along paths of the graphs (sec. 2), from different seed nodes;
    in a folder where a killed run goes on. A teacher may begin a path elsewhere near the seed node: test
    questions that begin where one for training does are left out."""
    teacher = teacher_of(cfg)
    halves = {}
    for name, graph in graphs.items():
        halves[name] = synthesis.split_seeds(graph, 0, cfg.test_share, largest=cfg.largest_ball)
    found = []
    for number, part in enumerate(("train", "test")):
        only = {name: half[number] for name, half in halves.items()}
        share = cfg.test_share if part == "test" else 1
        count = math.ceil(cfg.per_graph * share)
        made = write_questions(folder / part, graphs, teacher, cfg, count, only)
        found.append(made)
    train, test = found
    begun = {(q.type, q.evidences[0][0]) for q in train}
    kept = [q for q in test if (q.type, q.evidences[0][0]) not in begun]
    if len(kept) < len(test):
        say(f"left out {len(test) - len(kept)} of {len(test)} test questions: their paths begin where one "
            "for training does")
    return train, kept


def load_world(cfg, folder):
    """Training on three domains; the test world's four, with more of the relations that are rare."""
    train = world_place(cfg, folder, "train", TRAINED_DOMAINS, cfg.per_graph)
    if cfg.limit:
        train = replace(train, questions=graph_questions.some(train.questions, cfg.limit))
    names = (cfg.eval_data or "test").split(",")
    domains = world_graphs.DOMAINS
    limit = cfg.eval_limit or 400
    count = math.ceil(limit / (2 * len(domains)))
    evals = []
    for name in names:
        place = world_place(cfg, folder, name, domains, count)
        parts = apart(place.questions, place.tools)
        if len(names) > 1:
            parts = [replace(part, name=f"{name}-{part.name}") for part in parts]
        evals += parts
    return train, evals


def graphs_of_world(cfg, name, domains):
    """{domain: graph} of a split."""
    try:
        seed = 1 if name == "test" else 0
        made = world.make_world(name, seed, cfg.world_size, questions=1)
    except (ValueError, IndexError) as error:  # too large for its words, or too small for a question
        raise data.DataError(f"--world-size {cfg.world_size}: {error}") from error
    return {domain: world_graphs.graph_for(made, domain) for domain in domains}


def world_place(cfg, folder, name, domains, count):
    """A split's graphs, their tools, and questions by template."""
    graphs = graphs_of_world(cfg, name, domains)
    teacher = Template(world_graphs.wording, world_graphs.weight_of(name), world_graphs.forward)
    questions = write_questions(folder / name, graphs, teacher, cfg, count)
    tools = LocalTools(graphs, cfg.max_edges, cfg.max_words)
    return Place(name, questions, tools)
