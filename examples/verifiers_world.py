"""The embedded world as an environment of verifiers 0.4 (pip install verifiers uv), scored as here.

    PYTHONPATH=.:examples vf-eval verifiers_world -m MODEL --env.taskset.questions 100
    env = load_environment(split="test", questions=100)         # from Python
    env = load_environment(data="my.jsonl", corpus="my_corpus.jsonl")

at2po.py's own agent plays. Where it samples a turn, the model is asked for a message; what a search finds is
the user's next message (in at2po.py it stands inside the assistant's). Prompt, limits, format rule and exact
match are those of at2po.py.
"""

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import verifiers.v1 as vf

import at2po
from common import data, retriever
from common.agent import Player
from common.engine import Generation
from common.rollout import Policy, Trajectory
from common.serve.served import TextTokenizer, ending
from common.world import splits

CONFIG = at2po.Config(prompt_form="chat", stop_at_answer=True, top_k=1)
STOPS = [at2po.SEARCH[1], at2po.ANSWER[1]]


class Question(vf.TaskData):
    answers: list[str] = []


class WorldConfig(vf.TasksetConfig):
    split: str = "test"
    questions: int = 100
    data: str = ""          # your own questions, as docs/data.md has them, with the corpus that is searched
    corpus: str = ""


class World(vf.Taskset[vf.Task[Question], WorldConfig]):
    """Each task is a question of the embedded world's first level, or of a file of yours."""

    def __init__(self, config):
        super().__init__(config)
        if config.data:
            asked = data.load_questions(config.data, config.questions)
            search = retriever.make_retriever("bm25", data.load_corpus(config.corpus))
            self.world = data.Split(config.data, asked, search)
        else:
            self.world = splits.world_split(config.split, questions=config.questions)

    def load(self):
        for q in self.world.questions:
            row = Question(
                id=q.id,
                prompt=q.question,
                system_prompt=at2po.SYSTEM_PROMPT,
                answers=q.answers,
            )
            yield vf.Task[Question](row, self.config.task)


class SearchConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        sampling={"stop": STOPS},
    )


class Said:
    """Stands where an engine stands: a turn is the model's next message."""

    def __init__(self, talk, tokenizer, prompt_ids):
        self.talk = talk
        self.tokenizer = tokenizer
        self.read = len(prompt_ids)

    async def generate(self, prompt_ids, stop, max_tokens, temperature, seed):
        observed = self.tokenizer.decode(prompt_ids[self.read:])
        segment = await self.talk.turn(observed.strip() or None)
        text = segment.last_reply
        found = ending(text, stop)      # servers leave the stop string out
        ids = self.tokenizer.said(text + found)
        self.read = len(prompt_ids) + len(ids)
        return Generation(ids, [0.0] * len(ids), found or "eos")


class SearchWorld(vf.Env[SearchConfig]):
    async def run(self, task, agents):
        async def search(query, k):
            found = self.taskset.world.retriever.search([query], k)
            return found[0]

        row = task.data
        tokenizer = TextTokenizer()
        prompt_ids = at2po.render_prompt(tokenizer, row.prompt, CONFIG.prompt_form)
        async with agents.agent.interaction(task) as talk:
            policy = Policy(None, tokenizer, Said(talk, tokenizer, prompt_ids))
            player = Player(policy, search, prompt_ids, CONFIG, 0, 1.0)
            leaf = await at2po.play(player, at2po.Node(), "verifiers")
            played = Trajectory(row.id, prompt_ids, leaf.turns())
            asked = data.Question(row.id, row.prompt, row.answers)
            at2po.score(played, asked, CONFIG)
            talk.trace.record_reward("exact_match", played.reward)
            talk.trace.record_metric("searches", played.info.searches)


def load_environment(**taskset):
    """taskset: fields of WorldConfig."""
    named = {"id": "verifiers_world", **taskset}
    config = vf.resolve_env_config({"taskset": named})
    return vf.load_environment(config)


__all__ = ["SearchWorld", "World"]
