"""Omne-R1: learning to reason with memory for multi-hop question answering (arXiv 2508.17330).

A policy walks a knowledge graph with two tools: entity_matcher finds names, node_info reads a node and its
edges. The questions are made from the graph itself. Stage 1: PPO of the base model, whose result only samples
trajectories. Stage 2: SFT, again from the base model (in the paper from a newer one), on right trajectories
of stage 1 and on templates along the known paths of questions; a token of a thought weighs .001 in the loss.
Stage 3: PPO of all weights, which begin as stage 2's, with another reward.

PPO, except: GAE and both losses skip the tools' replies; the KL to the weights that the stage began with is a
cost in each token's reward; the critic is a linear head on the policy's own hidden states.

    sec. 2                 questions from paths           common/of_omne/synthesis.py
    sec. 3.1               think, call a tool, answer     play, read_round, common/of_omne/tool_calls.py
    sec. 3.3.1             PPO, GAE, actor and critic     train, ppo_loss, gae, ActorCritic
    sec. 3.3.2, 3.5        rewards of stages 1 and 3      stage1_reward, stage3_reward
    sec. 3.4               trajectories to learn from     sampled_rows, template_rows, thoughts
    Algorithm 1            weighted loss                  think_weights, weighted_loss, train_sft
    sec. 4.1.2, 4.2.4      accuracy, patterns of calls    answer_scores, pattern_of
    app. A, B              ShareGPT rows, prompt          sharegpt_row, SYSTEM

    python omne_r1.py                          a generated world's graphs, stages 1 to 3; ten minutes
    python -m common.ladder omne_r1 table5 --seeds 3       Table 5 over 3 seeds; also table2, 3, 4, 8
    python omne_r1.py --stage sft --sft-data FILE --think-weight .1 --name tenth   one stage; --resume goes on
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/ --stage synthesize --teacher http://HOST/v1
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/              the paper's setting; not run
    python omne_r1.py --eval-only --checkpoint DIR --graph graphs/ --eval-data questions.jsonl
Where paper, code and ours differ: docs/differences.md. Numbers reached: results/README.md.
"""

import json
import math
import random
import re
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch
from safetensors.torch import load_file, save_file

from common import chat, checkpoint, data, distributed, flags, metrics, rollout, training
from common import model as models
from common.agent import Agent, after_warm_up
from common.files import Lines, Progress, warn
from common.folder import left_by
from common.graphs.kg_tools import ENTITY_MATCHER, NODE_INFO, Call
from common.kg import one_line
from common.of_omne import graph_questions, plumbing, records
from common.of_omne.tool_calls import Fault, parse_tool_call, written
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed
from common.run import Run, program, timed
from kernels.weighted_ce import weighted_cross_entropy

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PolicyFlags):
    """The paper's settings. Behind | stands the source of a default; without | it is ours.
    common/flags.py has the flags of all scripts (model, names, lora, optimizer,
    micro_tokens, share_prefixes, sampler_correction), recipes/world.toml the embedded world's settings."""

    # ---- stages

    # ppo, sft, rl = stage 1, 2 or 3 alone; all = base evaluated, ppo, then sft and rl twice, with and without
    # thoughts; three = the same, but sft and rl once, as --think says; synthesize = only write the questions;
    # direct = answers without tools (Table 2); eval = evaluate, as --eval-only
    stage: Literal["all", "three", "synthesize", "ppo", "sft", "rl", "direct", "eval"] = "all"
    think: Literal["on", "off"] = "on"  # off = the chat template's empty <think> block instead | sec. 3.4.1

    # ---- graphs and tools

    # NAME=FILE,NAME=FOLDER (a question's type is its graph's NAME), a file, or a folder of graphs
    graph: str = ""
    graph_encoder: str = "BAAI/bge-large-en-v1.5"  # of entities' names; empty = tf-idf | sec. 3.2.1
    matches: int = 5                # entities that entity_matcher shows | app. A
    max_edges: int = 60             # edges node_info shows; first those that share words with the question
    max_rounds: int = 7             # turns per question, with the answer | sec. 4.1.1
    max_turn: int = 3000            # tokens of one turn | sec. 3.1
    max_train_turn: int = 1024      # the same in training, if smaller | authors' code
    max_prompt: int = 4096          # tokens of the first prompt
    max_context: int = 32768        # tokens of prompt, turns and tools' replies
    curve_questions: int = 512      # the same ones before and between steps (--eval-every) | Fig. 4
    temperature: float = 1.0        # of sampling in training; the paper prints none
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code

    # ---- questions (sec. 2)

    # training questions: a file as --stage synthesize writes it; empty = made from the graphs
    data: str = ""
    # finds paths and phrases questions: an OpenAI-compatible chat endpoint (key: OPENAI_API_KEY); "template"
    # needs no model
    teacher: str = "template"
    teacher_model: str = "deepseek-reasoner"    # the model's name there | sec. 2
    # training questions of each kind (1/2-hop, 3+) per graph; a tenth as many for the test
    per_graph: int = 1000
    train_hops: Literal["mix", "12", "3"] = "mix"   # hops of training questions: all, 1/2, 3+ | Table 3
    largest_ball: int = 400         # nodes around a seed node, at most | sec. 2
    unique: bool = True             # leave out questions whose relations lead to another node too | app. C

    # ---- PPO (stages 1 and 3)
    steps: int = 350                # the authors planned 1,000 and evaluated step 350 | authors' code
    questions_per_step: int = 256   # questions per step | authors' code
    group_size: int = 1             # trajectories per question | authors' code
    mini_batch: int = 256           # trajectories per update | authors' code
    epochs: int = 1                 # passes over a step's trajectories | ours, verl's
    lr: float = 1e-6                # of the policy | authors' code
    head_lr: float = 1e-5           # of the value head | authors' code
    lr_warmup: float = .05          # both rates rise over this share of steps, then stay | authors' code
    # half width of the clip window, which acts only where a step has several updates (the authors' steps
    # have one) | ours, verl's
    clip: float = .2
    gamma: float = 1.0              # discount per token | ours, verl's
    lam: float = 1.0                # lambda of GAE | ours, verl's
    # weight of the log-ratio to the stage's first weights, a cost in each token's reward; 0 = none | authors'
    # code, where it is switched off (use_kl_in_reward)
    kl_coef: float = 1e-3
    value_coef: float = .5          # weight of the value loss

    # ---- SFT (stage 2)

    # ShareGPT rows to learn from; empty = stage 1's right trajectories, and templates
    sft_data: str = ""
    sft_sampled: int = 5000         # of stage 1's right trajectories, at most
    sft_templates: int = 5000       # questions tried for template trajectories
    think_weight: float = .001      # w, weight of a thought's token in the loss | Table 5
    # rank of LoRA; 0 = full weights; auto = 8 with thoughts, 0 without | sec. 3.5
    sft_lora: Literal["auto"] | int = "auto"
    sft_lr: float = 1e-4            # of adapters; rises over the first tenth | sec. 3.4.2
    sft_full_lr: float = 1e-5       # of full weights; rises over the first hundredth | sec. 3.4.2
    sft_epochs: int = 3             # the rate falls as one cosine over all | sec. 3.4.2
    sft_batch: int = 4              # conversations per update | sec. 3.4.2


