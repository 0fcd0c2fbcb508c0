"""Questions with gold paths, made from knowledge graphs: section 2 and appendix C of Omne-R1.

    teacher = Template()                    or Teacher("http://127.0.0.1:8000/v1", "deepseek-r1")
    rows = synthesize({"cs": graph}, {"cs": seeds(graph)}, folder, teacher, count=500)

Seed nodes take turns. In each, a teacher drafts a path near the node, a question and its answer; `check`
looks at them, and the teacher judges what is left. A draft that fails goes back with what was wrong.
docs/data.md has the files of the folder. The order of the work is always the same, and no answer that is on
file is asked for again: the same command goes on with an interrupted synthesis, to the same rows.

A path is a list of names. An edge joins two nodes from either end, as the tools show it; where a directed
graph's edge is gone against its direction, its label is "inverse of …".
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from functools import partial

import networkx

from common import kg
from common.files import Keyed, Progress, RunError, say, warn, write_jsonl
from common.http_client import Threads
from common.rollout import stable_seed
from common.serve.chat_client import SHOWN, UNREADABLE, BadAnswer, Chat, read_object

DEPTH = 3               # of the subgraph around a seed node
SMALLEST = 20           # nodes of a subgraph
LARGEST = 400           # nodes of a subgraph
TEST_SHARE = .1         # of the seed nodes (ours)
KINDS = {"12": (2, 3), "3": (4, 6)}  # nodes of a path: 1/2-hop; 3+-hop ("at least 4": that 6 is most is ours)
ATTEMPTS = 3            # drafts in a turn (ours)
ROUNDS = 10             # turns that a seed node has at most (ours)
MAX_RELATIONS = 2000    # lines of a prompt, nearest the seed node first (ours)
INVERSE = "inverse of "
AMBIGUOUS = "another node reached"


@dataclass(frozen=True)
class Item:
    """One question to be made: of a kind, from a seed node's turn."""
    id: str              # "cs-12-7"
    graph_type: str
    kind: str            # of KINDS
    seed_node: str
    round: int           # how many turns the seed node had before


@dataclass
class Draft:
    """What a teacher drafted. rule and reason say why it is no question; of a question the rule is empty."""
    path: list
    question: str
    answer: str
    relations: list | None = None   # a label per step; None: the teacher does not know which edges it took
    rule: str = ""
    reason: str = ""
    path_valid: bool = False
    ambiguous: bool = False         # the same labels lead from the start to another node, too


# ---------------------------------------------------------------- seed nodes

def seeds(graph, largest=LARGEST, side=""):
    """The nodes, in the graph's order, from which paths may start: within three steps lie 20 to `largest`
    nodes, the start among them, and one at least is three steps away. Edges are gone either way. side: those
    for "train" or for "test", by a hash of the name alone, whatever else is in the graph; empty = all."""
    around = networkx.Graph(graph.graph)
    found = []
    for node in around:
        others = networkx.bfs_edges(around, node, depth_limit=DEPTH)  # an edge per node; lazy, for hubs
        size = 1 + sum(1 for _ in itertools.islice(others, largest))
        if SMALLEST <= size <= largest and max(subgraph(around, node).values()) == DEPTH:
            in_test = stable_seed(0, "test", node) / 2 ** 63 < TEST_SHARE   # the seed's range is 0 to 2 ** 63
            if not side or in_test == (side == "test"):
                found.append(node)
    return found


def subgraph(around, node):
    """{node: steps from this one}, nearest first."""
    return networkx.single_source_shortest_path_length(around, node, cutoff=DEPTH)


# ---------------------------------------------------------------- paths

def steps(graph, node):
    """[(relation, node it leads to)], in a directed graph also against its edges."""
    found = [(relation, tail) for _, relation, tail in graph.facts(node)]
    if graph.graph.graph.get("directed", True):
        for head, _, relation in graph.graph.in_edges(node, data="relation"):
            found.append((INVERSE + relation, head))
    return found


def relations_along(graph, path):
    """The label of each step, of parallel edges the first; None for a step that no edge makes."""
    labels = []
    for here, there in itertools.pairwise(path):
        found = [relation for relation, other in steps(graph, here) if other == there]
        labels.append(found[0] if found else None)
    return labels


