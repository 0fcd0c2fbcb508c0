"""ASKiT: Search and Ask, evidence retrieval as reinforcement learning (the paper and the authors' code are
public).

A question comes with some forty sentences, of which two to four are its evidence. A coarse bi-encoder ranks
the sentences for the question and what was found so far; a fine policy takes one of its best candidates or
submits. The policy is trained on labelled evidence, then with PPO on the score of the evidence that it ends
with. A T5 learns to ask sub-questions; trained inside the PPO loop, it learns which ones help.

    sec. 3.1.1   coarse retrieval                    coarse_loss, coarse_step, freeze_vectors
    sec. 3.1.2   policy over candidates and submit   Scorer, log_policy
                 supervised loss                     supervised_loss
                 PPO, baseline of sampled paths      path_reward, baselines, ppo_loss
                 beam search                         beam_search
    sec. 3.3-4   question approximation, sub-questions   approximation_row, sub_question_row
    sec. 4.4     correlation of p and reward         spearman
    sec. 4.5.1   "PPO + sub-questions"               forced_questions
    sec. 6       what it leaves for later            question_loss (joint training), answer_rewards

Where paper and authors' code differ, or the paper is silent; the flag in brackets takes the other:

    candidates            paper: 6 actions; code: 5 and submit; ours: 6 and submit (--candidates)
    most evidence         code: 10 sentences (--max-evidence)
    texts                 paper: <sep> between question and evidence; code: blanks. A sentence is "Title,
                          text" for the fine models, "Title: text" for the frozen vectors (code)
    yes/no questions      code: not trained on; ours: trained on (--drop-yes-no)
    coarse vectors        code: the sentences' are normalised and frozen, the state's is not: its norm is
                          the temperature
    coarse loss           paper: cross-entropy, "-.456" (which is minus a mean probability); code: sum over
                          the missing gold of -log p; ours: its mean (--coarse-loss)
    coarse negatives      code: the question's own sentences and another question's
    submit's score        paper: answerability; code: start logits of positions 0 and 1; ours: start and end
                          logit of the first token (--submit-score)
    fine stage            paper: a copy of the coarse stage's settings; code: one gold against 6 random
                          sentences; ours: the coarse candidates, a missing gold put in where none is there
                          (--negatives)
    clip                  paper: clip(r, 1 + eps, 1 - eps), its bounds swapped
    reward                paper: discounted F1, +1 if exact; code: gamma 1, no bonus for submitting; ours:
                          the bonus on every exact end, not discounted (--gamma, --bonus)
    a path's return       code: F1 after one action, since its greedy rollout is dropped; ours: the sampled
                          path's (--returns action --baseline candidates is the code's)
    baseline b(s)         paper: paths sampled from s; code: greedy ones after every candidate, weighed by
                          pi; ours: other paths of the question through the same evidence, and fresh ones
                          where they are few (--baseline, --baseline-rollouts)
    PPO                   paper: "batch size 6", so one update a batch, where r = 1 and nothing is clipped;
                          code: a replay buffer of old states, a loss over all candidates of a state, cosine
                          with warm-up; ours: sampled actions, several updates a step (--mini-batch), constant
    labels out of reach   code: such questions are left out; ours: they stay, as gold that cannot be found
    long states           code: cut at 512 tokens; ours: the oldest sentences are left out (--max-tokens)
    beam                  code: all beams start equal and stay so; ours: from one, distinct hypotheses
    dropout               off in all stages, so that ratios begin at 1
    Spearman              paper: cov / (cov cov), 1,000 questions; code: temperature .5, F1, 8 actions; ours:
                          of ranks, over questions whose paths differ (--correlate). log p is without T5's
    sub-question's target paper: the approximation of the evidence found; code: of the evidence found later,
                          but one; ours: of the gold that is missing, before anything is found too, or the
                          paper's (--sqg-target)
    joint training        paper: proposed; ours: from the supervised policy, as many steps as PPO
    "+ sub-questions"     code: wherever the policy would not submit, a sub-question takes the question's
                          place in a search of its own, whose finds are all kept; the asker is given the
                          evidence with a blank between all letters. Ours: without those blanks; and, beside
                          it, asking before every sentence, the sub-question behind the evidence in the
                          policy's text and the coarse stage's query for that sentence

    python askit.py                              embedded world: coarse, supervised, PPO; minutes on two cores
    python askit.py --stage ask                  then: qap, sqg, joint
    python askit.py --stage ppo --resume         one stage; --resume goes on
    python askit.py --model paper --data hotpotqa     the paper's encoders (as safetensors) and data; not run
    python askit.py --encoder DIR --fine-layers 3 --data train.jsonl --eval-data dev.jsonl    any encoder
    python askit.py --eval-data dev --ask "Who is the mother of …?"     a question of that set
What is not in the paper is at the end (appendix) or in common/.
"""

import math
import random
from collections import Counter
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import (
    checkpoint,
    data,
    encoders,
    flags,
    loop,
    metrics,
    report,
    retriever,
    rollout,
    run,
    seq2seq,
    splits,
    training,
)
from common import model as models
from common.answerer import Answerer, answers_of, reader_row
from common.curves import draw_ranks, draw_recall
from common.evidence import (
    ASK,
    ENDS,
    SUBMIT,
    SearchPath,
    SubQuestion,
    asked_of,
    evidence_of,
    evidence_scores,
    make_case,
    make_cases,
    read,
    state_ids,
    text_of,
    with_evidence,
    world_questions,
)
from common.files import Progress, console, plain, read_evaluation, read_jsonl, say
from common.metric_table import ANSWERS, RATIO, SECONDS, STEP, UPDATE, Metric
from common.page.evidence import about, group_record, path_nodes, prediction
from common.rollout import stable_seed
from common.world import tiny_bert, tiny_t5

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.Flags):
    """The paper's settings; what a run needs besides (data, names) is in common/flags.py."""

    # ---- stages and models
    # what to do; all = coarse, supervised, ppo; ask = qap, sqg, joint; each of them evaluated
    stage: Literal[
        "all", "ask", "coarse", "supervised", "ppo", "qap", "sqg", "joint", "reader", "eval"] = "all"
    encoder: str = ""               # coarse encoder; empty = with --model paper the paper's, else a tiny one
    action_model: str = ""          # scores (state, sentence) as next sentences
    submit_model: str = ""          # scores whether the evidence answers the question
    # 0 = the two scorers as named; else both are the encoder's first so many layers with a new head each
    fine_layers: int = 0
    question_model: str = ""        # T5 that qap and sqg begin with

    # ---- search
    candidates: int = 6             # candidates of the coarse stage beside submit | sec. 4.3.3
    max_evidence: int = 10          # sentences a search may take | authors' code
    beam: int = 4                   # hypotheses of the beam search | sec. 4.5.1
    # tokens of a state and a sentence together; a sentence has a quarter, a state leaves out its oldest ones
    max_tokens: int = 508
    submit_score: Literal["paper", "code"] = "paper"  # first token's start and end logit, or two start logits

    # ---- coarse stage
    coarse_steps: int = 60000       # training steps | sec. 4.3.2
    coarse_batch: int = 24          # states a step | sec. 4.3.2
    coarse_lr: float = 1e-6         # learning rate after warm-up, half a cosine to 0 | sec. 4.3.2
    coarse_warmup: int = 10000      # steps of linear warm-up | sec. 4.3.2
    # over the missing gold of a state: mean or sum of -log p, or -log of the sum of p
    coarse_loss: Literal["mean", "sum", "logsumexp"] = "mean"
    # wrong sentences in a training state: round(Exponential(rate)) | authors' code
    noise_rate: float = 2.0

    # ---- supervised stage
    supervised_steps: int = 80000   # training steps | authors' code
    supervised_batch: int = 8       # states a step | authors' code
    supervised_lr: float = 1e-6     # learning rate after warm-up, half a cosine to 0 | authors' code
    supervised_warmup: int = 15000  # steps of linear warm-up | authors' code
    # the other actions of a training state: the coarse stage's candidates, or random sentences (authors'
    # code)
    negatives: Literal["coarse", "random"] = "coarse"

    # ---- PPO
    # training questions: file, hub name, or "world" | sec. 4.1.1
    data: str = "hotpotqa"
    steps: int = 1667               # PPO steps; 10,000 paths in all | sec. 4.3.3
    questions_per_step: int = 1     # questions a step | ours
    group_size: int = 6             # paths sampled a question | ours
    mini_batch: int = 6             # "batch size 6", here of paths | sec. 4.3.3
    lr: float = 1e-6                # learning rate; constant is ours | sec. 4.3.3
    clip: float = .2                # half width of the clip window | sec. 4.3.3
    # score of the evidence, or of a reader's answer from it, which needs no labels (the stages before it do;
    # --gamma and --bonus are the evidence's) | sec. 6
    reward: Literal["evidence", "answer"] = "evidence"
    gamma: float = 1.0              # discount of F1 for each action; not printed | authors' code
    bonus: float = 1.0              # for an exact evidence set | sec. 3.1.2
    # R of an action: its path's, or that of the evidence after it (authors' code, with --baseline candidates)
    returns: Literal["path", "action"] = "path"
    # b(s): mean return of other paths through s; of greedy ones after each candidate, weighed by pi; or 0
    baseline: Literal["paths", "candidates", "none"] = "paths"
    baseline_rollouts: int = 4      # other paths through s, at least; 0 = those of the question alone | ours
    drop_yes_no: bool = False       # leave yes/no questions out of training, as the authors' code
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient
    micro_tokens: int = 16384       # tokens a forward pass; memory only
    precision: Literal["fp32", "bf16"] = "fp32"     # of products; bf16 = autocast | ours
    correlate: int = 100            # evaluated questions whose p and reward are correlated, 10 paths each

    # ---- asking
    qap_steps: int = 52500          # updates; 7 epochs of 60,000 questions | sec. 4.3.1
    sqg_steps: int = 35000          # updates; 7 epochs of 40,000 states | sec. 4.3.1
    question_batch: int = 8         # rows an update; not printed
    question_lr: float = 1e-4       # learning rate of both, half a cosine to 0 | sec. 4.3.1
    question_tokens: int = 64       # tokens of a sub-question, at most | authors' code
    # what a sub-question is trained to say: the approximation of the evidence found (paper) or missing
    sqg_target: Literal["prefix", "suffix"] = "suffix"
    ask_steps: int = 1000           # joint: supervised updates that teach when to ask | ours
    max_questions: int = 2          # sub-questions a search may ask | ours
    question_cost: float = .02      # of the reward, a sub-question | ours
    question_kl: float = .05        # weight of the KL to the T5 that joint training begins with | ours

    # ---- answer-based reward
    reader: str = ""                # extractive reader; empty = the one of --stage reader
    reader_steps: int = 20000       # updates of a reader | ours
    sentence_cost: float = .02      # of the reward, a sentence taken | ours


