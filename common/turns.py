"""What an agent leaves: turns, trajectories of turns, and the seeds of both. Imports nothing of ours."""

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass, field

# the place of the agent that runs now, and of all that it gathers: the engine takes up the first ones first
PLACE = ContextVar("place", default=0)


@dataclass(eq=False)
class Turn:
    """What the policy sampled in one go, and the observation that followed. Paths of a tree share them."""
    ids: list[int]                  # sampled, stop token included
    logprobs: list[float]           # of the sampler, one per token
    stop_reason: str
    text: str                       # decoded, for parsing only; training uses ids
    observation_ids: list[int] = field(default_factory=list)
    observation: str = ""

    @property
    def entropy(self):
        """Mean negative log-likelihood of the sampled tokens, nats (AT2PO Eq 2)."""
        return -sum(self.logprobs) / max(1, len(self.logprobs))


@dataclass
class Outcome:
    """What a trajectory came to. Metrics, guards and the page read this; scripts add fields of their own."""
    answer: str | None = None   # as it was read, None where there is none
    problem: str = ""           # what is wrong with the format, empty where nothing is
    em: float = 0.0             # exact match of the answer with a gold one
    f1: float = 0.0
    searches: int = 0           # that the trajectory made


@dataclass(eq=False)
class Trajectory:
    """A prompt and the turns that followed it."""
    question_id: str
    prompt_ids: list[int]
    turns: list[Turn]
    reward: float = 0.0
    advantages: list[float] = field(default_factory=list)   # one per turn, from the paper's credit rule
    info: Outcome = field(default_factory=Outcome)          # why it has this reward

    @property
    def sampled_tokens(self):
        return sum(len(t.ids) for t in self.turns)

    @property
    def length(self):
        return len(self.prompt_ids) + sum(len(t.ids) + len(t.observation_ids) for t in self.turns)


def sampled_text(tokenizer, ids, stop_reason):
    """What was sampled, as text, without the token that ends the sequence. Special tokens are text too: a
    model's tags may be registered as such."""
    return tokenizer.decode(ids[:-1] if stop_reason == "eos" else ids)


def context_ids(prompt_ids, turns):
    """What the policy reads next: the prompt and all that was sampled and observed since."""
    return prompt_ids + [i for t in turns for i in t.ids + t.observation_ids]


def stable_seed(*parts):
    """A 63-bit seed from (run seed, question id, sample path, turn, …), the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def question_seeds(questions, *parts):
    """A seed per question. A question drawn twice in a step gets two seeds, so that its samples differ."""
    ids = [q.id for q in questions]
    drawn_before = [ids[:i].count(name) for i, name in enumerate(ids)]
    return [stable_seed(*parts, name, n) for name, n in zip(ids, drawn_before, strict=True)]


def tree_seeds(questions, *parts):
    """As question_seeds, but of a question that is drawn once without a number."""
    ids = [q.id for q in questions]
    seeds = []
    for i, name in enumerate(ids):
        again = ids[:i].count(name)
        seeds.append(stable_seed(*parts, name, *(("again", again) if again else ())))
    return seeds
