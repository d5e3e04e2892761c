"""Limits on what comes from others: sizes in the files of models, programs in files of models and users."""
