"""Limits on untrusted input: sizes in the files of models, and programs in the files of models and users."""
