"""ASKiT: Search and Ask, evidence retrieval as reinforcement learning (paper and authors' code are public).

A question comes with some forty sentences, of which two to four are its evidence. A coarse bi-encoder ranks
them for the question and what was found so far; a fine policy takes one of its best candidates or submits. It
is trained on labelled evidence, then with PPO on the score of the evidence that it ends with. A T5 learns to
ask sub-questions; trained inside the PPO loop, it learns which ones help.

PPO, except: an action is a sentence or submit, the policy's softmax is over a handful of them, and the
baseline of a state is the mean return of other paths through it.

    sec. 3.1.1   coarse retrieval                        coarse_loss, coarse_step
    sec. 3.1.2   policy over candidates and submit       candidates, log_policy
                 supervised loss                         supervised_states, supervised_loss
                 PPO, baseline of sampled paths          path_reward, baselines, ppo_loss
                 beam search                             beam_search
    sec. 3.3-4   question approximation, sub-questions   question_losses, ask_questions
    sec. 4.4     correlation of p and reward             correlation (common/evidence_evaluation.py)
    sec. 4.5.1   "PPO + sub-questions"                   forced_questions
    sec. 6       what it leaves for later                question_loss (joint training)

    python askit.py                              embedded world: coarse, supervised, PPO; minutes on two cores
    python askit.py --stage ask                  then: qap, sqg, joint
    python askit.py --stage ppo --resume         one stage; --resume goes on
    python askit.py --stage ppo --name nobonus --before seed0 --bonus 0      from another run's earlier stages
    python askit.py --data hotpotqa              the paper's encoders (as safetensors) and data; not run
    python askit.py --encoder DIR --fine-layers 3 --data train.jsonl --eval-data dev.jsonl    any encoder
    python askit.py --eval-data dev --ask "Who is the mother of …?"     a question of that set (with
                                                            --checkpoint DIR --stage eval: of that policy)
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import data, encoders, flags, run, seq2seq, training
from common.evidence import (
    ASK,
    SUBMIT,
    SearchPath,
    SubQuestion,
    asked_case,
    asked_of,
    evidence_of,
    evidence_scores,
    find_case,
    kept_apart,
    load_cases,
    state_batches,
    state_ids,
    text_of,
    training_state,
)
from common.evidence_evaluation import (
    PATHS,
    RATIOS,
    SUPERVISED,
    correlation,
    draw_evaluations,
    evaluate_ranking,
    path_metrics,
    paths_without_policy,
    scored,
    write_unlabelled,
)
from common.evidence_models import Policy, load_writer, with_models
from common.evidence_stages import (
    ASK_MODES,
    checkpoint_of,
    load_stage,
    need_earlier,
    open_stage,
    sets_of,
    show_table,
)
from common.files import Progress, say
from common.guards import STEP, UPDATE
from common.page.evidence import sample_record, show_path
from common.rollout import stable_seed
from common.sub_questions import evaluate_approximations, rows_of, sub_question_input
from common.supervised import learn_when_to_ask, log_steps, updates

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.Flags):
    """The paper's settings; what a run needs besides (data, names) is in common/flags.py."""

    # ---- stages and models

    # what to do; all = coarse, supervised, ppo; ask = qap (question approximation, which sqg learns from),
    # sqg (sub-questions), joint; each of them evaluated. eval = of --checkpoint, or of what ppo left
    stage: Literal["all", "ask", "coarse", "supervised", "ppo", "qap", "sqg", "joint", "eval"] = "all"
    encoder: str = ""               # coarse encoder; empty = the paper's, in the world a tiny one
    action_model: str = ""          # scores (state, sentence) as next sentences
    submit_model: str = ""          # scores whether the evidence answers the question
    # 0 = the two scorers as named; else both are the encoder's first so many layers with a new head each
    fine_layers: int = 0
    question_model: str = ""        # T5 that qap and sqg begin with
    # run whose earlier stages this one goes on from, by name or path; empty = its own
    before: str = ""

    # ---- search
    candidates: int = 6             # candidates of the coarse stage beside submit | sec. 4.3.3
    max_evidence: int = 10          # sentences a search may take | authors' code (8 in its PPO)
    beam: int = 4                   # hypotheses of the beam search | sec. 4.5.1
    # tokens of a state and a sentence together; a sentence has a quarter, a state leaves out its oldest ones
    max_tokens: int = 508

    # ---- coarse stage
    coarse_steps: int = 60000       # training steps | sec. 4.3.2
    coarse_batch: int = 24          # states a step | sec. 4.3.2
    coarse_lr: float = 1e-6         # learning rate after warm-up, half a cosine to 0 | sec. 4.3.2
    coarse_warmup: int = 10000      # steps of linear warm-up | sec. 4.3.2
    # wrong sentences in a training state: round(Exponential(rate)) | authors' code
    noise_rate: float = 2.0

    # ---- supervised stage
    supervised_steps: int = 80000   # training steps | authors' code
    supervised_batch: int = 8       # states a step | authors' code
    supervised_lr: float = 1e-6     # learning rate after warm-up, half a cosine to 0 | authors' code
    supervised_warmup: int = 15000  # steps of linear warm-up | authors' code
    # other actions of a training state: the coarse stage's candidates, or random sentences (authors' code)
    negatives: Literal["coarse", "random"] = "coarse"

    # ---- PPO

    # training questions: file, hub name, or "world" | sec. 4.1.1
    data: str = "hotpotqa"
    # the last ones of these, kept for a validation loss (in the world so many more) | sec. 4.1; number ours
    validate: int = 500
    steps: int = 1667               # PPO steps; 10,000 paths in all | sec. 4.3.3
    questions_per_step: int = 1     # questions a step | ours
    group_size: int = 6             # paths sampled a question | ours
    mini_batch: int = 6             # "batch size 6", here of paths | sec. 4.3.3
    lr: float = 1e-6                # learning rate; constant is ours | sec. 4.3.3
    clip: float = .2                # half width of the clip window | sec. 4.3.3
    gamma: float = 1.0              # discount of F1 for each action; not printed | authors' code
    bonus: float = 1.0              # for an exact evidence set | sec. 3.1.2
    baseline: Literal["paths", "none"] = "paths"    # b(s): mean return of other paths through s, or 0
    baseline_rollouts: int = 4      # other paths through s, at least; 0 = those of the question alone | ours
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient
    micro_tokens: int = 16384       # tokens a forward pass; memory only
    precision: Literal["fp32", "bf16"] = "fp32"     # of products; bf16 = autocast | ours
    save_every: int = 1             # steps between checkpoints, which are small here | ours
    correlate: int = 1000           # questions whose p and reward are correlated, of 10 paths each | sec. 4.4
    # what these paths are drawn from: pi, or softmax(pi / 2), which is nearly uniform (authors' code)
    correlate_sampling: Literal["policy", "authors"] = "policy"

    # ---- asking
    qap_steps: int = 26250          # updates; 7 epochs of 60,000 questions, drawn from all | sec. 4.3.1
    sqg_steps: int = 17500          # updates; 7 epochs of 40,000 states, drawn from all | sec. 4.3.1
    question_batch: int = 16        # rows an update | authors' code
    question_lr: float = 1e-4       # learning rate of both | sec. 4.3.1; half a cosine to 0 is ours
    question_tokens: int = 64       # tokens of a sub-question, at most | authors' code
    # what a sub-question is trained to say: the approximation of the evidence found (paper), which never is
    # none, or missing (ours)
    sqg_target: Literal["prefix", "suffix"] = "prefix"
    # what sqg is evaluated in. replace: a sub-question takes the question's place in a search from no
    # evidence (authors' code at 2ad87c8); replace-keep: in one that keeps the evidence (their last, 5064f6f);
    # append: it stands behind the evidence, as in joint training; all: one after the other
    ask_mode: Literal["all", "replace", "replace-keep", "append"] = "all"
    ask_steps: int = 1000           # joint: supervised updates that teach when to ask | ours
    max_questions: int = 2          # sub-questions a search may ask | ours
    question_cost: float = .02      # of the reward, a sub-question | ours
    question_kl: float = .05        # weight of the KL to the T5 that joint training begins with | ours


