"""Classifiers that a curation trains or applies."""
