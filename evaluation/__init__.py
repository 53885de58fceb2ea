"""Scores of anything that embeds: suites, their figures, comparisons and reports. Needs the extra `train`."""
