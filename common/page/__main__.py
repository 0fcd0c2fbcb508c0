"""The page of a run, made anew with its curves: python -m common.page RUN. Of several runs at once:
python -m common.report."""

import argparse
import sys
from pathlib import Path

from common.files import RunError, read_jsonl, say
from common.page.writer import write_page
from common.report import curves, with_evaluations


def draw(run, title):
    """curves.png and trajectories.html of a run folder."""
    if read_jsonl(run / "metrics.jsonl"):
        rows = {run.name: [with_evaluations(run)]}
        curves.draw_curves(rows, run / "curves.png", title, curves.panels_of(run))
    say(f"page: {write_page(run)}")


def main(argv=None):
    """Writes pages and curves of run folders."""
    parser = argparse.ArgumentParser(prog="python -m common.page", description=main.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, such as runs/at2po/atpo-hard-seed0")
    for run in parser.parse_args(argv).runs:
        if not (run / "config.json").exists():
            sys.exit(f"error: {run} holds no run (no config.json)")
        draw(run, run.name)


if __name__ == "__main__":
    try:
        main()
    except RunError as error:
        raise SystemExit(f"error: {error}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise SystemExit(f"error: not a run folder of this version, or damaged ({what})") from error
