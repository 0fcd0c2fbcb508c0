"""Writes docs/differences.md from the scripts' docstrings: python -m docs.differences"""

import re
from pathlib import Path

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1

HEAD = """\
# Where paper and code differ

What each script does where its paper and the authors' code differ, where the paper is silent, and where it is
misprinted. A flag in brackets takes the other reading. This page is made from the scripts' docstrings
(`python -m docs.differences`).
"""
BEGINS = re.compile(r"^(Where .*|Misprints\. .*|What the cascade does\. .*)$", re.MULTILINE)
COMMAND = "\n    python "


def differences(script):
    """The part of a docstring between its table of equations and its commands."""
    text = script.__doc__
    begin = BEGINS.search(text).start()
    return text[begin:text.index(COMMAND, begin)].strip()


def page():
    parts = [HEAD]
    for script in (at2po, bi_rar, mygo_mujica, askit, omne_r1):
        title = script.__doc__.split("\n\n")[0].replace("\n", " ")
        parts.append(f"## {script.__name__}.py\n\n{title}\n\n```text\n{differences(script)}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "differences.md").write_text(page(), encoding="utf-8")
