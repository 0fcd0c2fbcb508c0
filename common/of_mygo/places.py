"""What mygo_mujica.py's --envs ask for, questions with their passages and graph, and what its flags must be.
cfg is mygo_mujica.Config."""

import random
import unicodedata
from dataclasses import replace

from common import data, flags, kg, metrics, splits
from common.files import warn
from common.rollout import stable_seed

WORLD_SETS = ("test", "dev", "other-relations")  # that --eval-data may name in the embedded world


def load_splits(cfg, paper_eval):
    """(training split or None, evaluation splits) of --data and --eval-data, with the graph where one is
    searched (sec. 4.1)."""
    if cfg.data == "world":
        return load_world(cfg)
    envs = cfg.envs.split(",")
    whole = replace(cfg, limit=0)
    split, evals = splits.load_splits(whole, paper_eval, "text" in envs, read_sets=cfg.graph == "evidences")
    if split and cfg.limit:  # a random subset (D.3)
        rng = random.Random(stable_seed(cfg.seed, "subset"))
        split.questions = rng.sample(split.questions, min(cfg.limit, len(split.questions)))
    sets = [s for s in (split, *evals) if s]
    questions = [q for s in sets for q in s.questions]
    bare = [q.id for q in questions if not q.context]
    if bare and "kimi" in envs:
        raise data.DataError(f"--envs kimi: question {bare[0]} has no passages of its own")
    if "kg" in envs:
        from common.graphs import kg_files
        graph = kg_files.graph_of(cfg.graph, questions)
        for s in sets:
            s.graph = graph
            lost = sum(not topic_entities(q, graph) for q in s.questions)
            if lost:
                warn(f"{s.name}: {lost} of {len(s.questions)} questions have no topic entity in the graph: "
                     "nothing can be searched for them")
    return split, evals


# relations that no training question of the embedded world has; those that need one are out of its domain
OTHER_RELATIONS = (
    "author", "publisher", "employer", "educated at", "headquarters location", "located in")


def load_world(cfg):
    """The embedded world's splits, apart by relations: training and evaluation never need one of
    OTHER_RELATIONS, the set "other-relations" always does."""
    from common.world import hard
    from common.world.splits import world_split
    level = hard.parse(cfg.world)
    most = cfg.eval_limit or 400
    drawn = most * (2 if level else 4)  # the hard ones are as long as they are few

    def needs_other(question):
        return any(relation in OTHER_RELATIONS for _, relation, _ in question.evidences)

    def part(name, count, most=None):
        others = name == "other-relations"
        source = "test" if others else name
        split = world_split(source, count, cfg.retriever, level, kg.KnowledgeGraph.from_triples)
        kept = [q for q in split.questions if needs_other(q) == others]
        return replace(split, name=name, questions=kept[:most])

    evals = [part(name, drawn, most) for name in (cfg.eval_data or "test").split(",")]
    return part("train", cfg.limit or 2000), evals


def topic_entities(question, graph):
    """The gold topic entities that a graph's planner starts from (sec. 4.1), as the graph spells them: those
    of the question, [[name, alias, …]]; without any, the heads of its evidences that are no tails (ours)."""
    named = question.entities
    if not named:
        tails = {plain_name(tail) for _, _, tail in question.evidences}
        named = [[head] for head, _, _ in question.evidences if plain_name(head) not in tails]
    in_graph = [[name for name in names if name and name in graph] for names in named]
    return list(dict.fromkeys(names[0] for names in in_graph if names))


def plain_name(name):
    """A name without accents, case and punctuation: 2Wiki spells one entity in several ways."""
    name = unicodedata.normalize("NFKD", name.replace("ł", "l").replace("Ł", "L"))  # (ł does not decompose)
    return metrics.normalize_answer(name.encode("ascii", "ignore").decode())


def resolve(cfg, learning, with_ratio):
    """Fills in fields that depend on others; refuses what cannot run. learning: the stages that train in
    iterations; with_ratio: those of them whose loss has a ratio."""
    envs = cfg.envs.split(",")
    if cfg.eval_only:
        cfg = replace(cfg, stage="eval")
    if "text" not in envs:  # then there is no corpus, and no server
        cfg = replace(cfg, retriever=cfg.retriever or "bm25")
    cfg = replace(cfg, eval_only=cfg.stage == "eval")
    cfg = flags.check(cfg, may_be_zero="token_budget", above_zero="lr sft_lr grpo_lr temperature",
                      world_sets=WORLD_SETS, least={"group_size": 2})
    few_shot_first = cfg.stage in ("all", "few-shot", "warm-up")
    above = "below 1: rewards (F1) have to be above it"
    for wrong, flag, words in (
        (not set(envs) <= {"text", "kg", "kimi"} or len(set(envs)) < len(envs), "envs",
         "text, kg or kimi, or several of them with commas"),
        ("kimi" in envs and (cfg.ask or cfg.retriever.startswith("http")), "envs", "kimi searches a "
         "question's own passages with --retriever bm25 or dense:MODEL; --ask has no passages"),
        ("kg" in envs and cfg.data != "world" and not cfg.graph, "envs",
         "kg needs --graph FILE (triples or GraphML), or --graph evidences with a data set that has them"),
        (cfg.threshold >= 1, "threshold", above),
        (cfg.offline_threshold >= 1, "offline_threshold", above),
        (cfg.warmup_data and (envs != ["text"] or few_shot_first), "warmup_data", "replaces the warm-up on "
         f"few-shot trajectories: it goes with --envs text and --stage {', '.join(learning)} or eval"),
        (cfg.sampler_correction != "none" and cfg.stage not in with_ratio, "sampler_correction",
         "goes with --stage grpo and raft++; a likelihood (Eq 6) has no ratio"),
        ("elastic" in cfg.world, "world",
         "elastic is for agents that search on their own; here the knob is partial"),
    ):
        if wrong:
            flags.refuse(flag, getattr(cfg, flag), words)
    return cfg
