"""Every public format of real samples, and one clear error for each kind of bad record."""

import copy
import csv
import gzip
import io
import json
import re
import sys
import types

import pyarrow.parquet
import pytest

from common import chat, data, files, formats, metrics
from common.formats import fingerprint
from tests.conftest import sample, write

GOOD = {"question": "Who?", "answer": "Ada"}


def one(row):
    """The Question of a record."""
    return data.load_questions([row])[0]


def error_of(load, *args, **kwargs):
    with pytest.raises(data.DataError) as caught:
        load(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- real files

@pytest.mark.parametrize("name, n, hops, context", [
    ("hotpotqa/dev_distractor.json", 94, {2}, 10),
    ("hotpotqa/train.json", 54, {2}, 2),
    ("hotpotqa/dev_distractor_hf.json", 39, {2}, 2),
    ("2wikimultihopqa/dev.json", 89, {2, 4}, 10),
    ("musique/dev.jsonl", 94, {2, 3, 4}, 20),
    ("hotpotqa/dev_qa_only.jsonl", 237, {0}, 0),
    ("triviaqa/test.jsonl", 300, {0}, 0),
    ("popqa/test.jsonl", 300, {0}, 0),
    ("bamboogle/test.csv", 64, {0}, 0),
    ("rl_formats/arpo_valid.parquet", 88, {0}, 0)])
def test_real_files(name, n, hops, context):
    questions = data.load_questions(sample(name))
    assert len(questions) == n and len({q.id for q in questions}) == n
    assert all(q.question and q.answers for q in questions)
    assert all(isinstance(a, str) and a for q in questions for a in q.answers)
    assert hops <= {q.hops for q in questions} and (0 in hops or all(q.hops for q in questions))
    assert all(len(q.context) >= min(context, 2) for q in questions)
    if context:  # every gold fact points into the context
        facts = [(q, title) for q in questions for title, _ in q.supporting_facts]
        assert len(facts) > n and all(title in dict(q.context) for q, title in facts)
    assert len(data.load_questions(sample(name), limit=7)) == 7
    assert name != "musique/dev.jsonl" or any(len(q.answers) > 1 for q in questions)
    if name == "2wikimultihopqa/dev.json":
        assert {"comparison", "compositional"} <= {q.type for q in questions}


def test_corpora():
    rows = data.load_corpus(sample("rl_formats/search_r1_corpus.jsonl"))
    assert len(rows) == 10 and rows[0]["title"] == "Evan Morris"
    assert rows[0]["text"].startswith("Evan Morris Evan L.")
    assert len(data.load_corpus(sample("2wikimultihopqa/corpus.json"))) == 3060
    pooled = data.pool_contexts(data.load_questions(sample("hotpotqa/dev_distractor.json")))
    assert 800 < len(pooled) <= 940 and pooled[0]["text"]


def test_popqa_in_its_own_layout():
    popqa = data.load_questions(sample("popqa/popqa_paragraphs.json"))
    assert len(popqa) == 80
    assert popqa[0].answers == ["cartoonist", "graphic artist", "animator", "illustrator"]
    assert popqa[0].context[0][0] == "Eleanor Davis" and popqa[0].supporting_facts[0] == ["Eleanor Davis", 0]


# ---------------------------------------------------------------- hub names and roles

@pytest.fixture
def loads(monkeypatch):
    """The arguments of every datasets.load_dataset; the hub has every set."""
    calls = []

    def load_dataset(name, config=None, split=None, **_):
        calls.append((name, config, split))
        return [GOOD]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(data, "locate", lambda name, kind="model": name)
    return calls


FLASHRAG, SEARCH_R1 = "RUC-NLPIR/FlashRAG_datasets", "PeterJinGo/nq_hotpotqa_train"


@pytest.mark.parametrize("source, train, evaluation", [
    *((name, (FLASHRAG, name, "train"), (FLASHRAG, name, "test")) for name in ("nq", "triviaqa")),
    *((name, (FLASHRAG, name, "train"), (FLASHRAG, name, "dev")) for name in ("hotpotqa", "musique")),
    ("2wiki", (FLASHRAG, "2wikimultihopqa", "train"), (FLASHRAG, "2wikimultihopqa", "dev")),
    ("nq-train", (FLASHRAG, "nq", "train"), (FLASHRAG, "nq", "train")),
    ("search-r1", (SEARCH_R1, None, "train"), (SEARCH_R1, None, "test")),
    ("search-r1-train", (SEARCH_R1, None, "train"), (SEARCH_R1, None, "train")),
    *((name, f"{name} has no train split, only test", (FLASHRAG, name, "test"))
      for name in ("popqa", "bamboogle")),
    ("nq-test", "not a training split, but one to evaluate on; train on nq, triviaqa, hotpotqa",
     (FLASHRAG, "nq", "test")),
    ("hotpotqa-dev", "not a training split", (FLASHRAG, "hotpotqa", "dev")),
    ("popqa-test", "not a training split", (FLASHRAG, "popqa", "test")),
    ("hotpotqa-test", "hotpotqa has no test split", "hotpotqa has no test split, only train, dev"),
    ("popqa-train", "popqa has no train split, only test", "popqa has no train split, only test"),
    # a hub id in full is taken as it is
    ("a/b:c:validation", ("a/b", "c", "validation"), ("a/b", "c", "validation")),
    ("a/b:c", ("a/b", "c", "train"), ("a/b", "c", "test")),
    ("a/b::test", ("a/b", None, "test"), ("a/b", None, "test"))])
def test_a_name_is_its_training_split_for_training_only(loads, source, train, evaluation):
    for role, wanted in (("train", train), ("evaluation", evaluation)):
        loads.clear()
        if isinstance(wanted, str):
            assert wanted in error_of(data.load_questions, source, role=role) and not loads
        else:
            data.load_questions(source, role=role)
            assert loads == [wanted]


def test_what_the_hub_says_of_a_name_becomes_one_line(loads, monkeypatch):
    def refuse(name, kind):
        raise files.HubError(f"{name}: the hub has no such {kind}, or it is private")

    def lacks(*_, **__):
        raise ValueError("Unknown split \"test\". Should be one of ['train'].\nsecond line")

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["datasets"], "load_dataset", lacks)
        message = error_of(data.load_questions, "a/b")
        assert 'did not load (ValueError: Unknown split "test"' in message and "config[:split]" in message
    monkeypatch.setattr(data, "locate", refuse)
    message = error_of(data.load_questions, "nobody/nothing")
    assert "split test did not load (HubError: nobody/nothing" in message and "a file (.json" in message
    monkeypatch.setattr(data, "locate", lambda *_: pytest.fail("the hub was asked"))
    for name in ("hotpotqe", "my/own/questions"):  # what is no name of the hub
        message = error_of(data.load_questions, name)
        assert f"{name}: no such file here. Give --data or" in message
        assert "nq, triviaqa, popqa, hot" in message
    assert not loads


