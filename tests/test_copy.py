"""docs/copy.md: every piece is lifted into an empty folder, where nothing of ours can be imported, and its
example runs there against numbers worked by hand."""

import re

import pytest

from docs import copy
from tests.conftest import ROOT
from tests.lifting import run


@pytest.mark.parametrize("piece", copy.PIECES)
def test_a_piece_runs_without_us(piece, tmp_path):
    for name, text in copy.texts_of(piece).items():
        (tmp_path / name).write_text(text)
    assert run(tmp_path, (tmp_path / f"example_{piece}.py").read_text()).strip()  # it says what it found


def test_the_page_has_every_piece_and_its_names():
    page = (ROOT / "docs/copy.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(copy.PIECES)


def test_the_command_lifts_and_runs(tmp_path, capfd):
    new = tmp_path / "new"
    began = {"gae": "example_gae.py LICENSE gae.py\nadvantages [[", "credit": "example_credit.py"}
    for piece, said in began.items():
        with pytest.raises(SystemExit, match="^0$"):
            copy.main([piece, str(new)])
        assert capfd.readouterr().out.startswith(said)
    (new / "gae.py").write_text("mine")
    with pytest.raises(SystemExit, match="gae.py is there, and is another file: nothing was written"):
        copy.main(["gae", str(new)])
    assert (new / "gae.py").read_text() == "mine"
