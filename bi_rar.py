"""Bi-RAR: Thinking Forward and Backward, RL for retrieval-augmented reasoning (arXiv 2511.09109).

Search-R1's agent thinks, searches, reads, and at last answers. Bi-RAR pays a right trajectory (its answer
matches a gold one exactly) for each of its reasoning steps. The forward reward pays steps near the answer,
the backward reward steps near the question; near means a small information distance under a frozen language
model. Two policies are trained from one checkpoint, one per reward, and their weights are averaged.

GRPO, except: a right trajectory earns 1 - prod_i (1 - r_i) over its reasoning steps (the paper's cascade),
not 1, so a group whose trajectories are all right can still teach; and the result is the average of two
policies. (Ours: a group of equal rewards makes no loss, not even its KL term.)
There are two kinds of step. cfg.steps and `step` are training steps. step_text, answer_step, step_reward and
steps_scored mean the paper's T_i, a *reasoning step*: the thought of a turn (in the embedded world, the toy
data set that comes with the code, the whole turn).

    Eq 2     conditional information distance      information_distance
    Eq 3     complexity as -log2 likelihood        complexity
    Eq 4     distance to answer, to question       terms_of, distances
    Eq 5-6   cascading rewards                     cascade
    Eq 7     r = exp(-d)                           step_reward
    Eq 8-9   GRPO                                  assign_advantages, training.grpo_loss, train
    Eq 10    merged weights                        merge

    python bi_rar.py                    embedded world, seven minutes: baseline, forward, backward, merge
    python bi_rar.py --stage forward    one stage (baseline, forward, backward, merge, eval); --resume goes on
    python bi_rar.py --model Qwen/Qwen2.5-3B-Instruct      the paper's setting: a search server; not run by us
    python bi_rar.py --model M --stage merge --forward A --backward B      two folders of one architecture
Where paper, code and ours differ: docs/differences.md. Numbers reached: results/README.md.
"""

import math
import re
import shutil
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch
from transformers import AutoConfig

