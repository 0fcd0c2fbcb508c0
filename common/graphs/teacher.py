"""Teachers: who writes a path through a knowledge graph and a question about it (Omne-R1, section 2).

    Template(wording, weigh, facts)    a random walk, and a question of its relation labels: no model
    ChatTeacher(url, model)            a model behind an OpenAI-compatible address, with appendix C's prompts

Both have
    teacher.draft(graph, item, attempt, previous, answers) -> Draft
    teacher.judge(draft, item, attempt, answers) -> (valid, reason)
    teacher.cancel(), which ends waiting
and raise BadAnswer where nothing usable comes. `answers`, a files.Keyed, keeps what a model said.
"""

import random
from dataclasses import dataclass

from common import kg
from common.graphs import kg_paths
from common.http_client import RETRIES
from common.rollout import stable_seed
from common.serve.chat_client import NEVER_READ, SHOWN, UNREADABLE, BadAnswer, Chat, read_object

MAX_QUESTION = 4000         # characters
MAX_PATH = 50               # nodes read; how many are right is kg_paths.KINDS
BAD_LIMIT = 300             # unreadable answers in a row: the teacher is not one (ours)
MAX_RELATIONS = 2000        # lines of a prompt, nearest the seed first (ours)
PERSONS = ("person", "human")


@dataclass(frozen=True)
class Item:
    """A piece of work: one question of one kind, from one seed node."""
    id: str              # "cs-12-7"
    graph_type: str
    kind: str            # of kg_paths.KINDS
    seed_node: str
    round: int           # how often the seed node had its turn before


@dataclass
class Draft:
    path: list[str]
    question: str
    answer: str
    relations: list[str] | None = None   # a label a step, where the teacher knows which edges it went


@dataclass
class Previous:
    """A draft that was turned down, for the next attempt to learn from."""
    draft: Draft
    path_valid: bool
    feedback: str


class Patience:
    """Counts answers that cannot be read: how many in a row (`bad`), and whether one ever could (`read`)."""

    def __init__(self, limit=BAD_LIMIT, read=False):
        self.limit = limit
        self.read = read
        self.bad = 0

    def ends(self, readable):
        """Whether this answer was one too many."""
        self.read |= readable
        self.bad = 0 if readable else self.bad + 1
        return self.bad >= self.limit or not self.read and self.bad >= NEVER_READ


# ---------------------------------------------------------------- without a model

def question_of_labels(graph, path, relations):
    """"Who is" where the last node is a person, else "What is", "the mother of the director of Pale Tower?"
    """
    kind = graph.graph.nodes[path[-1]].get("kind", "")
    asked = "Who" if kind.lower() in PERSONS else "What"
    words = [f"the {relation} of" for relation in reversed(relations)]
    return f"{asked} is {' '.join(words)} {path[0]}?"


class Template:
    """Walks at random along graph.facts from the seed node, no node twice; the walk's end is the answer.

    wording(graph, path, relations) -> question. weigh(relation) -> how likely an edge is to be taken, among
    those of its node (0: never); where all of them together weigh less than 1, the walk may end instead.
    facts(graph, name) -> the edges that may be taken, in place of graph.facts."""
    name = "template"
    concurrency = 1

    def __init__(self, wording=question_of_labels, weigh=None, facts=kg.KnowledgeGraph.facts):
        self.wording = wording
        self.weigh = weigh
        self.facts = facts

    def draft(self, graph, item, attempt, previous=None, answers=None):
        drawn = stable_seed(kg_paths.SEED, item.graph_type, item.kind, item.seed_node, item.round, attempt)
        rng = random.Random(drawn)
        path, relations = self.walk(graph, item.seed_node, rng.randint(*kg_paths.KINDS[item.kind]), rng)
        question = self.wording(graph, path, relations) if relations else ""
        return Draft(path, question, path[-1], relations)

    def walk(self, graph, start, nodes, rng):
        """(path, its relations): `nodes` nodes, or fewer where the walk ends before."""
        path = [start]
        relations = []
        while len(path) < nodes:
            facts = [fact for fact in self.facts(graph, path[-1]) if fact[2] not in path]
            weights = [1] * len(facts)
            if self.weigh:
                weights = [self.weigh(relation) for _, relation, _ in facts]
            if not any(weights) or self.weigh and rng.random() >= sum(weights):
                break
            _, relation, tail = rng.choices(facts, weights)[0]
            path.append(tail)
            relations.append(relation)
        return path, relations

    def judge(self, draft, item, attempt, answers=None):
        return True, ""

    def cancel(self):
        pass


# ---------------------------------------------------------------- prompts (appendix C)
# The lines that the print broke are joined. The print cuts off the end of three lines: "entities are" and
# "meet the following" stay as they stand, the last line of the 3+-hop prompt is that of the other, with
# the four nodes of which the print has pieces.

