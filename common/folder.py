"""A run's folder: what it holds, what --resume may go on from, the folders of a run's stages.

    runs/<script>/<name>/  config.json  metrics.json  metrics.jsonl  samples.jsonl  eval_<set>.json
                           trajectories.html  checkpoint/

All but the weights is JSON, PNG or HTML and can be read without this code; docs/runs.md has every file. A
stage's folder is <name>-<stage>."""

import fcntl
import glob
import itertools
import json
import os
import re
from dataclasses import asdict
from pathlib import Path

from common import cache, checkpoint, distributed, passages
from common.files import (
    REMEDY,
    RunError,
    read_evaluations,
    read_json,
    read_jsonl,
    say,
    warn,
    write_json,
    write_jsonl,
)

FREE_ON_RESUME = (
    "cache_gb",  # a run that was killed for its memory goes on with less
    "steps", "eval_every", "save_every", "log", "resume", "out", "collect")
opened = []  # the folders of this process (but for a warm-up, which goes on by itself)


class RunFolder:
    """runs/<script>/<name>. A new run never overwrites one that exists;
    a resumed one must be configured as it was.

    The constructor checks and writes nothing; `create` writes config.json once everything else has loaded.
    `create`, `rewind` and `forget_evaluations` are for one process: distributed.once calls them.
    Other processes are kept out until this one ends: out of a new run from `create` on, out of a resumed one
    from here on. `saved` is the configuration it was begun with, `start` the checkpoint that it goes on
    from."""

    def __init__(self, root, script, name, config, resume=False, free_to_change=()):
        self.path = Path(root) / script / name
        self.config = config
        self.resume = resume
        self.tracker = None
        self.start = None
        self.lock = None
        if not resume and begun(self.path):
            raise RunError(f"{self.path} exists: choose another --name, or add --resume to go on with it")
        if resume and not (self.path / "config.json").exists():
            raise RunError(f"--resume: {self.path} holds no run (no config.json)")
        self.saved = {}
        if resume:
            distributed.once(self._keep_others_out)
            self.saved = read_json(self.path / "config.json", dict)
            self._refuse_changes(free_to_change)
            self.start = checkpoint_of(self.path)

    def _refuse_changes(self, free_to_change):
        for key, value in self.config.items():
            if key not in free_to_change and self.saved.get(key) != json.loads(json.dumps(value)):
                begun_with = self.saved.get(key)
                raise RunError(f"--resume: this run was started with {key} = {begun_with!r}, not {value!r}: "
                               "give the same flags, or choose another --name")

    def refuse_other_inputs(self, inputs):
        """inputs: {"train" or set: what known_as says of it}."""
        for name, begun_with in self.saved.get("inputs", {}).items():
            if name in inputs and inputs[name] != begun_with:
                raise RunError(f"--resume: {self.path} was begun with other questions, corpus or graph in "
                               f"{name}: give those again, or begin another run (--name)")

    def _keep_others_out(self):
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self.lock or open(self.path / ".lock", "w")
        try:
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            raise RunError(f"another process is writing to {self.path}") from error
        except OSError:
            warn(f"{self.path}: this file system has no locks; see that no other process writes there")

    def create(self, **facts):
        """Makes the folder. facts: what else config.json keeps of the process that began the run."""
        self._keep_others_out()
        if not self.resume and (self.path / "config.json").exists():
            raise RunError(f"{self.path} exists: choose another --name")
        write_json(self.path / "config.json", self.config | facts)

    def rewind(self, step):
        """Drops what a killed run may have written past its last checkpoint, of `step`: lines of every .jsonl
        file, and evaluations."""
        for file in self.path.glob("*.jsonl"):
            write_jsonl(file, [row for row in read_jsonl(file) if row.get("step", 0) <= step])
        for file in self.path.glob("eval_*_step*.json"):
            number = re.search(r"_step(\d+)\.json$", file.name)
            if number and int(number[1]) > step:
                file.unlink(missing_ok=True)

    def append(self, name, rows):
        """Adds rows to metrics.jsonl or samples.jsonl, flushed to disk."""
        if distributed.rank() > 0:
            return
        with open(self.path / name, "a", encoding="utf-8", errors="replace") as f:
            lines = [json.dumps(r, ensure_ascii=False) + "\n" for r in rows]
            f.write("".join(lines))
            f.flush()
            os.fsync(f.fileno())

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
        be younger than a time. Says so; refuses other questions, another corpus or graph."""
        rows = read_jsonl(self.path / "metrics.jsonl")
        made = rows[-1]["step"] if rows else 0
        files = [self.path / f"eval_{s.name}.json" for s in splits]
        evaluated = all(f.exists() and f.stat().st_mtime > newer_than for f in files)
        done = self.resume and made >= steps and evaluated
        if done:
            if not self.config.get("skip_bad"):  # which left overlong questions out when it was begun
                self.refuse_other_inputs({s.name: known_as(s) for s in splits})
            say(f"{self.path}: done before")
        return done

    def forget_evaluations(self):
        """Deletes the final ones: training goes on, so they are of fewer steps."""
        for file in self.path.glob("eval_*.json"):
            if not re.search(r"_(before|step\d+)\.json$", file.name):
                file.unlink(missing_ok=True)


def known_as(split):
    """Letters that stand for the questions of a split, or of askit's cases, and for what is searched."""
    questions = getattr(split, "questions", None)
    if questions is None:
        questions = [case.question for case in getattr(split, "cases", split)]
    searched = getattr(split, "retriever", None)
    corpus = getattr(searched, "corpus", None)
    graphs = getattr(searched, "graphs", None) or {"": getattr(split, "graph", None)}
    told = [[q.id, q.question, q.answers] for q in questions]
    told.append("" if corpus is None else passages.identity(corpus))
    known = [graph.graph.edges(data="relation") for graph in graphs.values() if graph is not None]
    return cache.key(itertools.chain(told, *(map(repr, edges) for edges in known)))