from common import chat, checkpoint, data, distributed, flags, metrics, rollout, splits, tool_search, training
from common import model as models
from common.agent import Agent, after_warm_up
from common.folder import left_by
from common.of_bi_rar import page, scoring
from common.page import record
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed
from common.run import Run, program, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings. common/flags.py has the flags of all scripts, recipes/world.toml the settings of
    the embedded world."""

    # ---- stages

    # all = initial, baseline, forward, backward, a merge per share in --lambdas; eval trains nothing.
    # Two controls (common/of_bi_rar/scoring.py): length: a right trajectory earns 1 less .05 per search;
    # shuffled: forward, its distances permuted over all right trajectories of a step
    stage: Literal[
        "all", "baseline", "forward", "backward", "merge", "eval", "length", "shuffled"] = "all"
    forward: str = ""               # merge: folder of the forward policy; empty = this run's
    backward: str = ""              # merge: folder of the backward policy; empty = this run's
    lambdas: str = ".25,.5,.75"     # shares of the backward policy in merges (.25 was chosen) | sec. 4

    # ---- rollout

    # Search-R1's tags in a user message, or calls of the model's own chat template (common/tool_search.py)
    prompt_form: Literal["user", "tools"] = "user"
    group_size: int = 5             # trajectories per question | sec. 4
    top_k: int = 3                  # passages per search | Search-R1
    max_searches: int = 4           # turns that may search, invalid ones too; one more follows | Search-R1
    max_passage: int = 4000         # characters kept of a passage; --max-observation cuts after that
    max_prompt: int = 2048          # tokens of the prompt | Search-R1
    max_turn: int = 500             # tokens per turn | Search-R1
    max_observation: int = 500      # tokens of a search result | Search-R1
    temperature: float = 1.0        # of sampling in training | sec. 4
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | Search-R1

    # ---- reward and loss
    clip: float = .2                # half width of the clip window | sec. 4
    kl_coef: float = 1e-3           # weight of the KL (k3, as in Search-R1) to the initial policy | sec. 4
    # frozen model that measures distances: folder or hub id; empty = the initial policy; lines = the embedded
    # world's policy, trained further on lines of question, reasoning step and answer in the orders of Eq 4
    scorer: str = ""
    # which part of a turn is T_i; a turn without a thought counts whole | sec. 2
    step_text: Literal["thought", "turn"] = "thought"
    # whether the turn that answers is a reasoning step; off: an answer in the first turn earns 0
    answer_step: Literal["on", "off"] = "on"
    explain_limit: int = 100        # trajectories per set whose distances an evaluation measures

    # ---- update
    data: str = "search-r1"         # training questions: file, hub name, or "world"; NQ and HotpotQA | sec. 4
    steps: int = 200                # training steps | sec. 4
    questions_per_step: int = 128   # questions per training step | sec. 4
    mini_batch: int = 128           # questions per update; the paper is silent
    # learning rate, constant | sec. 4, which names no schedule; Search-R1's rises for 28.5 % of the run
    lr: float = 1e-6
    weight_decay: float = .01       # of matrices | verl
    grad_clip: float = 1.0          # largest norm of the gradient | verl


PAPER_EVAL = "nq,triviaqa,popqa,hotpotqa-dev,2wiki-dev,musique-dev,bamboogle"  # Table 1

# ---------------------------------------------------------------- prompt and tags (Search-R1, byte for byte)

PROMPT = """\
Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get \
new information. After reasoning, if you find you lack some knowledge, you can call a search engine by \
<search> query </search> and it will return the top searched results between <information> and \
</information>. You can search as many times as your want. If you find no further external knowledge \
needed, you can directly provide the answer inside <answer> and </answer>, without detailed illustrations. \
For example, <answer> Beijing </answer>. Question: {question}
"""
INVALID = """
My previous action is invalid. If I want to search, I should put the query between <search> and </search>. \
If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try \
again.
"""
ACTIONS = {
    "user": re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL),
    "tools": re.compile(r"<(tool_call|answer)>(.*?)</\1>", re.DOTALL),
}
# PROMPT for --prompt-form tools, where the chat template describes the tool; ours
TOOLS_PROMPT = """\
Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get \
new information. After reasoning, if you find you lack some knowledge, you can call the search tool as many \
times as your want. If you find no further external knowledge needed, you can directly provide the answer \
inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>."""
INVALID_CALL = """\
Your previous action is invalid. To search, call the tool; to give the final answer, put it between <answer> \
and </answer>. Try again."""
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def render_prompt(tokenizer, question, form="user"):
    """Token ids of the prompt. A question without a question mark gets one, as in Search-R1."""
    question = question.strip()
    asked = chat.Foreign(question if question.endswith("?") else question + "?")
    if form == "tools":
        return tool_search.prompt(tokenizer, TOOLS_PROMPT, asked)
    before, after = PROMPT.split("{question}")
    if chat.is_tiny(tokenizer):  # the world's policy reads no instructions
        before = after = ""
    return chat.render_chat(tokenizer, [("user", [before, asked, after])])


def render_observation(tokenizer, passages, limit=500, max_passage=4000, form="user"):
    """(text, ids) of a search result."""
    quote = "" if chat.is_tiny(tokenizer) else '"'  # the world's policy was warmed up without quotes
    return render_result(tokenizer, render_information(passages, quote, max_passage), limit, form)


def render_result(tokenizer, shown, limit, form="user"):
    """(text, ids) of a search result that shows this text. The next turn begins with "<", and ids are as the
    tokenizer cuts before a "<" (chat.before_a_turn). No passage can write a tag or a special token
    (chat.Foreign). A result of more than `limit` tokens loses its end, but not the closing tag; in the form
    of tools the limit does not count the template's own words."""
    if form == "tools":
        ids = chat.encode(tokenizer, chat.Foreign(shown))[1]
        return tool_search.result(tokenizer, tokenizer.decode(ids[:limit]))
    end = "</information>\n\n"
    text, ids = chat.before_a_turn(tokenizer, "\n\n<information>", chat.Foreign(shown), end)
    if len(ids) > limit:
        close = chat.before_a_turn(tokenizer, end)[1]
        ids = ids[: limit - len(close)]
        text, ids = tokenizer.decode(ids) + end, ids + close
    return text, ids


def render_information(passages, quote='"', max_passage=4000):
    """The text between the information tags.

    >>> from common.retriever import Passage
    >>> render_information([Passage("7", "Silent Harbor", "A film.")])
    'Doc 1(Title: "Silent Harbor") A film.'
    """
    docs = []
    for i, p in enumerate(passages, 1):
        docs.append(f"Doc {i}(Title: {quote}{p.title[:max_passage]}{quote}) {p.text[:max_passage]}")
    return "\n".join(docs).strip() or "No passage found."


# ---------------------------------------------------------------- agent (Search-R1's loop)

