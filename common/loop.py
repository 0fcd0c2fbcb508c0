"""What stands around a paper's training step and is in no paper: resuming, budgets, guards, evaluation,
logs, checkpoints.

    for step, row in loop.steps(cfg, folder, policy, optimizer, METRICS, state):
        …      # the method: sample, score, update;
               # it fills `row` with metrics, row["sample"] with what the page shows

Behind the body, once a step: the line on the terminal, the guards, an evaluation where one is due,
metrics.jsonl and samples.jsonl, the checkpoint. What the body raises goes straight through: nothing of a
broken step is written.
"""

import math
import time
from contextlib import contextmanager

import torch

from common import checkpoint, guards
from common import model as models
from common.files import clock, console, read_jsonl, say, warn
from common.page import record


def steps(cfg, folder, policy, optimizer, metrics,
          state=None, evaluate=None, share=None, label="", guard=None, keep_best=False):
    """Yields (step, row) from where the folder's checkpoint stands to cfg.steps.

    policy: has `model` and `tokenizer`, which are saved with the optimizer. metrics: the script's table.
    state: plain numbers that the body changes and a checkpoint keeps; filled from it on resume.
    evaluate(suffix) -> {"eval/…": number} is called every cfg.eval_every steps.
    share(step) -> how much of the training is done after it, of 1, where another budget than steps may
        end it.
    guard: {name: function} of a script's own, beside those of common/guards.py.
    keep_best: the weights with the highest eval/em so far are kept in best/, the number as state["best"]."""
    state = {} if state is None else state
    share = share or (lambda step: step / max(1, cfg.steps))
    step = saved = 0
    if folder.start:
        before = checkpoint.load_training_state(folder.start, policy.model, optimizer)
        for key, value in state.items():
            state[key] = before.get(key, value)
        step = saved = before["step"]
    else:
        saved = -1
    folder.rewind(step)
    earlier = read_jsonl(folder.path / "metrics.jsonl")
    pace = Pace(share(step))
    if step < cfg.steps and share(step) < 1:
        folder.forget_evaluations()
    while step < cfg.steps and share(step) < 1:
        step += 1
        row = {"step": step}
        yield step, row

        if torch.cuda.is_available():
            row["mem/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row |= pace.times(share(step), torch.get_num_threads())
        sample = row.pop("sample", None)
        console.print(f"{label}{step_line(step, cfg.steps, row, metrics)}", markup=False)
        row |= guards.watch(row, earlier, warn, metrics, guard, coarsest_precision(cfg))
        if sample and cfg.show_every and step % cfg.show_every == 0:
            record.explain_best_and_worst(sample)
        if evaluate and cfg.eval_every and step % cfg.eval_every == 0 and step < cfg.steps:
            row |= evaluate(f"_step{step}")
            if keep_best and row["eval/em"] > state.get("best", -1.0):
                state["best"] = row["eval/em"]
                save(folder, policy, None, step, state, "best")
        if sample:
            folder.append("samples.jsonl", [sample])
        folder.log(row)
        earlier.append(row)
        if cfg.save_every and step % cfg.save_every == 0:
            save(folder, policy, optimizer, step, state)
            saved = step
    if step < cfg.steps:
        say(f"training ends after step {step} of at most {cfg.steps}: "
            f"its budget is spent ({describe(state)})")
    if step > saved:
        save(folder, policy, optimizer, step, state)


def coarsest_precision(cfg):
    """fp32 | bf16, of the products of sampler and trainer: vLLM's on a GPU are bf16 in any case."""
    on_gpu = models.default_device() != "cpu"
    vllm = getattr(cfg, "engine", "") == "vllm"
    in_bf16 = cfg.precision == "bf16" or on_gpu and (cfg.precision == "auto" or vllm)
    return "bf16" if in_bf16 else "fp32"


def describe(state):
    """
    >>> describe({"tokens": 1234567, "K": .5})
    'tokens 1,234,567, K 0.5'
    """
    parts = []
    for key, value in state.items():
        form = ",.0f" if value >= 100 else "g"
        parts.append(f"{key} {value:{form}}")
    return ", ".join(parts)


def save(folder, policy, optimizer, step, state, name="checkpoint"):
    state = {"step": step, "run": folder.id, **state}
    checkpoint.save(folder.path / name, policy.model, policy.tokenizer, optimizer, state)


def step_line(step, total, row, metrics):
    """One line a step, from the script's table: times and memory last. Means over the whole step."""
    parts = [f"step {step}/{total}"]
    last = ("time/", "mem/")
    for key in sorted(metrics, key=lambda key: key.startswith(last)):
        if metrics[key].line and key in row:
            parts.append(metrics[key].line.format(row[key]))
    if "train/updates" in metrics and not row.get("train/updates"):
        parts.append("no update")
    if "time/left" in row:
        parts.append(f"{clock(row['time/elapsed'])}, {clock(row['time/left'])} left")
    if "time/threads" in row:
        parts.append(f"threads {row['time/threads']}")
    return " | ".join(parts)


class Pace:
    """Time since a run was begun or resumed, and what is left: pace.times(share of the run that is done)."""

    def __init__(self, share):
        self.began = time.time()
        self.first = share
        self.threads = None

    def times(self, share, threads=None):
        """{"time/elapsed", "time/left"} in seconds; with `threads` on the first call also that number."""
        elapsed = time.time() - self.began
        to_do = max(0.0, 1 - share)
        done = max(share - self.first, 1e-9)
        left = elapsed * to_do / done
        if not math.isfinite(left):
            left = 0.0
        row = {"time/elapsed": elapsed, "time/left": left}
        if threads and self.threads is None:
            self.threads = row["time/threads"] = threads
        return row


@contextmanager
def timed(row, key):
    """Adds the seconds of its body to row[key]."""
    began = time.time()
    yield
    row[key] = row.get(key, 0.0) + time.time() - began
