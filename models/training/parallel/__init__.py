"""Training over several processes under a layout, with one process's objectives and, up to rounding, its results."""