async def play(player, question, name):
    """One trajectory: think, then search or answer. INVALID answers a turn without a valid action. After
    max_searches turns, invalid ones included, there is a last one; a search in it is not executed. name is
    part of its seeds."""
    cfg, tokenizer = player.cfg, player.policy.tokenizer
    as_tool = cfg.prompt_form == "tools"
    stop = (tool_search.CALL[1] if as_tool else "</search>", "</answer>")
    turns = []
    last = False
    while not last:
        g = await player.policy.engine.generate(
            context_ids(player.prompt_ids, turns),
            stop=stop,
            max_tokens=cfg.max_turn,
            temperature=player.temperature,
            seed=stable_seed(player.seed, name, len(turns)),
        )
        text = rollout.sampled_text(tokenizer, g.token_ids, g.stop_reason)  # last token may go past the stop
        # the loss covers the sampled ids, stop string included; the observation's ids have mask 0
        # (collate, in common/rollout.py)
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)

        kind, content = action_of(text, cfg.prompt_form)
        last = kind == "answer" or len(turns) >= cfg.max_searches
        if not last and kind == "search":
            passages = await player.search(content, cfg.top_k)
            turn.observation, turn.observation_ids = render_observation(
                tokenizer, passages, cfg.max_observation, cfg.max_passage, cfg.prompt_form)
        elif not last and as_tool:
            turn.observation = INVALID_CALL
            turn.observation_ids = chat.render_reply(tokenizer, turn.ids, INVALID_CALL)
        elif not last:
            turn.observation, turn.observation_ids = chat.encode(tokenizer, INVALID)
        turns.append(turn)
        if player.watch:  # --ask prints each turn
            player.watch(turn)
    return check_answer(Trajectory(question.id, player.prompt_ids, turns), question, cfg.prompt_form)


def action_of(text, form="user"):
    """(search or answer, what is asked or said): a turn's first action; ("", "") without one."""
    found = ACTIONS[form].search(text)
    if not found:
        return "", ""
    if found[1] != "tool_call":
        return found[1], found[2].strip()
    query = tool_search.query_of(found[2])
    return ("search", query) if query else ("", "")


@dataclass
class Checked(Outcome):
    """Outcome's answer, problem, searches, em and f1, and:"""
    invalid: int = 0            # turns without an action, which INVALID answered
    d_TA: list | None = None    # distance of each reasoning step to the answer (Eq 4); None: not measured
    d_TQ: list | None = None    # to the question


def check_answer(trajectory, question, form="user"):
    """Sets trajectory.info and returns the trajectory. The answer is that of the last turn."""
    kind, said = action_of(trajectory.turns[-1].text, form)
    answer = said if kind == "answer" else None
    observed = [t.observation for t in trajectory.turns if t.observation]
    # play writes exactly these; every other observation is a search result
    invalid = sum(text in (INVALID, INVALID_CALL) for text in observed)
    info = Checked(answer, invalid=invalid, searches=len(observed) - invalid)
    if answer:
        info.em = metrics.exact_match(answer, question.answers)
        info.f1 = metrics.f1(answer, question.answers)
        info.problem = "an invalid action" if invalid else ""
    else:
        info.problem = "no answer"
    trajectory.info = info
    return trajectory


def rollout_groups(policy, retriever, questions, cfg, step):
    """group_size trajectories per question, all played at once: each rank plays its share, and gets all. What
    a trajectory samples depends on its own seed alone."""
    search = rollout.BatchedSearch(retriever)
    seeds = rollout.question_seeds(questions, cfg.seed, step)
    agents = []
    for question, seed in zip(questions, seeds, strict=True):
        # AGENT (below): player = prompt, policy, search and seed in one object
        player = AGENT.player(policy, search, question, cfg, seed, cfg.temperature)
        agents += [play(player, question, f"chain{k}") for k in range(cfg.group_size)]
    trajectories = rollout.run_agents(agents, policy.engine, search)
    return [trajectories[i:i + cfg.group_size] for i in range(0, len(trajectories), cfg.group_size)]


# ---------------------------------------------------------------- reward: information distance (Eq 2-4)
#
# Q, A and T are the token ids of the question, its first gold answer and one reasoning step. K(u | v) is the
# number of bits that the scorer, a frozen language model, needs for u after v. It sees no passage and no
# earlier reasoning step. Each text of v ends with a line break (which is no token in the embedded world).

FARTHEST = 20.0


def information_distance(k_a_bc, k_b_ac, k_a_c, k_b_c):
    """Eq 2: d(a, b | c) = min{K(a|b,c), K(b|a,c)} / min{K(a|c), K(b|c)}, with min, as printed; the normalized
    information distance has max in both places. The bound of 20 is ours.

    >>> information_distance(2.0, 5.0, 4.0, 8.0)
    0.5
    """
    given_the_other = min(k_a_bc, k_b_ac)
    alone = max(min(k_a_c, k_b_c), 1e-6)
    return min(FARTHEST, given_the_other / alone)


class ReasoningStep(NamedTuple):
    """T_i, with its question's Q and A: token ids, as tuples."""
    Q: tuple
    A: tuple
    T: tuple


