"""Mujica-MyGO: Reinforcing QA Agents with Minimalist Policy Gradient Optimization (arXiv 2505.17086).

Mujica is one model in two roles. The planner splits a question into sub-questions, one layer of a directed
acyclic graph at a time, and reads one sentence per sub-question; a worker answers one sub-question from the
passages it retrieves, or from the triples of one entity. The sub-questions of a layer run in parallel; no
graph is built, since one planner turn is one layer. An attempt is one planner with all its workers. MyGO
trains both roles by plain likelihood on attempts whose reward passes a threshold that rises with the policy.

Of GRPO only the groups stay: there is no advantage, ratio, clip or KL. An attempt that passes the threshold
is learned by its likelihood, the others are thrown away, and a question is asked again until three attempts
have passed or 16 were made.

    Eq 1        planner and workers              plan, work
    sec. 3.3    rising threshold K               next_threshold
    D.1         multiple-attempt sampling        sample, until_enough
    D.2         selection, planner and workers   select, conversations
    Eq 6        likelihood of sampled tokens     mle_loss, update       (Eq 4, GRPO: agent_grpo_loss)
    D.3         warm-up                          warm_up, sft
    App. F      offline MyGO                     --stage offline
    Tables 7-10 prompts                          SYSTEM, SHOTS (at the end)

    python mygo_mujica.py                  few-shot, warm-up and MyGO in the embedded world's text, five
                                           minutes; --envs kg: in its knowledge graph. (The world's policy
                                           cannot read examples: its "few-shot" is the policy as it starts)
    python mygo_mujica.py --stage offline  one stage: few-shot, warm-up, mygo, offline, fixed, grpo, star, …
    python mygo_mujica.py --model Qwen/Qwen2.5-7B-Instruct --data TRAIN.json --eval-data DEV.json  with one of
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
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import chat, checkpoint, data, distributed, flags, kg, metrics, rollout, training
from common import model as models
from common.agent import Agent, after_warm_up
from common.files import say, warn
from common.folder import left_by
from common.of_mygo import places, records
from common.of_mygo.places import topic_entities
from common.retriever import make_retriever
from common.rollout import Outcome, Policy, Trajectory, Turn, context_ids, question_seeds, stable_seed
from common.run import Run, program, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings. Behind | stands the source of a default; a default without | is ours.
    common/flags.py has the flags of all scripts. Without --model and --data the run is in the embedded world,
    whose defaults in recipes/world.toml replace these."""

    # ---- stages

    # what to do; all = few-shot, warm-up, mygo. The table before select() says what each learns from
    stage: Literal[
        "all", "few-shot", "warm-up", "mygo", "offline", "fixed", "grpo", "star", "raft", "raft++", "eval",
    ] = "all"
    envs: str = "text"              # text, kg, kimi (each question's own passages), or several with commas
    # kg: file of triples (.jsonl, .json, .tsv) or .graphml. Or "evidences": the gold triples of 2Wiki's
    # questions, and hardly any others, so it is far easier than Wikidata
    graph: str = ""

    # ---- agent
    top_k: int = 5                  # passages per sub-question
    max_triples: int = 20           # triples per sub-question
    max_words: int = 200            # words kept of a text from outside, 20 characters each; see harmless()
    max_rounds: int = 6             # planner turns
    max_parallel: int = 8           # sub-questions per turn
    max_turn: int = 512             # tokens sampled per turn
    max_prompt: int = 4096          # tokens of the planner's first prompt; more: an error, see --skip-bad
    temperature: float = 1.0        # of sampling in training
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy

    # ---- warm-up
    sft_trajectories: int = 300     # few-shot attempts with EM 1 to learn from (sec. 4.2 says 1k) | D.3
    sft_epochs: int = 3             # epochs over them
    sft_lr: float = 1e-5            # learning rate at the start | D.3
    sft_lr_final: float = 1e-6      # and at the end, cosine | D.3

    # ---- MyGO and its baselines

    # training questions, 2Wiki or HotpotQA: file, hub name, or "world" | sec. 4.1
    data: str = "hotpotqa"
    limit: int = 20000              # training questions, drawn at random; 0 = all | D.3
    steps: int = 20                 # iterations; 20,000 questions in all | D.3
    questions_per_step: int = 1000  # questions per iteration | D.3
    keep: int = 3                   # m, attempts to learn from per question | D.3
    max_attempts: int = 16          # attempts per question | D.3
    threshold: float = .5           # K before the first iteration; mygo raises it, fixed keeps it
    offline_threshold: float = .8   # K of offline
    group_size: int = 5             # attempts per question of STaR, RAFT, RAFT++ and GRPO
    mini_batch: int = 32            # attempts per update
    lr: float = 5e-7                # learning rate at the start | D.3
    lr_final: float = 1e-8          # and at the end, cosine | D.3
    grpo_lr: float = 1e-6           # GRPO's and RAFT++'s, constant; as in the other scripts
    clip: float = .2                # GRPO and RAFT++: half width of the clip window
    kl_coef: float = 1e-3           # GRPO: weight of the KL (k3) to the weights it started from
    token_budget: int = 0           # training ends when it has sampled so many tokens; 0 = no limit


PAPER_EVAL = "hotpotqa-dev,musique-dev"  # Tables 2 and 3

# ---------------------------------------------------------------- prompts (Tables 7-10 are at the end)

NOTHING = "No relevant information found."  # Table 10


