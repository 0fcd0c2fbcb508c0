"""AT2PO: Agentic Turn-based Policy Optimization via Tree Search (arXiv 2601.04767).

The policy answers a question in turns: it thinks and searches, reads the result, and so on until it answers.
One tree of such trajectories is grown per question: M chains first, then L rounds that regenerate the N turns
the policy was least sure of. Outcome rewards at the leaves are passed up the tree, which gives each turn a
value of its own, and the update uses one importance ratio and one clip decision a turn: coarser than a token
(GRPO), finer than a sequence (GSPO).

GRPO, except: a group is a tree, a turn has an advantage of its own, ratio and clip are a turn's, there is no
KL term, and a tree whose leaves all have one reward is left out of the update.

    Eq 2            turn entropy                  Turn.entropy (common/turns.py)
    Algorithm 1     tree                          grow_tree, choose_nodes, play
    Eq 14-16        reward                        parse_response, score
    Eq 3            values, advantages            leaf_values, node_value, assign_advantages
    Eq 4-5, 10-11   ATPO loss                     atpo_loss (of one turn: GSPO, Eq 8-9)
    Eq 6-7          GRPO loss                     training.grpo_loss
    Eq 13           turn entropy of the update    turn_entropy

    python at2po.py                               the embedded world, two CPU cores, under ten minutes
    python at2po.py --loss grpo                   the GRPO baseline (chains, group 16), same token budget
    python -m common.ladder at2po table1 --seeds 5 -- --world hard      a table where methods can differ
    python at2po.py --model Qwen/Qwen3-4B         the paper's setting; a search server; not run (docs/gpu.md)
    python at2po.py --eval-only --checkpoint Qwen/Qwen3-4B --data musique-dev        ReAct: no training
    python at2po.py --ask "Who is the spouse of the composer of the film Empty Ocean?"
Numbers reached: results/README.md. The paper's own (Qwen3-4B, 8 GPUs, 21M passages) were not measured.
"""

