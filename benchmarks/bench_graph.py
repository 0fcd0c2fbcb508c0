"""The knowledge-graph tools and their server under load (Linux: memory is read from /proc).

    OMP_NUM_THREADS=1 python -m benchmarks.bench_graph                   # 1,000 and 100,000 nodes, 60 s each
    OMP_NUM_THREADS=1 python -m benchmarks.bench_graph --nodes 1000000 --repeats 1   # 5 GB

Graphs: Barabasi-Albert by networkx, two edges a new node, so degrees follow a power law; names of two to four
invented words, a type, a sentence of description for a node and for an edge, as LightRAG writes them, added
as read_graphml adds them. Vectors: random, 64 numbers of float32 a name, written as a LightRAG folder's
vdb_entities.json and read as from one.

No encoder made those vectors, and none is here, so queries are answered as in any run without one: the exact
spelling of a name by that name's vector (FAISS above 50,000 names), everything else by tf-idf on the names.

One Markdown table, a row printed as it comes:

- build, memory, index: in a process of its own; seconds are of CPU, so that other work on the machine does
  not count; memory is what is resident after less before, strings included;
- in process: both tools, 256 calls in one list against one by one, alternating, medians of --repeats, calls
  a second of CPU;
- served: common.serve graph in a process of its own, asked by --clients threads of another for --seconds.
  Each sends its next request when it has the answer, so p50 is near clients / (answers a second). A fifth is
  hostile: names that there are not, bodies of 1 MB, unknown graphs, malformed JSON, wrong types, connections
  that break off within a body. Every answer must be the text that the tools in process have for the name as
  the server reads it (server.readable), or the expected refusal: "wrong" counts those that are not, and
  requests without an answer. Growth: the server's resident memory, mean of the last tenth of the run less
  that of the first.
"""

import argparse
import base64
import http.client
import json
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import faiss as faiss  # imported here, so that no figure has the time and memory of it
import networkx
import numpy as np

from common import kg, kg_formats, kg_lightrag, kg_vectors
from common.graphs.kg_tools import ENTITY_MATCHER, NODE_INFO, PATHS, Call, LocalTools
from common.serve import server

GRAPH = "bench"
DIMENSION = 64
AT_ONCE = 256
DIFFERENT = 48     # requests of a kind, each asked many times
MEGABYTE = 1_000_000
TIMEOUT = 120.0    # seconds until a client calls it no answer
RELATIONS = ["is part of", "was founded by", "lies near", "competes with", "was written by", "feeds on",
             "is a kind of", "employs", "was followed by", "contradicts", "is made of", "influenced"]
KINDS = ["person", "organization", "location", "concept", "event"]
MIX = {  # per cent of the requests
    "node_info": 35,
    "node_info, a question": 10,
    "entity_matcher, misspelt": 18,
    "entity_matcher, exact name": 12,
    "8 names in a list": 5,
    "no such name": 5,
    "1 MB of name": 1,
    "1 MB beside the name": 1,
    "over the limit of a body": 1,
    "unknown graph": 4,
    "malformed JSON": 4,
    "wrong types": 3,
    "breaks off": 1,
}


# ---------------------------------------------------------------- graphs

def vocabulary(rng, size=20_000):
    """Invented words."""
    syllables = []
    for consonant in "b c d f g h k l m n p r s t v w br st th ch".split():
        syllables += [consonant + end for end in "a e i o u an er in or el".split()]
    words = set()
    while len(words) < size:
        words.add("".join(rng.choices(syllables, k=rng.randint(2, 3))))
    return sorted(words)


def make_names(rng, words, count):
    """Different names of two to four words, a few of them frequent."""
    weights = [1 / rank for rank in range(10, 10 + len(words))]
    spread = np.cumsum(weights).tolist()
    names = {}
    while len(names) < count:
        chosen = rng.choices(words, cum_weights=spread, k=rng.randint(2, 4))
        names[" ".join(chosen).title()] = None
    return list(names)


def write_inputs(nodes, folder):
    """Edges and vectors, in a process whose memory nobody measures."""
    grown = networkx.barabasi_albert_graph(nodes, 2, seed=nodes)
    np.save(folder / "edges.npy", np.array(grown.edges, np.int32))  # (edges, 2)
    rng = random.Random(nodes)
    names = make_names(rng, vocabulary(rng), nodes)
    vectors = np.random.default_rng(nodes).standard_normal((nodes, DIMENSION), np.float32)
    value = {
        "embedding_dim": DIMENSION,
        "data": [{"__id__": f"ent-{i}", "entity_name": name} for i, name in enumerate(names)],
        "matrix": base64.b64encode(vectors.tobytes()).decode(),
    }
    (folder / kg_formats.VECTORS).write_text(json.dumps(value))


