"""Tables of one run and of several, and the command line over run folders.

    python -m common.report RUN                  writes its page and curves anew
    python -m common.report RUN RUN …            curves over one another, tables with paired differences, over
                                                 seeds too (…seed0…, …seed1…); --score f1: of another number
    python -m common.report RUN --explain ID     one question's trajectories on the terminal
    python -m common.report RUN --export FOLDER  its configuration, metrics and predictions,
                                                 as results/ keeps them
"""

import argparse
import gzip
import json
import re
import sys
from pathlib import Path
from statistics import fmean

from common.curves import draw_curves
from common.files import RunError, read_jsonl, say, table, warn, write_atomic, write_json
from common.metrics import average, bootstrap_interval, is_two_way, paired_difference, seed_interval
from common.page import write_page
from common.page.record import explain
from common.results import evaluations, interval, mean_along, panels_of, pool, signed, with_evaluations

# ---------------------------------------------------------------- one run

def show_averages(results, groups):
    """A line for each average over several sets."""
    for label, result in pool(results, groups).items():
        s = result["summary"]
        say(f"{label} (n {s['n']}): EM {interval(s)} | format {s['format']:.2f}")


def show_results(folder, before, after, groups=()):
    """results.json and the table of a run: {set: {"summary", "predictions"}} before and after, paired on the
    same questions. groups: {label: sets} whose averages (common/results.py) are the last rows."""
    for name, b in before.items():
        for by in ("hops", "type"):
            old = b["summary"]["by_" + by]
            new = after[name]["summary"]["by_" + by]
            parts = []
            for value, group in new.items():
                parts.append(f"{value or '-'} {old[value]['em']:.2f} → {group['em']:.2f} (n {group['n']})")
            say(f"{name} by {by}: " + ", ".join(parts))
        say(f"{name}: " + apart(b["summary"], after[name]["summary"]))
    before = before | pool(before, groups)
    after = after | pool(after, groups)
    rows = []
    for name, b in before.items():
        a = after[name]
        old = b["summary"]
        new = a["summary"]
        rows.append([
            name,
            new["n"],
            interval(old),
            interval(new),
            signed(paired_difference(scores(b), scores(a))),
            f"{new['em_valid']:.3f}" if "em_valid" in new else "",
            f"{new['format']:.2f}",
            f"{new['f1']:.3f}",
            f"{old['searches']:.2f} → {new['searches']:.2f}",
            f"{old['tokens']:.0f} → {new['tokens']:.0f}",
        ])
    header = [
        "set", "n", "EM before", "EM after", "difference (paired)", "EM in valid format", "format", "F1",
        "searches", "tokens"]
    table(f"{folder.path}: EM before and after, 95 % intervals", header, rows)
    folder.write("results.json", {"header": header, "rows": rows})


def apart(old, new):
    """What guessing scores, EM of the questions that do not offer their answer, how often one was read, and
    copied right."""
    def change(part, key):
        found = [s[part][key] for s in (old, new) if part in s and key in s[part]]
        return " → ".join(f"{value:.3f}" for value in found)

    parts = [f"guessing scores {new['guess']:.3f}"] if "guess" in new else []
    if "open" in new:
        parts.append(f"EM of what cannot be guessed {change('open', 'em')} (n {new['open']['n']})")
    if "reading" in new:
        parts.append(f"of these the answer was read in {change('reading', 'read')}")
        if "copied" in new["reading"]:
            parts.append(f"answers copied right {change('reading', 'copied')}")
    return ", ".join(parts) or "no types of questions"


def scores(result, key="em"):
    return [row[key] for row in result["predictions"]]


# ---------------------------------------------------------------- the stages of a script

COLUMNS = {  # header: (key of a summary, its form)
    "F1": ("f1", ".3f"),
    "tokens": ("tokens", ".1f"),
    "searches": ("searches", ".2f"),
}


