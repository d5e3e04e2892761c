"""Flows as programs: declared, traced, planned, performed."""
