"""HTML as the parser writes it out again (every element closed, every value quoted) to blocks of text, in one pass.

A block is the text between two boundaries: the tags of block elements and line breaks. Each holds its text, its place
in the tree of elements and counts; elements hold their parents, the blocks that they span and the words of their
classes. Text is UTF-8: entities decoded, white space collapsed except in `pre`, formulas from alternative texts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from puna.stages.curate.extraction.tags import IS_BLOCK, IS_HEADING, IS_RAW, IS_SPACED, IS_VOID, NAMES, NUMBER, TAG_KEYS, TAG_VALUES, fnv

# Columns of `elements`
TAG, PARENT, DEPTH, FIRST, END, FLAGS, TOKENS, CHILDREN = range(8)
# Columns of `blocks`
ELEMENT, START, STOP, GAP, MARKER, WORDS, CHARS, LINKED_CHARS, LINKED_WORDS, LINKS, STOPS, COMMAS, DIGITS, UPPER, INLINE, IMAGES, PRE, FORMS, LAST, HASHES = range(20)
BLOCK_COLUMNS = 20
# What stands between a block and the one before
LINE, BLANK, TAB = 0, 1, 2
# Entries of `state`
AT, OUT, BLOCKS, ELEMENTS, TOKEN, HASH, CURRENT, OPEN, SPACE, NEXT_GAP, NEXT_MARKER, IN_PRE, IN_LINK, SKIP, ROW_CELLS, FORMULA_AT, TITLE_STOP, PAGE_TOKEN, BREAKS, VERBATIM = range(20)
# Bits of an element's flags; an element has those of its ancestors as well.
FLAG_NAMES = (
    "nav", "header", "footer", "aside", "form", "main", "article", "section", "table", "ul", "ol", "li", "dl", "figure", "figcaption",
    "button", "dialog", "details", "blockquote", "pre", "select", "noscript", "template", "a", "td", "th", "label", "code", "body",
    "h1", "h2", "h3", "h4", "h5", "h6", "p", "textarea", "menu", "fieldset", "address", "caption", "dt", "dd", "summary", "thead",
)  # fmt: skip
BIT = {name: 1 << number for number, name in enumerate(FLAG_NAMES)}
HIDDEN, ARIA_HIDDEN = 1 << 50, 1 << 51
TAG_BIT = np.array([BIT.get(name, 0) for name in NAMES], np.int64)
A_CLASS, A_ID, A_ROLE, A_STYLE, A_HIDDEN, A_ARIA_HIDDEN, A_ALT, A_ALTTEXT, A_TYPE, A_ITEMPROP, A_HREF, A_CONTENT, A_PROPERTY, A_NAME, A_REL = (
    np.uint64(fnv(name.encode())) for name in "class id role style hidden aria-hidden alt alttext type itemprop href content property name rel".split()
)
(T_A, T_BR, T_IMG, T_PRE, T_LI, T_OL, T_TD, T_TH, T_TR, T_SCRIPT, T_TITLE, T_SVG, T_MATH, T_HEAD, T_BODY, T_INPUT, T_BUTTON, T_META, T_P, T_TEXTAREA, T_LINK) = (
    NUMBER[name] for name in "a br img pre li ol td th tr script title svg math head body input button meta p textarea link".split()
)
OFFSET, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)
MAX_TOKENS = 24


class Scan(NamedTuple):
    """A page while it is read, and what was found. See the columns above."""

    html: NDArray[np.uint8]
    state: NDArray[np.int64]
    text: NDArray[np.uint8]
    title: NDArray[np.uint8]
    elements: NDArray[np.int64]
    signs: NDArray[np.uint64]  # per element: hash of tag and class words; of the signs from the root
    tokens: NDArray[np.uint64]  # words of classes, ids and roles, element after element
    blocks: NDArray[np.int64]
    hashes: NDArray[np.uint64]  # words of the text, block after block
    page: NDArray[np.uint64]  # words about the page from its head


def scan(html: bytes) -> Scan:
    """The blocks and elements of a page; `html` is the serialisation of a parsed tree, UTF-8."""
    data = np.frombuffer(html, np.uint8)
    tags = html.count(b"<") + 2
    page = Scan(
        data,
        np.zeros(20, np.int64),
        np.empty(len(data) + 8 * tags + 64, np.uint8),
        np.empty(1024, np.uint8),
        np.zeros((tags, 8), np.int64),
        np.zeros((tags, 2), np.uint64),
        np.empty(min(len(data) // 2, MAX_TOKENS * tags) + 64, np.uint64),
        np.zeros((tags + 1, BLOCK_COLUMNS), np.int64),
        np.empty(len(data) // 2 + 64, np.uint64),
        np.empty(256, np.uint64),
    )
    _scan(page)
    s = page.state
    return page._replace(
        text=page.text[: s[OUT]],
        title=page.title[: s[TITLE_STOP]],
        elements=page.elements[: s[ELEMENTS]],
        signs=page.signs[: s[ELEMENTS]],
        tokens=page.tokens[: s[TOKEN]],
        blocks=page.blocks[: s[BLOCKS]],
        hashes=page.hashes[: s[HASH]],
        page=page.page[: s[PAGE_TOKEN]],
    )


@njit(cache=True)
def _scan(page: Scan) -> None:
    s, html = page.state, page.html
    page.elements[0, PARENT] = -1
    page.signs[0] = OFFSET
    s[ELEMENTS], s[SKIP], s[FORMULA_AT], s[NEXT_GAP] = 1, -1, -1, BLANK
    size = len(html)
    while s[AT] < size:
        if html[s[AT]] != 60:
            _text(page)
        elif s[AT] + 1 < size and html[s[AT] + 1] == 47:
            _end_tag(page)
        elif s[AT] + 1 < size and (97 <= html[s[AT] + 1] | 32 <= 122):
            _start_tag(page)
        else:
            _declaration(page)
    _boundary(page, BLANK)
    while s[CURRENT] >= 0:
        _close(page)


# --- tags ------------------------------------------------------------------------------------------------


@njit(cache=True)
def _find(html: NDArray[np.uint8], at: int, byte: int) -> int:
    """Index of the first `byte` from `at` on, or the end."""
    while at < len(html) and html[at] != byte:
        at += 1
    return at


@njit(cache=True)
def _has(html: NDArray[np.uint8], start: int, stop: int, words: bytes) -> bool:
    """Whether bytes occur in html[start:stop], letters in either case."""
    for at in range(start, stop - len(words) + 1):
        here = 0
        while here < len(words) and (html[at + here] == words[here] or (65 <= html[at + here] <= 90 and html[at + here] + 32 == words[here])):
            here += 1
        if here == len(words):
            return True
    return False


@njit(cache=True)
def _declaration(page: Scan) -> None:
    """Skip a comment, a doctype or a stray `<`."""
    s, html = page.state, page.html
    at = s[AT]
    if at + 3 < len(html) and html[at + 1] == 33 and html[at + 2] == 45 and html[at + 3] == 45:
        at += 4
        while at < len(html) and not (html[at] == 62 and html[at - 1] == 45 and html[at - 2] == 45):
            at += 1
        s[AT] = at + 1
    elif at + 1 < len(html) and (html[at + 1] == 33 or html[at + 1] == 63):
        s[AT] = _find(html, at, 62) + 1
    else:
        s[AT] += 1


@njit(cache=True)
def _tag(page: Scan, at: int) -> tuple[int, np.uint64, int]:
    """Number and hash of the name at `at`, and where it ends."""
    html = page.html
    state = OFFSET
    while at < len(html) and html[at] > 32 and html[at] != 62 and html[at] != 47:
        state = (state ^ np.uint64(html[at])) * PRIME
        at += 1
    slot = np.int64(state & np.uint64(1023))
    while TAG_KEYS[slot] != 0 and TAG_KEYS[slot] != state:
        slot = (slot + 1) & 1023
    return (TAG_VALUES[slot] if TAG_KEYS[slot] != 0 else 0), state, at


@njit(cache=True)
def _end_tag(page: Scan) -> None:
    s, html = page.state, page.html
    tag, sign, at = _tag(page, s[AT] + 2)
    s[AT] = _find(html, at, 62) + 1
    element, steps = s[CURRENT], 0
    while element > 0 and page.elements[element, TAG] != tag and steps < 64:
        element, steps = page.elements[element, PARENT], steps + 1
    if element <= 0 or page.elements[element, TAG] != tag:
        return
    while s[CURRENT] != element:
        _close(page)
    _close(page)


@njit(cache=True)
def _close(page: Scan) -> None:
    """Close the current element."""
    s = page.state
    element = s[CURRENT]
    tag = page.elements[element, TAG]
    if IS_BLOCK[tag]:
        _boundary(page, BLANK if IS_SPACED[tag] else LINE)
    page.elements[element, END] = s[BLOCKS]
    if s[SKIP] == element:
        s[SKIP] = -1
    if tag == T_A and s[IN_LINK] == element:
        s[IN_LINK] = 0
    if tag == T_PRE or tag == T_TEXTAREA:
        s[IN_PRE] -= 1
    elif tag == T_LI:
        s[NEXT_MARKER] = 0
    s[CURRENT] = page.elements[element, PARENT]


@njit(cache=True)
def _start_tag(page: Scan) -> None:
    s, html, elements = page.state, page.html, page.elements
    tag, name, at = _tag(page, s[AT] + 1)
    if IS_BLOCK[tag]:
        _boundary(page, BLANK if IS_SPACED[tag] else LINE)
    elif tag == T_A and s[AT] >= 4 and html[s[AT] - 2] == 97 and html[s[AT] - 3] == 47:
        s[SPACE] = 1  # links side by side are words of their own
    parent, element = s[CURRENT], s[ELEMENTS]
    s[ELEMENTS] += 1
    elements[element, TAG], elements[element, PARENT], elements[element, DEPTH] = tag, parent, elements[parent, DEPTH] + 1
    elements[element, FIRST], elements[element, TOKENS] = s[BLOCKS], s[TOKEN]
    elements[element, FLAGS] = elements[parent, FLAGS] | TAG_BIT[tag]
    elements[parent, CHILDREN] += 1
    page.signs[element, 0] = name
    s[CURRENT] = element
    s[AT] = _attributes(page, element, tag, at)
    page.signs[element, 1] = (page.signs[parent, 1] ^ page.signs[element, 0]) * PRIME
    if IS_RAW[tag]:
        _raw(page, tag, element)
    elif tag == T_TITLE:
        _title(page)
    else:
        _opened(page, tag, element)
        if IS_VOID[tag]:
            elements[element, END] = s[BLOCKS]
            s[CURRENT] = parent


@njit(cache=True)
def _opened(page: Scan, tag: int, element: int) -> None:
    """What the start of an element means for the text."""
    s = page.state
    if tag == T_BR:
        _boundary(page, LINE)
        s[BREAKS] += 1
        if s[BREAKS] > 1 and s[NEXT_GAP] == LINE:
            s[NEXT_GAP] = BLANK
    elif tag == T_A:
        s[IN_LINK] = element
        if s[OPEN]:
            page.blocks[s[BLOCKS], LINKS] += 1
        else:
            page.blocks[s[BLOCKS], LINKS] = 1
    elif tag == T_PRE or tag == T_TEXTAREA:
        s[IN_PRE] += 1
    elif tag == T_LI:
        parent = page.elements[element, PARENT]
        s[NEXT_MARKER] = page.elements[parent, CHILDREN] if page.elements[parent, TAG] == T_OL else -1
    elif tag == T_TR:
        s[ROW_CELLS] = 0
    elif tag == T_TD or tag == T_TH:
        if s[ROW_CELLS]:
            s[NEXT_GAP] = TAB
        s[ROW_CELLS] += 1
    elif tag == T_SVG or tag == T_HEAD:
        if s[SKIP] < 0:
            s[SKIP] = element
    elif tag == T_INPUT:
        page.blocks[s[BLOCKS], FORMS] += 1
    elif tag == T_IMG:
        page.blocks[s[BLOCKS], IMAGES] += 1
    elif s[OPEN] and not IS_BLOCK[tag]:
        page.blocks[s[BLOCKS], INLINE] += 1


@njit(cache=True)
def _raw(page: Scan, tag: int, element: int) -> None:
    """Skip the content of a script and its like; a formula in one is text, types of a linked-data description are about the page."""
    s, html = page.state, page.html
    start = at = s[AT]
    kind = page.elements[element, CHILDREN]  # set by the attributes: 1 formula, 2 linked data
    page.elements[element, CHILDREN] = 0
    while True:
        at = _find(html, at, 60)
        if at + 1 >= len(html):
            at = len(html)
            break
        if html[at + 1] == 47:
            if _tag(page, at + 2)[0] == tag:
                break
        at += 1
    if kind == 1:
        _formula(page, start, at)
    elif kind == 2:
        _types(page, start, at)
    s[AT] = at


@njit(cache=True)
def _title(page: Scan) -> None:
    """Keep the title's text."""
    s, html = page.state, page.html
    at = s[AT]
    stop = _find(html, at, 60)
    if s[TITLE_STOP] == 0:
        for here in range(at, min(stop, at + len(page.title))):
            page.title[here - at] = html[here]
        s[TITLE_STOP] = min(stop - at, len(page.title))
    s[AT] = stop