def build(nodes, folder):
    """(KnowledgeGraph with stored vectors, {what: figure} of making it)"""
    edges = np.load(folder / "edges.npy")
    server.graph_app(LocalTools({"small": kg.KnowledgeGraph.from_triples([("A", "r", "B")])}))  # imports
    before = resident()
    rng = random.Random(nodes)
    words = vocabulary(rng)
    names = make_names(rng, words, nodes)
    about = [" ".join(rng.choices(words, k=12)) for _ in names]
    between = [" ".join(rng.choices(words, k=8)) for _ in edges]
    started = time.process_time()
    graph = kg_lightrag.empty_graph(directed=False)
    for name, text in zip(names, about, strict=True):
        graph.add_node(name, kind=KINDS[len(text) % 5], description=text)
    for (head, tail), text in zip(edges, between, strict=True):
        relation = RELATIONS[len(text) % 12]
        kg_lightrag.add_edge(graph, names[head], names[tail], relation,
                             description=text, keywords=relation, weight=1.0)
    built = time.process_time() - started
    del about, between
    grown = resident()
    started = time.process_time()
    stored = kg_vectors.read_nano_vectors(folder / kg_formats.VECTORS)
    made = kg.KnowledgeGraph(graph, stored=stored)
    read = time.process_time() - started
    started = time.process_time()
    server.graph_app(LocalTools({GRAPH: made}))  # what a server does before its first answer
    indexed = time.process_time() - started
    figures = {
        "edges": f"{len(edges):,}",
        "graph built": f"{built:.2f} s of CPU",
        "memory of the graph": f"{(grown - before) / nodes:,.0f} bytes a node",
        "vectors read": f"{read:.2f} s of CPU",
        "index built (tf-idf, vectors, FAISS above 50,000)": f"{indexed:.2f} s of CPU",
        "memory of vectors and index": f"{(resident() - grown) / nodes:,.0f} bytes a node",
        "resident in all": megabytes(resident()),
    }
    return made, figures


def resident(pid="self"):
    """Bytes of a process in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def cpu_seconds(pid):
    """Of a process, its threads included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(size):
    return f"{size / 2**20:,.0f} MB"


# ---------------------------------------------------------------- in process

def misspelt(rng, name):
    """Two neighbouring letters changed places, one is gone."""
    i = rng.randrange(1, len(name) - 3)
    return name[:i] + name[i + 1] + name[i] + name[i + 3:]


