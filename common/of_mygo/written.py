"""Demonstrations of planner and workers (mygo_mujica.py): those of the embedded world, and those of real
questions from their gold evidence. The script's own agent plays them: its demonstration(tokenizer, question,
demo, place, cfg) -> [planner, worker, …].

What is said comes from planner(number of the turn, entities that have labels) and worker(its info), the parts
of a turn as chat.encode takes them. clean(text): the script's guard over foreign text."""

import random
import re
from dataclasses import replace

from common import chat, data, kg
from common import model as models
from common.metrics import stands_in
from common.rollout import Turn
from common.warmup import demonstrations, warmup
from common.world import spoken, tiny

NO_LABEL = 9  # an entity's that the planner cannot name


def asking(thought, calls, env="text"):
    """A planner's turn; calls: a list of parts each."""
    parts = [part for call in calls for part in (" ", *call)]
    if env == "kg":
        parts = [" <action>", *parts, " </action>"]
    return ["<think> ", chat.Foreign(thought), " </think>", *parts]


def answering(thought, demo):
    """A planner's last turn. Some demonstrations have flaws, so that RL finds something to mend."""
    before, after = "<answer> ", " </answer>"
    if demo.flaw == "bad format":
        before = after = ""
    return ["<think> ", chat.Foreign(thought), " </think> ", before, chat.Foreign(demo.answer), after]


def reporting(thought, select, sentence):
    """A worker's turn."""
    return ["<think> ", chat.Foreign(thought), f" </think> <select> [{select}] </select> <sentence> ",
            chat.Foreign(sentence), " </sentence>"]


def lines_of(tokenizer, question, demo, place, top_k, clean, nothing):
    """Team.next_turn of a team that says a demonstration. nothing: the sentence of a worker that fails."""
    if hasattr(demo, "steps"):  # of the embedded world, where all of them are known
        planner, worker = of_world(demo, place, clean, nothing)
    else:
        planner, worker = of_evidence(tokenizer, question, demo, place, top_k, clean)

    async def next_turn(conversation, seed):
        info = conversation.info
        if info.who[1] == "worker":
            parts = worker(info)
        else:
            parts = planner(len(conversation.turns), info.entities)
        end = f" {tokenizer.eos_token}"
        text, ids = chat.encode(tokenizer, *parts, end)
        return Turn(ids, [0.0] * len(ids), "eos", text.removesuffix(end))
    return next_turn


def of_world(demo, place, clean, nothing):
    """(planner, worker) of a demonstration of the world."""
    layers = demonstrations.layers(demo.steps)
    hop_of = {}  # {sub-question: its hop}

    def planner(number, entities):
        thought = ""
        if number:
            for hop in layers[number - 1]:
                thought += f"found {spoken(hop.relation)} {hop.found or 'nothing'} ; "
        if number == len(layers):
            return answering(f"{thought}answer", demo)
        calls, wanted = [], []
        for hop in layers[number]:
            sub = f"{spoken(hop.relation)} of {hop.subject}"
            hop_of[clean(sub)] = hop
            wanted.append(f"now {sub}")
            label = NO_LABEL
            if hop.subject in entities:
                label = entities.index(hop.subject)
            call = f"<search> {sub} </search>"
            if place.env == "kg":
                call = f'Search([{label}], "{sub}")'
            calls.append([call])
        return asking(thought + " ; ".join(wanted), calls, place.env)

    def worker(report):
        hop = hop_of[report.sub_question]
        name = hop.found
        fits = [line.startswith(hop.subject) for line in report.materials]
        if place.env == "kg":  # it has the tail by its own name, where a passage may call it otherwise
            fits = [relation == hop.relation for _, relation, _ in report.facts]
            name = hop.found and (hop.tail or hop.found)
        if not any(fits) or name is None:
            return reporting("nothing", -1, nothing)
        select, asked = fits.index(True), report.sub_question
        return reporting(f"[{select}] says {asked}", select, f"{asked} is {name}.")
    return planner, worker


ASKING = "what who whom whose when where which why how in on at".split()


