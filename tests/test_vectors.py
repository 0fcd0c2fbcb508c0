"""Vectors as files: made piece by piece, opened mapped, refused where they are not those of the corpus."""

import functools
import json
import random
import re
import zlib

import faiss
import numpy as np
import pytest

from common import vectors
from common.passages import RetrieverError
from common.vectors import VectorsError, sentences
from common.vectors import __main__ as made_by_command
from common.vectors.dense import DenseRetriever
from tests.conftest import write

CORPUS = [{"id": str(i), "title": f"Title {i}", "text": f"Text of {i}."} for i in range(400)]


@functools.cache
def vector(title, salt):
    centre = int(re.sub(r"\D", "", title) or 0) // 20
    x = np.random.default_rng(centre).normal(size=32)
    x = x + .7 * np.random.default_rng(zlib.crc32((salt + title).encode())).normal(size=32)
    return (x / np.linalg.norm(x)).astype("float32")


class Fake:
    """An encoder: a text is the seed of its vector, near the centre that its last number names."""
    name, dimension, passage_prefix, weights = "fake", 32, "", "weights"
    salt = ""

    def __init__(self, name="fake"):
        pass

    def queries(self, texts):
        return np.stack([vector(text, self.salt) for text in texts])

    def passages(self, corpus, numbers):
        return self.queries([f"{corpus[int(i)]['title']}" for i in numbers])


class Other(Fake):
    salt = "o"


