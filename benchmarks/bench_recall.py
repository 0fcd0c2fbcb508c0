"""Recall of gold pages: how many of a question's supporting titles a retriever finds with the question.

    python -m benchmarks.bench_recall --corpus corpus.jsonl --questions hotpot_dev.json,2wiki_dev.json \\
        --retriever bm25 --retriever dense:MODEL --retriever dense:MODEL@e5_Flat.index --out recall.json

No policy is asked: an agent's own queries find more, hop by hop (the summary's "reading" of an evaluation).
"""

import argparse
import time
from pathlib import Path

import psutil

from common import data, metrics, vectors
from common.files import table, write_json
from common.retriever import make_retriever
from common.splits import set_name
from common.vectors.dense import DenseRetriever


def recalls(index, questions, ks):
    """({k: [share of gold titles found, per question]}, {k: [1.0 where all were]}, seconds per question)"""
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


def of_exact(index, questions, k):
    """The share of an exact search's k best that a dense retriever finds, "" where none can be told."""
    if not isinstance(index, DenseRetriever):
        return ""
    file = index.path / vectors.VECTORS if index.path.is_dir() else index.path
    flat = vectors.mapped(file)
    if not vectors.is_flat(flat):
        return ""
    asked = index.encoder.queries([q.question for q in questions])
    nearest = vectors.exact(file, flat, asked, k)
    scores = vectors.search(index.index, asked, k)[0]
    as_near = scores > nearest[:, -1:] - 1e-5
    return f"{as_near.mean():.3f}"


def own_memory():
    """MB that this process shares with no file; what is mapped and cached is not counted."""
    memory = psutil.Process().memory_info()
    return (memory.rss - memory.shared) / 1e6


def on_disk(index):
    """MB of a retriever's files; 0 where all is in memory."""
    path = getattr(index, "path", None)
    if path is None:
        return 0.0
    files = path.glob("*") if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files) / 1e6


def main(argv=None):
    """A row per set and retriever, whose differences to the first retriever are paired by question, and a row
    per retriever of what it costs."""
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
    rows, costs, first = [], [], {}
    for spec in args.retriever:
        name = Path(spec.split(":")[-1]).name
        before = own_memory()
        began = time.process_time()
        index = make_retriever(spec, corpus)
        start = time.process_time() - began
        spent = []
        for set_of, questions in sets.items():
            shares, alls, seconds = recalls(index, questions, ks)
            row = [set_of, len(questions), name]
            rows.append(row + cells(shares, alls, ks, set_of, first))
            spent.append(f"{1000 * seconds:.2f}")
        everything = [q for questions in sets.values() for q in questions]
        costs.append([
            name,
            of_exact(index, everything, ks[0]),
            ", ".join(spent),
            f"{start:.1f}",
            f"{own_memory() - before:.0f}",
            f"{on_disk(index):.0f}",
        ])
        del index  # (before the next one's memory is measured)
    header = ["set", "n", "retriever", *(f"recall@{k} (all found); minus the first's" for k in ks)]
    cost_header = ["retriever", f"of the exact {ks[0]} best", "CPU-ms per question", "CPU-s to start",
                   "MB of its own", "MB on disk"]
    table("gold titles found with the question as it stands", header, rows)
    table(f"what that costs with {len(corpus):,} passages", cost_header, costs)
    if args.out:
        write_json(args.out, {"header": header, "rows": rows, "cost_header": cost_header, "costs": costs})


def cells(shares, alls, ks, set_of, first):
    """A cell per k, with the difference to the first retriever's shares, which `first` keeps."""
    found = []
    for k in ks:
        mean, low, high = metrics.bootstrap_interval(shares[k])
        cell = f"{mean:.3f} [{low:.3f}, {high:.3f}] ({sum(alls[k]) / len(alls[k]):.3f})"
        if (set_of, k) in first:
            gain, low, high = metrics.paired_difference(first[set_of, k], shares[k])
            cell += f"; {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
        found.append(cell)
        first.setdefault((set_of, k), shares[k])
    return found


if __name__ == "__main__":
    main()
