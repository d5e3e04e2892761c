"""Training over several processes: one layout, the same objectives, the same results as one process."""
