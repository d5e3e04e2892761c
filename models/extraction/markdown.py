"""Markdown's marks that a page spells out, where its author or its software left them as text."""

from __future__ import annotations

import re

# A line of its own between blank lines: comments of code stand next to code.
TITLE = re.compile(r"(?:^|(?<=\n\n))#{1,6} +(?=\S[^\n]*(?:\n\n|\n*$))")
BOLD = re.compile(r"(?<![\w*])\*\*(?=[^\s*])([^*\n]*[^\s*])\*\*(?![\w*])")


def without_marks(text: str) -> str:
    """Return the text without the marks of `**bold**` and of `# titles` between blank lines."""
    return BOLD.sub(r"\1", TITLE.sub("", text))
