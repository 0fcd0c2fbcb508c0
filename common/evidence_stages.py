"""The stages of a search for evidence: the folder of each, what it goes on from, the models that it loads,
the sets that it is evaluated on, and a table of all of them."""

from dataclasses import fields
from pathlib import Path

from common import checkpoint, report, run
from common import model as models
from common.encoders import fingerprint
from common.evidence import Questions, freeze_vectors, tokenize
from common.evidence_models import load_encoder, load_policy, load_writer
from common.files import read_json, say
from common.metrics import is_two_way
from common.page.evidence import about

BEFORE = {"ppo": "supervised", "joint": "supervised", "eval": "ppo", "qap": "ppo", "sqg": "ppo"}
ORDER = ("coarse", "supervised", "ppo", "qap", "sqg", "joint")
WRITERS = {"sqg": "qap", "joint": "sqg"}  # whose T5 a stage needs
ASK_MODES = ("replace", "replace-keep", "append")
SEARCHES = {  # how a stage is evaluated; the others: greedy and by beams
    "coarse": ("ranking", "bm25", "coarse", "oracle"),
    "qap": ("greedy",),
    "sqg": ASK_MODES,
}
COLUMNS = {
    "F1": ("eval", "f1", ".3f"),
    "precision": ("eval", "precision", ".3f"),
    "recall": ("eval", "recall", ".3f"),
    "sentences": ("eval", "sentences", ".2f"),
}


def open_stage(cfg, stage):
    """The run folder of a stage; it may go on with more updates."""
    steps = [f.name for f in fields(cfg) if f.name.endswith("_steps")]
    free = (*run.FREE_ON_RESUME, "stage", *steps)
    name = f"{cfg.name}-{stage}"
    return run.open_folder(cfg, "askit", name, free, one_of_many=True, saves=stage != "eval")


def need_earlier(cfg, stage, start=None, made=()):
    """Refuses a stage whose earlier ones are not there; start: its own checkpoint, where it goes on; made:
    stages that this command makes first."""
    if stage == "coarse":
        return
    needed = {"coarse", WRITERS.get(stage)}
    if not start and not cfg.checkpoint:
        needed.add(BEFORE.get(stage))
    for earlier in ORDER:
        if earlier in needed and earlier not in made:
            checkpoint_of(cfg, earlier)


def runs_of(cfg):
    """"…/askit/<name>" of this run and of those that it may go on from: --before, that one's, and so on."""
    own = Path(cfg.out) / "askit" / cfg.name
    found, waiting = [], [own]
    while waiting:
        one = waiting.pop(0)
        if one in found:
            continue
        found.append(one)
        befores = [cfg.before] if one == own else []
        for stage in ORDER:
            config = Path(f"{one}-{stage}") / "config.json"
            if config.exists():
                befores.append(read_json(config, dict).get("before"))
        for before in filter(None, befores):
            waiting += [one.parent / before, Path(before)]  # by name or by path
    return found


def checkpoint_of(cfg, stage):
    """What a stage of this run left, or of one before; refused in words where it is not there."""
    for one in runs_of(cfg):
        found = checkpoint.find(Path(f"{one}-{stage}") / "checkpoint")
        if found is not None:
            return found
    folder = Path(cfg.out) / "askit" / f"{cfg.before or cfg.name}-{stage}" / "checkpoint"
    raise models.ModelError(f"{folder} does not exist: run --stage {stage} first, or name a run that has it "
                            "with --before")


def sets_of(cfg, stage, evals):
    """The evaluation sets, once for each way that a stage searches them, under the name of their file."""
    searches = SEARCHES.get(stage, ("greedy", "beam"))
    if stage == "sqg" and cfg.ask_mode != "all":
        searches = (cfg.ask_mode,)
    endings = {"greedy": "", "ranking": "", "beam": f"-beam{cfg.beam}"}
    found = []
    for e in evals:
        cases = e.cases
        if stage == "sqg" and not cfg.question_model:  # the tiny T5 cannot copy two names
            cases = [c for c in cases if not is_two_way(about(c))]
            out = len(e.cases) - len(cases)
            say(f"sqg: {e.name} without {out} comparisons, where the tiny T5 often writes one name twice")
        if not cases:  # none with labels
            continue
        for search in searches:
            name = e.name + endings.get(search, f"-{search}")
            found.append(Questions(name, cases, search))
    return found


def check_beginning(cfg, trained, untrained):
    """Refuses a coarse stage that was trained from another encoder than --encoder, whose sentence vectors
    its queries would not fit."""
    config = Path(trained).parent / "config.json"
    other = read_json(config, dict).get("encoder", "") if config.exists() else cfg.encoder
    if other == cfg.encoder:
        return
    try:
        same = fingerprint(load_encoder(cfg, other), ()) == fingerprint(untrained, ())
    except models.ModelError:  # it is not there any more
        same = False
    if not same:
        raise models.ModelError(
            f"{trained} was trained from --encoder {other or '(none: the tiny one)'}, and fits that one's "
            f"sentence vectors; here --encoder is {cfg.encoder or 'not given'}")


def load_stage(cfg, stage, start, cases):
    """(what a stage trains, what it evaluates), from `start`, its checkpoint, where it goes on."""
    trained = start if stage == "coarse" else checkpoint_of(cfg, "coarse")
    untrained = load_encoder(cfg, cfg.encoder)
    if trained:
        check_beginning(cfg, trained, untrained)
    encoder = load_encoder(cfg, trained or cfg.encoder)
    tokenize(encoder.pair_tokenizer, cases)
    freeze_vectors(untrained, cases, Path(cfg.out) / "askit" / "vectors")
    if stage == "coarse":
        return encoder, encoder
    if stage in ("qap", "sqg"):
        writer = load_writer(cfg, start or cfg.question_model)
        policy = load_policy(cfg, checkpoint_of(cfg, "ppo"), encoder, cases)
        policy.asker = writer
        return writer, policy
    source = start or cfg.checkpoint
    if not source and stage in BEFORE:
        source = checkpoint_of(cfg, BEFORE[stage])
    asker = checkpoint_of(cfg, "sqg") if stage == "joint" else ""
    policy = load_policy(cfg, source, encoder, cases, asker)
    return policy, policy


def show_table(cfg, paper):
    """<name>-table.json of the stages that are there, and of those in a run before that they began from.
    paper: {(stage, set): "EM / F1"}, shown beside a stage that was evaluated on that set alone."""
    runs = runs_of(cfg)  # its own first
    stages = ("supervised", "ppo", "sqg", "joint")
    there = [s for s in stages if Path(f"{runs[0]}-{s}").exists()]
    shown = {*there, *(BEFORE.get(s) for s in there)}
    if "ppo" in shown:
        shown.add("supervised")
    folders = {}
    for stage in stages:
        paths = [Path(f"{one}-{stage}") for one in runs]
        found = [p for p in paths if p.exists()]
        if found and stage in shown:
            folders[stage] = [found[0]]
    others = [folders[stage][0].name for stage in folders if stage not in there]

    def printed(stage, sets):
        return paper.get((stage, *sets), "")

    title = f"ASKiT {cfg.name} (paper: EM / F1, HotpotQA)"
    if others:
        title += f", {' and '.join(others)} before it"
    report.method_table(runs[0], title, folders, "supervised", printed, COLUMNS, means=False)
    report.draw_methods(runs[0], title, folders)