def reached(graph, start, relations):
    """The nodes at the end of this sequence of labels. The start is none of them: a question names it."""
    here = {start}
    for label in relations:
        following = set()
        for node in here:
            following |= {other for relation, other in steps(graph, node) if relation == label}
        here = following
    return here - {start}


# ---------------------------------------------------------------- checks: BadAnswer of the first broken rule

def check(draft, graph, kind, unique):
    """unique: another answer by the same relations is a reason against a draft, and not only marked. Fills in
    what is left open of its path."""
    check_path(graph, kind, draft.path, draft.answer)
    draft.path_valid = True
    check_names(draft.path, draft.question, draft.answer)
    if draft.relations is None:
        draft.relations = relations_along(graph, draft.path)
    to_answer = draft.relations[:draft.path.index(draft.answer)]
    others = sorted(reached(graph, draft.path[0], to_answer) - {draft.answer})
    draft.ambiguous = bool(others)
    if others and unique:
        raise BadAnswer(
            AMBIGUOUS, f"The answer is not unique: '{others[0]}' is reached by the same relations.")


def check_path(graph, kind, path, answer):
    """A path is valid if it is a connected one of the graph, contains the answer, and has the kind's length.
    """
    for place, node in enumerate(path):
        if node not in graph:
            raise BadAnswer("node not in the graph", f"The graph has no node '{node}'.")
        if node in path[:place]:
            raise BadAnswer("node twice in the path", f"The path has the node '{node}' twice.")
    labels = relations_along(graph, path)
    if None in labels:
        here = labels.index(None)
        raise BadAnswer(
            "path not connected", f"No edge of the graph joins '{path[here]}' and '{path[here + 1]}'.")
    if answer not in path:
        raise BadAnswer("answer not in the path", f"The answer '{answer}' is not a node of the path.")
    fewest, most = KINDS[kind]
    if not fewest <= len(path) <= most:
        rule = "path too short" if len(path) < fewest else "path too long"
        raise BadAnswer(rule, f"The path has {len(path)} nodes; it should have {fewest} to {most}.")


def check_names(path, question, answer):
    """A question names the start and no other node of the path."""
    if not kg.is_named(path[0], question):
        raise BadAnswer("start node not named", (
            f"The question does not name the starting node '{path[0]}', "
            "so the answerer does not know where to search from."))
    for node in path[1:]:
        if node != answer and kg.is_named(node, question):
            raise BadAnswer("inner node named", (
                f"The question reveals the name of a middle node '{node}' in the path, "
                "which should be hidden according to the requirements."))
    if kg.is_named(answer, question):
        raise BadAnswer("answer named", (
            f"The question reveals the name of the answer node '{answer}', which should be hidden."))


# ---------------------------------------------------------------- a teacher without a model

def question_of_labels(graph, path, relations):
    """"Who is" where the last node is a person, else "What is", "the mother of the director of Pale Tower?"
    """
    kind = graph.graph.nodes[path[-1]].get("kind", "")
    asked = "Who" if kind.lower() in ("person", "human") else "What"
    words = [f"the {relation} of" for relation in reversed(relations)]
    return f"{asked} is {' '.join(words)} {path[0]}?"


class Template:
    """Walks at random along graph.facts from the seed node, no node twice; the walk's end is the answer.

    wording(graph, path, relations) -> question. weigh(relation) -> how likely an edge is to be taken, among
    those of its node (0: never); where all of them together weigh less than 1, the walk may end instead.
    facts(graph, name) -> the edges that may be taken, in place of graph.facts."""
    concurrency = 1     # items in work at a time

    def __init__(self, wording=question_of_labels, weigh=None, facts=kg.KnowledgeGraph.facts):
        self.wording = wording
        self.weigh = weigh
        self.facts = facts

    def draft(self, graph, item, attempt, previous=None):
        seed = stable_seed(0, item.graph_type, item.kind, item.seed_node, item.round, attempt)
        rng = random.Random(seed)
        path, relations = self.walk(graph, item.seed_node, rng.randint(*KINDS[item.kind]), rng)
        question = ""
        if relations:
            question = " ".join(self.wording(graph, path, relations).split())
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

    def judge(self, draft, item, attempt):
        """Nothing is left to be judged."""


