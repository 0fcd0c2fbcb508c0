"""A paper's table over several seeds: every row a process of its own, one after another, each resumed where
it stopped; then one table, paper beside ours, and curves.

    python -m common.ladder at2po table1 --seeds 5 -- --world hard

Seeds may run side by side, a ladder each (--seed 3); the command for all of them then draws the table.

The rows stand in recipes/<script>.toml. A row has flags (what makes its method) and a run of its own,
<name>-<row>-seed<seed>; or it is a stage of the run without flags, <name>-seed<seed>, which is made first,
with the flags of "whole". So tables share the runs of one name.
"""

import argparse
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict
from pathlib import Path

from common import process, report
from common.files import RunError, UserError, clock, say
from common.flags import RECIPES
from common.report import committed, curves

FREE = {"resume", "out", "log", "save_every"}  # of a run's config.json, what need not be the table's


def read_tables(script):
    """{table: what recipes/<script>.toml says of it}; what stands above all tables holds for each. "stages":
    of the run of all stages."""
    recipe = tomllib.loads((RECIPES / f"{script}.toml").read_text(encoding="utf-8"))
    tables = {name: value for name, value in recipe.items() if isinstance(value, dict) and "rows" in value}
    stages = {}
    for table in tables.values():
        rows = table["rows"].values()
        stages |= {row["stage"]: None for row in rows if "stage" in row and "flags" not in row}
    return {name: recipe | table | {"stages": list(stages)} for name, table in tables.items()}


def jobs_of(recipe, base, name, seed, shared):
    """({run: (its flags, the folders that it makes)}, {row: its folder}) of a seed. shared: flags of every
    run."""
    whole = base / f"{name}-seed{seed}"
    jobs = {}
    folders = {}
    for label, row in recipe["rows"].items():
        if "when" in row:
            continue
        stage = row.get("stage", "")
        own = shlex.split(row.get("flags", ""))
        words = re.sub(r"\W+", "-", label.lower()).strip("-")
        run, stages = base / f"{name}-{words}-seed{seed}", [stage]
        if own:
            own = shlex.split(recipe.get("each", "")) + own
        elif stage:
            run, stages = whole, recipe["stages"]
            own = shlex.split(recipe.get("whole", ""))
        folders[label] = stage_of(run, stage)
        flags = [*shared, *(word.replace("{run}", str(whole)) for word in own)]
        flags += ["--seed", str(seed), "--name", run.name, "--out", str(base.parent)]
        jobs.setdefault(run, (flags, [stage_of(run, one) for one in stages]))
    return jobs, folders


def stage_of(run, stage):
    return run.with_name(f"{run.name}-{stage}") if stage else run


def run(script, table, seeds, name, out, shared):
    """Runs what is missing of a table for some seeds, and shows what came out:
    <out>/<script>/<name>-<table>-table.json and figures beside it. shared: flags of every run."""
    tables = read_tables(script)
    if table not in tables:
        raise RunError(f"{table}: the tables of {script} are {', '.join(tables)}")
    module = importlib.import_module(script)
    base = Path(out) / script
    methods = {}
    whole, others = {}, {}  # runs of all stages, which other rows may go on from; the other runs
    done = 0
    for seed in seeds:
        jobs, folders = jobs_of(tables[table], base, name, seed, shared)
        for label, folder in folders.items():
            methods.setdefault(label, {})[seed] = folder
        for job, (flags, made) in jobs.items():
            given = module.parse_args(flags)  # what it refuses is refused now
            begun = refuse_other_settings(job, made, asdict(given))
            if all(map(is_done, made)):
                done += 1
                continue
            wave = whole if job.name == f"{name}-seed{seed}" else others
            resume = ["--resume"] if begun else []
            wave[job] = [sys.executable, module.__file__, *flags, *resume]
    say(f"{name}-{table}: {done + len(whole) + len(others)} runs, {done} of them done before")
    one_by_one(whole | others)
    show(base / f"{name}-{table}", f"{script} {name}: {table}", tables[table], methods)


def is_done(folder):
    """Whether a run has come to its end: it has the final evaluation of each set, and its page is younger
    than all of them. What results/ keeps has."""
    page = folder / "trajectories.html"
    made = [file.stat().st_mtime for file in folder.glob("eval_*.json")]
    sets = (report.config_of(folder) or {}).get("inputs", {}).keys() - {"train"}
    found = report.evaluations(folder)
    whole = found and sets <= found.keys() and page.exists() and page.stat().st_mtime >= max(made)
    return bool(whole) or committed.name_of(folder) is not None


def refuse_other_settings(run, folders, config):
    """Whether a run was begun; RunError if with other settings, which a table must not mix. What an older
    version did not have is not compared, nor "auto" and what the stages of a run have each for itself."""
    configs = map(report.config_of, folders)
    saved = [one for one in configs if one is not None]
    for key in config.keys() - FREE:
        wanted = json.dumps(config[key])
        there = {json.dumps(one[key]) for one in saved if key in one}
        if len(there) == 1 and wanted not in (*there, '"auto"'):
            raise RunError(f"{run} was made with {key} = {there.pop()}, this table is for {wanted}")
    return bool(saved)


