"""Encoders that read one text or a pair of texts: how a text becomes ids, batches of like length, mean
pooling, and vectors that are written once and stay as they are."""

import hashlib
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import chat
from common.files import Progress
from common.retriever import kept_vectors

SEP = " <sep> "  # between a question and what was found for it


class PairTokenizer:
    """A tokenizer's way of writing one text or a pair of texts: max_tokens for both, a quarter of them for a
    sentence, a question or a sub-question, the rest for a state."""

    def __init__(self, name, tokenizer, max_tokens):
        self.name = name
        self.tokenizer = tokenizer
        self.max_tokens = max_tokens
        self.texts = self.cut = 0  # texts that were read, and those that were cut
        self.shortened = 0  # states that left out their oldest sentences
        self.sep = self.ids(SEP, own=True)
        pair, text = tokenizer("a", "a")["input_ids"], self.ids("a")
        starts = [i for i in range(len(pair)) if pair[i:i + len(text)] == text]
        first, second = starts[0], starts[-1]
        self.before = pair[:first]  # what stands before, between and behind the two texts
        self.between = pair[first + len(text):second]
        self.behind = pair[second + len(text) :]
        self.types = "token_type_ids" in tokenizer("a", "a")

    def ids(self, text, own=False):
        """Token ids of a text, cut to its quarter. A text of others can write neither <sep> nor a special
        token."""
        ids = chat.encode(self.tokenizer, text if own else chat.Foreign(text))[1]
        limit = max(1, self.max_tokens // 4)
        self.texts += 1
        self.cut += len(ids) > limit
        return ids[:limit]

    def joined(self, parts, staying=1):
        """Ids of several texts, <sep> between them; those behind the first `staying` are left out, oldest
        first, where all together are too long (the last one stays)."""
        limit = self.max_tokens - self.max_tokens // 4 + len(self.sep)
        kept = list(parts)
        while len(kept) > max(1, staying) and sum(len(p) + len(self.sep) for p in kept) > limit:
            kept.pop(staying)
        self.shortened += len(kept) < len(parts)
        ids = list(kept[0])
        for part in kept[1:]:
            ids += self.sep + part
        return ids

    def batch(self, pairs, device):
        """input_ids, attention_mask and token types (n, T) of [(ids, ids or None)]."""
        rows, kinds = [], []
        for first, second in pairs:
            row = self.before + first
            row = row + (self.behind if second is None else self.between)
            kind = [0] * len(row)
            if second is not None:
                row = row + second + self.behind
                kind += [1] * (len(row) - len(kind))
            rows.append(row)
            kinds.append(kind)
        batch = {
            "input_ids": padded(rows, self.tokenizer.pad_token_id, device),
            "attention_mask": padded([[1] * len(row) for row in rows], 0, device),
        }
        if self.types:
            batch["token_type_ids"] = padded(kinds, 0, device)
        return batch


def padded(rows, value, device):
    """(n, longest) of lists of numbers."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=device)


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


def autocast(model, precision):
    """bf16 products where precision says so; weights and sums stay as they are."""
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


@dataclass
class Encoder:
    """A bi-encoder's half: mean of the last hidden states."""

    model: object
    pair_tokenizer: PairTokenizer
    micro_tokens: int
    precision: str = "fp32"

    @property
    def tokenizer(self):
        return self.pair_tokenizer.tokenizer

    def encode(self, ids):
        """(n, H) of lists of ids, not normalised."""
        batch = self.pair_tokenizer.batch([(i, None) for i in ids], self.model.device)
        with autocast(self.model, self.precision):
            hidden = self.model(**batch).last_hidden_state  # (n, T, H)
        mask = batch["attention_mask"][:, :, None]
        return (hidden.float() * mask).sum(1) / mask.sum(1)

    @torch.no_grad()
    def encode_all(self, ids, what=""):
        """(n, H) on the CPU; `what` names the work on the progress line."""
        vectors = torch.empty(len(ids), self.model.config.hidden_size)
        done = 0
        with Progress(what) if what else nullcontext() as progress:
            for part in in_batches(ids, len, self.micro_tokens):
                vectors[part] = self.encode([ids[i] for i in part]).cpu()
                done += len(part)
                if progress:
                    progress(done, len(ids))
        return vectors


def frozen_vectors(encoder, texts, folder):
    """(n, H) normalised vectors of lists of ids, mapped into memory from a file in `folder` that is made once
    for an encoder and its texts."""
    def make():
        return torch.nn.functional.normalize(encoder.encode_all(texts, "vectors"), dim=-1).numpy()

    return torch.from_numpy(kept_vectors(Path(folder) / f"{fingerprint(encoder, texts)}.npy", make))


def fingerprint(encoder, texts):
    """Of an encoder's weights and of lists of ids."""
    digest = hashlib.sha256(encoder.precision.encode())
    for name, weight in sorted(encoder.model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().contiguous().numpy().tobytes())
    for ids in texts:
        digest.update(np.asarray([len(ids), *ids], dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