def terms_of(reasoning_step, line_break):
    """The seven K(u | v) of Eq 4: {"u|v": (v, u)}, ids as the scorer reads them; texts of v in the order
    Q, A, T. scoring.sequences_of relies on the order of the seven."""
    Q, A, T = reasoning_step

    def lines(*texts):
        return tuple(i for text in texts for i in (*text, *line_break))

    return {
        "T|Q": (lines(Q), T),
        "A|QT": (lines(Q, T), A),
        "A|Q": (lines(Q), A),
        "T|QA": (lines(Q, A), T),
        "T|A": (lines(A), T),
        "Q|AT": (lines(A, T), Q),
        "Q|A": (lines(A), Q),
    }


@torch.no_grad()
def complexity(scorer, v, u):
    """Eq 3: K(u | v) = -log2 P(u | v), in bits; v stands first. `scorer` is any causal model of transformers.
    For readers and tests: a run calls scoring.packed_bits, which has many terms per pass."""
    ids = torch.tensor([[*v, *u]], device=scorer.device)                            # (1, N)
    logits = scorer(input_ids=ids).logits[0, :, :getattr(scorer, "vocabulary", None)]   # (N, V), V unpadded
    logprobs = logits.float().log_softmax(-1)
    of_u = logprobs[len(v) - 1:-1].gather(1, ids[0, len(v):, None])                 # (len(u), 1)
    return -float(of_u.double().sum()) / math.log(2)


def distances(K):
    """Eq 4: (d_TA, d_TQ) = (d(a=T, b=A | c=Q), d(a=T, b=Q | c=A)), from {"u|v": bits}."""
    to_answer = information_distance(K["T|QA"], K["A|QT"], K["T|Q"], K["A|Q"])
    to_question = information_distance(K["T|QA"], K["Q|AT"], K["T|A"], K["Q|A"])
    return to_answer, to_question


def reasoning_steps_of(trajectory, question, tokenizer, cfg, same_vocabulary=True):
    """The trajectory's turns as [ReasoningStep], invalid ones too, without the retrieved text. A thought is
    encoded anew. A whole turn keeps its sampled ids if the scorer has the policy's vocabulary
    (same_vocabulary)."""
    turns = trajectory.turns
    if cfg.answer_step == "off" and trajectory.info.answer:
        turns = turns[:-1]

    def ids_of(text):
        return tuple(chat.encode(tokenizer, chat.Foreign(text))[1])

    Q, A = ids_of(question.question), ids_of(question.answers[0])
    reasoning_steps = []
    for turn in turns:
        thought = THOUGHT.search(turn.text)
        if cfg.step_text == "thought" and thought:
            T = ids_of(thought[1].strip())
        elif same_vocabulary:  # the whole turn, as it was sampled
            T = tuple(turn.ids)
        else:  # encoded anew, its tags as ‹…>
            T = ids_of(turn.text)
        reasoning_steps.append(ReasoningStep(Q, A, T))
    return reasoning_steps


@dataclass
class Scorer:
    model: object               # frozen
    tokenizer: object = None    # its own, where it does not know the policy's token ids


def measure_distances(policy, scorer, pairs, cfg):
    """Fills info.d_TA and info.d_TQ of (trajectory, question) pairs, a number for each reasoning step.
    Returns how many different reasoning steps there are, empty ones, too."""
    if not pairs:
        return 0
    tokenizer = scorer.tokenizer or policy.tokenizer
    same = scorer.tokenizer is None
    steps_of = {t: reasoning_steps_of(t, q, tokenizer, cfg, same_vocabulary=same) for t, q in pairs}
    distinct = dict.fromkeys(r for steps in steps_of.values() for r in steps)  # each is measured once
    line_break = chat.encode(tokenizer, "\n")[1]
    terms = {r: terms_of(r, line_break) for r in distinct if r.T}  # {step: {"u|v": (v, u)}}
    # model: scorer.model; if that is the policy itself (--lora without --scorer), with its adapters off
    with models.reference_weights(policy.model, scorer.model) as model:
        bits = scoring.packed_bits(model, terms.values(), line_break, cfg)  # {(v, u): K(u | v)}, of all ranks
    measured = dict.fromkeys(distinct, (FARTHEST, FARTHEST))  # an empty T stays there
    for r, named in terms.items():
        K = {name: bits[term] for name, term in named.items()}  # "u|v": K(u | v)
        measured[r] = distances(K)
    for t, _ in pairs:
        t.info.d_TA = [measured[r][0] for r in steps_of[t]]
        t.info.d_TQ = [measured[r][1] for r in steps_of[t]]
    return len(distinct)


# ---------------------------------------------------------------- reward: cascade (Eq 5-7)

def step_reward(distance):
    """Eq 7, the reward of a reasoning step."""
    return math.exp(-distance)


