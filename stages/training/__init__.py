"""Training on artifacts, packed tokens and the corpus, shared by pretraining, the experiments and alignment."""
