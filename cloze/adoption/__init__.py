"""Models of sentence-transformers: their files, and a bundle of their own ONNX graph. It needs no torch."""
