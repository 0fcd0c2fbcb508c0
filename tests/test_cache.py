"""What is kept: its folder, its name, its lock."""

import os
import threading
import time
from types import SimpleNamespace

import pytest

from common import cache


def test_the_folder_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg/fivehop"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setattr(cache.Path, "home", lambda: tmp_path / "home")
    assert cache.folder() == tmp_path / "home/.cache/fivehop"


def test_borders_count_in_a_key():
    assert cache.key(["ab", "c"]) != cache.key(["a", "bc"]) != cache.key(["abc"])
    assert cache.key(["a\n", "b"]) != cache.key(["a", "\nb"])
    assert cache.key(["a", {"b": 1, "c": [2]}]) == cache.key(iter(["a", {"c": [2], "b": 1}]))


WEIGHTS = ["model.safetensors", "pytorch_model.bin", "0_Transformer/model.safetensors", "1_Dense/model.bin",
           "adapter_model.safetensors", "onnx/model.onnx", "modules.json", "0_Transformer/tokenizer.json"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_digest_sees_other_weights_of_the_same_size_and_time(name, tmp_path):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    first, stamp = cache.digest(tmp_path), file.stat()
    file.write_bytes(b"trained")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert cache.digest(tmp_path) != first
    file.write_bytes(b"weights")
    os.utime(file, (1, 1))
    (tmp_path / "README.md").write_text("a card")
    (tmp_path / ".lock").touch()
    assert cache.digest(tmp_path) == first  # restored


def test_a_large_file_counts_by_its_size_and_pieces_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "WHOLE", 64)
    monkeypatch.setattr(cache, "PIECE", 8)
    file = tmp_path / "weights"
    for size in (63, 64, 65, 200, 1001):
        zeros = bytes(size)
        file.write_bytes(zeros)
        first = cache.digest(file)
        for at in (0, size - 1):
            file.write_bytes(zeros[:at] + b"x" + zeros[at + 1:])
            assert cache.digest(file) != first
        file.write_bytes(zeros + b"\0")
        assert cache.digest(file) != first
        for changed in (b"x" * size, zeros[:size // 4] + b"x" * (size // 2) + zeros[:size // 4 + 1]):
            file.write_bytes(changed[:size])
            assert cache.digest(file) != first
    read = []
    monkeypatch.setattr(cache.hashlib, "sha256", lambda _: SimpleNamespace(
        update=lambda piece: read.append(len(piece)), hexdigest=str))
    cache.digest(file)
    assert 0 < sum(read) <= 64


def test_a_hub_id_has_the_revision_that_lies_here(tmp_path, monkeypatch):
    import huggingface_hub
    found = []
    for revision in ("0a1b", "2c3d"):
        snapshot = str(tmp_path / revision)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, _s=snapshot, **_: _s)
        found.append(cache.digest("owner/name"))
    assert "" != found[0] != found[1] != ""
    monkeypatch.undo()
    assert cache.digest("nobody/nothing") == ""


def test_one_makes_it_and_the_other_waits(tmp_path):
    made = []

    def write(part):
        made.append(part)
        time.sleep(.2)  # the other comes meanwhile
        part.mkdir()

    threads = [threading.Thread(target=cache.made_once, args=(tmp_path / "made", write)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(f.name for f in tmp_path.iterdir()) == [".made.lock", "made"] and len(made) == 1