import asyncio
import math
import random
import re
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import (
    baselines,
    chat,
    data,
    flags,
    guards,
    keep_best,
    metrics,
    report,
    rollout,
    run,
    splits,
    training,
    tree_metrics,
)
from common import model as models
from common.baselines import BASELINES
from common.files import console, plain, warn
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.page import record, trees
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings; what a run needs besides (model, search, memory, names) is in common/flags.py."""

    # ---- rollout

    # auto = a tree for ATPO, branches (chains that split as they go) for AEPO, chains for the others
    rollout: Literal["auto", "tree", "branches", "chains"] = "auto"
    chains: int = 10                # M, chains a tree begins with | sec. 5.1
    expand: int = 6                 # N, turns regenerated a round | sec. 5.1
    rounds: int = 2                 # L, rounds of expansion | sec. 5.1
    group_size: int = 16            # trajectories a question for the baselines | sec. 5.1
    # which turns are expanded; random = Table 1's ablation
    expansion: Literal["entropy", "random"] = "entropy"
    branch_penalty: float = .05     # taken off a turn's entropy for each time it was branched | authors' code
    top_k: int = 3                  # passages a search | Table 3
    max_searches: int = 6           # searches a trajectory | sec. 5.1
    max_passage: int = 1000         # characters of a passage that are read | authors' code
    max_prompt: int = 2000          # tokens of the prompt | Table 3
    max_response: int = 6192        # tokens of the response, observations included | Table 3
    # the question inside the system message, or in a user message
    prompt_form: Literal["system", "chat"] = "system"
    # stop at </answer>; without it a turn ends at the end of sequence, which is trained
    stop_at_answer: bool = False
    temperature: float = 1.0        # of sampling in training; top-p 1, no top-k | authors' code
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | authors' code

    # ---- reward, credit and loss
    bad_format_reward: float = 0.0  # what a bad format earns; -1 in the authors' code | Eq 16
    # a turn's own value; its leaf's for every turn (Table 1); the leaf's among all leaves plus that among the
    # leaves of its own chain (Tree-GRPO)
    credit: Literal["turn", "outcome", "tree-grpo"] = "turn"
    # of inner nodes (Table 2) | Eq 3
    value: Literal["child-weighted", "child-mean", "leaf-mean"] = "child-weighted"
    advantage: Literal["value", "td", "global", "combined"] = "value"  # from values (Table 2) | Eq 3
    # turn, token or sequence ratios; grpo, dapo, gspo and aepo with their own defaults
    loss: Literal["atpo", "grpo", "dapo", "gspo", "aepo"] = "atpo"
    clip_low: float = 3e-3          # 1 - lower end of the clip window | sec. 5.1
    clip_high: float = 4e-3         # upper end - 1 | sec. 5.1
    kl_coef: float = 0.0            # k3 estimate of the KL to the initial policy; --loss grpo alone
    # train on turns decoded and encoded anew, which is what token in, token out avoids (Figure 8)
    retokenize: bool = False

    # ---- update

    # set that chooses, every --eval-every steps, the weights that are evaluated at the end; empty = the last
    # (the paper takes the best of its benchmarks)
    keep_data: str = ""
    # training questions: file, hub name, or "world" (nq = the single-hop policy's) | authors' code
    data: str = "hotpotqa"
    steps: int = 240                # training steps | sec. 5.1
    # stop when so many tokens were sampled; auto = what the baseline's chains would have sampled in --steps;
    # 0 = no limit
    token_budget: Literal["auto"] | int = "auto"
    questions_per_step: int = 64    # questions a step | Table 3
    mini_batch: int = 8             # questions an update | Table 3
    epochs: int = 1                 # passes over a step's trees; the paper is silent
    lr: float = 1e-6                # learning rate, constant | Table 3
    weight_decay: float = .01       # of matrices | authors' code
    grad_clip: float = 1.0          # largest norm of the gradient | authors' code


# What differs in the embedded world: a half-million-weight policy on two cores. Ours; the learning rate was
# chosen on the dev split, from 3e-5, 1e-4, 3e-4 and 1e-3, for ATPO and GRPO alike
# (results/notes/at2po.md).
WORLD = dict(
    data="world",
    retriever="bm25",
    top_k=1,
    max_response=700,
    prompt_form="chat",
    stop_at_answer=True,
    eval_temperature=1.0,
    eval_limit=400,
    steps=60,
    token_budget=550_000,
    questions_per_step=16,
    mini_batch=4,
    lr=1e-4,
    clip_low=0.03,
    clip_high=0.04,
    micro_tokens=8192,
    save_every=1,
    eval_every=10,
)
# And at the world's second level (--world hard): two passes over fewer questions, another tree of 22 leaves.
# The learning rate was chosen on dev for each kind of ratio: 2e-4 for turns, 1e-4 for tokens
# (results/notes/at2po.md).
HARD = WORLD | dict(
    limit=1500,
    eval_limit=2000,
    token_budget=120_000,
    chains=4,
    rounds=3,
    questions_per_step=8,
    mini_batch=2,
    epochs=2,
    lr=2e-4,
    clip_low=0.02,
    clip_high=0.027,
    eval_every=5,
)
TOKEN_RATIOS = ("grpo", "dapo", "aepo")
MULTI_HOP = ("hotpotqa-dev", "2wiki-dev", "musique-dev", "bamboogle")  # sec. 5.1
SINGLE_HOP = ("nq", "triviaqa", "popqa")  # trained on NQ: --data nq
PAPER_EVAL = ",".join(MULTI_HOP + SINGLE_HOP)
AVERAGES = {
    "multi-hop average (weighted by questions)": MULTI_HOP,
    "single-hop average (weighted by questions)": SINGLE_HOP,
}


# ---------------------------------------------------------------- prompt and tags

THINK, SEARCH, RESULT, ANSWER = ((f"<{t}>", f"</{t}>") for t in ("think", "search", "result", "answer"))

# Figure 7, as in the authors' data script
SYSTEM_PROMPT = """\
You are a helpful assistant that can solve the given question step by step with the help of the wikipedia \
search tool. Given a question, you need to first think about the reasoning process in the mind and then \
provide the answer. During thinking, you can invoke the wikipedia search tool to search for fact \
information about specific topics if needed. You can search as many times as your want. The reasoning \
process and answer are enclosed within <think> </think> and <answer> </answer> tags respectively, and the \
search query and result are enclosed within <search> </search> and <result> </result> tags respectively. \
For example, <think> This is the reasoning process. </think> <search> search query here </search> <result> \
search result here </result>  <think> This is the reasoning process. </think> <answer> The final answer is \
\\[ \\boxed{answer here} \\] </answer>. In the last part of the answer, the final exact answer is enclosed \
within \\boxed{} with latex format."""
# authors' code
LIMIT_MESSAGE = ("I have reached the tool call limit and cannot make further tool calls. Let me provide the "
                 "final answer based on the information I have gathered so far.")


def render_prompt(tokenizer, question, form="system"):
    """Token ids of the first prompt; later turns append ids. form "system": the authors', one system message
    with the question; "chat": the question in a user message."""
    if form == "system":
        asked = question.strip() if question.strip().endswith("?") else question.strip() + "?"
        message = [f"{SYSTEM_PROMPT}\nuser\n", chat.Foreign(asked)]
        try:
            return chat.render_chat(tokenizer, [("system", message)])
        except chat.TemplateError as error:
            raise chat.TemplateError(f"{error}; --prompt-form chat asks in a user message") from error
    return chat.render_chat(tokenizer, [("system", SYSTEM_PROMPT), ("user", [chat.Foreign(question)])])


def render_passages(passages, max_passage=1000):
    """The text between the result tags: each text once, cut to `max_passage` characters.

    >>> from common.retriever import Passage
    >>> render_passages([Passage("7", "Silent Harbor", "A film."), Passage("8", "Silent Harbor", "A film.")])
    'Page 1: "Silent Harbor"\\nA film.'
    """
    once = {(p.title, p.text): p for p in passages}.values()
    pages = []
    for i, p in enumerate(once, 1):
        pages.append(f'Page {i}: "{p.title[:max_passage]}"\n{p.text[:max_passage]}')
    return "\n".join(pages) or "No passage found."


def render_observation(tokenizer, passages, max_passage=1000):
    """(text, ids) of a search result; no passage can write a tag or a token of its own into it."""
    shown = chat.Foreign(render_passages(passages, max_passage))
    return chat.encode(tokenizer, f" {RESULT[0]}\n", shown, f"\n{RESULT[1]}")


def inside(tags, text):
    """What stands between each pair of tags.

    >>> inside(SEARCH, "<search>a</search> so <search>b</search>")
    ['a', 'b']
    """
    return re.findall(re.escape(tags[0]) + r"(.*?)" + re.escape(tags[1]), text, re.DOTALL)


# ---------------------------------------------------------------- agent: a tree of turns (Algorithm 1)

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

    def lineage(self):
        """The nodes from the first turn to this one."""
        return [] if self.turn is None else [*self.parent.lineage(), self]

    def turns(self):
        return [node.turn for node in self.lineage()]

    def nodes(self):
        """This node and everything below it, in the order it was grown."""
        return [self] + [n for child in self.children for n in child.nodes()]

    def leaves(self):
        return [n for n in self.nodes() if n.done]

    def rewards(self):
        return [leaf.trajectory.reward for leaf in self.leaves()]


async def play(policy, search, prompt_ids, node, path, cfg, seed, temperature, watch=None, one_turn=False):
    """From the state after `node` to the end: sample a turn, search, observe, and so on. Returns the leaf;
    with one_turn the next node."""
    stop = (SEARCH[1], ANSWER[1]) if cfg.stop_at_answer else (SEARCH[1],)
    while True:
        turns = node.turns()
        context = context_ids(prompt_ids, turns)
        room = cfg.max_response - (len(context) - len(prompt_ids))
        node = Node(None, node, path)
        # before anything is awaited: siblings stand in the order they were asked for
        node.parent.children.append(node)

        g = await policy.engine.generate(
            context,
            stop=stop,
            max_tokens=room,
            temperature=temperature,
            seed=stable_seed(seed, path, len(turns)),
        )
        text = rollout.sampled_text(policy.tokenizer, g.token_ids, g.stop_reason)
        turn = node.turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)

        query = inside(SEARCH, text)[-1:]
        query = query[0].replace('"', "").strip() if query else ""  # an empty one ends it, as in their code
        if g.stop_reason == SEARCH[1] and query and len(turns) < cfg.max_searches:
            passages = await search(query, cfg.top_k)
            observed = render_observation(policy.tokenizer, passages, cfg.max_passage)
            turn.observation, turn.observation_ids = observed
        elif g.stop_reason == SEARCH[1] and query and len(turns) == cfg.max_searches:
            # one search too many: the environment says so, once
            observed = chat.encode(policy.tokenizer, f"\n{LIMIT_MESSAGE}\n")
            turn.observation, turn.observation_ids = observed
        else:
            node.done = True
        if not node.done and len(turn.ids) + len(turn.observation_ids) >= room:
            node.done = True  # no room left to answer in: nobody reads the result
            turn.observation, turn.observation_ids = "", []
            turn.stop_reason = "length"
        if watch:
            watch(turn)
        if node.done or one_turn:
            return node


def choose_nodes(root, cfg, rng):
    """The N nodes to branch next: the most uncertain turns, or random ones. The root is one of them, with
    entropy 0. Too few nodes: the best ones again, or random ones with replacement, as in the authors'
    code."""
    candidates = [root] + [n for n in root.nodes()[1:] if not n.done]
    if cfg.expansion == "random":
        enough = len(candidates) >= cfg.expand
        return rng.sample(candidates, cfg.expand) if enough else rng.choices(candidates, k=cfg.expand)

    def certainty(node):
        if node is root:
            return cfg.branch_penalty * (len(root.children) - 1)
        return cfg.branch_penalty * node.resamples - node.turn.entropy

    ranked = sorted(candidates, key=certainty)
    return [ranked[i % len(ranked)] for i in range(cfg.expand)]


async def grow_tree(policy, search, question, prompt_ids, cfg, seed):
    """Algorithm 1, or for the baselines a group of chains (a tree of one level) that may branch (AEPO).
    Returns the root."""
    def start(node, path, one_turn=False):
        return play(policy, search, prompt_ids, node, path, cfg, seed, cfg.temperature, one_turn=one_turn)

    root = Node()
    if cfg.rollout == "chains":
        await asyncio.gather(*(start(root, f"chain{m}") for m in range(cfg.group_size)))
    elif cfg.rollout == "branches":
        rng = random.Random(stable_seed(seed, "branch"))
        await baselines.grow_branches(
            partial(start, one_turn=True), root, cfg.chains, cfg.group_size, rng, len(policy.tokenizer))
    else:
        await asyncio.gather(*(start(root, f"chain{m}") for m in range(cfg.chains)))
        for r in range(cfg.rounds):
            chosen = choose_nodes(root, cfg, random.Random(stable_seed(seed, "expand", r)))
            for node in chosen:
                node.resamples += 1
            # a turn is sampled anew from the state before it
            paths = [f"{node.path}.{r}-{i}" for i, node in enumerate(chosen)]
            await asyncio.gather(*(start(n.parent or root, p) for n, p in zip(chosen, paths, strict=True)))
    for node in root.nodes()[1:] if cfg.retokenize else ():
        node.turn = retokenized(policy.tokenizer, node.turn)
    for leaf in root.leaves():
        trajectory = leaf.trajectory = score(Trajectory(question.id, prompt_ids, leaf.turns()), question, cfg)
        if cfg.loss == "dapo":
            length = trajectory.length - len(prompt_ids)
            trajectory.reward += baselines.overlong_penalty(length, cfg.max_response)
    return root


def retokenized(tokenizer, turn):
    """A turn as its text is encoded, which need not be what was sampled (App. C); its entropy stays."""
    ids = chat.encode(tokenizer, tokenizer.decode(turn.ids))[1]
    return replace(turn, ids=ids, logprobs=[-turn.entropy] * len(ids))


def rollout_trees(policy, retriever, questions, cfg, step):
    """One tree a question, all grown at once: each expands as soon as its own leaves are in (sec. 7), and
    what it samples does not depend on the others."""
    search = rollout.BatchedSearch(retriever)
    agents, seen = [], []
    for q in questions:
        # drawn twice in a step: two different trees
        again = ("again", seen.count(q.id)) if q.id in seen else ()
        seed = stable_seed(cfg.seed, step, q.id, *again)
        prompt_ids = render_prompt(policy.tokenizer, q.question, cfg.prompt_form)
        agents.append(grow_tree(policy, search, q, prompt_ids, cfg, seed))
        seen.append(q.id)
    return rollout.run_agents(agents, policy.engine, search)


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


def parse_response(turns):
    """(answer or None, problem or ""): reads what the policy sampled, never an observation (Eq 15).

    Valid: think tags paired and present, no result tag of its own, every turn but the last one search that
    got its result, the last one exactly one answer block with \\boxed{} inside. What follows the block (the
    rest of a token such as ">.") is no fault."""
    text = "".join(t.text for t in turns)
    last = turns[-1].text
    answers = inside(ANSWER, text)
    answer = boxed(answers[-1]) if answers else None
    thoughts = re.findall(r"</?think>", text)
    if not thoughts or thoughts != list(THINK) * (len(thoughts) // 2):
        return answer, "think tags not paired"
    if RESULT[0] in text or RESULT[1] in text:
        return answer, "wrote a result itself"
    if any(where.count(tag) != 1 for where in (text, last) for tag in ANSWER):
        return answer, "not exactly one answer block at the end"
    if any(t.text.count(tag) != 1 for t in turns[:-1] for tag in SEARCH) or SEARCH[0] in last:
        return answer, "a search without its result"
    if any(RESULT[0] not in t.observation for t in turns[:-1]):
        return answer, "a search without its result"
    return (answer, "") if answer else (None, "no \\boxed{} in the answer")


@dataclass
class Scored(Outcome):
    """em and f1 are those of the extracted answer whatever the format, as the authors evaluate."""
    em_valid: float = 0.0       # em in valid format, else 0


def score(trajectory, question, cfg):
    """Fills reward and what explains it: EM if the format is valid, else bad_format_reward (Eq 16)."""
    answer, problem = parse_response(trajectory.turns)
    em = metrics.exact_match(answer, question.answers) if answer else 0.0
    trajectory.reward = cfg.bad_format_reward if problem else em
    trajectory.info = Scored(
        answer,
        problem,
        em,
        f1=metrics.f1(answer, question.answers) if answer else 0.0,
        searches=sum(RESULT[0] in t.observation for t in trajectory.turns),
        em_valid=0.0 if problem else em,
    )
    return trajectory


# ---------------------------------------------------------------- credit: values, advantages (Eq 3, Table 2)

def leaf_values(rewards, sample_std=False):
    """(R - mean) / (std + 1e-6) over the leaves of a tree; GRPO divides by the sample std, the tree by the
    population's."""
    mean = sum(rewards) / len(rewards)
    variance = sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - sample_std)
    return [(r - mean) / (math.sqrt(variance) + 1e-6) for r in rewards]


