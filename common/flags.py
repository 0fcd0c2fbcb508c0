"""The flags that all scripts share, and a script's Config on the command line: its comments are the help,
its banners the groups.

    @dataclass
    class Config(flags.PolicyFlags):
        # ---- update
        steps: int = 240      # training steps | sec. 5.1
        # a comment above a field is its help too, where it does not fit behind it

Behind the bar stands who set the default: the paper's section or the authors' code. Where another default
holds (the embedded world's), the help names the paper's number together with its source, never the source
beside a number that is not its own.
"""

import dataclasses
import importlib.util
import inspect
import itertools
import math
import re
import shlex
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

import torch
import tyro

from common import distributed

# ---------------------------------------------------------------- shared fields

@dataclass
class Flags:
    """What every script can be told, beside what its paper talks about."""

    # ---- model and data
    model: str = ""               # folder or hub id; empty = the tiny policy of the embedded world
    # weights to start from or to evaluate: a run's checkpoint/, any folder or hub id
    checkpoint: str = ""
    data: str = ""                # training questions: file, hub name, or "world"
    eval_data: str = ""           # evaluation sets with commas; empty = the paper's, or a file's last tenth
    limit: int = 0                # first so many training questions; 0 = all
    eval_limit: int = 0           # first so many questions of each evaluation set; 0 = all
    skip_bad: bool = False        # leave malformed records and overlong prompts out, and count them

    # ---- embedded world
    world_size: float = 1.0       # 1.0 = about 1,000 entities

    # ---- running
    eval_every: int = 0           # steps between evaluations; 0 = before and after training only
    save_every: int = 10          # steps between checkpoints; 0 = at the end only
    show_every: int = 10          # steps between printed trajectories; 0 = none
    log: str = ""                 # tracker beside the files: trackio, or wandb (offline)
    seed: int = 0                 # of everything that is random
    name: str = ""                # of the run folder in runs/<script>/; empty = from model, data and seed
    out: str = "runs"             # where run folders go
    resume: bool = False          # go on with the run of this name
    eval_only: bool = False       # evaluate --checkpoint or --model, no training
    ask: str = ""                 # answer one question and show how


@dataclass
class PolicyFlags(Flags):
    """And the scripts that sample a language model, let it search, and train it."""

    # ---- search
    search_timeout: float = 60.0  # seconds a request to a search server may take
    search_retries: int = 12      # further tries while a search server does not answer; 12 = some two minutes

    # ---- a served policy
    # with --eval-only: address of an OpenAI-compatible service, up to and with /v1; its key comes from
    # OPENAI_API_KEY
    policy: str = ""
    policy_model: str = ""        # the name it knows the model by

    # ---- warm-up
    # real questions with gold evidence, or ShareGPT conversations, that --model learns the format from first:
    # files with commas
    warmup_data: str = ""
    warmup_epochs: int = 3        # passes over their demonstrations
    # updates of 8 demonstrations; auto = those of --warmup-epochs, and 900 for the world's tiny policy
    warmup_steps: Literal["auto"] | int = "auto"
    warmup_lr: float = 1e-5       # learning rate, cosine; 3e-4 did well for 135M weights
    # share of flawed demonstrations; auto = 0, and for the tiny policy .6 in the last fifth, .1 before
    flaw_rate: Literal["auto"] | float = "auto"

    # ---- memory and speed
    # what samples; auto = vllm where CUDA and vLLM are; a run keeps its own, since random streams differ
    engine: Literal["auto", "transformers", "vllm"] = "auto"
    max_batch: int = 256          # sequences decoded together, at most
    cache_gb: float = 8.0         # keys and values of running sequences; as much again for finished turns
    micro_tokens: int = 16384     # packed tokens a forward pass; memory only
    pack_tokens: int = 16384      # tokens a pack of shared prefixes; memory only
    share_prefixes: Literal["on", "off"] = "on"     # compute shared starts of trajectories once; same results
    kernels: Literal["auto", "on", "off"] = "auto"  # Triton log-probs; auto = where there is CUDA
    # over shared prefixes: tree = FlexAttention, on a GPU; auto = tree there, a dense mask elsewhere
    attention: Literal["auto", "dense", "tree"] = "auto"
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # of products, not weights; auto = bf16 on a GPU
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"   # 8 bit = moments in a quarter of the memory
    lora: int = 0                 # rank of adapters; 0 = full weights
    # losses with a ratio weighed by a token's trainer over sampler probability, at most 2
    sampler_correction: Literal["none", "token"] = "none"
    # recompute activations; auto = on a GPU; memory only
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"


