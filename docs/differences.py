"""Writes docs/differences.md from the ends of the scripts: python -m docs.differences"""

from pathlib import Path

import askit
import at2po
import bi_rar
import mygo_mujica
import omne_r1

HEAD = """\
# Where paper and code differ

What each script does where its paper and the authors' code differ, where the paper is silent, and
where it is misprinted. A flag in brackets takes the other reading. Each part stands at the end of its
script too; this page is made of them (`python -m docs.differences`).
"""


def page():
    parts = [HEAD]
    for script in (at2po, bi_rar, mygo_mujica, askit, omne_r1):
        title = script.__doc__.split("\n\n")[0].replace("\n", " ")
        parts.append(f"## {script.__name__}.py\n\n{title}\n\n```text\n{script.DIFFERENCES.strip()}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (Path(__file__).parent / "differences.md").write_text(page(), encoding="utf-8")
