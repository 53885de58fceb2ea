"""From texts to vectors: models, tokenising, batching, sessions."""
