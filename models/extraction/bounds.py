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
from puna.models.extraction.tags import NAMES, begins, find, flags, fnv, tag_name

# The parser closes these elements by itself, or they are empty: they do not nest.
CLOSED = flags(
    "area base basefont bgsound body br button col colgroup dd dt embed frame head hr html img input keygen li link meta optgroup option "
    "p param rp rt source tbody td tfoot th thead tr track wbr a"
)
OPTIONS = flags("option optgroup")
FORMATTING = flags("b big code em font i nobr s small strike strong tt u")
OPAQUE = flags("script style textarea title xmp iframe noembed noframes")
FOREIGN = flags("svg math")
# The end tag of a formatting element opened before one of these, the innermost, closes nothing.
MARKS = flags("object template td th caption")
APPLET, MARQUEE = np.uint64(fnv("applet")), np.uint64(fnv("marquee"))
REACH = 1000  # open elements among which an end tag's element is looked for
MANY_ATTRIBUTES = 100
# A start tag of one of these ends an open svg or math element.
BREAKS_OUT = flags(
    "b big blockquote body br center code dd div dl dt em embed h1 h2 h3 h4 h5 h6 head hr i img li menu meta nobr ol p pre ruby s small "
    "span strong strike sub sup table tt u ul var font"
)


class Burden(NamedTuple):
    """Counts of a page. `depth`: maximum of nested and of open formatting elements. `attributes`: maximum of a tag or, if greater, the
    root of the sum of squares over tags with more than `MANY_ATTRIBUTES`. `copies`: formatting elements opened again. `doubtful`: elements
    that a parser may leave open, although a browser closes them in the usual case. `loose`: formatting elements that it may open again,
    although an end tag follows them."""

    tags: int
    depth: int
    attributes: int
    copies: int
    options: int
    doubtful: int
    loose: int


def burden(html: bytes) -> Burden:
    """Return upper bounds on the counts that a parser reaches with a page."""
    stack, listed = np.empty(html.count(b"<"), np.uint64), np.zeros(len(NAMES), np.int64)
    return Burden(*_burden(np.frombuffer(html, np.uint8), stack, listed))


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
def _place(stack: NDArray[np.uint64], depth: int, name: np.uint64) -> int:
    """Return the index of the innermost open element of a name, among the innermost `REACH`; -1 if there is none."""
    for at in range(depth - 1, max(-1, depth - 1 - REACH), -1):
        if stack[at] == name:
            return at
    return -1


@njit(cache=True, borrows=True)
def _content_end(html: NDArray[np.uint8], at: int, tag: int) -> tuple[int, int]:
    """Return the number of start tags in an opaque element's content, which a parser may take for elements, and its end tag's index."""
    size, tags = len(html), 0
    at = find(html, at, 60)
    while at < size and not (at + 1 < size and html[at + 1] == 47 and tag_name(html, at + 2)[0] == tag):
        tags += at + 1 < size and 97 <= (html[at + 1] | 32) <= 122
        at = find(html, at + 1, 60)
    return tags, at


@njit(cache=True, borrows=True)
def _burden(html: NDArray[np.uint8], stack: NDArray[np.uint64], listed: NDArray[np.int64]) -> tuple[int, int, int, int, int, int, int]:
    size = len(html)
    tags = depth = deepest = formatting = most = widest = squares = copies = foreign = options = doubtful = loose = barrier = at = 0
    drawn = marked = False
    while True:
        at = find(html, at, 60)
        if at >= size:
            break
        closing = at + 1 < size and html[at + 1] == 47
        first = at + 1 + closing
        if first >= size or not 97 <= (html[first] | 32) <= 122:
            at = _after_comment(html, at)
            continue
        tag, name, at = tag_name(html, first)
        attributes, at = _attributes(html, at)
        tags += 1
        widest = max(widest, attributes)
        squares += attributes * attributes if attributes > MANY_ATTRIBUTES else 0
        options += OPTIONS[tag] and not closing
        if FOREIGN[tag]:
            foreign, drawn = max(0, foreign + (-1 if closing else 1)), True
        elif BREAKS_OUT[tag] and not closing:
            foreign = 0
        place = _place(stack, depth, name) if closing and not CLOSED[tag] else -1
        if not FORMATTING[tag]:
            copies += formatting
        elif not closing:
            formatting, most = formatting + 1, max(most, formatting + 1)
            listed[tag] += 1
        elif listed[tag]:
            formatting -= 1
            listed[tag] -= 1
            loose += 0 <= place < barrier or (place < 0 and marked)
        if place >= 0:
            doubtful += depth - place if place < depth - 1 else 0
            depth, barrier = place, min(barrier, place)
        elif not closing and foreign > 0 and html[at - 2] == 47:
            doubtful += not CLOSED[tag]
        elif not closing and not CLOSED[tag]:
            stack[depth] = name
            depth += 1
            deepest = max(deepest, depth)
        if not closing and (MARKS[tag] or name in (APPLET, MARQUEE)):
            barrier, marked = depth, True
        if OPAQUE[tag] and not closing and foreign == 0:
            inside, at = _content_end(html, at, tag)
            doubtful += inside if drawn else 0
    return tags, max(deepest, most), max(widest, int(squares**0.5)), copies, options, doubtful, loose
