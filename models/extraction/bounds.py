"""Estimate of a page's cost for a parser, from the page's tags, so that pages built to hang a parser are refused before parsing.

The time of an HTML parser grows with the square of four counts: nested elements, attributes of one tag, options of a selection list, and
unclosed formatting elements (`b`, `font`, ...), which the parser opens again in every paragraph. Options hold no text of the page: if
there are many, their tags are removed and the page is parsed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.tags import begins, find, flags, tag_name

# The parser closes these elements by itself, or they are empty: they do not nest.
CLOSED = flags(
    "area base basefont bgsound body br button col colgroup dd dt embed frame head hr html img input keygen li link meta optgroup option "
    "p param rp rt source tbody td tfoot th thead tr track wbr a"
)
OPTIONS = flags("option optgroup")
FORMATTING = flags("b big code em font i nobr s small strike strong tt u")
OPAQUE = flags("script style textarea title xmp iframe noembed noframes")
FOREIGN = flags("svg math")
MANY_ATTRIBUTES = 100
# A start tag of one of these ends an open svg or math element.
BREAKS_OUT = flags(
    "b big blockquote body br center code dd div dl dt em embed h1 h2 h3 h4 h5 h6 head hr i img li menu meta nobr ol p pre ruby s small "
    "span strong strike sub sup table tt u ul var font"
)


class Burden(NamedTuple):
    """Counts of a page. `depth`: maximum nested elements or open formatting elements. `attributes`: maximum of a tag or, if greater, the
    root of the sum of squares over tags with more than `MANY_ATTRIBUTES`. `copies`: formatting elements opened again."""

    tags: int
    depth: int
    attributes: int
    copies: int
    options: int


def burden(html: bytes) -> Burden:
    """Return upper bounds on the counts that a parser reaches with a page."""
    return Burden(*_burden(np.frombuffer(html, np.uint8)))


@njit(cache=True, borrows=True)
def _attributes(html: NDArray[np.uint8], at: int) -> tuple[int, int]:
    count, size = 0, len(html)
    while at < size and html[at] != 62:
        if html[at] <= 32 or html[at] == 47:
            at += 1
            continue
        count += 1
        at += 1
        while at < size and html[at] != 61 and html[at] > 32 and html[at] != 62 and html[at] != 47:
            at += 1
        while at < size and html[at] <= 32:
            at += 1
        if at < size and html[at] == 61:
            at += 1
            while at < size and html[at] <= 32:
                at += 1
            if at < size and (html[at] == 34 or html[at] == 39):
                at = find(html, at + 1, html[at]) + 1
            else:
                while at < size and html[at] > 32 and html[at] != 62:
                    at += 1
    return count, min(at + 1, size)


@njit(cache=True, borrows=True)
def _after_comment(html: NDArray[np.uint8], at: int) -> int:
    """Return the end of a comment, a doctype or a stray `<` at `at`; the earliest possible end, when in doubt."""
    size = len(html)
    if begins(html, at, size, b"<!--"):
        at += 2
        while at < size:
            if html[at] == 62 and html[at - 1] == 45 and html[at - 2] == 45:
                return at + 1
            if html[at] == 62 and html[at - 1] == 33 and html[at - 2] == 45 and html[at - 3] == 45:
                return at + 1
            at += 1
        return size
    if at + 1 < size and (html[at + 1] == 33 or html[at + 1] == 63 or html[at + 1] == 47):
        at = find(html, at, 62)
    return min(at + 1, size)


@njit(cache=True, borrows=True)
def _burden(html: NDArray[np.uint8]) -> tuple[int, int, int, int, int]:
    size = len(html)
    tags = depth = deepest = formatting = most = widest = squares = copies = foreign = options = at = 0
    while True:
        at = find(html, at, 60)
        if at >= size:
            break
        closing = at + 1 < size and html[at + 1] == 47
        first = at + 1 + closing
        if first >= size or not 97 <= (html[first] | 32) <= 122:
            at = _after_comment(html, at)
            continue
        tag, _, at = tag_name(html, first)
        attributes, at = _attributes(html, at)
        tags += 1
        widest = max(widest, attributes)
        squares += attributes * attributes if attributes > MANY_ATTRIBUTES else 0
        options += OPTIONS[tag] and not closing
        if FOREIGN[tag]:
            foreign = max(0, foreign + (-1 if closing else 1))
        elif BREAKS_OUT[tag]:
            foreign = 0
        nests = not CLOSED[tag] and not (foreign > 0 and at > 1 and html[at - 2] == 47)
        if FORMATTING[tag]:
            formatting = max(0, formatting - 1) if closing else formatting + 1
            most = max(most, formatting)
        else:
            copies += formatting
        if nests:
            depth = max(0, depth - 1) if closing else depth + 1
            deepest = max(deepest, depth)
        if OPAQUE[tag] and not closing and foreign == 0:
            at = find(html, at, 60)
            while at < size and not (at + 1 < size and html[at + 1] == 47 and tag_name(html, at + 2)[0] == tag):
                at = find(html, at + 1, 60)
    return tags, max(deepest, most), max(widest, int(squares**0.5)), copies, options
