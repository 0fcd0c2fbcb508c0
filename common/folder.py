"""A run's folder: what it holds, what --resume may go on from, the folders of a run's stages.

    runs/<script>/<name>/  config.json  metrics.json  metrics.jsonl  samples.jsonl  eval_<set>.json
                           curves.png  trajectories.html  checkpoint/

Everything is JSON, PNG or HTML and can be read without this code; docs/runs.md has every file. A stage's
folder is <name>-<stage>."""

import fcntl
import glob
import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

from common import cache, checkpoint, distributed
from common.files import (
    RunError,
    check_form,
    read_evaluations,
    read_json,
    read_jsonl,
    say,
    warn,
    write_atomic,
    write_json,
)

FREE_ON_RESUME = (
    "cache_gb",  # a run that was killed for its memory goes on with less
    "steps", "eval_every", "save_every", "log", "resume", "out", "collect")
INPUTS = (  # flags that name files, folders and hub ids which are read
    "data", "eval_data", "corpus", "graph", "retriever", "graph_encoder", "warmup_data", "sft_data",
    "model", "checkpoint", "forward", "backward", "scorer", "encoder", "action_model", "submit_model",
    "question_model")
NO_INPUTS = ("", "world", "contexts", "evidences", "bm25", "lines")  # which these flags may say as well
opened = []  # the folders of this process, for what Ctrl-C says


class RunFolder:
    """runs/<script>/<name>. A new run never overwrites one that exists;
    a resumed one must be configured as it was.

    The constructor checks and writes nothing; `create` writes config.json once everything else has loaded.
    Other processes are kept out until this one ends: of a new run from `create` on, of a resumed one before
    anything is read. `id` names the run in its checkpoints, `saved` is the configuration it was begun with,
    `inputs` what it reads (inputs_of), `start` the checkpoint that it goes on from."""

    def __init__(self, root, script, name, config, resume=False, free_to_change=()):
        one_word = name == Path(name).name and "\\" not in name and name.isprintable()
        if not one_word or name.startswith(".") or len(name) > 200:
            raise RunError(f"--name {name[:200]!r}: the name of a folder in {root}/{script}, of at most 200 "
                           "letters on one line, without slashes or a dot before it")
        self.path = Path(root) / script / name
        self.config = config
        self.resume = resume
        self.tracker = None
        self.start = None
        if not resume and begun(self.path):
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        if resume and not (self.path / "config.json").exists():
            raise RunError(f"--resume: {self.path} holds no run (no config.json)")
        if resume:
            distributed.once(self._keep_others_out)
        self.saved = read_json(self.path / "config.json", dict) if resume else {}
        self.inputs = inputs_of(config)
        self.id = self.saved.get("run_id") or os.urandom(8).hex()
        if resume:
            self._refuse_changes(free_to_change)
        opened.append(self)

    def _refuse_changes(self, free_to_change):
        for key, value in self.config.items():
            if key not in free_to_change and self.saved.get(key) != json.loads(json.dumps(value)):
                flag = "--" + key.replace("_", "-")
                raise RunError(f"--resume: this run was started with {key} = {self.saved.get(key)!r}, "
                               f"not {value!r}; leave {flag} as it was")
        begun_with = self.saved.get("inputs", {})  # (runs of before have none)
        for name, digest in self.inputs.items():
            if begun_with.get(name, digest) != digest:
                raise RunError(f"--resume: {name.split(' ', 1)[1]} has changed since this run began: "
                               "restore it, or start anew with another --name")

    def _keep_others_out(self):
        if hasattr(self, "lock"):
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / ".lock", "w")
        except OSError as error:
            raise RunError(f"cannot create {self.path}: {error.strerror}") from error
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise RunError(f"another process is writing to {self.path}: wait for it, "
                           "or choose another --name") from error
        except OSError:
            warn(f"{self.path}: this file system has no locks; see that no other process writes there")

    @distributed.by_one
    def create(self, **facts):
        """Makes the folder. facts: what else config.json keeps of the process that began the run."""
        self._keep_others_out()
        if not self.resume and (self.path / "config.json").exists():
            # begun and ended while this one was loading
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        config = self.config | {"run_id": self.id, "inputs": self.saved.get("inputs", self.inputs)} | facts
        write_atomic(self.path / "config.json", json.dumps(config, indent=1))

    @distributed.by_one
    def rewind(self, step):
        """Drops the lines of steps after `step`, which a killed run may have written past its last
        checkpoint, from every .jsonl file of the folder."""
        written = {f.name for f in self.path.glob("*.jsonl")}
        for name in sorted({"metrics.jsonl", "samples.jsonl"} | written):
            kept = [json.dumps(r) + "\n" for r in self.rows(name) if r["step"] <= step]
            write_atomic(self.path / name, "".join(kept))

    def rows(self, name):
        """The lines of a .jsonl file of steps."""
        rows = read_jsonl(self.path / name)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict) or not isinstance(row.get("step"), int):
                raise RunError(f"{self.path / name}: line {number} has no step; nothing was changed")
        return rows

    def append(self, name, rows):
        """Adds rows to metrics.jsonl or samples.jsonl, flushed to disk."""
        if distributed.rank() > 0:
            return
        try:
            with open(self.path / name, "a", encoding="utf-8", errors="replace") as f:
                lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in rows]
                f.write("".join(lines))
                f.flush()
                os.fsync(f.fileno())
        except OSError as error:
            raise RunError(f"cannot write {self.path / name}: {error.strerror}") from error

    def write(self, name, value):
        distributed.once(write_json, self.path / name, value)

    def kept(self, name, make):
        """What make() returns: lists, kept in a file for when the run goes on."""
        if not (self.path / name).exists():
            self.write(name, make())
        return read_json(self.path / name, list)

    def log(self, row):
        """A line of metrics.jsonl, and the same to the tracker of --log."""
        self.append("metrics.jsonl", [row])
        if self.tracker:
            numbers = {k: v for k, v in row.items() if k != "step"}
            self.tracker.log(numbers, step=row["step"])

    def is_done(self, steps, splits, newer_than=0):
        """Whether a resumed run has made all its steps, and the final evaluation of every split, which has to
        be younger than a time. Says so."""
        rows = self.rows("metrics.jsonl")
        made = rows[-1]["step"] if rows else 0
        files = [self.path / f"eval_{s.name}.json" for s in splits]
        evaluated = all(f.exists() and f.stat().st_mtime > newer_than for f in files)
        done = self.resume and made >= steps and evaluated
        if done:
            say(f"{self.path}: done before")
        return done

    @distributed.by_one
    def forget_evaluations(self):
        """The final ones, of fewer steps, where training goes on."""
        for file in self.path.glob("eval_*.json"):
            if not re.search(r"_(before|step\d+)\.json$", file.name):
                file.unlink(missing_ok=True)


