"""The stages of a search for evidence: the folder of each, what it goes on from, the models that it loads,
the sets that it is evaluated on, and a table of all of them."""

from dataclasses import fields
from pathlib import Path

from common import checkpoint, report, run
from common import model as models
from common.encoders import fingerprint
from common.evidence import Questions, freeze_vectors, tokenize
from common.evidence_models import load_encoder, load_policy, load_reader, load_writer
from common.files import read_json

BEFORE = {"ppo": "supervised", "joint": "supervised", "eval": "ppo", "qap": "ppo", "sqg": "ppo"}
SEARCHES = {  # how a stage is evaluated; the others: greedy and by beams
    "coarse": ("ranking", "bm25", "coarse", "oracle"),
    "qap": ("greedy",),
    "sqg": ("replace", "append"),
    "reader": ("greedy",),
}
COLUMNS = {
    "F1": ("f1", ".3f"),
    "precision": ("precision", ".3f"),
    "recall": ("recall", ".3f"),
    "sentences": ("sentences", ".2f"),
}


def open_stage(cfg, stage):
    """The run folder of a stage; it may go on with more updates."""
    steps = [f.name for f in fields(cfg) if f.name.endswith("_steps")]
    free = (*run.FREE_ON_RESUME, "stage", *steps)
    name = f"{cfg.name}-{stage}"
    if cfg.reward == "answer" and not cfg.reader and stage not in ("coarse", "reader"):
        checkpoint_of(cfg, "reader")
    return run.open_folder(cfg, "askit", name, free, one_of_many=True, saves=stage != "eval")


def checkpoint_of(cfg, stage):
    """What a stage of this run left, or of the run --before; refused in words where it is not there."""
    base = Path(cfg.out) / "askit"
    runs = [base / cfg.name]
    if cfg.before:
        runs += [base / cfg.before, Path(cfg.before)]
    for one in runs:
        found = checkpoint.find(Path(f"{one}-{stage}") / "checkpoint")
        if found is not None:
            return found
    folder = base / f"{cfg.before or cfg.name}-{stage}" / "checkpoint"
    raise models.ModelError(f"{folder} does not exist: run --stage {stage} first, or name a run that has it "
                            "with --before")


def sets_of(cfg, stage, evals):
    """The evaluation sets, once for each way that a stage searches them, under the name of their file."""
    searches = SEARCHES.get(stage, ("greedy", "beam"))
    if stage == "sqg" and cfg.ask_mode != "both":
        searches = (cfg.ask_mode,)
    endings = {"greedy": "", "ranking": "", "beam": f"-beam{cfg.beam}"}
    found = []
    for e in evals:
        if not e.cases:  # without labels
            continue
        for search in searches:
            name = e.name + endings.get(search, f"-{search}")
            found.append(Questions(name, e.cases, search))
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
    if stage == "reader":
        reader = load_reader(cfg, start or cfg.reader or cfg.submit_model, cases)
        return reader, reader
    trained = start if stage == "coarse" else checkpoint_of(cfg, "coarse")
    untrained = load_encoder(cfg, cfg.encoder)
    if trained:
        check_beginning(cfg, trained, untrained)
    encoder = load_encoder(cfg, trained or cfg.encoder)
    tokenize(encoder.pair_tokenizer, cases)
    freeze_vectors(untrained, cases, Path(cfg.out) / "askit" / "vectors")
    if stage == "coarse":
        return encoder, encoder
    reader = ""
    if cfg.reward == "answer":
        reader = cfg.reader or checkpoint_of(cfg, "reader")
    if stage in ("qap", "sqg"):
        writer = load_writer(cfg, start or cfg.question_model)
        policy = load_policy(cfg, checkpoint_of(cfg, "ppo"), encoder, cases, reader=reader)
        policy.asker = writer
        return writer, policy
    source = start or cfg.checkpoint
    if not source and stage in BEFORE:
        source = checkpoint_of(cfg, BEFORE[stage])
    asker = checkpoint_of(cfg, "sqg") if stage == "joint" else ""
    policy = load_policy(cfg, source, encoder, cases, asker, reader)
    return policy, policy


def show_table(cfg, paper):
    """<name>-table.json of the stages that are there. paper: {(stage, set): "EM / F1"}, shown beside a stage
    that was evaluated on that set alone."""
    base = Path(cfg.out) / "askit"
    folders = {stage: base / f"{cfg.name}-{stage}" for stage in ("supervised", "ppo", "sqg", "joint")}

    def printed(stage, sets):
        return paper.get((stage, *sets), "")

    title = f"ASKiT {cfg.name} (paper: EM / F1, HotpotQA)"
    report.stage_table(base / cfg.name, title, folders, "supervised", printed, COLUMNS, means=False)
