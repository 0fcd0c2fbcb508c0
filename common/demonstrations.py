"""Scripted demonstrations in the embedded world: what the tiny policy is warmed up on.

A demonstration is plain steps (what is asked of whom, what is found, what is answered); each script renders them in its own tags.
Flaws are drawn in, so that reinforcement learning has something to mend."""

import random
from dataclasses import dataclass

from common.world import FACTS, NAMES, make_world

FLAWS = {"wrong relation": .3, "too few hops": .3, "bad format": .2, "wrong entity": .1, "from nowhere": .1}  # kind: its share


@dataclass
class Step:
    """One hop: ask for `relation` of `subject`, find `found` (None: the passage does not say)."""
    subject: str
    relation: str
    found: str | None


@dataclass
class Demonstration:
    steps: list[Step]
    answer: str
    flaw: str | None = None  # a key of FLAWS; "bad format" is for the script to render in its own tags


def demonstrate(world, question, seed, flaw_rate):
    """The plan of a question of `world` as plain steps; with probability `flaw_rate` one flaw of FLAWS is drawn in."""
    rng = random.Random(f"{world.split}/{question['_id']}/{seed}")
    plan = [Step(s, r, world.facts[s, r]) for s, r in question["plan"]]
    if rng.random() >= flaw_rate:
        return Demonstration(plan, question["answer"])
    flaw = rng.choices(list(FLAWS), list(FLAWS.values()))[0]
    if flaw == "bad format":
        return Demonstration(plan, question["answer"], flaw)
    if flaw == "from nowhere" or (flaw == "too few hops" and len(plan) == 1):
        kind = world.kinds.get(question["answer"], "person")
        same = [e for e, k in world.kinds.items() if k == kind and e != question["answer"]]
        cut = plan[:rng.randrange(len(plan))]
        return Demonstration(cut, rng.choice(same), "from nowhere")
    if flaw == "too few hops":
        cut = plan[:rng.randrange(1, len(plan))]
        return Demonstration(cut, cut[-1].found, flaw)
    i = rng.randrange(len(plan))
    subject, relation = plan[i].subject, plan[i].relation
    if flaw == "wrong relation":
        relation = rng.choice([r for (k, r) in FACTS if k == world.kinds[subject] and r != relation] or [relation])
    else:
        like = [e for e in world.kinds if e != subject and world.kinds[e] == world.kinds[subject] and set(e.split()) & set(subject.split())]
        subject = rng.choice(like or [e for e, k in world.kinds.items() if k == world.kinds[subject] and e != subject])
    wrong = Step(subject, relation, world.facts.get((subject, relation)))
    return _carry_on(world, question, plan, i, wrong, flaw)


def _carry_on(world, question, plan, i, wrong, flaw):
    """After a wrong step the demonstrator goes on from what it found, as far as the graph carries it."""
    steps = plan[:i] + [wrong]
    for later in plan[i + 1:]:
        subject = steps[-1].found if later.subject == plan[len(steps) - 1].found else later.subject
        if subject is None or (subject, later.relation) not in world.facts:
            break
        steps.append(Step(subject, later.relation, world.facts[subject, later.relation]))
    if question["type"] in ("compositional", "inference"):
        answer = steps[-1].found or wrong.subject
    else:  # a comparison that went wrong ends on a guess
        options = [s for s, _ in question["plan"] if s in question["question"]] if question["answer"] not in ("yes", "no") else ["yes", "no"]
        answer = options[len(steps) % len(options)]
    return Demonstration(steps, answer, flaw)


def name_words():
    """Lists of words that play the same part in names, no word in two of them."""
    seen, lists = set(), []
    for words in dict.fromkeys(tuple(x) for first, second, _ in NAMES.values() for x in (first, second)):
        lists.append([w for w in words if w not in seen])
        seen.update(words)
    return lists


def groups(tokenizer, render, index, steps, flaw_rate, size):
    """Yields `steps` lists of the trajectories of eight demonstrations from four warm-up worlds, the same in every run. The words of names change places in
    each trajectory (given names among given names, and so on), so that the policy learns to read names, not to remember them. A
    shuffled name may be spelled like one of another split; what is said of it has nothing to do with the facts there.

    index(world) -> what render reads; render(question row, demonstration, index of its world) -> [rollout.Trajectory]."""
    worlds = [make_world("warmup", seed=s, size=size, questions=1500) for s in range(4)]
    indexes = [index(w) for w in worlds]
    names, rng = [tokenizer.convert_tokens_to_ids(words) for words in name_words()], random.Random(0)

    def shuffled(trajectory):
        new = {a: b for ids in names for a, b in zip(ids, rng.sample(ids, len(ids)), strict=True)}
        trajectory.prompt_ids = [new.get(i, i) for i in trajectory.prompt_ids]
        for turn in trajectory.turns:
            turn.ids, turn.observation_ids = [new.get(i, i) for i in turn.ids], [new.get(i, i) for i in turn.observation_ids]
        return trajectory
    for step in range(steps):
        world, its_index = rng.choice(list(zip(worlds, indexes, strict=True)))
        rate = flaw_rate if step >= .8 * steps else .1  # first learn to read, then bad habits
        yield [shuffled(t) for q in rng.sample(world.questions, 8) for t in render(q, demonstrate(world, q, step, rate), its_index)]
