"""A training step of AT2PO's size on one GPU, with random weights: rollout, update, memory, sleep and wake.

    python -m benchmarks.bench_gpu [--model qwen3-0.6b qwen3-4b] [--engine vllm] [--out results/gpu]

Weights are random, so turns are of a fixed length and nothing is learned; shapes are those of the paper's
runs (three passages of search results a turn, trees of ten chains and twelve more leaves). Rows: everything
on, then one thing off at a time. Tokens/s of a rollout counts sampled tokens, of an update the tokens that
the model computes, without padding. Utilisation: 6 FLOPs a weight and token of forward and backward, 2 of the
old log-probs, recomputation not counted, of 989 TFLOP/s (H100, dense bf16). A CPU runs it with --model small.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import torch

import at2po
from benchmarks.bench_kernels import HEADS, markdown, reason, versions
from common import rollout, run, training
from common.model import flex, token_logprobs
from common.rollout import Trajectory, Turn
from common.world.tiny import tiny_tokenizer

PEAK_TFLOPS = 989
LAYERS = {
    "qwen3-0.6b": dict(
        num_hidden_layers=28, intermediate_size=3072,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128),
    "qwen3-4b": dict(
        num_hidden_layers=36, intermediate_size=9728,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "qwen3-8b": dict(
        num_hidden_layers=36, intermediate_size=12288,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128),
    "small": dict(
        num_hidden_layers=2, intermediate_size=128,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32),
}
CASES = {  # fields of at2po.Config
    "as it is": {},
    "prefixes not shared": {"share_prefixes": "off"},
    "8-bit Adam": {"optimizer": "adamw8bit"},
}
COLUMNS = ("model", "case", "tokens", "update s", "tokens/s", "utilisation", "peak GB", "note")


def random_model(name, cfg, device):
    """A policy of that size as load_model would give it, without a file."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    H, V = HEADS[name]
    config = Qwen3Config(hidden_size=H, vocab_size=V, tie_word_embeddings=True, **LAYERS[name])
    config._attn_implementation = "sdpa"
    if device == "cuda":
        flex()  # transformers knows "tree" from here on
        config._attn_implementation = "tree"
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config)
    if device == "cuda":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.in_bf16 = device == "cuda"
    return model


def words(vocabulary):
    """A tokenizer of so many words."""
    tokenizer = tiny_tokenizer([f"w{i}" for i in range(vocabulary)], [])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return tokenizer


def random_tree(question, vocabulary, sampled, observed, turns=4, chains=10, more=12):
    """The leaves of a tree: `chains` from the prompt, `more` that branch off a turn of one of them."""
    random = Random(question)

    def ids(n):
        return random.choices(range(vocabulary), k=n)

    def turn(last):
        return Turn(ids(sampled), [-1.0] * sampled, "", "", [] if last else ids(observed))

    prompt = ids(300)
    paths = []
    for i in range(chains + more):
        start = [] if i < chains else random.choice(paths)[:random.randint(1, turns - 1)]
        paths.append([*start, *(turn(k == turns - 1) for k in range(len(start), turns))])
    leaves = [Trajectory(str(question), prompt, path) for path in paths]
    for leaf in leaves:
        leaf.advantages = [random.gauss(0, 1) for _ in leaf.turns]
    return leaves


def bench_rollout(model, cfg, questions, sampled, observed, turns=2, chains=10):
    """Chains of turns through the engine, all questions together: {metric: number}."""
    vocabulary = model.config.vocab_size
    engine = run.make_engine(cfg, model, words(vocabulary - 10))
    engine.eos.clear()  # turns are of one length
    vocabulary -= 10

    async def chain(question, i):
        random = Random(question)
        context = random.choices(range(vocabulary), k=300)
        for k in range(turns):
            seed = hash((question, i, k)) % 2**31
            made = await engine.generate(context, max_tokens=sampled, seed=seed)
            context = [*context, *made.token_ids, *random.choices(range(vocabulary), k=observed)]

    def play(n):
        agents = [chain(q, i) for q in range(n) for i in range(chains)]
        rollout.run_agents(agents, engine, rollout.BatchedSearch(None))

    play(1)  # warm
    engine.sync(model)
    steps = turns * sampled
    before = engine.sampled_tokens
    reset_peak()
    began = now()
    play(questions)
    seconds = now() - began
    tokens = engine.sampled_tokens - before
    held = held_gb()
    peak = max(held, peak_gb() or 0) if held else None  # vLLM's memory is not PyTorch's
    began = now()
    engine.sleep()
    slept = now() - began
    asleep = held_gb()
    began = now()
    engine.sync(model)
    play(1)
    woke = now() - began
    engine.sleep()
    return {
        "sampled": tokens, "s": seconds, "tokens/s": tokens / seconds, "ms per token": 1e3 * seconds / steps,
        "peak GB": peak, "after it GB": held,
        "asleep GB": asleep, "sleep s": slept, "wake and ten chains s": woke,
    }


