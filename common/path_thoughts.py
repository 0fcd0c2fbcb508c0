"""Thoughts for calls along a known path (Omne-R1, section 3.4): by template, or written by a language model.

    writer = thoughts_by_template(seed)         or thoughts_by_teacher(teacher, answers)
    calls = template_calls(question)            question.evidences are the edges of its path
    writer(question, calls, tools.search(calls, k))     ->  [a thought for each call, and one for the answer]
"""

import random

from common import chat
from common.graphs.kg_tools import Call
from common.rollout import stable_seed
from common.serve.chat_client import BadAnswer, filled, read_object
from common.world import graph_policy as phrases

THOUGHTS = """\
Below are a question, its answer, and the calls that find it in a knowledge graph, each with what the tool \
said. Write the thought that leads to each call, and one that leads to the answer. A thought knows what was \
said before it and nothing that comes later; it says what was learned and what to do next.

Question: {question}
Answer: {answer}
{steps}

Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object \
with {count} texts:
{"thoughts": ["thought", ...]}
"""


def template_calls(question):
    """The calls of the standard pattern along the question's path."""
    nodes = [head for head, _, _ in question.evidences]
    calls = [Call("entity_matcher", nodes[0], question.type, question.question)]
    return calls + [Call("node_info", node, question.type, question.question) for node in nodes]


def thoughts_by_template(seed):
    """A writer that makes a thought for every turn of the world's phrases."""
    def write(question, calls, shown):
        rng = random.Random(stable_seed(seed, "thoughts", question.id))
        path = question.evidences
        said = [rng.choice(phrases.STARTS).format(subject=path[0][0])]
        found = ""
        for head, relation, tail in path:
            plan = rng.choice(phrases.PLANS).format(relation=relation, subject=head)
            said.append(phrases.planned(rng, found, plan))
            found = rng.choice(phrases.FOUND).format(relation=relation, found=tail)
        said[0] = phrases.planned(rng, said[0])
        said.append(phrases.planned(rng, found, rng.choice(phrases.ENDS)))
        return said

    return write


def thoughts_by_teacher(teacher, answers):
    """A writer that asks a language model (the paper does not print its prompt: ours is above); answers
    keeps what it said, so that nothing is asked for twice."""
    def write(question, calls, shown):
        steps = []
        for number, (call, text) in enumerate(zip(calls, shown, strict=True), 1):
            steps.append(f"{number}. {call.tool}({call.node_name!r})\n{text}")
        prompt = filled(
            THOUGHTS,
            question=question.question,
            answer=question.answers[0],
            steps="\n".join(steps),
            count=str(len(calls) + 1),
        )
        try:
            row = answers.of(str(stable_seed(prompt)), lambda: {"text": teacher.ask(prompt)})
            value = read_object(row["text"])
        except BadAnswer:
            return None
        found = value.get("thoughts")
        if not isinstance(found, list) or len(found) != len(calls) + 1:
            return None
        found = [chat.no_tags(str(thought)).strip() for thought in found]
        return found if all(found) else None

    return write
