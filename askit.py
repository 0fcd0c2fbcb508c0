"""ASKiT: Search and Ask, evidence retrieval as reinforcement learning (the paper and the authors' code are
public).

A question comes with some forty sentences, of which two to four are its evidence. A coarse bi-encoder ranks
the sentences for the question and what was found so far; a fine policy takes one of its best candidates or
submits. The policy is trained on labelled evidence, then with PPO on the score of the evidence that it ends
with.

    sec. 3.1.1   coarse retrieval                    state_vectors, coarse_loss, coarse_step
    sec. 3.1.2   policy over candidates and submit   Scorer, log_policy
                 supervised loss                     supervised_loss
                 PPO, baseline of sampled paths      path_reward, baselines, ppo_loss
                 beam search                         beam_search
    sec. 4.4     correlation of p and reward         spearman

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
                          path's
    baseline b(s)         paper: paths sampled from s; code: greedy ones after every candidate, weighed by
                          pi; ours: mean return of the question's own paths through the same evidence
                          (--baseline)
    beam                  code: all beams start equal and stay so; ours: from one, distinct hypotheses
    dropout               off in all stages, so that ratios begin at 1
    Spearman              paper: cov / (cov cov); ours: of ranks, over questions whose paths differ

Not here yet: question approximation, sub-questions and their joint training, the answer-based reward.

    python askit.py                              embedded world: coarse, supervised, PPO; minutes on two cores
    python askit.py --stage ppo --resume         one stage (coarse, supervised, ppo, eval); --resume goes on
    python askit.py --model paper --data hotpotqa     the paper's encoders and data; not run
    python askit.py --eval-data dev --ask "Who is the mother of …?"     a question of that set
What is not in the paper is at the end (appendix) or in common/.
"""

import math
import random
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
    flags,
    loop,
    metrics,
    report,
    rollout,
    run,
    splits,
    training,
    world,
)
from common import model as models
from common.files import console, plain, read_jsonl, say
from common.metric_table import ANSWERS, RATIO, SECONDS, STEP, UPDATE, Metric
from common.page import record
from common.rollout import stable_seed
from common.world import tiny_bert

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.Flags):
    """The paper's settings; what a run needs besides (data, names) is in common/flags.py."""

    # ---- stages and models
    # what to do; all = coarse, supervised, ppo, each evaluated
    stage: Literal["all", "coarse", "supervised", "ppo", "eval"] = "all"
    encoder: str = ""               # coarse encoder; empty = with --model paper the paper's, else a tiny one
    action_model: str = ""          # scores (state, sentence) as next sentences
    submit_model: str = ""          # scores whether the evidence answers the question

    # ---- search
    candidates: int = 6             # candidates of the coarse stage beside submit | sec. 4.3.3
    max_evidence: int = 10          # sentences a search may take | authors' code
    beam: int = 4                   # hypotheses of the beam search | sec. 4.5.1
    max_tokens: int = 192           # tokens of a state, and of a sentence, that are read
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
    questions_per_step: int = 1     # questions a step
    group_size: int = 6             # paths sampled a question | sec. 4.3.3
    mini_batch: int = 6             # paths an update | sec. 4.3.3
    lr: float = 1e-6                # learning rate, constant | sec. 4.3.3
    clip: float = .2                # half width of the clip window | sec. 4.3.3
    gamma: float = 1.0              # discount of F1 for each action; not printed | authors' code
    bonus: float = 1.0              # for an exact evidence set | sec. 3.1.2
    # b(s): mean return of the question's paths through s, or 0 | sec. 3.1.2
    baseline: Literal["paths", "none"] = "paths"
    drop_yes_no: bool = False       # leave yes/no questions out of training, as the authors' code
    weight_decay: float = .01       # of matrices
    grad_clip: float = 1.0          # largest norm of the gradient
    micro_tokens: int = 16384       # tokens a forward pass; memory only
    correlate: int = 100            # evaluated questions whose p and reward are correlated, 10 paths each


# What differs in the embedded world: encoders of some hundred thousand weights on two cores. Ours.
WORLD = dict(
    data="world",
    limit=800,
    eval_limit=400,
    coarse_steps=400,
    coarse_lr=3e-3,
    coarse_warmup=20,
    supervised_steps=400,
    supervised_batch=12,
    supervised_lr=1e-3,
    supervised_warmup=50,
    steps=40,
    questions_per_step=24,
    mini_batch=48,
    lr=2e-4,
    save_every=10,
)
PAPER_MODELS = {
    "encoder": "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
    "action_model": "prajjwal1/bert-mini",
    "submit_model": "deepset/tinyroberta-squad2",
}
PAPER_EVAL = "hotpotqa-dev"
PAPER = {"supervised": "30.2 / 63.9", "ppo": "33.9 / 67.4"}  # EM / F1, HotpotQA distractor dev
PAPER_BEAM = "34.4 / 69.0"
SEP = " <sep> "
SUBMIT = -1  # the action that ends a search; others are sentence indices


# ---------------------------------------------------------------- environment: questions, states, rewards

@dataclass(eq=False)
class Case:
    """A question with the sentences of its own context. A state is (case, indices taken, in their order)."""

    question: data.Question
    texts: list[str]  # "Title, sentence"
    facts: list[tuple]  # (title, index in its paragraph), what is scored
    gold: frozenset  # indices of the gold sentences that are there
    gold_facts: list  # all gold facts, those outside the context too
    tokens: dict  # reader's name -> (ids of the question, [ids of each sentence])
    vectors: torch.Tensor | None = None  # (sentences, H), normalised and frozen


