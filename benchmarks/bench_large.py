"""All of an AT2PO step that is not the model, at the paper's size: seconds and memory, by part.

    OMP_NUM_THREADS=1 python -m benchmarks.bench_large [--questions 64 128 256 512]
    … --corpus corpus.jsonl --tokenizer FOLDER      passages of a corpus, in the pieces of a real tokenizer

at2po's own code runs a step: it grows trees of 22 leaves, assigns credit, packs and collates, takes the loss,
meters, and makes the page's record. Three things are made up. The engine hands back ids at once: an answer
with probability .2 a turn, of about 125 tokens. The search hands back passages drawn from --corpus; without
one they are of made-up words, their characters normal(640, 120), cut to 100 … 1,000, which is about 450
tokens of three. The model is one weight. The tokenizer, where none is given, is a byte-level BPE that is
trained on such words.

Each size runs in a process of its own. Seconds are of CPU; those of the engine, the search and the model are
left out. Memory is how far a part raised the peak of resident memory. The exponent is the slope of log cost
over log questions: 1 = linear. The last rows compare with the time that the model takes for these packed
tokens on an H100 (Qwen3-4B's shape, benchmarks/bench_gpu.py); its rollout, far longer, is not counted.
"""

import argparse
import asyncio
import functools
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerFast

import at2po
from benchmarks.bench_kernels import markdown, versions
from common import chat, rollout, training
from common import model as models
from common.data import Question, Split, load_corpus
from common.engine import Generation
from common.gpu.tree_attention import block_mask, padded_length
from common.of_at2po import trees
from common.retriever import Passage
from common.rollout import Policy
from common.run import Run

# of Qwen3-4B on an H100: old log-probs, then forward and backward, of 24,000 packed tokens
GPU_SECONDS_A_TOKEN = (.74 + 3.0) / 24_000
LIMIT = .05                # of the GPU's time, for all that is not the model
MADE_UP = "made up"        # the part that is left out
ANSWERS = .2               # probability that a turn answers
CORRECT = .4               # and that the answer is right
PARTS = (  # name, who has the function, its name
    ("texts to ids", chat, "encode"),
    ("trees", at2po, "rollout_trees"),
    ("reward", at2po, "score"),
    ("credit", at2po, "assign_advantages"),
    ("packing order", training, "portions"),
    ("packing order", training, "micro_batches"),
    ("collate", training, "collate"),
    ("collate", rollout, "collate"),
    ("masks", sys.modules[__name__], "block_mask"),
    ("loss", models, "by_token"),
    ("loss", at2po, "policy_loss"),
    ("loss", at2po, "update_spread"),
    ("loss", torch.Tensor, "backward"),
    ("meter", training.Meter, "__init__"),
    ("meter", training.Meter, "add"),
    ("meter", training.Meter, "end_update"),
    ("meter", training.Meter, "means"),
    ("metrics", trees, "rollout_metrics"),
    ("record", trees, "sample_record"),
)


# ---------------------------------------------------------------- seconds and memory

class Stopwatch:
    """CPU seconds of parts, and MB by which they raised the process's peak; what runs inside another part is
    its own alone."""

    def __init__(self):
        self.seconds = Counter()
        self.megabytes = Counter()
        self.open = []
        self.since = time.process_time()
        self.peak = peak_mb()

    def charge(self):
        """What went by since the last call, to the innermost part."""
        now = time.process_time()
        peak = peak_mb()
        if self.open:
            self.seconds[self.open[-1]] += now - self.since
            self.megabytes[self.open[-1]] += peak - self.peak
        self.since = now
        self.peak = peak

    @contextmanager
    def part(self, name):
        self.charge()
        self.open.append(name)
        yield
        self.charge()
        self.open.pop()

    def timed(self, name, function):
        @functools.wraps(function)
        def inner(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)
        return inner


def peak_mb():
    """Largest resident memory of this process so far (Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---------------------------------------------------------------- what is made up

def made_up_text(random, words):
    """Words of one to four syllables, drawn by Zipf's law, with commas and full stops."""
    syllables = [c + v for c in "bdfghklmnprst" for v in "aeiou"]
    vocabulary = ["".join(random.choices(syllables, k=random.randint(1, 4))) for _ in range(5000)]
    weights = [1 / (rank + 1) for rank in range(len(vocabulary))]
    drawn = random.choices(vocabulary, weights, k=words)
    marks = random.choices(["", ",", "."], [12, 1, 1], k=words)
    return " ".join(word + mark for word, mark in zip(drawn, marks, strict=True))


