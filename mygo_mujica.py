"""Mujica-MyGO: Reinforcing QA Agents with Minimalist Policy Gradient Optimization (arXiv 2505.17086).

Mujica is one model in two roles. The planner splits a question into sub-questions, one layer of a directed
acyclic graph at a time, and reads one sentence per sub-question; a worker answers one sub-question from the
passages it retrieves, or from the triples of one entity. The sub-questions of a layer run in parallel. MyGO
trains both roles by plain likelihood on sampled trajectories whose reward passes a threshold that rises with
the policy.

GRPO, except: there is no advantage, ratio, clip or KL. A trajectory that passes the threshold is learned by
its likelihood, the others are thrown away, and a question is asked again until three have passed or 16 were
made. The graph is never written down: the calls of one planner turn are one layer.

    Eq 1        planner and workers              plan, work
    sec. 3.3    rising threshold K               next_threshold
    D.1         multiple-attempt sampling        sample, attempts
    D.2         selection, planner and workers   select, conversations
    Eq 6        likelihood of sampled tokens     mle_loss, train     (Eq 4, GRPO, for comparison: baselines)
    D.3         warm-up                          warm_up, sft
    App. F      offline MyGO                     --stage offline
    Tables 7-10 prompts                          SYSTEM, SHOTS (at the end)

    python mygo_mujica.py                  few-shot, warm-up and MyGO in the text of the embedded world, five
                                           minutes; --envs kg does the same in its graph. ("few-shot" is there
                                           the start policy, which has learned flawed demonstrations)
    python mygo_mujica.py --stage offline  one stage: few-shot, warm-up, mygo, offline, fixed, grpo, star, …
    python mygo_mujica.py --model Qwen/Qwen2.5-7B-Instruct --data TRAIN.json --eval-data DEV.json   and one of
        --corpus contexts --retriever dense:BAAI/bge-large-en-v1.5           2Wiki-Text
        --envs kg --graph triples.jsonl                                      2Wiki-KG
        --envs kimi                                                          Hotpot-Kimi
Where paper, code and ours differ: docs/differences.md. Numbers reached: results/README.md.
"""

