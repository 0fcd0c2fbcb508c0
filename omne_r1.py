"""Omne-R1: learning to reason with memory for multi-hop question answering.

(Parts of it are in a co-author's public branch, called the code below.) A policy walks a schema-free
knowledge graph with two tools: entity_matcher finds names, node_info reads a node and its edges. Questions
are made from the graph itself. Stage 1, PPO, makes trajectories; stage 2 learns from them and from templates,
where thoughts count for less than calls; stage 3 is PPO again.

PPO, except: observations are skipped in GAE and losses, the KL to the start is a cost a token, and a linear
head on the policy's own hidden states is the critic.

    sec. 2          questions from paths            common/graphs/synthesis.py, graph_questions.py
    sec. 3.1        think, call a tool, answer      play, read_round
    sec. 3.3.1      PPO, GAE, value loss            gae, assign_credit, ppo_loss
    sec. 3.3.2      reward of stage 1               first_reward
    sec. 3.4        trajectories to learn from      sampled_rows, template_rows
    Algorithm 1     weighted loss                   weighted_sft_loss (kernels/weighted_ce.py)
    sec. 3.5        reward of stage 3               third_reward
    sec. 4.1.2      accuracy                        judge
    sec. 4.2.4      patterns of tool calls          pattern_of
    app. A, B       ShareGPT rows, system prompt    sharegpt_row, SYSTEM

    python omne_r1.py                          embedded world, all stages; 25 minutes
    python -m common.ladder omne_r1 table5 --seeds 3       Table 5 over seeds (2, 3, 4, 8 likewise)
    python omne_r1.py --stage sft --sft-data FILE --think-weight .1 --name tenth   one stage; --resume goes on
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/ --stage synthesize --teacher http://HOST/v1
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/              the paper's setting; not run
    python omne_r1.py --eval-only --checkpoint DIR --graph graphs/ --eval-data questions.jsonl
What is not in the paper, and its prompts, are at the end (appendix) or in common/.
"""

import json
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import (
    call_metrics,
    chat,
    checkpoint,
    data,
    distributed,
    flags,
    graph_stages,
    guards,
    metrics,
    rollout,
    run,
    splits,
    training,
)
from common import model as models
from common.critic import load_actor_critic
from common.files import Lines, Progress, console, plain, say, warn
from common.graphs import graph_questions
from common.graphs.graph_questions import has_hops
from common.graphs.kg_tools import Call
from common.graphs.tool_calls import Fault, parse_tool_call, write_tool_call
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.kg import one_line
from common.page import call_records
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed
from kernels.weighted_ce import think_weights, weighted_cross_entropy

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PolicyFlags):
    """The paper's settings; what a run needs besides (model, memory, names) is in common/flags.py."""

    # ---- stages

    # what to do; all = the base model, ppo, then sft and rl with and without thoughts
    stage: Literal["all", "synthesize", "ppo", "sft", "rl", "direct", "eval"] = "all"
    think: Literal["on", "off"] = "on"  # thoughts, or the template's empty block in their place | sec. 3.4.1
    save_every: int = 1             # steps (of stage 2: 25 updates) between checkpoints | ours

    # ---- graphs and tools

    # graphs by their types: NAME=FILE,NAME=FOLDER, one file, a folder of graphs, or http://HOST:PORT
    graph: str = ""
    graph_encoder: str = "BAAI/bge-large-en-v1.5"  # of entities' names; empty = tf-idf | sec. 3.2.1
    matches: int = 5                # entities that entity_matcher shows | app. A
    max_edges: int = 60             # edges that node_info shows; those that share words with the question
    max_words: int = 2000           # words of a tool's answer
    max_rounds: int = 7             # turns a question, that of the answer too | sec. 4.1.1
    max_turn: int = 3000            # tokens a turn | sec. 3.1
    max_train_turn: int = 1024      # in training, where it is less than --max-turn | authors' code
    max_prompt: int = 4096          # tokens of the first prompt
    max_context: int = 32768        # tokens of prompt, turns and answers of tools
    curve_questions: int = 512      # of an evaluation between steps (--eval-every), the same ones | Fig. 4
    temperature: float = 1.0        # of sampling in training; not printed
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code

    # ---- answers that need a judge

    # an OpenAI-compatible endpoint that says whether free answers are right (Tables 2 and 7)
    judge: str = ""
    judge_model: str = "deepseek-reasoner"      # its name there | sec. 4.2.1
    score: str = ""                 # judge the answers in this file (question, gold answer, answer a line)

    # ---- questions (sec. 2)

    # training questions: a file that --stage synthesize made, or of such rows; empty = this run's own
    data: str = ""
    # who finds paths and words questions: an OpenAI-compatible chat endpoint (key: OPENAI_API_KEY), or
    # "template", which needs no model
    teacher: str = "template"
    teacher_model: str = "deepseek-reasoner"    # its name there | sec. 2
    per_graph: int = 1000           # training questions of each kind (1/2-hop, 3+) a graph
    train_hops: Literal["mix", "12", "3"] = "mix"   # hops of training questions: all, 1/2, 3+ | Table 3
    test_share: float = .1          # of seed nodes, and of as many questions more, that are the test's
    attempts: int = 3               # of the teacher at a question
    largest_ball: int = 400         # nodes within three steps of a seed node, at most | sec. 2
    unique: bool = True             # leave out questions whose relations lead to another node too | app. C

    # ---- PPO (stages 1 and 3)
    steps: int = 350                # PPO steps; 1,000 were planned, step 350 evaluated | authors' code
    questions_per_step: int = 256   # questions a step | authors' code
    group_size: int = 1             # trajectories a question | authors' code
    mini_batch: int = 256           # trajectories an update | authors' code
    epochs: int = 1                 # passes over a step's trajectories | ours, verl's
    lr: float = 1e-6                # learning rate of the policy | authors' code
    head_lr: float = 1e-5           # of the value head | authors' code
    lr_warmup: float = .05          # share of the steps in which the learning rates rise | authors' code
    clip: float = .2                # half width of the clip window | ours, verl's
    gamma: float = 1.0              # discount a token | ours, verl's
    lam: float = 1.0                # lambda of GAE | ours, verl's
    kl_coef: float = 1e-3           # cost a token of the log-ratio to the first weights | authors' code
    value_coef: float = .5          # weight of the value loss | ours
    critic_warmup: int = 0          # steps in which the critic alone learns | ours
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient

    # ---- SFT (stage 2)

    # what to learn from: ShareGPT rows; empty = those of stage 1 with reward 1, and templates
    sft_data: str = ""
    sft_from: Literal["base", "stage1"] = "base"    # weights to begin with | sec. 3.4.1
    sft_sampled: int = 5000         # trajectories of stage 1, at most; not printed
    sft_templates: int = 5000       # template trajectories, at most; not printed
    think_weight: float = .001      # w, what a thought's tokens count | Table 5
    # what the weighted mean is taken over: a forward pass of one conversation, or all of an update
    # | Algorithm 1
    loss_total: Literal["forward", "update"] = "forward"
    # rank of its adapters; 0 = full weights; auto = 8, and 0 without thoughts (the variants of sec. 3.5)
    sft_lora: Literal["auto"] | int = "auto"
    sft_lr: float = 1e-4            # of adapters, after a tenth of warm-up | sec. 3.4.2
    sft_full_lr: float = 1e-5       # of full weights, after a hundredth | sec. 3.4.2
    sft_epochs: int = 3             # cosine over all of them | sec. 3.4.2
    sft_batch: int = 4              # conversations an update | sec. 3.4.2
    max_length: int = 6144          # tokens of a conversation; longer ones are left out | sec. 3.4.2


