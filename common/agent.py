"""A script's agent, as --ask, evaluations, demonstrations, warm-ups, --collect and the embedded world's tiny
policy need it. No paper talks about these, so the script only declares what its agent writes:

    AGENT = Agent("bi_rar", play, render_prompt, …)
"""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from common import chat, data, metrics, rollout, splits, tool_search
from common import model as models
from common.files import console, plain, say


def after_warm_up(cfg, learn_first, runs=()):
    """cfg; with --warmup-data its --checkpoint is the folder that learn_first(cfg, start) leaves. runs:
    opened before the warm-up, so that one that cannot go on is refused at once. They get this --checkpoint,
    too; their config.json keeps the flags as given."""
    if not cfg.warmup_data:
        return cfg
    models.find_start(cfg)  # refuses what is no model
    folder = learn_first(replace(cfg, ask="", collect=""), cfg.checkpoint or cfg.model)
    for run in runs:
        run.cfg = replace(run.cfg, checkpoint=str(folder))
    return replace(cfg, checkpoint=str(folder))


def show_turn(turn):
    """On the terminal, while its trajectory is played."""
    console.print(plain(turn.text))
    console.print(f"  [dim]{plain(turn.observation[:600])}[/dim]")


@dataclass(frozen=True)
class Player:
    """What all turns of one question share.

    policy: has a tokenizer and an engine whose `generate` takes ids and gives token_ids, logprobs and
    stop_reason: the string it stopped at, "eos", or "length". search: await search(query, k) -> passages.
    cfg: the agent's settings. watch(turn): called after each turn."""

    policy: "rollout.Policy"
    search: "rollout.BatchedSearch"
    prompt_ids: list
    cfg: object
    seed: int
    temperature: float
    watch: "Callable | None" = None


