"""Stages and functions that bring data and models in and out."""
