"""What Omne-R1's critic and its weighted loss cost: python -m benchmarks.bench_omne

The tiny policy, trajectories of random tokens as long as those of the embedded world. Printed: seconds of an
update with PPO and GRPO on the same trajectories, and tokens a second of stage 2
through the weighted loss and through full logits; ratios within one run.
"""

import argparse
import random
import time

import torch

import omne_r1
from common import model as models
from common import rollout, training
from common.critic import load_actor_critic
from common.rollout import Trajectory, Turn
from kernels.weighted_ce import weighted_cross_entropy


def trajectories(count, vocabulary, rng):
    """Five turns of some 27 sampled tokens, each with an observation of 60, as in the embedded world."""
    made = []
    for i in range(count):
        turns = []
        for _ in range(rng.randint(3, 7)):
            ids = tokens(rng, vocabulary, 20, 34)
            seen = tokens(rng, vocabulary, 40, 80)
            turns.append(Turn(ids, [-1.0] * len(ids), "", "", seen))
        turns[-1].observation_ids = []
        prompt = tokens(rng, vocabulary, 16, 16)
        t = Trajectory(str(i), prompt, turns, reward=rng.random())
        advantage = rng.choice((-1.0, 1.0))
        t.advantages = [advantage] * len(turns)
        made.append(t)
    return made


def tokens(rng, vocabulary, fewest, most):
    count = rng.randint(fewest, most)
    return rng.choices(range(20, vocabulary), k=count)


def timed(action, repeats):
    """Seconds of the fastest of `repeats`."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def grpo_update(model, reference, optimizer, done, cfg):
    packing = training.Packing(cfg.micro_tokens, cfg.pack_tokens, cfg.share_prefixes == "on")
    batches = training.prepare(model, reference, done, packing, cfg.temperature, cfg.kernels)
    meter = training.Meter(batches)
    for batch in batches:
        logprobs = models.token_logprobs(model, batch)
        weights = training.sequence_weights(batch.response_mask, len(done))
        loss, stats = training.grpo_loss(
            logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.response_mask,
            weights,
            kl_coef=1e-3,
            ref_logprobs=batch.ref_logprobs,
        )
        loss.backward()
        meter.add(loss, stats)
    meter.step(model, optimizer, 1.0, batches)


def updates(cfg, folder, done, repeats):
    """{update: seconds}"""
    found = {}
    reference = models.load_model(folder).requires_grad_(False)
    model = models.load_model(folder)
    optimizer = training.make_optimizer(model, 1e-5)
    found["GRPO"] = timed(lambda: grpo_update(model, reference, optimizer, done, cfg), repeats)
    actor = load_actor_critic(models.load_model(folder), None)
    trained = training.make_optimizer(actor, 1e-5)
    found["PPO"] = timed(lambda: omne_r1.update(actor, reference, trained, done, cfg, 1), repeats)
    return found


def losses(cfg, folder, done, repeats):
    """{loss: tokens a second} of stage 2's forward and backward pass."""
    model = models.load_model(folder)
    batch = rollout.collate(done, True, cfg.pack_tokens)
    learned = int(batch.response_mask.sum())
    head = model.get_output_embeddings().weight
    weights = torch.ones(len(batch.target))

    def fused():
        hidden = models.hidden_states(model, batch)
        hidden = hidden.flatten(0, 1)[batch.predecessor]
        weighted_cross_entropy(hidden, head, batch.target, weights, float(learned)).backward()

    def full():
        logits = models.hidden_states(model, batch) @ head.T  # of every place, learned or not
        rows = logits.flatten(0, 1)[batch.predecessor]
        torch.nn.functional.cross_entropy(rows, batch.target).backward()

    seconds = {"weighted loss": timed(fused, repeats), "full logits": timed(full, repeats)}
    return {name: learned / value for name, value in seconds.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", default="", help="a model; default the tiny policy")
    args = parser.parse_args()
    cfg = omne_r1.parse_args([])
    folder = args.folder or omne_r1.tiny_policy(cfg)
    vocabulary = models.load_model(folder).config.vocab_size
    done = trajectories(args.trajectories, vocabulary, random.Random(0))
    cfg = omne_r1.replace(cfg, mini_batch=args.trajectories)
    seconds = updates(cfg, folder, done, args.repeats)
    for name, value in seconds.items():
        ratio = value / seconds["GRPO"]
        print(f"{name:24} {value:6.2f} s an update of {len(done)}   {ratio:.2f} x GRPO")
    rates = losses(cfg, folder, done, args.repeats)
    for name, value in rates.items():
        ratio = value / rates["full logits"]
        print(f"{name:24} {value:8.0f} learned tokens/s   {ratio:.2f} x full logits")


if __name__ == "__main__":
    main()
