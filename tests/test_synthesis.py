"""of_omne/synthesis.py: seed nodes, rejections, teachers, and a synthesis that goes on after a kill."""

import contextlib
import json
import re
import threading
from collections import Counter

import networkx
import pytest

import omne_r1
from common import files, kg
from common.graphs import kg_files
from common.of_omne import graph_questions, synthesis
from common.of_omne.synthesis import Draft, Item, Teacher, Template
from common.serve import chat_client
from tests.conftest import sample


def graph_of(triples, directed=True):
    made = kg.graph_of_triples(triples)
    made.graph["directed"] = directed
    return kg.KnowledgeGraph(made)


BEES = graph_of([
    ("Colony Collapse Disorder (CCD)", "linked to", "Nosema"),
    ("Nosema", "treated with", "Fumagilin-B"),
    ("Fumagilin-B", "made from", "Aspergillus"),
    ("Aspergillus", "named by", "Pier Micheli"),
    ("Pier Micheli", "born in", "Florence"),
    ("Florence", "lies on", "Arno"),
    ("Arno", "flows into", "Tyrrhenian Sea"),
    ("Corboy", "keeps", "Beehives"),
], directed=False)
CCD = ["Colony Collapse Disorder (CCD)", "Nosema", "Fumagilin-B", "Aspergillus", "Pier Micheli", "Florence",
       "Arno"]
WELL = "What treats the pathogen that is linked to Colony Collapse Disorder?"


def synthesize(graphs, folder, teacher, count, only=None, unique=True, **constants):
    """From all seed nodes, or only from these. constants: such as rounds=2."""
    starts = only or {name: synthesis.seeds(graph) for name, graph in graphs.items()}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(synthesis, name.upper(), value)
        return synthesis.synthesize(graphs, starts, folder, teacher, count, unique)


def tree(directed=False, width=3):
    """A tree of depth 3 with 40 nodes: the root is its only seed node where edges go one way alone."""
    triples = []
    for a in range(width):
        triples.append(("Root", f"child {a}", f"N{a}"))
        for b in range(width):
            triples.append((f"N{a}", f"child {b}", f"N{a}{b}"))
            for c in range(width):
                triples.append((f"N{a}{b}", f"child {c}", f"N{a}{b}{c}"))
    return graph_of(triples, directed)


# ---- seeds


def path_graph(edges, extra=0):
    """A chain of `edges` edges, and leaves on its first node."""
    triples = [(f"C{i}", "next", f"C{i + 1}") for i in range(edges)]
    return graph_of(triples + [("C0", "leaf", f"L{i}") for i in range(extra)])


@pytest.mark.parametrize("edges,extra,is_seed", [
    (3, 15, False),   # 1 + 3 + 15 = 19 nodes
    (3, 16, True),    # 20
    (2, 30, False),   # nothing at depth 3
    (3, 396, True),   # 400
    (3, 397, False),  # 401
    (9, 16, True),    # what is further away does not count
])
def test_a_seed_reaches_depth_three_and_has_20_to_400_nodes_around_it(edges, extra, is_seed):
    assert ("C0" in synthesis.seeds(path_graph(edges, extra))) == is_seed


def test_the_subgraph_goes_along_edges_of_either_direction():
    graph = graph_of([("B", "r", "A"), ("B", "r", "C"), ("D", "r", "C"), ("D", "r", "E"), ("A", "r", "A")])
    around = networkx.Graph(graph.graph)
    assert synthesis.subgraph(around, "A") == {"A": 0, "B": 1, "C": 2, "D": 3}


def test_train_and_test_share_no_seed_and_a_node_keeps_its_side():
    small = path_graph(3, 300)
    large = path_graph(4, 350)
    train, test = (synthesis.seeds(small, side=side) for side in ("train", "test"))
    assert sorted(train + test) == sorted(synthesis.seeds(small)) and not set(train) & set(test)
    assert .04 < len(test) / len(train + test) < .18
    assert set(test) & set(synthesis.seeds(large)) <= set(synthesis.seeds(large, side="test"))


# ---- what is rejected


def broken_rule(graph, kind, path, question, answer):
    try:
        synthesis.check(Draft(path, question, answer), graph, kind, unique=False)
    except chat_client.BadAnswer as bad:
        return bad.rule


PAPERS = ("What biochemical intervention is used to manage the pathogen that contributes to "
          "Colony Collapse Disorder through pesticide interactions?")


