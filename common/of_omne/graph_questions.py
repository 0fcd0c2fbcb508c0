"""Questions that are asked of graphs: where they come from (files, a teacher, the embedded world), the tools
that answer for the graphs, and the conversations that stage 2 of Omne-R1 learns from.

    task, evals = load(cfg, folder)    questions that are made are kept in the folder

A question is a data.Question whose `type` is the graph that it is asked of; `evidences` are the edges of its
path, where that is known. On file it is a line of what synthesis.py writes:

    {"id": "cs-1", "graph_type": "cs", "question": "…", "golden_answer": "…", "path": […], "relations": […]}

of which path and relations may be missing.
"""

import math
import random
import re
from dataclasses import replace
from pathlib import Path

from common import data, distributed, flags, splits
from common.files import Lines, Progress, RunError, read_json, read_jsonl, say, write_json, write_jsonl
from common.formats import fingerprint
from common.graphs.kg_tools import LocalTools, make_tools
from common.rollout import stable_seed
from common.warmup import sharegpt

GRAPH_TYPE = r"[\w.-]+"  # it stands in the system prompt
TEST_SHARE = .1  # of the seed nodes, and of as many questions more
TRAINED_DOMAINS = ("film", "music", "literature")  # the world's test has one more


def question_of(row):
    """A row as a data.Question; its path ends at the answer."""
    path = row.get("path", [])
    answer = row["golden_answer"]
    if answer in path:
        path = path[:path.index(answer) + 1]
    edges = zip(path, row.get("relations", []), path[1:], strict=False)
    return data.Question(
        row["id"], row["question"], [answer], type=row["graph_type"],
        hops=row.get("hops") or max(1, len(path) - 1), evidences=[list(edge) for edge in edges])


def fault_of(row, graphs):
    for name in ("id", "graph_type", "question", "golden_answer"):
        if not isinstance(row.get(name), str) or not row[name].strip():
            return f"expected a text in `{name}`"
    for name in ("path", "relations"):
        texts = row.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            return f"expected a list of texts in `{name}`"
    hops = row.get("hops", 1)
    if not isinstance(hops, int) or hops < 1:
        return "expected a number from 1 in `hops`"
    if not re.fullmatch(GRAPH_TYPE, row["graph_type"]):
        return "a graph_type is letters, digits, . - _"
    if graphs is not None and row["graph_type"] not in graphs:
        return f"there is no graph {row['graph_type']}: --graph has {', '.join(graphs)}"
    return ""


def read_questions(file, graphs=None):
    """The questions of a file. graphs: names of those there are; None where nobody knows."""
    found = []
    for number, row in data.read_records(Path(file)):
        row = row if isinstance(row, dict) else {}
        wrong = fault_of(row, graphs)
        if wrong:
            raise data.DataError(f"{file}: line {number}: {wrong}")
        found.append(question_of(row))
    if not found:
        raise data.DataError(f"{file}: no question")
    return found


def has_hops(question, hops):
    """hops: "12" = one or two, "3" = three and more, "mix" = any."""
    return hops == "mix" or (question.hops < 3) == (hops == "12")


def some(questions, count):
    """`count` of them, drawn at random, the same every time, in their order."""
    if len(questions) <= count:
        return questions
    drawn = set(random.Random(0).sample(range(len(questions)), count))
    return [q for i, q in enumerate(questions) if i in drawn]


