"""Vectors of entity names, and the names nearest to a query.

    Index(names)                             character n-grams (tf-idf): no download
    Index(names, "BAAI/bge-large-en-v1.5")   sentence-transformers vectors, kept on disk
"""

import os
import threading

import numpy as np

from common import cache
from common.retriever import best
from common.vectors.sentences import encode, load_encoder, prefixes

BLOCK = 1_000_000  # scores in memory at a time, for each core


class Index:
    def __init__(self, names, encoder=""):
        self.names = names
        self.encoder = encoder
        self.cores = threading.Semaphore(os.cpu_count() or 1)  # more blocks at once cost memory alone
        if not encoder:
            from sklearn.feature_extraction.text import TfidfVectorizer
            self.tfidf = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3)).fit(names)
            self.columns = self.tfidf.transform(names).T.tocsr()  # (features, n): a query reads its own rows
            return
        self.model = load_encoder(encoder)
        _, self.prefix = prefixes(encoder, self.model)  # names among names: both sides as passages
        name = cache.key([encoder, cache.digest(encoder), self.prefix, *names])
        path = cache.made_once(cache.folder() / f"entities-{name}.npy", self._write)
        self.vectors = np.load(path, mmap_mode="c", allow_pickle=False)  # (n, d), of length 1

    def _write(self, part):
        with part.open("wb") as file:
            np.save(file, self._encode(self.names), allow_pickle=False)

    def _encode(self, texts):
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # (half a character is no text)
        return encode(self.model, texts, self.prefix, "document", progress=len(texts) > 5000)

    def search(self, queries, k):
        """For each query at most k (number of a name, cosine), best first; equal ones in the names' order."""
        if not queries:
            return []
        if self.encoder:
            asked, columns = self._encode(queries), self.vectors.T
        else:
            asked, columns = self.tfidf.transform(queries), self.columns
        size = max(1, BLOCK // len(self.names))
        found = []
        for start in range(0, len(queries), size):
            with self.cores:
                scores = asked[start:start + size] @ columns
                if not self.encoder:
                    scores = scores.toarray()
                for row in scores:
                    found.append([(int(i), float(row[i])) for i in best(row, k)])
        return found
