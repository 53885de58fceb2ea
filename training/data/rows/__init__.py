"""The rows of a corpus: on disk, and a choice of them."""