# ---------------------------------------------------------------- prompt and rounds (app. B is at the end)

STOP = ("</tool_call>", "</answer>")
NO_THOUGHT = "<think>\n\n</think>\n\n"
TAG = r"</?(?:think|tool_call|answer)>"
NO_TAG = f"(?!{TAG})"                       # no tag begins here; consumes nothing
INSIDE = rf"\s*{NO_TAG}\S(?:{NO_TAG}.)*"    # some text, not blank, without a tag
ACT = rf"\s*<(tool_call|answer)>{INSIDE}</\1>\s*"
# Of a turn's text ACTION is what the agent obeys, ROUND what the format reward accepts.
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
ACTION = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
ROUND = {
    "on": re.compile(rf"\s*<think>{INSIDE}</think>{ACT}", re.DOTALL),
    "off": re.compile(ACT, re.DOTALL),
}


def no_thought_ids(tokenizer, think):
    """Ids that begin each turn with --think off: the empty thought, which nobody sampled (mask 0)."""
    if think == "on":
        return []
    _, ids = chat.before_a_turn(tokenizer, NO_THOUGHT)  # encode, as tokenised before a tag
    return ids


def render_prompt(tokenizer, question, cfg):
    """Token ids of the first prompt. question.type is the name of the graph that it is asked of."""
    asked = question.question
    if chat.is_tiny(tokenizer):     # its chat template drops the system prompt, which names the graph
        asked = f"{question.type} : {asked}"
    system = SYSTEM.replace("{graph_type}", question.type)
    messages = [("system", system), ("user", chat.Foreign(asked))]  # Foreign: it can write no tag
    return chat.render_chat(tokenizer, messages) + no_thought_ids(tokenizer, cfg.think)


def render_observation(tokenizer, turn_ids, text, think):
    """Ids between a turn and the next one: the tool's reply as a user's message (sec. 3.1). They begin with
    the end-of-message mark, unless the turn sampled one itself."""
    shown = chat.Foreign(text)
    reply = chat.render_reply(tokenizer, turn_ids, "<tool_response>\n", shown, "\n</tool_response>")
    return reply + no_thought_ids(tokenizer, think)


def read_round(text):
    """What a turn does: ("call", (tool, arguments) or Fault), ("answer", text; None if blank) or ("", None).
    What a closed thought says does not count; of several calls and answers the last one does.

    >>> read_round('<think> I answer </think> <answer> Rome </answer>')
    ('answer', 'Rome')
    """
    actions = ACTION.findall(THOUGHT.sub("", text))
    if not actions:
        return "", None
    kind, inside = actions[-1]
    if kind == "answer":
        return "answer", inside.strip() or None
    try:
        tool, arguments = parse_tool_call(inside)  # a known tool, exactly its arguments, in fixed order
    except Fault as fault:
        return "call", fault
    return "call", (tool, {name: value.strip() for name, value in arguments.items()})


# ---------------------------------------------------------------- agent (sec. 3.1)

async def play(player, question, name):
    """One trajectory: think, call a tool, read, …, answer. Ends at an answer, no action, the last round, or
    too little room for a full turn. name is part of its seeds.

    player (common/agent.py): the question's prompt_ids, policy (engine, tokenizer), search (calls the tools),
    cfg, seed, temperature."""
    cfg, tokenizer = player.cfg, player.policy.tokenizer
    turns = []
    while True:
        g = await player.policy.engine.generate(
            context_ids(player.prompt_ids, turns),
            stop=STOP,
            max_tokens=cfg.max_turn,
            temperature=player.temperature,
            seed=stable_seed(player.seed, name, len(turns)),
        )
        text = rollout.sampled_text(tokenizer, g.token_ids, g.stop_reason)  # without an end-of-sequence token
        # learned: all sampled ids, the stop string's too; prompt and replies get response_mask 0 (collate)
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)
        turns.append(turn)
        kind, action = read_round(text)
        calls_a_tool = kind == "call" and len(turns) < cfg.max_rounds
        if calls_a_tool:
            turn.observation = await reply_to(player.search, action, question, cfg)
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, cfg.think)
        has_room = cfg.max_context - len(context_ids(player.prompt_ids, turns)) >= cfg.max_turn
        if not has_room:  # for another full turn: no turn would read the reply, so it is dropped
            turn.observation, turn.observation_ids = "", []
        if player.watch:  # --ask shows it
            player.watch(turn)
        if not (calls_a_tool and has_room):
            info = result_of(turns, question, cfg)  # em is also the reward, until train sets its own
            return Trajectory(question.id, player.prompt_ids, turns, reward=info.em, info=info)


# For common/agent.py: player() renders the prompt, evaluate() plays each question once, ask() is --ask.
# rows_of: what --collect writes of a trajectory: one row, as stage 2 learns from (sampled_row, below).
AGENT = Agent("omne_r1", play, prompt=render_prompt, rows_of=lambda t, q: [sampled_row(t, q)])


