"""A policy behind an OpenAI-compatible address, to be evaluated with a script's own agent, prompt, tags and
score: `python at2po.py --eval-only --policy http://127.0.0.1:8000/v1 --policy-model NAME --data …`.

Text goes in and out, so nothing can be trained on it, and no tokenizer is needed: TextTokenizer cuts text
into pieces of about four characters, and the conversation that an agent made of them is sent as messages.
What the assistant has said so far in its turn is sent as a last message to be continued, as vLLM, SGLang and
llama.cpp do (OpenAI's own service does not). Limits on tokens are therefore limits on pieces, and so are the
tokens in tables."""

import asyncio
import hashlib
import json
import re
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from common import http_client
from common.engine import Generation
from common.files import Keyed, RunError, warn
from common.http_client import KEY
from common.rollout import Policy

CONCURRENT = 32         # requests at a time
TIMEOUT = 600.0         # seconds an answer
REFUSED = (400, 413, 422)
ROLES = ("system", "user", "assistant")
UNNAMED = object()      # of servers that do not say what ended a text


def policy(cfg):
    """The rollout.Policy of --policy and --policy-model; it has no weights."""
    tokenizer = TextTokenizer()
    return Policy(None, tokenizer, ServedEngine(cfg.policy, cfg.policy_model, tokenizer, cfg.search_retries))


# ---------------------------------------------------------------- text as ids

class TextTokenizer:
    """Ids of pieces of text, given out as they come; joined the pieces are the text. Marks of roles are
    tokens of their own, which foreign text cannot write (common/chat.py)."""
    END = "<|end|>"
    PIECES = re.compile(r"\s?[^\W\d_]{1,5}|\s?\d{1,3}|.", re.DOTALL)

    def __init__(self):
        self.marks = [f"<|{role}|>" for role in ROLES] + [self.END]
        self.all_special_tokens = self.marks
        self.unk_token = self.unk_token_id = None
        self.eos_token = self.END
        self.pieces = list(self.marks)
        self.ids = {piece: i for i, piece in enumerate(self.pieces)}
        self.eos_token_id = self.pad_token_id = self.ids[self.END]

    def get_added_vocab(self):
        return {mark: self.ids[mark] for mark in self.marks}

    def convert_tokens_to_ids(self, piece):
        return self.ids[piece]

    def __call__(self, text, add_special_tokens=False):
        found = []
        for part in re.split("(" + "|".join(map(re.escape, self.marks)) + ")", text):
            found += [self.ids[part]] if part in self.marks else self.said(part)
        return {"input_ids": found}

    def said(self, text):
        """Ids of what a model said, in which a mark is text like any other."""
        found = []
        for piece in self.PIECES.findall(text):
            if piece not in self.ids:
                self.ids[piece] = len(self.pieces)
                self.pieces.append(piece)
            found.append(self.ids[piece])
        return found

    def decode(self, ids, skip_special_tokens=False):
        first = len(self.marks) if skip_special_tokens else 0
        return "".join(self.pieces[i] for i in ids if i >= first)

    def apply_chat_template(self, messages, **how):
        written = [f"<|{m['role']}|>{m['content']}{self.END}" for m in messages]
        return "".join(written) + "<|assistant|>"

    def messages(self, ids):
        """[{"role", "content"}] of a prompt and what was said since; a last assistant's message without its
        end is there only if it has begun."""
        messages = []
        for i in ids:
            piece = self.pieces[i]
            if piece == self.END:
                continue
            if i < len(ROLES):
                messages.append({"role": ROLES[i], "content": ""})
            else:
                messages[-1]["content"] += piece
        if messages[-1]["role"] == "assistant" and not messages[-1]["content"]:
            messages.pop()
        return messages


# ---------------------------------------------------------------- engine