# ---------------------------------------------------------------- gold answers

@pytest.mark.parametrize("answer, golds", [
    ({"value": "Ada", "aliases": ["A. H.", "Ada"], "normalized_aliases": ["ada"]}, ["Ada", "A. H."]),
    ({"Value": "Ada", "Aliases": []}, ["Ada"]),
    ('["Ada", "it\'s"]', ["Ada", "it's"]),
    ("[REC]", ["[REC]"]),
    ("[1, 2]", ["1", "2"]),
    (1984, ["1984"]), (1984.0, ["1984"]), (2.5, ["2.5"]), ([3.0, "three"], ["3", "three"]),
    (True, ["yes"]), (False, ["no"]), ([True], ["yes"]),
    (["Ada", None, " "], ["Ada"]),
    (["The The", "!!!", "Matt Johnson"], ["Matt Johnson"]),
    ("C++", ["C++"])])
def test_a_gold_answer_is_what_its_layout_means_by_it(answer, golds):
    assert one({"question": "Who?", "answer": answer}).answers == golds


@pytest.mark.parametrize("answer", [
    float("nan"), float("inf"), {}, [[]], {"a": {"b": "c d"}}, {"value": None}, ["['Ada', 'A. H.']"],
    {"value": "<unk>", "aliases": []}, "['Ada' 'Bea']", "['Ada', 'Bea']", "[]", b"Ada", {"text": ["Ada"]},
    "{'target': ['Ada']}", '{"name": "Ada"}', "{}"])
def test_an_answer_that_cannot_be_compared_is_an_error_naming_the_field(answer):
    row = {"question": "Who?", "answer": answer}
    assert "records: record 1: field 'answer" in error_of(data.load_questions, [row])
    assert len(data.load_questions([row, GOOD], skip_bad=True)) == 1


@pytest.mark.parametrize("answer", ["!!!", "The The", ["?", ")"], "\ud800"])
def test_an_answer_without_a_word_is_left_out_of_training_and_told(tmp_path, answer, capsys):
    path = write(tmp_path / "q.jsonl", [{"question": "Who?", "answer": answer}, GOOD])
    for role, n, fate in (("train", 1, "left out"), ("evaluation", 2, "kept")):
        assert len(data.load_questions(path, role=role)) == n
        said = capsys.readouterr().err
        assert f"{fate}: 1 whose answer" in said and "would be right; the first: record 1\n" in said


# ---------------------------------------------------------------- golds: JSON in text, several fields

OBJECT = '{"target": ["Ada", "A. H."]}'


@pytest.mark.parametrize("row, golds", [
    ({"answer": OBJECT}, ["Ada", "A. H."]),
    ({"answer": ' {"value": "Ada", "aliases": ["A. H."]} '}, ["Ada", "A. H."]),
    ({"answer": {"target": '["Ada", "A. H."]'}}, ["Ada", "A. H."]),
    ({"answers": ["Ada", '{"target": "A. H."}']}, ["Ada", "A. H."]),
    ({"golden_answers": '["Ada", 7]'}, ["Ada", "7"]),
    ({"answer": "Ada", "aliases": '["A. H."]'}, ["Ada", "A. H."]),
    ({"answer": "{x | x > 3}"}, ["{x | x > 3}"]),
    ({"answer": '{"target": "Ada"'}, ['{"target": "Ada"']),  # a text, as it is not closed
    ({"answer": "Ada", "answers": ["Ada", "A. H."]}, ["Ada", "A. H."]),
    ({"answers": ["A. H.", "Ada"], "answer": "Ada"}, ["Ada", "A. H."]),
    ({"golden_answers": ["Ada"], "answer_aliases": ["A. H."], "aliases": ["B"]}, ["Ada", "A. H.", "B"]),
    ({"Answer": "Ada", "ALIASES": ["A. H."]}, ["Ada", "A. H."]),
    ({"answer": None, "answers": ["Ada"]}, ["Ada"]),
    ({"possible_answers": '["Ada", "A. H."]', "obj": "Ada"}, ["Ada", "A. H."])])
def test_golds_of_all_fields_stand_together_and_those_in_json_are_read(row, golds):
    q = one({"question": "Who?"} | row)
    assert (q.question, q.answers, q.context) == ("Who?", golds, [])
    verl = {"question": "Who?", "reward_model": {"ground_truth": golds[0]}} | row
    assert sorted(one(verl).answers) == sorted(golds)


