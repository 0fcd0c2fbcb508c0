"""The vectors of a corpus as files: encoded piece by piece, compressed, mapped into memory.

    python -m common.vectors --corpus wiki-18.jsonl --encoder intfloat/e5-base-v2 --out wiki-18-e5
    python -m common.vectors … --flat e5_Flat.index      Search-R1's or FlashRAG's vectors: nothing is encoded
    python -m common.serve search --corpus wiki-18.jsonl --retriever dense:intfloat/e5-base-v2@wiki-18-e5

    vectors.faiss    fp16, a row per passage in the corpus's order (with --flat a link to that file)
    codes.faiss      short codes in lists, which a search scans; it ranks their best again by their vectors
    manifest.json    what both were made of, how they are searched, and the recall that was measured

After a kill the same command goes on. Both files are plain FAISS indexes."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common import cache, data
from common.files import Progress, UserError, read_json, say, write_json
from common.passages import identity
from common.vectors.sentences import MAX_TOKENS


class VectorsError(UserError):
    """Vectors that are not those of a corpus and an encoder; the message names the remedy."""


# ---------------------------------------------------------------- vectors

VECTORS, CODES, MANIFEST = "vectors.faiss", "codes.faiss", "manifest.json"
PIECE = 4096    # passages that are encoded, or read, at a time
CHECKED = 16    # passages that are encoded again when an index is opened
NEAR = 8        # rows on either side of theirs: neighbours are alike, and an index may be shifted


def header(d, n):
    """How a FAISS file of n rows of d fp16 begins: that of an empty one, with its two counts filled in."""
    import faiss
    empty = faiss.index_factory(d, "SQfp16", faiss.METRIC_INNER_PRODUCT)
    begin = bytearray(faiss.serialize_index(empty))
    begin[8:16] = n.to_bytes(8, "little")           # ntotal
    begin[-8:] = (2 * d * n).to_bytes(8, "little")  # bytes of the rows, which follow
    return bytes(begin)


def write_vectors(path, corpus, encoder):
    """Goes on behind the last whole piece: cut within one, its batches would be others, and so the last bits.
    """
    d, n = encoder.dimension, len(corpus)
    begin = header(d, n)
    part = path.with_name(f"{path.name}.part")
    with part.open("ab") as file, Progress("encoding") as progress:
        done = max(0, file.tell() - len(begin)) // (2 * d * PIECE) * PIECE
        if not done:
            file.truncate(0)
            file.write(begin)
        file.truncate(len(begin) + 2 * d * done)
        for start in range(done, n, PIECE):
            stop = min(start + PIECE, n)
            file.write(encoder.passages(corpus, range(start, stop)).astype("float16").tobytes())
            file.flush()
            progress(stop - done, n - done)
    part.replace(path)


def mapped(path):
    """A FAISS index that takes no memory but what a search touches, which other processes share."""
    import faiss
    if not Path(path).exists():
        raise VectorsError(f"{path}: no such file, or a link to what is gone")
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        why = str(error).splitlines()[-1][-150:]
        raise VectorsError(f"{path}: no FAISS index, or not all of it ({why}): fetch "
                           "it again, or make it with python -m common.vectors") from None


def is_flat(index):
    """Whether its file ends in its rows, of fp32 or fp16, compared by their inner product."""
    import faiss
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        return False
    half = isinstance(index, faiss.IndexScalarQuantizer) and index.sa_code_size() == 2 * index.d
    return half or isinstance(index, faiss.IndexFlat)


def pieces(path, vectors, size):
    """(number of the first row, (size, d) float32) of a flat file, read in order: through the mapping every
    4 KB of a cold file are a page fault, ten CPU minutes for 21 million rows."""
    n, d, width = vectors.ntotal, vectors.d, vectors.sa_code_size() // vectors.d
    with open(path, "rb") as file:
        file.seek(-n * d * width, os.SEEK_END)
        for start in range(0, n, size):
            rows = np.fromfile(file, f"f{width}", min(size, n - start) * d)
            yield start, rows.reshape(-1, d).astype("float32", copy=False)


def exact(path, vectors, queries, k):
    """(queries, k) scores of the nearest rows of a flat file, found by reading all."""
    import faiss
    best = faiss.ResultHeap(len(queries), k, keep_max=True)
    with Progress("exact search") as progress:
        for start, rows in pieces(path, vectors, PIECE):
            scores, numbers = faiss.knn(queries, rows, min(k, len(rows)), metric=faiss.METRIC_INNER_PRODUCT)
            best.add_result(scores, numbers + start)
            progress(start + len(rows), vectors.ntotal)
    best.finalize()
    return best.D


def evenly(n, count):
    """At most `count` numbers below n, evenly spread."""
    return np.unique(np.linspace(0, n - 1, min(count, n)).astype("int64"))


def check(path, index, corpus, encoder):
    """VectorsError unless the index has these passages, in this order, as this encoder puts them."""
    n = len(corpus)
    if index.ntotal != n:
        raise VectorsError(f"{path}: {index.ntotal:,} vectors for {n:,} passages: give the corpus that it "
                           "was made of, or make it anew with python -m common.vectors")
    if index.d != encoder.dimension:
        raise VectorsError(f"{path}: vectors of {index.d} numbers, those of {encoder.name} have "
                           f"{encoder.dimension}: give the encoder that made it")
    numbers = evenly(n, CHECKED)
    again = encoder.passages(corpus, numbers)
    try:
        own = (again * index.reconstruct_batch(numbers)).sum(1)
        around = np.clip(numbers[:, None] + np.arange(-NEAR, NEAR + 1), 0, n - 1).ravel()
        others = again @ index.reconstruct_batch(around).T
        right = own >= others.max(1) - 1e-3  # (a passage may be there twice)
    except RuntimeError:  # of such an index no vector can be had
        right = (index.search(again, 10)[1] == numbers[:, None]).any(1)
    wrong = int((~right).sum())
    if wrong > len(numbers) // 8:
        raise VectorsError(f"{path}: {wrong} of {len(numbers)} passages are not where {encoder.name} puts "
                           "them: give the encoder and the corpus, in its order, that it was made of")


# ---------------------------------------------------------------- codes

FLAT = "Flat"        # no codes: every search compares all vectors
SMALL = 100_000      # passages: up to here that is fast, and .3 GB of memory with 768 numbers
PER_LIST = 64        # vectors that a list is trained with
ASKED = 400          # held-out questions: half choose, half measure
AT_ONCE = 8          # queries: FAISS makes 15 KB of tables for each and each list
RECALL = 0.97        # of the exact search's three best, for which `choose` looks
EFFORTS = [(lists, best) for lists in (8, 16, 32, 64, 128, 256) for best in (10, 20, 40)]


def spec_for(n):
    """The index of n passages: codes of a bit per number in 4 sqrt(n) lists.

    >>> spec_for(10_000), spec_for(1_000_000), spec_for(21_015_324)
    ('Flat', 'IVF4096,RaBitQfs', 'IVF16384_HNSW32,RaBitQfs')
    """
    if n <= SMALL:
        return FLAT
    lists = 2 ** round(math.log2(4 * math.sqrt(n)))
    found = "_HNSW32" if lists > 4096 else ""  # (the lists of a vector are themselves searched for)
    return f"IVF{lists}{found},RaBitQfs"


def empty_index(d, spec):
    import faiss
    try:
        index = faiss.index_factory(d, spec, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise refused(spec, error) from error
    lists = faiss.try_extract_index_ivf(index)  # also behind a transform (PCA64,IVF32,Flat)
    if lists is not None:
        lists.cp.min_points_per_centroid = 1  # (else it warns of small corpora)
    return index


def refused(spec, error):
    reason = str(error).splitlines()[-1][:200]
    return VectorsError(f"MODEL@{spec}: no such file or folder, and FAISS refuses to make it ({reason}); try "
                        "Flat, SQ8, HNSW32, or IVF<lists>,SQ8 with fewer lists than passages")


def write_codes(path, file, vectors, spec):
    """A sample trains lists and codes, then all rows are added."""
    import faiss
    index = empty_index(vectors.d, spec)
    lists = faiss.try_extract_index_ivf(index)
    sample = PER_LIST * (lists.nlist if lists is not None else 1024)
    try:
        index.train(vectors.reconstruct_batch(evenly(vectors.ntotal, sample)))
    except RuntimeError as error:
        raise refused(spec, error) from error
    with Progress("compressing") as progress:
        for start, rows in pieces(file, vectors, PIECE):
            index.add(rows)
            progress(start + len(rows), vectors.ntotal)
    faiss.write_index(index, str(path))


def refined(codes, vectors, lists, candidates):
    """Finds `candidates` per passage asked for by the codes of so many lists, and ranks them by vectors."""
    import faiss
    inner = faiss.try_extract_index_ivf(codes)
    if inner is not None:
        inner.nprobe = min(lists, inner.nlist)
    index = faiss.IndexRefine(codes, vectors)
    index.k_factor = candidates
    return index


def search(index, asked, k):
    """(scores, numbers of rows) of an index, each (queries, k), best first; -1 where it found none."""
    import faiss
    whole = isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer))
    size = max(1, len(asked)) if whole else AT_ONCE
    parts = [index.search(asked[start:start + size], k) for start in range(0, len(asked), size)]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def choose(codes, vectors, queries, nearest, target):
    """The least of EFFORTS that finds `target` of what scores as the nearest (queries, k) do, for every other
    query, else the largest; and the recall for the rest."""
    k = nearest.shape[1]
    for lists, candidates in EFFORTS:
        scores = search(refined(codes, vectors, lists, candidates), queries, k)[0]
        recall = (scores > nearest[:, -1:] - 1e-5).mean(1)
        if recall[::2].mean() >= target:
            break
    return {"lists": lists, "candidates": candidates, "recall": round(float(recall[1::2].mean()), 4)}


# ---------------------------------------------------------------- an index that searches

def opened(path, corpus, encoder):
    """A FAISS file, or a folder of ours, of exactly these passages and this encoder, ready to search."""
    import faiss
    if path.is_dir():
        made = manifest(path)
        if not made.get("complete"):
            raise VectorsError(f"{path}: no index, or one that is not finished ({MANIFEST}): run python -m "
                               f"common.vectors --out {path} (again)")
        check(path, mapped(path / VECTORS), corpus, encoder)
        return searched(path, made)
    index = mapped(path)
    check(path, index, corpus, encoder)
    inner = faiss.try_extract_index_ivf(index)
    if inner and inner.nprobe == 1:  # FAISS's default: a third of the nearest would be found
        inner.nprobe = min(64, inner.nlist)
        say(f"{path}: its search goes through {inner.nprobe} of {inner.nlist} lists")
    return index


def manifest(folder):
    """What a folder's index was made of, and how it is searched; {} where none was begun."""
    return read_json(folder / MANIFEST, dict) if (folder / MANIFEST).exists() else {}


