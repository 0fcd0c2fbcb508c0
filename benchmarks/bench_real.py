"""A real model's step on a CPU, part by part, and beside peers on the same prompts and lengths:

    taskset -c 0 python -m benchmarks.bench_real QUESTIONS FLAGS OF at2po.py

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

import torch

import at2po
from common import data, splits, training
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


def of_generate(folder, waves):
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()

    def wave(rows):
        width = max(len(ids) for ids, _ in rows)
        most = max(n for _, n in rows)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in rows])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in rows])
        model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=most,
                       min_new_tokens=most)
    return wave


def of_vllm(folder, waves):
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING"}
    from vllm import LLM, SamplingParams
    longest = max(len(ids) + n for rows in waves for ids, n in rows)
    llm = LLM(folder, enforce_eager=True, max_num_seqs=64, enable_prefix_caching=True,
              max_model_len=longest + 8)

    def wave(rows):
        how = [SamplingParams(max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for _, n in rows]
        llm.generate([{"prompt_token_ids": ids} for ids, _ in rows], how, use_tqdm=False)
    return wave


def of_llama_cpp(folder, waves):
    from llama_cpp import Llama
    llm = Llama(os.environ["GGUF"], n_ctx=4096, n_threads=1, n_threads_batch=1, verbose=False)

    def wave(rows):  # (its Python interface has no batch of sequences)
        for ids, n in rows:
            for k, _ in enumerate(llm.generate(ids, temp=1.0, top_k=0, top_p=1.0), 1):
                if k == n:
                    break
    return wave


PEERS = {"transformers": of_generate, "vllm": of_vllm, "llama_cpp": of_llama_cpp}


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
    cfg = at2po.parse_args(given)
    split, _ = splits.load_splits(cfg, at2po.PAPER_EVAL)
    run = Run(cfg)
    policy = run.policy(cfg.checkpoint or cfg.model, trains=True)
    model = policy.model
    questions = data.batch_of_step(split.questions, 1, int(limit), 0)
    began = timed_by()
    policy.engine.sync(model)
    roots = at2po.rollout_trees(policy, split.retriever, questions, cfg, step=1)
    ours = timed_by() - began
    policy.engine.sleep()
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
        for name, peer in PEERS.items():
            if importlib.util.find_spec(name) and (name != "llama_cpp" or "GGUF" in os.environ):
                wave = peer(source, waves)
                began = timed_by()
                for rows in waves:
                    wave(rows)
                tell(f"rollout: {name}", tokens, timed_by() - began, ours)


if __name__ == "__main__":
    main()
