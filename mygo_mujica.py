"""Mujica-MyGO: Reinforcing QA Agents with Minimalist Policy Gradient Optimization (arXiv 2505.17086).

Mujica is one model in two roles. The planner splits a question into sub-questions, a layer of a directed
acyclic graph at a time, and reads only one sentence for each; a worker answers one sub-question from the
passages it retrieves, or from the triples of one entity. The sub-questions of a layer run in parallel. MyGO
trains both roles by plain likelihood on sampled trajectories whose reward passes a threshold that rises with
the policy.

GRPO, except: there is no advantage, ratio, clip or KL. What passes the threshold is learned by its
likelihood, the rest is thrown away, and a question is asked again until enough has passed.

    Eq 1        planner and workers              plan, work
    sec. 3.3    rising threshold K               next_threshold
    D.1         multiple-attempt sampling        sample, attempts
    D.2         selection, planner and workers   select, examples
    Eq 6        likelihood of sampled tokens     mle_loss        (Eq 4, GRPO, for comparison: agent_grpo_loss)
    D.3         warm-up                          warm_up, sft
    App. F      offline MyGO                     --stage offline
    Tables 7-10 prompts                          SYSTEM, SHOTS (at the end)

    python mygo_mujica.py                  embedded world: few-shot, warm-up, MyGO; text, then graph; 8 min
    python mygo_mujica.py --stage offline  one stage: few-shot, warm-up, mygo, offline, fixed, grpo, star, …
    python mygo_mujica.py --model Qwen/Qwen2.5-7B-Instruct --data TRAIN.json --eval-data DEV.json   and one of
        --corpus contexts --retriever dense:BAAI/bge-large-en-v1.5           2Wiki-Text
        --envs kg --graph triples.jsonl                                      2Wiki-KG
        --envs kimi                                                          Hotpot-Kimi
--graph evidences makes the graph of 2Wiki's own evidences: gold facts and next to no others, so it is far
easier than Wikidata. What is not in the paper is at the end (appendix) or in common/. Numbers reached:
results/README.md. The paper's own (7B and 8B models) were not measured.
"""

