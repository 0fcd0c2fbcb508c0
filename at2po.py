"""AT2PO: Agentic Turn-based Policy Optimization via Tree Search (arXiv 2601.04767).

The policy answers a question in turns: it thinks and searches, reads the result, and so on until it answers. One tree of
such trajectories is grown per question: M chains first, then L rounds that regenerate the N turns the policy was least
sure of. Outcome rewards at the leaves are passed up the tree, which gives each turn a value of its own, and the update
uses one importance ratio and one clip decision a turn: coarser than a token (GRPO), finer than a sequence (GSPO).

    Eq 2    turn entropy                  rollout.Turn.entropy
    Alg 1   tree                          grow_tree, choose_nodes, play
    Eq 3    values, advantages            leaf_values, node_value, assign_advantages
    Eq 4-5, 10-11   ATPO loss             atpo_loss   (GRPO, Eq 6-7: grpo_loss; GSPO, Eq 8-9: atpo_loss of one turn)
    Eq 13   turn entropy of the update    turn_entropy
    Eq 14-16   reward                     parse_response, score

Where the paper and the authors' code differ, or the paper is silent (decided for its words where it has any, else for the code):
                              paper                     code                          ours (flag)
    bad format earns          0                         -1                            0 (--bad-format-reward)
    evaluation                silent                    greedy; EM without the        the code's; EM in valid format beside it
                                                        format gate                   (--eval-temperature)
    averages                  weighted by questions     weighted by questions         weighted by questions
    checkpoint reported       best of 240 steps         best of 240 steps             the last
    prompt                    Figure 7                  one system message, the       the code's (--prompt-form chat: system
                                                        question with "?" in it       and user message)
    \boxed in the prompt      \boxed                    a backspace                   \boxed
    an answer ends            silent                    at the end of sequence        the code's (--stop-at-answer: at </answer>,
                                                                                      so no end of sequence is learned)
    text after </answer>      silent                    valid                         valid
    order of tags, words      pairs                     counts of tags                think tags alternate; last answer block
    a result                  Page i: "T" text          1,000 characters a page,      the code's (--max-passage), a tag or token
                                                        each text once, " stripped    in it is broken up
                                                        from queries
    no room for a result      silent                    its end is cut                dropped, the trajectory ends
    the search limit          6 calls                   told at every further call;   told once, an eighth search ends it;
                                                        bad format                    bad format (--limit-message-valid)
    penalty counts            times branched            siblings                      times branched (--penalty-count)
    answer turns expanded     silent                    never                         never (--expand-answers)
    the root                  has no action             a candidate of entropy 0:     the code's, its penalty too: it counts the
                                                        a fresh chain                 chains that the root has, less one
    the turn told of          silent                    never expanded                expanded like others
    the limit
    all chains answered       silent                    N fresh chains a round        the code's: always M + L N leaves
    random expansion          silent                    without replacement           the code's
    a turn                    an action                 a run of ones in the mask     turn_ids, written by the rollout
    std of rewards            GRPO's                    population in a tree, sample  the code's (--std)
                                                        in Table 1's first row
    GRPO's mean               sequences (Eq 6)          all tokens                    sequences (--grpo-mean)
    GRPO's dual clip          none                      3                             none (--dual-clip)
    flat trees                silent                    kept                          left out, their KL term too
    token budget              "comparable": 16 B        the same steps for all        the baseline's tokens (--token-budget auto):
                                                                                      a tree costs 19.6 chains, not 16

Trees are independent: each expands as soon as its own leaves are in, so the sampler does not idle between rounds (sec. 7).

    python at2po.py                               the embedded world, two CPU cores, under ten minutes
    python at2po.py --loss grpo                   the GRPO baseline (chains, group 16) on the same token budget
    python at2po.py --model Qwen/Qwen3-4B         the paper's setting; one large GPU, a search server, not run (see README)
    python at2po.py --eval-only --checkpoint Qwen/Qwen3-4B --data musique-dev        ReAct: no training
    python at2po.py --ask "Who is the spouse of the composer of the film Empty Ocean?"
Numbers reached: see the README's table. The paper's own (Qwen3-4B, 8 GPUs, 21M passages) were not measured.
"""

import asyncio
import itertools
import math
import random
import re
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from common import process  # first: torch reads thread settings once

# isort: split
import torch
import transformers

from common import chat, data, flags, guards, metrics, report, retriever, rollout, task, training, world
from common.engine import TransformersEngine
from common.rollout import Trajectory, Turn, stable_seed

# ---------------------------------------------------------------- config

