"""Omne-R1: learning to reason with memory for multi-hop question answering.

(A preprint; a co-author's public branch has parts of it, "the authors' code".) A policy walks a knowledge
graph with two tools: entity_matcher finds names, node_info reads a node and its edges. The questions are made
from the graph itself. Stage 1: PPO from the base; its weights only serve to sample trajectories. Stage 2:
SFT, again from the base (the paper has another), on those and on scripted ones along the paths of the
questions; a thought's tokens weigh .001 in the loss. Stage 3: PPO of all weights from stage 2's, with another
reward.

PPO, except: GAE and both losses skip the tools' replies; the KL to the weights the stage began with is a cost
in each token's reward; the critic is a linear head on the policy's own hidden states.

    sec. 2          questions from paths            common/graphs/synthesis.py
    sec. 3.1        think, call a tool, answer      play, read_round, parse_tool_call
    sec. 3.3.1      PPO, GAE, actor and critic      train, ppo_loss, gae, ActorCritic
    sec. 3.3.2      reward of stage 1               first_reward
    sec. 3.4        trajectories to learn from      sampled_rows, template_rows, thoughts
    Algorithm 1     weighted loss                   think_weights, weighted_loss, train_sft
    sec. 3.5        reward of stage 3               third_reward
    sec. 4.1.2      accuracy                        result_of
    sec. 4.2.4      patterns of tool calls          pattern_of
    app. A, B       ShareGPT rows, system prompt    sharegpt_row, SYSTEM

    python omne_r1.py                          embedded world, three stages; ten minutes (--stage all: six)
    python -m common.ladder omne_r1 table5 --seeds 3       Table 5 over seeds (2, 3, 4, 8 likewise)
    python omne_r1.py --stage sft --sft-data FILE --think-weight .1 --name tenth   one stage; --resume goes on
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/ --stage synthesize --teacher http://HOST/v1
    python omne_r1.py --model Qwen/Qwen3-14B --graph graphs/              the paper's setting; not run
    python omne_r1.py --eval-only --checkpoint DIR --graph graphs/ --eval-data questions.jsonl
Where paper, code and ours differ: docs/differences.md. Numbers reached: results/README.md.
"""

import ast
import json
import random
import re
import warnings
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
from common.files import Progress, warn
from common.folder import left_by
from common.graphs.kg_tools import ENTITY_MATCHER, NODE_INFO, Call
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.kg import one_line
from common.of_omne import calls, graph_questions
from common.of_omne.graph_questions import has_hops
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed
from common.run import Run, program, tell, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PolicyFlags):
    """The paper's settings; what a run needs besides (model, memory, names) is in common/flags.py."""

    # ---- stages

    # all = evaluate the base, then ppo, then sft and rl with and without thoughts; three = as --think says;
    # synthesize = only make the questions; direct = answer without tools (Table 2)
    stage: Literal["all", "three", "synthesize", "ppo", "sft", "rl", "direct", "eval"] = "all"
    think: Literal["on", "off"] = "on"  # off = the chat template's empty <think> block instead | sec. 3.4.1

    # ---- graphs and tools

    # graphs by their types: NAME=FILE,NAME=FOLDER, one file, a folder of graphs, or http://HOST:PORT
    graph: str = ""
    graph_encoder: str = "BAAI/bge-large-en-v1.5"  # of entities' names; empty = tf-idf | sec. 3.2.1
    matches: int = 5                # entities that entity_matcher shows | app. A
    max_edges: int = 60             # edges node_info shows; first those that share words with the question
    max_words: int = 2000           # words of a tool's reply
    max_rounds: int = 7             # turns per question, with the answer | sec. 4.1.1
    max_turn: int = 3000            # tokens of one turn | sec. 3.1
    max_train_turn: int = 1024      # in training, where it is less than --max-turn | authors' code
    max_prompt: int = 4096          # tokens of the first prompt
    max_context: int = 32768        # tokens of prompt, turns and tools' replies
    curve_questions: int = 512      # of an evaluation between steps (--eval-every), the same ones | Fig. 4
    temperature: float = 1.0        # of sampling in training; not printed
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code

    # ---- answers that need a judge

    # a file of answers to be judged: an eval_<set>.json, or a question, gold answer and answer per line
    # (Tables 2 and 7)
    score: str = ""
    judge: str = ""                 # the OpenAI-compatible endpoint that judges them
    judge_model: str = "deepseek-reasoner"      # the judge's name there | sec. 4.2.1

    # ---- questions (sec. 2)

    # training questions: a file that --stage synthesize made, or of such rows; empty = this run's own
    data: str = ""
    # who finds paths and words questions: an OpenAI-compatible chat endpoint (key: OPENAI_API_KEY), or
    # "template", which needs no model
    teacher: str = "template"
    teacher_model: str = "deepseek-reasoner"    # the teacher's name there | sec. 2
    per_graph: int = 1000           # training questions of each kind (1/2-hop, 3+) per graph; the test has .1
    train_hops: Literal["mix", "12", "3"] = "mix"   # hops of training questions: all, 1/2, 3+ | Table 3
    largest_ball: int = 400         # nodes around a seed node, at most | sec. 2
    unique: bool = True             # leave out questions whose relations lead to another node too | app. C

    # ---- PPO (stages 1 and 3)
    steps: int = 350                # PPO steps; of 1,000 planned, the one evaluated | authors' code
    questions_per_step: int = 256   # questions per step | authors' code
    group_size: int = 1             # trajectories per question | authors' code
    mini_batch: int = 256           # trajectories per update | authors' code
    epochs: int = 1                 # passes over a step's trajectories | ours, verl's
    lr: float = 1e-6                # of the policy | authors' code
    head_lr: float = 1e-5           # of the value head | authors' code
    lr_warmup: float = .05          # share of the steps in which the learning rates rise | authors' code
    clip: float = .2                # half width of the clip window | ours, verl's
    gamma: float = 1.0              # discount per token | ours, verl's
    lam: float = 1.0                # lambda of GAE | ours, verl's
    kl_coef: float = 1e-3           # cost per token of the log-ratio to the stage's start | authors' code
    value_coef: float = .5          # weight of the value loss | ours
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient

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
    max_length: int = 6144          # tokens; longer conversations are left out | sec. 3.4.2


