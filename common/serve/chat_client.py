"""The client of OpenAI-compatible services: a teacher, a judge, a served policy.

    chat = Chat("http://127.0.0.1:8000/v1", "deepseek-r1", "--teacher")
    chat.ask(prompt)                         -> text without thoughts; BadAnswer where this prompt gets none
    chat.asked(kept, key, prompt, read)      -> read(the text), once and for all of a prompt
    chat.choice(messages, temperature=1.0)   -> (text, openai's Choice); a prompt's ids: /v1/completions
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
from common.http_client import BROKEN
from common.rollout import stable_seed

KEY = "OPENAI_API_KEY"
TIMEOUT = 600.0       # seconds an answer: a reasoning model thinks for minutes
RETRIES = 6           # half a minute in all
START_RETRIES = 2     # before a first answer: the address may be wrong
MAX_ANSWER = 20_000   # characters, thoughts apart
SHOWN = 300           # characters of an answer that an error or a rejection keeps
NEVER_READ = 30       # answers, and none could be read: the model does not understand what is asked (ours)

REMEDY = "See that it runs and give the same command again, of a run with --resume: its answers are kept"
UNREADABLE = "unreadable JSON"
NO_ANSWER = "no answer from the teacher"


class BadAnswer(UserError):
    """Nothing usable for one prompt, though others may get it: rule (UNREADABLE or NO_ANSWER) and reason."""

    def __init__(self, rule, reason):
        super().__init__(reason)
        self.rule = rule
        self.reason = reason


class Chat:
    """url: up to and with "/v1". model: the name that the server knows it by. flag gave the address."""
    concurrency = 8   # requests at a time

    def __init__(self, url, model, flag):
        self.url = url
        self.model = model
        self.flag = flag
        self.answered = False
        self.unread = 0  # answers in a row that could not be read
        self.key = os.environ.get(KEY, "").strip()
        self.openai = openai.OpenAI(
            base_url=url,
            api_key=self.key or "none",  # the package wants one; a server of one's own looks past it
            timeout=TIMEOUT,
            http_client=http_client.connect(url, TIMEOUT, flag, RunError),
        )

    def ask(self, prompt):
        """The text of one answer, without thoughts."""
        text, _ = self.choice([{"role": "user", "content": prompt}])
        return text.rpartition("</think>")[2][:MAX_ANSWER + 1]

    def asked(self, kept, key, prompt, read):
        """read(the model's answer). One that can be read is kept (files.Keyed) and not asked for again; for
        any other BadAnswer is raised, after NEVER_READ in a row RunError."""
        def ask():
            text = self.ask(prompt)
            read(text)
            return {"text": text}

        own = stable_seed(self.model, prompt)  # of another model or prompt the key is another
        try:
            found = read(kept.of(f"{key}/{own}", ask)["text"])
        except BadAnswer as bad:
            self.unread += 1
            if self.unread >= NEVER_READ:
                raise RunError(f"{self.flag} {self.url}: {NEVER_READ} unusable answers in a row, the last: "
                               f"{bad.reason[:200]!r}. With a better one the same command goes on") from None
            raise
        self.unread = 0
        return found

    def choice(self, messages, **options):
        """(text, openai's Choice) of one answer to messages, or to the ids of a rendered prompt. Raises
        BadAnswer where the prompt is refused (too long, most often) or the answer has no text, RunError where
        the server cannot be used."""
        rendered = isinstance(messages[0], int)
        retries = RETRIES if self.answered else START_RETRIES
        answer = None
        try:
            client = self.openai.with_options(max_retries=retries)
            if rendered:
                answer = client.completions.create(model=self.model, prompt=messages, **options)
                said = answer.choices[0].text
            else:
                answer = client.chat.completions.create(model=self.model, messages=messages, **options)
                said = answer.choices[0].message.content
            choice = answer.choices[0]
            text = self.hidden(BROKEN.sub("\ufffd", said or ""))
        except openai.APIStatusError as error:
            raise self._refused(error) from None
        except openai.APIConnectionError as error:  # a time-out as well
            raise RunError(f"{self.flag}: no answer from {self.url} ({error.__cause__ or error}). {REMEDY}"
                           ) from None
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            said = self.hidden(str(answer or error))[:SHOWN]
            raise BadAnswer(NO_ANSWER, f"{self.url} answers, but not as an OpenAI-compatible service does: "
                                       f"{said!r}") from None
        self.answered = True
        return text, choice

    def _refused(self, error):
        """The exception that an HTTP status is."""
        text = self.hidden(" ".join(error.response.text.split()))
        refused = f"{self.flag}: {self.url} refused the request: HTTP {error.status_code} {text[:SHOWN]}"
        if error.status_code in (400, 413, 422):
            return BadAnswer(NO_ANSWER, refused)
        if error.status_code in (401, 403):
            refused += f" (the key is the environment variable {KEY})"
        return RunError(f"{refused}. {REMEDY}")

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
