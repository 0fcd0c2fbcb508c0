"""What omne_r1.py's flags must be, what its stages find of one another, and the conversations that stage 2
learns from. cfg is omne_r1.Config."""

import re
from dataclasses import replace
from pathlib import Path

from common import data, flags
from common import model as models
from common.files import RunError, read_json, say, write_json, write_jsonl
from common.folder import left_by
from common.formats import fingerprint
from common.graphs.kg_files import GRAPH_NAME
from common.warmup import sharegpt

# ---------------------------------------------------------------- flags

def check(cfg):
    """The cfg with --name. Refuses numbers out of range, and graphs, questions and models that do not go
    together."""
    if cfg.eval_only and cfg.stage != "direct":
        cfg = replace(cfg, stage="eval")
    cfg = replace(cfg, eval_only=cfg.stage in ("eval", "direct"))
    cfg = flags.check(cfg, may_be_zero="sft_sampled sft_templates sft_lora",
                      above_zero="lr head_lr sft_lr sft_full_lr temperature")
    of_world = cfg.data == "world"
    needs_model = cfg.stage != "synthesize"
    for wrong, name, words in (
        (not 0 <= cfg.gamma <= 1, "gamma", "from 0 to 1"),
        (not 0 <= cfg.lam <= 1, "lam", "from 0 to 1"),
        (cfg.collect and cfg.stage == "direct", "collect",
         "is for answers with tools, and not for --stage direct"),
        (cfg.lora and cfg.stage == "sft", "lora", "is for PPO: the adapters of stage 2 are --sft-lora"),
        (of_world and cfg.graph, "graph", "not with --data world, which has its own"),
        (of_world and cfg.teacher != "template", "teacher",
         "not with --data world, which words its own questions"),
        (not of_world and not cfg.graph, "graph",
         "needed with --model or --data: NAME=FILE,…, or a folder of graphs"),
        (not of_world and needs_model and not (cfg.model or cfg.checkpoint or cfg.policy), "model",
         "needed with --graph (or --checkpoint)"),
        (cfg.warmup_data and cfg.stage == "rl", "warmup_data",
         "not with --stage rl, which begins with stage 2's weights or a --checkpoint"),
        (cfg.graph.startswith(("http://", "https://")), "graph", "a file or a folder; no server is asked"),
    ):
        if wrong:
            flags.refuse(name, getattr(cfg, name), words)
    graphs = [Path(graph.partition("=")[0]).stem for graph in cfg.graph.split(",")]
    return replace(cfg, name=cfg.name or flags.run_name(cfg, *graphs))


# ---------------------------------------------------------------- stages

NAMED = {"on": "think", "off": "no-think"}  # --think, as a folder's name has it


def stages_of(cfg, table):
    """{label: (what the stage does, its settings)} of --stage, in order. table: the script's STAGES."""
    sft, rl = f"sft-{NAMED[cfg.think]}", f"rl-{NAMED[cfg.think]}"
    if cfg.stage == "all":
        stages = table
    elif cfg.stage == "three":
        stages = {label: table[label] for label in ("base", "stage1", sft, rl)}
    elif cfg.stage == "synthesize":     # the questions are made before any stage
        stages = {}
    else:
        direct = {"on": "direct", "off": "direct-no-think"}[cfg.think]
        labels = {"ppo": "stage1", "sft": sft, "rl": rl, "direct": direct, "eval": "eval"}
        stages = {labels[cfg.stage]: (cfg.stage, cfg.think)}
    found = {}
    for label, (kind, think) in stages.items():
        settings = replace(cfg, think=think)
        if cfg.sft_lora == "auto":
            settings.sft_lora = {"on": 8, "off": 0}[think]  # sec. 3.5
        found[label] = kind, settings
    return found


def folder_of(cfg, *name):
    """<out>/omne_r1/<its name>-<name>: what the stages of a run share."""
    return Path(cfg.out) / "omne_r1" / "-".join([cfg.name, *name])


def warmed_up(cfg, source, evaluated, conversation_of):
    """Folder of `source` after --warmup-data: rows as stage 2 writes and reads them. (Questions whose paths
    are known become such rows there: --stage sft --sft-sampled 0.) conversation_of: the script's."""
    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    examples = []
    for file in cfg.warmup_data.split(","):
        for row in read_conversations(file, evaluated):
            examples.append([conversation_of(tokenizer, row, cfg, apart=False)])
    return warmup.warmed_up(cfg, "omne_r1", source, examples)


# ---------------------------------------------------------------- conversations on file
#
#     <name>-sft-data/  settings.json  sampled.jsonl  sharegpt.jsonl  dataset_info.json

MAKES_ROWS = (
    "sft_sampled", "sft_templates", "teacher", "teacher_model", "seed", "train_hops", "graph", "data",
    "matches", "max_edges", "max_rounds", "max_turn", "max_train_turn", "temperature")


def read_conversations(file, evaluated=frozenset()):
    """The rows of a file whose questions are not evaluated; DataError names one that is none."""
    rows = sharegpt.read(file, ("id", "graph_type", "question"))
    for number, row in enumerate(rows, 1):
        if not re.fullmatch(GRAPH_NAME, row.get("graph_type") or ""):
            raise data.DataError(f"{file}: row {number}: a graph_type is letters, digits, . - _")
    left = [row for row in rows if fingerprint(row["question"]) not in evaluated]
    if len(left) < len(rows):
        say(f"{file}: left out {len(rows) - len(left)} of {len(rows)} conversations, whose questions are "
            "evaluated")
    if not left:
        raise data.DataError(f"{file}: all its questions are evaluated, so nothing is left to learn from")
    return left


def begin_conversations(cfg):
    """(folder, stage 1's weights, None where the rows are there or none is sampled). Notes the settings, so
    that an interrupted run goes on with the same ones alone; RunError where there are others."""
    folder, weights = folder_of(cfg, "sft-data"), None
    if cfg.sft_sampled and not (folder / "sharegpt.jsonl").exists():
        weights = left_by(cfg, "omne_r1", "stage1", "--stage sft (--sft-sampled)")
    made_with = {name: getattr(cfg, name) for name in MAKES_ROWS}
    settings = folder / "settings.json"
    if settings.exists():
        saved = read_json(settings, dict)  # (of an older version it has more)
        if saved != saved | made_with:
            raise RunError(f"{folder} was made with other settings than {made_with} (settings.json): choose "
                           "another --name, or give --sft-data FILE")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(settings, made_with)
    return folder, weights


def write_conversations(folder, rows):
    """The rows, and the file that tells LLaMA-Factory of them."""
    if not rows:
        raise RunError("nothing to learn from: stage 1 has no trajectory with reward 1, and no question has "
                       "a known path for a template")
    write_json(folder / "dataset_info.json", sharegpt.dataset_info("omne_r1"))
    write_jsonl(folder / "sharegpt.jsonl", rows)
