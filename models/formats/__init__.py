"""Layouts of checkpoints: Hugging Face, GGUF, AWQ, INT8, adapters."""