@pytest.mark.parametrize("truth", [
    OBJECT, '["Ada", "A. H."]', {"target": '["Ada", "A. H."]'}, {"target": [OBJECT]},
    {"Target": "Ada", "aliases": ["A. H."]}])
def test_a_ground_truth_is_the_same_as_text_and_as_an_object(truth):
    row = {"prompt": [{"role": "user", "content": "who?"}], "reward_model": {"ground_truth": truth}}
    assert one(row).answers == ["Ada", "A. H."]
    as_text = {name: json.dumps(value) for name, value in row.items()}
    assert (one(as_text).question, one(as_text).answers) == ("who?", ["Ada", "A. H."])


def test_the_question_apart_from_the_words_around_it_wins():
    row = {
        "prompt": [{"role": "user", "content": "Question: Who wrote it?\nThink step by step."}],
        "reward_model": {"ground_truth": "Ada"}, "extra_info": {"index": 3, "question": "Who wrote it?"}}
    assert one(row).question == "Who wrote it?"
    assert one(row | {"extra_info": json.dumps(row["extra_info"])}).question == "Who wrote it?"
    assert one(row | {"question": "Who?"}).question == "Who?"


# ---------------------------------------------------------------- contexts, evidence, ids

def test_a_passage_of_one_string_is_one_sentence_and_not_its_characters():
    assert one(GOOD | {"context": [["T", "One sentence."]]}).context == [["T", ["One sentence."]]]
    hub_layout = {"title": ["T", "U"], "sentences": ["One sentence.", ["Two.", "Three."]]}
    wanted = [["T", ["One sentence."]], ["U", ["Two.", "Three."]]]
    assert one(GOOD | {"context": hub_layout}).context == wanted
    assert one(GOOD | {"context": ""}).context == []


def test_2wiki_in_the_hubs_layout():
    names = "type", "supporting_facts", "context", "evidences"
    meta = {name: LAYOUTS["2wiki hub"][name] for name in names}
    q = one({"id": "x", "question": "Who?", "golden_answers": ["Ada"], "metadata": meta})
    assert (q.context, q.evidences) == ([["T", ["One.", "Two."]]], [["Ada", "mother", "Bea"]])
    assert (q.supporting_facts, q.type, q.hops) == ([["T", 0]], "comparison", 1)


def test_musique_keeps_its_decomposition():
    raw = [json.loads(line) for line in sample("musique/dev.jsonl").read_text(encoding="utf-8").splitlines()]
    for q, row in zip(data.load_questions(sample("musique/dev.jsonl")), raw, strict=True):
        kept = ("question", "answer", "paragraph_support_idx")
        steps = [{k: step[k] for k in kept} for step in row["question_decomposition"]]
        assert q.decomposition == steps and q.hops == len(steps)
        assert q.support_paragraphs == [p["idx"] for p in row["paragraphs"] if p["is_supporting"]]
        assert len(q.supporting_facts) == len(q.support_paragraphs)  # two paragraphs of one title are two


def test_musique_of_flashrag_has_the_paragraphs_that_its_steps_rest_on():
    def step(question, answer, idx):
        paragraph = PARAGRAPH | {"idx": idx}
        return {"id": idx, "question": question, "answer": answer, "support_paragraph": paragraph}

    steps = [step("Who owns it?", "Bea", 3), step("Where is #1?", "Ulm", 11)]
    q = one({
        "question": "Where?", "golden_answers": ["Ulm"],
        "metadata": {"answerable": True, "question_decomposition": steps}})
    assert (q.hops, q.support_paragraphs, q.context) == (2, [3, 11], [["T", ["One sentence."]]] * 2)
    assert q.decomposition[1] == {"question": "Where is #1?", "answer": "Ulm", "paragraph_support_idx": 11}


def test_a_context_beside_a_decomposition_and_facts_beside_paragraphs_are_kept_once():
    both = GOOD | {
        "context": [["T", ["One."]]], "supporting_facts": [["T", 0]], "question_decomposition": [STEP]}
    assert (one(both).context, one(both).supporting_facts) == ([["T", ["One."]]], [["T", 0]])
    assert one(both | {"paragraphs": [PARAGRAPH]}).supporting_facts == [["T", 0]]


def test_repeated_ids_are_told_apart():
    def ids(*given):
        return [q.id for q in data.load_questions([GOOD | {"id": i} for i in given])]

    x = f"x-{fingerprint(GOOD['question'])}"
    assert ids("x", "y", "x", "x") == [x, "y", f"{x}#2", f"{x}#3"]
    assert len(set(ids("a", "a", "a#2", "a#2"))) == 4
    assert ids(0, 1) == ["0", "1"]  # 0 is an id like any other


def test_a_question_has_one_id_wherever_it_stands_in_the_file():
    def ids(rows):
        return {q.question: q.id for q in data.load_questions(rows)}

    bare = [{"question": f"Who made the Hill {i}?", "answer": "Ada"} for i in range(6)]
    verl = [{"prompt": [{"content": q["question"]}], "reward_model": {"ground_truth": "Ada"}} for q in bare]
    qald = [row | {"qid_topic_entity": {}, "answer": {"Q1": "Ada"}} for row in bare]
    twice = [row | {"id": i % 2} for i, row in enumerate(bare)]  # two files, each counted from 0
    for rows in (bare, verl, qald, twice):
        first = ids(rows)
        assert len(set(first.values())) == 6
        assert ids(rows[::-1]) == ids([*rows[3:], *rows[:3]]) == first
    assert ids(bare) == ids(verl) == ids(qald)
    again = [q.id for q in data.load_questions([*bare, {"question": "who made hill 0", "answer": "Bo"}])]
    assert again[6] == f"{again[0]}#2"


