"""docs/copy.md: every piece is lifted into an empty folder, where nothing of ours can be imported, and its
example runs there against numbers worked by hand."""

import re

import pytest

from docs import copy
from tests.conftest import ROOT
from tests.lifting import run


@pytest.mark.parametrize("piece", copy.PIECES)
def test_a_piece_runs_without_us(piece, tmp_path):
    copy.lift(piece, tmp_path)
    assert run(tmp_path, (tmp_path / "example.py").read_text()).strip()  # it says what it found


def test_the_page_has_every_piece_and_its_names():
    page = (ROOT / "docs/copy.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(copy.PIECES)


def test_the_command_lifts_and_runs(tmp_path, capfd):
    with pytest.raises(SystemExit, match="^0$"):
        copy.main(["gae", str(tmp_path / "new")])
    assert capfd.readouterr().out.startswith("example.py gae.py\nadvantages [[")
    with pytest.raises(SystemExit, match="is not an empty folder: nothing was written"):
        copy.main(["gae", str(tmp_path / "new")])
