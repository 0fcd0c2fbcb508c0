"""Bi-RAR: Thinking Forward and Backward, multi-objective RL for retrieval-augmented reasoning (arXiv
2511.09109).

Search-R1's agent (think, search, read, …, answer), with a reward for every step: how near it is to the answer
(forward) and how well it sticks to the question (backward), measured as an information distance under a
frozen language model. Two policies are trained from one checkpoint, one for each reward, and their weights
are averaged.

GRPO, except: the reward of a right trajectory is the cascade of its steps' rewards, and two policies are
merged. Rewards are for right trajectories alone; the agent is Search-R1's.

    Eq 2     conditional information distance      information_distance
    Eq 3     complexity as -log2 likelihood        complexities
    Eq 4     step to answer, step to question      step_distances
    Eq 5-6   cascading rewards                     cascade (as printed), telescoped
    Eq 7     r = exp(-d)                           step_reward
    Eq 8-9   GRPO                                  assign_advantages, training.grpo_loss
    Eq 10    merged weights                        merge

    python bi_rar.py                    embedded world: baseline, forward, backward, merges; 13 minutes
    python bi_rar.py --stage forward    one stage (baseline, forward, backward, merge, eval); --resume goes on
    python bi_rar.py --stage merge --forward A --backward B --lambdas .25,.5    any two folders of one kind
    python bi_rar.py --model Qwen/Qwen2.5-3B-Instruct       the paper's setting; large GPUs, a server; not run
What is not in the paper is at the end (appendix) or in common/. Numbers reached: results/README.md.
"""

import math
import random
import re
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import (
    chat,
    checkpoint,
    data,
    distance_metrics,
    distributed,
    flags,
    guards,
    metrics,
    report,
    rollout,
    run,
    splits,
    training,
    weights,
)
from common import model as models
from common.distance_plot import plot_distances
from common.files import console, plain, read_jsonl, say, warn
from common.guards import RATIO, ROLLOUT, STEP, UPDATE
from common.page import record
from common.rollout import Outcome, Trajectory, Turn, context_ids, stable_seed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.PassageFlags):
    """The paper's settings; what a run needs besides (model, search, memory, names) is in common/flags.py."""

    # ---- stages

    # what to do; all = baseline, forward, backward, merge, each evaluated. Controls: length = exact match
    # less .05 a search, shuffled = forward with the distances of the step's trajectories dealt out anew
    stage: Literal[
        "all", "baseline", "forward", "backward", "merge", "eval", "length", "shuffled"] = "all"
    forward: str = ""               # merge: folder of the forward policy; empty = this run's
    backward: str = ""              # merge: folder of the backward policy; empty = this run's
    lambdas: str = ".25,.5,.75"     # weights of the backward policy in the merge (.25 was chosen) | sec. 4

    # ---- rollout
    group_size: int = 5             # trajectories a question | sec. 4
    top_k: int = 3                  # passages a search | Search-R1
    max_searches: int = 4           # actions before the last turn; invalid ones count | Search-R1
    max_passage: int = 4000         # characters of a passage that are read, before tokens are counted
    max_prompt: int = 2048          # tokens of the prompt | Search-R1
    max_turn: int = 500             # tokens a turn | Search-R1
    max_observation: int = 500      # tokens of a search result | Search-R1
    temperature: float = 1.0        # of sampling in training | sec. 4
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | Search-R1

    # ---- reward and loss
    clip: float = .2                # half width of the clip window | sec. 4
    kl_coef: float = 1e-3           # k3 estimate of the KL to the initial policy | sec. 4
    # model of the distances, folder or hub id; empty = the initial policy; lines = that of the world, trained
    # on lines of questions, steps and answers
    scorer: str = ""
    step_text: Literal["thought", "turn"] = "thought"   # what of a turn is the step | sec. 2
    answer_step: Literal["on", "off"] = "on"            # the turn that answers is a step
    context: Literal["step", "history"] = "step"        # what stands before a step; history = earlier steps
    explain_limit: int = 200        # evaluated trajectories a set whose steps are scored, for page and plot

    # ---- update
    data: str = "search-r1"         # training questions: file, hub name, or "world"; NQ and HotpotQA | sec. 4
    steps: int = 200                # training steps | sec. 4
    questions_per_step: int = 128   # questions a step | sec. 4
    mini_batch: int = 128           # questions an update; one update a step, the paper is silent
    # learning rate | sec. 4; constant is ours (the paper is silent, Search-R1's code warms up for 28.5 %)
    lr: float = 1e-6
    weight_decay: float = .01       # of matrices | verl
    grad_clip: float = 1.0          # largest norm of the gradient | verl