# What differs in the embedded world: encoders of some hundred thousand weights on two cores. Ours.
WORLD = dict(
    data="world",
    limit=2000,
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
    save_every=10,
    qap_steps=1600,
    sqg_steps=1600,
    question_batch=16,
    question_lr=3e-3,
    question_tokens=24,
    ask_steps=100,
    reader_steps=3000,
)
PAPER_MODELS = {
    "encoder": "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
    "action_model": "prajjwal1/bert-mini",
    "submit_model": "deepset/tinyroberta-squad2",
    "question_model": "ThomasSimonini/t5-end2end-question-generation",
}
PAPER_EVAL = "hotpotqa-dev"
# EM / F1, HotpotQA distractor dev
PAPER = {"supervised": "30.2 / 63.9", "ppo": "33.9 / 67.4"}
PAPER_BEAM = "34.4 / 69.0"
PAPER_ASKED = "0.0 / 40.8"


# ---------------------------------------------------------------- reward (states: common/evidence.py)

def path_reward(case, steps, cfg):
    """gamma^T F1 + bonus if the evidence is exactly the gold (sec. 3.1.2), less what its sub-questions cost;
    T = actions of the path, submitting included."""
    em, f1, _, _ = evidence_scores(case, steps)
    return (
        cfg.gamma ** (len(steps) + 1) * f1
        + cfg.bonus * em
        - cfg.question_cost * len(asked_of(steps))
    )


# ---------------------------------------------------------------- coarse retrieval (sec. 3.1.1)

def freeze_vectors(encoder, cases, folder):
    """Normalised vectors of every sentence, from the encoder before its training; they never change again."""
    texts = [ids for case in cases for ids in case.tokens["coarse"][1]]
    vectors = encoders.frozen_vectors(encoder, texts, folder)
    at = 0
    for case in cases:
        case.vectors = vectors[at:at + len(case.texts)]  # (sentences, H)
        at += len(case.texts)


def coarse_loss(scores, missing, kind="mean"):
    """Of one state: scores (sentences,) of all that are not taken, `missing` the gold among them."""
    logp = scores.log_softmax(0)[missing]
    if kind == "logsumexp":
        return -logp.logsumexp(0)
    return -logp.sum() if kind == "sum" else -logp.mean()


def training_state(case, rng, noise_rate, complete):
    """Sentences taken in a made-up state: some gold in random order, and wrong ones among it. complete:
    whether all gold may be there (then the right action is to submit)."""
    gold = sorted(case.gold)
    most = len(gold) if complete else len(gold) - 1
    taken = rng.sample(gold, rng.randint(0, most))
    wrong = [i for i in range(len(case.texts)) if i not in case.gold]
    noise = min(round(rng.expovariate(noise_rate)), len(wrong))
    for i in rng.sample(wrong, noise):
        taken.insert(rng.randint(0, len(taken)), i)
    return tuple(taken)


def coarse_step(encoder, cases, others, cfg, rng):
    """Loss of a batch of states, and how many have missing gold as their best sentence. Negatives: the
    question's other sentences and those of one other question."""
    states = [training_state(case, rng, cfg.noise_rate, complete=False) for case in cases]
    vectors = encoder.encode(
        [state_ids(encoder.reader, c, t) for c, t in zip(cases, states, strict=True)]
    )
    losses, right = [], []
    for case, taken, other, vector in zip(cases, states, others, vectors, strict=True):
        left = [i for i in range(len(case.texts)) if i not in taken]
        missing = [k for k, i in enumerate(left) if i in case.gold]
        # (left + other's, H)
        others_vectors = other.vectors[: 0 if other is case else None]
        corpus = torch.cat([case.vectors[left], others_vectors]).to(vector.device)
        scores = corpus @ vector
        losses.append(coarse_loss(scores, missing, cfg.coarse_loss))
        right.append(int(scores.argmax()) in missing)
    return torch.stack(losses).mean(), sum(right)


# ---------------------------------------------------------------- fine policy (sec. 3.1.2)

class Scorer(torch.nn.Module):
    """pi(a|s) over submit and candidates: a next-sentence model for sentences, a question-answering model for
    submitting; in joint training the T5 that asks too. Saved as folders in Hugging Face form."""

    def __init__(self, parts):
        super().__init__()
        for name, (model, _) in parts.items():  # action, submit, question
            self.add_module(name, model)
        self.tokenizers = {name: tokenizer for name, (_, tokenizer) in parts.items()}

    def save_pretrained(self, folder):
        for name, tokenizer in self.tokenizers.items():
            getattr(self, name).save_pretrained(Path(folder) / name)
            tokenizer.save_pretrained(Path(folder) / name)


@dataclass
class Policy:
    """What is saved (model, tokenizer) and what a search needs besides."""

    model: Scorer
    encoder: encoders.Encoder
    action_reader: encoders.PairTokenizer
    submit_reader: encoders.PairTokenizer
    cfg: Config
    asker: seq2seq.Writer | None = None
    may_ask: bool = False  # of its own accord
    answerer: Answerer | None = None  # of --reward answer

    def __post_init__(self):
        self.coarse_cache = {}  # state -> candidates; the encoder stays as it is
        self.cache = {}  # state -> (actions, log-probs) of these weights
        self.asked = {}  # state -> SubQuestion of the beams of these weights

    @property
    def tokenizer(self):
        return self.action_reader.tokenizer

    def forget(self):
        """After an update."""
        self.cache = {}
        self.asked = {}


def coarse_query(reader, case, steps):
    """The question and the evidence; right after a sub-question that alone, a look from another side."""
    if steps and isinstance(steps[-1], SubQuestion):
        return reader.ids(steps[-1].text)
    return state_ids(reader, case, evidence_of(steps))


@torch.no_grad()
def candidates(policy, states):
    """[sentence numbers] of each state: the best that are not yet taken, best first."""
    new = [s for s in dict.fromkeys(states) if s not in policy.coarse_cache]
    if new:
        vectors = policy.encoder.encode_all(
            [coarse_query(policy.encoder.reader, *s) for s in new]
        )
        for (case, steps), vector in zip(new, vectors, strict=True):
            gone = case.closed | set(evidence_of(steps))
            scores = case.vectors @ vector  # (sentences,)
            scores[list(gone)] = -torch.inf
            k = min(policy.cfg.candidates, len(case.texts) - len(gone))
            policy.coarse_cache[case, steps] = scores.topk(k).indices.tolist()
    return [policy.coarse_cache[s] for s in states]


