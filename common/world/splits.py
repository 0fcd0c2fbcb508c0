"""The embedded world as splits: what --data world, --eval-data and --world name."""

from common import data, retriever, world
from common.world import hard


def world_split(name, questions=400, spec="bm25", level=None, graph_of=None):
    """A Split of the embedded world, or of its second level. graph_of: makes its graph of triples, where one
    is asked for.

    Test questions come from the world of seed 1 (second level: 2), first evaluated after the learning rate
    had been chosen on dev (the test world of seed 0 was in view when clip window and warm-up were set); every
    other split is the world of seed 0."""
    if level:
        seed = hard.TEST_SEED if name == "test" else 0
        made = hard.make_hard_world(name, seed, questions, level)
    else:
        seed = 1 if name == "test" else 0
        made = world.make_world(name, seed, questions)
    return data.Split(
        name,
        data.load_questions(made.questions),
        retriever.make_retriever(spec, made.corpus()),
        graph_of and graph_of(made.triples),
    )


def load(cfg):
    """(training split, evaluation splits) of a run's flags."""
    def part(name, questions):
        return world_split(name, questions, cfg.retriever, hard.parse(cfg.world))
    evals = [part(name, cfg.eval_limit or 400) for name in (cfg.eval_data or "test").split(",")]
    return part("train", cfg.limit or 2000), evals


# relations that no training question of mygo_mujica.py has; those that need one are out of its domain
OTHER_RELATIONS = (
    "author", "publisher", "employer", "educated at", "headquarters location", "located in")


def load_apart(cfg, graph_of):
    """The same apart by relations: training and evaluation never need one of OTHER_RELATIONS, the set
    "other-relations" always does."""
    level = hard.parse(cfg.world)
    most = cfg.eval_limit or 400
    drawn = most * 4
    if level:  # whose questions are as long as they are few
        drawn = most * 2

    def needs_other(question):
        return any(relation in OTHER_RELATIONS for _, relation, _ in question.evidences)

    def part(name, source, questions):
        split = world_split(source, questions, cfg.retriever, level, graph_of)
        split.name = name
        others = name == "other-relations"
        split.questions = [q for q in split.questions if needs_other(q) == others]
        return split

    evals = []
    for name in (cfg.eval_data or "test").split(","):
        source = "test" if name == "other-relations" else name
        evals.append(part(name, source, drawn))
        evals[-1].questions = evals[-1].questions[:most]
    return part("train", "train", cfg.limit or 2000), evals