import asyncio
import itertools
import math
import random
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import chat, checkpoint, data, distributed, flags, kg, metrics, rollout, training
from common import model as models
from common.agent import Agent
from common.files import say, warn
from common.folder import left_by
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.of_mygo import places, records
from common.retriever import make_retriever
from common.rollout import Outcome, Policy, Trajectory, Turn, context_ids, question_seeds, stable_seed
from common.run import Run, make_engine, program, tell, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings. Behind |: where a value comes from; without it the choice is ours.
    common/flags.py has the flags of all scripts, recipes/world.toml the settings of the embedded world."""

    # ---- stages

    # what to do; all = few-shot, warm-up, mygo. The table before select() says what each learns from
    stage: Literal[
        "all", "few-shot", "warm-up", "mygo", "offline", "fixed", "grpo", "star", "raft", "raft++", "eval",
    ] = "all"
    envs: str = "text"              # text, kg, kimi (each question's own passages), or several with commas
    # kg: triples (.jsonl, .json, .tsv) or .graphml; or "evidences" = those of 2Wiki's questions, gold facts
    # and next to no others, far easier than Wikidata
    graph: str = ""

    # ---- agent
    top_k: int = 5                  # passages per sub-question
    max_triples: int = 20           # triples per sub-question
    max_words: int = 200            # words of a passage, triple or question, and 20 times as many characters
    max_rounds: int = 6             # planner turns
    max_parallel: int = 8           # sub-questions per turn
    max_turn: int = 512             # tokens sampled per turn
    max_prompt: int = 4096          # tokens of the planner's first prompt; longer ones are refused
    temperature: float = 1.0        # of sampling in training
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy

    # ---- warm-up
    sft_trajectories: int = 300     # few-shot trajectories with EM 1 to learn from (sec. 4.2 says 1k) | D.3
    sft_epochs: int = 3             # epochs over them
    sft_lr: float = 1e-5            # learning rate at the start | D.3
    sft_lr_final: float = 1e-6      # and at the end, cosine | D.3

    # ---- MyGO and its baselines

    # training questions, 2Wiki or HotpotQA: file, hub name, or "world" | sec. 4.1
    data: str = "hotpotqa"
    limit: int = 20000              # training questions, drawn at random; 0 = all | D.3
    steps: int = 20                 # iterations; 20,000 questions in all | D.3
    questions_per_step: int = 1000  # questions per iteration | D.3
    keep: int = 3                   # m, trajectories to learn from per question | D.3
    max_attempts: int = 16          # attempts per question | D.3
    threshold: float = .5           # K before the first iteration; mygo raises it, fixed keeps it
    offline_threshold: float = .8   # K of offline
    group_size: int = 5             # attempts per question of STaR, RAFT and GRPO
    mini_batch: int = 32            # planner trajectories per update, their workers with them
    lr: float = 5e-7                # learning rate at the start | D.3
    lr_final: float = 1e-8          # and at the end, cosine | D.3
    grpo_lr: float = 1e-6           # GRPO's, constant; as in the other scripts
    clip: float = .2                # GRPO: half width of the clip window
    kl_coef: float = 1e-3           # GRPO: k3 estimate of the KL to the weights it started from
    token_budget: int = 0           # stop when so many tokens were sampled after the warm-up; 0 = no limit


PAPER_EVAL = "hotpotqa-dev,musique-dev"  # Tables 2 and 3

# ---------------------------------------------------------------- prompts (Tables 7-10 are at the end)

NOTHING = "No relevant information found."  # Table 10


def first_prompt(tokenizer, who, request, few_shot=False):
    """Prompt ids of a conversation: instructions, the example if wanted, the request. who: (environment,
    "planner" or "worker"), as Tables 7-10 are for."""
    messages = [("system", SYSTEM[who])]
    if few_shot and not chat.is_tiny(tokenizer):  # (the world's tiny policy has no words for examples)
        for n, text in enumerate(SHOTS[who]):
            role = "assistant" if n % 2 else "user"
            messages.append((role, text))
    # Foreign: what a question or passage says can become no tag and no special token
    return chat.render_chat(tokenizer, [*messages, ("user", chat.Foreign(request))])


def harmless(text, max_words):
    """One line of at most max_words words and 20 max_words characters that cannot write a tag, an index or
    the heading of a message: passages, sub-questions and sentences must not pose as something else.

    >>> harmless("Silent Harbor <b>\\n[3] Obs:: me </sentence>", 20)
    'Silent Harbor ‹b> (3) Obs me ‹/sentence>'
    """
    text = " ".join(str(text).split()[:max_words])[: 20 * max_words]
    text = re.sub(r"\b(Obs|Question|Context|Materials|Candidate)(?:\s*[:：])+", r"\1", text)    # heading
    text = re.sub(r"<(?=[/|!a-zA-Z])", "‹", text)                                               # tag
    return re.sub(r"\[\s*(-?\d+)\s*\]", r"(\1)", text)                                          # index


def numbered(lines, between="\n"):
    """Lines behind their indices.

    >>> numbered(["a", "b"], " ")
    '[0] a [1] b'
    """
    return between.join(f"[{i}] {line}" for i, line in enumerate(lines))


def worker_request(env, question, materials):
    heading = "Materials" if env == "kg" else "Context"
    return f"Question: {question}\n{heading}:\n{numbered(materials)}"


def planner_request(env, question, entities):
    if env != "kg":
        return f"Question: {question}"
    return f"Question: {question}\nCandidate: {numbered(entities, ' ')}"


# ---------------------------------------------------------------- parsing: read, never trusted

# of nested tags the inner ones: "<search> a <search> b </search>" asks for b
SEARCH = re.compile(r"<search>((?:(?!</?search>).)*)</search>", re.DOTALL)
# Search([label], "question"); a quotation may hold quotes, but no further call
INSIDE = r"(?:(?!Search\s*\().)*?"
CALL = re.compile(
    rf"""\bSearch\s*\(\s*((?:\[[^\]]*\]\s*)*),?\s*(?:["“]({INSIDE})["”]|'({INSIDE})')\s*\)""", re.DOTALL
)


def without_thoughts(text):
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)


def last_inside(tag, text):
    """What the last <tag>…</tag> holds, on one line; None where there is none."""
    insides = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if insides:
        return " ".join(insides[-1].split())


def parse_plan(text, env, max_parallel):
    """(sub-questions [(label or None, text)], answer or None, Counter of faults) of a planner's turn.

    Only text outside <think>…</think> is parsed. If a turn both asks and answers, it counts as asking and its
    answer is ignored. Faults are counted for the log; they change no reward.

    >>> parse_plan("<think> … </think> <search> a </search> <search> b <search> c </search>", "text", 8)
    ([(None, 'a'), (None, 'c')], None, Counter({'bad call': 1}))
    >>> parse_plan('<action> Search([0], "Who wrote it?") Search([x], "When?") </action>', "kg", 8)
    ([(0, 'Who wrote it?')], None, Counter({'bad call': 1}))
    """
    text = without_thoughts(text)
    if env == "kg":
        calls, bad = calls_of_graph(text)
    else:
        calls, bad = calls_of_text(text)
    answer = last_inside("answer", text)
    faults = Counter({"bad call": bad, "too many": max(0, len(calls) - max_parallel)})
    if calls and answer is not None:  # it cannot have read what it asks for
        answer = None
        faults["answered while asking"] = 1
    if not calls and not answer:
        faults["no action"] = 1
    return calls[:max_parallel], answer or None, +faults  # (+ leaves out zeros)


def calls_of_text(text):
    """([(None, question)] of <search> tags, how many tags made none)"""
    questions = [" ".join(inside.split()) for inside in SEARCH.findall(text)]
    calls = [(None, question) for question in questions if question]
    tags = max(text.count("<search>"), text.count("</search>"))  # one that lacks its other half is a bad call
    return calls, tags - len(calls)


def calls_of_graph(text):
    """([(label, question)] of Search([label], "question"), how many calls could not be read)"""
    calls = []
    for labels, double, single in CALL.findall(text):
        label = re.fullmatch(r"\[\s*(-?\d{1,6})\s*\]\s*", labels)  # one label, a number
        question = " ".join((double or single).split())
        if label and question:
            calls.append((int(label[1]), question))
    begun = len(re.findall(r"\bSearch\s*\(", text))
    return calls, begun - len(calls)


def parse_report(text, materials):
    """(sentence or None, selected indices, what was wrong or "") of a worker's turn over so many materials;
    [-1]: no material fits, and the worker answers from its own knowledge (Table 8).

    >>> parse_report("<think> … </think> <select> [0][2] </select> <sentence> A is B. </sentence>", 3)
    ('A is B.', [0, 2], '')
    >>> parse_report("<select> [7] </select> <sentence> A is B. </sentence>", 3)
    (None, [], 'no such index')
    """
    text = without_thoughts(text)
    sentence = last_inside("sentence", text)
    if not sentence:
        return None, [], "no sentence"
    indices = []
    for bracket in re.findall(r"\[([^\]]*)\]", last_inside("select", text) or ""):
        indices += map(int, re.findall(r"-?\d{1,6}", bracket))  # [0][2], or [0, 2]
    if not indices:
        return None, [], "no selection"
    if indices == [-1]:
        return sentence, [], ""
    if any(not 0 <= i < materials for i in indices):
        return None, [], "no such index"
    return sentence, list(dict.fromkeys(indices)), ""


# ---------------------------------------------------------------- agent: planner and workers (Eq 1)

@dataclass
class Place(data.Split):
    """Where a team works: a data.Split (name, questions, retriever, graph) in one environment."""

    env: str = "text"  # or kg, which reads `graph`, or kimi
    few_shot: bool = False  # whether prompts have an example
    own: dict = field(default_factory=dict)  # kimi: question id -> a retriever over its own passages


@dataclass
class Team:
    """One model in both roles, in one place."""

    policy: Policy
    place: Place
    cfg: Config
    temperature: float
    search: object = None  # a BatchedSearch; its place's by default

    def __post_init__(self):
        self.search = self.search or rollout.BatchedSearch(self.place.retriever)

    def run(self, agents):
        """The results of coroutines, in order; engine and search batch what waits."""
        return rollout.run_agents(agents, self.policy.engine, self.search)

    def prompt(self, info):
        return first_prompt(self.policy.tokenizer, info.who, info.request, self.place.few_shot)

    async def say(self, info, prompt_ids, turns, seed):
        """The next Turn of a conversation, sampled to the end of its message. info: the speaker's Attempt or
        Report; sampling needs no more of it, a written demonstration speaks from it (Written)."""
        g = await self.policy.engine.generate(
            context_ids(prompt_ids, turns),  # all ids so far: token in, token out
            stop=(),
            max_tokens=self.cfg.max_turn,
            temperature=self.temperature,
            seed=seed,
        )
        text = rollout.sampled_text(self.policy.tokenizer, g.token_ids, g.stop_reason)
        return Turn(g.token_ids, g.logprobs, g.stop_reason, text)


def topic_entities(question, graph):
    """The gold topic entities that a graph's planner starts from (sec. 4.1), as the graph spells them: those
    that the data set names, else the heads of its evidences that no other evidence leads to (ours)."""
    entities_named = question.entities  # [[name, another name of the same, …]]
    if not entities_named:
        tails = {plain_name(tail) for _, _, tail in question.evidences}
        entities_named = [[head] for head, _, _ in question.evidences if plain_name(head) not in tails]
    entities = []
    for names in entities_named:
        in_graph = [name for name in names if name and name in graph]
        entities += in_graph[:1]  # the first name that the graph knows
    return list(dict.fromkeys(entities))


def plain_name(name):
    """A name without accents, case and punctuation: 2Wiki spells one entity in several ways."""
    name = unicodedata.normalize("NFKD", name.replace("ł", "l").replace("Ł", "L"))  # (ł does not decompose)
    return metrics.normalize_answer(name.encode("ascii", "ignore").decode())


def opening(place, question, cfg):
    """(entities that a graph's planner may name at the start, its request)"""
    entities = []
    if place.env == "kg":
        entities = topic_entities(question, place.graph)
    shown = [harmless(e, cfg.max_words) for e in entities]
    return entities, planner_request(place.env, harmless(question.question, cfg.max_words), shown)


async def materials_for(team, question, sub, entity):
    """Returns (the lines that a worker reads, the triples that they show). kg: the entity's triples, none for
    an unknown label; text: the best passages of the corpus, without titles; kimi: of the question's own."""
    cfg, place = team.cfg, team.place
    if place.env == "kg":
        facts = nearest_facts(sub, place.graph.facts(entity), cfg.max_triples)
        return [harmless(", ".join(fact), cfg.max_words) for fact in facts], facts
    if place.env == "kimi":
        if question.id not in place.own:
            place.own[question.id] = make_retriever(cfg.retriever, data.pool_contexts([question]))
        passages = place.own[question.id].search([sub], cfg.top_k)[0]
    else:
        passages = await team.search(sub, cfg.top_k)
    return [harmless(p.text, cfg.max_words) for p in passages], []


def nearest_facts(sub, facts, most):
    """All, or the `most` of them that share most words with the sub-question."""
    if len(facts) <= most:
        return facts
    words = set(metrics.normalize_answer(sub).split())

    def shared(fact):
        return len(words & set(metrics.normalize_answer(" ".join(fact)).split()))
    return sorted(facts, key=shared, reverse=True)[:most]


@dataclass
class Report:
    """What a worker was asked, read and said: the `info` of its Trajectory."""
    who: tuple                  # (environment, "worker")
    sub_question: str
    entity: str | None          # in a graph the one whose triples are read, None where the label is unknown
    materials: list = field(default_factory=list)   # lines that it reads
    facts: list = field(default_factory=list)       # in a graph the triples they show
    request: str = ""           # its user message
    sentence: str = NOTHING     # the report
    problem: str = ""           # why there is none
    selected: list = field(default_factory=list)    # indices of materials
    tokens: int = 0             # Attempt.tokens of its attempt, not its own


@dataclass
class Attempt(Outcome):
    """The `info` of a planner's Trajectory: what common.rollout.Outcome has (answer, problem, em and f1, 0
    without an answer, searches = sub-questions), and this."""
    who: tuple = ("text", "planner")
    request: str = ""           # the planner's user message
    entities: list = field(default_factory=list)    # in a graph entities[label]; grows as workers find more
    workers: list = field(default_factory=list)     # workers[i]: Trajectories of the workers of turns[i]
    faults: dict = field(default_factory=dict)      # {fault: how often}
    tokens: int = 0             # sampled by planner and all workers together: GRPO's loss divides by it


async def work(team, question, sub, entity, seed):
    """One worker reads, thinks, selects, and states one sentence: a Trajectory of one turn. If there is
    nothing to read or the label is unknown, the model is not sampled and the trajectory has no turns."""
    env, max_words = team.place.env, team.cfg.max_words
    info = Report((env, "worker"), harmless(sub, max_words), entity)
    info.materials, info.facts = await materials_for(team, question, info.sub_question, entity)
    if not info.materials:
        info.problem = "nothing to read"
        if env == "kg" and entity is None:
            info.problem = "unknown label"
        return Trajectory(question.id, [], [], info=info)
    info.request = worker_request(env, info.sub_question, info.materials)
    prompt_ids = team.prompt(info)
    turn = await team.say(info, prompt_ids, [], seed)
    sentence, info.selected, info.problem = parse_report(turn.text, len(info.materials))
    if sentence:
        info.sentence = harmless(sentence, max_words)
    return Trajectory(question.id, prompt_ids, [turn], info=info)


async def plan(team, question, name, seed, watch=None):
    """One answer to one question: the planner's loop, its workers in parallel. A Trajectory, its info an
    Attempt. name: distinguishes the attempts at one question, and their seeds. watch(turn): shows it."""
    place, cfg = team.place, team.cfg
    entities, request = opening(place, question, cfg)
    info = Attempt(who=(place.env, "planner"), request=request, entities=entities)
    prompt_ids = team.prompt(info)
    turns, faults, asked_before = [], Counter(), set()
    for k in range(cfg.max_rounds):
        turn = await team.say(info, prompt_ids, turns, stable_seed(seed, name, k))
        turns.append(turn)
        calls, info.answer, wrong = parse_plan(turn.text, place.env, cfg.max_parallel)
        faults += wrong
        if calls and k + 1 == cfg.max_rounds:  # nobody would read what they find: they are not made
            calls = []
            faults["out of rounds"] = 1
        new = set(calls) - asked_before
        faults["asked again"] += len(calls) - len(new)  # made in an earlier turn, or before in this one
        asked_before.update(calls)

        layer = []  # one layer of the graph: its workers run side by side
        for i, (label, sub) in enumerate(calls):
            entity = None
            if label is not None and 0 <= label < len(entities):
                entity = entities[label]
            layer.append(work(team, question, sub, entity, stable_seed(seed, name, k, "worker", i)))
        workers = await asyncio.gather(*layer)
        info.workers.append(workers)
        faults += Counter(f"worker: {w.info.problem}" for w in workers if w.info.problem)
        if workers:
            # in order: each may add to `entities`, whose positions are the labels
            turn.observation = "\n".join(observed(w.info, entities, place, cfg) for w in workers)
            # The observation has mask 0. If the turn was cut off, render_reply first writes the end of the
            # planner's message, which the policy did not sample: mask 0, too
            reply = chat.Foreign(turn.observation)
            turn.observation_ids = chat.render_reply(team.policy.tokenizer, turn.ids, reply)
        if watch:
            watch(turn)
        if not calls:  # an answer, or nothing that can be read
            break
    info.faults = dict(+faults)  # (+ leaves out zeros)
    return score(Trajectory(question.id, prompt_ids, turns, info=info), question)


def observed(report, entities, place, cfg):
    """What the planner reads of a worker: its sentence, and the next labels for the entities that its
    selected triples lead to, which are appended to `entities`. An entity without facts of its own gets none:
    nothing is to be read."""
    labels = []
    if report.facts:
        for i in report.selected:
            tail = report.facts[i][2]
            if tail not in entities and place.graph.facts(tail):
                labels.append(f"[{len(entities)}] {harmless(tail, cfg.max_words)}")
                entities.append(tail)
    line = f"Obs: {report.sentence}"
    if labels:
        line += f" Candidate: {' '.join(labels)}"
    return line


# ---------------------------------------------------------------- reward

def score(trajectory, question):
    """The trajectory with its reward, the F1 of the answer (sec. 4.1), 0 without one, and its info filled."""
    info = trajectory.info
    if info.answer:
        info.em = metrics.exact_match(info.answer, question.answers)
        info.f1 = metrics.f1(info.answer, question.answers)
    elif "out of rounds" in info.faults:
        info.problem = "out of rounds"
    else:
        info.problem = "no answer"
    trajectory.reward = info.f1
    info.searches = sum(map(len, info.workers))
    info.tokens = sum(c.sampled_tokens for c in conversations(trajectory))
    for c in conversations(trajectory):
        c.info.tokens = info.tokens
    return trajectory


def conversations(trajectory):
    """The conversations of one attempt, whose Trajectory is the planner's, each learned by itself (D.2): the
    planner's and each worker's single exchange. A worker that failed is learned too, unless it was not
    sampled."""
    return [trajectory] + [w for layer in trajectory.info.workers for w in layer if w.turns]


# ---------------------------------------------------------------- sampling and selection (sec. 3.3, D.1, D.2)

R_SUP = 1.0  # the largest reward there is: F1


def next_threshold(previous, mean_reward, r_sup=R_SUP):
    """K := max(K', (mean_r + r_sup) / 2), mean_r over the first attempts (sec. 3.3; the printed form would
    select nothing: see docs/differences.md). It stays a millionth below r_sup, so that r = r_sup passes.

    >>> next_threshold(.5, .4), next_threshold(.8, .4), next_threshold(.8, 1.0)
    (0.7, 0.8, 0.999999)
    """
    return min(max(previous, (mean_reward + r_sup) / 2), r_sup - 1e-6)


async def attempts(team, question, first, K, seed):
    """[first attempt, …] until m (team.cfg.keep) of them pass K, or max_attempts are made (D.1). Each round
    samples as many attempts as are still missing, so at most m can pass."""
    group, cfg = [first], team.cfg
    while True:
        passed = sum(t.reward > K for t in group)
        missing = min(cfg.keep - passed, cfg.max_attempts - len(group))
        if missing <= 0:
            return group
        names = [f"attempt{len(group) + i}" for i in range(missing)]
        group += await asyncio.gather(*(plan(team, question, name, seed) for name in names))


def sample(team, questions, step, K, rises=True):
    """([[attempt]] per question, K of this iteration). rises: K follows the mean reward of the first attempts
    alone, since further ones go to questions that are hard."""
    seeds = question_seeds(questions, team.cfg.seed, step)
    first = team.run(plan(team, q, "attempt0", seed) for q, seed in zip(questions, seeds, strict=True))
    if rises:
        mean_reward = sum(t.reward for t in first) / len(first)
        K = next_threshold(K, mean_reward)
    begun = zip(questions, first, seeds, strict=True)
    groups = team.run(attempts(team, q, t, K, seed) for q, t, seed in begun)
    return groups, K


# The stages that train in iterations. All start from the warm-up (or from --checkpoint, or --warmup-data).
#
#   stage     attempts per question        learned from                            loss
#   mygo      until m of them pass K       at most m, r > K; K rises               Eq 6
#   offline   until m of them pass K, by   at most m, r > K = --offline-threshold  Eq 6
#             the frozen warm-up (App. F)
#   fixed     until m of them pass K       at most m, r > K = --threshold          Eq 6
#   star      group_size                   at most m, r = 1                        Eq 6
#   raft      group_size                   at most m of those with the highest r,  Eq 6
#                                          if it is above 0
#   raft++    group_size                   as raft                                 clipped ratio, advantage 1
#   grpo      group_size                   all, unless all rewards are equal       clipped ratio, KL (Eq 4),
#                                                                                  group advantages
BASELINES = ("grpo", "star", "raft", "raft++")
WITH_RATIO = ("grpo", "raft++")  # in their loss
LEARNING = ("mygo", "offline", "fixed", *BASELINES)


def select(group, K, keep):
    """The attempts at one question to learn from: those that pass K, at most `keep` (D.2). Baselines have
    rules of their own."""
    return [t for t in group if t.reward > K][:keep]


# ---------------------------------------------------------------- loss (Eq 6)

def mle_loss(logprobs, response_mask, num_tokens):
    """Eq 6: minus the log-likelihood of what the agent said. The paper divides by |D| conversations, ours by
    num_tokens, the sampled tokens of the whole mini-batch on all ranks (as LLaMA-Factory). logprobs,
    response_mask (B, T): sampled tokens, no observations."""
    return -torch.where(response_mask.bool(), logprobs, 0.0).sum() / num_tokens


# ---------------------------------------------------------------- update

def mini_batches(groups, size):
    """Lists of at most `size` trajectories, in order; a question's stay together, since they share their
    prompt, even where they are more."""
    parts = [[]]
    for group in groups:
        if parts[-1] and len(parts[-1]) + len(group) > size:
            parts.append([])
        parts[-1] += group
    return [part for part in parts if part]


METRICS = STEP | ROLLOUT | UPDATE | RATIO | records.METRICS  # what a step's row may hold


def train(run, stage, policy, sampler, reference, place):
    """MyGO: sample until enough attempts pass K, select them, maximise their likelihood, once per iteration.
    The other stages of LEARNING differ where they are named.

    sampler: the policy itself, or for offline MyGO the warmed-up one, which stays as it is. reference: the
    weights of GRPO's KL term. Every rank has all trajectories, and makes batches of its part."""
    cfg, model = run.cfg, policy.model
    # AdamW with weight decay .01 on matrices; gradients are clipped at norm 1 (ours, LLaMA-Factory)
    optimizer = training.make_optimizer(model, cfg.lr, kind=cfg.optimizer)
    team = Team(sampler, place, cfg, cfg.temperature)
    threshold = cfg.offline_threshold if stage == "offline" else cfg.threshold
    state = {"tokens": 0, "K": threshold}  # kept in checkpoints, and read back from them on --resume

    def completed(step):
        """Fraction of training completed after a step: by iterations or by tokens, whichever is further."""
        return max(step / cfg.steps, state["tokens"] / (cfg.token_budget or math.inf))

    # Steps run until completed() reaches 1. After each body, also after `continue`, run.steps logs, warns if
    # hardly any attempt was chosen (GUARD), evaluates and saves.
    for step, row in run.steps(policy, optimizer, cfg.steps, state=state, share=completed,
                               label=f"{stage} | ", guard=records.GUARD):
        order = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(place.questions, step, cfg.questions_per_step, order)
        # where on the cosine this iteration begins: before its tokens are added to state
        before = completed(step - 1)

        with run.sampling(sampler, row):  # with the weights of now: nothing is sampled ahead (D.2)
            if stage in BASELINES:  # see "baselines" below
                groups, selected = baseline_groups(team, questions, stage, step)
            else:
                # 1. sample (D.1): first attempts set K, further ones go where too few of them passed
                groups, state["K"] = sample(team, questions, step, state["K"], rises=stage == "mygo")
                # 2. select (D.2): at most m per question; the others are thrown away
                selected = [select(group, state["K"], cfg.keep) for group in groups]
        # rejected attempts count too: methods are compared at equal numbers of sampled tokens
        state["tokens"] += sum(t.info.tokens for group in groups for t in group)
        # for the log, the page and LLaMA-Factory (which could not use what GRPO learns to avoid)
        row |= records.of_step(step, stage, state, questions, groups, selected, conversations)
        row |= rollout.search_repairs(place.retriever)
        if stage != "grpo":
            write_sharegpt(run.folder, [t for group in selected for t in group], step)

        # 3. update (Eq 6), once per mini-batch, on planners and workers alike
        rise = training.rise(step, cfg.lr_warmup, cfg.steps)  # a factor of the rate, 1 without --lr-warmup
        if stage in WITH_RATIO:  # GRPO and RAFT++ alone, by a loss of their own
            row |= ratio_update(model, reference, optimizer, selected, cfg, rise)
            continue
        parts = mini_batches(selected, cfg.mini_batch)
        rates = []
        for number in range(len(parts)):
            # of one cosine over all iterations (ours), 0 to 1; a token budget moves it on between iterations
            fraction = before + number / len(parts) / cfg.steps
            rates.append(rise * training.cosine_lr(fraction, 1, cfg.lr, cfg.lr_final))
        row |= likelihood_epoch(model, optimizer, parts, rates, cfg)


def likelihood_epoch(model, optimizer, parts, rates, cfg):
    """An update by Eq 6 for each mini-batch of trajectories, at its learning rate, on planners and workers,
    failed ones too. Returns the means for the step's row."""
    meter = training.Meter()
    for part, rate in zip(parts, rates, strict=True):
        training.set_lr(optimizer, rate)
        learned = [c for t in part for c in conversations(t)]
        # sampled tokens of the whole mini-batch on all ranks; prompts and observations have mask 0
        num_tokens = sum(c.sampled_tokens for c in learned)
        # passes of --micro-tokens, for memory alone: gradients add up. Of several ranks, this one's
        for b in training.collate_parts(model, learned, cfg.micro_tokens, cfg.share_prefixes):
            logprobs = models.token_logprobs(model, b, cfg.temperature)    # (B, T), at sampling's temperature
            loss = mle_loss(logprobs, b.response_mask, num_tokens)
            (loss * b.weight).backward()  # weight 0: a filler batch, since all ranks make as many passes
            meter.add(loss, {"tokens": int(b.response_mask.sum())}, b.weight)
        norm = training.clip_gradient(model)
        if meter.end_update(norm):  # else loss or gradient is not a number: no update
            optimizer.step()
        optimizer.zero_grad()
    return records.update_metrics(meter, optimizer)


# ---------------------------------------------------------------- warm-up (sec. 4.2, D.3)

def warm_up(run, policy, place):
    """Samples with few-shot prompts until sft_trajectories attempts have EM 1, and trains on these."""
    cfg, folder = run.cfg, run.folder
    folder.rewind(-1)  # a warm-up interrupted earlier is discarded and restarted
    team = Team(policy, place, cfg, cfg.temperature)
    order = data.shuffled_forever(place.questions, stable_seed(cfg.seed, "warm-up"))
    questions = list(itertools.islice(order, 10 * cfg.sft_trajectories))  # no more are tried (ours)
    right, tokens, tried, seconds = [], 0, 0, {}
    with run.sampling(policy, seconds):
        while len(right) < cfg.sft_trajectories and tried < len(questions):
            batch = questions[tried:tried + cfg.questions_per_step]
            agents = []
            for q in batch:
                seed = stable_seed(cfg.seed, "warm-up", tried + len(agents), q.id)
                agents.append(plan(team, q, "warm-up", seed))
            sampled = team.run(agents)
            tried += len(batch)
            tokens += sum(t.info.tokens for t in sampled)
            right += [(t, q) for t, q in zip(sampled, batch, strict=True) if t.info.em == 1]
            say(f"warm-up | {len(right)} of {cfg.sft_trajectories} with EM 1 from {tried} questions")
    if not right:
        raise models.ModelError(f"warm-up: none of {tried} few-shot trajectories has EM 1; see which rule "
                                "fails with --stage few-shot, use a stronger model, or go on without: "
                                "--stage mygo --checkpoint MODEL")
    if len(right) < cfg.sft_trajectories:
        warn(f"warm-up: {len(right)} trajectories with EM 1 from all {tried} questions tried, fewer than "
             f"--sft-trajectories {cfg.sft_trajectories}")
    folder.write("sampling.json", {"questions": tried, "kept": len(right), "tokens": tokens} | seconds)
    learned = [t for t, _ in right[:cfg.sft_trajectories]]
    for t in learned:  # learned under prompts without the example (D.3)
        for c in conversations(t):
            c.prompt_ids = first_prompt(policy.tokenizer, c.info.who, c.info.request)
    write_sharegpt(folder, learned, step=0)  # before the first epoch; the page begins with step 1
    folder.append("samples.jsonl", [records.group_record([t], q, step=1) for t, q in right[:5]])
    optimizer = training.make_optimizer(policy.model, cfg.sft_lr, kind=cfg.optimizer)
    sft(cfg, folder, policy.model, optimizer, learned)
    run.save(policy, optimizer, step=cfg.sft_epochs, state={"tokens": tokens, "K": cfg.threshold})


def sft(cfg, folder, model, optimizer, trajectories):
    """sft_epochs over the trajectories by Eq 6, each update as in train; a cosine over all of them."""
    for epoch in range(cfg.sft_epochs):
        rng = random.Random(stable_seed(cfg.seed, "sft", epoch))
        order = rng.sample(trajectories, len(trajectories))
        parts = mini_batches([[t] for t in order], cfg.mini_batch)
        rates = []
        for number in range(len(parts)):
            fraction = (epoch + number / len(parts)) / cfg.sft_epochs
            rates.append(training.cosine_lr(fraction, 1, cfg.sft_lr, cfg.sft_lr_final))
        row = {"step": epoch + 1} | likelihood_epoch(model, optimizer, parts, rates, cfg)
        loss = row.get("train/loss", math.nan)
        say(f"warm-up | epoch {epoch + 1}/{cfg.sft_epochs} | loss {loss:.4f} | "
            f"{row['train/updates']} updates")
        folder.log(row)


# ---------------------------------------------------------------- evaluate

def agent_in(place):
    """A team in one place, as evaluations, --collect and --ask need it (common/agent.py)."""
    def prompt(tokenizer, question, cfg):
        _, request = opening(place, question, cfg)
        return first_prompt(tokenizer, (place.env, "planner"), request, place.few_shot)

    def play(player, question, name):
        team = Team(player.policy, place, player.cfg, player.temperature, player.search)
        return plan(team, question, name, player.seed, player.watch)
    return Agent("mygo_mujica", play, prompt, rows_of=collected_rows)


def evaluate(policy, place, cfg, progress):
    """One trajectory per question. Returns (rows, summary)."""
    rows, summary = agent_in(place).evaluate(
        policy, place, cfg, progress, records.prediction, ("em", "f1", "searches", "tokens", "rounds"))
    return rows, summary | {"faults": records.faults_of(row["faults"] for row in rows)}


# ---------------------------------------------------------------- main

@program()
def main(argv=None):
    """The stages of --stage in each of --envs, each in a run folder of its own."""
    cfg = parse_args(argv)
    if cfg.ask:
        return ask(cfg)
    envs, stages = cfg.envs.split(","), [cfg.stage]
    if cfg.stage == "all":
        stages = ["few-shot", "warm-up", "mygo"]
    free = ["stage", "envs", "token_budget"]  # --resume may change these flags
    todo = []  # opened first: a run that cannot go on is refused before data are read
    for env, stage in itertools.product(envs, stages):
        saves = stage in LEARNING
        if stage == "warm-up":
            saves = "once"  # at its end
        todo.append((Run(cfg, "mygo_mujica", METRICS, f"{env}-{stage}", free, saves), env, stage))
        if cfg.stage in LEARNING:
            start_weights(cfg, env, stage)  # refuses where the warm-up is missing
    split, evals = load_splits(cfg)
    tell(cfg, cfg.steps)  # what will happen
    for run, env, stage in todo:
        run_stage(run, env, stage, split, evals)
    for env in envs:
        distributed.once(records.show_table, cfg, env, ("few-shot", "warm-up", *LEARNING))


def run_stage(run, env, stage, split, evals):
    """Trains and evaluates one stage in one environment, or only evaluates. --resume skips a complete one."""
    cfg, steps = run.cfg, 0
    if stage in LEARNING and not records.budget_is_spent(run.folder, cfg.token_budget):
        steps = cfg.steps
    if run.folder.is_done(steps, evals):  # a resumed run that has made as many, and its evaluations
        return
    few_shot = stage == "few-shot"
    evals = [Place(**vars(e), env=env, few_shot=few_shot) for e in evals]
    source = start_weights(cfg, env, stage)
    if cfg.warmup_data:  # written demonstrations instead of the few-shot warm-up
        source = warmed_up(cfg, source, evals[0])
    trains = stage in ("warm-up", *LEARNING)
    has_reference = stage == "grpo" and cfg.kl_coef > 0
    frozen = int(stage == "offline" or has_reference)  # models in memory beside the policy
    policy = run.policy(run.folder.start or source, trains, frozen)
    sampler, reference = policy, None
    if stage == "offline":
        sampler = frozen_sampler(cfg, source, policy)
    if has_reference:
        reference = models.load_reference(policy.model, source, lora=0)
    evals = [within_limit(e, policy, cfg) for e in evals]
    if trains:
        place = within_limit(Place(**vars(split), env=env, few_shot=stage == "warm-up"), policy, cfg)

    with run.stage(f"Mujica {cfg.name}: {env} {stage}", policy, evals, evaluate):
        if stage == "warm-up" and not run.folder.start:  # it saves at its end alone
            warm_up(run, policy, place)
        if stage in LEARNING:
            train(run, stage, policy, sampler, reference, place)
        run.evaluate(initial=few_shot)  # initial: says so if there is nothing to learn from


def within_limit(place, policy, cfg):
    """The place with the questions whose prompts --max-prompt allows."""
    return agent_in(place).within_limit(policy, [place], cfg)[0]


def ask(cfg):
    """--ask: one question. In a graph its topic entities are those that it names."""
    run = Run(cfg, "mygo_mujica")
    _, [split, *_] = load_splits(cfg)
    place = Place(**vars(split), env=cfg.envs.split(",")[0], few_shot=cfg.stage == "few-shot")
    question = data.Question("ask", cfg.ask, [""])
    if place.env == "kg":
        from common.graphs.synthesis import is_named
        question.entities = [[name] for name in place.graph.graph if is_named(name, cfg.ask)]
        if not question.entities:
            raise data.DataError("--ask: the question names no entity of the graph, spelled as it is there")
    agent_in(place).ask(run, start_weights(cfg, place.env, "eval"), place.retriever, question)


def start_weights(cfg, env, stage):
    """What a stage starts from: the given checkpoint, the run's warm-up, or the model."""
    named = cfg.warmup_data or cfg.checkpoint and cfg.stage != "all"  # (all warms the checkpoint up first)
    if stage in LEARNING and not named:
        return left_by(replace(cfg, name=f"{cfg.name}-{env}"), "mygo_mujica", "warm-up", stage)
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)  # --policy: a service
    return checkpoint.find(source) or source