def log_policy(policy, states, offered):
    """(n, 1 + k) log pi of submit and of the offered actions of each state, -inf where there are fewer. The
    text of asking is "?"."""
    action, submit = policy.action_reader, policy.submit_reader
    action_pairs, submit_pairs, rows, columns = [], [], [], []
    for row, ((case, steps), actions) in enumerate(zip(states, offered, strict=True)):
        question, sentences = case.tokens["submit"]
        evidence = [sentences[i] for i in evidence_of(steps)]
        submit_pairs.append((question, submit.joined(evidence) if evidence else []))
        first = state_ids(action, case, steps)
        for column, a in enumerate(actions, 1):
            action_pairs.append(
                (first, action.ids("?") if a == ASK else case.tokens["action"][1][a])
            )
            rows.append(row)
            columns.append(column)
    device = policy.model.action.device
    logits = torch.full(
        (len(states), 1 + max(map(len, offered), default=0)), -torch.inf, device=device
    )
    with encoders.autocast(policy.model.action, policy.cfg.precision):
        out = policy.model.submit(**submit.batch(submit_pairs, device))
        if action_pairs:
            scores = policy.model.action(**action.batch(action_pairs, device)).logits[:, 0]
            logits[rows, columns] = scores.float()
    second = (
        out.end_logits[:, 0] if policy.cfg.submit_score == "paper" else out.start_logits[:, 1]
    )
    # the first token: "no answer here"
    logits[:, 0] = -(out.start_logits[:, 0] + second).float() / 2
    return logits.log_softmax(-1)


def state_batches(policy, states, offered):
    """Lists of states in forward passes of about micro_tokens, given by their numbers."""

    def tokens(item):
        (case, steps), actions = item
        question, of = case.tokens["action"]
        state = (
            len(question)
            + sum(len(of[i]) + 1 for i in evidence_of(steps))
            + 16 * len(asked_of(steps))
        )
        state = min(policy.cfg.max_tokens, state)
        return state + sum(state + (1 if a == ASK else len(of[a])) for a in actions)

    return encoders.in_batches(
        list(zip(states, offered, strict=True)), tokens, policy.cfg.micro_tokens
    )


def offers(policy, states):
    """What may be done in each state beside submitting, which is all that is left where it is full."""
    found = []
    for (_, steps), sentences in zip(states, candidates(policy, states), strict=True):
        may_ask = policy.may_ask and len(asked_of(steps)) < policy.cfg.max_questions
        full = len(evidence_of(steps)) >= policy.cfg.max_evidence
        found.append([] if full else [*sentences, *([ASK] if may_ask else [])])
    return found


@torch.no_grad()
def policy_of(policy, states):
    """[(actions, log-probs)] of states, cached until the weights change; the first action is to submit."""
    new = [s for s in dict.fromkeys(states) if s not in policy.cache]
    offered = offers(policy, new)
    for part in state_batches(policy, new, offered):
        logp = log_policy(policy, [new[i] for i in part], [offered[i] for i in part])
        for i, row in zip(part, logp.tolist(), strict=True):
            policy.cache[new[i]] = [SUBMIT, *offered[i]], row[: 1 + len(offered[i])]
    return [policy.cache[s] for s in states]


# ---------------------------------------------------------------- asking (sec. 3.3, 3.4)

def approximation_row(writer, case, evidence):
    """(input ids, target ids) of question approximation: the evidence, and the question itself."""
    sentences = [case.texts[i] for i in evidence]
    return writer.ids("generate question: ", *sentences), writer.ids(case.question.question)


def sub_question_row(writer, case, steps, target=""):
    """(input ids, target ids) of sub-question generation: the question, <sep>, what was found."""
    sentences = [case.texts[i] for i in evidence_of(steps)]
    return writer.ids(
        "generate question: ", case.question.question, encoders.SEP, *sentences
    ), writer.ids(target)


def sub_question_targets(case, path, target):
    """[(evidence found, evidence that its sub-question approximates)] of a path: for every prefix that prefix
    itself (paper), or the gold that is missing from it."""
    prefixes = [path[:k] for k in range(len(path) + 1)]
    if target == "prefix":
        return [(p, p) for p in prefixes if p]
    pairs = [(p, tuple(sorted(case.gold - set(p)))) for p in prefixes]
    return [(found, missing) for found, missing in pairs if missing]


@torch.no_grad()
def ask_questions(policy, states, draws=None):
    """[SubQuestion] for states: sampled where draws (a random.Random each) are given, else the best of the
    beams, cached until the weights change."""
    inputs = [sub_question_row(policy.asker, *state)[0] for state in states]
    if draws:
        return [SubQuestion(*q) for q in policy.asker.sample(inputs, draws)]
    new = [i for i, s in enumerate(states) if s not in policy.asked]
    for i, text in zip(new, policy.asker.write([inputs[i] for i in new]), strict=True):
        policy.asked[states[i]] = SubQuestion(text)
    return [policy.asked[s] for s in states]


# ---------------------------------------------------------------- paths: sampled, greedy, beam

def walk(policy, paths, choose, draws=None):
    """Takes every path to its end; choose(path number, actions, log-probs) -> index of the action. All open
    states of all paths are scored in one call. draws: a random.Random each, for sampled sub-questions."""
    while any(not p.done for p in paths):
        running = [n for n, p in enumerate(paths) if not p.done]
        states = [(paths[n].case, paths[n].steps) for n in running]
        found = policy_of(policy, states)
        asking = []
        for n, state, (actions, logprobs) in zip(running, states, found, strict=True):
            i = choose(n, actions, logprobs)
            if actions[i] == ASK:
                asking.append((n, state, logprobs[i]))
            else:
                paths[n] = paths[n].after(actions[i], logprobs[i])
        if asking:
            own = draws and [draws[n] for n, _, _ in asking]
            questions = ask_questions(policy, [state for _, state, _ in asking], own)
            for (n, _, logprob), question in zip(asking, questions, strict=True):
                paths[n] = paths[n].after(question, logprob)
    return rewarded(policy, paths)


def rewarded(policy, paths):
    rewards = [path_reward(p.case, p.steps, policy.cfg) for p in paths]
    if policy.cfg.reward == "answer":
        rewards = answer_rewards(policy, paths)
    for p, reward in zip(paths, rewards, strict=True):
        p.reward = reward
    return paths


def sample_from(policy, starts, seeds):
    """The paths that begin as `starts`, each with a seed of its own."""
    draws = [random.Random(seed) for seed in seeds]

    def draw(n, actions, logprobs):
        return draws[n].choices(range(len(actions)), [math.exp(x) for x in logprobs])[0]

    return walk(policy, list(starts), draw, draws)


def sample_paths(policy, cases, size, *seed):
    """`size` paths a question; a path depends on its own seed alone."""
    starts, seeds, times = [], [], Counter()
    for case in cases:
        for _ in range(size):
            starts.append(SearchPath(case))
            seeds.append(stable_seed(*seed, case.question.id, times[case]))
            times[case] += 1
    return sample_from(policy, starts, seeds)


def best(n, actions, logprobs):
    return max(range(len(actions)), key=logprobs.__getitem__)


def greedy_paths(policy, cases):
    return walk(policy, [SearchPath(case) for case in cases], best)


def beam_search(policy, cases, width):
    """The most probable path of each question among `width` hypotheses a step. From one beam; hypotheses are
    distinct; those that ended compete with those that go on, by log p(tau), without length normalisation."""
    beams = [[SearchPath(case)] for case in cases]
    while any(not p.done for beam in beams for p in beam):
        running = [p for beam in beams for p in beam if not p.done]
        found = policy_of(policy, [(p.case, p.steps) for p in running])
        asking = [p for p, (actions, _) in zip(running, found, strict=True) if ASK in actions]
        questions = (
            ask_questions(policy, [(p.case, p.steps) for p in asking]) if asking else []
        )
        question_of = dict(zip(asking, questions, strict=True))
        grown_from = {}
        for p, (actions, logprobs) in zip(running, found, strict=True):
            steps = [question_of[p] if a == ASK else a for a in actions]
            grown_from[p] = [p.after(s, x) for s, x in zip(steps, logprobs, strict=True)]
        for n, beam in enumerate(beams):
            grown = [q for p in beam for q in grown_from.get(p, [p])]
            beams[n] = sorted(grown, key=lambda p: -p.logprob)[:width]
    return rewarded(policy, [beam[0] for beam in beams])


def forced_questions(policy, cases, mode):
    """Wherever the policy would not submit, a sub-question is asked: "PPO + sub-questions" (sec. 4.5.1).

    The policy itself does not ask. mode: "replace" = the authors' search: the sub-question takes the
    question's place in a greedy search of its own, from no evidence, and all that it finds is kept; "append"
    = it stands behind the evidence, and the policy's best sentence for this state is taken."""

    def seen(path):
        """The state that the policy sees."""
        return path.case, evidence_of(path.steps) if mode == "replace" else path.steps

    paths = [SearchPath(case) for case in cases]
    while any(not p.done for p in paths):
        running = [n for n, p in enumerate(paths) if not p.done]
        found = policy_of(policy, [seen(paths[n]) for n in running])
        asking = []
        for n, (actions, logprobs) in zip(running, found, strict=True):
            if best(n, actions, logprobs) == 0:
                paths[n] = paths[n].after(SUBMIT, logprobs[0])
            else:
                asking.append(n)
        questions = ask_questions(policy, [seen(paths[n]) for n in asking]) if asking else []
        for n, question in zip(asking, questions, strict=True):
            paths[n] = paths[n].after(question, 0.0)
        if mode == "append":
            found = policy_of(policy, [(paths[n].case, paths[n].steps) for n in asking])
            for n, (actions, logprobs) in zip(asking, found, strict=True):
                i = 1 + best(n, actions[1:], logprobs[1:])
                paths[n] = paths[n].after(actions[i], logprobs[i])
            continue
        searches = [
            asked_case(policy, paths[n], q) for n, q in zip(asking, questions, strict=True)
        ]
        for n, search in zip(asking, greedy_paths(policy, searches), strict=True):
            room = policy.cfg.max_evidence - len(paths[n].taken)
            for i in search.taken[:room]:
                paths[n] = paths[n].after(i, 0.0)
            if not search.taken:  # it would ask the same again, for ever
                paths[n] = paths[n].after(SUBMIT, 0.0)
    return rewarded(policy, paths)