# ---------------------------------------------------------------- prompt and rounds (app. B is at the end)

STOP = ("</tool_call>", "</answer>")
NO_THOUGHT = "<think>\n\n</think>\n\n"
NO_TAG = r"(?!</?(?:think|tool_call|answer)>)"
INSIDE = rf"\s*{NO_TAG}\S(?:{NO_TAG}.)*"     # of tags: text that is not blank, without another tag
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
    return chat.before_a_turn(tokenizer, NO_THOUGHT)[1]


def render_prompt(tokenizer, question, graph_type, think):
    """Token ids of the first prompt."""
    if chat.is_tiny(tokenizer):     # its chat template drops the system prompt, which names the graph
        question = f"{graph_type} : {question}"
    system = SYSTEM.replace("{graph_type}", graph_type)
    messages = [("system", system), ("user", chat.Foreign(question))]
    return chat.render_chat(tokenizer, messages) + opening(tokenizer, think)


def render_observation(tokenizer, turn_ids, text, think):
    """Ids behind a turn: a tool's reply as a user's message (sec. 3.1), and where the next turn begins."""
    shown = chat.Foreign(text)
    reply = chat.render_reply(tokenizer, turn_ids, "<tool_response>\n", shown, "\n</tool_response>")
    return reply + opening(tokenizer, think)


