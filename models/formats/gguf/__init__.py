"""GGUF, the format of llama.cpp: reading and writing of models with their tokenizers."""
