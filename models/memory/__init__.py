"""Inference with models larger than the memory: plans, and layers loaded for each pass."""