# ---------------------------------------------------------------- mutations

PARAGRAPH = {"idx": 4, "title": "T", "paragraph_text": "One sentence.", "is_supporting": True}
STEP = {"id": 1, "question": "Who?", "answer": "Ada", "paragraph_support_idx": 4}
LAYOUTS = {
    "hotpotqa": {
        "_id": "x", "question": "Who?", "answer": "Ada", "type": "bridge", "level": "hard",
        "supporting_facts": [["T", 0]], "context": [["T", ["One.", "Two."]]]},
    "2wiki": {
        "_id": "x", "question": "Who?", "answer": "Ada", "type": "comparison", "supporting_facts": [["T", 0]],
        "context": [["T", ["One."]]], "evidences": [["Ada", "mother", "Bea"]],
        "evidences_id": [["Q1", "mother", "Q2"]], "answer_id": "Q1", "entity_ids": "Q1_Q2"},
    "2wiki hub": {
        "id": "x", "question": "Who?", "answer": "Ada", "type": "comparison",
        "supporting_facts": {"title": ["T"], "sent_id": [0]},
        "context": {"title": ["T"], "content": [["One.", "Two."]]},
        "evidences": {"fact": ["Ada"], "relation": ["mother"], "entity": ["Bea"]}},
    "musique": {
        "id": "2hop__1_2", "question": "Who?", "answer": "Ada", "answer_aliases": ["A. H."],
        "answerable": True, "paragraphs": [PARAGRAPH], "question_decomposition": [STEP]},
    "flashrag": {
        "id": "dev_0", "question": "Who?", "golden_answers": ["Ada", "A. H."], "metadata": {
            "type": "bridge", "hops": 2, "context": {"title": ["T"], "sentences": [["One.", "Two."]]},
            "supporting_facts": {"title": ["T"], "sent_id": [0]}}},
    "musique of flashrag": {
        "id": "dev_0", "question": "Who?", "golden_answers": ["Ada"], "metadata": {"question_decomposition": [
            {"question": "Who?", "answer": "Ada", "support_paragraph": PARAGRAPH}]}},
    "nq-open": {"question": "who?", "answer": ["Ada", "A. H."]},
    "search-r1": {
        "data_source": "nq", "prompt": [{"role": "user", "content": "Answer. Question: who?\n"}],
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada"]}}, "ability": "qa",
        "extra_info": {"split": "train", "index": 0}},
    "verl": {"question": "who?", "reward_model": {"style": "rule", "ground_truth": "Ada"}, "id": "x"},
    "tog": {"question": "Who?", "answer": {"Q7": "Ada"}, "sparql": "…", "qid_topic_entity": {"Q1": "Bea"}},
    "triviaqa hub": {
        "question_id": "tc_1", "question": "Who?",
        "answer": {"value": "Ada", "aliases": ["A. H."], "normalized_value": "ada"}},
    "popqa": {"id": 4, "question": "Who?", "possible_answers": '["Ada", "A. H."]', "obj": "Ada"}}


