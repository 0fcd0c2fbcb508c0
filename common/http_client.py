"""What clients of services share.

    Threads(8).map(ask, prompts): requests side by side, which Ctrl-C does not wait for"""

import queue
import re
import threading
import time
from concurrent.futures import Future
from contextlib import suppress

import httpx

LAST_SECONDS = 3.0    # that calls under way have when the others are dropped
LOOPBACK = ("127.0.0.1", "localhost", "::1")  # which no proxy can reach
BROKEN = re.compile("[\ud800-\udfff]")        # half of a character, or a byte that is no UTF-8


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
