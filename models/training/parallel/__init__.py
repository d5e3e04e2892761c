"""Training over several processes under a layout. Objectives and, up to rounding, results are those of a single process."""
