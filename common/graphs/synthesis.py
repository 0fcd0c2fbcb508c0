"""Questions with gold paths, made from knowledge graphs (Omne-R1, section 2).

    graphs = kg.load_graphs("cs=FILE,legal=FOLDER")
    rows = synthesize(graphs, "questions/", Template(), count=500)
    rows = synthesize(graphs, "questions/", ChatTeacher("http://127.0.0.1:8000/v1", "deepseek-r1"), count=500)

A seed node, a draft of the teacher (a path from its surroundings, a question, an answer), the checks of
kg_paths.py, the teacher's judgement; a draft that fails goes back with what was wrong. The folder has

    questions.jsonl   {"id", "graph_type", "question", "golden_answer", "path", "relations", "hops", "kind",
                      "seed_node", "ambiguous"}, relations[i] from path[i] to path[i + 1]
    rejected.jsonl    {"id", "graph_type", "kind", "rule", "path", "question", "answer", "reason"}, a row an
                      attempt: the text of what could not be read stands in its reason
    answers.jsonl     what a model said, on file as soon as it said it: it is never asked for twice
    questions.md      the paper's table 1, and the rejections by rule
    settings.json     what the folder was made with

and can be gone on with after any interruption, with the same outcome: the order of the work depends on the
seed alone, and is kept by what is written.
"""

import random
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.files import Keyed, Progress, RunError, say, warn, write_atomic
from common.graphs import kg_paths
from common.graphs.kg_paths import KINDS, LARGEST, OF_THE_PATH, SMALLEST
from common.graphs.kg_paths import seeds as seeds
from common.graphs.kg_paths import split_seeds as split_seeds
from common.graphs.synthesis_files import TITLES, Ledger, mark_of, markdown, settle
from common.graphs.teacher import BAD_LIMIT, Draft, Item, Previous
from common.kg_lightrag import GraphError
from common.rollout import stable_seed
from common.serve.chat_client import BadAnswer

ATTEMPTS = 3      # at a question, each with what was wrong with the last (ours)
ROUNDS = 10       # turns that a seed node has at most (ours)
WAITING = 4       # items in work or waiting for an earlier one, a thread
JUDGED = "judge says no"


# ---------------------------------------------------------------- one question

@dataclass
class Tried:
    """A draft and what became of it; rule is empty where it is a question."""
    draft: Draft
    rule: str = ""
    reason: str = ""
    ambiguous: bool = False


def attempt_all(graph, teacher, item, answers, attempts=ATTEMPTS, unique=True):
    """[Tried] of an item, up to the first that holds."""
    tried = []
    previous = None
    for attempt in range(1, attempts + 1):
        tried.append(attempt_one(graph, teacher, item, attempt, previous, answers, unique))
        last = tried[-1]
        if not last.rule:
            break
        if last.draft.path:
            previous = Previous(last.draft, last.rule not in OF_THE_PATH, last.reason)
    return tried


def attempt_one(graph, teacher, item, attempt, previous, answers, unique):
    """A draft, checked and judged."""
    try:
        draft = teacher.draft(graph, item, attempt, previous, answers)
    except BadAnswer as bad:
        return Tried(Draft([], "", ""), bad.rule, bad.reason)
    draft.question = " ".join(draft.question.split())
    found = kg_paths.fault(graph, item.kind, draft.path, draft.question, draft.answer)
    if found:
        return Tried(draft, *found)
    if draft.relations is None:
        draft.relations = kg_paths.relations_along(graph, draft.path)
    others = kg_paths.other_answers(graph, draft.path, draft.relations, draft.answer)
    if others and unique:
        reason = f"The answer is not unique: '{others[0]}' is reached by the same relations."
        return Tried(draft, kg_paths.AMBIGUOUS, reason, True)
    try:
        valid, reason = teacher.judge(draft, item, attempt, answers)
    except BadAnswer as bad:
        return Tried(draft, bad.rule, f"judge: {bad.reason}", bool(others))
    if not valid:
        return Tried(draft, JUDGED, reason, bool(others))
    return Tried(draft, ambiguous=bool(others))


# ---------------------------------------------------------------- all of them

def synthesize(graphs, folder, teacher, count, seed=0, kinds=tuple(KINDS), attempts=ATTEMPTS, rounds=ROUNDS,
               unique=True, only=None, smallest=SMALLEST, largest=LARGEST, bad_limit=BAD_LIMIT,
               progress=Progress):
    """The rows of questions.jsonl: `count` a graph and kind, or as many as all seed nodes give in `rounds`;
    a folder that had more keeps them.

    graphs: {graph_type: KnowledgeGraph}. only: {graph_type: names} of the seed nodes that may be used, of
    split_seeds for one. unique: a question with another answer by the same relations is rejected, not only
    marked. What is missing is a warning; no question at all, or a folder made otherwise, is RunError, a graph
    without seed nodes among others a warning, alone GraphError."""
    folder = Path(folder)
    starts = starts_of(graphs, only, smallest, largest)
    marks = {graph_type: mark_of(graphs[graph_type], names) for graph_type, names in starts.items()}
    make_folder(folder)
    settle(folder, {"teacher": teacher.name, "seed": seed, "unique": unique}, marks)
    ledger = Ledger(folder, attempts, bad_limit)
    answers = Keyed(folder / "answers.jsonl")
    work = Work(graphs, teacher, ledger, answers, attempts, unique)
    pairs = [(graph_type, kind) for graph_type in starts for kind in kinds]
    try:
        with progress("questions") as bar:
            work.meter = Meter(bar, count * len(pairs), ledger)
            for graph_type, kind in pairs:
                items = items_of(graph_type, kind, starts[graph_type], rounds, seed)
                found = work.collect(items, count)
                missing(graph_type, kind, found, count, len(starts[graph_type]), rounds)
    except KeyboardInterrupt:
        warn("interrupted: the answers that are under way are waited for, and kept")
        raise
    finally:
        work.stop()
        ledger.close()
        answers.close()
    write_atomic(folder / "questions.md", markdown(ledger.questions.rows, ledger.rejected.rows))
    if not ledger.questions.rows:
        raise RunError(nothing(ledger.rejected))
    say(f"{folder}: {outcome(ledger.questions.rows, ledger.rejected.rows, unique)}")
    return [row for row in ledger.questions.rows if (row["graph_type"], row["kind"]) in pairs]