def stage_table(path, title, folders, base, paper, columns=None, minus=("tokens",), means=True):
    """<path>-table.json and, of several trained stages, <path>-curves.png: the final scores of {stage: run
    folder}, EM and what `minus` names less those of the stage `base`, paired by question, and what training
    cost.

    paper(stage, sets) -> the paper's number for these sets, or ""; asked for every set, and for the plain
    mean of several (no such rows without `means`). columns: what stands beside EM, as COLUMNS, "interval" for
    a form where the summary has one; minus: headers of it."""
    columns = columns or COLUMNS
    folders = {stage: f for stage, f in folders.items() if list(f.glob("eval_*.json"))}
    results = {stage: evaluations(f) for stage, f in folders.items()}
    learned = {stage: read_jsonl(f / "metrics.jsonl") for stage, f in folders.items()}
    header = ["stage", "set", "paper", "EM", f"EM minus {base}"]
    for name in columns:
        header += [name, f"{name} minus {base}"] if name in minus else [name]
    header += ["sampled in training", "training s"]
    rows = []
    for stage, sets in results.items():
        cost = _cost(learned[stage])
        for name, result in sets.items():
            s = result["summary"]
            old = results.get(base, {}).get(name) if stage != base else None
            row = [stage, name, paper(stage, [name]), interval(s), _minus(old, result, "em", "+.3f")]
            for column, (key, form) in columns.items():
                row.append(_cell(s, key, form))
                if column in minus:
                    row.append(_minus(old, result, key, "+" + form))
            rows.append([*row, *cost])
    for stage, sets in results.items():
        if means and len(sets) > 1:
            summaries = [r["summary"] for r in sets.values()]
            row = [stage, f"mean of {len(sets)} sets", paper(stage, list(sets))]
            row += [f"{average(summaries)[1]:.3f}", ""]
            for column, (key, form) in columns.items():
                row.append(f"{average(summaries, key)[1]:{form}}")
                if column in minus:
                    row.append("")
            rows.append([*row, "", ""])
    table(f"{title}: 95 % intervals over questions, differences paired", header, rows)
    write_json(f"{path}-table.json", {"header": header, "rows": rows})
    curves = {}
    for stage, steps in learned.items():
        if any("reward/mean" in row for row in steps):
            curves[stage] = steps
    say(f"table: {path}-table.json")
    if len(curves) > 1:  # one stage's stand in its own folder
        panels = panels_of(*(folders[stage] for stage in curves))
        draw_curves(curves, Path(f"{path}-curves.png"), title, panels)
        say(f"curves: {path}-curves.png")


def _cell(summary, key, form):
    """A number of a summary; "" where it has none."""
    if key not in summary:
        return ""
    return interval(summary, key) if form == "interval" else f"{summary[key]:{form}}"


def _minus(old, new, key, form):
    """The difference to the base's result on the same questions; "" where there is none."""
    if not old or scores(old, "id") != scores(new, "id"):
        return ""
    gain = paired_difference(scores(old, key), scores(new, key))
    return signed(gain, form)


def _cost(rows):
    """[sampled tokens, seconds of sampling and updates] of a training; blanks where there was none."""
    if not any("rollout/tokens" in row for row in rows):
        return ["", ""]
    tokens = sum(row.get("rollout/tokens", 0) for row in rows)
    sampling = sum(row.get("time/rollout", 0) for row in rows)
    updates = sum(row.get("time/train", 0) for row in rows)
    return [f"{tokens:,.0f}", f"{sampling + updates:.0f}"]


# ---------------------------------------------------------------- several runs

