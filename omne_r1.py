"""Omne-R1: learning to reason with memory for multi-hop question answering.

(A preprint; a co-author's public branch has parts of it, "the authors' code".) A policy walks a knowledge
graph with two tools: entity_matcher finds names, node_info reads a node and its edges. The questions are made
from the graph itself. Stage 1: PPO from the base; its weights only serve to sample trajectories. Stage 2:
SFT of the base (in the paper a newer one), on those and on scripted ones along the paths of the questions; a
thought's tokens weigh .001 in the loss. Stage 3: PPO of all weights from stage 2's, with another reward.

PPO, except: GAE and both losses skip the tools' replies; the KL to the weights the stage began with is a cost
in each token's reward; the critic is a linear head on the policy's own hidden states.

    sec. 2          questions from paths            common/graphs/synthesis.py
    sec. 3.1        think, call a tool, answer      play, read_round, common/of_omne/tool_calls.py
    sec. 3.3.1      PPO, GAE, actor and critic      train, ppo_loss, gae, ActorCritic
    sec. 3.3.2      reward of stage 1               first_reward
    sec. 3.4        trajectories to learn from      sampled_rows, template_rows, thoughts
    Algorithm 1     weighted loss                   think_weights, weighted_loss, train_sft
    sec. 3.5        reward of stage 3               third_reward
    sec. 4.1.2      accuracy                        accuracy
    sec. 4.2.4      patterns of tool calls          pattern_of
    app. A, B       ShareGPT rows, system prompt    sharegpt_row, SYSTEM

    python omne_r1.py                          embedded world, stages 1 to 3; ten minutes
    python -m common.ladder omne_r1 table5 --seeds 3       Table 5 over seeds (2, 3, 4, 8 likewise)
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
from common.agent import Agent
from common.files import Lines, Progress, warn
from common.folder import left_by
from common.graphs.kg_tools import ENTITY_MATCHER, NODE_INFO, Call
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.kg import one_line
from common.of_omne import calls, graph_questions, plumbing
from common.of_omne.tool_calls import Fault, parse_tool_call, written
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed
from common.run import Run, program, tell, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PolicyFlags):
    """The paper's settings; what a run needs besides (model, memory, names) is in common/flags.py."""

    # ---- stages

    # three = evaluate the base, then ppo, sft and rl (stages 1 to 3), the last two as --think says; all = the
    # last two with and without thoughts; synthesize = only make the questions; direct = no tools (Table 2)
    stage: Literal["all", "three", "synthesize", "ppo", "sft", "rl", "direct", "eval"] = "all"
    think: Literal["on", "off"] = "on"  # off = the chat template's empty <think> block instead | sec. 3.4.1

    # ---- graphs and tools

    # graphs by their types: NAME=FILE,NAME=FOLDER, one file, a folder of graphs, or http://HOST:PORT
    graph: str = ""
    graph_encoder: str = "BAAI/bge-large-en-v1.5"  # of entities' names; empty = tf-idf | sec. 3.2.1
    matches: int = 5                # entities that entity_matcher shows | app. A
    max_edges: int = 60             # edges node_info shows; first those that share words with the question
    max_rounds: int = 7             # turns per question, with the answer | sec. 4.1.1
    max_turn: int = 3000            # tokens of one turn | sec. 3.1
    max_train_turn: int = 1024      # in training, where it is less than --max-turn | authors' code
    max_prompt: int = 4096          # tokens of the first prompt
    max_context: int = 32768        # tokens of prompt, turns and tools' replies
    curve_questions: int = 512      # of an evaluation between steps (--eval-every), the same ones | Fig. 4
    temperature: float = 1.0        # of sampling in training; not printed
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code

    # ---- questions (sec. 2)

    # training questions: a file that --stage synthesize made, or of such rows; empty = this run's own
    data: str = ""
    # who finds paths and words questions: an OpenAI-compatible chat endpoint (key: OPENAI_API_KEY), or
    # "template", which needs no model
    teacher: str = "template"
    teacher_model: str = "deepseek-reasoner"    # the teacher's name there | sec. 2
    per_graph: int = 1000           # training questions of each kind (1/2-hop, 3+) per graph; a tenth to test
    train_hops: Literal["mix", "12", "3"] = "mix"   # hops of training questions: all, 1/2, 3+ | Table 3
    largest_ball: int = 400         # nodes around a seed node, at most | sec. 2
    unique: bool = True             # leave out questions whose relations lead to another node too | app. C

    # ---- PPO (stages 1 and 3)
    steps: int = 350                # PPO steps; the one evaluated, of 1,000 planned | authors' code
    questions_per_step: int = 256   # questions per step | authors' code
    group_size: int = 1             # trajectories per question | authors' code
    mini_batch: int = 256           # trajectories per update | authors' code
    epochs: int = 1                 # passes over a step's trajectories | ours, verl's
    lr: float = 1e-6                # of the policy | authors' code
    head_lr: float = 1e-5           # of the value head | authors' code
    lr_warmup: float = .05          # share of the steps in which the learning rates rise | authors' code
    # half width of the clip window, which acts only where a step has several updates (the authors' steps
    # have one) | ours, verl's
    clip: float = .2
    gamma: float = 1.0              # discount per token | ours, verl's
    lam: float = 1.0                # lambda of GAE | ours, verl's
    kl_coef: float = 1e-3           # cost per token of the log-ratio to the stage's start | authors' code
    value_coef: float = .5          # weight of the value loss | ours

    # ---- SFT (stage 2)

    # ShareGPT rows to learn from; empty = right ones sampled with stage 1's weights, and templates
    sft_data: str = ""
    sft_sampled: int = 5000         # trajectories of stage 1, at most; not printed
    sft_templates: int = 5000       # questions tried for template trajectories; not printed
    think_weight: float = .001      # w, what a thought's tokens count | Table 5
    # rank of LoRA; 0 = full weights; auto = 8 with thoughts, 0 without | sec. 3.5
    sft_lora: Literal["auto"] | int = "auto"
    sft_lr: float = 1e-4            # of adapters, after a tenth of warm-up | sec. 3.4.2
    sft_full_lr: float = 1e-5       # of full weights, after a hundredth | sec. 3.4.2
    sft_epochs: int = 3             # cosine over all of them | sec. 3.4.2
    sft_batch: int = 4              # conversations per update | sec. 3.4.2


