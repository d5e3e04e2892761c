"""Tokenizers, vocabularies and chat templates: text to token ids and back."""
