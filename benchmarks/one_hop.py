"""Real questions of one hop, for a model too small for two: the triples of 2WikiMultihopQA and the
sub-questions of MuSiQue, each with the page that answers it.

    python -m benchmarks.one_hop FOLDER --train 2wiki_train.json,musique_train.jsonl \\
        --dev 2wiki_dev.json,musique_dev.jsonl --more hotpot_train.json,hotpot_dev.json

FOLDER has train.jsonl and dev.jsonl (in MuSiQue's form, so that they carry gold evidence), and corpus.jsonl
with every passage of all files' contexts. No page of dev.jsonl answers a question of train.jsonl.
"""

import argparse
import re
import sys
from pathlib import Path

from common import data
from common.files import UserError, write_jsonl
from common.metrics import normalize_answer
from common.warmup.demonstrations import plain_title


def hops(question):
    """Yields (asked, answer, title of the gold page or None); asked may be "subject >> relation"."""
    titles = {plain_title(title).lower(): title for title, _ in question.supporting_facts}
    for subject, relation, answer in question.evidences:
        yield f"{subject} >> {relation}", answer, titles.get(plain_title(subject).lower())
    facts = zip(question.support_paragraphs, question.supporting_facts, strict=False)
    titles = {number: title for number, (title, _) in facts}
    answers = []
    for step in question.decomposition:
        asked = re.sub(r"#(\d)", lambda match: answers[int(match[1]) - 1], step["question"])
        answers.append(step["answer"])
        yield asked.strip(), step["answer"], titles.get(step["paragraph_support_idx"])


def one_hop(questions):
    """{normalised question: row in MuSiQue's form}"""
    rows = {}
    for question in questions:
        pages = {title: " ".join(sentences) for title, sentences in question.context}
        for asked, answer, title in hops(question):
            subject, arrow, relation = asked.partition(" >> ")
            words = asked
            if arrow:
                words = f"What is the {relation} of {subject}?"
            key = normalize_answer(words)
            if title not in pages or key in rows:
                continue
            page = {"idx": 0, "title": title, "paragraph_text": pages[title], "is_supporting": True}
            step = {"id": 0, "question": asked, "answer": answer, "paragraph_support_idx": 0}
            rows[key] = {"id": f"{question.id}-{len(rows)}", "question": words, "answer": answer,
                         "answer_aliases": [], "answerable": True, "paragraphs": [page],
                         "question_decomposition": [step]}
    return rows


def parser_of(about):
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", required=True, metavar="FILES")
    parser.add_argument("--dev", required=True, metavar="FILES")
    return parser


def main(argv=None):
    parser = parser_of(__doc__)
    parser.add_argument("--more", default="", metavar="FILES", help="files whose contexts alone are used")
    write(make, parser.parse_args(argv))


def write(make, args):
    """make(args), which writes args.folder; one line where it cannot."""
    if args.folder.exists():
        sys.exit(f"error: {args.folder} exists: nothing was written; choose another name")
    try:
        make(args)
    except UserError as error:
        sys.exit(f"error: {error}")


def make(args):
    """Writes train.jsonl, dev.jsonl and corpus.jsonl."""
    read = {}
    for split in ("train", "dev", "more"):
        files = filter(None, getattr(args, split).split(","))
        read[split] = [question for file in files for question in data.load_questions(file)]
    dev = one_hop(read["dev"])
    scored = {row["paragraphs"][0]["title"] for row in dev.values()}
    train = {}
    for key, row in one_hop(read["train"]).items():
        if key not in dev and row["paragraphs"][0]["title"] not in scored:
            train[key] = row
    corpus = data.pool_contexts(read["train"] + read["dev"] + read["more"])
    args.folder.mkdir(parents=True)
    for name, part in (("train", train.values()), ("dev", dev.values()), ("corpus", corpus)):
        write_jsonl(args.folder / f"{name}.jsonl", part)
    print(f"{args.folder}: {len(train)} questions to train on, {len(dev)} to score, {len(corpus)} passages")


if __name__ == "__main__":
    main()