@dataclass
class Config:
    """Defaults are the paper's where a model is given, the embedded world's (WORLD) where none is."""

    # ---- model and data
    model: str = ""                 # folder or hub id; empty = the tiny policy of the embedded world
    checkpoint: str = ""            # weights to start from or to evaluate: a run's checkpoint/, any folder or hub id
    data: str = "hotpotqa"          # training questions: file, hub name, or "world" (nq = the single-hop policy's) | sec. 5.1
    eval_data: str = ""             # evaluation sets with commas; empty = the paper's seven, or a file's last tenth
    corpus: str = ""                # JSONL with id, contents; or "contexts" = pooled from the questions
    # bm25, dense:MODEL[@INDEX] or http://HOST:PORT; empty = bm25 with a corpus, else http://127.0.0.1:8000
    retriever: str = ""
    search_timeout: float = 60.0    # seconds a request to a search server may take
    search_retries: int = 12        # further tries while a search server does not answer; 12 = some two minutes
    limit: int = 0                  # first so many training questions; 0 = all
    eval_limit: int = 0             # first so many questions of each evaluation set; 0 = all
    skip_bad: bool = False          # leave malformed records and overlong prompts out, and count them

    # ---- embedded world
    world_size: float = 1.0         # 1.0 = about 1,000 entities
    flaw_rate: float = .6           # share of flawed demonstrations in the last fifth of the warm-up, .1 before
    warmup_steps: int = 900         # supervised steps of 8 demonstrations that make the tiny policy

    # ---- rollout
    rollout: Literal["auto", "tree", "chains"] = "auto"  # auto = chains for GRPO and GSPO, a tree otherwise
    chains: int = 10                # M, chains a tree begins with | sec. 5.1
    expand: int = 6                 # N, turns regenerated a round | sec. 5.1
    rounds: int = 2                 # L, rounds of expansion | sec. 5.1
    group_size: int = 16            # chains a question for the baselines | sec. 5.1
    expansion: Literal["entropy", "random"] = "entropy"  # which turns are expanded; random = Table 1's ablation
    branch_penalty: float = .05     # taken off a turn's entropy for each time it was branched | authors' code
    penalty_count: Literal["resamples", "siblings"] = "resamples"  # what the penalty counts; siblings = authors' code
    expand_answers: bool = False    # expand answer turns too
    top_k: int = 3                  # passages a search | Table 3
    max_searches: int = 6           # searches a trajectory | sec. 5.1
    max_passage: int = 1000         # characters of a passage that are read | authors' code
    max_prompt: int = 2000          # tokens of the prompt | Table 3
    max_response: int = 6192        # tokens of the response, observations included | Table 3
    prompt_form: Literal["system", "chat"] = "system"  # the question inside the system message, or in a user message
    stop_at_answer: bool = False    # stop at </answer>; without it a turn ends at the end of sequence, which is trained
    limit_message_valid: bool = False  # a trajectory told that its searches are used up may still be in valid format
    temperature: float = 1.0        # of sampling in training; top-p 1, no top-k | authors' code
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code
    max_batch: int = 256            # sequences decoded together, at most
    cache_gb: float = 8.0           # keys and values of running sequences; as much again for finished turns

    # ---- reward, credit and loss
    bad_format_reward: float = 0.0  # what a bad format earns; -1 in the authors' code | Eq 16
    std: Literal["auto", "population", "sample"] = "auto"  # of rewards; auto = population in a tree, sample over chains
    credit: Literal["turn", "outcome"] = "turn"  # a turn's own value, or its leaf's for every turn (Table 1)
    value: Literal["child-weighted", "child-mean", "leaf-mean"] = "child-weighted"  # of inner nodes (Table 2) | Eq 3
    advantage: Literal["value", "td", "global", "combined"] = "value"  # from values (Table 2) | Eq 3
    loss: Literal["atpo", "grpo", "gspo"] = "atpo"  # turn, token or sequence ratios; with grpo and gspo their own defaults
    clip_low: float = 3e-3          # 1 - lower end of the clip window | sec. 5.1
    clip_high: float = 4e-3         # upper end - 1 | sec. 5.1
    kl_coef: float = 0.0            # k3 estimate of the KL to the initial policy; --loss grpo alone
    grpo_mean: Literal["sequence", "token"] = "sequence"  # GRPO's mean: of sequences, or of all tokens (authors' code) | Eq 6
    dual_clip: float = 0.0          # GRPO's bound where the advantage is negative; 3 in the authors' code, 0 = none
    flip_advantages: bool = False   # a sanity check that must not learn

    # ---- update
    steps: int = 240                # training steps | sec. 5.1
    # stop when so many tokens were sampled; auto = what the baseline's chains would have sampled in --steps; 0 = no limit
    token_budget: Literal["auto"] | int = "auto"
    questions_per_step: int = 64    # questions a step | Table 3
    mini_batch: int = 8             # questions an update | Table 3
    lr: float = 1e-6                # learning rate, constant | Table 3
    weight_decay: float = .01       # of matrices | authors' code
    grad_clip: float = 1.0          # largest norm of the gradient | authors' code
    micro_tokens: int = 16384       # packed tokens a forward pass; memory only
    pack_tokens: int = 16384        # tokens a pack of shared prefixes; memory only
    share_prefixes: Literal["on", "off"] = "on"   # compute shared starts of trajectories once; same results
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton log-probs; auto = where there is CUDA
    lora: int = 0                   # rank of adapters; 0 = full weights
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations; auto = on a GPU; memory only

    # ---- running
    eval_every: int = 0             # steps between evaluations; 0 = before and after only
    save_every: int = 10            # steps between checkpoints; 0 = at the end only
    show_every: int = 10            # steps between printed trajectories; 0 = none
    log: str = ""                   # trackers beside the files: tensorboard, wandb (offline), or both with a comma
    seed: int = 0                   # of everything that is random
    name: str = ""                  # of the run folder runs/at2po/<name>; empty = loss and seed
    out: str = "runs"               # where run folders go
    resume: bool = False            # go on with the run of this name
    eval_only: bool = False         # evaluate --checkpoint or --model, no training
    ask: str = ""                   # answer one question and show the trajectory


# What differs in the embedded world: a half-million-weight policy on two cores. Ours; the learning rate was chosen on the dev split,
# from 3e-5, 1e-4, 3e-4 and 1e-3, for ATPO and GRPO alike (results/at2po/selection.md).
WORLD = dict(data="world", retriever="bm25", top_k=1, max_response=700, prompt_form="chat", stop_at_answer=True, eval_temperature=1.0,
             eval_limit=400, steps=60, token_budget=550_000, questions_per_step=16, mini_batch=4, lr=1e-4, clip_low=.03, clip_high=.04,
             micro_tokens=8192, pack_tokens=512, max_batch=384, save_every=1, eval_every=10)
BASELINES = {"grpo": dict(clip_low=.2, clip_high=.2, kl_coef=1e-3), "gspo": dict(clip_low=3e-4, clip_high=4e-4)}  # App. B.4
MULTI_HOP = ("hotpotqa-dev", "2wiki-dev", "musique-dev", "bamboogle")  # sec. 5.1
SINGLE_HOP = ("nq", "triviaqa", "popqa")                               # trained on NQ: --data nq
PAPER_EVAL = ",".join(MULTI_HOP + SINGLE_HOP)
AVERAGES = {"multi-hop average (weighted by questions)": MULTI_HOP, "single-hop average (weighted by questions)": SINGLE_HOP}


# ---------------------------------------------------------------- prompts and tags

THINK, SEARCH, RESULT, ANSWER = ((f"<{t}>", f"</{t}>") for t in ("think", "search", "result", "answer"))

# Figure 7, as in the authors' data script
SYSTEM_PROMPT = """You are a helpful assistant that can solve the given question step by step with the help of the wikipedia search tool. \
Given a question, you need to first think about the reasoning process in the mind and then provide the answer. \
During thinking, you can invoke the wikipedia search tool to search for fact information about specific topics if needed. \
You can search as many times as your want. \
The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags respectively, \
and the search query and result are enclosed within <search> </search> and <result> </result> tags respectively. \
For example, <think> This is the reasoning process. </think> <search> search query here </search> <result> search result here </result>  \
<think> This is the reasoning process. </think> <answer> The final answer is \\[ \\boxed{answer here} \\] </answer>. \
In the last part of the answer, the final exact answer is enclosed within \\boxed{} with latex format."""
LIMIT_MESSAGE = ("I have reached the tool call limit and cannot make further tool calls. Let me provide the final answer based on the "
                 "information I have gathered so far.")  # authors' code


