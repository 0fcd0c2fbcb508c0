"""Both engines against a plain forward pass; independence of batching; prefixes; stop strings; cancelling;
new weights. What is vLLM's alone is in test_vllm.py."""

import asyncio
import copy
import random

import pytest
import torch

from common import engine as engines
from common import rollout
from common.checkpoint import ModelError
from common.engine import BLOCK, MAX_BATCH, TransformersEngine, _Request
from common.gpu import decode_graphs
from common.gpu.vllm_engine import VllmEngine
from common.model import token_logprobs
from common.world import tiny
from tests.conftest import NEEDS_VLLM, needs_vllm
from tests.test_chat import sentencepiece

BOTH = pytest.mark.parametrize(
    "Engine", [TransformersEngine, pytest.param(VllmEngine, marks=NEEDS_VLLM)], ids=["transformers", "vllm"])


def without_bias(model):
    """A tiny policy without the biases of its attention, of which vLLM's Qwen3 lacks one."""
    config = copy.deepcopy(model.config)
    config.attention_bias = False
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain


def random_policy(width, seed=0):
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(40)], ["<a>", "</a>"])
    model = without_bias(tiny.tiny_model(tokenizer, width, seed))
    for p in model.parameters():  # larger logits: no sample hangs on the last bit of a sum
        p.data.mul_(1.5)
    return model, tokenizer


@pytest.fixture(scope="module")
def policy():
    return random_policy(32)


@pytest.fixture(scope="module")
def wide():
    """vLLM's CPU build has no heads of fewer than 32 dimensions."""
    return random_policy(128)


def generate(policy, requests, max_batch=MAX_BATCH, engine=None, Engine=TransformersEngine, **kwargs):
    engine = engine or Engine(*policy, max_batch=max_batch)
    options = {"max_tokens": 12, "temperature": 1.0} | kwargs
    agents = [engine.generate(ids, seed=seed, **options) for ids, seed in requests]
    return rollout.run_agents(agents, engine, rollout.BatchedSearch(None)), engine


REQUESTS = [([5 + i % 7, 6, 7 + i % 3] * (1 + i % 4), i) for i in range(30)]


@BOTH
def test_logprobs_equal_a_plain_forward(Engine, wide):
    model, _ = wide
    for temperature in (1.0, 0.5):
        requests = REQUESTS + REQUESTS[:3]  # some prompts twice: computed once
        results, _ = generate(wide, requests, Engine=Engine, temperature=temperature)
        assert drift(model, requests, results, temperature) < 2e-5


def test_the_padded_pass_of_a_gpu_gives_the_same_numbers(wide, monkeypatch):
    monkeypatch.setattr(TransformersEngine, "_packed", TransformersEngine._padded)
    results, engine = generate(wide, REQUESTS, max_batch=7)
    assert drift(wide[0], REQUESTS, results) < 2e-5
    continued = [(r[0] + g.token_ids + [6, 7, 8], r[1]) for r, g in zip(REQUESTS, results, strict=True)]
    results, _ = generate(wide, continued, engine=engine)
    assert engine.reused_tokens and drift(wide[0], continued, results) < 2e-5


def drift(model, requests, results, temperature=1.0):
    """Largest difference of log-probs to those of a plain forward pass, nats."""
    largest = 0.0
    for (ids, _), g in zip(requests, results, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + g.token_ids])).logits[0, len(ids) - 1:-1].float()
        expected = (logits / temperature).log_softmax(-1).gather(1, torch.tensor(g.token_ids)[:, None])[:, 0]
        largest = max(largest, float((torch.tensor(g.logprobs) - expected).abs().max()))
    return largest


