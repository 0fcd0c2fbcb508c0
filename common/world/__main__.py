import sys

import tyro

from common.world import main, start_weights

if sys.argv[1:2] == ["make"]:
    start_weights.make(sys.argv[2:])
else:
    tyro.cli(main, prog="python -m common.world")
