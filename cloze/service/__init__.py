"""The HTTP service: texts in, vectors out. FastAPI and ONNX Runtime; neither torch nor transformers."""

import os
from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("cloze")
except PackageNotFoundError:
    VERSION = "unknown"

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read once, by the import; else it reports to its maker