def of_evidence(tokenizer, question, demo, place, top_k, clean):
    """(planner, worker) of a real question's demonstration. First layer: hops whose page the question names
    and that need no earlier answer; then one hop per layer."""
    def at_once(hop):
        return not hop.waits and stands_in([demonstrations.plain_title(hop.title)], question.question)

    first = list(filter(at_once, demo.hops))
    layers = [[hop] for hop in demo.hops if hop not in first]
    if first:
        layers.insert(0, first)

    def sub_question(hop):
        """(its need in words, or where no search finds the page so, its query; the index of its page)"""
        sub = f"What is {hop.need}?"
        if hop.need.split()[0].lower() in ASKING:
            sub = f"{hop.need}?"
        sub = clean(chat.harmless(tokenizer, sub))
        titles = [p.title for p in place.retriever.search([sub], top_k)[0]]
        if hop.title not in titles:
            sub = clean(chat.harmless(tokenizer, hop.queries[0]))
            titles = [p.title for p in hop.passages]
        return sub, titles.index(hop.title)

    turns, reports, known = [], {}, ""
    for layer in layers:
        calls = []
        for hop in layer:
            sub, select = sub_question(hop)
            calls.append(["<search> ", chat.Foreign(sub), " </search>"])
            thought = f"The question asks about {hop.need}. Passage ({select}) says it."
            reports[sub] = reporting(thought, select, clean(hop.found))
        wanted = " and ".join(hop.need for hop in layer)
        turns.append(asking(known + demo.wanted(0, wanted), calls))
        known = " ".join(hop.found for hop in layer) + " "
    turns.append(answering(known + demo.concluded(), demo))
    return lambda number, _: turns[number], lambda report: reports[report.sub_question]


# ---------------------------------------------------------------- what learns from them

def warmed_up(cfg, source, place, demonstration):
    """Trains `source` on --warmup-data; returns the folder of the result."""
    def reward(learned, question):
        """The planner's; None where it took more turns or calls than there may be."""
        layers = learned[0].info.workers
        if len(layers) > cfg.max_rounds or max(map(len, layers)) > cfg.max_parallel:
            return None
        return learned[0].reward

    def prompt(tokenizer, row):
        request = chat.Foreign(row["conversations"][0]["value"])
        return chat.render_chat(tokenizer, [("system", row["system"]), ("user", request)])

    def reply(tokenizer, turn_ids, observation):
        return chat.render_reply(tokenizer, turn_ids, chat.Foreign(observation))

    examples = warmup.examples_of(
        cfg, "mygo_mujica", models.load_tokenizer(source), place, reward=reward, reply=reply, prompt=prompt,
        render=lambda *given: demonstration(*given, place, cfg), ends="all", top_k=cfg.top_k)
    return warmup.warmed_up(cfg, "mygo_mujica", source, examples)


def tiny_policy(cfg, demonstration, Place, nothing):
    """Folder of the embedded world's tiny policy, which learns both environments: one that comes with the
    project (common/world/start), or one made here and cached. Place: the script's class."""
    words = "0 1 2 3 4 5 6 7 8 9 now found nothing answer says ; "
    words += "Search ( ) [ ] - Question Context Materials Candidate Obs : , " + nothing
    names = ("think", "search", "select", "sentence", "action", "answer")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]

    def index(world):
        return Place("warmup", [], tiny.bm25(world), kg.KnowledgeGraph.from_triples(world.triples))

    def render(tokenizer, row, demo, place):
        env = random.Random(f"{row['_id']}/{demo.answer}").choice(("text", "kg"))
        return demonstration(tokenizer, data.parse_question(row), demo, replace(place, env=env), cfg)

    steps, flaw_rate = tiny.warm_up_of(cfg.world, cfg.warmup_steps)
    recipe = tiny.Recipe(f"mygo_mujica, {cfg.max_words} words", steps, flaw_rate, cfg.top_k, cfg.world)
    return tiny.folder_of(tiny.Making(recipe, re.findall(r"\w+|[^\w\s]", words), tags, render, index))