def evidence_scores(case, taken):
    """(em, f1, precision, recall) of a set of sentences, as HotpotQA's script scores them."""
    return metrics.evidence_scores([case.facts[i] for i in taken], case.gold_facts)


def path_reward(case, taken, actions, gamma=1.0, bonus=1.0):
    """gamma^T F1 + bonus if the evidence is exactly the gold (sec. 3.1.2); T = actions of the path."""
    em, f1, _, _ = evidence_scores(case, taken)
    return gamma**actions * f1 + bonus * em


# ---------------------------------------------------------------- coarse retrieval (sec. 3.1.1)

class Reader:
    """A tokenizer's way of writing one text or a pair of texts."""
    def __init__(self, name, tokenizer, max_tokens):
        self.name = name
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.sep = self.ids(SEP, own=True)
        pair, text = tokenizer("a", "a"), self.ids("a")
        starts = [
            i for i in range(len(pair["input_ids"])) if pair["input_ids"][i:i + len(text)] == text
        ]
        first, second = starts[0], starts[-1]
        self.before = pair["input_ids"][:first]  # what stands before, between and behind the two texts
        self.between = pair["input_ids"][first + len(text):second]
        self.behind = pair["input_ids"][second + len(text) :]
        self.types = "token_type_ids" in pair

    def read(self, case):
        """Keeps the question's and the sentences' ids."""
        separator = ": " if self.name == "coarse" else ", "
        sentences = [self.ids(text.replace(", ", separator, 1)) for text in case.texts]
        case.tokens[self.name] = self.ids(case.question.question), sentences

    def state(self, case, taken):
        """Ids of the question and of the evidence behind it, <sep> between."""
        question, sentences = case.tokens[self.name]
        ids = list(question)
        for i in taken:
            ids += self.sep + sentences[i]
        return ids

    def ids(self, text, own=False):
        """Token ids of a text, cut to max_tokens. A text of others can write neither <sep> nor a special
        token."""
        return chat.encode(self.tokenizer, text if own else chat.Foreign(text))[1][: self.max_tokens]

    def batch(self, pairs, device):
        """input_ids, attention_mask and token types (n, T) of [(ids, ids or None)]."""
        rows, kinds = [], []
        for first, second in pairs:
            row = (
                self.before
                + first[: self.max_tokens]
                + (self.between if second is not None else self.behind)
            )
            kind = [0] * len(row)
            if second is not None:
                row = row + second[: self.max_tokens] + self.behind
                kind += [1] * (len(row) - len(kind))
            rows.append(row)
            kinds.append(kind)
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id
        batch = {
            "input_ids": torch.tensor(
                [row + [pad] * (width - len(row)) for row in rows], device=device
            ),
            "attention_mask": torch.tensor(
                [[1] * len(r) + [0] * (width - len(r)) for r in rows], device=device
            ),
        }
        if self.types:
            batch["token_type_ids"] = torch.tensor(
                [k + [0] * (width - len(k)) for k in kinds], device=device
            )
        return batch


def in_batches(items, length, budget):
    """Lists of indices, items of like length together, at most `budget` tokens each."""
    order = sorted(range(len(items)), key=lambda i: length(items[i]))
    batches, widest = [], 0
    for i in order:
        widest = max(widest, length(items[i]))
        if not batches or widest * (len(batches[-1]) + 1) > budget:
            batches.append([])
            widest = length(items[i])
        batches[-1].append(i)
    return batches


@dataclass
class Encoder:
    """The coarse stage's bi-encoder: mean of the last hidden states."""

    model: object
    reader: Reader
    micro_tokens: int

    @property
    def tokenizer(self):
        return self.reader.tokenizer

    def encode(self, ids):
        """(n, H) of lists of ids, not normalised."""
        batch = self.reader.batch([(i, None) for i in ids], self.model.device)
        hidden = self.model(**batch).last_hidden_state  # (n, T, H)
        mask = batch["attention_mask"][:, :, None]
        return (hidden * mask).sum(1) / mask.sum(1)

    @torch.no_grad()
    def encode_all(self, ids):
        vectors = [None] * len(ids)
        for part in in_batches(ids, len, self.micro_tokens):
            for i, vector in zip(part, self.encode([ids[i] for i in part]), strict=True):
                vectors[i] = vector
        return torch.stack(vectors)


def freeze_vectors(encoder, cases):
    """Normalised vectors of every sentence, from the encoder before its training; they never change again."""
    distinct = list(dict.fromkeys(tuple(ids) for case in cases for ids in case.tokens["coarse"][1]))
    vectors = encoder.encode_all([list(ids) for ids in distinct])
    vectors = torch.nn.functional.normalize(vectors, dim=-1)
    row = {ids: i for i, ids in enumerate(distinct)}
    for case in cases:
        case.vectors = vectors[[row[tuple(ids)] for ids in case.tokens["coarse"][1]]]  # (sentences, H)


def coarse_loss(scores, missing, kind="mean"):
    """Of one state: scores (sentences,) of all that are not taken, `missing` the gold among them."""
    logp = scores.log_softmax(0)[missing]
    if kind == "logsumexp":
        return -logp.logsumexp(0)
    return -logp.sum() if kind == "sum" else -logp.mean()


