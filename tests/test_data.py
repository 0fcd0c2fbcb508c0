"""Every public format of real samples, and one clear error for each kind of bad record."""

import json

import pytest

from common import data
from tests.conftest import sample


@pytest.mark.parametrize("name, n, hops, context", [
    ("hotpotqa/dev_distractor.json", 94, {2}, 10), ("hotpotqa/train.json", 54, {2}, 2), ("hotpotqa/dev_distractor_hf.json", 39, {2}, 2),
    ("2wikimultihopqa/dev.json", 89, {2, 4}, 10), ("musique/dev.jsonl", 94, {2, 3, 4}, 20), ("hotpotqa/dev_qa_only.jsonl", 237, {0}, 0),
    ("nq/nq_open_dev.jsonl", 500, {0}, 0), ("triviaqa/test.jsonl", 300, {0}, 0), ("popqa/test.jsonl", 300, {0}, 0), ("bamboogle/test.csv", 64, {0}, 0),
    ("rl_formats/arpo_valid.parquet", 88, {0}, 0)])
def test_real_files(name, n, hops, context):
    questions = data.load_questions(sample(name))
    assert len(questions) == n and len({q.id for q in questions}) == n
    assert all(q.question and q.answers and all(isinstance(a, str) and a for a in q.answers) for q in questions)
    assert hops <= {q.hops for q in questions} and (0 in hops or all(q.hops for q in questions))
    assert all(len(q.context) >= min(context, 2) for q in questions)
    if context:  # every gold fact points into the context
        assert sum((t in dict(q.context)) for q in questions for t, _ in q.supporting_facts) == sum(len(q.supporting_facts) for q in questions) > n
    assert len(data.load_questions(sample(name), limit=7)) == 7


def test_aliases_and_types():
    q = data.load_questions(sample("musique/dev.jsonl"))
    assert any(len(x.answers) > 1 for x in q)
    assert {x.type for x in data.load_questions(sample("2wikimultihopqa/dev.json"))} >= {"comparison", "compositional"}


def test_search_r1_rows():
    row = {"data_source": "nq", "prompt": [{"role": "user", "content": "Answer … Question: who is it?\n"}],
           "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "A."]}}, "extra_info": {"split": "train", "index": 7}}
    q = data.parse_question(row)
    assert (q.id, q.question, q.answers) == ("7", "who is it?", ["Ada", "A."])


def test_corpora():
    rows = data.load_corpus(sample("rl_formats/search_r1_corpus.jsonl"))
    assert len(rows) == 10 and rows[0]["title"] == "Evan Morris" and rows[0]["text"].startswith("Evan Morris Evan L.")
    assert len(data.load_corpus(sample("2wikimultihopqa/corpus.json"))) == 3060
    pooled = data.pool_contexts(data.load_questions(sample("hotpotqa/dev_distractor.json")))
    assert 800 < len(pooled) <= 940 and pooled[0]["text"]


BAD = {"missing answer": ('{"question": "q"}', "record 2: field 'answer' is missing|record 2: field 'Answer' is missing"),
       "empty answer": ('{"question": "q", "answer": ""}', "record 2: field 'answer' is empty"),
       "empty list": ('{"question": "q", "golden_answers": []}', "record 2: field 'answer' is empty"),
       "empty question": ('{"question": " ", "answer": "a"}', "record 2: field 'question' is empty"),
       "no question": ('{"answer": "a"}', "record 2: field '[qQ]uestion' is missing"),
       "not an object": ('[1, 2]', "record 2: expected an object"),
       "a null paragraph": ('{"question": "q", "answer": "a", "paragraphs": [null]}', "record 2: ")}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_record_is_named_and_can_be_skipped(tmp_path, kind):
    line, message = BAD[kind]
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "fine", "answer": "a"}\n' + line + "\n")
    with pytest.raises(data.DataError, match=f"q.jsonl: ({message})"):
        data.load_questions(path)
    assert len(data.load_questions(path, skip_bad=True)) == 1


def test_bad_files(tmp_path):
    def fails(content, message, name="q.json", load=data.load_questions):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(data.DataError, match=message):
            load(path)
    fails(b'[{"question": "q",]', "q.json: not valid JSON: .* line 1")
    fails(b'{"question": \n', "record 1 is not valid JSON", "q.jsonl")
    fails(b"\xff\xfe\x00bad", "not UTF-8")
    fails(b"", "no questions in it")
    fails(b"not parquet", "not a parquet file", "q.parquet")
    fails(b"", "the corpus is empty", "c.jsonl", data.load_corpus)
    fails(b'{"id": 3}\n', "c.jsonl: record 1: expected id and contents", "c.jsonl", data.load_corpus)
    with pytest.raises(data.DataError, match="no such file"):
        data.load_questions(tmp_path / "missing.json")
    with pytest.raises(data.DataError, match="is a folder"):
        data.load_questions(tmp_path)
    with pytest.raises(data.DataError, match="no contexts to pool"):
        data.pool_contexts([data.Question("1", "q", ["a"])])


def test_repeated_ids_are_told_apart():
    rows = [{"id": "x", "question": json.dumps(i), "answer": "a"} for i in range(3)]
    assert [q.id for q in data.load_questions(rows)] == ["x", "x#1", "x#2"]


def test_line_separators_inside_strings(tmp_path):
    file = tmp_path / "q.jsonl"
    file.write_text(json.dumps({"question": "one\u2028line?", "answer": "a"}, ensure_ascii=False) + "\n")
    assert data.load_questions(file)[0].question == "one\u2028line?"
    table = tmp_path / "q.csv"
    table.write_text('Question,Answer\n"two\nlines?",b\n')
    assert data.load_questions(table)[0].question == "two\nlines?"


def test_a_large_corpus_is_memory_mapped_and_reads_the_same(tmp_path, monkeypatch):
    file = tmp_path / "corpus.jsonl"
    file.write_text("".join(json.dumps({"id": str(i), "contents": f'"Title {i}"\nText of {i}.'}) + "\n" for i in range(50)))
    small = data.load_corpus(file)
    monkeypatch.setattr(data, "MEMORY_MAP_FROM", 0)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    large = data.load_corpus(file)
    assert not isinstance(large, list) and [large[i] for i in range(50)] == small and len(large) == 50


@pytest.mark.parametrize("row,message", [
    ({"evidences": [["a", "b"]]}, "field 'evidences'"), ({"evidences": [["a", "b", 3]]}, "field 'evidences'"),
    ({"context": [["t", [None]]]}, "field 'context'"),
    ({"supporting_facts": [["t", float("inf")]]}, "record 1"), ({"evidences": [None]}, "record 1")])
def test_odd_fields_of_a_record_are_its_error(row, message, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"question": "Who?", "answer": "a"} | row) + "\n")
    with pytest.raises(data.DataError, match=message):
        data.load_questions(tmp_path / "a.jsonl")


@pytest.mark.parametrize("text", ['{"dataset": {}}', '{"dataset": {}, "questions": null}', "[" * 100_000, '[{"question": "a", "answer": ' + "9" * 5000 + "}]"])
def test_odd_json_is_one_error(text, tmp_path):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(data.DataError, match="a.json"):
        data.load_questions(tmp_path / "a.json")


def test_half_a_surrogate_pair_and_types_that_are_lists_are_text(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "Who \\ud800?", "answer": "\\ud83d\\ude00 \\udc00", "type": ["a"]}\n')
    q = data.load_questions(tmp_path / "a.jsonl")[0]
    assert (q.question, q.answers, q.type) == ("Who ??", ["\U0001f600 ?"], "['a']")
