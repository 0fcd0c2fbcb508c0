"""Supervised training in so many updates, with linear warm-up and half a cosine, as a run with a log."""

import random
from dataclasses import replace

from common import loop, training
from common.rollout import stable_seed

EVERY = 25  # updates a step of the log


def steps_of(updates):
    """Steps of the log for so many updates."""
    return -(-updates // EVERY)


def supervise(cfg, folder, learner, stage, losses, lr, warmup, metrics, evaluate):
    """Trains learner.model for cfg.<stage>_steps updates.

    losses(rng): yields (loss, rows, right ones) of an update's forward passes; rng is the update's own.
    metrics: of the log. evaluate: as in loop.steps."""
    updates = getattr(cfg, f"{stage}_steps")
    logged = replace(cfg, steps=steps_of(updates), show_every=0)
    optimizer = training.make_optimizer(learner.model, lr, cfg.weight_decay)
    state = {"updates": None}  # made so far: a run may go on with more after a step of fewer
    for step, row in loop.steps(
        logged, folder, learner, optimizer, metrics, state, evaluate, label=f"{stage} | "
    ):
        meter = training.Meter()
        begin = state["updates"]
        if begin is None:
            begin = (step - 1) * EVERY
        state["updates"] = min(step * EVERY, updates)
        for number in range(begin, state["updates"]):
            training.set_lr(optimizer, training.cosine_lr(number, updates, lr, warmup=warmup))
            rng = random.Random(stable_seed(cfg.seed, stage, number))
            for loss, count, right in losses(rng):
                loss.backward()
                meter.add(loss, {"tokens": count, "right_sum": right})
            meter.step(learner.model, optimizer, cfg.grad_clip, ())
        row |= meter.means()
        if meter.total.get("tokens"):  # nothing, where no update was finite
            row["pretrain/right"] = meter.total["right_sum"] / meter.total["tokens"]
