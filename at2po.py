"""AT2PO: Agentic Turn-based Policy Optimization via Tree Search (arXiv 2601.04767).

The policy answers a question in turns: it thinks and searches, reads the result, and so on until it answers.
One tree of such trajectories is grown per question: M chains, then L rounds. A round takes the N turns of
highest entropy and plays a new sibling of each to the end. A leaf's value is its standardised reward. A
turn's value is the mean of its children's values, weighted by the children's entropies; it is also the
turn's advantage. ATPO is the loss: one importance ratio and one clip decision per turn, coarser than a token
(GRPO), finer than a sequence (GSPO). AT2PO is tree, values and loss.

GRPO, except: a group is a tree; advantages, ratios and clips are per turn; the clip is .003 and .004; rewards
are divided by the population's std (authors' code); there is no KL term.

    Eq 2            H(turn) = mean of -log p      Turn.entropy: the engine's log-probs of sampled tokens
    Algorithm 1     tree                          grow_tree, choose_nodes, play_turn
    Eq 14-16        reward                        parse_response, score
    Eq 3            values, advantages            leaf_values, node_value, turn_credit
    Eq 4-5, 10-12   ATPO loss                     turn_loss (with one turn per sequence it is GSPO, Eq 8-9)
    Eq 6-7          GRPO loss                     training.grpo_loss
    Eq 13           spread of an update           update_spread

    python at2po.py                               the embedded world: invented facts, a tiny policy, clip, lr,
                                                  tree and format's reward of recipes/world.toml; two CPU
                                                  cores, two minutes
    python at2po.py --loss grpo                   the GRPO baseline: groups of 16 chains, same token budget
    python -m common.ladder at2po table1 --seeds 5      the paper's Table 1 in the embedded world
    python at2po.py --model Qwen/Qwen3-4B         the paper's setting: a search server; not run (docs/gpu.md)
    python at2po.py --eval-only --model Qwen/Qwen3-4B --data musique-dev             ReAct: no training
    python at2po.py --world plain --ask "Who is the spouse of the composer of the film Empty Ocean?"
Where paper, code and ours differ, and the edition cited: docs/differences.md. Numbers: results/README.md.
"""

