"""Stages and functions that import and export data and models."""
