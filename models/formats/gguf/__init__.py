"""GGUF, the format of llama.cpp: models and their tokenizers, in and out."""
