"""A run: the policy it trains, its steps, its evaluations, and how a program ends.

The order is always the same:

    # refuses what cannot go on; writes nothing (common/folder.py)
    run = Run(cfg, "at2po", METRICS)
    policy = run.policy(run.folder.start or source)
    with run.stage(title, policy, evals, evaluate):    # the folder exists; at its end curves and page
        for step, row in run.steps(policy, optimizer, cfg.steps):
            …      # the method: sample, score, update;
                   # it fills `row` with metrics, row["sample"] with what the page shows
        run.evaluate()

After the body of a step: an evaluation where one is due, the guards, metrics.jsonl and
samples.jsonl, the checkpoint, and then the line on the terminal. What the body raises goes straight through:
nothing of a broken step is written.
"""

import copy
import importlib
import os
import shlex
import subprocess
import textwrap
import time
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from rich.columns import Columns
from rich.text import Text

from common import chat, checkpoint, distributed, flags, guards, metrics, process, rollout
from common import model as models
from common.engine import TransformersEngine
from common.files import (
    Progress,
    RunError,
    UserError,
    clock,
    console,
    one_line,
    plain,
    read_evaluations,
    read_json,
    read_jsonl,
    say,
    warn,
)
from common.flags import PolicyFlags
from common.folder import known_as, open_folder, opened
from common.metrics import mean_em

# ---------------------------------------------------------------- tracker

def open_tracker(name, folder):
    """The module of --log, trackio or wandb, which share an interface, with this run begun. Both write on
    this machine, without an account; wandb unless WANDB_MODE says otherwise."""
    if not name or distributed.rank() > 0:
        return None
    own = {}
    if name == "wandb":
        own = {"dir": str(folder.path), "mode": os.environ.get("WANDB_MODE", "offline")}
    tracker = importlib.import_module(name)
    resume = "allow" if folder.resume else "never"
    script = folder.path.parent.name
    tracker.init(project=script, name=folder.path.name, config=folder.config, resume=resume, **own)
    return tracker


# ---------------------------------------------------------------- a run, or a stage of one

SCREEN = 80      # columns of what is read word by word
explained = []   # legends that this program has printed, and meanings of words
PAGE_EVERY = 60  # seconds after which a step brings the page up to date, as every evaluation does


