"""The house stays readable: arrows run down only, one thought a line, docs say what is there."""

import ast
import dataclasses
import importlib
import io
import json
import os
import re
import runpy
import symtable
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest

import askit
import omne_r1
from common import data, flags, retriever
from common.rollout import Trajectory, Turn
from tests.conftest import forked

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(ROOT.glob("*.py"))
LOWER = sorted((ROOT / "common").rglob("*.py")) + sorted((ROOT / "kernels").glob("*.py"))
CODE = SCRIPTS + LOWER + sorted((ROOT / "benchmarks").glob("*.py")) + sorted((ROOT / "examples").glob("*.py"))
# doors: a flag, a device or a run's end opens them
ROOMS = ("gpu", "graphs", "page", "report", "serve", "vectors", "warmup", "world")


def module_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in SCRIPTS + LOWER}


def imports_of(path):
    """Own modules that a file imports at its top, and those that it imports inside a function."""
    top, inside = set(), set()
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {node for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found = inside if node in inner else top
        found |= set(names) & (MODULES.keys() - {"common", module_of(path)} | {"benchmarks"})
    return top, inside


def reached(top, module):
    """The modules that importing one brings along."""
    seen, left = set(), [module]
    while left:
        more = top[left.pop()] - seen
        seen |= more
        left += more
    return seen


def drawer_of(module):
    """The script that common.of_<script> serves, "" for other modules."""
    served = re.match(r"common\.of_(\w+)", module)
    return next(s.stem for s in SCRIPTS if s.stem.startswith(served[1])) if served else ""


def is_program(module):
    return 'if __name__ == "__main__"' in MODULES[module].read_text()


def floor_of(module):
    """0 kernels, 1 core, 2 rooms, drawers and programs, 3 scripts."""
    first, *rest = module.split(".")
    if first == "kernels":
        return 0
    if first != "common":
        return 3
    return 2 if rest and rest[0] in ROOMS or drawer_of(module) or is_program(module) else 1


def test_imports_run_down_in_no_circle_and_inside_functions_through_doors_alone():
    found = {module: imports_of(path) for module, path in MODULES.items()}
    top = {module: both[0] for module, both in found.items()}
    whole = {module: both[0] | both[1] for module, both in found.items()}
    floor = {"benchmarks": 3}
    floor |= {module: floor_of(module) for module in MODULES}
    for script in SCRIPTS:
        closure = reached(top, script.stem)
        size = sum(MODULES[m].stat().st_size for m in closure)
        print(f"{script.stem:12} brings {len(closure)} modules along, {size / 1024:.0f} KB")
    wrong = [f"{m} is in a circle" for m in top if m in reached(top, m)]
    for module, others in whole.items():
        both = [other for other in others - {module, "benchmarks"} if module in whole[other]]
        wrong += [f"{module} and {other} import one another" for other in both]
    for module, (above, inside) in found.items():
        for other in above:
            up = floor[other] > floor[module] or floor[other] == 3
            if up:
                wrong.append(f"{module} -> {other} runs up")
        for other in inside:
            if floor[other] != 2:
                wrong.append(f"{module} -> {other}, inside a function, is no door")
    assert not wrong, "\n".join(wrong)


def test_what_serves_one_script_lies_in_its_drawer_which_nothing_else_opens():
    whole = {module: set.union(*imports_of(path)) for module, path in MODULES.items()}
    wrong = []
    for module in MODULES:
        mine = drawer_of(module)
        users = {drawer_of(other) or other for other in MODULES if module in whole[other]}
        if mine and users - {mine}:
            wrong.append(f"{module} serves {mine}, and {', '.join(users - {mine})} imports it")
        its_own = module.startswith("common.") and not is_program(module)
        if its_own and not mine and len(users) == 1 and users <= {s.stem for s in SCRIPTS}:
            wrong.append(f"{module} serves {', '.join(users)} alone: into its drawer")
    assert not wrong, "\n".join(wrong)


def test_every_name_that_is_imported_from_a_module_of_ours_is_there():
    """Inside functions too, where nothing but a rare flag would meet a name that is gone."""
    files = sorted(path for folder in ("docs", "benchmarks", "examples") for path in
                   (ROOT / folder).glob("*.py"))
    names = {}
    for path in {*CODE, *files}:
        symbols = symtable.symtable(path.read_text(), str(path), "exec").get_symbols()
        names[module_of(path)] = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    packages = {module.partition(".")[0] for module in names}
    gone = []
    for path in {*CODE, *files}:
        for node in ast.walk(ast.parse(path.read_text())):
            asked = []
            if isinstance(node, ast.ImportFrom):
                asked = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                asked = [alias.name.rpartition(".")[::2] for alias in node.names]
            for module, name in asked:
                whole = f"{module}.{name}".strip(".")
                if whole.partition(".")[0] not in packages or whole in {*names, *packages}:
                    continue
                if name not in names.get(module, ()):
                    gone.append(f"{path.relative_to(ROOT)}:{node.lineno}: {whole}")
    assert not gone, "\n".join(gone)


def test_common_reads_of_cfg_the_flags_that_every_script_has():
    """What a paper talks about is handed over as a value; a drawer may read its script's Config."""
    shared = {field.name for field in dataclasses.fields(flags.PassageFlags)}
    wrong = []
    for path in LOWER:
        if drawer_of(module_of(path)) or path.name == "agent.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("cfg"):
                if node.attr not in shared:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)


