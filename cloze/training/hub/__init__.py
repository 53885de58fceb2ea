"""sentence-transformers models, written and read with torch."""