def begun(folder):
    """Whether a run folder holds anything but the lock of a run that wrote nothing."""
    folder = Path(folder)
    return folder.is_dir() and any(f.name != ".lock" for f in folder.iterdir())


def open_folder(cfg, script, stage="", free=()):
    """The RunFolder of a run, checked. --resume may change FREE_ON_RESUME and `free` flags.

    A stage's folder is <name>-<stage>; --resume begins one that was not begun yet, where another stage of the
    run was."""
    base = Path(cfg.out) / script
    name, resume = cfg.name, cfg.resume
    if stage:
        name = f"{cfg.name}-{stage}"
        if resume and not any(map(begun, base.glob(f"{glob.escape(cfg.name)}-*"))):
            raise RunError(f"--resume: {base} holds no stage of a run called {cfg.name}")
        resume = resume and begun(base / name)
    folder = RunFolder(cfg.out, script, name, asdict(cfg), resume, (*FREE_ON_RESUME, *free))
    opened.append(folder)
    return folder


def left_by(cfg, script, stage, needed_by):
    """The checkpoint that a stage of this run left; refused in words where it is not there."""
    place = Path(cfg.out) / script / f"{cfg.name}-{stage}" / "checkpoint"
    found = checkpoint.find(place)
    if found is None:
        raise checkpoint.ModelError(f"{needed_by} goes on from {stage}, which was not run: no {place}")
    return found


def checkpoint_of(path):
    """The checkpoint that --resume goes on from; None where none was saved yet. Refuses where it is gone."""
    found = checkpoint.find(path / "checkpoint")
    begun_steps = read_jsonl(path / "metrics.jsonl")
    if found is None and begun_steps:
        if read_evaluations(path):
            raise RunError(f"--resume: {path} came to its end, and its checkpoint/ is gone: {REMEDY}")
        warn(f"{path}: no checkpoint was saved before it stopped; beginning again at step 1")
    return found