async def reply_to(search, action, question, cfg):
    """The tool's reply, or an error text that says why the call cannot be made."""
    if isinstance(action, Fault):
        return f"Error: {action.detail}."
    tool, arguments = action
    if arguments["graph_type"] != question.type:
        return f"Error: graph_type must be '{question.type}' for this question."
    call = Call(tool, arguments["node_name"], question.type, question.question)
    return await search(call, cfg.matches)


@dataclass
class Result(Outcome):
    """What a trajectory came to: answer, problem of the format, em, f1, searches (calls, also one in the last
    round, which gets no reply), and:"""
    normalised: float = 0.0     # exact match under SQuAD's normalisation
    format: float = 0.0         # share of the rounds in the right format
    repetitions: int = 0        # calls that repeat an earlier one (sec. 3.5)
    pattern: str = ""           # of tool calls (pattern_of)
    faults: dict = field(default_factory=dict)  # {what was wrong with calls: how many}


def turn_label(turn):
    """A turn's name in the run's page."""
    kind, action = read_round(turn.text)
    if kind == "answer":
        return kind
    return action[0] if isinstance(action, tuple) else "no call"


def result_of(turns, question, cfg):
    """The Result of a trajectory's turns."""
    right_format = [round_is_right(turn.text, cfg.think, last=turn is turns[-1]) for turn in turns]
    rounds = [read_round(turn.text) for turn in turns]
    calls_made = [action for kind, action in rounds if kind == "call"]
    readable = [action for action in calls_made if not isinstance(action, Fault)]
    faults = Counter(action.name for action in calls_made if isinstance(action, Fault))
    distinct = {(tool, *arguments.values()) for tool, arguments in readable}
    wrong_graph = sum(arguments["graph_type"] != question.type for _, arguments in readable)
    if wrong_graph:
        faults["wrong graph"] = wrong_graph
    kind, answer = rounds[-1]
    if kind != "answer":
        answer = None
    problem = ""
    if not all(right_format):  # the last round is wrong, too, unless it is an answer
        problem = "no answer" if answer is None else "form"
    return Result(
        answer,
        problem,
        **answer_scores(answer, question.answers[0]),
        searches=len(calls_made),
        format=sum(right_format) / len(right_format),
        repetitions=len(readable) - len(distinct),
        pattern=pattern_of(calls_made, answer),
        faults=dict(faults),
    )


def answer_scores(answer, gold):
    """em: answer and gold are equal as the tools print names (one_line: tags made harmless, blanks merged;
    sec. 4.1.2). normalised: the accuracy of the authors' code. A node has one name, so there is one
    gold answer. Without an answer {}: Result's defaults, 0."""
    said, gold = one_line(answer or ""), one_line(gold)
    if not said:
        return {}
    normalised = metrics.exact_match(said, gold)
    return {"em": float(said == gold), "f1": metrics.f1(said, gold), "normalised": normalised}


def round_is_right(text, think, last):
    """Exactly one thought (--think off: none), then one readable call, in the last round the answer."""
    match = ROUND[think].fullmatch(text)
    if not match or (match[1] == "answer") != last:
        return False
    return last or not isinstance(read_round(text)[1], Fault)


def pattern_of(calls_made, answer):
    """The calls of a trajectory as letters: m = entity_matcher, n = node_info, x = not readable; then a = an
    answer, - = none. The standard pattern (sec. 4.2.4) is m, then some n, then a."""
    letters = {ENTITY_MATCHER: "m", NODE_INFO: "n"}
    tools = ["x" if isinstance(action, Fault) else letters[action[0]] for action in calls_made]
    return "".join(tools) + ("-" if answer is None else "a")


def rollouts(policy, tools, questions, cfg, *when):
    """group_size trajectories per question, with training's limit on turns, all played at once: each rank
    plays its share, and gets all. Each has its own seed, of the run's, `when` (stage, step), the question,
    and its number in the group."""
    search = rollout.BatchedSearch(tools)  # calls that wait at once are one tools.search
    cfg = replace(cfg, max_turn=min(cfg.max_turn, cfg.max_train_turn))
    agents = []
    seeds = rollout.question_seeds(questions, cfg.seed, *when)
    for q, seed in zip(questions, seeds, strict=True):
        player = AGENT.player(policy, search, q, cfg, seed, cfg.temperature)
        agents += [play(player, q, f"chain{k}") for k in range(cfg.group_size)]
    return rollout.run_agents(agents, policy.engine, search)


# ---------------------------------------------------------------- rewards (sec. 3.3.2, 3.5)

def stage1_reward(trajectory):
    """Stage 1: R_format (.1 + .9 R_result): the share of the rounds in the right format, and em."""
    info = trajectory.info
    return info.format * (.1 + .9 * info.em)


def stage3_reward(trajectory):
    """Stage 3: (r_format + r_answer) / 2 - .1 n_repetition. r_format is 1 if every round is in the right
    format, r_answer = em. A wrong answer in right format is worth .5."""
    info = trajectory.info
    return (float(not info.problem) + info.em) / 2 - .1 * info.repetitions


REWARD = {"ppo": stage1_reward, "rl": stage3_reward}


# ---------------------------------------------------------------- actor and critic (sec. 3.3.1)

HEAD = "value_head.safetensors"     # beside the policy's weights in a checkpoint


class ActorCritic(torch.nn.Module):
    """The policy's model, and V as a linear head on its hidden states: "both networks share an encoder", so
    V's gradient goes into the policy's layers too. resumed: the checkpoint to read the head from."""

    def __init__(self, model, resumed=None):
        super().__init__()
        self.policy = model  # the model alone, no rollout.Policy; also the prefix of its weights on file
        self.head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device)
        torch.nn.init.zeros_(self.head.weight)  # V = 0 to begin with
        torch.nn.init.zeros_(self.head.bias)
        if resumed:
            self.head.load_state_dict(load_file(str(Path(resumed) / HEAD)))
        distributed.cut(self.head)  # on several GPUs it is sharded (FSDP), as the policy is

    def forward(self, batch, temperature):
        """log-probs of the sampled tokens, and V of the states before them: both (B, T), 0 elsewhere."""
        hidden = models.hidden_states(self.policy, batch)
        logprobs = models.token_logprobs(self.policy, batch, temperature, hidden=hidden)
        return logprobs, models.token_values(self.head, batch, hidden)

    def save_pretrained(self, folder, state_dict=None):
        """state_dict: the gathered weights, given where each rank holds a shard."""
        parts = {"policy": {}, "head": {}}
        for name, weight in (state_dict or self.state_dict()).items():
            part, _, name = name.partition(".")
            parts[part][name] = weight
        self.policy.save_pretrained(folder, state_dict=parts["policy"])
        save_file({name: weight.cpu() for name, weight in parts["head"].items()}, f"{folder}/{HEAD}")


