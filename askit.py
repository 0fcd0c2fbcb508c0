"""ASKiT: Search and Ask, evidence retrieval as reinforcement learning (paper and authors' code are public).

A question comes with some forty sentences, of which two to four are its evidence. A search takes sentences
one by one, until it submits what it has. Models learn one after the other, a stage each:

    coarse      a bi-encoder ranks the sentences for the question and the evidence so far     sec. 3.1.1
    supervised  a policy over its six best sentences and "submit" learns from labels          sec. 3.1.2
    ppo         the policy learns from the score of the evidence that its searches end with   sec. 3.1.2
    qap         question approximation: a T5 writes the question from ppo's evidence          sec. 3.3
    sqg         sub-question generation by a second T5, whose targets qap's T5 writes         sec. 3.4

PPO, except: an action is a sentence or submit, and pi(a|s) a softmax over seven scores of small encoders.
There is no critic: b(s) is the mean return of other paths through s. A is not normalised, there is no entropy
term and no KL, and there is one pass over a step's paths. The reward is F1, +1 if exact.

    states, paths    state_ids, SearchPath       credit        path_return, baselines, advantages_of
    candidates       coarse_losses, offers       PPO           ppo_loss, train
    policy           log_policy, policy_of       questions     sub_question_rows, forced_questions
    searches         sample_paths, beam_search   correlation   correlation (sec. 4.4)

    python askit.py                              embedded world: coarse, supervised, PPO; four minutes
    python askit.py --stage asking               then: qap, sqg
    python askit.py --stage ppo --name nobonus --before seed0 --bonus 0      from another run's earlier stages
    python askit.py --data hotpotqa              the paper's encoders (as safetensors) and data; not run
    python askit.py --encoder DIR --fine-layers 3 --data train.jsonl --eval-data dev.jsonl    any encoder
    python askit.py --eval-data dev --ask "Who is the mother of …?"     a question of that set
Where paper, code and ours differ: docs/differences.md. Numbers reached: results/README.md.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import torch

from common import data, flags, metrics, training
from common.files import Progress, say
from common.of_askit import encoders, evidence, page, stages
from common.of_askit.encoders import SEP, TASK, state_batches
from common.of_askit.evidence import ASK, SUBMIT, evidence_scores
from common.rollout import stable_seed
from common.run import Run, program, timed

# ---------------------------------------------------------------- config

@dataclass
class Config(flags.Flags):
    """The paper's settings. Behind | stands the source of a default; a default without | is ours.
    common/flags.py has the flags of all scripts (data, names, …)."""

    # ---- stages and models

    # all = coarse, supervised, ppo; asking = qap, sqg; eval = no training: evaluates --checkpoint, else ppo's
    stage: Literal["all", "asking", "coarse", "supervised", "ppo", "qap", "sqg", "eval"] = "all"
    # runs (names or full paths, with commas) whose earlier stages this run loads if it has none itself
    before: str = ""
    model: str = ""                 # "paper" = the paper's encoders, also in the embedded world; else empty
    checkpoint: str = ""            # a checkpoint/ of supervised or ppo to start from or to evaluate
    encoder: str = ""               # coarse encoder; empty = the paper's, in the world a tiny one
    action_model: str = ""          # scores (state, sentence) as next sentences
    submit_model: str = ""          # scores whether the evidence answers the question
    # 0 = the two models above; k = both are the first k layers of --encoder, each with a new head
    fine_layers: int = 0
    question_model: str = ""        # T5 that qap and sqg begin with

    # ---- search
    candidates: int = 6             # candidates of the coarse stage beside submit | sec. 4.3.3
    max_evidence: int = 10          # sentences a search may take | authors' code (8 in its PPO)
    beam: int = 4                   # hypotheses of the beam search | sec. 4.5.1
    # tokens of state + sentence: a sentence is cut to a quarter of them, a state drops its oldest sentences
    max_tokens: int = 508

    # ---- coarse stage
    coarse_steps: int = 60000       # updates | sec. 4.3.2
    coarse_batch: int = 24          # states per update | sec. 4.3.2
    coarse_lr: float = 1e-6         # learning rate after warm-up, half a cosine to 0 | sec. 4.3.2
    coarse_warmup: int = 10000      # updates of linear warm-up | sec. 4.3.2

    # ---- supervised stage
    supervised_steps: int = 80000   # updates | authors' code
    supervised_batch: int = 8       # states per update | authors' code
    supervised_lr: float = 1e-6     # learning rate after warm-up, half a cosine to 0 | authors' code
    supervised_warmup: int = 15000  # updates of linear warm-up | authors' code
    # sentences offered in a training state: coarse's candidates, or random ones (authors' code)
    negatives: Literal["coarse", "random"] = "coarse"

    # ---- data and passes (of all stages), PPO
    data: str = "hotpotqa"          # training questions: file, hub name, or "world" | sec. 4.1.1
    # training questions held out for a validation loss, the last ones (world: on top of --limit) | sec. 4.1;
    # number: ours
    validate: int = 500
    steps: int = 1667               # PPO steps; 10,000 paths in all | sec. 4.3.3
    questions_per_step: int = 1     # questions per step | ours
    group_size: int = 6             # paths sampled per question | ours
    mini_batch: int = 6             # "batch size 6", here of paths | sec. 4.3.3
    lr: float = 1e-6                # learning rate; constant is ours | sec. 4.3.3
    clip: float = .2                # half width of the clip window | sec. 4.3.3
    gamma: float = 1.0              # discount of F1 per action; the paper gives no value | authors' code
    bonus: float = 1.0              # for an exact evidence set | sec. 3.1.2
    baseline_rollouts: int = 4      # other paths per state, at least; missing ones are sampled | ours
    micro_tokens: int = 16384       # tokens per forward pass; memory only
    precision: Literal["fp32", "bf16"] = "fp32"     # of products, but for T5's; bf16 = autocast | ours
    correlate: int = 1000           # questions whose p and reward are correlated, 10 paths each | sec. 4.4
    # what these paths are drawn from: pi, or softmax(pi / 2), which is nearly uniform (authors' code)
    correlate_sampling: Literal["policy", "authors"] = "policy"

    # ---- asking
    qap_steps: int = 26250          # updates: 7 epochs x 60,000 / 16 rows, drawn from all | sec. 4.3.1
    sqg_steps: int = 17500          # updates: 7 epochs x 40,000 / 16, likewise | sec. 4.3.1
    question_batch: int = 16        # rows per update | authors' code
    question_lr: float = 1e-4       # learning rate of both | sec. 4.3.1; half a cosine to 0 is ours
    question_tokens: int = 64       # tokens of a sub-question, at most | authors' code
    # what qap's T5 writes a sub-question from: the evidence found so far (paper), or the missing gold (ours)
    sqg_target: Literal["prefix", "suffix"] = "prefix"


PAPER_MODELS = {
    "encoder": "sentence-transformers/multi-qa-MiniLM-L6-cos-v1",
    "action_model": "prajjwal1/bert-mini",
    "submit_model": "deepset/tinyroberta-squad2",
    "question_model": "ThomasSimonini/t5-end2end-question-generation",
}
PAPER_EVAL = "hotpotqa-dev"


# ---------------------------------------------------------------- states
#
# A Case (common/of_askit/evidence.py) is a question with its sentences:
#
#     question its .id and its text, .question
#     texts    its sentences, numbered from 0
#     gold     numbers of the labelled ones; gold_facts: all labels, also of sentences that are not in texts
#     closed   numbers that are never offered; in a sub-question's search: what the main search has taken
#     tokens   {model: (ids of the question, [ids of each sentence])}, of "coarse", "action" and "submit"
#     vectors  (sentences, H), normalised, of the coarse encoder before its training (sec. 3.1.1)
#
# Two Cases are equal only if they are one object, so a sub-question's search (asked_case) has its own cache.
#
#     state    (case, moves), a key of the policy's cache
#     moves    numbers of the sentences taken, in order (SearchPath.moves: also sub-questions, as texts)
#     action   a sentence's number or SUBMIT (-1); ASK (-2) in forced_questions alone

def state_ids(pair_tokenizer, case, moves):
    """Ids of the question and of the sentences taken, <sep> between them (sec. 3.1.1). pair_tokenizer: of the
    coarse encoder or of the action model; each has its own tokens. (submit's input: log_policy)"""
    question, sentences = case.tokens[pair_tokenizer.name]
    return pair_tokenizer.joined([question, *(sentences[i] for i in moves)])


NOISE_RATE = 2.0  # how many wrong sentences go in: an exponential draw of this rate, rounded | authors' code


def training_state(case, rng, may_complete):
    """The sentences of a made-up state (sec. 3.1.1): some gold in random order, and wrong ones among it.
    may_complete: all gold may be there; then the right action is to submit."""
    gold = sorted(case.gold)
    most = len(gold) if may_complete else max(0, len(gold) - 1)
    taken = rng.sample(gold, rng.randint(0, most))
    wrong = [i for i in range(len(case.texts)) if i not in case.gold]
    noise = min(round(rng.expovariate(NOISE_RATE)), len(wrong))  # most often none
    for i in rng.sample(wrong, noise):
        taken.insert(rng.randint(0, len(taken)), i)
    return tuple(taken)


# ---------------------------------------------------------------- coarse retrieval (sec. 3.1.1)

def coarse_loss(scores, gold_places):
    """- mean over the missing gold of log p, in one state. scores: of the sentences not taken, and of another
    question's."""
    return -scores.log_softmax(0)[gold_places].mean()


def coarse_losses(encoder, cases, cfg, rng):
    """The loss of an update: the encoder learns which gold is missing from a state. Yields once: (loss,
    number of states, how many of them rank missing gold first). `supervise` makes the updates."""
    batch = rng.choices(cases, k=cfg.coarse_batch)
    others = rng.choices(cases, k=cfg.coarse_batch)
    taken_of, states = [], []
    for case in batch:
        taken = training_state(case, rng, may_complete=False)  # some gold is missing: that is what is learned
        taken_of.append(taken)
        states.append(state_ids(encoder.pair_tokenizer, case, taken))
    vectors = encoder.encode(states)  # (n, H), with gradient, not normalised: its norm learns a temperature
    losses, hits = [], 0
    for case, other, taken, vector in zip(batch, others, taken_of, vectors, strict=True):
        left = [i for i in range(len(case.texts)) if i not in taken]
        gold_places = [place for place, i in enumerate(left) if i in case.gold]
        corpus = case.vectors[left]  # frozen: only the state's encoder learns
        if other is not case:
            corpus = torch.cat([corpus, other.vectors])  # more wrong ones, as in the authors' code
        scores = corpus.to(vector.device) @ vector  # (left + other's,)
        losses.append(coarse_loss(scores, gold_places))
        hits += int(scores.argmax()) in gold_places
    yield torch.stack(losses).mean(), len(batch), hits


@torch.no_grad()
def offers(policy, states):
    """[candidates] of each state, the sentences that are offered beside submitting: the best ones not taken
    yet, best first; none if --max-evidence are taken."""
    queries = [state_ids(policy.encoder.pair_tokenizer, *state) for state in states]
    vectors = policy.encoder.encode_all(queries)  # (n, H), on the CPU, some texts at a time
    offered = []
    for (case, moves), vector in zip(states, vectors, strict=True):
        gone = case.closed | set(moves)
        k = min(policy.cfg.candidates, len(case.texts) - len(gone))
        if len(moves) >= policy.cfg.max_evidence:
            k = 0
        scores = case.vectors @ vector  # (sentences,)
        scores[list(gone)] = -torch.inf
        offered.append(scores.topk(k).indices.tolist())
    return offered


# ---------------------------------------------------------------- fine policy (sec. 3.1.2)

@dataclass
class Policy:
    """The fine policy, and what a search needs besides. Its cache holds (actions, log-probs) of the states
    seen since forget(). A PairTokenizer makes a model's inputs of one text or of a pair."""

    model: encoders.Together  # a module of .action and .submit, which are trained and saved together
    encoder: encoders.Encoder  # of the coarse stage, frozen
    action_tokenizer: encoders.PairTokenizer
    submit_tokenizer: encoders.PairTokenizer
    cfg: Config
    asker: encoders.Writer | None = None  # the T5 of the stage, qap or sqg

    def __post_init__(self):
        self.forget()

    @property
    def tokenizer(self):  # a checkpoint keeps it
        return self.action_tokenizer.tokenizer

    def forget(self):
        """Empties the cache: before new weights sample, and after the last update of a step."""
        self.cache = {}


def log_policy(policy, decisions):
    """(n, 1 + k) log pi of submitting (column 0) and of the sentences offered; -inf where fewer are offered.
    decisions: tuples (state, sentences offered, …). A next-sentence model scores each (state, sentence), a
    question-answering model scores submitting."""
    action, submit = policy.action_tokenizer, policy.submit_tokenizer  # PairTokenizers
    action_pairs, places, submit_pairs = [], [], []
    for n, ((case, moves), offered, *_) in enumerate(decisions):
        question, sentences = case.tokens["submit"]
        # staying=0: the oldest go first if too long (state_ids has joined's staying=1: the question stays)
        evidence_ids = submit.joined([sentences[i] for i in moves], staying=0)
        submit_pairs.append((question, evidence_ids))
        state = state_ids(action, case, moves)  # one text of the pair; the sentence offered is the other
        _, sentences = case.tokens["action"]  # the same sentences, as the action model reads them
        for column, a in enumerate(offered, 1):
            action_pairs.append((state, sentences[a]))
            places.append((n, column))
    device = policy.model.action.device
    most = max(len(offered) for _, offered, *_ in decisions)
    logits = torch.full((len(decisions), 1 + most), -torch.inf, device=device)  # p = 0 of what is not offered
    with encoders.autocast(policy.model.action, policy.cfg.precision):
        out = policy.model.submit(**submit.batch(submit_pairs, device))
        if action_pairs:  # none where all states are full
            scores = policy.model.action(**action.batch(action_pairs, device))
            where = tuple(zip(*places, strict=True))
            logits[where] = scores.logits[:, 0].float()  # class 0: it comes next
    # a SQuAD 2 model says "no answer" by an answer that starts and ends at token 0: it gives two logits, a
    # sentence has one. So submit's logit is minus the mean of the two, not minus their sum
    no_answer = out.start_logits[:, 0] + out.end_logits[:, 0]
    logits[:, 0] = -no_answer.float() / 2
    return logits.log_softmax(-1)  # one softmax over both models' logits


@torch.no_grad()
def policy_of(policy, states):
    """[(actions, log-probs)] of states, cached until policy.forget(); submitting is always the first."""
    new = [s for s in dict.fromkeys(states) if s not in policy.cache]
    decisions = list(zip(new, offers(policy, new), strict=True))
    for part in state_batches(decisions, policy.cfg):  # forward passes, for memory alone
        logp = log_policy(policy, part).tolist()
        for (state, offered), values in zip(part, logp, strict=True):
            actions = [SUBMIT, *offered]
            policy.cache[state] = actions, values[:len(actions)]  # without the -inf of wider states
    return [policy.cache[s] for s in states]


# ---------------------------------------------------------------- supervised stage (sec. 3.1.2)

def supervised_decisions(policy, cases, cfg, rng):
    """Decisions [(state, sentences offered, right)]; right: a bool for submitting, then one per sentence.
    Each missing gold that is offered is right (if none is, one replaces the last candidate); if none is
    missing, submitting."""
    states = []
    for case in cases:
        taken = training_state(case, rng, may_complete=True)
        states.append((case, taken[:cfg.max_evidence - 1]))  # not full: a full one offers nothing
    decisions = []
    for (case, moves), offered in zip(states, offers(policy, states), strict=True):
        taken = set(moves)
        missing = case.gold - taken
        if cfg.negatives == "random":
            left = [i for i in range(len(case.texts)) if i not in taken]
            offered = rng.sample(left, min(cfg.candidates, len(left)))
        if missing and not missing & set(offered):
            offered = [*offered[:-1], rng.choice(sorted(missing))]
        right = [a in missing for a in offered]  # perhaps several
        decisions.append(((case, moves), offered, [not missing, *right]))
    return decisions


def supervised_loss(logp, right):
    """- sum over the right actions of log pi(a|s), mean over states (sec. 3.1.2); both (n, 1 + k), right is
    bool. (The coarse loss is the mean over the missing gold.)"""
    return -logp.masked_fill(~right, 0.0).sum() / len(logp)  # filled: -inf times 0 would be nan


def supervised_losses(policy, cases, cfg, rng):
    """The loss of an update: the policy learns to take missing gold, and to submit when none is missing.
    Yields (loss, number of states, how many have a right likeliest action) per forward pass."""
    batch = rng.choices(cases, k=cfg.supervised_batch)
    decisions = supervised_decisions(policy, batch, cfg, rng)
    for part in state_batches(decisions, cfg):
        logp = log_policy(policy, part)  # (n, 1 + k)
        _, _, right = zip(*part, strict=True)
        right = encoders.padded(right, False, logp.device)  # (n, 1 + k)
        hits = right[range(len(part)), logp.argmax(1)].sum()
        loss = supervised_loss(logp, right) * len(part) / len(decisions)  # mean over the whole batch
        yield loss, len(part), int(hits)


# ---------------------------------------------------------------- paths: sampled, greedy, beam

@dataclass(eq=False)
class SearchPath:
    """A search from a state, mostly the question alone, to the evidence that it ends with.

    Contract: paths compare by identity (eq=False), so that they can be keys, and a baseline excludes only the
    path itself, not another one with the same moves."""

    case: "evidence.Case"  # (a piece that is lifted knows no such module)
    moves: tuple = ()  # sentence numbers; in forced_questions also sub-questions, which are texts
    given: int = 0  # so many first moves are not its own; above 0 only in the fresh paths of `baselines`
    logprobs: tuple = ()  # log pi of each action, when it was chosen
    done: bool = False  # it has submitted
    reward: float = 0.0  # once it is done

    @property
    def taken(self):
        return tuple(m for m in self.moves if isinstance(m, int))

    @property
    def asked(self):
        return [m for m in self.moves if isinstance(m, str)]

    @property
    def actions(self):
        """Its own, behind the given moves: sentence numbers, ASK and SUBMIT."""
        own = [ASK if isinstance(m, str) else m for m in self.moves[self.given:]]
        if self.done:
            own.append(SUBMIT)
        return tuple(own)

    @property
    def logprob(self):
        """log p(tau), a sum over actions (sec. 3.1.2)."""
        return sum(self.logprobs)

    def after(self, move, logprob):
        """The path with one more move: a sentence number, a sub-question, or SUBMIT."""
        logprobs = *self.logprobs, logprob
        if move == SUBMIT:
            return replace(self, logprobs=logprobs, done=True)
        return replace(self, logprobs=logprobs, moves=(*self.moves, move))

    def states(self):
        """The state before each action."""
        ends = range(self.given, self.given + len(self.actions))
        return [(self.case, self.moves[:end]) for end in ends]


def finish_paths(policy, paths, rngs=None, sampling="policy"):
    """The paths, each taken to its end by the likeliest actions, or by drawn ones. rngs: a random.Random per
    path. All open states of all paths are scored in one call."""
    paths = list(paths)
    while running := [n for n, p in enumerate(paths) if not p.done]:
        choices = policy_of(policy, [(paths[n].case, paths[n].moves) for n in running])
        for n, (actions, logprobs) in zip(running, choices, strict=True):
            i = draw(rngs[n], logprobs, sampling) if rngs else likeliest(logprobs)
            paths[n] = paths[n].after(actions[i], logprobs[i])
    return rewarded(paths, policy.cfg)


def likeliest(logprobs):
    """The index of the likeliest action."""
    return max(range(len(logprobs)), key=logprobs.__getitem__)


def draw(rng, logprobs, sampling):
    """The index of an action drawn from pi. sampling: see --correlate-sampling."""
    chances = [math.exp(x) for x in logprobs]
    if sampling == "authors":
        chances = [math.exp(p / 2) for p in chances]  # (rng.choices divides by their sum)
    return rng.choices(range(len(chances)), chances)[0]


def sample_paths(policy, cases, size, *seed, sampling="policy"):
    """`size` paths per question; a path's draws depend on its own seed alone. seed: parts of it, as (run
    seed, "ppo", step)."""
    starts, rngs, times_drawn = [], [], Counter()
    for case in cases:
        for _ in range(size):
            starts.append(SearchPath(case))
            path_seed = stable_seed(*seed, case.question.id, times_drawn[case])
            rngs.append(random.Random(path_seed))
            times_drawn[case] += 1  # a question drawn twice in a step goes on counting
    return finish_paths(policy, starts, rngs, sampling)


def greedy_paths(policy, cases):
    """A path per question, by the likeliest actions."""
    return finish_paths(policy, map(SearchPath, cases))


def beam_search(policy, cases, width):
    """The most probable path of each question among `width` hypotheses."""
    return rewarded([beam[0] for beam in grow_beams(policy, cases, width)], policy.cfg)


def grow_beams(policy, cases, width):
    """The last hypotheses of each question, likeliest first: [[path]]."""
    beams = [[SearchPath(case)] for case in cases]
    while running := [p for beam in beams for p in beam if not p.done]:
        choices = policy_of(policy, [(p.case, p.moves) for p in running])
        children = {}
        for p, (actions, logprobs) in zip(running, choices, strict=True):
            children[p] = [p.after(a, x) for a, x in zip(actions, logprobs, strict=True)]
        for n, beam in enumerate(beams):
            grown = []
            for p in beam:
                grown += children.get(p, [p])  # one that has ended competes with those that go on
            grown.sort(key=lambda p: -p.logprob)  # log p(tau), without length normalisation
            beams[n] = grown[:width]
    return beams


# ---------------------------------------------------------------- reward and credit (sec. 3.1.2)

def path_return(case, moves, cfg, t=0):
    """R_t, the return of action t = 0 … T - 1: gamma^(T - t) F1 + bonus EM. T counts the moves and the
    submit, which is action T - 1, so its F1 has gamma^1; the bonus has no discount."""
    taken = [m for m in moves if isinstance(m, int)]
    em, f1, _, _ = evidence_scores(case, taken)  # of sets, against case.gold_facts
    discount = cfg.gamma ** (len(moves) + 1 - t)
    return discount * f1 + cfg.bonus * em


def rewarded(paths, cfg):
    """The paths, with their rewards filled in."""
    for p in paths:
        p.reward = path_return(p.case, p.moves, cfg)
    return paths


def returns_of(path, cfg):
    """R_t of every action of a path; at the default gamma of 1 all are its reward."""
    times = range(path.given, path.given + len(path.actions))
    return [path_return(path.case, path.moves, cfg, t) for t in times]


def state_key(case, moves):
    """The same for all orders of the same sentences, although the policy does read the order."""
    return case, frozenset(moves)


def baselines(policy, paths, least, *seed):
    """b(s) before every action of every path: the mean return of the other paths that took the same
    sentences, in any order. If fewer than `least` did, fresh paths are sampled from s, for b alone."""
    visits = {}  # state_key -> [(path, its return from there)]

    def add_visits(path):
        for state, its_return in zip(path.states(), returns_of(path, policy.cfg), strict=True):
            visits.setdefault(state_key(*state), []).append((path, its_return))

    for p in paths:
        add_visits(p)
    # by depth: fresh paths from s also visit the states below it, where fewer are then needed
    for depth in range(max(len(p.actions) for p in paths)):
        fresh = {}  # {(key, k): the k-th path that key lacks}; paths with the same key share it
        for p in paths:
            if depth < len(p.actions):
                case, moves = p.states()[depth]
                key = state_key(case, moves)
                num_others = len(visits[key]) - 1  # without p: b(s) must not depend on its action
                for k in range(least - num_others):
                    fresh.setdefault((key, k), SearchPath(case, moves, given=len(moves)))
        rngs = []
        for (_, k), start in fresh.items():
            taken = sorted(map(str, start.moves))  # one seed for each state_key
            path_seed = stable_seed(*seed, "baseline", start.case.question.id, *taken, k)
            rngs.append(random.Random(path_seed))
        for p in finish_paths(policy, fresh.values(), rngs):
            add_visits(p)
    found = []
    for p in paths:
        of_states = []
        for state in p.states():
            other_returns = [r for q, r in visits[state_key(*state)] if q is not p]
            of_states.append(sum(other_returns) / len(other_returns))
        found.append(of_states)
    return found


def advantages_of(policy, paths, cfg, *seed):
    """A_t = R_t - b(s_t) of every action of every path; not normalised."""
    advantages = []
    b = baselines(policy, paths, cfg.baseline_rollouts, *seed)
    for p, of_states in zip(paths, b, strict=True):
        both = zip(returns_of(p, cfg), of_states, strict=True)
        advantages.append([its_return - baseline for its_return, baseline in both])
    return advantages


# ---------------------------------------------------------------- update (sec. 3.1.2)

def ppo_loss(logprobs, old_logprobs, advantages, num_paths, clip=0.2):
    """- sum_t min(r_t A_t, clip(r_t, 1 - eps, 1 + eps) A_t), mean over paths; all (actions,). Returns (loss,
    stats). num_paths: paths of the whole mini-batch; these actions may be a part of it."""
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -objective.sum() / num_paths  # a sum over a path's actions, as printed: a long path weighs more
    above = (ratio > 1 + clip) & (advantages > 0)
    below = (ratio < 1 - clip) & (advantages < 0)
    mask = torch.ones_like(ratio, dtype=torch.bool)  # no padding here
    return loss, training.loss_stats(log_ratio, above | below, mask, ratio)


def actions_taken(policy, paths, advantages):
    """What an update learns from, decisions for log_policy: [(state, sentences offered, column of the action
    taken, old log-prob, advantage)].

    Contract: policy.cache is as sampling left it, with the actions that were offered then. So forget() is
    called before sampling and after the last update, never between."""
    decisions = []
    for p, of_actions in zip(paths, advantages, strict=True):
        for state, action, old, advantage in zip(
                p.states(), p.actions, p.logprobs, of_actions, strict=True):
            actions, _ = policy.cache[state]  # submitting is the first: log_policy's column 0
            decisions.append((state, actions[1:], actions.index(action), old, advantage))
    return decisions


# ---------------------------------------------------------------- train

METRICS = page.PPO  # {what a step's row may hold: its caption}


def train(run, policy, cases):
    """A step of PPO: sample paths, credit their actions, update once per mini-batch of paths."""
    cfg = run.cfg
    # AdamW with weight decay .01; gradients are clipped at norm 1 | ours
    optimizer = training.make_optimizer(policy.model, cfg.lr)
    seed = stable_seed(cfg.seed, "order")
    # step 1, 2, …: after a body run.steps logs its row, and evaluates and saves where that is due
    for step, row in run.steps(policy, optimizer, cfg.steps, label="ppo | "):
        policy.forget()
        with timed(row, "time/rollout"):
            # 1. sample paths to their ends, with the current weights; each has its reward then
            drawn = data.batch_of_step(cases, step, cfg.questions_per_step, seed)
            paths = sample_paths(policy, drawn, cfg.group_size, cfg.seed, "ppo", step)

            # 2. credit: R_t - b(s_t) of every action; the fresh paths of b(s) are not learned from
            advantages = advantages_of(policy, paths, cfg, cfg.seed, "ppo", step)

        # 3. old log-probs: p.logprobs, kept from sampling
        # 4. update, once per mini-batch; at the paper's sizes one per step, where r = 1
        meter = training.Meter()
        for begin in range(0, len(paths), cfg.mini_batch):
            end = begin + cfg.mini_batch
            mini = paths[begin:end]
            decisions = actions_taken(policy, mini, advantages[begin:end])
            for part in state_batches(decisions, cfg):  # forward passes, for memory alone: gradients add up
                _, _, columns, old, credit = zip(*part, strict=True)
                logp = log_policy(policy, part)[range(len(part)), columns]  # (n,); no dropout: r begins at 1
                old, credit = torch.tensor([old, credit], device=logp.device)
                loss, stats = ppo_loss(logp, old, credit, len(mini), cfg.clip)
                loss.backward()
                meter.add(loss, stats)
            norm = training.clip_gradient(policy.model)
            if meter.end_update(norm):  # loss and gradient are finite
                optimizer.step()
            optimizer.zero_grad()

        row |= meter.means() | page.path_metrics(paths)
        returns = [returns_of(p, cfg) for p in paths]
        row["sample"] = page.sample_record(
            policy, paths, cfg.group_size, step=step, returns=returns, advantages=advantages)
        policy.forget()  # those scores are of old weights


# ---------------------------------------------------------------- the loop of coarse, supervised, qap and sqg

T5_STAGES = ("qap", "sqg")
UPDATES_PER_STEP = 25  # updates per step of the log, and per validation loss
VALIDATED = 4  # batches of a validation loss
PRETRAIN_METRICS = page.SUPERVISED


def supervise(run, learner, losses, rows, held_out):
    """Makes --<stage>-steps updates, UPDATES_PER_STEP in a step of the log; the rate warms up (a T5's does
    not), then falls as half a cosine.

    rows: training cases, or a T5's rows; losses(learner, rows, cfg, rng), such as coarse_losses, draws a
    batch from them. held_out: others for the validation loss, perhaps none."""
    cfg, stage = run.cfg, run.stage_name
    total = getattr(cfg, f"{stage}_steps")
    lr = cfg.question_lr if stage in T5_STAGES else getattr(cfg, f"{stage}_lr")
    warmup = 0 if stage in T5_STAGES else getattr(cfg, f"{stage}_warmup")
    optimizer = training.make_optimizer(learner.model, lr)
    steps = math.ceil(total / UPDATES_PER_STEP)
    for step, row in run.steps(learner, optimizer, steps, label=f"{stage} | "):
        meter = training.Meter()
        for update in range((step - 1) * UPDATES_PER_STEP, min(step * UPDATES_PER_STEP, total)):
            training.set_lr(optimizer, training.cosine_lr(update, total, lr, warmup=warmup))
            # the batch depends on the update's number alone: a resumed run goes on as if it never stopped
            rng = random.Random(stable_seed(cfg.seed, stage, update))
            for loss, count, hits in losses(learner, rows, cfg, rng):
                loss.backward()
                meter.add(loss, {"tokens": count, "right_sum": hits})  # states, or a T5's target tokens
            norm = training.clip_gradient(learner.model)
            if meter.end_update(norm):  # loss and gradient are finite
                optimizer.step()
            optimizer.zero_grad()
        row |= meter.means()
        if meter.total.get("tokens"):  # sums over the step's updates; none, if no update was finite
            row["pretrain/right"] = meter.total["right_sum"] / meter.total["tokens"]
        if held_out:
            row["pretrain/validation_loss"] = validation_loss(losses, learner, held_out, cfg)


@torch.no_grad()
def validation_loss(losses, learner, held_out, cfg):
    """Mean loss of the same few batches each time."""
    rng = random.Random(stable_seed(cfg.seed, "validation"))
    total = 0.0
    for _ in range(VALIDATED):
        for loss, *_ in losses(learner, held_out, cfg, rng):
            total += loss.item()
    return total / VALIDATED


# ---------------------------------------------------------------- what the T5s learn (sec. 3.3, 3.4, 4.1.3)
#
# A writer is an encoders.Writer, a T5 with its tokenizer. Each of its inputs begins with TASK ("generate
# question: "); SEP (<sep>) stands between a question and its evidence. The approximator is qap's T5,
# policy.asker that of the stage.

def approximation_input(writer, case, taken):
    """Ids that QAp's T5 reads: the evidence, cut to fit. Its target is the question."""
    return writer.ids(TASK, evidence=[case.texts[i] for i in taken])


def sub_question_input(writer, case, taken):
    """Ids that SQG's T5 reads: the question, <sep> and the evidence. Sub-questions asked before are left out:
    its training states have none."""
    return writer.ids(TASK, case.question.question, SEP, evidence=[case.texts[i] for i in taken])


def approximation_rows(writer, paths):
    """QAp's rows (input ids, target ids): the evidence that a path ended with, and the question."""
    rows = []
    for p in paths:
        if p.taken:
            question = writer.ids(p.case.question.question)
            rows.append((approximation_input(writer, p.case, p.taken), question))
    return rows


def sub_question_rows(writer, approximator, paths, target):
    """SQG's rows (input ids, target ids), one for each beginning e_1 … e_k of a path's evidence. Input: the
    question and these sentences. Target: the question that QAp's T5, the approximator, writes from them
    (target "prefix", k >= 1), or from the gold that is not among them ("suffix", k >= 0)."""
    inputs, sources = [], []
    for p in paths:
        for k in range(len(p.taken) + 1):
            prefix = p.taken[:k]
            source = prefix
            if target == "suffix":
                source = sorted(p.case.gold - set(prefix))
            if source:  # else nothing was found (prefix), or no gold is missing (suffix)
                inputs.append(sub_question_input(writer, p.case, prefix))
                sources.append(approximation_input(approximator, p.case, source))
    with Progress("approximations") as progress:
        texts = approximator.write(sources, progress)
    targets = [writer.ids(text) for text in texts]
    return list(zip(inputs, targets, strict=True))


def question_losses(writer, rows, cfg, rng):
    """The loss of an update of qap or sqg: cross-entropy, mean over the targets' tokens. Yields (loss, target
    tokens, those with p > .5) per forward pass."""
    batch = rng.choices(rows, k=cfg.question_batch)
    tokens = sum(len(target) for _, target in batch)  # of the whole batch, the end tokens too
    for part in writer.batches(batch):
        inputs, targets = zip(*part, strict=True)
        logp, mask = writer.logprobs(inputs, targets)  # (n, T); 0 behind a target's end
        likely = logp[mask] > math.log(0.5)
        yield -logp.sum() / tokens, len(likely), int(likely.sum())


# ---------------------------------------------------------------- "PPO + sub-questions" (sec. 4.5.1)

def forced_questions(policy, cases):
    """A path per question: the best sentence first; then, until the policy would submit, a sub-question and
    its search (it is forced: whenever it would not submit, it asks). The policy sees no sub-question."""
    paths = []
    start = [(case, ()) for case in cases]
    for case, (actions, logprobs) in zip(cases, policy_of(policy, start), strict=True):
        i = 1 + likeliest(logprobs[1:])  # the best sentence, even where it would submit
        paths.append(SearchPath(case).after(actions[i], logprobs[i]))
    while running := [n for n, p in enumerate(paths) if not p.done]:
        asking = []
        choices = policy_of(policy, [(paths[n].case, paths[n].taken) for n in running])
        for n, (actions, logprobs) in zip(running, choices, strict=True):
            if actions[likeliest(logprobs)] == SUBMIT:
                paths[n] = paths[n].after(SUBMIT, logprobs[0])
            else:
                asking.append(n)
        longer = ask_and_search(policy, [paths[n] for n in asking])
        for n, path in zip(asking, longer, strict=True):
            paths[n] = path
    return rewarded(paths, policy.cfg)


def ask_and_search(policy, paths):
    """Each path with one more sub-question and the sentences that a greedy search for it finds, which begins
    with no evidence. If it finds none the path submits, since the T5 would ask the same again."""
    inputs = [sub_question_input(policy.asker, p.case, p.taken) for p in paths]
    asked = []
    for p, question in zip(paths, policy.asker.write(inputs), strict=True):
        asked.append(p.after(question, 0.0))  # log p 0: no choice of the policy's own
    searches = [SearchPath(asked_case(policy, p)) for p in asked]
    longer = []
    for p, search in zip(asked, finish_paths(policy, searches), strict=True):
        room = policy.cfg.max_evidence - len(p.taken)
        for i in search.taken[:room]:
            p = p.after(i, 0.0)
        if not search.taken:
            p = p.after(SUBMIT, 0.0)
        longer.append(p)
    return longer


def asked_case(policy, path):
    """The case of a search for the path's last sub-question, over the sentences that it has not taken. Of the
    question only its ids change: .question and the gold stay the main question's."""
    case, question = path.case, path.asked[-1]
    tokens = dict(case.tokens)
    for t in (policy.encoder.pair_tokenizer, policy.action_tokenizer, policy.submit_tokenizer):
        _, sentences = tokens[t.name]
        tokens[t.name] = t.ids(question), sentences
    return replace(case, tokens=tokens, closed=case.closed | set(path.taken))


# ---------------------------------------------------------------- evaluate

CORRELATED = 10  # paths per question | sec. 4.4


def evaluate(policy, split, cfg, progress):
    """The evidence that a search ends with, against the labels. Returns (rows, summary). split
    (evidence.Questions): cases, and the search that they are evaluated with."""
    policy.forget()
    paths = search_all(policy, split.cases, split.search, progress)
    rows, summary = page.scored(policy, paths, split, cfg.seed)
    if split.search == "greedy" and cfg.correlate:  # once per set
        cases = split.cases[:cfg.correlate]
        paths = sample_paths(
            policy, cases, CORRELATED, cfg.seed, "correlate", sampling=cfg.correlate_sampling)
        summary |= correlation(paths, CORRELATED)
    return rows, summary


def search_all(policy, cases, search, progress):
    """The path that a search finds for each question, some questions at a time."""
    paths = []
    for start in range(0, len(cases), 64):
        part = cases[start:start + 64]
        if search == "beam":
            paths += beam_search(policy, part, policy.cfg.beam)
        elif search == "replace":  # a sub-question in the question's place
            paths += forced_questions(policy, part)
        else:
            paths += greedy_paths(policy, part)
        progress(len(paths), len(cases))
    return paths


def correlation(paths, size):
    """Spearman's correlation of p(tau) and reward over the `size` sampled paths of a question (sec. 4.4):
    mean and interval over the questions whose paths differ in both, and the share of these."""
    from scipy.stats import spearmanr
    rhos = []
    for begin in range(0, len(paths), size):
        group = paths[begin:begin + size]
        logprobs = [p.logprob for p in group]  # of pi, however the paths were drawn
        rewards = [p.reward for p in group]
        if len(set(logprobs)) > 1 and len(set(rewards)) > 1:  # else there are no ranks
            rhos.append(float(spearmanr(logprobs, rewards).statistic))
    share = len(rhos) / max(1, len(paths) // size)
    if not rhos:
        return {"spearman_questions": share}
    rho, low, high = metrics.bootstrap_interval(rhos)
    say(f"  Spearman of p and reward {rho:.2f} over the {share:.0%} of questions whose paths differ")
    return {"spearman_questions": share, "spearman": rho, "spearman_low": low, "spearman_high": high}


def evaluate_coarse(encoder, split, cfg, progress):
    """The coarse encoder alone: the ranking of all sentences (sec. 4.3.2), or evidence taken by a rule
    (ours): BM25's best two, the encoder's best, or gold wherever it is offered."""
    if split.search == "ranking":
        return ranking(encoder, split, cfg)
    policy = Policy(None, encoder, None, None, cfg)  # without scorers: it offers, and does not choose
    evidence_of = page.taken_by_rule(split, partial(offers, policy), cfg.max_evidence, progress)
    paths = []
    for case, taken in zip(split.cases, evidence_of, strict=True):
        no_choice = (0.0,) * (len(taken) + 1)  # log p of actions that no policy drew
        paths.append(SearchPath(case, taken, logprobs=no_choice, done=True))
    rows, summary = page.scored(policy, rewarded(paths, cfg), split, cfg.seed)
    return rows, summary | {"by_rule": True}  # so that it is left out of the mean over sets


def ranking(encoder, split, cfg):
    """How gold is ranked when nothing is taken yet (sec. 4.3.2). So that tables can be shared, the rows' em
    is hit@1 and their f1 recall among the candidates; percentile: of the best gold sentence among all."""
    queries = [state_ids(encoder.pair_tokenizer, case, ()) for case in split.cases]
    rows = []
    for case, vector in zip(split.cases, encoder.encode_all(queries), strict=True):
        ranked = (case.vectors @ vector).argsort(descending=True).tolist()
        places = [place for place, i in enumerate(ranked) if i in case.gold]
        first = min(places, default=len(ranked))  # (a question may have no gold here)
        rows.append(evidence.about(case) | {
            "em": float(first == 0),
            "f1": sum(place < cfg.candidates for place in places) / len(case.gold_facts),
            "percentile": 1 - first / max(1, len(ranked) - 1) if places else 0.0,
            "sentences": len(ranked),
        })
    names = {"em": "hit@1", "f1": f"recall@{cfg.candidates}"}
    return page.summed_up(rows, split, cfg.seed, ("em", "f1", "percentile", "sentences"), names=names)


def evaluate_approximations(policy, split, cfg, progress):
    """Question approximations from all gold sentences against the question itself."""
    inputs = [approximation_input(policy.asker, case, sorted(case.gold)) for case in split.cases]
    return page.score_approximations(split, cfg.seed, policy.asker.write(inputs, progress))


# ---------------------------------------------------------------- stages

@dataclass(frozen=True)
class Stage:
    needs: tuple                # earlier stages whose checkpoints it always loads
    begins_with: str            # whose weights it starts from, without --checkpoint or one of its own
    losses: Callable | None     # see `supervise`; ppo has `train`, eval nothing
    evaluate: Callable
    searches: tuple             # ways to find evidence, an evaluation each (qap, which reads gold: one)


STAGES = {  # needs, begins_with, losses, evaluate, searches
    "coarse": Stage((), "", coarse_losses, evaluate_coarse, ("ranking", "bm25", "coarse", "oracle")),
    "supervised": Stage(("coarse",), "", supervised_losses, evaluate, ("greedy", "beam")),
    "ppo": Stage(("coarse",), "supervised", None, evaluate, ("greedy", "beam")),
    "qap": Stage(("coarse", "ppo"), "", question_losses, evaluate_approximations, ("greedy",)),
    "sqg": Stage(("coarse", "qap", "ppo"), "", question_losses, evaluate, ("replace",)),
    "eval": Stage(("coarse",), "ppo", None, evaluate, ("greedy", "beam")),
}
IN_ORDER = {"all": ("coarse", "supervised", "ppo"), "asking": T5_STAGES}


def question_rows(cfg, stage, writer, policy, cases, required):
    """What a T5 learns from the evidence that ppo's policy finds for these cases (sec. 4.1.2, 4.1.3).
    required: no rows is an error."""
    with Progress("evidence") as progress:
        paths = search_all(policy, cases, "greedy", progress)
    policy.forget()
    writer.shortened = 0
    if stage == "qap":
        rows = approximation_rows(writer, paths)
    else:
        approximator = encoders.load_writer(cfg, stages.checkpoint_of(cfg, "qap"))
        rows = sub_question_rows(writer, approximator, paths, cfg.sqg_target)
    if required and not rows:
        raise data.DataError(
            f"{stage}: the policy of ppo submits at once on all of {len(cases)} training questions, so there "
            "is no evidence to ask from: train it for longer, or name another run's with --before")
    say(f"{stage}: {len(rows)} rows of {len(cases)} questions, {writer.shortened} of them shortened")
    return rows


def run_stage(run, cases, evals):
    """Trains a stage and evaluates (coarse: before, too), or only evaluates. --resume skips what is done."""
    cfg, stage, folder = run.cfg, run.stage_name, run.folder
    settings = STAGES[stage]
    updates = getattr(cfg, f"{stage}_steps", 0)  # ppo, eval: 0
    steps = cfg.steps if stage == "ppo" else math.ceil(updates / UPDATES_PER_STEP)
    sets = evidence.searched(evals, settings.searches, cfg.beam)  # a set for each search
    if folder.is_done(steps, sets):
        return
    torch.manual_seed(cfg.seed)  # of new heads
    train_cases, held_out = evidence.kept_apart(cases, cfg.validate)  # held_out: the last ones
    all_cases = cases + [case for split in evals for case in split.cases]
    # learner: what is trained, an Encoder, a Policy or a T5; evaluated: the same, or the Policy with that T5.
    # This also fills the cases' tokens and vectors
    learner, evaluated = stages.load(
        cfg, stage, all_cases, begins_with=settings.begins_with, start=folder.start, Policy=Policy)
    with run.stage(f"ASKiT {cfg.name}: {stage}", evaluated, sets, settings.evaluate, learned=cases):
        if stage == "coarse" and not folder.start:
            run.evaluate("_before")
        rows, held_out_rows = train_cases, held_out
        if stage in T5_STAGES:  # kept in files: a resumed run does not make them again
            rows_of = partial(question_rows, cfg, stage, learner, evaluated)
            rows = folder.kept("rows.json", lambda: rows_of(train_cases, required=True))
            held_out_rows = folder.kept("validation_rows.json", lambda: rows_of(held_out, required=False))
        if stage == "ppo":
            train(run, learner, train_cases)
        elif stage != "eval":
            supervise(run, learner, settings.losses, rows, held_out_rows)
        run.evaluate()


# ---------------------------------------------------------------- main

@program(one_process=True)
def main(argv=None):
    """The stages of --stage, each in a run folder of its own. Checks that need no data come first."""
    cfg = parse_args(argv)
    in_order = IN_ORDER.get(cfg.stage, (cfg.stage,))
    free = ["stage"]  # --resume may change this flag
    runs = []
    for stage in () if cfg.ask else in_order:  # --ask has no run folder
        table = METRICS if stage == "ppo" else PRETRAIN_METRICS
        runs.append(Run(cfg, "askit", table, stage=stage, free=free))
    starts = {run.stage_name: run.folder.start for run in runs}  # the checkpoints that --resume found
    stages.refuse_missing(cfg, in_order, starts, STAGES)
    cases, evals = evidence.load_cases(cfg, PAPER_EVAL)
    if cfg.ask:
        case = evidence.find_case(evals[0], cfg.ask)
        policy, _ = stages.load(cfg, "eval", [case], begins_with=STAGES["eval"].begins_with, Policy=Policy)
        return page.show_path(policy, greedy_paths(policy, [case])[0])
    for run in runs:
        run_stage(run, cases, evals)
    from common import ladder
    ladder.show_table("askit", stages.runs_of(cfg), ("coarse", "supervised", "ppo", "sqg"))


def parse_args(argv=None):
    """The flags, over the paper's defaults or the embedded world's."""
    return stages.check(flags.parse("askit", Config, __doc__, argv), PAPER_MODELS)


if __name__ == "__main__":
    main()
