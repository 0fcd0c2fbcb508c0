"""Questions with gold paths, made from knowledge graphs (Omne-R1, section 2).

    graphs = kg_files.load_graphs("cs=FILE,legal=FOLDER")
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

A killed run goes on there, with the same outcome: the order of the work is always the same. The first three
files only grow, a line at a time.
"""

import hashlib
import itertools
import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from common.files import Keyed, Lines, Progress, RunError, read_json, say, warn, write_atomic, write_json
from common.graphs import kg_paths
from common.graphs.kg_paths import KINDS, LARGEST, OF_THE_PATH, SEED
from common.graphs.teacher import BAD_LIMIT, Draft, Item, Patience, Previous
from common.kg import GraphError
from common.rollout import stable_seed
from common.serve.chat_client import NO_ANSWER, UNREADABLE, BadAnswer

ATTEMPTS = 3      # at a question, each with what was wrong with the last (ours)
ROUNDS = 10       # turns that a seed node has at most (ours)
AT_ONCE = 4       # items that a thread is given at a time
JUDGED = "judge says no"
DUPLICATE = "duplicate"
NOT_READ = (UNREADABLE, NO_ANSWER)
TITLES = {"12": "1/2 hop", "3": "3+ hop"}


# ---------------------------------------------------------------- one question

@dataclass
class Tried:
    """A draft and what became of it; rule is empty where it is a question."""
    draft: Draft
    rule: str = ""
    reason: str = ""
    ambiguous: bool = False


def attempt_all(graph, teacher, item, answers, attempts, unique):
    """[Tried] of an item, up to the first that holds."""
    tried = []
    previous = None
    for attempt in range(1, attempts + 1):
        last = attempt_one(graph, teacher, item, attempt, previous, answers, unique)
        tried.append(last)
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
    return Tried(draft, "" if valid else JUDGED, reason, bool(others))


# ---------------------------------------------------------------- all of them