def paths(value, path=()):
    """Every path into nested lists and objects, the root left out."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in inner:
        yield (*path, key)
        yield from paths(child, (*path, key))


def mutations(record):
    """(path, what was done, the record after it): each path deleted, null, and of each other type."""
    others = (
        None, True, 7, 1.5, float("nan"), "", "text", [], [[]], ["text"], [None], {}, {"k": 1}, [{"k": 1}])
    for path in paths(record):
        for new in ("delete", *others):
            changed = copy.deepcopy(record)
            place = changed
            for key in path[:-1]:
                place = place[key]
            if new == "delete":
                del place[path[-1]]
            else:
                place[path[-1]] = copy.deepcopy(new)
            yield path, new, changed


def assert_well_typed(q):
    def texts(*values):
        return all(type(v) is str for v in values)

    assert texts(q.id, q.question, q.type) and q.question.strip() and type(q.hops) is int
    assert q.answers and texts(*q.answers) and all(a.strip() for a in q.answers)
    assert not metrics.exact_match("", q.answers)
    for title, sentences in q.context:
        assert texts(title, *sentences) and type(sentences) is list
    for title, index in q.supporting_facts:
        assert texts(title) and type(index) is int
    for triple in q.evidences:
        assert type(triple) is list and len(triple) == 3 and texts(*triple)
    for name, identity in q.entities:
        assert texts(name, identity)
    for step in q.decomposition:
        assert texts(step["question"], step["answer"])
        assert type(step["paragraph_support_idx"]) in (int, type(None))
    assert all(type(i) is int for i in q.support_paragraphs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_damaged_record_is_an_error_with_record_and_field_or_a_well_typed_question(layout):
    assert_well_typed(one(LAYOUTS[layout]))
    tried = 0
    for path, new, record in mutations(LAYOUTS[layout]):
        where, tried = f"{path} -> {new!r}", tried + 1
        try:
            assert_well_typed(one(record))
        except data.DataError as error:
            assert str(error).startswith("records: record 1: field '"), f"{where}: {error}"
            assert len(data.load_questions([record, GOOD], skip_bad=True)) == 1, where
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    assert tried > 40


# ---------------------------------------------------------------- files

FINE = json.dumps(GOOD).encode()
BAD = [  # records in the second line
    (b'{"question": "q"}\n', "field 'answer' is missing"),
    (b'{"question": "q", "golden_answers": []}\n', "field 'golden_answers' is empty"),
    (b'{"question": " ", "answer": "Ada"}\n', "field 'question': expected text"),
    (b"[1, 2]\n", "expected an object, got a list"),
    (b'{"question": "q", "answer": "Ada", "paragraphs": [null]}\n', "field 'paragraphs'"),
    (b'{"question": "q", "answer": "\xff"}\n', "'utf-8' codec can't decode byte 0xff"),
    (b'{"question": "q", "ans\n', "not valid JSON"), (b'{"question": "q", "ans', "not valid JSON"),
    *((json.dumps(GOOD | more).encode(), f"field '{field}'") for more, field in (
        ({"evidences": [["a", "b"]]}, "evidences"), ({"hops": "two"}, "hops"),
        ({"supporting_facts": [["t", float("inf")]]}, "supporting_facts")))]


@pytest.mark.parametrize("name, content, message", [
    *(("q.jsonl", FINE + b"\n" + bad, f"record 2: {message}") for bad, message in BAD),
    ("q.jsonl", b'{"question": \n' + FINE, "record 1: not valid JSON"),
    ("q.csv", b"question,answer\nWho, if not she?,Ada\nWho?,Ada,,\n",
     "record 1: more cells than the 2 of the header")])
def test_a_bad_record_is_named_and_can_be_skipped(tmp_path, capsys, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    assert f"{name}: {message}" in error_of(data.load_questions, path)
    assert len(data.load_questions(path, skip_bad=True)) == 1
    assert "skipped 1 bad records" in capsys.readouterr().err


@pytest.mark.parametrize("name, content, message", [
    ("q.json", b'[{"question": "q",]', "q.json: not valid JSON: .* line 1"),
    ("q.json", b'{\n "question": "q",\n]', "q.json: not valid JSON: .* line 3"),
    ("q.jsonl", b'{"question": \n', "record 1: not valid JSON"),
    ("q.json", b"\xff\xfe\x00bad", "'utf-8' codec can't"), ("q.json", b"", "not valid JSON"),
    ("q.jsonl", b"", "no questions in it"),
    ("q.csv", b"question,answer\nWho?,Ada\nWhere?,Gen\xe8ve\n", "q.csv: not UTF-8 text"),
    ("q.parquet", b"not parquet", "not a parquet file"),
    ("q.jsonl.gz", b"\x1f\x8bnot gzip", "damaged gzip file"),
    ("q.jsonl.gz", gzip.compress(b'{"question": "q"}' * 99, mtime=0)[:-9], "damaged gzip file"),
    ("q.txt", b"who? Ada", "q.txt: .* formats that can be read: .json, .jsonl, .csv, .tsv or .parquet"),
    ("q.csv", b'question,answer\n"Sea" is what?,b\nc,d\n', "q.csv: not a table: line "),
    ("q.csv", b'question,answer\na,b\n"Sea is what?,b\nc,d\n', "q.csv: not a table: line "),
    *(("q.json", odd, "q.json") for odd in (
        b'{"dataset": {}}', b'{"dataset": {}, "questions": null}', b"[" * 100_000, b"5",
        b'[{"question": "a", "answer": ' + b"9" * 5000 + b"}]")),
    ("missing.json", None, "no such file"), ("missing.jsonl.gz", None, "no such file"),
    (".", None, "is a folder"),
    ("c.jsonl", b"", "the corpus is empty"),
    ("c.jsonl", b'{"id": 3}\n', "c.jsonl: record 1: expected id and contents"),
    ("c.jsonl", b'{"contents": 3}\n', "record 1: field 'contents': expected text"),
    ("c.jsonl", b'{"title": [], "text": "x"}\n', "record 1: field 'title': expected"),
    ("c.json", b'["x"]', "c.json: record 1: expected id and contents"),
    ("c.jsonl", b'{"text": "x"}\n{"te', "c.jsonl: record 2: not valid JSON")])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, name, content, message):
    load = data.load_corpus if name.startswith("c.") else data.load_questions
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert re.search(message, error_of(load, tmp_path / name))


def test_parquet_with_damaged_pages_is_a_data_error(tmp_path):
    path = tmp_path / "q.parquet"
    rows = [{"question": f"Who is number {i}?", "answer": f"Ada {i}"} for i in range(500)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, compression="gzip")
    assert len(data.load_questions(path)) == 500
    raw = bytearray(path.read_bytes())
    raw[40:400] = bytes(b ^ 255 for b in raw[40:400])
    path.write_bytes(raw)
    assert "q.parquet: not a parquet file, or a damaged one" in error_of(data.load_questions, path)


def test_every_form_of_file_gives_the_same_questions_compressed_or_not(tmp_path):
    rows = [GOOD, {"question": "Two\n\tlines?", "answer": "Bea, Céline"},
            {"question": "one\u2028line?", "answer": "b\n\tc\n"}]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    forms = {
        "a.jsonl": lines, "a.json": json.dumps(rows), "b.json": lines, "c.json": json.dumps(rows, indent=2),
        "d.json": json.dumps({"data": rows}, indent=2), "e.json": json.dumps({"data": rows}),
        "f.json": json.dumps({"version": 1, "questions": rows})}
    text = io.StringIO()
    csv.writer(text).writerows([GOOD.keys(), *(row.values() for row in rows)])
    forms["a.csv"] = text.getvalue()
    contents = {name: text.encode() for name, text in forms.items()}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    contents["a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    wanted = [(row["question"], [row["answer"]]) for row in rows]
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        for path in (tmp_path / name, tmp_path / f"{name}.gz"):
            assert [(q.question, q.answers) for q in data.load_questions(path)] == wanted, path
    (tmp_path / "one.json").write_text(json.dumps(GOOD, indent=2))
    assert len(data.load_questions(tmp_path / "one.json")) == 1


QUESTIONS = [("Who wrote Sea?", "Bo"), ('"Sea" is by whom?', "Bo"), ('"To be or not is from?', "Hamlet"),
             ("Where is Oslo?", "Norway"), ('What is "Sea"?', "novel"), ('"Sea"', '"a novel'), ("It?", 'so"')]


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("begin", ["", "\ufeff"])
@pytest.mark.parametrize("rows", [QUESTIONS, QUESTIONS[:2], QUESTIONS[2:5], QUESTIONS[5:]])
def test_quotes_that_are_text_do_not_swallow_lines_of_a_tsv(tmp_path, newline, begin, rows):
    lines = ["question\tanswer", *("\t".join(row) for row in rows), ""]
    (tmp_path / "q.tsv").write_text(begin + newline.join(lines), encoding="utf-8", newline="")
    read = data.load_questions(tmp_path / "q.tsv")
    assert [(q.question, *q.answers) for q in read] == rows


@pytest.mark.parametrize("header, sep", [("Ask;Reply", ";"), ("Ask,Reply", ","), ("Ask\tReply", "\t")])
def test_a_table_s_columns_go_by_name_or_the_message_names_them(header, sep, tmp_path):
    table = tmp_path / ("q.tsv" if sep == "\t" else "q.csv")
    table.write_bytes(b"\xef\xbb\xbf" + sep.join(["No.", "ANSWER", "Question"]).encode()
                      + sep.join(["\r\n1", '"Oslo"', '"Where, to; the north?"\r\n']).encode())
    [question] = data.load_questions(table)
    assert (question.question, question.answers) == ("Where, to; the north?", ["Oslo"])
    table.write_text(f"{header}\n" + 3 * f"Where?{sep}Oslo\n")
    for skip_bad in (False, True):
        said = error_of(data.load_questions, table, skip_bad=skip_bad)
        assert "'question' is missing: there are 'Ask', 'Reply'; rename to question and answer" in said
        assert said.count("missing") == 1 and "\n" not in said
    table.write_text(f"question{sep}Reply\nWhere?{sep}Oslo\n")
    assert "'answer' is missing: there are 'question', 'Reply'" in error_of(data.load_questions, table)


@pytest.mark.parametrize("name", ["q.csv", "q.tsv"])
def test_a_cell_is_what_json_has_for_it(tmp_path, name):
    cells = ["1984.0", "True", "false", "-7.0", "2.5", "1984.05", "True story", "7"]
    delimiter = "\t" if name == "q.tsv" else ","
    lines = [f"{i}.0{delimiter}True?{delimiter}{cell}\n" for i, cell in enumerate(cells)]
    (tmp_path / name).write_text(f"id{delimiter}Question{delimiter}Answer\n" + "".join(lines))
    questions = data.load_questions(tmp_path / name)
    assert [q.answers for q in questions] == [
        ["1984"], ["yes"], ["no"], ["-7"], ["2.5"], ["1984.05"], ["True story"], ["7"]]
    assert [q.question for q in questions] == ["True?"] * 8 and questions[3].id == "3"


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("form, of_the_hub", [
    ("c.parquet", []), ("owner/name", ["owner/name", None, "train"]),
    ("owner/name:config:dev", ["owner/name", "config", "dev"])])
def test_corpora_of_datasets_and_of_the_hub(tmp_path, monkeypatch, form, of_the_hub, mapped):
    import datasets
    monkeypatch.setattr(data, "MEMORY_MAP_FROM", 0 if mapped else 200e6)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    table, asked = datasets.Dataset.from_list(ROWS), []
    monkeypatch.setattr(data, "locate", lambda name, kind: name)
    monkeypatch.setattr(datasets, "load_dataset", lambda *of, split: asked.append([*of, split]) or table)
    source = form
    if not of_the_hub:
        source = tmp_path / form
        table.to_parquet(source)
    made = [data.load_corpus(source) for _ in range(2)]
    assert len(made[0]) == 40 and made[0][7] == {"id": "7", "title": "Title 7", "text": "Text 7."}
    assert isinstance(made[0], list) is not mapped
    assert not mapped or made[0]._fingerprint == made[1]._fingerprint
    assert asked == [of_the_hub] * 2 or asked == of_the_hub == []


def test_folders_and_names_that_are_no_corpus_are_one_line(tmp_path):
    for source, said in ((str(tmp_path), f"common.corpus {tmp_path} corpus.jsonl"),
                         ("./no/such", "no such file"), ("nothing.jsonl", "no such file")):
        assert said in error_of(data.load_corpus, source)


def test_parquet_is_read_in_pieces(tmp_path, monkeypatch):
    file = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"text": str(i)} for i in range(50_000)]), file)
    monkeypatch.setattr(pyarrow.parquet, "read_table", lambda *of: pytest.fail("read whole"))
    rows = data.read_records(file)
    assert next(rows) == (1, {"text": "0"}) and sum(1 for _ in rows) == 49_999


ROWS = [{"id": str(i), "contents": f'"Title {i}"\nText {i}.'} for i in range(40)]
OF_TWO_LAYOUTS = [{"id": i, "title": "1984", "text": f"Year {i}."} for i in range(20)] + ROWS[20:]
AS_LINES = {
    "ids of two types": [row | {"id": i if i < 20 else f"p{i}"} for i, row in enumerate(ROWS)],
    "no ids": [{"contents": row["contents"]} for row in ROWS], "two layouts": OF_TWO_LAYOUTS,
    "dates as titles": [{"id": str(i), "title": f"2001-01-0{1 + i % 9}", "text": f"x{i}"} for i in range(40)],
    "times as ids": [row | {"id": "2001-01-01 00:00:00"} for row in ROWS],
    "half a character": [row | {"contents": f"{row['id']} \ud800."} for row in ROWS],
    "other columns": [row | {"year": i if i < 20 else "?"} for i, row in enumerate(ROWS)]}


def small_and_large(file, monkeypatch, **options):
    """What the reader of small files and that of large ones make of a corpus: rows, or an error's text."""
    made = []
    monkeypatch.setenv("HF_DATASETS_CACHE", str(file.parent / "cache"))
    for limit in (200e6, 0):
        monkeypatch.setattr(data, "MEMORY_MAP_FROM", limit)
        try:
            rows = data.load_corpus(file, **options)
            assert isinstance(rows, list) == (limit > 0)
            made.append([dict(row) for row in rows])
        except data.DataError as error:
            made.append(str(error))
    return made


