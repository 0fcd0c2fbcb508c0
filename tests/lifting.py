"""Runs a program where nothing of ours can be imported."""

import importlib.util
import os
import runpy
import sys

from tests.conftest import ROOT, forked

OURS = ("common", "kernels", "docs", "tests", "at2po", "bi_rar", "mygo_mujica", "omne_r1", "askit")


def run(folder, program):
    """What a program prints in that folder."""
    (folder / "program.py").write_text(program, encoding="utf-8")
    child = forked(_alone, folder, out=folder / "said", err=folder / "wrong")
    child.join()
    assert child.exitcode == 0, (folder / "wrong").read_text()
    return (folder / "said").read_text()


def _alone(argv):
    """A process that imported torch before, and can import nothing of ours any more."""
    os.chdir(argv[0])
    sys.path[:] = [argv[0], *(place for place in sys.path if place not in ("", str(ROOT)))]
    for name in list(sys.modules):
        if name.partition(".")[0] in OURS:
            del sys.modules[name]
    for name in OURS:
        if not os.path.exists(f"{name}.py"):  # a lifted file may have the name of its script
            assert importlib.util.find_spec(name) is None, f"{name} can be imported here"
    runpy.run_path("program.py", run_name="__main__")
