"""The code identity of a stage, which is part of an artifact's key."""
