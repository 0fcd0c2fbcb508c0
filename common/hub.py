"""Names of models, encoders and data sets: a folder here, or a repository of the Hugging Face hub, asked for
once.

    hub.locate("runs/at2po/a/checkpoint")     a folder, as it is
    hub.locate("Qwen/Qwen3-4B")               the hub's, or the copy in the local cache where the hub cannot
                                              be reached
    hub.locate("runs/at2po/b/checkpoint")     HubError at once: it looks like a path, and is none
    hub.load_encoder("intfloat/e5-base-v2")   a SentenceTransformer; prefixes(name, encoder) of its texts;
                                              encode(encoder, texts, …)
"""

import functools
import os
import re
import threading
from pathlib import Path

from common.files import UserError, say


class HubError(UserError):
    """Nothing usable has that name; the message says whether it is misspelt, gated, or the hub is out of
    reach."""


def looks_like_path(name):
    """Whether a name can only be meant as a path: hub ids are "owner/name".

    >>> [looks_like_path(n) for n in ("Qwen/Qwen3-4B", "./model", "nothere", "runs/at2po/a", "C:\\\\model")]
    [False, True, True, True, True]
    """
    parts = name.split("/")
    if len(parts) != 2 or not all(parts):
        return True
    return name[0] in "./~" or "\\" in name or Path(parts[0]).is_dir()


@functools.cache
def locate(name, kind="model", timeout=10.0):
    """What `from_pretrained` or `load_dataset` should be given for `name`. kind: "model" (encoders too) or
    "dataset".

    One request, no retries: a mistyped or unreachable name costs a moment, not a minute. Raises HubError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return str(path)
    if looks_like_path(name):
        raise HubError(f"{name}: no such folder here. Give a folder in Hugging Face form, "
                       "or a hub id such as owner/name")
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return _cached(name, kind, "HF_HUB_OFFLINE is set, so the hub is not asked")
    from huggingface_hub import HfApi, errors
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=timeout)
    except errors.GatedRepoError as error:
        raise HubError(f"{name}: gated on the hub: accept its terms there, then log in "
                       "(`hf auth login`, or HF_TOKEN)") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{name}: the hub has no such {kind}, or it is private: "
                       "check the spelling, or log in") from error
    except Exception as error:  # no answer: whatever its HTTP client raises
        return _cached(name, kind, f"the hub cannot be reached ({type(error).__name__})")
    return name


def _cached(name, kind, why):
    """The folder of a model's copy in the local cache (a data set keeps its name: `datasets` finds its own
    copies)."""
    from huggingface_hub import snapshot_download
    try:
        folder = snapshot_download(name, repo_type=kind, local_files_only=True)
    except Exception as error:  # whatever the client raises, there is no copy
        raise HubError(f"{name}: not in the local cache, and {why}. Give a folder, or fetch it where there "
                       "is a network; HF_HUB_OFFLINE=1 says that there is none") from error
    return folder if kind == "model" else name


# ---------------------------------------------------------------- encoders

@functools.cache
def load_encoder(name):
    """One SentenceTransformer a name and process; a folder asks no network. Raises HubError.

    Pooling and normalisation come from the model's own modules.json. A folder without one gets mean pooling,
    or its first token where it holds a model of the bge family."""
    found = locate(name)
    try:
        import faiss  # noqa: F401  (which will hold its vectors)
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise HubError(f"{name}: an encoder wants sentence-transformers and faiss ({error}): pip install "
                       "-r requirements.txt, or the extra [dense]") from error
    try:
        encoder = SentenceTransformer(found, local_files_only=Path(found).is_dir())
    except Exception as error:  # format errors of every kind have the same remedy
        raise HubError(f"{name}: the encoder did not load ({type(error).__name__}); "
                       "give a folder or a hub id with a sentence-transformers model") from error
    bare = Path(found).is_dir() and not (Path(found) / "modules.json").exists()
    if bare and any(called.startswith("bge-") for called in _names(name)):
        encoder[1].pooling_mode = "cls"
    return encoder


ENCODING = threading.Lock()  # a server asks from several threads, a fast tokenizer bears one


def encode(encoder, texts, prefix, task, batch_size=32, progress=False):
    """(n, d) float32, rows of length 1. task: "query" or "document", for models that have layers for each."""
    with ENCODING:
        vectors = encoder.encode(texts, prompt=prefix, task=task, batch_size=batch_size,
                                 normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=progress)
    return vectors.astype("float32")


WEB_SEARCH = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
PREFIXES = {  # encoders without prompts of their own, by whole names: (before queries, before passages)
    r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?": ("query: ", "passage: "),
    r"multilingual-e5-large-instruct|e5-mistral-7b-instruct": (WEB_SEARCH, ""),
    r"bge-(small|base|large)-en(-v1\.5)?": ("Represent this sentence for searching relevant passages: ", ""),
    r"bge-(small|base|large)-zh(-v1\.5)?": ("为这个句子生成表示以用于检索相关文章：", ""),
}


@functools.cache
def prefixes(name, encoder, query="auto", passage="auto"):
    """(what stands before queries, what stands before passages) for an encoder, and says so once.

    auto: the encoder's own prompts where it has some, else those of its name in PREFIXES, else nothing."""
    own = {use: text for use, text in encoder.prompts.items() if text}
    passages = own.get("document") or own.get("passage") or own.get("corpus") or ""
    found = own.get("query", ""), passages
    source = "its own prompts"
    if not any(found):
        found, source = _by_name(name)
    if not source:
        source = f"its name is not known; its prompts: {', '.join(own) or 'none'}"
    used = (found[0] if query == "auto" else query), (found[1] if passage == "auto" else passage)
    if used != found:
        source = "as given"
    say(f"encoder {name}: {used[0]!r} before queries, {used[1]!r} before passages and names ({source})")
    return used


def _by_name(name):
    """(prefixes, whose they are) of the first of a model's names that PREFIXES has."""
    for called in _names(name):
        for pattern, found in PREFIXES.items():
            if re.fullmatch(pattern, called):
                return found, f"those of {called}"
    return ("", ""), ""


NAMED = re.compile(  # in config.json; in the header of README.md: the model it was made from, its own name
    r'(?:"_name_or_path": *"|^base_model: *\n?(?:- )?|^- name: )([^"\s]+)', re.MULTILINE)


def _names(name):
    """What a model may be: its own name, then those in the files of its folder; in small letters, without
    owners.

    >>> _names("models--intfloat--e5-base-v2/snapshots/0a1b"), _names("BAAI/bge-m3/")
    (['e5-base-v2'], ['bge-m3'])
    """
    folder = Path(name).expanduser().absolute()
    found = [str(folder)]
    for file in (folder / "config.json", folder / "README.md"):
        if file.is_file():
            found += NAMED.findall(file.read_text(encoding="utf-8", errors="replace"))
    found = [re.sub("/snapshots/[^/]+$", "", path.rstrip("/")) for path in found]
    return [re.split("/|--", path)[-1].lower() for path in found]
