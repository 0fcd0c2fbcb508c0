"""Engine and update on the embedded world: python -m benchmarks.bench_engine [--questions 8] [--group 16]

Generation: the same multi-turn rollouts (same policy, questions, seeds where the API has them) by our engine, by a plain loop that
calls model.generate once a turn for the whole batch, and by transformers' generate_batch. Update: seconds of forward and
backward of the same trees with and without shared prefixes. Prints one Markdown table; figures are of this machine and this run.
"""

import argparse
import platform
import time

import torch
import transformers

import at2po
from common import data, retriever, rollout, task, training, world
from common.engine import TransformersEngine


def setup(questions):
    cfg = at2po.parse_args([])
    model, tokenizer = training.load_policy(at2po.tiny_policy(cfg))
    train = world.make_world("train", questions=2000)
    split = task.Split("train", data.load_questions(train.questions)[:questions], retriever.BM25Retriever(train.corpus()))
    return cfg, model, tokenizer, split


def by_engine(cfg, model, tokenizer, split, group):
    """Seconds and sampled tokens of `group` chains a question."""
    engine = TransformersEngine(model, tokenizer, cfg.max_batch)
    policy = at2po.Policy(engine, tokenizer, rollout.BatchedSearch(split.retriever))
    started = time.time()
    at2po.rollout_trees(policy, split.questions, at2po.replace(cfg, rollout="chains", group_size=group), 0)
    return time.time() - started, engine.sampled_tokens


def turn_loop(cfg, model, tokenizer, split, group, generate):
    """The textbook loop: every trajectory takes a turn, all wait for the slowest, the whole context is encoded again.
    generate(contexts) -> list of sampled ids. The limits are those of the engine's run."""
    states = [{"prompt": at2po.render_prompt(tokenizer, q.question), "turns": []} for q in split.questions for _ in range(group)]
    live, tokens, started = states, 0, time.time()
    while live:
        contexts = [s["prompt"] + [i for ids, obs in s["turns"] for i in ids + obs] for s in live]
        sampled = generate(contexts)
        after = []
        for s, ids in zip(live, sampled, strict=True):
            tokens += len(ids)
            text = tokenizer.decode(ids)
            if text.rstrip().endswith(at2po.SEARCH[1]) and at2po.SEARCH[0] in text and len(s["turns"]) < cfg.max_searches:
                query = text.split(at2po.SEARCH[0])[-1].split(at2po.SEARCH[1])[0].strip()
                s["turns"].append((ids, at2po.render_observation(tokenizer, split.retriever.search([query], cfg.top_k)[0])[1]))
                if sum(len(a) + len(b) for a, b in s["turns"]) < cfg.max_response:
                    after.append(s)
        live = after
    return time.time() - started, tokens


def plain_generate(cfg, model, tokenizer):
    stops = {tokenizer.convert_tokens_to_ids(t) for t in (at2po.SEARCH[1], at2po.ANSWER[1])} | {tokenizer.eos_token_id}
    config = transformers.GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=256, eos_token_id=sorted(stops),
                                           pad_token_id=tokenizer.pad_token_id)

    def generate(contexts):
        width = max(map(len, contexts))
        ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(c)) + c for c in contexts])
        mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
        return [next((o[:n + 1] for n, t in enumerate(o) if t in stops), o) for o in out]

    def batched(contexts):
        config.num_blocks, config.max_batch_tokens = None, None
        results = model.generate_batch(inputs=contexts, generation_config=config, progress_bar=False)
        return [list(r.generated_tokens) for r in results.values()]
    return generate, batched


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
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--skip-generate-batch", action="store_true")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    cfg, model, tokenizer, split = setup(args.questions)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
          f"transformers {transformers.__version__}; {args.questions} questions x {args.group} chains\n")
    generate, batched = plain_generate(cfg, model, tokenizer)
    rows = [("TransformersEngine (ours)", *by_engine(cfg, model, tokenizer, split, args.group)),
            ("model.generate, a call a turn for all", *turn_loop(cfg, model, tokenizer, split, args.group, generate))]
    one_by_one = [turn_loop(cfg, model, tokenizer, at2po.replace(split, questions=[q]), args.group, generate) for q in split.questions]
    rows.append(("model.generate, a question's group at a time", sum(s for s, _ in one_by_one), sum(n for _, n in one_by_one)))
    if not args.skip_generate_batch:
        rows.append(("generate_batch, a call a turn for all", *turn_loop(cfg, model, tokenizer, split, args.group, batched)))
    print("| generation | sampled tokens | seconds | tokens/s | ours / this |\n|---|---|---|---|---|")
    ours = rows[0][2] / rows[0][1]
    for name, seconds, tokens in rows:
        print(f"| {name} | {tokens} | {seconds:.1f} | {tokens / seconds:.0f} | {ours / (tokens / seconds):.2f} |")
    results = updates(cfg, model, tokenizer, split)
    print("\n| update of the same trees | tokens through the model | seconds |\n|---|---|---|")
    for share, name in (("on", "shared prefixes"), ("off", "plain batch")):
        print(f"| {name} | {results[share][1]} | {results[share][0]:.2f} |")
    (a, n), (b, m) = results["on"], results["off"]
    print(f"\ntoken ratio {m / n:.2f}, time ratio {b / a:.2f}")


if __name__ == "__main__":
    main()
