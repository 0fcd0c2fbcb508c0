"""Mujica's layers: independent sub-questions side by side against one after another. python -m benchmarks.bench_parallel

A planner that asks one, or three, sub-questions at once (its turns are given), workers that really search, read and write (the tiny policy, two
cores). Prints one Markdown table; seconds are medians, of this machine and run: compare the rows.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import replace

import mygo_mujica
from common import data, rollout, task, training
from common.engine import Generation, TransformersEngine


class GivenPlans(TransformersEngine):
    """The real engine, but planners say what they are given; one at a time: workers wait for one another."""
    plans, one_at_a_time, lock = (), False, None

    async def generate(self, prompt_ids, **request):
        text = self.tokenizer.decode(prompt_ids)
        if "Context" not in text:
            ids = self.tokenizer(self.plans["Obs" in text], add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
            return Generation(ids, [0.0] * len(ids), "eos")
        if not self.one_at_a_time:
            return await super().generate(prompt_ids, **request)
        async with self.lock:
            return await super().generate(prompt_ids, **request)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    cfg = replace(mygo_mujica.Config(), **{**mygo_mujica.WORLD, "envs": "text"})
    model, tokenizer = training.load_policy(mygo_mujica.tiny_policy(cfg))
    split = task.world_split("dev", questions=50)
    films = [name for name in split.graph.graph if any(r == "director" for _, r, _ in split.graph.facts(name))][:3]
    question = data.Question("q", "Which of them?", ["a"])
    times = {}
    for _ in range(repeats):
        for name, count, apart in (("one sub-question", 1, False), ("three, side by side", 3, False), ("three, one after another", 3, True)):
            engine = GivenPlans(model, tokenizer)
            engine.plans = (" ".join(f"<search> director of {f} </search>" for f in films[:count]), "<answer> a </answer>")
            engine.one_at_a_time, engine.lock = apart, asyncio.Lock()
            policy = mygo_mujica.Policy(engine, tokenizer, rollout.BatchedSearch(split.retriever))
            started = time.perf_counter()
            done = rollout.run_agents([mygo_mujica.plan(policy, split, question, "a", cfg, 0, 0.0)], engine, policy.search)[0]
            times.setdefault((name, sum(w.sampled_tokens for w in mygo_mujica.examples(done)[1:])), []).append(time.perf_counter() - started)
    base = statistics.median(next(iter(times.values())))
    print("| one question, a layer of | sampled tokens of workers | seconds | to one sub-question |\n|---|---|---|---|")
    for (name, tokens), seconds in times.items():
        print(f"| {name} | {tokens} | {statistics.median(seconds):.3f} | {statistics.median(seconds) / base:.2f} |")


if __name__ == "__main__":
    main()
