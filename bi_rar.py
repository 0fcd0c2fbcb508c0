"""Bi-RAR: Thinking Forward and Backward, multi-objective RL for retrieval-augmented reasoning (arXiv 2511.09109).

Search-R1's agent (think, search, read, …, answer), with a reward for every step: how near it is to the answer (forward) and how well it
sticks to the question (backward), measured as an information distance under a frozen language model. Two policies are trained from one
checkpoint, one for each reward, and their weights are averaged.

    Eq 2     conditional information distance      information_distance
    Eq 3     complexity as -log2 likelihood        complexities
    Eq 4     step to answer, step to question      step_distances
    Eq 5-6   cascading rewards                     cascade (as printed), telescoped
    Eq 7     r = exp(-d)                           step_reward
    Eq 8-9   GRPO                                  group_advantages, grpo_loss
    Eq 10    merged weights                        merge

What the cascade does. sum_i r_i prod_{j<i} (1 - r_j) telescopes to 1 - prod_i (1 - r_i): the chance that at least one step "succeeds". It is
at most 1, grows with every further step, however bad, and does not depend on their order: nothing in it prefers early success or short
trajectories. Where the paper is silent (Search-R1 = its code):
    A                       the first gold answer
    T_i                     what the policy wrote in turn i, thought and query; no retrieved text; the answer turn is a step
    context                 Q or A and the step alone, one a line (the world's tokenizer has no line break); no earlier steps
    scorer                  the initial policy, frozen (the paper scores with Qwen2.5-3B, for the instruct variant too as far as it says)
    clamps                  denominators at least 1e-6 bits, d in [0, 20]; an empty step has d = 20
    actions                 4 at most, invalid ones included (Search-R1's budget), then a turn without a search; greedy evaluation
    groups of one reward    left out of the update, their KL term too
    observations            a cut one keeps its closing tag; "<" before a letter becomes a look-alike; an invalid turn's end of sequence stays
    averages                the mean over sets, each counting the same, as in the paper's table
In the world K(Q|.) is computed and never enters: it is the smaller of its pair in none of 422 steps, above or below the line, so the
backward reward there is exp(-K(T|Q,A) / K(T|A)). Nor can the world show shorter trajectories: a right one has exactly as many
searches as its question has hops, and right trajectories of a question nearly always have one length.

Scoring is the cost the paper complains of: eight likelihoods a step. Two depend on the question alone, two are the same number, and the rest
share prefixes: Q-T-A gives K(T|Q) and K(A|T,Q) in one pass, Q-A-T gives K(A|Q) and K(T|A,Q), A-T-Q gives K(T|A) and K(Q|T,A). All steps of a
batch are packed (rollout.collate), equal steps of a question are scored once, and the reward asks only for steps of right trajectories.

    python bi_rar.py                                        embedded world: baseline, forward, backward, merge and sweep; 13 minutes on two cores
    python bi_rar.py --stage forward                        one stage (baseline, forward, backward, merge, eval); --resume goes on
    python bi_rar.py --stage merge --forward A --backward B --lambdas .25,.5     any two folders of one architecture
    python bi_rar.py --model Qwen/Qwen2.5-3B-Instruct       the paper's setting; large GPUs, a search server, not run (see README)
"""

import itertools
import json
import math
import re
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from common import process  # first: torch reads thread settings once

# isort: split
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common import chat, data, flags, guards, metrics, report, retriever, rollout, task, training, world
from common.engine import TransformersEngine
from common.rollout import Trajectory, Turn, stable_seed

# ---------------------------------------------------------------- config

@dataclass
class Config:
    """Defaults are the paper's where a model is given, the embedded world's (WORLD) where none is."""

    # ---- stages
    # what to do; all = baseline, forward, backward, merge, each evaluated
    stage: Literal["all", "baseline", "forward", "backward", "merge", "eval"] = "all"
    forward: str = ""               # merge: folder of the forward policy; empty = this run's
    backward: str = ""              # merge: folder of the backward policy; empty = this run's
    lambdas: str = ".25,.5,.75"     # weights of the backward policy in the merge (.25 was chosen) | sec. 4

    # ---- model and data
    model: str = ""                 # folder or hub id; empty = the tiny policy of the embedded world
    checkpoint: str = ""            # weights to start from or to evaluate
    data: str = "search-r1"         # training questions: file, hub name, or "world"; NQ and HotpotQA | sec. 4
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
    group_size: int = 5             # trajectories a question | sec. 4
    top_k: int = 3                  # passages a search | Search-R1
    max_searches: int = 4           # actions before the last turn; invalid ones count | Search-R1
    max_passage: int = 4000         # characters of a passage that are read, before tokens are counted
    max_prompt: int = 2048          # tokens of the prompt | Search-R1
    max_turn: int = 500             # tokens a turn | Search-R1
    max_observation: int = 500      # tokens of a search result | Search-R1
    temperature: float = 1.0        # of sampling in training | sec. 4
    eval_temperature: float = 0.0   # of evaluation and --ask; 0 = greedy | Search-R1
    max_batch: int = 256            # sequences decoded together, at most
    cache_gb: float = 8.0           # keys and values of running sequences; as much again for finished turns

    # ---- reward and loss
    clip: float = .2                # half width of the clip window | sec. 4
    kl_coef: float = 1e-3           # k3 estimate of the KL to the initial policy | sec. 4
    explain_limit: int = 200        # evaluated trajectories of each set whose steps are scored, for page and plot

    # ---- update
    steps: int = 200                # training steps | sec. 4
    questions_per_step: int = 128   # questions a step | sec. 4
    mini_batch: int = 128           # questions an update; one update a step, the paper is silent
    lr: float = 1e-6                # learning rate, constant | sec. 4
    weight_decay: float = .01       # of matrices | verl
    grad_clip: float = 1.0          # largest norm of the gradient | verl
    micro_tokens: int = 16384       # packed tokens a forward pass; memory only
    pack_tokens: int = 16384        # tokens a pack of shared prefixes; memory only
    share_prefixes: Literal["on", "off"] = "on"   # compute shared starts of trajectories once; same results
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton log-probs; auto = where there is CUDA
    lora: int = 0                   # rank of adapters; 0 = full weights
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"  # recompute activations; auto = on a GPU; memory only

    # ---- running
    eval_every: int = 0             # steps between evaluations; 0 = at the end only
    save_every: int = 10            # steps between checkpoints; 0 = at the end only
    show_every: int = 20            # steps between printed trajectories; 0 = none
    log: str = ""                   # trackers beside the files: tensorboard, wandb (offline), or both with a comma
    seed: int = 0                   # of everything that is random
    name: str = ""                  # of the run folders runs/bi_rar/<name>-<stage>; empty = seed<seed>
    out: str = "runs"               # where run folders go
    resume: bool = False            # go on with the run of this name
    eval_only: bool = False         # the same as --stage eval
    ask: str = ""                   # answer one question and show the trajectory