def render_prompt(tokenizer, question, form="chat"):
    """Token ids of the first prompt; later turns append ids. form "system": the authors', one system message with the question."""
    if form == "system":
        asked = question.strip() if question.strip().endswith("?") else question.strip() + "?"
        return chat.render_chat(tokenizer, [("system", [f"{SYSTEM_PROMPT}\nuser\n", chat.Foreign(asked)])])
    return chat.render_chat(tokenizer, [("system", SYSTEM_PROMPT), ("user", [chat.Foreign(question)])])


def render_passages(passages, max_passage=1000):
    """The text between the result tags: each text once, cut to `max_passage` characters.

    >>> render_passages([retriever.Passage("7", "Silent Harbor", "A film."), retriever.Passage("8", "Silent Harbor", "A film.")])
    'Page 1: "Silent Harbor"\\nA film.'
    """
    once = {(p.title, p.text): p for p in passages}.values()
    pages = [f'Page {i}: "{p.title[:max_passage]}"\n{p.text[:max_passage]}' for i, p in enumerate(once, 1)]
    return "\n".join(pages) or "No passage found."


def render_observation(tokenizer, passages, max_passage=1000):
    """(text, ids) of a search result; no passage can write a tag or a token of its own into it."""
    return chat.encode(tokenizer, f" {RESULT[0]}\n", chat.Foreign(render_passages(passages, max_passage)), f"\n{RESULT[1]}")


# ---------------------------------------------------------------- the tiny policy of the embedded world

def render_demonstration(tokenizer, question, demo, index, top_k):
    """A demonstration of the world in this paper's tags, as a trajectory; results are what the retriever really returns."""
    turns, found = [], ""
    say = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for step in demo.steps:
        relation = world.SPOKEN.get(step.relation, step.relation)
        text = f"{THINK[0]} {found}now {relation} of {step.subject} {THINK[1]} {SEARCH[0]} {step.subject} {relation} {SEARCH[1]}"
        observation, ids = render_observation(tokenizer, index.search([f"{step.subject} {relation}"], top_k)[0])
        turns.append(Turn(say(text), [], SEARCH[1], text, ids, observation))
        found = f"found {relation} {step.found or 'nothing'} ; "
    final = f"{ANSWER[0]} {demo.answer} {ANSWER[1]}" if demo.flaw == "bad format" else f"{ANSWER[0]} \\boxed{{ {demo.answer} }} {ANSWER[1]}"
    text = f"{THINK[0]} {found}answer {THINK[1]} {final}"
    turns.append(Turn(say(text), [], ANSWER[1], text))
    for turn in turns:
        turn.logprobs = [0.0] * len(turn.ids)
    return Trajectory(question["_id"], render_prompt(tokenizer, question["question"]), turns)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from; made once, then cached."""
    words = "Page 1 2 3 now found nothing answer ;".split() + re.findall(r"\w+|[^\w\s]", LIMIT_MESSAGE)
    return task.tiny_policy(cfg, "at2po", words, [*THINK, *SEARCH, *RESULT, *ANSWER, "\\boxed{", "}"],
                            lambda *demonstration: [render_demonstration(*demonstration, cfg.top_k)], (render_observation, render_demonstration))


# ---------------------------------------------------------------- reward (Eq 14-16)

def boxed(text):
    """Content of the last \\boxed{…}, braces balanced; None if there is none.

    >>> boxed("so \\\\[ \\\\boxed{a {b} c} \\\\]")
    'a {b} c'
    """
    start = text.rfind("\\boxed{")
    depth = 0
    for i in range(start + 6, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7:i].strip()
    return None


def parse_response(turns, limit_message_valid=False):
    """(answer or None, problem or ""): reads what the policy sampled, never an observation (Eq 15).

    Valid: think tags paired and present, no result tag of its own, every turn but the last one search that got its result, the last
    one exactly one answer block with \\boxed{} inside. What follows the block (the rest of a token such as ">.") is no fault."""
    text = "".join(t.text for t in turns)
    answers = re.findall(re.escape(ANSWER[0]) + r"(.*?)" + re.escape(ANSWER[1]), text, re.DOTALL)
    answer = boxed(answers[-1]) if answers else None
    thoughts = re.findall(r"</?think>", text)
    if not thoughts or thoughts != list(THINK) * (len(thoughts) // 2):
        return answer, "think tags not paired"
    if RESULT[0] in text or RESULT[1] in text:
        return answer, "wrote a result itself"
    if [text.count(tag) for tag in ANSWER] != [1, 1] or [turns[-1].text.count(tag) for tag in ANSWER] != [1, 1]:
        return answer, "not exactly one answer block at the end"
    if any(t.text.count(SEARCH[0]) != 1 or t.text.count(SEARCH[1]) != 1 for t in turns[:-1]) or SEARCH[0] in turns[-1].text:
        return answer, "a search without its result"
    if not all(RESULT[0] in t.observation or limit_message_valid and LIMIT_MESSAGE in t.observation for t in turns[:-1]):
        return answer, "a search without its result"
    return (answer, "") if answer else (None, "no \\boxed{} in the answer")


def score(trajectory, question, cfg):
    """Fills reward and what explains it: EM if the format is valid, else bad_format_reward (Eq 16). em and f1 are those of the
    extracted answer whatever the format, as the authors evaluate; em_valid counts it in valid format alone."""
    answer, problem = parse_response(trajectory.turns, cfg.limit_message_valid)
    em = metrics.exact_match(answer, question.answers) if answer else 0.0
    em_valid = 0.0 if problem else em
    trajectory.reward = cfg.bad_format_reward if problem else em
    trajectory.info = {"answer": answer, "problem": problem, "em": em, "em_valid": em_valid,
                       "f1": metrics.f1(answer, question.answers) if answer else 0.0,
                       "searches": sum(RESULT[0] in t.observation for t in trajectory.turns)}
    return trajectory


def why(trajectory, question):
    """What led to the reward, in words: the format rule (Eq 15) and the strings compared (Eq 16)."""
    i = trajectory.info
    lines = [f"format (Eq 15): {i['problem'] or 'valid'}"]
    if i["answer"]:
        golds = " | ".join(metrics.normalize_answer(g) for g in question.answers)
        equal = "equal" if metrics.exact_match(i["answer"], question.answers) else "not equal"
        lines.append(f"exact match (Eq 16): {metrics.normalize_answer(i['answer'])!r} against {golds!r}: {equal}" + (", not counted" if i["problem"] else ""))
    return lines


# ---------------------------------------------------------------- rollout (Algorithm 1)

@dataclass(eq=False)
class Node:
    """One turn in the tree; the root holds the prompt. A path from the root to a leaf is a trajectory."""
    turn: Turn | None = None
    parent: "Node | None" = None
    path: str = ""                        # names the sample, for seeds
    children: list["Node"] = field(default_factory=list)
    done: bool = False                    # a leaf: answered, or cut off
    resamples: int = 0                    # times this turn was branched
    value: float = 0.0
    advantage: float = 0.0
    trajectory: Trajectory | None = None  # of a leaf

    def turns(self):
        return [] if self.turn is None else self.parent.turns() + [self.turn]

    def nodes(self):
        """This node and everything below it, in the order it was grown."""
        return [self] + [n for child in self.children for n in child.nodes()]

    def leaves(self):
        return [n for n in self.nodes() if n.done]


@dataclass
class Policy:
    """What a rollout needs: the engine, the tokenizer, and the search of a split."""
    engine: object
    tokenizer: object
    search: rollout.BatchedSearch


async def play(policy, prompt_ids, node, path, cfg, seed, temperature, watch=None):
    """From the state after `node` to the end: sample a turn, search, observe, and so on. Returns the leaf."""
    while True:
        turns = node.turns()
        context = prompt_ids + [i for t in turns for i in t.ids + t.observation_ids]
        room = cfg.max_response - (len(context) - len(prompt_ids))
        node = Node(None, node, path)
        node.parent.children.append(node)  # before anything is awaited: the order of siblings does not depend on who is done first
        stop = (SEARCH[1], ANSWER[1]) if cfg.stop_at_answer else (SEARCH[1],)
        g = await policy.engine.generate(context, stop=stop, max_tokens=room, temperature=temperature,
                                         seed=stable_seed(seed, path, len(turns)))
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, policy.tokenizer.decode(g.token_ids, skip_special_tokens=True))
        node.turn = turn
        query = re.findall(re.escape(SEARCH[0]) + r"(.*?)" + re.escape(SEARCH[1]), turn.text, re.DOTALL)
        if g.stop_reason == SEARCH[1] and query and len(turns) <= cfg.max_searches:
            if len(turns) == cfg.max_searches:  # one search too many: the environment says so, once
                turn.observation = f"\n{LIMIT_MESSAGE}\n"
                turn.observation_ids = policy.tokenizer(turn.observation, add_special_tokens=False)["input_ids"]
            else:
                passages = await policy.search(query[-1].replace('"', "").strip(), cfg.top_k)
                turn.observation, turn.observation_ids = render_observation(policy.tokenizer, passages, cfg.max_passage)
            node.done = len(g.token_ids) + len(turn.observation_ids) >= room
            if node.done:  # no room left to answer in: nobody reads the result
                turn.observation, turn.observation_ids = "", []
        else:
            node.done = True
        if watch:
            watch(turn)
        if node.done:
            return node


def choose_nodes(root, cfg, rng):
    """The N nodes to branch next: the most uncertain turns, or random ones. The root is one of them, with entropy 0: branching it is
    a fresh chain. Too few nodes: the best ones again (entropy), or drawn with replacement (random), as in the authors' code."""
    candidates = [root] + [n for n in root.nodes()[1:] if cfg.expand_answers or not n.done]
    if cfg.expansion == "random":
        return rng.sample(candidates, cfg.expand) if len(candidates) >= cfg.expand else rng.choices(candidates, k=cfg.expand)

    def certainty(node):
        if node is root:
            return cfg.branch_penalty * (len(root.children) - 1)
        branched = node.resamples if cfg.penalty_count == "resamples" else len(node.parent.children) - 1
        return cfg.branch_penalty * branched - node.turn.entropy
    ranked = sorted(candidates, key=certainty)
    return [ranked[i % len(ranked)] for i in range(cfg.expand)]


