"""What --precision is worth on this machine for a real model: prefill, decoding and update, fp32 and bf16.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_precision --model smollm2

CPU seconds of this process; decoding is the difference of a long and a short run of the engine.
"""

import argparse
import random
import time
from pathlib import Path

from common import model as models
from common import rollout
from common.engine import TransformersEngine
from common.files import say, table, write_json
from common.rollout import Trajectory, Turn

PROMPT = 650   # tokens: instructions, a question, passages
SHORT, LONG = 2, 34


def ids(rng, n, model):
    return [rng.randrange(100, model.config.vocab_size) for _ in range(n)]


def generating(model, tokenizer, chains, tokens):
    """CPU seconds for so many chains over four prompts, so many tokens each."""
    rng = random.Random(0)
    prompts = [ids(rng, PROMPT + 10 * i, model) for i in range(4)]
    engine = TransformersEngine(model, tokenizer, 256, 8, 8)
    engine.sync(model)

    async def chain(i):
        return await engine.generate(prompts[i % 4], (), tokens, 1.0, i)

    agents = [chain(i) for i in range(chains)]
    no_search = rollout.BatchedSearch(None)
    began = time.process_time()
    rollout.run_agents(agents, engine, no_search)
    return time.process_time() - began


def updating(model, trajectories):
    """CPU seconds for log-probs and gradients of two trajectories at a time."""
    began = time.process_time()
    for start in range(0, len(trajectories), 2):
        batch = rollout.collate(trajectories[start:start + 2], share_prefixes=False)
        loss = -models.token_logprobs(model, batch).mean()
        loss.backward()
        model.zero_grad()
    return time.process_time() - began


def trajectory(rng, model):
    """Four turns of some 45 sampled tokens, three observations."""
    turns = []
    for k in range(4):
        said = ids(rng, rng.randrange(30, 60), model)
        seen = ids(rng, rng.randrange(60, 140), model) if k < 3 else []
        turns.append(Turn(said, [0.0] * len(said), "", "", seen))
    return Trajectory("", ids(rng, 250, model), turns)


def measured(folder, precision):
    """{what: tokens per CPU second}; the names say how often 16 and 64 chains were decoded."""
    model, tokenizer = models.load_policy(folder, precision=precision)
    generating(model, tokenizer, 4, SHORT)
    found = {}
    for chains in (16, 64):
        short = generating(model, tokenizer, chains, SHORT)
        long = generating(model, tokenizer, chains, LONG)
        found[f"decoding, {chains} chains"] = chains * (LONG - SHORT) / (long - short)
        if chains == 16:
            encoded = 4 * (PROMPT + 15)
            found["prefill, shared prompts"] = encoded / short
    rng = random.Random(1)
    trajectories = [trajectory(rng, model) for _ in range(8)]
    tokens = sum(t.length for t in trajectories)
    updating(model, trajectories[:2])
    found["update"] = tokens / updating(model, trajectories)
    return found


def main(argv=None):
    """One row for each piece of work, one column a precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    found = {}
    for precision in ("fp32", "bf16"):
        found[precision] = measured(args.model, precision)
        say(f"{precision}: done")
    rows = []
    for what, fp32 in found["fp32"].items():
        bf16 = found["bf16"][what]
        rows.append([what, f"{fp32:.0f}", f"{bf16:.0f}", f"{bf16 / fp32:.2f}"])
    header = ["tokens per CPU second", "fp32", "bf16", "ratio"]
    table(f"{args.model} on a CPU", header, rows)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows})


if __name__ == "__main__":
    main()