def cascade(step_rewards):
    """Eq 5-6 of a right trajectory, as printed: sum_i r_i prod_{j<i} (1 - r_j), over its reasoning steps.
    It equals 1 - prod_i (1 - r_i), the chance that at least one of them succeeds. So their order does not
    matter, and every further reasoning step raises the reward, however bad it is. With d = 1 each:

    >>> [round(cascade([step_reward(1)] * n), 2) for n in (1, 2, 3)]
    [0.37, 0.6, 0.75]
    """
    total, all_failed = 0.0, 1.0
    for r in step_rewards:
        total += all_failed * r
        all_failed *= 1 - r
    return total


def set_rewards(policy, scorer, groups, questions, stage, cfg, step=0):
    """A wrong trajectory earns 0. A right one earns Eq 5 (forward), Eq 6 (backward) or 1 (baseline), so only
    right ones are measured. Returns how many different reasoning steps were measured."""
    right = []
    for group, question in zip(groups, questions, strict=True):
        for t in group:
            t.reward = t.info.em
            if t.info.em:
                right.append((t, question))
    if stage == "length":  # a control
        for t, _ in right:
            t.reward = 1 - scoring.SEARCH_COST * t.info.searches
    if stage in ("baseline", "length"):
        return 0
    measured = measure_distances(policy, scorer, right, cfg)
    if stage == "backward":
        step_distances = [t.info.d_TQ for t, _ in right]
    else:
        step_distances = [t.info.d_TA for t, _ in right]
    if stage == "shuffled":  # a control
        step_distances = scoring.permuted(step_distances, stable_seed(cfg.seed, "shuffled", step))
    for (t, _), ds in zip(right, step_distances, strict=True):
        t.reward = cascade([step_reward(d) for d in ds])
    return measured


# ---------------------------------------------------------------- credit: GRPO's (Eq 8-9)

def assign_advantages(group):
    """(reward - mean) / standard deviation (the sample's) of the group, the same for every turn; 0 where all
    rewards are equal."""
    advantages = training.group_advantages([t.reward for t in group])
    for t, advantage in zip(group, advantages, strict=True):
        t.advantages = [advantage] * len(t.turns)


# ---------------------------------------------------------------- update: a training step

METRICS = page.METRICS  # {name of a logged number: what it is}