# What differs in the embedded world, where sentences tell apart what relations do not. Ours.
WORLD = dict(
    data="world",
    graph_encoder="",
    matches=3,
    max_edges=5,
    max_turn=120,
    max_context=1900,
    curve_questions=100,
    eval_temperature=1.0,
    per_graph=300,
    unique=False,
    eval_limit=400,
    steps=30,
    questions_per_step=96,
    mini_batch=48,
    lr=2e-4,
    head_lr=1e-3,
    lr_warmup=0.0,
    sft_sampled=500,
    sft_templates=500,
    sft_lr=2e-4,
    sft_full_lr=5e-4,
    sft_batch=8,
    micro_tokens=2048,
    warmup_steps=1200,
    flaw_rate=.4,
)
VARIANTS = {"think": dict(think="on"), "no-think": dict(think="off", sft_lora=0)}   # sec. 3.5

# ---------------------------------------------------------------- prompt and rounds (app. B is at the end)

STOP = ("</tool_call>", "</answer>")
NO_THOUGHT = "<think>\n\n</think>\n\n"
NO_TAG = r"(?!</?(?:think|tool_call|answer)>)"
INSIDE = rf"\s*{NO_TAG}\S(?:{NO_TAG}.)*"     # of tags: text that is not blank, without another tag
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
ACTION = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
ROUND = {
    "on": re.compile(rf"\s*<think>{INSIDE}</think>\s*<(tool_call|answer)>{INSIDE}</\1>\s*", re.DOTALL),
    "off": re.compile(rf"\s*<(tool_call|answer)>{INSIDE}</\1>\s*", re.DOTALL),
}


def opening(tokenizer, think):
    """Ids that stand before a turn without thoughts, and are not the policy's."""
    return chat.encode(tokenizer, NO_THOUGHT)[1] if think == "off" else []


def render_prompt(tokenizer, question, graph_type, think):
    """Token ids of the first prompt."""
    asked = chat.Foreign(f"{graph_type} : {question}" if chat.is_tiny(tokenizer) else question)
    system = SYSTEM.replace("{graph_type}", graph_type)
    return chat.render_chat(tokenizer, [("system", system), ("user", asked)]) + opening(tokenizer, think)


def render_observation(tokenizer, turn_ids, text, think):
    """Ids behind a turn: a tool's answer as a user's message (sec. 3.1), and where the next turn begins."""
    shown = chat.Foreign(text)
    reply = chat.render_reply(tokenizer, turn_ids, "<tool_response>\n", shown, "\n</tool_response>")
    return reply + opening(tokenizer, think)


def read_round(text):
    """("call", (tool, arguments) or Fault), ("answer", text, None where it is blank) or ("", None) of a turn;
    what stands in closed thoughts is not read.

    >>> read_round('<think> I answer </think> <answer> Rome </answer>')
    ('answer', 'Rome')
    """
    actions = ACTION.findall(THOUGHT.sub("", text))
    if not actions:
        return "", None
    kind, inside = actions[-1]
    if kind == "answer":
        return "answer", inside.strip() or None
    found = parse_tool_call(inside)
    if isinstance(found, Fault):
        return "call", found
    tool, arguments = found
    return "call", (tool, {name: value.strip() for name, value in arguments.items()})


# ---------------------------------------------------------------- agent (sec. 3.1)

async def play(policy, tools, question, path, cfg, seed, temperature, watch=None):
    """One trajectory: think, call a tool, read, …, answer. question.type is the graph it is asked of."""
    tokenizer = policy.tokenizer
    prompt_ids = render_prompt(tokenizer, question.question, question.type, cfg.think)
    turns = []
    while True:
        g = await policy.engine.generate(
            context_ids(prompt_ids, turns),
            stop=STOP,
            max_tokens=cfg.max_turn,
            temperature=temperature,
            seed=stable_seed(seed, path, len(turns)),
        )
        text = rollout.sampled_text(tokenizer, g.token_ids, g.stop_reason)
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)
        turns.append(turn)
        kind, action = read_round(text)
        lost = False
        if kind == "call" and len(turns) < cfg.max_rounds:
            shown = await answer_of(tools, action, question, cfg)
            lost = shown is None
            if not lost:
                turn.observation = shown
                turn.observation_ids = render_observation(tokenizer, turn.ids, shown, cfg.think)
        if watch:
            watch(turn)
        room = cfg.max_context - len(context_ids(prompt_ids, turns))
        if not turn.observation_ids or room < cfg.max_turn:
            return judge(Trajectory(question.id, prompt_ids, turns), question, cfg, lost)


async def answer_of(tools, action, question, cfg):
    """What a tool says to a call; a call that cannot be made is told why. None: its server failed."""
    error = refusal(action, question.type)
    if error:
        return error
    tool, arguments = action
    call = Call(tool, arguments["node_name"], question.type, question.question)
    return await tools(call, cfg.matches)


def refusal(action, graph_type):
    """Why a call cannot be made; empty where it can."""
    if isinstance(action, Fault):
        return f"Error: {action.detail}."
    if action[1]["graph_type"] != graph_type:
        return f"Error: graph_type must be '{graph_type}' for this question."
    return ""


@dataclass
class Judged(Outcome):
    """em is the paper's accuracy (sec. 4.1.2): the same string but for blanks around it, as the tools print
    it, since a policy can write no other. searches: all calls, also by the one too many that no tool
    answers."""
    normalised: float = 0.0     # exact match under SQuAD's normalisation
    format: float = 0.0         # share of the rounds in the right form
    repetitions: int = 0        # calls written before (sec. 3.5)
    pattern: str = ""           # the tools in one word (pattern_of)
    faults: dict = field(default_factory=dict)  # {what was wrong with calls: how many}
    lost: bool = False          # ended by a tool's server: nothing is learned from it (ours)


