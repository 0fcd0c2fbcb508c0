"""The numbers of searches for evidence: of the paths of a training step, of the evidence that an evaluation
ends with, of how gold is ranked before anything is searched, and of texts written from evidence."""

import random
from collections import Counter

import torch

from common import metrics, report, retriever
from common.evidence import ENDS, SearchPath, SubQuestion, evidence_of, evidence_scores, state_ids
from common.files import Progress, read_evaluation, say
from common.guards import ANSWERS, RATIO, SECONDS, Metric
from common.page.evidence import about, prediction
from common.rollout import mean, stable_seed

# ---------------------------------------------------------------- of a step

# of a step that samples paths
PATHS = {
    "reward/mean": Metric("mean reward", "reward", "reward {:.3f}", "reward"),  # up to 2
    "reward/em": Metric("share of paths that end with exactly the gold evidence", ANSWERS, "em {:.3f}"),
    "reward/f1": Metric("F1 of the evidence that a path ends with", ANSWERS, "f1 {:.3f}"),
    "path/sentences": Metric(
        "sentences that a path ends with", "sentences a path", "sentences {:.2f}"),
    "train/question_kl": Metric(
        "KL of sub-questions' tokens to the T5 that joint training began with"),
    "path/questions": Metric("sub-questions asked a path", "sentences a path", "asked {:.2f}"),
    "path/entropy": Metric(
        "mean -log pi of the actions, nats", "entropy (nats an action)", "ent {:.3f}"),
    "path/full": Metric("share of paths that ran into --max-evidence"),
    "time/rollout": Metric("seconds of sampling paths", SECONDS, "roll {:.1f}s"),
}

# of a step of supervised updates
SUPERVISED = {
    "train/loss": Metric(
        "the supervised loss, mean of the updates", "supervised loss", "loss {:.3f}"),
    "pretrain/validation_loss": Metric(
        "the supervised loss of questions that are not trained on (--validate)",
        "supervised loss", "validation {:.3f}", "validation"),
    "pretrain/right": Metric(
        "share of states whose best choice is right; of tokens with p over a half",
        ANSWERS, "right {:.3f}"),
}

NO_SAMPLES = ("rollout/flat_groups", "train/sampler")  # of scripts that sample a language model
RATIOS = {key: metric for key, metric in RATIO.items() if not key.startswith(NO_SAMPLES)}


def path_metrics(paths, max_evidence):
    """Means over the step's paths."""
    scores = [evidence_scores(p.case, p.steps) for p in paths]
    actions = sum(len(p.actions) for p in paths)
    return {
        "reward/mean": mean(p.reward for p in paths),
        "reward/em": mean(em for em, *_ in scores),
        "reward/f1": mean(f1 for _, f1, *_ in scores),
        "path/sentences": mean(len(p.taken) for p in paths),
        "path/questions": mean(len(p.asked) for p in paths),
        "path/entropy": -sum(p.logprob for p in paths) / actions,
        "path/full": mean(len(p.taken) == max_evidence for p in paths),
    }


# ---------------------------------------------------------------- of an evaluation

SCORES = ("em", "f1", "precision", "recall", "sentences")


def scored(policy, paths, split, cfg):
    """(rows, summary) of paths: the scores of their evidence, and what went wrong. Says how many states were
    shortened since it was last asked."""
    rows = [prediction(policy, p) for p in paths]
    tokenizer = policy.action_tokenizer
    if tokenizer and tokenizer.shortened:
        say(f"  {tokenizer.shortened} times a state left out its oldest sentences (--max-tokens)")
        tokenizer.shortened = 0
    summary = {"set": split.name, "seed": cfg.seed, "search": split.search}
    summary |= metrics.summarize(rows, SCORES)
    ends = Counter(r["end"] for r in rows)
    wrong = Counter(r["first_wrong"] for r in rows if r["first_wrong"])
    summary["ends"] = {end: ends[end] / len(rows) for end in ENDS}
    summary["first_wrong"] = dict(sorted(wrong.items()))
    questions = []
    for p in paths:
        for t, step in enumerate(p.steps):
            if isinstance(step, SubQuestion):
                questions.append((p, t))
    if questions:
        share = mean(redundant(policy.encoder, questions))
        number = len(questions) / len(paths)
        summary |= {"redundant": share, "asked": number}
        say(f"  {number:.2f} sub-questions a search, {share:.0%} of them redundant")
    return rows, summary


