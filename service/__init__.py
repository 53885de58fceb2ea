"""The HTTP service: texts in, vectors out. FastAPI and ONNX Runtime; neither torch nor transformers."""