TASK = {
    "12": """\
The above is a knowledge graph where the relation between the entities are
Your need to determine a path in the knowledge graph first, and the path should be suitable for generating \
a one-hop or two-hop question.
The suitable path should be:
The language of the one/two hop question will be natural.
The answer will be unique, only one node in the knowledge graph corresponds to the correct answer.
The length of the path is 2 or 3, which corresponds to one-hop and two-hop questions.
Then you need to generate a one/two hop question from the path. You should not reveal the answer node name \
but need to provide the starting node name(s) for the answerer to start with. Use natural language to \
describe the relation between the nodes.
Here are some two-hop question types as hint:
1. Inferring the bridge entity to complete the 2nd-hop question
Which team does the player named 2015 Diamond Head Classic's MVP play for?
2. Locating the answer entity by checking multiple properties
Which former member of the Pittsburgh Pirates was nicknamed "The Cobra"?
3. Inferring about the property of an entity in question through a bridge entity
What city is the Marine Air Control Group 28 located in?
""",
    "3": """\
Given the knowledge graph above, identify one path that is suitable for generating a multi-hop question. \
A suitable path should meet the following
The resulting question should be natural and fluent in language (not awkward or difficult to read).
The answer should be unique and unambiguous.
The path length should be at least 4.
Once such a path is selected, generate a multi-hop question based on it.
The question must follow these constraints:
Only the name of the start node or end node in the path may be explicitly mentioned. The names of the \
intermediate nodes must not be revealed, as doing so would reduce the difficulty of the question.
The relationships between each pair of connected nodes should be described using natural language.
Formulate one comprehensive multi-hop question, rather than multiple smaller sub-questions.
""",
}

FORM = {
    "12": """\
Output in English.
Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object:
{"path": [node_name1, node_name2, ...], "question": "question", "answer": the answer node name}
""",
    "3": """\
Output in English.
Output in JSON format only, do not add markdown code delimiter or anything else, only a valid json object:
{"path": [node_name1, node_name2, node_name3, node_name4, ...], "question": "question", "answer": the \
answer node name}
""",
}

JUDGE_TASK = """\
You will see a path from knowledge graph and a corresponding multi-hop question. Your task is to check if \
the question satisfies all the following requirements:
The question contains the name of the node explicitly so that the answerer knows where to search from in \
the knowledge graph.
The question only reveals the name of node to start from, but hide the name of the other nodes in the path.
The question is a multi-hop question.
If the question satisfies all the requirements, the question is valid, otherwise it is invalid.
Here is the real data:
"""

JUDGE_FORM = """\
Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object:
{"valid": true or false, "reason": "your reason"}
"""


def generation_prompt(graph, item, previous=None):
    """The prompt for a path, a question and an answer; previous: what was wrong with the last."""
    prompt = "Relations(entity_1 - entity_2: the relation):\n"
    prompt += "".join(f"{line}\n" for line in relation_lines(graph, item.seed_node))
    prompt += TASK[item.kind]
    if previous:
        prompt += feedback_lines(previous)
    return prompt + FORM[item.kind]


def relation_lines(graph, seed_node):
    """The edges between the nodes of the seed's ball, nearest first, none twice, as tools print names."""
    around = kg_paths.ball(graph, seed_node)
    lines = {}
    for node in around:
        outward = graph.graph.out_edges(node, data="relation")
        inward = graph.graph.in_edges(node, data="relation")
        for head, tail, relation in [*outward, *inward]:
            if head in around and tail in around:
                lines[kg.one_line(f"{head} - {tail}: {relation}")] = None
    return list(lines)[:MAX_RELATIONS]


def feedback_lines(previous):
    """What the appendix prints in gray."""
    draft = previous.draft
    return (
        "These are the path and questions generated before but they are not good enough.\n"
        f"previous path: {draft.path}\n"
        f"previous question: {draft.question}\n"
        "This is the feedback\n"
        f"path validity: {previous.path_valid}\n"
        f"question feedback: {previous.feedback}\n"
        "You need to provide a better question and/or path and fix the previous issues.\n"
    )


def judge_prompt(draft):
    data = f"Path: {draft.path}\nMulti-hop question: {draft.question}\n"
    return JUDGE_TASK + data + JUDGE_FORM


# ---------------------------------------------------------------- a model's words

def read_draft(text):
    """Raises BadAnswer."""
    value = read_object(text)
    path = value.get("path")
    fine = isinstance(path, list) and 0 < len(path) <= MAX_PATH
    words = [*path, value.get("question"), value.get("answer")] if fine else [None]
    for word in words:
        fine = fine and isinstance(word, str) and 0 < len(word.strip()) <= MAX_QUESTION
    if not fine:
        raise BadAnswer(UNREADABLE, f"not a path, a question and an answer: {text[:SHOWN]}")
    *path, question, answer = [kg.one_line(word) for word in words]
    return Draft(path, question, answer)


def read_verdict(text):
    """(valid, reason). Raises BadAnswer."""
    value = read_object(text)
    reason = value.get("reason", "")
    if not isinstance(value.get("valid"), bool) or not isinstance(reason, str):
        raise BadAnswer(UNREADABLE, f"not a verdict: {text[:SHOWN]}")
    return value["valid"], kg.one_line(reason)[:MAX_QUESTION]


# ---------------------------------------------------------------- a model behind an address

class ChatTeacher(Chat):
    """url: an OpenAI-compatible service, up to and with "/v1"; model: the name that it knows it by."""

    def __init__(self, url, model, retries=RETRIES):
        super().__init__(url, model, "--teacher", "teacher", retries)
        self.name = model

    def draft(self, graph, item, attempt, previous, answers):
        prompt = generation_prompt(graph, item, previous)
        row = answers.of(f"{item.id}/{attempt}", lambda: {"text": self.ask(prompt)})
        draft = read_draft(row["text"])
        draft.path = [graph.named(name) or name for name in draft.path]
        draft.answer = graph.named(draft.answer) or draft.answer
        return draft

    def judge(self, draft, item, attempt, answers):
        prompt = judge_prompt(draft)
        row = answers.of(f"{item.id}/{attempt}/judge", lambda: {"text": self.ask(prompt)})
        return read_verdict(row["text"])