def train(run, policy, initial, scorer, split):
    """GRPO with the stage's reward, from the initial policy."""
    cfg, stage, model = run.cfg, run.stage_name, policy.model
    reference = initial if cfg.kl_coef else None
    optimizer = training.make_optimizer(model, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    for step, row in run.steps(policy, optimizer, cfg.steps, label=f"{stage} | "):  # logs, saves when due
        # 1. sample: a group of trajectories for each question, with the current weights
        order_seed = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(split.questions, step, cfg.questions_per_step, order_seed)
        with run.sampling(policy, row):
            groups = rollout_groups(policy, split.retriever, questions, cfg, step)

        # 2. score: the stage's reward, which measures distances where it needs them
        with timed(row, "time/scoring"):
            row["reward/steps_scored"] = set_rewards(policy, scorer, groups, questions, stage, cfg, step)

        # 3. credit: a trajectory's advantage in its group
        for group in groups:
            assign_advantages(group)

        # 4. this rank's micro-batches (B, T), with log-probs of the initial policy (for the KL) and of the
        # policy before any update (old=False: step 5 sets them). Flat groups count in num_sequences alone
        mini_batches = []
        with timed(row, "time/old_logprobs"):
            for first in range(0, len(groups), cfg.mini_batch):
                part = groups[first:first + cfg.mini_batch]
                with_spread = [group for group in part if training.has_spread([t.reward for t in group])]
                trajectories = [t for group in with_spread for t in group]
                if trajectories:  # else this mini-batch makes no update
                    batches = training.prepare(
                        model, reference, trajectories, cfg.micro_tokens, share_prefixes=cfg.share_prefixes,
                        temperature=cfg.temperature, old=bool(mini_batches))
                    mini_batches.append((batches, len(part) * cfg.group_size))

        # 5. per mini-batch: loss = -1/N sum_o 1/|o| sum_t [min(rho adv, clip(rho) adv) - kl_coef k3]
        # rho = exp(logprob - old_logprob); 1 in the first mini-batch, so that the clip does nothing there
        # o: a trajectory, adv: its advantage; N: the mini-batch's trajectories of all ranks, flat groups too.
        # t: its sampled tokens, the stop string's too; prompt, INVALID and search results have mask 0
        all_batches = [b for batches, _ in mini_batches for b in batches]
        meter = training.Meter(all_batches, cfg.sampler_correction)
        training.set_warmup_lr(optimizer, step / cfg.steps, cfg.lr_warmup)  # constant unless --lr-warmup
        for batches, num_sequences in mini_batches:
            for b in batches:  # gradients add up; backward sums those of ranks (FSDP2)
                logprobs = models.token_logprobs(model, b, cfg.temperature)        # (B, T)
                b.remember_old(logprobs)  # in the first update; no effect later
                advantages = training.corrected_advantages(b, cfg.sampler_correction)  # off by default
                # 1 / (N |o|), (B, 1); grpo_loss applies the mask
                token_weights = training.sequence_weights(b.response_mask, num_sequences)
                loss, stats = training.grpo_loss(
                    logprobs, b.old_logprobs, advantages, b.response_mask, token_weights,
                    clip_low=cfg.clip, clip_high=cfg.clip, kl_coef=cfg.kl_coef, ref_logprobs=b.ref_logprobs)
                (loss * b.weight).backward()  # weight 0: a filler, where another GPU has more batches
                meter.add(loss, stats, b.weight)
            norm = training.clip_gradient(model, cfg.grad_clip)
            if meter.end_update(norm):  # loss and gradient are finite, on all ranks
                optimizer.step()
            optimizer.zero_grad()

        row |= meter.means() | page.step_metrics(groups, split.retriever)
        row["sample"] = sample_record(policy, scorer, groups, questions, step, cfg)


def sample_record(policy, scorer, groups, questions, step, cfg):
    """For the page: the first group with different rewards. Every stage measures it, wrong trajectories too,
    so a scorer is always loaded. Call it after page.step_metrics, which averages all that was measured."""
    shown = record.first_with_spread([[t.reward for t in group] for group in groups])
    group, question = groups[shown], questions[shown]
    measure_distances(policy, scorer, [(t, question) for t in group], cfg)
    action = partial(action_of, form=cfg.prompt_form)
    return page.group_record(group, question, step_reward, action, step=step)


# ---------------------------------------------------------------- merge (Eq 10)

@torch.no_grad()
def merge(forward, backward, lam, out):
    """Eq 10: theta = (1 - lam) theta_forward + lam theta_backward, tensor by tensor in fp32. Two Hugging Face
    folders become a third, `out`, in forward's precision and with its tokenizer."""
    if Path(out).resolve() in (Path(forward).resolve(), Path(backward).resolve()):
        raise models.ModelError(f"cannot merge into {out}: it is one of the two; choose another --name")
    pair = [models.load_model(folder, device="cpu", precision="fp32") for folder in (forward, backward)]
    merged, other = pair
    if hasattr(merged, "peft_config") or hasattr(other, "peft_config"):
        raise models.ModelError(f"cannot merge {forward} and {backward}: averaged LoRA adapters are not the "
                                "average of what they do; merge each into its base first (merge_and_unload)")
    shapes = [{(name, theta.shape) for name, theta in model.named_parameters()} for model in pair]
    unlike = sorted({name for name, _ in shapes[0] ^ shapes[1]})  # in one alone, or of another shape
    if type(merged) is not type(other) or unlike:
        raise models.ModelError(f"cannot merge {forward} and {backward}: not one architecture {unlike[:3]}")
    theta_backward = dict(other.named_parameters())
    for name, theta in merged.named_parameters():  # in place: it was the forward policy
        theta.copy_((1 - lam) * theta + lam * theta_backward[name])
    stored = AutoConfig.from_pretrained(models.find_model(forward)).dtype or torch.float32
    shutil.rmtree(out, ignore_errors=True)  # an earlier merge (NAME-weights-LAM)
    merged.to(stored).save_pretrained(out)
    models.load_tokenizer(forward).save_pretrained(out)
    checkpoint.mark_as_trained(backward, out)  # it has learned if either has (splits.has_learned)
    checkpoint.mark_as_trained(forward, out)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress, scorer=None):
    """(rows, summary) of one trajectory per question, at --eval-temperature. "repeats": queries asked twice.
    scorer: measures the distances of the first explain_limit trajectories, for the page."""
    trajectories = AGENT.answers(policy, split, cfg, progress)
    pairs = list(zip(trajectories, split.questions, strict=True))
    if scorer is not None:
        measure_distances(policy, scorer, pairs[:cfg.explain_limit], cfg)
    rows = []
    for t, question in pairs:
        t.reward = t.info.em
        rows.append(page.prediction(t, question, step_reward, partial(action_of, form=cfg.prompt_form)))
    about = {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature}
    return rows, about | metrics.summarize(rows, ("em", "f1", "searches", "tokens", "repeats"))


