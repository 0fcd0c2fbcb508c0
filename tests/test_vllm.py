"""What is vLLM's alone: weights that are copied, parameters that it drops, one vLLM for several engines, what
it does to the process, and two steps of every script that trains a language model."""

import json
import os
import random
import subprocess
import sys
import zlib

import numpy as np
import pytest
import torch

import at2po
import bi_rar
import mygo_mujica
import omne_r1
from common import metrics, rollout
from common.checkpoint import ModelError
from common.files import read_jsonl
from common.gpu import vllm_engine
from common.gpu.vllm_engine import VllmEngine
from common.model import token_logprobs
from common.rollout import Trajectory, Turn
from common.world import tiny
from tests.conftest import NEEDS_VLLM
from tests.test_distributed import OTHERS, ROOT, free_port, same_run
from tests.test_distributed import SMALL as FEW
from tests.test_distributed import TREES as FEW_TREES
from tests.test_engine import REQUESTS, chain, drift, generate, random_policy, without_bias

pytestmark = NEEDS_VLLM


def small_policy(tied=True, lora=0):
    """(model, tokenizer): random weights, with or without a head of its own and adapters."""
    model, tokenizer = random_policy(128)
    if not tied:
        model.config.tie_word_embeddings = False
        untied = type(model)(model.config)
        untied.load_state_dict(model.state_dict())
        torch.nn.init.normal_(untied.lm_head.weight, std=.1)
        model = untied
    if lora:
        from peft import LoraConfig, get_peft_model
        settings = LoraConfig(r=lora, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, settings)
    return model, tokenizer


def test_agents_that_were_begun_go_on_before_others_begin():
    policy = random_policy(128)
    engine = VllmEngine(*policy, max_batch=8, cache_gb=8 * 250 * 2 * 2 * 2 * 32 * 4 / 2**30)
    engine.eos = set()
    reused = []
    for agents in (8, 64):
        engine.sync(policy[0])
        engine.reused_tokens = 0
        chains = [chain(engine, i) for i in range(agents)]
        rollout.run_agents(chains, engine, rollout.BatchedSearch(None))
        reused.append(engine.reused_tokens / agents)
    assert reused[1] > .9 * reused[0] > 100


def train_a_little(model):
    """As updates do, only further: every trained weight moves."""
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, p in model.named_parameters():
            if p.requires_grad:
                scale = .05 if "lora_" in name else .2 * p.std().nan_to_num() + .01
                p.add_(torch.randn_like(p) * scale)