# What differs in the embedded world: encoders of some hundred thousand weights on two cores. Ours.
WORLD = dict(
    data="world",
    limit=2000,
    validate=100,
    eval_limit=400,
    coarse_steps=400,
    coarse_lr=3e-3,
    coarse_warmup=20,
    supervised_steps=400,
    supervised_batch=12,
    supervised_lr=1e-3,
    supervised_warmup=50,
    steps=50,
    questions_per_step=24,
    mini_batch=48,
    lr=4e-4,
    correlate=100,
    qap_steps=1600,
    sqg_steps=1600,
    question_lr=3e-3,
    question_tokens=24,
    ask_steps=100,
)
PAPER_MODELS = {
    "encoder": "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
    "action_model": "prajjwal1/bert-mini",
    "submit_model": "deepset/tinyroberta-squad2",
    "question_model": "ThomasSimonini/t5-end2end-question-generation",
}
PAPER_EVAL = "hotpotqa-dev"
PAPER = {  # EM / F1, HotpotQA distractor dev
    ("supervised", PAPER_EVAL): "30.2 / 63.9",
    ("ppo", PAPER_EVAL): "33.9 / 67.4",
    ("ppo", f"{PAPER_EVAL}-beam4"): "34.4 / 69.0",
    ("sqg", f"{PAPER_EVAL}-replace"): "0.0 / 40.8",
}


# ---------------------------------------------------------------- reward
#
# A state is (case, steps): a question with its sentences, and in their order the numbers of the sentences
# taken and the SubQuestions asked (common/evidence.py).

def path_reward(case, steps, cfg, t=0):
    """gamma^(T - t) F1 + bonus if the evidence is exactly the gold (sec. 3.1.2), less what its sub-questions
    cost; T = actions of the path, submitting included, t = those before the one that is judged."""
    em, f1, _, _ = evidence_scores(case, steps)
    cost = cfg.question_cost * len(asked_of(steps))
    discount = cfg.gamma ** (len(steps) + 1 - t)
    return discount * f1 + cfg.bonus * em - cost


def returns_of(path, cfg):
    """R_t of every action of a path."""
    times = range(path.first, path.first + len(path.actions))
    return [path_reward(path.case, path.steps, cfg, t) for t in times]


def rewarded(policy, paths):
    """The paths with their rewards."""
    for p in paths:
        p.reward = path_reward(p.case, p.steps, policy.cfg)
    return paths


# ---------------------------------------------------------------- coarse retrieval (sec. 3.1.1)

def coarse_loss(scores, missing):
    """- mean over the missing gold of log p, of one state: scores (sentences,) of all that are not taken and
    perhaps another question's; missing: the places of gold among them."""
    return -scores.log_softmax(0)[missing].mean()


