"""Training text: corpora and their order, masked words, BM25, and teacher vectors."""
