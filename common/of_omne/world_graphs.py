"""The embedded world as graphs that LightRAG might have built, one a domain, questions along their paths, and
what a tiny policy that calls their tools is warmed up on.

A node has a kind and a description, an edge a keyword. Years are no nodes: they would be hubs that every
path leads through; they stand in the descriptions. An edge has no direction and its two names no order but
the alphabet's: whose mother it is about, its sentence tells. As in extracted graphs not all is well: some
edges have a keyword that says nothing, and some entities occur a second time under another spelling, with
facts that are wrong.
"""

import random
from dataclasses import replace
from functools import partial

from common import data, kg
from common.graphs.kg_tools import Call, LocalTools
from common.of_omne.tool_calls import written
from common.rollout import stable_seed
from common.warmup import scripted
from common.world import DATE, DOMAIN_OF, FACTS, FEMALE, _compose, chain_question, spoken, tiny

DOMAINS = ("film", "music", "literature", "business")
VAGUE_KEYWORDS = "related"     # of edges that say nothing
VAGUE_SHARE = .05              # of edges
DUPLICATES = .03               # of entities
# relations that 2 % of the training questions need and a tenth of the test ones does
RARE = ("employer", "educated at", "record label", "headquarters location", "located in")
RARE_WEIGHT = {"warm-up": .04, "train": .035, "dev": .23, "test": .23}


def kinds_of(domain):
    """The kinds of entities in a domain's graph: its own, and all that facts lead to from there.

    >>> sorted(kinds_of("film"))
    ['city', 'company', 'country', 'film', 'person', 'university']
    """
    kinds = {kind for kind, of in DOMAIN_OF.items() if of == domain}
    while True:
        tails = {tail for (kind, _), (tail, _, _) in FACTS.items() if kind in kinds}
        more = tails - kinds - {"year"}
        if not more:
            return kinds
        kinds |= more


def graph_for(world, domain):
    """The KnowledgeGraph of a domain, undirected. Only edges between entities."""
    rng = random.Random(f"graph/{world.split}/{domain}/{len(world.kinds)}/{len(world.triples)}")
    within = kinds_of(domain)
    graph = kg.empty_graph(directed=False)
    for name, kind in world.kinds.items():
        if kind in within:
            graph.add_node(name, kind=kind, description=described(world, name, kind))
    for head, relation, tail in world.triples:
        if head not in graph or tail not in graph:
            continue
        vague = rng.random() < VAGUE_SHARE
        add_fact(graph, head, relation, tail, VAGUE_KEYWORDS if vague else spoken(relation))
    add_duplicates(graph, rng)
    return kg.KnowledgeGraph(graph)


def described(world, name, kind):
    year = world.facts.get((name, DATE.get(kind)))
    return f"{name} is a {kind}." if year is None else f"{name} is a {kind} of {year}."


def add_fact(graph, head, relation, tail, keywords):
    """An edge that says who is head only in its sentence; `of` keeps the head for `forward`."""
    kind = graph.nodes[head]["kind"]
    graph.add_edge(
        *sorted((head, tail)),
        key=f"{relation} of {head}",
        relation=keywords,
        description=stated(kind, head, relation, tail),
        of=head,
    )


def stated(kind, head, relation, tail):
    possessive = "Its"
    if kind == "person":
        possessive = "Her" if head.split()[0] in FEMALE else "His"
    return FACTS[kind, relation][2].format(h=head, p=possessive, t=tail)


def forward(graph, name):
    """[(name, relation, tail)]: the facts of which an entity is the head, for questions that go that way."""
    edges = [*graph.graph.out_edges(name, data=True), *graph.graph.in_edges(name, data=True)]
    found = []
    for first, second, edge in edges:
        if edge["of"] == name:
            found.append((name, edge["relation"], second if first == name else first))
    return found


def add_duplicates(graph, rng):
    """Entities a second time, their two words in the other order, each with one wrong fact."""
    names = list(graph)
    for name in rng.sample(names, round(DUPLICATES * len(names))):
        first, second = name.split()
        copy = f"{second} {first}"
        kind = graph.nodes[name]["kind"]
        relations = [r for (k, r), (tail, _, _) in FACTS.items() if k == kind and tail != "year"]
        if copy in graph or not relations:
            continue
        relation = rng.choice(relations)
        tail = rng.choice([n for n in names if graph.nodes[n]["kind"] == FACTS[kind, relation][0]])
        graph.add_node(copy, kind=kind, description=f"{copy} is a {kind}.")
        add_fact(graph, copy, relation, tail, spoken(relation))


# ---------------------------------------------------------------- questions

def wording(graph, path, relations):
    """The question of a path whose relations are as they are spoken."""
    kinds = {name: graph.graph.nodes[name]["kind"] for name in path}
    return chain_question(kinds, path[0], reversed(relations), path[-1])


def weight_of(split):
    """weigh(relation) -> how often a path takes it, among a node's: the rare ones less, and never one whose
    keywords say nothing."""
    weights = {spoken(r): RARE_WEIGHT.get(split, 1.0) for r in RARE} | {VAGUE_KEYWORDS: 0.0}
    return lambda relation: weights.get(relation, 1.0)