def coarse_step(encoder, cases, others, cfg, rng):
    """Loss of a batch of states, and how many have missing gold as their best sentence. Negatives: the
    question's other sentences and those of one other question."""
    taken_of, texts = [], []
    for case in cases:
        taken_of.append(training_state(case, rng, cfg.noise_rate, complete=False))
        texts.append(state_ids(encoder.pair_tokenizer, case, taken_of[-1]))
    vectors = encoder.encode(texts)
    losses, right = [], 0
    for case, taken, other, vector in zip(cases, taken_of, others, vectors, strict=True):
        left = [i for i in range(len(case.texts)) if i not in taken]
        missing = [k for k, i in enumerate(left) if i in case.gold]
        corpus = case.vectors[left]
        if other is not case:
            corpus = torch.cat([corpus, other.vectors])
        scores = corpus.to(vector.device) @ vector  # (left + other's,)
        losses.append(coarse_loss(scores, missing))
        right += int(scores.argmax()) in missing
    return torch.stack(losses).mean(), right


# ---------------------------------------------------------------- fine policy (sec. 3.1.2)

def coarse_query(pair_tokenizer, case, steps):
    """The question and the evidence; right after a sub-question that alone, a look from another side."""
    if steps and isinstance(steps[-1], SubQuestion):
        return pair_tokenizer.ids(steps[-1].text)
    return state_ids(pair_tokenizer, case, evidence_of(steps))


@torch.no_grad()
def candidates(policy, states):
    """[sentence numbers] of each state: the best that are not yet taken, best first."""
    encoder = policy.encoder
    new = [s for s in dict.fromkeys(states) if s not in policy.coarse_cache]
    queries = [coarse_query(encoder.pair_tokenizer, *state) for state in new]
    vectors = encoder.encode_all(queries)
    for (case, steps), vector in zip(new, vectors, strict=True):
        gone = case.closed | set(evidence_of(steps))
        scores = case.vectors @ vector  # (sentences,)
        scores[list(gone)] = -torch.inf
        k = min(policy.cfg.candidates, len(case.texts) - len(gone))
        policy.coarse_cache[case, steps] = scores.topk(k).indices.tolist()
    return [policy.coarse_cache[s] for s in states]


def offers(policy, states):
    """What may be done in each state beside submitting, which is all that is left where it is full."""
    found = []
    for (_, steps), sentences in zip(states, candidates(policy, states), strict=True):
        full = len(evidence_of(steps)) >= policy.cfg.max_evidence
        if policy.may_ask and len(asked_of(steps)) < policy.cfg.max_questions:
            sentences = [*sentences, ASK]
        found.append([] if full else sentences)
    return found


def log_policy(policy, rows):
    """(n, 1 + k) log pi of submit and of what is offered, of rows (state, actions it offers, …); -inf where
    there are fewer. A next-sentence model scores sentences, and reads sub-questions too; a question-answering
    model scores submitting from the sentences alone. The text of asking is "?"."""
    action, submit = policy.action_tokenizer, policy.submit_tokenizer
    asking = action.ids("?")
    action_pairs, submit_pairs, places = [], [], []
    for n, ((case, steps), actions, *_) in enumerate(rows):
        question, sentences = case.tokens["submit"]
        taken = [sentences[i] for i in evidence_of(steps)]
        evidence = submit.joined(taken, staying=0) if taken else []
        submit_pairs.append((question, evidence))
        state = state_ids(action, case, steps)
        _, texts = case.tokens["action"]
        for column, a in enumerate(actions, 1):
            text = asking if a == ASK else texts[a]
            action_pairs.append((state, text))
            places.append((n, column))
    device = policy.model.action.device
    most = max(len(actions) for _, actions, *_ in rows)
    shape = len(rows), 1 + most
    logits = torch.full(shape, -torch.inf, device=device)
    with encoders.autocast(policy.model.action, policy.cfg.precision):
        out = policy.model.submit(**submit.batch(submit_pairs, device))
        if action_pairs:
            scores = policy.model.action(**action.batch(action_pairs, device))
            where = tuple(zip(*places, strict=True))
            logits[where] = scores.logits[:, 0].float()  # class 0: it comes next
    # SQuAD 2's readers say "no answer" at the first token
    no_answer = out.start_logits[:, 0] + out.end_logits[:, 0]
    logits[:, 0] = -no_answer.float() / 2
    return logits.log_softmax(-1)


@torch.no_grad()
def policy_of(policy, states):
    """[(actions, log-probs)] of states, cached until policy.forget(); the first action is to submit, behind
    it stands what is offered."""
    new = [s for s in dict.fromkeys(states) if s not in policy.cache]
    rows = list(zip(new, offers(policy, new), strict=True))
    for part in state_batches(rows, policy.cfg):
        logp = log_policy(policy, part).tolist()
        for (state, offered), values in zip(part, logp, strict=True):
            actions = [SUBMIT, *offered]
            policy.cache[state] = actions, values[: len(actions)]
    return [policy.cache[s] for s in states]


# ---------------------------------------------------------------- asking (sec. 3.3, 3.4)

@torch.no_grad()
def ask_questions(policy, states, draws=None):
    """[SubQuestion] for states: sampled where draws (a random.Random each) are given, else the best of the
    T5's own beam search, cached until policy.forget()."""
    if not states:
        return []
    new = states if draws else [s for s in states if s not in policy.asked]
    inputs = [sub_question_input(policy.asker, *state) for state in new]
    if draws:
        return [SubQuestion(*q) for q in policy.asker.sample(inputs, draws)]
    texts = policy.asker.write(inputs)
    for state, text in zip(new, texts, strict=True):
        policy.asked[state] = SubQuestion(text)
    return [policy.asked[s] for s in states]


# ---------------------------------------------------------------- paths: sampled, greedy, beam

