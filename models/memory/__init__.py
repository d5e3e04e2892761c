"""Inference with models larger than the memory: plans of what stays in memory, and layers loaded for each pass."""
