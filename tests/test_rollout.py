"""Literal trajectories and their exact masks; packing; the loop that drives agents."""

import asyncio
import itertools
from random import Random

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from common import rollout, tree_blocks
from common.data import Question
from common.gpu import tree_attention
from common.model import token_logprobs, token_values
from common.rollout import Trajectory, Turn, collate
from common.world import tiny


def turn(ids, observation=(), logprobs=None):
    return Turn(list(ids), logprobs or [-0.1 * i for i in range(1, len(ids) + 1)], "", "", list(observation))


def three_turns():
    # the second has an empty observation
    return Trajectory("q", [5, 6], [turn([7, 8], [9]), turn([10]), turn([11, 12, 13])])


def test_a_literal_trajectory():
    trajectory = three_turns()
    trajectory.advantages = [.5, -1.0, 2.0]
    b = collate([trajectory])
    assert b.advantages.tolist() == [[0, 0, .5, .5, 0, -1, 2, 2, 2]]
    assert b.input_ids.tolist() == [[5, 6, 7, 8, 9, 10, 11, 12, 13]]
    assert b.response_mask.int().tolist() == [[0, 0, 1, 1, 0, 1, 1, 1, 1]]
    assert b.turn_ids.tolist() == [[-1, -1, 0, 0, -1, 1, 2, 2, 2]]  # adjacent turns stay apart
    assert b.rollout_logprobs[0].tolist() == pytest.approx([0, 0, -0.1, -0.2, 0, -0.1, -0.1, -0.2, -0.3])
    assert b.target.tolist() == [7, 8, 10, 11, 12, 13] and b.predecessor.tolist() == [1, 2, 4, 5, 6, 7]


def tree():
    """Two leaves share a turn, a third shares the prompt, a fourth has another prompt."""
    shared = turn([20, 21], [22])
    other = Trajectory("p", [3, 4, 5], [turn([30, 31, 32])])
    return [
        Trajectory("q", [1, 2], [shared, turn([23])]),
        other,
        Trajectory("q", [1, 2], [turn([26, 27])]),
        Trajectory("q", [1, 2], [shared, turn([24], [25]), turn([28, 29])])]


def seen_by(end):
    """(P, N, N) bool of Batch.end: whether query i sees key j."""
    i = torch.arange(end.shape[1])
    return (i <= i[:, None]) & (i[:, None] < end[:, None])


def test_shared_turns_are_packed_once_with_their_ancestors():
    ordered = rollout.prefix_order(tree())
    assert [t.turns[-1].ids for t in ordered] == [[23], [28, 29], [26, 27], [30, 31, 32]]
    b = collate(ordered)
    assert b.packed_ids.tolist() == [[1, 2, 20, 21, 22, 23, 24, 25, 28, 29, 26, 27, 3, 4, 5, 30, 31, 32]]
    assert b.positions.tolist() == [[0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 2, 3, 0, 1, 2, 3, 4, 5]]
    mask = seen_by(b.end)[0].int()
    assert mask[5].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert mask[8].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 4, 6, 7, 8]  # not the sibling at 5
    assert mask[10].nonzero()[:, 0].tolist() == [0, 1, 10]
    assert mask[15].nonzero()[:, 0].tolist() == [12, 13, 14, 15]
    assert b.target.numel() == 11  # the shared tokens once


@pytest.mark.parametrize("seed", range(6))
def test_the_mask_of_any_trees_in_any_order_is_that_of_their_ancestors(seed):
    """Every token of a random tree is its own word, so the paths name its ancestors."""
    random = Random(seed)
    word = itertools.count(1)
    leaves = []
    for q in range(3):
        prompt = [next(word) for _ in range(random.randint(1, 4))]
        stems = [[]]
        for _ in range(8):
            stem = random.choice(stems)
            stems.append([*stem, turn([next(word) for _ in range(random.randint(1, 3))], [next(word)])])
        leaves += [Trajectory(str(q), prompt, turns) for turns in stems if turns]
    random.shuffle(leaves)
    if seed % 2:
        leaves = rollout.prefix_order(leaves)
    b = collate(leaves, pack_tokens=random.choice([10, 30, 500]))
    mask = seen_by(b.end)
    turns = [[i for turn in t.turns for i in turn.ids + turn.observation_ids] for t in leaves]
    paths = [t.prompt_ids + ids for t, ids in zip(leaves, turns, strict=True)]
    before = {path[k]: path[:k + 1] for path in paths for k in range(len(path))}
    for p, n in enumerate(b.lengths.tolist()):
        ids = b.packed_ids[p]
        for i in range(n):
            assert ids[mask[p, i]].tolist() == before[int(ids[i])]
        padding = mask[p, n:].nonzero().tolist()
        assert padding == [[i, n + i] for i in range(len(padding))]     # sees itself alone


def long_trees(seed, turns=25):
    """Leaves whose packs have many of FlexAttention's blocks."""
    random = Random(seed)
    stems = [[]]
    for _ in range(turns):
        ids = random.choices(range(5, 60), k=random.choice([1, 40, 130, 300]))
        stems.append([*random.choice(stems), turn(ids, logprobs=[0.0] * len(ids))])
    return [Trajectory(str(i % 3), [i % 3] * 100, turns) for i, turns in enumerate(stems) if turns]


