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
from concurrent.futures import FIRST_COMPLETED, wait

from common.engine import Generation
from common.files import Keyed, warn
from common.http_client import Threads
from common.rollout import Policy
from common.serve.chat_client import BadAnswer, Chat

CONCURRENT = 32         # requests at a time
ROLES = ("system", "user", "assistant")
UNNAMED = object()      # of servers that do not say what ended a text


def policy(cfg):
    """The rollout.Policy of --policy and --policy-model; it has no weights."""
    tokenizer = TextTokenizer()
    return Policy(None, tokenizer, ServedEngine(cfg.policy, cfg.policy_model, tokenizer))


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

class ServedEngine:
    """The interface of common/engine.py over a chat client. Log-probs are 0: nobody asks for them."""

    def __init__(self, url, model, tokenizer):
        self.chat = Chat(url, model, "--policy")
        self.tokenizer = tokenizer
        self.pending = set()
        self.kept = None
        self.threads = Threads(CONCURRENT)

    def keep(self, file):
        """From here on what was said is on file at once; what stands there is not asked for."""
        if self.kept:
            self.kept.close()
        self.kept = Keyed(file)
        self.chat.answered = self.chat.answered or bool(self.kept.known)

    def sync(self, model):
        """There are no weights to hand over."""

    def sleep(self):
        """Its memory is the server's."""

    @property
    def busy(self):
        return bool(self.pending)

    async def generate(self, prompt_ids, stop=(), max_tokens=512, temperature=1.0, seed=0):
        messages = self.tokenizer.messages(prompt_ids)
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed % 2**31}
        if stop:
            options["stop"] = list(stop)
        if messages[-1]["role"] == "assistant":
            options["extra_body"] = {"continue_final_message": True, "add_generation_prompt": False}
        answer = self.threads.submit(self.said, messages, options)
        self.pending.add(answer)
        row = await asyncio.wrap_future(answer)
        ids = self.tokenizer.said(row["text"])
        if row["stop_reason"] == "eos":
            ids.append(self.tokenizer.eos_token_id)
        return Generation(ids, [0.0] * len(ids), row["stop_reason"])

    def step(self):
        """Waits for an answer, half a second at a time: Ctrl-C reaches the loop in between."""
        _, self.pending = wait(self.pending, timeout=0.5, return_when=FIRST_COMPLETED)

    def said(self, messages, options):
        """{"text" with the stop string that ended it, "stop_reason"}, from the file or from the server. A
        prompt that is refused ends its trajectory as one without room does; where none was answered before,
        it is an error."""
        try:
            if not self.kept:
                return self.ask(messages, options)
            asked = json.dumps([self.chat.model, messages, options], sort_keys=True)
            key = hashlib.sha256(asked.encode()).hexdigest()[:24]
            return self.kept.of(key, lambda: self.ask(messages, options))
        except BadAnswer as error:
            if not self.chat.answered:
                raise
            warn(f"a prompt was refused: {error}")
            return {"text": "", "stop_reason": "length"}

    def ask(self, messages, options):
        text, choice = self.chat.choice(messages, **options)
        if choice.finish_reason == "length":
            return {"text": text, "stop_reason": "length"}
        stop = ending(text, options.get("stop", ()), getattr(choice, "stop_reason", UNNAMED))
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
