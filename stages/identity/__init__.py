"""The code that an artifact's key stands for."""
