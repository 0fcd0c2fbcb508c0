"""How a program of this project begins and ends. A script imports it before torch, which reads its thread settings only once.

    from common import process      # threads and wait policy; Ctrl-C during the imports below is one line and exit code 130
    …
    with process.ends_cleanly(errors, saved): …      # in main: one line for what the user can mend; Ctrl-C 130, SIGTERM 143

Two OpenMP threads that spin at every barrier of a tiny matrix product stand still whenever anything else runs: one of them waits for a
time slice while the other spins through its own. So cores that are busy with other work are left alone, and threads spin briefly before
they sleep (GNU OpenMP's spin count; asleep at once, two threads are slower than one on a quiet machine). What the user set stays.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

USER_SET = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
settled = None  # what was found, in words, where this module chose the threads


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they kill."""


def busy_cores(seconds=0.1):
    """How many cores other processes keep busy just now; 0.0 where the system does not say."""
    def sample():
        user, nice, system, idle, waiting = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:6])
        own = sum(os.times()[:2]) * os.sysconf("SC_CLK_TCK")
        return user + nice + system - own, user + nice + system + idle + waiting
    try:
        busy, total = sample()
        time.sleep(seconds)
        more_busy, more_total = sample()
    except (OSError, ValueError):
        return 0.0
    return max(0.0, (more_busy - busy) / max(1, more_total - total)) * (os.cpu_count() or 1)


def settle_threads():
    """Sets OpenMP's spin count and number of threads for this process. Returns what it found, in words; None where the user set them."""
    if any(name in os.environ for name in USER_SET):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    taken = round(busy_cores())
    os.environ["GOMP_SPINCOUNT"] = "10000"  # some 30 microseconds; the default of 300,000 is ten times slower beside a busy process
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores - taken))
    return f"{taken} of {cores} cores are busy with other work" if taken else ""


def _leave_at_once(*_):
    """Ctrl-C while modules are still being imported: nothing has been begun, so nothing is left to close."""
    os.write(2, b"interrupted; nothing was begun\n")
    os._exit(130)


def _terminate(*_):
    raise Terminated


@contextmanager
def ends_cleanly(errors, saved=str):
    """Around main: an error of `errors` is one line and exit code 1; Ctrl-C is 130 and SIGTERM 143, with what saved() says is kept."""
    ours = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _terminate}
    main_thread = threading.current_thread() is threading.main_thread()  # no other may set handlers
    before = {number: signal.signal(number, handler) for number, handler in ours.items()} if main_thread else {}
    try:
        yield
    except errors as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt as stop:
        terminated = isinstance(stop, Terminated)
        print(f"{'terminated' if terminated else 'interrupted'}; {saved() or 'nothing was written'}", file=sys.stderr)
        sys.exit(143 if terminated else 130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if Path(sys.argv[0] or ".").resolve().parent == Path(__file__).resolve().parents[1]:  # a script, not a test or a notebook
    signal.signal(signal.SIGINT, _leave_at_once)
    settled = settle_threads()
