"""Vectors, INT8 products and numba's cache for CPUs."""