def node_value(node, rule):
    """Sets and returns V(n) from the children's values (Eq 3); leaves hold theirs."""
    if node.done:
        return node.value
    values = [node_value(c, rule) for c in node.children]
    if rule == "child-weighted":  # sum_c softmax_c(H(c)) V(c)
        weights = [math.exp(c.turn.entropy) for c in node.children]
        node.value = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    elif rule == "child-mean":
        node.value = sum(values) / len(values)
    else:  # leaf-mean (TreeRL)
        leaves = node.leaves()
        node.value = sum(leaf.value for leaf in leaves) / len(leaves)
    return node.value


def assign_advantages(root, cfg):
    """A(n) for every turn of the tree, and the list of them for every leaf's trajectory. Returns False,
    leaving none, where all leaves have one reward: nothing to learn."""
    leaves = root.leaves()
    rewards = root.rewards()
    if not training.has_spread(rewards):
        return False
    population = cfg.loss == "atpo" and cfg.rollout == "tree"
    standardised = partial(leaf_values, sample_std=not population)
    for leaf, value in zip(leaves, standardised(rewards), strict=True):
        leaf.value = value
    node_value(root, cfg.value)
    for n in root.nodes()[1:]:
        td = n.value - n.parent.value
        above_root = n.value - root.value
        kinds = {"value": n.value, "td": td, "global": above_root, "combined": td + above_root}
        n.advantage = kinds[cfg.advantage]
    within = {}
    if cfg.credit == "tree-grpo":
        within = baselines.values_within_chains(root, standardised)
    for leaf in leaves:  # each turn's own (the paper's), or the leaf's value for all
        path = [n.advantage for n in leaf.lineage()]
        if cfg.credit != "turn":
            path = [leaf.value + within.get(leaf, 0.0)] * len(path)
        leaf.trajectory.advantages = path
    return True


