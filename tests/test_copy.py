"""docs/copy.md: every piece is lifted into an empty folder, where nothing of ours can be imported, and its
example runs there against numbers worked by hand."""

import re

import pytest

from docs import copy
from tests.conftest import ROOT
from tests.lifting import run


@pytest.mark.parametrize("piece", copy.PIECES)
def test_a_piece_runs_without_us_says_whose_it_is_and_works_inside_a_package(piece, tmp_path):
    (tmp_path / "theirs").mkdir()
    texts = copy.texts_of(piece)
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        (tmp_path / "theirs" / name).write_text(text)
    said = run(tmp_path, f"""{texts[f"example_{piece}.py"]}
import inspect, typing
from theirs import {piece} as lifted
own = [x for _, x in inspect.getmembers(lifted) if getattr(x, "__module__", "") == lifted.__name__]
hints = [typing.get_type_hints(x) for x in own if inspect.isclass(x) or inspect.isfunction(x)]
print("types of:", len(hints), lifted.__doc__)""")
    found, about = said.split("types of: ")
    assert found.strip() and int(about.split()[0])  # the example says what it found
    assert "From fivehop: " in about and "MIT licence" in about


def test_the_page_has_every_piece_and_its_names():
    page = (ROOT / "docs/copy.md").read_text()
    assert re.findall(r"^\| `(\w+)`: ", page, re.MULTILINE) == list(copy.PIECES)


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
