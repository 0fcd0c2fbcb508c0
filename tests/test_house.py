"""The house stays readable: arrows run down only, one thought a line, docs say what is there."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

from docs import differences, metrics

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
LOWER = sorted((ROOT / "common").rglob("*.py")) + sorted((ROOT / "kernels").glob("*.py"))
CODE = SCRIPTS + LOWER + sorted((ROOT / "benchmarks").glob("*.py"))
ABOVE = {  # what a floor must not import
    "kernels": {"common", "benchmarks", *(f.stem for f in SCRIPTS)},
    "common": {"benchmarks", *(f.stem for f in SCRIPTS)},
}


def name(path):
    return str(path.relative_to(ROOT))


def imported(path):
    """Names of the modules that a file imports, wherever in it."""
    return modules_of(ast.walk(ast.parse(path.read_text())))


def modules_of(nodes):
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", SCRIPTS + LOWER, ids=name)
def test_imports_run_down_only(path):
    floor = path.relative_to(ROOT).parts[0]
    forbidden = ABOVE.get(floor, {f.stem for f in SCRIPTS} - {path.stem})  # scripts never import one another
    assert not {module.split(".")[0] for module in imported(path)} & forbidden


def test_common_has_no_circles():
    modules = {}
    for path in (ROOT / "common").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    at_import = {}
    for module, path in modules.items():
        top = modules_of(ast.parse(path.read_text()).body)
        at_import[module] = top & (modules.keys() - {"common"})
    done = set()
    while rest := [m for m in at_import if m not in done]:
        free = [m for m in rest if at_import[m] <= done]
        assert free, {m: at_import[m] - done for m in rest}
        done |= set(free)


@pytest.mark.parametrize("path", CODE, ids=name)
def test_one_thought_a_line(path):
    source = path.read_text()
    wide = [i for i, line in enumerate(source.split("\n"), 1) if len(line) > 110]
    assert not wide, "lines over 110 columns"
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lengths[node.name] = node.end_lineno - node.lineno + 1
    assert not [f for f, lines in lengths.items() if lines > 60], "functions over 60 lines"
    counts = tokens_of_code_lines(source)
    assert len(counts) < 40 or sum(counts) / len(counts) <= 10.5, "tokens a code line"


def tokens_of_code_lines(source):
    """Names, numbers, strings and operators of each line that is neither blank, comment nor docstring."""
    documented = set()
    for node in ast.walk(ast.parse(source)):
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and ast.get_docstring(node) is not None:
            documented |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    counts = {}
    inside = 0  # of f-strings: each counts as one string, though Python 3.12 takes them apart
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        inside -= kind == "FSTRING_END"
        counted = kind in ("NAME", "NUMBER", "STRING", "OP", "FSTRING_START") and not inside
        inside += kind == "FSTRING_START"
        if counted and token.start[0] not in documented:
            counts[token.start[0]] = counts.get(token.start[0], 0) + 1
    return list(counts.values())


@pytest.mark.parametrize("script", SCRIPTS, ids=name)
def test_a_script_goes_from_config_to_main_and_then_to_what_is_not_in_the_paper(script):
    text = script.read_text()
    order = ["@dataclass\nclass Config", f"\n# {64 * '-'} update", "\ndef train(", "\ndef evaluate(",
             "\ndef main(", "\n# ================", "\nMETRICS = ", 'if __name__ == "__main__"']
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_the_docs_have_every_metric_and_no_other():
    text = (ROOT / "docs/runs.md").read_text()
    assert metrics.table() in text, "docs/runs.md: its table is not that of python -m docs.metrics"


def test_the_page_of_differences_is_that_of_the_docstrings():
    text = (ROOT / "docs/differences.md").read_text()
    assert text == differences.page(), "docs/differences.md is not what python -m docs.differences writes"
    for words in ("bad format earns", "What the cascade does.", "Misprints.", "reward of stage 3"):
        assert text.count(words) == 1, words


def test_the_method_of_ones_own_in_the_docs_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/write_your_own.md").read_text(), re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in code.split("\n")) <= 60
    script = tmp_path / "rloo.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n" + code)
    small = ("--warmup-steps 2 --steps 2 --questions-per-step 2 --group-size 2 --eval-limit 2 --limit 10 "
             "--max-response 60 --bad-format-reward -1 --out").split()
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script, *small, tmp_path], capture_output=True, text=True,
                          env=environment)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "rloo/atpo-seed0"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "eval_test.json").exists() and (folder / "trajectories.html").exists()


def test_links_in_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "results/README.md"]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)
