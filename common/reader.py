"""An extractive reader: the answer to a question as a span of its evidence, or nothing."""

import math
from dataclasses import dataclass

import torch

from common import encoders, metrics
from common.evidence import evidence_of, training_state
from common.evidence_evaluation import score_texts

SPAN = 12  # tokens of an answer, at most


@dataclass
class Reader:
    """A question-answering model; Case.tokens has what it reads under "reader"."""

    model: object
    pair_tokenizer: encoders.PairTokenizer

    @property
    def tokenizer(self):
        return self.pair_tokenizer.tokenizer


def pair_of(tokens, case, taken):
    """(question ids, evidence ids, where the evidence begins); tokens: a PairTokenizer."""
    question, sentences = case.tokens["reader"]
    taken = [sentences[i] for i in taken]
    evidence = tokens.joined(taken, staying=0) if taken else []
    begin = len(tokens.before) + len(question) + len(tokens.between)
    return question, evidence, begin


@torch.no_grad()
def answers_of(reader, states):
    """What the reader answers to each question from the evidence of a state, "" where it finds nothing: the
    span with the largest sum of start and end logit, if that is above the first token's."""
    tokens, model = reader.pair_tokenizer, reader.model
    answers = []
    for case, steps in states:
        question, evidence, begin = pair_of(tokens, case, evidence_of(steps))
        batch = tokens.batch([(question, evidence)], model.device)
        out = model(**batch)
        ids = batch["input_ids"][0]
        end = len(ids) - len(tokens.behind)
        start = out.start_logits[0, begin:end]
        stop = out.end_logits[0, begin:end]
        spans = start[:, None] + stop[None]  # (T, T)
        every = torch.ones_like(spans, dtype=torch.bool)
        allowed = every.triu().tril(SPAN - 1)
        spans = spans.masked_fill(~allowed, -torch.inf)
        nothing = out.start_logits[0, 0] + out.end_logits[0, 0]
        if not evidence or spans.max() <= nothing:
            answers.append("")
            continue
        first, last = divmod(int(spans.argmax()), end - begin)
        answer = ids[begin + first:begin + last + 1]
        answers.append(tokens.tokenizer.decode(answer))
    return answers


def answer_rewards(reader, paths, cfg):
    """Rewards of searches without labels (ASKiT, sec. 6): F1 of a frozen reader's answer from the evidence,
    less a cost a sentence and a sub-question."""
    found = []
    answers = answers_of(reader, [p.state for p in paths])
    for p, answer in zip(paths, answers, strict=True):
        reward = metrics.f1(answer, p.case.question.answers)
        reward -= cfg.sentence_cost * len(p.taken)
        found.append(reward - cfg.question_cost * len(p.asked))
    return found


# ---------------------------------------------------------------- training

def reader_row(tokens, case, taken):
    """((question ids, evidence ids), [(first, last) token of an answer]) to learn from; the answer is at the
    first token where gold is missing or the evidence does not say it."""
    question, evidence, begin = pair_of(tokens, case, taken)
    found = []
    if not case.gold - set(taken):
        spelled = []
        for answer in case.question.answers:
            spelled.append(tokens.ids(" " + answer))  # as it stands behind a word
            spelled.append(tokens.ids(answer))        # and where a sentence begins
        for ids in spelled:
            for at in range(len(evidence) - len(ids) + 1):
                if evidence[at:at + len(ids)] != ids:
                    continue
                first = begin + at
                last = first + len(ids) - 1
                if (first, last) not in found:
                    found.append((first, last))
    return (question, evidence), found or [(0, 0)]


def span_loss(reader, rows):
    """(mean -log p of finding one of a row's spans, rows where p is over a half) of reader_rows."""
    pairs = [pair for pair, _ in rows]
    batch = reader.pair_tokenizer.batch(pairs, reader.model.device)
    out = reader.model(**batch)
    padding = batch["attention_mask"] == 0  # (n, T)
    start = out.start_logits.masked_fill(padding, -torch.inf)
    stop = out.end_logits.masked_fill(padding, -torch.inf)
    start = start.log_softmax(-1)
    stop = stop.log_softmax(-1)
    logp = []
    for n, (_, spans) in enumerate(rows):
        each = [start[n, first] + stop[n, last] for first, last in spans]
        logp.append(torch.stack(each).logsumexp(0))
    logp = torch.stack(logp)
    right = int((logp > math.log(0.5)).sum())
    return -logp.mean(), right


def reader_losses(reader, cases, cfg, rng):
    """An extractive reader learns to find the answer where all gold is there, and nothing elsewhere."""
    rows = []
    for case in rng.choices(cases, k=cfg.supervised_batch):
        taken = training_state(case, rng, cfg.noise_rate, complete=True)
        if rng.random() < 0.5:  # all gold is there
            missing = sorted(case.gold - set(taken))
            taken = (*taken, *rng.sample(missing, len(missing)))
        rows.append(reader_row(reader.pair_tokenizer, case, taken))
    loss, right = span_loss(reader, rows)
    yield loss, len(rows), right


# ---------------------------------------------------------------- evaluation

def evaluate_answers(reader, split, cfg, progress):
    """Answers from all gold sentences against the answer."""
    states = [(c, tuple(sorted(c.gold))) for c in split.cases]
    wanted = [c.question.answers for c in split.cases]
    return score_texts(split, cfg, answers_of(reader, states), wanted)