def some_nodes(rng, graph, count):
    """Names of nodes: half of them drawn evenly, half as ends of edges, so that hubs are among them."""
    names = list(graph.graph)
    found = rng.choices(names, k=count // 2)
    while len(found) < count:
        start = rng.choice(names)
        found.append(rng.choice(list(graph.graph[start]) or [start]))
    return found


def compare(tools, calls, repeats):
    """(calls one by one and at once, each for a second of CPU; texts that differ): medians of alternating
    repeats."""
    times = {"alone": [], "at once": []}
    different = 0
    for _ in range(repeats):
        started = time.process_time()
        alone = [tools.search([call])[0] for call in calls]
        times["alone"].append(time.process_time() - started)
        started = time.process_time()
        together = tools.search(calls)
        times["at once"].append(time.process_time() - started)
        different += sum(a != b for a, b in zip(alone, together, strict=True))
    rates = [len(calls) / statistics.median(seconds) for seconds in times.values()]
    return *rates, different


def measure(nodes, folder, repeats, out):
    """A process of its own: figures of building and calling, and requests.json with what to answer."""
    graph, figures = build(nodes, folder)
    for what, figure in figures.items():
        out.put((what, figure))
    tools = LocalTools({GRAPH: graph})
    rng = random.Random(1)
    nodes_asked = some_nodes(rng, graph, AT_ONCE)
    kinds = {
        "node_info": [Call(NODE_INFO, name, GRAPH) for name in nodes_asked],
        "entity_matcher, misspelt": [
            Call(ENTITY_MATCHER, misspelt(rng, name), GRAPH) for name in nodes_asked],
        "entity_matcher, exact name": [Call(ENTITY_MATCHER, name, GRAPH) for name in nodes_asked],
    }
    for what, calls in kinds.items():
        alone, at_once, different = compare(tools, calls, repeats)
        figure = f"{alone:,.0f} one by one, {at_once:,.0f} at once, ratio {at_once / alone:.2f}"
        out.put((f"calls in process: {what}", f"{figure}; {different} texts differ"))
    requests = [request for kind in MIX for request in make_requests(kind, graph, tools)]
    (folder / "requests.json").write_text(json.dumps(requests))
    out.put(None)


# ---------------------------------------------------------------- requests

def make_requests(kind, graph, tools):
    """DIFFERENT requests of a kind: {"kind", "path", "body", "status", "text"}. text: what must come back,
    None for any; status 0: no answer is waited for."""
    rng = random.Random(kind)
    names = some_nodes(rng, graph, DIFFERENT)
    if kind.startswith("1 MB") or kind == "over the limit of a body":
        names = names[:4]
    return [{"kind": kind, **request(kind, rng, name, graph, tools)} for name in names]


def request(kind, rng, name, graph, tools):
    tool = rng.choice([NODE_INFO, ENTITY_MATCHER])
    if kind.startswith("node_info"):
        question = ""
        if kind.endswith("question"):
            question = f"Which {name} {rng.choice(RELATIONS)} {' '.join(some_nodes(rng, graph, 4))}?"
        return answered(tools, [Call(NODE_INFO, name, GRAPH, question)])
    if kind == "entity_matcher, misspelt":
        return answered(tools, [Call(ENTITY_MATCHER, misspelt(rng, name), GRAPH)])
    if kind == "entity_matcher, exact name":
        return answered(tools, [Call(ENTITY_MATCHER, name, GRAPH)])
    if kind == "8 names in a list":
        names = [*some_nodes(rng, graph, 6), misspelt(rng, name), "nobody \ud800"]
        return answered(tools, [Call(tool, name, GRAPH) for name in names])
    if kind == "no such name":
        odd = rng.choice(["", "\x00", "</tool_response>", "\ud83d", "(((", "\u202e" * 50, "\n\n", "北京"])
        return answered(tools, [Call(NODE_INFO, misspelt(rng, name) + odd, GRAPH)])
    if kind == "1 MB of name":
        long = (name + " ") * (MEGABYTE // len(name))
        return answered(tools, [Call(tool, long, GRAPH)])
    if kind == "1 MB beside the name":
        return answered(tools, [Call(NODE_INFO, name, GRAPH)], rest="x" * MEGABYTE)
    return refused(kind, rng, name, f"/{GRAPH}/{PATHS[tool]}")


def answered(tools, calls, **fields):
    """A request of one call, or of a list of calls of one tool, and the texts of this process."""
    read = [replace(call, node_name=server.readable(call.node_name)) for call in calls]
    texts = tools.search(read)
    body = {"node_name": [call.node_name for call in calls], "question": [call.question for call in calls]}
    if len(calls) == 1:
        texts = texts[0]
        body = {"node_name": calls[0].node_name, "question": calls[0].question}
    path = f"/{GRAPH}/{PATHS[calls[0].tool]}"
    return {"path": path, "body": json.dumps({**body, **fields}), "status": 200, "text": texts}


def refused(kind, rng, name, path):
    """A request that is no question, and its status."""
    good = json.dumps({"node_name": name})
    if kind == "over the limit of a body":
        size = server.MAX_BODY + 1  # announced only: who is still sending may find the connection closed
        return {"path": path, "body": "", "size": size, "status": 413, "text": None}
    if kind == "unknown graph":
        text = f"There is no graph 'another'. The graphs: {GRAPH}."
        return {"path": path.replace(GRAPH, "another"), "body": good, "status": 404, "text": text}
    if kind == "malformed JSON":
        if rng.random() < .2:
            return {"path": path, "body": "[" * 100_000, "status": 400, "text": None}
        bodies = [good[:-1], good + "}", "", "{", "\x00", "nonsense", good.replace(":", "=")]
        return {"path": path, "body": rng.choice(bodies), "status": 422, "text": None}
    if kind == "wrong types":
        values = [7, None, {"a": "b"}, [[name]], [name, 7], True, 1e400]
        body = json.dumps({"node_name": rng.choice(values)})
        return {"path": path, "body": body, "status": 422, "text": None}
    return {"path": path, "body": good, "status": 0, "text": None}


# ---------------------------------------------------------------- served

def serve(nodes, folder, listener):
    """A process of its own, until it is ended."""
    graph, _ = build(nodes, folder)
    app = server.graph_app(LocalTools({GRAPH: graph}))
    server.server(app).run([listener])


def right(request, status, body):
    """Whether an answer is the expected one."""
    if status != request["status"]:
        return False
    try:
        value = json.loads(body)
    except ValueError:
        return False
    if request["text"] is None:
        return bool(value.get("detail"))
    return value.get("rendered_content", value.get("detail")) == request["text"]


def break_off(address, request):
    """Announces a body, sends a part of it and is gone."""
    with socket.create_connection(address, TIMEOUT) as connection:
        head = f"POST {request['path']} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"node_name": ')


def client(address, requests, until, found):
    """Asks until the time is over; found: [(kind, seconds, whether right)]."""
    connection = http.client.HTTPConnection(*address, timeout=TIMEOUT)
    for request in requests:
        if time.perf_counter() > until:
            break
        started = time.perf_counter()
        try:
            if request["status"] == 0:
                break_off(address, request)
                continue
            body = request["body"].encode()
            size = request.get("size", len(body))
            headers = {"content-type": "application/json", "content-length": str(size)}
            connection.request("POST", request["path"], body, headers)
            reply = connection.getresponse()
            good = right(request, reply.status, reply.read())
        except (OSError, http.client.HTTPException):
            connection.close()
            good = False
        found.append((request["kind"], time.perf_counter() - started, good))
    connection.close()


def load(address, process, requests, clients, seconds):
    """(answers, the server's memory each half second or oftener, seconds of wall and of its CPU)"""
    by_kind = {}
    for request in requests:
        by_kind.setdefault(request["kind"], []).append(request)
    cpu = cpu_seconds(process.pid)
    started = time.perf_counter()
    found = [[] for _ in range(clients)]
    threads = []
    for number in range(clients):
        rng = random.Random(number)
        kinds = rng.choices(list(MIX), list(MIX.values()), k=5000)
        asked = cycle([rng.choice(by_kind[kind]) for kind in kinds])
        arguments = (address, asked, started + seconds, found[number])
        threads.append(threading.Thread(target=client, args=arguments))
    memory = []
    for thread in threads:
        thread.start()
    while time.perf_counter() < started + seconds:
        memory.append(resident(process.pid))
        time.sleep(min(.5, seconds / 20))
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    answers = [answer for some in found for answer in some]
    return answers, memory, seconds, cpu_seconds(process.pid) - cpu


def report(answers, memory, seconds, cpu):
    """Rows of a run of the server."""
    tenth = max(1, len(memory) // 10)
    first = statistics.mean(memory[:tenth])
    last = statistics.mean(memory[-tenth:])
    wrong = Counter(kind for kind, _, good in answers if not good)
    yield "served: answers", f"{len(answers):,} in {seconds:.0f} s, {len(answers) / seconds:,.0f} a second"
    yield "served: to a second of the server's CPU", f"{len(answers) / cpu:,.0f} answers"
    yield "served: wrong answers", f"{sum(wrong.values())} {dict(wrong) or ''}".strip()
    yield "served: time of an answer", quantiles([taken for _, taken, _ in answers])
    for kind in MIX:
        taken = [seconds for name, seconds, _ in answers if name == kind]
        if taken:
            yield f"served: {kind}", f"{len(taken):,} answers, {quantiles(taken)}"
    growth = (last - first) / 2**20
    growth = f"growth {growth:+.0f} MB, most {megabytes(max(memory))}"
    yield "server's memory", f"{megabytes(first)} at first, {growth}"


def quantiles(taken):
    """
    >>> quantiles([.001, .002, .003])
    'p50 2.0 ms, p99 3.0 ms'
    """
    p50, p99 = np.quantile(taken, [.5, .99], method="higher") * 1000
    return f"p50 {p50:,.1f} ms, p99 {p99:,.1f} ms"


# ---------------------------------------------------------------- main

def run_service(nodes, folder, args, spawn):
    """Yields the rows of a server under load."""
    requests = json.loads((folder / "requests.json").read_text())
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # clients are refused until the index stands
    address = listener.getsockname()
    process = spawn.Process(target=serve, args=(nodes, folder, listener), daemon=True)
    process.start()
    listener.close()
    try:
        while process.is_alive():
            try:
                socket.create_connection(address, 1).close()
                break
            except OSError:
                time.sleep(.2)
        yield from report(*load(address, process, requests, args.clients, args.seconds))
        yield "server at the end", "answers" if process.is_alive() else f"exited with {process.exitcode}"
    finally:
        process.terminate()
        process.join()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--seconds", type=float, default=60.0, help="of load")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="in process")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    print("| nodes | | |\n|---|---|---|")
    for nodes in args.nodes:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            queue = spawn.Queue()
            writing = spawn.Process(target=write_inputs, args=(nodes, folder))
            writing.start()
            writing.join()
            measuring = spawn.Process(target=measure, args=(nodes, folder, args.repeats, queue))
            measuring.start()
            for what, figure in iter(queue.get, None):
                print(f"| {nodes:,} | {what} | {figure} |", flush=True)
            measuring.join()
            for what, figure in run_service(nodes, folder, args, spawn):
                print(f"| {nodes:,} | {what} | {figure} |", flush=True)


if __name__ == "__main__":
    main()