# What differs in the embedded world. The learning rate is at2po.py's, chosen there for GRPO on the dev split. Steps and evaluation at
# temperature 1 were set after a three-step trial on 60 test questions (greedy decoding hides most of what the policy has to unlearn);
# nothing else was tuned.
WORLD = dict(data="world", retriever="bm25", top_k=1, max_turn=120, eval_limit=400, eval_temperature=1.0, steps=100,
             questions_per_step=32, mini_batch=8, lr=1e-4, micro_tokens=8192, pack_tokens=512, max_batch=384, save_every=5)
PAPER_EVAL = "nq,triviaqa,popqa,hotpotqa-dev,2wiki-dev,musique-dev,bamboogle"                              # Table 1
# Qwen2.5-3B-Instruct, mean of the seven sets
PAPER = {"baseline": "0.336 (Search-R1)", "forward": "0.384", "backward": "0.377", "lambda 0.25": "0.397"}

# ---------------------------------------------------------------- prompt and tags (Search-R1, byte for byte)

PROMPT = """Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get new information. After reasoning, \
if you find you lack some knowledge, you can call a search engine by <search> query </search> and it will return the top searched results between \
<information> and </information>. You can search as many times as your want. If you find no further external knowledge needed, you can directly provide \
the answer inside <answer> and </answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}
"""
INVALID = ("\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. If I want to give the final "
           "answer, I should put the answer between <answer> and </answer>. Let me try again.\n")
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


def is_tiny(tokenizer):
    """The world's own policy reads the question alone and titles without quotes."""
    return "[USER]" in tokenizer.all_special_tokens


def render_prompt(tokenizer, question):
    """Token ids of the first prompt; the question gets its question mark."""
    question = chat.Foreign(question.strip() if question.strip().endswith("?") else question.strip() + "?")
    before, after = PROMPT.split("{question}")
    return chat.render_chat(tokenizer, [("user", [question] if is_tiny(tokenizer) else [before, question, after])])


def render_observation(tokenizer, passages, limit=500, max_passage=4000):
    """(text, ids) of a search result; no passage can write a tag or a token of its own. A result over `limit` tokens loses its end."""
    close = tokenizer("</information>\n\n", add_special_tokens=False)["input_ids"]
    quote = "" if is_tiny(tokenizer) else '"'
    text, ids = chat.encode(tokenizer, "\n\n<information>", chat.Foreign(render_information(passages, quote, max_passage)))
    if len(ids) + len(close) > limit:
        ids = ids[:limit - len(close)]
        text = tokenizer.decode(ids)
    return f"{text}</information>\n\n", ids + close


def render_information(passages, quote='"', max_passage=4000):
    """The text between the information tags.

    >>> render_information([retriever.Passage("7", "Silent Harbor", "A film.")])
    'Doc 1(Title: "Silent Harbor") A film.'
    """
    docs = [f"Doc {i}(Title: {quote}{p.title[:max_passage]}{quote}) {p.text[:max_passage]}" for i, p in enumerate(passages, 1)]
    return "\n".join(docs).strip() or "No passage found."


def render_demonstration(tokenizer, question, demo, index, top_k):
    """A demonstration of the world in Search-R1's tags, as a trajectory; results are what the retriever really returns."""
    turns, found = [], ""
    say = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    for step in demo.steps:
        relation = world.SPOKEN.get(step.relation, step.relation)
        text = f"<think> {found}now {relation} of {step.subject} </think> <search> {step.subject} {relation} </search>"
        observation, ids = render_observation(tokenizer, index.search([f"{step.subject} {relation}"], top_k)[0])
        turns.append(Turn(say(text), [], "</search>", text, ids, observation))
        found = f"found {relation} {step.found or 'nothing'} ; "
    final = f"{demo.answer} </answer>" if demo.flaw == "bad format" else f"<answer> {demo.answer} </answer>"
    text = f"<think> {found}answer </think> {final}"
    turns.append(Turn(say(text), [], "</answer>", text))
    for turn in turns:
        turn.logprobs = [0.0] * len(turn.ids)
    return Trajectory(question["_id"], render_prompt(tokenizer, question["question"]), turns)


def tiny_policy(cfg):
    """Folder of the half-million-weight policy that the embedded world starts from; made once, then cached."""
    words = "Doc ( ) 1 2 3 Title now found nothing answer ; No passage".split() + re.findall(r"\w+|[^\w\s]", re.sub(r"</?\w+>", "", INVALID))
    tags = [f"<{slash}{t}>" for t in ("think", "search", "information", "answer") for slash in ("", "/")]
    return task.tiny_policy(cfg, "bi_rar", words, tags, lambda *demonstration: [render_demonstration(*demonstration, cfg.top_k)],
                            (render_observation, render_information, render_demonstration))


# ---------------------------------------------------------------- rollout

@dataclass
class Policy:
    """What a rollout needs: the engine, the tokenizer, and the search of a split."""
    engine: object
    tokenizer: object
    search: rollout.BatchedSearch


