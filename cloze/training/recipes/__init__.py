"""Recipes: their keys, the TOML files that come with Cloze, and how both are read."""
