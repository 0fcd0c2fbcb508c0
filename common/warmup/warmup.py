"""A warm-up on real questions: a released model that never writes a paper's tags learns them from scripted
demonstrations (demonstrations.py), or from conversations on file, before reinforcement learning.

    python at2po.py --model FOLDER --warmup-data train.json,more.jsonl --data train.json …

What comes out is kept beside the tiny policies (~/.cache/fivehop/warm-up/), under a hash of the model, the
demonstrations and the training's flags: a run folder with its curves, its demonstrations to read and its
checkpoint. Runs that ask for the same warm-up share it, and one that was interrupted goes on."""

import hashlib
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import torch

from common import cache, chat, checkpoint, data, distributed, rollout, splits, training
from common import model as models
from common.files import Progress, read_json, say, write_jsonl
from common.folder import RunFolder, begun
from common.gpu import memory
from common.guards import STEP, UPDATE, Metric
from common.run import Run
from common.warmup import demonstrations, sharegpt

VERSION = "3"  # change it when demonstrations or training are made otherwise
BATCH = 8      # demonstrations per update
EPOCHS = 3     # over them, unless --warmup-steps says otherwise
WEIGHT_DECAY = .01
METRICS = STEP | UPDATE | {
    "train/loss": Metric("mean -log p of a demonstrated token", "loss (nats per token)", "loss {:.3f}"),
    "train/lr": Metric("learning rate"),
    "warmup/tokens": Metric("tokens learned in the update"),
}