# ---------------------------------------------------------------- prompt and rounds (app. B is at the end)

STOP = ("</tool_call>", "</answer>")
NO_THOUGHT = "<think>\n\n</think>\n\n"
TAG = r"</?(?:think|tool_call|answer)>"
NO_TAG = f"(?!{TAG})"                       # no tag begins here
INSIDE = rf"\s*{NO_TAG}\S(?:{NO_TAG}.)*"    # between two tags: text that is not blank and has no tag
# ACTION is what the agent obeys, ROUND what the format reward accepts. A round is a turn and its reply.
THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
ACTION = re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL)
ROUND = {
    "on": re.compile(rf"\s*<think>{INSIDE}</think>\s*<(tool_call|answer)>{INSIDE}</\1>\s*", re.DOTALL),
    "off": re.compile(rf"\s*<(tool_call|answer)>{INSIDE}</\1>\s*", re.DOTALL),
}


def opening(tokenizer, think):
    """Ids before a turn without thoughts: the empty block. The policy did not sample them (mask 0)."""
    if think == "on":
        return []
    _, ids = chat.before_a_turn(tokenizer, NO_THOUGHT)
    return ids


def render_prompt(tokenizer, question, cfg):
    """Token ids of the first prompt; question.type is the graph's name."""
    asked = question.question
    if chat.is_tiny(tokenizer):     # its chat template drops the system prompt, which names the graph
        asked = f"{question.type} : {asked}"
    system = SYSTEM.replace("{graph_type}", question.type)
    messages = [("system", system), ("user", chat.Foreign(asked))]  # Foreign: it can write no tag
    return chat.render_chat(tokenizer, messages) + opening(tokenizer, cfg.think)


def render_observation(tokenizer, turn_ids, text, think):
    """Ids behind a turn: a tool's reply as a user's message (sec. 3.1), and where the next turn begins. An
    end mark that the turn sampled itself is not written again."""
    shown = chat.Foreign(text)
    reply = chat.render_reply(tokenizer, turn_ids, "<tool_response>\n", shown, "\n</tool_response>")
    return reply + opening(tokenizer, think)


def read_round(text):
    """What a turn does: ("call", (tool, arguments) or Fault), ("answer", text, or None where it is blank), or
    ("", None). Closed thoughts are not read; of several calls and answers the last one is.

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
        tool, arguments = parse_tool_call(inside)
    except Fault as fault:
        return "call", fault
    return "call", (tool, {name: value.strip() for name, value in arguments.items()})


# ---------------------------------------------------------------- agent (sec. 3.1)

async def play(player, question, name):
    """One trajectory: think, call a tool, read, …, answer. question.type is the graph it is asked of; name is
    part of its seeds. Ends at an answer, no action, the last round, or too little room for a full turn."""
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
        text = rollout.sampled_text(tokenizer, g.token_ids, g.stop_reason)
        # trained on are the sampled ids, the stop string's too; prompt and replies have mask 0 (collate)
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)
        turns.append(turn)
        kind, action = read_round(text)
        calls_a_tool = kind == "call" and len(turns) < cfg.max_rounds
        if calls_a_tool:
            turn.observation = await reply_to(player.search, action, question, cfg)
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, cfg.think)
        if player.watch:  # --ask shows it
            player.watch(turn)
        room = cfg.max_context - len(context_ids(player.prompt_ids, turns))
        if not calls_a_tool or room < cfg.max_turn:  # (then nobody reads the last reply)
            info = result_of(turns, question, cfg)
            return Trajectory(question.id, player.prompt_ids, turns, info.em, info=info)


async def reply_to(tools, action, question, cfg):
    """The tool's reply, or why the call cannot be made."""
    if isinstance(action, Fault):
        return f"Error: {action.detail}."
    tool, arguments = action
    if arguments["graph_type"] != question.type:
        return f"Error: graph_type must be '{question.type}' for this question."
    call = Call(tool, arguments["node_name"], question.type, question.question)
    return await tools(call, cfg.matches)


