"""Extraction of a web page's text: blocks, features, the content model."""
