"""The flags that all scripts share, what they must be, and a script's Config on the command line.

    @dataclass
    class Config(flags.PolicyFlags):
        steps: int = 240      # training steps | sec. 5.1

--help shows a field's comment. Behind the bar stands who set the default: the paper's section or the
authors' code. A flag of the script's own without a bar, or with "ours" behind it, stands in the last group.
"""

import dataclasses
import importlib.util
import itertools
import math
import re
import shlex
import shutil
import signal
import sys
import textwrap
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import tyro
from tyro._docstrings import get_field_docstring

from common import distributed
from common.rollout import stable_seed

# ---------------------------------------------------------------- shared fields

@dataclass
class Flags:
    """What every script can be told, beside what its paper talks about."""

    model: str = ""               # folder or hub id; empty = the tiny policy of the embedded world
    # weights to start from or to evaluate: a run's checkpoint/, any folder or hub id
    checkpoint: str = ""
    data: str = ""                # training questions: file, hub name, or "world"
    eval_data: str = ""           # evaluation sets with commas; empty = the paper's, or a tenth of a file
    limit: int = 0                # first so many training questions; 0 = all
    eval_limit: int = 0           # so many questions of each evaluation set, drawn with the seed; 0 = all
    skip_bad: bool = False        # leave malformed records and overlong prompts out, and count them

    eval_every: int = 0           # steps between evaluations; 0 = before and after training only
    # steps between checkpoints; auto = 1 below 1 GB, else 10, or one per 4 GB where that is more; 0 = at the
    # end only
    save_every: Literal["auto"] | int = "auto"
    log: Literal["", "trackio", "wandb"] = ""   # tracker beside the files; wandb: offline
    seed: int = 0                 # of everything that is random
    name: str = ""                # of the run folder in runs/<script>/; empty = of method, model, data, seed
    out: str = "runs"             # where run folders go
    resume: bool = False          # go on with the run of this name
    eval_only: bool = False       # evaluate --checkpoint or --model, no training
    ask: str = ""                 # answer one question and show how


@dataclass
class PolicyFlags(Flags):
    """Also of the scripts that sample a language model, let it search, and train it."""

    # with --eval-only: address of an OpenAI-compatible service, up to and with /v1; its key comes from
    # OPENAI_API_KEY
    policy: str = ""
    policy_model: str = ""        # the name it knows the model by
    policy_tokenizer: str = ""    # its tokenizer's folder: prompts are rendered here, for /v1/completions
    # with --eval-only: new file for the right trajectories on training questions, which --warmup-data learns
    collect: str = ""

    # real questions with gold evidence, or ShareGPT conversations, that --model learns the format from first:
    # files with commas
    warmup_data: str = ""
    # updates of 8 demonstrations; auto = three passes over all, or the tiny policy's number
    warmup_steps: Literal["auto"] | int = "auto"
    warmup_lr: float = 1e-5       # learning rate, rises, then a cosine; 3e-4 did well for 135M weights
    lr_warmup: float = 0.0        # share of the training over which the learning rate rises

    # what samples; auto = vllm where CUDA and vLLM are, but not in the embedded world; --resume refuses
    # another, since random streams differ
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    cache_gb: float = 8.0         # keys and values of running sequences; as much again for finished turns
    micro_tokens: int = 16384     # packed tokens a forward pass; --warmup-data leaves out what is longer
    share_prefixes: Literal["on", "off"] = "on"     # compute shared starts of trajectories once; same results
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of products, not weights; auto = bf16 on a GPU
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"   # 8 bit = moments in a quarter of the memory
    lora: int = 0                 # rank of adapters; 0 = full weights
    # losses with a ratio weighed by a token's trainer over sampler probability, at most 2
    sampler_correction: Literal["none", "token"] = "none"


@dataclass
class PassageFlags(PolicyFlags):
    """Also of those whose policy searches passages."""

    # plain, or hard[:KNOB=SHARE,…]: the level at which methods can differ (common/world/hard.py)
    world: str = "plain"
    corpus: str = ""              # JSONL with id, contents; or "contexts" = pooled from the questions
    # bm25, dense:MODEL[@INDEX], http://HOST:PORT or own:MODULE:CLASS; empty = bm25 with a corpus, else
    # http://127.0.0.1:8000
    retriever: str = ""


