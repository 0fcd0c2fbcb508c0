"""The engine against a plain forward pass; independence of batching; prefixes; stop strings."""

import asyncio

import pytest
import torch

from common import rollout
from common.engine import TransformersEngine
from common.world import tiny


@pytest.fixture(scope="module")
def policy():
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>", "</a>"])
    model = tiny.tiny_model(tokenizer, width=32)
    for p in model.parameters():  # larger logits: no sample hangs on the last bit of a sum
        p.data.mul_(1.5)
    return model, tokenizer


def generate(policy, requests, max_batch=256, engine=None, **kwargs):
    engine = engine or TransformersEngine(*policy, max_batch=max_batch)
    options = {"max_tokens": 12, "temperature": 1.0} | kwargs
    agents = [engine.generate(ids, seed=seed, **options) for ids, seed in requests]
    return rollout.run_agents(agents, engine, rollout.BatchedSearch(None)), engine


REQUESTS = [([5 + i % 7, 6, 7 + i % 3] * (1 + i % 4), i) for i in range(30)]


def test_logprobs_equal_a_plain_forward(policy):
    model, _ = policy
    for temperature in (1.0, 0.5):
        results, _ = generate(policy, REQUESTS, temperature=temperature)
        for (ids, _), g in zip(REQUESTS, results, strict=True):
            full = torch.tensor([ids + g.token_ids])
            with torch.no_grad():
                logprobs = (model(full).logits[0].float() / temperature).log_softmax(-1)
            expected = logprobs[len(ids) - 1 : -1].gather(1, full[0, len(ids) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(g.logprobs), expected, atol=2e-5, rtol=1e-4)


def test_samples_do_not_depend_on_the_batch(policy):
    together, _ = generate(policy, REQUESTS)
    reversed_, _ = generate(policy, REQUESTS[::-1])
    two_at_a_time, _ = generate(policy, REQUESTS, max_batch=2)
    alone = [generate(policy, [r])[0][0] for r in REQUESTS[:8]]
    ids = [g.token_ids for g in together]
    assert ids == [g.token_ids for g in reversed_][::-1] == [g.token_ids for g in two_at_a_time]
    assert ids[:8] == [g.token_ids for g in alone]
    assert (
        len({tuple(i) for i in ids}) > 20
        and generate(policy, [(REQUESTS[0][0], 99)])[0][0].token_ids != ids[0]
    )


def test_prefixes_are_reused_and_change_nothing(policy):
    engine = TransformersEngine(*policy)
    first, _ = generate(policy, [(list(range(5, 35)), 1)], engine=engine)
    longer = list(range(5, 35)) + first[0].token_ids + [6, 7, 8]
    before = engine.reused_tokens
    warm, _ = generate(policy, [(longer, 2), (longer, 3), (list(range(5, 35)), 4)], engine=engine)
    assert engine.reused_tokens - before >= 32 + len(longer) + 24
    cold, _ = generate(policy, [(longer, 2), (longer, 3), (list(range(5, 35)), 4)])
    assert [g.token_ids for g in warm] == [g.token_ids for g in cold]
    for a, b in zip(warm, cold, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
    engine.sync(engine.model)
    assert not engine.prefixes and not engine.blocks


def test_a_small_prefix_cache_forgets_the_oldest(policy):
    engine = TransformersEngine(*policy, prefix_cache_gb=100_000 / 2**30)
    results, _ = generate(policy, REQUESTS, engine=engine)
    assert engine.prefix_bytes <= 100_000 and len(engine.prefixes) < 30
    assert set(engine.blocks.values()) <= set(engine.prefixes)
    assert [g.token_ids for g in results] == [g.token_ids for g in generate(policy, REQUESTS)[0]]


def test_memory_limits_the_batch_and_changes_nothing(policy):
    # three sequences of 24 tokens
    engine = TransformersEngine(*policy, cache_gb=3 * (12 + 12) * 2 * 2 * 2 * 8 * 4 / 2**30)
    results, _ = generate(policy, REQUESTS, engine=engine)
    assert (
        engine.cache.kv.shape[2] <= 12
        and [g.token_ids for g in results] == [g.token_ids for g in generate(policy, REQUESTS)[0]]
    )


def test_cancelled_generations_leave_the_others_alone(policy):
    engine = TransformersEngine(*policy)

    async def main():
        tasks = [
            asyncio.ensure_future(engine.generate(ids, seed=seed, max_tokens=12))
            for ids, seed in REQUESTS[:6]
        ]
        await asyncio.sleep(0)
        engine.step()
        tasks[1].cancel()
        tasks[4].cancel()
        await asyncio.sleep(0)
        while engine.busy:
            engine.step()
        late = asyncio.ensure_future(engine.generate([5], max_tokens=3))
        await asyncio.sleep(0)
        late.cancel()
        await asyncio.sleep(0)
        engine.step()  # only a cancelled request waits
        engine.sync(engine.model)
        return [None if t.cancelled() else t.result().token_ids for t in tasks]

    expected = [g.token_ids for g in generate(policy, REQUESTS[:6])[0]]
    assert asyncio.run(main()) == [None if i in (1, 4) else ids for i, ids in enumerate(expected)]


def test_new_weights_change_what_is_sampled(policy):
    model, tokenizer = policy
    other = tiny.tiny_model(tokenizer, width=32, seed=1)
    engine = TransformersEngine(tiny.tiny_model(tokenizer, width=32), tokenizer)
    a, _ = generate(None, REQUESTS[:4], engine=engine)
    engine.sync(other)
    b, _ = generate(None, REQUESTS[:4], engine=engine)
    c, _ = generate((other, tokenizer), REQUESTS[:4])
    assert [g.token_ids for g in b] == [g.token_ids for g in c] != [g.token_ids for g in a]


def test_stop_reasons(policy):
    _, tokenizer = policy
    word = tokenizer.convert_ids_to_tokens(generate(policy, [([5, 6], 0)])[0][0].token_ids[2])
    stopped = generate(policy, [([5, 6], 0)], stop=(word,))[0][0]
    assert stopped.stop_reason == word and tokenizer.convert_ids_to_tokens(stopped.token_ids[-1]) == word
    assert len(stopped.token_ids) == len(stopped.logprobs) <= 3
    full = generate(policy, [([5, 6], 0)])[0][0]
    assert (
        full.stop_reason in ("length", "eos")
        and stopped.token_ids == full.token_ids[: len(stopped.token_ids)]
    )
    assert generate(policy, [([5, 6], 0)], max_tokens=2)[0][0].stop_reason == "length"


def test_a_stop_string_inside_a_token_keeps_the_token(policy):
    """The pieces "</a" and ">x" complete "</a>" in the middle of the second."""
    model, tokenizer = policy
    engine = TransformersEngine(model, tokenizer)
    sampled = generate(policy, [([5, 6], 0)])[0][0].token_ids
    engine.pieces = {t: " y" for t in range(len(tokenizer))} | {sampled[0]: "b</a", sampled[1]: ">x"}
    g = generate(policy, [([5, 6], 0)], engine=engine, stop=("</a>",))[0][0]
    assert g.token_ids == sampled[:2] and g.stop_reason == "</a>"


def test_greedy_is_the_argmax(policy):
    model, _ = policy
    g = generate(policy, [([5, 6, 7], 0)], temperature=0.0)[0][0]
    with torch.no_grad():
        logits = model(torch.tensor([[5, 6, 7] + g.token_ids])).logits[0]
    assert g.token_ids == logits[2:-1].argmax(-1).tolist()


def test_bad_requests(policy):
    engine = TransformersEngine(*policy)
    for ids, n in (([], 4), ([1], 0)):
        with pytest.raises(ValueError, match="prompt"):
            asyncio.run(engine.generate(ids, max_tokens=n))


def test_a_failed_agent_leaves_the_engine_usable(policy):
    engine = TransformersEngine(*policy)

    async def broken():
        await engine.generate([5], max_tokens=2)
        raise RuntimeError("agent bug")

    with pytest.raises(RuntimeError, match="agent bug"):
        rollout.run_agents(
            [broken(), *(engine.generate([5, 6], max_tokens=40) for _ in range(3))],
            engine,
            rollout.BatchedSearch(None),
        )
    results, _ = generate(policy, REQUESTS[:3], engine=engine)
    assert [g.token_ids for g in results] == [g.token_ids for g in generate(policy, REQUESTS[:3])[0]]