def frozen_sampler(cfg, source, policy):
    """A policy with an engine and weights of its own."""
    model = models.load_model(source, frozen=True, precision=cfg.precision)
    model.vocabulary = policy.model.vocabulary  # ids that may be sampled
    return Policy(model, policy.tokenizer, make_engine(cfg, model, policy.tokenizer))


def load_splits(cfg):
    """(training split or None, evaluation splits), with the graph where one is searched (sec. 4.1)."""
    if cfg.data != "world":
        return places.load_splits(cfg, PAPER_EVAL, topic_entities)
    from common.world import hard
    from common.world import splits as of_world
    return of_world.load_apart(cfg.eval_data, cfg.limit, cfg.eval_limit, cfg.retriever, cfg.world_scale,
                               hard.parse(cfg.world), kg.KnowledgeGraph.from_triples)


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    return resolve(flags.parse("mygo_mujica", Config, __doc__, argv))


def resolve(cfg):
    """Fills in dependent fields, so that config.json records what ran; refuses settings that cannot run."""
    return places.resolve(cfg, LEARNING, WITH_RATIO)


# ---------------------------------------------------------------- baselines: STaR, RAFT, RAFT++, GRPO

def baseline_groups(team, questions, stage, step):
    """([[attempt]], group_size of them per question; [[attempt]] that the stage learns from)"""
    async def group_of(question, seed):
        names = [f"attempt{k}" for k in range(team.cfg.group_size)]
        return await asyncio.gather(*(plan(team, question, name, seed) for name in names))

    seeds = question_seeds(questions, team.cfg.seed, step)
    groups = team.run(map(group_of, questions, seeds))
    selected = [baseline_choice(group, stage, team.cfg.keep) for group in groups]
    if stage in WITH_RATIO:
        for group in filter(None, selected):
            assign_advantages(group, stage)
    return groups, selected