class Run:
    """A script's settings, folder and table of metrics; it loads, steps, evaluates and saves.

    It opens runs/<script>/<name>, or of a stage <name>-<stage>; none for --ask. free: flags that --resume may
    change. metrics: the script's table, kept as metrics.json."""

    def __init__(self, cfg, script="", metrics=None, stage="", free=()):
        self.cfg = cfg
        self.metrics = metrics or {}
        self.stage_name = stage
        self.folder = None
        if script and isinstance(cfg, PolicyFlags) and (cfg.checkpoint or cfg.model):
            models.find_start(cfg)  # refuses, before anything large is read
        self.learner, self.evals, self.script_evaluates = None, (), None  # `stage` sets them
        if script and not cfg.ask:
            self.folder = open_folder(cfg, script, stage, free)

    def policy(self, source, trains=True, num_frozen=0, lora=None):
        """rollout.Policy of a folder or hub id, or of the service at --policy. Its engine sleeps: sync it
        before anything is sampled.

        num_frozen: models of its size that will be loaded beside it. lora: another rank than --lora."""
        cfg = self.cfg
        rank = cfg.lora if lora is None else lora
        cfg = replace(cfg, lora=rank if trains else 0)
        if cfg.policy:
            from common.serve import served
            return served.policy(cfg)
        from common.gpu import memory
        torch.manual_seed(cfg.seed)  # new adapters begin alike in every stage and every resumed run
        recomputes = trains and memory.check(cfg, source, num_frozen)
        own_engine = cfg.engine != "vllm"  # it copies whole weights: they are sharded after it is made
        # beside vLLM, weights that nothing trains are held in its precision
        frozen = not trains and not own_engine
        model, tokenizer = models.load_policy(
            source, cfg.lora, recomputes=recomputes, precision=cfg.precision, frozen=frozen)
        say(models.describe(source, model))
        if trains and not own_engine:
            distributed.shard(model)
        policy = rollout.Policy(model, tokenizer, make_engine(cfg, model, tokenizer, trains))
        if trains and own_engine:
            distributed.shard(model)
        check_engine(cfg, source, policy)
        policy.engine.sleep()  # what is loaded next, a reference or moments, finds room
        return policy

    @contextmanager
    def sampling(self, policy, row):
        """In the body the policy samples, with its current weights; row: gets time/rollout."""
        with timed(row, "time/rollout"):
            policy.engine.sync(policy.model)
            yield
            policy.engine.sleep()

    @contextmanager
    def stage(self, title, policy=None, evals=(), evaluate=None, learned=None):
        """The folder exists in the body; its trajectories.html shows how far it is, and is whole at the end.

        evaluate(policy, split, cfg, progress) -> (rows, summary): the script's, which `self.evaluate` calls
        for each split of evals. learned: the split that is trained on; --resume refuses another one."""
        self.learner, self.evals, self.script_evaluates = policy, evals, evaluate
        folder = self.folder
        if folder in opened and "settings" not in explained:  # (a warm-up's folder is not)
            tell(self.cfg)
        here = {
            "program": Path(flags.started_as(folder.path.parent.name)).name,
            "threads": torch.get_num_threads(),
            "date": chat.today,
            "machine": machine(),
        }
        begun = {key: folder.saved.get(key, now) for key, now in here.items()}
        for key in here:  # a copy may have another method; threads sum otherwise, prompts name the date
            if begun[key] != here[key]:
                warn(f"{folder.path} was begun with {key} {begun[key]}: it may not go on bit for bit")
        planned = folder.saved.get("steps")
        if folder.config.get("lr_warmup") and planned not in (None, folder.config["steps"]):
            warn(f"{folder.path} was begun with steps {planned}: the learning rate rose over a share of them")
        inputs = {split.name: known_as(split) for split in evals}
        if learned:
            inputs["train"] = known_as(learned)
        folder.refuse_other_inputs(inputs)
        given = changed(type(self.cfg), folder.config)  # (without the --checkpoint that a warm-up set)
        distributed.once(folder.create, **begun, changed=given, inputs=inputs)
        folder.write("metrics.json", {key: list(metric) for key, metric in self.metrics.items()})
        folder.tracker = open_tracker(self.cfg.log, folder)
        console.print(f"[bold]{plain(title)}[/bold]")
        say(f"Watch it: {folder.path}/trajectories.html in a browser, brought up to date as the run goes on")
        distributed.once(page_so_far, folder, "the run has begun")
        yield
        if folder.tracker:
            folder.tracker.finish()
        distributed.once(page_so_far, folder, "")
        say(f"page: {folder.path}/trajectories.html")

    def evaluate(self, suffix="", evals=None, evaluate=None, initial=False):
        """{set: {"summary", "predictions"}}; each goes to eval_<set><suffix>.json, read back on resume.
        evals, evaluate: others than those of `stage`. initial: before training; warns if nothing can be
        learned from these weights, and a run that goes on from a checkpoint has it on file."""
        cfg, folder, policy = self.cfg, self.folder, self.learner
        evaluate = evaluate or self.script_evaluates
        found = {}
        for split in evals or self.evals:
            file = folder.path / f"eval_{split.name}{suffix}.json"
            kept = file.exists() or (initial and folder.start)
            if not (cfg.resume and suffix and kept):
                if isinstance(policy, rollout.Policy) and not suffix:  # (others ask the same questions)
                    warn_of_unknown_words(policy.tokenizer, [q.question for q in split.questions[:10]])
                served = isinstance(cfg, PolicyFlags) and cfg.policy
                with Progress(f"evaluating {split.name}", at_once=True) as progress:
                    if served:
                        policy.engine.keep(folder.path / f"said_{split.name}{suffix}.jsonl")
                    rows, summary = evaluate(policy, split, cfg, progress)
                if served:
                    policy.engine.refuse_few_answers()
                if all("nodes" in row for row in rows):
                    fill_in_reading(rows, policy.tokenizer)
                    summary |= metrics.reading(rows)
                if hasattr(policy, "engine"):  # encoders have none
                    policy.engine.sleep()
                folder.write(file.name, {"summary": summary, "predictions": rows})
            found[split.name] = read_json(file, dict)
            when = suffix.replace("_", " ")  # " before", " step5"
            say(metrics.summary_line(f"{split.name}{when}", found[split.name]["summary"]))
            explain(guards.EVALUATION)
        if not suffix:
            from common.report import card
            distributed.once(card.write, folder, policy, found)
        if initial:
            guards.look_at_start(found, warn)
        return found

    def steps(self, learner, optimizer, total, *, state=None, share=None, label="", guard=None):
        """Yields (step, row) from where the folder's checkpoint stands to `total`.

        learner: has `model` and `tokenizer`, which are saved with the optimizer.
        state: plain numbers that the body changes and a checkpoint keeps; filled from it on resume.
        share(step) -> part of the training, 0 to 1, that is done after it, where another budget than steps
            may end it.
        guard: {name: function} of a script's own, beside those of common/guards.py."""
        cfg, folder, table = self.cfg, self.folder, self.metrics
        state = {} if state is None else state
        share = share or (lambda step: step / max(1, total))
        step, saved = 0, -1
        save_every = checkpoint.steps_between(cfg.save_every, learner.model, optimizer)
        if folder.start:
            before = checkpoint.load_training_state(folder.start, learner.model, optimizer)
            state |= {key: before.get(key, value) for key, value in state.items()}
            step = saved = before["step"]
        distributed.once(folder.rewind, step)
        earlier = read_jsonl(folder.path / "metrics.jsonl")
        began, begun_at = time.time(), share(step)
        page_at = 0  # the first step brings it up to date, too
        if step < total and share(step) < 1:
            distributed.once(folder.forget_evaluations)
        distributed.once(page_so_far, folder, f"step {step} of {total}")
        while step < total and share(step) < 1:
            step += 1
            row = {"step": step}
            yield step, row

            if torch.cuda.is_available():
                row["mem/gpu_gb"] = torch.cuda.max_memory_allocated() / 1e9
            elapsed, done = time.time() - began, share(step)
            left = elapsed * max(0.0, 1 - done) / max(done - begun_at, 1e-9)
            row |= {"time/elapsed": elapsed, "time/left": left, "time/threads": torch.get_num_threads()}
            sample = row.pop("sample", None)
            if sample and "prompt_ids" in sample:  # (askit.py has no prompts)
                sample["prompt"] = learner.tokenizer.decode(sample["prompt_ids"])
            if optimizer:
                row.setdefault("train/lr", optimizer.param_groups[0]["lr"])
            how_far = place_of(step, total, done)
            told = [f"{label}{how_far}{step_line(row, table)}"]  # printed last, when the step is on disk
            due = cfg.eval_every and step % cfg.eval_every == 0 and step < total and done < 1
            if due and self.evals:
                row["eval/em"] = mean_em(self.evaluate(f"_step{step}"))
            row |= guards.watch(row, earlier, told.append, table, guard, coarsest_precision(cfg))
            if sample:
                folder.append("samples.jsonl", [sample])
            folder.log(row)
            earlier.append(row)
            if save_every and step % save_every == 0:
                self.save(learner, optimizer, step, state)
                saved = step
            announce(row, table, *told)
            if distributed.rank() == 0 and (due or time.time() > page_at):
                page_at = time.time() + PAGE_EVERY
                page_so_far(folder, how_far.replace("/", " of "))
        if step < total:
            say(f"training ends after step {step} of at most {total}: its budget of sampled tokens is spent")
        if step > saved:
            self.save(learner, optimizer, step, state)

    def save(self, learner, optimizer, step, state):
        folder = self.folder.path / "checkpoint"
        checkpoint.save(folder, learner.model, learner.tokenizer, optimizer, {"step": step, **state})

    def ask(self, policy, retriever, agent, question):
        """What agent(policy, search) returns, a coroutine that answers the question."""
        warn_of_unknown_words(policy.tokenizer, [question])
        policy.engine.sync(policy.model)
        return rollout.run_alone(agent, policy, retriever)


