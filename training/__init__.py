"""Fine-tune an encoder by a recipe, evaluate it, and export it as a bundle."""

import os
from importlib.util import find_spec

os.environ |= {"ORT_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}  # read once, when they are imported

if find_spec("torch") is None or find_spec("transformers") is None:
    raise SystemExit("error: training needs torch and transformers: pip install -c constraints.txt -e '.[train]'")