def judge(trajectory, question, cfg, lost=False):
    """Fills info."""
    *earlier, last = trajectory.turns
    right_form = [round_is_right(turn.text, cfg.think, last=False) for turn in earlier]
    right_form.append(round_is_right(last.text, cfg.think, last=True))
    calls, faults, made = [], Counter(), []
    for turn in trajectory.turns:
        kind, action = read_round(turn.text)
        if kind != "call":
            continue
        calls.append(action)
        if isinstance(action, Fault):
            faults[action.name] += 1
            continue
        tool, arguments = action
        made.append((tool, *arguments.values()))
        faults["wrong graph"] += arguments["graph_type"] != question.type
    answer = action if kind == "answer" else None
    said = one_line(answer or "")
    gold = one_line(question.answers[0])
    problem = "" if all(right_form) else "no answer" if answer is None else "form"
    trajectory.info = Judged(
        answer,
        problem="a tool's server failed" if lost else problem,
        em=float(said == gold) if said else 0.0,
        f1=metrics.f1(said, gold) if said else 0.0,
        searches=len(calls),
        normalised=metrics.exact_match(said, gold) if said else 0.0,
        format=sum(right_form) / len(right_form),
        repetitions=len(made) - len(set(made)),
        pattern=pattern_of(calls, answer),
        faults=dict(+faults),
        lost=lost,
    )
    return trajectory


def round_is_right(text, think, last):
    """Exactly one thought (or none, without thoughts), then exactly one readable call; the answer in the last
    round, and only there."""
    found = ROUND[think].fullmatch(text)
    if not found or (found[1] == "answer") != last:
        return False
    return last or not isinstance(read_round(text)[1], Fault)


def pattern_of(calls, answer):
    """The tools of a trajectory in one word: m = entity_matcher, n = node_info, x = not readable, a = answer.

    The standard one (sec. 4.2.4) is one m, then n alone, then a."""
    letter = {"entity_matcher": "m", "node_info": "n"}
    letters = ["x" if isinstance(call, Fault) else letter[call[0]] for call in calls]
    return "".join(letters) + ("a" if answer is not None else "-")


def rollouts(policy, tools, questions, cfg, *seed, ended=None):
    """group_size trajectories a question, all played at once; each depends on its own seed alone.
    ended(trajectory, question): told of each as soon as it is there."""
    search = rollout.BatchedSearch(tools)
    cfg = replace(cfg, max_turn=min(cfg.max_turn, cfg.max_train_turn))

    async def one(question, path, own):
        trajectory = await play(policy, search, question, path, cfg, own, cfg.temperature)
        if ended:
            ended(trajectory, question)
        return trajectory

    agents = []
    seeds = rollout.question_seeds(questions, cfg.seed, *seed)
    for q, own in zip(questions, seeds, strict=True):
        agents += [one(q, f"chain{k}", own) for k in range(cfg.group_size)]
    return rollout.run_agents(agents, policy.engine, search)


# ---------------------------------------------------------------- rewards (sec. 3.3.2, 3.5)

def first_reward(trajectory, cfg):
    """Stage 1: R_format (.1 + .9 R_result), R_format in [0, 1] the share of the rounds in the right form."""
    info = trajectory.info
    return info.format * (.1 + .9 * info.em)


def third_reward(trajectory, cfg):
    """Stage 3: (r_format + r_answer) / 2 - .1 n_repetition."""
    info = trajectory.info
    return (float(not info.problem) + info.em) / 2 - .1 * info.repetitions


REWARD = {"ppo": first_reward, "rl": third_reward}


# ---------------------------------------------------------------- credit: GAE (sec. 3.3.1)

def gae(rewards, values, response_mask, gamma, lam):
    """(advantages, returns), both (B, T): A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma
    V(s_{t+1}) - V(s_t), where t + 1 is the next *sampled* token, and V = 0 behind the last one.

    rewards, values (B, T): of sampled tokens; what stands elsewhere is not read."""
    advantages = torch.zeros_like(values)
    carry = values.new_zeros(len(values))       # (B,) A of the next sampled token
    next_value = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        sampled = response_mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * carry
        advantages[:, t] = torch.where(sampled, advantage, 0.0)
        carry = torch.where(sampled, advantage, carry)
        next_value = torch.where(sampled, values[:, t], next_value)
    returns = torch.where(response_mask, advantages + values, 0.0)
    return advantages, returns


def token_rewards(batch, kl_coef):
    """(B, T): the trajectory's reward on its last sampled token, less the log-ratio to the reference (k1) on
    each: the critic has to see it."""
    last = batch.response_mask.cumsum(1) == batch.response_mask.sum(1, keepdim=True)
    last = last & batch.response_mask                                   # (B, T)
    final = torch.tensor([[t.reward] for t in batch.trajectories], device=last.device)
    rewards = torch.where(last, final, 0.0)
    if batch.ref_logprobs is not None:
        log_ratio = batch.old_logprobs - batch.ref_logprobs
        rewards = rewards - kl_coef * torch.where(batch.response_mask, log_ratio, 0.0)
    return rewards


@dataclass
class Experience:
    """A batch as PPO learns from it: V and R are (B, T), like batch.advantages."""
    batch: rollout.Batch        # with old and reference log-probs
    values: torch.Tensor        # of the weights that sampled
    returns: torch.Tensor | None = None


def assign_credit(step, cfg):
    """Fills returns and advantages, which are whitened over the step's [Experience], those of other ranks
    included. Returns how much of the returns' variance the critic explains."""
    for e in step:
        rewards = token_rewards(e.batch, cfg.kl_coef)
        e.batch.advantages, e.returns = gae(
            rewards, e.values, e.batch.response_mask, cfg.gamma, cfg.lam)
    learned = [e for e in step if e.batch.weight]
    advantages = distributed.of_all_ranks(e.batch.advantages[e.batch.response_mask] for e in learned)
    returns = distributed.of_all_ranks(e.returns[e.batch.response_mask] for e in learned)
    mean = advantages.mean()
    variance = advantages.var(correction=0)
    for e in step:
        whitened = (e.batch.advantages - mean) / (variance + 1e-8).sqrt()
        e.batch.advantages = torch.where(e.batch.response_mask, whitened, 0.0)
    spread = returns.var(correction=0)
    return float(1 - variance / spread) if spread > 1e-12 else 0.0


