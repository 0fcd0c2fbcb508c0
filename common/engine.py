"""Generation: token ids in, token ids and log-probs out.

An engine has five methods, and agents know the first alone:

    await engine.generate(prompt_ids, stop=(…), max_tokens=…, temperature=…, seed=…) -> Generation
    engine.busy          whether anything waits or runs
    engine.step()        moves it by one token or more; the rollout loop calls it
    engine.sync(model)   the weights of `model`, now; forgets what was computed with the old ones
    engine.sleep()       gives its memory to the trainer until the next sync

`asked` is the first prompt since the last sync, with its stop strings (common/report/card.py).

There are this one, gpu/vllm_engine.py, and serve/served.py for --policy. This one batches continuously:
whoever waits joins at the next token, whoever stops leaves, and keys and values of what was read before
(earlier turns, the common start of siblings) are reused. (transformers' own `generate_batch` takes one seed
for the whole batch, and is slower on a CPU: results/notes/speed.md.)

A sample depends on (prompt, seed) alone, up to rounding: one uniform number per token, drawn from the
request's own seed, picks the token by its cumulative probability, whatever else is in the batch.

So guessing is exact: where few sequences run on a CPU, tokens that followed the same words before are read in
one pass with the last one (prompt lookup; passages are copied, some policies repeat themselves), and are kept
as far as they are what the numbers pick. A wrong guess changes nothing.
"""

import asyncio
import copy
import os
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

from common import distributed
from common.checkpoint import ModelError
from common.model import (
    attending,
    computes_in_bf16,
    computing,
    end_of_sequence,
    head_dim,
    head_rows,
    key_heads,
    positions,
)
from common.rollout import PLACE
from kernels.turn_logprob import matmul_fp32, matmul_of_bf16

BLOCK = 8        # prefixes are found at multiples of this many tokens
HEADROOM = 64    # tokens that a request must have room for to be taken up
PREFILL = 16384  # tokens of prompts that one forward pass reads, padding included; one prompt may have more
MAX_BATCH = 384  # sequences decoded together, at most
FEW = 16         # sequences that run, at most, where tokens are guessed
GUESSED = 6      # tokens of one, at most
SHARED = 64      # tokens of a common start that are worth a pass of their own
PART = 64        # tokens of the vocabulary whose probabilities are added first


@dataclass
class Generation:
    token_ids: list[int]      # as sampled, with the token that completes the stop string or ends the sequence
    logprobs: list[float]     # log pi(token), nats, at the sampling temperature
    stop_reason: str          # the stop string, "eos" or "length"


@dataclass(eq=False)
class _Request:
    prompt_ids: list[int]
    stop: tuple[str, ...]
    max_tokens: int
    temperature: float
    uniforms: np.ndarray      # (max_tokens,) one number per token
    future: asyncio.Future
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: str = ""     # empty while it runs
    tail: str = ""            # the end of the text so far, for stop strings
    place: int = field(default_factory=PLACE.get)
    guess: list[int] = field(default_factory=list)   # what may follow the last token
    seen: dict = field(default_factory=dict)         # three tokens -> where the one behind them stands
    listed: int = 3                                  # places below this one are in `seen`

    @property
    def length(self):
        return len(self.prompt_ids) + len(self.token_ids)

    def guess_next(self):
        """Sets `guess`: what followed the last time that the last three tokens stood there."""
        ids = self.prompt_ids + self.token_ids
        for place in range(self.listed, len(ids)):
            self.seen[tuple(ids[place - 3:place])] = place
        self.listed = max(3, len(ids))
        begin = self.seen.get(tuple(ids[-3:]))
        room = self.max_tokens - len(self.token_ids) - 1
        self.guess = ids[begin:begin + min(GUESSED, room)] if begin else []


