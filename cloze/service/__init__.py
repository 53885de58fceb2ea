"""The HTTP service: texts in, vectors out. It needs FastAPI and ONNX Runtime, but neither torch nor transformers."""

import os
from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("cloze")
except PackageNotFoundError:
    VERSION = "unknown"

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read once, at import; otherwise ONNX Runtime sends telemetry