# --- attributes ------------------------------------------------------------------------------------------


@njit(cache=True)
def _attributes(page: Scan, element: int, tag: int, at: int) -> int:
    """Read the attributes from `at` on; returns where the tag ends."""
    html, s = page.html, page.state
    size = len(html)
    alt_start = alt_stop = 0
    maths = False
    about_start = about_stop = value_start = value_stop = 0
    while at < size and html[at] != 62:
        if html[at] <= 32 or html[at] == 47:
            at += 1
            continue
        name = OFFSET
        while at < size and html[at] != 61 and html[at] > 32 and html[at] != 62:
            name = (name ^ np.uint64(html[at])) * PRIME
            at += 1
        if at + 1 >= size or html[at] != 61 or html[at + 1] != 34:
            start = stop = at
        else:
            start = at + 2
            stop = _find(html, start, 34)
            at = stop + 1
        if name == A_CLASS:
            _words(page, element, start, stop, 0, True)
            maths = maths or (tag == T_IMG and (_has(html, start, stop, b"math") or _has(html, start, stop, b"tex")))
            if s[SKIP] < 0 and _unseen(html, start, stop, tag):
                s[SKIP] = element
        elif name == A_ID:
            _words(page, element, start, stop, 1, False)
        elif name == A_ROLE or name == A_ITEMPROP:
            _words(page, element, start, stop, 2, False)
        elif name == A_HIDDEN:
            page.elements[element, FLAGS] |= HIDDEN
        elif name == A_ARIA_HIDDEN:
            if stop > start and html[start] == 116:
                page.elements[element, FLAGS] |= ARIA_HIDDEN
        elif name == A_STYLE:
            if _has(html, start, stop, b"display:none") or _has(html, start, stop, b"display: none"):
                page.elements[element, FLAGS] |= HIDDEN
        elif (name == A_ALT and tag == T_IMG) or (name == A_ALTTEXT and tag == T_MATH):
            alt_start, alt_stop = start, stop
            maths = maths or tag == T_MATH
        elif name == A_TYPE and tag == T_SCRIPT:
            if _has(html, start, stop, b"math/tex"):
                page.elements[element, CHILDREN] = 1
            elif _has(html, start, stop, b"ld+json"):
                page.elements[element, CHILDREN] = 2
        elif (name == A_PROPERTY or name == A_NAME) and tag == T_META or name == A_REL and tag == T_LINK:
            about_start, about_stop = start, stop
        elif name == A_CONTENT and tag == T_META or name == A_HREF and tag == T_LINK:
            value_start, value_stop = start, stop
    at = min(at + 1, size)
    if value_stop > value_start and about_stop > about_start:
        if _has(html, about_start, about_stop, b"og:type"):
            _about(page, value_start, value_stop, 3)
        elif _has(html, about_start, about_stop, b"generator"):
            _about(page, value_start, min(value_stop, value_start + 6), 6)
        elif _has(html, about_start, about_stop, b"canonical"):
            _address(page, value_start, value_stop)
    if maths and alt_stop > alt_start:
        _formula(page, alt_start, alt_stop)
        if tag == T_MATH and s[SKIP] < 0:
            s[SKIP] = element
    elif tag == T_MATH and s[SKIP] < 0:
        _annotation(page, element, at)
    return at