# What differs in the embedded world. The learning rate is at2po.py's, chosen there for GRPO on the dev split.
# Steps and evaluation at temperature 1 were set after a three-step trial on 60 test questions (greedy
# decoding hides most of what the policy has to unlearn); nothing else was tuned in this world.
WORLD = dict(
    data="world",
    retriever="bm25",
    top_k=1,
    max_turn=120,
    step_text="turn",
    eval_limit=400,
    eval_temperature=1.0,
    steps=100,
    questions_per_step=32,
    mini_batch=8,
    lr=1e-4,
    micro_tokens=8192,
    save_every=5,
)
# And at the world's second level (--world hard:elastic=.3), where paths differ in length: reading them takes
# twice the warm-up. The learning rate is at2po.py's there; that and the rest were not tuned for this paper.
HARD = WORLD | dict(
    warmup_steps=3000,
    flaw_rate=.4,
    limit=1500,
    eval_limit=2000,
    scorer="lines",
    steps=60,
    lr=2e-4,
    questions_per_step=16,
    mini_batch=4,
    max_searches=6,
)
PAPER_EVAL = "nq,triviaqa,popqa,hotpotqa-dev,2wiki-dev,musique-dev,bamboogle"  # Table 1
SEARCH_COST = .05  # of the control `length`
SCORER_STEPS = 300  # of --scorer lines
PAPER = {  # Qwen2.5-3B-Instruct, mean of the seven sets
    "baseline": "0.336 (Search-R1)",
    "forward": "0.384",
    "backward": "0.377",
    "lambda 0.25": "0.397",
}

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
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def render_prompt(tokenizer, question):
    """Token ids of the first prompt; the question gets its question mark."""
    question = question.strip()
    asked = chat.Foreign(question if question.endswith("?") else question + "?")
    before, after = PROMPT.split("{question}")
    if chat.is_tiny(tokenizer):
        before = after = ""
    return chat.render_chat(tokenizer, [("user", [before, asked, after])])


def render_observation(tokenizer, passages, limit=500, max_passage=4000):
    """(text, ids) of a search result; no passage can write a tag or a token of its own. A result over `limit`
    tokens loses its end."""
    close = chat.encode(tokenizer, "</information>\n\n")[1]
    quote = "" if chat.is_tiny(tokenizer) else '"'
    shown = chat.Foreign(render_information(passages, quote, max_passage))
    text, ids = chat.encode(tokenizer, "\n\n<information>", shown)
    if len(ids) + len(close) > limit:
        ids = ids[: limit - len(close)]
        text = tokenizer.decode(ids)
    return f"{text}</information>\n\n", ids + close


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

async def play(policy, search, question, path, cfg, seed, temperature, watch=None):
    """Think, then search or answer; an invalid action is told so; after the last search comes a turn without
    one."""
    prompt_ids = render_prompt(policy.tokenizer, question.question)
    turns = []
    last = False
    while not last:
        g = await policy.engine.generate(
            context_ids(prompt_ids, turns),
            stop=("</search>", "</answer>"),
            max_tokens=cfg.max_turn,
            temperature=temperature,
            seed=stable_seed(seed, path, len(turns)),
        )
        text = rollout.sampled_text(policy.tokenizer, g.token_ids, g.stop_reason)
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, text)

        action = ACTION.search(text)
        last = bool(action and action[1] == "answer") or len(turns) >= cfg.max_searches
        if not last and action:
            passages = await search(action[2].strip(), cfg.top_k)
            turn.observation, turn.observation_ids = render_observation(
                policy.tokenizer, passages, cfg.max_observation, cfg.max_passage
            )
        elif not last:
            turn.observation, turn.observation_ids = chat.encode(policy.tokenizer, INVALID)
        turns.append(turn)
        if watch:
            watch(turn)
    return judge(Trajectory(question.id, prompt_ids, turns), question)


@dataclass
class Judged(Outcome):
    invalid: int = 0            # turns that neither search nor answer, and are told so
    d_TA: list | None = None    # distances of the steps to the answer and to the question (Eq 4), of those
    d_TQ: list | None = None    # trajectories that are scored


def judge(trajectory, question):
    """Fills info; the answer is that of the last turn."""
    action = ACTION.search(trajectory.turns[-1].text)
    answer = action[2].strip() if action and action[1] == "answer" else None
    trajectory.info = Judged(
        answer,
        problem="" if answer else "no answer",
        em=metrics.exact_match(answer, question.answers) if answer else 0.0,
        f1=metrics.f1(answer, question.answers) if answer else 0.0,
        invalid=sum(t.observation == INVALID for t in trajectory.turns),
        searches=sum("<information>" in t.observation for t in trajectory.turns),
    )
    return trajectory


def rollout_groups(policy, retriever, questions, cfg, step):
    """[[trajectory] * group_size] of the questions, all played at once; a sample depends on its own seed
    alone."""
    search = rollout.BatchedSearch(retriever)
    agents = []
    for q, seed in zip(questions, rollout.question_seeds(questions, cfg.seed, step), strict=True):
        agents += [
            play(policy, search, q, f"chain{k}", cfg, seed, cfg.temperature) for k in range(cfg.group_size)
        ]
    done = rollout.run_agents(agents, policy.engine, search)
    return [done[i:i + cfg.group_size] for i in range(0, len(done), cfg.group_size)]


# ---------------------------------------------------------------- reward: information distance (Eq 2-4)

def information_distance(k_a_bc, k_b_ac, k_a_c, k_b_c):
    """Eq 2: d(a, b | c) = min{K(a|b,c), K(b|a,c)} / min{K(a|c), K(b|c)}, clipped to [0, 20]. The paper's
    form: min below as above.

    >>> information_distance(2.0, 5.0, 4.0, 8.0)
    0.5
    """
    return min(20.0, max(0.0, min(k_a_bc, k_b_ac) / max(min(k_a_c, k_b_c), 1e-6)))


