"""Bounds on the work of an HTML parser, from a page's bytes alone.

The time and memory of a parser grow with products: elements times open elements, attributes of one element times themselves, and open
formatting elements (`b`, `font`, ...) times elements, since the parser opens them again in each paragraph. Which elements are open at a
place depends on all of the parser's rules, so a page can be built to mislead any estimate of that. The counts here are upper bounds
whatever the rules say: each `<` counts as a tag, also in comments, scripts and attributes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.tags import find, flags, is_space, tag_name

FORMATTING = flags("a b big code em font i nobr s small strike strong tt u")
OPTIONS = flags("option optgroup")
MAX_TAGS, MAX_ATTRIBUTES = 10_000, 30_000  # about a second for the parser, if each costs time for all others
MAX_BYTES = 1e9  # memory of formatting elements that are opened again at each tag
ELEMENT_BYTES, ATTRIBUTE_BYTES = 250, 200


class Counts(NamedTuple):
    """Upper bounds on a page's numbers of tags, attributes, formatting elements (with their attributes and bytes) and options."""

    tags: int
    attributes: int
    formats: int
    format_attributes: int
    format_bytes: int
    options: int

    def is_cheap(self) -> bool:
        """True if a parser surely takes at most a few seconds and about `MAX_BYTES` of memory for the page, as for nine of ten pages."""
        again = ELEMENT_BYTES * self.formats + ATTRIBUTE_BYTES * self.format_attributes + self.format_bytes
        return self.tags <= MAX_TAGS and self.attributes <= MAX_ATTRIBUTES and self.tags * again <= MAX_BYTES


def counts(html: bytes) -> Counts:
    """Return upper bounds on the counts that a parser reaches with a page."""
    return Counts(*_counts(np.frombuffer(html, np.uint8)))


@njit(cache=True, borrows=True)
def _attributes(html: NDArray[np.uint8], at: int) -> tuple[int, int]:
    """Return the number of attributes of a tag from the end of its name at `at`, and the tag's end, by the rules of the HTML standard."""
    count, size = 0, len(html)
    while at < size and html[at] != 62:
        if is_space(html[at]) or html[at] == 47:
            at += 1
            continue
        count += 1
        at += 1
        while at < size and html[at] != 61 and not is_space(html[at]) and html[at] != 62 and html[at] != 47:
            at += 1
        while at < size and is_space(html[at]):
            at += 1
        if at < size and html[at] == 61:
            at += 1
            while at < size and is_space(html[at]):
                at += 1
            if at < size and (html[at] == 34 or html[at] == 39):
                at = find(html, at + 1, html[at]) + 1
            else:
                while at < size and not is_space(html[at]) and html[at] != 62:
                    at += 1
    return count, min(at + 1, size)


@njit(cache=True, borrows=True)
def _counts(html: NDArray[np.uint8]) -> tuple[int, int, int, int, int, int]:
    size = len(html)
    tags = attributes = formats = format_attributes = format_bytes = options = scanned = at = 0
    while True:
        at = find(html, at, 60) + 1
        if at >= size:
            return tags, attributes, formats, format_attributes, format_bytes, options
        tags += 1
        if 97 <= (html[at] | 32) <= 122:
            tag, _, stop = tag_name(html, at)
            own, end = _attributes(html, stop)
            attributes += own
            scanned += end - at
            options += OPTIONS[tag]
            if FORMATTING[tag]:
                formats += 1
                format_attributes += own
                format_bytes += end - at
            if scanned > 4 * size:  # tags in attributes of tags: each byte may be part of many
                attributes += size
                at = size
