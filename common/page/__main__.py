"""The page of a run, on its own and on the terminal. Several runs: python -m common.report.

    python -m common.page RUN                  writes its page and curves anew
    python -m common.page RUN --explain ID     one question's trajectories on the terminal
"""

import argparse
import re
import sys
from pathlib import Path

from common.files import RunError, read_jsonl, say
from common.page import write_page
from common.page.record import explain
from common.report import draw_curves, evaluations, panels_of, with_evaluations


def main(argv=None):
    """Pages and explanations of run folders."""
    parser = argparse.ArgumentParser(prog="python -m common.page", description=main.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-hard-seed0")
    parser.add_argument(
        "--explain", metavar="ID", help="explain the trajectories of this question; ID/N for one of them")
    args = parser.parse_args(argv)
    for run in args.runs:
        if not (run / "config.json").exists():
            sys.exit(f"error: {run} holds no run (no config.json)")
    if args.explain is not None:
        return explain_question(args.runs, args.explain)
    for run in args.runs:
        if read_jsonl(run / "metrics.jsonl"):
            draw_curves({run.name: [with_evaluations(run)]}, run / "curves.png", run.name, panels_of(run))
        say(f"page: {write_page(run)}")


def explain_question(runs, wanted):
    """--explain ID or ID/N: the trajectories of a question,
    the last time that it was sampled or evaluated."""
    question, number = re.fullmatch(r"(.*?)(?:/(\d+))?", wanted, re.DOTALL).groups()
    groups = {}
    for run in runs:
        everything = read_jsonl(run / "samples.jsonl")
        for evaluation in evaluations(run).values():
            everything += evaluation["predictions"]
        groups |= {g["question_id"]: g for g in everything if g.get("nodes")}
    group = groups.get(question, {"trajectories": []})
    chosen = range(len(group["trajectories"]))
    if number:
        chosen = chosen[int(number):][:1]
    if not chosen:
        known = ", ".join(groups)[:600] or "none"
        sys.exit(f"error: no such trajectory {wanted} in {runs[0]}; there are {known}")
    for i in chosen:
        explain(group, i)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        raise SystemExit(f"error: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SystemExit(f"error: not a run folder of this version, or damaged ({what})") from error