RECIPES = Path(__file__).resolve().parents[1] / "recipes"
DATA_SUFFIX = r"\.(jsonl?|ndjson|csv|tsv|parquet)(\.gz)?$"
MAY_BE_ZERO = ("limit", "eval_limit", "eval_every", "save_every", "lora", "seed")
ABOVE_ZERO = ("cache_gb", "warmup_lr")


def run_name(cfg, *first):
    """The name of a run folder where --name is empty: `first`, model and data where they are not the default,
    and the seed; of an evaluation a number."""
    if cfg.eval_only and isinstance(cfg, PassageFlags):
        model = cfg.model or cfg.policy_model
        searched = (cfg.policy, cfg.corpus, cfg.retriever, cfg.collect)
        evaluated = (model, cfg.checkpoint, cfg.data, cfg.eval_data, cfg.eval_limit, cfg.seed, *searched)
        if cfg.world != "plain":
            evaluated += cfg.world,
        return f"eval-{stable_seed(*evaluated) % 10**6}"
    model = cfg.model or getattr(cfg, "policy_model", "")  # (askit.py has no --policy)
    parts = [*first, Path(model).name]
    if cfg.data not in ("world", type(cfg)().data):
        parts += [re.sub(DATA_SUFFIX, "", Path(name).name) for name in cfg.data.split(",")]
    if isinstance(cfg, PassageFlags) and cfg.world != "plain":
        parts.append(cfg.world)
    name = "-".join([*filter(None, parts), f"seed{cfg.seed}"])
    return re.sub(r"[^\w.=+-]+", "-", name)[-100:].strip("-.")


# ---------------------------------------------------------------- what flags must be

def refuse(name, value, wanted):
    """Ends the program with what a flag has to be."""
    given = f" {value}" if value != "" else ""
    sys.exit(f"error: --{name.replace('_', '-')}{given}: {wanted}")


def check(cfg, *first, may_be_zero="", above_zero="", world_sets=None, least=None):
    """cfg with --engine auto resolved, so that config.json says what ran, and, of a searching policy, with
    --name and --retriever filled in. Refuses numbers that no run can use, and flags that do not go together.
    first: the words that begin the name (run_name).

    int fields: at least 1, or 0 if in may_be_zero; float fields: at least 0, or above 0 if in above_zero (the
    script's own names, with blanks between, beside the shared ones); least {name: minimum} overrides."""
    if isinstance(cfg, PolicyFlags) and cfg.engine == "auto":
        wants_vllm = torch.cuda.is_available() and has_vllm() and cfg.data != "world"
        cfg = replace(cfg, engine="vllm" if wants_vllm else "transformers")
    check_numbers(cfg, (*MAY_BE_ZERO, *may_be_zero.split()), (*ABOVE_ZERO, *above_zero.split()), least or {})
    if cfg.name != Path(cfg.name).name or cfg.name.startswith(".") or not cfg.name.isprintable():
        refuse("name", repr(cfg.name), "the name of a folder")
    if cfg.log and not importlib.util.find_spec(cfg.log):
        refuse("log", cfg.log, f"not installed here; pip install {cfg.log}")
    if isinstance(cfg, PolicyFlags):
        check_policy(cfg)
    if cfg.data == "world":
        check_world(cfg, world_sets)
    if isinstance(cfg, PassageFlags):
        usual = "bm25" if cfg.corpus or cfg.data == "world" else "http://127.0.0.1:8000"
        cfg = replace(cfg, name=cfg.name or run_name(cfg, *first), retriever=cfg.retriever or usual)
    return cfg


def check_numbers(cfg, may_be_zero, above_zero, least):
    """Refuses a number that is not finite or below what its field allows."""
    hints = get_type_hints(type(cfg))
    for name, value in vars(cfg).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        whole = int in (hints[name], *get_args(hints[name]))
        minimum = least.get(name, 1 if whole and name not in may_be_zero else 0)
        if not math.isfinite(value) or value < minimum:
            refuse(name, value, f"at least {minimum}, and finite")
        if name in above_zero and value <= 0:
            refuse(name, value, "a number above 0")