def baseline_choice(group, stage, keep):
    """The trajectories of one question that a baseline learns from, by the table of stages."""
    rewards = [t.reward for t in group]
    if stage == "grpo":
        return group if training.has_spread(rewards) else []  # else all advantages are 0
    least = R_SUP if stage == "star" else max(rewards)
    return [t for t in group if t.reward >= least > 0][:keep]


def assign_advantages(group, stage="grpo"):
    """GRPO: planner and workers share their trajectory's advantage (ours; sec. 3.2 defines A(tau)).
    RAFT++: 1."""
    advantages = [1.0] * len(group)
    if stage == "grpo":
        advantages = training.group_advantages([t.reward for t in group])
    for t, advantage in zip(group, advantages, strict=True):
        for c in conversations(t):
            c.advantages = [advantage] * len(c.turns)


def agent_grpo_loss(logprobs, batch, cfg, num_trajectories):
    """Eq 4, with two changes: a ratio per token, not per turn, and a mean over a trajectory's tokens, those
    of its planner and workers. num_trajectories: of the mini-batch, on all ranks. Without a reference
    (RAFT++) there is no KL term."""
    weights = [[1 / (num_trajectories * c.info.tokens)] for c in batch.trajectories]
    weights = torch.tensor(weights, device=logprobs.device)                        # (B, 1)
    kl_coef = 0.0 if batch.ref_logprobs is None else cfg.kl_coef
    advantages = training.corrected_advantages(batch, cfg.sampler_correction)  # unchanged by default
    return training.grpo_loss(logprobs, batch.old_logprobs, advantages, batch.response_mask, weights,
                              cfg.clip, cfg.clip, kl_coef, batch.ref_logprobs)


