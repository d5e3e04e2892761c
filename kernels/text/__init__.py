"""Compiled loops over bytes, characters and words."""
