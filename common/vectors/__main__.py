"""The command of common.vectors: makes the vectors of a corpus, or goes on making them."""

import re
import time

import numpy as np
import tyro

from common import cache, data, vectors
from common.files import UserError, clock, say, warn
from common.passages import read
from common.vectors import FLAT, PER_LIST, Build, VectorsError, sentences


def plan(job, corpus, encoder):
    """What will be made, said before hours of work; times are those of 64 passages, and of a product."""
    n, d = len(corpus), encoder.dimension
    spec = job.index or vectors.spec_for(n)
    lists = re.match(r"IVF(\d+)", spec)
    lists = int(lists[1]) if lists else 0
    seconds = timed(lambda: encoder.passages(corpus, vectors.evenly(n, 64))) * n / min(n, 64)
    rows = f"{2 * n * d / 1e9:.2f} GB on disk, encoded in {clock(seconds)}"
    if job.flat:
        rows = f"as they are in {job.flat}"
    if spec == FLAT:
        return f"{n:,} passages; vectors of {d} numbers: {rows}; in memory {4 * n * d / 1e9:.2f} GB"
    square = np.ones((1024, d), "float32")
    comparisons = (10 * PER_LIST * lists + n) * lists  # ten rounds of k-means, then a list for each
    training = timed(lambda: square @ square.T) * comparisons / 1024**2
    codes = n * (d / 8 + 21) / 1e9
    making = codes + 4e-9 * PER_LIST * lists * d
    return (f"{n:,} passages; vectors of {d} numbers: {rows}; {spec}: {codes:.2f} GB on disk and in memory "
            f"(RaBitQ's), made in {clock(training)} at most, with {making:.2f} GB of memory")


def timed(work):
    work()  # (the first time is no measure)
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main(argv=None):
    job = tyro.cli(Build, prog="python -m common.vectors", args=argv)
    try:
        corpus = data.load_corpus(job.corpus, job.skip_bad)
        encoder = sentences.Encoder(job.encoder)
        if job.flat and not vectors.is_flat(vectors.mapped(job.flat)):
            raise VectorsError(f"--flat {job.flat}: no index of whole vectors (fp32 or fp16, inner product): "
                               f"search it as it is, --retriever dense:{job.encoder}@{job.flat}")
        say(plan(job, corpus, encoder))
        made = vectors.build(job, corpus, encoder, cache.key(map(read, corpus)))
    except (UserError, OSError) as error:
        raise SystemExit("error: " + " ".join(str(error).split())) from None
    say(f"{job.out}: finds {made['recall']:.3f} of the exact search's three best, on questions that did not "
        f"tune it ({made['lists']} lists, {made['candidates']} codes per passage asked for)")
    if made["recall"] < job.recall - 0.02:  # (200 questions tell no more)
        warn(f"{job.out}: this is less than --recall {job.recall}: give an --index with more bytes a passage "
             "(IVF4096,SQ8), or search the vectors themselves (--index Flat)")


if __name__ == "__main__":
    main()
