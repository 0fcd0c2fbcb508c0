"""The stages of a run that asks questions of graphs: where each is, and the weights that it leaves."""

from pathlib import Path

from common import checkpoint, run
from common import model as models

FREE = (*run.FREE_ON_RESUME, "stage", "judge", "judge_model", "curve_questions")
TRAINING = ("ppo", "sft", "rl")


def path_of(cfg, label):
    """Where a stage of this run is, or what it makes."""
    return Path(cfg.out) / "omne_r1" / f"{cfg.name}-{label}"


def open_stage(cfg, label, kind):
    """The run folder of a stage."""
    saves = kind in TRAINING
    return run.open_folder(cfg, "omne_r1", f"{cfg.name}-{label}", FREE, one_of_many=True, saves=saves)


def checkpoint_of(cfg, label, needed_by):
    """The weights that a stage of this run left; refused in words where they are not there."""
    folder = path_of(cfg, label) / "checkpoint"
    found = checkpoint.find(folder)
    if found is None:
        raise models.ModelError(f"--stage {needed_by} goes on from {label}, and {folder} does not exist: run "
                                "that stage first, or give --checkpoint")
    return found


def folded(cfg, source):
    """The folder itself, or, of adapters, one of this run with the model that they make of their base."""
    return models.folded(source, path_of(cfg, "merged"))
