"""The folder of synthesis.py: what a teacher said, which questions were kept, what was rejected and why.

Every file but two only grows, a line at a time, and is whole after a kill at any point; settings.json and
questions.md are replaced whole.
"""

import hashlib
import json
from collections import Counter

from common.files import Lines, RunError, read_json, write_json
from common.graphs.teacher import Patience
from common.serve.chat_client import NO_ANSWER, UNREADABLE

TITLES = {"12": "1/2 hop", "3": "3+ hop"}
DUPLICATE = "duplicate"
NOT_READ = (UNREADABLE, NO_ANSWER)


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
            "id": item.id,
            "graph_type": item.graph_type,
            "question": draft.question,
            "golden_answer": draft.answer,
            "path": draft.path,
            "relations": draft.relations,
            "hops": len(draft.path) - 1,
            "kind": item.kind,
            "seed_node": item.seed_node,
            "ambiguous": tried.ambiguous,
        })
        self.kept.add(item.id)
        self.seen.add((draft.question, draft.answer))
        self.patience.ends(readable=True)

    def close(self):
        self.questions.close()
        self.rejected.close()


# ---------------------------------------------------------------- settings.json

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


# ---------------------------------------------------------------- questions.md

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