@pytest.fixture(autouse=True)
def one_thread():
    """FAISS's OpenMP beside PyTorch's stood still at times, at the end of a whole run of the tests."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(before)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(vectors, "PIECE", 32)
    monkeypatch.setattr(sentences, "Encoder", Fake)


def rows_of(corpus=CORPUS, encoder=Fake):
    return encoder().passages(corpus, range(len(corpus)))


def faiss_file(path, spec="Flat", corpus=CORPUS):
    index = faiss.index_factory(32, spec, faiss.METRIC_INNER_PRODUCT)
    index.train(rows_of(corpus))
    if spec.startswith("IDMap"):
        index.add_with_ids(rows_of(corpus), np.arange(len(corpus)))
    else:
        index.add(rows_of(corpus))
    faiss.write_index(index, str(path))
    return path


@pytest.fixture
def corpus_file(tmp_path):
    return lambda corpus=CORPUS: str(write(tmp_path / "corpus.jsonl", corpus))


def command(corpus, out, *flags):
    made_by_command.main(["--corpus", corpus, "--encoder", "fake", "--out", str(out), *map(str, flags)])


def first(index, number):
    return DenseRetriever(CORPUS, "fake", str(index)).search([f"Title {number}"], 3)[0][0].title


def recall(found, exact):
    return np.mean((found[:, :, None] == exact[:, None]).any(2))


def test_a_row_is_where_faiss_looks_for_it(tmp_path):
    path = tmp_path / "v.faiss"
    vectors.write_vectors(path, CORPUS, Fake())
    made = faiss.read_index(str(path))
    assert type(made).__name__ == "IndexScalarQuantizer" and made.ntotal == 400
    np.testing.assert_array_equal(made.reconstruct_n(0, 400), rows_of().astype("float16").astype("float32"))
    faiss.write_index(made, str(tmp_path / "again.faiss"))
    assert path.read_bytes() == (tmp_path / "again.faiss").read_bytes()


def test_ten_kills_leave_the_bytes_of_none(tmp_path, monkeypatch):
    vectors.write_vectors(tmp_path / "whole", CORPUS, Fake())
    whole, draw, encoded = (tmp_path / "whole").read_bytes(), random.Random(1), []

    class Killed(Fake):
        def passages(self, corpus, numbers):
            if draw.random() < .6 and len(kills) < 10:
                raise KeyboardInterrupt
            encoded.append(numbers[0])
            return super().passages(corpus, numbers)

    kills = []
    part = tmp_path / "killed.part"
    while not (tmp_path / "killed").exists():
        try:
            vectors.write_vectors(tmp_path / "killed", CORPUS, Killed())
        except KeyboardInterrupt:
            with part.open("ab") as file:  # a row that is not whole, or a lost page
                file.write(b"x" * draw.randrange(70))
                if draw.random() < .3:
                    file.truncate(draw.randrange(part.stat().st_size + 1))
            kills.append(part.stat().st_size)
    assert len(kills) == 10 and (tmp_path / "killed").read_bytes() == whole
    assert len(encoded) < 2 * 13  # (of 13 pieces, with what was cut off again)


SPECS = ["Flat", "SQfp16", "SQ8", "HNSW16", "IVF8,PQ8x4", "IVF8,RaBitQfs", "IDMap,Flat"]


@pytest.mark.parametrize("spec", SPECS)
def test_any_file_of_faiss_opens_mapped(tmp_path, spec):
    path = faiss_file(tmp_path / "e5_Flat.index", spec)
    found = DenseRetriever(CORPUS, "fake", str(path)).search(["Title 17", "Title 203"], 5)
    assert all(f"Title {n}" in [p.title for p in hits] for n, hits in zip((17, 203), found, strict=True))


def own_memory():
    status = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\s*(\d+)", status)[1]) / 1024


def test_an_index_takes_no_memory_of_its_own(tmp_path):
    index = faiss.IndexFlatIP(512)
    index.add(np.random.default_rng(0).random((60_000, 512), "float32"))
    faiss.write_index(index, str(tmp_path / "large.index"))  # 123 MB
    query = index.reconstruct_n(4321, 1)
    del index
    before = own_memory()
    opened = vectors.mapped(tmp_path / "large.index")
    assert opened.search(query, 1)[1][0, 0] == opened.search(query, 1)[1][0, 0] and own_memory() - before < 30


@pytest.mark.parametrize("flat, spec", [("", "IVF8,RaBitQfs"), ("Flat", "IVF8_HNSW32,RaBitQfs"),
                                        ("SQfp16", "IVF8,SQ8"), ("Flat", "HNSW16"), ("", "PCA8,IVF4,Flat")])
def test_codes_in_front_of_vectors_find_what_an_exact_search_finds(tmp_path, corpus_file, flat, spec, capsys):
    flags = ["--index", spec, "--recall", ".95"]
    if flat:
        flags += ["--flat", faiss_file(tmp_path / "e5.index", flat)]
    command(corpus_file(), tmp_path / "out", *flags)
    said = capsys.readouterr().out
    made = json.loads((tmp_path / "out/manifest.json").read_text())
    assert made["complete"] and made["recall"] > .9 and made["passages"] == 400 and made["spec"] == spec
    assert f"400 passages; vectors of 32 numbers: 0.00 GB; {spec}" in said
    assert (tmp_path / "out/vectors.faiss").is_symlink() is bool(flat)
    asked = Fake().queries([f"Title {n}" for n in range(1, 400, 7)])
    index = DenseRetriever(CORPUS, "fake", str(tmp_path / "out")).index
    exact = np.argsort(-(asked @ rows_of().T), 1)[:, :3]
    assert recall(index.search(asked, 3)[1], exact) > .93
    np.testing.assert_allclose(index.search(asked, 3)[0][:, 0], 1, atol=2e-3)  # ranked by vectors, not codes


def test_an_exact_search_reads_a_file_in_order_and_finds_what_faiss_finds(tmp_path):
    asked = Fake().queries([f"Title {n}" for n in range(0, 400, 9)])
    for spec in ("Flat", "SQfp16"):
        path = faiss_file(tmp_path / spec, spec)
        index = vectors.mapped(path)
        np.testing.assert_allclose(vectors.exact(path, index, asked, 3), index.search(asked, 3)[0], atol=1e-6)
        assert [len(rows) for _, rows in vectors.pieces(path, index, 32)] == 12 * [32] + [16]


def test_effort_is_chosen_on_one_half_and_measured_on_the_other(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 32)).astype("float32")
    queries = rng.normal(size=(200, 32)).astype("float32")
    flat = faiss.IndexFlatIP(32)
    flat.add(x)
    codes = vectors.empty_index(32, "IVF64,Flat")
    codes.train(x)
    codes.add(x)
    nearest = flat.search(queries, 3)[0]
    less, more = (vectors.choose(codes, flat, queries, nearest, target) for target in (.5, .97))
    assert less["lists"] < more["lists"] < 128 and less["recall"] < more["recall"]
    odd = vectors.refined(codes, flat, more["lists"], more["candidates"]).search(queries[1::2], 3)[1]
    assert more["recall"] == round(recall(odd, flat.search(queries[1::2], 3)[1]), 4)
    assert vectors.choose(codes, flat, queries, nearest + 9, .9)["lists"] == 256  # what none can find


def test_many_queries_at_once_take_no_more_memory_than_some(tmp_path, monkeypatch):
    codes = vectors.empty_index(32, "IVF16,RaBitQfs")
    codes.train(rows_of())
    codes.add(rows_of())
    flat = vectors.mapped(faiss_file(tmp_path / "e5.index"))
    index, asked, sizes = vectors.refined(codes, flat, 16, 10), np.tile(rows_of(), (3, 1)), []
    search = faiss.IndexRefine.search

    def counted(self, x, k):
        sizes.append(len(x))
        return search(self, x, k)

    monkeypatch.setattr(faiss.IndexRefine, "search", counted)
    scores, numbers = vectors.search(index, asked, 2)
    assert max(sizes) == vectors.AT_ONCE and scores.shape == numbers.shape == (1200, 2)
    assert (numbers[:, 0] == np.tile(np.arange(400), 3)).mean() > .99
    assert vectors.search(flat, asked, 2)[1][:, 0].tolist() == [*range(400)] * 3


def test_a_recall_that_is_missed_is_said(tmp_path, corpus_file, capsys, monkeypatch):
    monkeypatch.setattr(vectors, "EFFORTS", [(1, 1)])
    command(corpus_file(), tmp_path / "out", "--index", "IVF32,RaBitQ")
    said = capsys.readouterr()
    assert "this is less than --recall 0.97" in said.out and "WARNING clustering" not in said.err


def test_the_same_command_goes_on_and_another_is_refused(tmp_path, corpus_file, monkeypatch):
    flat, out = faiss_file(tmp_path / "a.index"), tmp_path / "out"
    command(corpus_file(), out, "--flat", flat)
    command(corpus_file(), out, "--flat", flat)
    assert first(out, 17) == "Title 17"
    command(corpus_file(), out, "--flat", flat, "--index", "IVF8,SQ8")
    assert first(out, 17) == "Title 17" and (out / "codes.faiss").exists()
    command(corpus_file(), out, "--flat", flat, "--index", "SQ8")  # the codes of another index go
    assert len(vectors.mapped(out / "codes.faiss").reconstruct(0)) == 32

    def refused(said, *flags, corpus=CORPUS):
        said = f"^error: {out} was begun with other {said}: give another --out$"
        with pytest.raises(SystemExit, match=said):
            command(corpus_file(corpus), out, *flags)

    refused("flat", "--flat", faiss_file(tmp_path / "b.index"))
    refused("flat")
    refused("corpus", "--flat", flat, corpus=[CORPUS[0] | {"text": "Another"}, *CORPUS[1:]])
    refused("corpus, passages", "--flat", flat, corpus=CORPUS[1:])
    monkeypatch.setattr(Fake, "weights", "trained on")
    refused("weights", "--flat", flat)


@pytest.mark.parametrize("spec", ["IVF8,SQ8", "HNSW16", "SQ8"])
def test_only_whole_vectors_are_compressed(tmp_path, corpus_file, spec):
    with pytest.raises(SystemExit, match="^error: --flat .*: no index of whole vectors.*r dense:fake@"):
        command(corpus_file(), tmp_path / "out", "--flat", faiss_file(tmp_path / "a.index", spec))


DAMAGED = {
    "cut": lambda b: b[:len(b) // 2], "cut by a byte": lambda b: b[:-1], "empty": lambda b: b"",
    "foreign": lambda b: b"PK" + b[2:], "a table": lambda b: b'{"id": "1"}\n' * 50}


@pytest.mark.parametrize("how", DAMAGED)
@pytest.mark.parametrize("spec", ["Flat", "SQfp16", "IVF8,RaBitQfs"])
def test_a_damaged_file_is_one_line(tmp_path, how, spec):
    path = faiss_file(tmp_path / "e5.index", spec)
    path.write_bytes(DAMAGED[how](path.read_bytes()))
    with pytest.raises(RetrieverError, match="e5.index: no FAISS index, or not all of it") as raised:
        DenseRetriever(CORPUS, "fake", str(path))
    assert "\n" not in str(raised.value) and "python -m common.vectors" in str(raised.value)


class Small(Fake):
    dimension = 8


@pytest.mark.parametrize("spec", ["Flat", "HNSW16", "IVF8,RaBitQfs"])
@pytest.mark.parametrize("corpus, encoder, said", [
    (CORPUS[:399], Fake, "400 vectors for 399 passages"),
    (CORPUS + CORPUS[:1], Fake, "400 vectors for 401 passages"),
    (CORPUS[1:] + CORPUS[:1], Fake, "of 16 passages are not where fake puts them"),
    (CORPUS[200:] + CORPUS[:200], Fake, "16 of 16 passages are not where"),
    (CORPUS[::-1], Fake, "of 16 passages are not where"),
    (CORPUS, Other, "of 16 passages are not where"),
    (CORPUS, Small, "vectors of 32 numbers, those of fake have 8")])
def test_vectors_of_another_corpus_order_or_encoder_are_refused(tmp_path, spec, corpus, encoder, said):
    path = faiss_file(tmp_path / "e5.index", spec)
    if spec != "Flat":
        said = said.replace("16 of 16", "of 16")
    with pytest.raises(VectorsError, match=said):
        vectors.opened(path, corpus, encoder())


def test_the_lists_of_a_file_of_one_s_own_are_searched(tmp_path, capsys):
    path = faiss_file(tmp_path / "e5.index", "IVF8,Flat")
    index = vectors.opened(path, CORPUS, Fake())
    assert index.nprobe == 8 and "goes through 8 of 8 lists" in capsys.readouterr().out


def test_a_passage_that_is_there_twice_is_no_error(tmp_path):
    corpus = [CORPUS[i // 2] for i in range(400)]
    vectors.opened(faiss_file(tmp_path / "e.index", corpus=corpus), corpus, Fake())


@pytest.mark.parametrize("manifest", [None, "{", '{"complete": false, "spec": "Flat"}'])
def test_a_folder_that_is_not_finished_is_one_line(tmp_path, corpus_file, manifest):
    command(corpus_file(), tmp_path / "out")
    path = tmp_path / "out/manifest.json"
    path.unlink()
    if manifest is not None:
        path.write_text(manifest)
    with pytest.raises(RetrieverError, match="no index, or one that is not finished|manifest.json"):
        DenseRetriever(CORPUS, "fake", str(tmp_path / "out"))


def test_codes_of_other_vectors_are_refused(tmp_path, corpus_file):
    command(corpus_file(), tmp_path / "out", "--index", "IVF8,RaBitQfs")
    codes = faiss_file(tmp_path / "out/codes.faiss", "IVF8,RaBitQfs", CORPUS[:399])
    for said in ("399 codes for 400 vectors: delete codes.faiss", "codes.faiss: no such file"):
        with pytest.raises(RetrieverError, match=said):
            DenseRetriever(CORPUS, "fake", str(tmp_path / "out"))
        codes.unlink(missing_ok=True)


def test_a_path_that_is_not_there_is_no_factory_string():
    for path in ("./nothing", "indexes/e5", "e5_Flat.index"):
        with pytest.raises(RetrieverError, match=f"fake@{path}: no such file or folder"):
            DenseRetriever(CORPUS, "fake", path)


def test_an_index_in_the_cache_knows_its_corpus_and_encoder(tmp_path, monkeypatch):
    def made(corpus, spec=""):
        DenseRetriever(corpus, "fake", spec)
        return len(list(tmp_path.glob("fivehop/dense-*")))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = [{"id": str(i), "title": f"Title {i}", "text": f"{i}\n{i + 1}"} for i in range(40)]
    joined = [row | {"text": row["text"] + "\nTitle"} for row in lines]
    assert made(lines) == made(lines) == made(lines, "Flat") == 1  # (Flat is what so few get)
    assert made(joined) == 2 and made(lines, "SQ8") == 3
    monkeypatch.setattr(Fake, "weights", "trained on")
    assert made(lines) == 4
    monkeypatch.setattr(Fake, "passage_prefix", "passage: ")
    assert made(lines) == 5
