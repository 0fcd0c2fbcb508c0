"""common/kg.py: graphs of triples and of GraphML, their two tools, and what a bad file says."""

import json

import pytest

from common import data, kg, world
from tests.conftest import sample

TRIPLES = [
    ("Pale Tower", "director", "Ada Adler"),
    ("Ada Adler", "mother", "Cora Cole"),
    ("Ada Adler", "spouse", "Abel Adler"),
    ("Abel Adler", "spouse", "Ada Adler"),
    ("Pale Tower", "director", "Ada Adler"),
    ("Pale Tower", "composer", "Ada Adler"),
]


def test_facts_neighbours_and_edges():
    graph = kg.KnowledgeGraph.from_triples(TRIPLES)
    # given twice: one edge
    assert graph.facts("Pale Tower") == [
        ("Pale Tower", "director", "Ada Adler"),
        ("Pale Tower", "composer", "Ada Adler"),
    ]
    assert (
        graph.facts("nobody") == []
        and graph.node_info("nobody") is None
        and "Cora Cole" in graph
        and "nobody" not in graph
    )
    info = graph.node_info("Ada Adler")
    assert info["neighbours"] == ["Cora Cole", "Abel Adler", "Pale Tower"]
    assert sorted((e["head"], e["relation"], e["tail"]) for e in info["edges"]) == sorted(
        [*TRIPLES[:4], TRIPLES[5]]
    )
    assert [e["head"] for e in info["edges"]][:2] == ["Ada Adler"] * 2  # its own facts first


def test_the_entity_matcher_finds_misspelt_names():
    graph = kg.KnowledgeGraph.from_triples(TRIPLES)
    found = graph.entity_matcher("Ada Addler")
    assert [f["name"] for f in found][:2] == ["Ada Adler", "Abel Adler"] and len(found) == 4
    assert all(0 <= f["score"] <= 1.0001 for f in found) and found[0]["score"] > found[1]["score"]
    assert len(graph.entity_matcher("Ada", k=1)) == 1
    assert graph.entity_matcher("Pale Tower", 1)[0]["score"] == pytest.approx(1)
    graph.entity_matcher("", 2), graph.entity_matcher("(((", 2)


def test_the_graph_of_the_world_holds_every_plan():
    made = world.make_world("dev", questions=60)
    graph = kg.KnowledgeGraph.from_triples(made.triples)
    for q in made.questions:
        for head, relation, tail in q["evidences"]:
            assert (head, relation, tail) in graph.facts(head)


@pytest.mark.parametrize("name,nodes,entity", [
    ("christmas_carol", 322, "Ebenezer Scrooge"),
    ("christmas_carol_nano_graphrag", 694, "SCROOGE"),
    ("ultradomain_mix", 450, None),
])
def test_graphml_of_lightrag_and_nano_graphrag(name, nodes, entity):
    graph = kg.load_graph(sample(f"lightrag_graph/{name}/graph_chunk_entity_relation.graphml"))
    assert graph.graph.number_of_nodes() == nodes
    assert not any('"' in n or "<SEP>" in d["description"] for n, d in graph.graph.nodes(data=True))
    isolated = sum(not graph.facts(n) for n in graph.graph)
    # no direction: an edge is a fact of both ends
    assert isolated == sum(d == 0 for _, d in graph.graph.degree())
    if entity:
        assert graph.entity_matcher(entity.lower().replace("scrooge", "scroogge"))[0]["name"] == entity
        info = graph.node_info(entity)
        assert (
            info["description"]
            and info["neighbours"]
            and all(entity in (e["head"], e["tail"]) for e in info["edges"])
        )


def test_files_of_triples(tmp_path):
    (tmp_path / "a.jsonl").write_text('["A", "r", "B"]\n\n{"head": "B", "relation": "s", "tail": "C"}\n')
    (tmp_path / "a.json").write_text(json.dumps([["A", "r", "B"]]))
    (tmp_path / "a.tsv").write_text("A\tr\tB\r\nB\ts\tC\n")
    for name, facts in (("a.jsonl", 2), ("a.json", 1), ("a.tsv", 2)):
        graph = kg.load_graph(tmp_path / name)
        assert graph.facts("A") == [("A", "r", "B")] and graph.graph.number_of_edges() == facts
    assert kg.load_graph(sample("wikidata_codex/codex-s_train.txt")).graph.number_of_edges() == 32888


@pytest.mark.parametrize("name,text,message", [
    ("a.jsonl", '["A", "r", "B"]\n["A", "r"]\n', "record 2: expected head, relation and tail"),
    ("a.jsonl", "{\n", "record 1"),
    ("a.jsonl", '["A", 1, "B"]\n', "record 1"),
    ("a.json", "[", "not valid JSON"),
    ("a.tsv", "A B C\n", "record 1"),
    ("a.graphml", "<graphml>", "not a GraphML file"),
    ("a.graphml", "no", "not a GraphML file"),
    ("a.json", "5", "expected a list"),
    ("a.json", "[" * 100_000, "not valid JSON"),
    ("a.graphml", '<?xml version="1.0" encoding="bogus-8"?><graphml/>', "GraphML"),
    ("a.jsonl", "", "the graph is empty"),
    ("a.jsonl", '{"head": "A", "relation": "r"}', "record 1"),
])
def test_a_bad_file_is_one_clear_error(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(kg.GraphError, match=message):
        kg.load_graph(tmp_path / name)
    for missing in ("nowhere.jsonl", "nowhere.graphml"):
        with pytest.raises(kg.GraphError, match=missing):
            kg.load_graph(tmp_path / missing)


def test_qald_questions_of_both_forms():
    official = data.load_questions(sample("qald10/qald_10.json"), skip_bad=True)
    assert (
        official[0].answers == ["Q1739008"]
        and official[0].question.startswith("among the founders of tencent")
    )
    assert {"yes", "no"} & {q.answers[0] for q in official} and not official[0].entities
    tog = data.load_questions(sample("qald10/qald_10_en_topic_entities.json"), skip_bad=True)
    assert tog[0].answers == ["Ma Huateng"] and tog[0].entities[0] == ["Tencent", "Q860580"]
    with pytest.raises(data.DataError, match="field 'answer' is empty"):
        data.load_questions(sample("qald10/qald_10.json"))