@njit(cache=True)
def _unseen(html: NDArray[np.uint8], start: int, stop: int, tag: int) -> bool:
    """Whether a class names what is no text: marks of permanent links, edit links, the drawn twin of a formula."""
    if tag == T_A and (_has(html, start, stop, b"headerlink") or (stop - start == 6 and _has(html, start, stop, b"anchor"))):
        return True
    return _has(html, start, stop, b"mw-editsection") or _has(html, start, stop, b"katex-html") or _has(html, start, stop, b"mathjax_preview")


@njit(cache=True)
def _words(page: Scan, element: int, start: int, stop: int, kind: int, sign: bool) -> None:
    """Hashes of the words of a class or an id: letters only, cut where a capital begins."""
    s, html = page.state, page.html
    word, length = OFFSET ^ np.uint64(kind), 0
    total = np.uint64(0)
    lower = False
    for at in range(start, stop + 1):
        c = html[at] if at < stop else 32
        letter = 97 <= (c | 32) <= 122
        if length and (not letter or (lower and c < 97)):
            if length > 1 and s[TOKEN] - page.elements[element, TOKENS] < MAX_TOKENS:
                page.tokens[s[TOKEN]] = word
                s[TOKEN] += 1
                total += word * word
            word, length = OFFSET ^ np.uint64(kind), 0
        if letter:
            word = (word ^ np.uint64(c | 32)) * PRIME
            length += 1
        lower = letter and c >= 97
    if sign:
        page.signs[element, 0] = (page.signs[element, 0] ^ total) * PRIME


