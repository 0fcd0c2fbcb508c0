"""--retriever dense:MODEL: the passages whose vectors are nearest to a query's."""

from pathlib import Path

from common import vectors
from common.files import UserError
from common.passages import RetrieverError, found_in
from common.vectors import sentences


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
