"""The terminal; files that are whole or not there: JSON, JSON lines, atomic writes; names of models and data
sets. Imports nothing of the project."""

import functools
import json
import os
import re
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

console = Console(highlight=False, soft_wrap=True)
if not console.is_terminal:  # logs are not cut at 80 columns
    console.width = 160


class UserError(Exception):
    """What a program ends with in one line that says what to do. Anything else is a bug and shows where."""


class RunError(UserError):
    """A run folder or one of its files cannot be used as asked; the message says what to do."""


# ---------------------------------------------------------------- terminal

def say(text):
    """A line on the terminal, whatever brackets it has."""
    console.print(text, markup=False)


def warn(message):
    console.print(message, style="yellow", markup=False)


def one_line(text):
    """Text of a data set, a model or a passage on one line, without control characters."""
    joined = " ".join(str(text).split())
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", "\N{REPLACEMENT CHARACTER}", joined)


def plain(text):
    """The same for the terminal, without markup."""
    return escape(one_line(text))


def clock(seconds):
    """
    >>> clock(42), clock(188), clock(7500)
    ('42s', '3m08s', '2h05m')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"


class Progress:
    """A long piece of work, done of total: a live line on a terminal, a line every 20 seconds in a log.

    at_once: its parts run side by side: the time left is not guessed. Where it is not entered, there is no
    live line."""
    every = 20.0

    def __init__(self, what, at_once=False):
        self.at_once = at_once
        self.what = what
        self.began = self.said = time.time()
        self.status = None

    def __enter__(self):
        if console.is_terminal:
            self.status = console.status(self.what)
            self.status.start()
        return self

    def __exit__(self, *_):
        if self.status:
            self.status.stop()

    def __call__(self, done, total, more=""):
        """total: 0 = not known. more: what else tells that it goes on."""
        now = time.time()
        line = f"{self.what}: {done}{total and f'/{total}' or ''}{more}, {clock(now - self.began)}"
        if total and done and not self.at_once:
            left = (now - self.began) * (total - done) / done
            line += f", {clock(left)} left"
        if self.status:
            self.status.update(line)
        elif now - self.said > self.every:
            self.said = now
            say(line)


# ---------------------------------------------------------------- files

def write_atomic(path, text):
    """The file is the old one or the new one, never a part; a full disk leaves the old one."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(part, "w", encoding="utf-8", errors="replace") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


REMEDY = "restore it, or start anew with another --name"


def write_json(path, value):
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False))


def write_jsonl(path, rows):
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_json(path, kind):
    """The value of a JSON file, a `kind` (dict or list); RunError names a missing or damaged one."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({type(error).__name__}): {REMEDY}") from error
    if not isinstance(value, kind):
        raise RunError(f"{path} holds no {kind.__name__}: {REMEDY}")
    return value


def read_evaluations(folder, when=""):
    """{set: {"summary", "predictions"}} of a run folder's final evaluations, or of those `when` ("before",
    "step10")."""
    found = {}
    for file in sorted(Path(folder).glob("eval_*.json"), key=lambda file: file.stem):
        parts = re.fullmatch(r"eval_(.*?)(_(before|step\d+))?\.json", file.name)
        name, _, suffix = parts.groups()
        if (suffix or "") == when:
            found[name] = read_json(file, dict)
            kinds = [type(found[name].get(key)) for key in ("summary", "predictions")]
            if kinds != [dict, list] or not all(isinstance(row, dict) for row in found[name]["predictions"]):
                raise RunError(f"{file} is no evaluation of ours: {REMEDY}")
    return found


def read_jsonl(path):
    """Rows of a JSON-lines file; a last line cut off by a kill is left out. No file: no rows."""
    path = Path(path)
    lines = path.read_bytes().split(b"\n") if path.exists() else []  # (splitlines would cut at U+2028, too)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            if line:
                rows.append(json.loads(line))
                if not isinstance(rows[-1], dict):
                    raise RunError(f"{path}: line {number} is no JSON object: {REMEDY}")
        except (ValueError, RecursionError) as error:
            if number < len(lines):
                raise RunError(f"{path}: line {number} is not valid JSON: {REMEDY}") from error
    return rows


# ---------------------------------------------------------------- files that grow

class Lines:
    """A file of JSON lines that only grows; the last line, if a kill cut it off, is dropped."""

    def __init__(self, path):
        path = Path(path)
        if path.exists():
            whole = path.read_bytes().rfind(b"\n") + 1
            os.truncate(path, whole)
        self.rows = read_jsonl(path)
        self.file = open(path, "a", encoding="utf-8", errors="replace", newline="\n")

    def add(self, row):
        self.file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.file.flush()
        self.rows.append(row)

    def close(self):
        self.file.close()


class Keyed(Lines):
    """Rows by their "key", each on file as soon as it is there; threads may add at once."""

    def __init__(self, path):
        super().__init__(path)
        self.known = {row["key"]: row for row in self.rows}
        self.lock = threading.Lock()

    def of(self, key, make):
        """The row of a key: that on file, or make() -> dict, which is then there."""
        if key not in self.known:
            row = {"key": key} | make()
            with self.lock:
                self.known[key] = row
                self.add(row)
        return self.known[key]


# ---------------------------------------------------------------- models and data sets by name

class HubError(UserError):
    """Nothing usable has that name; the hub's own words say why."""


def looks_like_path(name):
    """Whether a name can only be meant as a path: hub ids are "owner/name".

    >>> [looks_like_path(n) for n in ("Qwen/Qwen3-4B", "./model", "nothere", "runs/at2po/a", "C:\\\\model")]
    [False, True, True, True, True]
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(parts):
        return True
    return name[0] in "./~" or "\\" in name or Path(parts[0]).is_dir()


@functools.cache
def locate(name, kind="model"):
    """What `from_pretrained` or `load_dataset` should be given for `name`. kind: "model" (encoders too) or
    "dataset".

    One request, no retries: a mistyped or unreachable name costs a moment, not a minute. Raises HubError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if looks_like_path(name):
        raise HubError(f"{name}: no such folder here, and no hub id such as owner/name")
    from huggingface_hub import HfApi, snapshot_download
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10.0)
        return name
    except Exception as error:  # misspelt, gated, no network, HF_HUB_OFFLINE: its own words say which
        why = one_line(error)
    try:
        folder = snapshot_download(name, repo_type=kind, local_files_only=True)
    except Exception as error:  # whatever the client raises, there is no copy
        raise HubError(f"{name}: not in the local cache; the hub: {why}") from error
    return folder if kind == "model" else name  # (`datasets` finds its own copies)