async def play(policy, question, path, cfg, seed, temperature, watch=None):
    """Search-R1's loop: think, then search or answer; an invalid action is told so; after the last search comes a turn without one."""
    prompt, turns = render_prompt(policy.tokenizer, question.question), []
    while True:
        context = prompt + [i for t in turns for i in t.ids + t.observation_ids]
        g = await policy.engine.generate(context, stop=("</search>", "</answer>"), max_tokens=cfg.max_turn, temperature=temperature,
                                         seed=stable_seed(seed, path, len(turns)))
        turn = Turn(g.token_ids, g.logprobs, g.stop_reason, policy.tokenizer.decode(g.token_ids, skip_special_tokens=True))
        action = ACTION.search(turn.text)
        last = (action and action[1] == "answer") or len(turns) >= cfg.max_searches
        if not last and action:
            passages = await policy.search(action[2].strip(), cfg.top_k)
            turn.observation, turn.observation_ids = render_observation(policy.tokenizer, passages, cfg.max_observation, cfg.max_passage)
        elif not last:
            turn.observation, turn.observation_ids = INVALID, policy.tokenizer(INVALID, add_special_tokens=False)["input_ids"]
        turns.append(turn)
        if watch:
            watch(turn)
        if last:
            return judge(Trajectory(question.id, prompt, turns), question)


def judge(trajectory, question):
    """Fills info: the answer (of the last turn), exact match, what is wrong with the format."""
    action = ACTION.search(trajectory.turns[-1].text)
    answer = action[2].strip() if action and action[1] == "answer" else None
    invalid = sum(t.observation == INVALID for t in trajectory.turns)
    trajectory.info = {"answer": answer, "problem": "" if answer else "no answer", "em": metrics.exact_match(answer, question.answers) if answer else 0.0,
                       "f1": metrics.f1(answer, question.answers) if answer else 0.0, "invalid": invalid,
                       "searches": sum("<information>" in t.observation for t in trajectory.turns)}
    return trajectory


def rollout_groups(policy, questions, cfg, step):
    """[[trajectory] * group_size] of the questions, all played at once; a sample depends on its own seed alone."""
    seeds = [stable_seed(cfg.seed, step, q.id, sum(p.id == q.id for p in questions[:i])) for i, q in enumerate(questions)]
    agents = [play(policy, q, f"chain{k}", cfg, s, cfg.temperature) for q, s in zip(questions, seeds, strict=True) for k in range(cfg.group_size)]
    done = rollout.run_agents(agents, policy.engine, policy.search)
    return [done[i:i + cfg.group_size] for i in range(0, len(done), cfg.group_size)]


# ---------------------------------------------------------------- information distance (Eq 2-4)

def information_distance(k_a_bc, k_b_ac, k_a_c, k_b_c):
    """Eq 2: d(a, b | c) = min{K(a|b,c), K(b|a,c)} / min{K(a|c), K(b|c)}, clipped to [0, 20]. The paper's form: min below as above.

    >>> information_distance(2.0, 5.0, 4.0, 8.0)
    0.5
    """
    return min(20.0, max(0.0, min(k_a_bc, k_b_ac) / max(min(k_a_c, k_b_c), 1e-6)))


def turn_sums(x, response_mask, turn_ids):
    """Sums of x (B, T) over the scored tokens of each turn, (B, K)."""
    zeros = x.new_zeros(x.shape[0], int(turn_ids.max()) + 1)
    return zeros.scatter_add(1, turn_ids.clamp(min=0), x * response_mask)


@torch.no_grad()
def complexities(scorer, tokenizer, jobs, cfg):
    """Eq 3: {(question, answer, step ids): (K(T|QA), K(A|QT), K(T|Q), K(A|Q), K(Q|AT), K(T|A), K(Q|A))} in bits.

    jobs: [(question, answer, step ids)]. Each string stands on a line of its own. Every path is a Trajectory whose turns are what is
    scored, so shared prefixes (Q; Q, A; A; a step under Q or under A) are computed once and everything goes through packed batches."""
    ids, keys = (lambda text: chat.encode(tokenizer, chat.Foreign(text))[1]), list(dict.fromkeys(jobs))
    line, part = tokenizer("\n", add_special_tokens=False)["input_ids"], lambda scored: Turn(scored, [0.0] * len(scored), "", "", line)
    shared, paths = {}, []
    for question, answer, step in keys:
        Q, A = shared.setdefault((question, answer), (part(ids(question)), part(ids(answer))))
        T, T_after_A = part(list(step)), part(list(step))
        paths.append([Trajectory("", Q.ids + line, [T, part(A.ids)]),          # K(T|Q), K(A|Q,T)
                      Trajectory("", Q.ids + line, [A, part(list(step))]),     # K(A|Q), K(T|Q,A)
                      Trajectory("", A.ids + line, [T_after_A, part(Q.ids)]),  # K(T|A), K(Q|A,T)
                      Trajectory("", A.ids + line, [Q])])                      # K(Q|A)
    bits, share = {}, cfg.share_prefixes == "on"
    for micro in rollout.micro_batches([t for p in paths for t in p], cfg.micro_tokens, share):
        batch = rollout.collate(micro, share, cfg.pack_tokens).to(scorer.device)
        logprobs = training.token_logprobs(scorer, batch, 1.0, cfg.kernels)
        for t, sums in zip(micro, turn_sums(logprobs.double(), batch.response_mask, batch.turn_ids).tolist(), strict=True):
            bits[id(t)] = [-s / math.log(2) for s in sums]
    found = {}
    for key, (qt, qa, at, q) in zip(keys, paths, strict=True):
        (k_t_q, k_a_qt), (k_a_q, k_t_qa), (k_t_a, k_q_at), k_q_a = bits[id(qt)][:2], bits[id(qa)][:2], bits[id(at)][:2], bits[id(q)][0]
        found[key] = k_t_qa, k_a_qt, k_t_q, k_a_q, k_q_at, k_t_a, k_q_a
    return found


def step_distances(scorer, tokenizer, jobs, cfg):
    """Eq 4: {job: (d_TA, d_TQ)}; a step without a token says nothing and is as far as can be."""
    found = {job: (20.0, 20.0) for job in jobs if not job[2]}
    for job, (k_t_qa, k_a_qt, k_t_q, k_a_q, k_q_at, k_t_a, k_q_a) in complexities(scorer, tokenizer, [j for j in jobs if j[2]], cfg).items():
        found[job] = information_distance(k_t_qa, k_a_qt, k_t_q, k_a_q), information_distance(k_t_qa, k_q_at, k_t_a, k_q_a)
    return found


