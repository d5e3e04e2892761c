"""Conversion of the parser's serialized HTML (every element closed, every value quoted) to blocks of text, in one pass.

A block is the text between two boundaries: the tags of block elements and line breaks. A block holds its text, counts and its
place in the tree of elements; an element holds its parent, the blocks that it spans and the words of its classes.
Text is UTF-8: entities are decoded, white space is collapsed except in `pre`, and formulas are read from alternative texts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.attributes import attributes, types
from puna.models.extraction.layout import TAG_BIT, Pages, Scan, page_of
from puna.models.extraction.tags import IS_BLOCK, IS_RAW, IS_SPACED, IS_VOID, NUMBER, OFFSET, PRIME, begins, find, is_space, tag_name
from puna.models.extraction.write import boundary, formula, write

T_A, T_BR, T_IMG, T_INPUT, T_LI, T_OL, T_TD, T_TH, T_TR = (
    NUMBER[name] for name in ["a", "br", "img", "input", "li", "ol", "td", "th", "tr"]
)
T_PRE, T_TEXTAREA, T_TITLE, T_SVG, T_HEAD = (NUMBER[name] for name in ["pre", "textarea", "title", "svg", "head"])
QUOTES = L.BIT["noscript"] | L.BIT["textarea"]
NO_BOUND = 1 << 62


def serialize(tree: Any) -> bytes:
    """Return the serialized HTML of a page that Resiliparse has parsed."""
    document = tree.document
    return document.html.encode("utf-8", "replace") if document is not None else b" "


def scan(html: bytes) -> Scan:
    """Return the blocks and elements of a page. `html`: the parsed tree, serialized in UTF-8."""
    return page_of(read_pages([html])[0], 0)  # type: ignore[no-any-return]


def read_pages(htmls: list[bytes], max_depth: int = NO_BOUND, max_blocks: int = NO_BOUND) -> tuple[Pages, NDArray[np.int64]]:
    """Return the pages' blocks and elements, and each page's depth and number of blocks [pages, 2]. Leave a page beyond a bound empty."""
    ends = np.zeros(len(htmls) + 1, np.int64)
    np.cumsum([len(html) for html in htmls], out=ends[1:])
    return _read(np.frombuffer(b"".join(htmls), np.uint8), ends, max_depth, max_blocks)  # type: ignore[no-any-return]


@njit(cache=True)
def _read(html: NDArray[np.uint8], ends: NDArray[np.int64], max_depth: int, max_blocks: int) -> tuple[Pages, NDArray[np.int64]]:
    n = len(ends) - 1
    tags, words = np.full(n, 2, np.int64), np.empty(n, np.int64)  # upper bounds per page
    every = tokens = 0
    for p in range(n):
        for at in range(ends[p], ends[p + 1]):
            tags[p] += html[at] == 60
        words[p] = min((ends[p + 1] - ends[p]) // 2, L.MAX_TOKENS * tags[p]) + 64
        every, tokens = every + tags[p], tokens + words[p]
    pages = Pages(
        html, np.zeros((n, L.STATES), np.int64), np.empty(len(html) + 8 * every + 64 * n, np.uint8), np.empty(n * L.MAX_TITLE, np.uint8),
        np.empty((every, L.COLUMNS), np.int64), np.empty((every, 2), np.uint64), np.empty(tokens, np.uint64),
        np.empty((every + n, L.HASHES + 1), np.int64), np.empty(len(html) // 2 + 64 * n, np.uint64),
        np.empty(n * L.MAX_HEAD_WORDS, np.uint64), np.zeros((n + 1, L.TABLES), np.int64),
    )  # fmt: skip
    results = np.zeros((n, 2), np.int64)
    for p in range(n):
        state, size = pages.states[p], ends[p + 1] - ends[p]
        room = (size, size + 8 * tags[p] + 64, L.MAX_TITLE, tags[p], words[p], tags[p] + 1, size // 2 + 64, L.MAX_HEAD_WORDS)
        pages.starts[p + 1] = pages.starts[p] + np.array(room)
        page = page_of(pages, p)
        _scan(page)
        for e in range(state[L.ELEMENTS]):
            results[p, 0] = max(results[p, 0], page.elements[e, L.DEPTH])
        results[p, 1] = state[L.BLOCKS]
        pages.starts[p + 1] = pages.starts[p]
        pages.starts[p + 1, L.HTML] = ends[p + 1]
        if results[p, 0] <= max_depth and results[p, 1] <= max_blocks:
            for table, length in enumerate((L.OUT, L.TITLE_STOP, L.ELEMENTS, L.TOKEN, L.BLOCKS, L.HASH, L.PAGE_TOKEN)):
                pages.starts[p + 1, 1 + table] += state[length]
    return pages, results


@njit(cache=True)
def _scan(page: Scan) -> None:
    s, html = page.state, page.html
    page.elements[0], page.elements[0, L.PARENT] = 0, -1
    page.signs[0], page.blocks[0] = OFFSET, 0
    s[L.ELEMENTS], s[L.SKIP], s[L.FORMULA_AT], s[L.NEXT_GAP] = 1, -1, -1, L.BLANK
    size = len(html)
    while s[L.AT] < size:
        if html[s[L.AT]] != 60:
            _text(page)
        elif s[L.AT] + 1 < size and html[s[L.AT] + 1] == 47:
            _end_tag(page)
        elif s[L.AT] + 1 < size and (97 <= html[s[L.AT] + 1] | 32 <= 122):
            _start_tag(page)
        else:
            _declaration(page)
    boundary(page, L.BLANK)
    while s[L.CURRENT] >= 0:
        _close(page)


@njit(cache=True, borrows=True)
def _declaration(page: Scan) -> None:
    """Skip a comment, a doctype or a stray `<`."""
    s, html = page.state, page.html
    at = s[L.AT]
    if begins(html, at, len(html), b"<!--"):
        at += 4
        while at < len(html) and not (html[at] == 62 and html[at - 1] == 45 and html[at - 2] == 45):
            at += 1
        s[L.AT] = at + 1
    elif at + 1 < len(html) and (html[at + 1] == 33 or html[at + 1] == 63):
        s[L.AT] = find(html, at, 62) + 1
    else:
        s[L.AT] += 1


@njit(cache=True, borrows=True)
def _end_tag(page: Scan) -> None:
    s, html = page.state, page.html
    tag, _, at = tag_name(html, s[L.AT] + 2)
    s[L.AT] = find(html, at, 62) + 1
    element, steps = s[L.CURRENT], 0
    while element > 0 and page.elements[element, L.TAG] != tag and steps < 64:
        element, steps = page.elements[element, L.PARENT], steps + 1
    if element <= 0 or page.elements[element, L.TAG] != tag:
        return
    while s[L.CURRENT] != element:
        _close(page)
    _close(page)


@njit(cache=True, borrows=True)
def _close(page: Scan) -> None:
    s = page.state
    element = s[L.CURRENT]
    tag = page.elements[element, L.TAG]
    if IS_BLOCK[tag]:
        boundary(page, L.BLANK if IS_SPACED[tag] else L.LINE)
    page.elements[element, L.END] = s[L.BLOCKS]
    if s[L.SKIP] == element:
        s[L.SKIP] = -1
    if tag == T_A and s[L.IN_LINK] == element:
        s[L.IN_LINK] = 0
    if tag in (T_PRE, T_TEXTAREA):
        s[L.IN_PRE] -= 1
    elif tag == T_LI:
        s[L.NEXT_MARKER] = 0
    s[L.CURRENT] = page.elements[element, L.PARENT]


@njit(cache=True, borrows=True)
def _start_tag(page: Scan) -> None:
    s, html, elements = page.state, page.html, page.elements
    tag, name, at = tag_name(html, s[L.AT] + 1)
    if IS_BLOCK[tag]:
        boundary(page, L.BLANK if IS_SPACED[tag] else L.LINE)
    elif tag == T_A and s[L.AT] >= 4 and html[s[L.AT] - 2] == 97 and html[s[L.AT] - 3] == 47:
        s[L.SPACE] = 1  # adjacent links are separate words
    parent, element = s[L.CURRENT], s[L.ELEMENTS]
    s[L.ELEMENTS] += 1
    elements[element] = 0
    elements[element, L.TAG], elements[element, L.PARENT], elements[element, L.DEPTH] = tag, parent, elements[parent, L.DEPTH] + 1
    elements[element, L.FIRST], elements[element, L.TOKENS] = s[L.BLOCKS], s[L.TOKEN]
    elements[element, L.FLAGS] = elements[parent, L.FLAGS] | TAG_BIT[tag]
    elements[parent, L.CHILDREN] += 1
    elements[element, L.HOLDER] = element if IS_BLOCK[tag] else elements[parent, L.HOLDER]
    page.signs[element, 0] = name
    s[L.CURRENT] = element
    s[L.AT] = attributes(page, element, tag, at)
    page.signs[element, 1] = (page.signs[parent, 1] ^ page.signs[element, 0]) * PRIME
    if IS_RAW[tag]:
        _raw(page, tag, element)
    elif tag == T_TITLE:
        _title(page)
    else:
        _open_tag(page, tag, element)
        if IS_VOID[tag]:
            elements[element, L.END] = s[L.BLOCKS]
            s[L.CURRENT] = parent
            if s[L.SKIP] == element:
                s[L.SKIP] = -1


@njit(cache=True, borrows=True)
def _open_tag(page: Scan, tag: int, element: int) -> None:
    s = page.state
    if tag == T_BR:
        boundary(page, L.LINE)
        s[L.BREAKS] += 1
        if s[L.BREAKS] > 1 and s[L.NEXT_GAP] == L.LINE:
            s[L.NEXT_GAP] = L.BLANK
    elif tag == T_A:
        s[L.IN_LINK] = element
        if s[L.OPEN]:
            page.blocks[s[L.BLOCKS], L.LINKS] += 1
        else:
            page.blocks[s[L.BLOCKS], L.LINKS] = 1
    elif tag in (T_PRE, T_TEXTAREA):
        s[L.IN_PRE] += 1
    elif tag == T_LI:
        parent = page.elements[element, L.PARENT]
        s[L.NEXT_MARKER] = page.elements[parent, L.CHILDREN] if page.elements[parent, L.TAG] == T_OL else -1
    elif tag == T_TR:
        s[L.ROW_CELLS] = 0
    elif tag in (T_TD, T_TH):
        if s[L.ROW_CELLS]:
            s[L.NEXT_GAP] = L.TAB
        s[L.ROW_CELLS] += 1
    elif tag in (T_SVG, T_HEAD):
        if s[L.SKIP] < 0:
            s[L.SKIP] = element
    elif tag == T_INPUT:
        page.blocks[s[L.BLOCKS], L.FORMS] += 1
    elif tag == T_IMG:
        page.blocks[s[L.BLOCKS], L.IMAGES] += 1
    elif s[L.OPEN] and not IS_BLOCK[tag]:
        page.blocks[s[L.BLOCKS], L.INLINE] += 1


@njit(cache=True, borrows=True)
def _raw(page: Scan, tag: int, element: int) -> None:
    """Skip the content of a raw element (`script`, `style`, …), but write a formula in it as text, and record the types in JSON-LD."""
    s, html = page.state, page.html
    start = at = s[L.AT]
    kind = page.elements[element, L.CHILDREN]  # set by the attributes: 1 formula, 2 linked data
    page.elements[element, L.CHILDREN] = 0
    while True:
        at = find(html, at, 60)
        if at + 1 >= len(html):
            at = len(html)
            break
        if html[at + 1] == 47 and tag_name(html, at + 2)[0] == tag:
            break
        at += 1
    if kind == 1:
        formula(page, start, at)
    elif kind == 2:
        types(page, start, at)
    s[L.AT] = at


@njit(cache=True, borrows=True)
def _title(page: Scan) -> None:
    s, html = page.state, page.html
    at = s[L.AT]
    stop = find(html, at, 60)
    if s[L.TITLE_STOP] == 0:
        for here in range(at, min(stop, at + len(page.title))):
            page.title[here - at] = html[here]
        s[L.TITLE_STOP] = min(stop - at, len(page.title))
    s[L.AT] = stop


@njit(cache=True, borrows=True)
def _is_markup(html: NDArray[np.uint8], at: int, stop: int) -> bool:
    """True if html[at:stop] begins with an escaped tag or comment, as in pages that a browser saved, or in snippets to embed."""
    while at < stop and is_space(html[at]):
        at += 1
    if at + 4 >= stop or not begins(html, at, stop, b"&lt;"):
        return False
    return bool(html[at + 4] == 33 or html[at + 4] == 47 or 97 <= (html[at + 4] | 32) <= 122)


@njit(cache=True, borrows=True)
def _text(page: Scan) -> None:
    """Read to the next tag, and write the text, except text in a skipped element, and escaped markup in `noscript` or `textarea`."""
    s, html = page.state, page.html
    stop = find(html, s[L.AT], 60)
    quoted = page.elements[s[L.CURRENT], L.FLAGS] & QUOTES and _is_markup(html, s[L.AT], stop)
    if s[L.SKIP] < 0 and not quoted:
        write(page, s[L.AT], stop)
    s[L.AT] = stop
