"""Evaluation of anything that embeds: suites, their figures, comparisons and reports."""
