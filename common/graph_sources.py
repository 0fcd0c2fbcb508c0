"""Where a run's graphs and questions come from: files, a teacher, or the embedded world.

    place, evals = load(cfg, folder)    what is made lies in the folder, where a killed run goes on
"""

import math
from dataclasses import replace

from common import data, graph_questions, synthesis, world
from common.graph_questions import Place, apart, write_questions
from common.kg_tools import LocalTools
from common.teacher import ChatTeacher, Template
from common.world import graphs as world_graphs

TRAINED_DOMAINS = ("film", "music", "literature")  # the test has one more


def load(cfg, folder):
    """(training Place or None, evaluation Places)"""
    if cfg.data == "world":
        return load_world(cfg, folder)
    return graph_questions.load_places(cfg, lambda graphs: make_questions(cfg, folder, graphs))


def load_tools(cfg):
    """The tools that --ask calls."""
    if cfg.data != "world":
        return graph_questions.load_tools(cfg)
    return LocalTools(graphs_of_world(cfg, "test", world_graphs.DOMAINS), cfg.max_edges, cfg.max_words)


def teacher_of(cfg):
    """Who words questions and thoughts."""
    return Template() if cfg.teacher == "template" else ChatTeacher(cfg.teacher, cfg.teacher_model)


def make_questions(cfg, folder, graphs):
    """(training questions, test questions) along paths of the graphs (sec. 2), from different seed nodes;
    in a folder where a killed run goes on."""
    teacher = teacher_of(cfg)
    halves = {}
    for name, graph in graphs.items():
        halves[name] = synthesis.split_seeds(graph, 0, cfg.test_share, largest=cfg.largest_ball)
    found = []
    for number, part in enumerate(("train", "test")):
        only = {name: half[number] for name, half in halves.items()}
        count = math.ceil(cfg.per_graph * (cfg.test_share if part == "test" else 1))
        found.append(write_questions(folder / part, graphs, teacher, cfg, count, only))
    return found


def load_world(cfg, folder):
    """Training on three domains; the test world's four, with more of the relations that are rare."""
    train = world_place(cfg, folder, "train", TRAINED_DOMAINS, cfg.per_graph)
    names = (cfg.eval_data or "test").split(",")
    limit = cfg.eval_limit or 400
    evals = []
    for name in names:
        domains = world_graphs.DOMAINS
        count = math.ceil(limit / (2 * len(domains)))
        place = world_place(cfg, folder, name, domains, count)
        for part in apart(place.questions, place.tools):
            evals.append(part if len(names) == 1 else replace(part, name=f"{name}-{part.name}"))
    return replace(train, name="train"), evals


def graphs_of_world(cfg, name, domains):
    """{domain: graph} of a split."""
    try:
        made = world.make_world(name, 1 if name == "test" else 0, cfg.world_size, questions=1)
    except (ValueError, IndexError) as error:  # too large for its words, or too small for a question
        raise data.DataError(f"--world-size {cfg.world_size}: {error}") from error
    return {domain: world_graphs.graph_for(made, domain) for domain in domains}


def world_place(cfg, folder, name, domains, count):
    """A split's graphs, their tools, and questions by template."""
    graphs = graphs_of_world(cfg, name, domains)
    teacher = Template(world_graphs.wording, world_graphs.weight_of(name))
    questions = write_questions(folder / name, graphs, teacher, cfg, count)
    return Place(name, questions, LocalTools(graphs, cfg.max_edges, cfg.max_words))
