"""The HTTP service: texts in, vectors out. FastAPI and ONNX Runtime; neither torch nor transformers."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]

try:
    VERSION = version("cloze")
except PackageNotFoundError:
    VERSION = "unknown"