def inputs_of(config):
    """{"--flag name": digest of its content} of the files, folders and hub ids that a configuration names,
    which are known by what they hold (cache.digest)."""
    found = {}
    for flag in INPUTS:
        for name in str(config.get(flag) or "").split(","):
            place = name
            if flag == "graph":
                place = name.partition("=")[2] or name  # TYPE=FILE
            elif flag == "retriever":
                place = name.removeprefix("dense:").partition("@")[0]  # dense:MODEL@INDEX
            digest = "" if place in NO_INPUTS or "://" in place else cache.digest(place)
            if digest:
                found[f"--{flag.replace('_', '-')} {place}"] = digest
    return found


def begun(folder):
    """Whether a run folder holds anything but the lock of a run that wrote nothing."""
    folder = Path(folder)
    return folder.is_dir() and any(f.name != ".lock" for f in folder.iterdir())


def open_stage(cfg, script, stage, free=(), saves=True):
    """open_folder of a stage, whose folder is <name>-<stage>. --resume begins one that was not begun yet,
    where another stage of the run was."""
    base, name = Path(cfg.out) / script, f"{cfg.name}-{stage}"
    if cfg.resume and not any(map(begun, base.glob(f"{glob.escape(cfg.name)}-*"))):
        raise RunError(f"--resume: {base} holds no stage of a run called {cfg.name}")
    return open_folder(cfg, script, name, free, saves, cfg.resume and begun(base / name))


def open_folder(cfg, script, name, free=(), saves=True, resume=None):
    """The RunFolder of a run, checked, with the checkpoint that --resume goes on from. It may go on with
    other FREE_ON_RESUME and other `free` flags. saves: False = it has no checkpoints, "once" = one, at its
    end. resume: where it is not --resume."""
    resume = cfg.resume if resume is None else resume
    folder = RunFolder(cfg.out, script, name, asdict(cfg), resume, (*FREE_ON_RESUME, *free))
    if resume and saves:
        every = folder.saved.get("save_every", 0)
        if saves == "once" or every == "auto":  # (auto becomes a number before the first step)
            every = 0
        check_form(folder.path / "config.json", {"save_every": every}, {"save_every": int})
        folder.start = checkpoint_of(folder, every)
    return folder


def left_by(cfg, script, stage, needed_by, flag="--checkpoint", called=""):
    """The checkpoint that a stage of this run left; refused in words where it is not there. flag: that names
    another one. called: the stage's name for --stage, where its folder's is another."""
    place = Path(cfg.out) / script / f"{cfg.name}-{stage}" / "checkpoint"
    found = checkpoint.find(place)
    if found is None:
        raise checkpoint.ModelError(f"{needed_by} goes on from {stage}, and {place} does not exist: run "
                                    f"--stage {called or stage} first, or give {flag}")
    return found


def checkpoint_of(folder, save_every):
    """The checkpoint that --resume goes on from, all its files as they were saved; None where none was saved
    yet. save_every: steps between two of them, 0 = it is saved at the end alone.

    Refuses, and has changed nothing, where the checkpoint is gone, damaged or another run's."""
    found = checkpoint.find(folder.path / "checkpoint")
    rows = folder.rows("metrics.jsonl")
    folder.rows("samples.jsonl")
    read_evaluations(folder.path, "before")
    if found is None:
        if rows and (read_evaluations(folder.path) or len(rows) > (save_every or math.inf)):
            raise RunError(f"--resume: {folder.path} has {len(rows)} steps in metrics.jsonl, "
                           "and its checkpoint/ is gone: restore it, or start anew with another --name")
        if rows:
            warn(f"{folder.path}: no checkpoint was saved before it stopped (--save-every); "
                 "beginning again at step 1")
        return None
    state = checkpoint.read_state(found)
    if state.get("run", folder.id) != folder.id:
        raise checkpoint.ModelError(f"{found}: checkpoint of another run; put this run's own back, "
                                "or start anew with another --name")
    logged = max((row["step"] for row in rows), default=0)
    if logged < state["step"]:
        raise RunError(f"--resume: {folder.path} has a checkpoint of step {state['step']}, and metrics.jsonl "
                       f"ends at step {logged}: restore it, or start anew with another --name")
    return found