async def grow_tree(policy, question, prompt_ids, cfg, seed):
    """Algorithm 1, or a group of independent chains (a tree of one level) for the baselines. Returns the root."""
    root = Node()
    first = cfg.chains if cfg.rollout == "tree" else cfg.group_size
    await asyncio.gather(*(play(policy, prompt_ids, root, f"chain{m}", cfg, seed, cfg.temperature) for m in range(first)))
    for r in range(cfg.rounds if cfg.rollout == "tree" else 0):
        chosen = choose_nodes(root, cfg, random.Random(stable_seed(seed, "expand", r)))
        for node in chosen:
            node.resamples += 1
        starts = [root if node is root else node.parent for node in chosen]  # a turn is sampled anew from the state before it
        await asyncio.gather(*(play(policy, prompt_ids, start, f"{node.path}.{r}-{i}", cfg, seed, cfg.temperature)
                               for i, (start, node) in enumerate(zip(starts, chosen, strict=True))))
    for leaf in root.leaves():
        leaf.trajectory = score(Trajectory(question.id, prompt_ids, leaf.turns()), question, cfg)
    return root


def rollout_trees(policy, questions, cfg, step):
    """One tree a question, all grown at once; what they sample does not depend on who else is in the batch."""
    agents, seen = [], []
    for q in questions:
        again = ("again", seen.count(q.id)) if q.id in seen else ()  # a question drawn twice in a step gets two different trees
        agents.append(grow_tree(policy, q, render_prompt(policy.tokenizer, q.question, cfg.prompt_form), cfg,
                                stable_seed(cfg.seed, step, q.id, *again)))
        seen.append(q.id)
    return rollout.run_agents(agents, policy.engine, policy.search)


# ---------------------------------------------------------------- values and advantages (Eq 3, Table 2)

def leaf_values(rewards, sample_std=False):
    """(R - mean) / (std + 1e-6) over the leaves of a tree; GRPO divides by the sample std, the tree by the population's."""
    mean = sum(rewards) / len(rewards)
    var = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - sample_std)
    return [(r - mean) / (math.sqrt(var) + 1e-6) for r in rewards]


def node_value(node, rule):
    """Sets and returns V(n) from the children's values (Eq 3); leaves hold theirs."""
    if node.done:
        return node.value
    values = [node_value(c, rule) for c in node.children]
    if rule == "child-weighted":    # sum_c softmax_c(H(c)) V(c)
        weights = [math.exp(c.turn.entropy) for c in node.children]
        node.value = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    elif rule == "child-mean":
        node.value = sum(values) / len(values)
    else:                           # leaf-mean (TreeRL)
        leaves = node.leaves()
        node.value = sum(leaf.value for leaf in leaves) / len(leaves)
    return node.value


def assign_advantages(root, cfg):
    """A(n) for every turn of the tree. Returns False, leaving zeros, where all leaves have one reward: nothing to learn."""
    leaves = root.leaves()
    rewards = [leaf.trajectory.reward for leaf in leaves]
    if max(rewards) == min(rewards):
        return False
    for leaf, value in zip(leaves, leaf_values(rewards, sample_std=cfg.std == "sample"), strict=True):
        leaf.value = value
    node_value(root, cfg.value)
    for n in root.nodes()[1:]:
        td, above_root = n.value - n.parent.value, n.value - root.value
        n.advantage = {"value": n.value, "td": td, "global": above_root, "combined": td + above_root}[cfg.advantage]
    return True


