"""What askit.py's stages leave for one another and load, and what its flags must be. cfg is askit.Config."""

from dataclasses import replace
from pathlib import Path

from common import checkpoint, flags
from common.files import read_json
from common.of_askit import encoders, evidence

# ---------------------------------------------------------------- stages

def runs_of(cfg):
    """"…/askit/<name>" of this run and of those of --before."""
    names = [cfg.name]
    if cfg.before:
        names += cfg.before.split(",")
    return [Path(cfg.out) / "askit" / name for name in names]


def checkpoint_of(cfg, stage):
    """The checkpoint that a stage left, of this run or of one before."""
    folders = [Path(f"{run}-{stage}") / "checkpoint" for run in runs_of(cfg)]
    for folder in folders:
        if saved := checkpoint.find(folder):
            return saved
    raise checkpoint.ModelError(f"{folders[-1]} does not exist: run --stage {stage} first (--stage all: "
                                "coarse, supervised, ppo), or name runs that have it with --before")


def refuse_missing(cfg, in_order, starts, table):
    """An error, unless each stage finds the earlier ones that it loads, among these or on disk. starts:
    {stage: its own checkpoint, if it is resumed}. table: the script's STAGES."""
    for stage in in_order:
        needed = [*table[stage].needs]
        if not cfg.checkpoint and not starts.get(stage):
            needed.append(table[stage].begins_with)
        for earlier in needed:
            if earlier and earlier not in in_order:
                checkpoint_of(cfg, earlier)


def load(cfg, stage, cases, *, begins_with, start=None, Policy):
    """(what a stage trains, what it evaluates); fills in tokens and vectors of the cases. start: its own
    checkpoint, if it is resumed. begins_with: else the stage whose policy it goes on from, or empty. Policy:
    the script's class."""
    trained = start  # the coarse encoder, after its training
    if stage != "coarse":
        trained = checkpoint_of(cfg, "coarse")
        began_with = read_json(trained.parent / "config.json", dict).get("encoder")
        if began_with != cfg.encoder:  # whose sentence vectors it was trained against
            flags.refuse("encoder", cfg.encoder, f"{trained} was trained from {began_with or 'the tiny one'}")
    encoder = encoders.load_encoder(cfg, trained or cfg.encoder)
    evidence.tokenize(encoder.pair_tokenizer, cases)
    # sentences keep the vectors of the encoder before its training (sec. 3.1.1)
    evidence.freeze_vectors(encoders.load_encoder(cfg, cfg.encoder), cases)
    if stage == "coarse":
        return encoder, encoder
    if stage in ("qap", "sqg"):
        policy = load_policy(cfg, checkpoint_of(cfg, "ppo"), encoder, cases, Policy)
        policy.asker = encoders.load_writer(cfg, start or cfg.question_model)
        return policy.asker, policy
    source = start or cfg.checkpoint
    if not source and begins_with:
        source = checkpoint_of(cfg, begins_with)
    policy = load_policy(cfg, source, encoder, cases, Policy)
    return policy, policy


def load_policy(cfg, source, encoder, cases, Policy):
    """The fine policy of a checkpoint; without one (empty) of --action-model and --submit-model, or of the
    first layers of --encoder with a new head each. No dropout, so that ratios begin at 1."""
    scorers, tokenizers = encoders.load_scorers(cfg, source)
    for tokenizer in tokenizers:
        evidence.tokenize(tokenizer, cases)
    return Policy(scorers.eval(), encoder, *tokenizers, cfg)


# ---------------------------------------------------------------- flags

def check(cfg, paper_models):
    """cfg with --name, and with the paper's models for --model paper and for data where no model is named.
    Refuses what cannot run."""
    # all other numbers: whole ones at least 1, others at least 0
    may_be_zero = "coarse_warmup supervised_warmup fine_layers correlate validate"
    above_zero = "coarse_lr supervised_lr question_lr lr gamma"
    cfg = flags.check(cfg, may_be_zero=may_be_zero, above_zero=above_zero, least={"group_size": 2})
    if cfg.gamma > 1:
        flags.refuse("gamma", cfg.gamma, "at most 1")
    if cfg.eval_only or cfg.ask:
        cfg = replace(cfg, stage="eval")
    name = cfg.name or flags.run_name(cfg, Path(cfg.encoder).name)
    cfg = replace(cfg, eval_only=cfg.stage == "eval", name=name)

    named = cfg.encoder or cfg.action_model or cfg.submit_model or cfg.fine_layers
    if cfg.model == "paper" or cfg.data != "world" and not (named or cfg.model):
        cfg = replace(cfg, **{name: getattr(cfg, name) or paper for name, paper in paper_models.items()})
    elif cfg.model:
        flags.refuse("model", cfg.model, "there are several models here: --model paper, or --encoder")
    scorers = bool(cfg.fine_layers) + bool(cfg.action_model and cfg.submit_model)
    if named and not (cfg.encoder and scorers == 1):
        words = "needs --fine-layers, or --action-model and --submit-model, and these need it"
        flags.refuse("encoder", cfg.encoder, words)
    if cfg.encoder and not cfg.question_model and cfg.stage in ("asking", "qap", "sqg"):
        flags.refuse("stage", cfg.stage, "needs --question-model, a T5")
    if cfg.checkpoint and cfg.stage not in ("supervised", "ppo", "eval"):
        flags.refuse("checkpoint", cfg.checkpoint, "is for one of the stages supervised, ppo, eval")
    if cfg.checkpoint and not (Path(cfg.checkpoint) / "action").is_dir():
        flags.refuse("checkpoint", cfg.checkpoint, "holds no policy of askit.py, as a run's checkpoint/ does")
    return cfg
