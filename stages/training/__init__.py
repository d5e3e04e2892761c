"""What pretraining, the experiments and alignment share: training a model on an artifact, packed tokens, the corpus."""