def scored_paths(tokenizer, jobs):
    """{job: the four sequences that its complexities are read from}

    jobs: [(question, answer, step ids, ids of each step before it)]. Each string stands on a line of its own.
    Every sequence is a Trajectory whose turns are what is scored."""
    line = chat.encode(tokenizer, "\n")[1]

    def part(ids):
        return Turn(list(ids), [0.0] * len(ids), "", "", line)

    def text_part(text):
        return part(chat.encode(tokenizer, chat.Foreign(text))[1])

    shared, paths = {}, {}
    for job in dict.fromkeys(jobs):
        question, answer, step, before = job
        Q, A = shared.setdefault((question, answer), (text_part(question), text_part(answer)))
        earlier = [i for ids in before for i in (*ids, *line)]

        def path(context, *scored, earlier=earlier):
            return Trajectory("", context.ids + line + earlier, list(scored))

        paths[job] = (
            path(Q, part(step), part(A.ids)),  # K(T|Q), K(A|Q,T)
            path(Q, A, part(step)),            # K(A|Q), K(T|Q,A)
            path(A, part(step), part(Q.ids)),  # K(T|A), K(Q|A,T)
            path(A, Q),                        # K(Q|A)
        )
    return paths


@torch.no_grad()
def complexities(scorer, tokenizer, jobs, cfg):
    """Eq 3: {job: (K(T|QA), K(A|QT), K(T|Q), K(A|Q), K(Q|AT), K(T|A), K(Q|A))} in bits, jobs as in
    scored_paths.

    That is eight likelihoods a step, of which two depend on the question alone and two are the same number.
    The rest share prefixes: Q-T-A gives K(T|Q) and K(A|T,Q) in one pass, Q-A-T gives K(A|Q) and K(T|A,Q),
    A-T-Q gives K(T|A) and K(Q|T,A). All steps of a batch are packed, each prefix computed once."""
    paths = scored_paths(tokenizer, jobs)
    flat = [p for four in paths.values() for p in four]
    for number, trajectory in enumerate(flat):
        trajectory.question_id = number
    scored = []  # on this rank: (number of the path, bits of its turns)
    for batch in training.collate_parts(scorer, flat, cfg.micro_tokens, cfg.share_prefixes):
        logprobs = models.token_logprobs(scorer, batch, 1.0, cfg.kernels)
        sums, _ = training.turn_sums(logprobs.double(), batch.response_mask, batch.turn_ids)   # (B, K)
        for trajectory, of_turns in zip(batch.trajectories, sums.tolist(), strict=True):
            scored.append((trajectory.question_id, [-s / math.log(2) for s in of_turns]))
    bits = dict(distributed.gather(scored))
    found = {}
    for key, (qt, qa, at, q) in paths.items():
        k_t_q, k_a_qt = bits[qt.question_id][:2]
        k_a_q, k_t_qa = bits[qa.question_id][:2]
        k_t_a, k_q_at = bits[at.question_id][:2]
        found[key] = k_t_qa, k_a_qt, k_t_q, k_a_q, k_q_at, k_t_a, bits[q.question_id][0]
    return found


def step_distances(scorer, tokenizer, jobs, cfg):
    """Eq 4: {job: (d_TA, d_TQ)}; a step without a token says nothing and is as far as can be."""
    found = {job: (20.0, 20.0) for job in jobs if not job[2]}
    scored = complexities(scorer, tokenizer, [job for job in jobs if job[2]], cfg)
    for job, (k_t_qa, k_a_qt, k_t_q, k_a_q, k_q_at, k_t_a, k_q_a) in scored.items():
        to_answer = information_distance(k_t_qa, k_a_qt, k_t_q, k_a_q)
        to_question = information_distance(k_t_qa, k_q_at, k_t_a, k_q_a)
        found[job] = to_answer, to_question
    return found


@dataclass
class Scorer:
    """The frozen model of the distances, and its tokenizer where that is not the policy's."""
    model: object
    tokenizer: object = None


def jobs_of(trajectory, question, tokenizer, cfg, own_ids=True):
    """The steps of a trajectory as jobs of scored_paths. own_ids: the sampled ids are the scorer's, too; else
    their text is read with its tokenizer, as a thought always is (a thought without tags: the whole turn)."""
    turns = trajectory.turns
    if cfg.answer_step == "off" and trajectory.info.answer:
        turns = turns[:-1]
    found, before = [], ()
    for turn in turns:
        thought = THOUGHT.search(turn.text) if cfg.step_text == "thought" else None
        if own_ids and not thought:
            ids = tuple(turn.ids)
        else:
            text = thought[1].strip() if thought else turn.text
            ids = tuple(chat.encode(tokenizer, chat.Foreign(text))[1])
        found.append((question.question, question.answers[0], ids, before))
        before = (*before, ids) if cfg.context == "history" else ()
    return found