def first_prompt(tokenizer, who, request, few_shot=False):
    """Prompt ids of a conversation: instructions, the example if wanted, the request. who: (environment,
    "planner" or "worker"), the key of SYSTEM and SHOTS."""
    messages = [("system", SYSTEM[who])]
    if few_shot and not chat.is_tiny(tokenizer):  # the embedded world's policy has no words for examples
        for n, text in enumerate(SHOTS[who]):
            speaker = "assistant" if n % 2 else "user"
            messages.append((speaker, text))
    # Foreign: text from outside, of which no special token can be made
    return chat.render_chat(tokenizer, [*messages, ("user", chat.Foreign(request))])


def harmless(text, max_words):
    """One line of at most max_words words and 20 max_words characters. Every text from outside passes through
    here, so that it cannot imitate our tags, indices and headings.

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


def worker_request(env, sub_question, materials):
    heading = "Materials" if env == "kg" else "Context"
    return f"Question: {sub_question}\n{heading}:\n{numbered(materials)}"


def planner_request(env, question, entities):
    if env != "kg":
        return f"Question: {question}"
    return f"Question: {question}\nCandidate: {numbered(entities, ' ')}"


# ---------------------------------------------------------------- parsing: read, never trusted

# of nested tags only the innermost counts: "<search> a <search> b </search>" asks for b
SEARCH = re.compile(r"<search>((?:(?!</?search>).)*)</search>", re.DOTALL)
QUOTED = r"((?:(?!Search\s*\().)*?)"  # any text, also with quotes, but without another "Search("
CALL = re.compile(rf"""
    \bSearch\s*+\(\s*+                      # (*+ gives nothing back: linear time)
    ((?:\[[^\]]*+\]\s*+)*+),?\s*+          # [label]; none or several match, too: a bad call
    (?:["“]{QUOTED}["”]|'{QUOTED}')\s*\)    # "sub-question"
""", re.DOTALL | re.VERBOSE)


def without_thoughts(text):
    return re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)


def last_inside(tag, text):
    """What the last <tag>…</tag> holds, on one line; None where there is none."""
    insides = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    if insides:
        return " ".join(insides[-1].split())


def parse_plan(text, env, max_parallel):
    """(calls [(label or None, sub-question)], answer or None, Counter of faults) of a planner's turn.

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
    if calls and answer is not None:  # even an empty answer; it cannot have read what it asks for
        answer = None
        faults["answered while asking"] = 1
    if not calls and not answer:
        faults["no action"] = 1
    return calls[:max_parallel], answer or None, +faults  # (+ leaves out zeros)


def calls_of_text(text):
    """([(None, sub-question)] of <search> tags, how many tags made none)"""
    sub_questions = [" ".join(inside.split()) for inside in SEARCH.findall(text)]
    calls = [(None, sub_question) for sub_question in sub_questions if sub_question]
    tags = max(text.count("<search>"), text.count("</search>"))  # an unclosed or unopened tag counts too
    return calls, tags - len(calls)


def calls_of_graph(text):
    """([(label, sub-question)] of Search([label], "sub-question"), how many calls could not be read)"""
    calls = []
    for labels, double, single in CALL.findall(text):
        label = re.fullmatch(r"\[\s*(-?\d{1,6})\s*\]\s*", labels)  # one label, a number
        sub_question = " ".join((double or single).split())
        if label and sub_question:
            calls.append((int(label[1]), sub_question))
    seen = len(re.findall(r"\bSearch\s*\(", text))
    return calls, seen - len(calls)


def parse_report(text, num_materials):
    """(sentence or None, selected indices, what was wrong or "") of a worker's turn. [-1] selects none of its
    num_materials: it answers from its own knowledge (Table 8).

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
    if any(not 0 <= i < num_materials for i in indices):
        return None, [], "no such index"
    return sentence, list(dict.fromkeys(indices)), ""


# ---------------------------------------------------------------- agent: planner and workers (Eq 1)

@dataclass
class Place(data.Split):
    """A data.Split (name, questions, retriever, graph) in one environment."""

    env: str = "text"  # or kg, which reads `graph`, or kimi
    few_shot: bool = False  # whether prompts have an example
    own: dict = field(default_factory=dict)  # kimi: question id -> a retriever over its own passages


@dataclass
class Team:
    """One model in both roles, at work in one place."""

    policy: Policy  # model, tokenizer, and the engine that samples
    place: Place
    cfg: Config
    temperature: float
    search: object = None  # None = a BatchedSearch over the place's retriever

    def __post_init__(self):
        self.search = self.search or rollout.BatchedSearch(self.place.retriever)

    def run(self, agents):
        """The results of coroutines, in order. They run together, so that engine and search get requests in
        batches. Of several ranks each runs its share, and all get all results."""
        return rollout.run_agents(agents, self.policy.engine, self.search)

    def prompt(self, info):
        return first_prompt(self.policy.tokenizer, info.who, info.request, self.place.few_shot)

    async def next_turn(self, conversation, seed):
        """The next Turn of a planner's or worker's Trajectory, sampled to the end of its message."""
        g = await self.policy.engine.generate(
            context_ids(conversation.prompt_ids, conversation.turns),  # ids so far: token in, token out
            stop=(),
            max_tokens=self.cfg.max_turn,
            temperature=self.temperature,
            seed=seed,
        )
        text = rollout.sampled_text(self.policy.tokenizer, g.token_ids, g.stop_reason)  # less the end token
        return Turn(g.token_ids, g.logprobs, g.stop_reason, text)


# A planner and each worker have a Trajectory (question_id, prompt_ids, turns, reward, info) of their own. The
# planner's stands for the whole attempt: its info.workers holds those of its workers.

@dataclass
class PlannerInfo(Outcome):
    """The `info` of a planner's Trajectory: Outcome's answer, problem (why there is none), em, f1 and
    searches (number of sub-questions), and:"""
    who: tuple = ("text", "planner")
    request: str = ""           # its first user message
    entities: list = field(default_factory=list)    # kg: label [i] means entities[i]; take_report adds more
    calls: list = field(default_factory=list)       # calls[i]: [(label, sub-question)] sent at turns[i]
    workers: list = field(default_factory=list)     # workers[i]: the Trajectories of their workers
    faults: Counter = field(default_factory=Counter)    # {fault: how often}
    tokens: int = 0             # sampled in the attempt, by planner and workers


@dataclass
class WorkerInfo:
    """The `info` of a worker's Trajectory."""
    who: tuple                  # (environment, "worker")
    sub_question: str
    entity: str | None          # whose triples are read in a graph; None: no such label, or no graph
    materials: list = field(default_factory=list)   # lines that it reads
    facts: list = field(default_factory=list)       # in a graph the triples that these lines show
    request: str = ""           # its user message
    sentence: str = NOTHING     # its report
    problem: str = ""           # why it has none
    selected: list = field(default_factory=list)    # indices of materials
    tokens: int = 0             # as the planner's: of the whole attempt (GRPO's loss divides by it)