@pytest.mark.parametrize("kind,path,question,answer,rule", [
    ("12", CCD[:3], PAPERS, CCD[2], None),  # the paper's own example
    ("12", CCD[:2], WELL, CCD[1], None),
    ("12", CCD[:3], WELL, CCD[1], None),
    ("3", CCD[:4], WELL, CCD[3], None),
    ("3", CCD[:6], WELL, CCD[5], None),
    ("12", CCD[2::-1], "What is behind Fumagilin-B?", CCD[0], None),  # against the edges' direction
    ("12", CCD[:2] + ["Varroa"], WELL, "Varroa", "node not in the graph"),
    ("12", CCD[:2] + CCD[:1], WELL, "Nosema", "node twice in the path"),
    ("12", [CCD[0], CCD[2]], WELL, CCD[2], "path not connected"),
    ("12", CCD[:3], WELL, "Aspergillus", "answer not in the path"),
    ("12", CCD[:1], WELL, CCD[0], "path too short"),
    ("3", CCD[:3], WELL, CCD[2], "path too short"),
    ("12", CCD[:4], WELL, CCD[3], "path too long"),
    ("3", CCD, WELL, CCD[6], "path too long"),
    ("12", CCD[:3], "What treats the pathogen of bees?", CCD[2], "start node not named"),
    ("12", CCD[:3], WELL + " (Not NOSEMA.)", CCD[2], "inner node named"),
    ("12", CCD[:3], WELL + " fumagilin-b?", CCD[2], "answer named"),
    ("12", CCD[:3], WELL, CCD[0], "answer named"),
    ("12", CCD[:3], WELL + " Fumagilin-B?", "Nosema", "inner node named"),
])
def test_each_rule_has_its_case(kind, path, question, answer, rule):
    assert broken_rule(BEES, kind, path, question, answer) == rule


NAMED = [
    ("Fianna Fáil", "Who led fianna fail?"), ("FIANNA FAIL", "Who led Fianna  Fáil?"),
    ("Ann", "Who is Ann's aunt?"), ("Ann", "Is it Ann?"),
    ("King's Inns", "Where are the King\u2019s Inns?"), ("X-ray", "What does an X\u2011ray show?"),
    ("University College Dublin (UCD)", "Who taught at University College Dublin?"),
    ("Straße", "Which STRASSE?"), ("上海", "谁在上海出生？"), ("東京", "東京の知事は誰か。"),
    ("ガンダム", "機動戦士ガンダムの作者は？"),
    ("Ann", "谁是Ann的姑姑？"),
    ("1915", "1915年に何があったか。"),
]
NOT_NAMED = [
    ("Ann", "Who is Anna?"), ("Ann", "Who is Joann?"), ("1915", "What was made in 19150?"),
    ("a.b", "What is axb?"), ("UCD (Dublin)", "Where is Dublin?"), ("东京", "谁在上海出生？"),
    ("Ann", "谁是Anna的姑姑？"), ("\u0301", "What?"), ("", "What?"),
]


@pytest.mark.parametrize("pairs, named", [(NAMED, True), (NOT_NAMED, False)])
def test_names_are_compared_on_word_boundaries_case_and_accents_apart(pairs, named):
    wrong = [pair for pair in pairs if kg.is_named(*pair) != named]
    assert not wrong


def test_another_node_by_the_same_labels_is_seen():
    graph = graph_of([("A", "r", "B"), ("A", "r", "C"), ("B", "s", "D"), ("C", "s", "D"), ("C", "t", "E"),
                      ("D", "u", "F"), ("D", "u", "A")])
    assert synthesis.reached(graph, "A", ["r"]) == {"B", "C"}
    assert synthesis.reached(graph, "A", ["r", "s"]) == {"D"}
    assert synthesis.reached(graph, "A", ["r", "s", "u"]) == {"F"}  # not the start itself
    assert synthesis.reached(graph, "D", ["inverse of s"]) == {"B", "C"}
    assert synthesis.relations_along(graph, ["D", "B", "A", "E"]) == ["inverse of s", "inverse of r", None]
    assert synthesis.steps(BEES, "Nosema") == [("treated with", "Fumagilin-B"), ("linked to", CCD[0])]


# ---- without a model


def item(node, kind="12", turn=0):
    return Item("g-12-0", "g", kind, node, turn)


