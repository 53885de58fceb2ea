"""Rounds of training on a user's own documents and queries, with a measurement of the gain."""