def first_request(place, question, cfg):
    """(topic entities of the question, [] without a graph; the planner's first user message)"""
    entities = []
    if place.env == "kg":
        entities = topic_entities(question, place.graph)
    shown = [harmless(e, cfg.max_words) for e in entities]
    return entities, planner_request(place.env, harmless(question.question, cfg.max_words), shown)


async def materials_for(team, question, sub_question, entity):
    """(the lines that a worker reads, the triples that they show). kg: the entity's triples; text: the best
    passages of the corpus, without titles; kimi: the best of the question's own."""
    cfg, place = team.cfg, team.place
    if place.env == "kg":
        facts = place.graph.facts(entity)  # [] if entity is None
        facts = nearest_facts(sub_question, facts, cfg.max_triples)
        return [harmless(", ".join(fact), cfg.max_words) for fact in facts], facts
    if place.env == "kimi":
        if question.id not in place.own:
            own = data.pool_contexts([question])
            place.own[question.id] = make_retriever(cfg.retriever, own, few=True)  # few: no index is kept
        passages = place.own[question.id].search([sub_question], cfg.top_k)[0]
    else:
        passages = await team.search(sub_question, cfg.top_k)
    return [harmless(p.text, cfg.max_words) for p in passages], []


def nearest_facts(sub_question, facts, most):
    """All, or the `most` of them that share most words with the sub-question."""
    if len(facts) <= most:
        return facts
    words = set(metrics.normalize_answer(sub_question).split())

    def shared(fact):
        return len(words & set(metrics.normalize_answer(" ".join(fact)).split()))
    return sorted(facts, key=shared, reverse=True)[:most]


async def work(team, question, sub_question, entity, seed):
    """One worker reads, thinks, selects, and states one sentence. Returns its Trajectory of one turn, or of
    none: without anything to read the model is not sampled."""
    env, max_words = team.place.env, team.cfg.max_words
    info = WorkerInfo((env, "worker"), harmless(sub_question, max_words), entity)
    worker = Trajectory(question.id, [], [], info=info)
    info.materials, info.facts = await materials_for(team, question, info.sub_question, entity)
    if not info.materials:
        info.problem = "nothing to read"
        if env == "kg" and entity is None:
            info.problem = "unknown label"
        return worker
    info.request = worker_request(env, info.sub_question, info.materials)
    worker.prompt_ids = team.prompt(info)
    turn = await team.next_turn(worker, seed)
    worker.turns.append(turn)
    sentence, info.selected, info.problem = parse_report(turn.text, len(info.materials))
    if sentence:
        info.sentence = harmless(sentence, max_words)
    return worker


async def plan(team, question, name, seed, watch=None):
    """One attempt: the planner's loop, its workers in parallel. Returns the planner's Trajectory, scored.
    name: distinguishes the attempts at one question, and their seeds. watch(turn): shows a turn (--ask)."""
    place, cfg = team.place, team.cfg
    entities, request = first_request(place, question, cfg)
    info = PlannerInfo(who=(place.env, "planner"), request=request, entities=entities)
    attempt = Trajectory(question.id, team.prompt(info), [], info=info)
    for k in range(cfg.max_rounds):
        turn = await team.next_turn(attempt, stable_seed(seed, name, k))
        attempt.turns.append(turn)
        calls, info.answer, faults = parse_plan(turn.text, place.env, cfg.max_parallel)
        if calls and k + 1 == cfg.max_rounds:  # nobody would read what workers find: none is sent
            calls, info.problem = [], "out of rounds"
            faults["out of rounds"] = 1

        layer = []  # workers that run side by side
        for i, (label, sub_question) in enumerate(calls):
            entity = None
            if label is not None and 0 <= label < len(entities):
                entity = entities[label]
            worker_seed = stable_seed(seed, name, k, "worker", i)
            layer.append(work(team, question, sub_question, entity, worker_seed))
        workers = await asyncio.gather(*layer)
        info.calls.append(calls)
        info.workers.append(workers)
        records.count_faults(info, faults)  # for the log alone

        if workers:
            reports = []
            for worker in workers:  # in order: each may append to entities, which info.entities is
                reports.append(take_report(worker.info, entities, place, cfg))
            turn.observation = "\n".join(reports)
            # the end of the planner's message, if it was cut off, then the user's message with the
            # observation: none of these ids was sampled, so all have mask 0
            observation = chat.Foreign(turn.observation)
            turn.observation_ids = chat.render_reply(team.policy.tokenizer, turn.ids, observation)
        if watch:
            watch(turn)
        if not calls:  # an answer, or nothing that can be read
            break
    return score(attempt, question)


