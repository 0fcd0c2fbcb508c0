"""Questions with a search over them: the splits that --data, --eval-data, --corpus and --retriever name."""

import re
from pathlib import Path

from common import data, retriever
from common.data import Split
from common.files import say, warn
from common.formats import fingerprint

FEW = 20  # test questions below which no interval says anything
TRAINING_SETS = ("hotpotqa", "nq", "search-r1")  # of the papers; a run on one is evaluated on paper_eval


def load_splits(cfg, paper_eval, searched=True, read_sets=False):
    """(training split or None, evaluation splits). paper_eval: the paper's sets, with commas.

    searched: False = no passages are wanted, the retriever is None. read_sets: read the sets with --ask, too
    (their facts make a graph)."""
    if cfg.data == "world":
        from common.world import splits as of_world
        return of_world.load(cfg)
    read_sets = read_sets or not searched or cfg.corpus == "contexts"
    train, sets = _questions_of(cfg, paper_eval, read_sets)
    names = sorted(map(set_name, sets))
    if len(set(names)) < len(sets):
        raise data.DataError(f"--eval-data: two sets have one name ({', '.join(names)}): rename a file")
    searcher = None
    if searched:
        corpus = _corpus_of(cfg, [train or [], *sets.values()])
        searcher = retriever.make_retriever(cfg.retriever, corpus)
    if getattr(cfg, "collect", ""):  # (askit.py has no such flag) asks what is learned, evaluates nothing
        evaluated = frozenset()
        sets = {n: questions[:cfg.limit or None] for n, questions in sets.items()}
    else:
        evaluated = fingerprints(sets)
        limit = 0 if cfg.ask else cfg.eval_limit
        sets = {n: drawn(questions, limit, cfg.seed) for n, questions in sets.items()}
    evals = [Split(set_name(n), qs, searcher, evaluated=evaluated) for n, qs in sets.items()]
    if not evals:
        evals = [Split("ask", [], searcher)]
    split = None
    if train:
        split = Split("train", train[:cfg.limit or None], searcher, evaluated=evaluated)
    return split, evals


def _questions_of(cfg, paper_eval, read_sets):
    """(training questions or None, {evaluation set: its questions}), none in both, without --limit and
    --eval-limit.

    flags                             trained on                 evaluated
    --eval-data, or a paper's --data  --data, less these sets    --eval-data, or the paper's sets
    any other --data                  the other questions        a part that is held out (held_out)
    --eval-only                       nothing                    the same
      … of weights that learned none  nothing                    --eval-data, else all of --data
      … --collect                     nothing                    (asked:) what would be trained on
    --ask                             nothing                    nothing, unless read_sets"""
    collects = getattr(cfg, "collect", "")
    if cfg.ask and not read_sets:
        return None, {}
    # (--eval-only --data nq asks NQ alone)
    of_paper = [n for n in TRAINING_SETS if n != "nq" or collects or not cfg.eval_only]
    listed = cfg.eval_data
    if not listed and cfg.data.removesuffix("-train") in of_paper:
        listed = paper_eval
    sets = {n: data.load_questions(n, None, cfg.skip_bad) for n in listed.split(",") if n}
    if (cfg.eval_only or cfg.ask) and not collects:
        # of weights that learned nothing, and of other data than were learned, nothing is held out
        asks_all = cfg.ask or not has_learned(cfg) or not data.same_in_both_roles(cfg.data)
        if sets or asks_all:
            return None, sets or {cfg.data: data.load_questions(cfg.data, None, cfg.skip_bad)}
    train = data.load_questions(cfg.data, None, cfg.skip_bad, role="train")
    if sets:
        train = unseen(cfg.data, train, fingerprints(sets))
        if not train:
            raise data.DataError(f"{cfg.data}: all its questions are evaluated, so nothing is left to learn")
    else:
        held, train = held_out(cfg.data, train)
        if cfg.eval_only and not collects:
            say(f"{cfg.data}: these alone are asked; a run on this file, as it is now, learns the others "
                "(--eval-data asks all)")
        is_file = Path(cfg.data).expanduser().exists()  # else it would have the benchmark's name
        name = cfg.data if is_file else f"{cfg.data}-heldout"
        sets = {name: held}
    if collects:
        return None, {cfg.data: train}
    return train, sets


