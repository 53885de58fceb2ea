"""Export: a run, or another model, becomes ONNX graphs in a bundle."""
