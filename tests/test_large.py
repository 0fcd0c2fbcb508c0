"""The simulated large step at a tiny size; what was made faster for it equals its older, plainer form."""

import itertools
from random import Random

import pytest
import torch

import at2po
from benchmarks import bench_large
from common import rollout
from common.rollout import Trajectory, Turn

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


@pytest.mark.parametrize("seed", range(40))
def test_collate_equals_the_one_that_went_token_by_token(seed):
    leaves, share, pack_tokens, pad_id = random_case(Random(seed))
    made = vars(rollout.collate(leaves, share, pack_tokens, pad_id))
    literal = collate_of_lists(leaves, share, pack_tokens, pad_id)
    for name, expected in literal.items():
        assert made[name].dtype == expected.dtype and torch.equal(made[name], expected), name


def random_case(random):
    """Leaves of a few trees in packing order or any, and how they are packed."""
    def turn():
        n = random.randint(1, 6)
        observed = [random.randrange(99) for _ in range(random.randint(0, 5))]
        ids = [random.randrange(99) for _ in range(n)]
        return Turn(ids, [-random.random() for _ in ids], "", "", observed)

    leaves = []
    for q in range(random.randint(1, 4)):
        prompt = [random.randrange(99) for _ in range(random.randint(1, 9))]
        stems = [[]]
        for _ in range(random.randint(1, 12)):
            stems.append([*random.choice(stems), turn()])
        leaves += [Trajectory(str(q), prompt, turns) for turns in stems if turns]
    for leaf in leaves:
        if random.random() < .8:
            leaf.advantages = [random.gauss(0, 1) for _ in leaf.turns]
    random.shuffle(leaves)
    if random.random() < .7:
        leaves = rollout.prefix_order(leaves)
    return leaves, random.random() < .7, random.choice([1, 15, 40, 1000]), random.choice([0, 7])


def collate_of_lists(trajectories, share_prefixes, pack_tokens, pad_id):
    """{field of a Batch: tensor}, by lists with an entry a token."""
    B = len(trajectories)
    T = max(t.length for t in trajectories)
    input_ids = torch.full((B, T), pad_id)
    response_mask = torch.zeros(B, T, dtype=torch.bool)
    turn_ids = torch.full((B, T), -1)
    advantages = torch.zeros(B, T)
    rollout_logprobs = torch.zeros(B, T)
    gather = torch.full((B, T), -1)
    packs, predecessor, target = [], [], []
    prompts = {}
    for b, trajectory in enumerate(trajectories):
        path = rollout._path(trajectory, prompts)
        if not packs or not share_prefixes or packs[-1].room_wanted(path) > pack_tokens:
            packs.append(PackOfLists())
        pack = packs[-1]
        pack.close_all_but(path)
        position = 0
        for k, (key, ids, turn) in enumerate(path):
            if key not in pack.open:
                pack.add(key, ids, position, len(target))
                if turn is not None:
                    parent, _ = pack.open[path[k - 1][0]]
                    begin = pack.open[key][0].start
                    here = [parent.stop - 1, *range(begin, begin + len(turn.ids) - 1)]
                    predecessor += [(len(packs) - 1, i) for i in here]
                    target += turn.ids
            input_ids[b, position:position + len(ids)] = torch.tensor(ids)
            if turn is not None:
                span = slice(position, position + len(turn.ids))
                _, row = pack.open[key]
                response_mask[b, span] = True
                turn_ids[b, span] = k - 1
                rollout_logprobs[b, span] = torch.tensor(turn.logprobs)
                gather[b, span] = row + torch.arange(len(turn.ids))
                if trajectory.advantages:
                    advantages[b, span] = trajectory.advantages[k - 1]
            position += len(ids)
    gather[gather < 0] = len(target)
    N = max(len(p.ids) for p in packs)
    return dict(
        input_ids=input_ids, response_mask=response_mask, turn_ids=turn_ids, advantages=advantages,
        rollout_logprobs=rollout_logprobs, gather=gather, target=torch.tensor(target),
        predecessor=torch.tensor([p * N + i for p, i in predecessor]), **stacked(packs, N, pad_id))


class PackOfLists:
    def __init__(self):
        self.ids, self.positions, self.end, self.open = [], [], [], {}

    def room_wanted(self, path):
        return len(self.ids) + sum(len(ids) for key, ids, _ in path if key not in self.open)

    def close_all_but(self, path=()):
        keys = {key for key, _, _ in path}
        for key in [k for k in self.open if k not in keys]:
            tokens, _ = self.open.pop(key)
            self.end[tokens] = [len(self.ids)] * (tokens.stop - tokens.start)

    def add(self, key, ids, position, row):
        self.open[key] = (slice(len(self.ids), len(self.ids) + len(ids)), row)
        self.ids += ids
        self.positions += range(position, position + len(ids))
        self.end += [0] * len(ids)


def stacked(packs, N, pad_id):
    P = len(packs)
    packed_ids = torch.full((P, N), pad_id)
    positions = torch.zeros(P, N, dtype=torch.long)
    end = torch.arange(1, N + 1).repeat(P, 1)
    for p, pack in enumerate(packs):
        pack.close_all_but()
        n = len(pack.ids)
        packed_ids[p, :n] = torch.tensor(pack.ids)
        positions[p, :n] = torch.tensor(pack.positions)
        end[p, :n] = torch.tensor(pack.end)
    lengths = torch.tensor([len(p.ids) for p in packs])
    return dict(packed_ids=packed_ids, positions=positions, end=end, lengths=lengths)


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
    cfg = at2po.replace(at2po.Config(), rollout="tree", **SMALL)
    questions = [at2po.data.Question(str(i), "who", ["right"]) for i in range(8)]
    search = bench_large.InstantSearch(text, watch)
    done = at2po.trajectories_of(at2po.rollout_trees(policy, search, questions, cfg, 1))
    assert rollout.mean(not t.info.problem for t in done) > .6
    assert {t.reward for t in done} == {0.0, 1.0}
