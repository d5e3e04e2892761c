"""Text to ids and back: tokenizers, vocabularies, chat templates."""
