"""What a script starts from and ends with: questions with a search over them, the tiny policy, evaluation files.

The one module of common/ that joins the others; a script's method is nowhere in it."""

import inspect
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from common import chat, data, demonstrations, kg, process, report, retriever, rollout, training, world

NOT_NEGATIVE = ("eval_temperature", "weight_decay", "lr_final", "sft_lr_final", "clip", "clip_low", "clip_high", "kl_coef", "flaw_rate")


def check_model_is_named(cfg):
    """Refuses data other than the world's without a model; called before anything is read."""
    if cfg.data != "world" and not (cfg.checkpoint or cfg.model):
        raise training.ModelError(f"--data {cfg.data} needs --model or --checkpoint")


def check_flags(cfg, at_least, positive, world_sets=world.SPLITS):
    """Refuses numbers that no run can use, and trackers and sets that do not exist: {flag: minimum}, and flags that must be above 0 and finite."""
    if cfg.kernels == "on" and not torch.cuda.is_available():
        sys.exit("error: --kernels on needs a CUDA device; auto takes plain PyTorch where there is none")
    for name, minimum in at_least.items():
        if getattr(cfg, name) < minimum:
            sys.exit(f"error: --{name.replace('_', '-')} {getattr(cfg, name)}: at least {minimum}")
    for name in positive:
        if not 0 < getattr(cfg, name) < float("inf"):
            greedy = " (it is that of training; greedy evaluation is --eval-temperature 0)" if name == "temperature" else ""
            sys.exit(f"error: --{name.replace('_', '-')} {getattr(cfg, name)}: a number above 0{greedy}")
    for name, value in vars(cfg).items():
        if isinstance(value, float) and (not math.isfinite(value) or value < 0 and name in NOT_NEGATIVE):
            sys.exit(f"error: --{name.replace('_', '-')} {value}: a {'number of at least 0' if name in NOT_NEGATIVE else 'finite number'}")
    if not 0 <= cfg.seed < 2**63:
        sys.exit(f"error: --seed {cfg.seed}: a number from 0 to 2^63 - 1")
    if cfg.flaw_rate > 1:
        sys.exit(f"error: --flaw-rate {cfg.flaw_rate}: a share, from 0 to 1")
    try:
        report.check_trackers(cfg.log)
    except report.RunError as error:
        sys.exit(f"error: {error}")
    odd = [n for n in cfg.eval_data.split(",") if cfg.data == "world" and n not in ("", *world_sets)]
    if odd:
        sys.exit(f"error: --eval-data {odd[0]}: with --data world one of {', '.join(world_sets)}")


@dataclass
class Split:
    name: str
    questions: list
    retriever: object
    graph: object = None  # kg.KnowledgeGraph, where there is one


def world_split(name, size=1.0, questions=400, spec="bm25"):
    """A split of the embedded world. Test questions come from the world of seed 1, first evaluated after the learning rate had been chosen
    on dev (the test world of seed 0 was in view when clip window and warm-up were set); every other split is the world of seed 0."""
    try:
        made = world.make_world(name, seed=int(name == "test"), size=size, questions=questions)
    except (ValueError, IndexError) as error:  # too large for its words, or too small for its questions
        raise data.DataError(f"--world-size {size}: {error}") from error
    return Split(name, data.load_questions(made.questions), retriever.make_retriever(spec, made.corpus()), kg.KnowledgeGraph.from_triples(made.triples))


def make_retriever(cfg, corpus):
    """The retriever of --retriever with the run's time-outs."""
    return retriever.make_retriever(cfg.retriever, corpus, timeout=cfg.search_timeout, retries=cfg.search_retries)


