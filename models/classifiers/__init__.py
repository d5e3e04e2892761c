"""Text classifiers that work without a store: fastText models and the grades model."""
