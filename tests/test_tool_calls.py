"""of_omne/tool_calls.py: calls in two styles, names of every kind, and a named fault for what is none."""

import json
import random
import sys

import networkx
import pytest

import omne_r1
from common.graphs import kg_tools
from common.of_omne import tool_calls
from common.of_omne.tool_calls import MAX_CALL, Fault, parse_tool_call, written
from tests.conftest import sample

CAUX = ("node_info", {"node_name": "Pays de Caux", "graph_type": "agriculture"})
ODD = [
    "", " ", '"', "'", "\\", '\\"', "a\nb", "a\r\nb", "\t", "Ça, (va) [1] {2}", "名前", "\u2028", "\x00", "#",
    "it's \"so\", they said\\", "</tool_call>", "a=b", "{}", "%s", "\U0001f600", 'x", graph_type="law',
]


@pytest.mark.parametrize("text", [
    'node_info(node_name="Pays de Caux", graph_type="agriculture")',
    " node_info ( graph_type = 'agriculture' , node_name = 'Pays de Caux' , )\n",
    'node_info("Pays de Caux", "agriculture")',
    'node_info("Pays de Caux", graph_type="agriculture")',
    'node_info("Pays " "de Caux", """agriculture""")',
    '{"name": "node_info", "arguments": {"graph_type": "agriculture", "node_name": "Pays de Caux"}}',
    '{"name": "node_info", "parameters": {"node_name": "Pays de Caux", "graph_type": "agriculture"}}',
    '\n{"arguments": {"node_name": "Pays de Caux", "graph_type": "agriculture"}, "name": "node_info"} ',
    json.dumps({"name": CAUX[0], "arguments": json.dumps(CAUX[1])}),
    json.dumps({"type": "function", "function": {"name": CAUX[0], "arguments": json.dumps(CAUX[1])}}),
])
def test_every_way_to_write_a_call_gives_the_same(text):
    assert parse_tool_call(text) == CAUX
    assert list(parse_tool_call(text)[1]) == ["node_name", "graph_type"]


def names_of_the_samples():
    names = []
    for graph in ("christmas_carol", "christmas_carol_nano_graphrag", "ultradomain_mix"):
        file = sample(f"lightrag_graph/{graph}/graph_chunk_entity_relation.graphml")
        names += list(networkx.read_graphml(file))  # nano-graphrag's in their literal quotes
    return names


def survives(name):
    for tool in kg_tools.TOOLS:
        arguments = {"node_name": name, "graph_type": "cs"}
        made = written(kg_tools.Call(tool, name, "cs"))
        made = made.removeprefix("<tool_call>").removesuffix("</tool_call>")
        for call in (made, json.dumps({"name": tool, "arguments": arguments})):
            assert parse_tool_call(call) == (tool, arguments), call
        call = f"{tool}({name!r}, graph_type='cs')"  # Python's own quoting, single quotes where it can
        assert parse_tool_call(call) == (tool, arguments), call


def test_all_names_of_the_sample_graphs_survive_in_both_styles():
    names = names_of_the_samples()
    assert len(names) == 1466
    for signs, count in {"'\u2019": 135, ",": 15, "()": 25}.items():
        assert sum(bool(set(signs) & set(name)) for name in names) == count, signs
    assert sum(not name.isascii() for name in names) == 52
    for name in names:
        survives(name)


def test_commas_quotes_backslashes_newlines_and_brackets_survive():
    for name in ODD:
        survives(name)
    signs = "ab ,.'\"\\\n\t()[]{}<>=#\u00e9\u540d\U0001f600"
    random_signs = random.Random(0)
    for _ in range(500):
        survives("".join(random_signs.choices(signs, k=random_signs.randrange(12))))