# ---------------------------------------------------------------- update

def ppo_loss(logprobs, values, experience, num_tokens, cfg):
    """(policy loss, value loss, stats): both means over the mini-batch's `num_tokens` sampled tokens."""
    batch = experience.batch
    mask = batch.response_mask
    weights = torch.full((len(values), 1), 1 / num_tokens, device=values.device)
    advantages = training.corrected_advantages(batch, cfg.sampler_correction)
    policy_loss, stats = training.grpo_loss(
        logprobs, batch.old_logprobs, advantages, mask, weights, cfg.clip, cfg.clip)
    squares = torch.where(mask, (values - experience.returns) ** 2, 0.0).sum()
    stats["value_sum"] = float(squares.detach())
    return policy_loss, squares / num_tokens, stats


def prepare(actor, reference, trajectories, cfg):
    """[Experience] of trajectories, under the weights that sampled and those of the reference."""
    found = []
    for batch in training.collate_parts(actor.policy, trajectories, cfg.micro_tokens, cfg.share_prefixes):
        with torch.no_grad():
            batch.old_logprobs, values = actor(batch, cfg.temperature, cfg.kernels)
            if reference is not None:
                with models.reference_weights(actor.policy, reference) as frozen:
                    batch.ref_logprobs = models.token_logprobs(frozen, batch, cfg.temperature, cfg.kernels)
        found.append(Experience(batch, values))
    return found


def mean_log_ratio(batches):
    """log pi_old - log pi_ref of the sampled tokens."""
    learned = [b for b in batches if b.weight]
    ratios = distributed.of_all_ranks((b.old_logprobs - b.ref_logprobs)[b.response_mask] for b in learned)
    return float(ratios.mean())


def update(actor, reference, optimizer, trajectories, cfg, step, keep="nonfinite"):
    """--epochs passes over the step's trajectories, `mini_batch` an update. Returns the step's means."""
    started = time.time()
    order = data.batch_of_step(trajectories, 1, len(trajectories), stable_seed(cfg.seed, "parts", step))
    parts = [order[i:i + cfg.mini_batch] for i in range(0, len(order), cfg.mini_batch)]
    prepared = [prepare(actor, reference, part, cfg) for part in parts]
    everything = [e for experiences in prepared for e in experiences]
    row = {"train/explained_variance": assign_credit(everything, cfg)}
    if reference is not None:
        row["train/ref_kl"] = mean_log_ratio([e.batch for e in everything])
    row["time/old_logprobs"] = time.time() - started
    warming = step <= cfg.critic_warmup
    meter = training.Meter([e.batch for e in everything], keep, cfg.sampler_correction, cfg.epochs)
    for part, experiences in cfg.epochs * list(zip(parts, prepared, strict=True)):
        num_tokens = sum(t.sampled_tokens for t in part)
        for e in experiences:
            logprobs, values = actor(e.batch, cfg.temperature, cfg.kernels, detached=warming)
            policy_loss, value_loss, stats = ppo_loss(logprobs, values, e, num_tokens, cfg)
            loss = cfg.value_coef * value_loss
            if not warming:
                loss = loss + policy_loss
            (loss * e.batch.weight).backward()
            meter.add(loss, stats, e.batch.weight)
        norm = training.clip_gradient(actor, cfg.grad_clip)
        if meter.finite(norm, [e.batch for e in experiences]):
            optimizer.step()
        optimizer.zero_grad()
    if meter.total.get("tokens"):
        row["train/value_loss"] = meter.total["value_sum"] / meter.total["tokens"]
    return row | meter.means()


def set_rates(optimizer, cfg, step):
    """The learning rates of a step: both rise in the first --lr-warmup of the steps, then stay."""
    rise = min(1.0, step / max(1, round(cfg.lr_warmup * cfg.steps)))
    *of_policy, of_critic = optimizer.param_groups
    for group in of_policy:
        group["lr"] = rise * cfg.lr
    of_critic["lr"] = rise * cfg.head_lr


