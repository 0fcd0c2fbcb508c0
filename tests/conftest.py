"""Samples of the real data sets live beside the checkout (or in $FIVEHOP_DATA); tests that want them skip where they are missing."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("FIVEHOP_DATA", Path(__file__).resolve().parents[2] / "shared/data"))


def sample(name):
    """Path of a sample file; skips the test where it is missing."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"sample {name} is not here")
    return path