@pytest.mark.parametrize("lora", [0, 8], ids=["full", "lora"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_sampler_and_trainer_agree_after_a_sync(tied, lora):
    model, tokenizer = small_policy(tied, lora)
    assert model.config.tie_word_embeddings == tied
    results, engine = generate((model, tokenizer), REQUESTS, Engine=VllmEngine)
    assert drift(model, REQUESTS, results) < 1e-4
    for _ in range(2):
        train_a_little(model)
        results, _ = generate(None, REQUESTS, engine=engine)
        assert drift(model, REQUESTS, results) > .05, "nothing was changed"
        engine.sync(model)
        results, _ = generate(None, REQUESTS, engine=engine)
        assert drift(model, REQUESTS, results) < 1e-4


def test_more_prompts_than_one_pass_reads():
    """A CPU's generators cannot be rewound, as a prompt that is read in two pieces wants it."""
    policy = small_policy()
    requests = [([5 + (i * j) % 30 for j in range(400)], i) for i in range(40)]
    together, engine = generate(policy, requests, Engine=VllmEngine)
    alone, _ = generate(None, requests[-3:], engine=engine)
    assert [g.token_ids for g in together[-3:]] == [g.token_ids for g in alone]


def test_rows_of_the_head_that_are_no_tokens_are_not_sampled():
    model, tokenizer = random_policy(128)
    model.resize_token_embeddings(4 * len(tokenizer))
    with torch.no_grad():  # likelier than any token, if they were there
        model.get_output_embeddings().weight[len(tokenizer):] *= 30
    model.vocabulary = len(tokenizer)
    engine = VllmEngine(model, tokenizer)
    results, _ = generate((model, tokenizer), REQUESTS, engine=engine)
    assert max(i for g in results for i in g.token_ids) < len(tokenizer)
    made = [Trajectory("", ids, [Turn(g.token_ids, g.logprobs, "", "")])
            for (ids, _), g in zip(REQUESTS, results, strict=True)]
    batch = rollout.collate(made)
    apart = token_logprobs(model, batch) - batch.rollout_logprobs
    assert apart.abs().max() < 1e-4


def test_the_policy_of_the_embedded_world_is_refused():
    tokenizer = random_policy(128)[1]
    with pytest.raises(ModelError, match="no bias behind attention"):
        VllmEngine(tiny.tiny_model(tokenizer), tokenizer)


def test_engines_of_one_architecture_take_turns():
    policy, frozen = small_policy(), small_policy()
    first = VllmEngine(*policy)
    second = VllmEngine(*frozen)
    train_a_little(policy[0])
    assert first.llm is second.llm
    with pytest.raises(RuntimeError, match="sync before sampling"):
        generate(None, REQUESTS[:2], engine=first)
    for engine, (model, _) in ((second, frozen), (first, policy), (second, frozen)):
        engine.sync(model)
        results, _ = generate(None, REQUESTS[:4], engine=engine)
        assert drift(model, REQUESTS[:4], results) < 2e-5


def test_where_vllm_does_not_start_one_line_says_why():
    """Here for want of room for a single sequence. The next engine starts anew."""
    model, tokenizer = small_policy()
    with pytest.raises(ModelError, match="vLLM does not start with this model .*max_model_len"):
        VllmEngine(model, tokenizer, cache_gb=1e-6)
    results, _ = generate((model, tokenizer), REQUESTS[:4], Engine=VllmEngine)
    assert drift(model, REQUESTS[:4], results) < 2e-5


def test_the_process_stays_as_it_was():
    """Random numbers, threads, and modules that vLLM stumbles over."""
    vllm_engine.running = None  # start anew
    pytest.importorskip("llvmlite.binding.ffi")
    policy = small_policy()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    threads = torch.get_num_threads()
    VllmEngine(*policy)
    drawn = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert drawn == (float(torch.rand(())), random.random(), np.random.rand())
    assert torch.get_num_threads() == threads and "llvmlite.binding.ffi" in sys.modules
    torch.set_num_threads(threads + 1)
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the scripts

SMALL = (
    "--engine vllm --warmup-steps 100 --questions-per-step 4 --eval-limit 4 --limit 20 --lr 1e-3 --steps 2 "
    "--name a").split()
TREES = "--bad-format-reward -1 --chains 3 --expand 2 --rounds 1 --max-response 200"


def last_rows(folder):
    """The metrics of the two steps that a stage made, and what every stage leaves."""
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [r["step"] for r in rows] == [1, 2]
    assert json.loads((folder / "config.json").read_text())["engine"] == "vllm"
    assert (folder / "checkpoint/model.safetensors").exists()
    assert len(json.loads((folder / "eval_test.json").read_text())["predictions"]) == 4
    return rows


def assert_no_drift(rows):
    drifts = [r["rollout/logprob_drift_max"] for r in rows if "rollout/logprob_drift_max" in r]
    assert drifts and max(drifts) < 1e-4
    assert sum(r["train/updates"] for r in rows) >= 1


def policies_without_bias(patch):
    """The scripts' tiny policies are made as vLLM has a Qwen3."""
    with_bias = tiny.tiny_model
    patch.setattr(tiny, "tiny_model", lambda tokenizer: without_bias(with_bias(tokenizer)))
    patch.setattr(tiny, "VERSION", "without bias")


@pytest.fixture
def no_bias(monkeypatch):
    policies_without_bias(monkeypatch)


@pytest.fixture
def half_is_right(monkeypatch, no_bias):
    """Rewards that differ, though the policy is hardly warmed up: half of all answers are right."""
    def by_chance(prediction, golds):
        return float(zlib.crc32(prediction.encode()) % 2)

    monkeypatch.setattr(metrics, "exact_match", by_chance)
    monkeypatch.setattr(metrics, "f1", by_chance)


def test_two_steps_of_at2po_and_one_more(half_is_right, tmp_path):
    flags = [*SMALL, *TREES.split(), "--out", str(tmp_path)]
    at2po.main(flags)
    assert_no_drift(last_rows(tmp_path / "at2po/a"))
    at2po.main([*flags, "--resume", "--steps", "3"])
    assert [r["step"] for r in read_jsonl(tmp_path / "at2po/a/metrics.jsonl")] == [1, 2, 3]


def test_two_steps_of_bi_rar(half_is_right, tmp_path):
    flags = "--world plain --stage forward --group-size 4 --explain-limit 2 --out".split()
    bi_rar.main([*SMALL, *flags, str(tmp_path)])
    assert_no_drift(last_rows(tmp_path / "bi_rar/a-forward"))


def test_two_steps_of_mygo_mujica(half_is_right, tmp_path):
    """GRPO samples the policy; offline MyGO a frozen one, whose weights take turns with the policy's."""
    flags = [*SMALL, *"--envs text --max-attempts 3 --group-size 4 --offline-threshold 0 --out".split(),
             str(tmp_path)]
    start = mygo_mujica.tiny_policy(mygo_mujica.parse_args(flags))
    for stage in ("grpo", "offline"):
        mygo_mujica.main([*flags, "--stage", stage, "--checkpoint", str(start)])
    assert_no_drift(last_rows(tmp_path / "mygo_mujica/a-text-grpo"))
    assert sum(r["train/updates"] for r in last_rows(tmp_path / "mygo_mujica/a-text-offline")) >= 1


def test_two_steps_of_omne_r1_and_rows_of_what_it_learned(no_bias, tmp_path):
    flags = [*SMALL, *"--warmup-steps 20 --max-turn 40 --think on --out".split(), str(tmp_path)]
    omne_r1.main([*flags, "--stage", "ppo", "--group-size", "3"])
    learned = tmp_path / "omne_r1/a-stage1"
    assert_no_drift(read_jsonl(learned / "metrics.jsonl"))
    assert json.loads((learned / "config.json").read_text())["engine"] == "vllm"
    omne_r1.main([*flags, *"--stage sft --sft-sampled 4 --sft-templates 8 --sft-epochs 1".split()])
    data = tmp_path / "omne_r1/a-sft-data"
    assert len(read_jsonl(data / "sampled.jsonl")) == 20 and len(read_jsonl(data / "sharegpt.jsonl")) >= 8
    for folder in (learned, tmp_path / "omne_r1/a-sft-think"):
        assert list(folder.glob("checkpoint/*model.safetensors")) and list(folder.glob("eval_*.json"))


# ---------------------------------------------------------------- several processes

PROGRAM = """
import sys
sys.path.insert(0, {root!r})
import pytest
from tests.test_distributed import play
from tests.test_vllm import policies_without_bias
policies_without_bias(pytest.MonkeyPatch())
play(*sys.argv[1:])
"""


@pytest.mark.parametrize("script", ["at2po", "omne_r1"])
def test_two_ranks_with_a_vllm_each_are_one_process(tmp_path, script):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(root=str(ROOT)))
    settings = OTHERS[script].split() if script in OTHERS else FEW_TREES
    flags = [script, *FEW, *settings, "--steps", 2, "--name", "a", "--engine", "vllm"]
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port()]
    for launcher, out in ((["-u"], "one"), (torchrun, "two")):
        command = [sys.executable, *launcher, program, *flags, "--out", tmp_path / out]
        done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr[-3000:]
    folders = [f.parent for f in (tmp_path / "one" / script).glob("*/metrics.jsonl")]
    assert folders
    for one in folders:
        same_run(one, tmp_path / "two" / script / one.name)


