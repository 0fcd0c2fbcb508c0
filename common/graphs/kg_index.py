"""Vectors of entity names, and the names nearest to a query.

    Index(names)                             character n-grams (tf-idf): no download
    Index(names, "BAAI/bge-large-en-v1.5")   sentence-transformers vectors, kept on disk
    Index(names, encoder, Stored)            the vectors of LightRAG's vdb_entities.json (kg_files.py)
"""

import json
import os
import threading
from pathlib import Path

import numpy as np

from common.files import UserError
from common.retriever import CACHE, best, encode, fingerprint, kept_vectors, load_encoder, prefixes

BLOCK = 1_000_000  # scores in memory at a time, for each core


class VectorsError(UserError):
    """Stored vectors are not those of the encoder."""


class Index:
    """stored: vectors of these names; names that have none there are encoded. Without an encoder a query that
    is a name's exact spelling is answered by its stored vector, any other by tf-idf. left_out, encoded: how
    many names have no stored vector and stay without, or get one."""

    def __init__(self, names, encoder="", stored=None, cache=None):
        self.names = names
        self.encoder = encoder
        self.stored = stored
        self.left_out = self.encoded = 0
        self.numbers = np.arange(len(names))  # of the names that have vectors
        self.vectors = None                   # (n, d), of length 1
        self.tfidf = None
        self.cores = threading.Semaphore(os.cpu_count() or 1)  # more blocks at once cost memory alone
        if encoder:
            self.model = load_encoder(encoder)
            _, self.prefix = prefixes(encoder, self.model)  # names among names: both sides as passages
        if stored is not None:
            self._use_stored()
        elif not encoder:
            self.numbers = self.numbers[:0]
        else:
            folder = Path(cache or Path.home() / CACHE)
            name = fingerprint(encoder, [json.dumps(names)], self.prefix)
            path = folder / f"entities-{name}.npy"
            self.vectors = kept_vectors(path, lambda: self._encode(names))
        if not encoder:
            self._count_characters()

    def _count_characters(self):
        from sklearn.feature_extraction.text import TfidfVectorizer
        self.tfidf = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3)).fit(self.names)
        self.columns = self.tfidf.transform(self.names).T.tocsr()  # (features, n): a query reads its own rows
        self.row_of = {self.names[i]: row for row, i in enumerate(self.numbers)}

    def _use_stored(self):
        rows = [self.stored.rows.get(name, -1) for name in self.names]
        known = [i for i, row in enumerate(rows) if row >= 0]
        missing = [i for i, row in enumerate(rows) if row < 0]
        vectors = self.stored.vectors[[rows[i] for i in known]]
        if not self.encoder:
            self.left_out = len(missing)
        elif missing:
            encoded = self._encode([self.names[i] for i in missing])
            vectors = np.concatenate([vectors, encoded])
            known += missing
            self.encoded = len(missing)
        else:
            self._encode(self.names[:1])
        self.numbers = np.array(known)
        self.vectors = vectors

    def _encode(self, texts):
        texts = [text.encode("utf-8", "replace").decode() for text in texts]  # (half a character is no text)
        vectors = encode(self.model, texts, self.prefix, "document", progress=len(texts) > 5000)
        if self.stored is not None and vectors.shape[1] != self.stored.vectors.shape[1]:
            raise VectorsError(f"{self.stored.path}: its vectors have {self.stored.vectors.shape[1]:,} "
                               f"numbers, those of {self.encoder} {vectors.shape[1]:,}: give the encoder "
                               "that made them, or the .graphml alone, whose names are then encoded")
        return vectors

    def search(self, queries, k):
        """For each query at most k (number of a name, cosine), best first; equal ones in the names' order."""
        if self.encoder:
            return self._by_vectors(self._encode(queries), k)
        rows = [self.row_of.get(query) for query in queries]
        others = [query for query, row in zip(queries, rows, strict=True) if row is None]
        by_characters = iter(self._by_characters(others, k))
        found = []
        for row in rows:
            if row is None:
                found.append(next(by_characters))
            else:
                found += self._by_vectors(self.vectors[[row]], k)
        return found

    def _by_characters(self, queries, k):
        """Sums run over a query's features in order, whatever stands beside it in the batch."""
        def scores(part):
            return (self.tfidf.transform(queries[part]) @ self.columns).toarray()

        return self._best(len(queries), scores, range(len(self.names)), k)

    def _by_vectors(self, asked, k):
        def scores(part):
            return asked[part] @ self.vectors.T

        return self._best(len(asked), scores, self.numbers, k)

    def _best(self, queries, scores, numbers, k):
        """For each query [(number, score)], from blocks of scores(slice of queries) -> (queries, n)."""
        size = max(1, BLOCK // len(self.names))
        found = []
        for start in range(0, queries, size):
            with self.cores:
                block = scores(slice(start, start + size))
                for row in block:
                    pairs = [(int(numbers[i]), float(row[i])) for i in best(row, k)]
                    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
                    found.append(pairs)
        return found