@pytest.mark.parametrize("name", AS_LINES)
def test_a_large_corpus_has_the_texts_of_a_small_one(tmp_path, monkeypatch, name):
    file = write(tmp_path / "q.jsonl", AS_LINES[name])
    small, large = small_and_large(file, monkeypatch)
    assert small == large and len(small) == len(AS_LINES[name])
    assert all(isinstance(value, str) for row in large for value in row.values())


DPR = 'id\ttext\ttitle\n1\t"Aaron said ""no"". He\tleft."\tAaron\n2\tA year.\t1984\n3\tNot known.\tNA\n'


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name, text, rows, last", [
    ("e.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, ROWS)), 40, "Text 39."),
    ("psgs.tsv", DPR, 3, "Not known.")])
def test_a_large_corpus_is_read_in_the_forms_of_a_small_one(tmp_path, monkeypatch, name, text, rows, last,
                                                            packed):
    file = tmp_path / (f"{name}.gz" if packed else name)
    file.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    small, large = small_and_large(file, monkeypatch)
    assert small == large and len(small) == rows and small[-1]["text"] == last
    if name == "psgs.tsv":
        assert small[:2] == [{"id": "1", "title": "Aaron", "text": 'Aaron said "no". He\tleft.'},
                             {"id": "2", "title": "1984", "text": "A year."}]