def make_folder(folder):
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be made ({error.strerror})") from None


def starts_of(graphs, only, smallest, largest):
    """{graph_type: seed nodes}, without graphs that have none."""
    starts = {}
    for graph_type, graph in graphs.items():
        among = None if only is None else set(only.get(graph_type, ()))
        found = kg_paths.seeds(graph, smallest, largest, among)
        if found:
            starts[graph_type] = found
        else:
            warn(f"{graph_type}: no seed node: none of its {len(graph.graph)} nodes has {smallest} to "
                 f"{largest} nodes within {kg_paths.DEPTH} steps, one of them at that distance"
                 + (", among those that may be used" if only is not None else ""))
    if not starts:
        raise GraphError("no graph has a seed node for questions (section 2 of Omne-R1): "
                         "give a larger graph, or other bounds (--largest-ball)")
    return starts


def items_of(graph_type, kind, names, rounds, seed):
    """Every seed node's turn, round by round, in an order that the seed alone decides."""
    order = list(names)
    random.Random(stable_seed(seed, graph_type, kind, "order")).shuffle(order)
    number = 0
    for turn in range(rounds):
        for name in order:
            yield Item(f"{graph_type}-{kind}-{number}", graph_type, kind, name, turn, seed)
            number += 1


class Work:
    """Items in threads, and what they came to, entered in the order of the items."""

    def __init__(self, graphs, teacher, ledger, answers, attempts, unique):
        self.graphs = graphs
        self.teacher = teacher
        self.ledger = ledger
        self.options = (answers, attempts, unique)
        self.pool = ThreadPoolExecutor(teacher.concurrency)
        teacher.begin()
        self.meter = None

    def collect(self, items, count):
        """How many questions these items gave, at most count: no more are in work than are missing, so that
        no answer is asked for in vain."""
        window = deque()
        found = 0
        while found < count:
            while len(window) < min(count - found, WAITING * self.teacher.concurrency):
                item = next(items, None)
                if item is None:
                    break
                window.append((item, self._begin(item)))
            if not window:
                break
            item, tried = window.popleft()
            if tried is not None:
                self.ledger.enter(item, tried.result())
            found += item.id in self.ledger.kept
            self.meter(item.id in self.ledger.kept)
        return found

    def _begin(self, item):
        """What an item will come to; None where that is on file."""
        if self.ledger.finished(item):
            return None
        return self.pool.submit(attempt_all, self.graphs[item.graph_type], self.teacher, item, *self.options)

    def stop(self):
        """Nothing new is begun; what was asked for already is waited for, and kept."""
        self.teacher.cancel()
        self.pool.shutdown(wait=True, cancel_futures=True)


class Meter:
    """Questions of all that are wanted, and drafts a second, on a files.Progress."""

    def __init__(self, bar, total, ledger):
        self.bar = bar
        self.total = total
        self.ledger = ledger
        self.done = 0
        self.before = self._drafts()
        self.began = time.monotonic()

    def _drafts(self):
        return len(self.ledger.questions.rows) + len(self.ledger.rejected.rows)

    def __call__(self, kept):
        self.done += kept
        rate = (self._drafts() - self.before) / max(1e-6, time.monotonic() - self.began)
        self.bar.what = f"questions ({rate:.1f} drafts/s)"
        self.bar(self.done, self.total)


def outcome(questions, rejected, unique):
    """The last line: how many questions, and what share of what was fit has several right answers."""
    left_out = sum(row["rule"] == kg_paths.AMBIGUOUS for row in rejected)
    ambiguous = left_out + sum(row["ambiguous"] for row in questions)
    share = ambiguous / (left_out + len(questions))
    fate = "left out (--no-unique keeps them)" if unique else "kept"
    return (f"{len(questions)} questions, {len(rejected)} drafts rejected; {ambiguous} ({share:.0%} of those "
            f"that are fit) lead to another answer as well: {fate}")


def missing(graph_type, kind, found, count, names, rounds):
    """Says how many questions a graph did not give."""
    if found < count:
        warn(f"{graph_type}, {TITLES[kind]}: {count - found} of {count} questions are missing: all {names} "
             f"seed nodes had {rounds} turns. rejected.jsonl says why; more rounds or attempts may help")


def nothing(rejected):
    rules = Counter(row["rule"] for row in rejected.rows)
    (rule, times), *_ = rules.most_common(1)
    return (f"no question came of {len(rejected.rows)} drafts, {times} of them: {rule}. "
            f"See {rejected.path}; another teacher, graph or wording is needed")
