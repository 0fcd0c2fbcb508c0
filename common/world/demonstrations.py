"""Scripted demonstrations in the embedded world: what the tiny policy is warmed up on.

A demonstration is plain steps (what is asked of whom, what is found, what is answered); each script renders
them in its own tags. Flaws are drawn in, so that reinforcement learning has something to mend."""

import random
from dataclasses import dataclass

from common.world import FACTS, NAMES, make_world, spoken

# kind: its share
FLAWS = {
    "wrong relation": .3, "too few hops": .3, "bad format": .2,
    "wrong entity": .1, "from nowhere": .1,
}


@dataclass
class Step:
    """One hop: ask for `relation` of `subject`, find `found` (None: the passage does not say)."""
    subject: str
    relation: str
    found: str | None
    read: bool = False  # found in a passage that an earlier step has read: nothing is asked
    tail: str = ""      # the entity's name where the passage calls it otherwise


@dataclass
class Demonstration:
    steps: list[Step]
    answer: str
    flaw: str | None = None  # a key of FLAWS; "bad format" is for the script to render in its own tags

    def queries(self):
        return [f"{step.subject} {spoken(step.relation)}" for step in self.steps if not step.read]

    def thoughts(self):
        """One before each search, and one before the answer."""
        thoughts, found = [], ""
        for step in self.steps:
            if not step.read:
                thoughts.append(f"{found}now {spoken(step.relation)} of {step.subject}")
                found = ""
            found += f"found {spoken(step.relation)} {step.found or 'nothing'} ; "
        return [*thoughts, f"{found}answer"]


def demonstrate(world, question, seed, flaw_rate):
    """The plan of a question of `world` as plain steps; with probability `flaw_rate` one flaw of FLAWS is
    drawn in."""
    rng = random.Random(f"{world.split}/{question['_id']}/{seed}")
    kinds = world.kinds
    answer = question["answer"]
    plan = []
    for subject, relation in question["plan"]:
        plan.append(Step(subject, relation, world.facts[subject, relation]))
    if rng.random() >= flaw_rate:
        return Demonstration(plan, answer)
    flaw = rng.choices(list(FLAWS), list(FLAWS.values()))[0]
    if flaw == "bad format":
        return Demonstration(plan, answer, flaw)
    if flaw == "from nowhere" or (flaw == "too few hops" and len(plan) == 1):
        kind = kinds.get(answer, "person")
        same = [e for e, k in kinds.items() if k == kind and e != answer]
        cut = plan[:rng.randrange(len(plan))]
        return Demonstration(cut, rng.choice(same), "from nowhere")
    if flaw == "too few hops":
        cut = plan[:rng.randrange(1, len(plan))]
        return Demonstration(cut, cut[-1].found, flaw)
    i = rng.randrange(len(plan))
    subject = plan[i].subject
    relation = plan[i].relation
    kind = kinds[subject]
    if flaw == "wrong relation":
        others = [r for k, r in FACTS if k == kind and r != relation]
        relation = rng.choice(others or [relation])
    else:
        others = [e for e, k in kinds.items() if k == kind and e != subject]
        words = set(subject.split())
        like = [e for e in others if words & set(e.split())]
        subject = rng.choice(like or others)
    found = world.facts.get((subject, relation))
    wrong = Step(subject, relation, found)
    return _carry_on(world, question, plan, i, wrong, flaw)


def _carry_on(world, question, plan, i, wrong, flaw):
    """After a wrong step the demonstrator goes on from what it found, as far as the graph carries it."""
    steps = plan[:i] + [wrong]
    for later in plan[i + 1:]:
        subject = later.subject
        relation = later.relation
        if subject == plan[len(steps) - 1].found:
            subject = steps[-1].found
        if subject is None or (subject, relation) not in world.facts:
            break
        found = world.facts[subject, relation]
        steps.append(Step(subject, relation, found))
    if question["type"] in ("compositional", "inference"):
        answer = steps[-1].found or wrong.subject
    else:  # a comparison that went wrong ends on a guess
        options = ["yes", "no"]
        if question["answer"] not in options:
            options = [s for s, _ in question["plan"] if s in question["question"]]
        answer = options[len(steps) % len(options)]
    return Demonstration(steps, answer, flaw)


def name_ids(tokenizer):
    """Lists of ids of the words that play the same part in names, no word in two of them."""
    lists, seen = [], set()
    for words in [words for first, second, _ in NAMES.values() for words in (first, second)]:
        new = [word for word in words if word not in seen]
        if new:
            lists.append(tokenizer.convert_tokens_to_ids(new))
        seen.update(words)
    return lists


def exchanged(names, rng):
    """{a name's word: the one that takes its place}, as ids; names: name_ids."""
    new = {}
    for ids in names:
        new.update(zip(ids, rng.sample(ids, len(ids)), strict=True))
    return new


def groups(tokenizer, render, index, steps, flaw_rate,
           worlds=None, demonstrate=demonstrate, early_rate=.1):
    """Yields `steps` lists of the trajectories of eight demonstrations from four warm-up worlds, the same in
    every run. The words of names change places in each trajectory (given names among given names, and so on),
    so that the policy learns to read names, not to remember them. A shuffled name may be spelled like one of
    another split; what is said of it has nothing to do with the facts there.

    index(world) -> what render reads; render(question row, demonstration, index of its world) ->
    [Trajectory]. worlds, demonstrate: of another level (world/hard.py)."""
    worlds = worlds or [make_world("warmup", seed, questions=1500) for seed in range(4)]
    worlds = [(world, index(world)) for world in worlds]
    names = name_ids(tokenizer)
    rng = random.Random(0)

    def shuffled(trajectory):
        new = exchanged(names, rng)
        trajectory.prompt_ids = [new.get(i, i) for i in trajectory.prompt_ids]
        for turn in trajectory.turns:
            turn.ids = [new.get(i, i) for i in turn.ids]
            turn.observation_ids = [new.get(i, i) for i in turn.observation_ids]
        return trajectory

    for step in range(steps):
        world, its_index = rng.choice(worlds)
        rate = flaw_rate if step >= .8 * steps else early_rate  # first learn to read, then bad habits
        trajectories = []
        for question in rng.sample(world.questions, 8):
            demonstration = demonstrate(world, question, step, rate)
            rendered = render(question, demonstration, its_index)
            trajectories += map(shuffled, rendered)
        yield trajectories