def take_report(info, entities, place, cfg):
    """What the planner reads of a worker: its sentence. In a graph the tails of the selected triples are
    appended to `entities` and get the next labels, unless they have one or have no triples of their own."""
    labels = []
    if info.facts:
        for i in info.selected:
            tail = info.facts[i][2]
            if tail not in entities and place.graph.facts(tail):
                labels.append(f"[{len(entities)}] {harmless(tail, cfg.max_words)}")
                entities.append(tail)
    line = f"Obs: {info.sentence}"
    if labels:
        line += f" Candidate: {' '.join(labels)}"
    return line


# ---------------------------------------------------------------- reward

def score(attempt, question):
    """The attempt with its reward, the F1 of the answer (sec. 4.1), 0 without one, and its info filled in.
    Workers have no reward of their own."""
    info = attempt.info
    if info.answer:
        info.em = metrics.exact_match(info.answer, question.answers)
        info.f1 = metrics.f1(info.answer, question.answers)
    elif not info.problem:
        info.problem = "no answer"
    attempt.reward = info.f1
    info.searches = sum(map(len, info.workers))
    info.tokens = sum(c.sampled_tokens for c in conversations(attempt))
    for c in conversations(attempt):
        c.info.tokens = info.tokens
    return attempt


def conversations(attempt):
    """[planner, worker, …]: the Trajectories of one attempt, each learned by itself (D.2). Failed workers are
    learned, too; workers that were not sampled are left out."""
    return [attempt] + [w for layer in attempt.info.workers for w in layer if w.turns]


# ---------------------------------------------------------------- sampling and selection (sec. 3.3, D.1, D.2)

R_SUP = 1.0  # r_sup, the largest reward: an F1 of 1


def next_threshold(previous, mean_reward):
    """K := max(previous, (mean_reward + r_sup) / 2), sec. 3.3. The paper prints (mean_r / r_sup + 1) r_sup,
    which is at least r_sup: no reward could pass. K stays a millionth below r_sup, so that r = r_sup passes.

    >>> next_threshold(.5, .4), next_threshold(.8, .4), next_threshold(.8, 1.0)
    (0.7, 0.8, 0.999999)
    """
    return min(max(previous, (mean_reward + R_SUP) / 2), R_SUP - 1e-6)


async def until_enough(team, question, first_attempt, K, seed):
    """The group [first_attempt, …] at one question, sampled until m (--keep) of them pass K, or max_attempts
    are made (D.1). Each round samples as many as are still missing, so at most m can pass."""
    group, cfg = [first_attempt], team.cfg
    while True:
        passed = sum(t.reward > K for t in group)
        missing = min(cfg.keep - passed, cfg.max_attempts - len(group))
        if missing <= 0:
            return group
        names = [f"attempt{len(group) + i}" for i in range(missing)]
        group += await asyncio.gather(*(plan(team, question, name, seed) for name in names))


def sample(team, questions, step, K, raise_K=True):
    """(a group of attempts per question, K of this iteration). raise_K: the mean reward of the first attempts
    raises K before more are made. (Later ones are of hard questions only, so they do not count.)"""
    seeds = question_seeds(questions, team.cfg.seed, step)
    first = team.run(plan(team, q, "attempt0", seed) for q, seed in zip(questions, seeds, strict=True))
    if raise_K:
        mean_reward = sum(t.reward for t in first) / len(first)
        K = next_threshold(K, mean_reward)
    starts = zip(questions, first, seeds, strict=True)
    return team.run(until_enough(team, q, t, K, seed) for q, t, seed in starts), K


# The stages that train in iterations. All start from the warm-up (or from --checkpoint, or --warmup-data).
#
#   stage     attempts per question        learned from                            loss
#   mygo      until m of them pass K       those with r > K; K rises               Eq 6
#   offline   until m of them pass K, by   those with r > K = --offline-threshold  Eq 6
#             the frozen warm-up (App. F)
#   fixed     until m of them pass K       those with r > K = --threshold          Eq 6
#   star      group_size                   at most m, r = 1                        Eq 6
#   raft      group_size                   at most m of those with the highest r,  Eq 6
#                                          if it is above 0
#   raft++    group_size                   as raft                                 clipped ratio, advantage 1
#   grpo      group_size                   all, unless all rewards are equal       clipped ratio, KL (Eq 4),
#                                                                                  group advantages
BASELINES = ("grpo", "star", "raft", "raft++")
WITH_RATIO = ("grpo", "raft++")  # whose loss has a ratio
LEARNING = ("mygo", "offline", "fixed", *BASELINES)  # in iterations
TRAINS = ("warm-up", *LEARNING)


def select(group, K):
    """The attempts of a group to learn from (D.2): at most m (until_enough samples no more)."""
    return [t for t in group if t.reward > K]


# ---------------------------------------------------------------- loss (Eq 6)

