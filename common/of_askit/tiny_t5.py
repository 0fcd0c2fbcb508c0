"""How the tiny T5 was made that writes ASKiT's questions in the embedded world.

The authors begin with a T5 that had learned to ask before. So does this one: from the gold sentences of
questions in warm-up worlds, whose names change places in every row, so that it learns to copy names and not
to remember them. It lies in common/world/start/askit-plain, made by `python -m common.world make askit`.
"""

import itertools
import random

import torch
import transformers

from common import data
from common.of_askit import evidence
from common.of_askit.encoders import TASK, Writer
from common.of_askit.tiny_encoders import directions, tiny_tokenizer
from common.world import demonstrations, make_world, tiny

ROWS = 32  # a step
HOPS = (.1, .4, .1, .4)  # shares of 1 to 4 hops: three in ten questions compare, and name two


class T5Making(tiny.Making):
    """What tiny.Making is for a policy."""

    def __init__(self, steps=6000):
        vocabulary = tiny_t5_tokenizer().get_vocab()
        words = sorted(vocabulary, key=vocabulary.get)
        super().__init__(tiny.Recipe("askit", steps, flaw_rate=0.0), words, [], None, None, 0)

    def begin(self):
        tokenizer = tiny_t5_tokenizer()
        return untrained_t5(tokenizer), tokenizer

    def fingerprint(self):
        """A hash of the ids of the first three steps' rows."""
        writer = Writer(*self.begin())
        return tiny.hashed(list(itertools.islice(groups(writer), 3)))

    def learn(self, steps=None):
        model, tokenizer = self.begin()
        writer = Writer(model, tokenizer)

        def loss_of(model, rows):
            logp, mask = writer.logprobs(*zip(*rows, strict=True))  # (ROWS, T)
            return -logp.sum() / mask.sum()

        batches = itertools.islice(groups(writer), steps or self.recipe.steps)
        losses = tiny.warm_up(model, batches, self.recipe.steps, 3e-3, loss_of)
        return model, tokenizer, losses


def groups(writer):
    """Yields lists of ROWS rows (input ids, target ids) without end, the same in every run: the gold
    sentences of a question in any order, and the question."""
    cases = []
    for seed in range(4):
        made = make_world("warmup", seed, questions=1500, hop_mix=HOPS, vague=.33)
        cases += evidence.make_cases("warmup", data.load_questions(made.questions), candidates=1)[0]
    names = demonstrations.name_ids(writer.tokenizer)
    rng = random.Random(0)

    def row(case):
        gold = sorted(case.gold)
        shown = [case.texts[i] for i in rng.sample(gold, len(gold))]
        new = demonstrations.exchanged(names, rng)
        parts = writer.ids(TASK, evidence=shown), writer.ids(case.question.question)
        return [[new.get(i, i) for i in ids] for ids in parts]

    while True:
        yield [row(case) for case in rng.choices(cases, k=ROWS)]


def tiny_t5_tokenizer():
    special, words = ("<pad>", "<unk>", "<s>", "</s>"), ("generate", "question")
    return tiny_tokenizer(special, words, eos_token="</s>")


def untrained_t5(tokenizer):
    """Two layers a side. It starts out with what copying names takes, which it would otherwise spend its
    training on, and is free to change it: head 0 of the encoder notes at every token the one before it (A,
    written to B); all heads of the decoder's second layer copy what they look at (C), and head 0 looks for
    the place whose note is the token just written."""
    width = 96
    dim = width // 4
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=dim,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=tokenizer.pad_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        model = transformers.AutoModelForSeq2SeqLM.from_config(config)
        head = slice(0, dim)
        note, written = directions(dim, width), directions(dim, width)
        back = model.encoder.block[0].layer[0].SelfAttention
        back.relative_attention_bias.weight[:, 0] = 0
        back.relative_attention_bias.weight[1, 0] = 8  # the token before
        back.q.weight[head] = 0
        back.v.weight[head] = note
        back.o.weight[:, head] = 2 * written.T
        find = model.decoder.block[1].layer[1].EncDecAttention
        find.q.weight[head] = note
        find.k.weight[head] = written
        copied = directions(width, width).T  # (4 dim, width), a block a head
        find.v.weight.copy_(copied)
        find.o.weight.copy_(4 * copied.T)
    return model