class ServedEngine(http_client.Client):
    """The interface of common/engine.py over POST {url}/chat/completions. Log-probs are 0: nobody asks for
    them."""
    what = "language model"
    flag = "--policy"
    failure = RunError
    remedy = "Start it, or correct the address; --resume asks for nothing twice"

    def __init__(self, url, model, tokenizer, retries):
        super().__init__(url, TIMEOUT, retries)
        self.model = model
        self.tokenizer = tokenizer
        self.pool = ThreadPoolExecutor(CONCURRENT)
        self.pending = {}   # the thread's future: the agent's
        self.kept = None
        self.answered = 0
        self.use_key()

    def keep(self, file):
        """From here on what was said is on file at once; what stands there is not asked for."""
        if self.kept:
            self.kept.close()
        self.kept = Keyed(file)
        self.answered += len(self.kept.known)

    def sync(self, model):
        """There are no weights to hand over."""
        self.cancelled.clear()

    def sleep(self):
        """Its memory is the server's."""

    @property
    def busy(self):
        return bool(self.pending)

    async def generate(self, prompt_ids, stop=(), max_tokens=512, temperature=1.0, seed=0):
        request = {
            "model": self.model,
            "messages": self.tokenizer.messages(prompt_ids),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed % 2**31,
        }
        if stop:
            request["stop"] = list(stop)
        if request["messages"][-1]["role"] == "assistant":
            request |= {"continue_final_message": True, "add_generation_prompt": False}
        future = asyncio.get_running_loop().create_future()
        self.pending[self.pool.submit(self.said, request)] = future
        text, reason = await future
        ids = self.tokenizer.said(text)
        if reason == "eos":
            ids.append(self.tokenizer.eos_token_id)
        return Generation(ids, [0.0] * len(ids), reason)

    def step(self):
        """Waits for an answer."""
        done, _ = wait(self.pending, return_when=FIRST_COMPLETED)
        for asked in done:
            future = self.pending.pop(asked)
            if future.done():
                continue
            if asked.exception():
                future.set_exception(asked.exception())
            else:
                future.set_result(asked.result())

    def said(self, request):
        """(text with the stop string that ended it, stop reason), from the file or from the server."""
        key = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:24]
        row = self.kept.get(key) if self.kept else None
        if row is None:
            row = {"key": key} | self.asked(request)
            if self.kept and not row.get("refused"):
                self.kept.add(row)
        return row["text"], row["stop_reason"]

    def asked(self, request):
        """{"text", "stop_reason"} of one answer. A prompt that is refused (too long, most often) ends its
        trajectory as one without room does; RunError where none was answered before."""
        path = "/chat/completions"
        retries = self.retries if self.answered else min(self.retries, http_client.START_RETRIES)
        reply = self.patiently(lambda: self.reply_to("POST", path, request), retries)
        if reply.status_code in (401, 403):
            raise RunError(f"{self.url}{path}: HTTP {reply.status_code}: the server wants another key: "
                           f"put it into the environment variable {KEY}")
        if reply.status_code in REFUSED and self.answered:
            warn(f"a prompt was refused (HTTP {reply.status_code}): {self.hidden(reply.text)[:200]}")
            return {"text": "", "stop_reason": "length", "refused": True}
        value = self.value_of(path, reply)
        try:
            choice = value["choices"][0]
            text = choice["message"]["content"] or ""
            finish = choice.get("finish_reason")
            reason = choice.get("stop_reason", UNNAMED)
        except (TypeError, LookupError, AttributeError):
            text = None
        if not isinstance(text, str):
            shown = self.hidden(json.dumps(value))[:200]
            raise RunError(f"{self.url}{path} answers, but not as an OpenAI-compatible service does: {shown}")
        self.answered += 1
        text = self.text(self.hidden(text), "answers")
        if finish == "length":
            return {"text": text, "stop_reason": "length"}
        stop = ending(text, request.get("stop", ()), reason)
        return {"text": text + stop, "stop_reason": stop or "eos"}


def ending(text, stops, reason=UNNAMED):
    """The stop string that ended a text, which servers leave out of it; "" = the end of the message. reason:
    what the server names, None or the number of a token where the model ended it; where servers name nothing,
    it is the string whose tag is open.

    >>> ending("<search> a", ("</search>", "</answer>")), ending("<answer> b </answer>", ("</answer>",))
    ('</search>', '')
    >>> ending("<search> a", ("</search>", "</answer>"), None)
    ''
    """
    if reason is not UNNAMED:
        return reason if reason in stops else ""
    for stop in stops:
        opening = stop.replace("</", "<")
        if opening != stop and text.count(opening) > text.count(stop):
            return stop
    return ""