def ratio_update(model, reference, optimizer, groups, cfg, rise=1.0):
    """One epoch over [[trajectories] of a question] that have their advantages. Returns the step's means.
    rise: a factor of the learning rate."""
    parts, prepared, row = mini_batches(groups, cfg.mini_batch), [], {}
    with timed(row, "time/old_logprobs"):
        for part in parts:  # all old log-probs before the first update, by the trainer, not the engine
            learned = [c for t in part for c in conversations(t)]
            prepared.append(training.prepare(
                model, reference, learned, cfg.micro_tokens, cfg.share_prefixes, cfg.temperature))
    everything = [b for batches in prepared for b in batches]
    meter = training.Meter(everything, cfg.sampler_correction)
    for part, batches in zip(parts, prepared, strict=True):
        training.set_lr(optimizer, rise * cfg.grpo_lr)
        for b in batches:
            logprobs = models.token_logprobs(model, b, cfg.temperature)  # (B, T)
            loss, stats = agent_grpo_loss(logprobs, b, cfg, len(part))
            (loss * b.weight).backward()
            meter.add(loss, stats, b.weight)
        norm = training.clip_gradient(model)
        if meter.end_update(norm):
            optimizer.step()
        optimizer.zero_grad()
    return row | records.update_metrics(meter, optimizer)