@pytest.mark.parametrize("name, bad", [
    ("a.jsonl", b'{"id": "60", "contents": "cut \n'), ("b.jsonl", b'{"id": "60"}\n'),
    ("c.jsonl", b'{"contents": "Gen\xe8ve"}\n'), ("d.jsonl.gz", b'{"id": "60", "cont\n')])
def test_a_bad_line_of_a_corpus_is_named_or_left_out_whatever_its_size(tmp_path, monkeypatch, capfd, name,
                                                                       bad):
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    content = b"".join([*lines[:20], b"\n", bad, *lines[20:], bad])
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    small, large = small_and_large(file, monkeypatch)
    assert small == large and f"{name}: record 22: " in small
    assert small.endswith("(--skip-bad leaves such records out)")
    small, large = small_and_large(file, monkeypatch, skip_bad=True)
    assert small == large and [row["id"] for row in small] == [row["id"] for row in ROWS]
    small_and_large(file, monkeypatch, skip_bad=True)  # the large one from its cache
    assert capfd.readouterr().err.count(f"{name}: skipped 2 bad records") == 3  # the cached one not again


def test_a_large_corpus_that_is_damaged_or_changed_is_noticed(tmp_path, monkeypatch):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(gzip.compress(json.dumps(ROWS[0]).encode() * 99)[:-9])
    small, large = small_and_large(file, monkeypatch)
    assert small == large and "a.jsonl.gz: damaged gzip file" in small
    for row in ROWS[:2]:
        file.write_bytes(gzip.compress(json.dumps(row).encode()))
        assert small_and_large(file, monkeypatch)[1][0]["id"] == row["id"]


@pytest.mark.parametrize("row, title, text", [
    ({"title": "Oslo", "contents": "A city.\nIt rains."}, "Oslo", "A city.\nIt rains."),
    ({"Title": "Oslo", "contents": "A city."}, "Oslo", "A city."),
    ({"TITLE": "Oslo", "Text": "A city.\nIt rains."}, "Oslo", "A city.\nIt rains."),
    ({"title": "Oslo", "contents": '"Oslo"\nA city.'}, "Oslo", "A city."),
    ({"title": "Oslo", "text": "x", "contents": "Oslo\nA city."}, "Oslo", "A city."),
    ({"title": None, "contents": '"Oslo"\nA city.'}, "Oslo", "A city."),
    ({"contents": '"The "Sea" (film)"\nx'}, 'The "Sea" (film)', "x"),
    ({"title": '"Heroes" and "Low"', "text": "x"}, '"Heroes" and "Low"', "x"),
    ({"title": '"', "text": "x"}, '"', "x")])
def test_the_title_of_a_passage(tmp_path, row, title, text):
    """common/passages.py has more of them in its doctests."""
    [passage] = data.load_corpus(write(tmp_path / "c.jsonl", [row]))
    assert passage == {"id": "0", "title": title, "text": text}


def test_a_passage_is_called_as_its_record_is(tmp_path):
    names = ("id", "_id", "docid", "doc_id", "idx", "ID", "DocID")
    rows = [{name: f"n{i}", "text": f"x{i}"} for i, name in enumerate(names)]
    rows += [{"idx": 0, "text": "a"}, {"id": 7.0, "text": "b"}, {"_id": "", "text": "c"}]
    read = data.load_corpus(write(tmp_path / "c.jsonl", rows))
    assert [row["id"] for row in read] == [f"n{i}" for i in range(7)] + ["0", "7", "9"]


