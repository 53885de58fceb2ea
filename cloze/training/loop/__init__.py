"""A training run: from a recipe to its objective, the Trainer around it, seeds, and the mean of several runs."""
