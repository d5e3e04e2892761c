"""Checkpoint formats (Hugging Face, GGUF, AWQ), and models quantized in memory (INT8, FP8, NF4)."""
