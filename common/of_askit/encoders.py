"""The small models of ASKiT, which no other script has: encoders that read a text or a pair of texts, and a
T5 that writes questions. cfg is askit.Config."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError

from common import chat
from common import model as models
from common.rollout import no_progress

SEP = " <sep> "  # between a question and what was found for it
TASK = "generate question: "  # before what the authors' T5 reads


# ---------------------------------------------------------------- loading

ENCODERS = {  # {what it is: its class in transformers}
    "encoder": "AutoModel",
    "action": "AutoModelForNextSentencePrediction",
    "submit": "AutoModelForQuestionAnswering",
    "question": "AutoModelForSeq2SeqLM",
}


def load(source, kind, layers=0):
    """(model, tokenizer) of a folder or hub id, with the head `kind` of ENCODERS, in fp32, without dropout;
    without a source the tiny ones of the embedded world. layers: the first so many, 0 = all. A head that the
    folder does not have is a new one, drawn from PyTorch's generator."""
    if not source:
        from common.of_askit import tiny_encoders
        if kind == "question":
            model, tokenizer = tiny_encoders.tiny_t5()
        else:
            model, tokenizer = tiny_encoders.tiny_bert(kind, ENCODERS[kind])
        return model.eval(), tokenizer
    folder = models.find_model(source)
    few = {"num_hidden_layers": layers} if layers else {}
    cls = getattr(transformers, ENCODERS[kind])

    def of_a_head(key):  # (the question's T5 has none)
        return kind != "question" and ("pooler" in key or kind != "encoder" and not key.startswith("bert."))

    try:
        # a folder of another head, or of more layers, has more
        model = models.load_whole(cls, folder, of_a_head, lambda key: True, dtype=torch.float32, **few)
    except (OSError, ValueError, SafetensorError, KeyError, RuntimeError) as error:
        raise models.load_error(source, error) from error
    model = models.unmapped(model.to(models.default_device()))
    return model.eval(), models.load_tokenizer(folder)


def load_encoder(cfg, source):
    """The Encoder of a folder or hub id, or the tiny one."""
    model, tokenizer = load(source, "encoder")
    return Encoder(model, PairTokenizer("coarse", tokenizer, cfg.max_tokens), cfg.micro_tokens, cfg.precision)


def load_scorers(cfg, source):
    """(Together of "action" and "submit", a PairTokenizer of each) of the folder of a checkpoint, or those
    that flags name."""
    folders, layers = {"action": cfg.action_model, "submit": cfg.submit_model}, cfg.fine_layers
    if layers:
        folders = dict.fromkeys(folders, cfg.encoder)
    if source:
        folders, layers = {name: Path(source) / name for name in folders}, 0
    parts = {name: load(folder, name, layers) for name, folder in folders.items()}
    tokenizers = [PairTokenizer(name, parts[name][1], cfg.max_tokens) for name in parts]
    return Together(parts), tokenizers


def load_writer(cfg, source):
    """The Writer of a folder or hub id, or the tiny one, with <sep> among its words as in the authors'
    code."""
    model, tokenizer = load(source, "question")
    ends = tokenizer.pad_token_id, tokenizer.eos_token_id, model.config.decoder_start_token_id
    if None in ends or 2 * len(tokenizer) < model.config.vocab_size:
        raise models.ModelError(f"{source}: tokenizer and model do not go together: pad, end and start are "
                                f"{ends}, {len(tokenizer)} of {model.config.vocab_size} words are known")
    if SEP.strip() not in tokenizer.get_vocab():
        tokenizer.add_tokens([SEP.strip()])
        model.resize_token_embeddings(len(tokenizer))
    return Writer(model, tokenizer, max_new=cfg.question_tokens, micro_tokens=cfg.micro_tokens)


class Together(torch.nn.ModuleDict):
    """Several models {name: (model, tokenizer)} that one optimizer trains, a folder of a checkpoint each."""

    def __init__(self, parts):
        super().__init__({name: model for name, (model, _) in parts.items()})
        self.parts = parts

    def save_pretrained(self, folder):
        for name, (model, tokenizer) in self.parts.items():
            model.save_pretrained(Path(folder) / name)
            tokenizer.save_pretrained(Path(folder) / name)


# ---------------------------------------------------------------- batches

def padded(rows, value, device):
    """(n, longest) of lists of numbers."""
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=device)


def inputs_of(rows, tokenizer, device):
    """input_ids and attention_mask (n, T) of lists of ids."""
    return {
        "input_ids": padded(rows, tokenizer.pad_token_id, device),
        "attention_mask": padded([[1] * len(row) for row in rows], 0, device),
    }


def in_batches(items, length, budget):
    """Lists of indices, items of like length together, at most `budget` tokens each."""
    batches = []
    for i in sorted(range(len(items)), key=lambda i: length(items[i])):
        if not batches or length(items[i]) * (len(batches[-1]) + 1) > budget:  # none so far is longer
            batches.append([])
        batches[-1].append(i)
    return batches


def state_batches(decisions, cfg):
    """Decisions of askit.log_policy in passes of about --micro-tokens; one costs a text per action. No
    decisions give [], since log_policy takes at least one."""
    def cost(decision):
        (case, moves), offered, *_ = decision
        question, sentences = case.tokens["action"]
        taken = sum(len(sentences[i]) + 1 for i in moves)
        length = min(cfg.max_tokens, len(question) + taken)
        return length + sum(length + len(sentences[a]) for a in offered)

    parts = in_batches(decisions, cost, cfg.micro_tokens)
    return [[decisions[i] for i in part] for part in parts]


