"""The loop of a supervised stage (askit.py has four): updates at a rate that warms up and falls as half a
cosine, some of them to a step of the log; one that was stopped goes on as if it had not been."""

import random
from dataclasses import replace

import torch

from common import run, training
from common.files import Progress
from common.rollout import stable_seed

EVERY = 25  # updates a step of the log, and of a validation loss
VALIDATED = 4  # batches of a validation loss


def log_steps(updates):
    """Steps of the log that so many updates are."""
    return -(-updates // EVERY)


def updates(cfg, folder, learner, stage, rates, shown, evaluate_now, validation=None):
    """Yields (meter, rng) for each of --<stage>-steps updates: the caller makes the passes, backward
    included, and adds them to the meter with "tokens" judged and "right_sum" of them right. rates: (learning
    rate, steps of linear warm-up); shown: metrics of the log; validation(rng): yields (loss, …) of questions
    that are not trained on."""
    lr, warmup = rates
    total = getattr(cfg, f"{stage}_steps")
    logged = replace(cfg, steps=log_steps(total))
    optimizer = training.make_optimizer(learner.model, lr, cfg.weight_decay)
    state = {"updates": None}  # made so far: a run may go on with more after a step of fewer
    for step, row in run.steps(
        logged, folder, learner, optimizer, shown, state, evaluate_now, label=f"{stage} | "
    ):
        meter = training.Meter()
        begin = state["updates"]
        if begin is None:
            begin = (step - 1) * EVERY
        state["updates"] = min(step * EVERY, total)
        for number in range(begin, state["updates"]):
            training.set_lr(optimizer, training.cosine_lr(number, total, lr, warmup=warmup))
            yield meter, random.Random(stable_seed(cfg.seed, stage, number))
            norm = training.clip_gradient(learner.model, cfg.grad_clip)
            if meter.finite(norm):
                optimizer.step()
            optimizer.zero_grad()
        row |= meter.means()
        if meter.total.get("tokens"):  # nothing, where no update was finite
            row["pretrain/right"] = meter.total["right_sum"] / meter.total["tokens"]
        if validation:
            row["pretrain/validation_loss"] = validation_loss(validation, cfg.seed)


@torch.no_grad()
def validation_loss(losses, seed):
    """Mean loss of the same few batches each time."""
    rng = random.Random(stable_seed(seed, "validation"))
    total = sum(loss.item() for _ in range(VALIDATED) for loss, *_ in losses(rng))
    return total / VALIDATED


def learn_when_to_ask(cfg, folder, policy, optimizer, losses, state):
    """--ask-steps updates in front of joint training's first step, at the supervised stage's rate; saved like
    a step every 25. state["when_to_ask"]: those made."""
    training.set_lr(optimizer, cfg.supervised_lr)
    with Progress("joint: learning when to ask") as progress:
        while state["when_to_ask"] < cfg.ask_steps:
            rng = random.Random(stable_seed(cfg.seed, "when to ask", state["when_to_ask"]))
            for loss, *_ in losses(rng):
                loss.backward()
            training.clip_gradient(policy.model, cfg.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            state["when_to_ask"] += 1
            progress(state["when_to_ask"], cfg.ask_steps)
            if state["when_to_ask"] % EVERY == 0:
                run.save(folder, policy, optimizer, 0, state)
    training.set_lr(optimizer, cfg.lr)
