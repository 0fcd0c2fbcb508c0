"""How a program of this project begins and ends. Imported before torch, which reads its thread settings once.

    from common import process      # threads; Ctrl-C during the imports below is one line
    …
    with process.ends_cleanly(errors, saved): …      # in main: an error is one line; Ctrl-C 130, SIGTERM 143

Two OpenMP threads that spin at every barrier of a tiny matrix product stand still whenever anything else
runs: one waits for a time slice while the other spins through its own. So cores that are busy with other work
are left alone, and threads spin briefly before they sleep. What the user set stays.

A rollout's every step is a product of another shape. On a CPU oneDNN keeps what it made for the last 1,024 of
them, and so does the layer between it and PyTorch: in bf16 that came to 7 GB for a policy of 135M weights.
64 of each are kept here, which cost no time that was seen.
"""

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil

USER_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
KEPT_SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
settled = ""  # what was found, in words


for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # a terminal without UTF-8 gets "?" for "…", and no error
        stream.reconfigure(errors="replace")


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill."""


def own_cores():
    """Numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def busy_cores(seconds=0.1):
    """How many of them others keep busy while this process sleeps; 0 where the system does not say."""
    try:
        shares = psutil.cpu_percent(seconds, percpu=True)
        return round(sum(shares[core] for core in own_cores()) / 100)
    except (OSError, LookupError, psutil.Error):
        return 0


def settle_threads():
    """Sets OpenMP's spin count and threads, unless the user set them. Returns what it found, in words."""
    if any(name in os.environ for name in USER_SET):
        return ""
    cores = len(own_cores())
    taken = busy_cores()
    # a fraction of a millisecond; OpenMP's own default spins 30 times as long
    os.environ["GOMP_SPINCOUNT"] = "10000"
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores - taken))
    return f"{taken} of {cores} cores are busy with other work" if taken else ""


def _leave_at_once(number, _):
    """Ctrl-C while modules are still being imported: there is nothing to close yet."""
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(128 + number)


def _terminate(*_):
    raise Terminated


@contextmanager
def ends_cleanly(errors, saved=str):
    """Around main: an error of `errors` is one line and exit code 1; Ctrl-C is 130 and SIGTERM 143, with what
    saved() says is kept."""
    before = signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is _leave_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except errors as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as stop:
        word, code = ("terminated", 143) if isinstance(stop, Terminated) else ("interrupted", 130)
        print(f"{word}; {saved() or 'nothing was written'}", file=sys.stderr)
        sys.exit(code)
    finally:
        signal.signal(signal.SIGTERM, before)


for kept, shapes in KEPT_SHAPES.items():
    os.environ.setdefault(kept, shapes)
program = Path(sys.argv[0])
project = Path(__file__).resolve().parents[1]
if program.is_file() and program.resolve().parent == project:  # a script, not a test or a notebook
    settled = settle_threads()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as a shell wants it for jobs behind it
        signal.signal(signal.SIGINT, _leave_at_once)