def mle_loss(logprobs, response_mask, num_tokens):
    """Eq 6: minus the log-likelihood of what was sampled, per token (as LLaMA-Factory; the paper divides by
    |D| conversations). num_tokens: of the whole mini-batch, of which the tensors may be a part. logprobs,
    response_mask: (B, T), mask 0 = prompt, observation or padding."""
    return -torch.where(response_mask.bool(), logprobs, 0.0).sum() / num_tokens


# ---------------------------------------------------------------- update

def mini_batches(groups, size):
    """Lists of at most `size` attempts, in order. A question's attempts stay together, since their planners'
    prompt is computed once (--share-prefixes); a larger group than `size` is a mini-batch by itself."""
    batches = [[]]
    for group in groups:
        if batches[-1] and len(batches[-1]) + len(group) > size:
            batches.append([])
        batches[-1] += group
    return [batch for batch in batches if batch]


METRICS = records.METRICS  # {name of a logged number: what it is}


def train(run, stage, policy, sampler, reference, place):
    """MyGO, an iteration per step: sample until enough attempts pass K, select them, maximise their
    likelihood. Other stages of LEARNING branch off where `stage` is tested.

    sampler: the policy itself, or, of offline MyGO, the frozen warm-up. reference: the frozen model of GRPO's
    KL term, or None. Of several ranks each has all attempts, and learns from its share of them."""
    cfg, model = run.cfg, policy.model
    # AdamW with weight decay .01 on matrices (ours); gradients are clipped at norm 1 (as in LLaMA-Factory)
    optimizer = training.make_optimizer(model, cfg.lr, kind=cfg.optimizer)
    team = Team(sampler, place, cfg, cfg.temperature)
    first_K = cfg.offline_threshold if stage == "offline" else cfg.threshold
    state = {"tokens": 0, "K": first_K}  # checkpoints keep it; --resume restores it

    def completed(step):
        """The share of the training that is done after a step, by iterations or by tokens. Training ends once
        it is 1; the tokens of the last iteration may overshoot."""
        return max(step / cfg.steps, state["tokens"] / (cfg.token_budget or math.inf))

    # After each body (a `continue` ends one, too) run.steps evaluates, logs the row, saves, warns if hardly
    # any attempt was chosen (GUARD), and ends once completed(step) is 1
    for step, row in run.steps(policy, optimizer, cfg.steps, state=state, share=completed,
                               label=f"{stage} | ", guard=records.GUARD):
        # the next questions; epochs follow one another, each shuffled anew
        seed = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(place.questions, step, cfg.questions_per_step, seed)
        with run.sampling(sampler, row):  # the engine samples its current weights; row gets the seconds
            if stage in BASELINES:
                groups, selected = baseline_groups(team, questions, stage, step)
            else:
                # 1. sample (D.1): first attempts raise K, further ones follow where too few pass it
                groups, state["K"] = sample(team, questions, step, state["K"], raise_K=stage == "mygo")
                # 2. select (D.2): those that pass, at most m per question; the others are thrown away
                selected = [select(group, state["K"]) for group in groups]
        done_before = completed(step - 1)  # share done before this iteration: its tokens are not yet added
        # attempts that were thrown away count, too: methods are compared at equal numbers of sampled tokens
        state["tokens"] += sum(t.info.tokens for group in groups for t in group)
        # numbers, and a sample for trajectories.html
        row |= records.of_step(step, stage, state, questions=questions, groups=groups, selected=selected,
                               retriever=place.retriever)

        # 3. update (Eq 6), once per mini-batch. If no attempt passed: no update, but the iteration counts.
        # lr_factor rises over the first --lr-warmup of training, counted at this iteration's end; else 1
        lr_factor = training.warmup_factor(done_before + 1 / cfg.steps, cfg.lr_warmup)
        if stage in WITH_RATIO:  # GRPO and RAFT++, by a loss of their own
            row |= ratio_update(model, reference, optimizer, selected, cfg, lr_factor)
            continue
        batches, meter = mini_batches(selected, cfg.mini_batch), training.Meter()
        for number, batch in enumerate(batches):
            # 0 to 1 along the one cosine over all iterations (ours). Under --token-budget an iteration's
            # share, 1 / steps, is a guess
            cosine_at = done_before + number / len(batches) / cfg.steps
            lr = lr_factor * training.cosine_lr(cosine_at, 1, cfg.lr, cfg.lr_final)
            update(model, optimizer, batch, lr, cfg, meter)
        row |= records.update_metrics(meter, optimizer)


def update(model, optimizer, attempts, lr, cfg, meter):
    """One update by Eq 6 on a mini-batch, planners and workers alike. meter: adds up the step's updates."""
    training.set_lr(optimizer, lr)
    learned = [c for t in attempts for c in conversations(t)]
    # The denominator: what planners and workers sampled in the whole mini-batch, on all ranks. Each rank has
    # micro-batches of its share (--micro-tokens, to save memory). Their gradients add up, and backward sums
    # those of ranks (FSDP2): nothing is averaged
    num_tokens = sum(c.sampled_tokens for c in learned)
    for micro in training.collate_parts(model, learned, cfg.micro_tokens, cfg.share_prefixes):
        logprobs = models.token_logprobs(model, micro, cfg.temperature)  # (B, T), at sampling's temperature
        loss = mle_loss(logprobs, micro.response_mask, num_tokens)
        (loss * micro.weight).backward()  # weight 0: a filler, where another rank has more micro-batches
        meter.add(loss, {"tokens": int(micro.response_mask.sum())}, micro.weight)
    norm = training.clip_gradient(model)
    if meter.end_update(norm):  # loss and gradient are finite, on all ranks
        optimizer.step()
    optimizer.zero_grad()


