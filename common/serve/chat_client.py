"""The client of OpenAI-compatible services: a teacher, a judge, a served policy.

    chat = Chat("http://127.0.0.1:8000/v1", "deepseek-r1", "--judge", "judge")
    chat.ask(prompt)                         -> text without thoughts; BadAnswer where this prompt gets none
    chat.choice(messages, temperature=1.0)   -> (text, openai's Choice)
    read_object(text)                        -> dict

The key comes from OPENAI_API_KEY, and is neither written nor printed. A model's words are read as JSON of a
bounded size and never evaluated.
"""

import json
import os
import re

import openai

from common import http_client
from common.files import RunError, UserError
from common.http_client import RETRIES, Unavailable

KEY = "OPENAI_API_KEY"
TIMEOUT = 600.0       # seconds an answer: a reasoning model thinks for minutes
MAX_ANSWER = 20_000   # characters, thoughts apart
SHOWN = 300           # characters of an answer that an error or a rejection keeps
NEVER_READ = 30       # answers, and none could be read: the model does not understand what is asked (ours)

UNREADABLE = "unreadable JSON"
NO_ANSWER = "no answer from the teacher"


class BadAnswer(UserError):
    """Nothing usable for one prompt, though others may get it: rule (UNREADABLE or NO_ANSWER) and reason."""

    def __init__(self, rule, reason):
        super().__init__(reason)
        self.rule = rule
        self.reason = reason


class Chat(http_client.Client):
    """url: up to and with "/v1". model: the name that the server knows it by. flag gave the address."""
    failure = RunError
    remedy = ("What it answered so far is on file: start it, or correct the address, and run the same "
              "command again, a run with --resume")
    concurrency = 8   # requests at a time

    def __init__(self, url, model, flag, what, retries=RETRIES):
        self.flag = flag
        self.what = what
        super().__init__(url, TIMEOUT, retries)
        self.model = model
        self.key = os.environ.get(KEY, "").strip()
        if not re.fullmatch(r"[!-~]*", self.key):
            raise RunError(f"{KEY}: it has spaces or signs that no key has; set it anew")
        self.openai = openai.OpenAI(
            base_url=self.url,
            api_key=self.key or "none",  # the package wants one; a server of one's own looks past it
            max_retries=0,               # `patiently` says that it waits, and Ctrl-C ends it
            http_client=self.client,
        )

    def ask(self, prompt):
        """The text of one answer, without thoughts. Raises BadAnswer where this prompt gets none though
        others do, RunError where none does."""
        answered = self.answered
        try:
            text, _ = self.choice([{"role": "user", "content": prompt}])
        except RunError as error:
            if self.answered == answered or self.cancelled.is_set():
                raise
            raise BadAnswer(NO_ANSWER, str(error)) from None
        return text.rpartition("</think>")[2][:MAX_ANSWER + 1]

    def choice(self, messages, **options):
        """(text, openai's Choice) of one answer. Raises BadAnswer where the prompt is refused (too long, most
        often) or the answer has no text, else RunError."""
        return self.patiently(lambda: self._choice(messages, options))

    def _choice(self, messages, options):
        try:
            answer = self.openai.chat.completions.create(model=self.model, messages=messages, **options)
        except openai.APIConnectionError as error:
            raise Unavailable(f"{type(error.__cause__).__name__}: {error.__cause__}") from None
        except openai.APIStatusError as error:
            text = self.hidden(" ".join(error.response.text.split()))
            raise self._meaning(error.status_code, text[:SHOWN]) from None
        except (ValueError, RecursionError):
            raise Unavailable("the answer is no JSON") from None
        if isinstance(answer, str):  # of a server that does not say that it sends JSON
            raise Unavailable(f"the answer is no JSON: {self.hidden(answer)[:SHOWN]!r}")
        try:
            choice = answer.choices[0]
            return self.text(self.hidden(choice.message.content or ""), "answers"), choice
        except (AttributeError, LookupError, TypeError):
            raise BadAnswer(NO_ANSWER, f"{self.url} answers, but not as an OpenAI-compatible service does: "
                                       f"{self.hidden(str(answer))[:SHOWN]}") from None

    def _meaning(self, status, text):
        """The exception that an HTTP status is."""
        if status >= 500 or status in (408, 425, 429):
            return Unavailable(f"HTTP {status}")
        if status in (401, 403):
            return RunError(f"{self.url}: HTTP {status}: the server wants another key: put it into the "
                            f"environment variable {KEY}")
        refused = f"{self.url} refused the request: HTTP {status} {text}"
        if status in (400, 413, 422):
            return BadAnswer(NO_ANSWER, refused)
        return RunError(refused)

    def hidden(self, text):
        """The text without the key, should a server repeat it."""
        return text.replace(self.key, f"({KEY})") if self.key else text


def read_object(text):
    """The first whole JSON object of an answer; what is said around it is looked past. Raises BadAnswer."""
    if len(text) > MAX_ANSWER:
        raise BadAnswer(UNREADABLE, f"more than {MAX_ANSWER:,} characters: {text[:SHOWN]}")
    for brace in re.finditer("{", text):
        try:
            return json.JSONDecoder().raw_decode(text, brace.start())[0]
        except (ValueError, RecursionError):
            pass
    raise BadAnswer(UNREADABLE, f"no JSON object: {text[:SHOWN]}")


def filled(prompt, **texts):
    """The prompt with {name} filled in, all at once: what a text holds is never filled in.

    >>> filled('{a} {b} {"c"}', a="{b}", b="2")
    '{b} 2 {"c"}'
    """
    names = "|".join(texts)
    return re.sub(rf"{{({names})}}", lambda found: texts[found[1]], prompt)
