"""How programs begin and end: threads beside other work, Ctrl-C and
SIGTERM at any moment, flags and their help."""

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import at2po
import bi_rar
import mygo_mujica
from common import flags, process
from common.files import Lines, RunError, read_evaluations, read_jsonl
from tests.conftest import ROOT, forked
from tests.test_flags import SCRIPTS
from tests.test_run import ten_lines

# ---- threads

@pytest.mark.parametrize("busy, given, spins, threads", [
    (0, None, "10000", "4"), (1, None, "10000", "3"), (9, None, "10000", "1"),
    *((1, name, None, None) for name in process.USER_SET)])
def test_threads_spin_briefly_and_leave_busy_cores_alone(monkeypatch, busy, given, spins, threads):
    for name in process.USER_SET:
        monkeypatch.delenv(name, raising=False)
    expected = {"GOMP_SPINCOUNT": spins, "OMP_NUM_THREADS": threads}
    if given:
        monkeypatch.setenv(given, "7")
        expected[given] = "7"
    monkeypatch.setattr(process, "own_cores", lambda: set(range(4)))
    monkeypatch.setattr(process, "busy_cores", lambda: busy)
    said = process.settle_threads()
    assert (f"{busy} of 4 cores" in said) == bool(busy and not given)
    assert {name: os.environ[name] for name in process.USER_SET if name in os.environ} == {
        name: value for name, value in expected.items() if value}


def started(*args):
    """A script as a terminal starts it: Ctrl-C reaches it even where the tests run in the background."""
    return subprocess.Popen(
        [sys.executable, *map(str, args)], cwd=ROOT, stdout=-1, stderr=-1, text=True,  # pipes
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))


def own_environment():
    """This one, without what a user may have set, or this process has."""
    settled = *process.USER_SET, *process.KEPT_SHAPES
    return {name: value for name, value in os.environ.items() if name not in settled}


def test_a_busy_core_is_seen():
    if not Path("/proc/stat").exists():
        pytest.skip("no /proc/stat here")
    spins = "print(flush=True)\nwhile True: pass"
    spinning = subprocess.Popen([sys.executable, "-c", spins], stdout=subprocess.PIPE)
    try:
        spinning.stdout.readline()  # it has begun
        assert process.busy_cores(0.5) >= 1
    finally:
        spinning.kill()
        spinning.wait()


def test_a_library_import_changes_neither_handlers_nor_threads():
    code = (
        "import os, signal, sys; sys.argv = ['/elsewhere/tool.py']; "
        "before = signal.getsignal(signal.SIGINT); from common import process; "
        "assert signal.getsignal(signal.SIGINT) is before and 'GOMP_SPINCOUNT' not in os.environ; "
        "assert os.environ['LRU_CACHE_CAPACITY'] == os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'] == '64'")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env=own_environment())


# ---- Ctrl-C and SIGTERM

def test_ctrl_c_during_the_imports_is_one_line_and_130(tmp_path):
    running = started("at2po.py", "--out", tmp_path)
    while "libtorch" not in Path(f"/proc/{running.pid}/maps").read_text():  # then much is left to import
        time.sleep(.01)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate()
    assert running.returncode == 130 and "Traceback" not in said and said.startswith("interrupted")