# ---------------------------------------------------------------- credit: GAE (sec. 3.3.1)

def gae(rewards, values, response_mask, gamma, lam):
    """(advantages, returns), both (B, T): A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma
    V(s_{t+1}) - V(s_t), where t + 1 is the next *sampled* token, and V = 0 behind the last one. (The
    authors' code does not skip observations.)

    rewards, values (B, T): of sampled tokens, without gradient; other positions are ignored."""
    response_mask = response_mask.bool()
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
    each. The KL penalty is part of the reward, so that V learns to predict it."""
    mask = batch.response_mask                                          # (B, T)
    last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))         # the last sampled token
    final = torch.tensor([[t.reward] for t in batch.trajectories], device=last.device)  # (B, 1)
    rewards = torch.where(last, final, 0.0)
    if batch.ref_logprobs is not None:  # with --kl-coef 0 there are none
        log_ratio = batch.old_logprobs - batch.ref_logprobs
        rewards = rewards - kl_coef * torch.where(mask, log_ratio, 0.0)
    return rewards


def micro_batches(actor, reference, trajectories, cfg):
    """[Batch] of this rank's share, a trajectory per row, with old_logprobs and values of the weights that
    sampled, and ref_logprobs. A rank with less gets fillers (weight 0), so that all make equally many passes.
    """
    model = actor.policy
    batches = training.collate_parts(model, trajectories, cfg.micro_tokens, cfg.share_prefixes)
    for b in batches:
        with torch.no_grad():
            b.old_logprobs, b.values = actor(b, cfg.temperature)
            if reference is not None:   # a frozen model, or with --lora the policy without its adapters
                with models.reference_weights(model, reference) as frozen:
                    b.ref_logprobs = models.token_logprobs(frozen, b, cfg.temperature)
    return batches


def assign_credit(batches, cfg):
    """Fills in returns, and advantages that are whitened over all tokens of the step, other ranks' too. With
    gamma = lam = 1: A_t = (reward - KL cost from t on) - V(s_t), then whitened; returns are not.

    If all rewards are equal, what is left of the advantages is the critic's error and the KL. Whitening
    scales that to 1, so the policy still moves."""
    for b in batches:
        rewards = token_rewards(b, cfg.kl_coef)
        b.advantages, b.returns = gae(rewards, b.values, b.response_mask, cfg.gamma, cfg.lam)
    advantages = training.sampled(batches, lambda b: b.advantages)
    mean = advantages.mean()
    std = (advantages.var(correction=0) + 1e-8).sqrt()
    for b in batches:
        b.advantages = torch.where(b.response_mask, (b.advantages - mean) / std, 0.0)


# ---------------------------------------------------------------- update

def ppo_loss(logprobs, old_logprobs, advantages, values, returns, response_mask, clip, num_tokens):
    """(policy loss, value loss, stats) of tensors (B, T). L^PPO: - mean min(r A, clip(r, 1 - clip, 1 + clip)
    A), r = pi / pi_old. L^value: mean (V - R)^2. num_tokens: sampled tokens of the whole mini-batch, on all
    ranks. A mean is the sum over this micro-batch, divided by num_tokens: micro-batches add up to it."""
    response_mask = response_mask.bool()
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    policy_loss = -torch.where(response_mask, objective, 0.0).sum() / num_tokens
    squares = torch.where(response_mask, (values - returns) ** 2, 0.0).sum()
    too_high = (ratio > 1 + clip) & (advantages > 0)    # where clip decides, the gradient is 0
    too_low = (ratio < 1 - clip) & (advantages < 0)
    stats = training.loss_stats(log_ratio, too_high | too_low, response_mask, ratio)
    stats["value_sum"] = float(squares.detach())
    return policy_loss, squares / num_tokens, stats


METRICS = records.PPO  # {what a step's row may hold: its caption}


def train(run, kind, policy, source, split):
    """PPO with the reward of stage 1 (kind ppo) or 3 (rl), and a critic that begins at 0 in both. source: the
    weights that the stage began with, for the KL. split: training questions, and the tools as its retriever.
    """
    cfg, model, tools = run.cfg, policy.model, split.retriever
    actor = ActorCritic(model, run.folder.start)  # folder.start: the checkpoint that --resume found, or None
    reference = models.load_reference(model, source, cfg.lora) if cfg.kl_coef else None
    # AdamW, weight decay .01 on matrices, 0 for the value head; gradients are clipped at norm 1 | verl's
    optimizer = training.make_optimizer(model, cfg.lr, kind=cfg.optimizer)
    optimizer.add_param_group({"params": actor.head.parameters(), "lr": cfg.head_lr, "weight_decay": 0.0})
    saved = replace(policy, model=actor)  # a checkpoint has the policy and the value head
    # after each body run.steps evaluates, logs its row and saves
    for step, row in run.steps(saved, optimizer, cfg.steps, label=f"{kind} | "):
        training.set_warmup_lr(optimizer, step / cfg.steps, cfg.lr_warmup)  # both rates rise, then stay

        # 1. sample, with the current weights
        seed = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(split.questions, step, cfg.questions_per_step, seed)
        with run.sampling(policy, row):
            trajectories = rollouts(policy, tools, questions, cfg, kind, step)

        # 2. score whole trajectories; token_rewards puts this on their last sampled tokens
        for t in trajectories:
            t.reward = REWARD[kind](t)

        # 3. log-probs and values of the weights that sampled, for each mini-batch of the shuffled
        # trajectories, all before the first update: advantages are whitened over the tokens of the whole step
        seed = stable_seed(cfg.seed, "parts", step)
        shuffled = data.batch_of_step(trajectories, 1, len(trajectories), seed)  # a shuffle
        mini_batches = []  # (micro-batches of this rank, sampled tokens on all ranks)
        with timed(row, "time/old_logprobs"):
            for i in range(0, len(shuffled), cfg.mini_batch):
                part = shuffled[i:i + cfg.mini_batch]
                num_tokens = sum(t.sampled_tokens for t in part)
                mini_batches.append((micro_batches(actor, reference, part, cfg), num_tokens))

        # 4. credit, per sampled token: tools' replies have mask 0 in GAE, whitening and both losses
        all_batches = [b for micros, _ in mini_batches for b in micros]
        assign_credit(all_batches, cfg)
        row |= records.step_row(trajectories, all_batches, questions, tools=tools, step=step, cfg=cfg,
                                label=turn_label)

        # 5. an update for each mini-batch, in each epoch; credit and old log-probs stay
        meter = training.Meter(all_batches, cfg.sampler_correction, cfg.epochs)  # sums stats, vetoes NaN
        for micros, num_tokens in mini_batches * cfg.epochs:
            for b in micros:  # for memory alone: gradients add up; backward sums those of ranks (FSDP2)
                logprobs, values = actor(b, cfg.temperature)               # (B, T)
                # --sampler-correction token: times min(pi_trainer / pi_engine, 2)
                advantages = training.corrected_advantages(b, cfg.sampler_correction)
                policy_loss, value_loss, stats = ppo_loss(
                    logprobs, b.old_logprobs, advantages, values, b.returns, b.response_mask,
                    cfg.clip, num_tokens)
                loss = policy_loss + cfg.value_coef * value_loss
                (loss * b.weight).backward()  # weight 1; of a filler 0
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(actor)
            if meter.end_update(norm):  # loss and gradient are finite, on all ranks
                optimizer.step()
            optimizer.zero_grad()
        row |= records.update_metrics(meter)


# ---------------------------------------------------------------- stage 2: rows to learn from (sec. 3.4)

def sampled_rows(cfg, policy, split, file):
    """ShareGPT rows of stage 1's trajectories with reward 1, one per question, played at training's
    temperature and turn limit. file: a line per question played, so that a resumed run plays none again."""
    rng = random.Random(stable_seed(cfg.seed, "sft"))
    questions = rng.sample(split.questions, len(split.questions))
    one_each = replace(cfg, group_size=1)
    lines = Lines(file)
    row_of = {line["id"]: line["row"] for line in lines.rows}   # None: its reward was not 1
    rows = []
    policy.engine.sync(policy.model)
    with Progress("trajectories of stage 1") as progress:
        for start in range(0, len(questions), 128):
            batch = [q for q in questions[start:start + 128] if q.id not in row_of]
            trajectories = rollouts(policy, split.retriever, batch, one_each, "sft")
            for t, q in zip(trajectories, batch, strict=True):
                right = t.info.em == 1 and not t.info.problem  # stage1_reward is 1
                row_of[q.id] = sampled_row(t, q) if right else None
                if distributed.rank() == 0:  # every rank has all trajectories
                    lines.add({"id": q.id, "row": row_of[q.id]})
            rows = [row_of[q.id] for q in questions if row_of.get(q.id)]
            progress(min(len(rows), cfg.sft_sampled), cfg.sft_sampled)
            if len(rows) >= cfg.sft_sampled:
                break
    policy.engine.sleep()
    return rows[:cfg.sft_sampled]


def sampled_row(trajectory, question):
    said = [turn.text for turn in trajectory.turns]
    replies = [turn.observation for turn in trajectory.turns[:-1]]
    return sharegpt_row(question, said, replies, "sampled")


def template_rows(cfg, split):
    """ShareGPT rows of questions with a path (evidences, its triples): the calls of the standard pattern,
    the tools' replies, and thoughts in ready wordings. Skips, and counts, a question if a tool does not show
    the next node of its path."""
    known = [q for q in split.questions if q.evidences]
    rng = random.Random(stable_seed(cfg.seed, "templates"))
    known = rng.sample(known, len(known))[:cfg.sft_templates]
    rows = []
    with Progress("template trajectories") as progress:
        for number, question in enumerate(known, 1):
            planned = template_calls(question)
            replies = split.retriever.search(planned, cfg.matches)
            if path_is_shown(question, planned, replies):
                acts = [written(call) for call in planned] + [f"<answer> {question.answers[0]} </answer>"]
                both = zip(thoughts(question, cfg.seed), acts, strict=True)
                said = [f"<think> {thought} </think> {act}" for thought, act in both]
                rows.append(sharegpt_row(question, said, replies, "template"))
            progress(number, len(known))
    if len(rows) < len(known):
        left_out = len(known) - len(rows)
        warn(f"{left_out} of {len(known)} templates left out: a tool did not show the next step")
    return rows


def template_calls(question):
    """The calls of the standard pattern along a question's path: entity_matcher once, then node_info from
    node to node."""
    nodes = [head for head, _, _ in question.evidences]
    asked = question.type, question.question
    return [Call(ENTITY_MATCHER, nodes[0], *asked)] + [Call(NODE_INFO, node, *asked) for node in nodes]


def thoughts(question, seed=0):
    """A thought before each call along a question's path and one before the answer, in the ready wordings at
    the end of this file."""
    rng = random.Random(stable_seed(seed, "thoughts", question.id))
    said = [rng.choice(STARTS).format(subject=question.evidences[0][0])]
    found = ""
    for head, relation, tail in question.evidences:
        plan = rng.choice(PLANS).format(relation=relation, subject=head)
        said.append(with_fillers(rng, found, plan))
        found = rng.choice(FOUND).format(relation=relation, found=tail)
    said[0] = with_fillers(rng, said[0])  # (drawn after the others: results/ was made so)
    return [*said, with_fillers(rng, found, rng.choice(ENDS))]


def with_fillers(rng, *parts):
    """One part stands between two fillers; two have one before them, and half the time one behind, too."""
    said = [part for part in parts if part]
    two = len(said) < 2 or rng.random() < .5
    first, *second = rng.sample(FILLERS, 1 + two)
    return " ".join([first, *said, *second])


def path_is_shown(question, planned, replies):
    """Whether each reply shows the name in the next call, and the last one the answer. If a name was cut off
    (--max-edges), the row would teach the model to guess it."""
    named = [call.node_name for call in planned[1:]] + question.answers[:1]
    return all(one_line(name) in text for name, text in zip(named, replies, strict=True))


def sharegpt_row(question, said, replies, source):
    """A row as in appendix A: thought and call in one gpt message, tools' replies as observations."""
    conversation = [{"from": "human", "value": question.question}]
    for i, text in enumerate(said):
        conversation.append({"from": "gpt", "value": text})
        if i < len(replies):
            conversation.append({"from": "observation", "value": replies[i]})
    return {
        "id": question.id,
        "graph_type": question.type,
        "question": question.question,
        "golden_answer": question.answers[0],
        "conversations": conversation,
        "tools": json.dumps(TOOL_SCHEMAS).replace("{graph_type}", question.type),
        "system": SYSTEM.replace("{graph_type}", question.type),
        "source": source,
    }