def searched(folder, made):
    import faiss
    vectors = mapped(folder / VECTORS)
    if made["spec"] == FLAT:
        index = faiss.IndexFlatIP(vectors.d)
        for _, rows in pieces(folder / VECTORS, vectors, PIECE):
            index.add(rows)
        return index
    codes = mapped(folder / CODES)
    if (codes.ntotal, codes.d) != (vectors.ntotal, vectors.d):
        raise VectorsError(f"{folder}: {codes.ntotal:,} codes for {vectors.ntotal:,} vectors: delete {CODES} "
                           "and run python -m common.vectors again")
    return refined(codes, vectors, made["lists"], made["candidates"])


# ---------------------------------------------------------------- how it is made

@dataclass
class Build:
    """Makes the index of a corpus, or goes on making it."""
    corpus: str              # as the scripts' --corpus
    encoder: str             # a sentence-transformers model: folder or hub id
    out: Path                # a folder
    flat: str = ""           # a FAISS file of the corpus's vectors that is there already
    index: str = ""          # a FAISS factory string, or Flat; default by size
    questions: str = ""      # what the effort of a search is chosen with; default: titles of the corpus
    recall: float = RECALL   # of the exact search's three best
    skip_bad: bool = False


def build(job, corpus, encoder, known_as):
    """Makes what job.out lacks, and says how it is to be searched. known_as: the `identity` of the corpus."""
    spec = job.index or spec_for(len(corpus))
    empty_index(encoder.dimension, spec)  # what cannot be is refused before hours of encoding
    made = {"corpus": known_as, "passages": len(corpus), "encoder": encoder.name, "weights": encoder.weights,
            "prefix": encoder.passage_prefix, "dimension": encoder.dimension, "spec": spec,
            "flat": job.flat and str(Path(job.flat).expanduser().resolve())}
    folder, file = job.out, job.out / VECTORS
    folder.mkdir(parents=True, exist_ok=True)
    with cache.locked(folder / ".lock"):
        begin(folder, made)
        if job.flat and not file.exists():
            file.unlink(missing_ok=True)  # (a link to what is gone)
            file.symlink_to(made["flat"])
        if not file.exists():
            write_vectors(file, corpus, encoder)
        vectors = mapped(file)
        check(file, vectors, corpus, encoder)
        made |= {"lists": 1, "candidates": 1, "recall": 1.0}
        if spec != FLAT:
            codes = cache.made_once(folder / CODES, lambda part: write_codes(part, file, vectors, spec))
            queries = encoder.queries(held_out(job, corpus))
            nearest = exact(file, vectors, queries, min(3, len(corpus)))
            made |= choose(mapped(codes), vectors, queries, nearest, job.recall)
        write_json(folder / MANIFEST, made | {"complete": True})
    return made


