"""Models larger than the memory."""
