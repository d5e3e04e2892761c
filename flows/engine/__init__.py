"""Programs of stages: declared, traced, planned, performed."""