@dataclass
class Result(Outcome):
    """A trajectory's outcome: answer, problem (of the format), em, f1, searches (calls, also one in the last
    round, which gets no reply), and:"""
    normalised: float = 0.0     # exact match under SQuAD's normalisation
    format: float = 0.0         # share of the rounds in the right format
    repetitions: int = 0        # calls that repeat an earlier one (sec. 3.5)
    pattern: str = ""           # of tool calls (pattern_of)
    faults: dict = field(default_factory=dict)  # {what was wrong with calls: how many}


def turn_label(turn):
    """A turn's name on the page."""
    kind, action = read_round(turn.text)
    if kind == "answer":
        return kind
    return action[0] if isinstance(action, tuple) else "no call"


def result_of(turns, question, cfg):
    """The Result of a trajectory's turns."""
    right_format = [round_is_right(turn.text, cfg.think, last=turn is turns[-1]) for turn in turns]
    rounds = [read_round(turn.text) for turn in turns]
    calls_made = [action for kind, action in rounds if kind == "call"]
    faults = Counter()
    readable = []
    for action in calls_made:
        if isinstance(action, Fault):
            faults[action.name] += 1
        else:
            readable.append(action)
    distinct = {(tool, *arguments.values()) for tool, arguments in readable}
    wrong_graph = sum(arguments["graph_type"] != question.type for _, arguments in readable)
    if wrong_graph:
        faults["wrong graph"] = wrong_graph
    kind, answer = rounds[-1]
    if kind != "answer":
        answer = None
    problem = ""  # (of the right format is a last round with an answer alone)
    if not all(right_format):
        problem = "no answer" if answer is None else "form"
    return Result(
        answer,
        problem,
        **accuracy(answer, question.answers[0]),
        searches=len(calls_made),
        format=sum(right_format) / len(right_format),
        repetitions=len(readable) - len(distinct),
        pattern=pattern_of(calls_made, answer),
        faults=dict(faults),
    )


def accuracy(answer, gold):
    """em: equal as the tools print names, blanks apart (sec. 4.1.2); the authors' code has `normalised` for
    it. The gold answer is a node's name, which has no other."""
    said, gold = one_line(answer or ""), one_line(gold)
    if not said:
        return {}
    normalised = metrics.exact_match(said, gold)
    return {"em": float(said == gold), "f1": metrics.f1(said, gold), "normalised": normalised}


def round_is_right(text, think, last):
    """Exactly one thought (--think off: none), then one readable call; in the last round alone the answer."""
    form = ROUND[think].fullmatch(text)
    if not form or (form[1] == "answer") != last:
        return False
    return last or not isinstance(read_round(text)[1], Fault)


def pattern_of(calls_made, answer):
    """The tools of a trajectory in one word: m = entity_matcher, n = node_info, x = not readable; then a = an
    answer, - = none. The standard pattern (sec. 4.2.4) is m n n … a, as a regex mn+a."""
    letters = {ENTITY_MATCHER: "m", NODE_INFO: "n"}
    word = ""
    for action in calls_made:
        word += "x" if isinstance(action, Fault) else letters[action[0]]
    end = "-" if answer is None else "a"
    return word + end


def rollouts(policy, tools, questions, cfg, *when):
    """group_size trajectories per question, all played at once; each depends on its own seed alone, which is
    made of the run's, of `when` (stage, step) and of the question."""
    search = rollout.BatchedSearch(tools)
    cfg = replace(cfg, max_turn=min(cfg.max_turn, cfg.max_train_turn))
    agents = []
    seeds = rollout.question_seeds(questions, cfg.seed, *when)
    for q, seed in zip(questions, seeds, strict=True):
        player = AGENT.player(policy, search, q, cfg, seed, cfg.temperature)
        agents += [play(player, q, f"chain{k}") for k in range(cfg.group_size)]
    return rollout.run_agents(agents, policy.engine, search)


# ---------------------------------------------------------------- rewards (sec. 3.3.2, 3.5)

def first_reward(trajectory):
    """Stage 1: R_format (.1 + .9 R_result): the share of the rounds in the right format, and em."""
    info = trajectory.info
    return info.format * (.1 + .9 * info.em)


def third_reward(trajectory):
    """Stage 3: (r_format + r_answer) / 2 - .1 n_repetition. r_format is 1 if every round is in the right
    format, r_answer = em. A wrong answer in right format is worth .5."""
    info = trajectory.info
    return (float(not info.problem) + info.em) / 2 - .1 * info.repetitions


REWARD = {"ppo": first_reward, "rl": third_reward}


# ---------------------------------------------------------------- actor and critic (sec. 3.3.1)

HEAD = "value_head.safetensors"


