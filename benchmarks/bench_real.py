"""A real model's step on a CPU, part by part, and beside peers on the same prompts and lengths:

    taskset -c 0 python -m benchmarks.bench_real QUESTIONS FLAGS OF at2po.py
    taskset -c 0 python -m benchmarks.bench_real QUESTIONS --without FLAGS OF at2po.py

The second form leaves out, one at a time, what makes a step fast here, and no peer is asked.

Sampled tokens per CPU second of this process. For the rollout peers are transformers' generate, vLLM and
(with the GGUF file in $GGUF) llama-cpp-python, for the update transformers with peft, padded; who is not
installed is left out. They sample as many tokens behind each turn's context as ours did.
"""

import importlib.util
import os
import resource
import sys
import tempfile
import time
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

import at2po
from common import data, engine, splits, training
from common import model as models
from common.run import Run, program

timed_by = time.process_time


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def tell(what, tokens, seconds, of_ours=None):
    ratio = f"{seconds / of_ours:6.2f} times ours" if of_ours else ""
    rate = tokens / seconds
    print(f"{what:36} {seconds:7.1f} CPU s {rate:7.1f} tokens/s  peak {peak():4.1f} GB {ratio}", flush=True)


def waves_of(trajectories):
    """[[(context ids, tokens sampled behind it)] of the k-th turns]"""
    waves = []
    for t in trajectories:
        context = list(t.prompt_ids)
        for k, turn in enumerate(t.turns):
            waves += [[]] * (k == len(waves))
            waves[k] = [*waves[k], (context, len(turn.ids))]
            context = context + turn.ids + turn.observation_ids
    return waves


def of_generate(folder, waves, dtype):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def wave(rows):
        width = max(len(ids) for ids, _ in rows)
        most = max(n for _, n in rows)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in rows])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows])
        model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=most,
                       min_new_tokens=most)
    return wave


def of_vllm(folder, waves, dtype):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    sys.modules.pop("llvmlite.binding.ffi", None)  # vLLM looks into every module, and fails at this one
    from vllm import LLM, SamplingParams
    longest = max(len(ids) + n for rows in waves for ids, n in rows)
    llm = LLM(folder, dtype=dtype, enforce_eager=True, max_num_seqs=64, enable_prefix_caching=True,
              max_model_len=longest + 8)

    def wave(rows):
        how = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for _, n in rows]
        llm.generate([{"prompt_token_ids": ids} for ids, _ in rows], how, use_tqdm=False)
    return wave


def of_llama_cpp(folder, waves, dtype):
    from llama_cpp import Llama
    llm = Llama(os.environ["GGUF"], n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)

    def wave(rows):  # (its Python interface has no batch of sequences)
        for ids, n in rows:
            for k, _ in enumerate(llm.generate(ids, temp=1.0, top_k=0, top_p=1.0), 1):
                if k == n:
                    break
    return wave


PEERS = {"transformers": of_generate, "vllm": of_vllm, "llama_cpp": of_llama_cpp}


def all_at_once(shares, uniforms):
    """engine.pick as it was: all of the vocabulary added in fp64."""
    cumulative = shares.double().cumsum(-1)
    level = (uniforms * cumulative[:, -1])[:, None]
    token = torch.searchsorted(cumulative, level, right=True)[:, 0]
    return token.clamp(max=shares.shape[1] - 1), cumulative[:, -1]


