"""Lifts pieces of ours into an empty folder and runs them there (docs/copy.md)."""

import ast
import builtins
import importlib.util
import os
import runpy
import sys

from tests.conftest import ROOT, forked

OURS = ("common", "kernels", "docs", "tests", "at2po", "bi_rar", "mygo_mujica", "omne_r1", "askit")


def lift(folder, name, imports, **pieces):
    """Writes folder/name: the import lines, and behind them functions, classes and constants of our files as
    they stand there. No name in it may be left without a meaning. pieces: module=names with blanks between,
    a folder's module as common__turns."""
    parts = [imports]
    for module, names in pieces.items():
        source = (ROOT / f"{module.replace('__', '/')}.py").read_text(encoding="utf-8")
        lines = source.split("\n")
        found = {}
        for node in ast.parse(source).body:
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            text = "\n".join(lines[first - 1:node.end_lineno])
            if isinstance(node, ast.Assign):
                for target in ast.walk(node.targets[0]):
                    if isinstance(target, ast.Name):
                        found[target.id] = text
            else:
                found[getattr(node, "name", None)] = text
        parts += dict.fromkeys(found[one] for one in names.split())  # one line may set several names
    text = "\n\n\n".join(parts) + "\n"
    (folder / name).write_text(text, encoding="utf-8")
    dangling = names_without_meaning(text)
    assert not dangling, f"{name}: nobody says what {dangling} is"


def names_without_meaning(source):
    """Names that a module reads and never sets."""
    stored, loaded = {*dir(builtins), "__file__", "__name__"}, set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, ast.ExceptHandler):
            stored.add(node.name)
        elif isinstance(node, ast.alias):
            stored.add((node.asname or node.name).split(".")[0])
    return loaded - stored


def run(folder, program):
    """What a program prints in that folder, where nothing of ours can be imported."""
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
        assert importlib.util.find_spec(name) is None, f"{name} can be imported here"
    runpy.run_path("program.py", run_name="__main__")