class ActorCritic(torch.nn.Module):
    """The policy, and V as a linear head on its hidden states: "both networks share an encoder", so V's
    gradient goes into the policy's layers too. Saved as the policy's folder with value_head.safetensors,
    which is read back of the checkpoint `resumed`."""

    def __init__(self, policy, resumed=None):
        super().__init__()
        self.policy = policy
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)  # V = 0 to begin with
        torch.nn.init.zeros_(self.head.bias)
        if resumed:
            self.head.load_state_dict(load_file(str(Path(resumed) / HEAD)))
        distributed.cut(self.head)  # over several ranks, as the policy is

    @property
    def device(self):
        return self.policy.device

    def forward(self, batch, temperature):
        """log-probs of the sampled tokens, and V of the states before them; both (B, T), 0 elsewhere."""
        hidden = models.hidden_states(self.policy, batch)
        logprobs = models.token_logprobs(self.policy, batch, temperature, hidden=hidden)
        return logprobs, models.token_values(self.head, batch, hidden)

    def save_pretrained(self, folder, state_dict=None):
        """state_dict: whole weights, where this rank has parts of them."""
        policy, head = {}, {}
        for name, weight in (state_dict or self.state_dict()).items():
            if name.startswith("head."):
                head[name.removeprefix("head.")] = weight.cpu()
            else:
                policy[name.removeprefix("policy.")] = weight
        self.policy.save_pretrained(folder, state_dict=policy)
        save_file(head, f"{folder}/{HEAD}")


# ---------------------------------------------------------------- credit: GAE (sec. 3.3.1)

def gae(rewards, values, response_mask, gamma, lam):
    """(advantages, returns), both (B, T): A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma
    V(s_{t+1}) - V(s_t), where t + 1 is the next *sampled* token, and V = 0 behind the last one. (The
    authors' code does not skip observations.)

    rewards, values (B, T): of sampled tokens, without gradient; what stands elsewhere is not read."""
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
    last = batch.response_mask.cumsum(1) == batch.response_mask.sum(1, keepdim=True)
    last = last & batch.response_mask                                   # (B, T)
    final = torch.tensor([[t.reward] for t in batch.trajectories], device=last.device)
    rewards = torch.where(last, final, 0.0)
    if batch.ref_logprobs is not None:  # the authors set .001, but not the switch that uses it
        log_ratio = batch.old_logprobs - batch.ref_logprobs
        rewards = rewards - kl_coef * torch.where(batch.response_mask, log_ratio, 0.0)
    return rewards


def batches_of(actor, reference, trajectories, cfg):
    """[Batch] of trajectories, with log-probs and V of the weights that sampled and log-probs of the
    reference. Every rank has all trajectories and makes batches of its own part, and fillers of weight 0,
    since all must do equally many passes; denominators are those of all ranks."""
    batches = training.collate_parts(actor.policy, trajectories, cfg.micro_tokens, cfg.share_prefixes)
    for b in batches:
        with torch.no_grad():
            b.old_logprobs, b.values = actor(b, cfg.temperature)
            if reference is not None:   # a frozen model, or with --lora the policy without its adapters
                with models.reference_weights(actor.policy, reference) as frozen:
                    b.ref_logprobs = models.token_logprobs(frozen, b, cfg.temperature)
    return batches


def assign_credit(batches, cfg):
    """Fills returns, and advantages that are whitened over all tokens of the step, other ranks' too. With
    gamma = lam = 1: A_t = (reward - KL cost from t on) - V(s_t), then whitened; returns are not.

    If all rewards are equal, what is left of the advantages is the critic's error and the KL. Whitening
    scales that to 1, so the policy still moves."""
    for b in batches:
        rewards = token_rewards(b, cfg.kl_coef)
        b.advantages, b.returns = gae(rewards, b.values, b.response_mask, cfg.gamma, cfg.lam)
    own = [b.advantages[b.response_mask] for b in batches if b.weight]  # without fillers
    advantages = distributed.of_all_ranks(own)
    mean = advantages.mean()
    std = (advantages.var(correction=0) + 1e-8).sqrt()
    for b in batches:
        b.advantages = torch.where(b.response_mask, (b.advantages - mean) / std, 0.0)


# ---------------------------------------------------------------- update

def ppo_loss(logprobs, old_logprobs, advantages, values, returns, response_mask, clip, num_tokens):
    """(policy loss, value loss, stats), both losses means over the mini-batch's num_tokens sampled tokens, of
    which this may be a part; tensors (B, T).

    L^PPO: - mean min(r A, clip(r, 1 - clip, 1 + clip) A), r = pi / pi_old; mean (V - R)^2."""
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


GRAD_CLIP = 1.0     # largest norm of the gradient | ours, verl's
METRICS = STEP | ROLLOUT | UPDATE | RATIO | calls.CALLS
del METRICS["rollout/flat_groups"]  # advantages are not compared within groups