def training_state(case, rng, noise_rate, complete):
    """Indices taken in a made-up state: some gold in random order, and wrong sentences among it. complete:
    whether all gold may be there (then the right action is to submit)."""
    gold = sorted(case.gold)
    most = len(gold) if complete else len(gold) - 1
    taken = rng.sample(gold, rng.randint(0, most))
    wrong = [i for i in range(len(case.texts)) if i not in case.gold]
    noise = min(round(rng.expovariate(noise_rate)), len(wrong), len(case.texts) - len(gold))
    for i in rng.sample(wrong, noise):
        taken.insert(rng.randint(0, len(taken)), i)
    return tuple(taken)


def coarse_step(encoder, cases, others, cfg, rng):
    """Loss of a batch of states, and how many have missing gold as their best sentence. Negatives: the
    question's other sentences and those of one other question."""
    states = [training_state(case, rng, cfg.noise_rate, complete=False) for case in cases]
    vectors = encoder.encode([encoder.reader.state(c, t) for c, t in zip(cases, states, strict=True)])
    losses, right = [], []
    for case, taken, other, vector in zip(cases, states, others, vectors, strict=True):
        left = [i for i in range(len(case.texts)) if i not in taken]
        missing = [k for k, i in enumerate(left) if i in case.gold]
        corpus = torch.cat([case.vectors[left], other.vectors])  # (left + other's, H)
        scores = corpus @ vector
        losses.append(coarse_loss(scores, missing, cfg.coarse_loss))
        right.append(int(scores.argmax()) in missing)
    return torch.stack(losses).mean(), sum(right)


# ---------------------------------------------------------------- fine policy (sec. 3.1.2)

class Scorer(torch.nn.Module):
    """pi(a|s) over submit and candidates: a next-sentence model for sentences, a question-answering model for
    submitting. Saved as two folders in Hugging Face form."""
    def __init__(self, action, submit, tokenizers):
        super().__init__()
        self.action = action
        self.submit = submit
        self.tokenizers = tokenizers  # of the two

    def save_pretrained(self, folder):
        for name, model, tokenizer in zip(
            ("action", "submit"), (self.action, self.submit), self.tokenizers, strict=True
        ):
            model.save_pretrained(Path(folder) / name)
            tokenizer.save_pretrained(Path(folder) / name)


@dataclass
class Policy:
    """What is saved (model, tokenizer) and what a search needs besides."""

    model: Scorer
    encoder: Encoder
    action_reader: Reader
    submit_reader: Reader
    cfg: Config

    def __post_init__(self):
        self.coarse_cache = {}  # (question id, taken) -> candidates; the encoder stays as it is
        self.cache = {}  # (question id, taken) -> log-probs, of these weights

    @property
    def tokenizer(self):
        return self.action_reader.tokenizer

    def forget(self):
        """After an update."""
        self.cache = {}


@torch.no_grad()
def candidates(policy, states):
    """[sentence indices] of each state: the best that are not yet taken, best first."""
    new = [s for s in dict.fromkeys(states) if s not in policy.coarse_cache]
    if new:
        vectors = policy.encoder.encode_all([policy.encoder.reader.state(*state) for state in new])
        for (case, taken), vector in zip(new, vectors, strict=True):
            scores = case.vectors @ vector  # (sentences,)
            scores[list(taken)] = -torch.inf
            k = min(policy.cfg.candidates, len(case.texts) - len(taken))
            policy.coarse_cache[case, taken] = scores.topk(k).indices.tolist()
    return [policy.coarse_cache[s] for s in states]


def log_policy(policy, states, offered):
    """(n, 1 + k) log pi of submit and of the offered sentences of each state, -inf where there are fewer."""
    action, submit = policy.action_reader, policy.submit_reader
    action_pairs, submit_pairs, rows, columns = [], [], [], []
    for row, ((case, taken), sentences) in enumerate(zip(states, offered, strict=True)):
        question = case.tokens["submit"][0]
        evidence = submit.state(case, taken)[len(question) + len(submit.sep) :]
        submit_pairs.append((question, evidence))
        for column, i in enumerate(sentences, 1):
            action_pairs.append((action.state(case, taken), case.tokens["action"][1][i]))
            rows.append(row)
            columns.append(column)
    device = policy.model.action.device
    logits = torch.full((len(states), 1 + max(map(len, offered), default=0)), -torch.inf, device=device)
    batch = submit.batch(submit_pairs, device)
    out = policy.model.submit(**batch)
    second = out.end_logits[:, 0] if policy.cfg.submit_score == "paper" else out.start_logits[:, 1]
    logits[:, 0] = -(out.start_logits[:, 0] + second) / 2  # the first token stands for "no answer here"
    if action_pairs:
        batch = action.batch(action_pairs, device)
        logits[rows, columns] = policy.model.action(**batch).logits[:, 0]
    return logits.log_softmax(-1)


def state_batches(policy, states, offered):
    """Indices of states in forward passes of about micro_tokens."""
    def tokens(item):
        (case, taken), sentences = item
        question, of = case.tokens["action"]
        state = min(policy.cfg.max_tokens, len(question) + sum(len(of[i]) + 1 for i in taken))
        return state + sum(state + len(of[i]) for i in sentences)

    return in_batches(list(zip(states, offered, strict=True)), tokens, policy.cfg.micro_tokens)


@torch.no_grad()
def policy_of(policy, states):
    """[(actions, log-probs)] of states, cached until the weights change; the first action is to submit. A
    state that is full can only be submitted."""
    new = [s for s in dict.fromkeys(states) if s not in policy.cache]
    full = policy.cfg.max_evidence
    offered = [
        c if len(taken) < full else []
        for (_, taken), c in zip(new, candidates(policy, new), strict=True)
    ]
    for part in state_batches(policy, new, offered):
        logp = log_policy(policy, [new[i] for i in part], [offered[i] for i in part])
        for i, row in zip(part, logp.tolist(), strict=True):
            policy.cache[new[i]] = [SUBMIT, *offered[i]], row[: 1 + len(offered[i])]
    return [policy.cache[s] for s in states]


