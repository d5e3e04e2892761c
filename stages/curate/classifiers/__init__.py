"""Classifiers that curation stages train and apply."""