def train(run, stage, policy, initial, task):
    """PPO with the reward of stage 1 (ppo) or 3 (rl), and a critic that begins at 0 in both. initial: folder
    of the weights that the stage began with, for the KL."""
    cfg = run.cfg
    actor = ActorCritic(policy.model, run.folder.start)
    reference = models.load_reference(policy.model, initial, cfg.lora) if cfg.kl_coef else None
    optimizer = training.make_optimizer(actor.policy, cfg.lr, kind=cfg.optimizer)
    optimizer.add_param_group({"params": actor.head.parameters(), "lr": cfg.head_lr, "weight_decay": 0.0})
    learner = replace(policy, model=actor)  # saved in checkpoints
    for step, row in run.steps(learner, optimizer, cfg.steps, label=f"{stage} | "):
        training.raise_lr(optimizer, step, cfg.lr_warmup, cfg.steps)  # the policy's and the head's

        # 1. sample
        seed = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(task.questions, step, cfg.questions_per_step, seed)
        with run.sampling(policy, row):
            trajectories = rollouts(policy, task.retriever, questions, cfg, stage, step)

        # 2. score whole trajectories; token_rewards puts this on their last sampled tokens
        for t in trajectories:
            t.reward = REWARD[stage](t)
        row |= calls.rollout_metrics(trajectories, task.retriever)

        # 3. log-probs and values of the weights that sampled, for each mini-batch of the shuffled
        # trajectories, all before the first update: advantages are whitened over the tokens of the whole step
        seed = stable_seed(cfg.seed, "parts", step)
        shuffled = data.batch_of_step(trajectories, 1, len(trajectories), seed)  # all of them, once
        parts = [shuffled[i:i + cfg.mini_batch] for i in range(0, len(shuffled), cfg.mini_batch)]
        with timed(row, "time/old_logprobs"):
            prepared = [batches_of(actor, reference, part, cfg) for part in parts]

        # 4. credit, per sampled token: tools' replies have mask 0 in GAE, whitening and both losses
        everything = [b for batches in prepared for b in batches]
        assign_credit(everything, cfg)
        row |= calls.critic_metrics(everything)
        credit = calls.credit_of(everything, cfg.gamma, cfg.lam)
        row["sample"] = calls.sample_record(trajectories, questions, step, cfg.group_size, turn_label, credit)

        # 5. an update for each mini-batch, in each epoch; credit and old log-probs stay
        meter = training.Meter(everything, cfg.sampler_correction, cfg.epochs)
        mini_batches = list(zip(parts, prepared, strict=True))
        for part, batches in cfg.epochs * mini_batches:
            # sampled tokens of the mini-batch on all ranks: each counts the same, whatever its trajectory
            num_tokens = sum(t.sampled_tokens for t in part)
            for b in batches:  # micro-batches of this rank, for memory alone
                logprobs, values = actor(b, cfg.temperature)               # (B, T)
                # by default b.advantages, else times p of the trainer over p of the engine
                advantages = training.corrected_advantages(b, cfg.sampler_correction)
                policy_loss, value_loss, stats = ppo_loss(
                    logprobs, b.old_logprobs, advantages, values, b.returns, b.response_mask,
                    cfg.clip, num_tokens)
                loss = policy_loss + cfg.value_coef * value_loss
                (loss * b.weight).backward()
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(actor, GRAD_CLIP)
            if meter.end_update(norm):  # else nothing is learned from this mini-batch
                optimizer.step()
            optimizer.zero_grad()
        row |= calls.update_metrics(meter)


# ---------------------------------------------------------------- stage 2: rows to learn from (sec. 3.4)

def sampled_rows(cfg, policy, task, file):
    """(a) ShareGPT rows of stage 1's trajectories with reward 1, one per question, played at training's
    temperature and turn limit. file: what became of each question, so that nothing is sampled twice."""
    rng = random.Random(stable_seed(cfg.seed, "sft"))
    questions = rng.sample(task.questions, len(task.questions))
    one_each = replace(cfg, group_size=1)
    lines = Lines(file)
    row_of = {line["id"]: line["row"] for line in lines.rows}   # None: not answered right
    rows = []
    policy.engine.sync(policy.model)
    with Progress("trajectories of stage 1") as progress:
        for start in range(0, len(questions), 128):
            batch = [q for q in questions[start:start + 128] if q.id not in row_of]
            trajectories = rollouts(policy, task.retriever, batch, one_each, "sft")
            for t, q in zip(trajectories, batch, strict=True):
                row_of[q.id] = None
                if t.info.em == 1 and not t.info.problem:
                    row_of[q.id] = sampled_row(t, q)
                if distributed.rank() == 0:
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


def template_rows(cfg, task):
    """(b) ShareGPT rows of questions whose paths are known: the calls of the standard pattern, the tools'
    replies, and thoughts in ready wordings. Left out (and counted): those where a tool does not show the next
    node."""
    known = [q for q in task.questions if q.evidences]
    rng = random.Random(stable_seed(cfg.seed, "templates"))
    known = rng.sample(known, len(known))[:cfg.sft_templates]
    rows = []
    with Progress("template trajectories") as progress:
        for number, question in enumerate(known, 1):
            planned = template_calls(question)
            replies = task.retriever.search(planned, cfg.matches)
            if path_is_shown(question, planned, replies):
                acts = [written(call) for call in planned] + [f"<answer> {question.answers[0]} </answer>"]
                said = []
                for thought, act in zip(thoughts(question, cfg.seed), acts, strict=True):
                    said.append(f"<think> {thought} </think> {act}")
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
    """A thought before each call along a question's path and one before the answer, in the ready wordings
    (their words are in the appendix)."""
    rng = random.Random(stable_seed(seed, "thoughts", question.id))
    said = [rng.choice(STARTS).format(subject=question.evidences[0][0])]
    known = ""
    for head, relation, tail in question.evidences:
        plan = rng.choice(PLANS).format(relation=relation, subject=head)
        said.append(with_fillers(rng, known, plan))
        known = rng.choice(FOUND).format(relation=relation, found=tail)
    said[0] = with_fillers(rng, said[0])  # last, since the numbers of results/ were drawn so
    return [*said, with_fillers(rng, known, rng.choice(ENDS))]


