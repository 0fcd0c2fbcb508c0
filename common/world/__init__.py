"""The embedded world: a generated graph, its passages, and multi-hop questions over them.

Nothing real is replaced and nothing is downloaded. Every split ("warmup", "train", "dev", "test") is a world
of its own: all splits are written with the same words, but no two splits share an entity, so no fact learned
in one answers a question in another and the policy has to search. Same arguments, same bytes.

    python -m common.world --split test --out world/     # 2Wiki-style questions, Search-R1 corpus, triples

Relations carry their Wikidata labels and questions come in the four types of 2WikiMultihopQA (Ho et al.,
2020).
"""

import hashlib
import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path

from common.files import UserError, write_json, write_jsonl
from common.world.words import (
    BRIDGES,
    DATE,
    DISTRACTORS,
    DOMAIN_OF,
    FACTS,
    FEMALE,
    INFERENCE,
    MALE,
    MIX,
    NAMES,
    OLDEST,
    SAME_COUNTRY,
    SPOKEN,
    VAGUE,
    spoken,
)

SPLITS = ("warmup", "train", "dev", "test")


@dataclass
class World:
    """triples (head, relation, tail); passages {id, title, sentences, facts}, facts[i] = the triple that
    sentence i states or None; questions in the official 2WikiMultihopQA form plus answer_aliases, hops,
    domain and plan."""
    split: str
    kinds: dict[str, str]                      # entity -> type
    triples: list[tuple[str, str, str]]
    passages: list[dict] = field(default_factory=list)
    questions: list[dict] = field(default_factory=list)

    def __post_init__(self):
        self.facts = {(h, r): t for h, r, t in self.triples}

    def corpus(self):
        """Passages as retriever rows {"id", "title", "text"}; the title opens the text, as in Wikipedia."""
        rows = []
        for p in self.passages:
            text = " ".join(p["sentences"])
            rows.append({"id": p["id"], "title": p["title"], "text": text})
        return rows

    def write(self, folder):
        """questions.json (official 2Wiki form), corpus.jsonl (Search-R1 form), triples.jsonl."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        passages = []
        for row in self.corpus():
            contents = f'"{row["title"]}"\n{row["text"]}'
            passages.append({"id": row["id"], "contents": contents})
        write_json(folder / "questions.json", self.questions)
        write_jsonl(folder / "corpus.jsonl", passages)
        write_jsonl(folder / "triples.jsonl", self.triples)


def _entities(split, rng):
    """Names by type. A name belongs to the split that its hash picks, so splits share words and no entity."""
    kinds = {}
    for kind, (first, second, count) in NAMES.items():
        own = []
        for a, b in itertools.product(first, second):
            name = f"{a} {b}"
            digest = hashlib.sha256(f"{kind}/{name}".encode()).digest()
            if a != b and SPLITS[digest[0] % len(SPLITS)] == split:
                own.append(name)
        rng.shuffle(own)
        for name in own[:count]:
            kinds[name] = kind
    years = {}
    for name, kind in kinds.items():
        if kind in DATE:
            years[name] = rng.randrange(1900, 2000)
    return kinds, years


def _triples(kinds, years, rng):
    """One tail for each (head, relation): every question has one answer."""
    by_kind = {}
    for name, kind in kinds.items():
        by_kind.setdefault(kind, []).append(name)
    women = [p for p in by_kind["person"] if p.split()[0] in FEMALE]
    men = [p for p in by_kind["person"] if p.split()[0] in MALE]
    grooms = rng.sample(men, len(men))
    brides = rng.sample(women, len(women))
    spouse = {}
    for man, woman in zip(grooms, brides, strict=False):
        spouse[man] = woman
        spouse[woman] = man

    triples = []
    for name, kind in kinds.items():
        for (head, relation), (tail_kind, share, _) in FACTS.items():
            if head != kind or rng.random() >= share:
                continue
            if tail_kind == "year":
                triples.append((name, relation, str(years[name])))
                continue
            pool = by_kind[tail_kind]
            if relation in ("mother", "father"):
                parents = women if relation == "mother" else men
                pool = [p for p in parents if 18 <= years[name] - years[p] <= 45]
            elif relation == "spouse":
                pool = [spouse[name]] if name in spouse else []
            pool = [p for p in pool if p != name]
            if pool:
                triples.append((name, relation, rng.choice(pool)))
    return triples


def _passages(kinds, triples, rng):
    """A passage per entity: an opening sentence, its facts in random order, one sentence that answers
    nothing."""
    facts = {}
    for triple in triples:
        facts.setdefault(triple[0], []).append(triple)
    names = list(kinds)
    passages = []
    for i, name in enumerate(names):
        kind = kinds[name]
        if kind != "person":
            pronoun, possessive = "It", "Its"
        elif name.split()[0] in FEMALE:
            pronoun, possessive = "She", "Her"
        else:
            pronoun, possessive = "He", "His"
        sentences = [f"{name} is a {kind}."]
        stated = [None]
        own = facts.get(name, [])
        for triple in rng.sample(own, len(own)):
            _, relation, tail = triple
            sentence = FACTS[kind, relation][2]
            sentences.append(sentence.format(h=pronoun, p=possessive, t=tail))
            stated.append(triple)
        if kind in DISTRACTORS:
            others = rng.sample(names, 60)
            others = [e for e in others if e != name and kinds[e] == kind]
            other = rng.choice(others or [names[i - 1]])
            at = rng.randrange(1, len(sentences) + 1)
            sentence = DISTRACTORS[kind].format(h=pronoun, p=possessive, x=other)
            sentences.insert(at, sentence)
            stated.insert(at, None)
        passages.append({"id": str(i), "title": name,
                         "sentences": sentences, "facts": stated})
    return passages


def _compose(world, rng, hops):
    """(start, relations, entities on the way, answer) of a walk that visits no entity twice, or None."""
    kinds = world.kinds
    names = [e for e, k in kinds.items() if k in DOMAIN_OF or (k == "person" and hops < 3)]
    start = rng.choice(names)
    at = start
    relations = []
    seen = [start]
    for hop in range(hops):
        options = []
        for (kind, relation), (tail_kind, _, _) in FACTS.items():
            if kind != kinds.get(at) or (at, relation) not in world.facts:
                continue
            if tail_kind == "year" and hop < hops - 1:
                continue
            if world.facts[at, relation] not in seen:
                options.append(relation)
        if not options:
            return None
        relation = rng.choice(options)
        relations.append(relation)
        at = world.facts[at, relation]
        seen.append(at)
    return start, relations, seen[:-1], at


def chain_question(kinds, start, words, answer):
    """"Who is the mother of the director of the film Pale Tower?": words for a chain's relations, last one
    first. kinds: {name: kind}."""
    asked = "Who is" if kinds.get(answer) == "person" else "What is"
    for word in words:
        asked += f" the {word} of"
    typed = start if kinds[start] == "person" else f"the {kinds[start]} {start}"
    return f"{asked} {typed}?"


def _question(world, rng, kind, hops):
    """One question row without id, or None where the draw leads nowhere.
    `plan` = [(subject, relation), …]."""
    facts, kinds = world.facts, world.kinds
    if kind == "compositional":
        walk = _compose(world, rng, hops)
        if walk is None or (hops == 2 and tuple(walk[1]) in INFERENCE):
            return None
        start, relations, subjects, answer = walk
        plan = list(zip(subjects, relations, strict=True))
        text = chain_question(kinds, start, map(spoken, reversed(relations)), answer)
        return text, answer, plan, start
    if kind == "inference":
        start = rng.choice([e for e, k in kinds.items() if k == "person"])
        (first, second), label = rng.choice(sorted(INFERENCE.items()))
        middle = facts.get((start, first))
        answer = facts.get((middle, second))
        if middle is None or answer in (None, start):
            return None
        plan = [(start, first), (middle, second)]
        return f"Who is the {label} of {start}?", answer, plan, start
    same = kind == "comparison" and rng.random() < .3
    relations = SAME_COUNTRY if same else DATE
    if kind == "bridge_comparison":
        relations = BRIDGES
    head_kind = rng.choice(sorted(relations))
    relation = relations[head_kind]
    heads = [e for e, k in kinds.items() if k == head_kind]
    a, b = rng.sample(heads, 2)
    if same:  # as many pairs that agree as pairs that do not
        country = {e: facts[e, relation] for e in heads if (e, relation) in facts}
        agree = rng.random() < .5
        others = [e for e in country if e != a and (country[e] == country.get(a)) == agree]
        b = rng.choice(others or [b])
        text = f"Are {a} and {b} from the same country?"
    elif kind == "comparison":
        text = f"Which {head_kind} {OLDEST[head_kind]}, {a} or {b}?"
    left, right = a, b
    plan = [(a, relation), (b, relation)]
    if kind == "bridge_comparison":
        bridge, relation = relation, "date of birth"
        left, right = facts.get((a, bridge)), facts.get((b, bridge))
        if left is None or right is None or left == right:
            return None
        plan = [(a, bridge), (left, relation), (b, bridge), (right, relation)]
        text = f"Which {head_kind} has the {spoken(bridge)} who was born first, {a} or {b}?"
    x, y = facts.get((left, relation)), facts.get((right, relation))
    if x is None or y is None:
        return None
    if same:
        answer = "yes" if x == y else "no"
    elif abs(int(x) - int(y)) < 5:
        return None
    else:
        answer = a if int(x) < int(y) else b
    return text, answer, plan, a


def make_world(split="train", seed=0, questions=400,
               hop_mix=(.3, .4, .15, .15), distractors="random", vague=0.0, mix=None):
    """A world of 1,000 entities with `questions` questions; hop_mix = shares of 1, 2, 3 and 4
    hops. distractors: six random passages in each question's context, or "linked" ones, of which four look
    as if they belonged there. vague: share of the compositional questions that are vaguely put. mix: MIX,
    or another table like it."""
    rng = random.Random(f"fivehop/{split}/{seed}/1.0")
    kinds, years = _entities(split, rng)
    world = World(split, kinds, _triples(kinds, years, rng))
    world.passages = _passages(kinds, world.triples, rng)
    at = {p["title"]: p for p in world.passages}
    seen = set()
    tries = 0
    while len(world.questions) < questions:
        tries += 1
        if tries > 5000:  # in a row
            raise UserError(f"the embedded world does not hold {questions} different questions")
        hops = rng.choices((1, 2, 3, 4), hop_mix)[0]
        types = (mix or MIX)[hops]
        kind = rng.choices(list(types), list(types.values()))[0]
        drawn = _question(world, rng, kind, hops)
        if drawn is None or drawn[0] in seen:
            continue
        seen.add(drawn[0])
        tries = 0
        world.questions.append(_row(world, rng, at, seed, kind, hops, drawn, distractors, vague))
    return world


def _row(world, rng, at, seed, kind, hops, drawn, distractors, vague):
    """A question of make_world in the official form; at: {title: its passage}."""
    split, kinds = world.split, world.kinds
    text, answer, plan, start = drawn
    stated = plan  # what the gold sentences say
    if vague and kind == "compositional":
        blur = random.Random(f"vague/{split}/{seed}/{text}")
        if blur.random() < vague:
            kind = "vague"
            text, described = _vaguely(world, blur, text, plan, answer)
            stated = [*described, *plan]
    evidences = []
    gold = []
    for subject, relation in stated:
        triple = subject, relation, world.facts[subject, relation]
        evidences.append(list(triple))
        gold.append([subject, at[subject]["facts"].index(triple)])
    noise = rng.sample([p["title"] for p in world.passages], 6)
    own = {subject for subject, _ in plan}
    if distractors == "linked":
        noise = _linked(world, random.Random(f"{split}/{seed}/{text}"), own)
    titles = own | set(noise)
    titles = sorted(titles, key=lambda title: int(at[title]["id"]))
    first, _, last = answer.partition(" ")
    aliases = []
    # "A. Fisher" is no alias: scores drop articles, and "Fisher" alone would be right
    if kinds.get(answer) == "person" and last and first[0] != "A":
        aliases.append(f"{first[0]}. {last}")
    return {
        "_id": f"{split}-{seed}-{len(world.questions)}", "type": kind,
        "question": text, "answer": answer, "answer_aliases": aliases,
        "hops": hops, "domain": DOMAIN_OF.get(kinds[start], "people"),
        "supporting_facts": gold, "evidences": evidences,
        "context": [[title, at[title]["sentences"]] for title in titles],
        "plan": [list(step) for step in plan]}


def _vaguely(world, rng, text, plan, answer):
    """(the question with other words for its relations and, where one fits, a description in place of its
    first name; [the fact that the description uses])."""
    facts, kinds, start = world.facts, world.kinds, plan[0][0]
    words = [rng.choice(VAGUE[relation]) for _, relation in reversed(plan)]
    text = chain_question(kinds, start, words, answer)
    known = [(r, x) for (h, r), x in facts.items() if h == start and x in kinds and x != answer]
    known = [(r, x) for r, x in known if r != plan[0][1]]
    for relation, tail in rng.sample(known, len(known)):
        alike = [h for (h, r), x in facts.items() if r == relation and x == tail and kinds[h] == kinds[start]]
        if len(alike) == 1:
            typed = start if kinds[start] == "person" else f"the {kinds[start]} {start}"
            described = f"the {kinds[start]} whose {spoken(relation)} is {tail}"
            return text.replace(typed, described), [(start, relation)]
    return text, []


def _linked(world, rng, gold):
    """Six titles for a context: two that share a word with a gold title, two that a gold passage leads to
    (dead ends, which look related), two random ones; other random ones where there are too few."""
    words = {word for title in gold for word in title.split()}
    alike = [t for t in world.kinds if t not in gold and words & set(t.split())]
    near = [t for h, _, t in world.triples if h in gold and t in world.kinds and t not in gold]
    near = list(dict.fromkeys(near))
    chosen = rng.sample(alike, min(2, len(alike)))
    near = [t for t in near if t not in chosen]
    chosen += rng.sample(near, min(2, len(near)))
    rest = [t for t in world.kinds if t not in gold and t not in chosen]
    return chosen + rng.sample(rest, 6 - len(chosen))


def vocabulary(vague=False):
    """Every word the world can write, in a fixed order (for the word-level tokenizers of the tiny models);
    vague: also those of questions that are vaguely put."""
    texts = []
    for first, second, _ in NAMES.values():
        texts += first
        texts += second
    texts += [str(year) for year in range(1900, 2000)]
    for *_, sentence in FACTS.values():
        texts.append(sentence.format(h="She He It", p="Her His Its", t=""))
    texts += [f"{kind} {relation}" for kind, relation in FACTS]
    texts += [sentence.format(h="", p="", x="") for sentence in DISTRACTORS.values()]
    texts += [*INFERENCE.values(), *OLDEST.values(), *SPOKEN.values()]
    texts.append("Who What Which is are Are and or the a of has from same country yes no who was born first "
                 ", ? . - : ; \" '")
    if vague:
        texts += ["whose", *(word for words in VAGUE.values() for word in words)]
    words = {}
    for text in texts:
        text = text.replace(".", " . ").replace("-", " - ")
        words |= dict.fromkeys(text.split())
    return list(words)