def write_unlabelled(folder, sets, search):
    """unlabelled_<set>.json of a run folder: what search(cases, "greedy", progress) finds for the questions
    that have no labelled evidence."""
    for split in sets:
        if not split.unlabelled:
            continue
        with Progress(f"searching {split.name}") as progress:
            paths = search(split.unlabelled, "greedy", progress)
        rows = []
        for p in paths:
            evidence = [list(p.case.facts[i]) for i in p.taken]
            question = p.case.question
            rows.append({"id": question.id, "question": question.question, "evidence_found": evidence})
        folder.write(f"unlabelled_{split.name}.json", rows)


def redundant(encoder, questions):
    """Whether the best sentence for each sub-question alone, by the encoder, was taken before it was asked:
    what can be measured of the paper's "answers were already in the evidence". questions [(path, index of the
    step)]."""
    texts = [encoder.pair_tokenizer.ids(p.steps[t].text) for p, t in questions]
    vectors = encoder.encode_all(texts)
    found = []
    for (p, t), vector in zip(questions, vectors, strict=True):
        scores = p.case.vectors @ vector  # (sentences,)
        taken = evidence_of(p.steps[:t])
        found.append(int(scores.argmax()) in taken)
    return found


def correlation(paths, size, *seed):
    """Spearman's correlation of p(tau) and reward over `size` sampled paths of each question (sec. 4.4).

    {"spearman": its mean over questions whose paths differ in both, with spearman_low and spearman_high, an
    interval over these questions, "spearman_questions": their share (the others have none), "ranks": how
    often each pair of ranks came, (size, size)}."""
    from scipy.stats import spearmanr

    found, counts = [], [[0] * size for _ in range(size)]
    groups = [paths[i:i + size] for i in range(0, len(paths), size)]
    for group in groups:
        both = [p.logprob for p in group], [p.reward for p in group]
        if all(len(set(values)) > 1 for values in both):
            found.append(float(spearmanr(*both).statistic))
            for x, y in rank_pairs(*both, *seed, group[0].case.question.id):
                counts[y][x] += 1
    share = len(found) / max(1, len(groups))
    if not found:
        return {"spearman_questions": share}
    rho, low, high = metrics.bootstrap_interval(found)
    say(f"  Spearman of p and reward {rho:.2f} over the {share:.0%} of questions whose paths differ")
    interval = {"spearman_low": low, "spearman_high": high}
    return {"spearman_questions": share, "spearman": rho, **interval, "ranks": counts}


def rank_pairs(probabilities, rewards, *seed):
    """[(rank of p, rank of the reward)] of paths, from the lowest. Ties are in random order, so that none of
    them agree."""
    ranks = []
    for values in (probabilities, rewards):
        draw = random.Random(stable_seed(*seed, len(ranks)))
        ties = draw.sample(range(len(values)), len(values))
        values = list(zip(values, ties, strict=True))
        ordered = sorted(values)
        ranks.append([ordered.index(value) for value in values])
    return list(zip(*ranks, strict=True))


def score_texts(split, cfg, texts, wanted):
    """(rows, summary): em and f1 of the words of a text for each case; wanted: what it may say."""
    rows = []
    for case, text, gold in zip(split.cases, texts, wanted, strict=True):
        row = {
            "em": metrics.exact_match(text, gold),
            "f1": metrics.f1(text, gold),
            "answer": text,
            "sentences": len(case.gold),
        }
        rows.append(about(case) | row)
    summary = {"set": split.name, "seed": cfg.seed}
    return rows, summary | metrics.summarize(rows, ("em", "f1"))


# ---------------------------------------------------------------- of the coarse stage alone

RECALL_AT = 20


def paths_without_policy(split, cfg, candidates_of, progress):
    """The evidence of BM25's best two sentences, of the coarse stage's best as many as the mean of gold, or
    of an oracle that takes gold wherever it is offered. candidates_of(states) -> [sentences, best first]."""
    size = round(mean(len(case.gold_facts) for case in split.cases))
    paths = []
    for case in split.cases:
        if split.search == "bm25":
            passages = []
            for i, text in enumerate(case.texts):
                passages.append({"id": str(i), "title": "", "text": text})
            index = retriever.BM25Retriever(passages)
            found = index.search([case.question.question], 2)[0]
            taken = [int(passage.id) for passage in found]
        elif split.search == "coarse":
            taken = candidates_of([(case, ())])[0][:size]
        else:
            taken = offered_gold(case, candidates_of, cfg.max_evidence)
        nothing = (0.0,) * (len(taken) + 1)
        paths.append(SearchPath(case, tuple(taken), logprobs=nothing, done=True))
        progress(len(paths), len(split.cases))
    return paths


