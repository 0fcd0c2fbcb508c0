"""What the scorer computes: bits of texts after other texts, many at once; the embedded world's scorer; what
--stage length and shuffled reward.

terms of a reasoning step: {name: (before, ids)}, tuples of token ids, see bi_rar.terms_of. A term that
others go on from comes before them."""

import itertools
import math
import random
from pathlib import Path

import torch

from common import chat, data, distributed, rollout, training
from common import model as models
from common.files import say
from common.rollout import Trajectory, Turn


def sequences_of(terms_of_steps, line_break):
    """[Trajectory]: the sequences that all terms are read from, four for the seven of a reasoning step.

    Where a term's `before` is all of an earlier term of its step, and a line break, the term is a further
    turn behind that one: the lines Q, T, A hold K(T|Q) and K(A|Q,T). A batch computes a prompt or Turn object
    that several sequences share once."""
    first_turns = {}  # K(A|Q) and K(Q|A) are the same for all reasoning steps of a question
    sequences = []
    for terms in terms_of_steps:
        paths, ends, continued = {}, {}, set()
        for term in terms.values():
            before, ids = term
            turn = Turn(list(ids), [0.0] * len(ids), "", "", observation_ids=line_break)
            if before in ends:
                continued.add(ends[before])
                prompt, turns = paths[ends[before]]
            else:
                prompt, turns = before, []
                turn = first_turns.setdefault(term, turn)
            paths[term] = prompt, [*turns, turn]
            ends.setdefault((*before, *ids, *line_break), term)
        for term, (prompt, turns) in paths.items():
            if term not in continued:
                sequences.append(Trajectory("", list(prompt), turns))
    return sequences


@torch.no_grad()
def packed_bits(scorer, terms_of_steps, line_break, cfg):
    """{(before, ids): K(ids | before)}, from few packed batches. Of several ranks each computes a part, and
    all get all."""
    sequences = sequences_of(terms_of_steps, line_break)
    on_this_rank = []
    for batch in training.collate_parts(scorer, sequences, cfg.micro_tokens, cfg.share_prefixes):
        logprobs = models.token_logprobs(scorer, batch, 1.0)                       # (B, T)
        sums, _ = training.turn_sums(logprobs.double(), batch.response_mask, batch.turn_ids)    # (B, 2)
        bits_of_turns = sums / -math.log(2)
        for s, of_turns in zip(batch.trajectories, bits_of_turns.tolist(), strict=True):
            before = tuple(s.prompt_ids)
            for turn, bits in zip(s.turns, of_turns, strict=False):
                on_this_rank.append(((before, tuple(turn.ids)), bits))
                before += (*turn.ids, *line_break)
    return dict(distributed.gather(on_this_rank))


SCORER_STEPS = 300  # of --scorer lines


def line_scorer(cfg, start, terms_of_demonstration):
    """Folder of the tiny policy after further training on the sequences of right demonstrations: it reads
    these as Eq 3 has them. Cached, too.

    terms_of_demonstration(cfg, tokenizer, line_break, question, demo, index) -> the terms of its reasoning
    steps."""
    from common.world import hard, tiny
    recipe = {
        "script": "bi_rar, lines",
        "start": Path(start).name,
        "steps": SCORER_STEPS,
        **{key: getattr(cfg, key) for key in ("step_text", "answer_step", "top_k")},
    }

    def build():
        model, tokenizer = models.load_policy(start, 0)
        line_break = chat.encode(tokenizer, "\n")[1]

        def render(row, demo, index):
            question = data.parse_question(row)
            terms = terms_of_demonstration(cfg, tokenizer, line_break, question, demo, index)
            return sequences_of(terms, line_break)

        groups = hard.groups(tokenizer, render, tiny.bm25, SCORER_STEPS, 0.0, hard.parse(cfg.world))
        say(f"training the scorer on the lines of {8 * SCORER_STEPS} demonstrations")
        batches = (rollout.collate(group, pack_tokens=128) for group in groups)
        tiny.warm_up(model, batches, SCORER_STEPS, lr=1e-3)
        return model, tokenizer

    return distributed.first(tiny.cached_policy, recipe, build)


# ---------------------------------------------------------------- two controls, which tell what counts

SEARCH_COST = .05  # --stage length


def permuted(per_trajectory, seed):
    """--stage shuffled: lists of the same lengths, with the distances of all of them permuted at random."""
    shuffled = [d for distances in per_trajectory for d in distances]
    random.Random(seed).shuffle(shuffled)
    left = iter(shuffled)
    return [list(itertools.islice(left, len(distances))) for distances in per_trajectory]