def warmed_up(cfg, script, source, examples):
    """Folder of `source` after --warmup-steps over examples, [[Trajectory]]. cfg: the run's flags
    (flags.PolicyFlags), since the warm-up is a run of its own."""
    steps = cfg.warmup_steps
    if steps == "auto":
        steps = -(-len(examples) * EPOCHS // BATCH)
    recipe = recipe_of(cfg, script, source, examples, steps)
    name = f"{script}-{cache.key([recipe])}"
    root = cache.folder()
    place = root / "warm-up" / name
    lock = nullcontext()
    if distributed.rank() == 0:
        lock = cache.locked(root / "warm-up" / f"{name}.lock")
    with lock:
        decided = []  # by rank 0, which has the lock
        if distributed.rank() == 0:
            found = checkpoint.find(place / "checkpoint")
            decided = [not found or read_json(found / "trainer.json", dict)["step"] < steps]
        if distributed.gather(decided)[0]:
            run_folder(cfg, steps, recipe, source, root, name, examples)
    trained = checkpoint.find(place / "checkpoint")
    folder = distributed.first(models.folded, trained, place / "folded")
    held = sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
    say(f"warmed up: {place} ({held / 1e9:.1f} GB; delete it when no run needs it)")
    return folder


def recipe_of(cfg, script, source, examples, steps):
    """What the result depends on; config.json of its folder."""
    ids = hashlib.sha256()
    for e in examples:
        for t in e:
            turns = [(u.ids, u.observation_ids) for u in t.turns]
            ids.update(repr((t.prompt_ids, turns)).encode())
    return {
        "script": script,
        "version": VERSION,
        "torch": torch.__version__,
        "model": str(source),
        "weights": cache.digest(source),
        "demonstrations": len(examples),
        "ids": ids.hexdigest(),
        "steps": steps,
        "lora": cfg.lora,
        "precision": cfg.precision,
        "optimizer": cfg.optimizer,
        "weight_decay": WEIGHT_DECAY,
        "warmup_lr": cfg.warmup_lr,
    }


# ---------------------------------------------------------------- examples

def examples_of(cfg, script, tokenizer, split, *, render, reward, reply, prompt, ends="none", top_k,
                max_passage=None):
    """[[Trajectory]], one list a demonstration of --warmup-data's files; says how many of each there are and
    why not more. split: data.Split, of whose passages an agent reads top_k, max_passage characters each; what
    it has as `evaluated` nothing may learn.

    render(tokenizer, question, Demonstration) -> [Trajectory], the script's; reward(trajectories, question):
    what the first of them earns, by the script's own rule; None where it exceeds the agent's limits.
    reply(tokenizer, turn ids, observation) -> ids, of conversations on file; ends: which of their messages
    the policy is to end itself, "all", the "last" or "none", where its agent stops it at a tag.
    prompt(tokenizer, row) -> ids, of the rows that --collect of this `script` wrote."""
    examples = []
    for file in cfg.warmup_data.split(","):
        if sharegpt.is_file(file):
            rows = sharegpt.read(file, ())
            others = {row.get("script", script) for row in rows} - {script}
            if others:
                raise data.DataError(f"--warmup-data {file}: conversations of {min(others)}.py, in its tags")
            kept, fate, marks = [], Counter(), chat.role_marks(tokenizer)
            for row in rows:
                if not split.evaluated.isdisjoint(sharegpt.questions_in(row)):
                    fate["their questions are evaluated"] += 1
                    continue
                t = of_conversation(tokenizer, row, reply, ends, prompt)
                said = [i for turn in t.turns for i in chat.encode(tokenizer, turn.text)[1]]  # without ends
                if not marks.isdisjoint(said):
                    fate["write a mark of the chat template"] += 1
                elif t.length > cfg.micro_tokens:
                    fate[f"longer than --micro-tokens {cfg.micro_tokens}"] += 1
                else:
                    kept.append([t])
            told = f"{len(kept)} conversations"
        else:
            questions = data.load_questions(file, None, cfg.skip_bad, role="train")
            questions = splits.unseen(file, questions, split.evaluated)
            with Progress(f"demonstrations of {file}") as progress:
                kept, fate = demonstrations.of_questions(
                    questions, split.retriever, lambda q, d: render(tokenizer, q, d), reward,
                    top_k, max_passage, progress)
            told = f"{fate.pop('demonstrated', 0)} of {len(questions)} questions demonstrated"
        told += "".join(f"; {n}: {why}" for why, n in fate.most_common())
        lengths = [t.length for example in kept for t in example]
        sampled = [t.sampled_tokens for example in kept for t in example]
        if kept:
            told += (f"; {sum(lengths) / len(kept):.0f} tokens each, {sum(sampled) / len(kept):.0f} of them "
                     "learned")
        say(f"{file}: {told}")
        examples += kept
    if not examples:
        raise data.DataError(f"--warmup-data {cfg.warmup_data}: nothing to learn from in it: no gold "
                             "evidence, and no conversations, of questions that are not evaluated")
    return examples


def of_conversation(tokenizer, row, reply, ends="none", prompt=None):
    """The Trajectory that a ShareGPT row teaches: what gpt says is learned, with the end of sequence where
    `ends` wants one (files hold none)."""
    first, *messages = row["conversations"]
    if "script" in row:
        prompt_ids = prompt(tokenizer, row)
    else:
        asked = [("user", first["value"])]
        if isinstance(row.get("system"), str):
            asked.insert(0, ("system", row["system"]))
        prompt_ids = chat.render_chat(tokenizer, asked)
    said = [message for message in messages if message["from"] == "gpt"]
    turns = []
    for message in messages:
        if message["from"] == "gpt":
            text, ids = chat.encode(tokenizer, message["value"])
            turn = rollout.Turn(ids, [0.0] * len(ids), "", text)
            if ends == "all" or ends == "last" and message is said[-1]:
                turn.ids.append(tokenizer.eos_token_id)
                turn.logprobs.append(0.0)
            turns.append(turn)
        else:
            turns[-1].observation = message["value"]
            turns[-1].observation_ids = reply(tokenizer, turns[-1].ids, message["value"])
    return rollout.Trajectory(str(row.get("id", "")), prompt_ids, turns)


# ---------------------------------------------------------------- training

def run_folder(cfg, steps, recipe, source, root, name, examples):
    """Trains `source` on the examples; leaves a run folder with its checkpoint."""
    recomputes = memory.check(cfg, source)
    cfg = replace(cfg, eval_every=0, save_every="auto", log="")
    folder = RunFolder(root, "warm-up", name, recipe, resume=begun(root / "warm-up" / name))
    torch.manual_seed(0)  # new adapters
    model, tokenizer = models.load_policy(
        folder.start or str(source), cfg.lora, recomputes=recomputes, precision=cfg.precision)
    policy = rollout.Policy(distributed.shard(model), tokenizer, None)
    run = Run(cfg, metrics=METRICS)
    run.folder = folder
    with run.stage(f"warm-up on {len(examples)} demonstrations"):
        shown = []  # for somebody who looks
        for t in (t for e in examples for t in e):
            turns = [{"said": turn.text, "seen": turn.observation} for turn in t.turns]
            shown.append({"step": 0, "id": t.question_id, "turns": turns})
        distributed.once(write_jsonl, folder.path / "demonstrations.jsonl", shown)
        train(run, steps, policy, examples)


def train(run, steps, policy, examples):
    """Minus the log-likelihood of what the demonstrations say; each update is the mean over its tokens. The
    rate rises over a tenth of the updates, and three at least, since Adam's first updates are as large as the
    rate; then half a cosine."""
    cfg = run.cfg
    optimizer = training.make_optimizer(policy.model, cfg.warmup_lr, WEIGHT_DECAY, kind=cfg.optimizer)
    micro_tokens = cfg.micro_tokens
    if policy.model.device.type == "cpu":  # more of them, so that progress is shown
        micro_tokens = min(cfg.micro_tokens, 2048)
    for step, row in run.steps(policy, optimizer, steps, label="warm-up | "):
        if step == 1:
            say(f"the first of {steps} updates, on {BATCH} demonstrations")
        chosen = data.batch_of_step(examples, step, BATCH, "warm-up")
        trajectories = [t for example in chosen for t in example]
        num_tokens = sum(t.sampled_tokens for t in trajectories)
        peak, rising = cfg.warmup_lr, max(3, steps // 10)
        row["train/lr"] = training.cosine_lr(step - 1, steps, peak, peak / 20, warmup=rising)
        training.set_lr(optimizer, row["train/lr"])
        meter = training.Meter()
        for b in training.collate_parts(policy.model, trajectories, micro_tokens, cfg.share_prefixes):
            logprobs = models.token_logprobs(policy.model, b, 1.0)   # (B, T)
            loss = -logprobs.sum() / num_tokens
            (loss * b.weight).backward()
            meter.add(loss, {"tokens": int(b.response_mask.sum())}, b.weight)
        norm = training.clip_gradient(policy.model, 1.0)
        if meter.end_update(norm):
            optimizer.step()
        optimizer.zero_grad()
        row |= meter.means()
        row["warmup/tokens"] = num_tokens
