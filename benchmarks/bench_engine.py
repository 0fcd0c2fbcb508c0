"""Engines on the embedded world.

    python -m benchmarks.bench_engine [--questions 16] [--repeats 5] [--vllm] [--clock cpu]
    python -m benchmarks.bench_engine --model smollm2 --max-response 128 --skip-generate --vllm

Generation: the script's own agents (same policy, questions and searches) on our engine, on vLLM (--vllm,
with the tiny policy that it can run), and on a plain loop that calls model.generate once a turn for everyone
who waits; as independent chains and as AT2PO's trees. Medians of alternating repeats; compare rows, not
machines, and on a busy machine CPU seconds (--clock cpu, one thread). --model: a folder instead of the tiny
policy, on the same questions; without a warm-up it writes no tag, so that a chain is one turn of
--max-response tokens.
"""

import argparse
import asyncio
import platform
import time
from dataclasses import replace

import torch
import transformers

import at2po
from common.engine import Generation, TransformersEngine
from common.rollout import Policy
from common.run import Run
from common.world.splits import world_split


def setup(args):
    cfg = at2po.parse_args(["--warmup-steps", str(args.warmup_steps)])  # the world's
    longest = args.max_response or cfg.max_response
    engine = "vllm" if args.vllm else "transformers"
    cfg = replace(cfg, engine=engine, precision="fp32", max_response=longest)
    policy = Run(cfg).policy(args.model or at2po.tiny_policy(cfg))
    split = world_split("train", questions=2000)
    return cfg, policy, replace(split, questions=split.questions[:args.questions])


class TurnEngine:
    """The textbook loop behind the engine's interface: whoever waits takes a turn in one call, all wait for
    the slowest, and every call encodes its contexts from the start.

    generate(contexts) -> list of sampled ids."""

    def __init__(self, tokenizer, generate):
        self.tokenizer = tokenizer
        self.generate_ids = generate
        self.waiting = []
        self.sampled_tokens = 0

    @property
    def busy(self):
        return bool(self.waiting)

    def sync(self, model):
        pass

    def sleep(self):
        pass

    async def generate(self, prompt_ids, stop, max_tokens, **sampling):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, stop, future))
        return await future

    def step(self):
        waiting = self.waiting
        self.waiting = []
        sampled = self.generate_ids([prompt_ids for prompt_ids, _, _ in waiting])
        for (_, stop, future), ids in zip(waiting, sampled, strict=True):
            self.sampled_tokens += len(ids)
            text = self.tokenizer.decode(ids)
            stopped_by = next((s for s in stop if s in text), "eos")
            future.set_result(Generation(ids, [-.1] * len(ids), stopped_by))


def plain_generate(tokenizer, model):
    """generate(contexts) by model.generate on the left-padded batch."""
    pad = tokenizer.pad_token_id
    tags = (at2po.SEARCH[1], at2po.ANSWER[1])
    stops = {tokenizer.convert_tokens_to_ids(t) for t in tags}
    stops.add(tokenizer.eos_token_id)
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=256,
        eos_token_id=sorted(stops), pad_token_id=pad)

    def up_to_stop(ids):
        for n, token in enumerate(ids):
            if token in stops:
                return ids[:n + 1]
        return ids

    def generate(contexts):
        width = max(map(len, contexts))
        ids = []
        mask = []
        for context in contexts:
            padding = width - len(context)
            ids.append([pad] * padding + context)
            mask.append([0] * padding + [1] * len(context))
        model.eval()
        with torch.no_grad():
            out = model.generate(
                torch.tensor(ids),
                attention_mask=torch.tensor(mask),
                generation_config=config)
        return [up_to_stop(sampled) for sampled in out[:, width:].tolist()]

    return generate


CLOCKS = {"wall": time.time, "cpu": time.process_time}
clock = time.time


def rollouts(engine, policy, split, cfg, at_a_time):
    """(sampled tokens, seconds) of one training step's rollouts, `at_a_time` questions together."""
    engine.sync(policy.model)
    sampler = Policy(policy.model, policy.tokenizer, engine)
    tokens = engine.sampled_tokens
    started = clock()
    for i in range(0, len(split.questions), at_a_time):
        questions = split.questions[i:i + at_a_time]
        at2po.rollout_trees(sampler, split.retriever, questions, cfg, 0)
    return engine.sampled_tokens - tokens, clock() - started


def compare_engines(engines, policy, split, cfg, repeats):
    """[(name, sampled tokens, seconds)], the median repeat of each of (name, engine, questions at a time)."""
    runs = {name: [] for name, _, _ in engines}
    for _ in range(repeats + 1):
        for name, engine, at_a_time in engines:
            tokens, seconds = rollouts(engine, policy, split, cfg, at_a_time)
            runs[name].append((tokens, seconds))
    rows = []
    for name, measured in runs.items():
        by_speed = sorted(measured[1:], key=lambda r: r[0] / r[1])  # the first round warms up
        rows.append((name, *by_speed[repeats // 2]))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="", help="a policy's folder; empty = the tiny one")
    parser.add_argument("--max-response", type=int, default=0, help="tokens; 0 = the world's limit")
    parser.add_argument("--skip-generate", action="store_true", help="the engines alone")
    parser.add_argument("--vllm", action="store_true", help="a row for vLLM")
    parser.add_argument("--warmup-steps", type=int, default=900, help="of the tiny policy")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of the seconds")
    args = parser.parse_args()
    global clock
    clock = CLOCKS[args.clock]
    transformers.utils.logging.set_verbosity_error()
    cfg, policy, split = setup(args)
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {torch.get_num_threads()} threads, "
          f"torch {torch.__version__}, transformers {transformers.__version__}; "
          f"{args.questions} questions, {args.repeats} repeats, {args.clock} seconds\n")
    generate = plain_generate(policy.tokenizer, policy.model)
    plain = TurnEngine(policy.tokenizer, generate)
    ours = TransformersEngine(
        policy.model, policy.tokenizer, cache_gb=cfg.cache_gb, prefix_cache_gb=cfg.cache_gb)
    engines = [("TransformersEngine (ours)", ours, args.questions)]
    if args.vllm:
        engines.append(("vLLM", policy.engine, args.questions))
    if not args.skip_generate:
        engines += [
            ("model.generate, one call per turn, all questions together", plain, args.questions),
            ("model.generate, one call per turn, one question at a time", plain, 1),
        ]
    print("| generation | workload | sampled tokens | seconds | tokens/s | ours / this |")
    print("|---|---|---|---|---|---|")
    for workload, expansion in (("chains", "none"), ("tree", "entropy")):
        c = replace(cfg, expansion=expansion)
        rows = compare_engines(engines, policy, split, c, args.repeats)
        _, our_tokens, our_seconds = rows[0]
        for name, tokens, seconds in rows:
            speed = tokens / seconds
            ratio = our_tokens / our_seconds / speed
            print(f"| {name} | {workload} | {tokens} | {seconds:.2f} | {speed:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