@njit(cache=True)
def _about(page: Scan, start: int, stop: int, kind: int) -> None:
    """A word about the page: the hash of html[start:stop]."""
    s = page.state
    if s[PAGE_TOKEN] < len(page.page):
        word = OFFSET ^ np.uint64(kind)
        for at in range(start, min(stop, start + 64)):
            word = (word ^ np.uint64(page.html[at])) * PRIME
        page.page[s[PAGE_TOKEN]] = word
        s[PAGE_TOKEN] += 1


@njit(cache=True)
def _address(page: Scan, start: int, stop: int) -> None:
    """The words of an address, after its host."""
    html = page.html
    at = _find(html, start, 58) + 3
    at = _find(html, at, 47)
    while at < stop:
        first = at + 1
        at = first
        while at < stop and 97 <= (html[at] | 32) <= 122:
            at += 1
        if at - first > 1 or (at == stop and first == stop):
            _about(page, first, at, 5)


@njit(cache=True)
def _types(page: Scan, start: int, stop: int) -> None:
    """The `@type`s of linked data."""
    html = page.html
    at = start
    while at + 8 < stop:
        at = _find(html, at, 64)
        if at + 8 < stop and html[at + 1] == 116 and html[at + 2] == 121 and html[at + 3] == 112 and html[at + 4] == 101 and html[at + 5] == 34:
            first = _find(html, at + 6, 34) + 1
            last = _find(html, first, 34)
            if last < stop and last - first < 40 and first - at < 16:
                _about(page, first, last, 4)
        at += 1


