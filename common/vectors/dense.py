"""--retriever dense:MODEL: the passages whose vectors are nearest to a query's."""

import functools
from pathlib import Path

from common import vectors
from common.files import UserError
from common.passages import RetrieverError, found_in
from common.vectors import sentences


@functools.cache
def encoder(model):
    """One a process: to know its weights again costs a read of them."""
    return sentences.Encoder(model)


class Nearest:
    """A few passages, all compared with every query: no index, and nothing is kept."""

    def __init__(self, corpus, model):
        self.corpus = corpus
        self.encoder = encoder(model)
        self.vectors = self.encoder.passages(corpus, range(len(corpus)))

    def search(self, queries, k):
        scores = self.encoder.queries(queries) @ self.vectors.T                     # (queries, passages)
        best = (-scores).argsort(axis=1, kind="stable")[:, :k]
        pairs = zip(best, scores, strict=True)
        return [[found_in(self.corpus[int(i)], of_query[i]) for i in row] for row, of_query in pairs]


class DenseRetriever:
    """Cosine similarity of sentence-transformers vectors in a FAISS index.

    index: a file of FAISS or a folder of ours; else a string of FAISS's factory, by default one for
    the corpus's size, whose index is made once and kept in the cache."""

    def __init__(self, corpus, model, index=""):
        self.corpus = corpus
        try:
            self.encoder = sentences.Encoder(model)
            self.path = Path(index).expanduser()
            if index and self.path.exists():
                self.index = vectors.opened(self.path, corpus, self.encoder)
            elif "/" in index or index.endswith((".index", ".faiss")):
                raise RetrieverError(f"{model}@{index}: no such file or folder")
            else:
                self.path, self.index = vectors.kept(corpus, self.encoder, index)
        except UserError as error:
            raise RetrieverError(f"--retriever dense:{error}") from error

    def search(self, queries, k):
        """At most k passages a query, best first; an approximate index may find fewer."""
        if not len(queries):
            return []
        asked = self.encoder.queries(queries)
        scores, ids = vectors.search(self.index, asked, min(k, len(self.corpus)))  # (queries, k)
        results = []
        for row in zip(scores, ids, strict=True):
            found = [(score, int(i)) for score, i in zip(*row, strict=True) if i >= 0]
            results.append([found_in(self.corpus[i], score) for score, i in found])
        return results