def read_round(text):
    """("call", (tool, arguments) or Fault), ("answer", text or None where it is blank), or ("", None) of a
    turn. Closed thoughts are not read; of several calls and answers the last one is.

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
        return "call", Fault(*fault.args)   # a fresh one, without the traceback
    return "call", (tool, {name: value.strip() for name, value in arguments.items()})


# ---------------------------------------------------------------- tool calls (app. B): read, never evaluated

ARGUMENTS = {  # a signature per tool: its arguments, in the order of positional ones
    ENTITY_MATCHER: ("node_name", "graph_type"),
    NODE_INFO: ("node_name", "graph_type"),
}
MAX_CALL = 4000  # characters


class Fault(Exception):
    """Why a text is no call: its name is counted, and the policy is told its detail."""

    def __init__(self, name, detail):
        super().__init__(name, detail)
        self.name = name
        self.detail = detail


def parse_tool_call(text):
    """(tool, {argument: text}) of a call in Python's or in JSON's style; raises Fault. The arguments stand in
    the order of the signature however they were written, so equal calls are equal.

    >>> parse_tool_call('node_info(graph_type="cs", node_name="Rastrigin Function")')
    ('node_info', {'node_name': 'Rastrigin Function', 'graph_type': 'cs'})
    """
    if len(text) > MAX_CALL:
        raise Fault("too long", f"a call may have {MAX_CALL:,} characters, this one has {len(text):,}")
    text = text.strip()
    if text.startswith(("`", "~~~")):  # a fenced or listed call is no right format: it is only told apart
        raise Fault("not a call", "expected a call without a code fence around it: leave out the ` signs")
    if text.startswith("["):
        raise Fault("not a call", "expected one call and not a list: leave out the square brackets")
    read = json_call if text.startswith("{") else python_call
    tool, given = read(text)
    signature = ARGUMENTS[tool]
    arguments = {}
    for name, value in given:
        if name not in signature:
            expected = ", ".join(signature)
            raise Fault("unknown argument", f"the arguments are {expected}, not {str(name)[:60]}")
        if name in arguments:
            raise Fault("repeated argument", f"{name} is given twice")
        if not isinstance(value, str):
            raise Fault("argument that is no text", f"{name} is no text in quotes")
        arguments[name] = value
    for name in signature:
        if name not in arguments:
            raise Fault("missing argument", f"{name} is missing")
    return tool, {name: arguments[name] for name in signature}


def python_call(text):
    """(tool, [(argument, value)]); the value is no text where the call has anything but a literal."""
    name = re.match(r"([^\W\d]\w*)\s*\(", text)
    if not name:
        raise Fault("not a call", f"expected {' or '.join(f'{tool}(…)' for tool in ARGUMENTS)}")
    tool = known_tool(name[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a name
            call = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        detail = ("not a call in Python's syntax: is a quote or bracket not closed, or a quote within a name "
                  "not escaped?")
        raise Fault("not a call", detail) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise Fault("not a call", "expected one call and nothing else")
    signature = ARGUMENTS[tool]
    if len(call.args) > len(signature):
        noun = "argument" if len(signature) == 1 else "arguments"
        raise Fault("unknown argument", f"expected {len(signature)} {noun}, not {len(call.args)}")
    given = list(zip(signature, call.args))
    given += [(keyword.arg, keyword.value) for keyword in call.keywords]
    return tool, [(name, getattr(node, "value", None)) for name, node in given]  # a literal's, else a node


def json_call(text):
    """As python_call. Llama and the authors' code call the arguments "parameters"; OpenAI's are JSON in a
    text, perhaps under "function"."""
    try:
        call = json.loads(text, strict=False, object_pairs_hook=once_each)
        call = call.get("function", call)
        given = call.get("arguments", call.get("parameters", {}))
        if "arguments" in call and "parameters" in call:
            raise Fault("repeated argument", "arguments and parameters are both given")
        if isinstance(given, str):
            given = json.loads(given, strict=False, object_pairs_hook=once_each)
        return known_tool(call["name"]), given.items()
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise Fault("not a call", 'expected one {"name": …, "arguments": {…}} and nothing else') from None


def once_each(pairs):
    """The dict of a JSON object. A key that is given twice is a Fault: json would keep its last value."""
    found = {}
    for name, value in pairs:
        if name in found:
            raise Fault("repeated argument", f"{name[:60]} is given twice")
        found[name] = value
    return found


def known_tool(name):
    if not isinstance(name, str) or name not in ARGUMENTS:
        raise Fault("unknown tool", f"there are the tools {' and '.join(ARGUMENTS)}, not {str(name)[:60]}")
    return name


def written(call):
    """A kg_tools.Call as the policy writes it."""
    name, graph = (json.dumps(text, ensure_ascii=False) for text in (call.node_name, call.graph_type))
    return f"<tool_call> {call.tool}(node_name={name}, graph_type={graph}) </tool_call>"


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
        if player.watch:
            player.watch(turn)
        room = cfg.max_context - len(context_ids(player.prompt_ids, turns))
        if not calls_a_tool or room < cfg.max_turn:
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
    """A trajectory's outcome. em (accuracy, sec. 4.1.2): answer == gold, after one_line() on both.
    searches: calls made, with one in the last round, which gets no reply.
    """
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
    """Rounds, calls and the answer of a trajectory's turns, counted and compared."""
    right_format = [round_is_right(turn.text, cfg.think, last=turn is turns[-1]) for turn in turns]
    rounds = [read_round(turn.text) for turn in turns]
    called = [action for kind, action in rounds if kind == "call"]
    readable = [action for action in called if not isinstance(action, Fault)]
    distinct = {(tool, *arguments.values()) for tool, arguments in readable}
    faults = Counter(action.name for action in called if isinstance(action, Fault))
    faults["wrong graph"] = sum(arguments["graph_type"] != question.type for _, arguments in readable)
    kind, answer = rounds[-1]
    if kind != "answer":
        answer = None
    problem = ""
    if not all(right_format):
        problem = "no answer" if answer is None else "form"
    said = one_line(answer or "")
    gold = one_line(question.answers[0])
    result = Result(
        answer,
        problem,
        searches=len(called),
        format=sum(right_format) / len(right_format),
        repetitions=len(readable) - len(distinct),
        pattern=pattern_of(called, answer),
        faults=dict(+faults),
    )
    if said:
        result.em = float(said == gold)     # the authors' code has `normalised` for it
        result.f1 = metrics.f1(said, gold)
        result.normalised = metrics.exact_match(said, gold)
    return result