import asyncio
import math
import random
import re
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import chat, data, flags, metrics, rollout, splits, tool_search, training
from common import model as models
from common.agent import Agent, after_warm_up
from common.of_at2po import baselines, trees
from common.rollout import Outcome, Trajectory, Turn, context_ids, sampled_text, stable_seed
from common.run import Run, program, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings. common/flags.py has the flags of all scripts (model, search, memory, names),
    recipes/world.toml the settings of the embedded world."""

    # ---- tree (Algorithm 1)
    chains: int = 10                # M, chains a tree begins with | sec. 5.1
    rounds: int = 2                 # L, rounds of expansion | sec. 5.1
    expand: int = 6                 # N, turns sampled again per round (the PDF's K) | sec. 5.1
    # which turns get a sibling: entropy = the most uncertain; random; none = chains alone (GRPO, DAPO, GSPO);
    # branches = AEPO's | Algorithm 1
    expansion: Literal["entropy", "random", "none", "branches"] = "entropy"
    group_size: int = 16            # trajectories per question for the baselines | sec. 5.1

    # ---- agent
    top_k: int = 3                  # passages per search | Table 3
    max_searches: int = 6           # searches per trajectory | sec. 5.1
    max_passage: int = 1000         # characters of a passage that are read | authors' code
    max_prompt: int = 2000          # tokens of the prompt | Table 3
    max_response: int = 6192        # tokens of the response, observations included | Table 3
    # where the question is: in the system message (the authors'), or in a user message; tools: as chat, but
    # searches are calls of the model's own chat template (common/tool_search.py)
    prompt_form: Literal["system", "chat", "tools"] = "system"
    # stop at </answer>; off: the policy learns to end | authors' code
    stop_at_answer: bool = False
    temperature: float = 1.0        # in training; top-p 1, no top-k | authors' code
    eval_temperature: float = 0.0   # in evaluation and --ask; 0 = greedy | authors' code

    # ---- reward, credit, loss
    bad_format_reward: float = -1.0  # reward of a bad format; the sentence above Eq 16 says 0 | Eq 16
    # V(n) weighs a child by its entropy H, a softmax of H, equally, or by its leaves | Eq 3, Table 2
    value: Literal["child-weighted", "child-softmax", "child-mean", "leaf-mean"] = "child-weighted"
    # A(n): V(n); td = V(n) - V(parent); global = V(n) - V(root); combined = td + global | Eq 3, Table 2
    advantage: Literal["value", "td", "global", "combined"] = "value"
    # turn = A(n); outcome = the leaf's value, for all its turns; tree-grpo = outcome, plus the leaf's reward
    # standardised among the leaves below the same first turn | Eq 3, Table 1
    credit: Literal["turn", "outcome", "tree-grpo"] = "turn"
    # one ratio per turn (atpo), sequence (gspo) or token; baselines have own defaults | Eq 10-11
    loss: Literal["atpo", "grpo", "dapo", "gspo", "aepo"] = "atpo"
    clip_low: float = 3e-3          # the ratio is clipped below 1 - clip_low | sec. 5.1
    clip_high: float = 4e-3         # and above 1 + clip_high | sec. 5.1
    kl_coef: float = 0.0            # weight of the KL to the initial policy; --loss grpo alone
    # train on turns decoded and encoded anew (Figure 8)
    retokenize: bool = False

    # ---- update

    # file, hub name, or "world"; hotpotqa trains the multi-hop policy, nq the single-hop one | authors' code
    data: str = "hotpotqa"
    steps: int = 240                # training steps | sec. 5.1
    # sampled tokens that end training; 0 = no limit; auto = as many as GRPO samples in all steps: steps x
    # questions_per_step (DAPO: thrice) x group_size x mean tokens of this run's unbranched chains, so far
    token_budget: Literal["auto"] | int = "auto"
    questions_per_step: int = 64    # trees per step | Table 3
    mini_batch: int = 8             # trees per update | Table 3
    epochs: int = 1                 # passes over a step's trees; the paper is silent
    lr: float = 1e-6                # learning rate, constant | Table 3


AVERAGES = {  # sec. 5.1
    "multi-hop average (weighted by questions)": ("hotpotqa-dev", "2wiki-dev", "musique-dev", "bamboogle"),
    "single-hop average (weighted by questions)": ("nq", "triviaqa", "popqa"),
}
PAPER_EVAL = ",".join(name for sets in AVERAGES.values() for name in sets)

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
# for --prompt-form tools, where the chat template describes the tool; ours
TOOLS_PROMPT = SYSTEM_PROMPT.partition(" The reasoning process and")[0] + """ The reasoning process \
and answer are enclosed within <think> </think> and <answer> </answer> tags respectively. In the last part \
of the answer, the final exact answer is enclosed within \\boxed{} with latex format, as in <answer> The \
final answer is \\[ \\boxed{answer here} \\] </answer>."""
# authors' code
LIMIT_MESSAGE = ("I have reached the tool call limit and cannot make further tool calls. Let me provide the "
                 "final answer based on the information I have gathered so far.")


def render_prompt(tokenizer, question, form="system"):
    """Token ids of the first prompt; later turns append ids. form: --prompt-form. chat.Foreign marks text
    from outside: chat breaks up tags and special tokens in it."""
    if form == "tools":
        return tool_search.prompt(tokenizer, TOOLS_PROMPT, question)
    if form == "system":
        asked = question.strip() if question.strip().endswith("?") else question.strip() + "?"
        message = [f"{SYSTEM_PROMPT}\nuser\n", chat.Foreign(asked)]  # sic: their template has the word "user"
        return chat.render_chat(tokenizer, [("system", message)])
    return chat.render_chat(tokenizer, [("system", SYSTEM_PROMPT), ("user", [chat.Foreign(question)])])


def render_passages(passages, max_passage=1000):
    """The text between the result tags: each page once, its title and text cut to `max_passage` characters.

    >>> from common.retriever import Passage
    >>> render_passages([Passage("7", "Silent Harbor", "A film."), Passage("8", "Silent Harbor", "A film.")])
    'Page 1: "Silent Harbor"\\nA film.'
    """
    once = {(p.title, p.text): p for p in passages}.values()
    pages = []
    for i, p in enumerate(once, 1):
        pages.append(f'Page {i}: "{p.title[:max_passage]}"\n{p.text[:max_passage]}')
    return "\n".join(pages) or "No passage found."


# the line break keeps Qwen's tokenizer from joining ">" and the next turn's "<" in one token
AROUND = f" {RESULT[0]}\n", f"\n{RESULT[1]}\n"


def render_result(tokenizer, text, form="system"):
    """(text, ids) of a search result."""
    if form == "tools":
        return tool_search.result(tokenizer, text)
    return chat.encode(tokenizer, AROUND[0], chat.Foreign(text), AROUND[1])


def tags_of(form):
    """The tags around a search, and around its result."""
    return (tool_search.CALL, tool_search.RESPONSE) if form == "tools" else (SEARCH, RESULT)


def inside(tags, text):
    """The text between each pair of tags.

    >>> inside(SEARCH, "<search>a</search> so <search>b</search>")
    ['a', 'b']
    """
    return re.findall(re.escape(tags[0]) + r"(.*?)" + re.escape(tags[1]), text, re.DOTALL)


# ---------------------------------------------------------------- agent: a tree of turns (Algorithm 1)

@dataclass(eq=False)
class Node:
    """One turn in the tree; the root is the prompt. A path from the root to a leaf is a trajectory."""

    turn: "Turn | None" = None
    parent: "Node | None" = None
    # the call of `play` that sampled it, part of its seed. "chain3.0-2": round 0's choice 2 (both from 0) was
    # a turn of chain3, and this path begins with its sibling; ".0-2": it was the root, this is a new chain
    name: str = ""
    children: list["Node"] = field(default_factory=list)
    done: bool = False                      # a leaf: nothing follows it
    value: float = 0.0                      # V(n)
    weights: list[float] = field(default_factory=list)  # what each child counts in V(n)
    advantage: float = 0.0                  # A(n)
    trajectory: "Trajectory | None" = None  # of a leaf

    def lineage(self):
        """The nodes from the first turn to this one."""
        return [] if self.parent is None else [*self.parent.lineage(), self]

    def turns(self):
        return [node.turn for node in self.lineage()]

    def nodes(self):
        """This node and all below it, depth first."""
        return [self] + [n for child in self.children for n in child.nodes()]

    def leaves(self):
        return [n for n in self.nodes() if n.done]

    def rewards(self):
        return [leaf.trajectory.reward for leaf in self.leaves()]


async def play_turn(player, node, name):
    """One turn after `node`: sample it, search, read the result. Returns its node, a new child of `node`.
    player: policy, search, prompt_ids, cfg, seed, temperature (common/agent.py).

    A turn without a query ends the trajectory (quotes are removed from a query). After max_searches the
    next query gets LIMIT_MESSAGE, and the one after it ends the trajectory. A result that leaves no room for
    a token is dropped, and ends it as "length"."""
    cfg, tokenizer = player.cfg, player.policy.tokenizer
    call, _ = tags_of(cfg.prompt_form)
    stop = (call[1],)
    if cfg.stop_at_answer:
        stop += (ANSWER[1],)
    turns = node.turns()  # each of them asked for a search
    context = context_ids(player.prompt_ids, turns)
    # tokens left for this turn and its result; positive, or the turn before would have ended as "length"
    room = cfg.max_response - (len(context) - len(player.prompt_ids))
    new = Node(None, node, name)
    node.children.append(new)  # before anything is awaited: siblings stand in the order they were asked for

    g = await player.policy.engine.generate(
        context,
        stop=stop,
        max_tokens=room,
        temperature=player.temperature,
        seed=stable_seed(player.seed, name, len(turns)),  # name: which path; len(turns): which turn of it
    )
    text = sampled_text(tokenizer, g.token_ids, g.stop_reason)  # may go on past the stop string
    # the loss covers the sampled ids, stop string included; the observation's ids have mask 0 (collate, in
    # common/rollout.py)
    turn = new.turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)

    query, queries = "", inside(call, text)
    if g.stop_reason == call[1] and queries:
        query = tool_search.query_of(queries[-1]) if cfg.prompt_form == "tools" else queries[-1]
        query = query.replace('"', "").strip()
    # observation: text, for trajectories.html and parse_response's check of tags; observation_ids: what the
    # policy reads next
    if query and len(turns) < cfg.max_searches:
        passages = await player.search(query, cfg.top_k)
        result = render_passages(passages, cfg.max_passage)
        turn.observation, turn.observation_ids = render_result(tokenizer, result, cfg.prompt_form)
    elif query and len(turns) == cfg.max_searches:
        # one search too many: the policy is told once, and the format counts as invalid (Eq 15)
        turn.observation = f"\n{LIMIT_MESSAGE}\n"
        if cfg.prompt_form == "tools":
            turn.observation_ids = chat.render_reply(tokenizer, turn.ids, LIMIT_MESSAGE)
        else:
            _, turn.observation_ids = chat.encode(tokenizer, turn.observation)
    if turn.observation_ids and len(turn.ids) + len(turn.observation_ids) >= room:  # no room for a next token
        turn.observation, turn.observation_ids, turn.stop_reason = "", [], "length"
    new.done = not turn.observation_ids  # nothing was read, so nothing follows
    return new


async def play(player, node, name):
    """From `node` to the end, turn by turn. Returns the leaf."""
    while not node.done:
        node = await play_turn(player, node, name)
        if player.watch:  # --ask prints each turn
            player.watch(node.turn)
    return node


SIBLING_PENALTY = .05  # alpha of Algorithm 1, line 11 | authors' code


def choose_nodes(root, cfg, rng):
    """The N nodes that get a sibling next (lines 10 to 12): the most uncertain turns first, or random ones;
    never a leaf. The root has no siblings: where it is chosen, a new chain begins."""
    candidates = [n for n in root.nodes() if not n.done]
    if cfg.expansion == "random":
        # too few: drawn with replacement, as in the authors' code
        draw = rng.sample if len(candidates) >= cfg.expand else rng.choices
        return draw(candidates, k=cfg.expand)

    def uncertainty(node):
        # Line 11 counts the turn itself, too: .05 more for each, so the order is the same. The root has no
        # entropy: it ranks as a child of the root with entropy 0 (authors' code)
        if node is root:
            return -SIBLING_PENALTY * (len(root.children) - 1)
        return node.turn.entropy - SIBLING_PENALTY * (len(node.parent.children) - 1)

    ranked = sorted(candidates, key=uncertainty, reverse=True)
    return [ranked[i % len(ranked)] for i in range(cfg.expand)]  # too few: again from the top


async def grow_tree(play_from, cfg, seed):
    """Algorithm 1. Returns the root.

    play_from(node, name): an async function that adds turns below `node` until the trajectory ends; name goes
    to their nodes. cfg: chains, rounds, expand, expansion, group_size."""
    root = Node()
    # a baseline's group is a tree without rounds
    chains, rounds = (cfg.group_size, 0) if cfg.expansion == "none" else (cfg.chains, cfg.rounds)
    await asyncio.gather(*[play_from(root, f"chain{m}") for m in range(chains)])
    for r in range(rounds):
        rng = random.Random(stable_seed(seed, "expand", r))  # a stream of its own for each round
        new_paths = []
        for i, node in enumerate(choose_nodes(root, cfg, rng)):
            parent = node.parent or root  # a sibling: the same state, a new turn
            new_paths.append(play_from(parent, f"{node.name}.{r}-{i}"))
        await asyncio.gather(*new_paths)
    return root


def rollout_trees(policy, retriever, questions, cfg, step):
    """One tree per question, all grown at once: each rank (GPU) grows its share, and gets all. A tree expands
    when its own leaves are done (sec. 7); what it samples does not depend on the others."""
    search = rollout.BatchedSearch(retriever)

    async def grow(question, seed):
        player = AGENT.player(policy, search, question, cfg, seed, cfg.temperature)
        if cfg.expansion == "branches":
            rng = random.Random(stable_seed(seed, "branch"))
            next_turn = partial(play_turn, player)
            root = await baselines.grow_aepo(next_turn, Node(), cfg, rng, len(policy.tokenizer))
        else:
            root = await grow_tree(partial(play, player), cfg, seed)
        if cfg.retokenize:  # Figure 8's control: train on text that is encoded anew
            baselines.retokenize(policy.tokenizer, root)
        for leaf in root.leaves():
            leaf.trajectory = Trajectory(question.id, player.prompt_ids, leaf.turns())
        return root

    seeds = rollout.tree_seeds(questions, cfg.seed, step)
    agents = [grow(q, seed) for q, seed in zip(questions, seeds, strict=True)]
    return rollout.run_agents(agents, policy.engine, search)


# ---------------------------------------------------------------- reward (Eq 14-16)

def boxed(text):
    """Content of the last \\boxed{…} or \\fbox{…}, braces balanced; None if there is none.

    >>> boxed("so \\\\[ \\\\boxed{a {b} c} \\\\]"), boxed("\\\\boxed {a}")
    ('a {b} c', 'a')
    """
    opened = list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))
    if not opened:
        return None
    depth, start = 1, opened[-1].end()
    for i in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start:i].strip()
    return None  # never closed


def parse_response(turns, form="system"):
    """(answer or None, problem or ""), Eq 15. Of observations it reads only whether they are results.

    Valid: think tags are there and paired; the policy wrote no result tag; every turn but the last is one
    search that got its result; the last has exactly one answer block, with \\boxed{} inside. Text around the
    block is allowed: the token that ends a stop string may go on, as ">." does."""
    search, result = tags_of(form)
    text = "".join(t.text for t in turns)
    last = turns[-1].text
    answers = inside(ANSWER, text)
    answer = boxed(answers[-1]) if answers else None
    thoughts = re.findall(r"</?think>", text)
    if not thoughts or thoughts != list(THINK) * (len(thoughts) // 2):  # <think>, </think>, <think>, …
        return answer, "think tags not paired"
    if result[0] in text or result[1] in text:
        return answer, "wrote a result itself"
    for tag in ANSWER:
        if text.count(tag) != 1 or tag not in last:
            return answer, "not exactly one answer block, in the last turn"
    for turn in turns[:-1]:
        one_search = turn.text.count(search[0]) == turn.text.count(search[1]) == 1
        if not one_search or result[0] not in turn.observation:
            return answer, "a search without its result"
    if any(tag in last for tag in search):
        return answer, "a search without its result"
    if answer is None:
        return None, "no \\boxed{} in the answer"
    if not answer:
        return None, "an empty \\boxed{}"
    return answer, ""


@dataclass
class Scored(Outcome):
    """Outcome's answer, problem, searches, em and f1, and one more. em and f1 ignore the format, as the
    authors evaluate."""
    em_valid: float = 0.0       # em in valid format, else 0


def score(trajectory, question, cfg):
    """Sets the reward (exact match, or --bad-format-reward; Eq 16) and info. Returns the trajectory."""
    answer, problem = parse_response(trajectory.turns, cfg.prompt_form)
    _, result = tags_of(cfg.prompt_form)
    searches = sum(result[0] in t.observation for t in trajectory.turns)
    info = trajectory.info = Scored(answer, problem, searches=searches)
    if answer:
        info.em = metrics.exact_match(answer, question.answers)
        info.f1 = metrics.f1(answer, question.answers)
    info.em_valid = 0.0 if problem else info.em
    trajectory.reward = cfg.bad_format_reward if problem else info.em
    return trajectory


def score_trees(roots, questions, cfg):
    """Scores every leaf."""
    for root, question in zip(roots, questions, strict=True):
        for leaf in root.leaves():
            score(leaf.trajectory, question, cfg)


# ---------------------------------------------------------------- credit: values, advantages (Eq 3, Table 2)

def leaf_values(rewards, sample_std=False):
    """(R - mean) / (std + 1e-6) over the leaves of a tree. sample_std: divide by n - 1, as GRPO does, and not
    by n."""
    mean = sum(rewards) / len(rewards)
    n = max(1, len(rewards) - int(sample_std))
    variance = sum((r - mean) ** 2 for r in rewards) / n
    return [(r - mean) / (math.sqrt(variance) + 1e-6) for r in rewards]


def child_weights(children, rule):
    """What each child's value counts in its parent's; they add up to 1."""
    entropies = [child.turn.entropy for child in children]
    equal = [1.0] * len(children)
    if rule == "child-weighted":  # H(c) / sum of H(c')
        weights = entropies if any(entropies) else equal  # where all are 0: ours
    elif rule == "child-softmax":  # authors' code; nearly equal while entropies are below .1 nats
        weights = [math.exp(h) for h in entropies]
    elif rule == "child-mean":
        weights = equal
    elif rule == "leaf-mean":  # TreeRL
        weights = [len(child.leaves()) for child in children]
    else:
        raise ValueError(f"rule {rule}: child-weighted, child-softmax, child-mean or leaf-mean")
    return [w / sum(weights) for w in weights]


def node_value(node, rule):
    """Sets and returns V(n) from the children's values (Eq 3). A leaf keeps its value. A node with one child
    has the child's, so in a chain every turn has the leaf's: GRPO's advantage."""
    if node.done:
        return node.value
    values = [node_value(child, rule) for child in node.children]
    node.weights = child_weights(node.children, rule)
    node.value = sum(w * v for w, v in zip(node.weights, values, strict=True))
    return node.value