def score_steps(scorer, tokenizer, pairs, cfg):
    """Fills info["d_TA"] and info["d_TQ"], a number a turn, of (trajectory, question) pairs. Returns how many different steps were scored."""
    job = lambda t, q: [(q.question, q.answers[0], tuple(turn.ids)) for turn in t.turns]  # noqa: E731
    distances = step_distances(scorer, tokenizer, [j for t, q in pairs for j in job(t, q)], cfg) if pairs else {}
    for t, q in pairs:
        t.info["d_TA"], t.info["d_TQ"] = map(list, zip(*(distances[j] for j in job(t, q)), strict=True))
    return len(distances)


# ---------------------------------------------------------------- rewards (Eq 5-7)

def step_reward(distance):
    """Eq 7."""
    return math.exp(-distance)


def cascade(step_rewards):
    """Eq 5-6 without the indicator, as printed: sum_i r_i prod_{j<i} (1 - r_j).

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


def set_rewards(groups, questions, scorer, tokenizer, stage, cfg):
    """Eq 5, Eq 6, or the baseline's exact match. Only right trajectories need their steps scored. Returns the number of steps scored."""
    scored = 0
    if stage != "baseline":
        right = [(t, q) for group, q in zip(groups, questions, strict=True) for t in group if t.info["em"]]
        scored = score_steps(scorer, tokenizer, right, cfg)
    for t in (t for group in groups for t in group):
        distances = t.info.get({"forward": "d_TA", "backward": "d_TQ"}.get(stage), [])
        t.reward = t.info["em"] if stage == "baseline" else cascade([step_reward(d) for d in distances]) * t.info["em"]
    return scored


# ---------------------------------------------------------------- GRPO (Eq 8-9)

def group_advantages(rewards):
    """(R - mean) / (sample std + 1e-6); zeros where all rewards are one (to 1e-9)."""
    if max(rewards) - min(rewards) < 1e-9:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (std + 1e-6) for r in rewards]


def grpo_loss(logprobs, old_logprobs, advantages, response_mask, clip=.2, kl_coef=0.0, ref_logprobs=None, num_sequences=None):
    """Eq 8-9, all (B, T): mean over sequences of the mean over sampled tokens, minus kl_coef times the k3 estimate of KL(pi || pi_ref)."""
    log_ratio = torch.where(response_mask, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    if kl_coef:
        to_ref = torch.where(response_mask, ref_logprobs - logprobs, 0.0)
        objective = objective - kl_coef * (to_ref.exp() - to_ref - 1)
    loss = (-(objective * response_mask).sum(1) / response_mask.sum(1).clamp(min=1)).sum() / (num_sequences or len(logprobs))
    clipped = ((ratio > 1 + clip) & (advantages > 0) | (ratio < 1 - clip) & (advantages < 0)) & response_mask
    return loss, {"tokens": float(response_mask.sum()), "clip_fraction": float(clipped.sum()), "kl": float(-(log_ratio.detach() * response_mask).sum()),
                  "ratio": float((ratio.detach() * response_mask).sum())}


def prepare(model, reference, groups, cfg):
    """[(batch, advantages, old log-probs, reference log-probs)] of some groups, as micro-batches at the weights they were sampled with."""
    advantage = {id(t): a for g in groups for t, a in zip(g, group_advantages([t.reward for t in g]), strict=True)}
    share, micro = cfg.share_prefixes == "on", []
    for part in rollout.micro_batches([t for g in groups for t in g], cfg.micro_tokens, share):
        batch = rollout.collate(part, share, cfg.pack_tokens).to(model.device)
        advantages = torch.tensor([[advantage[id(t)]] for t in part], device=model.device) * batch.response_mask
        with torch.no_grad():
            old, ref = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels), None
            if cfg.kl_coef:
                with training.reference_weights(model, reference) as frozen:
                    ref = training.token_logprobs(frozen, batch, cfg.temperature, cfg.kernels)
        micro.append((batch, advantages, old, ref))
    return micro


def update(model, reference, optimizer, groups, cfg, keep="nonfinite"):
    """One pass over the step's groups in mini-batches of questions; groups of one reward teach nothing and are left out. Returns means."""
    started = time.time()
    parts = [groups[i:i + cfg.mini_batch] for i in range(0, len(groups), cfg.mini_batch)]
    learn = [[g for g in part if any(group_advantages([t.reward for t in g]))] for part in parts]
    prepared = [prepare(model, reference, part, cfg) for part in learn]
    drift = [(old - b.rollout_logprobs)[b.response_mask].abs() for micro in prepared for b, _, old, _ in micro]
    out = {"time/old_logprobs": time.time() - started, "rollout/flat_groups": 1 - sum(map(len, learn)) / len(groups)}
    if drift:
        out |= {"rollout/logprob_drift_mean": float(torch.cat(drift).mean()), "rollout/logprob_drift_max": float(torch.cat(drift).max())}
    started, norms, sums, first_ratio = time.time(), [], {}, None
    for part, micro in zip(parts, prepared, strict=True):
        if not micro:
            continue
        mine = {}
        for batch, advantages, old, ref in micro:
            logprobs = training.token_logprobs(model, batch, cfg.temperature, cfg.kernels)
            loss, stats = grpo_loss(logprobs, old, advantages, batch.response_mask, cfg.clip, cfg.kl_coef, ref, len(part) * cfg.group_size)
            loss.backward()
            stats["loss"] = float(loss.detach())
            mine = {k: mine.get(k, 0) + v for k, v in stats.items()}
        first_ratio = mine["ratio"] / mine["tokens"] if first_ratio is None else first_ratio
        norms.append(training.optimizer_step(model, optimizer, cfg.grad_clip, mine["loss"]))
        if math.isfinite(norms[-1]):
            sums = {k: sums.get(k, 0) + v for k, v in mine.items()}
        else:
            for i, (batch, advantages, old, _) in enumerate(micro):
                training.save_batch(f"{keep}_{len(norms)}_{i}.safetensors", batch, advantages=advantages, old_logprobs=old)
    finite = [n for n in norms if math.isfinite(n)]
    if norms:
        out |= {"train/first_ratio": first_ratio, "train/updates": len(finite), "train/not_finite": len(norms) - len(finite)}
    if finite:
        out |= {f"train/{k}": sums[k] / sums["tokens"] for k in ("clip_fraction", "kl", "ratio")}
        out |= {"train/loss": sums["loss"] / len(finite), "train/grad_norm": sum(finite) / len(finite)}
    return out | {"time/train": time.time() - started}