def check_policy(cfg):
    """Refuses flags that do nothing together, or something else than they say."""
    world, searches = cfg.data == "world", isinstance(cfg, PassageFlags)
    for wrong, name, words in (
        (searches and not world and not (cfg.policy or cfg.checkpoint or cfg.model), "data",
         "needs --model or --checkpoint"),
        (searches and not world and cfg.world != "plain", "world",
         "is a level of the embedded world, without --model and --data"),
        (world and getattr(cfg, "corpus", ""), "corpus",
         "is for --model, --checkpoint or --policy with --data; the world's tiny policy has its own"),
        (world and cfg.warmup_data, "warmup_data",
         "is for --model and --data FILE; the world's tiny policy has its own"),
        (cfg.engine == "vllm" and not has_vllm(), "engine",
         "vLLM is not installed here; pip install -r requirements-gpu.txt, or use --engine transformers"),
        (cfg.collect and (not cfg.eval_only or cfg.ask), "collect", "goes with --eval-only, without --ask"),
        (cfg.collect and world, "collect",
         "is for --data FILE; the embedded world has demonstrations of its own"),
        (cfg.collect and Path(cfg.collect).expanduser().exists(), "collect", "exists: choose another name"),
        (cfg.lr_warmup > 1, "lr_warmup", "a share of the training, at most 1"),
        (cfg.optimizer == "adamw8bit" and distributed.world() > 1, "optimizer",
         "is for one process: use adamw with torchrun, or --lora"),
        (cfg.policy and not (cfg.eval_only or cfg.ask), "policy",
         "text goes in and out, so it can be evaluated and not trained: add --eval-only"),
        (cfg.policy_tokenizer and not cfg.policy, "policy_tokenizer", "is for --policy"),
        (cfg.policy and not cfg.policy_model, "policy_model",
         "the name that the service of --policy knows its model by"),
        (cfg.policy and (cfg.model or cfg.checkpoint or cfg.warmup_data), "policy",
         "is instead of --model, --checkpoint and --warmup-data"),
    ):
        if wrong:
            refuse(name, getattr(cfg, name), words)


def check_world(cfg, sets):
    """Refuses a level or a set of the world that there is not."""
    from common.world import SPLITS, hard
    if isinstance(cfg, PassageFlags):
        try:
            hard.parse(cfg.world)
        except ValueError as error:
            refuse("world", cfg.world, error)
    for name in cfg.eval_data.split(","):
        if name not in ("", *(sets or SPLITS)):
            refuse("eval_data", name, f"with --data world one of {', '.join(sets or SPLITS)}; "
                   "questions of your own are --data FILE")


def has_vllm():
    return importlib.util.find_spec("vllm") is not None


# ---------------------------------------------------------------- command line

def given_flags(argv=None):
    """(argv with what its @FILEs hold, {flag: value} as typed)"""
    argv = sys.argv[1:] if argv is None else list(argv)
    argv = [word for given in argv for word in (read_flags(given) if given.startswith("@") else [given])]
    flags = {}
    for flag, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = flag.partition("=")
        flags[name.replace("_", "-")] = value if equals else following
    if "--ask" in flags and not flags["--ask"].strip():
        sys.exit("error: --ask is empty: a question in quotes")
    return argv, flags