def autocast(model, precision):
    if precision == "fp32":
        return nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


# ---------------------------------------------------------------- what reads

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
        # what stands before, between and behind the two texts of a pair
        pair, text = tokenizer("a", "a"), self.ids("a")
        ids = pair["input_ids"]
        first, second = [i for i in range(len(ids)) if ids[i:i + len(text)] == text]
        self.before = ids[:first]
        self.between = ids[first + len(text):second]
        self.behind = ids[second + len(text):]
        self.types = "token_type_ids" in pair

    def ids(self, text, own=False):
        """Token ids of a text, cut to its quarter. A text of others can write neither <sep> nor a special
        token."""
        if not own:
            text = chat.Foreign(text)
        ids = chat.encode(self.tokenizer, text)[1]
        limit = max(1, self.max_tokens // 4)
        self.texts += 1
        self.cut += len(ids) > limit
        return ids[:limit]

    def joined(self, parts, staying=1):
        """Ids of several texts, <sep> between them. Where all together are too long, those behind the first
        `staying` are left out, oldest first (the last one stays)."""
        limit = self.max_tokens - self.max_tokens // 4 + len(self.sep)
        kept = list(parts)
        while len(kept) > max(1, staying) and sum(len(p) + len(self.sep) for p in kept) > limit:
            kept.pop(staying)
        self.shortened += len(kept) < len(parts)
        ids = list(kept[0]) if kept else []
        for part in kept[1:]:
            ids += self.sep + part
        return ids

    def batch(self, pairs, device):
        """input_ids, attention_mask and token types (n, T) of [(ids, ids or None)]."""
        rows, kinds = [], []
        for first, second in pairs:
            row, rest = self.before + first, self.behind
            if second is not None:
                row, rest = row + self.between, second + rest
            rows.append(row + rest)
            side = int(second is not None)
            kinds.append([0] * len(row) + [side] * len(rest))
        batch = inputs_of(rows, self.tokenizer, device)
        if self.types:
            batch["token_type_ids"] = padded(kinds, 0, device)
        return batch


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
    def encode_all(self, ids, progress=no_progress):
        """(n, H) on the CPU."""
        vectors = torch.empty(len(ids), self.model.config.hidden_size)
        done = 0
        for part in in_batches(ids, len, self.micro_tokens):
            vectors[part] = self.encode([ids[i] for i in part]).cpu()
            done += len(part)
            progress(done, len(ids))
        return vectors


# ---------------------------------------------------------------- what writes

BEAMS = {  # as the authors call their T5
    "num_beams": 4,
    "length_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "early_stopping": True,
}


@dataclass
class Writer:
    """A T5 that writes short texts."""

    model: object
    tokenizer: object
    max_input: int = 512  # tokens of a text that are read
    max_new: int = 64  # tokens that are written, the end token included
    micro_tokens: int = 16384  # of a forward pass
    shortened: int = 0  # inputs of which something was left out

    def ids(self, *parts, evidence=()):
        """Token ids of the parts and of sentences behind them, with blanks between, and one end token. Only
        SEP and TASK are taken as our own; no other part can write a special token.

        A sentence has a quarter of max_input, and the oldest ones are left out of what is too long."""
        sentences = [self._beginning(text) for text in evidence]
        ids = self._encoded(*parts, *sentences)
        self.shortened += sentences != list(evidence) or len(ids) >= self.max_input
        while sentences and len(ids) >= self.max_input:
            del sentences[0]
            ids = self._encoded(*parts, *sentences)
        return [*ids[:self.max_input - 1], self.tokenizer.eos_token_id]

    def _encoded(self, *parts):
        texts = []
        for part in parts:
            text = part.strip()
            if part not in (SEP, TASK):
                text = chat.Foreign(text)
            texts += [" ", text]
        return chat.encode(self.tokenizer, *texts[1:])[1]

    def _beginning(self, text):
        places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        most = self.max_input // 4
        return text if len(places) <= most else text[:places[most - 1][1]]

    def text(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    @torch.no_grad()
    def write(self, inputs, progress=no_progress):
        """The texts that a beam search finds."""
        texts, done = [""] * len(inputs), 0
        for part in in_batches(inputs, len, self.micro_tokens // 8):
            batch = inputs_of([inputs[i] for i in part], self.tokenizer, self.model.device)
            rows = self.model.generate(**batch, max_new_tokens=self.max_new, **BEAMS)
            for i, row in zip(part, rows.tolist(), strict=True):
                texts[i] = self.text(row)
            done += len(part)
            progress(done, len(inputs))
        return texts

    def logprobs(self, inputs, targets):
        """(log p of the targets' tokens (n, T), mask (n, T))."""
        device, config = self.model.device, self.model.config
        shifted = [[config.decoder_start_token_id, *ids[:-1]] for ids in targets]
        shifted = padded(shifted, self.tokenizer.pad_token_id, device)
        batch = inputs_of(inputs, self.tokenizer, device)
        logits = self.model(**batch, decoder_input_ids=shifted).logits  # (n, T, V)
        labels, mask = inputs_of(targets, self.tokenizer, device).values()  # (n, T)
        logp = logits.float().log_softmax(-1).gather(-1, labels[:, :, None])[:, :, 0]
        return logp.masked_fill(mask == 0, 0.0), mask.bool()

    def batches(self, rows):
        """Lists of rows (input ids, target ids, …) in forward passes of about micro_tokens."""
        parts = in_batches(rows, lambda row: len(row[0]) + len(row[1]), self.micro_tokens)
        return [[rows[i] for i in part] for part in parts]
