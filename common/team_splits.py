"""Questions for planners and workers (mygo_mujica.py): with a graph, or in the world apart by the relations
that they need."""

import random
import unicodedata
from dataclasses import replace

from common import data, kg, metrics, splits
from common.files import warn
from common.rollout import stable_seed

# relations that no training question has; the questions that need one are the out-of-domain set
OTHER_RELATIONS = (
    "author",
    "publisher",
    "employer",
    "educated at",
    "headquarters location",
    "located in",
)


def topic_entities(question, graph):
    """Names in the graph of the entities that the question starts from (sec. 4.1: gold topic entities): those
    the data set names, else the heads of its evidences that no other evidence leads to."""
    def plain_name(name):
        name = unicodedata.normalize("NFKD", name.replace("ł", "l").replace("Ł", "L"))
        return metrics.normalize_answer(name.encode("ascii", "ignore").decode())

    tails = {plain_name(t) for _, _, t in question.evidences}
    heads = [h for h, _, _ in question.evidences]
    heads = [[h, ""] for h in heads if plain_name(h) not in tails]
    found = []
    for names in question.entities or heads:
        found += [n for n in names if n and n in graph][:1]
    return list(dict.fromkeys(found))


def load_splits(cfg, paper_eval):
    """(training split or None, evaluation splits) with their graphs; in the world the questions apart by the
    relations they need."""
    if cfg.data == "world":
        return load_world(cfg)
    envs = cfg.envs.split(",")
    split, evals = splits.load_splits(replace(cfg, limit=0), paper_eval, searched="text" in envs,
                                      live=cfg.graph == "evidences")
    if split and cfg.limit:  # D.3: a random subset
        size = min(cfg.limit, len(split.questions))
        rng = random.Random(stable_seed(cfg.seed, "subset"))
        drawn = rng.sample(split.questions, size)
        split = replace(split, questions=drawn)
    everything = [q for s in (split, *evals) if s for q in s.questions]
    bare = [q for q in everything if not q.context]
    if bare and "kimi" in envs:
        raise data.DataError(f"--envs kimi: question {bare[0].id} has no passages of its own")
    if "kg" not in envs:
        return split, evals
    triples = [tuple(e) for q in everything for e in q.evidences]
    if cfg.graph == "evidences" and not triples:
        raise data.DataError("--graph evidences: the questions carry no evidences (2Wiki's official files "
                             "do); give a file of triples")
    of_evidences = cfg.graph == "evidences"
    if of_evidences:
        graph = kg.KnowledgeGraph.from_triples(triples)
    else:
        from common.graphs import kg_files
        graph = kg_files.load_graph(cfg.graph)
        graph.say_left_out(cfg.graph)
    for s in filter(None, (split, *evals)):
        lost = sum(not topic_entities(q, graph) for q in s.questions)
        if lost:
            warn(f"{s.name}: {lost} of {len(s.questions)} questions have no topic entity in the graph: "
                 "nothing can be searched for them")
    if split:
        split = replace(split, graph=graph)
    return split, [replace(s, graph=graph) for s in evals]


def load_world(cfg):
    """Training and evaluation never need one of OTHER_RELATIONS; the set "other-relations" always does. At
    the second level, whose questions are as long as they are few, it has to be asked for."""
    from common.world import hard
    from common.world.splits import world_split
    limit = cfg.eval_limit or 400
    level = hard.parse(cfg.world)

    def needs_other(q):
        return any(relation in OTHER_RELATIONS for _, relation, _ in q.evidences)

    def part(name, source, questions):
        graph_of = kg.KnowledgeGraph.from_triples
        s = world_split(source, cfg.world_size, questions, cfg.retriever, level, graph_of)
        others = name == "other-relations"
        wanted = [q for q in s.questions if needs_other(q) == others]
        if name != "train":
            wanted = wanted[:limit]
        return replace(s, name=name, questions=wanted)

    default = "test" if level else "test,other-relations"
    names = (cfg.eval_data or default).split(",")
    drawn = 2 * limit if level else 4 * limit
    evals = [part(n, "test" if n == "other-relations" else n, drawn) for n in names]
    return part("train", "train", cfg.limit or 2000), evals