def test_the_template_s_question_is_of_the_labels_and_of_the_answer_s_kind():
    graph = graph_of([("Pale Tower", "director", "Ada Adler"), ("Ada Adler", "mother", "Cora Cole")])
    for kind, who in (("", "What"), ("Person", "Who")):
        graph.graph.nodes["Cora Cole"]["kind"] = kind
        path = ["Pale Tower", "Ada Adler", "Cora Cole"]
        asked = synthesis.question_of_labels(graph, path, ["director", "mother"])
        assert asked == f"{who} is the mother of the director of Pale Tower?"


def test_a_walk_goes_forward_visits_no_node_twice_and_is_always_the_same():
    drafts = [Template().draft(tree(), item("N00", "3", turn), 1) for turn in range(40)]
    assert all(d.path[0] == "N00" and len(d.path) == len(set(d.path)) <= 6 for d in drafts)
    assert len({tuple(d.path) for d in drafts}) > 10 and any(len(d.path) >= 4 for d in drafts)
    assert drafts[7] == Template().draft(tree(), item("N00", "3", 7), 1)
    forward = [Template().draft(tree(directed=True), item("N00", "3", turn), 1) for turn in range(20)]
    assert {len(d.path) for d in forward} == {2}  # a dead end: what is checked later
    nowhere = Template().draft(tree(directed=True), item("N000"), 1)
    assert (nowhere.path, nowhere.question, nowhere.relations) == (["N000"], "", [])


def test_weigh_and_wording_are_the_caller_s():
    def walked(weigh, times=1):
        teacher = Template(lambda graph, path, relations: "/".join(relations), weigh)
        return [teacher.draft(tree(True), item("Root", "12", t), 1).question for t in range(times)]

    assert set(walked(lambda relation: relation.endswith("2"), 20)) == {"child 2", "child 2/child 2"}
    assert walked(lambda relation: 0) == [""]
    # three edges of .1 are taken in three of ten cases, the walk ends in the others
    assert 55 < walked(lambda relation: .1, 100).count("") < 85


class Words:
    """A teacher that says the given drafts, one after the other, whatever it is asked."""
    concurrency = 1

    def __init__(self, *drafts):
        self.drafts = list(drafts)

    def draft(self, graph, item, attempt, previous):
        return self.drafts.pop(0)

    def judge(self, draft, item, attempt):
        pass


def root_question(*steps, words="Which node below Root?"):
    return Draft(["Root", *steps], words, steps[-1])


def rules(folder):
    return [row["rule"] for row in files.read_jsonl(folder / "rejected.jsonl")]


SHORT = {"12": synthesis.KINDS["12"]}
ROOT = {"kinds": SHORT, "only": {"tree": ["Root"]}}


def test_the_rows_of_questions_and_of_a_duplicate(tmp_path):
    words = Words(root_question("N0"), root_question("N0"), root_question("N1"),
                  root_question("N0", "N01", "N012"), root_question("N1", "N10", "N102"))
    rows = synthesize({"tree": tree()}, tmp_path, words, 2, only=ROOT["only"])
    assert rows == files.read_jsonl(tmp_path / "questions.jsonl")
    assert [row["id"] for row in rows] == ["tree-12-0", "tree-12-2", "tree-3-0", "tree-3-1"]
    assert rows[2] == {
        "id": "tree-3-0", "graph_type": "tree", "question": "Which node below Root?", "golden_answer": "N012",
        "path": ["Root", "N0", "N01", "N012"], "relations": ["child 0", "child 1", "child 2"], "hops": 3,
        "kind": "3", "seed_node": "Root", "ambiguous": False}
    rejected, = files.read_jsonl(tmp_path / "rejected.jsonl")
    assert rejected.pop("reason")
    assert rejected == {"id": "tree-12-1", "graph_type": "tree", "kind": "12", "rule": "duplicate",
                        "path": ["Root", "N0"], "question": "Which node below Root?", "answer": "N0"}


@pytest.mark.parametrize("unique, answers, said", [
    (True, ["N1"], "1 questions; rejected drafts: 1 another node reached; 1 (50%"),
    (False, ["N0", "N1"], "2 questions; rejected drafts: none; 1 (50%"),
])
def test_what_has_another_answer_is_left_out_or_marked_and_its_share_is_said(
        tmp_path, capsys, unique, answers, said):
    graph = tree()
    graph.graph.add_edge("Root", "N00", "child 0", relation="child 0", description="")
    words = Words(root_question("N0"), root_question("N1"))
    rows = synthesize({"tree": graph}, tmp_path, words, len(answers), **ROOT, unique=unique)
    assert [(row["golden_answer"], row["ambiguous"]) for row in rows] == [(a, a == "N0") for a in answers]
    assert rules(tmp_path) == ["another node reached"] * unique and said in capsys.readouterr().out


