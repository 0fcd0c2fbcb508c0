"""What a tiny policy that calls a graph's tools is warmed up on: its words, and its demonstrations' walks."""

import random
from dataclasses import replace

from common.graphs.kg_tools import Call, LocalTools
from common.rollout import stable_seed
from common.warmup.demonstrations import said
from common.world import graphs, thoughts

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


def words(max_edges):
    """What it reads and writes besides the world's words."""
    signs = "( ) = \" ; … : .".split()
    numbers = [str(n) for n in range(max_edges + 60)]
    return [*TOOL_WORDS, *graphs.DOMAINS, *thoughts.words(), *signs, *numbers]


def tools_of(made, max_edges, max_words):
    """The tools on a world's graphs; its questions become those along their paths."""
    made.questions = []
    for domain in graphs.DOMAINS:
        made.questions += graphs.path_questions(made, domain, 375, 0)
    all_of_them = {domain: graphs.graph_for(made, domain) for domain in graphs.DOMAINS}
    return LocalTools(all_of_them, max_edges, max_words)


def turns_of(tokenizer, question, demo, tool_call, observe):
    """The turns of a demonstration, with the habits of a policy that nobody trained: fillers for thoughts,
    names matched that are known, calls made twice, calls that the tool refuses at first.

    tool_call(call) -> how it is written. observe(turn, call) -> (text, ids) of what the tool says."""
    seed = stable_seed(question["_id"], demo.answer, len(demo.steps), demo.flaw or "")
    rng = random.Random(seed)
    turns = []

    def turn(thought, act, stop):
        filled = thoughts.habit(rng, thought)
        turns.append(said(tokenizer, stop, f"<think> {filled} </think> {act}"))

    def call(tool, name, thought):
        made = Call(tool, name, question["domain"], question["question"])
        written = [tool_call(made)]
        if rng.random() < REFUSED:
            written.insert(0, flawed_call(rng, made, tool_call))
        for text in written:
            turn(thought, text, "</tool_call>")
            turns[-1].observation, turns[-1].observation_ids = observe(turns[-1], made)

    found = ""
    known = set()
    for step in demo.steps:
        relation = graphs.spoken(step.relation)
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
    thought = f"{found} answer".strip()
    turn(thought, f"{opened}{demo.answer} </answer>", "</answer>")
    return turns


def flawed_call(rng, call, tool_call):
    """A call as no tool takes it: for another graph, or with its first quote left out."""
    if rng.random() < .5:
        others = [domain for domain in graphs.DOMAINS if domain != call.graph_type]
        return tool_call(replace(call, graph_type=rng.choice(others)))
    return tool_call(call).replace('"', "", 1)