def fill_in_reading(rows, tokenizer):
    """Fills in predictions: the prompt as text; whether a gold answer was read, and the given one copied."""
    for row in rows:
        if "prompt_ids" in row:
            row["prompt"] = tokenizer.decode(row.pop("prompt_ids"))
        if "read" in row:  # the script knows better what was read
            continue
        observed = " ".join(node.get("observation", "") for node in row["nodes"])
        row["read"] = float(metrics.stands_in(row["gold"], observed))
        if row["answer"]:
            seen = f"{row['question']} {observed}"
            row["copied"] = float(metrics.stands_in([row["answer"]], seen))


# ---------------------------------------------------------------- engines

# on text: on random ids two bf16 passes differ by more (SmolLM2, Qwen2.5)
PROBES = ("The sky is blue because", "Marie Curie was born in Warsaw and moved to Paris in 1891, where she")


def check_engine(cfg, source, policy):
    """Refuses a model whose log-probs the engine computes otherwise than training (which load_policy has
    compared with the model's own forward pass): two rows of different length, two turns of eight tokens, the
    second on what is kept of the first."""
    async def two_turns(prompt_ids):
        turns = []
        for seed in range(2):
            context = rollout.context_ids(prompt_ids, turns)
            g = await policy.engine.generate(context, stop=(), max_tokens=8, temperature=1.0, seed=seed)
            turns.append(rollout.Turn(g.token_ids, g.logprobs, g.stop_reason, ""))
        return rollout.Trajectory("", prompt_ids, turns)

    other = "transformers" if cfg.engine == "vllm" else "vllm"
    most = guards.DRIFT_LIMIT[coarsest_precision(cfg)]
    policy.engine.sync(policy.model)
    prompts = []
    for text in PROBES:  # of which a tokenizer of words may know none
        ids = chat.encode(policy.tokenizer, text, begins=True)[1]
        prompts.append(ids or models.probe_ids(policy.tokenizer, len(text), text))
    rows = rollout.run_agents(
        map(two_turns, prompts), policy.engine, rollout.BatchedSearch(None), rollout.no_progress)
    batch = rollout.collate(rows, policy.model.shares_prefixes).to(policy.model.device)
    with torch.no_grad():
        found = models.token_logprobs(policy.model, batch)
    sampled = batch.response_mask
    models.refuse_other_numbers(source, "sampling", found[sampled], batch.rollout_logprobs[sampled], most,
                                f". Try --engine {other}")


