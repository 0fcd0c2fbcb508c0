"""Questions over the sentences of their own contexts: an environment whose states are sentences taken and
sub-questions asked, whose actions take a sentence, ask or submit, and whose score is that of the labelled
evidence. SearchPath(case) begins a search, .after(step, log-prob) takes a step."""

from dataclasses import dataclass, field, replace

import torch

from common import data, encoders, metrics, splits, world
from common.files import say

SUBMIT, ASK = -1, -2  # actions beside the sentences, which are numbered from 0
ENDS = ("exact", "too early", "too late", "wrong path", "unreachable")


@dataclass(eq=False)
class Case:
    """A question with the sentences of its own context. A state is (case, steps): the numbers of the
    sentences taken and the SubQuestions asked, in their order."""

    question: data.Question
    texts: list[str]  # "Title, sentence"
    facts: list[tuple]  # (title, index in its paragraph), what is scored
    gold: frozenset  # numbers of the gold sentences that are there
    gold_facts: list  # all gold facts, those outside the context too
    tokens: dict  # a PairTokenizer's name -> (ids of the question, [ids of each sentence])
    vectors: torch.Tensor | None = None  # (sentences, H), normalised and frozen
    closed: frozenset = frozenset()  # sentences that are not offered


@dataclass(frozen=True)
class SubQuestion:
    text: str
    ids: tuple = field(default=(), compare=False)  # as sampled, with the end token
    logprobs: tuple = field(default=(), compare=False)


def evidence_of(steps):
    """The sentences among a state's steps."""
    return tuple(s for s in steps if isinstance(s, int))


def asked_of(steps):
    return [s for s in steps if isinstance(s, SubQuestion)]


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


def freeze_vectors(encoder, cases, folder):
    """Normalised vectors of every sentence, from the encoder before its training; they never change again."""
    texts = [ids for case in cases for ids in case.tokens["coarse"][1]]
    vectors = encoders.frozen_vectors(encoder, texts, folder)
    at = 0
    for case in cases:
        case.vectors = vectors[at:at + len(case.texts)]  # (sentences, H)
        at += len(case.texts)


def state_ids(pair_tokenizer, case, steps):
    """Ids of the question and of what was found and asked behind it, <sep> between."""
    question, sentences = case.tokens[pair_tokenizer.name]
    behind = [pair_tokenizer.ids(s.text) if isinstance(s, SubQuestion) else sentences[s] for s in steps]
    return pair_tokenizer.joined([question, *behind])


def training_state(case, rng, noise_rate, complete):
    """Sentences taken in a made-up state: some gold in random order, and wrong ones among it. complete:
    whether all gold may be there (then the right action is to submit)."""
    gold = sorted(case.gold)
    most = len(gold) if complete else max(0, len(gold) - 1)
    taken = rng.sample(gold, rng.randint(0, most))
    wrong = [i for i in range(len(case.texts)) if i not in case.gold]
    noise = min(round(rng.expovariate(noise_rate)), len(wrong))
    for i in rng.sample(wrong, noise):
        taken.insert(rng.randint(0, len(taken)), i)
    return tuple(taken)


def state_batches(rows, cfg):
    """Lists of rows (state, actions it offers, …) in forward passes of about --micro-tokens; a state is read
    once with every action."""

    def tokens(row):
        (case, steps), actions, *_ = row
        question, sentences = case.tokens["action"]
        found = sum(len(sentences[i]) + 1 for i in evidence_of(steps))
        state = min(cfg.max_tokens, len(question) + found + 16 * len(asked_of(steps)))
        return state + sum(state + (1 if a == ASK else len(sentences[a])) for a in actions)

    parts = encoders.in_batches(rows, tokens, cfg.micro_tokens)
    return [[rows[i] for i in part] for part in parts]


def evidence_scores(case, steps):
    """(em, f1, precision, recall) of a set of sentences, as HotpotQA's script scores them."""
    return metrics.evidence_scores([case.facts[i] for i in evidence_of(steps)], case.gold_facts)


