"""An extractive reader: the answer to a question as a span of its evidence, or nothing."""

from dataclasses import dataclass

import torch

from common import encoders
from common.evidence import evidence_of

SPAN = 12  # tokens of an answer, at most


@dataclass
class Answerer:
    """A question-answering model; Case.tokens has what it reads under "reader"."""

    model: object
    reader: encoders.PairTokenizer

    @property
    def tokenizer(self):
        return self.reader.tokenizer


@torch.no_grad()
def answers_of(answerer, states):
    """What the reader answers to each question from the evidence of a state, "" where it finds nothing: the
    span with the largest sum of start and end logit, if that is above the first token's."""
    reader, model = answerer.reader, answerer.model
    answers = []
    for case, steps in states:
        question, sentences = case.tokens["reader"]
        taken = [sentences[i] for i in evidence_of(steps)]
        evidence = reader.joined(taken) if taken else []
        batch = reader.batch([(question, evidence)], model.device)
        out = model(**batch)
        begin = len(reader.before) + len(question) + len(reader.between)
        end = batch["input_ids"].shape[1] - len(reader.behind)
        start, stop = out.start_logits[0, begin:end], out.end_logits[0, begin:end]
        spans = start[:, None] + stop[None]  # (T, T)
        allowed = torch.ones_like(spans, dtype=torch.bool).triu().tril(SPAN - 1)
        spans = spans.masked_fill(~allowed, -torch.inf)
        if not evidence or spans.max() <= out.start_logits[0, 0] + out.end_logits[0, 0]:
            answers.append("")
            continue
        first, last = divmod(int(spans.argmax()), end - begin)
        answers.append(
            reader.tokenizer.decode(
                batch["input_ids"][0, begin + first:begin + last + 1]
            )
        )
    return answers


def reader_row(reader, case, taken):
    """((question ids, evidence ids), [(first, last) token of an answer]) to learn from; the answer is at the
    first token where gold is missing or the evidence does not say it."""
    question, sentences = case.tokens["reader"]
    evidence = reader.joined([sentences[i] for i in taken]) if taken else []
    found = []
    if not case.gold - set(taken):
        begin = len(reader.before) + len(question) + len(reader.between)
        for answer in case.question.answers:
            ids = reader.ids(" " + answer)  # as it stands behind a word
            for at in range(len(evidence) - len(ids) + 1):
                if evidence[at:at + len(ids)] == ids:
                    found.append((begin + at, begin + at + len(ids) - 1))
    return (question, evidence), found or [(0, 0)]
