"""The code identity of a stage, which an artifact's key covers."""