@BOTH
def test_samples_do_not_depend_on_the_batch(Engine, wide):
    together, engine = generate(wide, REQUESTS, Engine=Engine)
    reversed_, _ = generate(wide, REQUESTS[::-1], engine=engine)
    two_at_a_time, _ = generate(wide, REQUESTS, max_batch=2, Engine=Engine)
    engine = Engine(*wide)
    alone = [generate(wide, [r], engine=engine)[0][0] for r in REQUESTS[:8]]
    ids = ids_of(together)
    assert ids == ids_of(reversed_)[::-1] == ids_of(two_at_a_time) and ids[:8] == ids_of(alone)
    assert len({tuple(i) for i in ids}) > 20
    assert generate(wide, [(REQUESTS[0][0], 99)], engine=engine)[0][0].token_ids != ids[0]


def endless(Engine, policy, **options):
    """An engine that no sampled token stops."""
    engine = Engine(*policy, **options)
    engine.eos = set()
    return engine


def gigabytes(tokens):
    """Of keys and values of so many tokens of the small policy."""
    return tokens * 2 * 2 * 2 * 8 * 4 / 2**30


def ids_of(results):
    return [g.token_ids for g in results]


def assert_same(results, others):
    assert ids_of(results) == ids_of(others)
    for a, b in zip(results, others, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@BOTH
def test_prefixes_are_reused_and_change_nothing(Engine, wide):
    engine = endless(Engine, wide)
    start = [5 + i % 30 for i in range(70)]
    first, _ = generate(wide, [(start, 1)], engine=engine)
    longer = start + first[0].token_ids + [6, 7, 8]
    again = [(longer, 2), (longer, 3), (start, 4)]

    def reused(requests):
        before = engine.reused_tokens
        results, _ = generate(wide, requests, engine=engine)
        return results, engine.reused_tokens - before

    warm, tokens = reused(again)
    if Engine is TransformersEngine:  # blocks of 8; equal prompts are computed once
        assert tokens == 80 + len(longer) + 64
    else:  # blocks of 32; both of the equal prompts find what the first request left
        assert tokens == 64 + 64 + 64
    engine.sync(wide[0])
    assert reused(again[:1])[1] == 0
    engine.sync(wide[0])
    assert_same(warm, reused(again)[0])


@pytest.mark.parametrize("length", range(20, 28))
def test_a_turn_of_any_length_is_continued_as_if_it_were_read_anew(policy, length):
    """Its last token was sampled and never read: no block of 8 may claim its keys."""
    engine = endless(TransformersEngine, policy)
    start = [5 + i % 30 for i in range(length)]
    first, _ = generate(policy, [(start, 1)], engine=engine)
    continued = [(start + first[0].token_ids + [6, 7, 8], 2)]
    results, _ = generate(policy, continued, engine=engine)
    assert engine.reused_tokens >= length + 11 - 7 and drift(policy[0], continued, results) < 2e-5


def counted(engine):
    """[passes], which grows as the engine makes them."""
    passes = []
    whole = engine._pass
    engine._pass = lambda *given: passes.append(1) or whole(*given)
    return passes


@pytest.mark.parametrize("temperature", [0.0, .3, 1.0])
def test_guessed_tokens_save_passes_and_change_none(policy, monkeypatch, temperature):
    """Greedy, the policy repeats itself; at temperature 1 hardly a guess is right."""
    requests = [([5 + i % 7, 6, 7 + i % 3, 8] * 6, i) for i in range(12)]
    found = []
    for few in (0, 16):
        monkeypatch.setattr(engines, "FEW", few)
        engine = endless(TransformersEngine, policy)
        passes = counted(engine)
        results, _ = generate(policy, requests, engine=engine, temperature=temperature, max_tokens=80)
        found.append((results, len(passes)))
        again = [(ids + g.token_ids, 1) for (ids, _), g in zip(requests, results, strict=True)]
        assert drift(policy[0], again, generate(policy, again, engine=engine)[0]) < 2e-5  # its cache is right
    (one, slow), (other, fast) = found
    assert_same(one, other)
    assert fast < slow if temperature == 0 else fast <= slow


def test_a_guess_ends_where_a_turn_does(policy):
    """max_tokens and stop strings count tokens that were guessed, too."""
    prompt = [5, 6, 7, 8] * 8
    long, = generate(policy, [(prompt, 0)], engine=endless(TransformersEngine, policy), temperature=0.0,
                     max_tokens=60)[0]
    for most in (1, 2, 7, 31):
        short, = generate(policy, [(prompt, 0)], engine=endless(TransformersEngine, policy), temperature=0.0,
                          max_tokens=most)[0]
        assert short.token_ids == long.token_ids[:most] and short.stop_reason == "length"
    word = policy[1].decode([long.token_ids[40]])
    at = [policy[1].decode([t]) for t in long.token_ids].index(word)
    stopped, = generate(policy, [(prompt, 0)], engine=endless(TransformersEngine, policy), temperature=0.0,
                        max_tokens=60, stop=(word,))[0]
    assert stopped.token_ids == long.token_ids[:at + 1] and stopped.stop_reason == word


@pytest.mark.parametrize("V", [7, 64, 65, 1000, 30_000])
def test_what_is_picked_is_where_the_cumulative_probability_passes_the_number(V):
    torch.manual_seed(V)
    logits = 3 * torch.randn(40, V)
    logits[:, ::3] = -200.0  # probability 0
    uniforms = torch.rand(40, dtype=torch.double)
    uniforms[:2] = torch.tensor([0.0, 1 - 1e-16])
    cumulative = logits.double().softmax(-1).cumsum(-1)
    token, total = engines.pick(logits.exp(), uniforms)
    at = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)[:, 0]
    assert token[2:].tolist() == at[2:].tolist() and token[0] == 1
    assert (logits.gather(1, token[:, None]) > -100).all()
    torch.testing.assert_close(total, logits.double().exp().sum(-1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("V", [7, 64, 1000])
def test_what_is_not_finite_is_sampled_as_some_token(V):
    """A guard says so, behind the step: log-probs are NaN."""
    for shares in (torch.full((2, V), torch.nan), torch.zeros(2, V)):
        token, _ = engines.pick(shares, torch.tensor([.3, .9], dtype=torch.double))
        assert ((0 <= token) & (token < V)).all()


def test_what_all_prompts_begin_with_is_read_once(policy):
    """A system message of 80 tokens before eight questions."""
    start = [5 + i % 30 for i in range(80)]
    requests = [(start + [5 + i, 6, 7 + i], i) for i in range(8)]
    engine = endless(TransformersEngine, policy)
    results, _ = generate(policy, requests, engine=engine)
    assert engine.reused_tokens == 7 * 80 and drift(policy[0], requests, results) < 2e-5


async def grow(engine, ids, name, turns=4):
    """[(turns that are left, ids)] of a chain: each turn behind an observation."""
    states = [(turns, ids)]
    while turns:
        g = await engine.generate(ids, max_tokens=8, seed=rollout.stable_seed(name, turns))
        ids = [*ids, *g.token_ids, *random.Random(name).choices(range(5, 40), k=40)]
        turns -= 1
        states.append((turns, ids))
    return states


async def chain(engine, i):
    return await grow(engine, random.Random(i).choices(range(5, 40), k=40), str(i))


async def tree(engine, i):
    """Chains below one prompt, and again from states that they passed, as AT2PO's."""
    draw = random.Random(i)
    prompt = draw.choices(range(5, 40), k=40)
    chains = await asyncio.gather(*[grow(engine, prompt, f"{i} {k}") for k in range(3)])
    states = draw.choices([state for states in chains for state in states[:-1]], k=4)
    again = [grow(engine, ids, f"{i} again {k}", turns) for k, (turns, ids) in enumerate(states)]
    return chains + await asyncio.gather(*again)


@pytest.mark.parametrize("agent, slots", [(chain, 8), (tree, 3)])
def test_eight_times_as_many_agents_as_slots_reuse_as_much_and_say_the_same(policy, agent, slots):
    """An agent that was begun goes on before others begin, or its prefixes are forgotten first."""
    def run(agents, cache_gb):
        engine = endless(TransformersEngine, policy, max_batch=slots, cache_gb=cache_gb)
        begun = [agent(engine, i) for i in range(agents)]
        said = rollout.run_agents(begun, engine, rollout.BatchedSearch(None))
        return said, engine.reused_tokens / agents

    small = gigabytes(slots * 250)  # of as many sequences as are decoded together
    _, few = run(slots, small)
    many_said, many = run(8 * slots, small)
    said, _ = run(8 * slots, 1)
    assert many > .9 * few > 100 and many_said == said


def test_a_small_prefix_cache_forgets_the_oldest(policy):
    engine = TransformersEngine(*policy, cache_gb=100_000 / 2**30)
    results, _ = generate(policy, REQUESTS, engine=engine)
    assert engine.prefix_bytes <= 100_000 and len(engine.prefixes) < 30
    assert set(engine.blocks.values()) <= set(engine.prefixes)
    assert ids_of(results) == ids_of(generate(policy, REQUESTS)[0])


def test_memory_limits_the_batch_and_changes_nothing(policy):
    # five sequences of 80 tokens: what has grown past that sets the youngest back
    engine = endless(TransformersEngine, policy, cache_gb=gigabytes(5 * 80))
    step, running, waiting = engine.step, [], []

    def watched():
        step()
        running.append(len(engine.active))
        waiting.append(len(engine.waiting))
        longest = max((r.length for r in engine.active), default=0)
        assert len(engine.active) <= 1 or len(engine.active) * longest <= 5 * 80
        begun = [bool(r.token_ids) for r in engine.waiting]
        assert begun == sorted(begun, reverse=True)  # who was set back goes on before another begins
    engine.step = watched
    results, _ = generate(policy, REQUESTS, engine=engine, max_tokens=150)
    unlimited = endless(TransformersEngine, policy)
    assert max(running) >= 5 and any(b > a for a, b in zip(waiting, waiting[1:]))  # some were set back
    assert_same(results, generate(policy, REQUESTS, engine=unlimited, max_tokens=150)[0])


def test_few_long_sequences_after_many_short_ones_take_no_more_than_cache_gb(policy):
    longest = 400
    engine = endless(TransformersEngine, policy, cache_gb=gigabytes(4 * longest))
    grown, held, step = [], [], engine.step

    async def agent(i):
        ids = [5 + i % 7] * 10
        first = await engine.generate(ids, max_tokens=4, seed=i)
        grown.append(engine.cache.kv.shape)
        ids = [*ids, *first.token_ids, *[6] * (longest - 100)]  # a long observation
        await engine.generate(ids, max_tokens=20, seed=i)
        return await engine.generate([7 + i % 5] * 10, max_tokens=4, seed=i)  # and short ones again

    def watched():
        step()
        held.append(engine.cache.kv.numel() * engine.cache.kv.element_size() / 2**30)
    engine.step = watched
    rollout.run_agents([agent(i) for i in range(40)], engine, rollout.BatchedSearch(None))
    assert max(shape[2] for shape in grown) >= 20  # many were decoded together
    # tokens grow by 128; a prefix that is known begins behind where another ends
    assert max(held) <= 2 * gigabytes(4 * longest)


def test_prompts_that_are_read_together_keep_what_is_known_of_them(policy):
    """One goes on behind a long start that is known, the other is as long and new: padded to one width they
    end far behind both, and the room for that was made where the known start lay."""
    engine = endless(TransformersEngine, policy, cache_gb=gigabytes(800))
    start = [5 + i % 30 for i in range(200)]
    first, _ = generate(policy, [(start, 1)], engine=engine)
    both = [(start + first[0].token_ids, 2), ([7 + i % 20 for i in range(205)], 3)]
    results, _ = generate(policy, both, engine=engine)
    assert engine.reused_tokens > 200 and drift(policy[0], both, results) < 2e-5


def test_a_start_found_by_its_hash_is_compared(policy, monkeypatch):
    """Where all starts of one length have one hash, none is taken for another."""
    monkeypatch.setattr(TransformersEngine, "_keys", lambda self, ids: list(range(len(ids) // BLOCK)))
    engine = TransformersEngine(*policy)
    generate(policy, REQUESTS, engine=engine)
    others = [([9 + i % 5, *ids, *ids], seed) for i, (ids, seed) in enumerate(REQUESTS)]
    results, _ = generate(policy, others, engine=engine)
    assert drift(policy[0], others, results) < 2e-5


@pytest.mark.parametrize("cache_gb", [4.0, gigabytes(12 * 160)])
def test_decoding_in_fixed_buffers_says_the_same(policy, monkeypatch, cache_gb):
    """What CUDA graphs capture, without them; with little memory some steps have no room for free slots."""
    engine = endless(TransformersEngine, policy, cache_gb=cache_gb)
    plain, decoded, sizes = engine._decode, [], []

    def compute(decoder, slots, end):
        sizes.append((slots, end))
        decoder.ids[slots:] = decoder.start[slots:] = -1  # is not read
        return decoder.compute(slots, end)

    monkeypatch.setattr(decode_graphs.Decoder, "replay", compute)
    monkeypatch.setattr(engine, "_decode", lambda *given: decoded.append(given) or plain(*given))
    engine._wake()
    engine.decode = decode_graphs.Decoder(engine)
    requests = [(ids * (1 + seed % 3), seed) for ids, seed in REQUESTS]
    results, _ = generate(policy, requests, engine=engine, max_tokens=140)
    other = endless(TransformersEngine, policy)
    assert_same(results, generate(policy, requests, engine=other, max_tokens=140)[0])
    assert {slots for slots, _ in sizes} <= {16, 64} and bool(decoded) == (cache_gb < 4)
    assert {end for _, end in sizes} <= {256}


def test_bf16_samples_on_a_copy_of_the_matrices_as_autocast_would(policy):
    model = copy.deepcopy(policy[0])
    model.in_bf16 = True
    results, engine = generate((model, policy[1]), REQUESTS)
    assert engine.sampler is not model and engine.cache.kv.dtype == torch.bfloat16
    own = dict(model.named_parameters())
    copied = {name for name, p in engine.sampler.named_parameters() if p is not own[name]}
    assert copied == {name for name, p in own.items() if p.ndim == 2 and "embed" not in name}
    batch = rollout.collate([
        rollout.Trajectory(str(i), ids, [rollout.Turn(g.token_ids, g.logprobs, g.stop_reason, "")])
        for i, ((ids, _), g) in enumerate(zip(REQUESTS, results, strict=True))])
    difference = (token_logprobs(model, batch) - batch.rollout_logprobs)[batch.response_mask].abs()
    exact = drift(model, REQUESTS, results)
    assert float(difference.mean()) < .02 and 1e-4 < exact < .5
    engine.sleep()
    assert engine.sampler is None and engine.cache is None
    with torch.no_grad():
        model.get_decoder().layers[0].mlp.up_proj.weight.add_(.5)
    engine.sync(model)
    assert ids_of(generate((model, policy[1]), REQUESTS, engine=engine)[0]) != ids_of(results)


def test_a_request_that_fits_alone_is_served_whatever_its_length(policy):
    engine = TransformersEngine(*policy, cache_gb=1e-9)
    results, _ = generate(policy, REQUESTS[:4], engine=engine)
    assert ids_of(results) == ids_of(generate(policy, REQUESTS[:4])[0])


@BOTH
def test_cancelled_generations_leave_the_others_alone(Engine, wide):
    model, _ = wide
    engine = Engine(*wide)

    async def begun(*requests, max_tokens):
        tasks = [asyncio.ensure_future(engine.generate(ids, seed=seed, max_tokens=max_tokens))
                 for ids, seed in requests]
        await asyncio.sleep(0)
        return tasks

    async def cancel(*tasks):
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)

    async def main():
        tasks = await begun(*REQUESTS[:6], max_tokens=12)
        engine.step()
        await cancel(tasks[1], tasks[4])
        while engine.busy:
            engine.step()
        await cancel(*await begun(([5], 0), max_tokens=3))
        engine.step()  # only a cancelled request waits
        await cancel(*await begun(([5], 0), max_tokens=3))
        engine.sync(model)
        assert not engine.busy
        return [None if t.cancelled() else t.result().token_ids for t in tasks]

    expected = ids_of(generate(wide, REQUESTS[:6], Engine=Engine)[0])
    engine.sync(model)
    assert asyncio.run(main()) == [None if i in (1, 4) else ids for i, ids in enumerate(expected)]


@BOTH
def test_new_weights_change_what_is_sampled(Engine, wide):
    _, tokenizer = wide
    other, _ = random_policy(128, seed=1)
    engine = Engine(random_policy(128)[0], tokenizer)  # ours writes into the model that it has
    a, _ = generate(None, REQUESTS[:4], engine=engine)
    engine.sync(other)
    b, _ = generate(None, REQUESTS[:4], engine=engine)
    c, _ = generate((other, tokenizer), REQUESTS[:4], Engine=Engine)
    assert ids_of(b) == ids_of(c) != ids_of(a) and drift(other, REQUESTS[:4], b) < 2e-5


@BOTH
def test_a_sync_while_generations_run_is_refused_and_sleep_is_undone_by_sync(Engine, wide):
    model, _ = wide
    engine = endless(Engine, wide)

    async def main():
        task = asyncio.ensure_future(engine.generate([5, 6], max_tokens=4))
        await asyncio.sleep(0)
        engine.step()
        with pytest.raises(RuntimeError, match="while generations are running"):
            engine.sync(model)
        while engine.busy:
            engine.step()
        return await task

    before = asyncio.run(main())
    engine.sleep()
    engine.sync(model)
    assert asyncio.run(main()).token_ids == before.token_ids


@BOTH
def test_stop_reasons(Engine, wide):
    _, tokenizer = wide
    engine = endless(Engine, wide)
    full = generate(wide, [([5, 6], 0)], engine=engine)[0][0]
    word = tokenizer.convert_ids_to_tokens(full.token_ids[2])
    stopped = generate(wide, [([5, 6], 0)], engine=engine, stop=("</a>", word))[0][0]
    assert stopped.stop_reason == word and tokenizer.convert_ids_to_tokens(stopped.token_ids[-1]) == word
    assert len(stopped.token_ids) == len(stopped.logprobs) <= 3
    assert full.stop_reason == "length" and len(full.token_ids) == 12
    assert stopped.token_ids == full.token_ids[: len(stopped.token_ids)]
    assert generate(wide, [([5, 6], 0)], engine=engine, max_tokens=2)[0][0].stop_reason == "length"


@BOTH
def test_the_end_of_sequence_is_kept(Engine, wide):
    """Every model has its own ids for it; here each of ten words is one."""
    model, tokenizer = random_policy(128)
    model.generation_config.eos_token_id = list(range(20, 30))
    results, engine = generate((model, tokenizer), REQUESTS, Engine=Engine, max_tokens=40)
    ended = [g for g in results if g.stop_reason == "eos"]
    # and that with which the chat template closes a turn
    assert engine.eos == {*range(20, 30), tokenizer.eos_token_id} and len(ended) > 10
    for g in ended:
        assert g.token_ids[-1] in engine.eos and not engine.eos & set(g.token_ids[:-1])
        assert len(g.token_ids) == len(g.logprobs)


@needs_vllm
def test_both_engines_write_the_same_where_nothing_is_drawn(wide):
    """Greedy, with stop strings, lengths and the end of sequence."""
    _, tokenizer = wide
    stop = tuple(tokenizer.convert_ids_to_tokens([9, 17, 33]))
    ours, engine = generate(wide, REQUESTS, temperature=0.0, max_tokens=60, stop=stop)
    theirs, _ = generate(wide, REQUESTS, Engine=VllmEngine, temperature=0.0, max_tokens=60, stop=stop)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.token_ids, a.stop_reason) == (b.token_ids, b.stop_reason)
        assert a.logprobs == pytest.approx(b.logprobs, abs=2e-5)


@BOTH
def test_overlong_prompts(Engine, wide):
    """Ours goes on past the model's 2048 positions; vLLM ends there, refuses a prompt that leaves none."""
    model, _ = wide
    engine = endless(Engine, wide)
    long = [5 + i % 30 for i in range(2040)]
    near, _ = generate(wide, [(long, 0), ([5, 6], 1)], engine=engine, temperature=0.0)
    assert drift(model, [(long, 0), ([5, 6], 1)], near) < 1e-4
    assert near[0].stop_reason == "length"
    assert len(near[0].token_ids) == (12 if Engine is TransformersEngine else 8)
    if Engine is VllmEngine:
        with pytest.raises(ModelError, match="a prompt of 2050 tokens; the model's positions"):
            # the other agent is cancelled
            generate(wide, [([5, 6], 1), (long + [5] * 10, 0)], engine=engine, temperature=0.0)
    engine.sync(model)
    after, _ = generate(wide, [([5, 6], 1)], engine=engine, temperature=0.0)
    assert after[0].token_ids == near[1].token_ids


def test_a_stop_string_inside_a_token_keeps_the_token(policy):
    """The pieces "</a" and ">x" complete "</a>" in the middle of the second."""
    model, tokenizer = policy
    engine = TransformersEngine(model, tokenizer)
    sampled = generate(policy, [([5, 6], 0)])[0][0].token_ids
    pieces = {t: " y" for t in range(len(tokenizer))} | {sampled[0]: "b</a", sampled[1]: ">x"}

    class Pieces:
        def decode(self, ids):
            return "".join(pieces[i] for i in ids)

    engine.tokenizer = Pieces()
    g = generate(policy, [([5, 6], 0)], engine=engine, stop=("</a>",))[0][0]
    assert g.token_ids == sampled[:2] and g.stop_reason == "</a>"


@BOTH
def test_greedy_is_the_argmax(Engine, wide):
    g = generate(wide, [([5, 6, 7], 0)], Engine=Engine, temperature=0.0)[0][0]
    with torch.no_grad():
        logits = wide[0](torch.tensor([[5, 6, 7] + g.token_ids])).logits[0]
    assert g.token_ids == logits[2:-1].argmax(-1).tolist()


@BOTH
def test_a_failed_agent_leaves_the_engine_usable(Engine, wide):
    engine = Engine(*wide)

    async def broken():
        await engine.generate([5], max_tokens=2)
        raise RuntimeError("agent bug")

    agents = [broken(), *(engine.generate([5, 6], max_tokens=40) for _ in range(3))]
    with pytest.raises(RuntimeError, match="agent bug"):
        rollout.run_agents(agents, engine, rollout.BatchedSearch(None))
    results, _ = generate(wide, REQUESTS[:3], engine=engine)
    engine.sync(wide[0])
    assert ids_of(results) == ids_of(generate(wide, REQUESTS[:3], engine=engine)[0])


def stopped(tokenizer, text, stop=("</search>",)):
    """(how sampling of a text's tokens ends, what was said by then)"""
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.eos, engine.pieces, engine.tokenizer = set(), {}, tokenizer
    request = _Request([0], stop, 99, 1.0, None, None)
    for i in tokenizer(text, add_special_tokens=False)["input_ids"]:
        request.token_ids.append(i)
        reason = engine._stop_reason(request)
        if reason:
            return reason, tokenizer.decode(request.token_ids)
    return "", ""


def test_a_stop_string_stops_where_the_text_has_it_and_nowhere_else():
    """Decoded alone, pieces of SentencePiece lose the blank before them."""
    tokenizer = sentencepiece()
    for text in ("I look. </search> now", "I look.</search>", "up</search></search>"):
        reason, said = stopped(tokenizer, text)
        assert reason == "</search>" and said.endswith("</search>") and said.count("</search>") == 1
    for text in ("say </ search> now", "< / search>", "</search >", "</sea rch>"):
        assert stopped(tokenizer, text) == ("", ""), text
    assert stopped(tokenizer, "say </ search>", ("</ search>",))[0] == "</ search>"