def compare(folders, out="comparison.png", key="em"):
    """Curves of several runs over one another, and tables of their final scores: of each run, differences
    paired by question with the first one; and where the names differ by their seed (mygo-seed0,
    seed1-text-star), of each method over its seeds."""
    differ = len({f.name for f in folders}) == len(folders)
    names = [f.name if differ else str(f) for f in folders]
    by_name = dict(zip(names, folders, strict=True))
    curves = {n: read_jsonl(f / "metrics.jsonl") for n, f in by_name.items()}
    if any(curves.values()) and len(folders) > 1:
        draw_curves(curves, out, " · ".join(names), panels_of(*folders))
        say(f"curves: {out}")
    results = {n: evaluations(f) for n, f in by_name.items()}
    before = {n: evaluations(f, "before") for n, f in by_name.items()}
    if not any(results.values()):
        warn("no final evaluation (eval_<set>.json, predictions.jsonl.gz) in these folders: "
             "nothing to compare but curves")
        return
    rows = []
    for name in dict.fromkeys(n for sets in results.values() for n in sets):
        for run in (n for n in names if name in results[n]):
            result = results[run][name]
            s = result["summary"]
            old = before[run].get(name)
            gain = ""
            if run != names[0]:
                gain = _paired(results[names[0]].get(name), result)
            sampled = sum(r.get("rollout/tokens", 0) for r in curves[run])
            rows.append([
                name,
                run,
                s["n"],
                interval(old["summary"]) if old else "",
                interval(s),
                gain,
                f"{s['guess']:.3f}" if "guess" in s else "",
                f"{s['open']['em']:.3f}" if "open" in s and "guess" in s else "",
                f"{s['f1']:.3f}",
                f"{s['searches']:.2f}" if "searches" in s else "",
                f"{s['tokens']:.0f}" if "tokens" in s else "",
                sampled or "",
            ])
    header = [
        "set", "run", "n", "EM before", "EM", "EM minus the first run's (paired)", "guessing",
        "EM of the rest", "F1", "searches", "tokens", "sampled in training"]
    filled = [n for n in range(len(header)) if any(row[n] != "" for row in rows)]
    rows = [[row[n] for n in filled] for row in rows]
    table("final evaluations: 95 % intervals over questions", [header[n] for n in filled], rows)
    compare_seeds(results, key, {n: mean_along(f) for n, f in by_name.items()})


def _paired(first, other):
    """The difference on the questions that both have."""
    if not first:
        return ""
    ems = {p["id"]: p["em"] for p in first["predictions"]}
    shared = [p for p in other["predictions"] if p["id"] in ems]
    if not shared:
        return ""
    of_first = [ems[p["id"]] for p in shared]
    of_other = [p["em"] for p in shared]
    gain = paired_difference(of_first, of_other)
    return f"{signed(gain)} (n {len(shared)})"


def compare_seeds(results, key="em", along=None):
    """A table of methods over seeds: {run: {set: {"predictions"}}}; nothing where no method has two seeds.

    Differences to the first method are paired twice: by seed, the seed being the unit, and by question, of
    which each counts once with its mean over the seeds. along: {run: EM along it, or None}
    (results.mean_along), whose means and differences by seed are a table of their own."""
    methods = {}
    curves = {}
    for run, sets in results.items():
        seed = re.search(r"seed(\d+)", run)
        if not seed:
            continue
        method = run.replace(seed[0], "").strip("-_ ")
        if along and along[run] is not None:
            curves.setdefault(method, {})[int(seed[1])] = along[run]
        for name, result in sets.items():
            by_seed = methods.setdefault(name, {}).setdefault(method, {})
            by_seed[int(seed[1])] = {p["id"]: p[key] for p in result["predictions"] if key in p}
    rows = []
    for name, by_method in methods.items():
        first = next(iter(by_method.values()))
        for method, own in by_method.items():
            means = [fmean(found.values()) for found in own.values() if found]
            if len(means) < 2:
                continue
            mean, low, high = seed_interval(means)
            differences = ["", ""]
            if own is not first:
                differences = _over_seeds(first, own)
            rows.append([name, method, len(means), f"{mean:.3f} [{low:.3f}, {high:.3f}]", *differences])
    if rows:
        title = key.upper() if key in ("em", "f1") else key
        difference = f"{title} minus the first method's, by seed"
        header = ["set", "method", "seeds", title, difference, "by question"]
        table("over seeds: 95 % intervals of Student's t, the seed being the unit; by question: of the "
              "questions' means over the seeds", header, rows)
    _show_along({method: found for method, found in curves.items() if len(found) > 1})


