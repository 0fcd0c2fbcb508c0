"""The command of common.vectors: makes the vectors of a corpus, or goes on making them."""

import tyro

from common import cache, data, process, vectors
from common.files import UserError, say, warn
from common.passages import read
from common.vectors import Build, VectorsError, sentences


def main(argv=None):
    job = tyro.cli(Build, prog="python -m common.vectors", args=argv)
    with process.ends_cleanly((UserError, OSError), lambda: "the same command goes on"):
        make(job)


def make(job):
    """Says the size first and the recall at the end."""
    job.out.mkdir(parents=True, exist_ok=True)
    corpus = data.load_corpus(job.corpus, job.skip_bad)
    encoder = sentences.Encoder(job.encoder)
    if job.flat and not vectors.is_flat(vectors.mapped(job.flat)):
        raise VectorsError(f"--flat {job.flat}: no index of whole vectors (fp32 or fp16, inner product): "
                           f"search it as it is, --retriever dense:{job.encoder}@{job.flat}")
    n, d = len(corpus), encoder.dimension
    spec = job.index or vectors.spec_for(n)
    say(f"{n:,} passages; vectors of {d} numbers: {2e-9 * n * d:.2f} GB; {spec}")
    made = vectors.build(job, corpus, encoder, cache.key(map(read, corpus)))
    say(f"{job.out}: finds {made['recall']:.3f} of the exact search's three best, on questions that did not "
        f"tune it ({made['lists']} lists, {made['candidates']} codes per passage asked for)")
    if made["recall"] < job.recall - 0.02:  # (200 questions tell no more)
        warn(f"{job.out}: this is less than --recall {job.recall}: give an --index with more bytes a passage "
             "(IVF4096,SQ8), or search the vectors themselves (--index Flat)")


if __name__ == "__main__":
    main()