# ---------------------------------------------------------------- warm-up (sec. 4.2, D.3)

def warm_up(run, policy, place):
    """Samples with few-shot prompts until sft_trajectories attempts have EM 1, and trains on these."""
    cfg, folder = run.cfg, run.folder
    distributed.once(folder.rewind, -1)  # an interrupted warm-up begins anew: all that it wrote is dropped
    team = Team(policy, place, cfg, cfg.temperature)
    shuffled = data.shuffled_forever(place.questions, stable_seed(cfg.seed, "warm-up"))
    questions = list(itertools.islice(shuffled, 10 * cfg.sft_trajectories))  # no more are tried (ours)
    right, tokens, tried, times = [], 0, 0, {}
    with run.sampling(policy, times):
        while len(right) < cfg.sft_trajectories and tried < len(questions):
            batch = questions[tried:tried + cfg.questions_per_step]
            seeds = [stable_seed(cfg.seed, "warm-up", tried + i, q.id) for i, q in enumerate(batch)]
            sampled = team.run(plan(team, q, "warm-up", seed) for q, seed in zip(batch, seeds, strict=True))
            tried += len(batch)
            tokens += sum(t.info.tokens for t in sampled)
            right += [(t, q) for t, q in zip(sampled, batch, strict=True) if t.info.em == 1]
            say(f"warm-up | {len(right)} right ones, {cfg.sft_trajectories} wanted, from {tried} questions")
    if not right:
        raise models.ModelError(f"warm-up: none of {tried} few-shot trajectories has EM 1; see the faults "
                                "that --stage few-shot counts, use a stronger model, or go on without: "
                                "--stage mygo --checkpoint MODEL")
    if len(right) < cfg.sft_trajectories:
        warn(f"warm-up: {len(right)} trajectories with EM 1 from all {tried} questions tried, fewer than "
             f"--sft-trajectories {cfg.sft_trajectories}")
    folder.write("sampling.json", {"questions": tried, "kept": len(right), "tokens": tokens} | times)
    right = right[:cfg.sft_trajectories]
    chosen = [t for t, _ in right]
    for t in chosen:  # learned under prompts without the example (D.3)
        for c in conversations(t):
            c.prompt_ids = first_prompt(policy.tokenizer, c.info.who, c.info.request)
    write_sharegpt(folder, right)  # before the first epoch
    # step 1: trajectories.html shows them with epoch 1
    for t, q in right[:5]:
        prompt = policy.tokenizer.decode(t.prompt_ids)
        folder.append("samples.jsonl", [records.group_record([t], q, step=1, prompt=prompt)])
    optimizer = training.make_optimizer(policy.model, cfg.sft_lr, kind=cfg.optimizer)
    sft(cfg, folder, policy.model, optimizer, chosen)
    run.save(policy, optimizer, step=cfg.sft_epochs, state={})


def sft(cfg, folder, model, optimizer, attempts):
    """sft_epochs over the attempts by Eq 6, with train's update and one cosine over all epochs."""
    for epoch in range(cfg.sft_epochs):
        rng = random.Random(stable_seed(cfg.seed, "sft", epoch))
        shuffled = rng.sample(attempts, len(attempts))
        batches, meter = mini_batches([[t] for t in shuffled], cfg.mini_batch), training.Meter()
        for number, batch in enumerate(batches):
            cosine_at = (epoch + number / len(batches)) / cfg.sft_epochs
            lr = training.cosine_lr(cosine_at, 1, cfg.sft_lr, cfg.sft_lr_final)
            update(model, optimizer, batch, lr, cfg, meter)
        row = {"step": epoch + 1} | records.update_metrics(meter, optimizer)
        loss = row.get("train/loss", math.nan)
        say(f"warm-up | epoch {epoch + 1}/{cfg.sft_epochs} | loss {loss:.4f} | "
            f"{row['train/updates']} updates")
        folder.log(row)


# ---------------------------------------------------------------- evaluate

def agent_in(place):
    """What evaluations, --collect and --ask need of this script: a question's prompt, an attempt at it by a
    Player (common/agent.py), and the rows that --collect writes of a right one."""
    def prompt(tokenizer, question, cfg):  # for --max-prompt, and for Player; plan() renders its own
        _, request = first_request(place, question, cfg)
        return first_prompt(tokenizer, (place.env, "planner"), request, place.few_shot)

    def play(player, question, name):
        team = Team(player.policy, place, player.cfg, player.temperature, player.search)
        return plan(team, question, name, player.seed, player.watch)
    return Agent("mygo_mujica", play, prompt, rows_of=collected_rows)


def evaluate(policy, place, cfg, progress):
    """One attempt per question. Returns (rows, summary)."""
    rows, summary = agent_in(place).evaluate(
        policy, place, cfg, progress, records.prediction, ("em", "f1", "searches", "tokens", "rounds"))
    return rows, summary | {"faults": records.sum_of_faults(row["faults"] for row in rows)}


# ---------------------------------------------------------------- main

