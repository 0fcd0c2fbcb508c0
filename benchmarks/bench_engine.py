"""Engine and update on the embedded world: python -m benchmarks.bench_engine [--questions 16] [--repeats 5]

Generation: the script's own agents (same policy, questions and searches) on our engine, on a plain loop that calls model.generate once
a turn for everyone who waits, and on transformers' generate_batch; as independent chains and as AT2PO's trees. Update: seconds of
forward and backward of the same trees with and without shared prefixes. Medians of alternating repeats; compare rows, not machines.
"""

import argparse
import asyncio
import platform
import time

import torch
import transformers

import at2po
from common import data, retriever, rollout, task, training, world
from common.engine import Generation, TransformersEngine


def setup(questions):
    cfg = at2po.parse_args([])
    model, tokenizer = training.load_policy(at2po.tiny_policy(cfg))
    train = world.make_world("train", questions=2000)
    split = task.Split("train", data.load_questions(train.questions)[:questions], retriever.BM25Retriever(train.corpus()))
    return cfg, model, tokenizer, split


class TurnEngine:
    """The textbook loop behind the engine's interface: whoever waits takes a turn in one call, all wait for the slowest, and every call
    encodes its contexts from the start. generate(contexts) -> list of sampled ids."""

    def __init__(self, tokenizer, generate):
        self.tokenizer, self.generate_ids, self.waiting, self.sampled_tokens = tokenizer, generate, [], 0

    @property
    def busy(self):
        return bool(self.waiting)

    def load_weights(self):
        pass

    async def generate(self, prompt_ids, stop, max_tokens, **sampling):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, stop, future))
        return await future

    def step(self):
        waiting, self.waiting = self.waiting, []
        for (_, stop, future), ids in zip(waiting, self.generate_ids([w[0] for w in waiting]), strict=True):
            self.sampled_tokens += len(ids)
            text = self.tokenizer.decode(ids)
            future.set_result(Generation(ids, [-.1] * len(ids), next((s for s in stop if s in text), "eos")))


def plain_generate(tokenizer, model):
    """generate(contexts) by model.generate on the left-padded batch, and by generate_batch."""
    stops = {tokenizer.convert_tokens_to_ids(t) for t in (at2po.SEARCH[1], at2po.ANSWER[1])} | {tokenizer.eos_token_id}
    config = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=256, eos_token_id=sorted(stops),
                                           pad_token_id=tokenizer.pad_token_id)

    def generate(contexts):
        width = max(map(len, contexts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        model.eval()
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        return [next((o[:n + 1] for n, t in enumerate(o) if t in stops), o) for o in out]

    def batched(contexts):
        config.num_blocks, config.max_batch_tokens = None, None
        results = model.generate_batch(inputs=contexts, generation_config=config, progress_bar=False)
        return [list(r.generated_tokens) for r in results.values()]
    return generate, batched


def rollouts(engine, tokenizer, split, cfg, at_a_time):
    """(sampled tokens, seconds) of one training step's rollouts, `at_a_time` questions together."""
    engine.load_weights()
    policy = at2po.Policy(engine, tokenizer, rollout.BatchedSearch(split.retriever))
    tokens, started = engine.sampled_tokens, time.time()
    for i in range(0, len(split.questions), at_a_time):
        at2po.rollout_trees(policy, split.questions[i:i + at_a_time], cfg, 0)
    return engine.sampled_tokens - tokens, time.time() - started


def updates(cfg, model, tokenizer, split):
    """(seconds, packed tokens) of log-probs, loss and backward over the same trees, shared and plain."""
    engine = TransformersEngine(model, tokenizer, cfg.max_batch)
    policy = at2po.Policy(engine, tokenizer, rollout.BatchedSearch(split.retriever))
    roots = [r for r in at2po.rollout_trees(policy, split.questions, cfg, 0) if at2po.assign_advantages(r, cfg)]
    results = {}
    for share in ("on", "off", "on", "off"):  # the second round counts
        prepared = at2po.prepare(model, None, roots, at2po.replace(cfg, share_prefixes=share))
        started = time.time()
        for m in prepared:
            at2po.policy_loss(training.token_logprobs(model, m.batch), m, cfg, 100)[0].backward()
        results[share] = time.time() - started, sum(int((m.batch.segments >= 0).sum()) for m in prepared)
        model.zero_grad(set_to_none=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-generate-batch", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    cfg, model, tokenizer, split = setup(args.questions)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}; {args.questions} questions, {args.repeats} repeats\n")
    generate, batched = plain_generate(tokenizer, model)
    ours, plain = TransformersEngine(model, tokenizer, cfg.max_batch), TurnEngine(tokenizer, generate)
    together = [("TransformersEngine (ours)", ours, args.questions), ("model.generate, a call a turn, all questions together", plain, args.questions),
                ("model.generate, a call a turn, a question at a time", plain, 1)]
    print("| generation | workload | sampled tokens | seconds | tokens/s | ours / this |\n|---|---|---|---|---|---|")
    for workload in ("chains", "tree"):
        c = at2po.replace(cfg, rollout=workload)
        runs = [[rollouts(engine, tokenizer, split, c, n) for _, engine, n in together] for _ in range(args.repeats + 1)][1:]  # the first one warms up
        rows = [(name, *sorted((r[i] for r in runs), key=lambda r: r[0] / r[1])[len(runs) // 2]) for i, (name, *_) in enumerate(together)]
        if workload == "chains" and not args.skip_generate_batch:
            rows.append(("generate_batch, a call a turn, all questions together (once)",
                         *rollouts(TurnEngine(tokenizer, batched), tokenizer, split, c, args.questions)))
        for name, tokens, seconds in rows:
            print(f"| {name} | {workload} | {tokens} | {seconds:.2f} | {tokens / seconds:.0f} | {rows[0][1] / rows[0][2] / (tokens / seconds):.2f} |")
    results = updates(cfg, model, tokenizer, split)
    print("\n| update of the same trees | tokens through the model | seconds |\n|---|---|---|")
    for share, name in (("on", "shared prefixes"), ("off", "plain batch")):
        print(f"| {name} | {results[share][1]} | {results[share][0]:.2f} |")
    (a, n), (b, m) = results["on"], results["off"]
    print(f"\ntoken ratio {m / n:.2f}, time ratio {b / a:.2f}")


if __name__ == "__main__":
    main()
