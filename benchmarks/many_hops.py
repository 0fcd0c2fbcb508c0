"""Questions of many hops from HotpotQA, 2WikiMultihopQA and MuSiQue in one task, over one corpus:

    python -m benchmarks.many_hops FOLDER --train hotpot_train.json,2wiki_train.json,musique_train.jsonl \\
        --dev hotpot_dev.json,2wiki_dev.json,musique_dev.jsonl

FOLDER has train.jsonl; tune.jsonl, a tenth of the training questions, which settings are chosen on;
dev.jsonl, which is scored; and corpus.jsonl, every passage of all contexts. The rows are the files' own,
so they keep their gold evidence. A question stands once, by its words, and none of dev.jsonl in the others.
dev.jsonl is in an order of hashes, so that --eval-limit takes a fixed sample of all sets.
"""

from pathlib import Path

from benchmarks.one_hop import parser_of, write
from common import data
from common.files import write_jsonl
from common.metrics import normalize_answer
from common.rollout import stable_seed


def by_words(files, but=()):
    """{normalised question: row of the file}, without those in `but` and those that have no gold evidence."""
    rows = {}
    for file in files.split(","):
        for _, row in data.read_records(Path(file)):
            question, = data.load_questions([row])
            words = normalize_answer(question.question)
            if question.context and question.supporting_facts and words not in but:
                rows.setdefault(words, row)
    return rows


def make(args):
    """Writes the four files."""
    dev = by_words(args.dev)
    train = by_words(args.train, but=dev)
    tune = {words for words in train if stable_seed("tune", words) % 10 == 0}
    rows = {
        "train": [row for words, row in train.items() if words not in tune],
        "tune": [train[words] for words in train if words in tune],
        "dev": [dev[words] for words in sorted(dev, key=lambda words: stable_seed("dev", words))],
    }
    corpus = data.pool_contexts([q for part in rows.values() for q in data.load_questions(part)])
    args.folder.mkdir(parents=True)
    for name, part in (*rows.items(), ("corpus", corpus)):
        write_jsonl(args.folder / f"{name}.jsonl", part)
    print(f"{args.folder}: {len(rows['train'])} questions to train on, {len(rows['tune'])} to tune on, "
          f"{len(dev)} to score, {len(corpus)} passages")


def main(argv=None):
    write(make, parser_of(__doc__).parse_args(argv))


if __name__ == "__main__":
    main()