# ---------------------------------------------------------------- loss (Eq 4-11, Eq 13)

def atpo_loss(
    logprobs,
    old_logprobs,
    advantages,
    response_mask,
    turn_ids,
    clip_low=3e-3,
    clip_high=4e-3,
    num_sequences=None,
):
    """Eq 10-11. All (B, T); position t speaks of token t. GSPO (Eq 8-9) is the case where every sampled token
    has turn 0. num_sequences: of the whole mini-batch, where this is a part of it. Returns (loss, stats).

    kernels/turn_loss.py has the same in one step a turn."""
    training.check_shapes(logprobs, advantages, response_mask)
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)           # (B, T)

    # Eq 11: s_k is one number a turn, the exponential of its mean log-ratio. Its value is detached, and the
    # token's own log-prob put back with value 0, so that the gradient of a token is s_k A_k times that of its
    # log-prob.
    total, tokens = training.turn_sums(log_ratio.detach(), response_mask, turn_ids)    # (B, K)
    log_s = (total / tokens.clamp(min=1)).gather(1, turn_ids.clamp(min=0))         # (B, T)
    log_s = log_s + torch.where(response_mask, logprobs - logprobs.detach(), 0.0)
    s = log_s.clamp(max=10).exp()

    # Eq 10: the clipped objective, its mean over a sequence's tokens, then over sequences
    objective = torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)
    per_sequence = (-objective * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)     # (B,)
    loss = per_sequence.sum() / (num_sequences or len(logprobs))

    too_high = (s > 1 + clip_high) & (advantages > 0)
    too_low = (s < 1 - clip_low) & (advantages < 0)
    return loss, training.loss_stats(log_ratio, too_high | too_low, response_mask, s)


