"""ASKiT's questions as Cases, each with its own sentences: from files of HotpotQA, 2WikiMultihopQA and
MuSiQue, or from the embedded world. cfg is askit.Config."""

from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from common import data, metrics, splits
from common.files import Progress, say

SUBMIT, ASK = -1, -2  # actions of a search beside the sentences, which are numbered from 0


@dataclass(eq=False)
class Case:
    """A question with the sentences of its own context.

    Contract: two Cases are equal only if they are one object (eq=False), so that they can be keys of caches;
    it is never changed after its tokens and vectors were filled in."""

    question: data.Question
    texts: list[str]  # "Title, sentence"
    facts: list[tuple]  # (title, index in its paragraph), what is scored
    gold: frozenset  # numbers of the gold sentences that are there
    gold_facts: list  # all gold facts, those outside the context too
    tokens: dict  # a PairTokenizer's name -> (ids of the question, [ids of each sentence])
    vectors: torch.Tensor | None = None  # (sentences, H), normalised and frozen
    closed: frozenset = frozenset()  # sentences that are not offered: of a sub-question's own search


def tokenize(pair_tokenizer, cases):
    """Keeps the ids of each question and of its sentences, and says how many had to be cut; the coarse stage
    reads "Title: sentence"."""
    name = pair_tokenizer.name
    for case in cases:
        texts = case.texts
        if name == "coarse":
            texts = [f"{t}: {s[len(t) + 2:]}" for (t, _), s in zip(case.facts, texts, strict=True)]
        sentences = [pair_tokenizer.ids(text) for text in texts]
        case.tokens[name] = pair_tokenizer.ids(case.question.question), sentences
    if pair_tokenizer.cut:
        cut = f"{pair_tokenizer.cut} of {pair_tokenizer.texts} texts"
        say(f"{name}: {cut} are cut to a quarter of --max-tokens {pair_tokenizer.max_tokens}")


def freeze_vectors(encoder, cases):
    """Normalised vectors of every sentence, from the encoder before its training; a case that has some keeps
    them."""
    new = [case for case in cases if case.vectors is None]
    texts = [ids for case in new for ids in case.tokens["coarse"][1]]
    with Progress("vectors") as progress:
        vectors = torch.nn.functional.normalize(encoder.encode_all(texts, progress), dim=-1)
    for case, part in zip(new, vectors.split([len(case.texts) for case in new]), strict=True):
        case.vectors = part  # (sentences, H)


def evidence_scores(case, taken):
    """(em, f1, precision, recall) of a set of sentences, as HotpotQA's script scores them."""
    return metrics.evidence_scores([case.facts[i] for i in taken], case.gold_facts)


# ---------------------------------------------------------------- questions

@dataclass
class Questions:
    """A set of questions and how their evidence is searched."""

    name: str
    cases: list
    search: str = "greedy"
    unlabelled: list = field(default_factory=list)  # cases that cannot be scored: for --ask alone


def load_cases(cfg, paper_eval):
    """(training cases, [Questions to evaluate]), every question with its sentences."""
    if cfg.data == "world":
        questions = []
        if not cfg.eval_only:
            questions = world_questions("train", (cfg.limit or 2000) + cfg.validate)
        names = (cfg.eval_data or "test").split(",")
        sets = {name: world_questions(name, cfg.eval_limit or 400) for name in names}
    else:
        train, evaluated = splits.load_splits(cfg, paper_eval, searched=False)
        questions = []
        if train and not cfg.eval_only:
            questions = train.questions
        sets = {split.name: split.questions for split in evaluated}
    cases = [c for c in make_cases("train", questions, cfg.candidates)[0] if c.gold]
    if questions and not cases:
        raise data.DataError(f"{cfg.data}: no question is left whose evidence is labelled and in its context")
    evals = []
    for name, questions in sets.items():
        labelled, others = make_cases(name, questions, cfg.candidates)
        evals.append(Questions(name, labelled, unlabelled=others))
    return cases, evals


