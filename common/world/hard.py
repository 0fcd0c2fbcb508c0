"""The embedded world's second level, in which methods can differ: --world hard.

Questions are compositional, of 3 and 4 hops, and name their relations by cue words that no passage has, so
that nothing in a question can be copied but its first name. The warm-up's demonstrator has habits: it takes a
relation of a kind of entity, where it stands behind a certain other one, for fixed others of that kind, at a
rate of its own. So the policy starts out ripe in reading and wrong at every turn in some ninety ways, which
have to be mended one by one: four fifths of them by choosing what it does most often anyway, the others
against that.

Knobs, all off unless set (--world hard:partial=.5,elastic=.3):

    elastic   share of the questions of which a passage also states the fact after its own, so that one search
              fewer answers them, too; a seventh of the demonstrations ask something twice
    partial   share of the entities that other passages call by a longer name than their own page and gold do
              ("Ada Mira Fisher", "Port Alder Town"): right reasoning then earns an F1 of .8 or of 1
"""

import functools
import hashlib
import random
import re
from dataclasses import dataclass, field

from common import world
from common.world import demonstrations
from common.world.demonstrations import Demonstration, Step

HOPS = (0, 0, .5, .5)              # shares of 1, 2, 3 and 4 hops
WARM_UP_HOPS = (.1, .3, .3, .3)
RATES = (.125, .5, .75, 1)         # of habits, times the flaw rate; the last: for one other relation
OTHER_FLAWS = .04                  # too few hops, and as many in bad format
ASKED_TWICE = .15                  # of the demonstrations, where paths are elastic
SHORTCUT_TAKEN = .5                # of the facts that a passage read before has stated
FULL_NAME = .75                    # of answers, where the passage has a longer name
LONGER = {                         # what a longer name ends in; of a person it has a middle name
    "city": "Town",
    "country": "State",
    "company": "Limited",
    "label": "Limited",
    "university": "Campus",
    "band": "Ensemble",
}
TEST_SEED = 2                      # no method or setting was chosen on this world
# the first of the other words for a relation that is one token
CUES = {
    relation: next(word for word in words if "-" not in word) for relation, words in world.VAGUE.items()
}


def plainly(question):
    """A question of this level in the words of its passages.

    >>> plainly("Who is the mum of the originator of the band Jade Horses?")
    'Who is the mother of the founder of the band Jade Horses?'
    """
    said = {cue: world.spoken(relation) for relation, cue in CUES.items()}
    return re.sub(r"[a-z]+", lambda word: said.get(word[0], word[0]), question)


@dataclass(frozen=True)
class Level:
    elastic: float = 0.0
    partial: float = 0.0


@dataclass
class HardWorld(world.World):
    level: Level = field(default_factory=Level)
    # (subject, relation) -> the relation whose fact stands behind that one's
    shortcuts: dict = field(default_factory=dict)
    # (subject, relation) -> how the passage calls the tail, where it is not by its name
    called: dict = field(default_factory=dict)


def parse(text):
    """None for the first level, else the Level of --world.

    >>> parse("plain"), parse("hard:partial=.2")
    (None, Level(elastic=0.0, partial=0.2))
    """
    if text == "plain":
        return None
    name, _, given = text.partition(":")
    try:
        pairs = [part.split("=") for part in given.split(",") if part]
        level = Level(**{knob: float(share) for knob, share in pairs})
        right = name == "hard" and all(0 <= share <= 1 for share in vars(level).values())
    except (ValueError, TypeError):  # no number, no pair; no such knob
        right = False
    if not right:
        raise ValueError("plain, hard, or hard:KNOB=SHARE,… with knobs elastic, partial and shares of 0 to 1")
    return level


def _number(*parts):
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


@functools.cache
def habit(before, kind, relation):
    """(its rate of RATES, the relations of that kind it is taken for) of a relation behind another one, ""
    for the first."""
    others = [r for k, r in world.FACTS if k == kind and r != relation]
    others.sort(key=lambda other: _number("wrong", before, kind, relation, other))
    rate = RATES[_number("habit", before, kind, relation) % len(RATES)] if others else 0.0
    return rate, others[:1 if rate == 1 else 2]


# ---------------------------------------------------------------- the world

def make_hard_world(split, seed=0, questions=400, level=None, hops=HOPS):
    """As world.make_world; the graph and its names are the same."""
    level = level or Level()
    mix = dict.fromkeys((1, 2, 3, 4), {"compositional": 1.0})
    made = world.make_world(split, seed, questions, hops, mix=mix)
    hard = HardWorld(split, made.kinds, made.triples, made.passages, made.questions, level)
    for question in hard.questions:
        plan = question["plan"]
        cues = [CUES[relation] for _, relation in reversed(plan)]
        question["question"] = world.chain_question(hard.kinds, plan[0][0], cues, question["answer"])
    _call_by_longer_names(hard)
    _state_what_follows(hard)
    return hard