def ending(case, taken):
    """(how a search ended, place of its first wrong sentence or None). too early: nothing wrong, gold
    missing; too late: all gold, then wrong ones; wrong path: a wrong one before all gold was there;
    unreachable: gold that is not among the sentences is all that is missing."""
    wrong = next((n for n, i in enumerate(taken, 1) if i not in case.gold), None)
    if case.gold and case.gold <= set(taken[: wrong - 1] if wrong else taken):
        if wrong:
            return "too late", wrong
        return ("exact" if len(case.gold) == len(case.gold_facts) else "unreachable"), None
    return ("wrong path" if wrong else "too early"), wrong


def text_of(step):
    """A step as it can be sorted and hashed."""
    return getattr(step, "text", str(step))


# ---------------------------------------------------------------- paths

@dataclass(eq=False)
class SearchPath:
    """A search from a state, mostly the question alone, to the evidence it ends with."""

    case: Case
    steps: tuple = ()
    first: int = 0  # steps that were there before it began
    logprobs: tuple = ()  # of each action
    done: bool = False
    reward: float = 0.0

    @property
    def taken(self):
        return evidence_of(self.steps)

    @property
    def asked(self):
        return asked_of(self.steps)

    @property
    def state(self):
        """Where it stands."""
        return self.case, self.steps

    @property
    def actions(self):
        """Sentence numbers, ASK and SUBMIT."""
        found = [ASK if isinstance(s, SubQuestion) else s for s in self.steps[self.first :]]
        return (*found, SUBMIT) if self.done else tuple(found)

    @property
    def logprob(self):
        """log p of the whole path."""
        return sum(self.logprobs)

    def after(self, step, logprob):
        """The path with one more step: a sentence number, a SubQuestion, or SUBMIT."""
        steps = self.steps if step == SUBMIT else (*self.steps, step)
        return replace(self, steps=steps, logprobs=(*self.logprobs, logprob), done=step == SUBMIT)

    def states(self):
        """The state before each action."""
        return [(self.case, self.steps[: self.first + t]) for t in range(len(self.actions))]


def asked_case(policy, path):
    """A search for the path's last sub-question alone, over the sentences that it has not taken."""
    case, text = path.case, path.asked[-1].text
    tokens = dict(case.tokens)
    for t in (policy.encoder.pair_tokenizer, policy.action_tokenizer, policy.submit_tokenizer):
        _, sentences = tokens[t.name]
        tokens[t.name] = t.ids(text), sentences
    return replace(case, tokens=tokens, closed=case.closed | set(path.taken))


# ---------------------------------------------------------------- questions

@dataclass
class Questions:
    """A set of questions and how their evidence is searched."""

    name: str
    cases: list
    search: str = "greedy"
    unlabelled: list = field(default_factory=list)  # cases that cannot be scored


def load_cases(cfg, paper_eval):
    """(training set or None, evaluation sets), every question with its sentences. In the world those of two
    hops and more, with contexts that look related, and a fifth of them vaguely put."""
    if cfg.data == "world":
        train = world_questions("train", (cfg.limit or 2000) + cfg.validate, cfg.world_size)
        names = (cfg.eval_data or "test").split(",")
        evals = [(name, world_questions(name, cfg.eval_limit or 400, cfg.world_size)) for name in names]
    else:
        split, found = splits.load_splits(cfg, paper_eval, searched=False)
        train = split.questions if split else []
        evals = [(s.name, s.questions) for s in found]
    able, others = parted("train", train)
    if others:
        say(f"train: left out {len(others)} questions without labelled evidence")
    if train and not any(make_case(q).gold for q in able):
        raise data.DataError(f"{cfg.data}: no question is left whose evidence is labelled and in its context")
    made = []
    for name, questions in evals:
        labelled, others = parted(name, questions)
        if others:
            say(f"{name}: {len(others)} questions without labelled evidence are searched, not scored")
        cases = make_cases(name, labelled, cfg.candidates)
        made.append(Questions(name, cases, unlabelled=[make_case(q) for q in others]))
    train = Questions("train", make_cases("train", able, cfg.candidates)) if able else None
    return train, made


