"""Classifiers that curation trains and applies."""