def turn_entropy(log_ratio, response_mask, turn_ids):
    """Eq 13: how evenly an update is spread over turns, in [0, 1]; sequences of one turn count 0. log_ratio:
    new - old, (B, T)."""
    kl, tokens = training.turn_sums(-log_ratio, response_mask, turn_ids)           # (B, K)
    real = tokens > 0
    total = kl.sum(1, keepdim=True)                                                # (B, 1)
    share = kl / torch.where(total.abs() > 1e-12, total, 1.0)
    p = share.masked_fill(~real, -torch.inf).softmax(1)
    entropy = -(p * p.clamp(min=1e-12).log()).sum(1) / real.sum(1).clamp(min=2).log()  # (B,)
    return float(torch.where(real.sum(1) > 1, entropy, 0.0).mean())


def policy_loss(logprobs, batch, cfg, num_sequences, num_tokens):
    """The loss of --loss for a part of a mini-batch of so many sequences and tokens."""
    b = batch
    advantages = training.corrected_advantages(b, cfg.sampler_correction)
    if cfg.loss in TOKEN_RATIOS:
        baseline = BASELINES[cfg.loss]
        weights = training.sequence_weights(b.response_mask, num_sequences)
        if baseline.token_mean:
            weights = 1 / num_tokens
        return training.grpo_loss(
            logprobs,
            b.old_logprobs,
            advantages,
            b.response_mask,
            weights,
            cfg.clip_low,
            cfg.clip_high,
            cfg.kl_coef,
            b.ref_logprobs,
            baseline.dual_clip,
            baseline.soft_clip,
        )
    turn_ids = b.turn_ids.clamp(max=0) if cfg.loss == "gspo" else b.turn_ids
    return atpo_loss(
        logprobs,
        b.old_logprobs,
        advantages,
        b.response_mask,
        turn_ids,
        cfg.clip_low,
        cfg.clip_high,
        num_sequences,
    )


# ---------------------------------------------------------------- update

def trajectories_of(roots):
    return [leaf.trajectory for root in roots for leaf in root.leaves()]


def update(model, reference, optimizer, roots, cfg, keep="nonfinite"):
    """`epochs` passes over the step's trees, `mini_batch` questions an update. Returns the step's means.

    Trees whose leaves all have one reward teach nothing and are left out, their KL terms with them (ours);
    the denominators still count their leaves."""
    # 2. Eq 3: values up the tree, an advantage a turn; trees of one reward are left out
    started = time.time()
    groups = [roots[i:i + cfg.mini_batch] for i in range(0, len(roots), cfg.mini_batch)]
    learn = [[root for root in group if assign_advantages(root, cfg)] for group in groups]

    # 3. log-probs of the weights that sampled, of all trees before the first update
    entropies = cfg.loss == "aepo"
    prepared = []
    for group in learn:
        prepared.append(training.prepare(
            model, reference, trajectories_of(group), cfg.micro_tokens, cfg.share_prefixes, cfg.temperature,
            cfg.kernels, entropies))
    if cfg.loss == "aepo":
        for batches in filter(None, prepared):
            baselines.balance_entropy(batches)
    row = {
        "time/old_logprobs": time.time() - started,
        "rollout/flat_groups": 1 - sum(map(len, learn)) / max(1, len(roots)),
    }

    if cfg.rollout == "tree":
        row |= tree_metrics.credit_metrics([root for group in learn for root in group])

    # 4. Eq 10-11: an update a mini-batch of trees
    everything = [b for batches in prepared for b in batches]
    meter = training.Meter(everything, keep, cfg.sampler_correction, cfg.epochs)
    for group, batches in [*zip(groups, prepared, strict=True)] * cfg.epochs:
        if not batches:
            continue
        num_sequences = len(trajectories_of(group))  # of flat trees too
        num_tokens = sum(t.sampled_tokens for t in trajectories_of(group))
        for b in batches:  # micro-batches: for memory alone
            logprobs = models.token_logprobs(model, b, cfg.temperature, cfg.kernels)  # (B, T)
            loss, stats = policy_loss(logprobs, b, cfg, num_sequences, num_tokens)
            (loss * b.weight).backward()  # weight 0: another rank's batch, to keep step with it
            if meter.norms:  # before the first update the ratio is 1
                moved = logprobs.detach() - b.old_logprobs
                stats["turn_entropy"] = len(moved) * turn_entropy(moved, b.response_mask, b.turn_ids)
                stats["moved"] = len(moved)
            meter.add(loss, stats, b.weight)
        norm = training.clip_gradient(model, cfg.grad_clip)
        if meter.finite(norm, batches):  # else loss or gradient is not a number: no update
            optimizer.step()
        optimizer.zero_grad()
    if "moved" in meter.total:
        row["train/turn_entropy"] = meter.total["turn_entropy"] / meter.total["moved"]
    return row | meter.means()


