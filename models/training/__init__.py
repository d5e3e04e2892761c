"""Training: one loop, its schedules, objectives, batches and weight averages."""