def path_advantages(leaf, cfg):
    """One number a turn of the leaf's path: each turn's own (ours and the paper's), or the leaf's value for all (outcome)."""
    path = []
    node = leaf
    while node.turn is not None:
        path.insert(0, leaf.value if cfg.credit == "outcome" else node.advantage)
        node = node.parent
    return [-a for a in path] if cfg.flip_advantages else path


# ---------------------------------------------------------------- loss (Eq 4-11)

def turn_sums(x, response_mask, turn_ids):
    """Sums of x (B, T) over the sampled tokens of each turn, (B, K), and the number of those tokens."""
    K = int(turn_ids.max()) + 1
    index = turn_ids.clamp(min=0)
    mask = response_mask.to(x.dtype)
    zeros = x.new_zeros(x.shape[0], K)
    return zeros.scatter_add(1, index, x * mask), zeros.scatter_add(1, index, mask)


def atpo_loss(logprobs, old_logprobs, advantages, response_mask, turn_ids, clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """Eq 10-11. All (B, T); position t speaks of token t. GSPO (Eq 8-9) is the case where every sampled token has turn 0.

    num_sequences: of the whole mini-batch, where this is a part of it. kernels/turn_loss.py has the same in one step a turn."""
    check_shapes(logprobs, advantages, response_mask)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)               # (B, T)

    # Eq 11: s_k is one number a turn, the exponential of its mean log-ratio. Its value is detached, and the token's own
    # log-prob put back with value 0, so that the gradient of a token is s_k A_k times that of its log-prob.
    total, tokens = turn_sums(log_ratio.detach(), response_mask, turn_ids)             # (B, K)
    log_s = (total / tokens.clamp(min=1)).gather(1, turn_ids.clamp(min=0))             # (B, T)
    log_s = log_s + torch.where(response_mask, logprobs - logprobs.detach(), 0.0)
    s = log_s.clamp(max=10).exp()

    # Eq 10: the clipped objective, its mean over a sequence's tokens, then over sequences
    objective = torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)
    loss = sequence_mean(-objective, response_mask, num_sequences)

    too_high = (s > 1 + clip_high) & (advantages > 0)
    too_low = (s < 1 - clip_low) & (advantages < 0)
    return loss, loss_stats(log_ratio, too_high | too_low, response_mask, s)


def grpo_loss(logprobs, old_logprobs, advantages, response_mask, clip_low=.2, clip_high=.2, kl_coef=0.0, ref_logprobs=None,
              num_sequences=None, num_tokens=None, dual_clip=0.0):
    """Eq 6-7 with a ratio for each token, plus kl_coef times the k3 estimate of KL(pi || pi_ref). num_tokens: the mean is that of so
    many tokens (of the whole mini-batch), not of sequences. dual_clip: where A < 0, no token's term falls below dual_clip * A."""
    check_shapes(logprobs, advantages, response_mask)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip:
        objective = torch.where(advantages < 0, torch.maximum(objective, dual_clip * advantages), objective)
    if kl_coef:
        to_ref = torch.where(response_mask, ref_logprobs - logprobs, 0.0)
        objective = objective - kl_coef * (to_ref.exp() - to_ref - 1)
    loss = -(objective * response_mask).sum() / num_tokens if num_tokens else sequence_mean(-objective, response_mask, num_sequences)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return loss, loss_stats(log_ratio, too_high | too_low, response_mask, ratio)


def sequence_mean(x, response_mask, num_sequences=None):
    """(1 / sequences) sum_i (1 / |y_i|) sum_t x[i, t]; |y_i| = sampled tokens."""
    per_sequence = (x * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)
    return per_sequence.sum() / (num_sequences or len(x))


def check_shapes(logprobs, advantages, response_mask):
    """Says in words what a broadcast would hide."""
    if advantages.shape != logprobs.shape:
        raise ValueError(f"advantages {tuple(advantages.shape)}: one a token, {tuple(logprobs.shape)} like logprobs; "
                         "of one a sequence make advantages[:, None].expand_as(logprobs)")
    if not response_mask.any():
        raise ValueError("the policy sampled no token of this batch (response_mask is all 0): there is nothing to learn from")


def loss_stats(log_ratio, clipped, response_mask, ratio):
    """Sums over the sampled tokens of (B, T) tensors, to be added up over micro-batches, and the largest ratio."""
    log_ratio, clipped, ratio = (x.detach()[response_mask] for x in (log_ratio, clipped, ratio))  # (tokens,)
    return {"tokens": len(ratio), "clipped_tokens": int(clipped.sum()), "kl_sum": float(-log_ratio.sum()),
            "ratio_sum": float(ratio.sum()), "ratio_max": float(ratio.max())}


def turn_entropy(log_ratio, response_mask, turn_ids):
    """Eq 13: how evenly an update is spread over turns, in [0, 1]; sequences of one turn count 0. log_ratio: new - old, (B, T)."""
    kl, tokens = turn_sums(-log_ratio, response_mask, turn_ids)                     # (B, K)
    real = tokens > 0
    share = kl / kl.sum(1, keepdim=True).where(kl.sum(1, keepdim=True).abs() > 1e-12, torch.ones_like(kl[:, :1]))
    p = share.masked_fill(~real, -torch.inf).softmax(1)
    entropy = -(p * p.clamp(min=1e-12).log()).sum(1) / real.sum(1).clamp(min=2).log()
    return float(torch.where(real.sum(1) > 1, entropy, 0.0).mean())


# ---------------------------------------------------------------- update

@dataclass
class MicroBatch:
    batch: rollout.Batch
    advantages: torch.Tensor              # (B, T)
    old_logprobs: torch.Tensor            # (B, T) at rollout weights, recomputed
    ref_logprobs: torch.Tensor | None     # (B, T) at initial weights, where the loss has a KL term


def prepare(model, reference, roots, cfg):
    """The leaves of some trees as micro-batches, with log-probs at the weights they were sampled with."""
    leaf_of = {id(leaf.trajectory): leaf for root in roots for leaf in root.leaves()}
    share, micro = cfg.share_prefixes == "on", []
    for part in rollout.micro_batches([leaf.trajectory for leaf in leaf_of.values()], cfg.micro_tokens, share):
        batch = rollout.collate(part, share, cfg.pack_tokens)
        advantages = torch.zeros_like(batch.rollout_logprobs)
        for b, t in enumerate(part):
            per_turn = torch.tensor(path_advantages(leaf_of[id(t)], cfg))
            advantages[b] = torch.where(batch.response_mask[b], per_turn[batch.turn_ids[b].clamp(min=0)], 0.0)
        batch = batch.to(model.device)
        with torch.no_grad():
            old = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels)
            ref = None
            if cfg.kl_coef:
                with training.reference_weights(model, reference) as frozen:
                    ref = training.token_logprobs(frozen, batch, cfg.temperature, cfg.kernels)
        micro.append(MicroBatch(batch, advantages.to(model.device), old, ref))
    return micro