@dataclass(frozen=True)
class Agent:
    """An agent that writes <think>, <search> and <answer> tags. Its cfg has, besides the shared flags, top_k,
    max_searches, max_passage, max_prompt, eval_temperature, and perhaps max_response and prompt_form. Of an
    agent with other tags `play`, `prompt` and `rows_of` are enough for --ask, evaluations and --collect."""

    script: str
    # play(player, question, name): a coroutine that returns the scored Trajectory; name tells its seeds from
    # those of the question's other trajectories
    play: Callable
    prompt: Callable            # prompt(tokenizer, data.Question, cfg) -> ids
    result: Callable = None     # result(tokenizer, text, cfg) -> (text, ids) of a search result
    around: tuple = ()          # pairs: what stands before and after the text of a result
    tags: tuple = ()            # single tokens of the world's tokenizer, as are the words
    words: str = ""
    answer: tuple = ()          # what stands before and after the answer of a demonstration
    flawed: tuple = ()          # the same where its format is to be wrong
    real: tuple = ()            # as `answer`, of demonstrations of real questions
    system: str = ""            # of a conversation on file, with its first message
    request: str = "{question}"
    ends: Callable = lambda cfg: "none"     # which messages the policy ends itself: none | last
    hard: tuple = (1550, .8)    # (steps, flaw rate) of the tiny policy's warm-up with --world hard
    rows_of: Callable = None    # rows_of(trajectory, question) -> rows of --collect, other than `rows`

    # ---- playing

    def player(self, policy, search, question, cfg, seed, temperature, watch=None):
        prompt_ids = self.prompt(policy.tokenizer, question, cfg)
        return Player(policy, search, prompt_ids, cfg, seed, temperature, watch)

    def evaluate(self, policy, split, cfg, progress, prediction, keys=("em", "f1", "searches", "tokens")):
        """(rows, summary) of an evaluation. prediction(trajectory, question) -> a row; keys: its numbers."""
        trajectories = self.answers(policy, split, cfg, progress)
        rows = [prediction(t, q) for t, q in zip(trajectories, split.questions, strict=True)]
        about = {
            "set": split.name,
            "seed": cfg.seed,
            "temperature": cfg.eval_temperature,
        }
        return rows, about | metrics.summarize(rows, keys)

    def answers(self, policy, split, cfg, progress):
        """A trajectory per question at --eval-temperature; --collect keeps the right ones."""
        policy.engine.sync(policy.model)
        search = rollout.BatchedSearch(split.retriever)
        agents = []
        for q in split.questions:
            seed = rollout.stable_seed(cfg.seed, "eval", q.id)
            player = self.player(policy, search, q, cfg, seed, cfg.eval_temperature)
            agents.append(self.play(player, q, "eval"))
        trajectories = rollout.run_agents(agents, policy.engine, search, progress)
        if cfg.collect:
            from common.warmup import sharegpt
            sharegpt.collect(cfg.collect, trajectories, split.questions, self.rows_of or self.rows)
        return trajectories

    def within_limit(self, policy, sets, cfg):
        """The splits (None stays None) with the questions whose prompts fit into --max-prompt; an overlong
        one is an error, or left out with --skip-bad."""
        longest = cfg.max_prompt + getattr(cfg, "max_response", 0)
        most = math.inf if policy.model is None else models.positions(policy.model.config)
        if longest > most:
            raise models.ModelError(f"--max-prompt and --max-response make sequences of {longest:,} tokens; "
                                    f"the model's positions end at {most:,}: lower one of them")

        def fits(q):
            return len(self.prompt(policy.tokenizer, q, cfg)) <= cfg.max_prompt

        kept = []
        for split in sets:
            if split is not None:
                questions = list(filter(fits, split.questions))
                overlong = len(split.questions) - len(questions)
                told = f"{split.name}: {overlong} prompts over --max-prompt {cfg.max_prompt} tokens"
                if overlong and not (cfg.skip_bad and questions):
                    raise data.DataError(f"{told}: raise it, or leave some out with --skip-bad")
                if overlong:
                    say(f"{told} are left out")
                split = replace(split, questions=questions)
            kept.append(split)
        return kept

    def ask(self, run, source, retriever, question=None):
        """--ask: one trajectory of the weights `source`, shown while it is played. question: the script's own
        Question, if it has one."""
        cfg, policy = run.cfg, run.policy(source, trains=False)
        question = question or data.Question("ask", cfg.ask, [""])

        def played(its_policy, search):
            seed = rollout.stable_seed(cfg.seed, "ask")
            player = self.player(its_policy, search, question, cfg, seed, cfg.eval_temperature, show_turn)
            return self.play(player, question, "ask")

        info = run.ask(policy, retriever, played, question.question).info
        wrong = f" ({info.problem})" if info.problem else ""
        console.print(f"[bold]answer: {plain(f'{info.answer}{wrong}')}[/bold]")

    # ---- conversations on file

    def rows(self, trajectory, question):
        """The row of --collect: results without what stands around them."""
        from common.warmup import sharegpt
        def shown(observation):
            for before, after in self.around:
                observation = observation.removeprefix(before).removesuffix(after)
            return observation

        asked = question.question
        request = self.request.replace("{question}", asked)
        return [sharegpt.row(trajectory, self.system, request, shown, script=self.script, question=asked)]

    # ---- demonstrations

    def demonstration(self, tokenizer, question, demo, retriever, cfg, answer=()):
        """The trajectory of a demonstration: the agent plays it, and says what the demonstration says."""
        from common.warmup import scripted
        before, after = answer or self.answer
        if demo.flaw == "bad format":
            before, after = self.flawed
        as_calls = getattr(cfg, "prompt_form", "") == "tools"
        call = tool_search.written if as_calls else scripted.in_tags
        lines = scripted.search_lines(demo, before, chat.Foreign(demo.answer), after, call=call)
        # a demonstration is played whole, without the agent's limits
        unlimited = replace(cfg, max_searches=len(lines) - 1)
        if hasattr(cfg, "max_response"):
            unlimited = replace(unlimited, max_response=sys.maxsize)

        def agent(policy, search):
            player = self.player(policy, search, question, unlimited, seed=0, temperature=1.0)
            return self.play(player, question, "demonstration")

        return scripted.play(tokenizer, lines, retriever, agent)

    def learn_first(self, paper_eval, cfg, source):
        """The folder of `source` after --warmup-data, whose demonstrations search the first evaluation set's
        passages."""
        _, [split, *_] = splits.load_splits(cfg, paper_eval)
        return self.warmed_up(cfg, source, split)

    def warmed_up(self, cfg, source, split):
        """Fine-tunes `source` on --warmup-data, without what is evaluated, and returns the folder. split: a
        data.Split whose passages demonstrations read."""
        from common.warmup import warmup

        def render(tokenizer, question, demo):
            trajectory = self.demonstration(tokenizer, question, demo, split.retriever, cfg, self.real)
            if self.ends(cfg) == "last":
                trajectory.turns[-1].ids.append(tokenizer.eos_token_id)
                trajectory.turns[-1].logprobs.append(0.0)
            return [trajectory]

        def reward(trajectories, question):
            t = trajectories[0]
            response = t.length - len(t.prompt_ids)
            too_long = response > getattr(cfg, "max_response", math.inf)
            if too_long or len(t.turns) > cfg.max_searches + 1:
                return None  # too long for the agent's limits
            if t.info.problem:
                return 0.0
            return t.info.em

        def prompt(tokenizer, row):
            if getattr(cfg, "prompt_form", "") == "tools":
                raise data.DataError(f"{cfg.warmup_data}: conversations with searches in tags, which "
                                     "--prompt-form tools does not write")
            return self.prompt(tokenizer, data.Question("", row["question"], []), cfg)

        def reply(tokenizer, turn_ids, observation):
            return self.result(tokenizer, observation, cfg)[1]

        examples = warmup.examples_of(
            cfg, self.script, models.load_tokenizer(source), split, render=render, reward=reward, reply=reply,
            prompt=prompt, ends=self.ends(cfg), top_k=cfg.top_k, max_passage=cfg.max_passage)
        return warmup.warmed_up(cfg, self.script, source, examples)

    # ---- the embedded world

    def tiny_policy(self, cfg):
        """Folder of the half-million-weight policy that the embedded world starts from: one that comes with
        the project (common/world/start), or one made here and cached."""
        from common.world import tiny

        def render(tokenizer, row, demo, retriever):
            return [self.demonstration(tokenizer, data.parse_question(row), demo, retriever, cfg)]

        words = re.findall(r"\w+|[^\w\s]", self.words)
        steps, flaw_rate = tiny.warm_up_of(cfg.world, cfg.warmup_steps, hard=self.hard)
        recipe = tiny.Recipe(self.script, steps, flaw_rate, cfg.top_k, cfg.world)
        return tiny.folder_of(tiny.Making(recipe, words, list(self.tags), render))
