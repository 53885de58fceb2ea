"""Text to train on: corpora and their order, masked words, BM25, and the vectors of a teacher."""