# ---------------------------------------------------------------- paths: sampled, greedy, beam

@dataclass(eq=False)
class SearchPath:
    """A search from the question to the evidence it ends with."""

    case: Case
    taken: tuple = ()
    actions: tuple = ()
    logprobs: tuple = ()  # of each action
    reward: float = 0.0

    @property
    def done(self):
        return bool(self.actions) and self.actions[-1] == SUBMIT

    @property
    def logprob(self):
        """log p(tau) (sec. 3.1.2)."""
        return sum(self.logprobs)

    def after(self, action, logprob):
        taken = self.taken if action == SUBMIT else (*self.taken, action)
        return replace(
            self, taken=taken, actions=(*self.actions, action), logprobs=(*self.logprobs, logprob)
        )

    def states(self):
        """The state before each action."""
        return [(self.case, self.taken[:t]) for t in range(len(self.actions))]


def walk(policy, paths, choose):
    """Takes every path to its end; choose(path number, actions, log-probs) -> index of the action. All open
    states of all paths are scored in one call."""
    while any(not p.done for p in paths):
        running = [n for n, p in enumerate(paths) if not p.done]
        found = policy_of(policy, [(paths[n].case, paths[n].taken) for n in running])
        for n, (actions, logprobs) in zip(running, found, strict=True):
            i = choose(n, actions, logprobs)
            paths[n] = paths[n].after(actions[i], logprobs[i])
    cfg = policy.cfg
    for p in paths:
        p.reward = path_reward(p.case, p.taken, len(p.actions), cfg.gamma, cfg.bonus)
    return paths


def sample_paths(policy, cases, size, *seed):
    """`size` paths a question; a path depends on its own seed alone."""
    paths = [SearchPath(case) for case in cases for _ in range(size)]
    draws = [
        random.Random(stable_seed(*seed, p.case.question.id, n % size)) for n, p in enumerate(paths)
    ]

    def draw(n, actions, logprobs):
        return draws[n].choices(range(len(actions)), [math.exp(x) for x in logprobs])[0]

    return walk(policy, paths, draw)


def greedy_paths(policy, cases):
    def best(n, actions, logprobs):
        return max(range(len(actions)), key=logprobs.__getitem__)

    return walk(policy, [SearchPath(case) for case in cases], best)


def beam_search(policy, cases, width):
    """The most probable path of each question among `width` hypotheses a step. From one beam; hypotheses are
    distinct; those that ended compete with those that go on, by log p(tau), without length normalisation."""
    beams = [[SearchPath(case)] for case in cases]
    while any(not p.done for beam in beams for p in beam):
        running = [p for beam in beams for p in beam if not p.done]
        found = policy_of(policy, [(p.case, p.taken) for p in running])
        grown_from = {}
        for p, (actions, logprobs) in zip(running, found, strict=True):
            grown_from[p] = [p.after(a, x) for a, x in zip(actions, logprobs, strict=True)]
        for n, beam in enumerate(beams):
            grown = [q for p in beam for q in grown_from.get(p, [p])]
            beams[n] = sorted(grown, key=lambda p: -p.logprob)[:width]
    best = [beam[0] for beam in beams]
    for p in best:
        p.reward = path_reward(p.case, p.taken, len(p.actions), policy.cfg.gamma, policy.cfg.bonus)
    return best


def spearman(policy, cases, size, *seed):
    """Mean over questions of Spearman's correlation of p(tau) and reward over `size` sampled paths (sec.
    4.4), and the share of questions whose paths differ in both; the others have none."""
    from scipy.stats import spearmanr

    paths = sample_paths(policy, cases, size, *seed)
    found = []
    for group in (paths[i:i + size] for i in range(0, len(paths), size)):
        probabilities, rewards = [p.logprob for p in group], [p.reward for p in group]
        if len(set(probabilities)) > 1 and len(set(rewards)) > 1:
            found.append(float(spearmanr(probabilities, rewards).statistic))
    return (sum(found) / len(found) if found else math.nan), len(found) / max(1, len(cases))


# ---------------------------------------------------------------- losses

def supervised_loss(logp, correct):
    """- sum over the correct actions of log pi(a|s), mean over states (sec. 3.1.2). logp (n, 1 + k); correct
    (n, 1 + k) bool."""
    return -logp.masked_fill(~correct, 0.0).sum() / len(logp)


def baselines(paths):
    """b(s) before every action of every path: the mean return of the question's paths through the same
    evidence. Where one path alone came through, its action gets an advantage of zero: in the embedded world
    no baseline did better (results/README.md)."""
    returns = {}
    for p in paths:
        for case, taken in p.states():
            returns.setdefault((case, frozenset(taken)), []).append(p.reward)
    means = {key: sum(values) / len(values) for key, values in returns.items()}
    return [[means[case, frozenset(taken)] for case, taken in p.states()] for p in paths]


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


# ---------------------------------------------------------------- update

