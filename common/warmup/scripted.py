"""Demonstrations that the agent plays itself: a script says what the policy would sample, and the agent's own
loop searches, reads and goes on. So no second agent has to be kept in step with the first."""

from common import chat, rollout
from common.engine import Generation


class Script:
    """Stands where an engine stands. lines: the turns to come, each (stop, *parts), the string that ends it
    and parts as chat.encode takes them. Nobody reads the log-probs of what it says."""

    busy = False

    def __init__(self, tokenizer, lines):
        self.tokenizer = tokenizer
        self.lines = iter(lines)

    async def generate(self, prompt_ids, **sampling):
        stop, *parts = next(self.lines)
        ids = chat.encode(self.tokenizer, *parts)[1]
        return Generation(ids, [0.0] * len(ids), stop)


def in_tags(query):
    return " <search> ", chat.Foreign(query), " </search>"


def search_lines(demo, *answer, call=in_tags):
    """The lines of a demonstration for an agent that thinks in <think> tags. answer: the parts that end the
    last one. call(query) -> the parts of a search, at whose last tag it stops."""
    *thoughts, last = map(chat.Foreign, demo.thoughts())
    lines = []
    for thought, query in zip(thoughts, demo.queries(), strict=True):
        asked = call(query)
        lines.append((asked[-1].strip(), "<think> ", thought, " </think>", *asked))
    return [*lines, ("</answer>", "<think> ", last, " </think> ", *answer)]


def play(tokenizer, lines, retriever, agent):
    """What agent(policy, search) returns, a coroutine of a script's, where `lines` are said in place of a
    model."""
    policy = rollout.Policy(None, tokenizer, Script(tokenizer, lines))
    return rollout.run_alone(agent, policy, retriever)