def test_too_few_questions_are_a_warning_and_none_an_error(tmp_path, capsys):
    words = Words(*[root_question("N0")] * 4)
    assert len(synthesize({"tree": tree()}, tmp_path / "few", words, 9, **ROOT, rounds=4)) == 1
    assert "8 of 9 questions are missing: all 1 seed nodes had 4 turns" in capsys.readouterr().out
    lost = Words(*[root_question("N0", words="Which node?")] * 12)
    with pytest.raises(files.RunError, match="no question; rejected drafts: 12 start node"):
        synthesize({"tree": tree()}, tmp_path / "none", lost, 9, **ROOT, rounds=4)


def test_a_graph_without_seeds_is_a_warning_beside_others_and_an_error_alone(tmp_path, capsys):
    poor = path_graph(3)
    rows = synthesize({"poor": poor, "tree": tree()}, tmp_path / "a", Template(), 3)
    assert {row["graph_type"] for row in rows} == {"tree"}
    assert "poor, kind 12: 3 of 3 questions are missing: all 0 seed nodes" in capsys.readouterr().out
    with pytest.raises(kg.GraphError, match="no graph has a seed node"):
        synthesize({"poor": poor}, tmp_path / "b", Template(), 3)
    assert not (tmp_path / "b").exists()


def test_a_folder_s_questions_are_made_once_and_anew_with_other_settings(tmp_path, monkeypatch):
    made = []

    def counted(*args, **more):
        made.append(args)
        return real(*args, **more)

    real = synthesis.synthesize
    monkeypatch.setattr(synthesis, "synthesize", counted)
    cfg = omne_r1.Config(unique=False)

    def questions(graph, cfg, count=3):
        return graph_questions.write_questions(
            tmp_path / "q", {"tree": graph}, Template(), cfg, count)

    first = questions(tree(), cfg)
    assert questions(tree(), cfg) == first and len(first) == 6 and len(made) == 1
    assert len(questions(tree(), cfg, 4)) == 8 and len(made) == 2
    assert questions(tree(width=4), cfg) != first and len(made) == 3
    questions(tree(width=4), omne_r1.replace(cfg, unique=True))
    assert len(made) == 4


# ---- kill and resume


class Killed(Exception):
    pass


def killed_after(monkeypatch, writes):
    """From now on the given number of rows is written, and half of the next."""
    add = files.Lines.add
    left = [writes]

    def write(self, row):
        left[0] -= 1
        if left[0] >= 0:
            return add(self, row)
        self.file.write(json.dumps(row)[:20])
        self.file.flush()
        raise Killed

    monkeypatch.setattr(files.Lines, "add", write)


FILES = ("questions.jsonl", "rejected.jsonl")


def test_more_questions_later_are_added_to_those_there_are(tmp_path):
    first = synthesize({"tree": tree()}, tmp_path, Template(), 4)
    both = synthesize({"tree": tree(), "other": tree(width=4)}, tmp_path, Template(), 8)
    assert len(both) == 32 and [row for row in both if row in first] == first
    assert len({row["id"] for row in both}) == 32
    at_once = synthesize({"tree": tree()}, tmp_path / "new", Template(), 8)
    assert {row["id"] for row in at_once} == {row["id"] for row in both if row["graph_type"] == "tree"}


# ---- a model behind an address


