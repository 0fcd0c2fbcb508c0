"""The command line over run folders.

    python -m common.page RUN                  writes its page and curves anew
    python -m common.page RUN RUN …            curves over one another, tables with paired differences, over
                                               seeds too (…seed0…, …seed1…); --score f1: of another number
    python -m common.page RUN --explain ID     one question's trajectories on the terminal
    python -m common.page RUN --export FOLDER  its configuration, metrics and predictions,
                                               as results/ keeps them
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path

from common.files import RunError, read_jsonl, say, warn, write_atomic, write_json
from common.metrics import is_two_way
from common.page import write_page
from common.page.record import explain
from common.report import COLUMNS, draw_curves, evaluations, method_table, panels_of, with_evaluations


def main(argv=None):
    """Pages, comparisons and explanations of run folders."""
    parser = argparse.ArgumentParser(prog="python -m common.page", description=main.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-seed0")
    parser.add_argument(
        "--explain", metavar="ID", help="explain the trajectories of this question; ID/N for one of them")
    parser.add_argument(
        "--export", metavar="FOLDER", help="keep a run's configuration, metrics and predictions there")
    parser.add_argument(
        "--without-texts", action="store_true",
        help="with --export: no questions and answers, which may not be yours to give away, and no paths")
    parser.add_argument(
        "--out", default="comparison.png", help="where the curves of several runs go: .png, .pdf or .svg")
    parser.add_argument(
        "--score", default="em", help="what the tables compare: em, f1, or another number of the predictions")
    args = parser.parse_args(argv)
    if Path(args.out).suffix not in (".png", ".pdf", ".svg"):
        sys.exit(f"error: --out {args.out}: a name that ends in .png, .pdf or .svg")
    for run in args.runs:
        if not (run / "config.json").exists():
            sys.exit(f"error: {run} holds no run (no config.json)")
    first = args.runs[0]
    exported = (first / "predictions.jsonl.gz").exists()  # it has no trajectories for a page
    if args.explain is not None:
        explain_question(args.runs, args.explain)
    elif args.export:
        if len(args.runs) > 1:
            sys.exit("error: --export takes one run")
        export(first, args.export, not args.without_texts)
        say(f"exported to {args.export}")
    elif len(args.runs) > 1 or exported:
        compare(args.runs, args.out, args.score)
    else:
        if read_jsonl(first / "metrics.jsonl"):
            rows = [with_evaluations(first)]
            draw_curves({first.name: rows}, first / "curves.png", first.name, panels_of(first))
        say(f"page: {write_page(first)}")


def compare(folders, out="comparison.png", key="em"):
    """Curves of several runs over one another, and tables of their final scores: of each run, differences
    paired by question with the first one; and where the names differ by their seed (mygo-seed0,
    seed1-text-star), of each method over its seeds."""
    differ = len({f.name for f in folders}) == len(folders)
    runs = {f.name if differ else str(f): f for f in folders}
    steps = {name: [read_jsonl(f / "metrics.jsonl")] for name, f in runs.items()}
    if len(folders) > 1 and any(rows for rows, in steps.values()):
        draw_curves(steps, out, " · ".join(runs), panels_of(*folders))
        say(f"curves: {out}")
    if not any(map(evaluations, folders)):
        return warn("no final evaluation (eval_<set>.json, predictions.jsonl.gz) in these folders: "
                    "nothing to compare but curves")
    columns = {
        "EM before": ("before", "em", "interval"),
        "guessing": ("eval", "guess", ".3f"),
        "EM of the rest": ("eval", "open", ".3f"),
    } | COLUMNS
    each = {name: [folder] for name, folder in runs.items()}
    method_table(None, "final evaluations", each, next(iter(runs)), None, columns, key, means=False)
    methods = {}
    for name, folder in runs.items():
        seed = re.search(r"seed(\d+)", name)
        if seed:
            method = name.replace(seed[0], "").strip("-_ ")
            methods.setdefault(method, {})[int(seed[1])] = folder
    methods = {method: seeds for method, seeds in methods.items() if len(seeds) > 1}
    if methods:
        along = {"EM along the run": ("along", "", ".3f")}
        method_table(None, "over seeds", methods, next(iter(methods)), None, along, key, means=False)


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


# ---------------------------------------------------------------- what results/ keeps

EXPORTED = (
    "id", "question", "gold", "type", "hops", "answer", "problem", "em", "em_valid", "f1",
    "searches", "tokens", "read", "copied", "rounds", "normalised", "repetitions", "pattern", "standard",
    "precision", "recall", "percentile", "sentences", "evidence_found", "end", "first_wrong", "sub-questions",
    "logprob", "repeats", "d_TA", "d_TQ")
TEXTS = ("question", "gold", "answer")


def export(folder, out, texts=True):
    """What is kept of a run under results/: config.json, metrics.json, metrics.jsonl, and every prediction of
    the evaluations before and after in one compressed table, without the trajectories. summary.json has what
    a summary says that cannot be read off the predictions.

    Numbers can be recomputed from it; `python -m common.page` reads it. texts: False leaves out questions
    and answers, which are the data set's, and the run's paths."""
    folder = Path(folder)
    out = Path(out)
    if (out / "config.json").exists():
        raise RunError(f"{out} exists: choose another --export")
    rows, said = [], {}
    for when in ("before", ""):
        for name, result in evaluations(folder, when).items():
            for row in result["predictions"]:
                kept = {k: row[k] for k in EXPORTED if k in row and (texts or k not in TEXTS)}
                if not texts:
                    kept["two_way"] = float(is_two_way(row))
                rows.append({"set": name, "when": when or "after"} | kept)
            said[f"{name}_{when}".rstrip("_")] = _beyond_the_rows(result)
    if not rows:
        raise RunError(f"{folder} has no evaluation to export")
    out.mkdir(parents=True, exist_ok=True)
    with gzip.GzipFile(out / "predictions.jsonl.gz", "wb", mtime=0) as f:
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        f.write("".join(lines).encode())
    if any(said.values()):
        write_json(out / "summary.json", said)
    for name in ("metrics.jsonl", "metrics.json", "config.json"):
        if (folder / name).exists():
            text = (folder / name).read_text(encoding="utf-8")
            if name == "config.json" and not texts:  # of paths the last part alone
                text = re.sub(r'(?<=[",])[^",]*/(?=[^",/]+[",])', "", text)
            write_atomic(out / name, text)


def _beyond_the_rows(result):
    """What of a summary is neither a mean of the predictions nor how they were made."""
    known = {"set", "seed", "search", "n", "format", "two_way", "open", "guess", "reading"}
    columns = result["predictions"][0].keys()
    beyond = {}
    for key, value in result["summary"].items():
        read_off = key in known or key.startswith("by_") or re.sub("_(low|high)$", "", key) in columns
        if not read_off:
            beyond[key] = value
    return beyond


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        raise SystemExit(f"error: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SystemExit(f"error: not a run folder of this version, or damaged ({what})") from error