def turn_credit(root, value_rule, advantage_rule, sample_std):
    """Eq 3: V(n) and A(n) of every turn, from leaf.trajectory.reward and the turns' entropies."""
    for leaf, value in zip(root.leaves(), leaf_values(root.rewards(), sample_std), strict=True):
        leaf.value = value
    node_value(root, value_rule)
    for node in root.nodes()[1:]:  # the root has no turn
        td = node.value - node.parent.value
        above_root = node.value - root.value
        by_rule = {"value": node.value, "td": td, "global": above_root, "combined": td + above_root}
        node.advantage = by_rule[advantage_rule]


def assign_advantages(root, cfg):
    """Gives every leaf's trajectory one advantage per turn, or none where all leaves have the same reward:
    there is nothing to learn from such a tree."""
    if not training.has_spread(root.rewards()):
        return
    # the authors divide by the population's std in every tree, ours for ATPO on trees alone, and by the
    # sample's for all else. NO_TREE: expansions of a baseline's group
    sample_std = cfg.loss != "atpo" or cfg.expansion in baselines.NO_TREE
    turn_credit(root, cfg.value, cfg.advantage, sample_std)
    for leaf in root.leaves():
        of_turns = [node.advantage for node in leaf.lineage()]
        if cfg.credit == "outcome":  # Table 1: the leaf's value for all its turns
            of_turns = [leaf.value] * len(of_turns)
        leaf.trajectory.advantages = of_turns
    if cfg.credit == "tree-grpo":  # replaces the advantages just set
        baselines.tree_grpo_credit(root, partial(leaf_values, sample_std=sample_std))


