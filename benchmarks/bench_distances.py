"""Bi-RAR's distances under a real language model: scripted right trajectories of real questions, and the same
steps under other questions.

    python -m benchmarks.bench_distances --model FOLDER --questions train.jsonl --corpus corpus.jsonl

Whether the reward says more than the outcome shows in the spread of the cascade within right trajectories:
with the answer step, whose distance to the answer is next to nothing, and without it.
"""

import argparse
import random
from pathlib import Path

import numpy as np

import bi_rar
from common import data, demonstrations, retriever
from common import model as models
from common.files import say, table, write_json
from common.rollout import Policy

TENTHS = (.1, .25, .5, .75, .9)


def trajectories(questions, index, tokenizer, cfg):
    """[(trajectory, question)] of the questions that can be demonstrated."""
    def render(question, demo):
        return [bi_rar.render_demonstration(tokenizer, question, demo, index, cfg)]

    def reward(made, question):
        return bi_rar.judge(made[0], question).info["em"]

    kept, _ = demonstrations.of_questions(questions, index, cfg.top_k, render, reward)
    by_id = {q.id: q for q in questions}
    return [(made, by_id[made.question_id]) for (made,) in kept]


def described(values):
    """"median (10 %, 25 %, 75 %, 90 %)" of some numbers."""
    low, quarter, middle, three, high = np.quantile(values, TENTHS)
    return f"{middle:.3f} ({low:.3f}, {quarter:.3f}, {three:.3f}, {high:.3f})"


def parts(pairs):
    """{name: [number]} of scored trajectories: distances of searching and answering steps, cascades of whole
    trajectories with and without the answer step."""
    found = {}
    for key, name in (("d_TA", "forward"), ("d_TQ", "backward")):
        of_steps = [t.info[key] for t, _ in pairs]
        rewards = [[bi_rar.step_reward(d) for d in ds] for ds in of_steps]
        found[f"{key} of searching steps"] = [d for ds in of_steps for d in ds[:-1]]
        found[f"{key} of the answer step"] = [ds[-1] for ds in of_steps]
        found[f"{name} cascade, answer step in"] = [bi_rar.cascade(r) for r in rewards]
        found[f"{name} cascade, answer step out"] = [bi_rar.cascade(r[:-1]) for r in rewards]
    return found


def main(argv=None):
    """Two tables: distances and cascades; which complexity is the smaller of its pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    cfg = bi_rar.Config(top_k=1, micro_tokens=4096, pack_tokens=1024)
    tokenizer = models.load_tokenizer(args.model)
    index = retriever.make_retriever("bm25", data.load_corpus(args.corpus))
    right = trajectories(data.load_questions(args.questions, args.limit), index, tokenizer, cfg)
    if len(right) < 2:
        raise SystemExit(f"error: {args.questions}: fewer than two questions could be demonstrated")
    say(f"{len(right)} trajectories")
    model = models.load_model(args.model, precision=args.precision, frozen=True)
    others = [q for _, q in right]
    random.Random(0).shuffle(others)
    wrong = [(bi_rar.Trajectory(t.question_id, t.prompt_ids, t.turns), q)
             for (t, own), q in zip(right, others, strict=True) if q.id != own.id]
    for pairs in (right, wrong):
        bi_rar.score_steps(Policy(model, tokenizer, None), model, pairs, cfg)
    rows = []
    of_right, of_wrong = parts(right), parts(wrong)
    for name, values in of_right.items():
        rows.append([name, described(values), described(of_wrong[name])])
    header = ["median (10, 25, 75, 90 %)", "own question", "another question"]
    table("distances and cascades of scripted right trajectories", header, rows)
    jobs = [(q.question, q.answers[0], tuple(turn.ids)) for t, q in right for turn in t.turns[:-1]]
    bits = list(bi_rar.complexities(model, tokenizer, jobs, cfg).values())
    smaller = {
        "K(A|QT) below K(T|QA), of d_TA above": [b[1] < b[0] for b in bits],
        "K(A|Q) below K(T|Q), of d_TA below": [b[3] < b[2] for b in bits],
        "K(Q|AT) below K(T|QA), of d_TQ above": [b[4] < b[0] for b in bits],
        "K(Q|A) below K(T|A), of d_TQ below": [b[6] < b[5] for b in bits],
    }
    shares = [[name, f"{np.mean(values):.2f}"] for name, values in smaller.items()]
    table(f"which of a pair the minimum is: {len(bits)} searching steps", ["", "share"], shares)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows, "smaller": shares})


if __name__ == "__main__":
    main()