def finish_paths(policy, paths, choose, draws=None):
    """Takes every path to its end; choose(path number, actions, log-probs) -> index of the action. All open
    states of all paths are scored in one call. draws: a random.Random each, for sampled sub-questions."""
    while running := [n for n, p in enumerate(paths) if not p.done]:
        asking = {}  # path number -> log-prob
        found = policy_of(policy, [paths[n].state for n in running])
        for n, (actions, logprobs) in zip(running, found, strict=True):
            i = choose(n, actions, logprobs)
            if actions[i] == ASK:
                asking[n] = logprobs[i]
            else:
                paths[n] = paths[n].after(actions[i], logprobs[i])
        own = draws and [draws[n] for n in asking]
        questions = ask_questions(policy, [paths[n].state for n in asking], own)
        for n, question in zip(asking, questions, strict=True):
            paths[n] = paths[n].after(question, asking[n])
    return rewarded(policy, paths)


def sample_from(policy, starts, seeds, sampling="policy"):
    """The paths that begin as `starts`, each with a seed of its own; sampling: see --correlate-sampling."""
    draws = [random.Random(seed) for seed in seeds]

    def draw(n, actions, logprobs):
        weights = [math.exp(x) for x in logprobs]
        if sampling == "authors":
            weights = [math.exp(p / 2) for p in weights]
        return draws[n].choices(range(len(actions)), weights)[0]

    return finish_paths(policy, list(starts), draw, draws)


def sample_paths(policy, cases, size, *seed, sampling="policy"):
    """`size` paths a question; a path depends on its own seed alone."""
    starts, seeds, times = [], [], Counter()
    for case in cases:
        for _ in range(size):
            starts.append(SearchPath(case))
            seeds.append(stable_seed(*seed, case.question.id, times[case]))
            times[case] += 1
    return sample_from(policy, starts, seeds, sampling)


def best(n, actions, logprobs):
    return max(range(len(actions)), key=logprobs.__getitem__)


def greedy_paths(policy, cases):
    return finish_paths(policy, [SearchPath(case) for case in cases], best)


def beam_search(policy, cases, width):
    """The most probable path of each question among `width` hypotheses a step."""
    return rewarded(policy, [beam[0] for beam in grow_beams(policy, cases, width)])


def grow_beams(policy, cases, width):
    """The last hypotheses of each question, likeliest first. From one beam; they are distinct, since each has
    another parent or another last step; those that ended compete with those that go on, by log p(tau),
    without length normalisation."""
    beams = [[SearchPath(case)] for case in cases]
    while running := [p for beam in beams for p in beam if not p.done]:
        found = policy_of(policy, [p.state for p in running])
        asking = [p for p, (actions, _) in zip(running, found, strict=True) if ASK in actions]
        questions = ask_questions(policy, [p.state for p in asking])
        question_of = dict(zip(asking, questions, strict=True))
        grown_from = {}
        for p, (actions, logprobs) in zip(running, found, strict=True):
            grown_from[p] = []
            for a, x in zip(actions, logprobs, strict=True):
                step = question_of[p] if a == ASK else a
                grown_from[p].append(p.after(step, x))
        for n, beam in enumerate(beams):
            grown = [q for p in beam for q in grown_from.get(p, [p])]
            grown.sort(key=lambda p: -p.logprob)
            beams[n] = grown[:width]
    return beams


def forced_questions(policy, cases, mode):
    """Wherever the policy would not submit, a sub-question is asked: "PPO + sub-questions" (sec. 4.5.1).

    The policy itself does not ask. mode: "replace" and "replace-keep" = the authors' searches. One sentence
    is taken first; then a sub-question takes the question's place in a greedy search of its own, which begins
    with no evidence (their commit 2ad87c8) or with what was found (their last one, 5064f6f), and all that it
    finds is kept. "append" = as joint training asks: a sub-question stands behind the evidence, and the best
    sentence for this state is taken."""

    def seen(path):
        """The state that the policy sees."""
        return path.case, path.steps if mode == "append" else path.taken

    paths = [SearchPath(case) for case in cases]
    if mode != "append":
        paths = with_best_sentence(policy, paths)
    while running := [n for n, p in enumerate(paths) if not p.done]:
        asking = []
        found = policy_of(policy, [seen(paths[n]) for n in running])
        for n, (actions, logprobs) in zip(running, found, strict=True):
            if best(n, actions, logprobs) == 0:
                paths[n] = paths[n].after(SUBMIT, logprobs[0])
            else:
                asking.append(n)
        questions = ask_questions(policy, [seen(paths[n]) for n in asking])
        asked = [paths[n].after(q, 0.0) for n, q in zip(asking, questions, strict=True)]  # not its own choice
        if mode == "append":
            grown = with_best_sentence(policy, asked)
        else:
            grown = with_searches(policy, asked, keep=mode == "replace-keep")
        for n, path in zip(asking, grown, strict=True):
            paths[n] = path
    return rewarded(policy, paths)


def with_best_sentence(policy, paths):
    """Each path and the policy's best sentence, even where it would submit."""
    grown = []
    found = policy_of(policy, [p.state for p in paths])
    for n, (actions, logprobs) in enumerate(found):
        i = 1 + best(n, actions[1:], logprobs[1:])
        grown.append(paths[n].after(actions[i], logprobs[i]))
    return grown


def with_searches(policy, paths, keep):
    """Each path and all that a greedy search for its last sub-question finds; keep: from its evidence on."""
    searches = []
    for p in paths:
        begin = p.taken if keep else ()
        searches.append(SearchPath(asked_case(policy, p), begin, len(begin)))
    grown = []
    for p, search in zip(paths, finish_paths(policy, searches, best), strict=True):
        found = search.taken[search.first:]
        room = policy.cfg.max_evidence - len(p.taken)
        for i in found[:room]:
            p = p.after(i, 0.0)
        if not found:  # it would ask the same again, for ever
            p = p.after(SUBMIT, 0.0)
        grown.append(p)
    return grown


# ---------------------------------------------------------------- credit

