"""Checkpoint formats (Hugging Face, GGUF, AWQ), and models quantised in memory (INT8, FP8, NF4)."""