@pytest.mark.parametrize("text,fault", [
    ("node_info", "not a call"),
    ('node_info("a", "b") node_info("a", "b")', "not a call"),
    ('node_info("a", "b").x', "not a call"),
    ('node_info("a", "b")("c", "d")', "not a call"),
    ("node_info('Scrooge's ghost', 'cs')", "not a call"),
    ("node_info('a\x00', 'cs')", "not a call"),
    ("node_info('a\ud800', 'cs')", "not a call"),
    ('__import__("os").system("true")', "unknown tool"),
    ('Node_info("a", "b")', "unknown tool"),
    ('node_info("a", "b", "c")', "unknown argument"),
    ('node_info(name="a", graph_type="b")', "unknown argument"),
    ('node_info(**{"node_name": "a"}, graph_type="b")', "unknown argument"),
    ('node_info("a", "b", graph_type="b")', "repeated argument"),
    ('node_info(node_name="a", node_name="b", graph_type="b")', "repeated argument"),
    ('{"name": "node_info", "arguments": {"node_name": "a", "node_name": "b", "graph_type": "c"}}',
     "repeated argument"),
    (r'{"name": "node_info", "arguments": "{\"node_name\": \"a\", \"node_name\": \"b\"}"}',
     "repeated argument"),
    ('{"function": {"name": "node_info", "name": "entity_matcher", "arguments": {}}}', "repeated argument"),
    ('{"name": "node_info", "arguments": {"node_name": "a"}, "parameters": {"graph_type": "b"}}',
     "repeated argument"),
    ("node_info()", "missing argument"),
    ('node_info(7, "b")', "argument that is no text"),
    ('node_info(f"{open}", "b")', "argument that is no text"),
    ('node_info(*["a", "b"])', "argument that is no text"),
    ('node_info(open("x").read(), "b")', "argument that is no text"),
    ('{"name": "node_info"', "not a call"),
    ('{"arguments": {}}', "not a call"),
    ('{"name": "node_info", "parameters": 7}', "not a call"),
    ('{"name": "node_info", "arguments": "{"}', "not a call"),
    (r'{"name": "node_info", "arguments": "[\"a\"]"}', "not a call"),
    ('{"function": "node_info", "arguments": {"node_name": "a", "graph_type": "b"}}', "not a call"),
    ('{"name": ["node_info"], "arguments": {}}', "unknown tool"),
    ('{"name": "node_info"}', "missing argument"),
    ('{"name": "node_info", "arguments": {"node_name": ["a"], "graph_type": "b"}}',
     "argument that is no text"),
])
def test_what_is_no_call_is_a_named_fault(text, fault):
    with pytest.raises(Fault) as raised:
        parse_tool_call(text)
    assert raised.value.name == fault and raised.value.detail


@pytest.mark.parametrize("around, word", [
    ("[{}]", "list"), ("[ {},\n{} ]", "list"), ("```json\n{}\n```", "fence"), ("```\n{}```", "fence"),
    ("`{}`", "fence"), ("~~~json\n{}\n~~~", "fence"),
])
def test_a_fence_or_a_list_around_a_call_is_said_and_no_right_round(around, word):
    """The call within is one in itself, in both styles."""
    for call in ('node_info("a", "cs")', json.dumps({"name": CAUX[0], "arguments": CAUX[1]})):
        text = around.replace("{}", call)
        with pytest.raises(Fault, match="not a call") as raised:
            parse_tool_call(text)
        assert word in raised.value.detail
        for inside, right in ((call, True), (text, False)):
            told = f"<think> a </think> <tool_call> {inside} </tool_call>"
            assert omne_r1.round_is_right(told, "on", last=False) == right


def test_every_tool_has_a_signature_of_its_own(monkeypatch):
    monkeypatch.setattr(tool_calls, "ARGUMENTS", {"search": ("query",), "range": ("first", "last")})
    in_json = '{"name": "search", "arguments": {"query": "a, b"}}'
    for call in ("search('a, b')", "search(query='a, b')", in_json):
        assert parse_tool_call(call) == ("search", {"query": "a, b"})
    assert parse_tool_call("range(last='9', first='1')") == ("range", {"first": "1", "last": "9"})
    for call, fault, words in (
        ("search('a', 'b')", "unknown argument", "expected 1 argument, not 2"),
        ("range('a', 'b', 'c')", "unknown argument", "expected 2 arguments, not 3"),
        ("search(first='a')", "unknown argument", "the arguments are query, not first"),
        ("range('1')", "missing argument", "last is missing"),
        ("node_info('a', 'b')", "unknown tool", "search and range"),
        ("not a call", "not a call", "search(…) or range(…)"),
    ):
        with pytest.raises(Fault, match=fault) as raised:
            parse_tool_call(call)
        assert words in raised.value.detail


@pytest.mark.parametrize("text", [
    "node_info(" + "(" * 3900,
    "node_info(" + "-" * 3900 + "1)",
    "node_info(a" + ".a" * 1900 + ")",
    "node_info" + "()" * 1900,
    '{"a":' * 790,
    '{"name": "node_info", "arguments": ' + "[" * 1900 + "]" * 1900 + "}",
])
def test_deep_nesting_is_a_fault_and_no_crash(text):
    limit = sys.getrecursionlimit()
    assert len(text) <= MAX_CALL
    with pytest.raises(Fault):
        parse_tool_call(text)
    assert sys.getrecursionlimit() == limit


def test_a_call_of_4000_characters_is_read_and_one_more_is_too_long():
    call = 'node_info("{}", "cs")'
    text = call.format("x" * (4000 - len(call) + 2))
    assert len(text) == 4000 and parse_tool_call(text)[0] == "node_info"
    with pytest.raises(Fault, match="too long"):
        parse_tool_call(text + " ")


def test_nothing_of_a_call_is_evaluated(tmp_path):
    made = tmp_path / "made"
    for name in (f"open({str(made)!r}, 'w')", f"[open({str(made)!r}, 'w')][0].name"):
        with pytest.raises(Fault):
            parse_tool_call(f"node_info(node_name={name}, graph_type='cs')")
    assert not made.exists()


def test_an_odd_escape_warns_nobody(recwarn):
    assert parse_tool_call(r'node_info("\d", "cs")')[1]["node_name"] == r"\d"
    assert not list(recwarn)