def baselines(policy, paths, min_others, *seed):
    """b(s) before every action of every path: the mean return of other paths of the question through the same
    steps, in whatever order. Where they are fewer than `min_others`, fresh ones are sampled from there; with
    min_others = 0 a state that one path alone came through has the baseline of the state before it."""
    through = {}  # state -> [(path, its return from there)]

    def same(case, steps):
        """Orders of the same sentences are one state; a sub-question's place matters."""
        return case, steps if asked_of(steps) else frozenset(steps)

    def note(path):
        for state, value in zip(path.states(), returns_of(path, policy.cfg), strict=True):
            through.setdefault(same(*state), []).append((path, value))

    for p in paths:
        note(p)
    # from the question down: a fresh path counts for every state that it comes through
    for depth in range(max(len(p.actions) for p in paths)):
        starts = {}  # (case, steps or their set, number of the fresh path) -> where it starts
        for p in paths:
            for case, steps in p.states()[depth:depth + 1]:
                state = same(case, steps)
                missing = min_others + 1 - len(through[state])
                for k in range(missing):
                    starts.setdefault((*state, k), SearchPath(case, steps, len(steps)))
        seeds = []
        for case, steps, k in starts:
            texts = sorted(text_of(s) for s in steps)
            own = case.question.id, *texts, k
            seeds.append(stable_seed(*seed, "baseline", *own))
        for p in sample_from(policy, starts.values(), seeds):
            note(p)
    found = []
    for p in paths:
        values = []
        for state in p.states():
            here = through[same(*state)]
            others = [value for q, value in here if q is not p]
            values.append(sum(others) / len(others) if others else values[-1])
        found.append(values)
    return found


def advantages_of(policy, paths, cfg, *seed):
    """A_t = R_t - b(s_t) of every action (sec. 3.1.2)."""
    returns = [returns_of(p, cfg) for p in paths]
    if cfg.baseline == "paths":
        values = baselines(policy, paths, cfg.baseline_rollouts, *seed)
    else:
        values = [[0.0] * len(p.actions) for p in paths]
    found = []
    for of_actions, of_states in zip(returns, values, strict=True):
        found.append([r - b for r, b in zip(of_actions, of_states, strict=True)])
    return found


# ---------------------------------------------------------------- losses

def supervised_loss(logp, correct):
    """- sum over the correct actions of log pi(a|s), mean over states (sec. 3.1.2). logp (n, 1 + k); correct
    (n, 1 + k) bool."""
    return -logp.masked_fill(~correct, 0.0).sum() / len(logp)


def ppo_loss(logprobs, old_logprobs, advantages, num_paths, clip=0.2):
    """- sum_t min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), mean over paths; all (actions,). Returns (loss,
    stats)."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -objective.sum() / num_paths
    above = (ratio > 1 + clip) & (advantages > 0)
    below = (ratio < 1 - clip) & (advantages < 0)
    return loss, {  # (actions, or a sub-question's tokens)
        "tokens": len(ratio),
        "clipped_tokens": int((above | below).sum()),
        "kl_sum": float(-log_ratio.detach().sum()),
        "ratio_sum": float(ratio.detach().sum()),
        "ratio_max": float(ratio.detach().max()),
    }


def question_loss(logprobs, old_logprobs, start_logprobs, mask, advantages, num_paths, cfg):
    """Of the sub-questions asked, ours, summed over their tokens: PPO a token with the advantage of asking,
    and a KL to the T5 that joint training began with (estimated as r - 1 - log r). logprobs … (n, T), mask
    (n, T), advantages (n,)."""
    spread = advantages[:, None].expand_as(logprobs)[mask]
    loss, stats = ppo_loss(logprobs[mask], old_logprobs[mask], spread, num_paths, cfg.clip)
    back = (start_logprobs - logprobs)[mask]
    kl = back.exp() - 1 - back
    return loss + cfg.question_kl * kl.sum() / num_paths, {
        "question_tokens": stats["tokens"],
        "question_kl_sum": float(kl.detach().sum()),
    }


# ---------------------------------------------------------------- update

def supervised_states(policy, cases, cfg, rng):
    """[(state, offered actions, which of submitting and these are right)]: missing gold that is offered, or
    submitting where none is missing. Where the policy may ask: asking, if no missing gold is offered."""
    states = []
    for case in cases:
        taken = training_state(case, rng, cfg.noise_rate, complete=True)
        states.append((case, taken[: cfg.max_evidence - 1]))  # (a full state offers nothing)
    if policy.may_ask:
        states = some_asked(policy, states, rng)
    rows = []
    for (case, steps), actions in zip(states, offers(policy, states), strict=True):
        taken = set(evidence_of(steps))
        missing = case.gold - taken
        if cfg.negatives == "random":
            left = [i for i in range(len(case.texts)) if i not in taken]
            asks = [a for a in actions if a == ASK]
            actions = rng.sample(left, min(cfg.candidates, len(left))) + asks
        stuck = bool(missing) and not case.gold & set(actions)
        if stuck and ASK not in actions:
            actions = [*actions[:-1], rng.choice(sorted(missing))]
        right = [a in case.gold or (a == ASK and stuck) for a in actions]
        state = case, steps
        rows.append((state, actions, [not missing, *right]))
    return rows


def some_asked(policy, states, rng):
    """The states; those where the coarse stage offers no missing gold get up to --max-questions sampled
    sub-questions."""
    stuck = []
    for n, found in enumerate(candidates(policy, states)):
        case, steps = states[n]
        if case.gold - set(steps) and not case.gold & set(found):
            stuck += [n] * rng.randint(0, policy.cfg.max_questions)
    states = list(states)
    for n in stuck:
        case, steps = states[n]
        asked = ask_questions(policy, [states[n]], [rng])
        states[n] = case, (*steps, *asked)
    return states


def ppo_update(policy, optimizer, paths, advantages, cfg, reference=None):
    """One pass over the step's paths, `mini_batch` an update; reference = the T5 that joint training began
    with. Returns the step's means."""
    meter = training.Meter()
    for begin in range(0, len(paths), cfg.mini_batch):
        part = paths[begin:begin + cfg.mini_batch]
        rows, questions = [], []
        credit = advantages[begin:begin + cfg.mini_batch]
        for p, weights in zip(part, credit, strict=True):
            steps = [*p.steps[p.first :], SUBMIT]
            for t, state in enumerate(p.states()):
                actions, _ = policy.cache[state]  # as they were when it was sampled; submitting first
                chosen = actions.index(p.actions[t])
                numbers = p.logprobs[t], weights[t]
                rows.append((state, actions[1:], chosen, *numbers))
                if isinstance(steps[t], SubQuestion):
                    questions.append((state, steps[t], weights[t]))
        for group in state_batches(rows, cfg):
            _, _, chosen, *numbers = zip(*group, strict=True)
            logp = log_policy(policy, group)[range(len(group)), chosen]  # (n,)
            old, weight = (torch.tensor(x, device=logp.device) for x in numbers)
            loss, stats = ppo_loss(logp, old, weight, len(part), cfg.clip)
            loss.backward()
            meter.add(loss, stats)
        if questions:
            question_step(policy.asker, reference, questions, len(part), cfg, meter)
        norm = training.clip_gradient(policy.model, cfg.grad_clip)
        if meter.finite(norm):  # else loss or gradient is not a number: no update
            optimizer.step()
        optimizer.zero_grad()
    row = meter.means()
    if meter.total.get("question_tokens"):
        row["train/question_kl"] = meter.total["question_kl_sum"] / meter.total["question_tokens"]
    return row


