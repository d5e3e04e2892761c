"""Languages and scripts, and a model that tells them apart."""
