"""Fine-tune an encoder by a recipe, evaluate it, and export it as a bundle."""

import os
import sys
from importlib.util import find_spec

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # read once, when they are imported

if find_spec("torch") is None or find_spec("transformers") is None:
    print("error: training needs torch and transformers: pip install 'cloze[train]'", file=sys.stderr)
    raise SystemExit(2)