def with_fillers(rng, *parts):
    """A thought nearly twice as long as a call: what matters, and one or two fillers around it."""
    said = [part for part in parts if part]
    count = 1
    if len(said) < 2 or rng.random() < .5:
        count = 2
    first, *second = rng.sample(FILLERS, count)
    return " ".join([first, *said, *second])


def path_is_shown(question, planned, replies):
    """Whether each reply has the next call's name, the last one the answer. If a name was cut off
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


def sft_rows(cfg, task):
    """ShareGPT rows: those of --sft-data, or (a) and (b), made once in <name>-sft-data/."""
    if cfg.sft_data:
        return plumbing.read_conversations(cfg.sft_data, task.evaluated)
    folder, stage1 = distributed.first(plumbing.begin_conversations, cfg)
    file = folder / "sharegpt.jsonl"
    if not file.exists():
        rows = []
        if cfg.sft_sampled:
            policy = Run(cfg).policy(stage1, trains=False)
            rows = sampled_rows(replace(cfg, think="on"), policy, task, folder / "sampled.jsonl")
        distributed.once(lambda: plumbing.write_conversations(folder, rows + template_rows(cfg, task)))
    return plumbing.read_conversations(file, task.evaluated)


# ---------------------------------------------------------------- stage 2: Algorithm 1

def conversation_of(tokenizer, row, cfg, apart=True):
    """The Trajectory that a ShareGPT row teaches. Without thoughts it is the same row, stripped. apart: see
    encode_turn."""
    question = data.Question(row["id"], row["question"], [], type=row["graph_type"])
    prompt_ids = render_prompt(tokenizer, question, cfg)
    turns = []
    for message in row["conversations"][1:]:
        if message["from"] == "gpt":
            text = message["value"]
            if cfg.think == "off":
                text = THOUGHT.sub("", text).strip()
            if not text:
                raise data.DataError(f"conversation {row['id']}: of a message of thoughts alone --think off "
                                     "has nothing left")
            ids = encode_turn(tokenizer, text, apart)
            turns.append(Turn(ids, [0.0] * len(ids), "", text))
        else:
            turn = turns[-1]
            turn.observation = message["value"]
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, cfg.think)
    return Trajectory(row["id"], prompt_ids, turns, info=calls.Taught(source=row.get("source", "")))


def encode_turn(tokenizer, text, apart=True):
    """Ids of a turn that somebody wrote: its tags are tags, and nothing else in it is. apart: each tag is
    encoded by itself, so that Algorithm 1 finds it also where a tokenizer has several tokens for one; else
    the ids are those that a policy would sample."""
    parts = []
    for part in re.split(f"({TAG})", text):
        if not re.fullmatch(TAG, part):
            part = chat.Foreign(part)
        parts.append(part)
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


def sft_weights(batch, start_ids, end_ids, weight):
    """The weights of what is learned, (B, T), 0 elsewhere."""
    labels = torch.where(batch.response_mask, batch.input_ids, -100)
    return torch.where(batch.response_mask, think_weights(labels, start_ids, end_ids, weight), 0.0)


def weighted_loss(logprobs, weights, total):
    """Algorithm 1, lines 16 to 30: sum of w (-log p) / total, of (B, T) with weights 0 where nothing is
    learned. total: the sum of the weights of all that is averaged over, of which this may be a part (of the
    number of rows, where each row's weights sum to 1); at most 1e-8 gives 0."""
    loss = -torch.where(weights > 0, weights * logprobs, 0.0).sum()
    if total <= 1e-8:
        return 0 * loss
    return loss / total


def weighted_sft_loss(model, batch, weights, total):
    """weighted_loss of a batch's sampled tokens; on CUDA in one pass over the logits."""
    hidden = models.hidden_states(model, batch)
    if hidden.is_cuda:
        return calls.fused_loss(model, batch, weights, total, hidden)
    return weighted_loss(models.token_logprobs(model, batch, hidden=hidden), weights, total)


MAX_LENGTH = 6144       # tokens; longer conversations are left out | sec. 3.4.2
UPDATES_PER_STEP = 25   # of stage 2, in one line of metrics
SFT_METRICS = STEP | UPDATE | calls.WEIGHTED


def train_sft(run, policy, examples):
    """Stage 2: sft_epochs over the conversations ([Trajectory]), one cosine over all of it."""
    cfg, model = run.cfg, policy.model
    _, start_ids = chat.encode(policy.tokenizer, "<think>")
    _, end_ids = chat.encode(policy.tokenizer, "</think>")
    peak, warmup = cfg.sft_full_lr, .01
    if cfg.sft_lora:
        peak, warmup = cfg.sft_lr, .1
    optimizer = training.make_optimizer(model, peak, kind=cfg.optimizer)
    updates = math.ceil(len(examples) * cfg.sft_epochs / cfg.sft_batch)
    for step, row in run.steps(policy, optimizer, math.ceil(updates / UPDATES_PER_STEP), label="sft | "):
        meter = training.Meter()
        for number in range((step - 1) * UPDATES_PER_STEP, min(step * UPDATES_PER_STEP, updates)):
            # 1. some conversations, and their rate
            order = stable_seed(cfg.seed, "sft order")
            chosen = data.batch_of_step(examples, number + 1, cfg.sft_batch, order)
            row["train/lr"] = training.cosine_lr(number, updates, peak, warmup=round(warmup * updates))
            training.set_lr(optimizer, row["train/lr"])

            # 2. the update: Algorithm 1's weighted mean over each conversation, then the mean over the
            # conversations of the update, on all ranks: the divisor is their number
            for b in training.collate_parts(model, chosen, cfg.micro_tokens, cfg.share_prefixes):
                weights = sft_weights(b, start_ids, end_ids, cfg.think_weight)      # (B, T), 0 outside turns
                shares = weights / weights.sum(1, keepdim=True).clamp(min=1e-8)     # each row sums to 1
                loss = weighted_sft_loss(model, b, shares, len(chosen))
                (loss * b.weight).backward()  # weight 0: another rank's batch, here only to keep step
                stats = {"tokens": int(b.response_mask.sum()), "weight": float(weights.sum())}
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model, GRAD_CLIP)
            if meter.end_update(norm):  # else loss or gradient is not a number: no update
                optimizer.step()
            optimizer.zero_grad()
        row |= calls.update_metrics(meter)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, task, cfg, progress):
    """One trajectory per question. Returns (rows, summary)."""
    if cfg.stage == "direct":
        return DIRECT.evaluate(policy, task, cfg, progress, calls.direct_prediction, calls.DIRECT)
    prediction = partial(calls.prediction, label=turn_label)
    rows, summary = AGENT.evaluate(policy, task, cfg, progress, prediction, calls.EVALUATED)
    return rows, summary | calls.patterns_and_faults(rows)