def _corpus_of(cfg, questions):
    """The passages that --corpus names; None where a server or one's own class has them. questions: lists of
    those that a run reads, whose contexts `contexts` pools: so --eval-data alone searches fewer than a run
    that also trains."""
    if cfg.retriever.startswith(("http", "own:")):
        return None
    if not cfg.corpus:
        raise data.DataError(f"--retriever {cfg.retriever} needs --corpus FILE (or --corpus contexts)")
    if cfg.corpus == "contexts":
        from common.warmup import sharegpt
        for file in filter(None, cfg.warmup_data.split(",")):
            if not sharegpt.is_file(file):
                questions = [*questions, data.load_questions(file, None, cfg.skip_bad, role="train")]
        corpus = data.pool_contexts([q for some in questions for q in some])
    else:
        corpus = data.load_corpus(cfg.corpus, cfg.skip_bad)
    say(f"{cfg.corpus}: {len(corpus):,} passages")
    most = getattr(cfg, "max_passage", None)
    if most and isinstance(corpus, list):  # (a mapped one would be read through)
        longer = sum(len(passage["text"]) > most for passage in corpus)
        if longer:
            say(f"{longer:,} of them are longer than --max-passage {most}: their ends are not read")
    if len(corpus) < 5:
        warn("a search or two read all of it: so there is nothing to search for")
    return corpus


def has_learned(cfg):
    """Whether an evaluation may be of weights that learned from --data."""
    learns_first = getattr(cfg, "warmup_data", "")
    return bool(cfg.checkpoint or learns_first or Path(cfg.model, "trainer.json").expanduser().exists())


def held_out(source, questions):
    """(those that are evaluated, the others) of a file: the questions whose fingerprint is in the lowest
    tenth, and the next ones until they are FEW, but at most half.

    So it depends on no flag and no order, equal questions are on one side, and of a file that grows the
    lowest tenth stays where it is."""
    lowest = sorted({fingerprint(q.question) for q in questions})
    if len(lowest) < 2:
        raise data.DataError(f"{source}: one question cannot be split; give --eval-data")
    tenth = sum(name < f"{2**64 // 10:016x}" for name in lowest)
    chosen = set(lowest[:min(max(tenth, FEW), len(lowest) // 2)])
    held = [q for q in questions if fingerprint(q.question) in chosen]
    say(f"{source}: {len(held)} of {len(questions)} questions are held out, by a hash of their words")
    if len(held) < FEW:
        warn(f"{source}: {len(held)} questions are held out; so few decide nothing, whatever their interval")
    return held, [q for q in questions if fingerprint(q.question) not in chosen]


def fingerprints(sets):
    return frozenset(fingerprint(q.question) for questions in sets.values() for q in questions)


def unseen(source, questions, evaluated):
    """The questions of a file that are not evaluated; says how many are."""
    left = [q for q in questions if fingerprint(q.question) not in evaluated]
    if len(left) < len(questions):
        fewer = len(questions) - len(left)
        say(f"{source}: left out {fewer} of {len(questions)} questions, which are evaluated")
    return left


def drawn(questions, limit, seed):
    """`limit` of the questions, drawn with the seed, in their order; 0 = all."""
    if not limit or limit >= len(questions):
        return questions
    places = sorted(range(len(questions)), key=lambda i: fingerprint(f"{seed} {questions[i].question}"))
    return [questions[i] for i in sorted(places[:limit])]


def set_name(source):
    """What an evaluation set is called in files and tables.

    >>> set_name("data/dev.json.gz"), set_name("owner/name.v2:config"), set_name("2wiki-dev")
    ('dev', 'owner_name.v2_config', '2wiki-dev')
    """
    name = re.sub(r"[/:]", "_", source)
    if data.suffix_of(source) in data.SUFFIXES:
        name = Path(Path(source).name.removesuffix(".gz")).stem
    if re.search(r"_(before|step\d+)$", name):
        raise data.DataError(f"--eval-data {source}: rename it, an evaluation of a run has such a name")
    return name