# ---------------------------------------------------------------- loss (Eq 4-5, 8-13)

def turn_loss(log_ratio, advantages, tokens, clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """Eq 10-12. Returns (loss, stats). GSPO (Eq 8-9) is the case of one turn per sequence.

    All are (B, K), K: most turns of a row. log_ratio: log pi - log pi_old, summed over the turn's tokens.
    advantages: A of the turn. tokens: how many it has; 0 = there is no such turn. num_sequences: divides the
    sum: the sequences of the whole mini-batch; without it B."""
    # Eq 11: s_k = (pi(turn k) / pi_old(turn k))^(1 / |turn k|). Its gradient is Eq 12's, s_k times the mean
    # over the turn of grad log p_t. A mean log-ratio above 10 counts as 10: s stays finite, without gradient
    s = (log_ratio / tokens.clamp(min=1)).clamp(max=10).exp()
    objective = torch.minimum(s * advantages, s.clamp(1 - clip_low, 1 + clip_high) * advantages)
    # Eq 10: the mean over a sequence's tokens, in which a turn counts |turn k| / |sequence|, then over all
    # leaves (not per tree)
    share = tokens / tokens.sum(1, keepdim=True).clamp(min=1)
    loss = -(share * objective).sum() / (num_sequences or len(tokens))

    # only where the minimum is the clipped term
    clipped = (s > 1 + clip_high) & (advantages > 0) | (s < 1 - clip_low) & (advantages < 0)
    return loss, training.loss_stats(log_ratio, clipped, tokens, s)


def atpo_loss(logprobs, old_logprobs, advantages, response_mask, turn_ids,
              clip_low=3e-3, clip_high=4e-3, num_sequences=None):
    """Not called here: turn_loss from tokens, for other trainers (examples/). Returns (loss, stats).
    All are (B, T); [b, t] belongs to token t (log-probs are shifted already).

    logprobs: in float32; old_logprobs, advantages: without gradient. response_mask: what the policy sampled,
    any dtype. turn_ids: its turns, numbered from 0 in each row; -1 elsewhere. A turn's advantage is its
    tokens' mean."""
    # the mask as bool; refuses shapes that do not fit
    response_mask = training.per_token(logprobs, response_mask, old_logprobs=old_logprobs,
                                       advantages=advantages, turn_ids=turn_ids)
    log_ratio, tokens = training.turn_sums(logprobs - old_logprobs, response_mask, turn_ids)
    sums, _ = training.turn_sums(advantages, response_mask, turn_ids)
    return turn_loss(log_ratio, sums / tokens.clamp(min=1), tokens, clip_low, clip_high, num_sequences)


def update_spread(log_ratio, response_mask, turn_ids):
    """Eq 13, logged only: how evenly an update is spread over the turns of each sequence, (B,) from 0 to 1. A
    turn's KL is estimated by the sum of its tokens' -log-ratios; its share is that over the sequence's; p =
    softmax of the n turns' shares; H(p) / log n, or 0 for n = 1. log_ratio: new - old, (B, T)."""
    sums, tokens = training.turn_sums(-log_ratio, response_mask, turn_ids)         # (B, K)
    real = tokens > 0
    total = sums.sum(1, keepdim=True)                                              # (B, 1)
    # terms of both signs may nearly cancel: shares are then large, as Eq 13 has it
    share = sums / torch.where(total.abs() > 1e-12, total, 1.0)
    p = share.masked_fill(~real, -torch.inf).softmax(1)
    entropy = -(p * p.clamp(min=1e-12).log()).sum(1) / real.sum(1).clamp(min=2).log()  # (B,)
    return torch.where(real.sum(1) > 1, entropy, 0.0)


def policy_loss(logprobs, turn_logprobs, batch, cfg, num_sequences, num_tokens):
    """(loss, stats) of a micro-batch. logprobs: (B, T); turn_logprobs: (B, K), their sums per turn.
    The denominator is num_sequences of the whole mini-batch, all ranks (DAPO and AEPO: num_tokens)."""
    # (B, T); --sampler-correction token multiplies by min(p_trainer / p_engine, 2); a turn takes the mean
    advantages = training.corrected_advantages(batch, cfg.sampler_correction)
    if cfg.loss in baselines.TOKEN_RATIOS:  # GRPO, DAPO, AEPO
        return baselines.token_loss(logprobs, batch, advantages, cfg, num_sequences, num_tokens)
    log_ratio = turn_logprobs - batch.old_turn_logprobs                                  # (B, K)
    sums, tokens = training.turn_sums(advantages, batch.response_mask, batch.turn_ids)
    if cfg.loss == "gspo":  # a sequence is one turn
        log_ratio, sums, tokens = (x.sum(1, keepdim=True) for x in (log_ratio, sums, tokens))
    advantages = sums / tokens.clamp(min=1)
    return turn_loss(log_ratio, advantages, tokens, cfg.clip_low, cfg.clip_high, num_sequences)


# ---------------------------------------------------------------- update

def trajectories_of(roots):
    """One trajectory per leaf: a turn that k leaves share enters the loss k times."""
    return [leaf.trajectory for root in roots for leaf in root.leaves()]


METRICS = trees.METRICS  # {name of a logged number: what it is}


def mini_batches_of(roots, model, reference, cfg):
    """[(this rank's micro-batches, all ranks' sequences, all ranks' sampled tokens)], one per update. A turn
    that leaves share is computed once. Old log-probs are the trained model's before any update, not the
    engine's; the first update takes them from its own pass (train)."""
    mini_batches = []
    for i in range(0, len(roots), cfg.mini_batch):
        trajectories = trajectories_of(roots[i:i + cfg.mini_batch])
        # a flat tree has no gradient: no pass, and (ours) no KL; denominators count it (Eq 10)
        with_advantages = [t for t in trajectories if t.advantages]
        if not with_advantages:
            continue
        batches = training.prepare(
            model, reference, with_advantages, micro_tokens=cfg.micro_tokens,
            share_prefixes=cfg.share_prefixes, temperature=cfg.temperature,
            entropies=cfg.loss == "aepo", old=bool(mini_batches))  # the first's: from its own pass (train)
        baselines.balance_entropy(cfg.loss, batches)  # AEPO alone
        num_tokens = sum(t.sampled_tokens for t in trajectories)  # no prompts, no observations
        mini_batches.append((batches, len(trajectories), num_tokens))
    return mini_batches


def train(run, policy, reference, split):
    """A step: grow a tree per question, give every turn an advantage, update once per mini-batch of trees."""
    cfg, model = run.cfg, policy.model
    # AdamW with weight decay .01; gradients are clipped at norm 1 | authors' code
    optimizer = training.make_optimizer(model, cfg.lr, kind=cfg.optimizer)
    # --token-budget (ours). .spent: checkpoints keep it; .questions_per_step: cfg's, times three for DAPO
    budget = baselines.TokenBudget(cfg)
    # ends after cfg.steps, or when budget.share(step) is 1; a body's row is logged; evaluates, saves if due
    for step, row in run.steps(policy, optimizer, cfg.steps, state=budget.spent, share=budget.share):
        # 1. sample (Algorithm 1): one tree per question (DAPO draws more), with the current weights
        order_seed = stable_seed(cfg.seed, "order")  # one seed for all steps
        questions = data.batch_of_step(split.questions, step, budget.questions_per_step, order_seed)
        with run.sampling(policy, row):
            roots = rollout_trees(policy, split.retriever, questions, cfg, step)

        # 2. score the leaves (Eq 14-16)
        score_trees(roots, questions, cfg)

        # 3. credit (Eq 3): one advantage per turn; none in flat trees, whose leaves have equal rewards
        # learned_from: all trees; DAPO first lowers rewards of long responses, in place, and picks its trees
        learned_roots = baselines.learned_from(roots, cfg)
        for root in learned_roots:
            assign_advantages(root, cfg)

        # 4. mini-batches; all but the first get old log-probs here, of the weights that sampled
        with timed(row, "time/old_logprobs"):
            mini_batches = mini_batches_of(learned_roots, model, reference, cfg)

        # 5. update (Eq 10-11), once per mini-batch
        done = budget.share(step - 1) + 1 / cfg.steps  # this step included, as a share of cfg.steps
        training.set_warmup_lr(optimizer, done, cfg.lr_warmup)  # constant unless --lr-warmup
        all_batches = [b for batches, _, _ in mini_batches for b in batches]
        meter = training.Meter(all_batches, cfg.sampler_correction, cfg.epochs)
        for batches, num_sequences, num_tokens in mini_batches * cfg.epochs:
            for b in batches:  # micro-batches, for memory alone: gradients add up, over ranks too (FSDP2)
                logprobs, turn_logprobs = models.turn_logprobs(model, b, cfg.temperature)  # (B, T), (B, K)
                b.remember_old(logprobs, turn_logprobs)  # in the first update; no effect later
                loss, stats = policy_loss(logprobs, turn_logprobs, b, cfg, num_sequences, num_tokens)
                (loss * b.weight).backward()  # weight 0: a filler, where another GPU has more batches
                if meter.total:  # an update was made in this step; before it all log-ratios are 0
                    moved = logprobs.detach() - b.old_logprobs
                    stats["spreads"] = update_spread(moved, b.response_mask, b.turn_ids).tolist()
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model)
            if meter.end_update(norm):  # loss and gradient are finite, on all ranks
                optimizer.step()
            optimizer.zero_grad()

        row |= trees.step_metrics(roots, meter, split.retriever)
        # ours, one more forward pass: how far this step moved the log-probs of the last mini-batch's tokens
        # with A > 0, and with A < 0; all other train/ metrics are of the weights before the last update
        if mini_batches:
            last, *_ = mini_batches[-1]
            row |= training.moved(model, last, cfg.temperature)
        budget.add(row)
        row["sample"] = trees.sample_record(policy, roots, questions, step, cfg)


