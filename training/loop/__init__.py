"""A training run: the Trainer around an objective, the run folder, seeds, and the fit command."""