def begin(folder, made):
    """Leaves what is there, if it is the beginning of the same."""
    known = manifest(folder)
    parts = ("corpus", "passages", "weights", "prefix", "dimension", "flat")
    other = [part for part in parts if known and known.get(part) != made[part]]
    if other:
        raise VectorsError(f"{folder} was begun with other {', '.join(other)}: give another --out")
    if known and known.get("spec") != made["spec"]:
        (folder / CODES).unlink(missing_ok=True)
    write_json(folder / MANIFEST, made | {"complete": False})


def held_out(job, corpus):
    """Questions, or what stands for them: titles, or the first words of passages without."""
    if job.questions:
        return [q.question for q in data.load_questions(job.questions, ASKED)]
    rows = [corpus[int(i)] for i in evenly(len(corpus), ASKED)]
    return [row["title"] or " ".join(row["text"].split()[:10]) for row in rows]


def kept(corpus, encoder, spec=""):
    """(its folder, the index) of a corpus, made once in the cache. spec: of FAISS's factory."""
    known_as = identity(corpus)
    spec = spec or spec_for(len(corpus))
    name = cache.key([known_as, encoder.weights, encoder.passage_prefix, MAX_TOKENS, spec])
    out = cache.folder() / f"dense-{name}"
    made = manifest(out)
    if not made.get("complete"):
        made = build(Build("", encoder.name, out, index=spec), corpus, encoder, known_as)
    return out, searched(out, made)