ORDERS = 1000  # of gold that an oracle tries: all, where there are up to six


def offered_gold(case, candidates_of, most):
    """Gold sentences, at most `most`, each of which is among the candidates when its turn comes: as many as
    any order of them allows."""
    orders = [()]
    for _ in range(min(most, len(case.gold))):
        grown = []
        offered = candidates_of([(case, taken) for taken in orders])
        for taken, sentences in zip(orders, offered, strict=True):
            grown += [(*taken, i) for i in sorted(case.gold.intersection(sentences))]
        if not grown:
            break
        orders = grown[:ORDERS]
    return orders[0]


def evaluate_ranking(encoder, split, cfg):
    """How gold is ranked when nothing was taken yet: em = the best sentence is gold, f1 = share of the gold
    among the candidates ("names" says so), percentile of the best gold. recall_at: share of the missing gold
    among the best 1 to 20 sentences, with 0, 1 and 2 gold ones given; recall_intervals: (mean, low, high)
    over questions, among the candidates."""
    rows, recall_at, intervals = [], {}, {}
    for given in (0, 1, 2):
        recall, among_candidates = [], []
        for case, places, count in gold_places(encoder, split.cases, given):
            missing = len(case.gold_facts) - given
            among = [sum(p < k for p in places) for k in range(1, RECALL_AT + 1)]
            recall.append([number / missing for number in among])
            among_candidates.append(sum(p < cfg.candidates for p in places) / missing)
            if given == 0:
                best = places[0] if places else count - 1
                scores = {
                    "em": float(best == 0),
                    "f1": among_candidates[-1],
                    "percentile": 1 - best / max(1, count - 1),
                }
                rows.append(about(case) | scores | {"sentences": count})
        if recall:
            recall_at[given] = [mean(column) for column in zip(*recall, strict=True)]
            intervals[given] = metrics.bootstrap_interval(among_candidates)
    names = {"em": "hit@1", "f1": f"recall@{cfg.candidates}"}
    summary = {"set": split.name, "seed": cfg.seed, "names": names}
    summary |= metrics.summarize(rows, ("em", "f1", "percentile", "sentences"))
    return rows, summary | {"recall_at": recall_at, "recall_intervals": intervals}


def gold_places(encoder, cases, given):
    """Of each case with more gold than is given: (case, places of the missing gold from 0, sentences). With
    nothing given of every case, with no place where all gold is out of reach."""
    cases = [c for c in cases if len(c.gold) > given or not given]
    texts = []
    for case in cases:
        taken = sorted(case.gold)[:given]
        texts.append(state_ids(encoder.pair_tokenizer, case, taken))
    vectors = encoder.encode_all(texts)
    for case, vector in zip(cases, vectors, strict=True):
        taken = sorted(case.gold)[:given]
        scores = case.vectors @ vector  # (sentences,)
        scores[taken] = -torch.inf
        ranked = scores.argsort(descending=True).tolist()
        missing = case.gold - set(taken)
        places = [place for place, i in enumerate(ranked) if i in missing]
        yield case, places, len(ranked)


# ---------------------------------------------------------------- figures

def draw_evaluations(folder, found):
    """recall.png of a run folder: share of the missing gold among the best 1 to 20 sentences, before training
    and after."""
    curves = {}
    for name, result in found.items():
        if "recall_at" not in result["summary"]:
            continue
        before = read_evaluation(folder.path / f"eval_{name}_before.json")
        for label, one in ((f"{name} untrained", before), (name, result)):
            rows = []
            for given, shares in one["summary"]["recall_at"].items():
                key = f"eval/{given}"
                for k, share in enumerate(shares, 1):
                    rows.append({"best sentences": k, key: share})
            curves[label] = [rows]
    if curves:
        panels = {f"{given} gold given": {f"eval/{given}": "recall"} for given in "012"}
        title = "share of the missing gold"
        report.draw_curves(curves, folder.path / "recall.png", title, panels, "best sentences")
