"""Prompts and the tasks that generate them."""