def fewer(tasks, count):
    """The tasks with `count` questions in all, for a curve."""
    each = max(1, count // len(tasks))
    return [replace(task, questions=some(task.questions, each)) for task in tasks]


def asked(text, graphs):
    """The question of --ask; graphs: names of those there are. TYPE: QUESTION where there are several."""
    known = list(graphs or ["graph"])
    graph_type, _, question = text.partition(": ")
    if graph_type not in known:
        graph_type, question = known[0], text
    return data.Question("ask", question, [""], type=graph_type)


def held_out(question):
    """Whether a question of a file is among the tenth that is evaluated: all that start from one node are on
    one side."""
    start = question.evidences[0][0] if question.evidences else fingerprint(question.question)
    return stable_seed("held out", start) % 10 == 0


def apart(questions, tools, limit=0, seed=0, evaluated=frozenset()):
    """Splits for evaluation: questions with one or two hops and with more, at most limit / 2 each. Their
    retriever is the tools."""
    tasks = []
    each = limit and (limit // 2 or 1)
    for name, hops in (("1-2-hop", "12"), ("3-hop", "3")):
        of = splits.drawn([q for q in questions if has_hops(q, hops)], each, seed)
        if of:
            tasks.append(data.Split(name, of, tools, evaluated=evaluated))
    return tasks


# ---------------------------------------------------------------- where a run's come from

def check(cfg):
    """The cfg; refuses numbers out of range, and graphs, questions and models that do not go together."""
    may_be_zero = "sft_sampled sft_templates sft_lora"
    cfg = flags.check(cfg, may_be_zero, above_zero="lr head_lr sft_lr sft_full_lr temperature grad_clip")
    of_world = cfg.data == "world"
    needs_model = not cfg.score and cfg.stage != "synthesize"
    if needs_model and cfg.policy:
        flags.needs_a_model(cfg)
    asked = cfg.data or cfg.ask or cfg.eval_only and cfg.eval_data
    remote = cfg.graph.startswith(("http://", "https://"))
    for wrong, name, words in (
        (not 0 <= cfg.gamma <= 1, "gamma", "from 0 to 1"),
        (not 0 <= cfg.lam <= 1, "lam", "from 0 to 1"),
        (cfg.collect and cfg.stage == "direct", "collect",
         "is for answers with tools, and not for --stage direct"),
        (cfg.lora and cfg.stage == "sft", "lora", "is for PPO: the adapters of stage 2 are --sft-lora"),
        (bool(cfg.score) != bool(cfg.judge), "score",
         "--score FILE needs --judge URL, and the other way round"),
        (of_world and cfg.graph, "graph", "not with --data world, which has its own"),
        (of_world and cfg.teacher != "template", "teacher",
         "not with --data world, which words its own questions"),
        (not of_world and not cfg.graph and not cfg.score, "graph",
         "needed with --model or --data: NAME=FILE,…, a folder of graphs, or http://HOST:PORT"),
        (not of_world and needs_model and not (cfg.model or cfg.checkpoint or cfg.policy), "model",
         "needed with --graph (or --checkpoint)"),
        (remote and not asked, "graph", "a server answers calls; its questions stand in a --data FILE"),
    ):
        if wrong:
            flags.refuse(name, getattr(cfg, name), words)
    return cfg


def load_tools(cfg):
    if cfg.data == "world":
        return LocalTools(graphs_of_world(cfg, "test"), cfg.max_edges, cfg.max_words)
    return make_tools(cfg.graph, cfg.graph_encoder, cfg.max_edges, cfg.max_words)


def load(cfg, folder):
    """(training split or None, evaluation splits) of --data and --eval-data; where neither names a file the
    questions are made. Of a file of one's own a tenth is held out."""
    if cfg.data == "world":
        return load_world(cfg, folder)
    tools = load_tools(cfg)
    if not tools.remote and cfg.stage not in ("synthesize", "direct"):  # they search for nothing
        tools.prepare()
    train, test = [], []
    if cfg.data:
        train = read_questions(cfg.data, tools.graphs)
    elif cfg.collect or not (cfg.eval_data and cfg.eval_only):
        train, test = make_questions(cfg, folder, tools.graphs)
    if cfg.eval_data:
        for file in cfg.eval_data.split(","):
            test += read_questions(file, tools.graphs)
    alone = cfg.eval_only and not cfg.collect
    if not test and alone and not splits.has_learned(cfg):
        train, test = [], train
    if not test:
        test = [q for q in train if held_out(q)]
        say(f"{cfg.data}: {len(test)} of {len(train)} questions are held out, by a hash of where they start")
        if len(test) in (0, len(train)):
            raise data.DataError(f"{cfg.data}: too few questions to hold a tenth out; give --eval-data")
    evaluated = splits.fingerprints({"": test})
    if alone:
        train = []
    if train:
        train = splits.unseen(cfg.data or "questions that were made", train, evaluated)
        if not train:
            raise data.DataError(f"{cfg.data}: all its questions are evaluated, so nothing is left to learn "
                                 "from; give --eval-data other questions")
        train = some(train, cfg.limit or len(train))
    if cfg.collect:  # from what a run learns from, never from what it is tested on
        return None, apart(train, tools)
    tasks = apart(test, tools, cfg.eval_limit, cfg.seed, evaluated)
    return (data.Split("train", train, tools, evaluated=evaluated) if train else None), tasks


def make_questions(cfg, folder, graphs):
    """(training questions, test questions) along paths of the graphs (sec. 2), from different seed nodes. A
    teacher may begin a path elsewhere near the seed node: test questions that begin where one for training
    does are left out."""
    from common.graphs import synthesis
    teacher = synthesis.Template()
    if cfg.teacher != "template":
        teacher = synthesis.Teacher(cfg.teacher, cfg.teacher_model)

    def side(number):
        return lambda graph: synthesis.split_seeds(graph, TEST_SHARE, cfg.largest_ball)[number]

    train = write_questions(folder / "train", graphs, teacher, cfg, cfg.per_graph, side(0))
    count = math.ceil(cfg.per_graph * TEST_SHARE)
    test = write_questions(folder / "test", graphs, teacher, cfg, count, side(1))
    begun = {(q.type, q.evidences[0][0]) for q in train}
    kept = [q for q in test if (q.type, q.evidences[0][0]) not in begun]
    if len(kept) < len(test):
        say(f"left out {len(test) - len(kept)} of {len(test)} test questions: their paths begin where one "
            "for training does")
    return train, kept


MAKES_QUESTIONS = ("teacher", "teacher_model", "largest_ball", "unique")


def write_questions(folder, graphs, teacher, cfg, count, seeds):
    """Questions along paths of the graphs, `count` per graph and kind; made once. settings.json says what the
    folder was made with: with other settings the questions are made anew, from the answers that are there.

    seeds(graph) -> its seed nodes."""
    from common.graphs import synthesis
    facts = {name: stable_seed(sorted(g.graph.edges(data="relation"))) for name, g in graphs.items()}
    made_with = {name: getattr(cfg, name) for name in MAKES_QUESTIONS} | {"count": count, "facts": facts}
    settings = folder / "settings.json"
    if settings.exists() and read_json(settings, dict) == made_with:
        rows = read_jsonl(folder / "questions.jsonl")
        for row in rows:
            fault = fault_of(row, graphs)
            if fault:
                raise RunError(f"{folder}/questions.jsonl: {fault}: remove the folder, and it is made anew")
    else:
        starts = {name: seeds(graph) for name, graph in graphs.items()}
        rows = synthesis.synthesize(
            graphs, starts, folder, teacher, count, unique=cfg.unique)
        write_json(settings, made_with)
    return [question_of(row) for row in rows]


# ---------------------------------------------------------------- the embedded world

def load_world(cfg, folder):
    """Training on three domains; tests on four, with more of the relations that are rare."""
    from common.of_omne.world_graphs import DOMAINS
    train = world_task(cfg, folder, "train", TRAINED_DOMAINS, cfg.per_graph)
    train.questions = some(train.questions, cfg.limit or len(train.questions))
    names = (cfg.eval_data or "test").split(",")
    limit = cfg.eval_limit or 400
    count = math.ceil(limit / (2 * len(DOMAINS)))
    evals = []
    for name in names:
        task = world_task(cfg, folder, name, DOMAINS, count)
        parts = apart(task.questions, task.retriever)
        if len(names) > 1:
            parts = [replace(part, name=f"{name}-{part.name}") for part in parts]
        evals += parts
    return train, evals


def graphs_of_world(cfg, name, domains=None):
    from common import world
    from common.of_omne import world_graphs
    seed = 1 if name == "test" else 0
    made = world.make_world(name, seed, cfg.world_scale, questions=1)
    return {domain: world_graphs.graph_for(made, domain) for domain in domains or world_graphs.DOMAINS}


def world_task(cfg, folder, name, domains, count):
    from common.graphs import synthesis
    from common.of_omne import world_graphs
    graphs = graphs_of_world(cfg, name, domains)
    teacher = synthesis.Template(world_graphs.wording, world_graphs.weight_of(name), world_graphs.forward)
    questions = write_questions(
        folder / name, graphs, teacher, cfg, count, lambda graph: synthesis.seeds(graph, cfg.largest_ball))
    tools = LocalTools(graphs, cfg.max_edges, cfg.max_words)
    return data.Split(name, questions, tools)


# ---------------------------------------------------------------- conversations on file
#
#     sft-data/  settings.json  sampled.jsonl  sharegpt.jsonl  dataset_info.json

MAKES_ROWS = (
    "sft_sampled", "sft_templates", "teacher", "teacher_model", "seed", "train_hops", "graph", "data",
    "matches", "max_edges", "max_words", "max_rounds", "max_turn", "max_train_turn", "temperature")


def read_conversations(file, evaluated=frozenset()):
    """The rows of a file whose questions are not evaluated; DataError names one that is none."""
    rows = sharegpt.read(file, ("id", "graph_type", "question"))
    for number, row in enumerate(rows, 1):
        graph_type = row.get("graph_type")
        if not isinstance(graph_type, str) or not re.fullmatch(GRAPH_TYPE, graph_type):
            raise data.DataError(f"{file}: row {number}: a graph_type is letters, digits, . - _")
        if not isinstance(row.get("source", ""), str):
            raise data.DataError(f"{file}: row {number}: a source is a text")
    left = [row for row in rows if fingerprint(row["question"]) not in evaluated]
    if len(left) < len(rows):
        say(f"{file}: left out {len(rows) - len(left)} of {len(rows)} conversations, whose questions are "
            "evaluated")
    if not left:
        raise data.DataError(f"{file}: all its questions are evaluated, so nothing is left to learn from")
    return left


def begin_conversations(cfg, folder):
    """Notes the settings, so that an interrupted run goes on with the same ones alone; RunError where there
    are others."""
    made_with = {name: getattr(cfg, name) for name in MAKES_ROWS}
    settings = folder / "settings.json"
    if settings.exists() and read_json(settings, dict) != made_with:
        raise RunError(f"{folder} was made with other settings than {made_with} (settings.json): choose "
                       "another --name, or give --sft-data FILE")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(settings, made_with)


class SampledRows:
    """What became of stage 1's trajectories: the row of each question, None where it was not answered right,
    kept in a file as soon as its batch is there. All ranks have all rows; rank 0 writes."""

    def __init__(self, file):
        self.lines, on_file = None, []
        if distributed.rank() == 0:
            self.lines = Lines(file)
            on_file = self.lines.rows
        self.row_of = {line["id"]: line["row"] for line in distributed.gather(on_file)}

    def batches(self, questions, wanted):
        """Yields those that are to be sampled, until there are `wanted` rows."""
        with Progress("trajectories of stage 1") as progress:
            for start in range(0, len(questions), 128):
                yield [q for q in questions[start:start + 128] if q.id not in self.row_of]
                made = len(self.of(questions))
                progress(min(made, wanted), wanted)
                if made >= wanted:
                    break

    def add(self, question, row):
        self.row_of[question.id] = row
        if self.lines:
            self.lines.add({"id": question.id, "row": row})

    def of(self, questions):
        """The rows that there are, in the questions' order."""
        return [self.row_of[q.id] for q in questions if self.row_of.get(q.id)]


def write_conversations(folder, rows):
    """The rows, and the file that tells LLaMA-Factory of them."""
    if not rows:
        raise RunError("nothing to learn from: stage 1 has no trajectory with reward 1, and no question has "
                       "a known path for a template")
    write_json(folder / "dataset_info.json", sharegpt.dataset_info("omne_r1"))
    write_jsonl(folder / "sharegpt.jsonl", rows)