def sft_rows(cfg, split):
    """ShareGPT rows: those of --sft-data, or sampled and template ones, made once in <name>-sft-data/."""
    if cfg.sft_data:
        return plumbing.read_conversations(cfg.sft_data, split.evaluated)  # without questions of the test
    # first: rank 0 runs it, then the others do; once: rank 0 alone runs it, the others wait
    # stage1: the checkpoint to sample from; None if nothing is sampled
    folder, stage1 = distributed.first(plumbing.begin_conversations, cfg)
    file = folder / "sharegpt.jsonl"
    if not file.exists():
        rows = []
        if cfg.sft_sampled:
            policy = Run(cfg).policy(stage1, trains=False)  # (a Run without a folder)
            rows = sampled_rows(replace(cfg, think="on"), policy, split, folder / "sampled.jsonl")
        distributed.once(lambda: plumbing.write_conversations(folder, rows + template_rows(cfg, split)))
    return plumbing.read_conversations(file, split.evaluated)


# ---------------------------------------------------------------- stage 2: Algorithm 1

def conversation_of(tokenizer, row, cfg, apart=True):
    """The Trajectory that a ShareGPT row teaches. With --think off the thoughts are cut out of the same row.
    A turn ends at its last tag: the end-of-message mark is part of the reply, not learned. The row's own
    system message is not read. apart: tags are encoded alone (encode_turn), but for --warmup-data."""
    question = data.Question(row["id"], row["question"], [], type=row["graph_type"])
    prompt_ids = render_prompt(tokenizer, question, cfg)
    turns = []
    for message in row["conversations"][1:]:
        if message["from"] == "gpt":
            text = message["value"]
            if cfg.think == "off":
                text = THOUGHT.sub("", text).strip()
            if not text:
                raise data.DataError(f"conversation {row['id']}: a message has only thoughts, so --think off "
                                     "leaves nothing of it")
            ids = encode_turn(tokenizer, text, apart)
            turns.append(Turn(ids, [0.0] * len(ids), "", text))  # no sampler, no log-probs
        else:
            turn = turns[-1]
            turn.observation = message["value"]
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, cfg.think)
    return Trajectory(row["id"], prompt_ids, turns, info=records.Taught(source=row.get("source", "")))


