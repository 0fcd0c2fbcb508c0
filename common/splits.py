"""Questions with a search over them: the splits that --data, --eval-data, --corpus and --retriever name."""

import re
from dataclasses import replace
from pathlib import Path

from common import data, retriever
from common.data import Split
from common.files import say, warn

FEW = 20  # test questions below which no interval says anything
TRAINING_SETS = ("hotpotqa", "nq", "search-r1")  # of the papers; trained on one, their lists are evaluated


def load_splits(cfg, paper_eval, searched=True, live=False):
    """(training split or None, evaluation splits). paper_eval: the paper's sets, with commas.

    searched: False = no passages are wanted, the retriever is None. live: a question of --ask is about the
    sets' own facts, so they are read.

    A corpus pooled from contexts is that of all the sets loaded here, so an evaluation on its own searches
    a smaller one than a run that also trains."""
    if cfg.data == "world":
        from common.world import hard
        from common.world import splits as of_world
        return of_world.load(
            cfg.eval_data, cfg.limit, cfg.eval_limit, cfg.retriever, cfg.world_size, hard.parse(cfg.world))
    live = live or not searched or cfg.corpus == "contexts"
    train, sets = _questions_of(cfg, paper_eval, live)
    corpus = None
    if searched and not cfg.retriever.startswith(("http", "own:")):
        if not cfg.corpus:
            raise data.DataError(f"--retriever {cfg.retriever} needs --corpus FILE (or --corpus contexts)")
        if cfg.corpus == "contexts":
            from common.warmup import sharegpt
            everything = [train or [], *sets.values()]
            for file in filter(None, cfg.warmup_data.split(",")):
                if not sharegpt.is_file(file):
                    everything.append(data.load_questions(file, None, cfg.skip_bad, role="train"))
            corpus = data.pool_contexts([q for questions in everything for q in questions])
        else:
            corpus = data.load_corpus(cfg.corpus, cfg.skip_bad)
    search = None
    if searched:
        search = retriever.make_retriever(cfg.retriever, corpus)
    names = sorted(map(set_name, sets))
    if len(set(names)) < len(sets):
        raise data.DataError(f"--eval-data: two sets are called {', '.join(names)}; "
                             "predictions are kept by name: rename a file")
    evals = [Split(set_name(n), questions, search) for n, questions in sets.items()]
    if not evals:
        evals = [Split("ask", [], search)]
    return (Split("train", train, search) if train else None), evals


def _questions_of(cfg, paper_eval, live):
    """(training questions or None, {evaluation set: its questions})"""
    own = [n for n in TRAINING_SETS if n != "nq" or not cfg.eval_only]
    of_paper = cfg.data.removesuffix("-train") in own
    collects = getattr(cfg, "collect", "")  # (askit.py has no such flag)
    train = None
    if cfg.ask and not live:
        names = []
    elif (cfg.eval_only or cfg.ask) and not collects:
        listed = cfg.eval_data or (paper_eval if of_paper else cfg.data)
        names = listed.split(",")
        if cfg.checkpoint and not cfg.eval_data and not of_paper:
            warn(f"{cfg.data}: all its questions are asked; a policy that was trained on this file knows all "
                 "but its last tenth")
    else:
        train = data.load_questions(cfg.data, cfg.limit or None, cfg.skip_bad, role="train")
        listed = cfg.eval_data or (paper_eval if of_paper else "")
        names = [n for n in listed.split(",") if n]
    sets = {}
    if not collects:
        sets = {n: data.load_questions(n, cfg.eval_limit or None, cfg.skip_bad) for n in names}
    if train and not names:  # a file of one's own: its last tenth is held out, and not too few
        if len(train) < 2:
            raise data.DataError(f"{cfg.data}: one question cannot be split into training and evaluation; "
                                 "give --eval-data")
        held = max(len(train) // 10, min(FEW, len(train) // 2))
        held = min(held, cfg.eval_limit or len(train))
        if held < FEW:
            warn(f"{cfg.data}: {held} questions are held out; so few decide nothing, whatever their interval")
        say(f"{cfg.data}: the last {held} of {len(train)} questions are held out")
        name = cfg.data if Path(cfg.data).exists() else f"{cfg.data}-heldout"  # (no benchmark's)
        sets = {name: train[-held:]}
        train = train[:-held]
    if collects:  # from what a run learns from, never from what it is tested on
        train, sets = None, {cfg.data: train}
    return train, sets


def set_name(source):
    """What an evaluation set is called in files and tables.

    >>> set_name("data/dev.json.gz"), set_name("owner/name.v2:config"), set_name("2wiki-dev")
    ('dev', 'owner_name.v2_config', '2wiki-dev')
    """
    name = re.sub(r"[/:]", "_", source)
    if data.suffix_of(source) in data.SUFFIXES:
        name = Path(Path(source).name.removesuffix(".gz")).stem
    if re.search(r"_(before|step\d+)$", name):
        raise data.DataError(f"--eval-data {source}: a set cannot be called {name}, "
                             "as evaluations during a run are; rename the file")
    return name


def within_limit(splits, prompt_length, limit, skip_bad):
    """The splits (None stays None) with the questions whose prompts fit into `limit` tokens; an overlong one
    is an error, or left out and counted with skip_bad."""
    kept = []
    for split in splits:
        if split is None:
            kept.append(None)
            continue
        fits = []
        for q in split.questions:
            n = prompt_length(q)
            if n <= limit:
                fits.append(q)
            elif not skip_bad:
                raise data.DataError(f"question {q.id}: its prompt has {n} tokens, the limit is --max-prompt "
                                     f"{limit}; raise it, or leave such questions out with --skip-bad")
        if len(fits) < len(split.questions):
            say(f"left out {len(split.questions) - len(fits)} questions with prompts over {limit} tokens")
            if not fits:
                raise data.DataError(f"no question fits into --max-prompt {limit} tokens")
        kept.append(replace(split, questions=fits))
    return kept