def _show_along(curves):
    """{method: {seed: EM along the run}}, the difference to the first method paired by seed."""
    if not curves:
        return
    first = next(iter(curves.values()))
    rows = []
    for method, own in curves.items():
        shared = sorted(own.keys() & first.keys())
        gain = ""
        if own is not first and len(shared) > 1:
            gain = signed(seed_interval([own[seed] - first[seed] for seed in shared]))
        by_seed = " ".join(f"{own[seed]:.3f}" for seed in sorted(own))
        rows.append([method, by_seed, f"{fmean(own.values()):.3f}", gain])
    header = ["method", "by seed", "mean", "minus the first method's, by seed"]
    table("EM along the run, mean over the tokens sampled so far", header, rows)


def _over_seeds(first, other):
    """[difference with its interval over seeds, the same over questions] of {seed: {question: score}}."""
    shared = sorted(other.keys() & first.keys())
    if len(shared) < 2:
        return ["", ""]
    gains = []
    of_question = {}
    for seed in shared:
        both = first[seed].keys() & other[seed].keys()
        if not both:
            return ["", ""]
        own = {q: other[seed][q] - first[seed][q] for q in sorted(both)}
        gains.append(fmean(own.values()))
        for q, gain in own.items():
            of_question.setdefault(q, []).append(gain)
    by_question = bootstrap_interval([fmean(found) for found in of_question.values()])
    return [signed(seed_interval(gains)), signed(by_question)]


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

    Numbers can be recomputed from it; `python -m common.report` reads it. texts: False leaves out questions
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
    return {
        key: value
        for key, value in result["summary"].items()
        if key not in known
        and not key.startswith("by_")
        and re.sub("_(low|high)$", "", key) not in columns
    }


# ---------------------------------------------------------------- command line

def main(argv=None):
    """Pages, comparisons, explanations."""
    parser = argparse.ArgumentParser(
        prog="python -m common.report",
        description="Pages, comparisons and explanations of run folders.")
    parser.add_argument(
        "runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-seed0")
    parser.add_argument(
        "--explain", metavar="ID", help="explain the trajectories of this question; ID/N for one of them")
    parser.add_argument(
        "--export", metavar="FOLDER",
        help="keep a run's configuration, metrics and predictions there, compressed")
    parser.add_argument(
        "--without-texts", action="store_true",
        help="with --export: no questions and answers, which may not be yours to give away, and no paths")
    parser.add_argument(
        "--out", default="comparison.png", help="where the curves of several runs go: .png, .pdf or .svg")
    parser.add_argument(
        "--score", default="em",
        help="what the table over seeds compares: em, f1, or another number of the predictions")
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
        rows = with_evaluations(first)
        if read_jsonl(first / "metrics.jsonl"):
            draw_curves({first.name: rows}, first / "curves.png", first.name, panels_of(first))
        say(f"page: {write_page(first)}")


def explain_question(runs, wanted):
    """--explain ID or ID/N: the trajectories of a question,
    the last time that it was sampled or evaluated."""
    index = None
    if re.search(r"/\d+$", wanted):
        wanted, index = wanted.rsplit("/", 1)
    everything = []
    for run in runs:
        everything += read_jsonl(run / "samples.jsonl")
        for evaluation in evaluations(run).values():
            everything += evaluation["predictions"]
    everything = [g for g in everything if "nodes" in g]
    found = [g for g in everything if g.get("question_id") == wanted]
    if not found or index and int(index) >= len(found[-1]["trajectories"]):
        known = ", ".join(dict.fromkeys(g["question_id"] for g in everything))
        which = wanted if index is None else f"{wanted}/{index}"
        sys.exit(f"error: no such trajectory {which} in {runs[0]}; there are {known[:600] or 'none'}")
    group = found[-1]
    chosen = [int(index)] if index else range(len(group["trajectories"]))
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