class _SlotCache:
    """Keys and values as (layers, 2, slots, heads, tokens, dim). (transformers' layers call update and
    get_seq_length.)"""
    is_compileable = False

    def __init__(self, config, dtype, device):
        layers = config.num_hidden_layers
        heads, dim = key_heads(config), head_dim(config)
        self.kv = torch.zeros(layers, 2, 8, heads, 128, dim, dtype=dtype, device=device)
        self.bytes_per_token = layers * 2 * heads * dim * self.kv.element_size()

    def reserve(self, slots, tokens, used, most):
        """Grows to at least `slots` x `tokens`: slots by half, tokens by 128.

        used: (slots, tokens) that hold something. After many short sequences, few long ones would need more
        than `most` bytes: what is not used is given up first."""
        held_slots, held_tokens = self.kv.shape[2], self.kv.shape[4]
        if slots <= held_slots and tokens <= held_tokens:
            return
        tokens = -(-tokens // 128) * 128
        more_slots = max(slots, held_slots * 3 // 2) if slots > held_slots else held_slots
        more_tokens = max(tokens, held_tokens)
        if more_slots * more_tokens * self.bytes_per_token > most:
            self.kv = self.kv[:, :, :used[0], :, :used[1]].clone()
            held_slots, held_tokens = self.kv.shape[2], self.kv.shape[4]
            more_slots, more_tokens = max(slots, held_slots), max(tokens, held_tokens)
        padding = (0, 0, 0, more_tokens - held_tokens, 0, 0, 0, more_slots - held_slots)
        self.kv = torch.nn.functional.pad(self.kv, padding)

    def view(self, rows, slot, position, end):
        """The next forward pass writes its tokens at `position` in `slot`, tensors of the same shape or one
        that widens to it, and sees what is before `end` in the slots `rows`, a slice."""
        self.rows = rows
        self.slot = slot
        self.position = position
        self.end = end

    def update(self, keys, values, layer_idx, *args, **kwargs):
        held_keys = self.kv[layer_idx, 0]
        held_values = self.kv[layer_idx, 1]
        keys = keys.to(held_keys.dtype)  # a norm of fp32 weights gives fp32 keys, whatever came in
        held_keys[self.slot, :, self.position] = keys.transpose(1, 2)         # (…, heads, dim)
        held_values[self.slot, :, self.position] = values.transpose(1, 2)
        return held_keys[self.rows, :, :self.end], held_values[self.rows, :, :self.end]

    def get_seq_length(self, layer_idx=0):
        return 0


def attend(query, key, value, mask, scaling):
    """Scaled dot-product attention that reads keys and values where they lie: the query heads that share a
    key head become rows of one query, (n, key heads, group * width, dim). (transformers copies keys and
    values once for every query head.)"""
    n, heads, width, dim = query.shape
    key_heads = key.shape[1]
    group = heads // key_heads
    query = query.reshape(n, key_heads, group * width, dim)
    mask = mask.repeat(1, 1, group, 1)
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling)
    return out.reshape(n, heads, width, value.shape[-1])


def grouped_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Rows of equal width: query (n, heads, width, dim), attention_mask (n, 1, width, end)."""
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


def packed_attention(module, query, key, value, attention_mask, scaling=None, **kwargs):
    """Rows of any width behind one another, query (1, heads, T, dim), each with its own key and value (n, key
    heads, end, dim). attention_mask (n, 1, 1, 2): how many tokens a row holds, how many are its queries."""
    rows = attention_mask[:, 0, 0].tolist()
    out = []
    for i, part in enumerate(query.split([width for _, width in rows], 2)):
        held, width = rows[i]
        mask = torch.ones(1, 1, width, held + width, dtype=torch.bool).tril(held)
        keys = key[i:i + 1, :, :held + width]
        values = value[i:i + 1, :, :held + width]
        out.append(attend(part, keys, values, mask, scaling))
    return torch.cat(out, 2).transpose(1, 2).contiguous(), None


def prefills(suffixes):
    """Slices of what is read, in its order, at most PREFILL tokens each when padded to the longest.

    >>> [(rows.start, rows.stop) for rows in prefills([[7] * 9000, [7] * 7000, [7] * 2000, [7] * 20000])]
    [(0, 1), (1, 3), (3, 4)]
    """
    found, begin, widest = [], 0, 0
    for row, suffix in enumerate(suffixes):
        widest = max(widest, len(suffix))
        if row > begin and widest * (row + 1 - begin) > PREFILL:
            found.append(slice(begin, row))
            begin, widest = row, len(suffix)
    return [*found, slice(begin, len(suffixes))]


def pick(shares, uniforms):
    """(tokens (n,) drawn by uniforms (n,) from unnormalised shares (n, V), the sums of the shares (n,) fp64).
    PART tokens are added in fp32, these sums in fp64: V may be 150,000."""
    n, V = shares.shape
    whole = V - V % PART
    parts = shares[:, :whole].view(n, -1, PART).sum(-1)
    parts = torch.cat([parts, shares[:, whole:].sum(-1, keepdim=True)], 1).double().cumsum(-1)
    level = (uniforms.clamp(max=1 - 1e-9) * parts[:, -1])[:, None]            # (n, 1)
    part = torch.searchsorted(parts, level, right=True).clamp(max=parts.shape[1] - 1)
    before = torch.nn.functional.pad(parts, (1, 0)).gather(1, part)
    inside = ((level - before) / (parts.gather(1, part) - before)).clamp(max=1 - 1e-9)
    column = part * PART + torch.arange(PART, device=shares.device)           # (n, PART)
    some = shares.gather(1, column.clamp(max=V - 1)).double()
    some = torch.where(column < V, some, 0).cumsum(-1)
    at = torch.searchsorted(some, inside * some[:, -1:], right=True)
    token = column.gather(1, at.clamp(max=PART - 1))[:, 0]
    return token.clamp(max=V - 1), parts[:, -1]                               # (shares may be NaN)


def bf16_copy(model):
    """The model on bf16 copies of its linear layers' matrices; all else, the head too, is the model's own.

    (Under autocast its fp32 matrices would be rounded anew at every token.)"""
    shared = {id(p): p for p in model.parameters()}
    head = model.get_output_embeddings()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and layer is not head:
            copied = layer.weight.detach().to(torch.bfloat16)
            shared[id(layer.weight)] = torch.nn.Parameter(copied, requires_grad=False)
    return copy.deepcopy(model, shared)


class TransformersEngine:
    """Continuous batching over a Hugging Face causal LM, which may be the one that is trained.

    max_batch: sequences decoded together, at most; fewer where their keys and values at present lengths
    exceed cache_gb (twice that while they are copied): the last rows then wait, and are taken up again where
    they were. As much again holds keys and values of finished turns.
    The forward pass runs in bf16 where training's does, on a copy of the matrices in bf16 that is made once a
    sync and gone while training."""

    def __init__(self, model, tokenizer, max_batch=MAX_BATCH, cache_gb=4.0):
        from transformers import AttentionInterface  # (takes seconds, which a wrong flag need not wait for)
        AttentionInterface.register("grouped", grouped_attention)
        AttentionInterface.register("packed", packed_attention)
        self.model = model
        self.tokenizer = tokenizer
        self.device = model.device
        self.max_batch = max_batch
        self.max_length = positions(model.config)
        self.cache_bytes = cache_gb * 2**30
        self.eos = end_of_sequence(model, tokenizer)
        own_dtype = model.get_input_embeddings().weight.dtype
        self.cache_dtype = torch.bfloat16 if computes_in_bf16(model) else own_dtype
        self.waiting = []
        self.active = []
        self.cache = None
        self.pieces = {}                     # token id -> its text, for stop strings
        self.reused_tokens = 0
        self.sync(model)

    def sync(self, model):
        """An engine on the trainer's own model has its weights already; one with its own copies them."""
        self._forget_all()
        self.asked = None
        if model is not self.model:
            own = dict(self.model.named_parameters())
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    own[name].copy_(distributed.whole(tensor))

    def _forget_all(self):
        self._drop_cancelled()
        if self.busy:
            raise RuntimeError("sync or sleep while generations are running")
        self.prefixes = OrderedDict()
        self.blocks = {}
        self.prefix_bytes = 0
        self.stored = 0
        self.sampler = None                  # what decodes: the model, or its copy in bf16
        self.head = None                     # of these weights, as the products want it
        self.decode = self._decode

    def sleep(self):
        self._forget_all()
        self.cache = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _wake(self):
        """Makes what the next step needs and does not have."""
        if self.model.training:
            self.model.eval()
        if self.sampler is None:
            self.sampler = bf16_copy(self.model) if computes_in_bf16(self.model) else self.model
            head = head_rows(self.model, self.model.get_output_embeddings().weight).to(self.cache_dtype)
            self.head = head if head.is_cuda else head.float()  # a CPU's product for fp32 logits wants fp32
            if self.device.type == "cuda":
                from common.gpu.decode_graphs import Decoder
                self.decode = Decoder(self)
        if self.cache is None:
            self.cache = _SlotCache(self.model.config.get_text_config(), self.cache_dtype, self.device)

    @property
    def busy(self):
        return bool(self.waiting or self.active)

    async def generate(self, prompt_ids, stop=(), max_tokens=512, temperature=1.0, seed=0):
        """Samples until a stop string, the end of sequence, max_tokens or the model's last position (both
        "length"). temperature 0 is greedy. ModelError where the prompt leaves no position to sample."""
        if len(prompt_ids) >= self.max_length:
            raise ModelError(f"a prompt of {len(prompt_ids)} tokens; the model's positions end at "
                             f"{self.max_length}: shorten prompts or observations")
        max_tokens = min(max_tokens, self.max_length - len(prompt_ids))
        self.asked = self.asked or (list(prompt_ids), tuple(stop))
        future = asyncio.get_running_loop().create_future()
        random = np.random.Generator(np.random.Philox(seed))
        uniforms = random.random(max_tokens)
        request = _Request(list(prompt_ids), tuple(stop), max_tokens, temperature, uniforms, future)
        self.waiting.append(request)
        return await future

    @torch.no_grad()
    def step(self):
        """One token, or guesses too, for every running request; the first one for those that are admitted."""
        self._wake()
        self._drop_cancelled()
        self._make_room()
        hidden = []
        if self.active:
            hidden.append(self._go_on())
        if self.waiting:
            hidden += self._admit()
        if hidden:
            self._sample(self.active, torch.cat(hidden))
            self._retire()

    def _go_on(self):
        """Hidden states behind the last token of each active request and behind each guess of its own,
        (n, H)."""
        start = [r.length - 1 for r in self.active]
        if self.device.type == "cpu" and len(self.active) <= FEW:
            for r in self.active:
                r.guess_next()
        if not any(r.guess for r in self.active):
            return self.decode([r.token_ids[-1] for r in self.active], start)
        return torch.cat(self._read(0, [[r.token_ids[-1], *r.guess] for r in self.active], start))

    def _drop_cancelled(self):
        self.waiting = [r for r in self.waiting if not r.future.done()]
        for r in self.active:
            if r.future.done():
                r.stop_reason = "cancelled"
        self._retire()

    def _fits(self, requests, more):
        """Whether the caches of these fit into cache_gb when each has `more` tokens; one always does."""
        longest = max(r.length for r in requests) + more
        needed = len(requests) * longest * self.cache.bytes_per_token
        return len(requests) == 1 or needed <= self.cache_bytes

    def _make_room(self):
        """The last rows go back to those that wait until one more token of each fits, with its guesses. What
        they have is remembered like a finished turn, so that little is computed again."""
        while self.active and not self._fits(self.active, 1 + GUESSED):
            row = len(self.active) - 1
            r = self.active.pop()
            self._remember(r, row)
            self.waiting.insert(0, r)

    def _reserve(self, slots, tokens):
        used = max((r.length for r in self.active), default=0)
        self.cache.reserve(slots, tokens, (len(self.active), used), self.cache_bytes)

    def _decode(self, ids, start):
        """Hidden states (n, H) behind the last ids (n) of what runs, which holds start (n) tokens each."""
        end = max(start) + 1
        ids = torch.tensor(ids, device=self.device)[:, None]
        start = torch.tensor(start, device=self.device)
        return self._forward(slice(0, len(ids)), ids, start, end)[:, 0]

    def _forward(self, rows, ids, start, end):
        """Hidden states (n, width, H) of ids (n, width) that continue the slots `rows`, which hold start (n,)
        tokens each, and afterwards `end` at most."""
        slot = torch.arange(rows.start, rows.stop, device=self.device)[:, None]      # (n, 1)
        position = start[:, None] + torch.arange(ids.shape[1], device=self.device)   # (n, width)
        column = torch.arange(end, device=self.device)
        sees = column <= position[:, None, :, None]                                  # (n, 1, width, end)
        return self._pass("grouped", rows, ids, slot, position, sees, end)

    def _pass(self, attention, rows, ids, slot, position, mask, end):
        self._reserve(rows.stop, end)
        self.cache.view(rows, slot, position, end)
        with attending(self.sampler, attention), computing(self.model):
            return self.sampler.get_decoder()(
                input_ids=ids,
                attention_mask=mask,
                position_ids=position,
                past_key_values=self.cache,
                use_cache=True,
            ).last_hidden_state

    def _admit(self):
        """Prefills waiting requests into the rows after the running ones; equal prompts are computed once.

        Returns [] or [their last hidden states (n, H)]."""
        first = len(self.active)
        if self.prefix_bytes > self.cache_bytes / 4:
            # agents that were begun go on first, before their prefixes are forgotten
            self.waiting.sort(key=lambda r: r.place)
        room = 0
        while room < min(len(self.waiting), self.max_batch - first):
            if not self._fits([*self.active, *self.waiting[:room + 1]], HEADROOM):
                break
            room += 1
        if not room:
            return []
        new = self.waiting[:room]
        self.waiting = self.waiting[room:]
        unique = OrderedDict()
        for r in new:
            unique.setdefault((*r.prompt_ids, *r.token_ids), []).append(r)
        groups = list(unique.values())

        found = [self._longest_prefix(ids) for ids in unique]
        common = len(os.path.commonprefix([ids[:-1] for ids in unique]))
        if len(unique) > 1 and common >= SHARED and not any(known for known, _ in found):
            self._reserve(first + 1, common)  # what all begin with, the system message, is read once
            self._read(first, [list(next(iter(unique))[:common])], [0])
            found = [(common, self.cache.kv[:, :, first, :, :common].clone())] * len(unique)
            self.reused_tokens -= common
        start = [known for known, _ in found]
        suffixes = [list(ids[known:]) for ids, known in zip(unique, start, strict=True)]
        slices = prefills(suffixes)
        # padding counts; growing later could drop these rows, which are not active yet
        width = max(max(start[rows]) + max(map(len, suffixes[rows])) for rows in slices)
        self._reserve(first + len(new), width)
        for row, (ids, (known, kv)) in enumerate(zip(unique, found, strict=True), first):
            if known:
                self.cache.kv[:, :, row, :, :known] = kv[:, :, :, :known]
            repeats = len(unique[ids]) - 1
            self.reused_tokens += known + len(ids) * repeats
        last = torch.cat([
            torch.stack([hidden[-1] for hidden in self._read(first + s.start, suffixes[s], start[s])])
            for s in slices
        ])                                                                    # (n, H)

        order = [group[0] for group in groups]
        order += [r for group in groups for r in group[1:]]
        copies = [i for i, group in enumerate(groups) for _ in group[1:]]
        if copies:
            rows = torch.tensor(copies, device=self.device) + first
            kv = self.cache.kv
            kv[:, :, first + len(unique):first + len(order)] = kv[:, :, rows]
        self.active += order
        return [torch.cat([last, last[copies]])]

    def _read(self, row, parts, start):
        """[(width, H)] hidden states of parts, lists of ids that continue the slots from `row` on, which hold
        start tokens each."""
        read = self._packed if self.device.type == "cpu" else self._padded
        return read(row, parts, start)

    def _packed(self, row, parts, start):
        """A CPU computes no token for nothing: rows lie behind one another."""
        widths = [len(part) for part in parts]
        rows = list(zip(start, widths, strict=True))                          # [(held, width)]
        ids = torch.tensor([sum(parts, [])])                                  # (1, T), as the next two
        slot = torch.tensor([[i for i, width in enumerate(widths, row) for _ in range(width)]])
        position = torch.tensor([[held + k for held, width in rows for k in range(width)]])
        mask = torch.tensor(rows)[:, None, None]                              # (n, 1, 1, 2)
        end = max(held + width for held, width in rows)
        slots = slice(row, row + len(rows))
        return self._pass("packed", slots, ids, slot, position, mask, end)[0].split(widths)

    def _padded(self, row, parts, start):
        """A GPU computes rows of one width at once."""
        width = max(map(len, parts))
        ids = torch.tensor([part + [0] * (width - len(part)) for part in parts], device=self.device)
        end = max(start) + width
        start = torch.tensor(start, device=self.device)
        hidden = self._forward(slice(row, row + len(parts)), ids, start, end)
        return [hidden[i, :len(part)] for i, part in enumerate(parts)]

    def _sample(self, requests, hidden):
        """Appends to each request, from the last hidden states (n, H), what is drawn behind its last token,
        and behind its guesses as long as they are what is drawn. Rows of hidden: as in `requests`."""
        rows = [(r, k) for r in requests for k in range(1 + len(r.guess))]
        temperature = torch.tensor([r.temperature or 1.0 for r, _ in rows], device=self.device)
        logits = self._logits(hidden.to(self.cache_dtype)).div_(temperature[:, None])  # (n, V), fp32
        most, token = logits.max(-1)
        uniforms = [r.uniforms[len(r.token_ids) + k] for r, k in rows]
        uniforms = torch.tensor(uniforms, device=self.device, dtype=torch.double)
        drawn, total = pick((logits - most[:, None]).exp_(), uniforms)
        greedy = torch.tensor([r.temperature == 0 for r, _ in rows], device=self.device)
        token = torch.where(greedy, token, drawn)
        logprobs = (logits.gather(1, token[:, None])[:, 0] - most - total.log()).float()
        told = zip(token.tolist(), logprobs.tolist(), strict=True)
        for r in requests:
            of_request = [next(told) for _ in range(1 + len(r.guess))]
            for (t, lp), guessed in zip(of_request, [*r.guess, None], strict=True):
                r.token_ids.append(t)
                r.logprobs.append(lp)
                r.stop_reason = self._stop_reason(r)
                if r.stop_reason or t != guessed:
                    break
            r.guess = []

    def _logits(self, hidden):
        on_cpu = self.head.device.type == "cpu"
        if on_cpu and hidden.dtype == torch.bfloat16:  # the head is kept as fp32 copies of bf16 numbers
            return matmul_of_bf16(hidden.float(), self.head.T)
        return matmul_fp32(hidden.to(self.head.dtype), self.head.T)

    def _stop_reason(self, r):
        token = r.token_ids[-1]
        if token in self.eos:
            return "eos"
        if token not in self.pieces:
            self.pieces[token] = self.tokenizer.decode([token])
        longest = max(map(len, r.stop), default=0)
        r.tail = r.tail[-longest:] + self.pieces[token] if longest else ""
        for stop in r.stop:  # it may end in the middle of its token: the token is kept whole
            if self._has_stop(r, stop):
                return stop
        return "length" if len(r.token_ids) >= r.max_tokens else ""

    def _has_stop(self, r, stop):
        """Whether the text has the stop string in it. A token's own text may lack the blank before it, so
        what is found in pieces, blanks aside, is looked for in text that was decoded in one."""
        without_blanks = "".join(r.tail.split())
        if "".join(stop.split()) not in without_blanks:
            return False
        last = r.token_ids[-2 * len(stop):]  # (a token may have no text)
        return stop in self.tokenizer.decode(last)

    def _retire(self):
        """Hands finished requests back; the last row moves into each hole, so that running rows stay
        contiguous."""
        row = 0
        while row < len(self.active):
            r = self.active[row]
            if not r.stop_reason:
                row += 1
                continue
            if not r.future.done():
                self._remember(r, row)
                r.future.set_result(Generation(r.token_ids, r.logprobs, r.stop_reason))
            moved = self.active.pop()
            if moved is not r:
                self.active[row] = moved
                old_row = len(self.active)
                kv = self.cache.kv[..., :moved.length, :]
                kv[:, :, row] = kv[:, :, old_row]

    def _keys(self, ids):
        """Chained hashes of the whole blocks of ids: equal keys mean, nearly surely, an equal start."""
        key = 0
        keys = []
        for i in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = hash((key, *ids[i:i + BLOCK]))
            keys.append(key)
        return keys

    def _remember(self, r, row):
        """Keeps the keys and values of a request that leaves; the oldest go when memory is full."""
        ids = (*r.prompt_ids, *r.token_ids[:-1])
        kv = self.cache.kv[:, :, row, :, :len(ids)].clone()
        keys = self._keys(ids)
        self.stored += 1
        name = self.stored
        self.prefixes[name] = [ids, kv, len(keys)]  # the last: blocks that are found here
        self.prefix_bytes += kv.numel() * kv.element_size()
        for key in keys:
            old = self.blocks.get(key)
            if old is not None:
                self.prefixes[old][2] -= 1
                if self.prefixes[old][2] == 0:  # all of it is part of newer entries
                    self._forget(old)
            self.blocks[key] = name
        while self.prefix_bytes > self.cache_bytes:
            self._forget(next(iter(self.prefixes)))

    def _forget(self, name):
        ids, kv, _ = self.prefixes.pop(name)
        self.prefix_bytes -= kv.numel() * kv.element_size()
        for key in self._keys(ids):
            if self.blocks.get(key) == name:
                del self.blocks[key]

    def _longest_prefix(self, ids):
        """(tokens known, their keys and values); the last token is left, whose hidden state is needed."""
        keys = self._keys(ids[:-1])
        for number, key in reversed(list(enumerate(keys, 1))):
            if key in self.blocks:
                name = self.blocks[key]
                known, kv, _ = self.prefixes[name]
                n = number * BLOCK
                if known[:n] == ids[:n]:  # hashes may collide
                    self.prefixes.move_to_end(name)
                    return n, kv
        return 0, None