@program()
def main(argv=None):
    """The stages of --stage in each of --envs, each in a run folder of its own. (@program: an error is one
    line; Ctrl-C says how to go on.)"""
    cfg = parse_args(argv)
    if cfg.ask:
        return ask(after_warm_up(cfg, learn_first))
    envs, stages = cfg.envs.split(","), [cfg.stage]
    if cfg.stage == "all":
        stages = ["few-shot", "warm-up", "mygo"]
    todo = []
    free = ["stage", "envs", "token_budget"]  # --resume may change these flags
    # all are opened before data are read: a run that cannot go on is refused early
    for env, stage in itertools.product(envs, stages):
        run = Run(cfg, "mygo_mujica", METRICS, stage=f"{env}-{stage}", free=free)
        todo.append((run, env, stage))
    # --warmup-data: trains on it, and sets the checkpoint of cfg and of each run.cfg
    cfg = after_warm_up(cfg, learn_first, [run for run, _, _ in todo])
    if cfg.stage in LEARNING:
        for env in envs:
            start_weights(cfg, env, cfg.stage)  # for its error where the warm-up is missing
    split, evals = places.load_splits(cfg, PAPER_EVAL)
    for run, env, stage in todo:
        run_stage(run, env, stage, split, evals)
    from common import ladder
    for env in envs:
        path = f"{cfg.out}/mygo_mujica/{cfg.name}-{env}"
        distributed.once(ladder.show_table, "mygo_mujica", [path], ("few-shot", *TRAINS), env)


def run_stage(run, env, stage, split, evals):
    """Trains and evaluates one stage in one environment, or only evaluates it."""
    cfg = run.cfg
    steps_needed = cfg.steps if stage in LEARNING else 0  # the others are over once they are evaluated
    if records.budget_is_spent(run.folder, cfg.token_budget):
        steps_needed = 0  # --token-budget has ended the training, before --steps
    if run.folder.is_done(steps_needed, evals):  # --resume: nothing is left to do
        return
    evals = [Place(**vars(e), env=env, few_shot=stage == "few-shot") for e in evals]
    source = start_weights(cfg, env, stage)
    trains = stage in TRAINS
    has_reference = stage == "grpo" and cfg.kl_coef > 0
    num_frozen = int(stage == "offline" or has_reference)  # models in memory beside the policy
    # folder.start: the checkpoint that --resume goes on from; None at the beginning
    policy = run.policy(run.folder.start or source, trains=trains, num_frozen=num_frozen)
    sampler, reference = policy, None
    if stage == "offline":
        sampler = run.policy(source, trains=False)  # an engine of its own, on weights that are not trained
    if has_reference:
        # lora=0: a model of its own, since the base below --lora's adapters has had no warm-up
        reference = models.load_reference(policy.model, source, lora=0)
    evals = [agent_in(e).within_limit(policy, [e], cfg)[0] for e in evals]  # --max-prompt
    if trains:
        place = Place(**vars(split), env=env, few_shot=stage == "warm-up")
        [place] = agent_in(place).within_limit(policy, [place], cfg)

    trained_on = place if trains else None
    with run.stage(f"Mujica {cfg.name}: {env} {stage}", policy, evals, evaluate, learned=trained_on):
        # a warm-up saves at its end alone: one that has a checkpoint is over
        if stage == "warm-up" and not run.folder.start:
            warm_up(run, policy, place)
        if stage in LEARNING:
            train(run, stage, policy, sampler, reference, place)
        run.evaluate(initial=stage == "few-shot")  # initial: warns if hardly any attempt has the format


def ask(cfg):
    """--ask: one question. In a graph its topic entities are those that it names."""
    run = Run(cfg, "mygo_mujica")
    _, [split, *_] = places.load_splits(cfg, PAPER_EVAL)
    place = Place(**vars(split), env=cfg.envs.split(",")[0], few_shot=cfg.stage == "few-shot")
    question = data.Question("ask", cfg.ask, [""])
    if place.env == "kg":
        question.entities = [[name] for name in place.graph.graph if kg.is_named(name, cfg.ask)]
        if not question.entities:
            raise data.DataError("--ask: the question names no entity of the graph, spelled as it is there")
    source = start_weights(cfg, place.env, "eval")
    agent_in(place).ask(run, source, place.retriever, question)


def start_weights(cfg, env, stage):
    """What a stage starts from. One of LEARNING: the checkpoint of this run's warm-up in this environment,
    unless --checkpoint is given (but not with --stage all). Any other: --checkpoint, or the model."""
    given = cfg.checkpoint and cfg.stage != "all"  # "all": the warm-up starts from it, MyGO from the warm-up
    if stage in LEARNING and not given:
        # the folder is NAME-ENV-warm-up; left_by adds the stage to the name
        return left_by(replace(cfg, name=f"{cfg.name}-{env}"), "mygo_mujica", "warm-up", needed_by=stage)
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)  # --policy: address of an API
    return checkpoint.find(source) or source


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    return resolve(flags.parse("mygo_mujica", Config, __doc__, argv))


def resolve(cfg):
    """Refuses what cannot run, and fills in dependent fields, --name too: config.json records what ran."""
    return places.resolve(cfg, LEARNING, WITH_RATIO)


# ---------------------------------------------------------------- baselines: STaR, RAFT, RAFT++, GRPO

def baseline_groups(team, questions, stage, step):
    """(a group of group_size attempts per question; of each group those that the stage learns from)"""
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
    """The attempts at one question that a baseline learns from, by the table of stages."""
    rewards = [t.reward for t in group]
    if stage == "grpo":
        return group if training.has_spread(rewards) else []  # else all advantages are 0
    least = R_SUP if stage == "star" else max(rewards)
    return [t for t in group if least > 0 and t.reward >= least][:keep]