def question_step(asker, reference, questions, num_paths, cfg, meter):
    """Backward of the sub-questions' loss; questions [(state, SubQuestion, advantage)]."""
    rows = []
    for state, question, weight in questions:
        inputs = sub_question_input(asker, *state)
        rows.append((inputs, question.ids, question.logprobs, weight))
    for group in seq2seq.batches(rows, cfg.micro_tokens):
        inputs, targets, old, weight = zip(*group, strict=True)
        logp, mask = asker.logprobs(inputs, targets)  # (n, T)
        with torch.no_grad():
            before, _ = asker.logprobs(inputs, targets, model=reference)
        old = encoders.padded(old, 0.0, logp.device)
        weight = torch.tensor(weight, device=logp.device)
        loss, stats = question_loss(logp, old, before, mask, weight, num_paths, cfg)
        loss.backward()
        meter.add(loss, stats)


# ---------------------------------------------------------------- train
#
# Losses of the supervised stages: yield (loss, how many were judged, how many of them right) of an update's
# forward passes.

def coarse_losses(encoder, cases, cfg, rng):
    """The encoder learns which sentences are missing; the sentences' own vectors stay as they are."""
    batch = rng.choices(cases, k=cfg.coarse_batch)
    others = rng.choices(cases, k=cfg.coarse_batch)
    loss, right = coarse_step(encoder, batch, others, cfg, rng)
    yield loss, len(batch), right


def supervised_losses(policy, cases, cfg, rng):
    """The fine policy learns to take missing gold, and to submit when none is missing."""
    batch = rng.choices(cases, k=cfg.supervised_batch)
    rows = supervised_states(policy, batch, cfg, rng)
    for part in state_batches(rows, cfg):
        logp = log_policy(policy, part)  # (n, 1 + k)
        right = encoders.padded([r for _, _, r in part], False, logp.device)
        likeliest = logp.argmax(1)
        hits = right[range(len(part)), likeliest].sum()
        loss = supervised_loss(logp, right) * len(part) / len(rows)
        yield loss, len(part), int(hits)


def question_losses(writer, rows, cfg, rng):
    """A T5 learns rows [(input ids, target ids)]: question approximation, or sub-questions."""
    batch = rng.choices(rows, k=cfg.question_batch)
    tokens = sum(len(target) for _, target in batch)
    for part in seq2seq.batches(batch, cfg.micro_tokens):
        inputs, targets = zip(*part, strict=True)
        logp, mask = writer.logprobs(inputs, targets)
        likely = logp[mask] > math.log(0.5)
        right = int(likely.sum())
        yield -logp.sum() / tokens, len(likely), right


def supervise(cfg, folder, learner, stage, losses, validation, evaluate_now):
    """--<stage>-steps updates. losses(rng) yields an update's passes, rng being its own; validation(rng), or
    None, yields passes of questions that are not trained on."""
    kind = {"coarse": "coarse", "qap": "question", "sqg": "question"}.get(stage, "supervised")
    rates = getattr(cfg, f"{kind}_lr"), getattr(cfg, f"{kind}_warmup", 0)
    for meter, rng in updates(
        cfg, folder, learner, stage, rates, PRETRAIN_METRICS, evaluate_now, validation
    ):
        for loss, judged, right in losses(rng):
            loss.backward()
            meter.add(loss, {"tokens": judged, "right_sum": right})


