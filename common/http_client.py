"""Clients of the project's servers: patience with a server that restarts, one clear error where none helps,
and a count of what had to be mended.

    class HTTPRetriever(Client): what, flag, failure and remedy word the messages
    client.patiently(lambda: …client.post("/retrieve", request)…, retries)
"""

import json
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from urllib.parse import urlparse

KEY = "OPENAI_API_KEY"  # the environment variable; its value is neither written nor printed
RETRIES = 12           # waits of .5, 1, 2, 4, 8, 15, 15 … seconds, two minutes in all: a server's restart
LONGEST_WAIT = 15.0    # seconds
START_RETRIES = 2      # of the first request: a wrong address must not take two minutes
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: no text, no tokenizer takes it


class Unavailable(Exception):
    """No answer, or one that the same request may not get again."""


class Client:
    """A loopback address never goes through a proxy.

    Waits for a server that is restarted, and says so: connection errors, time-outs, answers that break off,
    HTTP 408, 425, 429 and 5xx are tried again. Anything else that is no answer is one `failure` at once."""
    remote = True
    what = ""              # "search": what the service does
    flag = ""              # that gave the address
    failure = RuntimeError
    remedy = ""
    key = ""

    def __init__(self, url, timeout, retries):
        import httpx
        self.url = url.rstrip("/")
        try:
            host = urlparse(self.url).hostname
            httpx.URL(self.url)
        except (ValueError, httpx.InvalidURL) as error:
            raise self.failure(f"{self.flag} {url}: {error}; expected http://HOST:PORT") from None
        if not host:
            raise self.failure(f"{self.flag} {url}: no host in it; expected http://HOST:PORT")
        limits = httpx.Limits(keepalive_expiry=2.0)  # before uvicorn closes what is idle, after 5 s
        loopback = host in ("127.0.0.1", "localhost", "::1")
        self.client = httpx.Client(trust_env=not loopback, limits=limits)
        self.timeout = timeout
        self.retries = retries
        self.repaired = Counter()
        self.cancelled = threading.Event()
        self.last_said = -math.inf

    def cancel(self):
        """Ends the waiting of requests in other threads, which Ctrl-C would otherwise have to outlast."""
        self.cancelled.set()

    def patiently(self, ask, retries):
        """ask(), again where it raises Unavailable."""
        waits = [min(0.5 * 2 ** attempt, LONGEST_WAIT) for attempt in range(retries)]
        said = False
        while True:
            try:
                results = ask()
                break
            except Unavailable as error:
                problem = error
            if not waits:
                raise self.failure(f"no {self.what} service at {self.url} after {retries + 1} tries "
                                   f"({problem}). {self.remedy}")
            if time.monotonic() - self.last_said >= LONGEST_WAIT:
                self.say(f" does not answer ({problem}); trying again for up to {sum(waits):.0f} s")
                self.last_said = time.monotonic()
                said = True
            if self.cancelled.wait(waits.pop(0)):
                raise self.failure(f"gave up waiting for the {self.what} server at {self.url} ({problem})")
        if said:
            self.say(" answers again")
        return results

    def post(self, path, request):
        """The JSON value of one answer. Raises Unavailable where another try may help, `failure` where it
        cannot."""
        return self.value_of(path, self.reply_to("POST", path, request))

    def reply_to(self, method, path, request=None):
        """An answer with a status that no other try would change."""
        import httpx
        patience = httpx.Timeout(self.timeout, connect=min(self.timeout, 5.0))
        try:
            reply = self.client.request(method, self.url + path, json=request, timeout=patience)
        except httpx.RequestError as error:
            raise Unavailable(f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        if reply.status_code >= 500 or reply.status_code in (408, 425, 429):
            raise Unavailable(f"HTTP {reply.status_code}")
        return reply

    def value_of(self, path, reply):
        """The JSON value of a reply."""
        start = self.hidden(reply.content[:2000].decode("utf-8", "replace"))
        start = " ".join(start.split())[:200]
        if not reply.is_success:
            raise self.failure(f"{self.url}{path} refused the request: HTTP {reply.status_code} {start}")
        try:
            text = reply.content.decode("utf-8-sig")
        except UnicodeDecodeError:
            text = reply.content.decode("utf-8", "replace")
            self.repair("answers with bytes that are not UTF-8")
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            if not start or start[0] == "{":
                raise Unavailable(f"the answer breaks off after {len(reply.content)} bytes") from None
            raise self.failure(f"{self.url}{path} answers, but not as a {self.what} service does: {start!r}. "
                               "Is the address right?") from None

    def text(self, text, what):
        """The text without halves of characters, which are counted."""
        clean, halves = HALF_CHARACTER.subn("\ufffd", text)
        self.repair(f"halves of characters in {what}", halves)
        return clean

    def repair(self, what, count=1):
        """Counts, and says each kind once."""
        if count <= 0:
            return
        if what not in self.repaired:
            self.say(f": {what}; mended, and counted from here on")
        self.repaired[what] += int(count)

    def use_key(self):
        """Requests carry the key of the environment, if there is one."""
        self.key = os.environ.get(KEY, "").strip()
        if not re.fullmatch(r"[!-~]*", self.key):
            raise self.failure(f"{KEY}: it has spaces or signs that no key has; set it anew")
        if self.key:
            self.client.headers["Authorization"] = f"Bearer {self.key}"

    def hidden(self, text):
        """The text without the key, should a server repeat it."""
        return text.replace(self.key, f"({KEY})") if self.key else text

    def say(self, words):
        print(f"{self.what} server at {self.url}{words}", file=sys.stderr, flush=True)