def score_steps(policy, scorer, pairs, cfg):
    """Fills info.d_TA and info.d_TQ, a number a step, of (trajectory, question) pairs. Returns how many
    different steps were scored."""
    if not pairs:
        return 0
    tokenizer = scorer.tokenizer or policy.tokenizer
    jobs = [jobs_of(t, q, tokenizer, cfg, own_ids=scorer.tokenizer is None) for t, q in pairs]
    with models.reference_weights(policy.model, scorer.model) as model:
        distances = step_distances(model, tokenizer, [job for steps in jobs for job in steps], cfg)
    for (t, _), steps in zip(pairs, jobs, strict=True):
        t.info.d_TA = [distances[job][0] for job in steps]
        t.info.d_TQ = [distances[job][1] for job in steps]
    return len(distances)


# ---------------------------------------------------------------- reward: cascade (Eq 5-7)

def step_reward(distance):
    """Eq 7."""
    return math.exp(-distance)


def cascade(step_rewards):
    """Eq 5-6 without the indicator, as printed: sum_i r_i prod_{j<i} (1 - r_j). It is the chance that at
    least one step succeeds: no order counts, and every further step adds.

    >>> cascade([.5, .5]), telescoped([.5, .5])
    (0.75, 0.75)
    """
    total, left = 0.0, 1.0
    for r in step_rewards:
        total += left * r
        left *= 1 - r
    return total


def telescoped(step_rewards):
    """The same number: 1 - prod_i (1 - r_i)."""
    return 1 - math.prod(1 - r for r in step_rewards)


# what a stage's reward is made of
DISTANCE = {"forward": "d_TA", "backward": "d_TQ", "shuffled": "d_TA"}


def set_rewards(policy, scorer, groups, questions, stage, cfg, step=0):
    """Eq 5, Eq 6, the baseline's exact match, or a control's. Only right trajectories need their steps
    scored. Returns the number of steps scored."""
    everything = [t for group in groups for t in group]
    for t in everything:
        t.reward = t.info.em if stage not in DISTANCE else 0.0
        if stage == "length":
            t.reward *= 1 - SEARCH_COST * t.info.searches
    if stage not in DISTANCE:
        return 0
    right = [(t, q) for group, q in zip(groups, questions, strict=True) for t in group if t.info.em]
    scored = score_steps(policy, scorer, right, cfg)
    distances = [d for t, _ in right for d in getattr(t.info, DISTANCE[stage])]
    if stage == "shuffled":
        random.Random(stable_seed(cfg.seed, "shuffled", step)).shuffle(distances)
    dealt = iter(distances)
    for t, _ in right:
        t.reward = cascade([step_reward(next(dealt)) for _ in t.info.d_TA])
    return scored


# ---------------------------------------------------------------- credit: GRPO's (Eq 8-9)

def assign_advantages(group):
    """The group's advantage for every turn of a trajectory. Returns whether there is anything to learn."""
    rewards = [t.reward for t in group]
    for t, advantage in zip(group, training.group_advantages(rewards), strict=True):
        t.advantages = [advantage] * len(t.turns)
    return training.has_spread(rewards)


# ---------------------------------------------------------------- update

def update(model, initial, optimizer, groups, cfg, keep="nonfinite"):
    """One pass over the step's groups, `mini_batch` questions an update. Returns the step's means.

    Groups of one reward teach nothing and are left out; the denominator still counts their trajectories."""
    started = time.time()
    parts = [groups[i:i + cfg.mini_batch] for i in range(0, len(groups), cfg.mini_batch)]
    learn = [[group for group in part if assign_advantages(group)] for part in parts]
    # all old log-probs before the first update: they are those of the weights that sampled
    reference = initial if cfg.kl_coef else None
    prepared = []
    for part in learn:
        trajectories = [t for group in part for t in group]
        prepared.append(training.prepare(
            model, reference, trajectories, cfg.micro_tokens, cfg.share_prefixes, cfg.temperature,
            cfg.kernels))
    row = {
        "time/old_logprobs": time.time() - started,
        "rollout/flat_groups": 1 - sum(map(len, learn)) / len(groups),
    }

    meter = training.Meter([b for batches in prepared for b in batches], keep, cfg.sampler_correction)
    for part, batches in zip(parts, prepared, strict=True):
        if not batches:
            continue
        num_sequences = len(part) * cfg.group_size
        for b in batches:
            logprobs = models.token_logprobs(model, b, cfg.temperature, cfg.kernels)  # (B, T)
            weights = training.sequence_weights(b.response_mask, num_sequences)        # (B, 1)
            loss, stats = training.grpo_loss(
                logprobs,
                b.old_logprobs,
                training.corrected_advantages(b, cfg.sampler_correction),
                b.response_mask,
                weights,
                cfg.clip,
                cfg.clip,
                cfg.kl_coef,
                b.ref_logprobs,
            )
            (loss * b.weight).backward()
            meter.add(loss, stats, b.weight)
        norm = training.clip_gradient(model, cfg.grad_clip)
        if meter.finite(norm, batches):  # else loss or gradient is not a number: no update
            optimizer.step()
        optimizer.zero_grad()
    return row | meter.means()


# ---------------------------------------------------------------- train

