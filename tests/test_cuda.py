"""What a CUDA device computes: the same as a CPU, up to its rounding. Skipped where there is none; the
kernels' own tests (test_kernels.py) run on both."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import model as models
from common import rollout, training
from common.engine import TransformersEngine
from common.rollout import Trajectory, Turn
from common.world import tiny
from tests.conftest import needs_cuda

pytestmark = needs_cuda
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def the_device_is_there_for_what_compiles():
    patch = pytest.MonkeyPatch()
    patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield
    patch.undo()


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
        eos_token_id=tokenizer.eos_token_id,
    ))
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


def logprobs_and_gradient(folder, leaves, pack_tokens=10**6, **how):
    model = models.load_model(folder, **how)
    total = []
    for part in rollout.micro_batches(leaves, pack_tokens):
        batch = rollout.collate(part, pack_tokens=pack_tokens).to(model.device)
        logprobs = models.token_logprobs(model, batch)
        (logprobs * batch.advantages).sum().backward()
        total.append(logprobs.detach()[batch.response_mask].cpu())
    gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters()])
    return torch.cat(total), gradient


@pytest.mark.parametrize("checkpointing", ["off", "on"])
@pytest.mark.parametrize("size", [7, 40])
def test_tree_attention_trains_as_the_dense_mask_does(folder, size, checkpointing):
    leaves = trees(size)
    exact, exact_gradient = logprobs_and_gradient(folder, leaves, device="cpu")
    dense, dense_gradient = logprobs_and_gradient(folder, leaves, device="cuda", attention="dense",
                                                  precision="fp32", gradient_checkpointing=checkpointing)
    tree, tree_gradient = logprobs_and_gradient(folder, leaves, device="cuda", attention="tree",
                                                precision="fp32", gradient_checkpointing=checkpointing)
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
        logprobs_and_gradient(folder, trees(size), device="cuda", attention="tree")
    assert counters["stats"]["unique_graphs"] <= 4, dict(counters["stats"])
    assert not counters["recompile_limit"], dict(counters["recompile_limit"])


@pytest.mark.parametrize("lora", [0, 4])
def test_the_engine_samples_what_the_trainer_computes_and_gives_its_memory_back(folder, lora):
    model, tokenizer = models.load_policy(folder, lora, device="cuda")
    engine = TransformersEngine(model, tokenizer)
    prompts = [[5 + i % 7, 6, 7 + i % 3] * (1 + i % 4) for i in range(30)]
    before = torch.cuda.memory_allocated()

    def sample():
        agents = [engine.generate(ids, max_tokens=12, seed=i) for i, ids in enumerate(prompts)]
        return rollout.run_agents(agents, engine, rollout.BatchedSearch(None))

    made = sample()
    batch = rollout.collate([
        Trajectory(str(i), ids, [Turn(g.token_ids, g.logprobs, g.stop_reason, "")])
        for i, (ids, g) in enumerate(zip(prompts, made, strict=True))]).to("cuda")
    with torch.no_grad():
        drift = (models.token_logprobs(model, batch) - batch.rollout_logprobs)[batch.response_mask].abs()
    assert float(drift.mean()) < .02 and float(drift.max()) < .3
    held = torch.cuda.memory_allocated()
    engine.sleep()
    assert torch.cuda.memory_allocated() < held
    assert torch.cuda.memory_allocated() <= before + 2 * batch.input_ids.numel() * 8 * 20
    engine.sync(model)
    again = sample()
    assert [g.token_ids for g in again] == [g.token_ids for g in made]


def test_a_step_with_8_bit_adam_and_its_checkpoint(folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    from common import checkpoint
    model, tokenizer = models.load_policy(folder, device="cuda")
    optimizer = training.make_optimizer(model, 1e-3, kind="adamw8bit")
    for batch in training.collate_parts(trees(), _Settings, model.device):
        (models.token_logprobs(model, batch) * batch.advantages).sum().backward()
    assert training.optimizer_step(model, optimizer) > 0
    checkpoint.save(tmp_path / "c", model, tokenizer, optimizer, {"step": 1, "run": "x"})
    other, _ = models.load_policy(str(tmp_path / "c"), device="cuda")
    restored = training.make_optimizer(other, 1e-3, kind="adamw8bit")
    checkpoint.load_training_state(tmp_path / "c", other, restored)
    for (name, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name
        for key, value in optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(restored.state[q][key])), (name, key)


class _Settings:
    share_prefixes = "on"
    micro_tokens = pack_tokens = 512


@pytest.mark.parametrize("script", ["at2po.py", "bi_rar.py", "mygo_mujica.py", "omne_r1.py"])
def test_a_script_trains_on_the_gpu(script, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(*more):
        command = [sys.executable, script, *more, "--steps", "2", "--warmup-steps", "25", "--eval-limit", "8",
                   "--questions-per-step", "4", "--out", str(tmp_path), "--engine", "transformers"]
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