# ---------------------------------------------------------------- train

def train(cfg, folder, policy, reference, split, evaluate_now):
    """The loop of the paper, once a step: grow trees, assign credit, update."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    spent = {"tokens": 0, "baseline_tokens": 0.0}  # kept in checkpoints

    def share(step):
        return max(step / max(1, cfg.steps), spent["tokens"] / token_budget(cfg, spent, step))

    keeps_best = bool(cfg.keep_data)
    if keeps_best:
        spent["best"] = -1.0
    steps = run.steps(
        cfg, folder, policy, optimizer, METRICS, spent, evaluate_now, share, keep_best=keeps_best)
    for step, row in steps:
        # 1. Algorithm 1: a tree a question, grown with the current weights
        order = stable_seed(cfg.seed, "order")
        drawn = cfg.questions_per_step * (baselines.DRAWN if cfg.loss == "dapo" else 1)
        questions = data.batch_of_step(split.questions, step, drawn, order)
        with run.timed(row, "time/rollout"):
            policy.engine.sync(policy.model)
            roots = rollout_trees(policy, split.retriever, questions, cfg, step)
            policy.engine.sleep()

        # 2. to 4. credit, old log-probs, updates
        learned = roots
        if cfg.loss == "dapo":  # which samples more questions than it learns from
            learned = baselines.chosen_to_learn(roots, cfg.questions_per_step)
        row |= update(policy.model, reference, optimizer, learned, cfg, folder.nonfinite(step))

        row |= tree_metrics.rollout_metrics(roots) | rollout.search_repairs(split.retriever)
        spent["tokens"] += row["rollout/tokens"]
        spent["baseline_tokens"] += drawn * cfg.group_size * row["rollout/chain_tokens"]
        row["rollout/tokens_total"] = spent["tokens"]
        row["sample"] = trees.sample_record(
            policy, roots, questions, step, cfg, turn_ratios, turn_label, why)


def token_budget(cfg, spent, step):
    """Sampled tokens at which training ends. auto: what chains in groups of group_size would sample in all
    steps, at the mean length that this run's own chains had so far, so that a tree and a group are compared
    at equal cost."""
    if cfg.token_budget != "auto":
        return cfg.token_budget or math.inf
    return cfg.steps * spent["baseline_tokens"] / step if step else math.inf


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress=rollout.no_progress):
    """One sampled trajectory a question, with the rollout used in training. Returns (rows, summary)."""
    policy.engine.sync(policy.model)
    search = rollout.BatchedSearch(split.retriever)

    async def answer(q):
        prompt_ids = render_prompt(policy.tokenizer, q.question, cfg.prompt_form)
        seed = stable_seed(cfg.seed, "eval", q.id)
        leaf = await play(policy, search, prompt_ids, Node(), "eval", cfg, seed, cfg.eval_temperature)
        return score(Trajectory(q.id, prompt_ids, leaf.turns()), q, cfg)

    done = rollout.run_agents([answer(q) for q in split.questions], policy.engine, search, progress)
    rows = [trees.prediction(t, q, turn_label, why) for t, q in zip(done, split.questions, strict=True)]
    about = {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature}
    return rows, about | metrics.summarize(rows)


# ---------------------------------------------------------------- main

def reproduce(cfg):
    """Evaluates, trains, evaluates again. What can be refused without reading data is refused first."""
    if not cfg.ask:
        free = (*run.FREE_ON_RESUME, "token_budget")
        folder = run.open_folder(cfg, "at2po", cfg.name, free)
    source = cfg.checkpoint or cfg.model
    source = source and models.find_model(source)
    split, evals = splits.load_splits(cfg, PAPER_EVAL, also=cfg.keep_data)
    chooser = keep_best.set_that_chooses(cfg, split) if split else None
    source = source or cfg.policy or tiny_policy(cfg)
    if cfg.warmup_data:
        source = warmed_up(cfg, source, split or evals[0])
    longest = cfg.max_prompt + cfg.max_response
    if cfg.ask:
        return ask(cfg, run.load_policy(cfg, source, trains=False, longest=longest), evals[0])
    beside = int(cfg.kl_coef > 0 and not cfg.lora)  # a reference
    policy = run.load_policy(
        cfg, folder.start or source, trains=not cfg.eval_only, frozen=beside, longest=longest)

    def length(q):
        return len(render_prompt(policy.tokenizer, q.question, cfg.prompt_form))
    given = [split, chooser, *evals]
    split, chooser, *evals = splits.within_limit(given, length, cfg.max_prompt, cfg.skip_bad)

    def evaluate_all(when=""):
        return run.evaluate_all(cfg, folder, policy, evals, evaluate, when)

    if folder.start:  # the table compares with the weights that the run began with
        before = {s.name: folder.evaluation(s, "_before") for s in evals}
    run.tell(cfg)
    title = f"AT2PO {cfg.name}: {cfg.loss}, {cfg.rollout}, {cfg.expansion} expansion"
    with run.stage(cfg, folder, METRICS, title):
        if cfg.eval_only:
            return report.show_averages(evaluate_all(), AVERAGES)
        reference = models.load_reference(policy.model, source, cfg.lora) if cfg.kl_coef else None
        if not folder.start:
            before = evaluate_all("_before")
            guards.look_at_start({name: r["summary"] for name, r in before.items()}, warn)

        def evaluate_now(when):
            chosen = [chooser] if chooser else evals
            return run.mean_em(run.evaluate_all(cfg, folder, policy, chosen, evaluate, when))

        train(cfg, folder, policy, reference, split, evaluate_now)
        if chooser:
            policy = keep_best.better_of_last_and_best(cfg, folder, policy, evaluate_now("_last")["eval/em"])
        report.show_results(folder, before, evaluate_all(), AVERAGES)


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, in_world = flags.given_flags(argv)
    loss = given.get("--loss")
    baseline = BASELINES[loss].flags if loss in BASELINES else {}
    paper = default = replace(Config(), **baseline)
    in_hard = given.get("--world", "").startswith("hard")
    if in_world:
        default = replace(Config(), **(HARD if in_hard else WORLD) | baseline)
    if in_world and in_hard and loss in TOKEN_RATIOS:
        default = replace(default, lr=1e-4)
    if in_world and loss == "gspo":
        # ten times the paper's, as for ATPO
        default = replace(default, clip_low=3e-3, clip_high=4e-3)
    return resolve(flags.cli(default, paper, __doc__, argv))


def resolve(cfg):
    """Refuses what cannot run; fills what depends on other fields, so that config.json says what ran."""
    if cfg.kl_coef and cfg.loss != "grpo":
        sys.exit(f"error: --kl-coef goes with --loss grpo; {cfg.loss} has no KL term (Eq 8-11)")
    may_be_zero = "steps rounds expand max_searches token_budget"
    negative = {"bad_format_reward": -math.inf, "branch_penalty": -math.inf}
    cfg = flags.check(cfg, may_be_zero, above_zero="lr temperature grad_clip", least=negative)
    flags.needs_a_model(cfg)
    keep_best.check(cfg)
    shape = cfg.rollout
    if shape == "auto":
        shape = {"atpo": "tree", "aepo": "branches"}.get(cfg.loss, "chains")
    if shape != "tree" and cfg.group_size == 1:
        flags.refuse("group_size", 1, "at least 2: a group's samples are compared")
    if shape == "tree" and cfg.chains + cfg.rounds * cfg.expand == 1:
        flags.refuse("chains", 1, "at least 2 leaves a tree: they are compared")
    name = flags.run_name(cfg, cfg.loss)
    if cfg.eval_only:
        model = cfg.model or cfg.policy_model
        evaluated = (model, cfg.checkpoint, cfg.data, cfg.eval_data, cfg.eval_limit, cfg.seed)
        name = f"eval-{stable_seed(*evaluated) % 10**6}"
    return replace(
        cfg,
        rollout=shape,
        name=cfg.name or name,
        retriever=cfg.retriever or flags.default_retriever(cfg),
    )


def main(argv=None):
    """`python at2po.py …`"""
    with run.program():
        reproduce(parse_args(argv))


# ================================================================ appendix: nothing below is in the paper

METRICS = STEP | ROLLOUT | UPDATE | RATIO | tree_metrics.TREES

# ---------------------------------------------------------------- records for the page

def turn_label(turn):
    """What a turn did: its query or its answer."""
    queries = inside(SEARCH, turn.text)
    if queries:
        return "search: " + queries[-1].strip()
    return "answer" if ANSWER[0] in turn.text else turn.stop_reason


def why(trajectory, question):
    """What led to the reward, in words: the format rule (Eq 15) and the strings compared (Eq 16)."""
    info = trajectory.info
    lines = [f"format (Eq 15): {info.problem or 'valid'}"]
    if info.answer:
        equal = "equal" if info.em else "not equal"
        counted = ", not counted" if info.problem else ""
        strings = record.compared(info.answer, question.answers)
        lines.append(f"exact match (Eq 16): {strings}: {equal}{counted}")
    return lines


@torch.no_grad()
def turn_ratios(model, leaves, cfg):
    """{leaf: [probability of each of its turns now, to that when it was sampled, per token]}"""
    share = cfg.share_prefixes == "on"
    leaf_of = {id(leaf.trajectory): leaf for leaf in leaves}
    ordered = rollout.prefix_order([leaf.trajectory for leaf in leaves])
    batch = rollout.collate(ordered, share, models.pack_tokens(model, cfg.micro_tokens)).to(model.device)
    moved = models.token_logprobs(model, batch, cfg.temperature, cfg.kernels) - batch.rollout_logprobs
    total, tokens = training.turn_sums(moved, batch.response_mask, batch.turn_ids)
    ratios = (total / tokens.clamp(min=1)).exp().tolist()  # (leaves, K)
    return {leaf_of[id(t)]: ratio for t, ratio in zip(ordered, ratios, strict=True)}


def ask(cfg, policy, split):
    """--ask: one trajectory, shown while it is played."""
    prompt_ids = render_prompt(policy.tokenizer, cfg.ask, cfg.prompt_form)

    def agent(search, seed):
        return play(
            policy, search, prompt_ids, Node(), "ask", cfg, seed, cfg.eval_temperature, run.show_turn)
    leaf = run.ask(cfg, policy, split.retriever, agent)
    answer, problem = parse_response(leaf.turns())
    console.print(f"[bold]answer: {plain(answer)}{f' ({problem})' if problem else ''}[/bold]")


# ---------------------------------------------------------------- demonstrations

def render_demonstration(tokenizer, question, demo, index, cfg, box=("\\boxed{ ", " }")):
    """A demonstration in this paper's tags; results are what the retriever returns. box: what stands around
    the answer."""
    def observe(query):
        passages = index.search([query], cfg.top_k)[0]
        return render_observation(tokenizer, passages, cfg.max_passage)

    before, after = ("", "") if demo.flaw == "bad format" else box
    answer = f"{ANSWER[0]} {before}", chat.Foreign(demo.answer), f"{after} {ANSWER[1]}"
    from common.warmup import demonstrations
    turns = demonstrations.search_turns(tokenizer, demo, observe, *answer)
    prompt_ids = render_prompt(tokenizer, question.question, cfg.prompt_form)
    return Trajectory(question.id, prompt_ids, turns)


def warmed_up(cfg, source, split):
    """Folder of `source` after --warmup-data, with Figure 7's words around the answer."""
    def render(tokenizer, question, demo):
        box = ("The final answer is \\[ \\boxed{", "} \\]")
        made = render_demonstration(tokenizer, question, demo, split.retriever, cfg, box)
        if not cfg.stop_at_answer:
            made.turns[-1].ids.append(tokenizer.eos_token_id)
            made.turns[-1].logprobs.append(0.0)
        return [made]

    def reward(made, question):
        turns = made[0].turns
        response = made[0].length - len(made[0].prompt_ids)
        if response > cfg.max_response or len(turns) > cfg.max_searches + 1:
            return None
        return score(made[0], question, cfg).reward

    def reply(tokenizer, turn_ids, observation):
        shown = chat.Foreign(observation)
        return chat.encode(tokenizer, f" {RESULT[0]}\n", shown, f"\n{RESULT[1]}")[1]

    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    ends = "none" if cfg.stop_at_answer else "last"
    examples = warmup.examples_of(
        cfg.warmup_data, tokenizer, split.retriever, render, reward, reply, ends, top_k=cfg.top_k,
        max_passage=cfg.max_passage, flaw_rate=cfg.flaw_rate, longest=cfg.micro_tokens, skip_bad=cfg.skip_bad)
    return warmup.warmed_up(cfg, "at2po", source, examples)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from; made once, then
    cached."""
    words = "Page 1 2 3 now found nothing answer ;".split() + re.findall(r"\w+|[^\w\s]", LIMIT_MESSAGE)
    tags = [*THINK, *SEARCH, *RESULT, *ANSWER, "\\boxed{", "}"]

    def render(tokenizer, row, demo, index):
        return [render_demonstration(tokenizer, data.parse_question(row), demo, index, cfg)]

    from common.world import tiny
    recipe = tiny.Recipe(
        "at2po", cfg.warmup_steps, cfg.flaw_rate, cfg.world_size, cfg.top_k, cfg.world, cfg.engine)
    return tiny.tiny_policy(recipe, words, tags, render)


# ---------------------------------------------------------------- paper, authors' code and ours

DIFFERENCES = """\
Where the paper has words, they are followed; else the authors' code is, unless a row says otherwise. A flag
in brackets takes the other reading.

    bad format        The paper pays 0 for it, the code -1 (--bad-format-reward).
    evaluation        The code decodes greedily and counts EM whatever the format. EM in valid format stands
                      beside it here.
    prompt            Figure 7. The code sends one system message with the question in it, a "?" added.
                      --prompt-form chat sends a system and a user message. In the authors' Python string
                      \\b is an escape, so their prompt holds a backspace character; ours holds \\boxed.
    end of a turn     The code ends an answer at the end of sequence. --stop-at-answer ends it at </answer>.
    order of tags     The paper asks for pairs of tags, the code counts tags. Here the think tags have to
                      alternate, and the last answer is read.
    a result          The code shows 1,000 characters of a page (--max-passage), each text once, and takes
                      quotes out of queries. Here tags and tokens in a page are broken up too.
    room              The code cuts a result that does not fit. Here it is dropped, and the trajectory ends.
    search limit      After 6 searches the seventh is answered by LIMIT_MESSAGE, which is a bad format, and an
                      eighth ends the trajectory. The code repeats the message.
    branch penalty    The paper counts how often a turn was branched, the code its siblings. Here the paper's.
    answers           An answer is never branched, as in the code.
    the root          It may be chosen too, which starts a new chain. Its entropy is 0 and its penalty that of
                      its chains less one, as in the code.
    told of the limit The code never branches such a turn. Here it is a turn like others.
    all answered      Each round then starts N new chains, as in the code: a tree always has M + L N leaves.
    a turn            The code takes a run of ones in the mask. Here the rollout writes turn_ids.
    std of rewards    The code takes the population's in a tree, and the sample's in Table 1's first row. Here
                      it is the sample's wherever the loss is not ATPO's or there is no tree.
    GRPO              The paper prints a mean over sequences (Eq 6) and no dual clip. The code takes the mean
                      of all tokens and a dual clip of 3 (numbers in common/baselines.py).
    flat trees        The code learns from them what the KL term says. Here they are left out.
    DAPO              --loss dapo (Yu et al. 2025).
    Tree-GRPO         --loss grpo --rollout tree --expansion random --credit tree-grpo (Ji et al. 2025).
    AEPO              --loss aepo (Dong et al. 2025), from its authors' code.
    token budget      The paper calls the costs comparable, the code trains all methods for the same steps. A
                      tree costs 19.6 chains and not 16, so here training ends at the tokens that the
                      baseline's chains would have sampled (--token-budget auto). DAPO, which the paper grants
                      three times the questions, has three times as many.
"""


if __name__ == "__main__":
    main()
