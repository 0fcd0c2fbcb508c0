"""Recall of gold pages: how many of a question's supporting titles a retriever finds with the question.

    python -m benchmarks.bench_recall --corpus corpus.jsonl --questions hotpot_dev.json,2wiki_dev.json \\
        --retriever bm25 --retriever dense:MODEL --out recall.json

No policy is asked: an agent's own queries find more, hop by hop (the summary's "reading" of an evaluation).
"""

import argparse
import time
from pathlib import Path

from common import data, metrics
from common.files import say, table, write_json
from common.retriever import make_retriever
from common.splits import set_name


def recalls(index, questions, ks):
    """({k: [share of gold titles found, a question]}, {k: [1.0 where all were]}, seconds a question)"""
    began = time.process_time()
    found = index.search([q.question for q in questions], max(ks))
    seconds = (time.process_time() - began) / len(questions)
    shares, alls = {k: [] for k in ks}, {k: [] for k in ks}
    for q, passages in zip(questions, found, strict=True):
        gold = {title for title, _ in q.supporting_facts}
        for k in ks:
            titles = {p.title for p in passages[:k]}
            shares[k].append(len(gold & titles) / len(gold))
            alls[k].append(float(gold <= titles))
    return shares, alls, seconds


def main(argv=None):
    """One row a set and retriever; differences to the first retriever are paired by question."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--questions", required=True, help="files with commas")
    parser.add_argument("--retriever", action="append", required=True, help="as the scripts' --retriever")
    parser.add_argument("--k", default="3,5,10")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    ks = [int(k) for k in args.k.split(",")]
    corpus = data.load_corpus(args.corpus)
    sets = {}
    for file in args.questions.split(","):
        with_gold = [q for q in data.load_questions(file) if q.supporting_facts]
        if not with_gold:
            raise SystemExit(f"error: {file}: no question has supporting facts")
        sets[set_name(file)] = with_gold
    rows, first = [], {}
    for spec in args.retriever:
        began = time.process_time()
        index = make_retriever(spec, corpus)
        say(f"{spec}: {len(corpus)} passages indexed in {time.process_time() - began:.0f} CPU-s")
        for name, questions in sets.items():
            shares, alls, seconds = recalls(index, questions, ks)
            row = [name, len(questions), Path(spec.split(":")[-1]).name]
            for k in ks:
                mean, low, high = metrics.bootstrap_interval(shares[k])
                cell = f"{mean:.3f} [{low:.3f}, {high:.3f}] ({sum(alls[k]) / len(alls[k]):.3f})"
                if (name, k) in first:
                    gain, low, high = metrics.paired_difference(first[name, k], shares[k])
                    cell += f"; {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
                row.append(cell)
                first.setdefault((name, k), shares[k])
            rows.append([*row, f"{1000 * seconds:.1f}"])
    header = ["set", "n", "retriever", *(f"recall@{k} (all found); minus the first's" for k in ks)]
    header.append("CPU-ms a question")
    table("gold titles found with the question as it stands", header, rows)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows})


if __name__ == "__main__":
    main()