import asyncio
import itertools
import math
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import (
    chat,
    checkpoint,
    data,
    distributed,
    flags,
    guards,
    kg,
    metrics,
    report,
    rollout,
    run,
    splits,
    team_metrics,
    training,
)
from common import model as models
from common.files import console, plain, read_jsonl, say, warn
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.page import teams
from common.rollout import Outcome, Policy, Trajectory, Turn, context_ids, stable_seed
from common.team_splits import load_splits, topic_entities
from common.warmup import demonstrations

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings; what a run needs besides (model, search, memory, names) is in common/flags.py."""

    # ---- stages

    # what to do; all = few-shot, warm-up, mygo
    stage: Literal[
        "all", "few-shot", "warm-up", "mygo", "offline", "fixed", "grpo", "star", "raft", "raft++", "eval",
    ] = "all"
    envs: str = "text"              # text, kg, kimi (each question's own passages), or several with commas
    # kg: triples (.jsonl, .json, .tsv) or .graphml; or "evidences" = of the questions (2Wiki)
    graph: str = ""

    # ---- agent
    top_k: int = 5                  # passages a worker reads
    max_triples: int = 20           # triples a worker reads
    max_words: int = 200            # words of a passage or triple, of at most 20 characters each
    max_rounds: int = 6             # planner turns
    max_parallel: int = 8           # sub-questions a turn
    max_turn: int = 512             # tokens sampled a turn
    max_prompt: int = 4096          # tokens of the first prompt
    temperature: float = 1.0        # of sampling in training
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy
    few_shot: bool = False          # --stage eval: with the examples of Tables 7-10

    # ---- warm-up
    sft_trajectories: int = 300     # few-shot trajectories with EM 1 to learn from (sec. 4.2 says 1k) | D.3
    sft_epochs: int = 3             # passes over them
    sft_lr: float = 1e-5            # learning rate at the start | D.3
    sft_lr_final: float = 1e-6      # and at the end, cosine | D.3

    # ---- MyGO and its baselines

    # training questions, 2Wiki or HotpotQA: file, hub name, or "world" | sec. 4.1
    data: str = "hotpotqa"
    limit: int = 20000              # training questions, drawn at random; 0 = all | D.3
    steps: int = 20                 # iterations; 20,000 questions in all | D.3
    questions_per_step: int = 1000  # questions an iteration | D.3
    keep: int = 3                   # m, trajectories kept a question | D.3
    max_attempts: int = 16          # attempts a question | D.3
    threshold: float = .5           # K' at the start
    offline_threshold: float = .8   # K of offline MyGO
    group_size: int = 5             # attempts a question of STaR, RAFT and GRPO
    mini_batch: int = 32            # planner trajectories an update, their workers with them
    lr: float = 5e-7                # learning rate at the start | D.3
    lr_final: float = 1e-8          # and at the end, cosine | D.3
    grpo_lr: float = 1e-6           # GRPO's, constant; as in the other scripts
    clip: float = .2                # GRPO: half width of the clip window
    kl_coef: float = 1e-3           # GRPO: k3 estimate of the KL to the weights it started from
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient | LLaMA-Factory
    token_budget: int = 0           # stop when so many tokens were sampled in training; 0 = no limit
    save_every: int = 1             # iterations between checkpoints; 0 = at the end only


# What differs in the embedded world. Ours.
WORLD = dict(
    data="world",
    envs="text,kg",
    retriever="bm25",
    top_k=2,
    max_turn=100,
    eval_limit=400,
    eval_temperature=1.0,
    limit=2000,
    sft_lr=3e-4,
    sft_lr_final=3e-5,
    steps=60,
    token_budget=800_000,
    questions_per_step=64,
    mini_batch=16,
    lr=1e-4,
    lr_final=1e-5,
    grpo_lr=1e-4,
    micro_tokens=8192,
)
# And at the world's second level (--world hard:partial=.8).
HARD = WORLD | dict(envs="text", limit=1500, eval_limit=1000, token_budget=1_200_000)
WORLD_SETS = ("test", "dev", "other-relations")
PAPER_EVAL = "hotpotqa-dev,musique-dev"  # Tables 2 and 3
PAPER = {  # Table 6, EM / F1 of Qwen2.5-7B on 2Wiki
    "text": {
        "few-shot": "12.41 / 19.71",
        "warm-up": "50.18 / 56.25",
        "mygo": "53.17 / 59.62",
        "offline": "53.27 / 59.78",
    },
    "kg": {
        "few-shot": "57.49 / 62.31",
        "warm-up": "74.93 / 80.74",
        "mygo": "77.63 / 84.15",
        "offline": "77.09 / 83.16",
    },
}

# ---------------------------------------------------------------- prompts (Tables 7-10 are at the end)

NOTHING = "No relevant information found."  # Table 10


def first_prompt(tokenizer, env, role, content, few_shot):
    """Prompt ids of planner or worker: instructions, examples if wanted, the request."""
    env = "kg" if env == "kg" else "text"
    shots = SHOTS[env, role] if few_shot and not chat.is_tiny(tokenizer) else []
    examples = [(("user", "assistant")[i % 2], text) for i, text in enumerate(shots)]
    return chat.render_chat(
        tokenizer, [("system", SYSTEM[env, role]), *examples, ("user", chat.Foreign(content))]
    )


def harmless(text, max_words):
    """One line of at most max_words words (20 characters each) that can neither write a tag, an index, nor
    the heading of a message.

    >>> harmless("Silent Harbor <b>\\n[3] Obs:: me </sentence>", 20)
    'Silent Harbor ‹b> (3) Obs me ‹/sentence>'
    """
    text = " ".join(str(text).split()[:max_words])[: 20 * max_words]
    text = re.sub(r"\b(Obs|Question|Context|Materials|Candidate)(?:\s*[:：])+", r"\1", text)
    return re.sub(r"\[\s*(-?\d+)\s*\]", r"(\1)", re.sub(r"<(?=[/|!a-zA-Z])", "‹", text))


def numbered(lines):
    """
    >>> numbered(["a", "b"])
    '[0] a\\n[1] b'
    """
    return "\n".join(f"[{i}] {line}" for i, line in enumerate(lines))


def worker_request(env, question, materials):
    return f"Question: {question}\n{'Materials' if env == 'kg' else 'Context'}:\n{numbered(materials)}"


def planner_request(env, question, entities):
    if env != "kg":
        return f"Question: {question}"
    return f"Question: {question}\nCandidate: {' '.join(f'[{i}] {e}' for i, e in enumerate(entities))}"


# ---------------------------------------------------------------- parsing: read, never trusted

SEARCH = re.compile(r"<search>((?:(?!</?search>).)*)</search>", re.DOTALL)
INSIDE = r"(?:(?!Search\s*\().)*?"  # of quotes: no further call
CALL = re.compile(
    rf"""Search\s*\(\s*((?:\[[^\]]*\]\s*)*),?\s*(?:["“]({INSIDE})["”]|'({INSIDE})')\s*\)""", re.DOTALL
)


def parse_plan(text, env, max_parallel):
    """(sub-questions [(label or None, text)], answer or None, Counter of what was wrong) of a planner's turn;
    closed thoughts are not read.

    >>> parse_plan("<think> … </think> <search> a </search> <search> b <search> c </search>", "text", 8)
    ([(None, 'a'), (None, 'c')], None, Counter({'unclosed': 1}))
    >>> parse_plan('<action> Search([0], "Who wrote it?") Search([x], "When?") </action>', "kg", 8)
    ([(0, 'Who wrote it?')], None, Counter({'bad call': 1}))
    """
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    calls, wrong = calls_of_graph(text) if env == "kg" else calls_of_text(text)
    wrong["too many"] += max(0, len(calls) - max_parallel)
    answers = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    answer = " ".join(answers[-1].split()) or None if answers else None
    if calls and answers:  # it cannot have read what it asks for
        answer = None
        wrong["answered while asking"] = 1
    wrong["no action"] += not calls and not answer
    return calls[:max_parallel], answer, +wrong


def calls_of_text(text):
    """[(None, query)] of <search> tags, and what was wrong with them."""
    found, opened, closed = SEARCH.findall(text), text.count("<search>"), text.count("</search>")
    calls = [(None, " ".join(q.split())) for q in found if q.strip()]
    return calls, Counter(
        {
            "unclosed": abs(opened - closed),
            "nested": min(opened, closed) - len(found),
            "empty": len(found) - len(calls),
        }
    )


def calls_of_graph(text):
    """[(label, question)] of Search([label], "question"), and what was wrong with them."""
    found, calls = CALL.findall(text), []
    wrong = Counter({"bad call": max(0, len(re.findall(r"\bSearch\s*\(", text)) - len(found))})
    for labels, double, single in found:
        label = re.fullmatch(r"\[\s*(-?\d{1,6})\s*\]\s*", labels)
        question = " ".join((double or single).split())
        if label and question:
            calls.append((int(label[1]), question))
        else:
            wrong["bad call"] += 1
    return calls, wrong


def parse_report(text, materials):
    """(sentence or None, selected indices, what was wrong or "") of a worker's turn over so many materials;
    [-1] = nothing fits, from memory.

    >>> parse_report("<think> … </think> <select> [0][2] </select> <sentence> A is B. </sentence>", 3)
    ('A is B.', [0, 2], '')
    >>> parse_report("<select> [7] </select> <sentence> A is B. </sentence>", 3)
    (None, [], 'no such index')
    """
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    sentences = re.findall(r"<sentence>(.*?)</sentence>", text, re.DOTALL)
    selects = re.findall(r"<select>(.*?)</select>", text, re.DOTALL)
    sentence = " ".join(sentences[-1].split()) if sentences else ""
    if not sentence:
        return None, [], "no sentence"
    brackets = re.findall(r"\[([^\]]*)\]", selects[-1] if selects else "")
    indices = [int(i) for bracket in brackets for i in re.findall(r"-?\d{1,6}", bracket)]
    if not indices:
        return None, [], "no selection"
    if indices == [-1]:
        return sentence, [], ""
    if any(not 0 <= i < materials for i in indices):
        return None, [], "no such index"
    return sentence, list(dict.fromkeys(indices)), ""


# ---------------------------------------------------------------- agent: planner and workers (Eq 1)

@dataclass
class Place:
    """A split in one environment: what can be asked and read there."""

    env: str  # text, kg or kimi
    name: str
    questions: list
    retriever: object  # text: passages of the corpus
    graph: object = None  # kg: kg.KnowledgeGraph
    own: dict = field(default_factory=dict)  # kimi: question id -> a retriever over its own passages


@dataclass
class Team:
    """One model in both roles, in one place."""

    policy: Policy
    place: Place
    cfg: Config
    temperature: float
    few_shot: bool = False

    def __post_init__(self):
        self.search = rollout.BatchedSearch(self.place.retriever)

    def run(self, agents, progress=None):
        return rollout.run_agents(agents, self.policy.engine, self.search, progress)


def opening(place, question, cfg):
    """(entities a graph's planner may name at the start, the request it gets)"""
    entities = topic_entities(question, place.graph) if place.env == "kg" else []
    shown = [harmless(e, cfg.max_words) for e in entities]
    return entities, planner_request(place.env, harmless(question.question, cfg.max_words), shown)


async def materials_for(team, question, sub, entity):
    """(lines a worker reads, triples behind them): an entity's facts, or the best passages of the corpus or
    of the question's own."""
    cfg, place = team.cfg, team.place
    if place.env == "kg":
        facts = place.graph.facts(entity)
        if len(facts) > cfg.max_triples:  # those that share most words with the question
            words = set(metrics.normalize_answer(sub).split())
            shared = [len(words & set(metrics.normalize_answer(" ".join(fact)).split())) for fact in facts]
            best = sorted(range(len(facts)), key=shared.__getitem__, reverse=True)
            facts = [facts[i] for i in best[: cfg.max_triples]]
        return [harmless(", ".join(fact), cfg.max_words) for fact in facts], facts
    if place.env == "kimi":
        if question.id not in place.own:
            place.own[question.id] = splits.make_retriever(cfg, data.pool_contexts([question]))
        passages = place.own[question.id].search([sub], cfg.top_k)[0]
    else:
        passages = await team.search(sub, cfg.top_k)
    return [harmless(p.text, cfg.max_words) for p in passages], []


async def say_next(team, prompt_ids, turns, seed):
    """The next turn of a conversation, sampled to the end of the message."""
    g = await team.policy.engine.generate(
        context_ids(prompt_ids, turns),
        stop=(),
        max_tokens=team.cfg.max_turn,
        temperature=team.temperature,
        seed=seed,
    )
    text = rollout.sampled_text(team.policy.tokenizer, g.token_ids, g.stop_reason)
    return Turn(g.token_ids, g.logprobs, g.stop_reason, text)


@dataclass
class Report:
    """What a worker did. problem: why it found nothing or named what there is not."""
    asked: str                  # the sub-question
    entity: str | None          # in a graph the one whose triples are read, None where the label is unknown
    materials: list             # lines that it reads
    problem: str
    request: str = ""           # its user message
    sentence: str = NOTHING     # what it reports
    selected: list = field(default_factory=list)    # indices of materials
    found: list = field(default_factory=list)       # entities that the selected triples lead to
    tokens: int = 0             # sampled by its planner and all workers


@dataclass
class Attempt(Outcome):
    """Of a planner. searches: sub-questions."""
    request: str = ""           # the planner's user message
    workers: list = field(default_factory=list)     # [round] -> [a worker's Trajectory, info a Report]
    faults: dict = field(default_factory=dict)      # {what went wrong: how often}
    tokens: int = 0             # sampled by planner and workers


async def work(team, question, sub, entity, seed):
    """One worker: reads, thinks, selects, states one sentence. A Trajectory of one turn (of none where there
    is nothing to read). entity: in a graph the one whose triples are read, None where the label does not
    exist."""
    env, max_words = team.place.env, team.cfg.max_words
    sub = harmless(sub, max_words)
    lines, facts = await materials_for(team, question, sub, entity)
    problem = "unknown label" if env == "kg" and entity is None else "nothing to read"
    info = Report(sub, entity, lines, problem)
    if not lines:
        return Trajectory(question.id, [], [], info=info)
    info.request = worker_request(env, sub, lines)
    prompt_ids = first_prompt(team.policy.tokenizer, env, "worker", info.request, team.few_shot)
    turn = await say_next(team, prompt_ids, [], seed)
    sentence, info.selected, info.problem = parse_report(turn.text, len(lines))
    info.sentence = harmless(sentence, max_words) if sentence else NOTHING
    info.found = [facts[i][2] for i in info.selected] if facts else []
    return Trajectory(question.id, prompt_ids, [turn], info=info)


async def plan(team, question, path, seed, watch=None):
    """One answer to one question: the planner's loop, its workers in parallel. A Trajectory with the workers
    in info.workers[round]."""
    place, cfg = team.place, team.cfg
    entities, request = opening(place, question, cfg)
    prompt_ids = first_prompt(team.policy.tokenizer, place.env, "planner", request, team.few_shot)
    turns, rounds, wrong, asked = [], [], Counter(), set()
    while True:
        turn = await say_next(team, prompt_ids, turns, stable_seed(seed, path, len(turns)))
        calls, answer, faults = parse_plan(turn.text, place.env, cfg.max_parallel)
        turns.append(turn)
        wrong += faults
        if answer or not calls or len(turns) == cfg.max_rounds:
            wrong["out of rounds"] += bool(calls)
            break
        wrong["asked again"] += sum(call in asked for call in calls) + len(calls) - len(set(calls))
        asked.update(calls)
        workers = []
        for i, (label, sub) in enumerate(calls):
            entity = entities[label] if label is not None and 0 <= label < len(entities) else None
            workers.append(
                work(team, question, sub, entity, stable_seed(seed, path, len(turns) - 1, "worker", i))
            )
        reports = await asyncio.gather(*workers)
        rounds.append(reports)
        wrong += Counter(f"worker: {r.info.problem}" for r in reports if r.info.problem)
        turn.observation = "\n".join(observed(r, entities, place, cfg) for r in reports)
        turn.observation_ids = chat.render_reply(
            team.policy.tokenizer, turn.ids, chat.Foreign(turn.observation)
        )
        if watch:
            watch(turn, reports)
    rounds.append([])
    if watch:
        watch(turn, [])
    info = Attempt(answer, request=request, workers=rounds, faults=dict(+wrong))
    return judge(Trajectory(question.id, prompt_ids, turns, info=info), question)


def observed(report, entities, place, cfg):
    """What the planner reads of a worker: its sentence, and labels for entities it has found, which join
    `entities`."""
    line = f"Obs: {report.info.sentence}"
    new = [e for e in dict.fromkeys(report.info.found) if e not in entities and place.graph.facts(e)]
    if new:
        labels = [f"[{len(entities) + i}] {harmless(e, cfg.max_words)}" for i, e in enumerate(new)]
        line += f" Candidate: {' '.join(labels)}"
    entities += new
    return line


# ---------------------------------------------------------------- reward

def judge(trajectory, question):
    """The reward: F1 of the answer (sec. 4.1); nothing without one. Fills the rest of info."""
    info = trajectory.info
    info.em = metrics.exact_match(info.answer, question.answers) if info.answer else 0.0
    info.f1 = metrics.f1(info.answer, question.answers) if info.answer else 0.0
    trajectory.reward = info.f1
    info.problem = (
        "" if info.answer else "out of rounds" if "out of rounds" in info.faults else "no answer"
    )
    info.searches = sum(map(len, info.workers))
    info.tokens = sum(e.sampled_tokens for e in examples(trajectory))
    for e in examples(trajectory):
        e.info.tokens = info.tokens
    return trajectory


def examples(trajectory):
    """What one trajectory gives to learn from (D.2): the planner's conversation and, apart, each worker's
    single exchange."""
    return [trajectory] + [w for reports in trajectory.info.workers for w in reports if w.turns]


# ---------------------------------------------------------------- sampling and selection (sec. 3.3, D.1, D.2)

R_SUP = 1.0  # the largest reward there is: F1


def next_threshold(previous, mean_reward, r_sup=R_SUP):
    """K := max(K', (mean_r + r_sup) / 2), mean_r over the first pass (sec. 3.3, the misprint corrected).

    >>> next_threshold(.5, .4), next_threshold(.8, .4)
    (0.7, 0.8)
    """
    return max(previous, (mean_reward + r_sup) / 2)


async def attempts(team, question, first, K, seed):
    """Goes on from the first attempt until m of them pass K, or max_attempts were made (D.1). As many at once
    as are lacking: never more than one by one."""
    made, cfg = [first], team.cfg
    while True:
        lacking = min(cfg.keep - sum(t.reward > K for t in made), cfg.max_attempts - len(made))
        if lacking <= 0:
            return made
        paths = [f"attempt{len(made) + i}" for i in range(lacking)]
        made += await asyncio.gather(*(plan(team, question, path, seed) for path in paths))


def sample(team, questions, stage, step, K):
    """(attempts a question, K of this iteration). An attempt depends on its own seed alone; how many there
    are, also on K, a mean over the batch."""
    cfg = team.cfg
    seeded = list(zip(questions, rollout.question_seeds(questions, cfg.seed, step), strict=True))
    if stage in ("star", "raft", "raft++", "grpo"):
        size = cfg.group_size
        made = team.run(plan(team, q, f"attempt{k}", seed) for q, seed in seeded for k in range(size))
        return [made[i:i + size] for i in range(0, len(made), size)], K
    first = team.run(plan(team, q, "attempt0", seed) for q, seed in seeded)
    if stage == "mygo":
        K = min(next_threshold(K, rollout.mean(t.reward for t in first)), R_SUP - 1e-6)
    made = team.run(attempts(team, q, t, K, seed) for (q, seed), t in zip(seeded, first, strict=True))
    return made, K


def select(made, stage, K, cfg):
    """The trajectories of one question to learn from."""
    if stage in ("raft", "raft++"):
        best = max(t.reward for t in made)
        return [t for t in made if t.reward == best > 0][: cfg.keep]
    if stage == "grpo":  # all, unless all are alike
        return made if training.has_spread([t.reward for t in made]) else []
    if stage == "star":
        return [t for t in made if t.reward >= R_SUP][: cfg.keep]
    return [t for t in made if t.reward > K][: cfg.keep]


def assign_advantages(group, stage="grpo"):
    """GRPO: planner and workers share their trajectory's advantage (sec. 3.2); RAFT++: 1."""
    advantages = [1.0] * len(group)
    if stage == "grpo":
        advantages = training.group_advantages([t.reward for t in group])
    for t, advantage in zip(group, advantages, strict=True):
        for e in examples(t):
            e.advantages = [advantage] * len(e.turns)


# ---------------------------------------------------------------- loss (Eq 6; Eq 4 for comparison)

def mle_loss(logprobs, response_mask, num_tokens):
    """Eq 6: minus the log-likelihood of what the agent said, over `num_tokens` (of the whole mini-batch).
    logprobs, response_mask (B, T)."""
    return -(logprobs * response_mask).sum() / num_tokens


def agent_grpo_loss(logprobs, batch, cfg, num_trajectories):
    """Eq 4 with a ratio a token: every trajectory counts the same, and so does every token of its planner and
    workers."""
    weights = [[1 / (num_trajectories * e.info.tokens)] for e in batch.trajectories]
    weights = torch.tensor(weights, device=logprobs.device)                        # (B, 1)
    kl_coef = 0.0 if batch.ref_logprobs is None else cfg.kl_coef  # RAFT++ has no KL term
    return training.grpo_loss(
        logprobs,
        batch.old_logprobs,
        training.corrected_advantages(batch, cfg.sampler_correction),
        batch.response_mask,
        weights,
        cfg.clip,
        cfg.clip,
        kl_coef,
        batch.ref_logprobs,
    )


# ---------------------------------------------------------------- update

def mini_batches(groups, size):
    """Lists of about `size` trajectories; a question's stay together, since they share their prompt."""
    parts = [[]]
    for group in groups:
        if parts[-1] and len(parts[-1]) + len(group) > size:
            parts.append([])
        parts[-1] += group
    return [part for part in parts if part]


def update(model, reference, optimizer, groups, cfg, rate, stage, keep="nonfinite"):
    """One epoch over [[chosen trajectories] of a question] in mini-batches; rate(share of the epoch done) ->
    learning rate. Eq 6, or GRPO's loss in the stages of RATIOS. Returns the step's means."""
    started, row = time.time(), {}
    parts = mini_batches(groups, cfg.mini_batch)
    learn = [[e for t in part for e in examples(t)] for part in parts]
    prepared = []
    if stage in RATIOS:
        # all old log-probs before the first update: they are those of the weights that sampled
        for part in learn:
            prepared.append(training.prepare(
                model, reference, part, cfg.micro_tokens, cfg.share_prefixes, cfg.temperature, cfg.kernels))
        row["time/old_logprobs"] = time.time() - started

    meter = training.Meter([b for batches in prepared for b in batches], keep, cfg.sampler_correction)
    for number, part in enumerate(parts):
        if prepared:
            batches = prepared[number]
        else:
            batches = training.collate_parts(
                model, learn[number], cfg.micro_tokens, cfg.share_prefixes)
        num_tokens = sum(e.sampled_tokens for e in learn[number])
        for b in batches:
            logprobs = models.token_logprobs(model, b, cfg.temperature, cfg.kernels)  # (B, T)
            if stage in RATIOS:
                loss, stats = agent_grpo_loss(logprobs, b, cfg, len(part))
            else:
                loss = mle_loss(logprobs, b.response_mask, num_tokens)
                stats = {"tokens": int(b.response_mask.sum())}
            (loss * b.weight).backward()
            meter.add(loss, stats, b.weight)
        training.set_lr(optimizer, rate(number / len(parts)))
        norm = training.clip_gradient(model, cfg.grad_clip)
        if meter.finite(norm, batches):  # else loss or gradient is not a number: no update
            optimizer.step()
        optimizer.zero_grad()
    row["train/tokens"] = meter.total.get("tokens", 0)
    row["train/lr"] = optimizer.param_groups[0]["lr"]
    return row | meter.means()


# ---------------------------------------------------------------- warm-up (sec. 4.2, D.3)

def warm_up(cfg, folder, policy, place):
    """Samples the few-shot model until sft_trajectories of them have EM 1, and trains on these without the
    examples."""
    folder.rewind(-1)
    optimizer = training.make_optimizer(policy.model, cfg.sft_lr, cfg.weight_decay, kind=cfg.optimizer)
    team = Team(policy, place, cfg, cfg.temperature, few_shot=True)
    order = data.shuffled_forever(place.questions, stable_seed(cfg.seed, "warm-up"))
    questions = list(itertools.islice(order, 10 * cfg.sft_trajectories))
    kept, tokens, asked, started = [], 0, 0, time.time()
    policy.engine.sync(policy.model)
    while len(kept) < cfg.sft_trajectories and asked < len(questions):
        batch = questions[asked:asked + cfg.questions_per_step]
        seeds = [stable_seed(cfg.seed, "warm-up", asked + i, q.id) for i, q in enumerate(batch)]
        made = team.run(plan(team, q, "warm-up", seed) for q, seed in zip(batch, seeds, strict=True))
        asked += len(batch)
        tokens += sum(t.info.tokens for t in made)
        right = [(t, q) for t, q in zip(made, batch, strict=True) if t.info.em == 1]
        kept += [(zero_shot(t, policy.tokenizer, place.env), q) for t, q in right]
        seconds = time.time() - started
        say(f"warm-up | {len(kept)} of {cfg.sft_trajectories} with EM 1 from {asked} questions | "
            f"{seconds:.0f}s")
    if not kept:
        raise models.ModelError(f"warm-up: none of {asked} few-shot trajectories has EM 1; see which rule "
                                "fails with --stage few-shot, use a stronger model, or go on without: "
                                "--stage mygo --checkpoint MODEL")
    if len(kept) < cfg.sft_trajectories:
        warn(f"warm-up: {len(kept)} trajectories with EM 1 from all {asked} questions tried, fewer than "
             f"--sft-trajectories {cfg.sft_trajectories}")
    kept = kept[: cfg.sft_trajectories]
    folder.append("sharegpt.jsonl", [row for t, _ in kept for row in sharegpt_rows(t, place.env, 0)])
    for t, q in kept[:5]:
        shown = teams.group_record([t], q, policy.tokenizer, step=1, prompt_ids=t.prompt_ids)
        folder.append("samples.jsonl", [shown])
    sampling = {"questions": asked, "kept": len(kept), "tokens": tokens, "seconds": seconds}
    folder.write("sampling.json", sampling)
    policy.engine.sleep()
    sft(cfg, folder, policy.model, optimizer, [[t] for t, _ in kept])
    run.save(folder, policy, optimizer, cfg.sft_epochs, {"tokens": tokens, "K": cfg.threshold})


def zero_shot(trajectory, tokenizer, env):
    """The trajectory and its workers under prompts without examples, which is what the warm-up burns in
    (D.3)."""
    for e in examples(trajectory):
        role = "planner" if e is trajectory else "worker"
        e.prompt_ids = first_prompt(tokenizer, env, role, e.info.request, few_shot=False)
    return trajectory


def sft(cfg, folder, model, optimizer, groups):
    """sft_epochs over the kept trajectories, a cosine over all of it."""
    for epoch in range(cfg.sft_epochs):

        def rate(share, epoch=epoch):
            return training.cosine_lr(epoch + share, cfg.sft_epochs, cfg.sft_lr, cfg.sft_lr_final)

        order = random.Random(stable_seed(cfg.seed, "sft", epoch)).sample(groups, len(groups))
        keep = folder.path / f"nonfinite_epoch{epoch + 1}"
        row = {"step": epoch + 1} | update(model, None, optimizer, order, cfg, rate, "warm-up", keep)
        loss = row.get("train/loss", math.nan)
        say(f"warm-up | epoch {epoch + 1}/{cfg.sft_epochs} | loss {loss:.4f} | "
            f"{row['train/updates']} updates")
        folder.log(row)


# ---------------------------------------------------------------- train

LEARNING = ("mygo", "offline", "fixed", "grpo", "star", "raft", "raft++")
RATIOS = ("grpo", "raft++")  # learn with a ratio to the weights that sampled


def train(cfg, stage, folder, policy, sampler, reference, place, evaluate_now):
    """The loop of the paper: sample until enough attempts pass the threshold, choose, maximise their
    likelihood; once an iteration. sampler: the policy itself, or for offline MyGO the warmed-up one, which
    stays as it is."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    team = Team(sampler, place, cfg, cfg.temperature)
    # kept in checkpoints
    state = {"tokens": 0, "K": cfg.offline_threshold if stage == "offline" else cfg.threshold}

    def share(step):
        of_budget = state["tokens"] / cfg.token_budget if cfg.token_budget else 0
        return max(step / cfg.steps, of_budget)

    steps = run.steps(
        cfg,
        folder,
        policy,
        optimizer,
        METRICS,
        state,
        evaluate_now,
        share,
        f"{stage} | ",
        {"selection": team_metrics.few_are_chosen},
    )
    for step, row in steps:
        order = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(place.questions, step, cfg.questions_per_step, order)
        with run.timed(row, "time/rollout"):
            sampler.engine.sync(sampler.model)
            made, state["K"] = sample(team, questions, stage, step, state["K"])
            sampler.engine.sleep()

        chosen = [select(group, stage, state["K"], cfg) for group in made]
        if stage in RATIOS:
            for group in filter(None, chosen):
                assign_advantages(group, stage)
        done = share(step - 1)

        def rate(part, done=done):
            if stage in RATIOS:
                return cfg.grpo_lr
            return training.cosine_lr(min(1, done + part / cfg.steps), 1, cfg.lr, cfg.lr_final)

        keep = folder.nonfinite(step)
        row |= update(policy.model, reference, optimizer, chosen, cfg, rate, stage, keep)

        row |= team_metrics.rollout_metrics(made, chosen, stage, state["K"], examples)
        row |= rollout.search_repairs(place.retriever)
        state["tokens"] += row["rollout/tokens"]
        row["rollout/tokens_total"] = state["tokens"]
        row["sample"] = teams.sample_record(policy, questions, made, chosen, stage, state["K"], step)
        if stage != "grpo":
            rows = [r for group in chosen for t in group for r in sharegpt_rows(t, place.env, step)]
            folder.append("sharegpt.jsonl", rows)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, place, cfg, progress, few_shot=False):
    """One trajectory a question. Returns (rows, summary)."""
    policy.engine.sync(policy.model)
    team = Team(policy, place, cfg, cfg.eval_temperature, few_shot)
    agents = [plan(team, q, "eval", stable_seed(cfg.seed, "eval", q.id)) for q in place.questions]
    done = team.run(agents, progress)
    rows = [teams.prediction(t, q) for t, q in zip(done, place.questions, strict=True)]
    faults = sum((Counter(t.info.faults) for t in done), Counter())
    about = {
        "set": place.name,
        "seed": cfg.seed,
        "temperature": cfg.eval_temperature,
        "faults": dict(sorted(faults.items())),
    }
    return rows, about | metrics.summarize(rows, ("em", "f1", "searches", "tokens", "rounds"))


# ---------------------------------------------------------------- main

def reproduce(cfg):
    """The stages of --stage in each of --envs, each in a run folder of its own. What can be refused without
    reading data is refused first."""
    stages = {"all": ("few-shot", "warm-up", "mygo")}.get(cfg.stage, (cfg.stage,))
    envs = cfg.envs.split(",")
    for env, stage in itertools.product(envs, () if cfg.ask else stages):
        stage_folder(cfg, env, stage)
    if cfg.checkpoint or cfg.model:
        models.find_model(cfg.checkpoint or cfg.model)
    split, evals = load_splits(cfg, PAPER_EVAL)
    for env in envs:
        place = split and Place(env, **vars(split))
        places = [Place(env, **vars(s)) for s in evals]
        if cfg.ask:
            source = start_weights(cfg, env, "eval")
            return ask(cfg, run.load_policy(cfg, source, trains=False), places[0])
        if env == envs[0]:
            run.tell(cfg)
        for stage in stages:
            run_stage(cfg, env, stage, place, places)
        distributed.once(show_table, cfg, env)


def run_stage(cfg, env, stage, place, evals):
    """Trains or only evaluates one stage in one environment; leaves a run folder. What --resume finds done is
    not done again."""
    folder = stage_folder(cfg, env, stage)
    last = (read_jsonl(folder.path / "metrics.jsonl") or [{}])[-1]
    spent = 0 < cfg.token_budget <= last.get("rollout/tokens_total", 0)
    trained = stage not in LEARNING or last.get("step", 0) >= cfg.steps or spent
    if folder.resume and trained and folder.evaluated(evals):
        return say(f"{env} {stage}: done before")
    source = start_weights(cfg, env, stage)
    if cfg.warmup_data and (stage == "eval" or stage in LEARNING):
        source = warmed_up(cfg, source, place or evals[0])
    beside = int(stage == "offline" or stage == "grpo" and cfg.kl_coef > 0)
    trains = stage in ("warm-up", *LEARNING)
    policy = run.load_policy(cfg, folder.start or source, trains, frozen=beside)
    sampler = frozen_sampler(cfg, source, policy) if stage == "offline" else policy
    few_shot = cfg.few_shot or stage == "few-shot"
    evals = [that_fit(e, policy, cfg, few_shot) for e in evals]
    place = that_fit(place, policy, cfg, few_shot or stage == "warm-up")

    def evaluate_all(when=""):
        return run.evaluate_all(cfg, folder, policy, evals, lambda *a: evaluate(*a, few_shot), when)

    with run.stage(cfg, folder, METRICS, f"Mujica {cfg.name}: {env} {stage}"):
        if stage == "warm-up" or stage in LEARNING and stage != "grpo":
            from common.warmup import sharegpt
            folder.write("dataset_info.json", sharegpt.dataset_info("mujica"))
        if stage == "warm-up" and not folder.start:
            warm_up(cfg, folder, policy, place)
        elif stage in LEARNING:
            reference = (
                models.load_reference(policy.model, source, lora=0)
                if stage == "grpo" and cfg.kl_coef
                else None
            )
            train(
                cfg,
                stage,
                folder,
                policy,
                sampler,
                reference,
                place,
                lambda when: run.mean_em(evaluate_all(when)),
            )
        results = evaluate_all()
        if stage == "few-shot":
            guards.look_at_start({name: r["summary"] for name, r in results.items()}, warn)


def stage_folder(cfg, env, stage):
    """A warm-up saves once, after its last epoch."""
    name = f"{cfg.name}-{env}-{stage}"
    free = (*run.FREE_ON_RESUME, "stage", "envs", "token_budget")
    trains = stage in ("warm-up", *LEARNING)
    every = math.inf if stage == "warm-up" else None
    return run.open_folder(cfg, "mygo_mujica", name, free, one_of_many=True, saves=trains, save_every=every)


def start_weights(cfg, env, stage):
    """What a stage starts from: the given checkpoint, the run's warm-up, or the model."""
    if stage in LEARNING and (not cfg.checkpoint or cfg.stage == "all") and not cfg.warmup_data:
        folder = Path(cfg.out) / "mygo_mujica" / f"{cfg.name}-{env}-warm-up" / "checkpoint"
        found = checkpoint.find(folder)
        if found is None:
            raise models.ModelError(f"{stage} starts from the warm-up, and {folder} does not exist: run "
                                    "--stage warm-up first, or give --checkpoint")
        return found
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
    return checkpoint.find(source) or source


def frozen_sampler(cfg, source, policy):
    """A policy with an engine and weights of its own."""
    model = models.load_model(source, frozen=True, precision=cfg.precision)
    model.vocabulary = policy.model.vocabulary
    return Policy(model, policy.tokenizer, run.make_engine(cfg, model, policy.tokenizer))


def that_fit(place, policy, cfg, few_shot):
    """The place without questions whose prompt is too long."""
    def length(q):
        _, request = opening(place, q, cfg)
        return len(first_prompt(policy.tokenizer, place.env, "planner", request, few_shot))
    return splits.within_limit([place], length, cfg.max_prompt, cfg.skip_bad)[0]


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, in_world = flags.given_flags(argv)
    of_world = HARD if given.get("--world", "").startswith("hard") else WORLD
    return resolve(flags.cli(replace(Config(), **(of_world if in_world else {})), Config(), __doc__, argv))


def resolve(cfg):
    """Refuses what cannot run; fills what depends on other fields, so that config.json says what ran."""
    cfg = check(cfg)
    envs = cfg.envs.split(",")
    search = flags.default_retriever(cfg) if "text" in envs else "bm25"
    stage = "eval" if cfg.eval_only else cfg.stage
    cfg = replace(
        cfg,
        stage=stage,
        eval_only=stage == "eval",
        retriever=cfg.retriever or search,
        name=cfg.name or flags.run_name(cfg),
    )
    if "kimi" in envs and cfg.retriever.startswith("http"):
        sys.exit("error: --envs kimi searches each question's own passages: --retriever bm25 or dense:MODEL")
    return cfg


def check(cfg):
    """Refuses what cannot run."""
    above_zero = "lr sft_lr grpo_lr temperature grad_clip"
    least = {"group_size": 2}  # (samples are compared)
    cfg = flags.check(cfg, "token_budget", above_zero, WORLD_SETS, least)
    flags.needs_a_model(cfg)
    envs = cfg.envs.split(",")
    if not set(envs) <= {"text", "kg", "kimi"} or len(set(envs)) < len(envs):
        flags.refuse("envs", cfg.envs, "text, kg or kimi, or several of them with commas")
    for name in ("threshold", "offline_threshold"):
        if not 0 <= getattr(cfg, name) < R_SUP:
            flags.refuse(name, getattr(cfg, name), "from 0 to below 1: the reward is F1 and has to be above")
    if cfg.keep > cfg.max_attempts:
        flags.refuse("keep", cfg.keep, f"at most --max-attempts {cfg.max_attempts}: so many are never found")
    if "kg" in envs and cfg.data != "world" and not cfg.graph:
        sys.exit("error: --envs kg needs --graph FILE (triples or GraphML), or --graph evidences with a data "
                 "set that has them (2Wiki)")
    if cfg.few_shot and not (cfg.stage == "eval" or cfg.eval_only or cfg.ask):
        sys.exit("error: --few-shot goes with --stage eval; training is on prompts without examples")
    if cfg.warmup_data and (envs != ["text"] or cfg.stage in ("all", "few-shot", "warm-up")):
        sys.exit("error: --warmup-data goes with --envs text and --stage mygo, offline, grpo, star, raft or "
                 "eval: it is instead of the warm-up on few-shot trajectories")
    if cfg.sampler_correction != "none" and cfg.stage not in RATIOS:
        sys.exit("error: --sampler-correction goes with --stage grpo and raft++; a likelihood (Eq 6) has no "
                 "ratio")
    from common.world import hard
    level = hard.parse(cfg.world)
    if level and (level.elastic or level.lists):
        flags.refuse("world", cfg.world, "elastic and lists are for agents that search on their own; here "
                     "the knob is partial")
    if cfg.ask and "kimi" in envs:
        sys.exit("error: --ask has no passages of its own: --envs text or kg")
    return cfg


def main(argv=None):
    """`python mygo_mujica.py …`"""
    with run.program():
        reproduce(parse_args(argv))


# ================================================================ appendix: not in the paper, but its prompts
#
# ---------------------------------------------------------------- metrics of a step

METRICS = STEP | ROLLOUT | UPDATE | RATIO | team_metrics.TEAMS

# ---------------------------------------------------------------- ShareGPT rows and a table

def sharegpt_rows(trajectory, env, step):
    """A planner's conversation and its workers'."""
    from common.warmup import sharegpt
    env = "kg" if env == "kg" else "text"
    rows = []
    for e in examples(trajectory):
        role = "planner" if e is trajectory else "worker"
        rows.append(sharegpt.row(e, SYSTEM[env, role], e.info.request, step))
    return rows


def show_table(cfg, env):
    """<name>-<env>-table.json: every stage's EM and F1 beside what it cost, differences to the warm-up."""
    base = Path(cfg.out) / "mygo_mujica"
    stages = ("few-shot", "warm-up", *LEARNING)
    folders = {stage: [base / f"{cfg.name}-{env}-{stage}"] for stage in stages}

    def paper(stage, sets):
        of_paper = len(sets) == 1 and sets[0].startswith("2wiki") and "heldout" not in sets[0]
        return PAPER.get(env, {}).get(stage, "") if of_paper else ""

    title = f"Mujica {cfg.name}, {env} (paper: EM / F1 of Qwen2.5-7B, 2Wiki)"
    report.method_table(base / f"{cfg.name}-{env}", title, folders, "warm-up", paper)
    report.draw_methods(base / f"{cfg.name}-{env}", title, folders)


def ask(cfg, policy, place):
    """--ask: one question, shown while it is worked on."""
    def watch(turn, reports):
        console.print(plain(turn.text))
        for w in reports:
            console.print(f"  [dim]{plain(w.info.asked)} → {plain(w.info.sentence)}[/dim]")

    question = data.Question("ask", cfg.ask, [""])
    if place.env == "kg":  # the entities that the question names
        from common.graphs.synthesis import as_words
        names = [n for n in place.graph.graph if re.search(as_words(n), cfg.ask)]
        question.entities = [[n, ""] for n in names]
        if not names:
            raise data.DataError("--ask: the question names no entity of the graph, spelled as it is there")
    team = Team(policy, place, cfg, cfg.eval_temperature, cfg.few_shot)

    def agent(search, seed):
        team.search = search
        return plan(team, question, "ask", seed, watch)
    done = run.ask(cfg, policy, place.retriever, agent)
    console.print(f"[bold]answer: {plain(done.info.answer)}[/bold]")


# ---------------------------------------------------------------- demonstrations

class Demonstrator:
    """Writes a demonstration of the world as this agent's conversations; what workers read is what they would
    read."""
    def __init__(self, tokenizer, question, place, cfg):
        self.tokenizer, self.place, self.cfg = tokenizer, place, cfg
        self.id = question.id
        self.entities = topic_entities(question, place.graph) if place.env == "kg" else []
        asked = harmless(question.question, cfg.max_words)
        self.request = planner_request(place.env, asked, self.entities)
        self.workers, self.turns = [], []

    def said(self, *text):
        turn = demonstrations.said(self.tokenizer, "eos", *text, f" {self.tokenizer.eos_token}")
        return replace(turn, text="".join(text))

    def finished(self, demo, thought):
        """[planner, worker, …] after the turn that answers."""
        tags = ("", "") if demo.flaw == "bad format" else ("<answer> ", " </answer>")
        answer = tags[0], chat.Foreign(demo.answer), tags[1]
        self.turns.append(self.said("<think> ", chat.Foreign(thought), " </think> ", *answer))
        return [self.conversation("planner", self.request, self.turns), *self.workers]

    def conversation(self, role, request, turns):
        prompt_ids = first_prompt(self.tokenizer, self.place.env, role, request, few_shot=False)
        return Trajectory(self.id, prompt_ids, turns)

    def layer(self, steps, thought):
        """A planner's turn that asks for these steps, their workers, and what they report."""
        asked = [self.step(step) for step in steps]
        calls = [part for call, _ in asked for part in (*call, " ")][:-1]
        if self.place.env == "kg":
            calls = ["<action> ", *calls, " </action>"]
        turn = self.said("<think> ", chat.Foreign(thought), " </think> ", *calls)
        turn.observation = "\n".join(line for _, line in asked)
        reply = chat.Foreign(turn.observation)
        turn.observation_ids = chat.render_reply(self.tokenizer, turn.ids, reply)
        self.turns.append(turn)

    def step(self, step):
        """(the parts of the planner's call, the observation) of a step; its worker's conversation is kept."""
        if isinstance(step, demonstrations.Hop):
            return self.hop(step)
        sub = f"{spoken(step)} of {step.subject}"
        in_graph = self.place.env == "kg"
        if in_graph and step.subject not in self.entities:
            return [f'Search([9], "{sub}")'], f"Obs: {NOTHING}"  # a label that does not exist
        if in_graph:
            call = f'Search([{self.entities.index(step.subject)}], "{sub}")'
            facts = self.place.graph.facts(step.subject)
            lines = [harmless(", ".join(fact), self.cfg.max_words) for fact in facts]
            fits = [fact[1] == step.relation for fact in facts]
        else:
            call = f"<search> {sub} </search>"
            passages = self.place.retriever.search([sub], self.cfg.top_k)[0]
            lines = [harmless(p.text, self.cfg.max_words) for p in passages]
            fits = [line.startswith(step.subject) for line in lines]
        select, sentence, thought = -1, NOTHING, "nothing"
        if any(fits) and step.found is not None:
            select = fits.index(True)
            stated = step.tail if in_graph and step.tail else step.found
            sentence, thought = f"{sub} is {stated}.", f"[{select}] says {sub}"
        observation = self.report(sub, lines, select, sentence, thought)
        tail = step.tail or step.found
        is_new = in_graph and select >= 0 and tail not in self.entities
        if is_new and self.place.graph.facts(tail):
            observation += f" Candidate: [{len(self.entities)}] {tail}"
            self.entities.append(tail)
        return [call], observation

    def report(self, sub, lines, select, sentence, thought):
        """Keeps a worker's conversation; returns what the planner reads of it."""
        answer = (
            "<think> ", chat.Foreign(thought), f" </think> <select> [{select}] </select> <sentence> ",
            chat.Foreign(sentence), " </sentence>")
        request = worker_request(self.place.env, sub, lines)
        self.workers.append(self.conversation("worker", request, [self.said(*answer)]))
        return f"Obs: {sentence}"

    def hop(self, hop):
        """The same of a real question: the sub-question is the search, so it is one that finds the page."""
        asked = hop.need if hop.need.split()[0].lower() in ASKING else f"What is {hop.need}"
        sub = harmless(f"{asked}?", self.cfg.max_words)
        passages = self.place.retriever.search([sub], self.cfg.top_k)[0]
        if not any(p.title == hop.title for p in passages):
            sub, passages = harmless(hop.queries[0], self.cfg.max_words), hop.passages
        select = next(i for i, p in enumerate(passages) if p.title == hop.title)
        lines = [harmless(p.text, self.cfg.max_words) for p in passages]
        thought = f"The question asks about {hop.need}. Passage ({select}) says it."
        sentence = harmless(hop.found, self.cfg.max_words)
        observation = self.report(sub, lines, select, sentence, thought)
        return ["<search> ", chat.Foreign(sub), " </search>"], observation


def spoken(step):
    from common.world import SPOKEN
    return SPOKEN.get(step.relation, step.relation)


def render_demonstration(tokenizer, question, demo, place, cfg):
    """A demonstration of the world as conversations: [planner, worker, …]."""
    writer, found = Demonstrator(tokenizer, question, place, cfg), ""
    for steps in demonstrations.layers(demo.steps):
        wanted = " ; ".join(f"now {spoken(s)} of {s.subject}" for s in steps)
        writer.layer(steps, found + wanted)
        found = "".join(f"found {spoken(s)} {s.found or 'nothing'} ; " for s in steps)
    return writer.finished(demo, f"{found}answer")


ASKING = "what who whom whose when where which why how in on at".split()


def render_real(tokenizer, question, demo, place, cfg):
    """A demonstration of a real question. Hops whose pages the question names are asked for at once, but for
    those that wait for what another finds."""
    writer = Demonstrator(tokenizer, question, place, cfg)
    named = demonstrations.named_in(question.question, demo.hops)
    at_once = [hop for hop in demo.hops if hop.title in named and not hop.waits]
    rest = [[hop] for hop in demo.hops if hop not in at_once]
    found = ""
    for hops in [at_once, *rest] if at_once else rest:
        wanted = " and ".join(hop.need for hop in hops)
        writer.layer(hops, f"{found}{demo.wanted(0, wanted)}")
        found = " ".join(hop.found for hop in hops) + " "
    *_, last = demo.thoughts()
    return writer.finished(demo, last)


def warmed_up(cfg, source, place):
    """Folder of `source` after --warmup-data."""
    def render(tokenizer, question, demo):
        return render_real(tokenizer, question, demo, place, cfg)

    def reward(made, question):
        """F1 of the answer as it is read, in as many turns and calls as there may be."""
        _, answer, _ = parse_plan(made[0].turns[-1].text, "text", cfg.max_parallel)
        asked = [len(parse_plan(t.text, "text", 99)[0]) for t in made[0].turns]
        if len(asked) > cfg.max_rounds or max(asked) > cfg.max_parallel:
            return None
        return metrics.f1(answer, question.answers) if answer else 0.0

    def reply(tokenizer, turn_ids, observation):
        return chat.render_reply(tokenizer, turn_ids, chat.Foreign(observation))

    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    examples = warmup.examples_of(
        cfg.warmup_data, tokenizer, place.retriever, render, reward, reply, ends="all", top_k=cfg.top_k,
        flaw_rate=cfg.flaw_rate, longest=cfg.micro_tokens, skip_bad=cfg.skip_bad)
    return warmup.warmed_up(cfg, "mygo_mujica", source, examples)


# ---------------------------------------------------------------- the tiny policy of the embedded world


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that both environments of the embedded world start from; made
    once, then cached."""
    from common.world import tiny
    written = "0 1 2 3 4 5 6 7 8 9 now found nothing answer says ; "
    written += "Search ( ) [ ] - Question Context Materials Candidate Obs : , "
    words = re.findall(r"\w+|[^\w\s]", written + NOTHING)
    names = ("think", "search", "select", "sentence", "action", "answer")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]

    def index(made):
        graph = kg.KnowledgeGraph.from_triples(made.triples)
        return Place("text", "warmup", [], tiny.bm25(made), graph)

    def render(tokenizer, question, demo, place):
        env = random.Random(f"{question['_id']}/{demo.answer}").choice(("text", "kg"))
        question = data.parse_question(question)
        return render_demonstration(tokenizer, question, demo, replace(place, env=env), cfg)

    recipe = tiny.Recipe(
        f"mygo_mujica, {cfg.max_words} words",
        cfg.warmup_steps, cfg.flaw_rate, cfg.world_size, cfg.top_k, cfg.world, cfg.engine)
    return tiny.tiny_policy(recipe, words, tags, render, index)


# ---------------------------------------------------------------- prompts (Tables 7 to 10)

SYSTEM = {
    ("text", "planner"): """**Your Task:** Answer the user's question thoroughly and accurately.
Before answering, outline your plan and reasoning process within '<think>' tags. This includes \
understanding the question, identifying needed \
information, and planning your search queries.
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
    ("kg", "planner"): """Your task is answering questions. You will be given a question and some \
candidate entities. You should first make a plan about how \
to solve this question.
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
University. She made her acting debut in 1984, and \
has since become active in television dramas, most notably as the arrogant and ambitious Lady Choi in the \
2003 period drama "Dae Jang Geum" (or "Jewel in \
the Palace"), which was a hit not only in Korea but throughout Asia.
[1] Shin Kyeong-nim was born on April 6, 1936 in North Chungcheong Province, South Korea. When he was \
young, Shin Kyong-rim frequented the people of \
Korea's rural villages and collected the traditional songs they sang. Much of his poetry represents a \
modernization of things he heard then Shin Kyeong-nim \
graduated in English Literature from Dongguk University, from which time he strove to become a creative \
writer. In 1955 and 1956, he made his formal \
literary debut with the publication of poems "Day Moon" (Natdal), "Reeds" (Galdae) and "Statue of Stone" \
(Seoksang). He taught elementary school in his \
hometown for a period of time, before moving to Seoul to work as an editor for Hyundae munhak and Donghwa \
Publishers. But his strong desire to create \
poetry continued.
[2] Paige Ackerson-Kiely received a BA in Asian Studies from the University of New Mexico in Albuquerque. \
Prior to this achievement, she attended Beloit \
College in Beloit, Wisconsin, Marmara University in Istanbul, and Birzeit University in Birzeit, Palestine.
[3] Han Seung-yeon was born on July 24, 1988, in Seoul, South Korea. She made her acting debut as a child \
actress in a bit part in "Dear Ends" (1993), \
"Summer Showers" (1995) and "Star in My Heart" (1997). She later left South Korea to study at Tenafly High \
School in New Jersey, United States. However, she \
withdrew from high school mid-course in order to pursue a singing career. After returning to South Korea, \
she debuted as a member of girl group Kara on \
March 29, 2007. During her time with the group, she passed a high school qualification exam, the College \
Scholastic Ability Test, and was accepted by Kyung \
Hee University, majoring in theater and film.
[4] Myo Min Zaw studied English at the University of Yangon, where he became active in the pro-democracy \
group All Burma Federation of Student Unions \
(ABFSU). In December 1996, he participated in a student protest, and following the closing of Burma's \
universities, remaining involved in the pro-democracy \
movement.""", """<think> The question asks about what college Kyeon Mi-ri attended.
Passage [0] clearly states that "Kyeon Mi-ri graduated from Seoul Traditional Arts High School in 1983, \
then studied Dance at Sejong University."
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
Ok. Right now I need compare their released \
date. 1932 is much earlier than 2003. Therefore, The Mask Of Fu Manchu came out first. </think>
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
Xawery Żuławski. [0] says Xawery Żuławski's mother \
Małgorzata Braunek, which excatly meets our need. </think>
<select> [0] </select>
<sentence> The mother of Xawery Żuławski is Małgorzata Braunek. </sentence>"""]}


