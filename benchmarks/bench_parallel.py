"""Mujica's layers: independent sub-questions side by side against one after another.

    python -m benchmarks.bench_parallel

A planner that asks one, or three, sub-questions at once (its turns are given), workers that really search,
read and write (the tiny policy, two cores). Prints one Markdown table; seconds are medians, of this machine
and run: compare the rows.
"""

import argparse
import asyncio
import statistics
import time
from dataclasses import replace

import mygo_mujica
from common import data
from common.engine import Generation, TransformersEngine
from common.model import load_policy
from common.rollout import Policy
from common.world.splits import world_split

WORKLOADS = (  # name, sub-questions, whether workers wait for one another
    ("one sub-question", 1, False),
    ("three, side by side", 3, False),
    ("three, one after another", 3, True),
)


class GivenPlans(TransformersEngine):
    """The real engine, but planners say what they are given; one at a time: workers wait for one another."""

    def __init__(self, model, tokenizer, plans, one_at_a_time):
        super().__init__(model, tokenizer)
        self.plans = plans
        self.one_at_a_time = one_at_a_time
        self.lock = asyncio.Lock()

    async def generate(self, prompt_ids, **request):
        text = self.tokenizer.decode(prompt_ids)
        if "Context" not in text:
            plan = self.plans["Obs" in text]
            ids = self.tokenizer(plan, add_special_tokens=False)["input_ids"]
            ids.append(self.tokenizer.eos_token_id)
            return Generation(ids, [0.0] * len(ids), "eos")
        if not self.one_at_a_time:
            return await super().generate(prompt_ids, **request)
        async with self.lock:
            return await super().generate(prompt_ids, **request)


def films_with_a_director(graph):
    films = []
    for name in graph.graph:
        if any(r == "director" for _, r, _ in graph.facts(name)):
            films.append(name)
    return films


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    cfg = replace(mygo_mujica.Config(), **mygo_mujica.WORLD)
    model, tokenizer = load_policy(mygo_mujica.tiny_policy(cfg))
    split = world_split("dev", questions=50)
    place = mygo_mujica.Place("text", **vars(split))
    films = films_with_a_director(place.graph)
    question = data.Question("q", "Which of them?", ["a"])
    times = {}
    for _ in range(repeats):
        for name, count, apart in WORKLOADS:
            searches = [f"<search> director of {f} </search>" for f in films[:count]]
            plans = (" ".join(searches), "<answer> a </answer>")
            engine = GivenPlans(model, tokenizer, plans, apart)
            policy = Policy(model, tokenizer, engine)
            team = mygo_mujica.Team(policy, place, cfg, temperature=0.0)
            started = time.perf_counter()
            done = team.run([mygo_mujica.plan(team, question, "a", seed=0)])[0]
            seconds = time.perf_counter() - started
            workers = mygo_mujica.examples(done)[1:]
            tokens = sum(worker.sampled_tokens for worker in workers)
            times.setdefault((name, tokens), []).append(seconds)
    base = statistics.median(next(iter(times.values())))
    print("| one question, a layer of | sampled tokens of workers | seconds | to one sub-question |")
    print("|---|---|---|---|")
    for (name, tokens), seconds in times.items():
        median = statistics.median(seconds)
        print(f"| {name} | {tokens} | {median:.3f} | {median / base:.2f} |")


if __name__ == "__main__":
    main()
