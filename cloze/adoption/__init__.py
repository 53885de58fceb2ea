"""Reads the files of sentence-transformers models, and makes bundles of their own ONNX graphs. Works without torch."""