def encode_turn(tokenizer, text, apart=True):
    """Ids of a turn that the policy did not sample; nothing in it but its tags can become a special token.
    apart: each tag is encoded alone, so that Algorithm 1 finds its ids even if it would merge with its
    neighbours; else as one text, as a policy samples it."""
    parts = re.split(f"({TAG})", text)  # text, tag, text, …
    parts[::2] = map(chat.Foreign, parts[::2])
    if not apart:
        return chat.encode(tokenizer, *parts)[1]
    return [i for part in parts for i in chat.encode(tokenizer, part)[1]]


def think_weights(labels, start_ids, end_ids, weight):
    """Algorithm 1, lines 3 to 15: (B, T) fp32, `weight` from each start tag to the first end tag behind it,
    tags included, 1 elsewhere.

    labels (B, T): token ids, negative = masked; a start tag in a masked position is ignored. start_ids,
    end_ids: the ids of a tag, one or several. A start without an end changes nothing."""
    weights = torch.ones(labels.shape)
    for b, row in enumerate(labels.tolist()):
        ends = starts_of(end_ids, row)
        for start in starts_of(start_ids, row):
            behind = [end for end in ends if end >= start]
            if behind:
                weights[b, start:behind[0] + len(end_ids)] = weight
    return weights.to(labels.device)


def starts_of(ids, row):
    """Where the ids begin in a row of ids."""
    return [i for i in range(len(row) - len(ids) + 1) if row[i:i + len(ids)] == list(ids)]


def weighted_loss(logprobs, weights, total):
    """Algorithm 1, lines 16 to 30: sum of w (-log p) / total; both (B, T), w = 0 where nothing is learned.
    total: the sum of w over all rows of the update. (train_sft scales each row's w to the sum 1, so its total
    is the number of rows.) total <= 1e-8 gives 0."""
    loss = -torch.where(weights > 0, weights * logprobs, 0.0).sum()
    if total <= 1e-8:
        return 0 * loss
    return loss / total


def fused_weighted_loss(model, batch, weights, total, hidden, backend="auto"):
    """weighted_loss and its gradient in one pass over the logits (kernels/weighted_ce.py), on CUDA. weights:
    (B, T); hidden: (P, N, H). target, predecessor: (R,) tokens, places in hidden; gather: (B, T) to R."""
    before = hidden.flatten(0, 1)[batch.predecessor]    # (R, H) that predict the batch's R sampled tokens
    w = weights.new_zeros(len(batch.target))            # (R,): (B, T) summed, since trajectories share tokens
    w.index_add_(0, batch.gather[batch.response_mask], weights[batch.response_mask])
    head = models.head_rows(model, distributed.whole(model.get_output_embeddings().weight))
    return weighted_cross_entropy(before, head, batch.target, w, total, backend=backend)


MAX_LENGTH = 6144       # tokens; longer conversations are left out | sec. 3.4.2
UPDATES_PER_STEP = 25   # SFT's updates per line of metrics.jsonl
SFT_METRICS = records.SFT