# ---------------------------------------------------------------- evaluate

async def answer(player, question, name):
    """One chain, scored: what evaluation, --ask and demonstrations play."""
    leaf = await play(player, Node(), name)
    return score(Trajectory(question.id, player.prompt_ids, leaf.turns()), question, player.cfg)


def evaluate(policy, split, cfg, progress):
    """One chain per question at --eval-temperature; AGENT (at the end) calls `answer`. Returns (rows,
    summary)."""
    return AGENT.evaluate(policy, split, cfg, progress, trees.prediction)


# ---------------------------------------------------------------- main

@program()
def main(argv=None):
    """Evaluates, trains, evaluates again. What can be refused without reading data is refused first.
    (@program: an error is one line; Ctrl-C says how to go on.)"""
    cfg = parse_args(argv)
    run = Run(cfg, "at2po", METRICS, free=["token_budget"])  # --resume may change this flag
    cfg = after_warm_up(cfg, learn_first, [run])  # --warmup-data trains first; sets cfg's, run's checkpoint
    split, evals = splits.load_splits(cfg, PAPER_EVAL)
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)  # --policy: address of an API
    if cfg.ask:
        return AGENT.ask(run, source, evals[0].retriever)
    # models in memory beside the policy: the reference, which with LoRA is its base
    num_frozen = int(cfg.kl_coef > 0 and not cfg.lora)
    # folder.start: the checkpoint that --resume goes on from
    policy = run.policy(run.folder.start or source, trains=not cfg.eval_only, num_frozen=num_frozen)
    if cfg.eval_only:
        split = None  # no training
    split, *evals = AGENT.within_limit(policy, [split, *evals], cfg)  # refuses prompts over --max-prompt
    title = f"AT2PO {cfg.name}: {cfg.loss}, {cfg.expansion} expansion"
    with run.stage(title, policy, evals, evaluate, learned=split):
        if cfg.eval_only:
            return trees.show_results(run.folder.path, AVERAGES, run.evaluate())
        reference = None
        if cfg.kl_coef:
            # of `source`, not folder.start: a resumed run's reference is the initial policy, too
            reference = models.load_reference(policy.model, source, cfg.lora)
        before = run.evaluate("_before", initial=True)  # --resume reads the one on file
        train(run, policy, reference, split)
        trees.show_results(run.folder.path, AVERAGES, run.evaluate(), before)


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    return resolve(flags.parse("at2po", Config, __doc__, argv, baselines.defaults))