@dataclass
class PassageFlags(PolicyFlags):
    """And those whose policy searches passages."""

    # ---- embedded world
    # plain, or hard[:KNOB=SHARE,…]: the level at which methods can differ (common/world/hard.py)
    world: str = "plain"

    # ---- search
    corpus: str = ""              # JSONL with id, contents; or "contexts" = pooled from the questions
    # bm25, dense:MODEL[@INDEX] or http://HOST:PORT; empty = bm25 with a corpus, else http://127.0.0.1:8000
    retriever: str = ""
    query_prefix: str = "auto"    # what the encoder of dense:MODEL reads before a query
    # and before a passage; auto = as it was trained, where its prompts or its name tell
    passage_prefix: str = "auto"


DATA_SUFFIX = r"\.(jsonl?|ndjson|csv|tsv|parquet)(\.gz)?$"
TINY_WARM_UP = {"warmup_steps": 900, "flaw_rate": .6}
HARD_WARM_UP = {"warmup_steps": 1550, "flaw_rate": .8}
MAY_BE_ZERO = ("limit", "eval_limit", "eval_every", "save_every", "show_every", "search_retries", "lora",
               "seed")
ABOVE_ZERO = ("world_size", "search_timeout", "cache_gb", "warmup_lr")


def without_auto(cfg):
    """cfg with what "auto" means here in the fields that all scripts share, so that config.json says what
    ran."""
    auto = {}
    if hasattr(cfg, "engine"):
        auto["engine"] = "vllm" if torch.cuda.is_available() and has_vllm() else "transformers"
    if hasattr(cfg, "warmup_data"):
        tiny = {} if cfg.warmup_data else TINY_WARM_UP
        if getattr(cfg, "world", "plain") != "plain":
            tiny = HARD_WARM_UP
        auto |= {"flaw_rate": 0.0} | tiny
    unset = {name: value for name, value in auto.items() if getattr(cfg, name) == "auto"}
    return dataclasses.replace(cfg, **unset)


def run_name(cfg, *first):
    """The name of a run folder where --name is empty: `first`, model and data where they are not the default,
    and the seed."""
    parts = [*first, Path(cfg.model or getattr(cfg, "policy_model", "")).name]
    if cfg.data not in ("world", type(cfg)().data):
        parts += [re.sub(DATA_SUFFIX, "", Path(name).name) for name in cfg.data.split(",")]
    if getattr(cfg, "world", "plain") != "plain":
        parts.append(cfg.world)
    if cfg.world_size != 1:
        parts.append(f"size{cfg.world_size:g}")
    name = "-".join([*filter(None, parts), f"seed{cfg.seed}"])
    return re.sub(r"[^\w.=+-]+", "-", name)[-100:].strip("-.")


def check(cfg, may_be_zero, above_zero, world_sets=None, least=None):
    """cfg without "auto". Refuses numbers that no run can use, and trackers and sets that do not exist.

    int fields: at least 1, or 0 if in may_be_zero; float fields: at least 0, or above 0 if in above_zero;
    least {name: minimum} overrides. The names (with blanks between) are the script's own, beside the shared
    ones."""
    cfg = without_auto(cfg)
    may_be_zero = (*MAY_BE_ZERO, *may_be_zero.split())
    above_zero = (*ABOVE_ZERO, *above_zero.split())
    hints = get_type_hints(type(cfg))
    for name, value in vars(cfg).items():
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name, value, "a finite number")
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        whole = int in (hints[name], *get_args(hints[name]))
        minimum = 1 if whole and name not in may_be_zero else 0
        minimum = (least or {}).get(name, minimum)
        if value < minimum and name not in above_zero:
            refuse(name, value, f"at least {minimum}")
    for name in above_zero:
        if hasattr(cfg, name) and not getattr(cfg, name) > 0:
            wanted = "a number above 0"
            if name == "temperature":
                wanted += " (it is that of training; greedy evaluation is --eval-temperature 0)"
            refuse(name, getattr(cfg, name), wanted)
    if not 0 <= cfg.seed < 2**63:
        refuse("seed", cfg.seed, "a number from 0 to 2^63 - 1")
    for name in ("clip", "clip_low", "clip_high"):
        if getattr(cfg, name, 0) >= 1:
            refuse(name, getattr(cfg, name), "below 1: the window is 1 - low to 1 + high")
    if getattr(cfg, "flaw_rate", 0) > 1:
        refuse("flaw_rate", cfg.flaw_rate, "a share, from 0 to 1")
    check_together(cfg)
    check_machine(cfg)
    if cfg.log not in ("", "trackio", "wandb"):
        refuse("log", cfg.log, "trackio or wandb")
    if cfg.log and not importlib.util.find_spec(cfg.log):
        refuse("log", cfg.log, f"not installed here; pip install {cfg.log}")
    check_world(cfg, world_sets)
    return cfg


