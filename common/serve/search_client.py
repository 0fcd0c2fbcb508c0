"""--retriever http://…: a search that another process answers, in Search-R1's form."""

from concurrent.futures import wait
from contextlib import closing

from common import http_client
from common.http_client import BROKEN, RETRIES, Threads
from common.passages import Passage, RetrieverError, titled

MAX_QUERY = 4000       # characters: an encoder reads about 1,000 (256 tokens), servers refuse too long ones
QUERIES_A_REQUEST = 256
UNDER_WAY = 4          # requests at a time: a server joins what waits


class HTTPRetriever(http_client.Client):
    """Client of a server in Search-R1's form.

    What a single passage can have wrong must not end a training run: it is mended, counted in `repaired`, and
    each kind of it said once."""
    what = "search"
    flag = "--retriever"
    failure = RetrieverError
    remedy = ("Start one with `python -m common.serve search --corpus FILE`, or use --retriever bm25 "
              "with --corpus FILE")

    def __init__(self, url, timeout=60.0, retries=RETRIES):
        super().__init__(url.rstrip("/").removesuffix("/retrieve"), timeout, retries)
        # some servers have no /health: a search is the only check that all understand
        self._search(["health check"], 1)

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
                    raise self.failure("interrupted")
        return [hits for part in found for hits in part.result()]

    def _search(self, queries, k):
        def ask():
            request = {"queries": queries, "topk": k, "return_scores": True}
            return self._parse(self.ask("POST", "/retrieve", request), len(queries), k)

        return self.patiently(ask)

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
        self.repair("passages beyond the number asked for", len(hits) - k)
        found = []
        for hit in hits[:k]:
            document = hit.get("document", hit)
            text = document["contents"] if "contents" in document else document["text"]
            if text is None:
                self.repair("passages without contents")
                continue
            title = document.get("title")
            if not isinstance(title, str):
                title = ""
            title, text = titled(self.text(title, "passages"), self.text(text, "passages"))
            names = [document[key] for key in ("id", "_id", "docid") if document.get(key) is not None]
            name = self.text(str([*names, ""][0]), "passages")
            found.append(Passage(name, title, text, self._score(hit.get("score", 0.0))))
        return found

    def _score(self, score):
        """A number; 0.0 for what is none. Nothing but the order counts, and that is the server's."""
        if isinstance(score, (int, float)) and abs(score) < 1e300:
            return float(score)
        self.repair("scores that are no numbers")
        return 0.0

    def _query(self, query):
        self.repair(f"queries of more than {MAX_QUERY:,} characters", len(query) > MAX_QUERY)
        return self.text(query[:MAX_QUERY], "queries")
