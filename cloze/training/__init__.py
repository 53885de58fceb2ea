"""Fine-tune an encoder with a recipe, evaluate it, and export it as a bundle. Needs the extra `train`."""

import os
import sys
from importlib.util import find_spec

from cloze.command import end_in_one_line

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # both are read once, at import

if sys.argv[:1] == ["-m"]:  # so it is while Python locates the module of `python -m training.NAME`
    sys.excepthook = end_in_one_line

if missing := [name for name in ("torch", "transformers") if find_spec(name) is None]:
    raise ModuleNotFoundError(
        f"training needs {missing[0]}: pip install '.[train]' in a clone of Cloze", name=missing[0]
    )
