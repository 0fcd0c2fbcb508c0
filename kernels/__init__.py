"""Kernels to copy: log-probs of sampled tokens without logits in memory, and weighted cross entropy on the
same passes.

    from kernels import turn_logprob, weighted_cross_entropy, think_weights

in a checkout of the project, or with PYTHONPATH=CHECKOUT elsewhere; an installation is refused. Hugging Face
has a package of this name too, for which transformers looks. Where it is installed, this one answers for
both: its modules are found behind ours, its names through __getattr__.
"""

import functools
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)

from kernels.turn_logprob import turn_logprob  # noqa: E402
from kernels.weighted_ce import think_weights, weighted_cross_entropy  # noqa: E402

__all__ = ["think_weights", "turn_logprob", "weighted_cross_entropy"]


@functools.cache
def _theirs():
    """Hugging Face's package; None where it is not installed."""
    others = [Path(folder) for folder in __path__[1:]]  # another checkout of ours may be among them
    behind = [str(folder.parent) for folder in others if not (folder / "turn_logprob.py").exists()]
    spec = PathFinder.find_spec(__name__, behind)
    if spec is None or spec.loader is None:
        return None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def __getattr__(name):
    if name == "__version__" or not name.startswith("_"):
        found = getattr(_theirs(), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module 'kernels' has no attribute '{name}'")