def resolve(cfg):
    """Refuses what cannot run, and fills in dependent fields, --name too: config.json records what ran."""
    baselines.check(cfg)
    tool_search.check(cfg.prompt_form, cfg)
    return flags.check(cfg, cfg.loss, may_be_zero="steps rounds expand max_searches token_budget",
                       above_zero="lr temperature", least={"bad_format_reward": -math.inf})


# ================================================================ appendix: nothing below is in the paper

# What the outside has to know of the agent (common/agent.py): --ask, --collect, demonstrations, warm-ups and
# the embedded world's tiny policy follow from it.
AGENT = Agent(
    "at2po",
    answer,
    prompt=lambda tokenizer, question, cfg: render_prompt(tokenizer, question.question, cfg.prompt_form),
    result=lambda tokenizer, text, cfg: render_result(tokenizer, text, cfg.prompt_form),
    around=(AROUND, tool_search.IN_RESPONSE),
    system=SYSTEM_PROMPT,
    # the tiny policy's vocabulary, beside the world's words
    tags=(*THINK, *SEARCH, *RESULT, *ANSWER, "\\boxed{", "}"),
    words="Page 1 2 3 now found nothing answer ; " + LIMIT_MESSAGE,
    # what stands around an answer. answer: in the world's demonstrations; flawed: in those with a format
    # error on purpose, so that training can mend it; real: in those of real questions (Figure 7's words)
    answer=(f"{ANSWER[0]} \\boxed{{ ", f" }} {ANSWER[1]}"),
    flawed=(f"{ANSWER[0]} ", f" {ANSWER[1]}"),
    real=(f"{ANSWER[0]} The final answer is \\[ \\boxed{{", f"}} \\] {ANSWER[1]}"),
    ends=lambda cfg: "none" if cfg.stop_at_answer else "last",  # which turns learn to end the sequence
)
tiny_policy = AGENT.tiny_policy
learn_first = partial(AGENT.learn_first, PAPER_EVAL)


if __name__ == "__main__":
    main()
