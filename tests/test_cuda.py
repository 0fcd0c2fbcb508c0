"""What a CUDA device computes: the same as a CPU, up to its rounding. Skipped where there is none; the
kernels' own tests (test_kernels.py) run on both."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common import distributed, rollout, training
from common import model as models
from common.engine import TransformersEngine
from common.gpu import vllm_engine
from common.rollout import Trajectory, Turn
from common.world import tiny
from tests.conftest import needs_cuda, needs_vllm

pytestmark = [needs_cuda, pytest.mark.usefixtures("the_device_is_there_for_what_compiles")]
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A policy of heads that FlexAttention takes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    path = tmp_path_factory.mktemp("policy")
    tokenizer = tiny.tiny_tokenizer([f"w{i}" for i in range(60)], ["<a>", "</a>"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id))
    for p in model.parameters():
        p.data.mul_(1.5)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def trees(size=7):
    """Two questions; stems that branch, in lengths that fill no block."""
    g = torch.Generator().manual_seed(0)

    def turn(n):
        ids = torch.randint(4, 60, (n,), generator=g).tolist()
        return Turn(ids, [-1.0] * n, "", "", torch.randint(4, 60, (n // 2,), generator=g).tolist())

    leaves = []
    for q in range(2):
        prompt = torch.randint(4, 60, (size * 3,), generator=g).tolist()
        for _ in range(3):
            stem = [turn(size * 2), turn(size)]
            leaves += [Trajectory(str(q), prompt, [*stem, turn(size + k)]) for k in range(4)]
    for t in leaves:
        t.advantages = [1.0, -.5, .25]
    return rollout.prefix_order(leaves)


def logprobs_and_gradient(folder, leaves, attention="tree", **how):
    model = models.load_model(folder, **how)
    if attention == "dense":
        model.set_attn_implementation("sdpa")
    return learned(model, leaves)


def learned(model, leaves, pack_tokens=10**6):
    total = []
    for part in rollout.micro_batches(leaves, pack_tokens):
        batch = rollout.collate(part, pack_tokens=pack_tokens).to(model.device)
        logprobs = models.token_logprobs(model, batch)
        (logprobs * batch.advantages).sum().backward()
        total.append(logprobs.detach()[batch.response_mask].cpu())
    gradient = torch.cat([distributed.whole(p.grad).flatten().cpu() for p in model.parameters()])
    return torch.cat(total), gradient


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("size", [7, 40])
def test_tree_attention_trains_as_the_dense_mask_does(folder, size, recomputes):
    leaves = trees(size)
    exact, exact_gradient = logprobs_and_gradient(folder, leaves, device="cpu")
    dense, dense_gradient = logprobs_and_gradient(folder, leaves, device="cuda", attention="dense",
                                                  precision="fp32", recomputes=recomputes)
    tree, tree_gradient = logprobs_and_gradient(folder, leaves, device="cuda", precision="fp32",
                                                recomputes=recomputes)
    # the head's products are of bf16 numbers on a GPU where its dtype is; here all is fp32
    assert (dense - exact).abs().max() < 1e-3
    assert (tree - dense).abs().max() < 1e-3
    assert (dense_gradient - exact_gradient).norm() / exact_gradient.norm() < 1e-3
    assert (tree_gradient - dense_gradient).norm() / dense_gradient.norm() < 1e-3


def test_bf16_stays_near_fp32(folder):
    leaves = trees()
    exact, exact_gradient = logprobs_and_gradient(folder, leaves, device="cpu")
    for attention in ("dense", "tree"):
        rounded, gradient = logprobs_and_gradient(folder, leaves, device="cuda", attention=attention)
        assert 1e-5 < (rounded - exact).abs().mean() < .05
        assert (gradient - exact_gradient).norm() / exact_gradient.norm() < .1


def test_many_lengths_compile_few_times(folder):
    from torch._dynamo.utils import counters
    counters.clear()
    for size in range(3, 40, 4):
        logprobs_and_gradient(folder, trees(size), device="cuda")
    assert counters["stats"]["unique_graphs"] <= 4, dict(counters["stats"])
    assert not counters["recompile_limit"], dict(counters["recompile_limit"])


PROMPTS = [[5 + i % 7, 6, 7 + i % 3] * (1 + i % 4) for i in range(30)]


def sample(engine):
    agents = [engine.generate(ids, max_tokens=12, seed=i) for i, ids in enumerate(PROMPTS)]
    return rollout.run_agents(agents, engine, rollout.BatchedSearch(None))


def drift(model, made):
    """(mean, largest) difference of the engine's log-probs to the trainer's, nats."""
    batch = rollout.collate([
        Trajectory(str(i), ids, [Turn(g.token_ids, g.logprobs, g.stop_reason, "")])
        for i, (ids, g) in enumerate(zip(PROMPTS, made, strict=True))]).to("cuda")
    with torch.no_grad():
        logprobs = models.token_logprobs(model, batch)
    apart = (logprobs - batch.rollout_logprobs)[batch.response_mask].abs()
    return float(apart.mean()), float(apart.max())


@pytest.mark.parametrize("lora", [0, 4])
def test_the_engine_samples_what_the_trainer_computes_and_gives_its_memory_back(folder, lora):
    model, tokenizer = models.load_policy(folder, lora, device="cuda")
    engine = TransformersEngine(model, tokenizer)
    sample(engine)  # the first products of a process leave a workspace behind
    engine.sleep()
    before = torch.cuda.memory_allocated()
    engine.sync(model)
    made = sample(engine)
    mean, largest = drift(model, made)
    assert mean < .02 and largest < .3
    held = torch.cuda.memory_allocated()
    engine.sleep()
    assert torch.cuda.memory_allocated() < held
    tokens = sum(len(ids) + len(g.token_ids) for ids, g in zip(PROMPTS, made, strict=True))
    assert torch.cuda.memory_allocated() <= before + 2 * tokens * 8 * 20
    engine.sync(model)
    again = sample(engine)
    assert [g.token_ids for g in again] == [g.token_ids for g in made]


def test_decoding_under_graphs_says_what_a_plain_pass_says_and_is_faster(folder):
    model, tokenizer = models.load_policy(folder, device="cuda", precision="fp32")
    engine = TransformersEngine(model, tokenizer)
    engine.eos = set()

    def said():
        agents = [engine.generate(ids, max_tokens=300, seed=i) for i, ids in enumerate(PROMPTS)]
        began = time.time()
        made = rollout.run_agents(agents, engine, rollout.BatchedSearch(None))
        return [g.token_ids for g in made], [g.logprobs for g in made], time.time() - began

    said()  # captures
    ids, logprobs, seconds = said()
    assert len(engine.decode.captured) >= 2
    engine.sync(model)
    engine._wake()
    engine.decode = engine._decode
    plain_ids, plain_logprobs, plain_seconds = said()
    same = [a == b for a, b in zip(ids, plain_ids, strict=True)]
    assert sum(same) >= len(same) - 1  # (a draw may lie on the border of two tokens)
    for equal, a, b in zip(same, logprobs, plain_logprobs, strict=True):
        assert not equal or a == pytest.approx(b, abs=1e-3)
    assert seconds < .7 * plain_seconds, (seconds, plain_seconds)


@needs_vllm
@pytest.mark.parametrize("lora", [0, 4])
def test_vllm_samples_what_the_trainer_computes_before_and_after_it_slept(folder, lora):
    """Weights, keys and values leave the GPU while it sleeps; new weights arrive with the next sync."""
    model, tokenizer = models.load_policy(folder, lora, device="cuda")
    engine = vllm_engine.VllmEngine(model, tokenizer, cache_gb=2)
    mean, largest = drift(model, sample(engine))
    assert mean < .02 and largest < .3
    for _ in range(2):
        free = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - free > .9 * engine.cache_bytes
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p) * .02)
        with pytest.raises(RuntimeError, match="sync before sampling"):
            sample(engine)
        engine.sync(model)
        made = sample(engine)
        mean, largest = drift(model, made)
        assert mean < .02 and largest < .3
    assert [g.token_ids for g in sample(engine)] == [g.token_ids for g in made]


def test_weights_cut_by_fsdp_over_nccl_train_as_whole_ones(folder, monkeypatch):
    """One GPU is one rank: nothing is really apart, but cut, gathered and summed by NCCL it is."""
    import torch.distributed as dist
    leaves = trees(40)
    whole, gradient = logprobs_and_gradient(folder, leaves, device="cuda", precision="fp32")
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr(distributed, "world", lambda: 2)
        model = models.load_model(folder, device="cuda", precision="fp32")
        model = distributed.shard(model)
        assert all(hasattr(p, "device_mesh") for p in model.parameters())
        cut, cut_gradient = learned(model, leaves)
        handed_over = dict(vllm_engine.policy_weights(model))
    finally:
        dist.destroy_process_group()
    assert not any(hasattr(weight, "device_mesh") for weight in handed_over.values())
    assert (cut - whole).abs().max() < 1e-4
    assert (cut_gradient - gradient).norm() / gradient.norm() < 1e-4


def test_a_step_with_8_bit_adam_and_its_checkpoint(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    from common import checkpoint
    model, tokenizer = models.load_policy(folder, device="cuda")
    optimizer = training.make_optimizer(model, 1e-3, kind="adamw8bit")
    for batch in training.collate_parts(model, trees(), 512):
        (models.token_logprobs(model, batch) * batch.advantages).sum().backward()
    assert training.clip_gradient(model) > 0
    optimizer.step()
    optimizer.zero_grad()
    checkpoint.save(tmp_path / "c", model, tokenizer, optimizer, {"step": 1, "run": "x"})
    other, _ = models.load_policy(str(tmp_path / "c"), device="cuda")
    restored = training.make_optimizer(other, 1e-3, kind="adamw8bit")
    checkpoint.load_training_state(tmp_path / "c", other, restored)
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(restored.state[q][key])), (name, key)


@pytest.mark.parametrize("script", ["at2po.py", "bi_rar.py", "mygo_mujica.py", "omne_r1.py"])
def test_a_script_trains_on_the_gpu(script, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*more):
        command = [sys.executable, script, *more, "--steps", "2", "--warmup-steps", "25", "--eval-limit", "8",
                   "--questions-per-step", "4", "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-3000:]
        return done.stdout

    more = {"omne_r1.py": ["--stage", "ppo"]}.get(script, [])
    if script == "mygo_mujica.py":  # from a policy that was not warmed up by its own stage
        run("--stage", "few-shot")
        [tiny_policy] = (tmp_path / "cache").glob("fivehop/policy-*/")
        more = ["--stage", "mygo", "--checkpoint", str(tiny_policy)]
    assert "on cuda:0" in run(*more)
    assert list(tmp_path.glob("*/*/trajectories.html"))
