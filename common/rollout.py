"""Turns and trajectories, the loop that runs many agents at once, and the batches that training sees.

An agent is a coroutine: it awaits generations and searches and otherwise reads like its paper's algorithm
box. `run_agents` drives any number of them; engine and retriever batch whatever waits.

    prompt   | turn 0: sampled ids | observation | turn 1: sampled ids | observation | …
    mask       1 1 1 1 1 1 1 1 1 1   0 0 0 0 0 0   1 1 1 1 1 …               (response_mask; prompt 0)
    turn_ids   0 0 0 0 0 0 0 0 0 0  -1 -1 -1 …     1 1 1 1 1 …               (-1 = not the policy's)
"""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch

from common import distributed
from common.files import Progress

# number of the running agent, inherited by tasks that it gathers: the engine takes low numbers first
PLACE = ContextVar("place", default=0)


@dataclass(eq=False)
class Turn:
    """What the policy sampled in one go, and the observation that followed. Paths of a tree share them."""
    ids: list[int]                  # sampled, stop token included
    logprobs: list[float]           # of the sampler, one per token
    stop_reason: str                # the stop string, "eos" or "length"
    text: str                       # decoded, for parsing only; training uses ids
    observation_ids: list[int] = field(default_factory=list)
    observation: str = ""

    @property
    def entropy(self):
        """Mean negative log-likelihood of the sampled tokens, nats (AT2PO Eq 2)."""
        return -sum(self.logprobs) / max(1, len(self.logprobs))


@dataclass
class Outcome:
    """What a trajectory came to. Metrics, guards and the page read this; scripts add fields of their own."""
    answer: str | None = None   # as it was read, None where there is none
    problem: str = ""           # what is wrong with the format, empty where nothing is
    em: float = 0.0             # exact match of the answer with a gold one
    f1: float = 0.0
    searches: int = 0           # that brought a result


@dataclass(eq=False)
class Trajectory:
    """A prompt and the turns that followed it."""
    question_id: str
    prompt_ids: list[int]
    turns: list[Turn]
    reward: float = 0.0
    advantages: list[float] = field(default_factory=list)   # one per turn, from the paper's credit rule
    info: Outcome = field(default_factory=Outcome)          # why it has this reward

    @property
    def sampled_tokens(self):
        return sum(len(t.ids) for t in self.turns)

    @property
    def length(self):
        return len(self.prompt_ids) + sum(len(t.ids) + len(t.observation_ids) for t in self.turns)


def sampled_text(tokenizer, ids, stop_reason):
    """What was sampled, as text, without the token that ends the sequence. Special tokens are text too: a
    model's tags may be registered as such."""
    return tokenizer.decode(ids[:-1] if stop_reason == "eos" else ids)


def context_ids(prompt_ids, turns):
    """What the policy reads next: the prompt and all that was sampled and observed since."""
    return prompt_ids + [i for t in turns for i in t.ids + t.observation_ids]


