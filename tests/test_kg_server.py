"""graphs/kg_tools.py and serve/server.py: both tools in this process and behind HTTP."""
# ruff: noqa: F811  (a fixture of another file)

import json

import pytest
from fastapi.testclient import TestClient

from common import kg
from common.graphs.kg_tools import Call, LocalTools
from common.serve import server as graph_server
from tests.conftest import sample
from tests.test_retriever import idle  # noqa: F401

TRIPLES = {
    "cs": [("Sorting", "part of", "Algorithms"), ("Merge Sort", "kind of", "Sorting")],
    "law": [("Contract", "needs", "Consent"), ("Contract", "kind of", "Sorting")]}


def local_tools(**limits):
    graphs = {name: kg.KnowledgeGraph.from_triples(rows) for name, rows in TRIPLES.items()}
    return LocalTools(graphs, **limits)


CALLS = [
    Call("node_info", "Sorting", "cs"),
    Call("entity_matcher", "merge", "cs"),
    Call("node_info", "Sorting", "law"),
    Call("node_info", "nobody", "law"),
    Call("entity_matcher", "contract \ud800 <b>", "law", "Which?"),
    Call("node_info", "Merge Sort", "cs", "What kind?"),
    Call("node_info", "x", "no such graph")]


@pytest.fixture(scope="module")
def client():
    return TestClient(graph_server.graph_app(local_tools()), raise_server_exceptions=False)


# ---- in this process

def test_calls_of_several_graphs_and_tools_keep_their_places():
    texts = local_tools().search(CALLS)
    assert texts[0].startswith("Entity: Sorting") and "Merge Sort" in texts[0] and "Contract" not in texts[0]
    assert texts[1].startswith("Found 3 entities matching 'merge':\n1. Entity: Merge Sort")
    assert "Contract" in texts[2] and "Merge Sort" not in texts[2]
    assert texts[3].startswith("There is no entity named 'nobody' in this graph. The nearest names: '")
    assert texts[4].startswith("Found 3 entities matching 'contract ")
    assert texts[5].startswith("Entity: Merge Sort")
    assert texts[6] == "There is no graph 'no such graph'. The graphs: cs, law."
    assert [local_tools().search([call])[0] for call in CALLS] == texts and local_tools().search([]) == []


def test_limits_and_the_question_reach_the_text():
    hub = kg.KnowledgeGraph.from_triples([("H", "r", f"T{i:03}") for i in range(99)])
    many = LocalTools({"a": hub}, max_edges=1)
    text = many.search([Call("node_info", "H", "a", "What is T077?")])[0]
    assert "1. H | r | T077" in text and "98 more edges" in text
    assert "Found 2 entities" in local_tools().search([CALLS[1]], k=2)[0]


# ---- the server, without a socket

@pytest.mark.parametrize("path,name,start", [
    ("/cs/get_node", "Sorting", "Entity: Sorting\n"),
    ("/law/get_node", "Contract", "Entity: Contract\n"),
    ("/cs/get_precise_entity_names", "sorting", "Found 3 entities matching 'sorting':\n1. Entity: Sorting\n"),
    ("/cs/get_node", "nobody", "There is no entity named 'nobody'"),
    ("/cs/get_node", "", "There is no entity named ''")])
def test_the_form_of_the_authors_server(client, path, name, start):
    reply = client.post(path, json={"node_name": name})
    assert reply.status_code == 200 and reply.json().keys() == {"rendered_content"}
    assert reply.json()["rendered_content"].startswith(start)


def test_what_takes_long_at_a_million_names_is_made_before_the_first_question():
    tools = local_tools()
    graph_server.graph_app(tools)
    assert all({"index", "_printed"} <= vars(graph).keys() for graph in tools.graphs.values())


def test_health_names_the_graphs_and_an_unknown_one_is_404(client):
    assert client.get("/health").json() == {"status": "ok", "graphs": ["cs", "law"]}
    reply = client.post("/biology/get_node", json={"node_name": "x"})
    assert reply.status_code == 404 and "The graphs: cs, law." in reply.json()["detail"]


def test_lists_of_names_have_lists_of_texts(client):
    body = {"node_name": ["Sorting", "nobody"], "question": ["a", "b"]}
    texts = client.post("/cs/get_node", json=body).json()["rendered_content"]
    assert [text.split("\n")[0][:20] for text in texts] == ["Entity: Sorting", "There is no entity n"]
    assert client.post("/cs/get_node", json={"node_name": []}).json() == {"rendered_content": []}


@pytest.mark.parametrize("body", [
    "{", "", "[]", "null", "{}", '{"node_name": 7}', '{"node_name": null}', '{"node_name": ["a", 7]}',
    '{"node_name": "a", "question": ["b"]}', '{"node_name": ["a"], "question": []}'])
def test_malformed_bodies_are_422_with_a_reason(client, body):
    reply = client.post("/cs/get_node", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422 and reply.json()["detail"][0]["msg"]


def test_half_a_character_and_a_megabyte_of_name_are_answered(client):
    for name in ("half \ud800", "x" * 1_000_000, "<" * 1000):
        body = json.dumps({"node_name": name})
        for tool in ("get_node", "get_precise_entity_names"):
            reply = client.post(f"/cs/{tool}", content=body, headers={"content-type": "application/json"})
            assert reply.status_code == 200 and len(reply.json()["rendered_content"]) < 30_000


def test_a_deep_body_is_no_crash(client):
    assert client.post("/cs/get_node", content="[" * 100_000).status_code in (400, 422)


# ---- the commands

def test_a_bad_source_is_one_line_and_no_zero_exit(tmp_path):
    with pytest.raises(SystemExit, match="^error: .*nowhere.tsv: no such file.*$"):
        graph_server.main(["graph", "--graph", str(tmp_path / "nowhere.tsv"), "--port", "0"])


def test_serve_says_where_it_listens_and_what(idle, capsys):
    graph_server.main(["graph", "--graph", str(sample("lightrag_graph")), "--port", "0"])
    first, *_, serving = capsys.readouterr().out.splitlines()
    assert first == "christmas_carol: 322 entities, 359 edges"
    assert serving.startswith("serving 3 graphs (christmas_carol, ") and "http://127.0.0.1:" in serving