def bpe_tokenizer(text):
    """Byte-level BPE of 2,500 pieces, with ChatML's template."""
    special = ["<|im_start|>", "<|im_end|>"]
    core = ByteLevelBPETokenizer()
    core.train_from_iterator(
        [text, at2po.SYSTEM_PROMPT], vocab_size=2500, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core._tokenizer, eos_token=special[1], pad_token=special[1])
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n")
    return tokenizer


class InstantEngine:
    """Answers whoever waits, at once."""

    def __init__(self, tokenizer, text, watch):
        self.watch = watch
        self.waiting = []

        def ids(text):
            return tokenizer(text, add_special_tokens=False)["input_ids"]

        self.words = np.array(ids(text[:200_000]))
        self.logprobs = -np.random.default_rng(0).exponential(.5, len(self.words))
        self.think = ids("<think>")
        self.search = ids("</think> <search>")
        self.searched = ids("</search>")
        self.answers = {}
        for answer in ("right", "wrong"):
            ending = f"</think> <answer>It is \\[ \\boxed{{{answer}}} \\]</answer>"
            self.answers[answer] = [*ids(ending), tokenizer.eos_token_id]

    @property
    def busy(self):
        return bool(self.waiting)

    def sync(self, model):
        pass

    def sleep(self):
        pass

    async def generate(self, prompt_ids, stop, max_tokens, temperature, seed):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((prompt_ids, max_tokens, seed, future))
        return await future

    def step(self):
        with self.watch.part(MADE_UP):
            waiting = self.waiting
            self.waiting = []
            for _, room, seed, future in waiting:
                future.set_result(self.turn(Random(seed), room))

    def turn(self, random, room):
        """A turn that depends on the seed alone."""
        n = min(300, max(20, round(random.gauss(95, 35))))
        ids = self.think + self.drawn(random, self.words, n)
        if random.random() < ANSWERS:
            ids += self.answers["right" if random.random() < CORRECT else "wrong"]
            stop_reason = "eos"
        else:
            ids += self.search + self.drawn(random, self.words, 8) + self.searched
            stop_reason = at2po.SEARCH[1]
        if len(ids) > room:
            ids = ids[:room]
            stop_reason = "length"
        return Generation(ids, self.drawn(random, self.logprobs, len(ids)), stop_reason)

    @staticmethod
    def drawn(random, numbers, n):
        """n of them from anywhere on, as objects of their own."""
        start = random.randrange(len(numbers) - n)
        return numbers[start:start + n].tolist()


class InstantSearch:
    """Passages of a corpus, or of made-up words."""

    def __init__(self, text, watch, passages=()):
        self.text = text
        self.watch = watch
        self.passages = passages

    def search(self, queries, k):
        with self.watch.part(MADE_UP):
            return [[self.passage(Random(f"{query} {i}")) for i in range(k)] for query in queries]

    def passage(self, random):
        if self.passages:
            drawn = self.passages[random.randrange(len(self.passages))]
            return Passage(drawn["id"], drawn["title"], drawn["text"])
        length = min(1000, max(100, round(random.gauss(640, 120))))
        start = random.randrange(len(self.text) - length)
        return Passage(str(start), self.text[start:start + 20], self.text[start:start + length])


class OneWeight(torch.nn.Module):
    """As much of a model as an update asks for."""
    device = torch.device("cpu")
    config = PretrainedConfig(hidden_size=4096)

    def __init__(self):
        super().__init__()
        self.logprob = torch.nn.Parameter(torch.tensor(-.5))
        self.trained_tokens = 0

    def token_logprobs(self, model, batch, temperature=1.0, hidden=None):
        """What stands around the model's forward pass: the mask before it, and behind it (B, T) of the
        log-probs of its distinct tokens, all of which are the one weight."""
        block_mask(batch.end, padded_length(batch.end.shape[1]))
        if torch.is_grad_enabled():
            self.trained_tokens += batch.tokens
        return models.by_token(self.logprob.expand(len(batch.target)), batch)


# ---------------------------------------------------------------- a step

def a_step(cfg, policy, retriever, questions, folder):
    """A step of at2po.train, without what run.steps does behind it but for the record of its trees."""
    row = {}
    grown = []
    grow = at2po.rollout_trees

    def kept(*args):
        grown.extend(grow(*args))
        return grown

    def one_step(*_, **__):
        yield 1, row
        with open(Path(folder) / "samples.jsonl", "w") as f:
            f.write(json.dumps(row["sample"]))

    cfg = replace(cfg, questions_per_step=len(questions))
    sampling = functools.partial(Run.sampling, None)
    run = SimpleNamespace(cfg=cfg, steps=one_step, sampling=sampling)
    with patch.object(at2po, "rollout_trees", kept):
        at2po.train(run, policy, None, Split("made up", questions, retriever))
    return grown, row