def rollout_metrics(groups):
    """Means over the step's trajectories; distances over the steps of those that were scored."""
    ts = [t for g in groups for t in g]
    mean = lambda xs: sum(xs) / len(xs) if xs else 0.0  # noqa: E731
    right, scored = [t for t in ts if t.info["em"]], [t for t in ts if "d_TA" in t.info]
    out = {"reward/mean": mean([t.reward for t in ts]), "reward/em": mean([t.info["em"] for t in ts]),
           "reward/format": mean([not (t.info["problem"] or t.info["invalid"]) for t in ts]), "rollout/tokens": sum(t.sampled_tokens for t in ts),
           "rollout/response_tokens": mean([t.sampled_tokens for t in ts]), "rollout/turns": mean([len(t.turns) for t in ts]),
           "rollout/searches": mean([t.info["searches"] for t in ts]), "rollout/searches_right": mean([t.info["searches"] for t in right]),
           "rollout/tokens_right": mean([t.sampled_tokens for t in right]),
           "rollout/entropy": -sum(sum(u.logprobs) for t in ts for u in t.turns) / sum(t.sampled_tokens for t in ts)}
    if scored:
        out |= {f"reward/{k}": mean([d for t in scored for d in t.info[k]]) for k in ("d_TA", "d_TQ")}
        out["reward/cascade"] = mean([t.reward for t in right])
    return out


# ---------------------------------------------------------------- merge (Eq 10)

def weight_files(folder):
    """{tensor name: safetensors file} of a Hugging Face folder, sharded or not."""
    folder = Path(folder)
    if (folder / "adapter_config.json").exists():
        raise training.ModelError(f"{folder}: LoRA adapters do not average to the average of what they do; merge each into its base first (merge_and_unload)")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    if not (folder / "config.json").exists():
        raise training.ModelError(f"{folder}: no config.json; merging reads Hugging Face folders")
    if not (folder / "model.safetensors").exists():
        raise training.ModelError(f"{folder}: no model.safetensors and no model.safetensors.index.json; merging reads Hugging Face folders")
    try:
        with safe_open(folder / "model.safetensors", "pt") as f:
            return dict.fromkeys(f.keys(), folder / "model.safetensors")
    except SafetensorError as error:
        raise training.ModelError(f"{folder}/model.safetensors cannot be read ({error})") from error


def merge(forward, backward, lam, out):
    """Eq 10: (1 - lam) forward + lam backward, tensor by tensor in fp32, one shard in memory; stored as forward is. Returns `out`."""
    forward, backward, out = Path(forward), Path(backward), Path(out)
    if out.resolve() in (forward.resolve(), backward.resolve()):
        raise training.ModelError(f"cannot merge into {out}: it is one of the two; choose another --name")
    for folder in (forward, backward):
        training.check_files(folder)
    ours, theirs = weight_files(forward), weight_files(backward)
    kinds = [json.loads((f / "config.json").read_text()).get("architectures") for f in (forward, backward)]
    if kinds[0] != kinds[1] or set(ours) != set(theirs):
        odd = sorted(set(ours) ^ set(theirs))[:3]
        raise training.ModelError(f"cannot merge {forward} ({kinds[0]}) and {backward} ({kinds[1]}): not one architecture"
                                  + (f"; only in one: {odd}" if odd else ""))
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    for file in dict.fromkeys(ours.values()):
        merged = {}
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  (safe_open is no dict)
                with safe_open(theirs[name], "pt") as g:
                    a, b = f.get_tensor(name), g.get_tensor(name)
                if a.shape != b.shape:
                    raise training.ModelError(f"cannot merge: {name} is {tuple(a.shape)} in {forward} and {tuple(b.shape)} in {backward}")
                merged[name] = ((1 - lam) * a.float() + lam * b.float()).to(a.dtype) if a.is_floating_point() else a
        save_file(merged, str(new / file.name), metadata={"format": "pt"})
    for file in forward.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model") and file.name not in ("trainer.json", "recipe.json"):
            shutil.copyfile(file, new / file.name)
    if out.exists():
        shutil.rmtree(out)
    new.rename(out)
    return out


# ---------------------------------------------------------------- evaluate

def record(trajectories, question, tokenizer, **extra):
    """Trajectories of one question as report.group; a turn shows its distances, rewards and its share of the cascade where it was scored."""
    nodes, paths = [{"id": 0, "parents": [], "label": "question", "sampled": False}], []
    for t in trajectories:
        path, left = [0], {"d_TA": 1.0, "d_TQ": 1.0}
        for k, turn in enumerate(t.turns):
            more = {}
            for d in ("d_TA", "d_TQ") if "d_TA" in t.info else ():
                r = step_reward(t.info[d][k])
                more |= {d: t.info[d][k], f"r_{d[2:]}": r, f"cascade_{d[2:]}": left[d] * r}
                left[d] *= 1 - r
            action = ACTION.search(turn.text)
            label = "invalid" if not action else "answer" if action[1] == "answer" else "search: " + action[2].strip()
            nodes.append(report.turn_node(len(nodes), [path[-1]], turn, tokenizer, label=label, advantage=t.info.get("advantage"), **more))
            path.append(nodes[-1]["id"])
        i, golds = t.info, " | ".join(metrics.normalize_answer(g) for g in question.answers)
        why = [f"exact match: {metrics.normalize_answer(i['answer'] or '')!r} against {golds!r}: {'equal' if i['em'] else 'not equal'}"]
        if "d_TA" in i:
            why += [f"{name} cascade (Eq {eq}): {telescoped([step_reward(d) for d in i[key]]):.4f}, counted where the answer is right"
                    for name, eq, key in (("forward", 5, "d_TA"), ("backward", 6, "d_TQ"))]
        paths.append({"path": path, "reward": t.reward, "answer": i["answer"], "problem": i["problem"], "correct": i["em"] == 1, "why": why})
    return report.group(question, nodes, paths, **extra)


