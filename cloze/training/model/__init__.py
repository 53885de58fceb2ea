"""The sentence encoder and everything that is served with it, in torch and as an ONNX graph."""