# ================================================================ appendix: plumbing, and the paper's prompts
#
# ---------------------------------------------------------------- conversations on file

def write_sharegpt(folder, trajectories, step):
    """sharegpt.jsonl: each planner's conversation and its workers', as LLaMA-Factory reads them."""
    from common.warmup import sharegpt
    learned = [c for t in trajectories for c in conversations(t)]
    folder.append("sharegpt.jsonl", rows_of(learned, step=step))
    folder.write("dataset_info.json", sharegpt.dataset_info("mujica"))


def rows_of(learned, **more):
    from common.warmup import sharegpt
    return [sharegpt.row(c, SYSTEM[c.info.who], c.info.request, **more) for c in learned]


def collected_rows(trajectory, question):
    """The rows of --collect. A worker that was cut off is left out."""
    whole = [c for c in conversations(trajectory) if c.turns[-1].stop_reason != "length"]
    return rows_of(whole, script="mygo_mujica", question=question.question)


# ---------------------------------------------------------------- demonstrations, spoken by plan() and work()

@dataclass
class Written(Team):
    """A team that says written lines where others sample (common/of_mygo/written.py)."""
    planner: object = None
    worker: object = None

    async def say(self, info, prompt_ids, turns, seed):
        if isinstance(info, Report):
            parts = self.worker(info)
        else:
            parts = self.planner(len(turns), info.entities)
        end = f" {self.policy.tokenizer.eos_token}"
        text, ids = chat.encode(self.policy.tokenizer, *parts, end)
        return Turn(ids, [0.0] * len(ids), "eos", text.removesuffix(end))


