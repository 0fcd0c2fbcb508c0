"""Scores against the official scripts' own outputs (skipped where the samples are missing) and against numbers worked by hand."""

import json

import numpy as np
import pytest

from common import data, metrics
from tests.conftest import sample


def test_normalisation_and_rules():
    assert metrics.normalize_answer("The  U.S. a Dog's") == "us dogs"
    assert metrics.exact_match("the Beatles!", ["Rolling Stones", "Beatles"]) == 1
    assert metrics.exact_match("", ["x"]) == 0
    assert metrics.f1("born in Paris", "Paris") == pytest.approx(.5)
    assert metrics.f1("yes it is", "yes") == 0 and metrics.f1("yes it is", "yes", yes_no_rule=False) == pytest.approx(.5)
    assert metrics.f1("the", "a", yes_no_rule=False) == 1 and metrics.f1("the", "a") == 0


def test_evidence_scores_by_hand():
    em, f1, precision, recall = metrics.evidence_scores([["A", 0], ["B", 1]], [("A", 0), ("C", 2), ("D", 0)])
    assert (em, precision) == (0, .5) and recall == pytest.approx(1 / 3) and f1 == pytest.approx(.4)
    assert metrics.evidence_scores([3, 1], [1, 3]) == (1, 1, 1, 1)
    assert metrics.evidence_scores([], [1]) == (0, 0, 0, 0)


def _joint(em, answer, evidence):
    """The official joint score of an answer's and a support's (em, f1, precision, recall)."""
    precision, recall = answer[1] * evidence[2], answer[2] * evidence[3]
    return [em * evidence[0], 2 * precision * recall / (precision + recall) if precision + recall else 0., precision, recall]


def test_equals_the_official_hotpotqa_script():
    gold = data.load_questions(sample("hotpotqa/dev_distractor.json"))
    predicted = json.loads(sample("metrics_expected/hotpotqa_pred.json").read_text())
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())["hotpotqa"]
    rows = []
    for q in gold:
        answer, facts = predicted["answer"].get(q.id), predicted["sp"].get(q.id)
        a = [metrics.exact_match(answer, q.answers), *metrics.f1_precision_recall(answer, q.answers[0])] if answer is not None else [0.] * 4
        s = list(metrics.evidence_scores(facts, q.supporting_facts)) if facts is not None else [0.] * 4
        rows.append(a + s + (_joint(a[0], a[1:], s) if answer is not None and facts is not None else [0.] * 4))
    names = "em f1 prec recall sp_em sp_f1 sp_prec sp_recall joint_em joint_f1 joint_prec joint_recall".split()
    for name, value in zip(names, np.mean(rows, axis=0), strict=True):
        assert value == pytest.approx(expected[name], abs=1e-12), name


def test_equals_the_official_2wiki_script():
    gold = data.load_questions(sample("2wikimultihopqa/dev.json"))
    predicted = json.loads(sample("metrics_expected/2wikimultihopqa_pred.json").read_text())
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())["2wikimultihopqa_v1"]
    norm = lambda triples: [[metrics.normalize_answer(x) for x in t] for t in triples]  # noqa: E731
    rows = []
    for q in gold:
        answer, facts, triples = (predicted[k].get(q.id) for k in ("answer", "sp", "evidence"))
        a = [metrics.exact_match(answer, q.answers), *metrics.f1_precision_recall(answer, q.answers[0])] if answer is not None else [0.] * 4
        s = list(metrics.evidence_scores(facts, q.supporting_facts)) if facts is not None else [0.] * 4
        e = list(metrics.evidence_scores(norm(triples), norm(q.evidences))) if triples is not None else [0.] * 4
        rows.append(a + s + e)
    names = "em f1 prec recall sp_em sp_f1 sp_prec sp_recall evi_em evi_f1 evi_prec evi_recall".split()
    for name, value in zip(names, 100 * np.mean(rows, axis=0), strict=True):
        assert round(value, 2) == expected[name], name


def test_equals_the_official_musique_script():
    gold = data.load_questions(sample("musique/dev.jsonl"))
    rows = [json.loads(line) for line in sample("metrics_expected/musique_pred.jsonl").read_text().splitlines()]
    raw = [json.loads(line) for line in sample("musique/dev.jsonl").read_text().splitlines()]
    expected = json.loads(sample("metrics_expected/expected_scores.json").read_text())["musique"]
    em = np.mean([metrics.exact_match(p["predicted_answer"], q.answers) for p, q in zip(rows, gold, strict=True)])
    f1 = np.mean([metrics.f1(p["predicted_answer"], q.answers, yes_no_rule=False) for p, q in zip(rows, gold, strict=True)])
    support = np.mean([metrics.evidence_scores(p["predicted_support_idxs"], [x["idx"] for x in r["paragraphs"] if x["is_supporting"]])[1]
                       for p, r in zip(rows, raw, strict=True)])
    assert (round(em, 3), round(f1, 3), round(support, 3)) == (expected["answer_em"], expected["answer_f1"], expected["support_f1"])


@pytest.mark.parametrize("name", ["gpt-3.5-ft", "llama-2-13b-lora"])
def test_equals_the_scores_of_real_agents(name):
    rows = json.loads(sample(f"trajectories/fireact/hotpotqa_{name}.json").read_text())
    checked = 0
    for row in rows.values():
        if row.get("pred") is not None:
            assert metrics.exact_match(row["pred"], row["gt"]) == float(row["em"])
            assert metrics.f1(row["pred"], row["gt"]) == pytest.approx(row["f1"])
            checked += 1
    assert checked > 100


def test_intervals():
    mean, low, high = metrics.bootstrap_interval([0, 1] * 50)
    assert mean == .5 and .38 < low < .43 and .57 < high < .62
    assert metrics.paired_difference([0, 0, 1], [1, 1, 1])[0] == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="differ in length"):
        metrics.paired_difference([1], [1, 2])