def train_sft(run, policy, examples):
    """Stage 2: sft_epochs over the conversations ([Trajectory]). A step is 25 updates (UPDATES_PER_STEP)."""
    cfg, model = run.cfg, policy.model
    _, start_ids = chat.encode(policy.tokenizer, "<think>")
    _, end_ids = chat.encode(policy.tokenizer, "</think>")
    peak, warmup = cfg.sft_full_lr, .01
    if cfg.sft_lora:  # a number by now: plumbing.stages_of has replaced "auto"
        peak, warmup = cfg.sft_lr, .1
    optimizer = training.make_optimizer(model, peak, kind=cfg.optimizer)
    updates = math.ceil(len(examples) * cfg.sft_epochs / cfg.sft_batch)
    for step, row in run.steps(policy, optimizer, math.ceil(updates / UPDATES_PER_STEP), label="sft | "):
        meter = training.Meter()
        for number in range((step - 1) * UPDATES_PER_STEP, min(step * UPDATES_PER_STEP, updates)):
            # 1. the next conversations of an epoch in random order, and the rate
            order = stable_seed(cfg.seed, "sft order")
            chosen = data.batch_of_step(examples, number + 1, cfg.sft_batch, order)
            row["train/lr"] = training.cosine_lr(number, updates, peak, warmup=round(warmup * updates))
            training.set_lr(optimizer, row["train/lr"])

            # 2. the update: Algorithm 1 takes the weighted mean of one conversation; this takes the mean of
            # such means, over the update's conversations on all ranks
            for b in training.collate_parts(model, chosen, cfg.micro_tokens, cfg.share_prefixes):
                labels = torch.where(b.response_mask, b.input_ids, -100)
                weights = think_weights(labels, start_ids, end_ids, cfg.think_weight)
                weights = torch.where(b.response_mask, weights, 0.0)                # (B, T), 0 outside turns
                shares = weights / weights.sum(1, keepdim=True).clamp(min=1e-8)     # each row sums to 1
                hidden = models.hidden_states(model, b)
                if hidden.is_cuda:  # the same loss
                    loss = fused_weighted_loss(model, b, shares, len(chosen), hidden)
                else:
                    logprobs = models.token_logprobs(model, b, hidden=hidden)       # (B, T)
                    loss = weighted_loss(logprobs, shares, len(chosen))
                (loss * b.weight).backward()  # weight 1; of a filler 0
                stats = {"tokens": int(b.response_mask.sum()), "weight": float(weights.sum())}
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model)
            if meter.end_update(norm):  # loss and gradient are finite, on all ranks
                optimizer.step()
            optimizer.zero_grad()
        row |= records.update_metrics(meter)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress):
    """One trajectory per question. Returns (rows, summary). records.NUMBERS: what the summary averages."""
    if cfg.stage == "direct":  # it runs alone, never as a part of all or three
        return DIRECT.evaluate(policy, split, cfg, progress, records.direct_row, records.DIRECT_NUMBERS)
    prediction = partial(records.prediction, label=turn_label)
    rows, summary = AGENT.evaluate(policy, split, cfg, progress, prediction, records.NUMBERS)
    return rows, summary | records.patterns_and_faults(rows)


# ---------------------------------------------------------------- main

TRAINS = ("ppo", "sft", "rl")
# {row of Table 8, which also names the run's folder: (--stage, --think)} | sec. 3.5
STAGES = {
    "base": ("eval", "on"),
    "stage1": ("ppo", "on"),
    "sft-think": ("sft", "on"),
    "sft-no-think": ("sft", "off"),
    "rl-think": ("rl", "on"),
    "rl-no-think": ("rl", "off"),
}


@program()
def main(argv=None):
    """The stages of --stage, each in a run folder of its own, and their table. Checks that need no data come
    first. (@program: an error is one line; Ctrl-C says how to go on.)"""
    cfg = parse_args(argv)
    if cfg.ask:
        cfg = after_warm_up(cfg, learn_first)
        run = Run(cfg, "omne_r1")
        tools, question = graph_questions.asked(cfg)
        return AGENT.ask(run, start_weights(cfg, "eval"), tools, question)
    stages = plumbing.stages_of(cfg, STAGES)  # {label: (kind, the stage's cfg)}
    runs = []
    free = ["stage"]  # --resume may change this flag
    for label, (kind, stage_cfg) in stages.items():
        table = SFT_METRICS if kind == "sft" else METRICS
        runs.append(Run(stage_cfg, "omne_r1", table, stage=label, free=free))
    cfg = after_warm_up(cfg, learn_first, runs)  # --warmup-data: sets --checkpoint of cfg and of runs
    if cfg.stage == "rl":
        start_weights(cfg, "rl")  # for its error where stage 2 is missing
    split, evals = distributed.first(graph_questions.load, cfg)
    for run, (kind, _) in zip(runs, stages.values(), strict=True):
        run_stage(run, kind, split, evals)
    if not stages:
        return  # --stage synthesize: the questions are made
    from common import ladder
    distributed.once(ladder.show_stages, "omne_r1", plumbing.folder_of(cfg), list(stages))


def run_stage(run, kind, split, evals):
    """Trains and evaluates, or only evaluates. --resume skips a stage whose final evaluations are there."""
    cfg, folder = run.cfg, run.folder
    # SFT's steps depend on rows that are not made yet: its final evaluation alone says that it is done
    steps = cfg.steps if kind in REWARD else 0
    for_curve = graph_questions.fewer(evals, cfg.curve_questions)  # is_done compares it with config.json
    if folder.is_done(steps, for_curve):
        return
    source = start_weights(cfg, kind)
    lora = cfg.sft_lora if kind == "sft" else cfg.lora
    rows = sft_rows(cfg, split) if kind == "sft" else []
    # the KL's reference is a second model in memory; with adapters it is the policy without them
    num_frozen = int(kind in REWARD and cfg.kl_coef > 0 and not lora)
    trains = kind in TRAINS
    policy = run.policy(folder.start or source, trains=trains, num_frozen=num_frozen, lora=lora)
    agent = DIRECT if kind == "direct" else AGENT  # DIRECT: its prompt has no tools
    split, *evals = agent.within_limit(policy, [split, *evals], cfg)  # --max-prompt
    for_curve = graph_questions.fewer(evals, cfg.curve_questions)
    trained_on = split if trains else None
    with run.stage(f"Omne-R1 {cfg.name}: {run.stage_name}", policy, for_curve, evaluate, learned=trained_on):
        if trains and cfg.eval_every and not folder.start:  # (--eval-every 0: no evaluation before)
            run.evaluate("_before")
        if kind == "sft":
            examples = [conversation_of(policy.tokenizer, row, cfg) for row in rows]
            train_sft(run, policy, records.to_learn(folder, examples, MAX_LENGTH, turn_label))
        elif trains:
            train(run, kind, policy, source, split)
        run.evaluate(evals=evals, initial=run.stage_name == "base")  # base: warns where few are in the format