def load_splits(cfg, paper_eval, searched=True):
    """(training split or None, evaluation splits) of --data, --eval-data, --corpus and --retriever. paper_eval: the paper's sets.

    searched: False = no passages are wanted, the retriever is None. A corpus pooled from contexts is that of all the sets loaded here, so an
    evaluation on its own searches a smaller one than a run that also trains."""
    if cfg.data == "world":
        evals = [world_split(n, cfg.world_size, cfg.eval_limit or 400, cfg.retriever) for n in (cfg.eval_data or "test").split(",")]
        return world_split("train", cfg.world_size, cfg.limit or 2000, cfg.retriever), evals
    own = ("hotpotqa", "search-r1") if cfg.eval_only else ("hotpotqa", "nq", "search-r1")  # the papers' training sets
    of_paper = cfg.data.removesuffix("-train") in own                                      # are evaluated on their lists
    if cfg.ask and cfg.corpus != "contexts" and getattr(cfg, "graph", "") != "evidences":  # nothing to pool: no set is read
        names, train = [], None
    elif cfg.eval_only or cfg.ask:
        names, train = (cfg.eval_data or (paper_eval if of_paper else cfg.data)).split(","), None
    else:
        train = data.load_questions(cfg.data, cfg.limit or None, cfg.skip_bad, role="train")
        names = [n for n in (cfg.eval_data or (paper_eval if of_paper else "")).split(",") if n]
    sets = {n: data.load_questions(n, cfg.eval_limit or None, cfg.skip_bad) for n in names}
    if train and not names:  # a file of one's own: its last tenth is held out
        held = min(max(1, len(train) // 10), cfg.eval_limit or len(train))
        if len(train) < 2:
            raise data.DataError(f"{cfg.data}: one question cannot be split into training and evaluation; give --eval-data")
        train, sets = train[:-held], {cfg.data if Path(cfg.data).exists() else f"{cfg.data}-heldout": train[-held:]}  # (no benchmark's)
    corpus = None
    if searched and not cfg.retriever.startswith("http"):
        if not cfg.corpus:
            raise data.DataError(f"--retriever {cfg.retriever} needs --corpus FILE (or --corpus contexts)")
        everything = [q for s in (train, *sets.values()) if s for q in s]
        corpus = data.pool_contexts(everything) if cfg.corpus == "contexts" else data.load_corpus(cfg.corpus)
    search = make_retriever(cfg, corpus) if searched else None
    named = sorted(map(set_name, sets))
    if len(set(named)) < len(sets):
        raise data.DataError(f"--eval-data: two sets are called {', '.join(named)}; predictions are kept by name: rename a file")
    evals = [Split(set_name(n), q, search) for n, q in sets.items()] or [Split("ask", [], search)]
    return (Split("train", train, search) if train else None), evals


def set_name(source):
    """What an evaluation set is called in files and tables.

    >>> set_name("data/dev.json.gz"), set_name("owner/name.v2:config"), set_name("2wiki-dev")
    ('dev', 'owner_name.v2_config', '2wiki-dev')
    """
    name = re.sub(r"[/:]", "_", source)
    if data.suffix_of(source) in data.SUFFIXES:
        name = Path(Path(source).name.removesuffix(".gz")).stem
    if re.search(r"_(before|step\d+)$", name):
        raise data.DataError(f"--eval-data {source}: a set cannot be called {name}, as evaluations during a run are; rename the file")
    return name


def within_limit(questions, prompt_length, limit, skip_bad):
    """The questions whose prompts fit into `limit` tokens; an overlong one is an error, or left out and counted with skip_bad."""
    fits = []
    for q in questions:
        n = prompt_length(q)
        if n <= limit:
            fits.append(q)
        elif not skip_bad:
            raise data.DataError(f"question {q.id}: its prompt has {n} tokens, the limit is --max-prompt {limit}; "
                                 "raise it, or leave such questions out with --skip-bad")
    if len(fits) < len(questions):
        report.console.print(f"left out {len(questions) - len(fits)} questions with prompts over {limit} tokens")
    if not fits:
        raise data.DataError(f"no question fits into --max-prompt {limit} tokens")
    return fits


def tiny_policy(cfg, script, words, tags, render, made_by, index=lambda made: retriever.BM25Retriever(made.corpus())):
    """Folder of the warmed-up tiny policy: supervised on flawed demonstrations in worlds that training never sees.

    words, tags: what the script writes besides the world's words. render(tokenizer, question row, demonstration, index) ->
    [rollout.Trajectory]; index(world) -> what it reads, by default a retriever. made_by: the functions it rests on; when their code
    changes, the policy is made anew."""
    code = (world, demonstrations, training.tiny_tokenizer, training.tiny_model, training.warm_up, rollout.collate, *made_by)
    recipe = {"script": script, "steps": cfg.warmup_steps, "flaw_rate": cfg.flaw_rate, "top_k": cfg.top_k, "size": cfg.world_size,
              "torch": torch.__version__, "code": rollout.stable_seed(*map(inspect.getsource, code))}

    def build():
        tokenizer = training.tiny_tokenizer([*world.vocabulary(), *words], tags)
        model = training.tiny_model(tokenizer)
        groups = demonstrations.groups(tokenizer, lambda *a: render(tokenizer, *a), index, cfg.warmup_steps, cfg.flaw_rate, cfg.world_size)
        started = time.time()
        report.console.print(f"warming up the tiny policy on {8 * cfg.warmup_steps} demonstrations, {torch.get_num_threads()} threads (cached afterwards)")

        def progress(step, loss):
            if step % 100 == 99 or step + 1 == cfg.warmup_steps:
                report.console.print(f"  warm-up {step + 1}/{cfg.warmup_steps} | loss {loss:.3f} | {time.time() - started:.0f}s")
        training.warm_up(model, (rollout.collate(g, pack_tokens=512) for g in groups), cfg.warmup_steps, progress=progress)
        return model, tokenizer
    return training.cached_policy(recipe, build)


def evaluate_all(cfg, run, policy, splits, evaluate, suffix=""):
    """{set: {"summary", "predictions"}}; each goes to eval_<set><suffix>.json, read back on resume.

    evaluate(policy, split, cfg, progress) -> (rows, summary) is the script's; policy has an engine and a search."""
    results = {}
    for split in splits:
        file = run.path / f"eval_{split.name}{suffix}.json"
        if not (cfg.resume and suffix and file.exists()):
            policy.engine.load_weights()
            policy.search.retriever = split.retriever
            with report.Progress(f"evaluating {split.name}") as progress:
                rows, summary = evaluate(policy, split, cfg, progress)
            run.write(file.name, {"summary": summary, "predictions": rows})
        results[split.name] = report.read_evaluation(file)
        s = results[split.name]["summary"]
        valid = f" (in valid format {s['em_valid']:.3f})" if "em_valid" in s else ""
        report.console.print(f"eval {split.name} (n {s['n']}): EM {s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}]{valid} | "
                             f"F1 {s['f1']:.3f} | searches {s['searches']:.2f} | tokens {s['tokens']:.0f} | format {s['format']:.2f}",
                             markup=False)
    return results


def checkpoint_of(run, every=None):
    """The checkpoint that --resume goes on from, all its files as they were saved; None where the run had not saved one yet.
    every: rows of metrics.jsonl between checkpoints, by default the run's --save-every.

    Refuses, and has changed nothing, where the checkpoint is gone, damaged or another run's."""
    folder, rows = training.find_checkpoint(run.path / "checkpoint"), report.read_jsonl(run.path / "metrics.jsonl")
    if folder is None:
        finished = report.evaluations(run.path)
        every = every or run.saved.get("save_every") or math.inf
        if rows and (finished or len(rows) > every):
            raise report.RunError(f"--resume: {run.path} has {len(rows)} steps in metrics.jsonl, and its checkpoint/ is gone: "
                                  "restore it, or start anew with another --name")
        if rows:
            report.warn(f"{run.path}: no checkpoint was saved before it stopped (--save-every); beginning again at step 1")
        return None
    state = training.read_state(folder)
    if state.get("run", run.id) != run.id:
        raise training.ModelError(f"{folder}: checkpoint of another run; put this run's own back, or start anew with another --name")
    threads = run.saved.get("threads")
    if isinstance(threads, int) and 0 < threads != torch.get_num_threads():
        if process.settled is None:
            report.warn(f"{run.path} was begun with {threads} threads, here are {torch.get_num_threads()}: it will not go on bit for bit")
        else:
            torch.set_num_threads(threads)
    return folder


def warn_of_unknown_words(tokenizer, question):
    """Says which words of a question the tiny policy has never seen: it answers with confidence all the same."""
    unknown = chat.unknown_words(tokenizer, question)
    if unknown:
        report.warn(f"this policy has no word for {', '.join(unknown)}: it knows the embedded world alone, and its answer means nothing here")
