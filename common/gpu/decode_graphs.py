"""Decoding under CUDA graphs, for our engine: a pass launches some 2,000 kernels from Python, 80 ms whatever
the batch, and a graph launches them at once.

A graph knows sizes and addresses alone: one is captured for each number of slots (16, 64, 256, 512, …) and
each 256 tokens of the longest sequence, and all are given up when the cache moves. A free slot computes a
token at position 0, which nobody reads."""

from functools import cache

import torch


@cache
def capture_stream():
    """One for all graphs: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream()


class Decoder:
    """engine._decode with its input in fixed buffers; an engine makes one a sync, since weights move too."""

    def __init__(self, engine):
        self.engine = engine
        self.device = engine.device
        most = engine.max_batch + 256
        self.ids = torch.zeros(most, 1, dtype=torch.long, device=self.device)
        self.start = torch.zeros(most, dtype=torch.long, device=self.device)
        self.captured = {}    # (slots, end) -> (graph, the hidden states that it writes)
        self.place = None     # of the cache that they read
        self.pool = None      # their memory

    def __call__(self, ids, start):
        """As engine._decode; the hidden states are good until the next call."""
        engine = self.engine
        n = len(ids)
        slots = 16
        while slots < n:
            slots = min(4 * slots, slots + 256)
        end = max(start) // 256 * 256 + 256
        if slots * end * engine.cache.bytes_per_token > engine.cache_bytes:
            return engine._decode(ids, start)
        engine._reserve(slots, end)
        kv = engine.cache.kv
        place = kv.data_ptr(), kv.shape
        if place != self.place:
            self.place = place
            self.captured = {}
            self.pool = None
        free = [0] * (slots - n)
        self.ids[:slots, 0] = torch.tensor(ids + free, device=self.device)
        self.start[:slots] = torch.tensor(start + free, device=self.device)
        return self.replay(slots, end)[:n]

    def compute(self, slots, end):
        rows = slice(0, slots)
        hidden = self.engine._forward(rows, self.ids[rows], self.start[rows], end)
        return hidden[:, 0]

    def replay(self, slots, end):
        if (slots, end) not in self.captured:
            self.captured[slots, end] = self.capture(slots, end)
        graph, hidden = self.captured[slots, end]
        graph.replay()
        return hidden

    def capture(self, slots, end):
        current = torch.cuda.current_stream()
        stream = capture_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # a first pass, which may allocate, outside the graph
            self.compute(slots, end)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=stream):
            hidden = self.compute(slots, end)
        self.pool = graph.pool()
        return graph, hidden
