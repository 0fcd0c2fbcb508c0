"""The cache of the tiny policies goes by tiny.VERSION: what it stands for must not change behind its back."""

import hashlib
import itertools

import pytest
import torch

import at2po
import bi_rar
import mygo_mujica
from common.world import demonstrations, tiny

# first three steps of each script's warm-up, and the model before it. Where one of these has to change,
# change tiny.VERSION too: cached policies are then made anew.
PINNED = {
    "VERSION": "2",
    "at2po": "dee0721cf315b130",
    "bi_rar": "acb5c7b9a434e320",
    "mygo_mujica": "c2618ed84e00c667",
    "model": "161e25aa016ef407",
}


class Caught(Exception):
    """Ends the making of a policy once its demonstrations are known."""


@pytest.mark.parametrize("script", [at2po, bi_rar, mygo_mujica], ids=lambda s: s.__name__)
def test_a_change_of_the_demonstrations_asks_for_a_new_version(script, monkeypatch, tmp_path):
    real = demonstrations.groups
    seen = hashlib.sha256()

    def groups(*args):
        for trajectories in itertools.islice(real(*args), 3):
            for t in trajectories:
                turns = [(turn.ids, turn.observation_ids) for turn in t.turns]
                seen.update(repr((t.prompt_ids, turns)).encode())
        raise Caught
    monkeypatch.setattr(demonstrations, "groups", groups)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Caught):
        script.tiny_policy(script.parse_args([]))
    assert (seen.hexdigest()[:16], tiny.VERSION) == (PINNED[script.__name__], PINNED["VERSION"])


def test_a_change_of_the_model_asks_for_a_new_version():
    tokenizer = tiny.tiny_tokenizer(["a", "b"], ["<t>"])
    weights = torch.cat([p.detach().flatten() for p in tiny.tiny_model(tokenizer, width=32).parameters()])
    rounded = (weights * 1e3).round().int().tolist()
    assert hashlib.sha256(repr(rounded).encode()).hexdigest()[:16] == PINNED["model"]