def stable_seed(*parts):
    """A 63-bit seed from (run seed, question id, sample path, turn, …), the same on every machine."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def question_seeds(questions, *parts):
    """A seed per question. A question drawn twice in a step gets two seeds, so that its samples differ."""
    ids = [q.id for q in questions]
    drawn_before = [ids[:i].count(name) for i, name in enumerate(ids)]
    return [stable_seed(*parts, name, n) for name, n in zip(ids, drawn_before, strict=True)]


def tree_seeds(questions, *parts):
    """As question_seeds, but a question's first draw has no number: AT2PO's committed runs have these."""
    ids = [q.id for q in questions]
    seeds = []
    for i, name in enumerate(ids):
        again = ids[:i].count(name)
        seeds.append(stable_seed(*parts, name, *(("again", again) if again else ())))
    return seeds


# ---------------------------------------------------------------- many agents at once

@dataclass
class Policy:
    """A language model that is sampled and trained: `Run.policy` makes one."""
    model: object         # Hugging Face causal LM, the one that is trained
    tokenizer: object
    engine: object        # samples; engine.sync(model) gives it the model's weights


class BatchedSearch:
    """`await search(query, k)`: all queries that wait when the agents pause go to the retriever in one call.

    A retriever with `remote = True` is called in a thread, so that generation goes on while it answers."""

    def __init__(self, retriever):
        self.retriever = retriever
        self.waiting = []
        self.running = set()

    async def __call__(self, query, k):
        future = asyncio.get_running_loop().create_future()
        self.waiting.append((query, k, future))
        return await future

    def cancel(self):
        """Tells a retriever that waits for its server to give up: the run was interrupted."""
        if hasattr(self.retriever, "cancel"):
            self.retriever.cancel()

    def flush(self):
        """Sends what waits, one call for each k."""
        waiting = self.waiting
        self.waiting = []
        for k in dict.fromkeys(k for _, k, _ in waiting):
            queries = [query for query, its_k, _ in waiting if its_k == k]
            futures = [future for _, its_k, future in waiting if its_k == k]
            if getattr(self.retriever, "remote", False):
                task = asyncio.ensure_future(self._in_thread(queries, k, futures))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            else:
                self._deliver(self.retriever.search(queries, k), futures)

    async def _in_thread(self, queries, k, futures):
        try:
            self._deliver(await asyncio.to_thread(self.retriever.search, queries, k), futures)
        except Exception as error:  # reaches every agent that waits for it
            for f in futures:
                if not f.done():
                    f.set_exception(error)

    @staticmethod
    def _deliver(results, futures):
        for result, future in zip(results, futures, strict=True):
            if not future.done():
                future.set_result(result)


def search_repairs(retriever):
    """{"rollout/search_repairs": answers of a search server that were mended so far}; {} where none was."""
    repaired = getattr(retriever, "repaired", {})
    return {"rollout/search_repairs": sum(repaired.values())} if repaired else {}


async def _drive(agents, engine, search, progress, results):
    tasks = []
    for place, agent in enumerate(agents):
        PLACE.set(place)
        tasks.append(asyncio.ensure_future(agent))
    steps = 0
    try:
        while not all(t.done() for t in tasks):
            progress(sum(t.done() for t in tasks), len(tasks), f", the others at token {steps:,}")
            # let every agent go on until it waits for engine or search (nested gathers take a few turns)
            for _ in range(4):
                await asyncio.sleep(0)
            for t in tasks:
                if t.done():
                    t.result()  # raises what it raised
            search.flush()
            if engine.busy:
                engine.step()
                steps += 1
            elif search.running:
                await asyncio.wait(search.running, return_when=asyncio.FIRST_COMPLETED)
        progress(len(tasks), len(tasks))
        # not returned: asyncio.run (its signal check) would make a repr of it, of trees in seconds
        results += [t.result() for t in tasks]
    finally:
        search.cancel()
        for t in tasks:
            t.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def mean(values):
    """
    >>> mean([1, 2]), mean([])
    (1.5, 0.0)
    """
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def means(trajectories):
    """What every script's step tells of its trajectories, under the names of guards.ROLLOUT."""
    return {
        "reward/mean": mean(t.reward for t in trajectories),
        "reward/em": mean(t.info.em for t in trajectories),
        "reward/format": mean(not t.info.problem for t in trajectories),
        "rollout/response_tokens": mean(t.sampled_tokens for t in trajectories),
        "rollout/turns": mean(len(t.turns) for t in trajectories),
        "rollout/searches": mean(t.info.searches for t in trajectories),
    }


def entropy(turns):
    """Mean -log pi of the tokens of some turns, nats."""
    return -sum(sum(t.logprobs) for t in turns) / sum(len(t.ids) for t in turns)


def no_progress(done, total, more=""):
    """For callers of an evaluation that nobody watches."""


def run_agents(agents, engine, search, progress=None):
    """Results of the coroutines, in order. The first exception cancels the rest and is raised.

    search: the BatchedSearch that the agents were given. progress(done, total, more) is told how many have
    ended; without it a long rollout prints its own. Of several ranks each runs its share, and all get all
    results."""
    progress = progress or Progress("rollout", at_once=True)
    agents = list(agents)
    own = distributed.share(agents)
    for agent in set(agents) - set(own):
        agent.close()  # else Python warns that it was never awaited
    done = []
    _run(_drive(own, engine, search, progress, done))
    return distributed.gather(done)


def run_alone(agent, policy, retriever):
    """The result of one agent, in this process alone: agent(policy, search) is its coroutine."""
    search = BatchedSearch(retriever)
    done = []
    _run(_drive([agent(policy, search)], policy.engine, search, no_progress, done))
    return done[0]