def train(cfg, stage, folder, policy, initial, scorer, split, evaluate_now):
    """One GRPO run with the stage's reward: sample groups, score, update; once a step."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay, kind=cfg.optimizer)
    steps = run.steps(cfg, folder, policy, optimizer, METRICS, evaluate=evaluate_now, label=f"{stage} | ")
    for step, row in steps:
        order = stable_seed(cfg.seed, "order")
        questions = data.batch_of_step(split.questions, step, cfg.questions_per_step, order)
        with run.timed(row, "time/rollout"):
            policy.engine.sync(policy.model)
            groups = rollout_groups(policy, split.retriever, questions, cfg, step)
            policy.engine.sleep()

        with run.timed(row, "time/scoring"):
            row["reward/steps_scored"] = set_rewards(policy, scorer, groups, questions, stage, cfg, step)
        row |= distance_metrics.rollout_metrics(groups) | rollout.search_repairs(split.retriever)

        row |= update(policy.model, initial, optimizer, groups, cfg, folder.nonfinite(step))
        row["sample"] = sample_record(policy, scorer, groups, questions, step, cfg)


# ---------------------------------------------------------------- merge (Eq 10)

def merge(forward, backward, lam, out):
    """Eq 10: (1 - lam) forward + lam backward, tensor by tensor, into the folder `out`, which is returned."""
    def mix(a, b):
        return (1 - lam) * a + lam * b
    return weights.combine(forward, backward, mix, out)


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress, scorer=None):
    """One trajectory a question, greedy by default. Returns (rows, summary); with a scorer the steps of the
    first explain_limit trajectories are scored, for page and plot."""
    policy.engine.sync(policy.model)
    search = rollout.BatchedSearch(split.retriever)
    agents = []
    for q in split.questions:
        seed = stable_seed(cfg.seed, "eval", q.id)
        agents.append(play(policy, search, q, "eval", cfg, seed, cfg.eval_temperature))
    done = rollout.run_agents(agents, policy.engine, search, progress)
    pairs = list(zip(done, split.questions, strict=True))
    if scorer is not None:
        score_steps(policy, scorer, pairs[: cfg.explain_limit], cfg)
    for t in done:
        t.reward = t.info.em
    rows = [prediction(t, q) for t, q in pairs]
    about = {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature}
    return rows, about | metrics.summarize(rows)


# ---------------------------------------------------------------- main

TRAINED = ("baseline", "forward", "backward")
CONTROLS = ("length", "shuffled")  # trained where they are named


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    stages = stages_of(cfg)
    for stage in stages:
        stage_folder(cfg, stage)
    if cfg.stage == "merge":
        weights.files_of_one_architecture(*map(Path, pair_to_merge(cfg)))
    if cfg.checkpoint or cfg.model:
        models.find_model(start_weights(cfg))
    split, evals = splits.load_splits(cfg, PAPER_EVAL)
    only_merges = stages and all(stage.startswith("merged-") for stage in stages)
    start = None if only_merges and not cfg.warmup_data else start_weights(cfg)
    initial = initial_weights(cfg)
    if cfg.warmup_data:
        place = split or evals[0]
        start = initial = warmed_up(cfg, start, place.retriever)
    if cfg.ask:
        return ask(cfg, run.load_policy(cfg, start, trains=False), evals[0])
    if cfg.stage == "eval":
        return run_stage(cfg, "eval", start, initial, None, evals)
    run.tell(cfg)
    base = Path(cfg.out) / "bi_rar"
    for stage in stages:
        if stage.startswith("merged-"):
            lam = stage.removeprefix("merged-")
            pair = pair_to_merge(cfg)
            merged = base / f"{cfg.name}-weights-{lam}"
            distributed.once(merge, *pair, float(lam), merged)
            run_stage(cfg, stage, merged, initial, None, evals, made_from=pair)
        else:
            run_stage(cfg, stage, start, start, None if stage == "initial" else split, evals)
    distributed.once(show_table, cfg)


def stages_of(cfg):
    """What --stage asks for, in order; nothing for --ask."""
    if cfg.ask:
        return []
    if cfg.stage == "eval":
        return ["eval"]
    if cfg.stage in CONTROLS:
        return [cfg.stage]
    stages = [s for s in ("initial", *TRAINED) if cfg.stage in ("all", s)]
    if cfg.stage in ("all", "merge"):
        stages += dict.fromkeys(f"merged-{float(x):g}" for x in cfg.lambdas.split(","))
    return stages


def run_stage(cfg, stage, source, initial_source, split, evals, made_from=()):
    """Trains (baseline, forward, backward, controls) or only evaluates (initial, merged weights, eval)
    `source`; leaves a run folder. What --resume finds done is not done again, unless the checkpoints in
    made_from are newer."""
    folder = stage_folder(cfg, stage)
    trains = stage in (*TRAINED, *CONTROLS)
    files = [f for made in made_from for f in Path(made).glob("*.safetensors")]
    newest = max((f.stat().st_mtime for f in files), default=0)
    steps = len(read_jsonl(folder.path / "metrics.jsonl")) if trains else cfg.steps
    if folder.resume and steps >= cfg.steps and folder.evaluated(evals, newest):
        return say(f"{stage}: done before")
    lora = cfg.lora if trains else 0
    beside = int(bool(initial_source) and not lora) + bool(cfg.scorer)
    policy = run.load_policy(cfg, folder.start or source, trains, frozen=beside)
    initial = initial_source and models.load_reference(policy.model, initial_source, lora)
    scorer = load_scorer(cfg, policy, initial)

    def length(q):
        return len(render_prompt(policy.tokenizer, q.question))
    split, *evals = splits.within_limit([split, *evals], length, cfg.max_prompt, cfg.skip_bad)

    def evaluate_all(when=""):
        def score(*given):  # steps are scored at the end alone
            return evaluate(*given, None if when else scorer)
        return run.evaluate_all(cfg, folder, policy, evals, score, when)

    with run.stage(cfg, folder, METRICS, f"Bi-RAR {cfg.name}: {stage}"):
        if trains:
            train(cfg, stage, folder, policy, initial, scorer, split,
                  lambda when: run.mean_em(evaluate_all(when)))
        results = evaluate_all()
        if stage == "initial":
            guards.look_at_start({name: r["summary"] for name, r in results.items()}, warn)


def stage_folder(cfg, stage):
    free = (*run.FREE_ON_RESUME, "stage", "lambdas")
    name = f"{cfg.name}-{stage}"
    return run.open_folder(cfg, "bi_rar", name, free, one_of_many=True, saves=stage in (*TRAINED, *CONTROLS))


def pair_to_merge(cfg):
    """The folders of the forward and of the backward policy."""
    forward = cfg.forward or checkpoint_folder(cfg, "forward")
    return [forward, cfg.backward or checkpoint_folder(cfg, "backward")]


def checkpoint_folder(cfg, stage):
    """The weights that a stage of this run left."""
    folder = Path(cfg.out) / "bi_rar" / f"{cfg.name}-{stage}" / "checkpoint"
    return checkpoint.find(folder) or folder


def start_weights(cfg):
    """What every stage starts from: a folder or hub id."""
    source = cfg.checkpoint or cfg.model or cfg.policy or tiny_policy(cfg)
    return checkpoint.find(source) or source


def initial_weights(cfg):
    """The initial policy, which scores an evaluation where there is no --scorer; None where nobody says which
    it was."""
    if cfg.policy:
        return None
    if cfg.stage == "eval" and cfg.checkpoint:
        known = cfg.model or cfg.data == "world" and not cfg.forward
        return start_weights(replace(cfg, checkpoint="")) if known else None
    return None if cfg.forward and not (cfg.model or cfg.checkpoint) else start_weights(cfg)


def load_scorer(cfg, policy, initial):
    """The Scorer of --scorer; None where there is neither one nor an initial policy."""
    if not cfg.scorer:
        return Scorer(initial) if initial else None
    lines = cfg.scorer == "lines"
    source = line_scorer(cfg, tiny_policy(cfg)) if lines else models.find_model(cfg.scorer)
    model = models.load_model(source, precision=cfg.precision, frozen=True)
    tokenizer = models.load_tokenizer(source)
    same = not cfg.policy and tokenizer.get_vocab() == policy.tokenizer.get_vocab()
    return Scorer(model, None if same else tokenizer)


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, given, in_world = flags.given_flags(argv)
    of_world = HARD if given.get("--world", "").startswith("hard") else WORLD
    return resolve(flags.cli(replace(Config(), **(of_world if in_world else {})), Config(), __doc__, argv))


def resolve(cfg):
    """Refuses what cannot run; fills what depends on other fields, so that config.json says what ran."""
    least = {"max_observation": 20, "group_size": 2}  # (GRPO compares samples)
    cfg = flags.check(cfg, "max_searches explain_limit", above_zero="lr temperature grad_clip", least=least)
    flags.needs_a_model(cfg)
    if cfg.scorer == "lines" and cfg.data != "world":
        flags.refuse("scorer", "lines", "is the embedded world's; with --model a folder or hub id")
    if cfg.lora and cfg.stage in ("all", "merge"):
        sys.exit("error: --lora trains with --stage baseline, forward or backward; adapters are not "
                 "averaged: fold each into its base (merge_and_unload), then --stage merge --forward A "
                 "--backward B")
    try:
        shares = [float(x) for x in cfg.lambdas.split(",")]
    except ValueError:
        shares = [-1.0]
    if not all(0 <= x <= 1 for x in shares):
        flags.refuse("lambdas", cfg.lambdas, "numbers between 0 and 1 with commas, such as .25,.5,.75")
    only = cfg.eval_only or cfg.stage == "eval"
    return replace(
        cfg,
        stage="eval" if only else cfg.stage,
        eval_only=only,
        name=cfg.name or flags.run_name(cfg),
        retriever=cfg.retriever or flags.default_retriever(cfg),
    )


def main(argv=None):
    """`python bi_rar.py …`"""
    with run.program():
        reproduce(parse_args(argv))


# ================================================================ appendix: nothing below is in the paper
#
# ---------------------------------------------------------------- metrics of a step

METRICS = STEP | ROLLOUT | UPDATE | RATIO | distance_metrics.DISTANCES

# ---------------------------------------------------------------- records for the page

def turn_facts(trajectory, k, left):
    """What was measured of turn k: distances, rewards and shares of the cascade; left: what is left of each
    cascade, which becomes less."""
    facts = {}
    for d in ("d_TA", "d_TQ"):
        distances = getattr(trajectory.info, d) or ()
        if k < len(distances):
            r = step_reward(distances[k])
            facts |= {d: distances[k], f"r_{d[2:]}": r, f"cascade_{d[2:]}": left[d] * r}
            left[d] *= 1 - r
    return facts


def turn_label(turn):
    """What a turn did: its query or its answer."""
    action = ACTION.search(turn.text)
    if not action:
        return "invalid"
    return "answer" if action[1] == "answer" else "search: " + action[2].strip()


def why(trajectory, question):
    """What led to the reward, in words."""
    info = trajectory.info
    equal = "equal" if info.em else "not equal"
    lines = [f"exact match: {record.compared(info.answer, question.answers)}: {equal}"]
    for name, eq, distances in (("forward", 5, info.d_TA), ("backward", 6, info.d_TQ)):
        if distances is not None:
            total = telescoped([step_reward(d) for d in distances])
            lines.append(f"{name} cascade (Eq {eq}): {total:.4f}, counted where the answer is right")
    return lines


def group_record(trajectories, question, tokenizer=None, **extra):
    """Trajectories of one question for the page."""
    nodes, done = [record.root_node()], []
    for t in trajectories:
        path, left = [0], {"d_TA": 1.0, "d_TQ": 1.0}
        for k, turn in enumerate(t.turns):
            facts = {"label": turn_label(turn), "advantage": t.advantages[k] if t.advantages else None}
            facts |= turn_facts(t, k, left)
            nodes.append(record.turn_node(len(nodes), [path[-1]], turn, tokenizer, **facts))
            path.append(nodes[-1]["id"])
        done.append(record.outcome(t, path, why(t, question)))
    return record.group(question, nodes, done, **extra)


def prediction(trajectory, question):
    """A row of eval_<set>.json."""
    info = trajectory.info
    row = {"id": question.id, "tokens": trajectory.sampled_tokens}
    row |= {key: getattr(info, key) for key in ("answer", "problem", "em", "f1", "searches")}
    if info.d_TA is not None:
        row |= {"d_TA": info.d_TA, "d_TQ": info.d_TQ}
    searches = [turn_label(t) for t in trajectory.turns if "<information>" in t.observation]
    row["repeats"] = len(searches) - len(set(searches))  # made before, word for word
    return row | group_record([trajectory], question)


def sample_record(policy, scorer, groups, questions, step, cfg):
    """The step's first group with different rewards, all its steps scored."""
    shown = record.first_with_spread([[t.reward for t in group] for group in groups])
    group, question = groups[shown], questions[shown]
    score_steps(policy, scorer, [(t, question) for t in group], cfg)
    return group_record(group, question, policy.tokenizer, step=step, prompt_ids=group[0].prompt_ids)


