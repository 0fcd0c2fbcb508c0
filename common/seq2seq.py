"""A sequence-to-sequence model (T5) that writes short texts: rows, sampling, beams, log-probs of targets."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch

from common import chat
from common.encoders import SEP, in_batches, padded
from common.files import Progress

TASK = "generate question: "  # before what the authors' T5 reads

BEAMS = {
    "num_beams": 4,
    "length_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "early_stopping": True,
}


@dataclass
class Writer:
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
        return [*ids[: self.max_input - 1], self.tokenizer.eos_token_id]

    def _encoded(self, *parts):
        texts = []
        for part in parts:
            own = part in (SEP, TASK)
            texts += [" ", part.strip() if own else chat.Foreign(part.strip())]
        return chat.encode(self.tokenizer, *texts[1:])[1]

    def _beginning(self, text):
        most = self.max_input // 4
        places = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True).offset_mapping
        return text if len(places) <= most else text[: places[most - 1][1]]

    def text(self, ids):
        return self.tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def _inputs(self, inputs):
        device = self.model.device
        return {
            "input_ids": padded(inputs, self.tokenizer.pad_token_id, device),
            "attention_mask": padded([[1] * len(ids) for ids in inputs], 0, device),
        }

    @torch.no_grad()
    def write(self, inputs, what=""):
        """The texts that a beam search finds, as the authors call it; `what` shows progress."""
        found = [""] * len(inputs)
        done = 0
        with Progress(what) if what else nullcontext() as progress:
            for part in in_batches(inputs, len, self.micro_tokens // 8):
                rows = self._inputs([inputs[i] for i in part])
                rows = self.model.generate(**rows, max_new_tokens=self.max_new, **BEAMS)
                for i, row in zip(part, rows.tolist(), strict=True):
                    found[i] = self.text(row)
                done += len(part)
                if progress:
                    progress(done, len(inputs))
        return found

    @torch.no_grad()
    def sample(self, inputs, draws):
        """[(text, ids, log-probs)] at temperature 1; a row's draws come from its own random.Random."""
        found = [None] * len(inputs)
        for part in in_batches(inputs, lambda ids: len(ids) + self.max_new, self.micro_tokens):
            mine = self._sample([inputs[i] for i in part], [draws[i] for i in part])
            for i, one in zip(part, mine, strict=True):
                found[i] = one
        return found

    def _sample(self, inputs, draws):
        rows = self._inputs(inputs)
        memory = self.model.get_encoder()(**rows)
        written = [([], []) for _ in inputs]
        last = torch.full(
            (len(inputs), 1),
            self.model.config.decoder_start_token_id,
            device=self.model.device,
        )
        cache, end = None, self.tokenizer.eos_token_id
        for _ in range(self.max_new):
            out = self.model(
                encoder_outputs=memory,
                attention_mask=rows["attention_mask"],
                decoder_input_ids=last,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            logp = out.logits[:, -1].float().log_softmax(-1)  # (n, V)
            below = logp.double().exp().cumsum(-1)
            chosen = []
            for n, ((ids, logprobs), draw) in enumerate(
                zip(written, draws, strict=True)
            ):
                if ids and ids[-1] == end:
                    chosen.append(self.tokenizer.pad_token_id)
                    continue
                point = draw.random() * float(below[n, -1])
                token = min(int((below[n] <= point).sum()), below.shape[1] - 1)
                ids.append(token)
                logprobs.append(float(logp[n, token]))
                chosen.append(token)
            if all(ids[-1] == end for ids, _ in written):
                break
            last = torch.tensor(chosen, device=self.model.device)[:, None]
        return [
            (self.text(ids), tuple(ids), tuple(logprobs)) for ids, logprobs in written
        ]

    def logprobs(self, inputs, targets, model=None):
        """(log p of the targets' tokens (n, T), mask (n, T)); `model`: another than the writer's own."""
        model = model or self.model
        shifted = [[model.config.decoder_start_token_id, *ids[:-1]] for ids in targets]
        pad = self.tokenizer.pad_token_id
        logits = model(
            **self._inputs(inputs), decoder_input_ids=padded(shifted, pad, model.device)
        ).logits
        labels = padded(targets, pad, model.device)  # (n, T)
        mask = padded([[1] * len(ids) for ids in targets], 0, model.device).bool()
        logp = logits.float().log_softmax(-1).gather(-1, labels[:, :, None])[:, :, 0]
        return logp.masked_fill(~mask, 0.0), mask


def batches(rows, budget):
    """Lists of rows (input ids, target ids, …) in forward passes of about `budget` tokens."""
    parts = in_batches(rows, lambda row: len(row[0]) + len(row[1]), budget)
    return [[rows[i] for i in part] for part in parts]