def supervised_states(policy, cases, cfg, rng):
    """(states, offered sentences, correct actions (n, 1 + k)): missing gold that is offered, or submitting
    where none is missing."""
    states = [(case, training_state(case, rng, cfg.noise_rate, complete=True)) for case in cases]
    states = [(case, taken[: cfg.max_evidence - 1]) for case, taken in states]
    offered = []
    for (case, taken), best in zip(states, candidates(policy, states), strict=True):
        if cfg.negatives == "random":
            left = [i for i in range(len(case.texts)) if i not in taken]
            best = rng.sample(left, min(cfg.candidates, len(left)))
        missing = sorted(case.gold - set(taken))
        if missing and not set(best) & case.gold:
            best = [*best[:-1], rng.choice(missing)]
        offered.append(best)
    correct = torch.zeros(len(states), 1 + max(map(len, offered)), dtype=torch.bool)
    for row, ((case, taken), sentences) in enumerate(zip(states, offered, strict=True)):
        correct[row, 0] = not case.gold - set(taken)
        for column, i in enumerate(sentences, 1):
            correct[row, column] = i in case.gold
    return states, offered, correct


def ppo_update(policy, optimizer, paths, cfg, keep):
    """One pass over the step's paths, `mini_batch` an update. Returns the step's means."""
    values = baselines(paths) if cfg.baseline == "paths" else [[0.0] * len(p.actions) for p in paths]
    meter = training.Meter(keep=keep)
    for start in range(0, len(paths), cfg.mini_batch):
        part = range(start, min(start + cfg.mini_batch, len(paths)))
        rows = [
            (s, a, x, paths[n].reward - b)
            for n in part
            for s, a, x, b in zip(
                paths[n].states(), paths[n].actions, paths[n].logprobs, values[n], strict=True
            )
        ]
        states = [row[0] for row in rows]
        offered = [policy.cache[s][0][1:] for s in states]
        for group in state_batches(policy, states, offered):
            logp = log_policy(
                policy, [states[i] for i in group], [offered[i] for i in group]
            )  # (n, 1 + k)
            taken = [policy.cache[states[i]][0].index(rows[i][1]) for i in group]
            logp = logp[range(len(group)), taken]  # (n,)
            old, advantages = (
                torch.tensor([rows[i][c] for i in group], device=logp.device) for c in (2, 3)
            )
            loss, stats = ppo_loss(logp, old, advantages, len(part), cfg.clip)
            loss.backward()
            meter.add(loss, stats)
        meter.step(policy.model, optimizer, cfg.grad_clip, ())
    return meter.means()


# ---------------------------------------------------------------- train

PRETRAIN_EVERY = 25  # supervised updates a step of the log