def train(cfg, stage, folder, policy, source, place, evaluate_now):
    """PPO with the reward of stage 1 or 3: sample, score, update; once a step."""
    actor = load_actor_critic(policy.model, folder.start)
    reference = models.load_reference(policy.model, source, cfg.lora) if cfg.kl_coef else None
    optimizer = training.make_optimizer(actor.policy, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    of_critic = {"params": actor.head.parameters(), "lr": cfg.head_lr, "weight_decay": 0.0}
    optimizer.add_param_group(of_critic)
    learner = replace(policy, model=actor)
    steps = run.steps(
        cfg, folder, learner, optimizer, METRICS, evaluate=evaluate_now, label=f"{stage} | ")
    for step, row in steps:
        set_rates(optimizer, cfg, step)
        order = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(place.questions, step, cfg.questions_per_step, order)
        with run.timed(row, "time/rollout"):
            policy.engine.sync(policy.model)
            done = rollouts(policy, place.tools, questions, cfg, stage, step)
            policy.engine.sleep()

        for t in done:
            t.reward = REWARD[stage](t, cfg)
        learned = [t for t in done if not t.info.lost]
        row |= call_metrics.rollout_metrics(learned or done) | rollout.search_repairs(place.tools)
        if len(learned) < len(done):
            row["rollout/lost"] = len(done) - len(learned)
        if learned:
            row |= update(actor, reference, optimizer, learned, cfg, step, folder.nonfinite(step))
        row["sample"] = call_records.sample_record(policy, done, questions, step, cfg.group_size, label)


# ---------------------------------------------------------------- stage 2: data (sec. 3.4, app. A)

def sampled_rows(cfg, policy, place, file):
    """(a) ShareGPT rows of stage 1's trajectories with reward 1, one a question. file keeps what was sampled,
    {"id", "row": None where it was not right}, a trajectory as soon as it ends; it is gone on with after a
    kill. Every rank samples its part and has all rows; rank 0 writes."""
    lines = Lines(file) if distributed.rank() == 0 else None
    known = distributed.gather(lines.rows if lines else [])
    row_of = {line["id"]: line["row"] for line in known}

    def keep(trajectory, question):
        if trajectory.info.lost or question.id in row_of:  # what is lost the next call plays again
            return
        row_of[question.id] = right_row(trajectory, question)
        if lines:
            lines.add({"id": question.id, "row": row_of[question.id]})

    policy.engine.sync(policy.model)
    order = stable_seed(cfg.seed, "sft")
    questions = random.Random(order).sample(place.questions, len(place.questions))
    one = replace(cfg, group_size=1)
    rows = []
    with Progress("trajectories of stage 1") as progress:
        for start in range(0, len(questions), 128):
            batch = [q for q in questions[start:start + 128] if q.id not in row_of]
            done = rollouts(policy, place.tools, batch, one, "sft", ended=keep)
            for t, q in zip(done, batch, strict=True):
                keep(t, q)  # those of other ranks
            rows = [row_of[q.id] for q in questions if row_of.get(q.id)]
            progress(min(len(rows), cfg.sft_sampled), cfg.sft_sampled)
            if len(rows) >= cfg.sft_sampled:
                break
    if lines:
        lines.close()
    policy.engine.sleep()
    return rows[:cfg.sft_sampled]


def right_row(trajectory, question):
    """The ShareGPT row of a trajectory that is right in answer and form; None of any other."""
    if trajectory.info.em != 1 or trajectory.info.problem:
        return None
    said = [turn.text for turn in trajectory.turns]
    shown = [turn.observation for turn in trajectory.turns[:-1]]
    return sharegpt_row(question, said, shown, "sampled")


def template_rows(cfg, place, writer, progress):
    """(b) Rows of known paths, whose calls are the standard pattern's and whose thoughts a writer fills in
    (common/path_thoughts.py)."""
    from common import conversations
    known = [q for q in place.questions if q.evidences]
    rng = random.Random(stable_seed(cfg.seed, "templates"))
    known = rng.sample(known, len(known))[:cfg.sft_templates]
    rows = []
    for q, calls, shown, written in conversations.walked_paths(cfg, known, place.tools, writer, progress):
        rows.append(sharegpt_row(q, spoken_turns(q, calls, written), shown, "template"))
    return rows


def sft_rows(cfg, place):
    """ShareGPT rows: a file's, or those that stage 1 and the templates give, made once."""
    from common import conversations
    if cfg.sft_data:
        return conversations.read_file(cfg.sft_data)
    folder = graph_stages.path_of(cfg, "sft-data")
    if not conversations.are_made(cfg, folder):
        place = replace(place, questions=[q for q in place.questions if has_hops(q, cfg.train_hops)])
        rows = []
        if cfg.sft_sampled:
            source = graph_stages.checkpoint_of(cfg, "stage1", "sft (--sft-sampled)")
            distributed.once(conversations.begin, cfg, folder)
            policy = run.load_policy(cfg, source, trains=False)
            rows = sampled_rows(replace(cfg, think="on"), policy, place, folder / "sampled.jsonl")
        distributed.once(write_sft_rows, cfg, folder, place, rows)
    return conversations.read_file(folder / "sharegpt.jsonl")


def write_sft_rows(cfg, folder, place, rows):
    """The rows, and those of templates, into a folder."""
    from common import conversations
    conversations.begin(cfg, folder)
    writer = conversations.writer_of(cfg, folder)
    with Progress("template trajectories") as progress:
        rows += template_rows(cfg, place, writer, progress)
    conversations.write(folder, rows)


def spoken_turns(question, calls, written):
    """What a gpt says, turn by turn."""
    actions = [*map(tool_call, calls), f"<answer> {question.answers[0]} </answer>"]
    return [f"<think> {thought} </think> {act}" for thought, act in zip(written, actions, strict=True)]


def tool_call(call):
    arguments = {"node_name": call.node_name, "graph_type": call.graph_type}
    return f"<tool_call> {write_tool_call(call.tool, arguments)} </tool_call>"


def sharegpt_row(question, said, shown, source):
    """A row as in appendix A: thought and call in one gpt message, tools' answers as observations."""
    conversation = [{"from": "human", "value": question.question}]
    for i, text in enumerate(said):
        conversation.append({"from": "gpt", "value": text})
        if i < len(shown):
            conversation.append({"from": "observation", "value": shown[i]})
    return {
        "id": question.id,
        "graph_type": question.type,
        "question": question.question,
        "golden_answer": question.answers[0],
        "conversations": conversation,
        "tools": json.dumps(TOOLS).replace("{graph_type}", question.type),
        "system": SYSTEM.replace("{graph_type}", question.type),
        "source": source,
    }


# ---------------------------------------------------------------- stage 2: Algorithm 1

@dataclass
class Taught(Outcome):
    source: str = ""            # where the conversation is from: "sampled", "template" or a file's word


def conversation_of(tokenizer, row, think):
    """The Trajectory that a ShareGPT row teaches. Without thoughts, they are cut out of it."""
    prompt_ids = render_prompt(tokenizer, row["question"], row["graph_type"], think)
    turns = []
    for message in row["conversations"][1:]:
        if message["from"] == "gpt":
            text = message["value"]
            if think == "off":
                text = THOUGHT.sub("", text).strip()
            ids = encode_turn(tokenizer, text)
            turns.append(Turn(ids, [0.0] * len(ids), "", text))
        else:
            turn = turns[-1]
            turn.observation = message["value"]
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, think)
    return Trajectory(row["id"], prompt_ids, turns, info=Taught(source=row.get("source", "")))


def encode_turn(tokenizer, text):
    """Ids of a turn that somebody wrote: its tags are tags, and nothing else in it is. Tags are encoded
    apart, so that Algorithm 1 finds them also where a tokenizer has several tokens for one."""
    ids = []
    for i, part in enumerate(re.split(r"(</?(?:think|tool_call|answer)>)", text)):
        tag = i % 2 == 1
        ids += chat.encode(tokenizer, part if tag else chat.Foreign(part))[1]
    return ids


def sft_weights(batch, tags, cfg):
    """Algorithm 1, lines 3 to 15, over what is learned: (B, T), 0 elsewhere."""
    labels = torch.where(batch.response_mask, batch.input_ids, -100)
    weights = think_weights(labels, *tags, cfg.think_weight)
    return torch.where(batch.response_mask, weights, 0.0)


def that_fit(trajectories, cfg):
    """Those to learn from; what is over --max-length is left out and counted."""
    fit = [t for t in trajectories if t.length <= cfg.max_length]
    if len(fit) < len(trajectories):
        say(f"sft: {len(trajectories) - len(fit)} of {len(trajectories)} conversations are over --max-length "
            f"{cfg.max_length} and left out")
    if not fit:
        raise data.DataError(f"no conversation fits into --max-length {cfg.max_length} tokens")
    sources = Counter(t.info.source for t in fit)
    say("sft: " + ", ".join(f"{n} {source or 'given'}" for source, n in sources.items()))
    return fit