def searched(evals, searches, beam):
    """The evaluation sets that have labels, once for each of these ways to search them."""
    endings = {"greedy": "", "ranking": "", "beam": f"-beam{beam}"}
    sets = [(e, search) for e in evals if e.cases for search in searches]
    return [Questions(e.name + endings.get(search, f"-{search}"), e.cases, search) for e, search in sets]


def about(case):
    q = case.question
    return {
        "id": q.id,
        "question": q.question,
        "gold": q.answers,
        "type": q.type,
        "hops": len(case.gold_facts),
        "answer": None,
        "problem": "",
    }


def kept_apart(cases, count):
    """(the training cases without the last `count`, those: for a validation loss)"""
    first = len(cases) - count
    if cases and first < 1:
        raise data.DataError(f"--validate {count} leaves none of {len(cases)} training questions: lower it")
    return cases[:first], cases[first:]


def find_case(split, question):
    cases = split.cases + split.unlabelled
    for case in cases:
        if case.question.question == question:
            return case
    words = f"not a question of {split.name}, whose contexts are searched, such as"
    raise data.DataError(f"--ask: {words} {cases[0].question.question!r}")


A_WORLD = 250  # questions of a training world


def world_questions(split, count):
    """Questions of the embedded world of two hops and more, with contexts that look related, some of them
    vaguely put. Training questions come from many worlds, so that no fact is worth remembering."""
    from common import world
    questions, seed = [], int(split == "test")
    while len(questions) < count:
        wanted = count
        if split == "train":
            wanted = min(A_WORLD, count - len(questions))
        made = world.make_world(split, seed, 2 * wanted, distractors="linked", vague=.33)
        for q in [q for q in data.load_questions(made.questions) if q.hops > 1][:wanted]:
            if split == "train":
                q = replace(q, id=f"{q.id}-{seed}")
            questions.append(q)
        seed += 2
    return questions


def make_cases(name, questions, candidates):
    """(Cases whose evidence is labelled, the others) of the questions that have a context. Says what is
    missing."""
    cases = [make_case(q) for q in questions if any(s for _, s in q.context)]
    if questions and not cases:
        raise data.DataError(f"{name}: no question has a context to search")
    labelled = [c for c in cases if c.question.supporting_facts]
    unlabelled = [c for c in cases if not c.question.supporting_facts]
    few = sum(len(c.texts) < candidates for c in labelled)
    elsewhere = sum(len(c.gold_facts) - len(c.gold) for c in labelled)
    for count, words in (
        (len(questions) - len(cases), "questions without a context are left out"),
        (len(unlabelled), "questions without labelled evidence are left out"),
        (few, f"questions have fewer than {candidates} sentences, all of which are offered"),
        (elsewhere, "labelled sentences are not in their question's context: out of reach, and counted as "
                    "missing"),
    ):
        if count:
            say(f"{name}: {count} {words}")
    return labelled, unlabelled


def make_case(question):
    """Sentences are told apart by their place, not by their text: two paragraphs may share one. Of two
    paragraphs with one title the second's sentences are numbered on behind the first's; MuSiQue says which of
    them is gold."""
    texts, facts, gold_facts = [], [], [tuple(fact) for fact in question.supporting_facts]
    counted, first = Counter(), []  # of a title the sentences so far; the first sentence of each paragraph
    for title, sentences in question.context:
        first.append((title, counted[title]))
        for sentence in sentences:
            texts.append(f"{title}, {sentence.strip()}")
            facts.append((title, counted[title]))
            counted[title] += 1
    if question.support_paragraphs:
        known = dict(zip(question.paragraph_ids, first, strict=True))
        gold_facts = [known.get(idx, ("", idx)) for idx in question.support_paragraphs]
    gold_facts = list(dict.fromkeys(gold_facts))
    gold = frozenset(i for i, fact in enumerate(facts) if fact in gold_facts)
    return Case(question, texts, facts, gold, gold_facts, {})