# ---------------------------------------------------------------- main

TRAINS = ("ppo", "sft", "rl")
# Table 8. label of folder and row: (what the stage does, with thoughts or without; sec. 3.5)
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
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    cfg = parse_args(argv)
    if cfg.ask:
        run = Run(cfg, "omne_r1")
        tools, question, evaluated = graph_questions.asked(cfg)
        return AGENT.ask(run, start_weights(cfg, "eval", evaluated), tools, question)
    stages, runs = plumbing.stages_of(cfg, STAGES), []
    free = ("stage", "curve_questions")  # --resume may go on with others
    for label, (kind, settings) in stages.items():
        table = SFT_METRICS if kind == "sft" else METRICS
        runs.append(Run(settings, "omne_r1", table, label, free, saves=kind in TRAINS))
    if cfg.stage == "rl":
        start_weights(cfg, "rl")  # refuses where stage 2 is missing
    task, evals = distributed.first(graph_questions.load, cfg)
    tell(cfg, cfg.steps)  # what will happen
    for run in runs:
        run_stage(run, stages[run.name][0], task, evals)
    from common import ladder
    distributed.once(ladder.show_stages, "omne_r1", plumbing.folder_of(cfg), list(stages))


def run_stage(run, kind, task, evals):
    """Trains and evaluates, or only evaluates. --resume skips a complete stage."""
    cfg, folder = run.cfg, run.folder
    steps = cfg.steps if kind in REWARD else 0
    if folder.is_done(steps, evals):
        return
    initial = start_weights(cfg, kind, evals[0].evaluated)
    lora = cfg.lora
    if kind == "sft":
        lora = cfg.sft_lora
        rows = sft_rows(cfg, task)
    # a reference in memory; with adapters it is the base with them off
    frozen = int(kind != "sft" and cfg.kl_coef > 0 and not lora)
    trains = kind in TRAINS
    policy = run.policy(folder.start or initial, trains, frozen, lora=lora)
    task, *evals = AGENT.within_limit(policy, [task, *evals], cfg)
    fewer = graph_questions.fewer(evals, cfg.curve_questions)  # of each set, between steps
    with run.stage(f"Omne-R1 {cfg.name}: {run.name}", policy, fewer, evaluate):
        if trains and cfg.eval_every and not folder.start:
            run.evaluate("_before")
        if kind == "sft":
            examples = [conversation_of(policy.tokenizer, row, cfg) for row in rows]
            train_sft(run, policy, calls.to_learn(folder, examples, MAX_LENGTH, turn_label))
        elif trains:
            train(run, kind, policy, initial, task)
        run.evaluate(evals=evals, initial=run.name == "base")


