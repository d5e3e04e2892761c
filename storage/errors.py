"""The one error a user should ever read."""


class PunaError(Exception):
    """Bad input or a broken store. The message names the file, row or field and what to do."""