# ---------------------------------------------------------------- main: the stages
#
# stage       begins with           a right trajectory earns     leaves in runs/bi_rar/
# initial     the initial policy    (only evaluated)             NAME-initial
# baseline    the initial policy    1, as in Search-R1           NAME-baseline, with a checkpoint
# forward     the initial policy    cascade of exp(-d_TA)        NAME-forward, with a checkpoint
# backward    the initial policy    cascade of exp(-d_TQ)        NAME-backward, with a checkpoint
# merged-0.25 forward and backward  (only evaluated)             NAME-merged-0.25; NAME-weights-0.25, a model
#             (--stage merge makes one for each of --lambdas)
# eval        what flags name       (only evaluated)             NAME-eval
# length      the initial policy    1 less .05 per search        NAME-length, with a checkpoint
# shuffled    the initial policy    cascade, d_TA permuted       NAME-shuffled, with a checkpoint

TRAINED = ("baseline", "forward", "backward", "length", "shuffled")


def stages_of(cfg):
    """The names of the stages that --stage asks for, in order."""
    merges = list(dict.fromkeys(f"merged-{float(lam):g}" for lam in cfg.lambdas.split(",")))
    everything = ["initial", "baseline", "forward", "backward", *merges]
    return {"all": everything, "merge": merges}.get(cfg.stage, [cfg.stage])


@program()
def main(argv=None):
    """The stages of --stage, each in a run folder of its own, and their table. What can be refused without
    reading data is refused first. (@program: an error is one line; Ctrl-C says how to go on.)"""
    cfg = parse_args(argv)
    if cfg.scorer and cfg.scorer != "lines":
        models.find_model(cfg.scorer)  # refuses what is no model
    if cfg.stage == "merge":
        pair_to_merge(cfg)  # refuses where one is missing
    stages = [""] if cfg.ask else stages_of(cfg)  # --ask has no folder
    free = ["stage", "lambdas"]  # --resume may change these flags
    runs = [Run(cfg, "bi_rar", METRICS, stage=s, free=free) for s in stages]
    cfg = after_warm_up(cfg, learn_first, runs)  # --warmup-data: trains on it, and sets cfg.checkpoint
    split, evals = splits.load_splits(cfg, PAPER_EVAL)
    initial_source = find_initial(cfg)
    # --stage eval evaluates --checkpoint. Distances: those of --scorer, else of initial_source, if any
    start = cfg.checkpoint or cfg.policy or initial_source
    if cfg.ask:
        return AGENT.ask(runs[0], start, evals[0].retriever)
    for run in runs:
        run_stage(run, start, initial_source, split, evals)
    if cfg.stage != "eval":
        distributed.once(page.show_table, cfg, ("initial", *TRAINED))


def run_stage(run, source, initial_source, split, evals):
    """Loads `source` (a folder or hub id) or merges, trains it where the stage trains, and evaluates it.
    --resume skips a stage that is done: all its steps, and evaluations younger than what was merged."""
    cfg = run.cfg
    trains = run.stage_name in TRAINED
    steps, lora = 0, 0  # where nothing trains no adapters are added: the initial policy is a second model
    if trains:
        steps, lora = cfg.steps, cfg.lora
    merges = run.stage_name.startswith("merged-")
    pair = pair_to_merge(cfg) if merges else []
    written = [file.stat().st_mtime for folder in pair for file in Path(folder).glob("*.safetensors")]
    if run.folder.is_done(steps, evals, newer_than=max(written, default=0)):
        return
    if merges:
        lam = run.stage_name.removeprefix("merged-")
        source = Path(cfg.out) / "bi_rar" / f"{cfg.name}-weights-{lam}"
        distributed.once(merge, *pair, float(lam), source)
    initial_scores = not cfg.scorer
    initial_is_reference = trains and cfg.kl_coef > 0
    needs_initial = bool(initial_source) and (initial_scores or initial_is_reference)
    # how many models are in memory beside the policy: the initial one, unless it is LoRA's base, and --scorer
    num_frozen = int(needs_initial and not lora) + bool(cfg.scorer)
    # folder.start: the checkpoint that --resume goes on from
    policy = run.policy(run.folder.start or source, trains=trains, num_frozen=num_frozen)
    initial = None
    if needs_initial:
        initial = models.load_reference(policy.model, initial_source, lora)
    scorer = load_scorer(cfg, policy, initial, initial_source)
    if not trains:
        split = None
    split, *evals = AGENT.within_limit(policy, [split, *evals], cfg)  # refuses prompts over --max-prompt
    with run.stage(f"Bi-RAR {cfg.name}: {run.stage_name}", policy, evals, evaluate, learned=split):
        if trains:
            train(run, policy, initial, scorer, split)
        final = partial(evaluate, scorer=scorer)  # measures distances; evaluations between steps do not
        run.evaluate(evaluate=final, initial=run.stage_name == "initial")


def pair_to_merge(cfg):
    """The folders of the forward and of the backward policy: those that flags name, else this run's."""
    pair = []
    for stage in ("forward", "backward"):
        given = getattr(cfg, stage)
        left = given or left_by(cfg, "bi_rar", stage, needed_by="a merge")
        pair.append(models.find_model(left))
    return pair