def _run(coroutine):
    """asyncio.run; in a thread of its own where a loop runs already, as in a cell of a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


# ---------------------------------------------------------------- batches

@dataclass
class Batch:
    """Trajectories as (B, T), right-padded, and the same tokens packed for the model.

    Position t of a (B, T) tensor speaks of token t: logprobs[b, t] = log pi(token t | tokens < t).
    The model runs on P packs of N tokens. With shared prefixes a pack is a tree, depth first: a turn that
    several trajectories share is there once, and its descendants stand right behind it. So query i sees key j
    where j <= i < end[j]. Without, a pack is one trajectory.
    `predecessor` and `target` list the R distinct sampled tokens, turn by turn. `gather` (B, T): index of
    (b, t) among these, R where nothing was sampled. `turns` (B, K): index of turn k among the D distinct
    turns, D where there is no such turn."""
    trajectories: list              # the B trajectories, in the order of the rows
    input_ids: torch.Tensor         # (B, T)
    response_mask: torch.Tensor     # (B, T) bool, 1 = sampled by the policy
    turn_ids: torch.Tensor          # (B, T) index of the turn, -1 = not the policy's
    advantages: torch.Tensor        # (B, T) of the token's turn, 0 where nothing was sampled
    rollout_logprobs: torch.Tensor  # (B, T) from the sampler, 0 where nothing was sampled
    packed_ids: torch.Tensor        # (P, N)
    positions: torch.Tensor         # (P, N) along the path
    end: torch.Tensor               # (P, N) one past the last token that sees this one; padding sees itself
    lengths: torch.Tensor           # (P,) tokens of the pack that are not padding
    is_tree: bool                   # some packs may hold more than one trajectory
    predecessor: torch.Tensor       # (R,) flat index into (P * N): the token whose hidden state predicts
    target: torch.Tensor            # (R,) the token that was sampled there
    gather: torch.Tensor            # (B, T) index into R
    turn_ptr: torch.Tensor          # (D + 1,) where the rows of each distinct turn begin, and R
    turns: torch.Tensor             # (B, K) index into D
    old_logprobs: torch.Tensor | None = None       # (B, T) of the weights that sampled, by the trainer
    old_turn_logprobs: torch.Tensor | None = None  # (B, K) their sums over turns
    ref_logprobs: torch.Tensor | None = None       # (B, T) of the reference
    entropies: torch.Tensor | None = None          # (B, T) of each sampled token's distribution; AEPO
    values: torch.Tensor | None = None             # (B, T) V before each token, when it was sampled; Omne-R1
    returns: torch.Tensor | None = None            # (B, T) what V learns; Omne-R1
    weight: float = 1.0  # 0: a filler, so that all ranks make equally many passes; nothing is learned from it

    def to(self, device):
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def remember_old(self, logprobs, turn_logprobs=None):
        """Sets what old_logprobs and old_turn_logprobs are, unless they are known."""
        if self.old_logprobs is None:
            self.old_logprobs = logprobs.detach()
            self.old_turn_logprobs = None if turn_logprobs is None else turn_logprobs.detach()


def _path(trajectory, prompts):
    """[(key, ids, turn)] from the prompt down. The same Turn behind the same start has the same key."""
    prompt = prompts.setdefault(tuple(trajectory.prompt_ids), len(prompts))
    key = (prompt,)
    path = [(key, trajectory.prompt_ids, None)]
    for turn in trajectory.turns:
        key += (id(turn),)
        path.append((key, turn.ids + turn.observation_ids, turn))
    return path


def prefix_order(trajectories):
    """The same trajectories, those that share a start side by side (depth first), as packing wants them."""
    prompts = {}
    rank = {}    # key of a path's part -> when it was first met
    ranks = []
    for trajectory in trajectories:
        keys = [key for key, _, _ in _path(trajectory, prompts)]
        ranks.append([rank.setdefault(key, len(rank)) for key in keys])
    pairs = zip(ranks, trajectories, strict=True)
    return [t for _, t in sorted(pairs, key=lambda pair: pair[0])]


def portions(trajectories, n):
    """n lists of about equally many tokens; trajectories that share a start stay together where possible.

    >>> [len(part) for part in portions([Trajectory("", [1, 2], []) for _ in range(5)], 2)]
    [2, 3]
    """
    lists = [[] for _ in range(n)]
    total = sum(t.length for t in trajectories)
    before = 0
    for t in prefix_order(trajectories):
        middle = before + t.length / 2
        lists[int(middle * n / total)].append(t)
        before += t.length
    return lists


def micro_batches(trajectories, max_tokens, share_prefixes=True):
    """Splits into lists of at most `max_tokens` tokens, one trajectory at least. Shared tokens count once;
    where nothing is shared each trajectory is padded to the longest of its list."""
    batches = [[]]
    prompts = {}
    seen = set()
    total = longest = 0
    for t in prefix_order(trajectories):
        path = _path(t, prompts)
        longest = max(longest, t.length)
        if share_prefixes:
            total += sum(len(ids) for key, ids, _ in path if key not in seen)
        else:
            total = longest * (len(batches[-1]) + 1)
        if batches[-1] and total > max_tokens:
            batches.append([])
            seen = set()
            total = longest = t.length
        batches[-1].append(t)
        seen.update(key for key, _, _ in path)
    return [batch for batch in batches if batch]


@dataclass
class _Part:
    """A prompt or a turn with its observation, in a pack."""
    ids: torch.Tensor
    start: int          # its place in the pack
    position: int       # along the path
    row: int            # where its sampled tokens begin among the R
    turn: int           # its index among the D distinct turns
    end: int = 0        # one past the last token that sees it

    @property
    def stop(self):
        return self.start + len(self.ids)


@dataclass
class _Pack:
    """Prompts and turns in a row, depth first. A path shares the parts that the path before it has too:
    these are still open, the others are closed."""
    length: int = 0
    parts: list = field(default_factory=list)
    open: dict = field(default_factory=dict)  # key of a part -> _Part

    def length_with(self, path):
        return self.length + sum(len(ids) for key, ids, _ in path if key not in self.open)

    def close_all_but(self, path=()):
        """Nothing that comes now sees the parts that are not on this path."""
        keys = {key for key, _, _ in path}
        for key in [k for k in self.open if k not in keys]:
            self.open.pop(key).end = self.length

    def add(self, key, ids, position, row, turn):
        """A new part below the open ones."""
        part = _Part(torch.tensor(ids, dtype=torch.long), self.length, position, row, turn)
        self.open[key] = part
        self.parts.append(part)
        self.length = part.stop


def collate(trajectories, share_prefixes=True, pack_tokens=1024, pad_id=0):
    """Batch of the trajectories in the given order.

    pack_tokens: length of a pack; a longer path has one of its own."""
    B = len(trajectories)
    T = max(t.length for t in trajectories)
    input_ids = torch.full((B, T), pad_id)
    response_mask = torch.zeros(B, T, dtype=torch.bool)
    turn_ids = torch.full((B, T), -1)
    advantages = torch.zeros(B, T)
    gather = torch.full((B, T), -1)
    K = max(len(t.turns) for t in trajectories)
    turns = torch.full((B, K), -1)
    packs = []
    predecessor = []    # (pack, indices in the pack), of a turn
    target = []
    logprobs = []       # of the targets
    R = 0
    turn_ptr = [0]
    prompts = {}
    for b, trajectory in enumerate(trajectories):
        path = _path(trajectory, prompts)
        if not packs or not share_prefixes or packs[-1].length_with(path) > pack_tokens:
            packs.append(_Pack())
        pack = packs[-1]
        pack.close_all_but(path)
        position = 0
        for k, (key, ids, turn) in enumerate(path):
            if key not in pack.open:
                pack.add(key, ids, position, R, len(turn_ptr) - 1)
                if turn is not None:
                    # rows of the sampled tokens; the first one is predicted by the parent's last token
                    here = torch.arange(len(turn.ids)) + pack.open[key].start - 1
                    here[0] = pack.open[path[k - 1][0]].stop - 1
                    predecessor.append((len(packs) - 1, here))
                    target.append(pack.open[key].ids[:len(turn.ids)])
                    logprobs += turn.logprobs
                    R += len(turn.ids)
                    turn_ptr.append(R)
            part = pack.open[key]
            input_ids[b, position:position + len(ids)] = part.ids
            if turn is not None:
                span = slice(position, position + len(turn.ids))
                response_mask[b, span] = True
                turn_ids[b, span] = k - 1
                gather[b, span] = torch.arange(part.row, part.row + len(turn.ids))
                turns[b, k - 1] = part.turn
                if trajectory.advantages:
                    advantages[b, span] = trajectory.advantages[k - 1]
            position += len(ids)
    gather[gather < 0] = R
    turns[turns < 0] = len(turn_ptr) - 1
    rollout_logprobs = torch.tensor([*logprobs, 0.0])[gather]
    packed_ids, positions, end, lengths = _stack(packs, pad_id)
    N = packed_ids.shape[1]
    predecessor = torch.cat([p * N + here for p, here in predecessor])
    return Batch(
        list(trajectories), input_ids, response_mask, turn_ids, advantages, rollout_logprobs,
        packed_ids, positions, end, lengths, share_prefixes,
        predecessor, torch.cat(target), gather, torch.tensor(turn_ptr), turns)


def _stack(packs, pad_id):
    """The packs as tensors of P rows."""
    P = len(packs)
    N = max(pack.length for pack in packs)
    packed_ids = torch.full((P, N), pad_id)
    positions = torch.zeros(P, N, dtype=torch.long)
    end = torch.arange(1, N + 1).repeat(P, 1)
    lengths = torch.tensor([pack.length for pack in packs])
    for p, pack in enumerate(packs):
        pack.close_all_but()
        for part in pack.parts:
            here = slice(part.start, part.stop)
            packed_ids[p, here] = part.ids
            positions[p, here] = torch.arange(part.position, part.position + len(part.ids))
            end[p, here] = part.end
    return packed_ids, positions, end, lengths
