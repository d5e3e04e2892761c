"""Training code that pretraining, the experiments and alignment share: the corpus, packed tokens, models, rewards."""
