"""Measurement of models."""