# ---------------------------------------------------------------- a teacher with one (appendix C)
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
JUDGE = """\
You will see a path from knowledge graph and a corresponding multi-hop question. Your task is to check if \
the question satisfies all the following requirements:
The question contains the name of the node explicitly so that the answerer knows where to search from in \
the knowledge graph.
The question only reveals the name of node to start from, but hide the name of the other nodes in the path.
The question is a multi-hop question.
If the question satisfies all the requirements, the question is valid, otherwise it is invalid.
Here is the real data:
Path: %s
Multi-hop question: %s
Output in JSON format only, don't add markdown code delimiter or anything else, only a valid json object:
{"valid": true or false, "reason": "your reason"}
"""


def generation_prompt(graph, item, previous=None):
    """previous: the last draft, and what was wrong with it, which the appendix prints in gray."""
    prompt = "Relations(entity_1 - entity_2: the relation):\n"
    prompt += "".join(f"{line}\n" for line in relation_lines(graph, item.seed_node))
    prompt += TASK[item.kind]
    if previous:
        prompt += (
            "These are the path and questions generated before but they are not good enough.\n"
            f"previous path: {previous.path}\n"
            f"previous question: {previous.question}\n"
            "This is the feedback\n"
            f"path validity: {previous.path_valid}\n"
            f"question feedback: {previous.reason}\n"
            "You need to provide a better question and/or path and fix the previous issues.\n"
        )
    return prompt + FORM[item.kind]


def relation_lines(graph, seed_node):
    """The edges between the nodes of the seed node's subgraph, nearest first, none twice, as tools print
    names."""
    near = subgraph(networkx.Graph(graph.graph), seed_node)
    lines = {}
    for node in near:
        outward = graph.graph.out_edges(node, data="relation")
        inward = graph.graph.in_edges(node, data="relation")
        for head, tail, relation in [*outward, *inward]:
            if head in near and tail in near:
                lines[kg.one_line(f"{head} - {tail}: {relation}")] = None
    return list(lines)[:MAX_RELATIONS]


def read_draft(text):
    """Raises BadAnswer."""
    value = read_object(text)
    path, question, answer = value.get("path"), value.get("question"), value.get("answer")
    texts = [*path, question, answer] if isinstance(path, list) and path else [None]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadAnswer(UNREADABLE, f"not a path, a question and an answer: {text[:SHOWN]}")
    return Draft(list(map(kg.one_line, path)), kg.one_line(question), kg.one_line(answer))


def read_verdict(text):
    """(valid, reason). Raises BadAnswer."""
    value = read_object(text)
    reason = value.get("reason", "")
    if not isinstance(value.get("valid"), bool) or not isinstance(reason, str):
        raise BadAnswer(UNREADABLE, f"not a verdict: {text[:SHOWN]}")
    return value["valid"], kg.one_line(reason)


class Teacher(Chat):
    """A model behind an OpenAI-compatible address."""
    answers = None      # files.Keyed of what it said, of the folder that synthesize fills

    def __init__(self, url, model):
        super().__init__(url, model, "--teacher")

    def draft(self, graph, item, attempt, previous):
        prompt = generation_prompt(graph, item, previous)
        draft = self.asked(self.answers, f"{item.id}/{attempt}", prompt, read_draft)
        draft.path = [graph.named(name) or name for name in draft.path]
        draft.answer = graph.named(draft.answer) or draft.answer
        return draft

    def judge(self, draft, item, attempt):
        prompt = JUDGE % (draft.path, draft.question)
        valid, reason = self.asked(self.answers, f"{item.id}/{attempt}/judge", prompt, read_verdict)
        if not valid:
            raise BadAnswer("judge says no", reason)


# ---------------------------------------------------------------- all of them

def drafts_of(item, graph, teacher, unique):
    """[Draft] of an item, up to the first that is a question."""
    drafts = []
    previous = None
    for attempt in range(1, ATTEMPTS + 1):
        draft = Draft([], "", "")
        try:
            draft = teacher.draft(graph, item, attempt, previous)
            check(draft, graph, item.kind, unique)
            teacher.judge(draft, item, attempt)
        except BadAnswer as bad:
            draft.rule, draft.reason = bad.rule, bad.reason
        drafts.append(draft)
        if not draft.rule:
            break
        if draft.path:
            previous = draft
    return drafts