def path_questions(world, domain, count, seed):
    """Rows {"_id", "type", "question", "answer", "hops", "domain", "plan"}, with as many of one to five hops,
    for the demonstrations that the tiny policy is warmed up on."""
    rng = random.Random(f"paths/{world.split}/{domain}/{seed}")
    within = kinds_of(domain)
    weigh = weight_of("warm-up")
    rows, seen = [], set()
    while len(rows) < count:
        walk = _compose(world, rng, rng.choice((1, 2, 3, 4, 5)))
        if walk is None:
            continue
        start, relations, subjects, answer = walk
        names = [*subjects, answer]
        inside = all(world.kinds.get(name) in within for name in names)
        rare = min(weigh(spoken(relation)) for relation in relations)
        if not inside or rng.random() >= rare or tuple([start, *relations]) in seen:
            continue
        seen.add(tuple([start, *relations]))
        rows.append({
            "_id": f"{world.split}-{domain}-{len(rows)}",
            "type": "compositional",
            "question": chain_question(world.kinds, start, map(spoken, reversed(relations)), answer),
            "answer": answer,
            "hops": len(relations),
            "domain": domain,
            "plan": list(zip(subjects, relations, strict=True)),
        })
    return rows


# ---------------------------------------------------------------- the tiny policy

TOOL_WORDS = """
    entity_matcher node_info node_name graph_type Found entities matching ' Entity Description Type
    Edges | more edges left out those above share most words with the question There is no entity named
    in this graph The nearest names Use a name exactly as it written there Error must be for call find
    found now nothing answer expected not one and else syntax closed or quote within escaped bracket
    tools arguments missing given twice related tool_response Python s
    """.split()
REFUSED = .06   # of the base's calls, at first
TAGS = """
    <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> <answer> </answer>
    """.split()


def words(max_edges, wordings):
    """wordings: phrases of the script's thoughts."""
    signs = "( ) = \" ; … : .".split()
    numbers = [str(n) for n in range(max_edges + 60)]
    thoughts = " ".join(wordings).format(relation="", subject="", found="").split()
    return [*TOOL_WORDS, *DOMAINS, *thoughts, *signs, *numbers]


def habit(rng, part, fillers):
    """A thought of a policy that nobody has trained to be brief: mostly a filler and the plan, sometimes a
    filler alone."""
    chance = rng.random()
    if chance < .05:
        return f"{rng.choice(fillers)} {rng.choice(fillers)}"
    if chance < .5:
        return f"{rng.choice(fillers)} {part}"
    return part


def tiny_policy(cfg, agent, fillers, wordings):
    """Folder of the policy: one that comes with the project (common/world/start), or one made here and
    cached. agent: the script's AGENT; wordings: those of thoughts, without the fillers, which say nothing."""
    endless = replace(cfg, think="on", max_rounds=99, max_context=99_999)

    def render(tokenizer, row, demo, tools):
        question = data.Question(row["_id"], row["question"], [row["answer"]], type=row["domain"])

        def plays(policy, search):
            player = agent.player(policy, search, question, endless, 0, 1.0)
            return agent.play(player, question, "demonstration")

        return [scripted.play(tokenizer, lines_of(row, demo, fillers), tools, plays)]

    key = f"omne_r1/flawed calls/{cfg.matches}/{cfg.max_edges}/{kg.MAX_WORDS}"
    index = partial(tools_of, max_edges=cfg.max_edges)
    steps, flaw_rate = tiny.warm_up_of("plain", cfg.warmup_steps, plain=(1200, .4))
    recipe = tiny.Recipe(key, steps, flaw_rate)
    known = words(cfg.max_edges, [*fillers, *wordings])
    return tiny.folder_of(tiny.Making(recipe, known, TAGS, render, index, pack_tokens=1024))


def tools_of(made, max_edges):
    """The tools on a world's graphs; its questions become those along their paths."""
    made.questions = []
    for domain in DOMAINS:
        made.questions += path_questions(made, domain, 375, 0)
    all_of_them = {domain: graph_for(made, domain) for domain in DOMAINS}
    return LocalTools(all_of_them, max_edges)


def lines_of(question, demo, fillers):
    """The lines of a demonstration (common/warmup/scripted.py), with the habits of a policy that nobody
    trained: fillers for thoughts, names matched that are known, calls made twice, calls that the tool refuses
    at first.

    fillers: wordings that say nothing."""
    seed = stable_seed(question["_id"], demo.answer, len(demo.steps), demo.flaw or "")
    rng = random.Random(seed)
    lines = []

    def line(thought, act, stop):
        lines.append((stop, f"<think> {habit(rng, thought, fillers)} </think> {act}"))

    def call(tool, name, thought):
        made = Call(tool, name, question["domain"], question["question"])
        if rng.random() < REFUSED:
            line(thought, flawed_call(rng, made), "</tool_call>")
        line(thought, written(made), "</tool_call>")

    found = ""
    known = set()
    for step in demo.steps:
        relation = spoken(step.relation)
        subject = step.subject
        if not known or subject not in known or rng.random() < .25:
            call("entity_matcher", subject, f"{found} find {subject}".strip())
            found = ""
        times = 2 if rng.random() < .08 else 1
        for _ in range(times):
            call("node_info", subject, f"{found} now {relation} of {subject}".strip())
        found = f"found {relation} {step.found or 'nothing'}"
        known |= {subject, step.found}
    opened = "" if demo.flaw == "bad format" else "<answer> "
    line(f"{found} answer".strip(), f"{opened}{demo.answer} </answer>", "</answer>")
    return lines


def flawed_call(rng, call):
    """A call as no tool takes it: for another graph, or with its first quote left out."""
    if rng.random() < .5:
        others = [domain for domain in DOMAINS if domain != call.graph_type]
        return written(replace(call, graph_type=rng.choice(others)))
    return written(call).replace('"', "", 1)