def kept_apart(cases, count):
    """(the training cases without the last `count`, those: for a validation loss)"""
    first = len(cases) - count
    if cases and first < 1:
        raise data.DataError(f"--validate {count} leaves none of {len(cases)} training questions: lower it")
    return cases[:first], cases[first:]


def find_case(split, question):
    """The Case of a question, by its words."""
    cases = split.cases + split.unlabelled
    for case in cases:
        if case.question.question == question:
            return case
    words = f"not a question of {split.name}, whose contexts are searched, such as"
    raise data.DataError(f"--ask: {words} {cases[0].question.question!r}")


def parted(name, questions):
    """(questions with labelled evidence, questions without) of those that have a context; the others are
    counted, and none at all is an error."""
    able = [q for q in questions if any(s for _, s in q.context)]
    if len(able) < len(questions):
        say(f"{name}: left out {len(questions) - len(able)} questions without a context")
    if questions and not able:
        raise data.DataError(f"{name}: no question has a context to search")
    labelled = [q for q in able if q.supporting_facts]
    return labelled, [q for q in able if not q.supporting_facts]


A_WORLD = 250  # questions of a training world


def world_questions(split, count, size=1.0):
    """Questions of the embedded world of two hops and more, with contexts that look related, some of them
    vaguely put. Training questions come from many worlds, so that no fact is worth remembering."""
    found, seed = [], int(split == "test")
    while len(found) < count:
        wanted = min(A_WORLD, count - len(found)) if split == "train" else count
        try:
            made = world.make_world(split, seed, size, 2 * wanted, distractors="linked", vague=.33)
        except (ValueError, IndexError) as error:  # too large for its words, or too small for its questions
            raise data.DataError(f"--world-size {size}: {error}") from error
        questions = [q for q in data.load_questions(made.questions) if q.hops > 1][:wanted]
        for q in questions:
            q.id = f"{q.id}-{seed}" if split == "train" else q.id
        found += questions
        seed += 2
    return found


def make_cases(name, questions, candidates):
    """A Case a question; says where fewer sentences than candidates are there, or labelled ones are not."""
    cases = [make_case(q) for q in questions]
    few = sum(len(c.texts) < candidates for c in cases)
    if few:
        say(f"{name}: {few} questions have fewer than {candidates} sentences, all of which are offered")
    outside = sum(len(c.gold_facts) - len(c.gold) for c in cases)
    if outside:
        say(
            f"{name}: {outside} labelled sentences are not in their question's context: out of reach, and "
            "counted as missing"
        )
    return cases


def make_case(question):
    """Sentences are told apart by their place, not by their text: two paragraphs may share one. Of two
    paragraphs with one title the second's sentences are numbered on behind the first's; MuSiQue says which of
    them is gold."""
    texts, facts, gold_facts = [], [], [tuple(fact) for fact in question.supporting_facts]
    counted, first = {}, []  # title -> its sentences so far; the first sentence of each paragraph
    for title, sentences in question.context:
        first.append((title, counted.get(title, 0)))
        for sentence in sentences:
            texts.append(f"{title}, {sentence.strip()}")
            facts.append((title, counted.get(title, 0)))
            counted[title] = counted.get(title, 0) + 1
    if question.support_paragraphs:
        known = dict(enumerate(first))
        gold_facts = [known.get(place, ("", place)) for place in question.support_paragraphs]
    gold_facts = list(dict.fromkeys(gold_facts))
    gold = frozenset(i for i, fact in enumerate(facts) if fact in gold_facts)
    return Case(question, texts, facts, gold, gold_facts, {})
