"""Text to train on and data to score with: files, sentence pairs, search collections, masking, sampling orders."""