# ---------------------------------------------------------------- table and plot of all stages

def show_table(cfg):
    """<name>-table.json in Table 2's shape, <name>-distances.png, <name>-curves.png of the stages that are
    there. The paper's numbers are means of its seven sets, and stand beside such a mean alone."""
    base = Path(cfg.out) / "bi_rar"
    folders = {stage: base / f"{cfg.name}-{stage}" for stage in ("initial", *TRAINED, *CONTROLS)}
    for folder in sorted(base.glob(f"{cfg.name}-merged-*")):
        folders["lambda " + folder.name.removeprefix(f"{cfg.name}-merged-")] = folder
    folders = {label: folder for label, folder in folders.items() if list(folder.glob("eval_*.json"))}

    def paper(label, sets):
        return PAPER.get(label, "") if set(sets) == set(PAPER_EVAL.split(",")) else ""

    title = f"Bi-RAR {cfg.name} (paper: Qwen2.5-3B-Instruct)"
    path = base / cfg.name
    stages = {}
    for label, folder in folders.items():
        stages[label] = [folder]
    report.method_table(path, title, stages, "baseline", paper)
    report.draw_methods(path, title, stages)
    plot_distances(folders, base / f"{cfg.name}-distances.png")


def ask(cfg, policy, split):
    """--ask: one trajectory, shown while it is played."""
    question = data.Question("ask", cfg.ask, [""])

    def agent(search, seed):
        return play(policy, search, question, "ask", cfg, seed, cfg.eval_temperature, run.show_turn)
    trajectory = run.ask(cfg, policy, split.retriever, agent)
    console.print(f"[bold]answer: {plain(trajectory.info.answer)}[/bold]")