def evaluate(policy, split, cfg, progress, score=None):
    """One trajectory a question, greedy by default. (rows, summary); score(pairs) fills in the distances of the first explain_limit, for page and plot."""
    done = rollout.run_agents([play(policy, q, "eval", cfg, stable_seed(cfg.seed, "eval", q.id), cfg.eval_temperature) for q in split.questions],
                              policy.engine, policy.search, progress)
    pairs = list(zip(done, split.questions, strict=True))
    if score:
        score(pairs[:cfg.explain_limit])
    for t in done:
        t.reward = t.info["em"]
    rows = [{"id": q.id, **{k: t.info[k] for k in ("answer", "problem", "em", "f1", "searches")}, "tokens": t.sampled_tokens} | record([t], q, None)
            for t, q in pairs]
    return rows, {"set": split.name, "seed": cfg.seed, "temperature": cfg.eval_temperature} | metrics.summarize(rows)


def plot_distances(runs, path):
    """distances.png: both distances along right and wrong trajectories, mean and interquartile range a step, of {label: run folder} (merged left out)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    runs = {k: v for k, v in runs.items() if not k.startswith("lambda")} or runs
    figure, axes = plt.subplots(2, len(runs), figsize=(4.2 * len(runs), 6), layout="constrained", squeeze=False, sharey="row", sharex=True)
    for column, (label, folder) in enumerate(runs.items()):
        rows = [p for e in report.evaluations(folder).values() for p in e["predictions"]]
        for row, key in enumerate(("d_TA", "d_TQ")):
            axis = axes[row][column]
            for right, colour in ((1, "#1d7f4c"), (0, "#b3372f")):
                steps = {}
                for p in rows:
                    for k, n in enumerate(n for n in p["nodes"] if key in n):
                        if p["em"] == right:
                            steps.setdefault(k + 1, []).append(n[key])
                steps = {k: sorted(v) for k, v in steps.items() if len(v) >= 5}
                if steps:
                    axis.plot(list(steps), [sum(v) / len(v) for v in steps.values()], "o-", color=colour, label="right" if right else "wrong")
                    low, high = ([v[len(v) * part // 4] for v in steps.values()] for part in (1, 3))
                    axis.fill_between(list(steps), low, high, color=colour, alpha=.15)
            axis.set_title(label if row == 0 else "", loc="left")
            axis.set_ylabel("distance to the answer" if row == 0 else "distance to the question") if column == 0 else None
            axis.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
            axis.grid(alpha=.25)
            axis.spines[["top", "right"]].set_visible(False)
    if axes[0][0].lines:
        axes[0][0].legend(frameon=False)
    for axis in axes[1]:
        axis.set_xlabel("step (turn)")
    figure.savefig(path, dpi=110)
    plt.close(figure)


# ---------------------------------------------------------------- main

FREE_ON_RESUME = ("stage", "steps", "eval_every", "save_every", "show_every", "log", "resume", "out", "lambdas", "search_timeout", "search_retries")
STAGES = ("initial", "baseline", "forward", "backward")


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, _, in_world = flags.given_flags(argv)
    cfg = flags.cli(Config, replace(Config(), **(WORLD if in_world else {})), Config(), __doc__, argv)
    ones = ("questions_per_step", "mini_batch", "max_turn", "max_prompt", "max_passage", "top_k", "max_batch", "steps")
    zeros = ("limit", "eval_limit", "lora", "max_searches", "explain_limit", "search_retries")
    task.check_flags(cfg, at_least=dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0) | {"max_observation": 20},
                     positive=("lr", "temperature", "cache_gb", "world_size", "grad_clip", "search_timeout"))
    if cfg.group_size < 2:
        sys.exit("error: --group-size must be at least 2: GRPO compares samples of one question")
    if cfg.lora and cfg.stage in ("all", "merge"):
        sys.exit("error: --lora trains with --stage baseline, forward or backward; adapters are not averaged: fold each into its base "
                 "(merge_and_unload), then --stage merge --forward A --backward B")
    try:
        if not all(0 <= float(x) <= 1 for x in cfg.lambdas.split(",")):
            raise ValueError
    except ValueError:
        sys.exit(f"error: --lambdas {cfg.lambdas}: numbers between 0 and 1 with commas, such as .25,.5,.75")
    search = "bm25" if cfg.corpus or cfg.data == "world" else "http://127.0.0.1:8000"
    only = cfg.eval_only or cfg.stage == "eval"
    return replace(cfg, stage="eval" if only else cfg.stage, eval_only=only, retriever=cfg.retriever or search, name=cfg.name or f"seed{cfg.seed}")


def train(cfg, stage, run, model, tokenizer, initial, policy, split, evals, start):
    """One GRPO run with the stage's reward: sample groups, score, update; once a step."""
    optimizer = training.make_optimizer(model, cfg.lr, cfg.weight_decay)
    state = training.load_training_state(start, model, optimizer) if start else {"step": 0}
    pace = report.Pace(state["step"] / cfg.steps)
    run.rewind(state["step"])
    earlier, saved_step = report.read_jsonl(run.path / "metrics.jsonl"), state["step"] if start else -1
    questions = itertools.islice(data.shuffled_forever(split.questions, stable_seed(cfg.seed, "order")), state["step"] * cfg.questions_per_step, None)
    for step in range(state["step"] + 1, cfg.steps + 1):
        started = time.time()
        policy.engine.load_weights()
        policy.search.retriever = split.retriever
        batch = list(itertools.islice(questions, cfg.questions_per_step))
        groups = rollout_groups(policy, batch, cfg, step)
        row, started = {"step": step, "time/rollout": time.time() - started}, time.time()
        with training.reference_weights(model, initial) as scorer:
            scored = set_rewards(groups, batch, scorer, tokenizer, stage, cfg)
        row |= {"time/scoring": time.time() - started, "reward/steps_scored": scored} | rollout_metrics(groups) | policy.search.metrics
        row |= update(model, initial, optimizer, groups, cfg, run.path / f"nonfinite_step{step}")
        row |= pace.times(step / cfg.steps, torch.get_num_threads())
        report.console.print(f"{stage} | " + report.step_line(step, cfg.steps, row))
        row |= guards.watch(row, earlier, report.warn)
        shown = next((i for i, g in enumerate(groups) if len({t.reward for t in g}) > 1), 0)
        with training.reference_weights(model, initial) as scorer:
            score_steps(scorer, tokenizer, [(t, batch[shown]) for t in groups[shown]], cfg)
        for t, a in zip(groups[shown], group_advantages([t.reward for t in groups[shown]]), strict=True):
            t.info["advantage"] = a
        sample = record(groups[shown], batch[shown], tokenizer, step=step, prompt_ids=groups[shown][0].prompt_ids)
        if cfg.show_every and step % cfg.show_every == 0:
            report.explain(sample, max(range(cfg.group_size), key=lambda i: groups[shown][i].reward))  # noqa: B023
        if cfg.eval_every and step % cfg.eval_every == 0 and step < cfg.steps:
            results = task.evaluate_all(cfg, run, policy, evals, evaluate, f"_step{step}")
            row["eval/em"] = sum(r["summary"]["em"] for r in results.values()) / len(results)
        run.append("samples.jsonl", [sample])
        run.log(row)
        earlier.append(row)
        state = {"step": step, "run": run.id}
        if cfg.save_every and step % cfg.save_every == 0:
            training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)
            saved_step = step
    if state["step"] > saved_step:
        training.save_checkpoint(run.path / "checkpoint", model, tokenizer, optimizer, state)


