"""Runs read again, run folders and runs that results/ keeps by name:

    python -m common.report RUN          the page and the curves of one folder anew, and its scores
    python -m common.report RUN RUN …    curves over one another; one line per method over seeds, or per run,
                                         with its difference to the first of the same sets
    python -m common.report RUN RUN --each     one line per run, too, where there are several seeds
    python -m common.report 'results/hard/at2po/frozen-*'
    python -m common.report RUN RUN --page     also comparison.html, their questions side by side
    python -m common.report RUN --export openai|atif    its trajectories for other tools (export.py)
"""

import argparse
import re
import sys
from collections import Counter
from pathlib import Path

from common.files import UserError, say, warn
from common.page.writer import draw, write_comparison
from common.report import committed, curves, method_table, read_run, steps_of
from common.report.export import FORMS, export


def compare(folders, out="comparison.png", page="", each_run=False):
    """Of one folder its page, of several runs their curves over one another; and tables of final scores:
    where all names differ by their seed (mygo-seed0, seed1-text-star) of each method over its seeds, else, or
    for a page, or with `each_run`, of each run, differences paired by question with the first one of the
    same sets. page: where to write the runs' questions side by side."""
    names = [folder.name for folder in folders]
    if len(folders) == 1 and folders[0].is_dir():
        draw(folders[0], names[0])
    if len(set(names)) < len(names):
        names = map(str, folders)
    runs = dict(zip(names, folders, strict=True))
    methods = {}
    for name, folder in runs.items():
        seed = re.search(r"seed(\d+)", name)
        if seed:
            method = name.replace(seed[0], "").strip("-_ ")
            methods.setdefault(method, {})[int(seed[1])] = folder
    methods = {method: seeds for method, seeds in methods.items() if len(seeds) > 1}
    drawn = {name: [folder] for name, folder in runs.items()}
    all_have_seeds = sum(map(len, methods.values())) == len(runs)
    if all_have_seeds:
        drawn = {method: list(seeds.values()) for method, seeds in methods.items()}
    steps = {name: [steps_of(folder) for folder in own] for name, own in drawn.items()}
    if len(folders) > 1 and any(map(any, steps.values())):
        curves.draw_curves(steps, out, " · ".join(drawn), curves.panels_of(*folders))
        say(f"curves: {out}")
    sets_of = {name: read_run(folder).sets for name, folder in runs.items()}
    if not any(sets_of.values()):
        return warn("no final evaluation (eval_<set>.json) in these folders: nothing to compare but curves")
    if methods:
        along = {"EM along the run": ("along", "", ".3f")}
        method_table(None, "over seeds", methods, next(iter(methods)), columns=along, means=False)
    if all_have_seeds and all(sets_of.values()) and not page and not each_run:
        return
    each = {name: [folder] for name, folder in runs.items()}
    counts = Counter(one for sets in sets_of.values() for one in sets)
    first = next((name for name, sets in sets_of.items() if any(counts[one] > 1 for one in sets)), "")
    table = method_table(None, "final evaluations", each, first, means=False)
    if page:
        say(f"page: {write_comparison(page, runs, table)}")


def main(argv=None):
    """Curves and tables of run folders, and of runs that results/ keeps."""
    parser = argparse.ArgumentParser(prog="python -m common.report", description=main.__doc__)
    parser.add_argument(
        "runs", nargs="+", help="run folders; of committed runs also patterns, 'results/at2po/*-seed*'")
    parser.add_argument(
        "--out", default="comparison.png", help="where the curves of several runs go: .png, .pdf or .svg")
    parser.add_argument(
        "--page", nargs="?", const="comparison.html", default="",
        help="also a page with the questions of all runs side by side and the table; the runs come before it")
    parser.add_argument("--export", choices=FORMS, help="trajectories of each folder in the form of others")
    parser.add_argument("--each", action="store_true", help="a line for each seed, too")
    args = parser.parse_args(argv)
    folders = []
    for run in args.runs:
        found = [Path(run)] if (Path(run) / "config.json").exists() else committed.matching(run)
        if not found:
            sys.exit(f"error: {run} holds no run (no config.json), and results/ keeps none of that name")
        folders += found
    try:
        if args.export:
            return [export(folder, args.export) for folder in folders]
        compare(folders, args.out, args.page, args.each)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
