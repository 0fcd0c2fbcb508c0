"""--keep best: of a run's weights those with the highest EM on a set that chooses and is not tested on."""

import sys

from common import checkpoint, data, run
from common.files import say
from common.world import hard
from common.world.splits import world_split


def check(cfg):
    """Refuses what cannot choose."""
    if cfg.keep == "last":
        if cfg.keep_data:
            sys.exit("error: --keep-data is for --keep best")
        return
    chooser = cfg.keep_data or "dev"
    tested = cfg.eval_data or "test" * (cfg.data == "world")
    if not (cfg.eval_every and (cfg.keep_data or cfg.data == "world")):
        sys.exit("error: --keep best needs --eval-every STEPS and --keep-data SET, which chooses and is not "
                 "tested on")
    if chooser in tested.split(","):
        sys.exit(f"error: --keep best: {chooser} would choose and be tested on; name another --keep-data or "
                 "--eval-data")
    if cfg.engine == "vllm":
        sys.exit("error: --keep best loads other weights at the end, which vLLM's engine is not made for: "
                 "--engine transformers, or --eval-only --checkpoint RUN/best")


def set_that_chooses(cfg, split):
    """The Split of --keep best; None for --keep last."""
    if cfg.keep == "last":
        return None
    limit = cfg.eval_limit
    if cfg.data == "world":
        level = hard.parse(cfg.world)
        name = cfg.keep_data or "dev"
        return world_split(name, cfg.world_size, limit or 400, cfg.retriever, level)
    questions = data.load_questions(cfg.keep_data, limit or None, cfg.skip_bad)
    return data.Split("kept-by", questions, split.retriever)


def better_of_last_and_best(cfg, folder, policy, last):
    """The policy as it is, with `last` as its score on the set that chooses, or as it was in best/."""
    found = checkpoint.find(folder.path / "best")
    state = checkpoint.read_state(found) if found else {"best": -1.0}
    if state["best"] <= last:
        return policy
    say(f"--keep best: step {state['step']} ({state['best']:.3f}), not the last ({last:.3f})")
    return run.load_policy(cfg, found, trains=False)
