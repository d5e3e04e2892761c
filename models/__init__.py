"""Language models: settings, checkpoint layouts, tokenizer, training and generation; classifiers, content extraction."""
