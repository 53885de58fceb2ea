"""Cloze: your own text as a sentence-embedding service. `encoding` is the contract between `training` and `service`."""