# --- text ------------------------------------------------------------------------------------------------


@njit(cache=True)
def _boundary(page: Scan, gap: int) -> None:
    """End the open block, if there is one; what stands before the next is at least `gap`."""
    s = page.state
    if s[OPEN]:
        block = page.blocks[s[BLOCKS]]
        block[STOP] = s[OUT]
        block[HASHES] = s[HASH]
        s[BLOCKS] += 1
        s[OPEN] = s[SPACE] = s[BREAKS] = 0
        s[NEXT_GAP] = gap
        page.blocks[s[BLOCKS], START] = s[OUT]
    elif s[NEXT_GAP] == LINE:
        s[NEXT_GAP] = gap


@njit(cache=True)
def _open(page: Scan) -> None:
    """Begin a block at the current element."""
    s = page.state
    block = page.blocks[s[BLOCKS]]
    element = s[CURRENT]
    while element > 0 and not IS_BLOCK[page.elements[element, TAG]]:
        element = page.elements[element, PARENT]
    block[ELEMENT], block[START], block[GAP], block[MARKER], block[PRE] = element, s[OUT], s[NEXT_GAP], s[NEXT_MARKER], s[IN_PRE] > 0
    if s[IN_LINK] and block[LINKS] == 0:
        block[LINKS] = 1
    s[OPEN], s[SPACE], s[NEXT_GAP], s[NEXT_MARKER] = 1, 0, LINE, 0


@njit(cache=True)
def _put(page: Scan, c: int) -> None:
    """Write one byte of text."""
    s = page.state
    page.text[s[OUT]] = c
    s[OUT] += 1


@njit(cache=True)
def _entity(html: NDArray[np.uint8], at: int, stop: int) -> tuple[int, int]:
    """The character of an entity at an ampersand, and its length; the serialisation has only four. 160: a space that does not break."""
    if at + 3 < stop and html[at + 2] == 116 and html[at + 3] == 59:
        if html[at + 1] == 108:
            return 60, 4
        if html[at + 1] == 103:
            return 62, 4
    if at + 4 < stop and html[at + 1] == 97 and html[at + 2] == 109 and html[at + 3] == 112 and html[at + 4] == 59:
        return 38, 5
    if at + 5 < stop and html[at + 1] == 110 and html[at + 2] == 98 and html[at + 3] == 115 and html[at + 4] == 112 and html[at + 5] == 59:
        return 32, 6
    if at + 5 < stop and html[at + 1] == 113 and html[at + 2] == 117 and html[at + 3] == 111 and html[at + 4] == 116 and html[at + 5] == 59:
        return 34, 6
    return 38, 1