def round_is_right(text, think, last):
    """Exactly one thought (--think off: none), then one readable call; in the last round alone the answer."""
    form = ROUND[think].fullmatch(text)
    if not form or (form[1] == "answer") != last:
        return False
    return last or not isinstance(read_round(text)[1], Fault)


def pattern_of(called, answer):
    """The tools of a trajectory in one word: m = entity_matcher, n = node_info, x = not readable; then a = an
    answer, - = none. The standard pattern (sec. 4.2.4) is m n n … a, as a regex mn+a."""
    letters = {ENTITY_MATCHER: "m", NODE_INFO: "n"}
    word = ""
    for action in called:
        word += "x" if isinstance(action, Fault) else letters[action[0]]
    if answer is None:
        return word + "-"
    return word + "a"


def rollouts(policy, tools, questions, cfg, *seed):
    """group_size trajectories per question, all played at once; each depends on its own seed alone."""
    search = rollout.BatchedSearch(tools)
    cfg = replace(cfg, max_turn=min(cfg.max_turn, cfg.max_train_turn))
    agents = []
    seeds = rollout.question_seeds(questions, cfg.seed, *seed)
    for q, own in zip(questions, seeds, strict=True):
        player = AGENT.player(policy, search, q, cfg, own, cfg.temperature)
        agents += [play(player, q, f"chain{k}") for k in range(cfg.group_size)]
    return rollout.run_agents(agents, policy.engine, search)


# ---------------------------------------------------------------- rewards (sec. 3.3.2, 3.5)

def first_reward(trajectory):
    """Stage 1: R_format (.1 + .9 R_result), R_format the share of the rounds in the right format, R_result =
    em."""
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
    """The policy, and V as a linear head on its hidden states: "both networks share an encoder". Saved as the
    policy's folder with value_head.safetensors, which is read back of the checkpoint `resumed`.

    If all rewards are equal, what is left of the advantages is the critic's error and the KL. Whitening
    scales that to 1, so the policy still moves."""

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
        weights = state_dict or self.state_dict()

        def of(part):
            return {name.removeprefix(part): w for name, w in weights.items() if name.startswith(part)}
        self.policy.save_pretrained(folder, state_dict=of("policy."))
        head = {name: value.cpu() for name, value in of("head.").items()}
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
            if reference is not None:
                with models.reference_weights(actor.policy, reference) as frozen:
                    b.ref_logprobs = models.token_logprobs(frozen, b, cfg.temperature)
    return batches


def assign_credit(batches, cfg):
    """Fills returns, and advantages that are whitened over all tokens of the step, other ranks' too. With
    gamma = lam = 1: A_t = (reward - KL cost from t on) - V(s_t), then whitened; returns are not."""
    for b in batches:
        rewards = token_rewards(b, cfg.kl_coef)
        b.advantages, b.returns = gae(rewards, b.values, b.response_mask, cfg.gamma, cfg.lam)
    advantages = distributed.of_all_ranks(b.advantages[b.response_mask] for b in batches if b.weight)
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
    policy_loss = -(objective * response_mask).sum() / num_tokens
    squares = torch.where(response_mask, (values - returns) ** 2, 0.0).sum()
    too_high = (ratio > 1 + clip) & (advantages > 0)    # where clip decides, the gradient is 0
    too_low = (ratio < 1 - clip) & (advantages < 0)
    stats = training.loss_stats(log_ratio, too_high | too_low, response_mask, ratio)
    stats["value_sum"] = float(squares.detach())
    return policy_loss, squares / num_tokens, stats


UNGROUPED = {key: metric for key, metric in RATIO.items() if key != "rollout/flat_groups"}
METRICS = STEP | ROLLOUT | UPDATE | UNGROUPED | calls.CALLS


