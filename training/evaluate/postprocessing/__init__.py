"""Vectors made from an encoder's states without training the encoder: whitening, flow, WK pooling, word averages."""
