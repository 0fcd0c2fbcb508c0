"""What the five scripts share."""

import importlib.util
import sys
from pathlib import Path

# Hugging Face has a package `kernels` too. Where Python would find it before ours (this project is installed,
# and the program is elsewhere), ours is looked for first, or, if theirs was imported already, behind it.
project = Path(__file__).resolve().parents[1]
found = importlib.util.find_spec("kernels")
if found is None or project / "kernels" / "__init__.py" != Path(found.origin or "").resolve():
    if "kernels" in sys.modules:
        sys.modules["kernels"].__path__.append(str(project / "kernels"))
    else:
        sys.path.insert(0, str(project))
