"""What `pip install .` asks to build this project. An installed folder `kernels` would write over Hugging
Face's package of that name, which transformers and peft import, and uninstalling it would leave a ruin; with
`-e` theirs would be found before ours."""

import os
import sys


def refuse(*_, **__):
    sys.exit("fivehop is not installed but used where it lies: pip install -r requirements.txt, and from "
             f"another folder PYTHONPATH={os.getcwd()} python …")


build_wheel = build_sdist = build_editable = refuse
get_requires_for_build_wheel = get_requires_for_build_sdist = get_requires_for_build_editable = refuse
prepare_metadata_for_build_wheel = prepare_metadata_for_build_editable = refuse
