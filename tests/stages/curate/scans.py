"""Scans of pages for the tests of extraction."""

from __future__ import annotations

from typing import Any

from puna.models.extraction.layout import Scan
from puna.models.extraction.scan import scan, serialize


def read_page(tree: Any) -> Scan:
    """Return the blocks and elements of a page that Resiliparse has parsed."""
    return scan(serialize(tree))
