"""--keep-data: of a run's weights those with the highest EM on a set that chooses and is not tested on."""

import sys
from dataclasses import replace

from common import checkpoint, data, run
from common.files import say


def check(cfg, keep_data):
    """Refuses what cannot choose."""
    if not keep_data:
        return
    tested = cfg.eval_data or "test" * (cfg.data == "world")
    if not cfg.eval_every:
        sys.exit(f"error: --keep-data {keep_data} needs --eval-every STEPS: it chooses among evaluations")
    if keep_data in tested.split(","):
        sys.exit(f"error: --keep-data {keep_data} would choose and be tested on; name another one, or "
                 "another --eval-data")
    if cfg.engine == "vllm":
        sys.exit("error: --keep-data loads other weights at the end, which vLLM's engine is not made for: "
                 "--engine transformers, or --eval-only --checkpoint RUN/best")


def set_that_chooses(cfg, keep_data, split):
    """The Split of --keep-data; None where the last weights are kept. split: the training questions, None
    where nothing is trained."""
    if not keep_data or split is None:
        return None
    if cfg.data == "world":
        from common.world import hard
        from common.world.splits import world_split
        level = hard.parse(cfg.world)
        return world_split(keep_data, cfg.world_size, cfg.eval_limit or 400, cfg.retriever, level)
    questions = data.load_questions(keep_data, cfg.eval_limit or None, cfg.skip_bad)
    return data.Split("kept-by", questions, split.retriever)


def better_of_last_and_best(cfg, folder, policy, last):
    """The policy as it is, with `last` as its score on the set that chooses, or as it was in best/."""
    found = checkpoint.find(folder.path / "best")
    state = checkpoint.read_state(found) if found else {"best": -1.0}
    if state["best"] <= last:
        return policy
    say(f"--keep-data: step {state['step']} ({state['best']:.3f}), not the last ({last:.3f})")
    return replace(run.load_policy(cfg, found, trains=False), saved_in="best")