def check_together(cfg):
    """Refuses flags that are for something else that is not there."""
    if getattr(cfg, "warmup_data", "") and cfg.data == "world":
        refuse("warmup_data", cfg.warmup_data, "is for --model and --data FILE; the world's tiny policy has "
               "its own")
    if getattr(cfg, "warmup_data", "") and cfg.checkpoint:
        refuse("warmup_data", cfg.warmup_data, "begins with --model; --checkpoint has learned already")
    for name in ("query_prefix", "passage_prefix"):
        given = getattr(cfg, name, "auto")
        if given != "auto" and (cfg.data == "world" or not cfg.retriever.startswith("dense:")):
            refuse(name, given, "is for --retriever dense:MODEL and a corpus")
    if Path(cfg.out).exists() and not Path(cfg.out).is_dir():
        refuse("out", cfg.out, "is a file: the name of a folder for run folders")


def check_world(cfg, sets):
    """Refuses a level or a set of the world that there is not, and a level without the world."""
    level = getattr(cfg, "world", "plain")
    if cfg.data != "world":
        if level != "plain":
            refuse("world", level, "is a level of the embedded world, without --model and --data")
        return
    from common.world import SPLITS, hard
    try:
        hard.parse(level)
    except ValueError as error:
        refuse("world", level, error)
    for name in cfg.eval_data.split(","):
        if name not in ("", *(sets or SPLITS)):
            refuse("eval_data", name, f"with --data world one of {', '.join(sets or SPLITS)}")


def has_vllm():
    return importlib.util.find_spec("vllm") is not None


def check_machine(cfg):
    """Refuses what is not on this machine."""
    if getattr(cfg, "kernels", "auto") == "on" and not torch.cuda.is_available():
        sys.exit("error: --kernels on needs a CUDA device; auto takes plain PyTorch where there is none")
    if getattr(cfg, "attention", "auto") == "tree" and not torch.cuda.is_available():
        sys.exit("error: --attention tree needs a CUDA device (FlexAttention cannot train on a CPU); "
                 "auto takes a dense mask where there is none")
    if getattr(cfg, "optimizer", "adamw") == "adamw8bit" and not importlib.util.find_spec("bitsandbytes"):
        sys.exit("error: --optimizer adamw8bit: bitsandbytes is not installed here; "
                 "pip install -r requirements.txt")
    if getattr(cfg, "optimizer", "adamw") == "adamw8bit" and distributed.world() > 1:
        sys.exit("error: --optimizer adamw8bit is for one process: bitsandbytes does not know weights that "
                 "are cut over several; with torchrun use adamw, or --lora")
    if getattr(cfg, "engine", "") == "vllm" and not has_vllm():
        sys.exit("error: --engine vllm: vLLM is not installed here; pip install -r requirements-gpu.txt, "
                 "or use --engine transformers")


def refuse(name, value, wanted):
    """Ends the program with what a flag has to be."""
    sys.exit(f"error: --{name.replace('_', '-')} {value}: {wanted}")


def default_retriever(cfg):
    """What an empty --retriever means."""
    return "bm25" if cfg.corpus or cfg.data == "world" else "http://127.0.0.1:8000"


def needs_a_model(cfg):
    """Refuses data other than the world's without a model; called before anything is read."""
    if getattr(cfg, "policy", ""):
        if not cfg.eval_only and not cfg.ask:
            refuse("policy", cfg.policy, "text goes in and out, so it can be evaluated and not trained: add "
                   "--eval-only")
        if not cfg.policy_model:
            refuse("policy_model", "", "the name that the service of --policy knows its model by")
        if cfg.model or cfg.checkpoint or cfg.warmup_data:
            refuse("policy", cfg.policy, "is instead of --model, --checkpoint and --warmup-data")
    elif cfg.data != "world" and not (cfg.checkpoint or cfg.model):
        sys.exit(f"error: --data {cfg.data} needs --model or --checkpoint")