@pytest.mark.parametrize("seed", range(4))
def test_the_blocks_of_tree_attention_are_those_of_the_rule(seed):
    b = collate(rollout.prefix_order(long_trees(seed)), pack_tokens=2000)
    length = tree_attention.padded_length(b.end.shape[1])
    made = tree_attention.block_mask(b.end, length)
    P = len(b.end)
    literal = create_block_mask(made.mask_mod, P, None, length, length, device="cpu")
    for what in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(made, what), getattr(literal, what))
    assert torch.equal(made.to_dense(), literal.to_dense())
    assert 0 < made.full_kv_num_blocks.sum() and made.sparsity() > 40


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("block", [3, 64])
def test_attention_by_blocks_is_attention_under_the_dense_mask(dtype, close, block, monkeypatch):
    """Values and gradients; six query heads, of which three share keys."""
    monkeypatch.setattr(tree_blocks, "BLOCK", block)
    end = collate(rollout.prefix_order(long_trees(1, turns=8)), pack_tokens=400).end
    P, N = end.shape
    torch.manual_seed(0)
    given = [torch.randn(P, heads, N, 16).to(dtype).requires_grad_() for heads in (6, 2, 2)]
    up = torch.randn(P, N, 6, 16)
    found, _ = tree_blocks.block_attention(None, *given, end[:, None, None], scaling=.3)
    found = found, *torch.autograd.grad((found * up).sum(), given)
    wide = [x.detach().double().requires_grad_() for x in given]
    out = torch.nn.functional.scaled_dot_product_attention(
        *wide, seen_by(end)[:, None], scale=.3, enable_gqa=True).transpose(1, 2)
    expected = out, *torch.autograd.grad((out * up).sum(), wide)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype and (one - other).norm() < close * other.norm()


@pytest.mark.parametrize("trees, pack_tokens", [(tree(), 11), (long_trees(0, 9), 900)], ids=["one", "many"])
def test_flex_attention_computes_what_the_dense_mask_does(model, trees, pack_tokens, monkeypatch):
    b = collate(rollout.prefix_order(trees), pack_tokens=pack_tokens)
    if pack_tokens > 11:  # blocks that are skipped, computed whole, computed in part
        made = tree_attention.block_mask(b.end, tree_attention.padded_length(b.end.shape[1]))
        assert made.full_kv_num_blocks.sum() > 0 and made.sparsity() > 30
    with torch.no_grad():
        dense = token_logprobs(model, b)
        monkeypatch.setattr(model.config, "_attn_implementation", "tree")
        assert (token_logprobs(model, b) - dense).abs().max() < 1e-5


def test_packs_are_closed_and_micro_batches_cover_everything():
    assert collate(rollout.prefix_order(tree()), pack_tokens=11).packed_ids.shape == (2, 10)
    for limit in (1, 10, 14, 100):
        parts = rollout.micro_batches(tree(), limit)
        assert sum(map(len, parts)) == 4
        assert all(len(p) == 1 or collate(p).lengths.sum() <= limit for p in parts)
        apart = rollout.micro_batches(tree(), limit, share_prefixes=False)
        assert sum(map(len, apart)) == 4
        assert all(len(p) == 1 or collate(p, False).packed_ids.numel() <= limit for p in apart)


@pytest.fixture(scope="module")
def model():
    tokenizer = tiny.tiny_tokenizer([str(i) for i in range(60)], ["<a>"])
    return tiny.tiny_model(tokenizer, width=32)


def loss_and_gradient(model, trajectories, **how):
    model.zero_grad()
    total = 0.0
    parts = how.pop("parts", [trajectories])
    for part in parts:
        b = collate(part, **how)
        # an arbitrary upstream gradient
        weights = torch.where(b.response_mask, (b.input_ids * 37 % 11).float() - 4, 0.0)
        loss = (token_logprobs(model, b, 0.7) * weights).sum()
        loss.backward()
        total += float(loss.detach())
    return total, torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("how", [
    dict(pack_tokens=11), dict(pack_tokens=6), dict(pad_id=9), dict(parts="each"),
    dict(order="reversed"), dict(share_prefixes=False)])
def test_sharing_packing_order_and_micro_batches_change_nothing(model, how):
    trajectories = rollout.prefix_order(tree())
    loss, gradient = loss_and_gradient(model, trajectories, share_prefixes=False)
    how = dict(how)
    if how.pop("order", None):
        trajectories = trajectories[::-1]
    if how.get("parts"):
        how["parts"] = [[t] for t in trajectories]
    other, other_gradient = loss_and_gradient(model, trajectories, **how)
    assert other == pytest.approx(loss, rel=1e-5)
    assert (other_gradient - gradient).norm() / gradient.norm() < 1e-5


