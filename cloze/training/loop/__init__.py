"""A training run: the Trainer around an objective, the run folder, seeds, the fit command; the mean of several runs."""
