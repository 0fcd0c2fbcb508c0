"""Writes docs/at2po.ipynb from docs/walkthrough.md: python -m docs.notebook

Text becomes cells of text. A block of doctests becomes cells that end where something is printed, with what
is printed below; a block of plain Python becomes one cell, which the walkthrough's own test leaves out.
"""

import doctest
import json
import re
from pathlib import Path

DOCS = Path(__file__).parent
HEAD = """\
This notebook is docs/walkthrough.md. It needs the project with its requirements, a CPU, and under five
minutes. In
the cloud, clone the project and `pip install -r requirements.txt` first."""
BEGIN = """\
import os
if not os.path.exists("at2po.py"):    # Jupyter begins beside the notebook
    os.chdir("..")
from common import process
process.settle_threads()              # before torch is imported"""


def text_cell(text):
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code_cell(source, printed=""):
    outputs = []
    if printed:
        outputs = [{"output_type": "stream", "name": "stdout", "text": printed}]
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "source": source.strip(),
            "outputs": outputs}


def code_cells(block):
    """The cells of a block."""
    examples = doctest.DocTestParser().get_examples(block)
    if not examples:
        return [code_cell(block)]
    cells, source = [], ""
    for example in examples:
        source += example.source
        if example.want:
            cells.append(code_cell(source, example.want))
            source = ""
    if source:
        cells.append(code_cell(source))
    return cells


def notebook():
    """The notebook as JSON, in version 4.5 of its format."""
    title, *parts = re.split(r"```python\n(.*?)```\n", (DOCS / "walkthrough.md").read_text(), flags=re.DOTALL)
    cells = [text_cell(HEAD), code_cell(BEGIN), text_cell(title)]
    for block, text in zip(parts[::2], parts[1::2], strict=True):
        cells += code_cells(block)
        if text.strip():
            cells.append(text_cell(text))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": about, "cells": cells}


def written():
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (DOCS / "at2po.ipynb").write_text(written(), encoding="utf-8")
