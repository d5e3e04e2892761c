"""The tables into which `scan` reads pages (elements, blocks of text, words), and sums over rows with equal keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction.tags import NAMES

# Columns of `elements`
TAG, PARENT, DEPTH, FIRST, END, FLAGS, TOKENS, CHILDREN, HOLDER, SPANS, COLUMNS = range(11)
# HOLDER: the innermost block element, itself included. SPANS: a cell's `colspan` (low 16 bits) and `rowspan` (high bits), 0 if absent.
# Columns of `blocks`. LAST: the last byte, HASHES: where the block's words end in `hashes`.
ELEMENT, START, STOP, GAP, MARKER, WORDS, CHARS, LINKED_CHARS, LINKED_WORDS, LINKS = range(10)
STOPS, COMMAS, DIGITS, UPPER, INLINE, IMAGES, PRE, FORMS, LAST, HASHES = range(10, 20)
# Gaps between a block and the block before
LINE, BLANK, TAB = 0, 1, 2
# Entries of `state`: how far the page is read and what is open. An element is given by its number, -1 for none.
AT, OUT, BLOCKS, ELEMENTS, TOKEN, HASH, CURRENT, OPEN, SPACE, NEXT_GAP, NEXT_MARKER = range(11)
IN_PRE, IN_LINK, SKIP, ROW_CELLS, FORMULA_AT, TITLE_STOP, PAGE_TOKEN, BREAKS, VERBATIM, MATHS = range(11, 21)
ABOUT, ABOUT_STOP, VALUE, VALUE_STOP = range(21, 25)  # attributes of the current tag
PLAIN_STOP, STATES = range(25, 27)  # index before which no formula has an annotation; number of entries
# Columns of `Pages.starts`
HTML, TEXT, TITLE, ROOT, WORD, BLOCK, TEXT_WORD, HEAD_WORD, TABLES = range(9)
# Bits of an element's flags; an element also has its ancestors' flags.
FLAG_NAMES = (
    "nav header footer aside form main article section table ul ol li dl figure figcaption button dialog details blockquote pre select "
    "noscript template a td th label code body h1 h2 h3 h4 h5 h6 p textarea menu fieldset address caption dt dd summary thead"
)
BIT = {name: 1 << number for number, name in enumerate(FLAG_NAMES.split())}
HIDDEN, ARIA_HIDDEN = 1 << 50, 1 << 51
TAG_BIT = np.array([BIT.get(name, 0) for name in NAMES], np.int64)
PROBES = 32  # slots tried for a key before all keys are sorted
MAX_TOKENS = 24  # words of one element's classes and id
MAX_TITLE = 1024  # bytes of a title
MAX_HEAD_WORDS = 256  # words about the page from its head


class Scan(NamedTuple):
    """A page's HTML, the state of reading, and the tables read so far; their columns are listed above."""

    html: NDArray[np.uint8]
    state: NDArray[np.int64]
    text: NDArray[np.uint8]
    title: NDArray[np.uint8]
    elements: NDArray[np.int64]
    signs: NDArray[np.uint64]  # per element: hash of tag and class words (sign); hash of the signs from the root (path)
    tokens: NDArray[np.uint64]  # words of classes, ids and roles, element after element
    blocks: NDArray[np.int64]
    hashes: NDArray[np.uint64]  # words of the text, block after block
    page: NDArray[np.uint64]  # words about the page from its head


class Pages(NamedTuple):
    """Pages after reading: the tables of `Scan`, page after page. Indices of elements, blocks and bytes start at 0 in each page's part."""

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
    a, z = pages.starts[number], pages.starts[number + 1]
    return Scan(
        pages.html[a[HTML] : z[HTML]], pages.states[number], pages.text[a[TEXT] : z[TEXT]], pages.title[a[TITLE] : z[TITLE]],
        pages.elements[a[ROOT] : z[ROOT]], pages.signs[a[ROOT] : z[ROOT]], pages.tokens[a[WORD] : z[WORD]],
        pages.blocks[a[BLOCK] : z[BLOCK]], pages.hashes[a[TEXT_WORD] : z[TEXT_WORD]], pages.page[a[HEAD_WORD] : z[HEAD_WORD]],
    )  # fmt: skip


def alone(page: Scan) -> Pages:
    tables = (page.html, page.text, page.title, page.elements, page.tokens, page.blocks, page.hashes, page.page)
    return Pages(*page._replace(state=page.state[None]), np.array([[0] * TABLES, [len(table) for table in tables]], np.int64))


@njit(cache=True)
def running(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of the first 0, 1, ... n values."""
    sums = np.zeros(len(values) + 1, values.dtype)
    sums[1:] = np.cumsum(values)
    return sums


@njit(cache=True)
def deepest(page: Scan, sums: NDArray[np.int64], share: float) -> tuple[int, int]:
    """Return the first block and the end of the deepest element with at least this share of the total, sums[-1]; (0, 0) if that is 0."""
    first, end = 0, 0
    for e in range(len(page.elements)):
        a, z = page.elements[e, FIRST], page.elements[e, END]
        if z > a and sums[z] > sums[a] and sums[z] - sums[a] >= share * sums[-1]:
            first, end = a, z
    return first, end


@njit(cache=True)
def numbers_of(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int]:
    """Return a number for each key, the same for equal keys; and the number of distinct keys."""
    n, size, count = len(keys), 2, 0
    while size < 2 * n:
        size *= 2
    places, own, numbers = np.full(size, -1, np.int64), np.empty(n, np.uint64), np.empty(n, np.int64)
    for k in range(n):
        at, probes = np.int64((keys[k] ^ (keys[k] >> np.uint64(32))) & np.uint64(size - 1)), 0
        while places[at] >= 0 and own[places[at]] != keys[k]:
            at, probes = (at + 1) & (size - 1), probes + 1
            if probes == PROBES:  # too many keys collide
                return _numbered_by_order(keys)  # type: ignore[no-any-return]
        if places[at] < 0:
            places[at], own[count] = count, keys[k]
            count += 1
        numbers[k] = places[at]
    return numbers, count


@njit(cache=True)
def _numbered_by_order(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], int]:
    """Return a number for each key, as `numbers_of` does, but in the order of the keys, and in n log n steps for any keys."""
    order, numbers, count = np.argsort(keys), np.empty(len(keys), np.int64), 0
    for k in range(len(order)):
        count += k == 0 or keys[order[k]] != keys[order[k - 1]]
        numbers[order[k]] = count - 1
    return numbers, count


@njit(cache=True)
def groups(keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, for each entry of `keys`, the number of entries with the same key, and the number of such entries before it."""
    numbers, count = numbers_of(keys)
    sizes, before = np.zeros(count, np.int64), np.empty(len(keys), np.int64)
    for k in range(len(keys)):
        before[k] = sizes[numbers[k]]
        sizes[numbers[k]] += 1
    return sizes[numbers], before


@njit(cache=True)
def group_sums(keys: NDArray[np.uint64], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return, for each row of `values` [n, k], the sum of all rows with the same key [n, k], added in order."""
    numbers, count = numbers_of(keys)
    sums, out = np.zeros((count, values.shape[1]), np.float32), np.empty(values.shape, np.float32)
    for k in range(len(keys)):
        for column in range(values.shape[1]):
            sums[numbers[k], column] += values[k, column]
    for k in range(len(keys)):
        out[k] = sums[numbers[k]]
    return out


@njit(cache=True)
def ratio(a: float, b: float) -> float:
    """Return a / b, or 0 if b is not positive."""
    return a / b if b > 0 else 0.0
