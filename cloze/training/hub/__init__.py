"""Models of sentence-transformers, written and read with torch."""