def policy_loss(logprobs, m, cfg, num_sequences, num_tokens):
    """The loss of --loss for a part of a mini-batch of so many sequences and tokens."""
    b = m.batch
    if cfg.loss == "grpo":
        tokens = num_tokens if cfg.grpo_mean == "token" else None
        return grpo_loss(logprobs, m.old_logprobs, m.advantages, b.response_mask, cfg.clip_low, cfg.clip_high, cfg.kl_coef,
                         m.ref_logprobs, num_sequences, tokens, cfg.dual_clip)
    turn_ids = b.turn_ids.clamp(max=0) if cfg.loss == "gspo" else b.turn_ids
    return atpo_loss(logprobs, m.old_logprobs, m.advantages, b.response_mask, turn_ids, cfg.clip_low, cfg.clip_high, num_sequences)


def update(model, reference, optimizer, roots, cfg, keep="nonfinite"):
    """One pass over the step's trees in mini-batches of questions. Returns the step's means. An update whose loss or gradient is not finite
    is skipped, and its batch kept in `keep`_<update>.safetensors."""
    started = time.time()
    groups = [roots[i:i + cfg.mini_batch] for i in range(0, len(roots), cfg.mini_batch)]
    learn = [[r for r in g if assign_advantages(r, cfg)] for g in groups]  # trees without reward spread are left out
    prepared = [prepare(model, reference, g, cfg) for g in learn]
    drift = [(m.old_logprobs - m.batch.rollout_logprobs)[m.batch.response_mask].abs() for ms in prepared for m in ms]
    out = {"time/old_logprobs": time.time() - started, "rollout/flat_groups": 1 - sum(map(len, learn)) / len(roots)}
    if drift:
        out |= {"rollout/logprob_drift_mean": float(torch.cat(drift).mean()), "rollout/logprob_drift_max": float(torch.cat(drift).max())}
    started, norms, spread, sums, first_ratio = time.time(), [], [], {}, None
    for group, micro in zip(groups, prepared, strict=True):
        if not micro:
            continue
        # of the whole mini-batch, those left out included: their advantages are zero (their KL terms are left out with them, ours)
        sequences = sum(len(r.leaves()) for r in group)
        tokens = sum(leaf.trajectory.sampled_tokens for r in group for leaf in r.leaves())
        part = {}
        for m in micro:
            logprobs = training.token_logprobs(model, m.batch, cfg.temperature, cfg.kernels)
            loss, stats = policy_loss(logprobs, m, cfg, sequences, tokens)
            loss.backward()
            stats["loss"] = float(loss.detach())
            part = {k: max(part.get(k, 0), v) if k == "ratio_max" else part.get(k, 0) + v for k, v in stats.items()}
            if norms:  # before the first update the ratio is 1
                spread.append(turn_entropy((logprobs.detach() - m.old_logprobs), m.batch.response_mask, m.batch.turn_ids))
        first_ratio = part["ratio_sum"] / part["tokens"] if first_ratio is None else first_ratio
        norms.append(training.optimizer_step(model, optimizer, cfg.grad_clip, part["loss"]))
        if math.isfinite(norms[-1]):
            sums = {k: max(sums.get(k, 0), v) if k == "ratio_max" else sums.get(k, 0) + v for k, v in part.items()}
        else:
            for i, m in enumerate(micro):
                training.save_batch(f"{keep}_{len(norms)}_{i}.safetensors", m.batch, advantages=m.advantages, old_logprobs=m.old_logprobs)
    finite = [n for n in norms if math.isfinite(n)]
    if norms:
        out |= {"train/first_ratio": first_ratio, "train/updates": len(finite), "train/not_finite": len(norms) - len(finite)}
    if finite:
        of = {"clip_fraction": "clipped_tokens", "kl": "kl_sum", "ratio": "ratio_sum"}
        out |= {f"train/{mean}": sums[total] / sums["tokens"] for mean, total in of.items()}
        out |= {"train/loss": sums["loss"] / len(finite), "train/ratio_max": sums["ratio_max"], "train/grad_norm": sum(finite) / len(finite)}
    if spread:
        out["train/turn_entropy"] = sum(spread) / len(spread)
    return out | {"time/train": time.time() - started}


def chain_tokens(roots):
    """Mean sampled tokens of a chain: of the trajectories that a tree begins with, before anything is branched."""
    chains = [leaf.trajectory for r in roots for leaf in r.leaves() if "." not in leaf.path]
    return sum(t.sampled_tokens for t in chains) / len(chains)


def rollout_metrics(roots):
    """Means over the step's leaves, and the sampled tokens its trees really cost."""
    nodes = [n for r in roots for n in r.nodes()[1:]]
    trajectories = [n.trajectory for n in nodes if n.done]
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    tokens = sum(len(n.turn.ids) for n in nodes)
    return {
        "reward/mean": mean([t.reward for t in trajectories]),
        "reward/em": mean([t.info["em"] for t in trajectories]),
        "reward/format": mean([not t.info["problem"] for t in trajectories]),
        "rollout/leaves": len(trajectories),
        "rollout/tokens": tokens,
        "rollout/chain_tokens": chain_tokens(roots),
        "rollout/response_tokens": mean([t.sampled_tokens for t in trajectories]),
        "rollout/turns": mean([len(t.turns) for t in trajectories]),
        "rollout/searches": mean([t.info["searches"] for t in trajectories]),
        "rollout/entropy": -sum(sum(n.turn.logprobs) for n in nodes) / tokens,
        "rollout/cut_off": mean([t.turns[-1].stop_reason == "length" for t in trajectories])}


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress=None):
    """One sampled trajectory a question, with the rollout used in training. Returns (rows, summary)."""
    async def one(q, prompt):
        leaf = await play(policy, prompt, Node(), "eval", cfg, stable_seed(cfg.seed, "eval", q.id), cfg.eval_temperature)
        return score(Trajectory(q.id, prompt, leaf.turns()), q, cfg)
    prompts = [render_prompt(policy.tokenizer, q.question, cfg.prompt_form) for q in split.questions]
    done = rollout.run_agents([one(q, p) for q, p in zip(split.questions, prompts, strict=True)], policy.engine, policy.search,
                              *([progress] if progress else []))
    rows = [{"id": q.id, **t.info, "tokens": t.sampled_tokens} | report.group(
        q, [report.turn_node(k, [k - 1] if k else [], turn, label=turn_label(turn)) for k, turn in enumerate(t.turns)],
        [outcome(t, q, list(range(len(t.turns))))]) for q, t in zip(split.questions, done, strict=True)]
    summary = {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature} | metrics.summarize(rows)
    return rows, summary