def synthesize(graphs, folder, teacher, count, kinds=tuple(KINDS), attempts=ATTEMPTS, rounds=ROUNDS,
               unique=True, only=None, largest=LARGEST, bad_limit=BAD_LIMIT):
    """The rows of questions.jsonl: `count` a graph and kind, or as many as all seed nodes give in `rounds`;
    a folder that had more keeps them.

    graphs: {graph_type: KnowledgeGraph}. only: {graph_type: names} of the seed nodes that may be used, of
    split_seeds for one. unique: a question with another answer by the same relations is rejected, not only
    marked. What is missing is a warning; no question at all, or a folder made otherwise, is RunError, a graph
    without seed nodes among others a warning, alone GraphError."""
    folder = Path(folder)
    starts = starts_of(graphs, only, largest)
    marks = {graph_type: mark_of(graphs[graph_type], names) for graph_type, names in starts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    settle(folder, {"teacher": teacher.name, "unique": unique}, marks)
    ledger = Ledger(folder, attempts, bad_limit)
    answers = Keyed(folder / "answers.jsonl")
    pairs = [(graph_type, kind) for graph_type in starts for kind in kinds]
    pool = ThreadPoolExecutor(teacher.concurrency)

    def attempt(item):
        return attempt_all(graphs[item.graph_type], teacher, item, answers, attempts, unique)

    def work(items):
        for item, tried in zip(items, pool.map(attempt, items), strict=True):
            ledger.enter(item, tried)
            bar(len(ledger.questions.rows), count * len(pairs))

    try:
        with Progress("questions") as bar:
            for graph_type, kind in pairs:
                items = items_of(graph_type, kind, starts[graph_type], rounds)
                found = collect(items, count, AT_ONCE * teacher.concurrency, ledger, work)
                missing(graph_type, kind, found, count, len(starts[graph_type]), rounds)
    except BaseException as error:
        teacher.cancel()
        if isinstance(error, KeyboardInterrupt):
            warn("interrupted: the answers that are under way are waited for, and kept")
        raise
    finally:  # nothing new is begun; what was asked for already is waited for, and kept
        pool.shutdown(wait=True, cancel_futures=True)
        ledger.close()
        answers.close()
    write_atomic(folder / "questions.md", markdown(ledger.questions.rows, ledger.rejected.rows))
    if not ledger.questions.rows:
        rules = Counter(row["rule"] for row in ledger.rejected.rows)
        (rule, times), *_ = rules.most_common(1)
        raise RunError(f"no question came of {len(ledger.rejected.rows)} drafts, {times} of them: {rule}. "
                       f"See {ledger.rejected.path}; another teacher, graph or wording is needed")
    say(f"{folder}: {outcome(ledger.questions.rows, ledger.rejected.rows, unique)}")
    return [row for row in ledger.questions.rows if (row["graph_type"], row["kind"]) in pairs]


def starts_of(graphs, only, largest):
    """{graph_type: seed nodes}, without graphs that have none."""
    starts = {}
    for graph_type, graph in graphs.items():
        among = None if only is None else set(only.get(graph_type, ()))
        found = kg_paths.seeds(graph, largest, among)
        if found:
            starts[graph_type] = found
        else:
            warn(f"{graph_type}: no seed node: none of its {len(graph.graph)} nodes has {kg_paths.SMALLEST} "
                 f"to {largest} nodes within {kg_paths.DEPTH} steps, one of them at that distance"
                 + (", among those that may be used" if only is not None else ""))
    if not starts:
        raise GraphError("no graph has a seed node for questions (section 2 of Omne-R1): "
                         "give a larger graph, or other bounds (--largest-ball)")
    return starts


def items_of(graph_type, kind, names, rounds):
    """Every seed node's turn, round by round, in an order that is always the same."""
    order = list(names)
    random.Random(stable_seed(SEED, graph_type, kind, "order")).shuffle(order)
    number = 0
    for turn in range(rounds):
        for name in order:
            yield Item(f"{graph_type}-{kind}-{number}", graph_type, kind, name, turn)
            number += 1


def collect(items, count, at_once, ledger, work):
    """How many questions these items gave, at most count: no more are in work than are missing, so that no
    answer is asked for in vain."""
    found = 0
    while found < count:
        part = list(itertools.islice(items, min(count - found, at_once)))
        if not part:
            break
        work([item for item in part if not ledger.finished(item)])
        found += sum(item.id in ledger.kept for item in part)
    return found


# ---------------------------------------------------------------- the folder

class Ledger:
    """The questions and the rejections of a folder: what is there is not worked on again."""

    def __init__(self, folder, attempts, bad_limit):
        self.questions = Lines(folder / "questions.jsonl")
        self.rejected = Lines(folder / "rejected.jsonl")
        self.attempts = attempts
        known = [row for row in self.rejected.rows if row["rule"] not in NOT_READ]
        self.patience = Patience(bad_limit, read=bool(known or self.questions.rows))
        self.kept = {row["id"] for row in self.questions.rows}
        self.turned_down = {}
        for row in self.rejected.rows:
            self.turned_down.setdefault(row["id"], []).append(row)
        self.seen = {(row["question"], row["golden_answer"]) for row in self.questions.rows}

    def finished(self, item):
        """Whether nothing more can come of an item."""
        rows = self.turned_down.get(item.id, [])
        given_up = len(rows) >= self.attempts
        return item.id in self.kept or given_up or any(r["rule"] == DUPLICATE for r in rows)

    def enter(self, item, tried):
        """Writes what an item came to; the rows of one that was cut short are there already."""
        last = tried[-1]
        if not last.rule and (last.draft.question, last.draft.answer) in self.seen:
            last.rule = DUPLICATE
            last.reason = "The question and its answer are there already."
        on_file = len(self.turned_down.get(item.id, []))
        for one in [one for one in tried if one.rule][on_file:]:
            self._turn_down(item, one)
        if not last.rule:
            self._keep(item, last)

    def _turn_down(self, item, tried):
        draft = tried.draft
        row = {"id": item.id, "graph_type": item.graph_type, "kind": item.kind, "rule": tried.rule,
               "path": draft.path, "question": draft.question, "answer": draft.answer,
               "reason": tried.reason}
        self.rejected.add(row)
        self.turned_down.setdefault(item.id, []).append(row)
        if self.patience.ends(tried.rule not in NOT_READ):
            raise RunError(f"the teacher gave {self.patience.bad} unusable answers in a row, the last: "
                           f"{tried.reason[:200]!r}. See {self.rejected.path}; with a better one the same "
                           "command goes on from here")

    def _keep(self, item, tried):
        draft = tried.draft
        self.questions.add({
            "id": item.id, "graph_type": item.graph_type, "question": draft.question,
            "golden_answer": draft.answer, "path": draft.path, "relations": draft.relations,
            "hops": len(draft.path) - 1, "kind": item.kind, "seed_node": item.seed_node,
            "ambiguous": tried.ambiguous})
        self.kept.add(item.id)
        self.seen.add((draft.question, draft.answer))
        self.patience.ends(readable=True)

    def close(self):
        self.questions.close()
        self.rejected.close()


def settle(folder, settings, graphs):
    """Writes what a folder is made with, or raises RunError where it was made with something else.

    graphs: {graph_type: mark_of(…)}; others may join them later."""
    path = folder / "settings.json"
    before = {**settings, "graphs": {}}
    if path.exists():
        before = read_json(path, dict)
    elif (folder / "questions.jsonl").exists():
        raise RunError(f"{folder} has questions but no settings.json: use another folder")
    known = before.get("graphs", {})
    for name, value in settings.items():
        if before.get(name) != value:
            raise RunError(f"{folder} was made with {name} {before.get(name)!r}, not {value!r}: "
                           "use another folder")
    for name, mark in graphs.items():
        if known.get(name, mark) != mark:
            raise RunError(f"{folder} was made from another graph {name!r}, or from other seed nodes of it: "
                           "use another folder")
    write_json(path, {**settings, "graphs": {**known, **graphs}})


def mark_of(graph, seed_nodes):
    """A hash of the facts and of the seed nodes, whatever their order."""
    digest = hashlib.sha256()
    for fact in sorted(graph.graph.edges(data="relation")):
        digest.update(json.dumps(fact).encode())
    digest.update(json.dumps(sorted(seed_nodes)).encode())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------- what is said of it

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


def markdown(questions, rejected):
    """Table 1 of the paper, the rejections by rule, and what share of the drafts was kept."""
    lines = ["# Questions", ""]
    kept = Counter((row["graph_type"], row["kind"]) for row in questions)
    lines += counts("Graph Type", kept)
    lines += ["", "# Rejected drafts", ""]
    lines += counts("rule", Counter((row["rule"], row["kind"]) for row in rejected))
    lines += ["", "# Yield", "", "| Graph Type | drafts | kept | share | ambiguous |",
              "|---|---:|---:|---:|---:|"]
    names = list(dict.fromkeys(row["graph_type"] for row in questions + rejected))
    for name in [*names, "Total"]:
        ours = [row for row in questions if name in (row["graph_type"], "Total")]
        drafts = len(ours) + sum(name in (row["graph_type"], "Total") for row in rejected)
        ambiguous = sum(row["ambiguous"] for row in ours)
        share = len(ours) / max(1, drafts)
        lines.append(f"| {cell(name)} | {drafts} | {len(ours)} | {share:.3f} | {ambiguous} |")
    lines += ["", "Ambiguous: another node is reached from the start by the same relations.", ""]
    return "\n".join(lines)


def counts(title, cells):
    """A table of {(row, kind): count}, its largest row first, with sums."""
    lines = [f"| {title} | {' | '.join(TITLES.values())} | Total |", "|---|" + "---:|" * (len(TITLES) + 1)]
    sums = Counter()
    for (name, kind), number in cells.items():
        sums[name] += number
        sums["Total", kind] += number
    names = [name for name, _ in sums.most_common() if isinstance(name, str)]
    for name in names:
        row = [cells.get((name, kind), 0) for kind in TITLES]
        lines.append(f"| {cell(name)} | {' | '.join(map(str, row))} | {sums[name]} |")
    totals = [sums["Total", kind] for kind in TITLES]
    lines.append(f"| Total | {' | '.join(map(str, totals))} | {sum(totals)} |")
    return lines


def cell(text):
    return text.replace("|", "\\|")