def start_weights(cfg, kind):
    """What a stage begins with. Stage 3: stage 2's weights, or with --stage rl its --checkpoint. Others: the
    first given of --checkpoint, --model, --policy (an API), else the tiny policy. Adapters are merged."""
    if kind == "rl" and not (cfg.stage == "rl" and cfg.checkpoint):
        stage = f"sft-{plumbing.NAMED[cfg.think]}"  # if it left no checkpoint, the error says what to run
        source = left_by(cfg, "omne_r1", stage, "--stage rl")
    else:
        source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
        source = checkpoint.find(source) or source
    return distributed.first(models.folded, source, plumbing.folder_of(cfg, "merged"))


def parse_args(argv=None):
    """The flags, over the paper's defaults or, without --model and --graph, the embedded world's."""
    return plumbing.check(flags.parse("omne_r1", Config, __doc__, argv, ends_world=("--model", "--graph")))


# ================================================================ appendix: the paper's prompts, and plumbing
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


TOOL_SCHEMAS = [
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
""" + "\n".join(map(json.dumps, TOOL_SCHEMAS)) + """
</tools>

For each function call, return the call in Python function-call style within <tool_call></tool_call> tags, \
for example: <tool_call>node_info(node_name="Rastrigin Function", graph_type="cs")</tool_call>
"""

# ---------------------------------------------------------------- ready wordings of thoughts (sec. 3.4; ours)
#
# A language model's thoughts are long and varied, and so are these: Algorithm 1 weighs thoughts down, which
# matters only if they have many tokens.

def phrases(text):
    """The phrases of a text, which have semicolons between them."""
    return tuple(" ".join(phrase.split()) for phrase in text.split(";"))


FILLERS = phrases("""okay let us try to figure this out step by step; wait but I am not sure about this yet;
    hmm let me think about it once more; well this is a question that needs some care; let me see what is
    known so far and what is not; alright first things first then the rest; I should not hurry here and look
    closely; maybe there is another way to see it but go on; it could be that I am wrong so let me check; good
    now this looks like the right way to go""")
PLANS = phrases("""the next thing to look for is the {relation} of {subject}; now I need the {relation} of
    {subject} from the graph; so the {relation} of {subject} comes next; what is missing is the {relation} of
    {subject}; the edge for the {relation} of {subject} should tell; to go on one must know the {relation} of
    {subject}; I will read the node for the {relation} of {subject}; from here the {relation} of {subject}
    leads further; the question wants the {relation} of {subject} first; let me get the {relation} of
    {subject} with the tool""")
FOUND = phrases("""the graph says the {relation} is {found}; there it is the {relation} is {found}; from the
    edges the {relation} is {found}; so I have found that the {relation} is {found}; the answer of the tool
    shows the {relation} is {found}; one edge tells that the {relation} is {found}; it is clear now the
    {relation} is {found}; this means the {relation} is {found}; reading the node the {relation} is {found};
    the {relation} is {found} as the graph has it""")
STARTS = phrases("""the question begins with {subject} so find that entity; first I must locate {subject} in
    the graph; the place to start is {subject}; let me match the name {subject} before anything else; the only
    name given is {subject} and it has to be found; the question names {subject} so that is what to match;
    without the entity {subject} there is no way to go on; I begin by looking for {subject} among the names;
    {subject} is where the path starts so let me find it; what I have is the name {subject} and no more""")
ENDS = phrases("""that is all the question asks for; nothing is left to look up; this must be the answer; now
    I can say the answer; the path is at its end here; with that the question is answered; so this is what was
    wanted; no more calls are needed for this; everything on the way has been found; it only remains to write
    it down""")

# ---------------------------------------------------------------- direct answers (Table 2)

def bare_prompt(tokenizer, question, cfg):
    """Ids of the question alone, without instructions."""
    messages = [("user", chat.Foreign(question.question))]
    return chat.render_chat(tokenizer, messages) + no_thought_ids(tokenizer, cfg.think)


async def answer_directly(player, question, name):
    """A Trajectory of one turn, from memory, without tools. The answer is all text behind the thoughts, so em
    is strict; common/of_omne/judge.py has a model judge it instead."""
    g = await player.policy.engine.generate(
        player.prompt_ids,
        stop=(),
        max_tokens=player.cfg.max_turn,
        temperature=player.temperature,
        seed=stable_seed(player.cfg.seed, "direct", question.id),  # (results/ was made with this one)
    )
    text = rollout.sampled_text(player.policy.tokenizer, g.token_ids, g.stop_reason)
    turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)
    said = THOUGHT.sub("", text).partition("<think>")[0].strip()  # (a thought that was cut off is no answer)
    info = Result(said, **answer_scores(said, question.answers[0]))
    return Trajectory(question.id, player.prompt_ids, [turn], info.em, info=info)


DIRECT = Agent("omne_r1", answer_directly, prompt=bare_prompt)


def learn_first(cfg, source):
    """Folder of `source` after --warmup-data."""
    _, evals = distributed.first(graph_questions.load, cfg)
    return plumbing.warmed_up(cfg, source, evals[0].evaluated, conversation_of)


def tiny_policy(cfg):
    """Folder of the embedded world's start: half a million weights, whose tokens are the words above, too."""
    from common.of_omne import world_graphs
    return world_graphs.tiny_policy(cfg, AGENT, FILLERS, [*PLANS, *FOUND, *STARTS, *ENDS])


if __name__ == "__main__":
    main()
