"""A patient client of JSON services: a server that restarts is waited for, anything else that is no answer is
one clear error, and what had to be mended is counted.

    class HTTPRetriever(Client): what, flag, failure and remedy word the messages
    Threads(8).map(ask, prompts): requests side by side, which Ctrl-C does not wait for"""

import json
import queue
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future
from contextlib import suppress

import httpx
import tenacity

from common.files import UserError

RETRIES = 12          # waits of .5, 1, 2, 4, 8, 15, 15 … seconds, two minutes in all: a server's restart
LONGEST_WAIT = 15.0   # seconds
START_RETRIES = 2     # before a first answer: a wrong address must not take two minutes
LAST_SECONDS = 3.0    # that calls under way have when the others are dropped
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # which no proxy can reach
BROKEN = re.compile("[\ud800-\udfff]")        # half of a character, or a byte that is no UTF-8


class Unavailable(Exception):
    """No answer, or one that the same request may not get again."""


def connect(url, timeout, flag, failure):
    """An httpx.Client for the address that a flag gave; `failure` where it is none."""
    try:
        host = httpx.URL(url).host
    except httpx.InvalidURL:
        host = ""
    if not host:
        raise failure(f"{flag} {url}: this is no address; expected http://HOST:PORT")
    return httpx.Client(
        trust_env=host not in LOOPBACK,
        timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
        limits=httpx.Limits(keepalive_expiry=2.0),  # before uvicorn closes what is idle, after 5 s
    )


class Threads:
    """Runs calls side by side in threads that end with the program: Ctrl-C does not wait for a server that
    hangs, as it would for those of ThreadPoolExecutor."""

    def __init__(self, count):
        self.calls = queue.SimpleQueue()  # (future, function, arguments), and None for each thread at the end
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(count)]
        for thread in self.threads:
            thread.start()

    def _work(self):
        while call := self.calls.get():
            future, function, arguments = call
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:  # to whoever waits for the result
                    future.set_exception(error)

    def submit(self, function, *arguments):
        """The Future of one call."""
        future = Future()
        self.calls.put((future, function, arguments))
        return future

    def map(self, function, items):
        """The results, in order."""
        futures = [self.submit(function, item) for item in items]
        return (future.result() for future in futures)

    def close(self):
        """Drops the calls that have not begun; those under way have LAST_SECONDS to end."""
        with suppress(queue.Empty):
            while True:
                self.calls.get_nowait()
        for _ in self.threads:
            self.calls.put(None)
        end = time.monotonic() + LAST_SECONDS
        for thread in self.threads:
            thread.join(max(0, end - time.monotonic()))


class Client:
    """timeout: seconds per request. repaired: {what was mended: how often}."""
    remote = True
    what = ""             # "search": what the service does
    flag = ""             # that gave the address
    failure = UserError
    remedy = ""

    def __init__(self, url, timeout, retries):
        self.url = url.rstrip("/")
        self.client = connect(self.url, timeout, self.flag, self.failure)
        self.retries = retries
        self.answered = False
        self.repaired = Counter()
        self.counting = threading.Lock()
        self.cancelled = threading.Event()
        self.last_said = -LONGEST_WAIT

    def cancel(self):
        """Ends the waiting of requests in other threads, which Ctrl-C would otherwise have to outlast."""
        self.cancelled.set()

    def patiently(self, ask):
        """ask(), again while it raises Unavailable; then `failure`."""
        retries = self.retries
        if not self.answered:
            retries = min(retries, START_RETRIES)
        trying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            wait=tenacity.wait_exponential(0.5, max=LONGEST_WAIT),
            stop=tenacity.stop_after_attempt(1 + retries) | tenacity.stop_when_event_set(self.cancelled),
            before_sleep=self._say_that_it_waits,
            sleep=self.cancelled.wait,
            reraise=True,
        )
        try:
            value = trying(ask)
        except Unavailable as problem:
            tries = trying.statistics["attempt_number"]
            raise self.failure(f"no {self.what} service at {self.url} after {tries} tries ({problem}). "
                               f"{self.remedy}") from None
        self.answered = True
        return value

    def _say_that_it_waits(self, state):
        if time.monotonic() - self.last_said >= LONGEST_WAIT:
            self.last_said = time.monotonic()
            self.say(f" does not answer ({state.outcome.exception()}); trying again")

    def ask(self, method, path, request=None):
        """The JSON value of one answer. Raises Unavailable where another try may help, `failure` where it
        cannot."""
        try:
            reply = self.client.request(method, self.url + path, json=request)
        except httpx.RequestError as error:
            raise Unavailable(f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        if reply.status_code >= 500 or reply.status_code in (408, 425, 429):
            raise Unavailable(f"HTTP {reply.status_code}")
        start = " ".join(reply.content[:2000].decode("utf-8", "replace").split())[:200]
        if not reply.is_success:
            raise self.failure(f"{self.url}{path} refused the request: HTTP {reply.status_code} {start}")
        try:
            return json.loads(reply.content.decode("utf-8-sig", "surrogateescape"))
        except (ValueError, RecursionError):
            if not start or start[0] == "{":
                raise Unavailable(f"the answer breaks off after {len(reply.content)} bytes") from None
            raise self.failure(f"{self.url}{path} answers, but not as a {self.what} service does: {start!r}. "
                               "Is the address right?") from None

    def text(self, text, what):
        """Without broken characters, which no tokenizer takes."""
        whole, broken = BROKEN.subn("\ufffd", text)
        self.repair(f"broken characters in {what}", broken)
        return whole

    def repair(self, what, count=1):
        """Counts, and says each kind once."""
        if count <= 0:
            return
        with self.counting:  # answers come in several threads
            if what not in self.repaired:
                self.say(f": {what}; mended, and counted from here on")
            self.repaired[what] += int(count)

    def say(self, words):
        print(f"{self.what} server at {self.url}{words}", file=sys.stderr, flush=True)
