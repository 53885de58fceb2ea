"""Models for others: sentence-transformers' format, written and read, and the Hugging Face hub."""