def train(cfg, folder, policy, cases, evaluate_now):
    """PPO: sample paths, score where they end, update; once a step. With a T5 in the policy this is joint
    training: it learns to ask while the policy learns when to. Some supervised updates come first then, or
    the score of asking would begin anywhere (ours)."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay)
    stage, reference, state = "ppo", None, {}
    if policy.may_ask:
        stage, state = "joint", {"when_to_ask": 0}
        reference = load_writer(cfg, checkpoint_of(cfg, "sqg")).model
    order = stable_seed(cfg.seed, "order")
    for step, row in run.steps(
        cfg, folder, policy, optimizer, METRICS, state, evaluate_now, label=f"{stage} | "
    ):
        if policy.may_ask and step == 1:
            losses = partial(supervised_losses, policy, cases, cfg)
            learn_when_to_ask(cfg, folder, policy, optimizer, losses, state)
        batch = data.batch_of_step(cases, step, cfg.questions_per_step, order)
        with run.timed(row, "time/rollout"):
            policy.forget()
            paths = sample_paths(policy, batch, cfg.group_size, cfg.seed, "ppo", step)
            advantages = advantages_of(policy, paths, cfg, cfg.seed, "ppo", step)
        row |= path_metrics(paths, cfg.max_evidence)
        row["sample"] = sample_record(policy, paths, cfg.group_size, step)
        row |= ppo_update(policy, optimizer, paths, advantages, cfg, reference)
        policy.forget()


# ---------------------------------------------------------------- evaluate

def evaluate(policy, split, cfg, progress):
    """The evidence that a search ends with, against the labels. Returns (rows, summary)."""
    policy.forget()
    paths = search_all(policy, split.cases, split.search, progress)
    rows, summary = scored(policy, paths, split, cfg)
    if split.search == "greedy" and cfg.correlate:
        cases = split.cases[: cfg.correlate]
        paths = sample_paths(policy, cases, 10, cfg.seed, "correlate", sampling=cfg.correlate_sampling)
        summary |= correlation(paths, 10, cfg.seed, "correlate")
    return rows, summary


def search_all(policy, cases, search, progress):
    """The path that a search finds for each question, some questions at a time."""
    paths = []
    for start in range(0, len(cases), 64):
        part = cases[start:start + 64]
        if search == "beam":
            paths += beam_search(policy, part, policy.cfg.beam)
        elif search in ASK_MODES:
            paths += forced_questions(policy, part, search)
        else:
            paths += greedy_paths(policy, part)
        progress(len(paths), len(cases))
    return paths


def evaluate_coarse(encoder, split, cfg, progress):
    """What can be had without a fine policy: the ranking itself, or evidence taken by a rule."""
    if split.search == "ranking":
        return evaluate_ranking(encoder, split, cfg)
    policy = Policy(None, encoder, None, None, cfg)  # without scorers: there are candidates alone
    paths = paths_without_policy(split, cfg, partial(candidates, policy), progress)
    rows, summary = scored(policy, paths, split, cfg)
    return rows, summary | {"by_rule": True}


EVALUATE = {"coarse": evaluate_coarse, "qap": evaluate_approximations}


# ---------------------------------------------------------------- main

STAGES = {"all": ("coarse", "supervised", "ppo"), "ask": ("qap", "sqg", "joint")}


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first (opening a folder only checks)."""
    stages = STAGES.get(cfg.stage, (cfg.stage,))
    if cfg.ask:
        need_earlier(cfg, "eval")
    for n, stage in enumerate(() if cfg.ask else stages):
        need_earlier(cfg, stage, open_stage(cfg, stage).start, stages[:n])
    split, evals = load_cases(cfg, PAPER_EVAL)
    if cfg.ask:
        case = find_case(evals[0], cfg.ask)
        policy, _ = load_stage(cfg, "eval", None, [case])
        return show_path(policy, greedy_paths(policy, [case])[0])
    run.tell(cfg)
    for stage in stages:
        run_stage(cfg, stage, split, evals)
    show_table(cfg, PAPER)


def run_stage(cfg, stage, split, evals):
    """Trains one stage and evaluates it, or only evaluates; leaves a run folder. What --resume finds done is
    not done again."""
    folder = open_stage(cfg, stage)
    sets = sets_of(cfg, stage, evals)
    samples = stage in ("ppo", "joint")
    steps = cfg.steps if samples else log_steps(getattr(cfg, f"{stage}_steps", 0))  # none of eval
    if folder.is_done(steps, sets):
        return say(f"{stage}: done before")
    torch.manual_seed(cfg.seed)
    able = [c for c in split.cases if c.gold] if split else []
    able, kept = kept_apart(able, cfg.validate)
    every = [c for part in (split, *evals) if part for c in part.cases + part.unlabelled]
    # the model that is trained, and what is evaluated: itself, or the policy that a T5 asks for
    learner, judged = load_stage(cfg, stage, folder.start, every)

    def evaluate_all(when=""):
        how = EVALUATE.get(stage, evaluate)
        return run.evaluate_all(cfg, folder, judged, sets, how, when)

    def evaluate_now(when):
        return run.mean_em(evaluate_all(when))

    with run.stage(cfg, folder, METRICS if samples else PRETRAIN_METRICS, f"ASKiT {cfg.name}: {stage}"):
        if stage == "coarse" and not folder.start:
            evaluate_all("_before")
        if samples:
            train(cfg, folder, learner, able, evaluate_now)
        elif steps:
            of = partial(losses_of, cfg, stage, folder, learner, judged)
            losses = of(able, "rows")
            validation = of(kept, "validation_rows") if kept else None
            supervise(cfg, folder, learner, stage, losses, validation, evaluate_now)
        draw_evaluations(folder, evaluate_all())
        if stage not in EVALUATE:
            write_unlabelled(folder, evals, partial(search_all, judged))


def losses_of(cfg, stage, folder, learner, policy, cases, name):
    """losses(rng) of a supervised stage; policy: what finds the evidence that a T5 learns from."""
    if stage in ("qap", "sqg"):
        make = partial(question_rows, cfg, stage, learner, policy, cases, name)
        rows = folder.kept(f"{name}.json", make)
        return partial(question_losses, learner, rows, cfg) if rows else None
    kinds = {"coarse": coarse_losses, "supervised": supervised_losses}
    return partial(kinds[stage], learner, cases, cfg)