# ---------------------------------------------------------------- main

FREE_ON_RESUME = ("steps", "token_budget", "eval_every", "save_every", "show_every", "log", "resume", "out", "search_timeout", "search_retries")


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, in_world = flags.given_flags(argv)
    paper = replace(Config(), **BASELINES.get(given.get("--loss"), {}))
    default = replace(paper, **{k: v for k, v in WORLD.items() if k not in BASELINES.get(given.get("--loss"), {})}) if in_world else paper
    if in_world and given.get("--loss") == "gspo":
        default = replace(default, clip_low=3e-3, clip_high=4e-3)  # ten times the paper's, as for ATPO
    return resolve(flags.cli(Config, default, paper, __doc__, argv))


def resolve(cfg):
    """Fills what depends on other fields, so that the saved configuration says what ran."""
    if cfg.kl_coef and cfg.loss != "grpo":
        sys.exit(f"error: --kl-coef goes with --loss grpo; {cfg.loss} has no KL term (Eq 8-11)")
    if cfg.loss != "grpo" and (cfg.dual_clip or cfg.grpo_mean == "token"):
        sys.exit(f"error: --dual-clip and --grpo-mean go with --loss grpo, not {cfg.loss}")
    ones = ("chains", "group_size", "questions_per_step", "mini_batch", "max_response", "max_prompt", "max_passage", "top_k", "max_batch")
    zeros = ("steps", "limit", "eval_limit", "lora", "rounds", "expand", "max_searches", "search_retries", "dual_clip")
    task.check_flags(cfg, at_least=dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0),
                     positive=("lr", "temperature", "cache_gb", "world_size", "grad_clip", "search_timeout"))
    if cfg.token_budget != "auto" and cfg.token_budget < 0:
        sys.exit(f"error: --token-budget {cfg.token_budget}: auto, or a number of at least 0")
    rollout_kind = ("tree" if cfg.loss == "atpo" else "chains") if cfg.rollout == "auto" else cfg.rollout
    std = ("population" if rollout_kind == "tree" else "sample") if cfg.std == "auto" else cfg.std
    evaluated = stable_seed(cfg.model, cfg.checkpoint, cfg.data, cfg.eval_data, cfg.eval_limit, cfg.seed) % 10**6
    name = f"eval-{evaluated}" if cfg.eval_only else f"{cfg.loss}-seed{cfg.seed}"
    search = "bm25" if cfg.corpus or cfg.data == "world" else "http://127.0.0.1:8000"
    return replace(cfg, rollout=rollout_kind, std=std, retriever=cfg.retriever or search, name=cfg.name or name)


def turn_label(turn):
    """What a turn did, for the page: its query or its answer."""
    query = re.findall(re.escape(SEARCH[0]) + r"(.*?)" + re.escape(SEARCH[1]), turn.text, re.DOTALL)
    return "search: " + query[-1].strip() if query else "answer" if ANSWER[0] in turn.text else turn.stop_reason


def outcome(trajectory, question, path):
    """A trajectory as the page wants it."""
    i = trajectory.info
    return {"path": path, "reward": trajectory.reward, "answer": i["answer"], "problem": i["problem"], "correct": i["em"] == 1,
            "why": why(trajectory, question)}


def tree_record(model, root, question, step, cfg, tokenizer):
    """The step's tree as report.group: every node with value, advantage, and how far the step has moved it (ratio of turn probabilities, new to
    sampled); ids are those trained on."""
    number = {id(n): i for i, n in enumerate(root.nodes())}
    leaves = root.leaves()
    batch = rollout.collate([leaf.trajectory for leaf in leaves], cfg.share_prefixes == "on", cfg.pack_tokens).to(model.device)
    with torch.no_grad():
        moved = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels) - batch.rollout_logprobs
    sums, tokens = turn_sums(moved, batch.response_mask, batch.turn_ids)
    ratios = (sums / tokens.clamp(min=1)).exp().tolist()                                      # (leaves, K)
    nodes = [{"id": 0, "parents": [], "label": "question", "sampled": False, "value": root.value}]
    for n in root.nodes()[1:]:
        leaf = next(i for i, x in enumerate(leaves) if n.turn in x.trajectory.turns)
        ratio, advantage = ratios[leaf][len(n.turns()) - 1], path_advantages(leaves[leaf], cfg)[len(n.turns()) - 1]
        past = ratio > 1 + cfg.clip_high and advantage > 0 or ratio < 1 - cfg.clip_low and advantage < 0
        nodes.append(report.turn_node(number[id(n)], [number[id(n.parent)]], n.turn, tokenizer, label=turn_label(n.turn), value=n.value, advantage=advantage,
                                      ratio=ratio, branched=n.resamples, **{"clip window": "past" if past else "inside"}))
    paths = []
    for leaf in leaves:
        node, path = leaf, []
        while node is not None:
            path.insert(0, number[id(node)])
            node = node.parent
        paths.append(outcome(leaf.trajectory, question, path))
    return report.group(question, nodes, paths, step=step, prompt_ids=leaves[0].trajectory.prompt_ids)


def token_budget(cfg, state):
    """Sampled tokens at which training ends. auto: what chains in groups of group_size would sample in all steps, at the mean length
    that this run's own chains had so far, so that a tree and a group are compared at equal cost."""
    if cfg.token_budget != "auto":
        return cfg.token_budget or math.inf
    return cfg.steps * state["baseline_tokens"] / state["step"] if state["step"] else math.inf


