"""Names of models, encoders and data sets: a folder here, or a repository of the Hugging Face hub, asked for
once.

    hub.locate("runs/at2po/a/checkpoint")     a folder, as it is
    hub.locate("Qwen/Qwen3-4B")               the hub's, or the copy in the local cache where the hub cannot
                                              be reached
    hub.locate("runs/at2po/b/checkpoint")     HubError at once: it looks like a path, and is none
"""

import functools
import os
from pathlib import Path


class HubError(RuntimeError):
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
