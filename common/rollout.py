"""Turns and trajectories, the loop that runs many agents at once, and the batches that training sees.

An agent is a coroutine: it awaits generations and searches and otherwise reads like its paper's algorithm box.
`run_agents` drives any number of them; engine and retriever batch whatever waits.

    prompt   | turn 0: sampled ids | observation | turn 1: sampled ids | observation | …
    mask       1 1 1 1 1 1 1 1 1 1   0 0 0 0 0 0   1 1 1 1 1 …                            (response_mask; prompt 0)
    turn_ids   0 0 0 0 0 0 0 0 0 0  -1 -1 -1 …     1 1 1 1 1 …                            (-1 = not the policy's)
"""

import asyncio
import hashlib
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class Turn:
    """What the policy sampled in one go, and the observation that followed. Paths of a tree share Turn objects."""
    ids: list[int]                  # sampled, stop token included
    logprobs: list[float]           # of the sampler, one a token
    stop_reason: str
    text: str                       # decoded, for parsing only; training uses ids
    observation_ids: list[int] = field(default_factory=list)
    observation: str = ""

    @property
    def entropy(self):
        """Mean negative log-likelihood of the sampled tokens, nats (AT2PO Eq 2)."""
        return -sum(self.logprobs) / max(1, len(self.logprobs))


@dataclass(eq=False)
class Trajectory:
    question_id: str
    prompt_ids: list[int]
    turns: list[Turn]
    reward: float = 0.0
    info: dict = field(default_factory=dict)   # what explains the reward: parsed answer, format, searches, …

    @property
    def sampled_tokens(self):
        return sum(len(t.ids) for t in self.turns)

    @property
    def length(self):
        return len(self.prompt_ids) + sum(len(t.ids) + len(t.observation_ids) for t in self.turns)