def synthesize(graphs, starts, folder, teacher, count, unique=True):
    """The rows of questions.jsonl: `count` per graph and kind, or as many as the seed nodes give in ROUNDS
    turns.

    graphs: {graph_type: KnowledgeGraph}. starts: {graph_type: its seed nodes}. unique: see `check`. What is
    missing is a warning, no question at all RunError; a graph without seed nodes is a warning among others,
    and GraphError alone."""
    if not any(starts.values()):
        raise kg.GraphError("no graph has a seed node for questions (section 2 of Omne-R1): "
                            "give a larger graph, or other bounds (--largest-ball)")
    folder.mkdir(parents=True, exist_ok=True)
    questions, rejected = {}, []
    teacher.answers = Keyed(folder / "answers.jsonl")
    threads = Threads(teacher.concurrency)
    total = count * len(KINDS) * sum(map(bool, starts.values()))
    try:
        with Progress("questions") as progress:
            for graph_type, kind in itertools.product(graphs, KINDS):
                work = partial(drafts_of, graph=graphs[graph_type], teacher=teacher, unique=unique)
                items = items_of(graph_type, kind, starts[graph_type])
                missing = count
                while missing:
                    # no more are in work than are missing, so that nothing is asked for in vain
                    part = list(itertools.islice(items, min(missing, 4 * teacher.concurrency)))
                    if not part:
                        warn(f"{graph_type}, kind {kind}: {missing} of {count} questions are missing: all "
                             f"{len(starts[graph_type])} seed nodes had {ROUNDS} turns. "
                             "rejected.jsonl says why; another --teacher or --largest-ball may help")
                        break
                    for item, drafts in zip(part, threads.map(work, part), strict=True):
                        missing -= enter(item, drafts, questions, rejected)
                        progress(len(questions), total)
    finally:
        threads.close()
        teacher.answers.close()
        write_jsonl(folder / "questions.jsonl", questions.values())
        write_jsonl(folder / "rejected.jsonl", rejected)
    tell(folder, questions.values(), rejected, unique)
    return list(questions.values())


def items_of(graph_type, kind, names):
    """Every seed node's turn, round by round, in an order that is always the same."""
    order = list(names)
    random.Random(stable_seed(0, graph_type, kind, "order")).shuffle(order)
    for number, (turn, name) in enumerate(itertools.product(range(ROUNDS), order)):
        yield Item(f"{graph_type}-{kind}-{number}", graph_type, kind, name, turn)


def enter(item, drafts, questions, rejected):
    """Makes rows of an item's drafts; whether it became a question. questions: {(question, answer): row},
    since none is made twice (sec. 2)."""
    *_, last = drafts
    if not last.rule and (last.question, last.answer) in questions:
        last.rule, last.reason = "duplicate", "The question and its answer are there already."
    for draft in drafts:
        row = {
            "id": item.id, "graph_type": item.graph_type, "kind": item.kind, "path": draft.path,
            "question": draft.question}
        if draft.rule:
            rejected.append(row | {"answer": draft.answer, "rule": draft.rule, "reason": draft.reason})
        else:
            questions[draft.question, draft.answer] = row | {
                "golden_answer": draft.answer, "relations": draft.relations, "hops": len(draft.path) - 1,
                "seed_node": item.seed_node, "ambiguous": draft.ambiguous}
    return not last.rule


def tell(folder, questions, rejected, unique):
    """How many questions there are, why not more, and what share of what was fit has several answers."""
    rules = Counter(row["rule"] for row in rejected)
    why = ", ".join(f"{times} {rule}" for rule, times in rules.most_common()) or "none"
    if not questions:
        raise RunError(f"no question; rejected drafts: {why}. See {folder / 'rejected.jsonl'}; another "
                       "teacher, graph or wording is needed")
    fit = rules[AMBIGUOUS] + len(questions)
    ambiguous = rules[AMBIGUOUS] + sum(row["ambiguous"] for row in questions)
    fate = "left out (--no-unique keeps them)" if unique else "kept"
    say(f"{folder}: {len(questions)} questions; rejected drafts: {why}; {ambiguous} ({ambiguous / fit:.0%} "
        f"of those that are fit) lead to another answer as well: {fate}")