def make_engine(cfg, model, tokenizer, trains=False):
    """What samples `model`: the engine of --engine. Ours shares the weights; vLLM copies them at each sync,
    and so does ours where training is sharded."""
    if cfg.engine == "vllm":
        from common.gpu.vllm_engine import VllmEngine
        return VllmEngine(model, tokenizer, cache_gb=cfg.cache_gb)
    if not models.attends_to_all(model.config):
        raise models.ModelError("this model has layers with a sliding window, or without full attention, "
                                "which --engine transformers does not know: use --engine vllm")
    if trains and distributed.world() > 1:  # it cannot sample what is cut: a copy, which its sync() fills
        model = copy.deepcopy(model).requires_grad_(False)
    return TransformersEngine(model, tokenizer, cache_gb=cfg.cache_gb)


def tell(cfg):
    """The first screen: settings that are not the paper's."""
    explained.append("settings")
    paper = type(cfg)()
    console.print("Settings that differ from the paper's, which is in brackets:", style="dim", markup=False)
    settings = []
    for key in changed(type(cfg), asdict(cfg)):
        of_paper = f" [{getattr(paper, key)}]" if getattr(paper, key) != "" else ""
        settings.append(Text(f"{key} {getattr(cfg, key) or repr(getattr(cfg, key))}{of_paper}"))
    console.print(Columns(settings or ["none"], padding=(0, 2)), style="dim", width=SCREEN)
    is_tiny = isinstance(cfg, PolicyFlags) and not (cfg.policy or cfg.model or cfg.checkpoint)
    if cfg.data == "world" and is_tiny:
        console.print("The world's policy reads no system message: an edit of the prompt acts with --model.",
                      style="dim", markup=False)