def test_functions_are_short_and_lines_hold_one_thought():
    wrong = []
    for path in CODE:
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > 60:
                    wrong.append(f"{path.relative_to(ROOT)}: {node.name} has {lines} lines of at most 60")
        counts = tokens_of_code_lines(source)
        if len(counts) >= 40 and sum(counts) / len(counts) > 12:
            wrong.append(f"{path.relative_to(ROOT)}: {sum(counts) / len(counts):.1f} tokens a code line")
    assert not wrong, "\n".join(wrong)


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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_goes_from_config_to_main_and_then_to_what_is_not_in_the_paper(script):
    text = script.read_text()
    order = ["@dataclass\nclass Config", f"\n# {64 * '-'} update", "\nMETRICS = ", "\ndef train(",
             "\ndef evaluate(", "\ndef main(", 'if __name__ == "__main__"']
    appendix = "\n# ================"
    if appendix in text:
        order.insert(-1, appendix)
    places = [text.index(part) for part in order]
    assert places == sorted(places)


def test_every_metric_has_words():
    tables = [importlib.import_module(script.stem).METRICS for script in SCRIPTS]
    for table in [*tables, askit.PRETRAIN_METRICS, omne_r1.SFT_METRICS]:
        assert [key for key, metric in table.items() if not metric.words] == []


def test_the_method_of_ones_own_in_the_docs_runs(tmp_path):
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs/write_your_own.md").read_text(), re.DOTALL)[1]
    assert sum(bool(line.strip()) for line in code.split("\n")) <= 60
    script = tmp_path / "rloo.py"
    script.write_text(code)
    small = ("--steps 2 --questions-per-step 2 --group-size 2 --eval-limit 2 --limit 10 "
             "--max-response 60 --bad-format-reward -1 --out").split()

    def run(argv):
        sys.argv[1:] = argv
        runpy.run_path(str(script), run_name="__main__")

    child = forked(run, *small, tmp_path, out=tmp_path / "said")
    child.join()
    assert child.exitcode == 0, (tmp_path / "said").read_text()
    folder = tmp_path / "rloo/rloo-hard-seed0"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    assert (folder / "eval_test.json").exists() and (folder / "trajectories.html").exists()


def test_the_three_edits_of_the_docs_make_a_script_that_trains(tmp_path):
    page = (ROOT / "docs/three_edits.md").read_text()
    script = (ROOT / "at2po.py").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", page, re.DOTALL):
        lines = diff.splitlines(keepends=True)
        old, new = ("".join(line[1:] for line in lines if line[0] == sign) for sign in "-+")
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    (tmp_path / "my_at2po.py").write_text(script)
    (tmp_path / "my_tools.py").write_text(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1])
    passage = {"id": "1", "title": "Leave", "text": "Ask Ann Holt for leave."}
    (tmp_path / "my_corpus.jsonl").write_text(json.dumps(passage))
    small = ("--retriever own:my_tools:Tools --world plain --steps 1 --questions-per-step 2 --mini-batch 2 "
             "--chains 2 --rounds 1 --expand 1 --max-response 60 --eval-limit 2 --limit 4 --name x "
             "--out .").split()

    def train(argv):
        os.chdir(tmp_path)
        sys.path.insert(0, str(tmp_path))
        mine = importlib.import_module("my_at2po")
        mine.main(argv)
        tools = retriever.make_retriever("own:my_tools:Tools", None)
        [result], [passage] = tools.search(["calculate: 12 * 7", "who grants leave?"], 1)
        assert (result.text, passage.title) == ("84", "Leave") and "our company" in mine.SYSTEM_PROMPT
        searched = Turn([1], [0.0], "</search>", "<think> a </think> <search> leave </search>", [2],
                        " <result>\nAnn\n</result>\n")
        said = Turn([1], [0.0], "eos", "<think> a </think> <answer> \\boxed{ Ann } </answer>")
        asked = data.Question("q", "?", ["Ann"])
        scored = mine.score(Trajectory("q", [1], [searched, said]), asked, mine.Config())
        assert (round(scored.reward, 3), scored.info.em) == (.95, 1)

    child = forked(train, *small, out=tmp_path / "said")
    child.join()
    assert child.exitcode == 0, (tmp_path / "said").read_text()
    assert len((tmp_path / "at2po/x/metrics.jsonl").read_text().splitlines()) == 1


def anchors_of(page):
    """The names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_in_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "results").rglob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", page.read_text()):
            place = page.parent / target if target else page
            assert "://" in target or place.exists(), (page.name, target)
            assert not anchor or "://" in target or anchor in anchors_of(place), (page.name, target, anchor)


def test_readme_is_short_and_leads_to_every_page():
    text = (ROOT / "README.md").read_text()
    pages = sorted((ROOT / "docs").glob("*.md"))
    assert len(text.splitlines()) <= 90
    assert not [page.name for page in pages if f"(docs/{page.name})" not in text]
    assert sum(page.stat().st_size for page in pages) < 117_000


def test_the_lock_has_every_version_that_is_required():
    def pins(name):
        lines = (ROOT / name).read_text().splitlines()
        return {line.split()[0] for line in lines if re.match(r"[\w-]+==", line)}

    assert pins("requirements.txt") <= pins("requirements.lock")


def test_uv_installs_what_pip_does():
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lists = [told["project"]["dependencies"], told["dependency-groups"]["dev"]]
    needs, _, tests = (ROOT / "requirements.txt").read_text().partition("\n# tests\n")
    of_pip = [[line.split("#")[0].strip() for line in part.splitlines()] for part in (needs, tests)]
    assert lists == [[need for need in part if need] for part in of_pip]