def train(run, stage, policy, initial, task):
    """PPO with the reward of stage 1 or 3, and a critic that begins at 0 in both. initial: the weights the
    stage began with, for the KL."""
    cfg = run.cfg
    actor = ActorCritic(policy.model, run.folder.start)
    reference = models.load_reference(policy.model, initial, cfg.lora) if cfg.kl_coef else None
    optimizer = training.make_optimizer(actor.policy, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    optimizer.add_param_group({"params": actor.head.parameters(), "lr": cfg.head_lr, "weight_decay": 0.0})
    learner = replace(policy, model=actor)  # saved in checkpoints
    for step, row in run.steps(learner, optimizer, cfg.steps, label=f"{stage} | "):
        training.raise_lr(optimizer, step, cfg.lr_warmup, cfg.steps)  # the policy's and the head's

        # 1. sample
        order = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(task.questions, step, cfg.questions_per_step, order)
        with run.sampling(policy, row):
            trajectories = rollouts(policy, task.retriever, questions, cfg, stage, step)

        # 2. score whole trajectories; token_rewards puts this on their last sampled tokens
        for t in trajectories:
            t.reward = REWARD[stage](t)
        row |= calls.rollout_metrics(trajectories, task.retriever)

        # 3. log-probs and values of the weights that sampled, for each mini-batch of the shuffled
        # trajectories, all before the first update: advantages are whitened over the tokens of the whole step
        order = stable_seed(cfg.seed, "parts", step)
        shuffled = data.batch_of_step(trajectories, 1, len(trajectories), order)  # all of them, once
        parts = [shuffled[i:i + cfg.mini_batch] for i in range(0, len(shuffled), cfg.mini_batch)]
        with timed(row, "time/old_logprobs"):
            prepared = [batches_of(actor, reference, part, cfg) for part in parts]

        # 4. credit, per sampled token: tools' replies have mask 0 in GAE, whitening and both losses
        everything = [b for batches in prepared for b in batches]
        assign_credit(everything, cfg)
        row |= calls.critic_metrics(everything)
        credit = calls.credit_of(everything, cfg.gamma, cfg.lam)
        row["sample"] = calls.sample_record(trajectories, questions, step, cfg.group_size, turn_label, credit)

        # 5. an update for each mini-batch
        meter = training.Meter(everything, cfg.sampler_correction, cfg.epochs)
        for part, batches in cfg.epochs * list(zip(parts, prepared, strict=True)):
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
            norm = training.clip_gradient(actor, cfg.grad_clip)
            if meter.end_update(norm):  # else nothing is learned from this mini-batch
                optimizer.step()
            optimizer.zero_grad()
        row |= calls.update_metrics(meter)


# ---------------------------------------------------------------- stage 2: rows to learn from (sec. 3.4)

def sampled_rows(cfg, policy, task, file):
    """(a) ShareGPT rows of stage 1's trajectories with reward 1, one per question, played at training's
    temperature and turn limit. file: keeps what became of each question."""
    rng = random.Random(stable_seed(cfg.seed, "sft"))
    questions = rng.sample(task.questions, len(task.questions))
    one_each = replace(cfg, group_size=1)
    kept = graph_questions.SampledRows(file)
    policy.engine.sync(policy.model)
    for batch in kept.batches(questions, cfg.sft_sampled):
        for t, q in zip(rollouts(policy, task.retriever, batch, one_each, "sft"), batch, strict=True):
            row = None
            if t.info.em == 1 and not t.info.problem:
                row = sampled_row(t, q)
            kept.add(q, row)
    policy.engine.sleep()
    return kept.of(questions)[:cfg.sft_sampled]


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
                acts = [*map(written, planned), f"<answer> {question.answers[0]} </answer>"]
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
    tools = [ENTITY_MATCHER] + [NODE_INFO] * len(nodes)
    pairs = zip(tools, [nodes[0], *nodes], strict=True)
    return [Call(tool, node, question.type, question.question) for tool, node in pairs]


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
    said[0] = with_fillers(rng, said[0])
    return [*said, with_fillers(rng, known, rng.choice(ENDS))]


def with_fillers(rng, *parts):
    """A thought nearly twice as long as a call: what matters, and one or two fillers around it."""
    said = [part for part in parts if part]
    count = 1
    if len(said) < 2 or rng.random() < .5:
        count = 2
    for number, filler in enumerate(rng.sample(FILLERS, count)):
        said.insert(number * len(said), filler)
    return " ".join(said)


def path_is_shown(question, planned, replies):
    """Whether each reply has the next call's name, the last one the answer. If truncation (--max-edges,
    --max-words) hid a name, the row would teach the model to guess it."""
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
        return graph_questions.read_conversations(cfg.sft_data, task.evaluated)
    folder = folder_of(cfg, "sft-data")
    file = folder / "sharegpt.jsonl"
    samples = cfg.sft_sampled and not file.exists()
    if samples:
        weights = left_by(cfg, "omne_r1", "stage1", "--stage sft (--sft-sampled)", called="ppo")
    distributed.once(graph_questions.begin_conversations, cfg, folder)
    if not file.exists():
        task = replace(task, questions=[q for q in task.questions if has_hops(q, cfg.train_hops)])
        rows = []
        if samples:
            policy = Run(cfg).policy(weights, trains=False)
            rows = sampled_rows(replace(cfg, think="on"), policy, task, folder / "sampled.jsonl")

        def write():
            graph_questions.write_conversations(folder, rows + template_rows(cfg, task))
        distributed.once(write)
    return graph_questions.read_conversations(file, task.evaluated)


# ---------------------------------------------------------------- stage 2: Algorithm 1

@dataclass
class Taught(Outcome):
    source: str = ""            # where the conversation is from: "sampled", "template" or a file's word


def conversation_of(tokenizer, row, think, apart=True):
    """The Trajectory that a ShareGPT row teaches. Without thoughts it is the same row, stripped."""
    prompt_ids = render_prompt(tokenizer, row["question"], row["graph_type"], think)
    turns = []
    for message in row["conversations"][1:]:
        if message["from"] == "gpt":
            text = message["value"]
            if think == "off":
                text = THOUGHT.sub("", text).strip()
            if not text:
                raise data.DataError(f"conversation {row['id']}: of a message of thoughts alone --think off "
                                     "has nothing left")
            ids = encode_turn(tokenizer, text, apart)
            turns.append(Turn(ids, [0.0] * len(ids), "", text))
        else:
            turn = turns[-1]
            turn.observation = message["value"]
            turn.observation_ids = render_observation(tokenizer, turn.ids, turn.observation, think)
    return Trajectory(row["id"], prompt_ids, turns, info=Taught(source=row.get("source", "")))


def encode_turn(tokenizer, text, apart=True):
    """Ids of a turn that somebody wrote: its tags are tags, and nothing else in it is. apart: tags are
    encoded by themselves, so that Algorithm 1 finds them also where a tokenizer has several tokens for one.
    """
    parts = re.split(r"(</?(?:think|tool_call|answer)>)", text)
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


def sft_weights(batch, tags, weight):
    """The weights of what is learned, (B, T), 0 elsewhere. tags: ids of <think> and </think>."""
    labels = torch.where(batch.response_mask, batch.input_ids, -100)
    return torch.where(batch.response_mask, think_weights(labels, *tags, weight), 0.0)


def weighted_loss(logprobs, weights, total):
    """Algorithm 1, lines 16 to 30: sum of w (-log p) / total, of (B, T) with weights 0 where nothing is
    learned. total: the sum of the weights of all that is averaged over, of which this may be a part; at most
    1e-8 gives 0."""
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


UPDATES_PER_STEP = 25  # of stage 2, in one line of metrics
SFT_METRICS = STEP | UPDATE | calls.WEIGHTED


def train_sft(run, policy, examples):
    """Stage 2: sft_epochs over the conversations, one cosine over all of it."""
    cfg, model = run.cfg, policy.model
    tags = [chat.encode(policy.tokenizer, tag)[1] for tag in ("<think>", "</think>")]
    peak, warmup = cfg.sft_full_lr, .01
    if cfg.sft_lora:
        peak, warmup = cfg.sft_lr, .1
    optimizer = training.make_optimizer(model, peak, cfg.weight_decay, kind=cfg.optimizer)
    updates = -(-len(examples) * cfg.sft_epochs // cfg.sft_batch)
    for step, row in run.steps(policy, optimizer, -(-updates // UPDATES_PER_STEP), label="sft | "):
        meter = training.Meter()
        for number in range((step - 1) * UPDATES_PER_STEP, min(step * UPDATES_PER_STEP, updates)):
            # 1. some conversations, and their rate
            order = stable_seed(cfg.seed, "sft order")
            chosen = data.batch_of_step(examples, number + 1, cfg.sft_batch, order)
            row["train/lr"] = training.cosine_lr(number, updates, peak, warmup=round(warmup * updates))
            training.set_lr(optimizer, row["train/lr"])

            # 2. the update: a weighted mean over each conversation (a forward pass of the paper), then the
            # mean of all conversations of the update, on all ranks: its divisor is their number
            for b in training.collate_parts(model, chosen, cfg.micro_tokens, cfg.share_prefixes):
                weights = sft_weights(b, tags, cfg.think_weight)                    # (B, T), 0 outside turns
                shares = weights / weights.sum(1, keepdim=True).clamp(min=1e-8)     # each row sums to 1
                loss = weighted_sft_loss(model, b, shares, len(chosen))
                (loss * b.weight).backward()  # weight 0: another rank's batch, here only to keep step
                stats = {"tokens": int(b.response_mask.sum()), "weight": float(weights.sum())}
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model, cfg.grad_clip)
            if meter.end_update(norm):  # else loss or gradient is not a number: no update
                optimizer.step()
            optimizer.zero_grad()
        row |= calls.update_metrics(meter)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, task, cfg, progress):
    """One trajectory per question. Returns (rows, summary)."""
    prediction = partial(calls.prediction, label=turn_label)
    rows, summary = AGENT.evaluate(policy, task, cfg, progress, prediction, calls.EVALUATED)
    return rows, summary | calls.patterns_and_faults(rows)


# ---------------------------------------------------------------- main

TRAINS = ("ppo", "sft", "rl")
NAMED = {"on": "think", "off": "no-think"}  # --think, as a folder's name has it
FREE = ("stage", "curve_questions")  # --resume may go on with others

# Table 8. label of folder and row: (what the stage does, with thoughts or without)
STAGES = {
    "base": ("eval", "on"),
    "stage1": ("ppo", "on"),
    "sft-think": ("sft", "on"),
    "sft-no-think": ("sft", "off"),
    "rl-think": ("rl", "on"),
    "rl-no-think": ("rl", "off"),
}


def stages_of(cfg):
    """{label: (what the stage does, settings)} of --stage, in order."""
    sft, rl = f"sft-{NAMED[cfg.think]}", f"rl-{NAMED[cfg.think]}"
    direct = {"on": "direct", "off": "direct-no-think"}[cfg.think]
    labels = {
        "synthesize": (),   # the questions are made before any stage
        "three": ("base", "stage1", sft, rl),
        "all": tuple(STAGES),
        "ppo": ("stage1",),
        "sft": (sft,),
        "rl": (rl,),
        "direct": (direct,),
        "eval": ("eval",),
    }
    stages = {}
    for label in labels[cfg.stage]:
        kind, think = cfg.stage, cfg.think
        if cfg.stage in ("three", "all"):
            kind, think = STAGES[label]
        settings = replace(cfg, think=think)
        if cfg.sft_lora == "auto":
            settings.sft_lora = {"on": 8, "off": 0}[think]  # sec. 3.5
        stages[label] = kind, settings
    return stages


def folder_of(cfg, name):
    """Where a stage of this run is, or what it makes."""
    return Path(cfg.out) / "omne_r1" / f"{cfg.name}-{name}"


@program()
def main(argv=None):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    cfg = parse_args(argv)
    if cfg.score:
        from common.of_omne.judge import score_answers
        return score_answers(cfg.score, cfg.judge, cfg.judge_model)
    if cfg.ask:
        run = Run(cfg, "omne_r1")
        evaluated = frozenset()
        if cfg.warmup_data:  # as the run that was warmed up
            evaluated = graph_questions.load(cfg, folder_of(cfg, "questions"))[1][0].evaluated
        tools = graph_questions.load_tools(cfg)
        question = graph_questions.asked(cfg.ask, tools.graphs)
        return AGENT.ask(run, start_weights(cfg, "eval", evaluated), tools, question)
    asked, runs = stages_of(cfg), []
    for name, (kind, settings) in asked.items():
        table = SFT_METRICS if kind == "sft" else METRICS
        runs.append(Run(settings, "omne_r1", table, name, FREE, saves=kind in TRAINS))
    if cfg.stage == "rl" and not cfg.checkpoint:
        left_by_sft(cfg)  # refuses where stage 2 is missing
    task, evals = distributed.first(graph_questions.load, cfg, folder_of(cfg, "questions"))
    tell(cfg, cfg.steps)  # what will happen
    for run in runs:
        run_stage(run, asked[run.name][0], task, evals)
    from common import ladder
    distributed.once(ladder.show_stages, "omne_r1", Path(cfg.out) / "omne_r1" / cfg.name, list(asked))


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
        examples = sft_rows(cfg, task)
    # a reference in memory; with adapters it is the base with them off
    frozen = int(kind != "sft" and cfg.kl_coef > 0 and not lora)
    trains = kind in TRAINS
    policy = run.policy(folder.start or initial, trains, frozen, lora=lora)
    evaluator = evaluate_directly if kind == "direct" else evaluate
    task, *evals = AGENT.within_limit(policy, [task, *evals], cfg)
    fewer = graph_questions.fewer(evals, cfg.curve_questions)  # of each set, between steps
    with run.stage(f"Omne-R1 {cfg.name}: {run.name}", policy, fewer, evaluator):
        if trains and cfg.eval_every and not folder.start:
            run.evaluate("_before")
        if kind == "sft":
            learned = [conversation_of(policy.tokenizer, row, cfg.think) for row in examples]
            learned = calls.that_fit(learned, cfg.max_length)
            calls.keep_learned(folder, learned, turn_label)
            train_sft(run, policy, learned)
        elif trains:
            asked = [q for q in task.questions if has_hops(q, cfg.train_hops)]
            if not asked:
                raise data.DataError(f"--train-hops {cfg.train_hops}: no training question has so many")
            train(run, kind, policy, initial, replace(task, questions=asked))
        run.evaluate(evals=evals, initial=run.name == "base")


def start_weights(cfg, kind, evaluated=frozenset()):
    """A folder or hub id: of stages 1 and 2 the base, of stage 3 what stage 2 left. Adapters are folded into
    the model that they belong to. evaluated: fingerprints of the questions that a warm-up leaves out."""
    if kind == "rl" and not (cfg.checkpoint and cfg.stage == "rl"):  # --stage rl --checkpoint begins there
        source = left_by_sft(cfg)
    else:
        source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
        if cfg.warmup_data:
            source = warmed_up(cfg, source, evaluated)
        source = checkpoint.find(source) or source
    return distributed.first(models.folded, source, folder_of(cfg, "merged"))


def left_by_sft(cfg):
    """The checkpoint of stage 2 that stage 3 goes on from."""
    return left_by(cfg, "omne_r1", f"sft-{NAMED[cfg.think]}", "--stage rl", called="sft")


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    cfg = flags.parse("omne_r1", Config, __doc__, argv, ends_world=("--model", "--graph"))
    if cfg.eval_only and cfg.stage != "direct":
        cfg = replace(cfg, stage="eval")
    cfg = graph_questions.check(replace(cfg, eval_only=cfg.stage in ("eval", "direct")))
    graphs = [Path(graph.partition("=")[0]).stem for graph in cfg.graph.split(",")]
    return replace(cfg, name=cfg.name or flags.run_name(cfg, *graphs))


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
    thoughts; em = 1 only if it equals the gold answer."""
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
    gold = question.answers[0]
    info = Result(said, em=float(said == gold.strip()), f1=metrics.f1(said, gold),
                  normalised=metrics.exact_match(said, gold))
    return Trajectory(question.id, player.prompt_ids, [turn], info.em, info=info)


def evaluate_directly(policy, task, cfg, progress):
    """As evaluate. --score eval_<set>.json has a judge say which of the answers are right."""
    agent = Agent("omne_r1", answer_directly, bare_prompt)
    return agent.evaluate(policy, task, cfg, progress, calls.direct_prediction, calls.DIRECT)


# The agent, as --ask, --collect and evaluations need it (common/agent.py)
AGENT = Agent(
    "omne_r1",
    play,
    prompt=lambda tokenizer, question, cfg: render_prompt(
        tokenizer, question.question, question.type, cfg.think),
    rows_of=lambda trajectory, question: [sampled_row(trajectory, question)],
)


# ---------------------------------------------------------------- warm-up

def warmed_up(cfg, source, evaluated=frozenset()):
    """Folder of `source` after --warmup-data: rows as stage 2 writes and reads them. (Questions whose paths
    are known become such rows there: --stage sft --sft-sampled 0.)"""
    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    examples = []
    for file in cfg.warmup_data.split(","):
        for row in graph_questions.read_conversations(file, evaluated):
            examples.append([conversation_of(tokenizer, row, cfg.think, apart=False)])
    return warmup.warmed_up(cfg, "omne_r1", source, examples)


# ---------------------------------------------------------------- the tiny policy of the embedded world

def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from: one that comes
    with the project (common/world/start), or one made here and cached."""
    from common.of_omne import world_graphs
    endless = replace(cfg, think="on", max_rounds=99, max_context=99_999)

    def agent(policy, search, question):
        return play(AGENT.player(policy, search, question, endless, 0, 1.0), question, "demonstration")

    return world_graphs.tiny_policy(cfg, agent, written, FILLERS, [*PLANS, *FOUND, *STARTS, *ENDS])


if __name__ == "__main__":
    main()
