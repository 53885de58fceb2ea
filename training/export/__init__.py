"""Export: a finished run becomes ONNX graphs in a bundle."""