def question_rows(cfg, stage, writer, policy, cases, name):
    """[(input ids, target ids)] of a T5, from what the policy finds for training questions."""
    with Progress("evidence") as progress:
        paths = search_all(policy, cases, "greedy", progress)
    policy.forget()
    approximator = load_writer(cfg, checkpoint_of(cfg, "qap")) if stage == "sqg" else None
    rows = rows_of(paths, writer, approximator, cfg.sqg_target)
    if not rows and name == "rows":
        raise data.DataError(
            f"{stage}: the policy of ppo submits at once on all of {len(cases)} training questions, so there "
            "is no evidence to ask from: train it for longer, or name another run's with --before")
    return rows


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, _, in_world = flags.given_flags(argv)
    default = Config(**WORLD) if in_world else Config()
    cfg = flags.cli(default, Config(), __doc__, argv)
    # all other numbers: whole ones at least 1, others at least 0
    may_be_zero = ("coarse_warmup supervised_warmup fine_layers baseline_rollouts correlate ask_steps "
                   "max_questions validate")
    above_zero = "coarse_lr supervised_lr question_lr lr grad_clip gamma noise_rate"
    cfg = flags.check(cfg, may_be_zero, above_zero, least={"group_size": 2})
    stage = "eval" if cfg.eval_only else cfg.stage
    name = cfg.name or flags.run_name(cfg, Path(cfg.encoder).name)
    cfg = replace(cfg, stage=stage, eval_only=stage == "eval", name=name)
    return with_models(cfg, PAPER_MODELS)


def main(argv=None):
    """`python askit.py …`"""
    with run.program(one_process=True):
        reproduce(parse_args(argv))


# ================================================================ appendix: nothing below is in the paper

METRICS = STEP | UPDATE | RATIOS | PATHS
PRETRAIN_METRICS = STEP | UPDATE | SUPERVISED


# ---------------------------------------------------------------- paper, authors' code and ours

DIFFERENCES = """\
A flag in brackets takes the other reading.

    candidates        The paper has 6 actions, the code 5 and submit. Ours are 6 and submit (--candidates).
    texts             The paper puts <sep> between question and evidence, the code blanks. A sentence is
                      "Title, text" for the fine models and "Title: text" for the coarse stage, as in the
                      code.
    yes/no questions  The code does not train on them; ours does.
    coarse vectors    The code keeps the sentences' frozen. It normalises them on its branch main, and not in
                      the searches of its branch Agent; ours are normalised. The state's is not: its norm is
                      the temperature.
    coarse loss       The paper's "cross-entropy" is -.456, minus a mean probability. The code takes the sum
                      of -log p over the missing gold, ours its mean.
    submit's score    The paper speaks of answerability. The code takes start logits of positions 0 and 1,
                      ours the start and end logit of the first token.
    fine stage        The paper repeats the coarse stage's settings. The code sets one gold against 6 random
                      sentences, of the first 20,000 questions. Ours takes the coarse candidates of all, and
                      puts a missing gold in where none is there (--negatives).
    clip              The paper prints clip(r, 1 + eps, 1 - eps), its bounds swapped.
    reward            The paper's is the discounted F1, +1 if exact. The code has gamma 1 and no bonus for
                      submitting. Ours pays the bonus on every exact end, not discounted (--gamma, --bonus).
    a path's return   The code's is the F1 after one action, its greedy rollout being dropped. Ours is the
                      sampled path's, F1 times gamma^(T - t).
    baseline b(s)     The paper samples paths from s. The code takes greedy ones after every candidate,
                      weighed by pi. Ours takes other paths of the question through the same evidence, and
                      fresh ones where they are few (--baseline, --baseline-rollouts).
    PPO               The paper says "batch size 6", the code has a replay buffer; ours has none. Both have a
                      loss of the sampled action. With the paper's numbers a step is one update, where r = 1
                      and nothing is clipped; there are several where --mini-batch is smaller than the step's
                      paths.
    unreachable gold  The code leaves such questions out. Ours keeps them where some gold can be found.
    long states       The code cuts them at 512 tokens. Ours leaves the oldest sentences out.
    beam              In the code all beams start equal and stay so. Ours has distinct hypotheses from one.
    Spearman          The paper prints cov / (cov cov), over 1,000 validation questions. The code's is of F1,
                      8 actions, and paths drawn from softmax(pi / 2), nearly uniform: another quantity
                      (--correlate-sampling authors). Ours is of ranks, over paths drawn from pi, of
                      evaluation questions whose paths differ (--correlate). log p is without T5's.
    question's target The paper's and ours is the approximation of the evidence found, never of none. The
                      code's is of the evidence found later, from one too late on. --sqg-target suffix takes
                      that of the missing gold.
    joint training    The paper proposes it. Ours goes on from the supervised policy, for as many steps as
                      PPO. A sub-question alone is the coarse query of the next step; the policy's text keeps
                      it. It may ask before anything is found, a state that --sqg-target prefix never learns
                      from.
    "+ sub-questions" The code finds one sentence first. Then, where the policy would not submit, a
                      sub-question takes the question's place in a search from no evidence (commit 2ad87c8) or
                      with what was found (5064f6f), whose finds are all kept; the asker reads evidence with
                      blanks between all letters. Ours has both, without those blanks (--ask-mode replace,
                      replace-keep). Beside them stands the sub-question as coarse query for one sentence, and
                      behind the evidence in the policy's text, as in joint training (--ask-mode append).
                      Comparisons are left out in the world, where the tiny T5 often writes one of the two
                      names twice.
"""


if __name__ == "__main__":
    main()
