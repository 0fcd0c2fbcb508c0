"""--retriever http://…: a search that another process answers, in Search-R1's form. A server that restarts is
waited for, anything else that is no answer is one clear error."""

import json
import sys
import threading
import time
from collections import Counter
from concurrent.futures import wait
from contextlib import closing

import httpx
import tenacity

from common import http_client
from common.http_client import BROKEN, Threads
from common.passages import Passage, RetrieverError, titled

TIMEOUT = 60.0         # seconds a request
RETRIES = 12           # waits of .5, 1, 2, 4, 8, 15, 15 … seconds, two minutes in all: a server's restart
LONGEST_WAIT = 15.0    # seconds
START_RETRIES = 2      # before a first answer: a wrong address must not take two minutes
MAX_QUERY = 4000       # characters: an encoder reads about 1,000 (256 tokens), servers refuse too long ones
QUERIES_A_REQUEST = 256
UNDER_WAY = 4          # requests at a time: a server joins what waits
REMEDY = ("Start one with `python -m common.serve search --corpus FILE`, or use --retriever bm25 "
          "with --corpus FILE")


class Unavailable(Exception):
    """No answer, or one that the same request may not get again."""


class HTTPRetriever:
    """Client of a server in Search-R1's form.

    What a single passage can have wrong must not end a training run: it is mended, counted in `repaired`, and
    each kind of it said once."""
    remote = True

    def __init__(self, url):
        self.url = url.rstrip("/").removesuffix("/retrieve").rstrip("/")
        self.client = http_client.connect(self.url, TIMEOUT, "--retriever", RetrieverError)
        self.answered = False
        self.repaired = Counter()
        self.counting = threading.Lock()
        self.cancelled = threading.Event()
        self.last_said = -LONGEST_WAIT
        # some servers have no /health: a search is the only check that all understand
        self._search(["health check"], 1)

    def cancel(self):
        """Ends the waiting of requests in other threads, which Ctrl-C would otherwise have to outlast."""
        self.cancelled.set()

    def search(self, queries, k):
        """At most k passages a query, best first."""
        self.cancelled.clear()
        queries = [self._query(query) for query in queries]
        size = QUERIES_A_REQUEST
        some = [queries[start:start + size] for start in range(0, len(queries), size)]
        with closing(Threads(min(UNDER_WAY, len(some)))) as threads:
            found = [threads.submit(self._search, part, k) for part in some]
            while wait(found, timeout=0.5).not_done:
                if self.cancelled.is_set():
                    raise RetrieverError("interrupted")
        return [hits for part in found for hits in part.result()]

    def _search(self, queries, k):
        """One request, again while it raises Unavailable."""
        request = {"queries": queries, "topk": k, "return_scores": True}
        retries = RETRIES if self.answered else START_RETRIES
        trying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Unavailable),
            wait=tenacity.wait_exponential(0.5, max=LONGEST_WAIT),
            stop=tenacity.stop_after_attempt(1 + retries) | tenacity.stop_when_event_set(self.cancelled),
            before_sleep=self._say_that_it_waits,
            sleep=self.cancelled.wait,
            reraise=True,
        )
        try:
            found = trying(lambda: self._parse(self._ask(request), len(queries), k))
        except Unavailable as problem:
            tries = trying.statistics["attempt_number"]
            raise RetrieverError(f"no search service at {self.url} after {tries} tries ({problem}). {REMEDY}"
                                 ) from None
        self.answered = True
        return found

    def _say_that_it_waits(self, state):
        if time.monotonic() - self.last_said >= LONGEST_WAIT:
            self.last_said = time.monotonic()
            self._say(f" does not answer ({state.outcome.exception()}); trying again")

    def _ask(self, request):
        """The JSON value of one answer. Unavailable where another try may help, else RetrieverError."""
        url = f"{self.url}/retrieve"
        try:
            reply = self.client.post(url, json=request)
        except httpx.RequestError as error:
            raise Unavailable(f"{type(error).__name__}: {error}".removesuffix(": ")) from None
        if reply.status_code >= 500 or reply.status_code in (408, 425, 429):
            raise Unavailable(f"HTTP {reply.status_code}")
        start = " ".join(reply.content[:2000].decode("utf-8", "replace").split())[:200]
        if not reply.is_success:
            raise RetrieverError(f"{url} refused the request: HTTP {reply.status_code} {start}")
        try:
            return json.loads(reply.content.decode("utf-8-sig", "surrogateescape"))
        except (ValueError, RecursionError):
            if not start or start[0] == "{":
                raise Unavailable(f"the answer breaks off after {len(reply.content)} bytes") from None
            raise RetrieverError(f"{url} answers, but not as a search service does: {start!r}. "
                                 "Is the address right?") from None

    def _parse(self, answer, expected, k):
        try:
            results = [self._passages(hits, k) for hits in answer["result"]]
        except (KeyError, TypeError, AttributeError) as error:
            said = BROKEN.sub("\ufffd", str(answer))[:300]
            raise RetrieverError(f"{self.url}/retrieve answered in another form than Search-R1's "
                                 f"({type(error).__name__}: {error}): {said}") from None
        if len(results) != expected:
            raise RetrieverError(f"{self.url}/retrieve answered {len(results)} lists for {expected} queries")
        return results

    def _passages(self, hits, k):
        self._repair("passages beyond the number asked for", len(hits) - k)
        found = []
        for hit in hits[:k]:
            document = hit.get("document", hit)
            text = document["contents"] if "contents" in document else document["text"]
            if text is None:
                self._repair("passages without contents")
                continue
            title = document.get("title")
            if not isinstance(title, str):
                title = ""
            title, text = titled(self._text(title, "passages"), self._text(text, "passages"))
            names = [document[key] for key in ("id", "_id", "docid") if document.get(key) is not None]
            name = self._text(str([*names, ""][0]), "passages")
            found.append(Passage(name, title, text, self._score(hit.get("score", 0.0))))
        return found

    def _score(self, score):
        """A number; 0.0 for what is none. Nothing but the order counts, and that is the server's."""
        if isinstance(score, (int, float)) and abs(score) < 1e300:
            return float(score)
        self._repair("scores that are no numbers")
        return 0.0

    def _query(self, query):
        self._repair(f"queries of more than {MAX_QUERY:,} characters", len(query) > MAX_QUERY)
        return self._text(query[:MAX_QUERY], "queries")

    def _text(self, text, what):
        """Without broken characters, which no tokenizer takes."""
        whole, broken = BROKEN.subn("\ufffd", text)
        self._repair(f"broken characters in {what}", broken)
        return whole

    def _repair(self, what, count=1):
        """Counts, and says each kind once."""
        if count <= 0:
            return
        with self.counting:  # answers come in several threads
            if what not in self.repaired:
                self._say(f": {what}; mended, and counted from here on")
            self.repaired[what] += int(count)

    def _say(self, words):
        print(f"search server at {self.url}{words}", file=sys.stderr, flush=True)
