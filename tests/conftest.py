"""Samples of the real data sets live beside the checkout (or in $FIVEHOP_DATA); tests that want them skip where they are missing."""

import os
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before kernels are imported: they then run on the CPU

DATA = Path(os.environ.get("FIVEHOP_DATA", Path(__file__).resolve().parents[2] / "shared/data"))


def sample(name):
    """Path of a sample file; skips the test where it is missing."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"sample {name} is not here")
    return path