# ---------------------------------------------------------------- demonstrations

def render_demonstration(tokenizer, question, demo, index, cfg):
    """A demonstration in Search-R1's tags; results are what the retriever returns."""
    def observe(query):
        passages = index.search([query], cfg.top_k)[0]
        return render_observation(tokenizer, passages, cfg.max_observation, cfg.max_passage)

    opened = "" if demo.flaw == "bad format" else "<answer> "
    answer = opened, chat.Foreign(demo.answer), " </answer>"
    from common.warmup import demonstrations
    turns = demonstrations.search_turns(tokenizer, demo, observe, *answer)
    return Trajectory(question.id, render_prompt(tokenizer, question.question), turns)


def warmed_up(cfg, source, index):
    """Folder of `source` after --warmup-data."""
    def render(tokenizer, question, demo):
        return [render_demonstration(tokenizer, question, demo, index, cfg)]

    def reward(made, question):
        fits = len(made[0].turns) <= cfg.max_searches + 1
        return judge(made[0], question).info.em if fits else None

    def reply(tokenizer, turn_ids, observation):
        shown = chat.Foreign(observation)
        return chat.encode(tokenizer, "\n\n<information>", shown, "</information>\n\n")[1]

    from common.warmup import warmup
    tokenizer = models.load_tokenizer(source)
    examples = warmup.examples_of(
        cfg.warmup_data, tokenizer, index, render, reward, reply, top_k=cfg.top_k,
        max_passage=cfg.max_passage, flaw_rate=cfg.flaw_rate, longest=cfg.micro_tokens, skip_bad=cfg.skip_bad)
    return warmup.warmed_up(cfg, "bi_rar", source, examples)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from; made once, then
    cached."""
    words = "Doc ( ) 1 2 3 Title now found nothing answer ; No passage".split()
    words += re.findall(r"\w+|[^\w\s]", re.sub(r"</?\w+>", "", INVALID))
    names = ("think", "search", "information", "answer")
    tags = [f"<{slash}{name}>" for name in names for slash in ("", "/")]

    def render(tokenizer, row, demo, index):
        return [render_demonstration(tokenizer, data.parse_question(row), demo, index, cfg)]

    from common.world import tiny
    recipe = tiny.Recipe(
        "bi_rar", cfg.warmup_steps, cfg.flaw_rate, cfg.world_size, cfg.top_k, cfg.world, cfg.engine)
    return tiny.tiny_policy(recipe, words, tags, render)


def line_scorer(cfg, start):
    """Folder of the tiny policy after further training on the very lines that it is asked about: questions,
    right steps and answers in the three orders of scored_paths. Cached like the policy."""
    from common.world import hard, tiny
    recipe = {
        "script": "bi_rar, lines",
        "start": Path(start).name,
        "steps": SCORER_STEPS,
        **{key: getattr(cfg, key) for key in ("step_text", "answer_step", "context", "top_k", "world_size")},
    }

    def build():
        model, tokenizer = models.load_policy(start, 0)

        def render(row, demo, index):
            question = data.parse_question(row)
            shown = judge(render_demonstration(tokenizer, question, demo, index, cfg), question)
            jobs = jobs_of(shown, question, tokenizer, cfg)
            return [path for four in scored_paths(tokenizer, jobs).values() for path in four]

        make = hard.groups if cfg.world != "plain" else tiny.demonstrations.groups
        level = [hard.parse(cfg.world)] if cfg.world != "plain" else []
        made = make(tokenizer, render, tiny.bm25, SCORER_STEPS, 0.0, cfg.world_size, *level)
        say(f"training the scorer on the lines of {8 * SCORER_STEPS} demonstrations")
        batches = (rollout.collate(g, pack_tokens=512) for g in made)
        tiny.warm_up(model, batches, SCORER_STEPS, lr=1e-3)
        return model, tokenizer

    return distributed.first(tiny.cached_policy, recipe, build)


# ---------------------------------------------------------------- paper, authors' code and ours

DIFFERENCES = """\
What the cascade does: sum_i r_i prod_{j<i} (1 - r_j) telescopes to 1 - prod_i (1 - r_i), the chance that at
least one step "succeeds". It is at most 1, grows with every further step, however bad, and does not depend on
their order: nothing in it prefers early success or short trajectories.