def test_half_a_surrogate_pair_and_types_that_are_lists_are_text(tmp_path):
    row = '{"question": "Who \\ud800?", "answer": "Ada \\ud83d\\ude00 \\udc00", "type": ["a"]}\n'
    (tmp_path / "a.jsonl").write_text(row)
    q = data.load_questions(tmp_path / "a.jsonl")[0]
    assert (q.question, q.answers, q.type) == ("Who ??", ["Ada \U0001f600 ?"], "['a']")
    assert one({"question": "How many?", "answer": 10**400}).answers == [str(10**400)]  # more than a float


# ---- what is read as it was meant

def test_titles_as_html_writes_them_are_the_pages_titles():
    title = "Bo &amp; Co"
    q = one(GOOD | {"supporting_facts": [[title, 0]], "context": [[title, ["They are a duo."]]]})
    assert q.context[0][0] == q.supporting_facts[0][0] == "Bo & Co"
    assert data.pool_contexts([q])[0]["title"] == "Bo & Co"


def test_accents_are_one_sign_in_answers_and_questions():
    q = one({"question": "Zu\u0308rich?", "answer": "Zu\u0308rich"})
    assert q.answers == ["Z\u00fcrich"] and q.question == "Z\u00fcrich?"
    for answer in ("Z\u00fcrich", "Zu\u0308rich"):
        assert metrics.exact_match(answer, q.answers) == metrics.f1(answer, q.answers) == 1
        assert metrics.stands_in(q.answers, f"In {answer}.")


@pytest.mark.parametrize("prompt, question", [
    (LAYOUTS["search-r1"]["prompt"], "who?"),
    ([{"role": "user", "content": "who is it?"}], "who is it?"),  # without the word, the whole message
    ([{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "<think>"}], "Who?"),
    ([{"role": "user", "content": 'Who wrote "Question: Time"?'}], 'Who wrote "Question: Time"?'),
    ([{"role": "user", "content": "Write <answer> x </answer>. Question: Who wrote Question: Time?\n"}],
     "Who wrote Question: Time?")])
def test_the_question_of_a_prompt_is_whole_and_the_user_s(prompt, question):
    row = LAYOUTS["search-r1"] | {"prompt": prompt}
    assert (one(row).id, one(row).question) == ("0", question)


def test_tables_have_numbers_as_they_were_written_and_maps_are_objects(tmp_path):
    answers = {
        "single": pyarrow.array([.1], pyarrow.float32()),
        "map": pyarrow.array([[("value", "Ann")]], pyarrow.map_(pyarrow.string(), pyarrow.string())),
    }
    found = {}
    for name, column in answers.items():
        file = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"question": ["Who?"], "answer": column}), file)
        found[name] = data.load_questions(str(file))[0].answers
    assert found == {"single": ["0.1"], "map": ["Ann"]}


@pytest.mark.parametrize("text", [
    "sep=;\nquestion;answer\nWho, he?;Ann\n", "question\tanswer\nWho, he?\tAnn\n",
    'question, answer\n"Who, he?", Ann\n'])
def test_spreadsheets_ways_to_part_cells(tmp_path, text):
    (tmp_path / "q.csv").write_text(text)
    q, = data.load_questions(str(tmp_path / "q.csv"))
    assert (q.question, q.answers) == ("Who, he?", ["Ann"])


def test_a_header_that_names_a_column_twice_is_refused(tmp_path):
    (tmp_path / "q.csv").write_text("question,answer,answer\nWho?,Ann,Bo\n")
    said = error_of(data.load_questions, tmp_path / "q.csv")
    assert "names a column twice (question, answer, answer): rename" in said
    (tmp_path / "q.csv").write_text("question,answer,,\nWho?,Ann,,\n")  # columns without a name
    assert data.load_questions(str(tmp_path / "q.csv"))[0].answers == ["Ann"]


@pytest.mark.parametrize("one, other", [
    ("Who is Ann's?", "Who is Ann’s?"), ("Is it \"Jaws\"?", "Is it “Jaws”"), ("红楼梦?", "红楼梦？"),
    ("¿Quién es?", "Quién es"), ("1914-18", "1914–18"), ("Zu\u0308rich", "Zürich"), ("a\u200bb", "ab")])
def test_a_question_is_the_same_in_every_script_s_signs(one, other):
    assert formats.fingerprint(one) == formats.fingerprint(other) != formats.fingerprint(f"{other} c")


def test_a_question_that_cannot_be_answered_is_refused_or_left_out(tmp_path, capsys):
    write(tmp_path / "q.jsonl", [{"question": "Who?", "answer": "Ann", "answerable": value}
                                 for value in (True, False)])
    (tmp_path / "q.csv").write_text("question,answer,answerable\nWho?,Ann,True\nWhat?,Bo,False\n")
    for name in ("q.csv", "q.jsonl"):
        assert "record 2: field 'answerable' is false" in error_of(data.load_questions, tmp_path / name)
    assert len(data.load_questions(str(tmp_path / "q.jsonl"), skip_bad=True)) == 1


def test_a_sign_that_stands_for_another_in_what_was_read_is_right_in_an_answer():
    shown = chat.no_tags("std::vector<int>")
    assert shown == "std::vector‹int>" and metrics.exact_match(shown, ["std::vector<int>"]) == 1
    assert metrics.stands_in(["std::vector<int>"], f"It is {shown}.")
