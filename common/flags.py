"""A script's Config on the command line: its comments are the help, its banners the groups.

    @dataclass
    class Config:
        # ---- update
        steps: int = 240      # training steps | sec. 5.1
        # a comment above a field is its help too, where it does not fit behind it

Behind the bar stands who set the default: the paper's section or the authors' code. Where another default holds (the embedded
world's), the help names the paper's number together with its source, never the source beside a number that is not its own.
"""

import dataclasses
import inspect
import itertools
import re
import sys
import textwrap
from typing import Annotated, get_type_hints

import tyro


def given_flags(argv=None):
    """(argv, {flag: value} as typed, whether they mean the embedded world: neither a model nor another data set is named)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags = {}
    for flag, following in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        name, _, value = flag.partition("=")
        flags[name.replace("_", "-")] = value if "=" in flag else following
    return argv, flags, flags.get("--data", "world") == "world" and "--model" not in flags


def comments(config):
    """{field: (group, words, source)} of a dataclass, from the comments in its source."""
    found, group, above = {}, "options", []
    for line in textwrap.dedent(inspect.getsource(config)).split("\n"):
        banner = re.match(r"    # ---- (.*)", line)
        field = re.match(r"    (\w+): [^#]*?(?:  # (.*))?$", line)
        if banner:
            group, above = banner[1], []
        elif line.startswith("    # "):
            above.append(line[6:])
        elif field:
            words, _, source = " ".join([*above, field[2] or ""]).strip().partition(" | ")
            found[field[1]], above = (group, words, source), []
    return found


def summary(docstring):
    """Of a script's docstring what --help shows: its title and its commands."""
    title, *rest = docstring.strip().split("\n")
    commands = [line for line in rest if re.match(r"    python |     {20,}\S", line)]
    while commands and not commands[0].startswith("    python"):
        commands.pop(0)
    return "\n".join([title, "", *commands, "", "Method, sources and differences from the paper: the top of the script."])


def cli(config, default, paper, docstring, argv):
    """`default` (an instance of `config`) with the flags of argv over it, one help group a banner. paper: the same with a model."""
    refuse_boolean_values(default, argv)
    hints, told = get_type_hints(config, include_extras=True), comments(config)
    groups = {}
    for f in dataclasses.fields(config):
        group, words, source = told[f.name]
        value = getattr(default, f.name)
        with_model = getattr(paper, f.name)
        cited = source if with_model == f.default else ""
        if value != with_model:
            words += f" (with --model: {with_model!r}{cited and ', ' + cited})"
        elif cited:
            words += f" ({cited})"
        kind = Annotated[hints[f.name], tyro.conf.arg(help=words)]
        groups.setdefault(group, []).append((f.name, kind, dataclasses.field(default=value)))
    nested = [(re.sub(r"\W+", "_", name), dataclasses.make_dataclass("Group", fields)) for name, fields in groups.items()]
    whole = dataclasses.make_dataclass("Config", [(name, kind, dataclasses.field(default_factory=kind)) for name, kind in nested])
    parsed = tyro.cli(tyro.conf.OmitArgPrefixes[whole], description=summary(docstring), args=argv)
    values = {f.name: getattr(part, f.name) for part in vars(parsed).values() for f in dataclasses.fields(part)}
    return config(**values)


def refuse_boolean_values(default, argv):
    """A switch takes no value: `--resume False` is refused with the two forms there are."""
    for flag, following in itertools.pairwise([*argv, ""]):
        flag, equals, value = flag.partition("=")
        name = re.sub(r"^--(no-)?", "", flag).replace("_", "-")
        value = value if equals else following
        if flag.startswith("--") and isinstance(getattr(default, name.replace("-", "_"), None), bool) and value and not value.startswith("-"):
            sys.exit(f"error: {flag} {value}: a switch without a value; write --{name} or --no-{name}")