def stage_folder(cfg, stage):
    """The run folder of a stage, opened to go on with where --resume finds it begun."""
    begun = cfg.resume and report.begun(Path(cfg.out) / "bi_rar" / f"{cfg.name}-{stage}")
    return report.RunFolder(cfg.out, "bi_rar", f"{cfg.name}-{stage}", asdict(cfg), begun, FREE_ON_RESUME), begun


def run_stage(cfg, stage, source, split, evals, made_from=()):
    """Trains (baseline, forward, backward) or only evaluates (initial, merged weights, eval) `source`; leaves a run folder. Returns its path.

    What --resume finds done is not done again, unless the checkpoints in made_from are newer."""
    torch.manual_seed(cfg.seed)  # adapters start alike in every stage
    run, begun = stage_folder(cfg, stage)
    trains = stage in STAGES[1:]
    wanted = [run.path / f"eval_{s.name}.json" for s in evals]
    newest = max((f.stat().st_mtime for folder in made_from for f in Path(folder).glob("*.safetensors")), default=0)
    if begun and all(f.exists() and f.stat().st_mtime > newest for f in wanted) and (
            not trains or len(report.read_jsonl(run.path / "metrics.jsonl")) >= cfg.steps):
        report.console.print(f"{stage}: done before")
        return run.path
    start = task.checkpoint_of(run) if begun and trains else None
    if cfg.lora and trains and (Path(source) / "adapter_config.json").exists():
        raise training.ModelError(f"{source} is an adapter: with --lora the reference would be its base; fold it into the base first (merge_and_unload)")
    model, tokenizer = training.load_policy(start or source, cfg.lora if trains else 0, cfg.gradient_checkpointing)
    frozen = source if trains else scorer_weights(cfg)
    initial = None if frozen is None or (cfg.lora and trains) else training.load_model(frozen).requires_grad_(False)
    policy = Policy(TransformersEngine(model, tokenizer, cfg.max_batch, cfg.cache_gb, cfg.cache_gb), tokenizer, rollout.BatchedSearch(evals[0].retriever))
    for s in filter(None, (split, *evals)):
        s.questions = task.within_limit(s.questions, lambda q: len(render_prompt(tokenizer, q.question)), cfg.max_prompt, cfg.skip_bad)
    run.create(threads=run.saved.get("threads", torch.get_num_threads()))
    run.trackers = report.open_trackers(cfg.log, run)
    report.console.print(f"[bold]{stage}[/bold]: {report.plain(training.describe(start or source, model))}")
    if trains:
        for file in wanted:  # of fewer steps
            file.unlink(missing_ok=True)
        train(cfg, stage, run, model, tokenizer, initial, policy, split, evals, start)

    def score(pairs):
        with training.reference_weights(model, initial) as scorer:
            score_steps(scorer, tokenizer, pairs, cfg)
    results = task.evaluate_all(cfg, run, policy, evals, lambda *a: evaluate(*a, score=score if trains or initial is not None else None))
    if stage == "initial":
        guards.look_at_start({name: r["summary"] for name, r in results.items()}, report.warn)
    rows = report.read_jsonl(run.path / "metrics.jsonl")
    if rows:
        report.draw_curves({stage: rows}, run.path / "curves.png", f"Bi-RAR · {cfg.name} · {stage}")
    report.write_page(run.path)
    return run.path


def scorer_weights(cfg):
    """The initial policy that scores an evaluation; None where nobody says which it was."""
    if cfg.stage == "eval" and cfg.checkpoint:
        return start_weights(replace(cfg, checkpoint="")) if cfg.model or cfg.data == "world" and not cfg.forward else None
    return None if cfg.forward and not (cfg.model or cfg.checkpoint) else start_weights(cfg)


def start_weights(cfg):
    """What every stage starts from: a folder or hub id."""
    source = cfg.checkpoint or cfg.model or tiny_policy(cfg)
    return training.find_checkpoint(source) or source