def said(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@pytest.fixture
def openai(monkeypatch, json_server):
    """openai(answer) -> a server; answer(prompt) -> text, or (status, body). server.teacher() asks it."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-7")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # which a loopback address does not take
    monkeypatch.setattr(chat_client, "START_RETRIES", 0)
    monkeypatch.setattr(chat_client, "RETRIES", 0)

    def start(answer):
        def reply(request):
            with server.lock:
                told = server.answer(request["messages"][0]["content"])
            return told if isinstance(told, tuple) else (200, said(told))

        def teacher(concurrency=8):
            asker = Teacher(f"{server.url}/v1", "r1")
            asker.concurrency = concurrency
            return asker

        server = json_server(reply)
        server.answer, server.lock, server.teacher = answer, threading.Lock(), teacher
        return server

    return start


def prompts(server):
    return [request["messages"][0]["content"] for _, _, request in server.asked]


def as_json(path, question, answer):
    return json.dumps({"path": path, "question": question, "answer": answer})


YES = '{"valid": true, "reason": "fine"}'
JUDGE = "Your task is to check"


def test_nonsense_then_a_leak_then_a_good_question_with_the_feedback_of_each(openai, tmp_path):
    verdicts = ['{"valid": false, "reason": "Too easy."}', YES]
    drafts = [
        "Of course! Here is your question.",
        as_json(["Root", "N01"], "What is below Root?", "N01"),
        as_json(["Root", "N0", "N01"], "What is below N0, below Root?", "N01"),
        as_json(["Root", "N0", "N01"], "What is two below Root?", "N01"),
        as_json(["Root", "N0", "N02"], "What comes of a child of Root?", "N02"),
    ]
    server = openai(lambda prompt: verdicts.pop(0) if JUDGE in prompt else drafts.pop(0))
    row, = synthesize({"tree": tree()}, tmp_path, server.teacher(), 1, **ROOT, attempts=5)
    assert row["golden_answer"] == "N02" and row["relations"] == ["child 0", "child 2"]
    assert rules(tmp_path) == [
        "unreadable JSON", "path not connected", "inner node named", "judge says no"]
    first, second, wrong_path, with_leak, judged, again, last = prompts(server)
    assert JUDGE in judged and JUDGE in last and "not good enough" not in first + second
    no_edge = "No edge of the graph joins 'Root' and 'N01'."
    assert f"path validity: False\nquestion feedback: {no_edge}" in wrong_path
    assert """\
previous path: ['Root', 'N0', 'N01']
previous question: What is below N0, below Root?
This is the feedback
path validity: True
question feedback: The question reveals the name of a middle node 'N0' in the path, which""" in with_leak
    assert "question feedback: Too easy.\n" in again and "N0, below Root" not in again
    assert "Path: ['Root', 'N0', 'N02']\nMulti-hop question: What comes of a child of Root?\nOutput" in last
    path, headers, request = server.asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer sk-secret-7"
    assert request.keys() == {"model", "messages"} and request["model"] == "r1"


def test_the_prompts_are_the_appendix_s():
    graph = graph_of([("Urban Farms", "perception change, urban development", "Corboy"),
                      ("Corboy", "keeps", "Bee\nhives </think>"), ("Corboy", "keeps", "Corboy")], False)
    short, long = (synthesis.generation_prompt(graph, item("Urban Farms", kind)) for kind in ("12", "3"))
    relations = """\
Relations(entity_1 - entity_2: the relation):
Urban Farms - Corboy: perception change, urban development
Corboy - Bee hives ‹/think>: keeps
Corboy - Corboy: keeps
"""
    assert short.startswith(relations + "The above is a knowledge graph where the relation between")
    assert "The length of the path is 2 or 3, which" in short and "Diamond Head Classic's MVP play" in short
    assert long.startswith(relations + "Given the knowledge graph above")
    assert "The path length should be at least 4.\n" in long
    assert long.endswith('"answer": the answer node name}\n')


def test_a_name_as_it_is_printed_is_the_graph_s(openai, tmp_path):
    graph = tree()
    networkx.relabel_nodes(graph.graph, {"N0": "Child\n</think> of it"}, copy=False)
    draft = as_json(["Root", "Child ‹/think> of it"], "What is below  Root?", "Child ‹/think> of it")
    server = openai(lambda prompt: YES if JUDGE in prompt else draft)
    row, = synthesize({"tree": graph}, tmp_path, server.teacher(), 1, **ROOT)
    assert row["path"] == ["Root", row["golden_answer"]] == ["Root", "Child\n</think> of it"]
    assert row["question"] == "What is below Root?"


@pytest.mark.parametrize("text,reason", [
    ("", "no JSON object"), ("[" * 15_000, "no JSON object"), ("[1]", "no JSON object"),
    ("null", "no JSON object"), ("Here: {path}", "no JSON object"), ('{"a":[' * 3333, "no JSON object"),
    ('{"path": ["Root"], "question": "q"}', "not a path, a question and an answer"),
    ('{"path": "Root", "question": "q", "answer": "a"}', "not a path"),
    ('{"path": [], "question": "q", "answer": "a"}', "not a path"),
    ('{"path": ["Root", 7], "question": "q", "answer": "a"}', "not a path"),
    ('{"path": ["Root", " "], "question": "q", "answer": "a"}', "not a path"),
    ("__import__('os').system('true')", "no JSON object"),
    ('{"path": ["' + "x" * 20_000 + '"]}', "more than 20,000 characters"),
])
def test_what_is_no_draft_is_named_and_bounded(text, reason):
    with pytest.raises(chat_client.BadAnswer, match=reason) as raised:
        synthesis.read_draft(text)
    assert raised.value.rule == "unreadable JSON" and len(raised.value.reason) < 400


@pytest.mark.parametrize("around", [
    "{}", "```json\n{}\n```", "Sure! Here is the JSON:\n{}\nIs it what you wanted?",
    "The path {{A, B}} is short: ```\n{}\n``` {{}}", "[{}]",
])
def test_what_is_said_around_an_answer_is_looked_past(around):
    text = around.format(as_json(["Root", "N0"], "What {of} is \"below\" Root?", "N0"))
    assert synthesis.read_draft(text) == Draft(["Root", "N0"], "What {of} is \"below\" Root?", "N0")
    assert synthesis.read_verdict(around.format(YES)) == (True, "fine")


def test_what_is_no_verdict_is_named():
    for text in ('{"valid": "true"}', '{"valid": 1}', "{}", '{"valid": true, "reason": 7}', "yes"):
        with pytest.raises(chat_client.BadAnswer) as raised:
            synthesis.read_verdict(text)
        assert raised.value.rule == "unreadable JSON"
    assert synthesis.read_verdict('{"valid": false, "reason": "a\\nb"}') == (False, "a b")


def test_half_a_character_of_the_teacher_s_can_be_written(openai, tmp_path):
    text = '{"path": ["Root", "N1\\ud800"], "question": "below Root \\ud800?", "answer": "N1"}'
    server = openai(lambda prompt: text)
    with pytest.raises(files.RunError, match="rejected drafts: 1 node not in the graph"):
        synthesize({"tree": tree()}, tmp_path, server.teacher(), 1, **ROOT, attempts=1, rounds=1)
    assert files.read_jsonl(tmp_path / "rejected.jsonl")[0]["question"] == "below Root ??"


@pytest.mark.parametrize("answer, rule, reason", [
    ((200, b'{"choices": []}'), "no answer from the teacher", "OpenAI"),
    ((200, b"[]"), "no answer from the teacher", "OpenAI"),
    ((200, said(["text"])), "no answer from the teacher", "OpenAI"),
    ((200, said(None)), "unreadable JSON", "no JSON object"),
    ("I would rather not.", "unreadable JSON", "I would rather"),
])
def test_nonsense_stops_after_thirty_and_a_better_teacher_goes_on(openai, tmp_path, answer, rule, reason):
    server = openai(lambda prompt: answer)
    with pytest.raises(files.RunError, match=f"30 unusable answers in a row.*{reason}"):
        synthesize({"tree": tree()}, tmp_path, server.teacher(concurrency=1), 90, kinds=SHORT)
    assert set(rules(tmp_path)) == {rule} and 30 <= len(server.asked) <= 32
    server.answer = good_answers
    assert len(synthesize({"tree": tree()}, tmp_path, server.teacher(), 3, kinds=SHORT)) == 3


def test_a_draft_that_can_be_read_starts_the_count_anew(openai, tmp_path, monkeypatch):
    monkeypatch.setattr(chat_client, "NEVER_READ", 3)
    answers = ["no", "no", as_json(["Root", "N0"], "What is below?", "N0")] * 4
    server = openai(lambda prompt: answers.pop(0))
    with pytest.raises(files.RunError, match="no question; rejected drafts: "):
        synthesize({"tree": tree()}, tmp_path, server.teacher(concurrency=1), 1, **ROOT, rounds=4)


def good_answers(prompt):
    """A draft from the relations of the prompt, the same for the same prompt."""
    if JUDGE in prompt:
        return '{"valid": false, "reason": "an odd end"}' if "'L3'" in prompt else YES
    head, tail, relation = re.match(r".*\n(.+) - (.+): (.+)\n", prompt).groups()
    return as_json([head, tail], f"What is the {relation} of {head}?", tail)


def test_killed_at_any_answer_no_question_is_asked_twice_and_the_rows_are_the_same(
        openai, tmp_path, monkeypatch):
    server = openai(good_answers)
    options = {"kinds": SHORT, "attempts": 2, "rounds": 2, "unique": False}
    graphs = {"path": path_graph(3, 18)}  # 20 seed nodes; each gives the same draft again in its second turn
    whole = synthesize(graphs, tmp_path / "whole", server.teacher(), 20, **options)
    assert len(whole) == 19
    assert Counter(rules(tmp_path / "whole")) == {"judge says no": 4, "duplicate": 19}
    expected = [(tmp_path / "whole" / name).read_bytes() for name in FILES]
    said_in_all = len((tmp_path / "whole/answers.jsonl").read_text().splitlines())
    assert said_in_all == len(server.asked)  # nothing was asked for in vain
    for writes in (0, 1, 30, 75):
        folder = tmp_path / str(writes)
        with monkeypatch.context() as patch:
            killed_after(patch, writes)
            with pytest.raises(Killed):
                synthesize(graphs, folder, server.teacher(concurrency=3), 20, **options)
        on_file = len((folder / "answers.jsonl").read_text().splitlines())
        half = not (folder / "answers.jsonl").read_text().endswith("\n")
        server.asked.clear()
        assert synthesize(graphs, folder, server.teacher(concurrency=3), 20, **options) == whole
        assert [(folder / name).read_bytes() for name in FILES] == expected
        assert len(server.asked) <= said_in_all - on_file + (on_file > 0) * half
    server.asked.clear()
    assert synthesize(graphs, tmp_path / "whole", server.teacher(), 20, **options) == whole
    assert server.asked == []


def test_requests_are_concurrent(openai, tmp_path):
    together = threading.Barrier(4, timeout=60)
    server = openai(good_answers)
    server.lock = contextlib.nullcontext()
    server.answer = lambda prompt: together.wait() < 4 and good_answers(prompt)
    options = {"kinds": SHORT, "only": {"tree": ["N0", "N1", "N2", "Root"]}, "rounds": 1, "unique": False}
    asker = server.teacher(concurrency=4)
    assert len(synthesize({"tree": tree()}, tmp_path, asker, 4, **options)) == 4
    assert len(server.asked) == 8


@pytest.mark.parametrize("broken", [(500, b"x"), (429, b"")])
def test_what_may_pass_is_asked_again(openai, tmp_path, monkeypatch, broken):
    monkeypatch.setattr(chat_client, "START_RETRIES", 1)
    answers = [broken]
    server = openai(lambda prompt: answers.pop() if answers else good_answers(prompt))
    assert len(synthesize({"tree": tree()}, tmp_path, server.teacher(), 1, **ROOT)) == 1
    assert rules(tmp_path) == [] and not answers


def test_a_teacher_that_is_not_there_is_one_error_and_nothing_is_lost(openai, tmp_path):
    refused = "refused.*the same command again"
    for url, said in (("http://127.0.0.1:9/v1", refused), ("nowhere", "no address")):
        with pytest.raises(files.RunError, match=f"--teacher.*{said}"):
            synthesize({"tree": tree()}, tmp_path, Teacher(url, "r1"), 2)
    assert synthesize({"tree": tree()}, tmp_path, openai(good_answers).teacher(), 2, kinds=SHORT)


# ---- real graphs


@pytest.mark.parametrize("source,options", [
    ("lightrag_graph/christmas_carol", {}),
    ("lightrag_graph/ultradomain_mix", {}),
    # every ball of this graph has more than 400 nodes
    ("wikidata_codex/codex-s_train.txt",
     {"only": {"g": ["Q44519", "Q49734", "Q104668", "Q311450"]}, "unique": False}),
])
def test_questions_of_real_graphs_hold_and_say_what_was_rejected(tmp_path, source, options):
    """Checked without the code that made them."""
    graph = kg_files.load_graph(sample(source))
    rows = synthesize({"g": graph}, tmp_path, Template(), 30, **options)
    for row in rows:
        path, relations = row["path"], row["relations"]
        assert row["hops"] == len(path) - 1 == len(relations) and path[-1] == row["golden_answer"]
        assert len(path) in {"12": (2, 3), "3": (4, 5, 6)}[row["kind"]]
        for head, relation, tail in zip(path, relations, path[1:]):
            assert (head, relation, tail) in graph.facts(head)
        assert row["question"].endswith(f" of {' '.join(path[0].split())}?") and path[0] == row["seed_node"]
    assert len(rows) >= 40 and "path too short" in rules(tmp_path)