def one_by_one(commands):
    """Runs {run folder: command} in turn, one thread each. A run that fails ends the table."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    began = time.time()
    for number, (folder, command) in enumerate(commands.items(), 1):
        if subprocess.run(command, env=environment).returncode:
            raise RunError(f"{folder.name} failed: {shlex.join(command)}")
        say(f"{number}/{len(commands)} {folder.name}: {clock(time.time() - began)}")


# ---------------------------------------------------------------- the table

def show(path, title, recipe, methods):
    """report.method_table of {row: {seed: run folder}}, and their curves."""
    rows = recipe["rows"]
    shown = {}
    minus = {}
    above = ""
    for label, row in rows.items():
        seeds = methods.get(label) or next(iter(methods.values()))  # "when": of the first row's runs
        shown[label] = {seed: (folder, row.get("when", "")) for seed, folder in seeds.items()}
        minus[label] = recipe.get("minus", above)
        above = label

    def paper(label, names):
        printed = rows[label].get("paper", "")
        if "of" in recipe:
            return printed if sorted(names) in map(sorted, recipe["of"]) else ""
        if isinstance(printed, list):
            return dict(zip(recipe["sets"], printed, strict=True)).get(names[0], "")
        first = next(iter(shown[label].values()))
        return printed if names == list(report.read_run(first).sets) else ""

    path.parent.mkdir(parents=True, exist_ok=True)  # committed runs have no folder
    report.method_table(path, title, shown, minus, paper, recipe["columns"], means="sets" not in recipe)
    curves.draw_methods(path, title, {label: list(seeds.values()) for label, seeds in methods.items()})


def show_stages(script, path, own):
    """<path>-table.json of the stages of a run that are there, beside the paper's numbers; own: labels of
    those that were run now."""
    rows = {}
    for recipe in read_tables(script).values():
        for row in recipe["rows"].values():
            rows.setdefault(row["stage"], row)
    for label in own:
        rows.setdefault(label, {})
    methods = {}
    for stage in rows:
        folder = stage_of(path, stage)
        if list(folder.glob("eval_*.json")):
            methods[stage] = {"": folder}
    if methods:
        minus = "base" if "base" in methods else own[0]
        recipe = {"columns": recipe["columns"], "sets": recipe["sets"], "minus": minus}
        recipe["rows"] = {stage: rows[stage] for stage in methods}
        show_one(path, f"{script} {path.name}", recipe, methods)


def show_table(script, runs, stages, of_paper=""):
    """<run>-table.json of the stages that are evaluated, by recipes/stages.toml, each of the first of `runs`
    ("…/<name>", this one's own first) that has it: those of a run before it show what this one began from.
    of_paper: which of the paper's lists of numbers stands beside them, where there are several."""
    recipe = tomllib.loads((RECIPES / "stages.toml").read_text(encoding="utf-8"))[script]
    printed = recipe["paper"].get(of_paper, recipe["paper"])
    path, *_ = runs = [Path(run) for run in runs]
    methods = {}
    for stage in stages:
        folders = [stage_of(run, stage) for run in runs]
        there = [folder for folder in folders if list(folder.glob("eval_*.json"))]
        if there:
            methods[stage] = {"": there[0]}
            if there[0] != folders[0]:
                say(f"{stage}: that of {there[0].name}")
    rows = {stage: {"paper": printed.get(stage, "")} for stage in methods}
    if methods:
        show_one(path, f"{recipe['title']}: {path.name}", recipe | {"rows": rows}, methods)


OF_A_STAGE = {"stage", "envs", "think", "sft_lora", "eval_only"}  # settings that a stage may have for itself


def show_one(path, title, recipe, methods):
    """The table of one run's stages, after what they do not share."""
    stages = [folder for seeds in methods.values() for folder in seeds.values()]
    report.warn_of_other_settings(path.name, stages, OF_A_STAGE)
    show(path, title, recipe, methods)


def main(argv=None):
    """`python -m common.ladder SCRIPT TABLE …`"""
    argv = sys.argv[1:] if argv is None else list(argv)
    own, shared = argv, []
    if "--" in argv:
        own, shared = argv[:argv.index("--")], argv[argv.index("--") + 1:]
    parser = argparse.ArgumentParser(prog="python -m common.ladder", description=__doc__.splitlines()[0])
    parser.add_argument("script", help="at2po, omne_r1")
    parser.add_argument("table", help="such as table1")
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--name", default="tables", help="what the names of run folders begin with")
    parser.add_argument("--out", default="runs", help="where run folders go")
    given = parser.parse_args(own)
    seeds = range(given.seed, given.seed + given.seeds)
    with process.ends_cleanly((UserError, OSError), lambda: "the same command goes on with what was written"):
        run(given.script, given.table, seeds, given.name, given.out, shared)


if __name__ == "__main__":
    main()
