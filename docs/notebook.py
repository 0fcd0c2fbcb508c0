"""Writes docs/at2po.ipynb from docs/walkthrough.md: python -m docs.notebook
With the folder of its ten steps, docs/training.png comes from their curves: python -m docs.notebook RUN

Text becomes cells of text. A block of doctests becomes cells that end where something is printed, with what
is printed below; a block of plain Python becomes one cell, which the walkthrough's own test leaves out. What
such a block printed and showed when it was written stands behind it, as a block of text and as a picture.
"""

import base64
import doctest
import json
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
BEGIN = """\
import os
if not os.path.exists("at2po.py"):    # Jupyter begins beside the notebook
    os.chdir("..")
from common import process
process.settle_threads()              # before torch is imported"""
# a block of Python, what it printed, what it showed
BLOCK = re.compile(
    r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?(?:\n!\[(.*?)\]\((.*?)\)\n)?", re.DOTALL)


def text_cell(text):
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def code_cell(source, printed="", words="", picture=""):
    """picture: the name of a PNG; words: what it shows."""
    outputs = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed})
    if picture:
        png = base64.b64encode((DOCS / picture).read_bytes()).decode()
        data = {"image/png": png, "text/plain": words}
        outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
    return {"cell_type": "code", "metadata": {}, "execution_count": None, "source": source.strip(),
            "outputs": outputs}


def code_cells(block, *shown):
    """The cells of a block."""
    examples = doctest.DocTestParser().get_examples(block)
    if not examples:
        return [code_cell(block, *shown)]
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
    title, _, text = (DOCS / "walkthrough.md").read_text(encoding="utf-8").partition("\n## ")
    first, *parts = BLOCK.split("## " + text)
    cells = [text_cell(title), code_cell(BEGIN), text_cell(first)]
    for i in range(0, len(parts), 5):
        block, printed, words, picture, text = parts[i:i + 5]
        cells += code_cells(block, printed or "", words or "", picture or "")
        if text.strip():
            cells.append(text_cell(text))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": about, "cells": cells}


def written():
    return json.dumps(notebook(), indent=1, ensure_ascii=False) + "\n"


def shrink(picture, out):
    from PIL import Image
    shown = Image.open(picture).convert("RGB")
    shown.thumbnail((1200, 1200))
    shown.quantize(128).save(out, optimize=True)


if __name__ == "__main__":
    for run in sys.argv[1:2]:
        shrink(f"{run}/curves.png", DOCS / "training.png")
    (DOCS / "at2po.ipynb").write_text(written(), encoding="utf-8")