def asked_case(policy, path, question):
    """A search for the sub-question alone, over the sentences that the path has not taken."""
    readers = (policy.encoder.reader, policy.action_reader, policy.submit_reader)
    asked = {r.name: (r.ids(question.text), path.case.tokens[r.name][1]) for r in readers}
    return replace(path.case, tokens=path.case.tokens | asked, closed=path.case.closed | set(path.taken))


def spearman(policy, cases, size, *seed):
    """Spearman's correlation of p(tau) and reward over `size` sampled paths of a question (sec. 4.4): its
    mean over questions whose paths differ in both, the share of these questions (the others have none), and
    how often each pair of ranks came (size, size)."""
    from scipy.stats import spearmanr

    paths = sample_paths(policy, cases, size, *seed)
    found, counts = [], [[0] * size for _ in range(size)]
    for group in (paths[i:i + size] for i in range(0, len(paths), size)):
        probabilities, rewards = [p.logprob for p in group], [p.reward for p in group]
        if len(set(probabilities)) > 1 and len(set(rewards)) > 1:
            found.append(float(spearmanr(probabilities, rewards).statistic))
            ranks = []
            for values in (probabilities, rewards):  # ties in random order, so that none of them agree
                ties = random.Random(stable_seed(*seed, group[0].case.question.id, len(ranks)))
                values = list(zip(values, ties.sample(range(size), size), strict=True))
                ranks.append([sorted(values).index(value) for value in values])
            for x, y in zip(*ranks, strict=True):
                counts[y][x] += 1
    mean = sum(found) / len(found) if found else math.nan
    return mean, len(found) / max(1, len(cases)), counts


# ---------------------------------------------------------------- credit

def returns_of(path, cfg):
    """R of every action: the path's reward; with --returns action that of the evidence after it, as the
    authors' code has it (no bonus for submitting)."""
    if cfg.returns == "path":
        return [path.reward] * len(path.actions)
    found = []
    for t, action in enumerate(path.actions):
        bonus = 0.0 if action == SUBMIT else cfg.bonus
        found.append(
            path_reward(path.case, path.steps[: path.first + t + 1], replace(cfg, bonus=bonus))
        )
    return found


def baselines(policy, paths, min_others, *seed):
    """b(s) before every action of every path: the mean return of other paths of the question through the same
    steps, in whatever order. Where they are fewer than `min_others`, fresh ones are sampled from there; with
    min_others = 0 a state that one path alone came through has the baseline of the state before it."""
    through = {}  # state -> paths

    def same(case, steps):
        """Orders of the same sentences are one state; a sub-question's place matters."""
        return case, steps if asked_of(steps) else frozenset(steps)

    def note(path):
        for state in path.states():
            through.setdefault(same(*state), []).append(path)

    for p in paths:
        note(p)
    for depth in range(max(len(p.actions) for p in paths)):
        starts = {}
        for case, steps in (p.states()[depth] for p in paths if len(p.actions) > depth):
            missing = min_others + 1 - len(through[same(case, steps)])
            for k in range(missing):
                starts.setdefault((*same(case, steps), k), SearchPath(case, steps, len(steps)))
        seeds = [
            stable_seed(*seed, "baseline", c.question.id, *sorted(text_of(x) for x in s), k)
            for c, s, k in starts
        ]
        for p in sample_from(policy, starts.values(), seeds):
            note(p)
    found = []
    for p in paths:
        values = []
        for case, steps in p.states():
            others = [q.reward for q in through[same(case, steps)] if q is not p]
            values.append(sum(others) / len(others) if others else values[-1])
        found.append(values)
    return found


def candidate_baselines(policy, paths):
    """b(s) of the authors' code: mean over actions, weighed by pi(a|s), of the reward of the greedy path
    after it; with --returns action, as it runs there, of the evidence after it."""
    states = list(dict.fromkeys(s for p in paths for s in p.states()))
    starts, weights = [], []
    for number, (state, (actions, logprobs)) in enumerate(
        zip(states, policy_of(policy, states), strict=True)
    ):
        for a, x in zip(actions, logprobs, strict=True):
            if a != ASK:
                starts.append(SearchPath(*state, len(state[1])).after(a, x))
                weights.append((number, math.exp(x)))
    if policy.cfg.returns == "path":
        returns = [p.reward for p in walk(policy, starts, best)]
    else:
        returns = [returns_of(p, policy.cfg)[0] for p in starts]
    value, total = [0.0] * len(states), [0.0] * len(states)
    for (number, weight), r in zip(weights, returns, strict=True):
        value[number] += weight * r
        total[number] += weight
    value = [v / t for v, t in zip(value, total, strict=True)]  # asking is left out
    at = dict(zip(states, value, strict=True))
    return [[at[s] for s in p.states()] for p in paths]


def advantages_of(policy, paths, cfg, *seed):
    """A_t = R_t - b(s_t) of every action (sec. 3.1.2)."""
    if cfg.baseline == "none":
        values = [[0.0] * len(p.actions) for p in paths]
    elif cfg.baseline == "candidates":
        values = candidate_baselines(policy, paths)
    else:
        values = baselines(policy, paths, cfg.baseline_rollouts, *seed)
    return [
        [r - b for r, b in zip(returns_of(p, cfg), v, strict=True)]
        for p, v in zip(paths, values, strict=True)
    ]