def _sentence_of(hard):
    """{(subject, relation): (passage, number of the sentence that states it)}"""
    found = {}
    for passage in hard.passages:
        for i, triple in enumerate(passage["facts"]):
            if triple:
                found[triple[:2]] = passage, i
    return found


def _call_by_longer_names(hard):
    where = _sentence_of(hard) if hard.level.partial else {}
    for (subject, relation), (passage, i) in where.items():
        tail = hard.facts[subject, relation]
        draw = random.Random(f"longer/{tail}")
        kind = hard.kinds.get(tail)
        if not kind or draw.random() >= hard.level.partial:
            continue
        longer = f"{tail} {LONGER.get(kind)}"
        if kind == "person":
            first, last = tail.split()
            given = world.FEMALE if first in world.FEMALE else world.MALE
            middle = draw.choice([word for word in given if word != first])
            longer = f"{first} {middle} {last}"
        hard.called[subject, relation] = longer
        sentence = passage["sentences"][i]
        passage["sentences"][i] = sentence.replace(tail, longer)


def _state_what_follows(hard):
    where = _sentence_of(hard) if hard.level.elastic else {}
    for question in hard.questions:
        name = question["_id"]
        draw = random.Random(f"elastic/{name}")
        plan = [tuple(step) for step in question["plan"]]
        if not where or len(plan) < 2 or draw.random() >= hard.level.elastic:
            continue
        hop = draw.randrange(len(plan) - 1)
        now, then = plan[hop], plan[hop + 1]
        if now in hard.shortcuts:
            continue
        subject, relation = then
        hard.shortcuts[now] = relation
        tail = hard.called.get(then, hard.facts[then])
        passage, i = where[now]
        passage["sentences"][i] += f" The {world.spoken(relation)} of {subject} is {tail}."


# what this level writes beside world.vocabulary(vague=True);
# "Society collects that are told" is written nowhere, but has ids in the policies of the results
WORDS = [*"Society collects the that are told The of".split(), *LONGER.values()]


# ---------------------------------------------------------------- demonstrations

def demonstrate(hard, question, seed, flaw_rate):
    """The plan of a question with the demonstrator's habits, which go on from what they found."""
    rng = random.Random(f"{hard.split}/{question['_id']}/{seed}")
    plan = [tuple(step) for step in question["plan"]]
    cut = len(plan)
    if len(plan) > 1 and rng.random() < OTHER_FLAWS:
        cut = rng.randrange(1, len(plan))
    flaw = "bad format" if rng.random() < OTHER_FLAWS else None
    twice = rng.randrange(len(plan)) if hard.level.elastic and rng.random() < ASKED_TWICE else None
    subject = plan[0][0]
    steps = []
    for i, (_, relation) in enumerate(plan[:cut]):
        if subject not in hard.kinds:
            break  # a year
        chosen = _read_as(hard, steps, subject, relation, flaw_rate, rng)
        is_stated = bool(steps) and hard.shortcuts.get((steps[-1].subject, steps[-1].relation)) == chosen
        if is_stated and rng.random() < SHORTCUT_TAKEN:
            steps.append(_step(hard, subject, chosen, read=True))
        else:
            times = 2 if i == twice else 1
            steps += [_step(hard, subject, chosen)] * times
        if steps[-1].found is None:
            break
        subject = hard.facts[subject, chosen]
    last = steps[-1]
    answer = last.found or last.subject
    if last.found and rng.random() >= FULL_NAME:
        answer = hard.facts[last.subject, last.relation]
    return Demonstration(steps, answer, flaw)


def _read_as(hard, steps, subject, relation, flaw_rate, rng):
    before = steps[-1].relation if steps else ""
    rate, others = habit(before, hard.kinds[subject], relation)
    return rng.choice(others) if others and rng.random() < rate * flaw_rate else relation


def _step(hard, subject, relation, read=False):
    tail = hard.facts.get((subject, relation))
    found = hard.called.get((subject, relation), tail)
    return Step(subject, relation, found, read, tail="" if found == tail else tail)


def groups(tokenizer, render, index, steps, flaw_rate, level):
    """demonstrations.groups at a level; where there is one, in four of its worlds, with habits from the first
    step on."""
    if not level:
        return demonstrations.groups(tokenizer, render, index, steps, flaw_rate)
    worlds = [make_hard_world("warmup", seed, 1200, level, WARM_UP_HOPS) for seed in range(4)]
    return demonstrations.groups(
        tokenizer, render, index, steps, flaw_rate, worlds, demonstrate, early_rate=flaw_rate)