# ---------------------------------------------------------------- paper, authors' code and ours

DIFFERENCES = """\
Misprints. The threshold is printed as K := max(K', (mean_r / r_sup + 1) r_sup), which is at least r_sup: r >
K selects nothing. It is read here as the midpoint, K := max(K', (mean_r + r_sup) / 2). Eq 4 is printed as A
min(r, clip(r)), which is not GRPO's min(r A, clip(r) A) where A < 0; ours is GRPO's. Proposition 3.1
(KL(pi^{>K} || pi*) < delta for large K) needs Z^{>K} >= Z exp(-delta), and Z^{>K} falls as K grows: the proof
holds for K small enough, and, where the temperature alpha goes to 0, for any K below r_sup. Its pi^{>K} is a
cut-off Boltzmann distribution; MyGO samples the policy, given that r > K, of which it says nothing.
Proposition 3.2's Var ~ 1/Z^2 does not follow from its own expansion, which tends to alpha^2.

Where the paper is silent (there is no public code):

    rounds              The planner has 6 turns, and in the last one nothing is asked any more.
    one turn            It is read outside closed thoughts. One that asks and answers asks, and its answer is
                        not read. It asks at most 8 sub-questions.
    a failed worker     Without a sentence or a selection, or with an index that does not exist, it reports
                        "No relevant information found." With nothing to read or an unknown label it is not
                        asked at all. [-1] is a selection.
    passages            They come without their titles, as in Table 8.
    topic entities      In the graph they are those that the data set names, else the heads of evidences that
                        no other one leads to.
    new entities        Tails of the selected triples that have facts themselves get the next labels.
    an entity's facts   Its triples as head, at most 20: those that share most words with the question. Table
                        10 also shows some as tail.
    schedule            One cosine and one AdamW run over all iterations, one epoch an iteration. K' starts at
                        .5.
    K at r_sup          A first pass without a fault would give K = r_sup and end all selection, so K stays
                        below.
    Eq 6                It is taken at the sampling temperature, over the tokens of the mini-batch, as in
                        LLaMA-Factory. Another constant would matter to gradient clipping alone.
    EM, F1              HotpotQA's rules (yes and no count whole) hold for every data set.
    STaR, RAFT, GRPO    The same agent makes group_size attempts a question. STaR learns from any with reward
                        1 (at most m), RAFT from those of the highest reward, if it is positive (at most m;
                        raft++ with a clipped ratio), GRPO from all, with advantages. STaR goes on from the
                        last iteration, like the others.
    fixed               MyGO whose K stays at --threshold: the threshold apart from allocation of attempts.
    asynchronous (D.2)  Not here: an iteration is sampled with the weights that the last one left.

In the embedded world "few-shot" is the tiny policy as it was made. It has no words for examples, so there the
warm-up does no more than choose.
"""


if __name__ == "__main__":
    main()
