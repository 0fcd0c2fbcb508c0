"""What a T5 of ASKiT is given and has to write (sec. 3.3, 3.4, 4.1.3): question approximation, evidence to
question; sub-question generation, a state to what the first model says of evidence."""

from common import encoders
from common.evidence import evidence_of
from common.evidence_evaluation import score_texts
from common.files import say
from common.seq2seq import TASK


def approximation_input(writer, case, evidence):
    """What question approximation is given: the evidence; its target is the question."""
    found = [case.texts[i] for i in evidence]
    return writer.ids(TASK, evidence=found)


def sub_question_input(writer, case, steps):
    """What sub-question generation is given: the question, <sep>, what was found."""
    question = case.question.question
    found = [case.texts[i] for i in evidence_of(steps)]
    return writer.ids(TASK, question, encoders.SEP, evidence=found)


def sub_question_targets(case, path, target):
    """[(evidence found, evidence that its sub-question approximates)] of a path: for every prefix that prefix
    itself (paper), or the gold that is missing from it."""
    found = []
    for k in range(len(path) + 1):
        prefix = path[:k]
        meant = prefix
        if target == "suffix":
            missing = case.gold - set(prefix)
            meant = tuple(sorted(missing))
        if meant:
            found.append((prefix, meant))
    return found


def approximation_rows(writer, paths):
    """QAp's rows (input ids, target ids): the evidence that a path ended with, and the question."""
    rows = []
    for p in paths:
        if p.taken:
            target = writer.ids(p.case.question.question)
            evidence = approximation_input(writer, p.case, p.taken)
            rows.append((evidence, target))
    return rows


def sub_question_rows(writer, approximator, paths, target):
    """SQG's rows: each state of a path, and the approximation of the evidence that its question is for."""
    inputs, meant = [], []
    for p in paths:
        case = p.case
        for found, wanted in sub_question_targets(case, p.taken, target):
            inputs.append(sub_question_input(writer, case, found))
            meant.append(approximation_input(approximator, case, wanted))
    say(f"sqg: {len(inputs)} states of {len(paths)} questions")
    texts = approximator.write(meant, "approximations")
    targets = [writer.ids(text) for text in texts]
    return list(zip(inputs, targets, strict=True))


def rows_of(paths, writer, approximator, target):
    """SQG's rows; QAp's where there is no approximator."""
    writer.shortened = 0
    if approximator:
        rows = sub_question_rows(writer, approximator, paths, target)
    else:
        rows = approximation_rows(writer, paths)
    for model in filter(None, (writer, approximator)):
        if model.shortened:
            say(f"{model.shortened} of {len(rows)} inputs are shortened to {model.max_input} tokens")
    return rows


def evaluate_approximations(policy, split, cfg, progress):
    """Question approximations from all gold sentences against the question itself."""
    inputs, wanted = [], []
    for case in split.cases:
        gold = sorted(case.gold)
        inputs.append(approximation_input(policy.asker, case, gold))
        wanted.append([case.question.question])
    texts = policy.asker.write(inputs)
    return score_texts(split, cfg, texts, wanted)