def explain(legend):
    """Below the first line of its kind: what the words in it mean."""
    if legend not in explained:
        explained.append(legend)
        console.print(textwrap.indent(textwrap.fill(legend, SCREEN - 4), "    "), style="dim", markup=False)


def changed(paper, flags_given):
    """The flags that are not the default of the class `paper`."""
    return [key for key, default in asdict(paper()).items() if flags_given.get(key, default) != default]


def machine():
    """What computes here, in words, for whoever compares results: device, versions, and the commit of this
    code where git knows it."""
    device = f"{len(process.own_cores())} cores"
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    code = Path(__file__).resolve().parents[1]
    commit = ""
    if (code / ".git").exists():
        asked = ["git", "-C", str(code), "describe", "--always", "--dirty"]
        commit = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    return f"{device}; torch {torch.__version__}, transformers {transformers.__version__}; commit {commit}"


def page_so_far(folder, how_far):
    from common.page.writer import write_page
    write_page(folder.path, how_far)


# ---------------------------------------------------------------- a step

def coarsest_precision(cfg):
    """fp32 | bf16, of the products of sampler and trainer: vLLM's on a GPU are bf16 in any case."""
    on_gpu = models.default_device() != "cpu"
    vllm = isinstance(cfg, PolicyFlags) and cfg.engine == "vllm"
    in_bf16 = cfg.precision == "bf16" or on_gpu and (cfg.precision == "auto" or vllm)
    return "bf16" if in_bf16 else "fp32"


def step_line(row, metrics):
    """A step in one line, from the script's table: times and memory last. Means over the whole step."""
    parts = [""]
    last = ("time/", "mem/")
    for key in sorted(metrics, key=lambda key: key.startswith(last)):
        if metrics[key].line and key in row:
            parts.append(metrics[key].line.format(row[key]))
    if "train/updates" in metrics and not row.get("train/updates"):
        parts.append("no update")
    if "time/left" in row:
        parts.append(f"{clock(row['time/elapsed'])}, {clock(row['time/left'])} left")
    return " | ".join(parts)


def place_of(step, total, done):
    """How far training is; done: the share of it, which more than steps may end.

    >>> place_of(3, 60, .05), place_of(3, 60, .2)
    ('step 3/60', 'step 3 of about 15')
    """
    ends = max(step, round(step / done)) if done else total
    return f"step {step}/{total}" if ends >= total else f"step {step} of about {ends}"


def announce(row, metrics, line, *warnings):
    """On the terminal: a step's line, what its words mean that were not there before, what its guards say."""
    console.print(line, markup=False)
    new = []
    for key, metric in metrics.items():
        word = metric.line.partition(" ")[0]  # of "em {:.3f}"; "{:.1f} GB" speaks for itself
        meaning = f"{word} = {metric.words}"  # a later stage may mean another thing by it
        if key in row and word.isalnum() and meaning not in explained:
            explained.append(meaning)
            new.append(meaning)
    if new:
        explain(f"{'; '.join(new)}.")
    for warning in warnings:
        warn(warning)


