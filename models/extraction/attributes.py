"""Reading of elements' attributes (classes, hidden content, formulas) and of a page's metadata (type, generator, address)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Scan
from puna.models.extraction.tags import NUMBER, OFFSET, PRIME, begins, find, fnv, has, is_space
from puna.models.extraction.write import annotation, formula

A_CLASS, A_ID, A_ROLE, A_STYLE, A_HIDDEN, A_ARIA_HIDDEN, A_ALT, A_ALTTEXT, A_START, A_VALUE = (
    np.uint64(fnv(name)) for name in ["class", "id", "role", "style", "hidden", "aria-hidden", "alt", "alttext", "start", "value"]
)
A_TYPE, A_ITEMPROP, A_HREF, A_CONTENT, A_PROPERTY, A_NAME, A_REL, A_COLSPAN, A_ROWSPAN = (
    np.uint64(fnv(name)) for name in ["type", "itemprop", "href", "content", "property", "name", "rel", "colspan", "rowspan"]
)
MAX_SPAN = 0x7FFF
T_A, T_IMG, T_LI, T_LINK, T_MATH, T_META, T_OL, T_SCRIPT = (NUMBER[n] for n in ["a", "img", "li", "link", "math", "meta", "ol", "script"])


@njit(cache=True, borrows=True)
def attributes(page: Scan, element: int, tag: int, at: int) -> int:
    """Read the attributes of a start tag, which begin at html[at], and write any formula that they hold; return the index after the tag."""
    html, s = page.html, page.state
    size = len(html)
    s[L.MATHS] = tag == T_MATH
    s[L.ABOUT] = s[L.ABOUT_STOP] = s[L.VALUE] = s[L.VALUE_STOP] = 0
    while at < size and html[at] != 62:
        if is_space(html[at]) or html[at] == 47:
            at += 1
            continue
        name = (OFFSET ^ np.uint64(html[at])) * PRIME  # a name may begin with `=`
        at += 1
        while at < size and html[at] != 61 and not is_space(html[at]) and html[at] != 62:
            name = (name ^ np.uint64(html[at])) * PRIME
            at += 1
        start = stop = at
        if at + 1 < size and html[at] == 61 and html[at + 1] == 34:
            start = at + 2
            stop = find(html, start, 34)
            at = stop + 1
        _attribute(page, element, tag, name, start, stop)
    at = min(at + 1, size)
    has_value = s[L.VALUE_STOP] > s[L.VALUE]
    if tag in (T_META, T_LINK) and has_value:
        _read_meta(page)
    elif s[L.MATHS] and has_value:
        formula(page, s[L.VALUE], s[L.VALUE_STOP])
        if tag == T_MATH and s[L.SKIP] < 0:
            s[L.SKIP] = element
    elif tag == T_MATH and s[L.SKIP] < 0:
        annotation(page, element, at)
    return at


@njit(cache=True, borrows=True)
def _attribute(page: Scan, element: int, tag: int, name: np.uint64, start: int, stop: int) -> None:
    html, s, flags = page.html, page.state, page.elements[element, L.FLAGS]
    if name == A_CLASS:
        _words(page, element, start, stop, 0, True)
        if tag == T_IMG and (has(html, start, stop, b"math") or has(html, start, stop, b"tex")):
            s[L.MATHS] = 1
        if s[L.SKIP] < 0 and _unseen(html, start, stop, tag):
            s[L.SKIP] = element
    elif name == A_ID:
        _words(page, element, start, stop, 1, False)
    elif name in (A_ROLE, A_ITEMPROP):
        _words(page, element, start, stop, 2, False)
    elif name == A_HIDDEN:
        page.elements[element, L.FLAGS] = flags | L.HIDDEN
    elif name == A_ARIA_HIDDEN and stop > start and html[start] == 116:
        page.elements[element, L.FLAGS] = flags | L.ARIA_HIDDEN
    elif name == A_STYLE and _hides(html, start, stop):
        page.elements[element, L.FLAGS] = flags | L.HIDDEN
    elif name == A_COLSPAN:
        page.elements[element, L.SPANS] |= _number(html, start, stop)
    elif name == A_ROWSPAN and stop > start and 48 <= html[start] <= 57:  # 0: to the end of the group
        page.elements[element, L.SPANS] |= (_number(html, start, stop) or MAX_SPAN) << 16
    elif name == A_START and tag == T_OL:
        page.elements[element, L.CHILDREN] = max(0, _number(html, start, stop) - 1)
    elif name == A_VALUE and tag == T_LI:
        parent = page.elements[element, L.PARENT]
        page.elements[parent, L.CHILDREN] = _number(html, start, stop) or page.elements[parent, L.CHILDREN]
    elif name == A_TYPE and tag == T_SCRIPT:
        page.elements[element, L.CHILDREN] = 1 if has(html, start, stop, b"math/tex") else 2 if has(html, start, stop, b"ld+json") else 0
    elif (tag == T_META and name in (A_PROPERTY, A_NAME)) or (tag == T_LINK and name == A_REL):
        s[L.ABOUT], s[L.ABOUT_STOP] = start, stop
    elif (
        (tag == T_META and name == A_CONTENT)
        or (tag == T_LINK and name == A_HREF)
        or (tag == T_IMG and name == A_ALT)
        or (tag == T_MATH and name == A_ALTTEXT)
    ):
        s[L.VALUE], s[L.VALUE_STOP] = start, stop


@njit(cache=True, borrows=True)
def _number(html: NDArray[np.uint8], start: int, stop: int) -> int:
    """Return the number that html[start:stop] begins with, capped at `MAX_SPAN`; 0 if it begins with no digit."""
    number, at = 0, start
    while at < stop and 48 <= html[at] <= 57:
        number, at = min(10 * number + int(html[at]) - 48, MAX_SPAN), at + 1
    return number


@njit(cache=True, borrows=True)
def _hides(html: NDArray[np.uint8], start: int, stop: int) -> bool:
    gone = has(html, start, stop, b"display:none") or has(html, start, stop, b"display: none")
    return bool(gone or has(html, start, stop, b"visibility:hidden") or has(html, start, stop, b"visibility: hidden"))


@njit(cache=True, borrows=True)
def _read_meta(page: Scan) -> None:
    """Record the page's type, generator or canonical address, if the current `meta` or `link` tag names one."""
    html, s = page.html, page.state
    if has(html, s[L.ABOUT], s[L.ABOUT_STOP], b"og:type"):
        _about(page, s[L.VALUE], s[L.VALUE_STOP], 3)
    elif has(html, s[L.ABOUT], s[L.ABOUT_STOP], b"generator"):
        _about(page, s[L.VALUE], min(s[L.VALUE_STOP], s[L.VALUE] + 6), 6)
    elif has(html, s[L.ABOUT], s[L.ABOUT_STOP], b"canonical"):
        _address(page, s[L.VALUE], s[L.VALUE_STOP])