def test_token_logprobs_equal_a_plain_forward(model):
    b = collate([three_turns()])
    logprobs = (model(b.input_ids).logits[0, :-1].double() / 0.7).log_softmax(-1)
    own = logprobs.gather(1, b.input_ids[0, 1:, None])[:, 0].float()
    expected = torch.where(b.response_mask[0, 1:], own, 0.0)
    torch.testing.assert_close(token_logprobs(model, b, 0.7)[0, 1:], expected, atol=1e-5, rtol=1e-5)


class Echo:
    """An engine that answers a request with the sum of its ids, a step a batch."""

    def __init__(self):
        self.waiting, self.batches = [], []

    async def generate(self, prompt_ids, **kwargs):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, future))
        return await future

    busy = property(lambda self: bool(self.waiting))

    def step(self):
        batch, self.waiting = self.waiting, []
        self.batches.append(len(batch))
        for ids, future in batch:
            if not future.done():
                future.set_result(sum(ids))


class Words:
    def __init__(self, remote=False):
        self.calls, self.remote = [], remote

    def search(self, queries, k):
        self.calls.append((len(queries), k))
        if "boom" in queries:
            raise RuntimeError("the service is gone")
        return [[q] * k for q in queries]


@pytest.mark.parametrize("remote", [False, True])
def test_agents_are_batched_and_do_not_wait_for_each_other(remote):
    engine, words = Echo(), Words(remote)
    search = rollout.BatchedSearch(words)

    async def agent(i):
        total = 0
        for _ in range(1 + i % 2):
            total += await engine.generate([i])
        both = await asyncio.gather(search(str(total), 2), search("x", 2))
        return both[0][0], i

    assert rollout.run_agents([agent(i) for i in range(6)], engine, search) == [
        ("0", 0), ("2", 1), ("2", 2), ("6", 3), ("4", 4), ("10", 5)]
    assert engine.batches[0] == 6 and sum(engine.batches) == 9 and words.calls[0] == (6, 2)


def test_progress_is_told_at_every_step_before_any_agent_has_ended():
    engine, told = Echo(), []
    search = rollout.BatchedSearch(Words())

    async def agent(i):
        return await engine.generate([i]) + await engine.generate([i])

    rollout.run_agents([agent(i) for i in range(3)], engine, search, lambda *counts: told.append(counts))
    assert told[:2] == [(0, 3, f", the others at token {n}") for n in (0, 1)] and told[-1] == (3, 3)


@pytest.mark.parametrize("remote", [False, True])
def test_the_first_failure_reaches_the_caller(remote):
    engine = Echo()
    search = rollout.BatchedSearch(Words(remote))

    async def agent(i):
        await engine.generate([i])
        return await search("boom" if i == 3 else "fine", 1)

    with pytest.raises(RuntimeError, match="the service is gone"):
        rollout.run_agents([agent(i) for i in range(6)], engine, search)


def test_seeds_are_stable():
    assert rollout.stable_seed(0, "q", "chain1", 2) == 4496476305615841176  # on every machine
    assert len({rollout.stable_seed(0, "q", p, t) for p in ("a", "b") for t in range(5)}) == 10


# ---- where a loop runs already, as in a notebook's cell

async def three(engine, ended):
    try:
        return [await engine.generate([3, 4]) for _ in range(3)]
    finally:
        ended.append("ended")


def in_a_cell(function):
    async def cell():
        return function()
    return asyncio.run(cell())


def test_agents_run_in_a_cell_of_a_notebook():
    def cell():
        engine, ended = Echo(), []
        agents = [three(engine, ended) for _ in range(2)]
        return rollout.run_agents(agents, engine, rollout.BatchedSearch(None)), ended
    assert in_a_cell(cell) == ([[7] * 3] * 2, ["ended"] * 2)


def test_an_exception_in_a_cell_comes_out_and_ends_the_agents():
    async def fails():
        raise KeyError("mine")

    ended = []

    def cell():
        with pytest.raises(KeyError):
            rollout.run_agents([three(Echo(), ended), fails()], Echo(), rollout.BatchedSearch(None))
    in_a_cell(cell)
    assert ended == ["ended"]


def test_v_reads_the_state_before_a_token():
    places = torch.arange(9.0).view(1, 9, 1)
    batch = collate([three_turns()])
    assert token_values(torch.nn.Identity(), batch, places).tolist() == [[0, 0, 1, 2, 0, 4, 5, 6, 7]]


def test_a_question_that_is_drawn_twice_gets_two_seeds():
    a, b = (Question(name, "Who?", []) for name in "ab")
    seeds = rollout.question_seeds([a, b, a], 0)
    assert len(set(seeds)) == 3 and seeds[:2] == rollout.question_seeds([a, b], 0)


def test_nobody_asks_for_the_repr_of_what_agents_return():
    asked = []

    class Tree:
        def __repr__(self):
            asked.append(self)
            return "megabytes"

    async def agent():
        return Tree()

    done = rollout.run_agents([agent() for _ in range(3)], Echo(), rollout.BatchedSearch(None))
    assert [type(tree) for tree in done] == [Tree] * 3 and not asked