def read_flags(given):
    """The flags of @FILE (see recipes/): words as a shell splits them, # begins a comment."""
    file = given[1:]
    try:
        text = Path(file).read_text(encoding="utf-8-sig")  # (Windows' editors put a mark before)
        return shlex.split(text, comments=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {given}: cannot read flags from {file} ({error})")


def parse(script, config, docstring, argv=None, own=None, ends_world=("--model", "--policy")):
    """A script's Config from the command line. Defaults are those of the class `config`, the paper's. In the
    embedded world, which another --data or a flag of `ends_world` leaves, recipes/world.toml replaces some.
    own(given, in_world) -> {field: default} replaces more, of both."""
    argv, given = given_flags(argv)
    paper = default = config()
    in_world = given.get("--data", "world") == "world" and not given.keys() & set(ends_world)
    if in_world:
        default = replace(default, **world_defaults(script, given.get("--world")))
    if own:
        paper = replace(paper, **own(given, False))
        default = replace(default, **own(given, in_world))
    if {"-h", "--help"} & set(argv):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends without a word
        print(help_of(default, paper, docstring))
        sys.exit()
    typed[:] = argv
    return tyro.cli(config, default=default, args=argv)


def world_defaults(script, level=None):
    """{field: default} of a script in the embedded world. level: --world as given; None = what the script's
    table [hard] sets, else plain."""
    tables = tomllib.loads((RECIPES / "world.toml").read_text(encoding="utf-8"))[script]
    found = dict(tables["plain"])
    hard = tables.get("hard", {})
    if (level or hard.get("world", "plain")).startswith("hard"):
        found |= hard
    return found


typed = []  # the flags that this program was started with


def started_as(script):
    """The file of this program as it was typed, which may be a copy of the script."""
    is_a_file = getattr(sys.modules["__main__"], "__spec__", None) is None
    typed_file = Path(sys.argv[0])
    if is_a_file and typed_file.suffix == ".py" and typed_file.stem != "ipykernel_launcher":
        return sys.argv[0]
    return f"{script}.py"


def command(script, without=(), **given):
    """A command line that can be pasted: this program's, without some flags and with others.

    >>> typed[:] = "--data a.jsonl --eval-only --lr=1 --name x".split()
    >>> print(command("at2po", ["eval_only", "lr"], name="y", ask="Who is it?"))
    python at2po.py --data a.jsonl --name y --ask 'Who is it?'
    """
    groups = []  # a flag with its values
    for word in typed:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    words = ["python", started_as(script)]
    for flag, *values in groups:
        name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
        if name not in (*without, *given):
            words += [flag, *values]
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


# ---------------------------------------------------------------- --help

PAPER = "The paper's settings (behind the bar: where it says so, or whose code)"
DATA = "Data and search"
MACHINE = "Model and training machine"
RUN = "Run folder and evaluation"
OURS = "Stages, baselines, and what the paper leaves open"
OF_DATA = ("data", "eval_data", "limit", "skip_bad", "world", "corpus", "retriever")
OF_RUN = ("eval_limit", "eval_every", "save_every", "log", "seed", "name", "out", "resume", "eval_only",
          "ask", "collect")


def group_of(name, words):
    """The group of a flag that has these words."""
    _, bar, source = words.rpartition("|")
    if name in OF_DATA:
        return DATA
    if name in OF_RUN:
        return RUN
    if bar and not source.strip().startswith("ours"):
        return PAPER
    return MACHINE if name in (f.name for f in dataclasses.fields(PolicyFlags)) else OURS


def help_of(default, paper, docstring):
    """What --help prints: the commands of a script's docstring and its flags in five groups."""
    title, *rest = docstring.strip().split("\n")
    from_first = itertools.dropwhile(lambda line: not line.startswith("    python "), rest)
    commands = itertools.takewhile(lambda line: line.startswith("    "), from_first)
    groups = {group: [] for group in (PAPER, DATA, MACHINE, RUN, OURS)}
    hints = get_type_hints(type(paper))
    for f in dataclasses.fields(paper):
        words = " ".join(get_field_docstring(type(paper), f.name, ()).split())
        flag, shown = f"--{f.name.replace('_', '-')}", [getattr(of, f.name) for of in (paper, default)]
        if hints[f.name] is bool:
            flag = flag.replace("--", "--[no-]", 1)
            shown = [("no", "yes")[value] for value in shown]
        value, in_world = (value if value != "" else "''" for value in shown)
        flag += f" {value}"
        if in_world != value:
            flag += f" [{in_world}]"
        group = group_of(f.name, words)
        choices = get_args(hints[f.name]) if get_origin(hints[f.name]) is Literal else ()
        if not all(re.search(rf"\b{re.escape(choice)}", words) for choice in choices):
            words += f" ({', '.join(choices)})"
        groups[group] += flag_lines(flag, words)
    lines = [title, *commands, "", "flag, its value in the paper [in the embedded world, without --model]"]
    for group, flags in groups.items():
        lines += ["", group, *flags]
    lines += ["", "  On a CPU a run takes the free cores as threads (OMP_NUM_THREADS=N: N of them), which is",
              "  faster than as many processes: torchrun is for GPUs."]
    return "\n".join(lines)


def flag_lines(flag, words):
    """A flag and its words in two columns."""
    width = min(110, shutil.get_terminal_size((110, 0)).columns)
    first, *others = textwrap.wrap(words, max(30, width - 31))
    if len(flag) > 27:
        return [f"  {flag}", *(f"{'':31}{line}" for line in (first, *others))]
    return [f"  {flag:27}  {first}", *(f"{'':31}{line}" for line in others)]