def test_nothing_is_sampled_between_sleep_and_sync():
    """On a CPU, too, where it has nothing to give: what forgets to sync is seen here."""
    policy = small_policy()
    _, engine = generate(policy, REQUESTS, Engine=VllmEngine)
    engine.sleep()
    with pytest.raises(RuntimeError, match="sync before sampling"):
        generate(policy, REQUESTS, engine=engine)
    engine.sync(policy[0])
    assert generate(policy, REQUESTS, engine=engine)[0]


def test_a_tokenizer_loaded_from_elsewhere_is_no_reason_to_start_again():
    model, tokenizer = small_policy()
    first = VllmEngine(model, tokenizer, max_batch=8)
    tokenizer.init_kwargs["is_local"] = not tokenizer.init_kwargs.get("is_local", False)
    assert VllmEngine(model, tokenizer, max_batch=8).vllm is first.vllm


def test_vllm_is_not_started_twice_beside_other_ranks(monkeypatch):
    model, tokenizer = small_policy()
    VllmEngine(model, tokenizer, max_batch=8)
    monkeypatch.setattr(vllm_engine.distributed, "world", lambda: 2)
    with pytest.raises(ModelError, match="cannot be started twice under torchrun"):
        VllmEngine(model, tokenizer, max_batch=9)


def test_on_a_cpu_it_computes_as_training_does():
    model, tokenizer = small_policy()
    model.in_bf16 = True
    results, engine = generate((model, tokenizer), REQUESTS, Engine=VllmEngine)
    assert drift(model, REQUESTS, results) > 1e-6
    assert drift(model.bfloat16(), REQUESTS, results) < .2  # (rounding alone makes .24 of fp32)
