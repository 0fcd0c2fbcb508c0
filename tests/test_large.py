"""The simulated large step at a tiny size."""

import itertools
from dataclasses import replace
from random import Random

import at2po
from benchmarks import bench_large
from common import rollout

SMALL = dict(chains=3, expand=2, rounds=1)


def test_a_tiny_step_has_all_parts_and_leaves_the_code_as_it_was():
    before = [getattr(owner, name) for _, owner, name in bench_large.PARTS]
    result = bench_large.measure(2, **SMALL)
    assert [getattr(owner, name) for _, owner, name in bench_large.PARTS] == before
    parts = {part for part, _, _ in bench_large.PARTS}
    assert result["seconds"].keys() == parts | {"ids to texts", "the rest of the update"}
    assert result["trajectories"] == 10 and result["updates"] == 1
    assert 1 < result["turns a trajectory"] <= 8
    assert result["packed tokens"] > 10 * 300
    results = {2: result, 4: result}
    assert "| collate |" in bench_large.table(results, "seconds")
    assert "| 2 | 10 |" in bench_large.against_gpu(results)


def test_time_inside_another_part_is_its_own(monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(bench_large.time, "process_time", lambda: next(clock))
    watch = bench_large.Stopwatch()                 # 0
    with watch.part("outer"):                       # 1
        with watch.part("inner"):                   # 2
            next(clock)                             # 3
                                                    # 4
        next(clock)                                 # 5
    assert watch.seconds == {"outer": 1 + 2, "inner": 2}


def test_nobody_asks_for_the_repr_of_what_agents_return():
    asked = []

    class Tree:
        def __repr__(self):
            asked.append(self)
            return "megabytes"

    async def agent():
        return Tree()

    class Idle:
        busy = False

    search = rollout.BatchedSearch(None)
    done = rollout.run_agents([agent() for _ in range(3)], Idle(), search)
    assert [type(tree) for tree in done] == [Tree] * 3 and not asked


def test_the_made_up_questions_are_answered_in_valid_format():
    watch = bench_large.Stopwatch()
    text = bench_large.made_up_text(Random(0), 60_000)
    tokenizer = bench_large.bpe_tokenizer(text)
    engine = bench_large.InstantEngine(tokenizer, text, watch)
    policy = rollout.Policy(bench_large.OneWeight(), tokenizer, engine)
    cfg = replace(at2po.Config(), **SMALL)
    questions = [at2po.data.Question(str(i), "who", ["right"]) for i in range(8)]
    search = bench_large.InstantSearch(text, watch)
    roots = at2po.rollout_trees(policy, search, questions, cfg, 1)
    at2po.score_trees(roots, questions, cfg)
    done = at2po.trajectories_of(roots)
    assert rollout.mean(not t.info.problem for t in done) > .6
    assert {t.reward for t in done} == {0.0, 1.0}