def stable_seed(*parts):
    """A 63-bit seed from (run seed, question id, sample path, turn, …): the same in every process and on every machine."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:8], "big") >> 1


class BatchedSearch:
    """`await search(query, k)`: all queries that wait when the agents pause go to the retriever in one call.

    A retriever with `remote = True` is called in a thread, so that generation goes on while it answers."""

    def __init__(self, retriever):
        self.retriever, self.waiting, self.running = retriever, [], set()

    async def __call__(self, query, k):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((query, k, future))
        return await future

    def cancel(self):
        """Ends the patience of a retriever that waits for its server: an interrupted run need not outlast it."""
        if hasattr(self.retriever, "cancel"):
            self.retriever.cancel()

    @property
    def metrics(self):
        """What a remote retriever sent that had to be mended, so far."""
        repaired = getattr(self.retriever, "repaired", {})
        return {"rollout/search_repairs": sum(repaired.values())} if repaired else {}

    def flush(self):
        """Sends what waits, one call for each k."""
        waiting, self.waiting = self.waiting, []
        for k in dict.fromkeys(k for _, k, _ in waiting):
            queries, futures = zip(*[(q, f) for q, kk, f in waiting if kk == k], strict=True)
            if getattr(self.retriever, "remote", False):
                task = asyncio.ensure_future(self._in_thread(queries, k, futures))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            else:
                self._deliver(self.retriever.search(list(queries), k), futures)

    async def _in_thread(self, queries, k, futures):
        try:
            self._deliver(await asyncio.to_thread(self.retriever.search, list(queries), k), futures)
        except Exception as error:  # reaches every agent that waits for it
            for f in futures:
                if not f.done():
                    f.set_exception(error)

    @staticmethod
    def _deliver(results, futures):
        for result, future in zip(results, futures, strict=True):
            if not future.done():
                future.set_result(result)


async def _drive(agents, engine, search, progress):
    tasks = [asyncio.ensure_future(a) for a in agents]
    for task in tasks:
        task.add_done_callback(lambda _: progress(sum(t.done() for t in tasks), len(tasks)))
    failed = lambda: next((t for t in tasks if t.done() and not t.cancelled() and t.exception()), None)  # noqa: E731
    try:
        while not all(t.done() for t in tasks):
            for _ in range(4):  # let every agent go on until it waits for something (nested gathers take a few turns)
                await asyncio.sleep(0)
            if failed():
                break
            search.flush()
            if engine.busy:
                engine.step()
            elif search.running:
                await asyncio.wait(search.running, return_when=asyncio.FIRST_COMPLETED)
        if failed():
            raise failed().exception()
        return [t.result() for t in tasks]
    finally:
        search.cancel()
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def run_agents(agents, engine, search, progress=lambda done, total: None):
    """Results of the coroutines, in order. The first exception cancels the rest and is raised."""
    return asyncio.run(_drive(list(agents), engine, search, progress))


@dataclass
class Batch:
    """Trajectories as (B, T), right-padded, and the same tokens packed for the model.

    Position t of a (B, T) tensor speaks of token t: logprobs[b, t] = log pi(token t | tokens < t).
    The model runs on P packs of N tokens. With shared prefixes a pack holds every distinct turn once and `ancestors` says
    which segment may see which; without, a pack is one trajectory and `ancestors` is None. `predecessor` and `target` list
    the R distinct sampled tokens; `gather` (B, T) leads from (b, t) to its row, R where nothing was sampled."""
    input_ids: torch.Tensor         # (B, T)
    response_mask: torch.Tensor     # (B, T) bool, 1 = sampled by the policy
    turn_ids: torch.Tensor          # (B, T) index of the turn, -1 = not the policy's
    rollout_logprobs: torch.Tensor  # (B, T) from the sampler, 0 where nothing was sampled
    packed_ids: torch.Tensor        # (P, N)
    positions: torch.Tensor         # (P, N) along the path
    segments: torch.Tensor          # (P, N) which prompt or turn of the pack, -1 = padding
    ancestors: torch.Tensor | None  # (P, S, S) bool: segment i descends from, or is, segment j
    predecessor: torch.Tensor       # (R,) flat index into (P * N): the token whose hidden state predicts
    target: torch.Tensor            # (R,) the token that was sampled there
    gather: torch.Tensor            # (B, T) index into R

    def to(self, device):
        return Batch(**{k: v if v is None else v.to(device) for k, v in vars(self).items()})

    def attention_mask(self):
        """(P, 1, N, N) bool, 1 = may attend: earlier tokens of the own segment and of its ancestors."""
        P, N = self.segments.shape
        i = torch.arange(N, device=self.segments.device)
        if self.ancestors is None:
            seen = (self.segments >= 0)[:, None, :].expand(P, N, N)
        else:
            s = self.segments.clamp(min=0)
            rows = self.ancestors[torch.arange(P, device=s.device)[:, None], s]              # (P, N, S)
            seen = rows.gather(2, s[:, None, :].expand(P, N, N)) & (self.segments >= 0)[:, None, :]
        return (seen & (i[None, :] <= i[:, None]) | torch.eye(N, dtype=torch.bool, device=i.device)).unsqueeze(1)


def _path(trajectory, prompts):
    """[(key, ids, turn)] from the prompt down. A Turn object below the same shared start has the same key wherever it occurs."""
    key = (prompts.setdefault(tuple(trajectory.prompt_ids), len(prompts)),)
    path = [(key, trajectory.prompt_ids, None)]
    for turn in trajectory.turns:
        key += (id(turn),)
        path.append((key, turn.ids + turn.observation_ids, turn))
    return path


def prefix_order(trajectories):
    """The same trajectories with those that share a start side by side (depth first), as packing wants them."""
    prompts, rank = {}, {}
    ranks = [[rank.setdefault(key, len(rank)) for key, _, _ in _path(t, prompts)] for t in trajectories]
    return [t for _, t in sorted(zip(ranks, trajectories, strict=True), key=lambda pair: pair[0])]


def micro_batches(trajectories, max_tokens, share_prefixes=True):
    """Splits into runs of at most `max_tokens` tokens, shared ones counted once (at least one trajectory each)."""
    batches, prompts, seen, total = [], {}, set(), 0
    for t in prefix_order(trajectories):
        path = _path(t, prompts)
        new = sum(len(ids) for key, ids, _ in path if not (share_prefixes and key in seen))
        if not batches or total + new > max_tokens:
            batches.append([])
            seen, total, new = set(), 0, t.length
        batches[-1].append(t)
        seen.update(key for key, _, _ in path)
        total += new
    return batches


def collate(trajectories, share_prefixes=True, pack_tokens=1024, pad_id=0):
    """Batch of the trajectories in the given order. pack_tokens: a pack is closed when the next path would pass it."""
    B, T = len(trajectories), max(t.length for t in trajectories)
    input_ids = torch.full((B, T), pad_id)
    response_mask = torch.zeros(B, T, dtype=torch.bool)
    turn_ids = torch.full((B, T), -1)
    rollout_logprobs = torch.zeros(B, T)
    gather = torch.full((B, T), -1)
    packs, predecessor, target, prompts = [], [], [], {}  # a pack: ids, positions, segments, {key: segment}, [parents], {segment: token index}
    for b, trajectory in enumerate(trajectories):
        path = _path(trajectory, prompts)
        new = sum(len(ids) for key, ids, _ in path if not packs or key not in packs[-1]["segment"])
        if not packs or not share_prefixes or len(packs[-1]["ids"]) + new > pack_tokens:
            packs.append({"ids": [], "positions": [], "segments": [], "segment": {}, "ancestors": [], "rows": {}, "start": {}})
        pack, position, lineage = packs[-1], 0, []
        for k, (key, ids, turn) in enumerate(path):
            first_time = key not in pack["segment"]
            segment = pack["segment"].setdefault(key, len(pack["segment"]))
            lineage = lineage + [segment]
            if first_time:
                pack["ancestors"].append(lineage)
                pack["start"][segment] = len(pack["ids"])
                if turn is not None:  # rows of the sampled tokens; the first one is predicted by the parent's last token
                    before = pack["start"][lineage[-2]] + len(path[k - 1][1]) - 1
                    here = [before] + [len(pack["ids"]) + j for j in range(len(turn.ids) - 1)]
                    pack["rows"][segment] = len(target)
                    predecessor += [(len(packs) - 1, i) for i in here]
                    target += turn.ids
                pack["ids"] += ids
                pack["positions"] += range(position, position + len(ids))
                pack["segments"] += [segment] * len(ids)
            input_ids[b, position:position + len(ids)] = torch.tensor(ids)
            if turn is not None:
                span = slice(position, position + len(turn.ids))
                response_mask[b, span] = True
                turn_ids[b, span] = k - 1
                rollout_logprobs[b, span] = torch.tensor(turn.logprobs)
                gather[b, span] = pack["rows"][segment] + torch.arange(len(turn.ids))
            position += len(ids)
    P, N, S = len(packs), max(len(p["ids"]) for p in packs), max(len(p["segment"]) for p in packs)
    packed_ids, positions, segments = torch.full((P, N), pad_id), torch.zeros(P, N, dtype=torch.long), torch.full((P, N), -1)
    ancestors = torch.zeros(P, S, S, dtype=torch.bool)
    for p, pack in enumerate(packs):
        n = len(pack["ids"])
        packed_ids[p, :n], positions[p, :n], segments[p, :n] = (torch.tensor(pack[key]) for key in ("ids", "positions", "segments"))
        for segment, lineage in enumerate(pack["ancestors"]):
            ancestors[p, segment, lineage] = True
    gather[gather < 0] = len(target)
    return Batch(input_ids, response_mask, turn_ids, rollout_logprobs, packed_ids, positions, segments, ancestors if share_prefixes else None,
                 torch.tensor([p * N + i for p, i in predecessor]), torch.tensor(target), gather)
