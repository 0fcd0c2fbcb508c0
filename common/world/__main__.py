import tyro

from common.world import main

tyro.cli(main, prog="python -m common.world")