@pytest.mark.parametrize("sent, code, word", [
    (signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")])
def test_stopping_a_run_says_what_is_saved_and_how_to_go_on(tmp_path, sent, code, word):
    running = forked(ten_lines, "--steps", 10_000, "--out", tmp_path, "--name", "a",
                     out=tmp_path / "out", err=tmp_path / "err")
    while len(read_jsonl(tmp_path / "at2po/a/metrics.jsonl")) < 3 and running.is_alive():
        time.sleep(.05)
    os.kill(running.pid, sent)
    running.join()
    said = (tmp_path / "err").read_text()
    assert running.exitcode == code and said.startswith(word), said
    assert "checkpoint of step" in said and "the same command and --resume" in said


def test_handlers_are_put_back_and_errors_are_one_line():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop, process.ends_cleanly((ValueError,)):
        raise ValueError("no such thing")
    assert stop.value.code == "error: no such thing"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


# ---- flags

def help_of(script, capsys):
    before = signal.getsignal(signal.SIGPIPE)
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    signal.signal(signal.SIGPIPE, before)
    return capsys.readouterr().out


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_flag_stands_in_a_group_with_words(script, capsys):
    whole = help_of(script, capsys)
    *_, shown = whole.split("without --model]\n")
    for f in dataclasses.fields(script.Config):
        flag = re.escape(f.name.replace("_", "-"))
        words = re.findall(rf"^  --(?:\[no-\])?{flag} \S+(?: \[\S*\])?\s\s+(\S.*)", shown, re.M)
        assert len(words) == 1 and len(words[0]) > 4 and "----" not in words[0], f.name
        assert not re.match(r"\||sec\.|Table|App|authors|ours", words[0]), f"{f.name}: a citation for words"
    titles = re.findall(r"^\w.*", shown, re.M)
    assert titles == [flags.PAPER, flags.DATA, flags.MACHINE, flags.RUN, flags.OURS]
    before, _, after = whole.partition(f"\n{flags.DATA}\n")
    assert before.count("\n") <= 60 and "  --lr " in before and "  --seed " in after


def test_help_shows_the_papers_numbers_beside_the_world_s(capsys):
    shown = help_of(at2po, capsys)
    assert re.search(r"--steps 240 \[60\] +training steps \| sec\. 5\.1", shown)
    assert re.search(r"--\[no-\]stop-at-answer no \[yes\]\s", shown)
    assert "python at2po.py --model Qwen/Qwen3-4B" in shown


def test_help_into_a_pipe_that_closes_ends_without_a_word(tmp_path):
    read, write = os.pipe()
    os.close(read)

    def helped(argv):
        os.dup2(write, sys.stdout.fileno())
        at2po.parse_args(argv)

    child = forked(helped, "--help", out=tmp_path / "said")
    child.join()
    assert child.exitcode == -signal.SIGPIPE and (tmp_path / "said").read_text() == ""


@pytest.mark.parametrize("cuda, there, chosen", [
    (True, True, "vllm"), (True, False, "transformers"), (False, True, "transformers")])
def test_the_engine_is_vllm_where_cuda_and_vllm_are(cuda, there, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(flags, "has_vllm", lambda: there)
    for script in (at2po, bi_rar, mygo_mujica):
        assert script.parse_args(["--model", "m", "--data", "q.jsonl"]).engine == chosen
        assert script.parse_args([]).engine == "transformers"  # the world's tiny policy
        assert script.parse_args(["--engine", "transformers"]).engine == "transformers"


def test_flags_given_with_underscores_count_too():
    assert flags.given_flags(["--eval_data=dev", "--model", "x"])[1] == {
        "--eval-data": "dev", "--model": "x", "x": ""}


# ---- Hugging Face's package of the name kernels

def hub_kernels(folder):
    """A made one, of the names that transformers imports, as a site-packages folder."""
    package = folder / "kernels"
    package.mkdir()
    names = re.findall(r"\w+", (
        "CUDAProperties Device LayerRepository LocalLayerRepository Mode ROCMProperties get_kernel kernelize "
        "register_kernel_mapping replace_kernel_forward_from_hub use_kernel_mapping "
        "use_kernel_forward_from_hub use_kernelized_func"))
    body = "    def __init__(self, *a, **k): pass\n    def __call__(self, x): return x\n"
    classes = "".join(f"class {name}:\n{body}" for name in names)
    (package / "__init__.py").write_text(
        "import importlib.metadata\n__version__ = importlib.metadata.version('kernels')\n"
        f"from kernels.layer import {', '.join(names)}\nfrom kernels._parts import part\n")
    (package / "layer").mkdir()
    (package / "layer/__init__.py").write_text("from kernels._parts import part\n" + classes)
    (package / "layer/mode.py").write_text("from kernels.layer import Mode\n")
    (package / "_parts.py").write_text("part = 'theirs'\n")
    (folder / "kernels-0.17.2.dist-info").mkdir()
    (folder / "kernels-0.17.2.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.17.2\n")
    return folder


OURS = "from kernels import turn_logprob, weighted_cross_entropy as w; assert callable(turn_logprob)"
THEIRS = "import transformers.integrations.hub_kernels as h; assert h.is_kernels_available() and h.Mode"


@pytest.mark.parametrize("order, here", [
    (f"import at2po; {OURS}; {THEIRS}", True),
    ("import kernels.layer.mode, kernels; assert kernels.part == 'theirs' and kernels.__version__", True),
    (f"import common; {OURS}", False),  # elsewhere theirs is found first
    pytest.param(f"{THEIRS}; import at2po; from kernels.turn_logprob import turn_logprob", False,
                 marks=pytest.mark.slow),
])
def test_the_other_package_of_the_name_kernels_lives_beside_ours(order, here, tmp_path):
    path = os.pathsep.join([str(hub_kernels(tmp_path)), str(ROOT)])
    done = subprocess.run([sys.executable, "-c", order], cwd=ROOT if here else tmp_path,
                          env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("how", [(), ("-e",)])
def test_an_installation_is_refused_in_a_line_and_leaves_the_other_package_whole(how, tmp_path):
    pytest.importorskip("pip")
    before = {f: f.read_bytes() for f in hub_kernels(tmp_path).rglob("*") if f.is_file()}
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", ".ci", "kernels", "common"):
        (project / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--no-index",
         "--target", tmp_path, *how, project], capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode != 0 and "Traceback" not in said
    assert said.count("fivehop is not installed but used where it lies: pip install -r requirements.txt") == 1
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file() and f in before} == before
    assert not (tmp_path / "common").exists() and not list(tmp_path.glob("fivehop*"))


def test_bitsandbytes_does_not_warn_of_ours_whoever_imports_it():
    code = ("import common, logging; logging.getLogger('bitsandbytes.backends.cpu.ops').warning('of ours'); "
            "logging.getLogger('another').warning('of another')")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.strip() == "of another"


def test_without_the_other_package_a_name_of_theirs_is_none_of_ours():
    import kernels
    with pytest.raises(AttributeError, match="no attribute 'get_kernel'"):
        _ = kernels.get_kernel


def test_another_checkout_on_the_path_is_not_taken_for_the_other_package(tmp_path):
    shutil.copytree(ROOT / "kernels", tmp_path / "kernels")
    code = "import kernels; assert len(kernels.__path__) == 2; print(hasattr(kernels, 'get_kernel'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert done.stdout == "False\n", done.stderr[-500:]


@pytest.mark.parametrize("program, word", [("askit.py", b"--stage"), ("-m common.serve", b"search")])
def test_a_terminal_without_utf_8_shows_help(program, word):
    done = subprocess.run([sys.executable, *program.split(), "--help"], cwd=ROOT, capture_output=True,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and word in done.stdout and done.stdout.isascii(), done.stderr[-500:]


@pytest.mark.parametrize("text", [
    '{"summary": {}}', '{"summary": {}, "predictions": ["x"]}', "[]", "[" * 100_000])
def test_an_evaluation_of_another_form_is_named(tmp_path, text):
    (tmp_path / "eval_test.json").write_text(text)
    with pytest.raises(RunError, match="eval_test.json (is no evaluation|holds no dict|cannot be read)"):
        read_evaluations(tmp_path)


def test_a_line_that_a_kill_cut_off_goes_from_a_file_that_can_be_read_alone(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\xff\xfe\n{"b"')
    with pytest.raises(RunError, match="line 2 is not valid JSON"):
        Lines(file)
    file.write_bytes(b'{"a": 1}\n{"b"')
    lines = Lines(file)
    lines.add({"c": 2})
    lines.close()
    assert file.read_bytes() == b'{"a": 1}\n{"c": 2}\n'