def train(cfg, run, model, tokenizer, reference, policy, split, evals, start):
    """The loop of the paper: grow trees, assign credit, update; once a step."""
    optimizer = training.make_optimizer(model, cfg.lr, cfg.weight_decay)
    state = {"step": 0, "tokens": 0, "baseline_tokens": 0.0, "run": run.id}
    state |= training.load_training_state(start, model, optimizer) if start else {}
    saved_step = state["step"] if start else -1
    run.rewind(state["step"])
    earlier = report.read_jsonl(run.path / "metrics.jsonl")
    pace = report.Pace(max(state["step"] / max(1, cfg.steps), state["tokens"] / max(1, token_budget(cfg, state))))
    order = data.shuffled_forever(split.questions, stable_seed(cfg.seed, "order"))
    questions = itertools.islice(order, state["step"] * cfg.questions_per_step, None)
    for step in range(state["step"] + 1, cfg.steps + 1):
        if state["tokens"] >= token_budget(cfg, state):
            report.console.print(f"training ends after step {step - 1} of at most {cfg.steps}: {state['tokens']:,} tokens were sampled, the budget "
                                 f"(--token-budget {cfg.token_budget}) is {token_budget(cfg, state):,.0f}", markup=False)
            break
        started = time.time()
        policy.engine.load_weights()
        policy.search.retriever = split.retriever
        batch = list(itertools.islice(questions, cfg.questions_per_step))
        roots = rollout_trees(policy, batch, cfg, step)
        row = {"step": step, "time/rollout": time.time() - started} | rollout_metrics(roots)
        row |= update(model, reference, optimizer, roots, cfg, run.path / f"nonfinite_step{step}")
        state |= {"step": step, "tokens": state["tokens"] + row["rollout/tokens"],
                  "baseline_tokens": state["baseline_tokens"] + len(batch) * cfg.group_size * row["rollout/chain_tokens"]}
        row |= {"rollout/tokens_total": state["tokens"]} | policy.search.metrics
        row |= {"mem/gpu_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}
        row |= pace.times(max(step / cfg.steps, state["tokens"] / token_budget(cfg, state)), torch.get_num_threads())
        report.console.print(report.step_line(step, cfg.steps, row))
        row |= guards.watch(row, earlier, report.warn)
        shown = next((i for i, r in enumerate(roots) if len({n.trajectory.reward for n in r.leaves()}) > 1), 0)  # a tree with right and wrong leaves
        sample = tree_record(model, roots[shown], batch[shown], step, cfg, tokenizer)
        if cfg.show_every and step % cfg.show_every == 0:
            ranked = sorted(range(len(sample["trajectories"])), key=lambda i: sample["trajectories"][i]["reward"])
            for i in dict.fromkeys((ranked[-1], ranked[0])):
                report.explain(sample, i)
        if cfg.eval_every and step % cfg.eval_every == 0 and step < cfg.steps:
            results = task.evaluate_all(cfg, run, policy, evals, evaluate, f"_step{step}")
            row["eval/em"] = sum(r["summary"]["em"] for r in results.values()) / len(results)
        run.append("samples.jsonl", [sample])
        run.log(row)
        earlier.append(row)
        if cfg.save_every and step % cfg.save_every == 0:
            training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)
            saved_step = step
    if state["step"] > saved_step:
        training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)


def ask(cfg, policy, split):
    """One trajectory, shown while it is played."""
    policy.search.retriever = split.retriever
    task.warn_of_unknown_words(policy.tokenizer, cfg.ask)
    prompt = render_prompt(policy.tokenizer, cfg.ask, cfg.prompt_form)

    def watch(turn):
        report.console.print(report.plain(turn.text))
        report.console.print(f"  [dim]{report.plain(turn.observation[:600])}[/dim]")
    agent = play(policy, prompt, Node(), "ask", cfg, stable_seed(cfg.seed, "ask"), cfg.eval_temperature, watch)
    leaf = rollout.run_agents([agent], policy.engine, policy.search)[0]
    answer, problem = parse_response(leaf.turns(), cfg.limit_message_valid)
    report.console.print(f"[bold]answer: {report.plain(answer)}{f' ({problem})' if problem else ''}[/bold]")


def reproduce(cfg):
    """Checks, loads, evaluates, trains, evaluates again. What can be refused without reading data is refused first."""
    run = None if cfg.ask else report.RunFolder(cfg.out, "at2po", cfg.name, asdict(cfg), cfg.resume, FREE_ON_RESUME)
    start = task.checkpoint_of(run) if cfg.resume else None
    task.check_model_is_named(cfg)
    source = cfg.checkpoint or cfg.model
    source = source and training.find_model(source)
    split, evals = task.load_splits(cfg, PAPER_EVAL)
    # of a resumed run the table compares with the weights that it began with
    before = {s.name: report.read_evaluation(run.path / f"eval_{s.name}_before.json") for s in evals} if start else {}
    source = source or tiny_policy(cfg)
    model, tokenizer = training.load_policy(start or source, cfg.lora, cfg.gradient_checkpointing)
    report.console.print(training.describe(start or source, model), markup=False)
    engine = TransformersEngine(model, tokenizer, cfg.max_batch, cfg.cache_gb, cfg.cache_gb)
    policy = Policy(engine, tokenizer, rollout.BatchedSearch(evals[0].retriever))
    if cfg.ask:
        return ask(cfg, policy, evals[0])
    for s in filter(None, (split, *evals)):
        s.questions = task.within_limit(s.questions, lambda q: len(render_prompt(tokenizer, q.question, cfg.prompt_form)), cfg.max_prompt, cfg.skip_bad)
    run.create(threads=run.saved.get("threads", torch.get_num_threads()))
    run.trackers = report.open_trackers(cfg.log, run)
    report.console.print(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""), style="dim", markup=False)
    if cfg.eval_only:
        report.show_averages(task.evaluate_all(cfg, run, policy, evals, evaluate), AVERAGES)
        return report.console.print(f"predictions in {run.path}, page: {report.write_page(run.path)}", markup=False)
    reference = training.load_model(source).requires_grad_(False) if cfg.kl_coef and not cfg.lora else None
    if not start:
        before = task.evaluate_all(cfg, run, policy, evals, evaluate, "_before")
        guards.look_at_start({name: r["summary"] for name, r in before.items()}, report.warn)
    train(cfg, run, model, tokenizer, reference, policy, split, evals, start)
    after = task.evaluate_all(cfg, run, policy, evals, evaluate)
    report.show_results(run, before, after, AVERAGES)
    report.draw_curves({cfg.name: report.with_evaluations(run, before, after)}, run.path / "curves.png",
                       f"AT2PO · {cfg.name} · {cfg.loss}, {cfg.rollout}, {cfg.expansion} expansion, credit by {cfg.credit}")
    report.write_page(run.path)
    report.console.print(f"run folder: {run.path}", markup=False)


def main(argv=None):
    cfg = None
    errors = (data.DataError, retriever.RetrieverError, training.ModelError, chat.TemplateError, report.RunError, OSError)
    with process.ends_cleanly(errors, lambda: report.what_is_saved(cfg, "at2po", cfg and cfg.name)):
        cfg = parse_args(argv)
        torch.manual_seed(cfg.seed)
        transformers.utils.logging.disable_progress_bar()
        if process.settled:
            report.warn(f"{process.settled}: {torch.get_num_threads()} threads here (OMP_NUM_THREADS sets another number)")
        reproduce(cfg)


if __name__ == "__main__":
    main()