def answer_rewards(policy, paths):
    """Rewards without labels (sec. 6): F1 of a frozen reader's answer from the evidence, less a cost a
    sentence and a sub-question."""
    cfg, found = policy.cfg, []
    for p, answer in zip(
        paths, answers_of(policy.answerer, [(p.case, p.steps) for p in paths]), strict=True
    ):
        f1 = metrics.f1(answer, p.case.question.answers)
        found.append(
            f1 - cfg.sentence_cost * len(p.taken) - cfg.question_cost * len(asked_of(p.steps))
        )
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
    objective = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    loss = -objective.sum() / num_paths
    clipped = (ratio > 1 + clip) & (advantages > 0) | (ratio < 1 - clip) & (advantages < 0)
    return loss, {
        "tokens": len(ratio),
        "clipped_tokens": int(clipped.sum()),
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
    """(states, offered actions, correct (n, 1 + k)): missing gold that is offered, or submitting where none
    is missing. Where the policy may ask: asking, if the coarse stage offers no missing gold."""
    states = [
        (case, training_state(case, rng, cfg.noise_rate, complete=True)) for case in cases
    ]
    states = [(case, taken[: cfg.max_evidence - 1]) for case, taken in states]
    if policy.may_ask:
        states = some_asked(policy, states, rng)
    offered = []
    for (case, steps), actions in zip(states, offers(policy, states), strict=True):
        taken = set(evidence_of(steps))
        if cfg.negatives == "random":
            left = [i for i in range(len(case.texts)) if i not in taken]
            asks = [a for a in actions if a == ASK]
            actions = rng.sample(left, min(cfg.candidates, len(left))) + asks
        missing = sorted(case.gold - taken)
        if missing and not set(actions) & case.gold and ASK not in actions:
            actions = [*actions[:-1], rng.choice(missing)]
        offered.append(actions)
    correct = torch.zeros(len(states), 1 + max(map(len, offered)), dtype=torch.bool)
    for row, ((case, steps), actions) in enumerate(zip(states, offered, strict=True)):
        missing = case.gold - set(evidence_of(steps))
        stuck = bool(missing) and not set(actions) & case.gold
        correct[row, 0] = not missing
        for column, a in enumerate(actions, 1):
            correct[row, column] = a in case.gold or (a == ASK and stuck)
    return states, offered, correct


def some_asked(policy, states, rng):
    """The states; those where the coarse stage offers no missing gold get up to --max-questions sampled
    sub-questions."""
    stuck = []
    for n, (found, (case, steps)) in enumerate(
        zip(candidates(policy, states), states, strict=True)
    ):
        if case.gold - set(steps) and not set(found) & case.gold:
            stuck += [n] * rng.randint(0, policy.cfg.max_questions)
    states = list(states)
    for n in stuck:
        question = ask_questions(policy, [states[n]], [rng])[0]
        states[n] = states[n][0], (*states[n][1], question)
    return states


def ppo_update(policy, optimizer, paths, advantages, cfg, keep, reference=None):
    """One pass over the step's paths, `mini_batch` an update; `start` = the T5 that joint training began
    with. Returns the step's means."""
    meter = training.Meter(keep=keep)
    for begin in range(0, len(paths), cfg.mini_batch):
        part = range(begin, min(begin + cfg.mini_batch, len(paths)))
        rows, questions = [], []
        for n in part:
            p = paths[n]
            rows += zip(p.states(), p.actions, p.logprobs, advantages[n], strict=True)
            steps = zip(p.states(), p.steps[p.first :], advantages[n], strict=False)
            questions += [(state, s, a) for state, s, a in steps if isinstance(s, SubQuestion)]
        states = [row[0] for row in rows]
        offered = [policy.cache[s][0][1:] for s in states]
        for group in state_batches(policy, states, offered):
            # (n, 1 + k)
            logp = log_policy(policy, [states[i] for i in group], [offered[i] for i in group])
            chosen = [policy.cache[states[i]][0].index(rows[i][1]) for i in group]
            logp = logp[range(len(group)), chosen]  # (n,)
            old, weight = (
                torch.tensor([rows[i][c] for i in group], device=logp.device) for c in (2, 3)
            )
            loss, stats = ppo_loss(logp, old, weight, len(part), cfg.clip)
            loss.backward()
            meter.add(loss, stats)
        if questions:
            question_step(policy.asker, reference, questions, len(part), cfg, meter)
        meter.step(policy.model, optimizer, cfg.grad_clip, ())
    row = meter.means()
    if meter.total.get("question_tokens"):
        row["train/question_kl"] = (
            meter.total["question_kl_sum"] / meter.total["question_tokens"]
        )
    return row


def question_step(asker, reference, questions, num_paths, cfg, meter):
    """Backward of the sub-questions' loss; questions [(state, SubQuestion, advantage)]."""
    inputs = [sub_question_row(asker, *state)[0] for state, _, _ in questions]
    targets = [list(q.ids) for _, q, _ in questions]
    for group in seq2seq.batches(list(zip(inputs, targets, strict=True)), cfg.micro_tokens):
        rows = [inputs[i] for i in group], [targets[i] for i in group]
        logp, mask = asker.logprobs(*rows)  # (n, T)
        with torch.no_grad():
            before, _ = asker.logprobs(*rows, model=reference)
        old = encoders.padded([questions[i][1].logprobs for i in group], 0.0, logp.device)
        weight = torch.tensor([questions[i][2] for i in group], device=logp.device)
        loss, stats = question_loss(logp, old, before, mask, weight, num_paths, cfg)
        loss.backward()
        meter.add(loss, stats)


# ---------------------------------------------------------------- train

PRETRAIN_EVERY = 25  # supervised updates a step of the log


def supervise(cfg, folder, learner, stage, lr, warmup, loss_of, evaluate_now):
    """Supervised training in --<stage>-steps updates, linear warm-up and half a cosine; PRETRAIN_EVERY of
    them are a step of the log. loss_of(rng) yields (loss, rows, right ones) of an update's forward passes."""
    updates = getattr(cfg, f"{stage}_steps")
    stage_cfg = replace(cfg, steps=-(-updates // PRETRAIN_EVERY), show_every=0)
    optimizer = training.make_optimizer(learner.model, lr, cfg.weight_decay)
    for step, row in loop.steps(
        stage_cfg,
        folder,
        learner,
        optimizer,
        PRETRAIN_METRICS,
        evaluate=evaluate_now,
        label=f"{stage} | ",
    ):
        meter = training.Meter(keep=folder.nonfinite(step))
        for number in range((step - 1) * PRETRAIN_EVERY, min(step * PRETRAIN_EVERY, updates)):
            training.set_lr(optimizer, training.cosine_lr(number, updates, lr, warmup=warmup))
            rng = random.Random(stable_seed(cfg.seed, stage, number))
            for loss, count, right in loss_of(rng):
                loss.backward()
                meter.add(loss, {"tokens": count, "right_sum": right})
            meter.step(learner.model, optimizer, cfg.grad_clip, ())
        row |= meter.means()
        row["pretrain/right"] = meter.total["right_sum"] / meter.total["tokens"]


def train_coarse(cfg, folder, encoder, cases, evaluate_now):
    """The encoder learns which sentences are missing; the sentences' own vectors stay as they are."""

    def loss_of(rng):
        batch, others = (
            rng.choices(cases, k=cfg.coarse_batch),
            rng.choices(cases, k=cfg.coarse_batch),
        )
        loss, right = coarse_step(encoder, batch, others, cfg, rng)
        yield loss, len(batch), right

    supervise(
        cfg, folder, encoder, "coarse", cfg.coarse_lr, cfg.coarse_warmup, loss_of, evaluate_now
    )


def train_supervised(cfg, folder, policy, cases, evaluate_now):
    """The fine policy learns to take missing gold, and to submit when none is missing."""

    def loss_of(rng):
        yield from supervised_losses(
            policy, rng.choices(cases, k=cfg.supervised_batch), cfg, rng
        )

    supervise(
        cfg,
        folder,
        policy,
        "supervised",
        cfg.supervised_lr,
        cfg.supervised_warmup,
        loss_of,
        evaluate_now,
    )


def supervised_losses(policy, cases, cfg, rng):
    states, offered, correct = supervised_states(policy, cases, cfg, rng)
    for part in state_batches(policy, states, offered):
        logp = log_policy(policy, [states[i] for i in part], [offered[i] for i in part])
        right = correct[part][:, : logp.shape[1]].to(logp.device)
        hits = right[range(len(part)), logp.argmax(1)].sum()
        yield supervised_loss(logp, right) * len(part) / len(states), len(part), int(hits)
    policy.forget()


def train(cfg, folder, policy, cases, evaluate_now):
    """PPO: sample paths, score where they end, update; once a step. With a T5 in the policy this is joint
    training: it learns to ask while the policy learns when to."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay)
    stage, reference = "ppo", None
    if policy.may_ask:
        stage = "joint"
        reference = load_writer(cfg, checkpoint_of(cfg, "sqg")).model
        if not folder.start:
            learn_when_to_ask(cfg, policy, optimizer, cases)
    for step, row in loop.steps(
        cfg, folder, policy, optimizer, METRICS, evaluate=evaluate_now, label=f"{stage} | "
    ):
        batch = data.batch_of_step(
            cases, step, cfg.questions_per_step, stable_seed(cfg.seed, "order")
        )
        with loop.timed(row, "time/rollout"):
            policy.forget()
            paths = sample_paths(policy, batch, cfg.group_size, cfg.seed, "ppo", step)
            advantages = advantages_of(policy, paths, cfg, cfg.seed, "ppo", step)
        row |= path_metrics(paths, cfg)
        row["sample"] = sample_record(policy, paths, cfg.group_size, step)
        row |= ppo_update(
            policy, optimizer, paths, advantages, cfg, folder.nonfinite(step), reference
        )
        policy.forget()


def learn_when_to_ask(cfg, policy, optimizer, cases):
    """Supervised updates before joint training (ours): asking is right where the coarse stage offers no
    missing gold. Otherwise the score of asking would begin anywhere."""
    say(f"joint: {cfg.ask_steps} supervised updates of when to ask")
    training.set_lr(optimizer, cfg.supervised_lr)
    for number in range(cfg.ask_steps):
        rng = random.Random(stable_seed(cfg.seed, "when to ask", number))
        batch = rng.choices(cases, k=cfg.supervised_batch)
        for loss, _, _ in supervised_losses(policy, batch, cfg, rng):
            loss.backward()
        training.optimizer_step(policy.model, optimizer, cfg.grad_clip)
    training.set_lr(optimizer, cfg.lr)


def train_questions(cfg, folder, writer, rows, stage, evaluate_now):
    """A T5 learns rows [(input ids, target ids)]: question approximation, or sub-questions."""

    def loss_of(rng):
        batch = rng.choices(rows, k=cfg.question_batch)
        tokens = sum(len(target) for _, target in batch)
        for part in seq2seq.batches(batch, cfg.micro_tokens):
            logp, mask = writer.logprobs(
                [batch[i][0] for i in part], [batch[i][1] for i in part]
            )
            yield (
                -logp.sum() / tokens,
                int(mask.sum()),
                int((logp[mask] > math.log(0.5)).sum()),
            )

    supervise(cfg, folder, writer, stage, cfg.question_lr, 0, loss_of, evaluate_now)


def train_reader(cfg, folder, answerer, cases, evaluate_now):
    """An extractive reader learns to find the answer where all gold is there, and nothing elsewhere."""

    def loss_of(rng):
        batch = rng.choices(cases, k=cfg.supervised_batch)
        pairs, spans = [], []
        for case in batch:
            taken = training_state(case, rng, cfg.noise_rate, complete=True)
            if rng.random() < 0.5:  # all gold is there
                missing = sorted(case.gold - set(taken))
                taken = (*taken, *rng.sample(missing, len(missing)))
            pair, found = reader_row(answerer.reader, case, taken)
            pairs.append(pair)
            spans.append(found)
        out = answerer.model(**answerer.reader.batch(pairs, answerer.model.device))
        # (n, T)
        start, stop = out.start_logits.log_softmax(-1), out.end_logits.log_softmax(-1)
        logp = [
            torch.stack([start[n, a] + stop[n, b] for a, b in found]).logsumexp(0)
            for n, found in enumerate(spans)
        ]
        right = sum(float(x.detach()) > math.log(0.5) for x in logp)
        yield -torch.stack(logp).mean(), len(batch), right

    supervise(
        cfg,
        folder,
        answerer,
        "reader",
        cfg.supervised_lr,
        cfg.supervised_warmup,
        loss_of,
        evaluate_now,
    )


# ---------------------------------------------------------------- evaluate

@dataclass
class Questions:
    """An evaluation set and how its evidence is searched."""

    name: str
    cases: list
    search: str = "greedy"


def evaluate(policy, split, cfg, progress):
    """The evidence that a search ends with, against the labels. Returns (rows, summary)."""
    policy.forget()
    paths = []
    for start in range(0, len(split.cases), 64):
        cases = split.cases[start:start + 64]
        if split.search == "beam":
            paths += beam_search(policy, cases, cfg.beam)
        elif split.search in ("replace", "append"):
            paths += forced_questions(policy, cases, split.search)
        else:
            paths += greedy_paths(policy, cases)
        progress(len(paths), len(split.cases))
    rows, summary = scored(policy, paths, split, cfg)
    if policy.action_reader.shortened:
        say(f"  {policy.action_reader.shortened} times a state left out its oldest sentences (--max-tokens)")
        policy.action_reader.shortened = 0
    if split.search == "greedy" and cfg.correlate:
        rho, share, counts = spearman(
            policy, split.cases[: cfg.correlate], 10, cfg.seed, "correlate"
        )
        summary |= {"spearman": rho, "spearman_questions": share, "ranks": counts}
        say(
            f"  Spearman of p and reward {rho:.2f} over the {share:.0%} of questions whose paths differ"
        )
    return rows, summary


def scored(policy, paths, split, cfg):
    """(rows, summary) of paths: the scores of their evidence, and what went wrong."""
    rows = [prediction(policy, p) for p in paths]
    summary = {"set": split.name, "seed": cfg.seed, "search": split.search}
    summary |= metrics.summarize(rows, SCORES)
    summary["ends"] = {end: sum(r["end"] == end for r in rows) / len(rows) for end in ENDS}
    wrong = [r["first_wrong"] for r in rows if r["first_wrong"]]
    summary["first_wrong"] = {i: wrong.count(i) for i in sorted(set(wrong))}
    questions = [
        (p, t) for p in paths for t, s in enumerate(p.steps) if isinstance(s, SubQuestion)
    ]
    if questions:
        summary["redundant"] = rollout.mean(
            float(x) for x in redundant(policy.encoder, questions)
        )
        summary["asked"] = len(questions) / len(paths)
        say(
            f"  {summary['asked']:.2f} sub-questions a search, {summary['redundant']:.0%} of them redundant"
        )
    return rows, summary


SCORES = ("em", "f1", "precision", "recall", "sentences")


def redundant(encoder, questions):
    """Whether the best sentence for each sub-question alone was taken before it was asked (the paper's
    "answers were already in the evidence"). questions [(path, index of the step)]."""
    vectors = encoder.encode_all([encoder.reader.ids(p.steps[t].text) for p, t in questions])
    found = []
    for (p, t), vector in zip(questions, vectors, strict=True):
        found.append(int((p.case.vectors @ vector).argmax()) in evidence_of(p.steps[:t]))
    return found


RECALL_AT = 20


def evaluate_coarse(encoder, split, cfg, progress):
    """What can be had without a fine policy: the ranking itself, or the evidence of BM25's best two
    sentences, of the coarse stage's best as many as the mean of gold, or of an oracle that takes gold
    wherever it is offered."""
    policy = Policy(None, encoder, None, None, cfg)
    size = round(rollout.mean(len(case.gold_facts) for case in split.cases))
    if split.search == "ranking":
        return evaluate_ranking(encoder, split, cfg)
    paths = []
    for case in split.cases:
        if split.search == "bm25":
            rows = [{"id": str(i), "title": "", "text": t} for i, t in enumerate(case.texts)]
            index = retriever.BM25Retriever(rows)
            taken = [int(row.id) for row in index.search([case.question.question], 2)[0]]
        elif split.search == "coarse":
            taken = candidates(policy, [(case, ())])[0][:size]
        else:
            taken = []
            while found := set(candidates(policy, [(case, tuple(taken))])[0]) & case.gold:
                taken.append(min(found))
        paths.append(
            SearchPath(case, tuple(taken), logprobs=(0.0,) * (len(taken) + 1), done=True)
        )
        progress(len(paths), len(split.cases))
    return scored(policy, paths, split, cfg)


def evaluate_ranking(encoder, split, cfg):
    """How gold is ranked when nothing was taken yet: em = the best sentence is gold, f1 = share of the gold
    among the candidates (so neither is the evidence's), percentile of the best gold. recall_at: share of the
    missing gold among the best 1 to 20 sentences, with 0, 1 and 2 gold ones given."""
    rows, recall = [], {0: [], 1: [], 2: []}
    for given, found in recall.items():
        cases = [c for c in split.cases if len(c.gold) > given]
        starts = [tuple(sorted(c.gold))[:given] for c in cases]
        vectors = encoder.encode_all(
            [state_ids(encoder.reader, c, s) for c, s in zip(cases, starts, strict=True)]
        )
        for case, taken, vector in zip(cases, starts, vectors, strict=True):
            scores = case.vectors @ vector
            scores[list(taken)] = -torch.inf
            ranked = scores.argsort(descending=True).tolist()
            places = [place for place, i in enumerate(ranked) if i in case.gold - set(taken)]
            missing = len(case.gold_facts) - given
            found.append(
                [sum(p < k for p in places) / missing for k in range(1, RECALL_AT + 1)]
            )
            if given == 0:
                row = {
                    "em": float(places[0] == 0),
                    "f1": sum(p < cfg.candidates for p in places) / missing,
                }
                row["percentile"] = 1 - places[0] / max(1, len(ranked) - 1)
                rows.append(about(case) | row | {"sentences": len(ranked)})
    summary = {"set": split.name, "seed": cfg.seed}
    summary |= metrics.summarize(rows, ("em", "f1", "percentile", "sentences"))
    columns = {
        given: list(zip(*found, strict=True)) for given, found in recall.items() if found
    }
    summary["recall_at"] = {
        given: [rollout.mean(c) for c in of] for given, of in columns.items()
    }
    return rows, summary


def evaluate_texts(learner, split, cfg, progress):
    """em and f1 of words: question approximations from all gold against the question itself, or a reader's
    answers from all gold against the answer."""
    golds = [tuple(sorted(c.gold)) for c in split.cases]
    states = list(zip(split.cases, golds, strict=True))
    if isinstance(learner, Answerer):
        texts = answers_of(learner, states)
        wanted = [c.question.answers for c in split.cases]
    else:
        texts = learner.asker.write([approximation_row(learner.asker, *s)[0] for s in states])
        wanted = [[c.question.question] for c in split.cases]
    rows = []
    for case, text, gold in zip(split.cases, texts, wanted, strict=True):
        scores = {
            "em": metrics.exact_match(text, gold),
            "f1": metrics.f1(text, gold),
        }
        rows.append(about(case) | scores | {"answer": text, "sentences": len(case.gold)})
    return rows, {"set": split.name, "seed": cfg.seed} | metrics.summarize(rows, ("em", "f1"))


# ---------------------------------------------------------------- main

STAGES = {"all": ("coarse", "supervised", "ppo"), "ask": ("qap", "sqg", "joint")}
SEARCHES = {"coarse": ("ranking", "bm25", "coarse", "oracle"), "sqg": ("replace", "append")}
BEFORE = {
    "ppo": "supervised",
    "joint": "supervised",
    "eval": "ppo",
    "qap": "ppo",
    "sqg": "ppo",
}


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    stages = STAGES.get(cfg.stage, (cfg.stage,))
    for stage in () if cfg.ask else stages:
        stage_folder(cfg, stage)
    split, evals = load_questions(cfg)
    if cfg.ask:
        return ask(cfg, evals[0])
    run.tell(cfg)
    for stage in stages:
        run_stage(cfg, stage, split, evals)
    base = Path(cfg.out) / "askit"
    folders = {
        stage: base / f"{cfg.name}-{stage}" for stage in ("supervised", "ppo", "sqg", "joint")
    }
    title = f"ASKiT {cfg.name} (paper: EM / F1, HotpotQA)"
    report.stage_table(
        base / cfg.name, title, folders, "supervised", paper, COLUMNS, means=False
    )


def run_stage(cfg, stage, split, evals):
    """Trains one stage and evaluates it, or only evaluates; leaves a run folder. What --resume finds done is
    not done again."""
    folder = stage_folder(cfg, stage)
    kinds = SEARCHES.get(
        stage, ("greedy",) if stage in ("qap", "reader") else ("greedy", "beam")
    )
    sets = [Questions(set_name(cfg, e, kind), e.cases, kind) for e in evals for kind in kinds]
    rows = read_jsonl(folder.path / "metrics.jsonl")
    updates = getattr(cfg, f"{stage}_steps", 0)
    steps = cfg.steps if stage in ("ppo", "joint") else -(-updates // PRETRAIN_EVERY)
    if (
        folder.resume
        and folder.evaluated(sets)
        and (rows or [{"step": 0}])[-1]["step"] >= steps
    ):
        return say(f"{stage}: done before")
    torch.manual_seed(cfg.seed)
    cases = [c for s in ([split] if split else []) + evals for c in s.cases]
    learner, judged, judge = load_stage(cfg, stage, folder, cases)

    def evaluate_all(when=""):
        return run.evaluate_all(cfg, folder, judged, sets, judge, when)

    with run.stage(
        cfg,
        folder,
        METRICS if stage in ("ppo", "joint") else PRETRAIN_METRICS,
        title(cfg, stage),
    ):
        if steps:
            folder.forget_evaluations(sets)
            able = [c for c in split.cases if c.gold]
            if stage == "coarse" and not folder.start:
                evaluate_all("_before")
            teach(
                cfg,
                stage,
                folder,
                learner,
                judged,
                able,
                lambda when: run.mean_em(evaluate_all(when)),
            )
        found = evaluate_all()
        draw(folder, found)


def teach(cfg, stage, folder, learner, policy, cases, evaluate_now):
    """Trains what a stage trains."""
    if stage == "qap":
        paths = greedy_in_parts(policy, cases, "evidence")
        rows = [approximation_row(learner, p.case, p.taken) for p in paths if p.taken]
        return train_questions(cfg, folder, learner, rows, stage, evaluate_now)
    if stage == "sqg":
        rows = sub_question_data(cfg, learner, greedy_in_parts(policy, cases, "evidence"))
        return train_questions(cfg, folder, learner, rows, stage, evaluate_now)
    how = {"coarse": train_coarse, "supervised": train_supervised, "reader": train_reader}.get(
        stage, train
    )
    return how(cfg, folder, learner, cases, evaluate_now)


def sub_question_data(cfg, writer, paths):
    """Rows of sub-question generation (sec. 4.1.3): the question-approximation model says what evidence asks
    for; that is the target of the state."""
    approximator = load_writer(cfg, checkpoint_of(cfg, "qap"))
    states, inputs = [], []
    for p in paths:
        for found, meant in sub_question_targets(p.case, p.taken, cfg.sqg_target):
            states.append((p.case, found))
            inputs.append(approximation_row(approximator, p.case, meant)[0])
    say(f"sqg: {len(inputs)} states of {len(paths)} questions")
    targets = approximator.write(inputs, "approximations")
    return [
        sub_question_row(writer, *s, target)
        for s, target in zip(states, targets, strict=True)
    ]


def greedy_in_parts(policy, cases, what):
    """Greedy paths of many questions, with progress."""
    paths = []
    with Progress(what) as progress:
        for start in range(0, len(cases), 64):
            paths += greedy_paths(policy, cases[start:start + 64])
            policy.forget()
            progress(len(paths), len(cases))
    return paths


def stage_folder(cfg, stage):
    free = (
        *run.FREE_ON_RESUME,
        "stage",
        *(f.name for f in fields(cfg) if f.name.endswith("_steps")),
    )
    return run.open_folder(
        cfg, "askit", f"{cfg.name}-{stage}", free, one_of_many=True, saves=stage != "eval"
    )


AT_LEAST_ONE = """
    candidates max_evidence beam max_tokens coarse_steps coarse_batch supervised_steps supervised_batch steps
    questions_per_step mini_batch micro_tokens qap_steps sqg_steps reader_steps question_batch
    question_tokens""".split()
AT_LEAST_ZERO = """
    coarse_warmup supervised_warmup clip bonus weight_decay correlate fine_layers baseline_rollouts ask_steps
    max_questions question_cost question_kl sentence_cost""".split()
ABOVE_ZERO = "coarse_lr supervised_lr question_lr lr grad_clip gamma noise_rate".split()


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, _, in_world = flags.given_flags(argv)
    cfg = flags.cli(replace(Config(), **(WORLD if in_world else {})), Config(), __doc__, argv)
    least = (
        dict.fromkeys(AT_LEAST_ONE, 1) | dict.fromkeys(AT_LEAST_ZERO, 0) | {"group_size": 2}
    )
    flags.check(cfg, least, above_zero=ABOVE_ZERO)
    if cfg.model == "paper":
        names = {name: getattr(cfg, name) or value for name, value in PAPER_MODELS.items()}
        cfg = replace(cfg, **names)
    check_models(cfg)
    stage = "eval" if cfg.eval_only else cfg.stage
    return replace(
        cfg, stage=stage, eval_only=stage == "eval", name=cfg.name or f"seed{cfg.seed}"
    )


def check_models(cfg):
    """Refuses models that do not go together."""
    scorers = bool(cfg.action_model) + bool(cfg.submit_model)
    if cfg.model not in ("", "paper"):
        words = "this script has several models: --model paper, or --encoder with --fine-layers, or with"
        flags.refuse("model", cfg.model, f"{words} --action-model and --submit-model")
    if scorers and cfg.fine_layers:
        flags.refuse(
            "fine_layers", cfg.fine_layers, "not beside --action-model and --submit-model"
        )
    if cfg.encoder and scorers < 2 and not cfg.fine_layers or scorers and not cfg.encoder:
        words = "needs --fine-layers, or --action-model and --submit-model, and these need it"
        flags.refuse("encoder", cfg.encoder, words)
    if cfg.fine_layers and not cfg.encoder:
        flags.refuse("fine_layers", cfg.fine_layers, "needs --encoder")
    if cfg.checkpoint and cfg.stage not in ("supervised", "ppo", "joint", "eval"):
        flags.refuse("checkpoint", cfg.checkpoint, "is for one of the stages supervised, ppo, joint, eval")
    if cfg.returns == "action" and (cfg.baseline, cfg.reward) != ("candidates", "evidence"):
        flags.refuse("returns", cfg.returns, "goes with --baseline candidates and --reward evidence")
    if cfg.encoder and cfg.stage == "reader" and not cfg.submit_model:
        flags.refuse("stage", cfg.stage, "needs --submit-model, or give a --reader instead")
    if cfg.data != "world" and not cfg.encoder:
        flags.refuse("data", cfg.data, "needs --model paper or --encoder")
    if cfg.encoder and not cfg.question_model and cfg.stage in ("ask", "qap", "sqg"):
        flags.refuse("stage", cfg.stage, "needs --question-model, a T5")
    if cfg.encoder and cfg.reward == "answer" and not cfg.reader:
        flags.refuse(
            "reward", cfg.reward, "needs --reader, an extractive question-answering model"
        )


def main(argv=None):
    """`python askit.py …`"""
    with run.program():
        reproduce(parse_args(argv))


# ================================================================ appendix: nothing below is in the paper
#
# ---------------------------------------------------------------- metrics of a step

METRICS = (
    STEP
    | UPDATE
    | {key: m for key, m in RATIO.items() if key != "rollout/flat_groups"}
    | {
        "reward/mean": Metric("mean reward", "reward", "reward {:.3f}", "reward"),  # up to 2
        "reward/em": Metric(
            "share of paths that end with exactly the gold evidence", ANSWERS, "em {:.3f}"
        ),
        "reward/f1": Metric("F1 of the evidence that a path ends with", ANSWERS, "f1 {:.3f}"),
        "path/sentences": Metric(
            "sentences that a path ends with", "sentences a path", "sentences {:.2f}"
        ),
        "train/question_kl": Metric(
            "KL of sub-questions' tokens to the T5 that joint training began with"
        ),
        "path/questions": Metric(
            "sub-questions asked a path", "sentences a path", "asked {:.2f}"
        ),
        "path/entropy": Metric(
            "mean -log pi of the actions, nats", "entropy (nats an action)", "ent {:.3f}"
        ),
        "path/full": Metric("share of paths that ran into --max-evidence"),
        "time/rollout": Metric("seconds of sampling paths", SECONDS, "roll {:.1f}s"),
    }
)
PRETRAIN_METRICS = (
    STEP
    | UPDATE
    | {
        "train/loss": Metric(
            "the supervised loss, mean of the updates", "supervised loss", "loss {:.3f}"
        ),
        "pretrain/right": Metric(
            "share of states whose best choice is right; of tokens or answers with p over a half",
            ANSWERS,
            "right {:.3f}",
        ),
    }
)
COLUMNS = {
    "F1": ("f1", ".3f"),
    "precision": ("precision", ".3f"),
    "recall": ("recall", ".3f"),
    "sentences": ("sentences", ".2f"),
}


def path_metrics(paths, cfg):
    """Means over the step's paths."""
    scores = [evidence_scores(p.case, p.steps) for p in paths]
    return {
        "reward/mean": rollout.mean(p.reward for p in paths),
        "reward/em": rollout.mean(em for em, *_ in scores),
        "reward/f1": rollout.mean(f1 for _, f1, *_ in scores),
        "path/sentences": rollout.mean(len(p.taken) for p in paths),
        "path/questions": rollout.mean(len(asked_of(p.steps)) for p in paths),
        "path/entropy": -sum(p.logprob for p in paths) / sum(len(p.actions) for p in paths),
        "path/full": rollout.mean(len(p.taken) == cfg.max_evidence for p in paths),
    }


def title(cfg, stage):
    return f"ASKiT {cfg.name}: {stage}"


def set_name(cfg, split, search):
    """What the file of an evaluation is called."""
    ending = {"greedy": "", "ranking": "", "beam": f"-beam{cfg.beam}"}
    return split.name + ending.get(search, f"-{search}")


def paper(stage, sets):
    """The paper's EM / F1, beside HotpotQA's dev set alone."""
    numbers = {
        ("supervised", PAPER_EVAL): PAPER["supervised"],
        ("ppo", PAPER_EVAL): PAPER["ppo"],
        ("ppo", f"{PAPER_EVAL}-beam4"): PAPER_BEAM,
        ("sqg", f"{PAPER_EVAL}-replace"): PAPER_ASKED,
    }
    return numbers.get((stage, *sets), "")


def draw(folder, found):
    """recall.png and ranks.png of what was evaluated."""
    recall = {}
    for name, r in found.items():
        if "recall_at" in r["summary"]:
            before = read_evaluation(folder.path / f"eval_{name}_before.json")
            recall[f"{name} untrained"] = before["summary"]["recall_at"]
            recall[name] = r["summary"]["recall_at"]
    if recall:
        draw_recall(recall, folder.path / "recall.png")
    for name, r in found.items():
        if "ranks" in r["summary"]:
            draw_ranks(
                r["summary"]["ranks"],
                r["summary"]["spearman"],
                folder.path / f"ranks-{name}.png",
            )


# ---------------------------------------------------------------- questions and models

def load_questions(cfg):
    """(training set or None, evaluation sets), every question with its sentences. In the world those of two
    hops and more, with contexts that look related, and a fifth of them vaguely put."""
    if cfg.data == "world":
        train = world_questions("train", cfg.limit or 2000)
        names = (cfg.eval_data or "test").split(",")
        evals = [(n, world_questions(n, cfg.eval_limit or 400)) for n in names]
    else:
        split, found = splits.load_splits(cfg, PAPER_EVAL, searched=False)
        train = split.questions if split else None
        evals = [(s.name, s.questions) for s in found]
    able = with_evidence("train", train or [])
    if cfg.drop_yes_no:
        able = [q for q in able if q.answers[0].lower() not in ("yes", "no", "noanswer")]
    if train and not any(make_case(q).gold for q in able):
        raise data.DataError(f"{cfg.data}: no question is left whose evidence is in its context")
    made = [
        Questions(n, make_cases(n, with_evidence(n, questions), cfg.candidates))
        for n, questions in evals
    ]
    return (
        Questions("train", make_cases("train", able, cfg.candidates)) if able else None
    ), made


def checkpoint_of(cfg, stage):
    """What a stage of this run left; refused in words where it is not there."""
    folder = Path(cfg.out) / "askit" / f"{cfg.name}-{stage}" / "checkpoint"
    found = checkpoint.find(folder)
    if found is None:
        raise models.ModelError(f"{folder} does not exist: run --stage {stage} first")
    return found


def load_stage(cfg, stage, folder, cases):
    """(what a stage trains, what it evaluates, how), from its checkpoint where it goes on."""
    if stage == "reader":
        answerer = load_answerer(cfg, folder.start, cases)
        return answerer, answerer, evaluate_texts
    encoder = load_encoder(cfg, stage, folder.start)
    for case in cases:
        read(encoder.reader, case)
    if encoder.reader.cut:
        share = f"{encoder.reader.cut} of {encoder.reader.texts} texts"
        say(f"{share} are cut to a quarter of --max-tokens {cfg.max_tokens}")
    freeze_vectors(load_encoder(cfg, "vectors"), cases, Path(cfg.out) / "askit" / "vectors")
    if stage == "coarse":
        return encoder, encoder, evaluate_coarse
    if stage in ("qap", "sqg"):
        writer = load_writer(cfg, folder.start or cfg.question_model)
        policy = load_policy(cfg, checkpoint_of(cfg, "ppo"), encoder, cases)
        policy.asker = writer
        policy.may_ask = False
        return writer, policy, evaluate if stage == "sqg" else evaluate_texts
    source = (
        folder.start
        or cfg.checkpoint
        or (checkpoint_of(cfg, BEFORE[stage]) if stage in BEFORE else None)
    )
    policy = load_policy(cfg, source, encoder, cases, asks=stage == "joint")
    return policy, policy, evaluate


def load_encoder(cfg, stage, source=None):
    """The coarse encoder that a stage works with; "vectors" = the one before its training."""
    if stage not in ("coarse", "vectors"):
        source = checkpoint_of(cfg, "coarse")
    source = source or cfg.encoder
    model, tokenizer = (
        models.load_encoder(source, "encoder") if source else tiny_bert.tiny_model("encoder")
    )
    reader = encoders.PairTokenizer("coarse", tokenizer, cfg.max_tokens)
    return encoders.Encoder(model.eval(), reader, cfg.micro_tokens, cfg.precision)


def load_policy(cfg, source, encoder, cases, asks=False):
    """The fine policy of a folder, or a new one. No dropout, so that ratios begin at 1."""
    parts = {}
    for name, given in (("action", cfg.action_model), ("submit", cfg.submit_model)):
        where = Path(source) / name if source else given or (cfg.fine_layers and cfg.encoder)
        layers = 0 if source else cfg.fine_layers
        parts[name] = (
            models.load_encoder(where, name, layers) if where else tiny_bert.tiny_model(name)
        )
    readers = [
        encoders.PairTokenizer(name, tokenizer, cfg.max_tokens)
        for name, (_, tokenizer) in parts.items()
    ]
    asker = None
    if asks or (source and (Path(source) / "question").exists()):
        kept = Path(source) / "question"
        asker = load_writer(cfg, kept if kept.exists() else checkpoint_of(cfg, "sqg"))
        parts["question"] = asker.model, asker.tokenizer
    for case in cases:
        for reader in readers:
            read(reader, case)
    answerer = load_answerer(cfg, None, cases) if cfg.reward == "answer" else None
    return Policy(
        Scorer(parts).eval(), encoder, *readers, cfg, asker, asker is not None, answerer
    )


def load_writer(cfg, source):
    """A T5 of a folder or hub id; without one the tiny one of the embedded world."""
    if source:
        model, tokenizer = models.load_encoder(source, "question")
    else:
        model, tokenizer = tiny_t5.tiny_model()
    if encoders.SEP.strip() not in tokenizer.get_vocab():  # as the authors' code
        tokenizer.add_tokens([encoders.SEP.strip()])
        model.resize_token_embeddings(len(tokenizer))
    return seq2seq.Writer(
        model.eval(), tokenizer, max_new=cfg.question_tokens, micro_tokens=cfg.micro_tokens
    )


def load_answerer(cfg, source, cases):
    """The reader of the answer-based reward: of --stage reader, or any extractive one."""
    source = source or cfg.reader or (cfg.submit_model if cfg.stage == "reader" else "")
    if not source and cfg.stage != "reader":
        source = checkpoint_of(cfg, "reader")
    model, tokenizer = (
        models.load_encoder(source, "submit") if source else tiny_bert.tiny_model("submit")
    )
    reader = encoders.PairTokenizer("reader", tokenizer, cfg.max_tokens)
    for case in cases:
        read(reader, case)
    return Answerer(model.eval(), reader)


# ---------------------------------------------------------------- live

def sample_record(policy, paths, size, step):
    """The step's first question whose paths have different rewards."""
    groups = [paths[i:i + size] for i in range(0, len(paths), size)]
    mixed = [g for g in groups if len({p.reward for p in g}) > 1]
    return group_record(policy, (mixed or groups)[0], step=step)


def ask(cfg, split):
    """--ask: one of the evaluation set's questions, searched over its own sentences."""
    found = [c for c in split.cases if c.question.question == cfg.ask]
    if not found:
        raise data.DataError(
            f"--ask: not a question of {split.name}, whose contexts are searched, such as "
            f"{split.cases[0].question.question!r}"
        )
    policy = load_stage(cfg, "eval", NoFolder, found)[0]
    path = greedy_paths(policy, found[:1])[0]
    for node in path_nodes(policy, path):
        console.print(f"[bold]{plain(node['text'])}[/bold]  ({node['probability']:.2f})")
        for line in node["observation"].split("\n")[1:]:
            console.print(f"  [dim]{plain(line)}[/dim]")


class NoFolder:
    """--ask has no run folder."""

    start = None


if __name__ == "__main__":
    main()
