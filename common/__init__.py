"""What the five scripts share."""

import importlib.util
import logging
import sys
from pathlib import Path

# Hugging Face has a package `kernels` too. Where Python would find it before ours (the program is elsewhere,
# and this folder stands behind it in sys.path), ours is looked for first, or, if theirs was imported already,
# behind it. bitsandbytes, which peft imports, looks for theirs, and warns where it finds ours.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
project = Path(__file__).resolve().parents[1]
found = importlib.util.find_spec("kernels")
if found is None or project / "kernels" / "__init__.py" != Path(found.origin or "").resolve():
    if "kernels" in sys.modules:
        sys.modules["kernels"].__path__.append(str(project / "kernels"))
    else:
        sys.path.insert(0, str(project))
