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
from common import data, retriever
from common import model as models
from common.files import say, table, write_json
from common.rollout import Policy, Trajectory
from common.warmup import demonstrations

TENTHS = (.1, .25, .5, .75, .9)


def trajectories(questions, index, tokenizer, cfg):
    """[(trajectory, question)] of the questions that can be demonstrated."""
    def render(question, demo):
        return [bi_rar.render_demonstration(tokenizer, question, demo, index, cfg)]

    def reward(made, question):
        return bi_rar.judge(made[0], question).info.em

    kept, _ = demonstrations.of_questions(questions, index, render, reward, cfg.top_k, cfg.max_passage)
    by_id = {q.id: q for q in questions}
    pairs = []
    for (made,) in kept:
        pairs.append((made, by_id[made.question_id]))
    return pairs


def described(values):
    """"median (10 %, 25 %, 75 %, 90 %)" of some numbers."""
    low, quarter, middle, three, high = np.quantile(values, TENTHS)
    return f"{middle:.3f} ({low:.3f}, {quarter:.3f}, {three:.3f}, {high:.3f})"


def parts(pairs):
    """{name: [number]} of scored trajectories: distances of searching and answering steps, cascades of whole
    trajectories with and without the answer step."""
    found = {}
    for key, name in (("d_TA", "forward"), ("d_TQ", "backward")):
        of_steps = [getattr(t.info, key) for t, _ in pairs]
        rewards = []
        for distances in of_steps:
            rewards.append([bi_rar.step_reward(d) for d in distances])
        searching = [distances[:-1] for distances in of_steps]
        found[f"{key} of searching steps"] = sum(searching, [])
        found[f"{key} of the answer step"] = [ds[-1] for ds in of_steps]
        whole = [bi_rar.cascade(r) for r in rewards]
        without = [bi_rar.cascade(r[:-1]) for r in rewards]
        found[f"{name} cascade, answer step in"] = whole
        found[f"{name} cascade, answer step out"] = without
    return found


def smaller_of_pairs(bits):
    """{which complexity is the smaller of its pair: share of the steps} of complexities' tuples."""
    t_qa, a_qt, t_q, a_q, q_at, t_a, q_a = np.array(bits).T
    return {
        "K(A|QT) below K(T|QA), of d_TA above": np.mean(a_qt < t_qa),
        "K(A|Q) below K(T|Q), of d_TA below": np.mean(a_q < t_q),
        "K(Q|AT) below K(T|QA), of d_TQ above": np.mean(q_at < t_qa),
        "K(Q|A) below K(T|A), of d_TQ below": np.mean(q_a < t_a),
    }


def exchanged(pairs):
    """The trajectories under each other's questions."""
    others = [question for _, question in pairs]
    random.Random(0).shuffle(others)
    found = []
    for (t, own), other in zip(pairs, others, strict=True):
        again = Trajectory(t.question_id, t.prompt_ids, t.turns)
        if other.id != own.id:
            found.append((again, other))
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
    cfg = bi_rar.Config(top_k=1, micro_tokens=4096, pack_tokens=1024, step_text="turn")
    tokenizer = models.load_tokenizer(args.model)
    index = retriever.make_retriever("bm25", data.load_corpus(args.corpus))
    questions = data.load_questions(args.questions, args.limit)
    right = trajectories(questions, index, tokenizer, cfg)
    if len(right) < 2:
        raise SystemExit(f"error: {args.questions}: fewer than two questions could be demonstrated")
    say(f"{len(right)} trajectories")
    model = models.load_model(args.model, precision=args.precision, frozen=True)
    wrong = exchanged(right)
    policy = Policy(None, tokenizer, None)  # the scorer is a model of its own
    for pairs in (right, wrong):
        bi_rar.score_steps(policy, bi_rar.Scorer(model), pairs, cfg)
    of_right, of_wrong = parts(right), parts(wrong)
    rows = []
    for name, values in of_right.items():
        rows.append([name, described(values), described(of_wrong[name])])
    header = ["median (10, 25, 75, 90 %)", "own question", "another question"]
    table("distances and cascades of scripted right trajectories", header, rows)
    jobs = []
    for t, q in right:
        for turn in t.turns[:-1]:
            step = tuple(turn.ids)
            jobs.append((q.question, q.answers[0], step, ()))
    bits = list(bi_rar.complexities(model, tokenizer, jobs, cfg).values())
    shares = [[name, f"{share:.2f}"] for name, share in smaller_of_pairs(bits).items()]
    table(f"which of a pair the minimum is: {len(bits)} searching steps", ["", "share"], shares)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows, "smaller": shares})


if __name__ == "__main__":
    main()
