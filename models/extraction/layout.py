"""The tables that pages are read into: elements, blocks of text, words. See `scan`."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.tags import NAMES

# Columns of `elements`
TAG, PARENT, DEPTH, FIRST, END, FLAGS, TOKENS, CHILDREN, HOLDER, COLUMNS = range(10)  # HOLDER: the innermost block element
# Columns of `blocks`. LAST: the last byte, HASHES: where the block's words end in `hashes`.
ELEMENT, START, STOP, GAP, MARKER, WORDS, CHARS, LINKED_CHARS, LINKED_WORDS, LINKS = range(10)
STOPS, COMMAS, DIGITS, UPPER, INLINE, IMAGES, PRE, FORMS, LAST, HASHES = range(10, 20)
# What stands between a block and the one before
LINE, BLANK, TAB = 0, 1, 2
# Entries of `state`: how far the page is read and what is open. Elements are numbers, -1 is none.
AT, OUT, BLOCKS, ELEMENTS, TOKEN, HASH, CURRENT, OPEN, SPACE, NEXT_GAP, NEXT_MARKER = range(11)
IN_PRE, IN_LINK, SKIP, ROW_CELLS, FORMULA_AT, TITLE_STOP, PAGE_TOKEN, BREAKS, VERBATIM, MATHS = range(11, 21)
ABOUT, ABOUT_STOP, VALUE, VALUE_STOP = range(21, 25)  # attributes of the tag that is read
PLAIN_STOP, STATES = range(25, 27)  # before it no formula has an annotation; how many entries
# Columns of `Pages.starts`
HTML, TEXT, TITLE, ROOT, WORD, BLOCK, TEXT_WORD, HEAD_WORD, TABLES = range(9)
# Bits of an element's flags; an element has those of its ancestors as well.
FLAG_NAMES = [
    "nav",
    "header",
    "footer",
    "aside",
    "form",
    "main",
    "article",
    "section",
    "table",
    "ul",
    "ol",
    "li",
    "dl",
    "figure",
    "figcaption",
    "button",
    "dialog",
    "details",
    "blockquote",
    "pre",
    "select",
    "noscript",
    "template",
    "a",
    "td",
    "th",
    "label",
    "code",
    "body",
    "h1",
    "h2",
    "h3",
    "h4",
    "h5",
    "h6",
    "p",
    "textarea",
    "menu",
    "fieldset",
    "address",
    "caption",
    "dt",
    "dd",
    "summary",
    "thead",
]
BIT = {name: 1 << number for number, name in enumerate(FLAG_NAMES)}
HIDDEN, ARIA_HIDDEN = 1 << 50, 1 << 51
TAG_BIT = np.array([BIT.get(name, 0) for name in NAMES], np.int64)
MAX_TOKENS = 24  # words of one element's classes and id
MAX_TITLE = 1024  # bytes of a title
MAX_HEAD_WORDS = 256  # words about the page from its head
OFFSET, PRIME = np.uint64(0xCBF29CE484222325), np.uint64(0x100000001B3)  # of the FNV-1a hash


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


class Pages(NamedTuple):
    """Pages that are read: the tables of `Scan`, page after page; numbers of elements, blocks and places are those in a page's own part."""

    html: NDArray[np.uint8]
    states: NDArray[np.int64]  # [pages, STATES]
    text: NDArray[np.uint8]
    title: NDArray[np.uint8]
    elements: NDArray[np.int64]
    signs: NDArray[np.uint64]
    tokens: NDArray[np.uint64]
    blocks: NDArray[np.int64]
    hashes: NDArray[np.uint64]
    page: NDArray[np.uint64]
    starts: NDArray[np.int64]  # [pages + 1, TABLES] where the part of each page begins


@njit(cache=True)
def page_of(pages: Pages, number: int) -> Scan:
    """Return one of the pages."""
    a, z = pages.starts[number], pages.starts[number + 1]
    return Scan(
        pages.html[a[HTML] : z[HTML]],
        pages.states[number],
        pages.text[a[TEXT] : z[TEXT]],
        pages.title[a[TITLE] : z[TITLE]],
        pages.elements[a[ROOT] : z[ROOT]],
        pages.signs[a[ROOT] : z[ROOT]],
        pages.tokens[a[WORD] : z[WORD]],
        pages.blocks[a[BLOCK] : z[BLOCK]],
        pages.hashes[a[TEXT_WORD] : z[TEXT_WORD]],
        pages.page[a[HEAD_WORD] : z[HEAD_WORD]],
    )


def alone(page: Scan) -> Pages:
    """Return a page as pages."""
    tables = (page.html, page.text, page.title, page.elements, page.tokens, page.blocks, page.hashes, page.page)
    ends = [len(table) for table in tables]
    return Pages(*page._replace(state=page.state[None]), np.array([[0] * TABLES, ends], np.int64))