def assign_advantages(group, stage="grpo"):
    """GRPO: A(tau) of sec. 3.2, which planner and workers share (ours). RAFT++: 1."""
    advantages = [1.0] * len(group)
    if stage == "grpo":
        advantages = training.group_advantages([t.reward for t in group])
    for t, advantage in zip(group, advantages, strict=True):
        for c in conversations(t):
            c.advantages = [advantage] * len(c.turns)


def agent_grpo_loss(logprobs, batch, cfg, num_attempts):
    """Eq 4 (A outside its min is a misprint) as a loss: the sum over tokens of -w [min(rho A, clip(rho) A)
    - kl_coef k3]. Two changes: rho is per token, not per turn; w = 1 / (attempts x tokens of the attempt,
    workers too): attempts weigh alike. num_attempts: in the mini-batch, on all ranks. No reference: no KL."""
    weights = [[1 / (num_attempts * c.info.tokens)] for c in batch.trajectories]
    weights = torch.tensor(weights, device=logprobs.device)                        # (B, 1)
    kl_coef = 0.0 if batch.ref_logprobs is None else cfg.kl_coef
    advantages = training.corrected_advantages(batch, cfg.sampler_correction)  # off by default
    return training.grpo_loss(
        logprobs, batch.old_logprobs, advantages, batch.response_mask, weights, clip_low=cfg.clip,
        clip_high=cfg.clip, kl_coef=kl_coef, ref_logprobs=batch.ref_logprobs)


def ratio_update(model, reference, optimizer, groups, cfg, lr_factor=1.0):
    """One epoch over groups of attempts that have their advantages. Returns the means for the step's row."""
    batches, prepared, row = mini_batches(groups, cfg.mini_batch), [], {}
    with timed(row, "time/old_logprobs"):
        # old log-probs: the trainer's, before any update. The first mini-batch needs no pass for them: the
        # forward pass of its update gives them (remember_old)
        for batch in batches:  # old: only the first batch finds `prepared` empty
            learned = [c for t in batch for c in conversations(t)]
            prepared.append(training.prepare(
                model, reference, learned, micro_tokens=cfg.micro_tokens, share_prefixes=cfg.share_prefixes,
                temperature=cfg.temperature, old=bool(prepared)))
    every_micro = [micro for parts in prepared for micro in parts]
    # also logs how far the engine's log-probs are off
    meter = training.Meter(every_micro, cfg.sampler_correction)
    for batch, parts in zip(batches, prepared, strict=True):
        training.set_lr(optimizer, lr_factor * cfg.grpo_lr)
        for micro in parts:
            logprobs = models.token_logprobs(model, micro, cfg.temperature)  # (B, T)
            micro.remember_old(logprobs)  # in the first mini-batch; no effect later
            loss, stats = agent_grpo_loss(logprobs, micro, cfg, len(batch))
            (loss * micro.weight).backward()
            meter.add(loss, stats, micro.weight)
        norm = training.clip_gradient(model)
        if meter.end_update(norm):
            optimizer.step()
        optimizer.zero_grad()
    return row | records.update_metrics(meter, optimizer)


# ================================================================ appendix: plumbing, and the paper's prompts
#
# ---------------------------------------------------------------- conversations on file

def write_sharegpt(folder, learned):
    """sharegpt.jsonl: the conversations of [(attempt, question)] that the warm-up learns, as LLaMA-Factory
    reads them."""
    from common.warmup import sharegpt
    rows = []
    for attempt, question in learned:
        rows += rows_of(conversations(attempt), question=question.question)
    folder.append("sharegpt.jsonl", rows)
    folder.write("dataset_info.json", sharegpt.dataset_info("mujica"))


def rows_of(learned, **more):
    from common.warmup import sharegpt
    return [sharegpt.row(c, SYSTEM[c.info.who], c.info.request, **more) for c in learned]


def collected_rows(attempt, question):
    """The rows of --collect, without conversations whose last turn was cut off."""
    whole = [c for c in conversations(attempt) if c.turns[-1].stop_reason != "length"]
    return rows_of(whole, script="mygo_mujica", question=question.question)


# ---------------------------------------------------------------- demonstrations (common/of_mygo/written.py)

def demonstration(tokenizer, question, demo, place, cfg):
    """The conversations of a demonstration: plan() and work() run, and its lines replace the model."""
    from common.of_mygo import written
    from common.warmup import scripted
    clean = partial(harmless, max_words=cfg.max_words)
    unlimited = replace(cfg, max_rounds=99, max_parallel=99)

    def agent(policy, search):
        team = Team(policy, place, unlimited, 0.0, search)
        # stands in for the method: the demonstration's lines. play() gets no lines of its own, so []
        team.next_turn = written.lines_of(tokenizer, question, demo, place, cfg.top_k, clean, NOTHING)
        return plan(team, question, "written", 0)
    return conversations(scripted.play(tokenizer, [], place.retriever, agent))  # [] lines: see next_turn


def learn_first(cfg, source):
    """Folder of `source` after --warmup-data; demonstrations search the first evaluation's corpus."""
    from common.of_mygo import written
    _, [split, *_] = places.load_splits(cfg, PAPER_EVAL)
    place = Place(**vars(split))
    return written.warmed_up(cfg, source, place, demonstration)


def tiny_policy(cfg):
    """Folder of the embedded world's policy of half a million weights, which knows text and graph."""
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

# one conversation each, user and assistant in turn, for few-shot prompts
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