# ---------------------------------------------------------------- command line

def given_flags(argv=None):
    """(argv with what its @FILEs hold, {flag: value} as typed, whether they mean the embedded world:
    neither a model, a service nor other data is named)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    argv = [word for given in argv for word in (read_flags(given) if given.startswith("@") else [given])]
    flags = {}
    for flag, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, equals, value = flag.partition("=")
        flags[name.replace("_", "-")] = value if equals else following
    if "--ask" in flags and not flags["--ask"].strip():
        sys.exit("error: --ask is empty: a question in quotes")
    world_data = flags.get("--data", "world") == "world"
    served = "--model" in flags or "--policy" in flags
    return argv, flags, world_data and not served


def read_flags(given):
    """The flags of @FILE (see recipes/): words as a shell splits them, # begins a comment."""
    file = given[1:]
    try:
        with open(file, encoding="utf-8") as f:
            return shlex.split(f.read(), comments=True)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {given}: cannot read flags from {file} ({error})")


def comments(config):
    """{field: (group, words, source)} of a dataclass and its bases, from the comments in their source.

    The script's own groups come first; a field that it has anew is told of as there."""
    found = {}
    for cls in config.__mro__[:-1]:
        for name, told in _comments_of(cls).items():
            found.setdefault(name, told)
    return found


def _comments_of(cls):
    found = {}
    group = "options"
    above = []
    source_code = textwrap.dedent(inspect.getsource(cls))
    for line in source_code.split("\n"):
        banner = re.match(r"    # ---- (.*)", line)
        field = re.match(r"    (\w+): [^#]*?(?:  # (.*))?$", line)
        if banner:
            group = banner[1]
            above = []
        elif line.startswith("    # "):
            above.append(line[6:])
        elif field:
            comment = " ".join([*above, field[2] or ""]).strip()
            words, _, source = comment.partition(" | ")
            found[field[1]] = group, words, source
            above = []
    return found


def summary(docstring):
    """Of a script's docstring what --help shows: its title and its commands."""
    title, *rest = docstring.strip().split("\n")
    commands = [line for line in rest if re.match(r"    python |     {20,}\S", line)]
    while commands and not commands[0].startswith("    python"):
        commands.pop(0)
    more = "Method, sources and differences from the paper: the top of the script."
    return "\n".join([title, "", *commands, "", more])


def cli(default, paper, docstring, argv):
    """`default` (an instance of a Config) with the flags of argv over it, one help group a banner.

    paper: the same with a model."""
    config = type(default)
    refuse_boolean_values(default, argv)
    hints = get_type_hints(config, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(config)}
    groups = {}
    for name, (group, words, source) in comments(config).items():
        value = getattr(default, name)
        with_model = getattr(paper, name)
        cited = source if with_model == fields[name].default else ""
        if value != with_model:
            words += f" (with --model: {with_model!r}{cited and ', ' + cited})"
        elif cited:
            words += f" ({cited})"
        kind = Annotated[hints[name], tyro.conf.arg(help=words)]
        member = (name, kind, dataclasses.field(default=value))
        groups.setdefault(group, []).append(member)
    nested = []
    for name, members in groups.items():
        kind = dataclasses.make_dataclass("Group", members)
        name = re.sub(r"\W+", "_", name)
        nested.append((name, kind, dataclasses.field(default_factory=kind)))
    whole = dataclasses.make_dataclass("Config", nested)
    whole = tyro.conf.OmitArgPrefixes[whole]
    parsed = tyro.cli(whole, description=summary(docstring), args=argv)
    values = {}
    for group in vars(parsed).values():
        values |= vars(group)
    return config(**values)


def refuse_boolean_values(default, argv):
    """A switch takes no value: `--resume False` is refused with the two forms there are."""
    for flag, following in itertools.pairwise([*argv, ""]):
        flag, equals, value = flag.partition("=")
        if not equals:
            value = following
        name = re.sub(r"^--(no-)?", "", flag).replace("_", "-")
        current = getattr(default, name.replace("-", "_"), None)
        switch = flag.startswith("--") and isinstance(current, bool)
        if switch and value and not value.startswith("-"):
            sys.exit(f"error: {flag} {value}: a switch without a value; write --{name} or --no-{name}")
