"""Scores against the official scripts' own outputs (skipped where the samples are missing) and numbers worked
by hand."""

import json

import numpy as np
import pytest

from common import data, metrics
from tests.conftest import sample


def test_normalisation_and_rules():
    assert metrics.normalize_answer("The  U.S. a Dog's") == "us dogs"
    assert metrics.exact_match("the Beatles!", ["Rolling Stones", "Beatles"]) == 1
    assert metrics.exact_match("", ["x"]) == 0
    assert metrics.f1("born in Paris", "Paris") == pytest.approx(0.5)
    assert metrics.f1("yes it is", "yes") == metrics.f1("the", "a") == 0


def test_equals_the_official_hotpotqa_script():
    gold = data.load_questions(sample("hotpotqa/dev_distractor.json"))
    predicted = json.loads(sample("metrics_expected/hotpotqa_pred.json").read_text())
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())["hotpotqa"]
    rows = []
    for q in gold:
        answer, facts = predicted["answer"].get(q.id), predicted["sp"].get(q.id)
        row = [0.0] * 6
        if answer is not None:
            row[:2] = metrics.exact_match(answer, q.answers), metrics.f1(answer, q.answers)
        if facts is not None:
            row[2:] = metrics.evidence_scores(facts, q.supporting_facts)
        rows.append(row)
    names = ["em", "f1", "sp_em", "sp_f1", "sp_prec", "sp_recall"]
    for name, value in zip(names, np.mean(rows, axis=0), strict=True):
        assert value == pytest.approx(expected[name], abs=1e-12), name


def test_answers_score_as_in_the_official_2wiki_script():
    """Without other names, and with those of the answer's Wikidata id."""
    predicted = json.loads(sample("metrics_expected/2wikimultihopqa_pred.json").read_text())["answer"]
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())
    aliases = {}
    for line in sample("metrics_expected/2wikimultihopqa_id_aliases.jsonl").read_text().splitlines():
        row = json.loads(line)
        aliases[row["Q_id"]] = [*row["aliases"], *row["demonyms"]]
    raw = json.loads(sample("2wikimultihopqa/dev.json").read_text())
    for version, others in (("v1", {}), ("v1.1", aliases)):
        rows = []
        for q, record in zip(data.load_questions(raw), raw, strict=True):
            golds = q.answers + others.get(record["answer_id"], [])
            answer = predicted.get(q.id)
            if answer is None:
                rows.append([0.0, 0.0])
            else:
                rows.append([metrics.exact_match(answer, golds), metrics.f1(answer, golds)])
        em, f1 = 100 * np.mean(rows, axis=0)
        wanted = expected[f"2wikimultihopqa_{version}"]
        assert (round(float(em), 2), round(float(f1), 2)) == (wanted["em"], wanted["f1"])


@pytest.mark.parametrize("predicted, gold, em, precision, recall, f1", [
    ([["A", 0], ["B", 1]], [("A", 0), ("C", 2), ("D", 0)], 0, .5, 1 / 3, .4),
    ([3, 1], [1, 3], 1, 1, 1, 1), ([], [1], 0, 0, 0, 0),
    ([["the zone", 0]], [["The Zone", 0]], 0, 0, 0, 0),  # case counts
    ([["A", 0], ["A", 0]], [["A", 0], ["B", 0]], 0, 1, .5, 2 / 3),  # and a fact once
    ([], [], 1, 0, 0, 0)])
def test_evidence_scores_by_hand(predicted, gold, em, precision, recall, f1):
    found = metrics.evidence_scores(predicted, gold)
    assert found == pytest.approx((em, f1, precision, recall))


def test_equals_the_official_musique_script_but_for_its_f1_of_yes_and_no():
    gold = data.load_questions(sample("musique/dev.jsonl"))
    lines = sample("metrics_expected/musique_pred.jsonl").read_text().splitlines()
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())["musique"]
    scores = []
    for p, q in zip(map(json.loads, lines), gold, strict=True):
        answer, paragraphs = p["predicted_answer"], p["predicted_support_idxs"]
        scores.append([
            metrics.exact_match(answer, q.answers), metrics.f1(answer, q.answers),
            metrics.evidence_scores(paragraphs, q.support_paragraphs)[1]])
    em, f1, support = np.mean(scores, axis=0)
    assert f1 == pytest.approx(expected.pop("answer_f1"), abs=2e-3)
    assert {"answer_em": round(em, 3), "support_f1": round(support, 3)} == expected


def _row(em, **more):
    return {"em": em, "f1": em, "searches": 1, "tokens": 10, "problem": "", "type": "", "hops": 2} | more


def test_em_counts_whatever_the_format_and_em_valid_does_not():
    rows = [_row(1, em_valid=0, problem="no answer tag")] * 20 + [_row(1, em_valid=1)] * 20
    rows += [_row(0, em_valid=0)] * 10
    s = metrics.summarize(rows)
    assert (s["n"], s["em"], s["em_valid"], s["format"]) == (50, 0.8, 0.4, 0.6)
    assert s["em_valid_low"] < 0.4 < s["em_valid_high"] and s["em_low"] < 0.8 < s["em_high"]
    assert "em_valid" not in metrics.summarize([*rows, _row(1)])


def test_questions_that_offer_their_answer_are_counted_apart():
    rows = [
        _row(1, type="comparison", gold=["Film A"]), _row(0, type="bridge_comparison", gold=["Film B"]),
        _row(1, type="bridge", gold=["No"]), _row(1, type="bridge", gold=["yes!"]),
        _row(0, type="compositional", gold=["Ada"]), _row(0, gold=["No Country"]),
        _row(1, gold=["Ada", "A. H."])]
    s = metrics.summarize(rows)
    assert s["two_way"] == {"n": 4, "em": 0.75} and s["open"] == {"n": 3, "em": pytest.approx(1 / 3)}
    assert s["by_type"]["comparison"] == {"n": 1, "em": 1}
    assert s["by_hops"] == {"2": {"n": 7, "em": pytest.approx(4 / 7)}}
    asked = [_row(1, type="comparison", gold=[gold], question=question) for gold, question in (
        ("Film A", "Which is older, Film A or Film B?"), ("alcohol", "What have gin and rum in common?"))]
    assert [metrics.is_two_way(row) for row in asked] == [True, False]
    only_open = metrics.summarize([_row(1)])
    assert only_open["open"] == {"n": 1, "em": 1} and "two_way" not in only_open
