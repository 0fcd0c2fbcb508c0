"""A warm-up by itself: what `--warmup-data` runs before a script's own program. Its last line is the command
that begins with what was learned.

    python -m common.warmup at2po --model DIR --data my.jsonl --corpus corpus.jsonl --warmup-data right.jsonl

The first word is the script, the flags are its own."""

import importlib
import sys

from common import process  # noqa: F401  (first: torch reads thread settings once)

# isort: split
from common import flags
from common.agent import after_warm_up
from common.files import say
from common.run import RunError, program

SCRIPTS = "at2po", "bi_rar", "mygo_mujica", "omne_r1"


@program()
def main(argv=None):
    script, *given = (sys.argv[1:] if argv is None else argv) or [""]
    script = script.removesuffix(".py")
    if script not in SCRIPTS:
        raise RunError(f"the first word is the script, one of {', '.join(SCRIPTS)}; its flags follow")
    module = importlib.import_module(script)
    cfg = module.parse_args(given)
    if not cfg.warmup_data:
        raise RunError("--warmup-data is missing: the questions or conversations that are learned")
    folder = after_warm_up(cfg, module.learn_first).checkpoint
    say(f"Next: {flags.command(script, ('warmup_data', 'warmup_steps', 'warmup_lr'), checkpoint=folder)}")


if __name__ == "__main__":
    main()