def under_a_dense_mask(module, query, key, value, end, scaling=None, **kwargs):
    """tree_blocks.block_attention as it was: every query reads every key of its pack, and a mask says which
    count. end: (P, 1, 1, N)."""
    at = torch.arange(end.shape[-1])
    seen = (at <= at[:, None]) & (at[:, None] < end)                          # (P, 1, N, N)
    out = F.scaled_dot_product_attention(query, key, value, seen, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("dense", under_a_dense_mask)


@contextmanager
def instead(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    yield
    setattr(module, name, before)


OF_ROLLOUT = {"guessing": (engine, "FEW", 0), "sampling in parts": (engine, "pick", all_at_once)}


def rolled_out(policy, split, questions, cfg):
    """(trees, seconds)"""
    began = timed_by()
    policy.engine.sync(policy.model)
    roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, step=1)
    seconds = timed_by() - began
    policy.engine.sleep()
    return roots, seconds


def each_left_out(policy, split, questions, cfg, batches, tokens, ours):
    """Lines of what a step takes without one part. ours: seconds of rollout and update."""
    model = policy.model

    def logprobs(b, temperature):
        return models.token_logprobs(model, b, temperature)

    reference = partial(models.turn_logprob, backend="reference")
    for name, context in (("attention by blocks", models.attending(model, "dense")),
                          ("the frozen head's own form", instead(models, "turn_logprob", reference))):
        model.train()
        with context:
            _, seconds = update(model, batches, logprobs, cfg.temperature)
        tell(f"update without {name}", tokens, seconds, ours[1])
    for name, patch in OF_ROLLOUT.items():
        model.eval()
        with instead(*patch):
            _, seconds = rolled_out(policy, split, questions, cfg)
        tell(f"rollout without {name}", tokens, seconds, ours[0])


def update(model, batches, logprobs_of, temperature):
    """(seconds of old log-probs, of forward and backward)"""
    began = timed_by()
    with torch.no_grad():
        old = [logprobs_of(b, temperature) for b in batches]
    middle = timed_by()
    for b, before in zip(batches, old, strict=True):
        (logprobs_of(b, temperature) - before).exp().sum().backward()
    model.zero_grad()
    return middle - began, timed_by() - middle


@program()
def main(argv=None):
    limit, *given = argv or sys.argv[1:]
    leaves_out = given[:1] == ["--without"]
    cfg = at2po.parse_args(given[leaves_out:])
    split, _ = splits.load_splits(cfg, at2po.PAPER_EVAL)
    run = Run(cfg)
    policy = run.policy(cfg.checkpoint or cfg.model, trains=True)
    model = policy.model
    questions = data.batch_of_step(split.questions, 1, int(limit), 0)
    roots, ours = rolled_out(policy, split, questions, cfg)
    at2po.score_trees(roots, questions, cfg)
    trajectories = at2po.trajectories_of(roots)
    turns = {id(turn): turn for t in trajectories for turn in t.turns}.values()
    tokens = sum(len(turn.ids) for turn in turns)
    print(f"{len(trajectories)} trajectories, {len(turns)} turns, {tokens} sampled tokens, longest "
          f"{max(t.sampled_tokens for t in trajectories)}")
    tell("rollout: ours", tokens, ours)

    batches = training.collate_parts(model, trajectories, cfg.micro_tokens, cfg.share_prefixes)
    old, learned = update(model, batches, lambda b, t: models.token_logprobs(model, b, t), cfg.temperature)
    tell("old log-probs: ours", tokens, old)
    tell("update: ours", tokens, learned)
    if leaves_out:
        return each_left_out(policy, split, questions, cfg, batches, tokens, (ours, learned))
    parts = [trajectories[i:i + 4] for i in range(0, len(trajectories), 4)]

    def plain(part, temperature):
        with models.computing(model):
            return models.plain_token_logprobs(model, part, temperature, model.vocabulary)

    model.train()
    with models.attending(model, "sdpa"):
        plain_old, plain_learned = update(model, parts, plain, cfg.temperature)
    tell("old log-probs: transformers, peft", tokens, plain_old, old)
    tell("update: transformers, peft", tokens, plain_learned, learned)

    waves = waves_of(trajectories)
    with tempfile.TemporaryDirectory() as folder:
        source = str(models.folded(cfg.checkpoint or cfg.model, f"{folder}/folded"))
        dtype = "bfloat16" if cfg.precision == "bf16" else "float32"
        for name, peer in PEERS.items():
            if importlib.util.find_spec(name) and (name != "llama_cpp" or "GGUF" in os.environ):
                wave = peer(source, waves, dtype)
                began = timed_by()
                for rows in waves:
                    wave(rows)
                tell(f"rollout: {name}", tokens, timed_by() - began, ours)


if __name__ == "__main__":
    main()