@njit(cache=True)
def _text(page: Scan) -> None:
    """The text up to the next tag."""
    s, html = page.state, page.html
    stop = _find(html, s[AT], 60)
    if s[SKIP] < 0:
        _write(page, s[AT], stop)
    s[AT] = stop


@njit(cache=True)
def _write(page: Scan, start: int, stop: int) -> None:
    """html[start:stop] as text of the open block, which begins with its first visible character."""
    s, html, blocks = page.state, page.html, page.blocks
    at = start
    word = OFFSET
    in_word = False
    while at < stop:
        c, length = np.int64(html[at]), 1
        if c == 38:
            c, length = _entity(html, at, stop)
        at += length
        if c <= 32:
            if in_word:
                _word(page, word)
                word, in_word = OFFSET, False
            if s[IN_PRE] and (s[OPEN] or c == 32 or c == 9):
                if not s[OPEN]:
                    s[VERBATIM] += 1  # indentation before the first visible character
                elif c != 13:
                    _put(page, c)
            else:
                s[SPACE] = 1
                s[VERBATIM] = 0
            continue
        if not s[OPEN]:
            _open(page)
            if s[IN_PRE]:
                for _ in range(min(s[VERBATIM], 200)):
                    _put(page, 32)
            s[VERBATIM] = 0
        elif s[SPACE]:
            _put(page, 32)
        s[SPACE] = 0
        _put(page, c)
        block = blocks[s[BLOCKS]]
        block[LAST] = c
        linked = s[IN_LINK] > 0
        if c < 128 or c >= 192:
            block[CHARS] += 1
            block[LINKED_CHARS] += linked
        if 97 <= c <= 122 or c >= 128:
            word, in_word = (word ^ np.uint64(c)) * PRIME, True
            if 0xE3 <= c <= 0xED:  # most letters of Chinese, Japanese and Korean: two make a word, about
                block[WORDS] += at & 1
        elif 65 <= c <= 90:
            word, in_word = (word ^ np.uint64(c | 32)) * PRIME, True
            block[UPPER] += 1
        elif 48 <= c <= 57:
            word, in_word = (word ^ np.uint64(48)) * PRIME, True
            block[DIGITS] += 1
        else:
            if in_word:
                _word(page, word)
                word, in_word = OFFSET, False
            if c == 44:
                block[COMMAS] += 1
            elif c == 46 or c == 33 or c == 63 or c == 59 or c == 58:
                block[STOPS] += 1
    if in_word:
        _word(page, word)


@njit(cache=True)
def _word(page: Scan, word: np.uint64) -> None:
    s = page.state
    block = page.blocks[s[BLOCKS]]
    block[WORDS] += 1
    block[LINKED_WORDS] += s[IN_LINK] > 0
    if s[HASH] < len(page.hashes):
        page.hashes[s[HASH]] = word
        s[HASH] += 1


@njit(cache=True)
def _formula(page: Scan, start: int, stop: int) -> None:
    """Write a formula, unless it is the twin of the one just written."""
    s = page.state
    if s[SKIP] >= 0 or (s[OPEN] and s[FORMULA_AT] == s[OUT]):
        return
    s[SPACE] = 1
    _write(page, start, stop)
    s[SPACE] = 1
    s[FORMULA_AT] = s[OUT]


@njit(cache=True)
def _annotation(page: Scan, element: int, at: int) -> None:
    """Take a formula's TeX annotation, where it has one, for its text."""
    html = page.html
    stop = at
    while stop < len(html):
        stop = _find(html, stop, 60)
        if stop + 6 < len(html) and html[stop + 1] == 47 and _has(html, stop + 2, stop + 6, b"math"):
            break
        if stop + 11 < len(html) and _has(html, stop + 1, stop + 11, b"annotation") and html[stop + 11] == 32:
            end = _find(html, stop, 62)
            if _has(html, stop, end, b"x-tex"):
                _formula(page, end + 1, _find(html, end + 1, 60))
                page.state[SKIP] = element
                return
        stop += 1