def bench_update(model, optimizer, cfg, updates, questions, sampled, observed):
    """Medians over updates of `questions` trees each."""
    vocabulary = model.config.vocab_size
    seconds = []
    reset_peak()
    for i in range(updates + 1):
        leaves = []
        for q in range(questions):
            leaves += random_tree(i * questions + q, vocabulary, sampled, observed)
        began = now()
        batches = training.prepare(
            model, None, leaves, cfg.micro_tokens, cfg.share_prefixes, cfg.temperature)
        sequences = len(leaves)
        for b in batches:
            logprobs = token_logprobs(model, b)
            loss, _ = at2po.policy_loss(logprobs, b, cfg, sequences, 0)
            loss.backward()
        training.clip_gradient(model)
        optimizer.step()
        optimizer.zero_grad()
        if i:  # the first one compiles
            seconds.append(now() - began)
    tokens = sum(b.tokens for b in batches)
    median = sorted(seconds)[len(seconds) // 2]
    weights = sum(p.numel() for p in model.parameters())
    flops = 8 * weights * tokens
    return {
        "tokens": tokens, "update s": median, "tokens/s": tokens / median,
        "utilisation": flops / median / PEAK_TFLOPS / 1e12, "peak GB": peak_gb(),
    }


# ---------------------------------------------------------------- the device

def now():
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reset_peak():
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_gb():
    return torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None


def held_gb():
    """Of the device, by whatever holds it: vLLM's memory is not PyTorch's. What PyTorch keeps for later is in
    it."""
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


# ---------------------------------------------------------------- main

def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(LAYERS), default=["qwen3-0.6b", "qwen3-4b"])
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--engine", choices=("transformers", "vllm"), default="transformers")
    parser.add_argument("--optimizer", choices=("adamw", "adamw8bit"), default="adamw", help="of every case")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--questions", type=int, default=2, help="trees per update")
    parser.add_argument("--chains", type=int, default=20, help="of a rollout, ten a question")
    parser.add_argument("--sampled", type=int, default=120, help="tokens per turn")
    parser.add_argument("--observed", type=int, default=450, help="tokens that a search returns")
    parser.add_argument("--micro-tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="folder for gpu.md")
    return parser.parse_args()


def main():
    args = parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = [versions()]

    def say(line):
        print(line, flush=True)
        text.append(line)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "gpu.md").write_text("\n".join(text) + "\n")

    print(text[0], flush=True)
    say(f"\n{args.questions} trees per update, turns of {args.sampled} sampled and {args.observed} observed "
        f"tokens, {args.micro_tokens} packed tokens a forward pass, {args.optimizer}, {args.updates} "
        "updates: medians\n")
    base = replace(at2po.Config(), engine=args.engine, optimizer=args.optimizer,
                   micro_tokens=args.micro_tokens)
    for name in args.model:
        for case in args.case:
            row = {"model": name, "case": case}
            try:
                cfg = replace(base, **CASES[case])
                model = random_model(name, cfg, device)
                if case == args.case[0]:
                    measured = bench_rollout(model, cfg, args.chains // 10, args.sampled, args.observed)
                    say(f"\nRollout of {name}, {args.chains} chains, {args.engine}:\n")
                    say(markdown([measured], tuple(measured)) + "\n")
                optimizer = training.make_optimizer(model, 1e-6, kind=cfg.optimizer)
                row |= bench_update(
                    model, optimizer, cfg, args.updates, args.questions, args.sampled, args.observed)
            except (RuntimeError, ImportError) as error:
                row["note"] = reason(error)
            table = markdown([row], COLUMNS)
            say(table if case == args.case[0] else table.split("\n")[-1])
            model = optimizer = None
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