def weighted_sft_loss(model, batch, weights, total, kernels="auto"):
    """Algorithm 1, lines 16 to 30: sum of w (-log p) / total. weights (B, T)."""
    hidden = models.hidden_states(model, batch).flatten(0, 1)[batch.predecessor]   # (R, H)
    by_row = weights.new_zeros(len(batch.target))                                  # (R,)
    by_row.index_add_(0, batch.gather[batch.response_mask], weights[batch.response_mask])
    head = distributed.whole(model.get_output_embeddings().weight)
    backend = models.BACKENDS[kernels]
    return weighted_cross_entropy(hidden, head, batch.target, by_row, total, backend=backend)


def sft_update(model, optimizer, examples, tags, cfg, meter):
    """One update on some conversations."""
    batches = training.collate_parts(model, examples, cfg.micro_tokens, cfg.share_prefixes)
    weights = [sft_weights(b, tags, cfg) for b in batches]
    own = sum(b.weight * float(w.sum()) for b, w in zip(batches, weights, strict=True))
    total = sum(distributed.gather([own]))
    if cfg.loss_total == "forward":  # each conversation is a mean of its own
        weights = [w / w.sum(1, keepdim=True).clamp(min=1e-8) for w in weights]
        total = len(examples)
    for b, w in zip(batches, weights, strict=True):
        loss = weighted_sft_loss(model, b, w, total, cfg.kernels)
        (loss * b.weight).backward()
        meter.add(loss, {"tokens": int(b.response_mask.sum())}, b.weight)
    meter.update["weight"] = own
    norm = training.clip_gradient(model, cfg.grad_clip)
    if meter.finite(norm, batches):  # else loss or gradient is not a number: no update
        optimizer.step()
    optimizer.zero_grad()


UPDATES_A_STEP = 25  # of stage 2, in one line of metrics


