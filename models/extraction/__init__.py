"""The text of a web page: blocks, features, the content model."""
