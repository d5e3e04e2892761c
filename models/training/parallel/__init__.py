"""Training over several processes: one layout, the same objectives, the same numbers as one process."""
