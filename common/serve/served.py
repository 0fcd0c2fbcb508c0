"""A policy behind an OpenAI-compatible address, to be evaluated with a script's own agent, prompt, tags and
score: `python at2po.py --eval-only --policy http://127.0.0.1:8000/v1 --policy-model NAME --data …`.

Text goes in and out, so nothing can be trained on it, and no tokenizer is needed: TextTokenizer cuts text
into pieces of about four characters, and the conversation that an agent made of them is sent as messages.
What the assistant has said so far in its turn is sent as a last message to be continued, as vLLM, SGLang and
llama.cpp do (OpenAI's own service does not). Limits on tokens are therefore limits on pieces, and so are the
tokens in tables. With --policy-tokenizer the prompt is rendered here and sent as ids to /v1/completions: no
template of the server's drops a thought or refuses to go on."""

import asyncio
import hashlib
import json
import re
from concurrent.futures import FIRST_COMPLETED, wait

from common import chat
from common.engine import Generation
from common.files import Keyed, RunError, warn
from common.http_client import Threads
from common.model import load_tokenizer
from common.rollout import Policy
from common.serve.chat_client import BadAnswer, Chat

CONCURRENT = 32         # requests at a time
ROLES = ("system", "user", "assistant")
UNNAMED = object()      # of servers that do not say what ended a text
OWN_TEMPLATE = "Or give --policy-tokenizer FOLDER: prompts are then rendered here, for /v1/completions"


# what a server would else fill in from its model's generation_config.json
OWN_SAMPLING = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


def policy(cfg):
    """The rollout.Policy of --policy and --policy-model; it has no weights."""
    tokenizer = TextTokenizer()
    if cfg.policy_tokenizer:
        tokenizer = load_tokenizer(cfg.policy_tokenizer)
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
        self.in_text = isinstance(tokenizer, TextTokenizer)
        self.sampling = dict(OWN_SAMPLING)
        self.continues = False  # whether it has gone on with an assistant's message
        self.goes_on = False    # whether it has gone on behind a stop string
        self.refused = []       # prompts' reasons, of the evaluation under way
        self.told = 0           # answers in it
        self.pending = set()
        self.kept = None
        self.threads = Threads(CONCURRENT)

    def keep(self, file):
        """From here on what was said is on file at once; what stands there is not asked for."""
        if self.kept:
            self.kept.close()
        self.kept = Keyed(file)
        self.chat.answered = self.chat.answered or bool(self.kept.known)
        self.continues = self.continues or self.chat.answered  # (else the run before would have ended)
        self.refused, self.told = [], 0

    def refuse_few_answers(self):
        """RunError where most prompts of an evaluation were refused: it has measured the server."""
        if len(self.refused) > self.told:
            raise RunError(f"--policy: {len(self.refused)} of {len(self.refused) + self.told} prompts were "
                           f"refused, so this is no score; the last: {self.refused[-1]}")

    def sync(self, model):
        """There are no weights to hand over."""

    def sleep(self):
        """Its memory is the server's."""

    @property
    def busy(self):
        return bool(self.pending)

    async def generate(self, prompt_ids, stop=(), max_tokens=512, temperature=1.0, seed=0):
        messages = self.tokenizer.messages(prompt_ids) if self.in_text else list(prompt_ids)
        options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed % 2**31, "top_p": 1.0}
        if stop:
            options["stop"] = list(stop)
        answer = self.threads.submit(self.said, messages, options)
        self.pending.add(answer)
        row = await asyncio.wrap_future(answer)
        if self.in_text:
            ids = self.tokenizer.said(row["text"])
        else:
            ids = chat.encode(self.tokenizer, row["text"])[1]
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
            if self.kept:
                asked = json.dumps([self.chat.model, messages, options], sort_keys=True)
                key = hashlib.sha256(asked.encode()).hexdigest()[:24]
                row = self.kept.of(key, lambda: self.ask(messages, options))
            else:
                row = self.ask(messages, options)
        except BadAnswer as error:
            if not self.chat.answered:
                raise
            warn(f"a prompt was refused: {error}")
            self.refused.append(str(error))
            return {"text": "", "stop_reason": "length"}
        self.told += 1
        return row

    def ask(self, messages, options):
        """The same, from the server. RunError where it takes away what the agent wrote."""
        so_far, goes_on = "", {}
        if self.in_text and messages[-1]["role"] == "assistant":
            so_far = messages[-1]["content"]
            goes_on = {"continue_final_message": True, "add_generation_prompt": False}
        sampling = self.sampling
        try:
            text, choice = self.chat.choice(messages, **options, extra_body=sampling | goes_on)
        except BadAnswer:
            if sampling and not (self.chat.answered and self.sampling):  # another thread has found it out
                self.sampling = {}
                warn(f"--policy: without {', '.join(sampling)}, which this service may not know")
                return self.ask(messages, options)
            if so_far and not self.continues:
                self.see_whether_it_goes_on(options, goes_on)
            raise
        message = getattr(choice, "message", None)
        if getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None):
            raise RunError("--policy: the server takes thoughts out of its answers: start it without its "
                           f"reasoning parser. {OWN_TEMPLATE}")
        self.continues = self.continues or bool(so_far)
        if so_far:
            text = text.removeprefix(so_far)  # which some send again
        return self.read(text, choice, options.get("stop", ()))

    def see_whether_it_goes_on(self, options, goes_on):
        """RunError where even a short assistant's message is refused: then it was not the prompt's fault."""
        short = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two,"}]
        try:
            self.chat.choice(short, **options, extra_body=self.sampling | goes_on)
        except BadAnswer as error:
            raise RunError("--policy: this server does not go on with an assistant's message, as agents do "
                           f"behind a search. {OWN_TEMPLATE} ({error})") from error
        self.continues = True

    def read(self, text, choice, stops):
        ends = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        if ends:  # servers leave it out, but for some; and some go on behind it
            end, stop = min(ends)
            if text[end:].strip() and not self.goes_on:
                self.goes_on = True
                warn(f"--policy: the server goes on behind {stop}, where it is to stop: that is cut off")
            return {"text": text[:end], "stop_reason": stop}
        if choice.finish_reason == "length":
            return {"text": text, "stop_reason": "length"}
        stop = ending(text, stops, getattr(choice, "stop_reason", UNNAMED))
        return {"text": text + stop, "stop_reason": stop or "eos"}


def ending(text, stops, reason=UNNAMED):
    """The stop string that ended a text, which servers leave out of it; "" = the end of the message. reason:
    what the server names, None or the number of a token where the model ended it; where servers name nothing,
    it is the string whose tag is open at the end.

    >>> ending("<search> a", ("</search>", "</answer>")), ending("no <search>. </think> b", ("</search>",))
    ('</search>', '')
    >>> ending("<search> a", ("</search>", "</answer>"), None)
    ''
    """
    if reason is not UNNAMED:
        return reason if reason in stops else ""
    for stop in stops:
        opening = stop.replace("</", "<")
        if opening != stop and opening in text and "</" not in text.rpartition(opening)[2]:
            return stop
    return ""
