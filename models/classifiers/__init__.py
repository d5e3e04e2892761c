"""fastText models and the grades model, without a store."""