@njit(cache=True, borrows=True)
def _unseen(html: NDArray[np.uint8], start: int, stop: int, tag: int) -> bool:
    """True if the class html[start:stop] marks an element that is not content: a permalink, an edit link, a formula's rendered copy."""
    if tag == T_A and (has(html, start, stop, b"headerlink") or (stop - start == 6 and has(html, start, stop, b"anchor"))):
        return True
    for at in range(start, stop):
        c = html[at] | 32
        if c == 107 and has(html, at, min(stop, at + 10), b"katex-html"):
            return True
        if c == 109 and (has(html, at, min(stop, at + 15), b"mathjax_preview") or has(html, at, min(stop, at + 14), b"mw-editsection")):
            return True
    return False


@njit(cache=True, borrows=True)
def _words(page: Scan, element: int, start: int, stop: int, kind: int, sign: bool) -> None:
    """Add hashes of the words (two letters or more, split as in camelCase) of a class, id or role to `tokens`. `sign`: also to `signs`."""
    s, html = page.state, page.html
    word, length = OFFSET ^ np.uint64(kind), 0
    total = np.uint64(0)
    lower = False
    for at in range(start, stop + 1):
        c = html[at] if at < stop else 32
        letter = 97 <= (c | 32) <= 122
        if length and (not letter or (lower and c < 97)):
            if length > 1 and s[L.TOKEN] - page.elements[element, L.TOKENS] < L.MAX_TOKENS:
                page.tokens[s[L.TOKEN]] = word
                s[L.TOKEN] += 1
                total += word * word
            word, length = OFFSET ^ np.uint64(kind), 0
        if letter:
            word = (word ^ np.uint64(c | 32)) * PRIME
            length += 1
        lower = letter and c >= 97
    if sign:
        page.signs[element, 0] = (page.signs[element, 0] ^ total) * PRIME


@njit(cache=True, borrows=True)
def _about(page: Scan, start: int, stop: int, kind: int) -> None:
    """Record a word about the page: the hash of `kind` and of html[start:stop], up to 64 bytes."""
    s = page.state
    if s[L.PAGE_TOKEN] < len(page.page):
        word = OFFSET ^ np.uint64(kind)
        for at in range(start, min(stop, start + 64)):
            word = (word ^ np.uint64(page.html[at])) * PRIME
        page.page[s[L.PAGE_TOKEN]] = word
        s[L.PAGE_TOKEN] += 1


@njit(cache=True, borrows=True)
def _address(page: Scan, start: int, stop: int) -> None:
    html = page.html
    at = find(html, start, 58, stop) + 3
    at = find(html, at, 47, stop)
    while at < stop:
        first = at + 1
        at = first
        while at < stop and 97 <= (html[at] | 32) <= 122:
            at += 1
        if at - first > 1 or (at == stop and first == stop):
            _about(page, first, at, 5)


@njit(cache=True, borrows=True)
def types(page: Scan, start: int, stop: int) -> None:
    """Record the values of `@type` in the JSON-LD html[start:stop] as words about the page."""
    html = page.html
    at = start
    while at + 8 < stop:
        at = find(html, at, 64, stop)
        if at + 8 < stop and begins(html, at, stop, b'@type"'):
            first = find(html, at + 6, 34, stop) + 1
            last = find(html, first, 34, stop)
            if last < stop and last - first < 40 and first - at < 16:
                _about(page, first, last, 4)
        at += 1
