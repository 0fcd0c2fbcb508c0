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