def demonstration(tokenizer, question, demo, place, cfg):
    """[planner, worker, …], the conversations of a demonstration: of the embedded world, whose steps are
    known, or of a real question. Turns and sub-questions have no limit."""
    from common.of_mygo import written
    from common.warmup import scripted

    def clean(text):
        return harmless(text, cfg.max_words)
    planner, worker = written.lines_of(tokenizer, question, demo, place, cfg.top_k, clean, NOTHING)
    unlimited = replace(cfg, max_rounds=99, max_parallel=99)

    def agent(policy, search):
        team = Written(policy, place, unlimited, 0.0, search, planner, worker)
        return plan(team, question, "written", 0)
    no_lines = []  # the team brings its own
    return conversations(scripted.play(tokenizer, no_lines, place.retriever, agent))


def warmed_up(cfg, source, place):
    """Folder of `source` after --warmup-data, whose demonstrations read what the place has."""
    from common.of_mygo import written
    return written.warmed_up(cfg, source, place, demonstration)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that both environments of the embedded world start from."""
    from common.of_mygo import written
    return written.tiny_policy(cfg, demonstration, Place, NOTHING)


# ---------------------------------------------------------------- prompts (Tables 7 to 10)

SYSTEM = {
    ("text", "planner"): """**Your Task:** Answer the user's question thoroughly and accurately.
Before answering, outline your plan and reasoning process within '<think>' tags. This includes understanding \
the question, identifying needed information, and planning your search queries.
You can use the search tool to get information.
Please put your search query in '<search>' tags, e.g., '<search> Who is the mother of Xawery Żuławski? \
</search>'
Every '<search>' tag only accepts one search query.
But you can use multiple '<search>' tags if needed.
Note that your query should be explicit and specific.
It is difficult to search a query with reference.
For example, if you directly search 'Who is the mother of the director of film Polish-Russian War', the \
search engine cannot find the information directly.
You should make a plan to decompose the question into multiple sub-queries.
Finally, integrate all the information and put your final answer within '<answer>' tags.""",
    ("text", "worker"): """You will be given a question with a context.
The context includes multiple passages labeled by index [x].
Your task is to select the most relevant passage from the context based on the question.
Please state the reason why you choose the passage. Put your thinking process into the <think>…</think> tag.
Put the index of the selected passage into the <select>…</select> tag.
Based on the selected passage, you should answer the question. State the answer as a complete declarative \
sentence, mirroring the question structure.
Put your answer into the <sentence>…</sentence> tag.
If the passages have no information related to the question, put [-1] in the <select>…</select> tag
and try your best to answer the question according to your knowledge in the <sentence>…</sentence> tag.""",
    ("kg", "planner"): """Your task is answering questions. You will be given a question and some candidate \