def measure(number, corpus=None, tokenizer=None, **fields):
    """{"seconds": {part: …}, "megabytes": {part: …}, and what the step was} of so many questions. corpus: a
    file; tokenizer: a folder."""
    torch.set_num_threads(1)
    cfg = at2po.parse_args(["--model", "made-up", "--data", "made-up"])
    cfg = replace(cfg, **fields)
    text = made_up_text(Random(0), 100_000)
    if tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    else:
        tokenizer = bpe_tokenizer(text[:200_000])
    passages = load_corpus(corpus) if corpus else ()
    watch = Stopwatch()
    model = OneWeight()
    policy = Policy(model, tokenizer, InstantEngine(tokenizer, text, watch))
    retriever = InstantSearch(text, watch, passages)
    questions = [Question(str(i), text[100 * i:100 * i + 90], ["right"]) for i in range(number)]
    with ExitStack() as patches, tempfile.TemporaryDirectory() as folder:
        for owner in (models, training):
            patches.enter_context(patch.object(owner, "token_logprobs", model.token_logprobs))
        a_step(cfg, policy, retriever, questions[:1], folder)  # what only the first step does
        model.trained_tokens = 0
        for name, owner, function in PARTS:
            timed = watch.timed(name, getattr(owner, function))
            patches.enter_context(patch.object(owner, function, timed))
        decode = watch.timed("ids to texts", tokenizer.decode)
        patches.enter_context(patch.object(tokenizer, "decode", decode))
        with watch.part("the rest of the update"):
            roots, row = a_step(cfg, policy, retriever, questions, folder)
    turns = [node.turn for root in roots for node in root.nodes()[1:]]
    observed = [len(t.observation_ids) for t in turns if t.observation_ids]
    return {
        "seconds": {name: s for name, s in watch.seconds.items() if name != MADE_UP},
        "megabytes": {name: mb for name, mb in watch.megabytes.items() if name != MADE_UP},
        "trajectories": row["rollout/leaves"],
        "turns a trajectory": row["rollout/turns"],
        "sampled tokens a turn": rollout.mean(len(t.ids) for t in turns),
        "observed tokens a search": rollout.mean(observed),
        "packed tokens": model.trained_tokens,
        "updates": row["train/updates"],
    }


# ---------------------------------------------------------------- tables

def exponent(sizes, costs):
    """Slope of log cost over log size, by least squares.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    if len(sizes) < 2 or min(costs) <= 0:
        return None
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def table(results, kind):
    """Markdown: a row a part, a column a size, the exponent; the costliest first."""
    sizes = list(results)
    largest = results[sizes[-1]][kind]
    rows = []
    for part in sorted(largest, key=largest.get, reverse=True):
        costs = [results[size][kind].get(part, 0.0) for size in sizes]
        rows.append((part, costs))
    rows.append(("**together**", [sum(results[size][kind].values()) for size in sizes]))
    shown = []
    for part, costs in rows:
        row = {kind: part} | {str(size): cost for size, cost in zip(sizes, costs, strict=True)}
        shown.append(row | {"exponent": exponent(sizes, costs)})
    return markdown(shown, (kind, *map(str, sizes), "exponent"))


def against_gpu(results):
    """Markdown: what the steps were, and how they compare with the GPU's time."""
    rows = []
    for size, result in results.items():
        seconds = sum(result["seconds"].values())
        on_gpu = result["packed tokens"] * GPU_SECONDS_A_TOKEN
        about = {name: value for name, value in result.items() if name not in ("seconds", "megabytes")}
        ratio = seconds / on_gpu
        verdict = "below" if ratio < LIMIT else "above"
        rows.append({
            "questions": size, **about,
            "s of the model on a GPU": on_gpu, "of that, %": 100 * ratio, f"limit {LIMIT:.0%}": verdict,
        })
    return markdown(rows, tuple(rows[0]))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", nargs="+", type=int, default=[64, 128, 256, 512])
    parser.add_argument("--corpus", help="a file of passages; without one they are made up")
    parser.add_argument("--tokenizer", help="a folder; without one it is made from made-up words")
    parser.add_argument("--out", type=Path, help="JSON of all numbers, written after each size")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    results = {}
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        of_size = functools.partial(measure, corpus=args.corpus, tokenizer=args.tokenizer)
        for size, result in zip(args.questions, pool.map(of_size, args.questions), strict=True):
            results[size] = result
            if args.out:
                args.out.write_text(json.dumps(results, indent=1))
            print(f"{size} questions: {sum(result['seconds'].values()):.1f} CPU s", file=sys.stderr)
    print(versions())
    for kind in ("seconds", "megabytes"):
        print(f"\n{table(results, kind)}")
    print(f"\n{against_gpu(results)}")


if __name__ == "__main__":
    main()