def show_table(cfg, folders):
    """Table 2's shape, <name>-table.json: every policy's EM, its difference to the baseline paired by question, length and searches.
    The paper's numbers are means of its seven sets, and stand beside such a mean alone."""
    results, rows = {label: report.evaluations(folder) for label, folder in folders.items()}, []
    for label, sets in results.items():
        for name, result in sets.items():
            s, base, cells = result["summary"], results.get("baseline", {}).get(name), ["", ""]
            if base and label != "baseline":
                cells = []
                for key, form in (("em", "+.3f"), ("tokens", "+.1f")):
                    gain = metrics.paired_difference([p[key] for p in base["predictions"]], [p[key] for p in result["predictions"]])
                    cells.append(f"{gain[0]:{form}} [{gain[1]:{form}}, {gain[2]:{form}}]")
            rows.append([label, name, "", f"{s['em']:.3f} [{s['em_low']:.3f}, {s['em_high']:.3f}]", cells[0], f"{s['f1']:.3f}",
                         f"{s['tokens']:.1f}", cells[1], f"{s['searches']:.2f}"])
    for label, sets in results.items():
        if len(sets) > 1:
            mean = {key: metrics.average([r["summary"] for r in sets.values()], key)[1] for key in ("em", "f1", "tokens", "searches")}
            paper = PAPER.get(label, "") if set(sets) == set(PAPER_EVAL.split(",")) else ""
            rows.append([label, f"mean of {len(sets)} sets", paper, f"{mean['em']:.3f}", "", f"{mean['f1']:.3f}",
                         f"{mean['tokens']:.1f}", "", f"{mean['searches']:.2f}"])
    header = ["policy", "set", "paper", "EM", "EM minus the baseline's", "F1", "tokens", "tokens minus the baseline's", "searches"]
    report.table(f"{cfg.name}: 95 % intervals over questions, differences paired (paper: Qwen2.5-3B-Instruct)", header, rows)
    path = Path(cfg.out) / "bi_rar"
    report.write_atomic(path / f"{cfg.name}-table.json", json.dumps({"header": header, "rows": rows}, indent=1, ensure_ascii=False))
    plot_distances(folders, path / f"{cfg.name}-distances.png")
    curves = {label: report.read_jsonl(folder / "metrics.jsonl") for label, folder in folders.items()}
    if any(curves.values()):
        report.draw_curves({k: v for k, v in curves.items() if v}, path / f"{cfg.name}-curves.png", f"Bi-RAR · {cfg.name}")
    report.console.print(f"table, distances and curves: {path}/{cfg.name}-table.json, -distances.png, -curves.png", markup=False)


def ask(cfg, split):
    """One trajectory, shown while it is played."""
    model, tokenizer = training.load_policy(start_weights(cfg))
    policy = Policy(TransformersEngine(model, tokenizer, cfg.max_batch), tokenizer, rollout.BatchedSearch(split.retriever))

    def watch(turn):
        report.console.print(report.plain(turn.text))
        report.console.print(f"  [dim]{report.plain(turn.observation[:600])}[/dim]")
    task.warn_of_unknown_words(tokenizer, cfg.ask)
    question = data.Question("ask", cfg.ask, [""])
    t = rollout.run_agents([play(policy, question, "ask", cfg, stable_seed(cfg.seed, "ask"), cfg.eval_temperature, watch)], policy.engine, policy.search)[0]
    report.console.print(f"[bold]answer: {report.plain(t.info['answer'])}[/bold]")


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is refused first."""
    lambdas = list(dict.fromkeys(f"{float(x):g}" for x in cfg.lambdas.split(","))) if cfg.stage in ("all", "merge") else []
    wanted = [st for st in STAGES if cfg.stage in ("all", st)] + [f"merged-{lam}" for lam in lambdas]
    for stage in [] if cfg.ask else ["eval"] if cfg.stage == "eval" else wanted:
        run, begun = stage_folder(cfg, stage)
        if begun and stage in STAGES[1:]:
            task.checkpoint_of(run)
    task.check_model_is_named(cfg)
    if cfg.checkpoint or cfg.model:
        training.find_model(start_weights(cfg))
    split, evals = task.load_splits(cfg, PAPER_EVAL)
    if cfg.ask:
        return ask(cfg, evals[0])
    if cfg.stage == "eval":
        return report.console.print(f"predictions and page in {run_stage(cfg, 'eval', start_weights(cfg), None, evals)}")
    report.console.print(" ".join(f"{k}={v}" for k, v in asdict(cfg).items() if v != ""), style="dim", markup=False)
    base = Path(cfg.out) / "bi_rar"
    pair = [Path(given or training.find_checkpoint(base / f"{cfg.name}-{stage}" / "checkpoint") or base / f"{cfg.name}-{stage}" / "checkpoint")
            for given, stage in ((cfg.forward, "forward"), (cfg.backward, "backward"))]
    for stage in wanted:
        if stage in STAGES:
            run_stage(cfg, stage, start_weights(cfg), split if stage != "initial" else None, evals)
        else:
            lam = stage.removeprefix("merged-")
            run_stage(cfg, stage, merge(*pair, float(lam), base / f"{cfg.name}-weights-{lam}"), None, evals, made_from=pair)
    merged = sorted(f.name.removeprefix(f"{cfg.name}-merged-") for f in base.glob(f"{cfg.name}-merged-*"))
    folders = {label: label for label in STAGES} | {f"lambda {m}": f"merged-{m}" for m in merged}
    folders = {label: base / f"{cfg.name}-{stage}" for label, stage in folders.items() if list((base / f"{cfg.name}-{stage}").glob("eval_*.json"))}
    show_table(cfg, folders)


def main(argv=None):
    cfg = None
    errors = (data.DataError, retriever.RetrieverError, training.ModelError, chat.TemplateError, report.RunError, OSError)
    with process.ends_cleanly(errors, lambda: report.what_is_saved(cfg, "bi_rar", cfg and f"{cfg.name}-*")):
        cfg = parse_args(argv)
        torch.manual_seed(cfg.seed)
        transformers.utils.logging.disable_progress_bar()
        if process.settled:
            report.warn(f"{process.settled}: {torch.get_num_threads()} threads here (OMP_NUM_THREADS sets another number)")
        reproduce(cfg)


if __name__ == "__main__":
    main()