def start_weights(cfg, kind, evaluated=frozenset()):
    """A folder or hub id: of stages 1 and 2 the base, of stage 3 what stage 2 left. Adapters are folded into
    the model that they belong to. evaluated: fingerprints of the questions that a warm-up leaves out."""
    if kind == "rl" and not (cfg.checkpoint and cfg.stage == "rl"):  # --stage rl --checkpoint begins there
        stage = f"sft-{plumbing.NAMED[cfg.think]}"
        source = left_by(cfg, "omne_r1", stage, "--stage rl", called="sft")
    else:
        source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
        if cfg.warmup_data:
            source = plumbing.warmed_up(cfg, source, evaluated, conversation_of)
        source = checkpoint.find(source) or source
    return distributed.first(models.folded, source, plumbing.folder_of(cfg, "merged"))


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    cfg = flags.parse("omne_r1", Config, __doc__, argv, ends_world=("--model", "--graph"))
    return plumbing.check(cfg)


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
# A language model's thoughts are long, varied and partly void. So are these: a method that counts thoughts
# for less than calls is only put to the test where thoughts are worth it.

FILLERS = (
    "okay let us try to figure this out step by step",
    "wait but I am not sure about this yet",
    "hmm let me think about it once more",
    "well this is a question that needs some care",
    "let me see what is known so far and what is not",
    "alright first things first then the rest",
    "I should not hurry here and look closely",
    "maybe there is another way to see it but go on",
    "it could be that I am wrong so let me check",
    "good now this looks like the right way to go",
)
PLANS = (
    "the next thing to look for is the {relation} of {subject}",
    "now I need the {relation} of {subject} from the graph",
    "so the {relation} of {subject} comes next",
    "what is missing is the {relation} of {subject}",
    "the edge for the {relation} of {subject} should tell",
    "to go on one must know the {relation} of {subject}",
    "I will read the node for the {relation} of {subject}",
    "from here the {relation} of {subject} leads further",
    "the question wants the {relation} of {subject} first",
    "let me get the {relation} of {subject} with the tool",
)
FOUND = (
    "the graph says the {relation} is {found}",
    "there it is the {relation} is {found}",
    "from the edges the {relation} is {found}",
    "so I have found that the {relation} is {found}",
    "the answer of the tool shows the {relation} is {found}",
    "one edge tells that the {relation} is {found}",
    "it is clear now the {relation} is {found}",
    "this means the {relation} is {found}",
    "reading the node the {relation} is {found}",
    "the {relation} is {found} as the graph has it",
)
STARTS = (
    "the question begins with {subject} so find that entity",
    "first I must locate {subject} in the graph",
    "the place to start is {subject}",
    "let me match the name {subject} before anything else",
    "the only name given is {subject} and it has to be found",
    "the question names {subject} so that is what to match",
    "without the entity {subject} there is no way to go on",
    "I begin by looking for {subject} among the names",
    "{subject} is where the path starts so let me find it",
    "what I have is the name {subject} and no more",
)
ENDS = (
    "that is all the question asks for",
    "nothing is left to look up",
    "this must be the answer",
    "now I can say the answer",
    "the path is at its end here",
    "with that the question is answered",
    "so this is what was wanted",
    "no more calls are needed for this",
    "everything on the way has been found",
    "it only remains to write it down",
)

# ---------------------------------------------------------------- direct answers (Table 2)

def bare_prompt(tokenizer, question, cfg):
    """Ids of the question alone, without instructions."""
    messages = [("user", chat.Foreign(question.question))]
    return chat.render_chat(tokenizer, messages) + opening(tokenizer, cfg.think)


async def answer_directly(player, question, name):
    """A Trajectory of one turn, from memory, without tools. The answer is all that stands behind the
    thoughts, so that em is strict: a judge can say which are right (common/of_omne/judge.py)."""
    g = await player.policy.engine.generate(
        player.prompt_ids,
        stop=(),
        max_tokens=player.cfg.max_turn,
        temperature=player.temperature,
        seed=stable_seed(player.cfg.seed, "direct", question.id),
    )
    text = rollout.sampled_text(player.policy.tokenizer, g.token_ids, g.stop_reason)
    turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)
    said = THOUGHT.sub("", text).partition("<think>")[0].strip()  # (a thought that was cut off is no answer)
    info = Result(said, **accuracy(said, question.answers[0]))
    return Trajectory(question.id, player.prompt_ids, [turn], info.em, info=info)


# ---------------------------------------------------------------- the agents, for what common/agent.py does

AGENT = Agent(
    "omne_r1",
    play,
    prompt=render_prompt,
    rows_of=lambda trajectory, question: [sampled_row(trajectory, question)],
)
DIRECT = Agent("omne_r1", answer_directly, prompt=bare_prompt)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from."""
    from common.of_omne import world_graphs
    return world_graphs.tiny_policy(cfg, AGENT, FILLERS, [*PLANS, *FOUND, *STARTS, *ENDS])


if __name__ == "__main__":
    main()
