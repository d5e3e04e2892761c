"""Identification of languages and scripts, and facts about languages."""
