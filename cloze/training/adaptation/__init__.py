"""Rounds of training on a user's own documents and queries, and whether they helped."""