@contextmanager
def timed(row, key):
    """Adds the seconds of its body to row[key]."""
    began = time.time()
    yield
    row[key] = row.get(key, 0.0) + time.time() - began


# ---------------------------------------------------------------- --ask

def warn_of_unknown_words(tokenizer, questions):
    """Says which words the tiny policy has never seen: it answers with confidence all the same."""
    unknown = [word for question in questions for word in chat.unknown_words(tokenizer, question)]
    if unknown:
        few = ", ".join(dict.fromkeys(unknown[:8]))
        warn(f"no word for {few}: this policy knows the embedded world alone, its answer means nothing here")


# ---------------------------------------------------------------- beginning and end of a program

@contextmanager
def program(one_process=False):
    """Around a script's main: an error is one line, Ctrl-C and SIGTERM say what is kept and how to go on; at
    its end stands what can be done next.

        @program()
        def main(argv=None):

    one_process: what it trains is small, and not made for several (common/distributed.py)."""
    opened.clear()
    explained.clear()
    transformers.utils.logging.disable_progress_bar()
    with process.ends_cleanly((UserError, OSError), what_is_saved):
        distributed.start()
        if one_process and distributed.world() > 1:
            raise RunError("this script trains in one process: start it without torchrun")
        if process.settled:
            warn(f"{process.settled}: {torch.get_num_threads()} threads here (OMP_NUM_THREADS sets others)")
        yield
        distributed.once(tell_what_next)


# flags of a run that a question to its checkpoint does without
OF_TRAINING = ("model", "policy", "policy_model", "warmup_data", "warmup_steps", "warmup_lr", "steps",
               "resume", "eval_only", "collect", "eval_limit", "eval_every", "save_every", "limit")


def tell_what_next():
    """The last lines on the terminal: commands to paste."""
    done = [f for f in opened if (f.path / "trajectories.html").exists()]
    if not done:
        return
    last = done[-1]
    script = last.path.parent.name
    say(f"Next: python -m webbrowser {shlex.quote(str(last.path))}/trajectories.html")
    if last.config.get("collect") and Path(last.config["collect"]).expanduser().exists():
        learns = {"model": "FOLDER", "warmup_data": last.config["collect"]}
        # what the flags say of warm-up and training stays
        without = ("policy", "policy_model", "policy_tokenizer", "checkpoint", "eval_only", "collect",
                   "resume", "name")
        say(f"      {flags.command(script, without, **learns)}")
    saved = [f.path for f in done if checkpoint.find(f.path / "checkpoint")]
    if script == "askit":  # the other stages leave no policy
        saved = [path for path in saved if path.name.endswith(("-supervised", "-ppo"))]
    answered = [row for found in read_evaluations(last.path).values() for row in found["predictions"]]
    best = max(answered, key=lambda row: row.get("em") or 0, default={})  # the first right one, if any is
    if saved and best.get("question"):
        greedy = {}
        if "eval_temperature" in last.config:
            greedy = {"eval_temperature": 0}
        asked = flags.command(script, OF_TRAINING, checkpoint=saved[-1] / "checkpoint", **greedy,
                              ask=one_line(best["question"]))
        say(f"      {asked}  # gold: {one_line(', '.join(map(str, best.get('gold', []))))}")
    if len(done) > 1:
        say(f"      python -m common.report {shlex.join(str(f.path) for f in done)}")


def what_is_saved():
    """How far the run folders of this process are, and how to go on."""
    steps = []
    for folder in opened:
        saved = checkpoint.find(folder.path / "checkpoint")
        if saved:
            step = read_json(saved / "trainer.json", dict)["step"]
            steps.append(f"{folder.path}: checkpoint of step {step}")
    if not any((f.path / "config.json").exists() for f in opened):
        return "no stage had begun; the same command begins it (a warm-up goes on)"
    if not steps:
        return ("no checkpoint yet; the same command and --resume begins training again, and keeps the "
                "evaluation before it")
    return f"{'; '.join(steps)}; go on with the same command and --resume"