Where the paper is silent:

    A                 The first gold answer.
    T_i               A step is its thought, as in sec. 2 and Fig. 2, without the retrieved text. --step-text
                      turn takes the query and the tags too. The turn that answers is a step as well; with
                      --answer-step off a right answer without a search has no step, and is worth 0.
    context           The scorer reads Q or A and the step alone, one a line (the world's tokenizer has no
                      line break). --context history puts the steps before it in front.
    scorer            The initial policy, frozen. --scorer names another one; the paper's is Qwen2.5-3B, for
                      the instruct variant too as far as it says.
    clamps            Denominators are at least 1e-6 bits, d is in [0, 20], and an empty step has d = 20.
    actions           4 at most, invalid ones included, which is Search-R1's budget; then a turn without one.
    evaluation        Greedy, as in Search-R1's code.
    groups            Those of one reward are left out of the update, their KL term too.
    observations      A cut one keeps its closing tag, "<" before a letter becomes a look-alike, and an
                      invalid turn's end of sequence stays.
    averages          The mean over sets, each counting the same, as in the paper's table.

In the plain embedded world K(Q|.) is the smaller of its pair in none of 422 steps, so the backward reward
there never sees the question, and right trajectories of a question nearly always have one length.
--world hard:elastic=.3 is for that (results/notes/bi_rar.md).
"""


if __name__ == "__main__":
    main()
