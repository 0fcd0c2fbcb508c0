"""The embedded world: determinism, separation of splits, questions that
their passages answer, demonstrations."""

import itertools

import pytest

from common import metrics, world
from common.world import demonstrations


def test_same_arguments_same_bytes(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        world.make_world("dev", seed=seed, questions=50).write(tmp_path / name)
    for file in ("questions.json", "corpus.jsonl", "triples.jsonl"):
        a, b, c = ((tmp_path / name / file).read_bytes() for name in "abc")
        assert a == b != c


def test_splits_share_words_and_no_entity():
    worlds = [world.make_world(split, questions=20) for split in world.SPLITS]
    assert all(len(made.kinds) >= 1000 for made in worlds)
    for a, b in itertools.combinations(worlds, 2):
        assert not set(a.kinds) & set(b.kinds) and not set(a.triples) & set(b.triples)
    words = [{w for name in made.kinds for w in name.split()} for made in worlds]
    assert len(set.intersection(*words)) > 0.8 * len(set.union(*words))


@pytest.fixture(scope="module")
def test_world():
    return world.make_world("test", questions=400)


def test_no_alias_makes_a_bare_surname_right(test_world):
    """ "A. Fisher" normalises to "fisher": scores drop articles."""
    named = 0
    for q in test_world.questions:
        for alias in q["answer_aliases"]:
            named += 1
            assert len(metrics.normalize_answer(alias).split()) == 2, alias
            assert not metrics.exact_match(alias.split()[-1], [q["answer"], *q["answer_aliases"]])
    assert named > 50
    assert any(q["answer"].startswith("A") and " " in q["answer"] for q in test_world.questions)


def test_questions_follow_from_their_evidence(test_world):
    at = {p["title"]: p for p in test_world.passages}
    types, hops = set(), set()
    for q in test_world.questions:
        types.add(q["type"])
        hops.add(q["hops"])
        assert len(q["evidences"]) == q["hops"] == len(q["supporting_facts"])
        for (title, i), triple in zip(q["supporting_facts"], q["evidences"], strict=True):
            # the gold sentence states the gold triple
            assert triple[0] == title and triple[2] in at[title]["sentences"][i]
        if q["type"] in ("compositional", "inference"):
            assert q["evidences"][-1][2] == q["answer"]
            assert [e[2] for e in q["evidences"][:-1]] == [e[0] for e in q["evidences"][1:]]
        elif q["type"] == "bridge_comparison":
            first = min((int(q["evidences"][i + 1][2]), q["evidences"][i][0]) for i in (0, 2))
            assert q["answer"] == first[1]
        elif q["answer"] in ("yes", "no"):
            assert (q["evidences"][0][2] == q["evidences"][1][2]) == (q["answer"] == "yes")
    assert types == {"compositional", "inference", "comparison", "bridge_comparison"} and hops == {1, 2, 3, 4}


def test_one_passage_an_entity_with_facts_beside_its_sentences(test_world):
    assert [p["title"] for p in test_world.passages] == list(test_world.kinds)
    stated = [t for p in test_world.passages for t in p["facts"] if t]
    assert sorted(stated) == sorted(test_world.triples)
    assert any(f is None for p in test_world.passages for f in p["facts"][1:])  # distractors
    words = set(world.vocabulary())
    for p in test_world.passages:
        for w in " ".join(p["sentences"]).replace(".", " .").split():
            assert w in words, w


def test_demonstrations_answer_or_carry_their_flaw(test_world):
    for q in test_world.questions[:100]:
        clean = demonstrations.demonstrate(test_world, q, 0, flaw_rate=0)
        assert (clean.flaw, clean.answer) == (None, q["answer"])
        assert [s.found for s in clean.steps] == [e[2] for e in q["evidences"]]
    flawed = [(q, demonstrations.demonstrate(test_world, q, n, flaw_rate=1))
              for q in test_world.questions for n in range(3)]
    assert {d.flaw for _, d in flawed} == set(demonstrations.FLAWS)
    assert sum(d.answer != q["answer"] for q, d in flawed) > 0.5 * len(flawed)
    for _, d in flawed:  # what a step finds is what the world says
        assert all(s.found == test_world.facts.get((s.subject, s.relation)) for s in d.steps)


def test_vague_questions_say_it_in_other_words_and_the_others_stay_as_they_are():
    plain = world.make_world("train", questions=150, distractors="linked")
    made = world.make_world("train", questions=150, distractors="linked", vague=.5)
    assert made.passages == plain.passages
    vague = [q for q in made.questions if q["type"] == "vague"]
    same = [(a, b) for a, b in zip(made.questions, plain.questions, strict=True) if a["type"] != "vague"]
    assert all(a == b for a, b in same) and len(same) + len(vague) == 150
    assert .3 < len(vague) / sum(q["type"] == "compositional" for q in plain.questions) < .7
    paragraphs = " ".join(" ".join(p["sentences"]) for p in made.passages).lower().split()
    odd = {word for words in world.VAGUE.values() for word in words}
    assert not odd & {w.strip(".,") for w in paragraphs}
    described = 0
    for q in vague:
        start, relation = q["plan"][0]
        assert odd & set(q["question"].strip("?").split())
        assert q["answer"] == made.facts[tuple(q["plan"][-1])]
        assert all(made.facts[s, r] == t for s, r, t in q["evidences"])
        assert len(q["supporting_facts"]) == len(q["evidences"])
        context = dict(q["context"])
        assert all(i < len(context[title]) for title, i in q["supporting_facts"])
        if "whose" in q["question"]:   # the description fits one entity, and its sentence is gold
            described += 1
            (head, used, tail), *rest = q["evidences"]
            assert head == start and start not in q["question"] and tail in q["question"] and used != relation
            alike = [h for (h, r), t in made.facts.items() if (r, t) == (used, tail)]
            assert [h for h in alike if made.kinds[h] == made.kinds[start]] == [start]
    assert described > len(vague) / 2
    known = set(world.vocabulary(vague=True))
    assert {w for q in vague for w in q["question"].replace("?", " ?").replace("-", " - ").split()} <= known
    assert world.vocabulary() == [w for w in world.vocabulary(vague=True)][:len(world.vocabulary())]


def test_linked_distractors_share_a_word_or_are_led_to_by_a_gold_passage():
    made = world.make_world("dev", questions=80, distractors="linked")
    shares = leads = 0
    for q in made.questions:
        gold = {title for title, _ in q["supporting_facts"]}
        others = [title for title, _ in q["context"] if title not in gold]
        assert len(others) == 6
        words = {w for title in gold for w in title.split()}
        shares += sum(bool(words & set(t.split())) for t in others) >= 2
        leads += any(h in gold and t in others for h, _, t in made.triples)
    assert shares > 70 and leads > 60