def find_initial(cfg):
    """Folder or hub id of what training begins with: the reference of the KL term and, without --scorer, the
    scorer. Empty where neither flags nor the world name one."""
    # --stage eval: --checkpoint is what is evaluated, not the initial policy, unless a warm-up made it
    if cfg.checkpoint and (cfg.stage != "eval" or cfg.warmup_data):
        return cfg.checkpoint
    if cfg.data == "world" and not (cfg.model or cfg.policy or cfg.forward):  # --forward: of any model
        return tiny_policy(cfg)
    return cfg.model


def load_scorer(cfg, policy, initial, initial_source):
    """The Scorer of --scorer, or the initial policy; None where there is neither."""
    if not cfg.scorer and not initial:
        return None
    source = cfg.scorer or initial_source
    if cfg.scorer == "lines":
        source = scoring.line_scorer(cfg, tiny_policy(cfg), terms_of_demonstration)
    tokenizer = models.load_tokenizer(source)
    model = initial
    if cfg.scorer:
        model = models.load_model(source, precision=cfg.precision, frozen=True)
    model.vocabulary = models.vocabulary_of(tokenizer)
    # one vocabulary: the scorer reads the sampled ids as they are (a served --policy returns text)
    if not cfg.policy and tokenizer.get_vocab() == policy.tokenizer.get_vocab():
        return Scorer(model)
    return Scorer(model, tokenizer)


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    return resolve(flags.parse("bi_rar", Config, __doc__, argv))


def resolve(cfg):
    """Refuses what cannot run, and fills in dependent fields, --name too: config.json records what ran."""
    if cfg.eval_only or cfg.stage == "eval":  # two flags for one thing
        cfg = replace(cfg, stage="eval", eval_only=True)
    # least: room for a result's closing tag; two trajectories to compare
    least = {"max_observation": 20, "group_size": 2}
    tool_search.check(cfg.prompt_form, cfg)
    cfg = flags.check(cfg, may_be_zero="max_searches explain_limit", above_zero="lr temperature grad_clip",
                      least=least)
    if cfg.scorer == "lines" and cfg.data != "world":
        flags.refuse("scorer", "lines", "is the embedded world's; with --model a folder or hub id")
    adapters = [Path(source) / "adapter_config.json" for source in (cfg.model, cfg.checkpoint) if source]
    if (cfg.lora or any(file.exists() for file in adapters)) and cfg.stage in ("all", "merge"):
        flags.refuse("lora", cfg.lora, "adapters are not averaged: train with --stage baseline, forward or "
                     "backward, fold each into its base (merge_and_unload), then --stage merge")
    if (cfg.forward or cfg.backward) and cfg.stage != "merge":
        flags.refuse("forward", cfg.forward, "and --backward are for --stage merge")
    for lam in cfg.lambdas.split(","):
        if not re.fullmatch(r"0?\.\d+|[01](\.0*)?", lam.strip()):
            flags.refuse("lambdas", cfg.lambdas, "numbers between 0 and 1 with commas, such as .25,.5,.75")
    return cfg


# ================================================================ appendix: nothing below is in the paper

AGENT = Agent(
    "bi_rar", play,
    prompt=lambda tokenizer, question, cfg: render_prompt(tokenizer, question.question, cfg.prompt_form),
    result=lambda tokenizer, text, cfg: render_result(
        tokenizer, text, cfg.max_observation, cfg.prompt_form),
    around=(("\n\n<information>", "</information>\n\n"), tool_search.IN_RESPONSE),
    request=PROMPT,
    # the tiny policy's vocabulary, beside the world's words
    tags=[f"<{slash}{name}>" for name in ("think", "search", "information", "answer") for slash in ("", "/")],
    words="Doc ( ) 1 2 3 Title now found nothing answer ; No passage " + re.sub(r"</?\w+>", "", INVALID),
    answer=("<answer> ", " </answer>"),  # around an answer, in the world's demonstrations
    flawed=("", " </answer>"),  # in those with a format error on purpose
    hard=(3000, .4))  # warm-up steps and rate of errors of the tiny policy at each --world but plain
tiny_policy = AGENT.tiny_policy
learn_first = partial(AGENT.learn_first, PAPER_EVAL)


def terms_of_demonstration(cfg, tokenizer, line_break, question, demo, retriever):
    """What --scorer lines learns to read: the terms of each reasoning step of a demonstration."""
    trajectory = AGENT.demonstration(tokenizer, question, demo, retriever, cfg)
    reasoning_steps = reasoning_steps_of(trajectory, question, tokenizer, cfg)
    return [terms_of(r, line_break) for r in dict.fromkeys(reasoning_steps)]


if __name__ == "__main__":
    main()
