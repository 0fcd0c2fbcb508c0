"""What a T5 of ASKiT is given and has to write (sec. 3.3, 3.4, 4.1.3): question approximation, evidence to
question; sub-question generation, a state to what the first model says of evidence."""

import math

from common import encoders, seq2seq
from common.evidence import evidence_of
from common.evidence_evaluation import score_texts
from common.files import say


def approximation_input(writer, case, evidence):
    """What question approximation is given: the evidence; its target is the question."""
    return writer.ids("generate question: ", *(case.texts[i] for i in evidence))


def sub_question_input(writer, case, steps):
    """What sub-question generation is given: the question, <sep>, what was found."""
    found = [case.texts[i] for i in evidence_of(steps)]
    return writer.ids("generate question: ", case.question.question, encoders.SEP, *found)


def sub_question_targets(case, path, target):
    """[(evidence found, evidence that its sub-question approximates)] of a path: for every prefix that prefix
    itself (paper), or the gold that is missing from it."""
    found = []
    for k in range(len(path) + 1):
        prefix = path[:k]
        meant = prefix if target == "prefix" else tuple(sorted(case.gold - set(prefix)))
        if meant:
            found.append((prefix, meant))
    return found


def approximation_rows(writer, paths):
    """QAp's rows (input ids, target ids): the evidence that a path ended with, and the question."""
    found = [p for p in paths if p.taken]
    inputs = [approximation_input(writer, p.case, p.taken) for p in found]
    targets = [writer.ids(p.case.question.question) for p in found]
    return list(zip(inputs, targets, strict=True))


def sub_question_rows(writer, approximator, paths, target):
    """SQG's rows: each state of a path, and the approximation of the evidence that its question is for."""
    inputs, meant = [], []
    for p in paths:
        for found, wanted in sub_question_targets(p.case, p.taken, target):
            inputs.append(sub_question_input(writer, p.case, found))
            meant.append(approximation_input(approximator, p.case, wanted))
    say(f"sqg: {len(inputs)} states of {len(paths)} questions")
    targets = approximator.write(meant, "approximations")
    return list(zip(inputs, map(writer.ids, targets), strict=True))


def question_losses(writer, rows, cfg, rng):
    """A T5 learns rows [(input ids, target ids)]: question approximation, or sub-questions."""
    batch = rng.choices(rows, k=cfg.question_batch)
    tokens = sum(len(target) for _, target in batch)
    for part in seq2seq.batches(batch, cfg.micro_tokens):
        logp, mask = writer.logprobs(*zip(*part, strict=True))
        likely = logp[mask] > math.log(0.5)
        yield -logp.sum() / tokens, len(likely), int(likely.sum())


def evaluate_approximations(policy, split, cfg, progress):
    """Question approximations from all gold sentences against the question itself."""
    inputs = [approximation_input(policy.asker, c, sorted(c.gold)) for c in split.cases]
    wanted = [[c.question.question] for c in split.cases]
    return score_texts(split, cfg, policy.asker.write(inputs), wanted)
