"""What you bring: a team, a policy of three words, and an agent that says one of them."""
import asyncio
from dataclasses import dataclass

import torch
from turns import Trajectory, Turn, stable_seed

R_SUP = 1.0


@dataclass
class Cfg:
    seed: int = 0
    keep: int = 3
    max_attempts: int = 16


class Team:
    """rewards: of a question's attempts, in order; without them the policy is sampled."""
    def __init__(self, rewards=None):
        self.cfg, self.rewards, self.asked = Cfg(), rewards, []
        self.logits = torch.zeros(3, requires_grad=True)

    def run(self, agents):
        async def together():
            return await asyncio.gather(*agents)
        return asyncio.run(together())


@dataclass
class Question:
    id: str


async def plan(team, question, attempt, seed):
    team.asked.append((question.id, attempt))
    number = int(attempt.removeprefix("attempt"))
    if team.rewards:
        return Trajectory(question.id, [], [], team.rewards[question.id][number])
    generator = torch.Generator().manual_seed(stable_seed(seed, attempt) % 2**31)
    word = int(torch.multinomial(team.logits.detach().softmax(0), 1, generator=generator))
    return Trajectory(question.id, [], [Turn([word], [0.0], "eos", "")], [0.0, .5, 1.0][word])