def supervise(cfg, folder, learner, updates, lr, warmup, update, evaluate_now, label):
    """Supervised training in so many updates, linear warm-up and half a cosine; PRETRAIN_EVERY of them are a
    step of the log. update(number, meter) does forward and backward."""
    stage = replace(cfg, steps=-(-updates // PRETRAIN_EVERY), show_every=0)
    optimizer = training.make_optimizer(learner.model, lr, cfg.weight_decay)
    for step, row in loop.steps(
        stage, folder, learner, optimizer, PRETRAIN_METRICS, evaluate=evaluate_now, label=label
    ):
        meter = training.Meter(keep=folder.nonfinite(step))
        for number in range((step - 1) * PRETRAIN_EVERY, min(step * PRETRAIN_EVERY, updates)):
            training.set_lr(optimizer, training.cosine_lr(number, updates, lr, warmup=warmup))
            update(number, meter)
            meter.step(learner.model, optimizer, cfg.grad_clip, ())
        row |= meter.means()
        row["pretrain/right"] = meter.total["right_sum"] / meter.total["tokens"]


def train_coarse(cfg, folder, encoder, cases, evaluate_now):
    """The encoder learns which sentences are missing; the sentences' own vectors stay as they are."""
    able = [c for c in cases if c.gold]

    def update(number, meter):
        rng = random.Random(stable_seed(cfg.seed, "coarse", number))
        batch, others = rng.choices(able, k=cfg.coarse_batch), rng.choices(able, k=cfg.coarse_batch)
        loss, right = coarse_step(encoder, batch, others, cfg, rng)
        loss.backward()
        meter.add(loss, {"tokens": len(batch), "right_sum": right})

    supervise(
        cfg,
        folder,
        encoder,
        cfg.coarse_steps,
        cfg.coarse_lr,
        cfg.coarse_warmup,
        update,
        evaluate_now,
        "coarse | ",
    )


def train_supervised(cfg, folder, policy, cases, evaluate_now):
    """The fine policy learns to take missing gold, and to submit when none is missing."""
    able = [c for c in cases if c.gold]

    def update(number, meter):
        rng = random.Random(stable_seed(cfg.seed, "supervised", number))
        states, offered, correct = supervised_states(
            policy, rng.choices(able, k=cfg.supervised_batch), cfg, rng
        )
        for part in state_batches(policy, states, offered):
            logp = log_policy(policy, [states[i] for i in part], [offered[i] for i in part])
            right = correct[part][:, : logp.shape[1]].to(logp.device)
            loss = supervised_loss(logp, right) * len(part) / len(states)
            loss.backward()
            hits = right[range(len(part)), logp.argmax(1)].sum()
            meter.add(loss, {"tokens": len(part), "right_sum": int(hits)})
        policy.forget()

    supervise(
        cfg,
        folder,
        policy,
        cfg.supervised_steps,
        cfg.supervised_lr,
        cfg.supervised_warmup,
        update,
        evaluate_now,
        "supervised | ",
    )


def train(cfg, folder, policy, cases, evaluate_now):
    """PPO: sample paths, score where they end, update; once a step."""
    optimizer = training.make_optimizer(policy.model, cfg.lr, cfg.weight_decay)
    able = [c for c in cases if c.gold]
    for step, row in loop.steps(
        cfg, folder, policy, optimizer, METRICS, evaluate=evaluate_now, label="ppo | "
    ):
        batch = data.batch_of_step(able, step, cfg.questions_per_step, stable_seed(cfg.seed, "order"))
        with loop.timed(row, "time/rollout"):
            policy.forget()
            paths = sample_paths(policy, batch, cfg.group_size, cfg.seed, "ppo", step)
        row |= path_metrics(paths, cfg)
        row["sample"] = sample_record(policy, paths, cfg.group_size, step)
        row |= ppo_update(policy, optimizer, paths, cfg, folder.nonfinite(step))
        policy.forget()


# ---------------------------------------------------------------- evaluate

@dataclass
class Questions:
    """An evaluation set, searched greedily or with a beam."""

    name: str
    cases: list
    beam: int = 1


def evaluate(policy, split, cfg, progress):
    """The evidence that a search ends with, against the labels. Returns (rows, summary)."""
    policy.forget()
    paths = []
    for start in range(0, len(split.cases), 64):
        cases = split.cases[start:start + 64]
        paths += (
            beam_search(policy, cases, split.beam) if split.beam > 1 else greedy_paths(policy, cases)
        )
        progress(len(paths), len(split.cases))
    rows = [prediction(policy, p) for p in paths]
    summary = {"set": split.name, "seed": cfg.seed, "beam": split.beam}
    summary |= metrics.summarize(rows, ("em", "f1", "precision", "recall", "sentences"))
    if split.beam == 1 and cfg.correlate:
        rho, share = spearman(policy, split.cases[: cfg.correlate], 10, cfg.seed, "correlate")
        summary |= {"spearman": rho, "spearman_questions": share}
        say(f"  Spearman of p and reward {rho:.2f} over the {share:.0%} of questions whose paths differ")
    return rows, summary


def evaluate_coarse(encoder, split, cfg, progress):
    """How the coarse stage ranks gold when nothing was taken yet: em = its best sentence is gold, f1 = share
    of the gold among the candidates (so neither is the evidence's), percentile of the best gold."""
    vectors = encoder.encode_all([encoder.reader.state(case, ()) for case in split.cases])
    rows = []
    for case, vector in zip(split.cases, vectors, strict=True):
        ranked = (case.vectors @ vector).argsort(descending=True).tolist()
        places = [place for place, i in enumerate(ranked) if i in case.gold]
        offered = len(case.gold & set(ranked[: cfg.candidates]))
        rows.append(
            about(case)
            | {
                "em": float(bool(places) and places[0] == 0),
                "f1": offered / max(1, len(case.gold_facts)),
                "percentile": 1 - places[0] / max(1, len(ranked) - 1) if places else 0.0,
                "sentences": len(ranked),
            }
        )
    return rows, {"set": split.name, "seed": cfg.seed} | metrics.summarize(
        rows, ("em", "f1", "percentile", "sentences")
    )


# ---------------------------------------------------------------- main

STAGES = ("coarse", "supervised", "ppo")


def reproduce(cfg):
    """The stages of --stage, each in a run folder of its own. What can be refused without reading data is
    refused first."""
    stages = STAGES if cfg.stage == "all" else (cfg.stage,)
    for stage in () if cfg.ask else stages:
        stage_folder(cfg, stage)
    split, evals = load_questions(cfg)
    if cfg.ask:
        return ask(cfg, evals[0])
    run.tell(cfg)
    for stage in stages:
        run_stage(cfg, stage, split, evals)
    base = Path(cfg.out) / "askit"
    folders = {stage: base / f"{cfg.name}-{stage}" for stage in ("supervised", "ppo")}
    report.stage_table(
        base / cfg.name,
        f"ASKiT {cfg.name} (paper: EM / F1, HotpotQA)",
        folders,
        "supervised",
        paper,
        COLUMNS,
    )


def run_stage(cfg, stage, split, evals):
    """Trains one stage and evaluates it, or only evaluates; leaves a run folder. What --resume finds done is
    not done again."""
    folder = stage_folder(cfg, stage)
    sets = [Questions(e.name, e.cases) for e in evals]
    if stage != "coarse":
        sets += [Questions(f"{e.name}-beam{cfg.beam}", e.cases, cfg.beam) for e in evals]
    rows = read_jsonl(folder.path / "metrics.jsonl")
    steps = {"ppo": cfg.steps, "eval": 0}.get(stage) or -(
        -getattr(cfg, f"{stage}_steps", 0) // PRETRAIN_EVERY
    )
    if folder.resume and folder.evaluated(sets) and (rows or [{"step": 0}])[-1]["step"] >= steps:
        return say(f"{stage}: done before")
    torch.manual_seed(cfg.seed)
    encoder = load_encoder(cfg, stage, folder)
    cases = [c for s in ([split] if split else []) + evals for c in s.cases]
    for case in cases:
        encoder.reader.read(case)
    freeze_vectors(load_encoder(cfg, "vectors", folder), cases)
    learner = encoder if stage == "coarse" else load_policy(cfg, stage, folder, encoder, cases)
    evaluate_stage = evaluate_coarse if stage == "coarse" else evaluate
    title = f"ASKiT {cfg.name}: {stage}"

    def evaluate_all(when=""):
        return run.evaluate_all(cfg, folder, learner, sets, evaluate_stage, when)

    with run.stage(cfg, folder, METRICS if stage == "ppo" else PRETRAIN_METRICS, title):
        if stage in STAGES:
            folder.forget_evaluations(sets)
            teach = {"coarse": train_coarse, "supervised": train_supervised, "ppo": train}[stage]
            teach(cfg, folder, learner, split.cases, lambda when: run.mean_em(evaluate_all(when)))
        evaluate_all()


def stage_folder(cfg, stage):
    free = (*run.FREE_ON_RESUME, "stage", "coarse_steps", "supervised_steps")
    return run.open_folder(
        cfg, "askit", f"{cfg.name}-{stage}", free, one_of_many=True, saves=stage in STAGES
    )


def parse_args(argv=None):
    """Flags over the paper's defaults, or over the world's where neither a model nor a data set is named."""
    argv, _, in_world = flags.given_flags(argv)
    cfg = flags.cli(replace(Config(), **(WORLD if in_world else {})), Config(), __doc__, argv)
    ones = (
        "candidates", "max_evidence", "beam", "max_tokens", "coarse_steps", "coarse_batch",
        "supervised_steps", "supervised_batch", "steps", "questions_per_step", "mini_batch",
        "micro_tokens")
    zeros = ("coarse_warmup", "supervised_warmup", "clip", "bonus", "weight_decay", "correlate")
    flags.check(
        cfg,
        dict.fromkeys(ones, 1) | dict.fromkeys(zeros, 0) | {"group_size": 2},
        above_zero=("coarse_lr", "supervised_lr", "lr", "grad_clip", "gamma", "noise_rate"),
    )
    if cfg.model not in ("", "paper"):
        flags.refuse(
            "model",
            cfg.model,
            "this script has three models: --model paper, or --encoder, --action-model and "
            "--submit-model",
        )
    named = [bool(getattr(cfg, name)) for name in PAPER_MODELS]
    if any(named) and not all(named):
        flags.refuse(
            "encoder", cfg.encoder, "give all of --encoder, --action-model and --submit-model, or none"
        )
    if cfg.model == "paper" and not any(named):
        cfg = replace(cfg, **PAPER_MODELS)
    if cfg.data != "world" and not cfg.encoder:
        flags.refuse(
            "data", cfg.data, "needs --model paper, or --encoder, --action-model and --submit-model"
        )
    stage = "eval" if cfg.eval_only else cfg.stage
    return replace(cfg, stage=stage, eval_only=stage == "eval", name=cfg.name or f"seed{cfg.seed}")


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
        "reward/em": Metric(
            "share of paths that end with exactly the gold evidence", ANSWERS, "em {:.3f}"
        ),
        "reward/f1": Metric("F1 of the evidence that a path ends with", ANSWERS, "f1 {:.3f}"),
        "path/sentences": Metric(
            "sentences that a path ends with", "sentences a path", "sentences {:.2f}"
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
        "pretrain/right": Metric("share of states whose best choice is right", ANSWERS, "right {:.3f}"),
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
    scores = [evidence_scores(p.case, p.taken) for p in paths]
    return {
        "reward/mean": rollout.mean(p.reward for p in paths),
        "reward/em": rollout.mean(em for em, *_ in scores),
        "reward/f1": rollout.mean(f1 for _, f1, *_ in scores),
        "path/sentences": rollout.mean(len(p.taken) for p in paths),
        "path/entropy": -sum(p.logprob for p in paths) / sum(len(p.actions) for p in paths),
        "path/full": rollout.mean(len(p.taken) == cfg.max_evidence for p in paths),
    }


def paper(stage, sets):
    """The paper's EM / F1, beside HotpotQA's dev set alone."""
    if sets == [f"{PAPER_EVAL}-beam4"]:
        return PAPER_BEAM if stage == "ppo" else ""
    return PAPER.get(stage, "") if sets == [PAPER_EVAL] else ""


# ---------------------------------------------------------------- questions and models

def load_questions(cfg):
    """(training set or None, evaluation sets), every question with its sentences. In the world those of two
    hops and more, with contexts that look related."""
    if cfg.data == "world":
        names = (cfg.eval_data or "test").split(",")
        sets = {"train": world_questions("train", cfg.limit or 800)}
        sets |= {n: world_questions(n, cfg.eval_limit or 400) for n in names}
        train, evals = sets.pop("train"), list(sets.items())
    else:
        split, found = splits.load_splits(cfg, PAPER_EVAL, searched=False)
        train = split.questions if split else None
        evals = [(s.name, s.questions) for s in found]
    able = [q for q in train or [] if q.supporting_facts and q.context]
    if train and not able:
        raise data.DataError(f"{cfg.data}: no question has labelled evidence and a context to train on")
    if train and len(able) < len(train):
        say(f"left out {len(train) - len(able)} training questions without labelled evidence or context")
    if cfg.drop_yes_no:
        able = [q for q in able if q.answers[0].lower() not in ("yes", "no", "noanswer")]
    made = [Questions(n, [make_case(q) for q in questions if q.context]) for n, questions in evals]
    return (Questions("train", [make_case(q) for q in able]) if able else None), made


def world_questions(split, count):
    made = world.make_world(split, seed=int(split == "test"), questions=2 * count, distractors="linked")
    questions = [q for q in data.load_questions(made.questions) if q.hops > 1]
    return questions[:count]


def make_case(question):
    """Sentences are told apart by their place, not by their text: two paragraphs may share one."""
    texts, facts = [], []
    for title, sentences in question.context:
        for i, sentence in enumerate(sentences):
            texts.append(f"{title}, {sentence.strip()}")
            facts.append((title, i))
    gold_facts = list(dict.fromkeys((title, i) for title, i in question.supporting_facts))
    gold = frozenset(i for i, fact in enumerate(facts) if fact in gold_facts)
    return Case(question, texts, facts, gold, gold_facts, {})


def checkpoint_of(cfg, stage):
    """What a stage of this run left; refused in words where it is not there."""
    folder = Path(cfg.out) / "askit" / f"{cfg.name}-{stage}" / "checkpoint"
    found = checkpoint.find(folder)
    if found is None:
        raise models.ModelError(f"{folder} does not exist: run --stage {stage} first")
    return found


def load_encoder(cfg, stage, folder):
    """The coarse encoder that a stage works with; "vectors" = the one before its training."""
    source = None
    if stage == "coarse":
        source = folder.start
    elif stage != "vectors":
        source = checkpoint_of(cfg, "coarse")
    source = source or cfg.encoder
    model, tokenizer = models.load_encoder(source, "encoder") if source else tiny_bert.tiny_model("encoder")
    return Encoder(model.eval(), Reader("coarse", tokenizer, cfg.max_tokens), cfg.micro_tokens)


def load_policy(cfg, stage, folder, encoder, cases):
    """The fine policy that a stage begins with, or goes on with. No dropout, so that ratios begin at 1."""
    before = {"ppo": "supervised", "eval": "ppo"}.get(stage)
    source = folder.start or cfg.checkpoint or (checkpoint_of(cfg, before) if before else None)
    parts = {}
    for name, given in (("action", cfg.action_model), ("submit", cfg.submit_model)):
        where = Path(source) / name if source else given
        parts[name] = models.load_encoder(where, name) if where else tiny_bert.tiny_model(name)
    (action, first), (submit, second) = parts["action"], parts["submit"]
    scorer = Scorer(action, submit, (first, second)).eval()
    readers = Reader("action", first, cfg.max_tokens), Reader("submit", second, cfg.max_tokens)
    for case in cases:
        for reader in readers:
            reader.read(case)
    return Policy(scorer, encoder, *readers, cfg)


# ---------------------------------------------------------------- records for the page

def about(case):
    """What every row of a prediction has."""
    q = case.question
    return {
        "id": q.id,
        "question": q.question,
        "gold": q.answers,
        "type": q.type,
        "hops": len(case.gold_facts),
        "answer": None,
        "problem": "",
    }


def path_nodes(policy, path, first=1):
    """A node for each action: the sentence taken or the submission, with what else was offered."""
    nodes = []
    for t, ((case, taken), action) in enumerate(zip(path.states(), path.actions, strict=True)):
        actions, logprobs = policy.cache.get((case, taken), ([], []))
        offers = []
        for a, x in sorted(zip(actions, logprobs, strict=True), key=lambda pair: -pair[1]):
            mark = "* " if a in case.gold else ""
            offers.append(f"{math.exp(x):.3f}  {mark}{'submit' if a == SUBMIT else case.texts[a]}")
        nodes.append(
            {
                "id": first + t,
                "parents": [first + t - 1 if t else 0],
                "label": "submit" if action == SUBMIT else case.texts[action].split(",")[0],
                "text": "submit" if action == SUBMIT else case.texts[action],
                "observation": "offered (* gold):\n" + "\n".join(offers),
                "probability": math.exp(path.logprobs[t]),
                "gold": action in case.gold,
            }
        )
    return nodes


def group_record(policy, paths, **extra):
    """Paths of one question for the page."""
    case = paths[0].case
    nodes, done = [record.root_node()], []
    for p in paths:
        mine = path_nodes(policy, p, len(nodes))
        nodes += mine
        em, f1, precision, recall = evidence_scores(case, p.taken)
        done.append(
            {
                "path": [0, *(node["id"] for node in mine)],
                "reward": p.reward,
                "answer": f"{len(p.taken)} sentences",
                "problem": "",
                "correct": em == 1,
                "why": [
                    f"F1 {f1:.2f}, precision {precision:.2f}, recall {recall:.2f}",
                    f"log p {p.logprob:.2f}",
                ],
            }
        )
    return record.group(case.question, nodes, done, **extra)


def prediction(policy, path):
    """A row of eval_<set>.json."""
    em, f1, precision, recall = evidence_scores(path.case, path.taken)
    scores = {
        "em": em,
        "f1": f1,
        "precision": precision,
        "recall": recall,
        "sentences": len(path.taken),
    }
    facts = [list(path.case.facts[i]) for i in path.taken]
    row = group_record(policy, [path]) | about(path.case)
    return row | scores | {"evidence_found": facts, "logprob": path.logprob}


def sample_record(policy, paths, size, step):
    """The step's first question whose paths have different rewards."""
    groups = [paths[i:i + size] for i in range(0, len(paths), size)]
    mixed = [g for g in groups if len({p.reward for p in g}) > 1]
    return group_record(policy, (mixed or groups)[0], step=step)


def ask(cfg, split):
    """--ask: one of the evaluation set's questions, or a question over the first one's sentences."""
    found = [c for c in split.cases if c.question.question == cfg.ask]
    if not found:
        raise data.DataError(f"--ask: not a question of {split.name}, whose contexts are searched, such as "
                             f"{split.cases[0].question.question!r}")
    encoder = load_encoder(cfg, "eval", None)
    encoder.reader.read(found[0])
    freeze_vectors(load_encoder(cfg, "vectors", None), found)
    policy = load_policy(cfg, "eval", NoFolder, encoder, found)
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
