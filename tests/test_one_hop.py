"""benchmarks/one_hop.py: single hops of multi-hop questions as questions of their own; many_hops.py: several
data sets in one task."""

import json

import pytest

from benchmarks import many_hops, one_hop
from common import data


def two_wiki(number, film, director, born):
    context = [[film, [f"{film} is a film by {director}."]], [director, [f"{director} was born in {born}."]],
               [f"Page {number}", ["Nothing."]]]
    return {"_id": f"w{number}", "question": f"Where was the director of {film} born?", "answer": born,
            "context": context, "supporting_facts": [[film, 0], [director, 0]],
            "evidences": [[film, "director", director], [director, "place of birth", born]]}


def musique(number):
    paragraphs = [{"idx": 0, "title": "Petra", "paragraph_text": "Petra was directed by Ann Lee.",
                   "is_supporting": True},
                  {"idx": 1, "title": "Ann Lee", "paragraph_text": "Ann Lee lives in Ulm.",
                   "is_supporting": True}]
    steps = [{"id": 1, "question": "Petra >> director", "answer": "Ann Lee", "paragraph_support_idx": 0},
             {"id": 2, "question": "Where does #1 live?", "answer": "Ulm", "paragraph_support_idx": 1}]
    return {"id": f"m{number}", "question": "Where does the director of Petra live?", "answer": "Ulm",
            "answer_aliases": [], "answerable": True, "paragraphs": paragraphs,
            "question_decomposition": steps}


def test_hops_become_questions_and_no_page_is_on_both_sides(tmp_path, capsys):
    train = [two_wiki(1, "Jaws", "Bo Ek", "Rom"), two_wiki(2, "Duel", "Jo Au", "Bonn")]
    dev = [two_wiki(3, "Hook", "Bo Ek", "Rom")]
    (tmp_path / "train.json").write_text(json.dumps(train))
    (tmp_path / "dev.json").write_text(json.dumps(dev))
    (tmp_path / "dev.jsonl").write_text(json.dumps(musique(4)) + "\n")
    one_hop.main([str(tmp_path / "out"), "--train", str(tmp_path / "train.json"),
                  "--dev", f"{tmp_path / 'dev.json'},{tmp_path / 'dev.jsonl'}"])
    trained = data.load_questions(str(tmp_path / "out" / "train.jsonl"))
    scored = data.load_questions(str(tmp_path / "out" / "dev.jsonl"))
    # Bo Ek's page answers a development question, so it trains nothing
    assert [q.question for q in trained] == [
        "What is the director of Jaws?", "What is the director of Duel?",
        "What is the place of birth of Jo Au?"]
    assert {q.question: q.answers for q in scored} == {
        "What is the director of Hook?": ["Bo Ek"], "What is the place of birth of Bo Ek?": ["Rom"],
        "What is the director of Petra?": ["Ann Lee"], "Where does Ann Lee live?": ["Ulm"]}
    assert scored[3].supporting_facts[0][0] == "Ann Lee"
    assert len(data.load_corpus(str(tmp_path / "out" / "corpus.jsonl"))) == 10
    assert "3 questions to train on, 4 to score, 10 passages" in capsys.readouterr().out


def test_many_hops_keeps_rows_once_and_none_on_both_sides(tmp_path, capsys):
    train = [two_wiki(n, f"Film {n}", f"Name {n}", f"Town {n}") for n in range(40)]
    dev = [two_wiki(50, "Film 3", "Name 3", "Town 3"), two_wiki(51, "Hook", "Bo Ek", "Rom")]
    (tmp_path / "train.json").write_text(json.dumps([*train, train[5]]))
    (tmp_path / "dev.json").write_text(json.dumps(dev))
    (tmp_path / "dev.jsonl").write_text(json.dumps(musique(4)) + "\n")
    files = f"{tmp_path / 'dev.json'},{tmp_path / 'dev.jsonl'}"
    given = ["--train", str(tmp_path / "train.json"), "--dev", files]
    many_hops.main([str(tmp_path / "out"), *given])
    parts = {}
    for name in ("train", "tune", "dev"):
        parts[name] = data.load_questions(str(tmp_path / f"out/{name}.jsonl"))
    asked = [q.question for part in parts.values() for q in part]
    assert len(asked) == len(set(asked)) == 42 and len(parts["dev"]) == 3 and 0 < len(parts["tune"]) < 12
    assert all(q.evidences and q.supporting_facts for q in parts["train"])
    assert [step["answer"] for q in parts["dev"] for step in q.decomposition] == ["Ann Lee", "Ulm"]
    corpus = {row["text"] for row in data.load_corpus(str(tmp_path / "out/corpus.jsonl"))}
    assert {"Hook is a film by Bo Ek.", "Ann Lee lives in Ulm."} <= corpus
    assert "to tune on, 3 to score" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="exists: nothing was written"):
        many_hops.main([str(tmp_path / "out"), *given])
