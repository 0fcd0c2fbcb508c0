"""What is made once and kept: where it lies, what it is called, and that one process at a time makes it.

    cache.made_once(cache.folder() / f"dense-{cache.key([name, cache.digest(name), *texts])}.faiss", write)"""

import hashlib
import json
import os
from pathlib import Path

from filelock import FileLock

WHOLE = 256 * 2**20  # bytes of a file that are read for its digest
PIECE = 2**20


def folder():
    """$XDG_CACHE_HOME/fivehop, else ~/.cache/fivehop."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fivehop"


def key(parts):
    """16 letters that stand for an iterable of texts or JSON values, with the borders between them."""
    found = hashlib.sha256()
    for part in parts:
        if not isinstance(part, str):
            part = json.dumps(part, sort_keys=True)
        part = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % len(part))
        found.update(part)
    return found.hexdigest()[:16]


def digest(source):
    """16 letters that stand for the content of a file, of a folder or of a model's hub id.

    A folder: all its files, in whatever layout weights lie there, but hidden ones and what is written about
    them (*.md). A hub id: the revision in the local cache. "" where nothing is there. Times do not count: a
    file that was restored is the same again. Past 256 MB a file counts by its size and 256 pieces all over
    it, which see any training and any line that is added, not every letter."""
    path = Path(source).expanduser()
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        names = [f.relative_to(path) for f in path.rglob("*") if f.is_file() and f.suffix != ".md"]
        shown = sorted(str(n) for n in names if not any(part.startswith(".") for part in n.parts))
        return key(text for name in shown for text in (name, _of_file(path / name)))
    from huggingface_hub import snapshot_download
    try:
        return key([Path(snapshot_download(str(source), local_files_only=True)).name])
    except Exception:  # whatever the client raises, there is no copy
        return ""


def _of_file(path):
    size = path.stat().st_size
    found = hashlib.sha256(b"%d:" % size)
    step = max(PIECE, -(-(size - PIECE) // (WHOLE // PIECE - 1)))  # the last piece is the file's end
    with open(path, "rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            found.update(file.read(PIECE))
    return found.hexdigest()[:16]


def locked(path):
    """with locked(file): the body of one process at a time; the others wait."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    return FileLock(path)


def made_once(path, write):
    """The path, with the file or folder there that write(path) makes: by one process, for which the others
    wait."""
    path = Path(path)
    with locked(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            part = path.with_name(f".{path.name}.tmp")
            write(part)
            part.replace(path)
    return path
