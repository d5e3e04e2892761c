"""The language model: its settings, layouts, tokenizer, training and generation."""