def train_sft(cfg, folder, policy, examples, evaluate_now):
    """sft_epochs over the conversations, a cosine over all of it."""
    tokenizer = policy.tokenizer
    tags = [chat.encode(tokenizer, tag)[1] for tag in ("<think>", "</think>")]
    peak, warmup = (cfg.sft_lr, .1) if cfg.sft_lora else (cfg.sft_full_lr, .01)
    optimizer = training.make_optimizer(policy.model, peak, cfg.weight_decay, kind=cfg.optimizer)
    total = -(-len(examples) * cfg.sft_epochs // cfg.sft_batch)
    planned = replace(cfg, steps=-(-total // UPDATES_A_STEP))
    steps = run.steps(planned, folder, policy, optimizer, SFT_METRICS, evaluate=evaluate_now, label="sft | ")
    for step, row in steps:
        meter = training.Meter(keep=folder.nonfinite(step))
        for number in range((step - 1) * UPDATES_A_STEP, min(step * UPDATES_A_STEP, total)):
            order = stable_seed(cfg.seed, "sft order")
            batch = data.batch_of_step(examples, number + 1, cfg.sft_batch, order)
            lr = training.cosine_lr(number, total, peak, warmup=round(warmup * total))
            training.set_lr(optimizer, lr)
            sft_update(policy.model, optimizer, batch, tags, cfg, meter)
        row |= meter.means()
        row["train/lr"] = lr
        if meter.total.get("tokens"):  # nothing, where no update was finite
            row["sft/weight"] = meter.total["weight"] / meter.total["tokens"]
            row["sft/tokens"] = meter.total["tokens"]


# ---------------------------------------------------------------- evaluate

def evaluate(policy, place, cfg, progress):
    """One trajectory a question. Returns (rows, summary)."""
    policy.engine.sync(policy.model)
    search = rollout.BatchedSearch(place.tools)
    agents = []
    for q in place.questions:
        seed = stable_seed(cfg.seed, "eval", q.id)
        agents.append(play(policy, search, q, "eval", cfg, seed, cfg.eval_temperature))
    done = rollout.run_agents(agents, policy.engine, search, progress)
    for t in done:
        t.reward = t.info.em
    rows = [call_records.prediction(t, q, label) for t, q in zip(done, place.questions, strict=True)]
    about = {"set": place.name, "seed": cfg.seed, "temperature": cfg.eval_temperature}
    return rows, about | call_metrics.summary(rows, done, place.name)


# ---------------------------------------------------------------- main

@dataclass
class Job:
    """A stage to run: its label (of folder and table), what it does, and its settings."""
    label: str
    kind: str
    cfg: Config

    def __post_init__(self):
        if self.cfg.sft_lora == "auto":
            self.cfg = replace(self.cfg, sft_lora=8 if self.cfg.think == "on" else 0)

    def folder(self):
        return graph_stages.open_stage(self.cfg, self.label, self.kind)


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    if cfg.score:
        from common.serve.judge import score_answers
        return score_answers(cfg.score, cfg.judge, cfg.judge_model)
    if not cfg.ask:
        for job in jobs_of(cfg):
            job.folder()
    if cfg.checkpoint or cfg.model:
        models.find_model(cfg.checkpoint or cfg.model)
    if cfg.ask:
        return ask(cfg, run.load_policy(cfg, base_weights(cfg), trains=False))
    questions = graph_stages.path_of(cfg, "questions")
    place, evals = distributed.first(graph_questions.load, cfg, questions)
    run.tell(cfg)
    own = []
    for job in jobs_of(cfg):
        run_job(job, place, evals)
        own.append(job.label)
    from common import ladder
    distributed.once(ladder.show_stages, "omne_r1", Path(cfg.out) / "omne_r1" / cfg.name, own)


def jobs_of(cfg):
    """What is asked for, in order."""
    if cfg.stage == "all":
        on = replace(cfg, think="on")
        jobs = [Job("base", "eval", on), Job("stage1", "ppo", on)]
        for kind in ("sft", "rl"):
            for variant, settings in VARIANTS.items():
                jobs.append(Job(f"{kind}-{variant}", kind, replace(cfg, **settings)))
        return jobs
    variant = "think" if cfg.think == "on" else "no-think"
    direct = "direct" if cfg.think == "on" else "direct-no-think"
    labels = {"ppo": "stage1", "sft": f"sft-{variant}", "rl": f"rl-{variant}", "direct": direct}
    if cfg.stage == "synthesize":
        return []
    return [Job(labels.get(cfg.stage, cfg.stage), cfg.stage, cfg)]


def run_job(job, place, evals):
    """Trains and evaluates, or only evaluates; leaves a run folder. What --resume finds done is not done
    again."""
    cfg, kind = job.cfg, job.kind
    folder = job.folder()
    trains = kind in graph_stages.TRAINING
    steps = cfg.steps if kind in ("ppo", "rl") else 0
    if folder.is_done(steps, evals):
        return say(f"{job.label}: done before")
    source = start_weights(job)
    examples = sft_rows(cfg, place) if kind == "sft" else None
    lora = cfg.sft_lora if kind == "sft" else cfg.lora
    beside = int(kind != "sft" and cfg.kl_coef > 0 and not lora)  # a reference
    policy = run.load_policy(replace(cfg, lora=lora), folder.start or source, trains, frozen=beside)
    score = evaluate
    if kind == "direct":  # from memory, without tools or instructions (Table 2)
        from common.direct import evaluate_directly
        empty = NO_THOUGHT if cfg.think == "off" else ""
        score = partial(evaluate_directly, folder=folder.path, opening=empty)

    def length(q):
        return len(render_prompt(policy.tokenizer, q.question, q.type, cfg.think))
    place, *evals = splits.within_limit([place, *evals], length, cfg.max_prompt, cfg.skip_bad)
    fixed = graph_questions.fewer(evals, cfg.curve_questions)

    def evaluate_now(when):
        return run.mean_em(run.evaluate_all(cfg, folder, policy, fixed, score, when))

    table = SFT_METRICS if kind == "sft" else METRICS
    with run.stage(cfg, folder, table, f"Omne-R1 {cfg.name}: {job.label}"):
        if trains:
            if cfg.eval_every and not folder.start:
                evaluate_now("_before")
        if kind == "sft":
            found = [conversation_of(policy.tokenizer, row, cfg.think) for row in examples]
            found = that_fit(found, cfg)
            call_records.keep_learned(folder, policy, found, label)
            train_sft(cfg, folder, policy, found, evaluate_now)
        elif trains:
            asked = [q for q in place.questions if has_hops(q, cfg.train_hops)]
            if not asked:
                raise data.DataError(f"--train-hops {cfg.train_hops}: no training question has so many")
            train(cfg, kind, folder, policy, source, replace(place, questions=asked), evaluate_now)
        results = run.evaluate_all(cfg, folder, policy, evals, score)
        if job.label == "base":
            guards.look_at_start({name: r["summary"] for name, r in results.items()}, warn)


def base_weights(cfg):
    """What stages 1 and 2 begin with: a folder or hub id."""
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
    if cfg.warmup_data:
        source = warmed_up(cfg, source)
    return distributed.first(graph_stages.folded, cfg, checkpoint.find(source) or source)


def start_weights(job):
    """The paper's: stage 2 begins with the base, not with stage 1; stage 3 with stage 2."""
    cfg = job.cfg
    before = {"rl": job.label.replace("rl", "sft")}
    if job.kind == "sft" and cfg.sft_from == "stage1":
        before["sft"] = "stage1"
    if job.kind not in before or (cfg.checkpoint and cfg.stage != "all"):
        return base_weights(cfg)
    left = graph_stages.checkpoint_of(cfg, before[job.kind], job.kind)
    return distributed.first(graph_stages.folded, cfg, left)


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, _ = flags.given_flags(argv)
    in_world = not given.keys() & {"--model", "--graph"} and given.get("--data", "world") == "world"
    default = replace(Config(), **WORLD) if in_world else Config()
    cfg = flags.cli(default, Config(), __doc__, argv)
    cfg = replace(cfg, eval_only=cfg.eval_only or cfg.stage in ("eval", "direct"))
    cfg = check(cfg)
    stage = "eval" if cfg.eval_only and cfg.stage != "direct" else cfg.stage
    return replace(cfg, stage=stage, name=cfg.name or run_name(cfg))


def run_name(cfg):
    """With the names of --graph."""
    graphs = [Path(graph.partition("=")[0]).stem for graph in cfg.graph.split(",")]
    return flags.run_name(cfg, *graphs)


def check(cfg):
    """Refuses what cannot run."""
    may_be_zero = "critic_warmup sft_sampled sft_templates sft_lora"
    cfg = flags.check(cfg, may_be_zero, above_zero="lr head_lr sft_lr sft_full_lr temperature grad_clip")
    for name in ("gamma", "lam", "lr_warmup"):
        if not 0 <= getattr(cfg, name) <= 1:
            flags.refuse(name, getattr(cfg, name), "from 0 to 1")
    if cfg.lora and cfg.stage == "sft":
        flags.refuse("lora", cfg.lora, "is for PPO: the adapters of stage 2 are --sft-lora")
    graph_questions.check(cfg)
    return cfg


def main(argv=None):
    """`python omne_r1.py …`"""
    with run.program():
        reproduce(parse_args(argv))


# ================================================================ appendix: not in the paper, but its prompts
#
# ---------------------------------------------------------------- system prompt and tools (app. B)

def schema(name, about, node_name):
    """A tool as the prompt shows it."""
    graph = "Type of knowledge graph to query, must be '{graph_type}' for this question"
    properties = {
        "node_name": {"type": "string", "description": node_name},
        "graph_type": {"type": "string", "description": graph, "enum": ["{graph_type}"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["node_name", "graph_type"]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS = [
    schema("entity_matcher",
           "A tool that Finds entities in the knowledge graph that match or are similar to your query",
           "The entity or concept you want to search for (e.g., 'crop diseases', 'legal precedent')"),
    schema("node_info",
           "A tool that retrieves detailed information about a specific entity and its relationships",
           "The exact entity name (use names returned by entity_matcher)"),
]
SYSTEM = """\
Answer the given question using knowledge graph tools. You should use an iterative process of reasoning and \
tool usage to solve the problem. For each step:

1. First, think about what you know and what information you need by writing your thoughts inside <think> \
and </think> tags.
2. You can only use one tool at a time
3. After receiving tool results, think again about what you've learned and what to do next
4. Repeat this process of thinking and searching until you have enough information to answer the question.
5. When you have enough information to answer the question, represent your final answer between <answer> and \
</answer> tag.

# Tools

You can call only one function at one time to assist with the user query. You are provided with function \
signatures within <tools> and </tools> XML tags:

<tools>
""" + "\n".join(map(json.dumps, TOOLS)) + """
</tools>

For each function call, return the call in Python function-call style within <tool_call></tool_call> tags, \
for example: <tool_call>node_info(node_name="Rastrigin Function", graph_type="cs")</tool_call>
"""

# ---------------------------------------------------------------- metrics of a step

UNGROUPED = {key: metric for key, metric in RATIO.items() if key != "rollout/flat_groups"}
METRICS = STEP | ROLLOUT | UPDATE | UNGROUPED | call_metrics.CALLS
SFT_METRICS = STEP | UPDATE | call_metrics.WEIGHTED

# ---------------------------------------------------------------- records for the page

def label(turn):
    """What a turn is called on the page."""
    kind, action = read_round(turn.text)
    if kind == "answer":
        return kind
    return action[0] if isinstance(action, tuple) else "no call"


def ask(cfg, policy):
    """--ask: one trajectory, shown while it is played; TYPE: QUESTION where there are several graphs."""
    tools = graph_questions.load_tools(cfg)
    question = graph_questions.asked(cfg.ask, tools.graphs)

    def agent(search, seed):
        return play(policy, search, question, "ask", cfg, seed, cfg.eval_temperature, run.show_turn)
    trajectory = run.ask(cfg, policy, tools, agent, question.question)
    console.print(f"[bold]answer: {plain(trajectory.info.answer)}[/bold]")


# ---------------------------------------------------------------- warm-up

def warmed_up(cfg, source):
    """Folder of `source` after --warmup-data: rows as stage 2 writes and reads them. (Questions whose paths
    are known become such rows there: --stage sft --sft-sampled 0.)"""
    from common import conversations
    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    examples = []
    for file in cfg.warmup_data.split(","):
        rows = conversations.read_file(file)
        examples += [[conversation_of(tokenizer, row, cfg.think)] for row in rows]
    return warmup.warmed_up(cfg, "omne_r1", source, examples)


# ---------------------------------------------------------------- the tiny policy of the embedded world

def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from; made once, then
    cached."""
    from common.world import graph_policy, tiny

    def index(made):
        return graph_policy.tools_of(made, cfg.max_edges, cfg.max_words)

    def render(tokenizer, question, demo, tools):
        def observe(turn, call):
            error = refusal(read_round(turn.text)[1], call.graph_type)
            text = error or tools.search([call], cfg.matches)[0]
            return text, render_observation(tokenizer, turn.ids, text, "on")

        turns = graph_policy.turns_of(tokenizer, question, demo, tool_call, observe)
        prompt_ids = render_prompt(tokenizer, question["question"], question["domain"], "on")
        return [Trajectory(question["_id"], prompt_ids, turns)]

    key = f"omne_r1/flawed calls/{cfg.matches}/{cfg.max_edges}/{cfg.max_words}"
    words = graph_policy.words(cfg.max_edges)
    recipe = tiny.Recipe(key, cfg.warmup_steps, cfg.flaw_rate, cfg.world_size, engine=cfg.engine)
    return tiny.tiny_policy(recipe, words, graph_policy.TAGS, render, index, pack_tokens=1024)


# ---------------------------------------------------------------- paper, authors' code and ours

DIFFERENCES = """\
Where paper and authors' code differ, or the paper is silent. A flag in brackets takes the other reading.

    weights of stages       Stage 1 trains Qwen2.5-14B-Instruct and only makes trajectories. Stage 2 begins
                            with Qwen3-14B as released. Stage 3 goes on from two models of stage 2, adapters
                            with thoughts at w = .001, and full weights without thoughts. Ours does all of it
                            from one base (--sft-from stage1 is not the paper's; --warmup-data makes two).
    accuracy                The paper compares strings but for blanks around them, the code by SQuAD's rules
                            ("normalised"), in reward and evaluation. Ours compares as the tools print names,
                            in one line and with a look-alike of "<". The gold answer is a node's name, which
                            has no aliases.
    prompt                  The evaluator's in the code ends "Your answer should only contain one entity name.
                            Don't include any other text."; the paper's and ours say nothing of it.
    rounds                  The paper has at most 7 of 3,000 tokens, that of the answer too, 32 at once (ours
                            384). The code has the same in evaluation, and in training 5 calls and a turn
                            more, of 1,024 tokens. Ours has 7 in both, of 1,024 tokens in training
                            (--max-train-turn).
    temperature             The paper prints none. The code's evaluation is greedy, and so is ours (in the
                            world it is 1).
    a call that fails       If it cannot be read, or is for another graph, it gets an error text and is
                            counted; the round goes on.
    calls                   The paper writes them in Python's style, which the code splits at commas; its
                            evaluator asks for JSON. Ours reads both and evaluates nothing. Blanks around a
                            name do not count.
    R_format of stage 1     The paper's is in [0, 1]. The code's is 0, .1, .4, .6 or 1, for tags that touch,
                            are empty, for two tools. Ours is the share of the rounds in the right form. All
                            pay for form alone, so a base that seldom calls learns not to call: the guard
                            "calls" says so.
    right form              Exactly one thought, then exactly one call that can be read, or the answer, which
                            the last round has to be; none of them blank. Without thoughts it is the same
                            without.
    reward of stage 3       As printed: a wrong answer in the right form is worth .5, and it may fall below 0.
                            A repeated call has the same tool and the same arguments, in whatever order and
                            quotes.
    GAE                     The printed exponent T - t + 1 must be T - t - 1. Ours skips observations: the
                            next value is that of the next sampled token. The code does not skip them, in GAE,
                            whitening and the critic's loss.
    PPO                     L^PPO is printed (3.3.1), its settings are not. The code (train_ppo_mix_0518.sh,
                            one of three versions) has 256 questions a step in one update, lr 1e-6 and 1e-5
                            (critic), both rising over .05 of the steps, 1,000 steps planned, step 350
                            evaluated, and whitened advantages. Ours has 350 steps, clip .2, gamma 1, lambda 1
                            and one epoch, as in verl; its value loss is not clipped. Stage 3's settings are
                            in neither; ours are the same.
    KL                      The code sets .001 but not use_kl_in_reward, so there was probably none. Ours is
                            .001 as a cost a token (--kl-coef 0).
    critic                  The paper's shares the actor's encoder, the code's is a model of its own. Ours is
                            a linear head on the policy's hidden states.
    loss of stage 2         The paper's mean is over a forward pass, one conversation. --loss-total update
                            takes it over all of an update.
    tags                    They belong to the thought: at w = 0 they are not learned either, as in Algorithm
                            1.
    adapters                The paper writes "+ RL (LoRA)". Where stage 2 or 3 begins with some, ours folds
                            them into their base, and PPO trains all weights (--lora makes new adapters).
    end of a turn           Ours ends at the closing tag; an end-of-message token is never learned.
    tools                   The paper has two; the code has a third, from an edge to a node.
    rows without thoughts   Their thoughts are removed, and the template's empty block stands in their place,
                            which is not learned.

Table 5 at w = 1 (87.9 / 52.8) should be one of Table 4's models with thoughts (83.8 / 47.2 with adapters,
89.2 / 57.1 without) and is neither; sec. 4.1 evaluates 1,106 and 1,453 questions, and its "70k" are 73,627 in
Table 1.
"""


if __name__ == "__main__":
    main()