entities. You should first make a plan about how to solve this question.
You can use the Search(entity, question) function to get information.
Please think thoroughly and label the final answer with <answer> *** </answer>.""",
    ("kg", "worker"): """Task: Extract relevant information from provided materials and present it in a \
specified format.
Instructions:
Read Carefully:
First, analyze the question to identify the key entity and requested information (e.g., "mother," "birth \
date").
Review all materials systematically.
Extraction Rules:
Use only direct matches from materials. Never paraphrase or infer relationships.
If multiple materials contain the answer, select all of them.
If no material matches, respond with "No relevant information found."
Answer Format:
State the answer as a complete declarative sentence, mirroring the question structure.
Add the source ID in brackets at the beginning of the answer.
Use template:
<think> … let's think step by step … </think>
<select> [X][Y] </select>
<sentence> Full sentence answer </sentence>"""}

# one conversation each, user and assistant in turn, for the few-shot model
SHOTS = {
    ("text", "planner"): ["Question: Who succeeded the first President of Namibia?", """<think>
The question asks about the person who succeeded the first President of Namibia.
1. I need to find who was the first President of Namibia.
2. I need to find who succeeded the first President of Namibia.
</think>
<search> Who was the first President of Namibia? </search>""", "Obs: Sam Nujoma was the first President of \
Namibia.", """<think>
Now I know that Sam Nujoma was the first President of Namibia.
I need to find who succeeded Sam Nujoma.
</think>
<search> Who succeeded Sam Nujoma? </search>""", "Obs: Hifikepunye Pohamba succeeded Sam Nujoma as the \
President of Namibia.", """<think>
The question asks about the person who succeeded the first President of Namibia.
Sam Nujoma was the first President of Namibia.
Hifikepunye Pohamba succeeded Sam Nujoma as the President of Namibia.
I have all the information to answer the question.
</think>
<answer> Hifikepunye Pohamba </answer>"""],
    ("text", "worker"): ["""Question: What college did Kyeon Mi-ri attend?
Context:
[0] Kyeon Mi-ri graduated from Seoul Traditional Arts High School in 1983, then studied Dance at Sejong \
University. She made her acting debut in 1984, and has since become active in television dramas, most \
notably as the arrogant and ambitious Lady Choi in the 2003 period drama "Dae Jang Geum" (or "Jewel in the \
Palace"), which was a hit not only in Korea but throughout Asia.
[1] Shin Kyeong-nim was born on April 6, 1936 in North Chungcheong Province, South Korea. When he was young, \
Shin Kyong-rim frequented the people of Korea's rural villages and collected the traditional songs they \
sang. Much of his poetry represents a modernization of things he heard then Shin Kyeong-nim graduated in \
English Literature from Dongguk University, from which time he strove to become a creative writer. In 1955 \
and 1956, he made his formal literary debut with the publication of poems "Day Moon" (Natdal), "Reeds" \
(Galdae) and "Statue of Stone" (Seoksang). He taught elementary school in his hometown for a period of time, \
before moving to Seoul to work as an editor for Hyundae munhak and Donghwa Publishers. But his strong desire \
to create poetry continued.
[2] Paige Ackerson-Kiely received a BA in Asian Studies from the University of New Mexico in Albuquerque. \
Prior to this achievement, she attended Beloit College in Beloit, Wisconsin, Marmara University in Istanbul, \
and Birzeit University in Birzeit, Palestine.
[3] Han Seung-yeon was born on July 24, 1988, in Seoul, South Korea. She made her acting debut as a child \
actress in a bit part in "Dear Ends" (1993), "Summer Showers" (1995) and "Star in My Heart" (1997). She \
later left South Korea to study at Tenafly High School in New Jersey, United States. However, she withdrew \
from high school mid-course in order to pursue a singing career. After returning to South Korea, she debuted \
as a member of girl group Kara on March 29, 2007. During her time with the group, she passed a high school \
qualification exam, the College Scholastic Ability Test, and was accepted by Kyung Hee University, majoring \
in theater and film.
[4] Myo Min Zaw studied English at the University of Yangon, where he became active in the pro-democracy \
group All Burma Federation of Student Unions (ABFSU). In December 1996, he participated in a student \
protest, and following the closing of Burma's universities, remaining involved in the pro-democracy \
movement.""", """<think> The question asks about what college Kyeon Mi-ri attended.
Passage [0] clearly states that "Kyeon Mi-ri graduated from Seoul Traditional Arts High School in 1983, then \
studied Dance at Sejong University."
So I select passage [0]. </think>
<select> [0] </select>
<sentence> Kyeon Mi-ri attended Sejong University. </sentence>"""],
    ("kg", "planner"): ["""Question: Which film came out first, Blind Shaft or The Mask Of Fu Manchu?
Candidate: [0] Blind Shaft [1] The Mask Of Fu Manchu""", """<think>
To solve this problem, I need to:
1. Figure out when Blind Shaft came out.
2. Figure out when The Mask Of Fu Manchu came out.
3. Compare their dates.
I need to search information for both of Blind Shaft and The Mask Of Fu Manchu.
</think>
<action>
Search([0], "When did Blind Shaft come out?")
Search([1], "When did The Mask Of Fu Manchu come out?")
</action>""", "Obs: Blind Shaft came out on 2003 and The Mask Of Fu Manchu came out on 1932.", """<think> \
Ok. Right now I need compare their released date. 1932 is much earlier than 2003. Therefore, The Mask Of Fu \
Manchu came out first. </think>
<answer> The Mask Of Fu Manchu </answer>"""],
    ("kg", "worker"): ["""Question: Who is the mother of Xawery Żuławski?
Materials:
[0] Xawery Żuławski, mother, Małgorzata Braunek
[1] Xawery Żuławski, father, Andrzej Żuławski
[2] Xawery Żuławski, family, Q63532193
[3] Xawery Żuławski, family name, Q56541485
[4] Xawery Żuławski, spouse, Maria Strzelecka
[5] Xawery Żuławski, date of birth, 1971-12-22T00:00:00Z
[6] Xawery Żuławski, sibling, Vincent Zulawski
[7] Xawery Żuławski, place of birth, Warsaw
[8] Andrzej Żuławski, child, Xawery Żuławski
[9] Małgorzata Braunek, child, Xawery Żuławski""", """<think> The question asks me to find the mother of \
Xawery Żuławski. [0] says Xawery Żuławski's mother Małgorzata Braunek, which excatly meets our need. </think>
<select> [0] </select>
<sentence> The mother of Xawery Żuławski is Małgorzata Braunek. </sentence>"""]}

# kimi reads passages, too
SYSTEM |= {("kimi", role): SYSTEM["text", role] for role in ("planner", "worker")}
SHOTS |= {("kimi", role): SHOTS["text", role] for role in ("planner", "worker")}


if __name__ == "__main__":
    main()
