"""Writing of a page's text: from the HTML between tags into blocks, and from the kept blocks into one text; cells of data tables."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Pages, Scan, alone, page_of
from puna.models.extraction.tags import NUMBER, OFFSET, PRIME, begins, find, has

CELL_BYTES = 200  # maximum bytes of a data cell: longer cells belong to layout tables and get lines of their own
MAX_COLUMNS = 63  # bits of a mask; cells beyond share the last column
MAX_GROUPS = 1000  # maximum groups of rows with a `rowspan` on one page; further groups ignore `rowspan`
T_TABLE, T_TR, T_TD, T_TH = (NUMBER[name] for name in ["table", "tr", "td", "th"])
IN_CELL, IN_TABLE = L.BIT["td"] | L.BIT["th"], L.BIT["table"]


@njit(cache=True)
def _grid(page: Scan) -> NDArray[np.int64]:
    """Return the first column of each cell [elements], as HTML places cells; a `rowspan` ends with its group of rows (`tbody`)."""
    elements, n = page.elements, len(page.elements)
    column, number, slot, slots = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.int64), 0
    for e in range(n):
        group = elements[elements[e, L.PARENT], L.PARENT]
        if elements[e, L.SPANS] >> 16 and group > 0 and slot[group] == 0 and slots < MAX_GROUPS:
            slots += 1
            slot[group] = slots
    covered = np.zeros((slots + 1, MAX_COLUMNS), np.int64)  # first row in which a column is free again
    for e in range(n):
        tag, row = elements[e, L.TAG], elements[e, L.PARENT]
        if tag == T_TR:  # `number`: rows so far of a group, index of a row; `column` of a row: its next column
            number[e] = number[row]
            number[row] += 1
        elif tag in (T_TD, T_TH) and row >= 0 and elements[row, L.TAG] == T_TR:
            spans, place = covered[slot[elements[row, L.PARENT]]], column[row]
            while place < MAX_COLUMNS - 1 and spans[place] > number[row]:
                place += 1
            column[e] = place
            column[row] = min(place + max(1, elements[e, L.SPANS] & 0xFFFF), MAX_COLUMNS - 1)
            rows = elements[e, L.SPANS] >> 16
            if rows and slot[elements[row, L.PARENT]]:
                spans[place : column[row]] = number[row] + rows
    return column


@njit(cache=True)
def data_cells(page: Scan, keep: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each kept block's table cell [blocks], -1 for none, and the cell's column if its row holds data, else -1.

    Columns in which no kept cell begins are not counted. A row holds data if all its kept cells are short and some row of its table has
    two kept cells. If a row has one kept cell, only the cell's first block has a column, so that the cell's lines stay apart."""
    elements, blocks, n = page.elements, page.blocks, len(keep)
    cells, columns = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    inside = [b for b in range(n) if keep[b] and elements[blocks[b, L.ELEMENT], L.FLAGS] & IN_CELL]
    if len(inside) == 0:
        return cells, columns
    grid, size, count = _grid(page), np.zeros(len(elements), np.int64), np.zeros(len(elements), np.int64)
    long, masks, tables = np.zeros(len(elements), np.bool_), np.zeros(len(elements), np.int64), np.zeros(n, np.int64)
    for b in inside:
        e = blocks[b, L.ELEMENT]
        while e > 0 and elements[e, L.TAG] != T_TD and elements[e, L.TAG] != T_TH:
            e = elements[e, L.PARENT]
        row = elements[e, L.PARENT]
        if e <= 0 or elements[row, L.TAG] != T_TR:
            continue
        above = elements[row, L.PARENT]
        while above > 0:
            tables[b] = above if tables[b] == 0 and elements[above, L.TAG] == T_TABLE else tables[b]
            long[above] = True  # a row around a table is not a data row
            above = elements[above, L.PARENT]
        cells[b], count[row] = e, count[row] + (size[e] == 0)
        size[e] += blocks[b, L.STOP] - blocks[b, L.START]
        long[row] |= size[e] > CELL_BYTES or blocks[b, L.PRE] != 0
    for b in inside:
        row = elements[cells[b], L.PARENT]
        if cells[b] >= 0 and not long[row]:  # the last bit is not a column: it is set if the table has data
            masks[tables[b]] |= 1 << grid[cells[b]] | int(count[row] > 1) << MAX_COLUMNS - 1
    before = -1
    for b in inside:
        cell, row = cells[b], elements[cells[b], L.PARENT]
        if cell >= 0 and not long[row] and masks[tables[b]] >> MAX_COLUMNS - 1 and (count[row] > 1 or cell != before):
            columns[b], mask = 0, masks[tables[b]] & (1 << grid[cell]) - 1
            while mask:
                columns[b], mask = columns[b] + 1, mask & (mask - 1)
        before = cell
    return cells, columns


MAX_INDENT = 200  # maximum spaces written before the first visible character of a block in <pre>
FIRST_MARK = 0xD8  # lowest first byte of the non-ASCII punctuation in `_mark`; `_in_word` counts its bytes as letters
# The value that an ASCII byte adds to a word's hash: a letter in lower case, 48 for any digit, 0 for a byte outside words.
LETTERS = np.array([(c | 32 if chr(c).isalpha() else 48 * chr(c).isdigit()) if c < 128 else 0 for c in range(256)], np.uint8)


@njit(cache=True, borrows=True)
def boundary(page: Scan, gap: int) -> None:
    """End the open block, if any, and set the gap before the next block. If no block is open, replace only the default gap, LINE."""
    s = page.state
    if s[L.OPEN]:
        block = page.blocks[s[L.BLOCKS]]
        block[L.STOP] = s[L.OUT]
        block[L.HASHES] = s[L.HASH]
        s[L.BLOCKS] += 1
        s[L.OPEN] = s[L.SPACE] = s[L.BREAKS] = 0
        s[L.NEXT_GAP] = gap
        page.blocks[s[L.BLOCKS]] = 0
        page.blocks[s[L.BLOCKS], L.START] = s[L.OUT]
    elif s[L.NEXT_GAP] == L.LINE:
        s[L.NEXT_GAP] = gap


@njit(cache=True, borrows=True)
def _open(page: Scan) -> None:
    s = page.state
    block = page.blocks[s[L.BLOCKS]]
    block[L.ELEMENT], block[L.START], block[L.GAP] = page.elements[s[L.CURRENT], L.HOLDER], s[L.OUT], s[L.NEXT_GAP]
    block[L.MARKER], block[L.PRE] = s[L.NEXT_MARKER], s[L.IN_PRE] > 0
    if s[L.IN_LINK] and block[L.LINKS] == 0:
        block[L.LINKS] = 1
    s[L.OPEN], s[L.SPACE], s[L.NEXT_GAP], s[L.NEXT_MARKER] = 1, 0, L.LINE, 0


@njit(cache=True, borrows=True)
def _entity(html: NDArray[np.uint8], at: int, stop: int) -> tuple[int, int]:
    """Return (character code, length) of the entity at an ampersand. The serializer writes only the five below; &nbsp; becomes a space."""
    if begins(html, at, stop, b"&lt;"):
        return 60, 4
    if begins(html, at, stop, b"&gt;"):
        return 62, 4
    if begins(html, at, stop, b"&amp;"):
        return 38, 5
    if begins(html, at, stop, b"&nbsp;"):
        return 32, 6
    return (34, 6) if begins(html, at, stop, b"&quot;") else (38, 1)


@njit(cache=True, borrows=True)
def write(page: Scan, start: int, stop: int) -> None:
    """Write html[start:stop] as text of the open block; if none is open, the first visible character opens one. Counts stay in local
    variables until the end: passing the page to a function for each byte takes forty times as long."""
    s, html, text, hashes = page.state, page.html, page.text, page.hashes
    out, place, opened, space, verbatim = s[L.OUT], s[L.HASH], s[L.OPEN], s[L.SPACE], s[L.VERBATIM]
    chars = words = wide = upper = digits = commas = stops = last = 0
    word, in_word, at = OFFSET, False, start
    while at < stop:
        c, length = np.int64(html[at]), 1
        if c == 38:
            c, length = _entity(html, at, stop)
        at += length
        if (c < 32 and not 9 <= c <= 13) or c == 127:
            continue  # control characters are not written
        kind = _in_word(c)
        if in_word and not kind:
            words, place = words + 1, _add_hash(hashes, place, word)
            word, in_word = OFFSET, False
        if c <= 32:
            if s[L.IN_PRE] and (opened or c == 32 or c == 9):
                if not opened:
                    verbatim += 1  # indentation before the first visible character
                elif c != 13:
                    text[out] = c
                    out += 1
            else:
                space, verbatim = 1, 0
            continue
        if not opened:
            out, opened, verbatim = _begin(page, out, verbatim), 1, 0
        elif space:
            text[out] = 32
            out += 1
        text[out] = c
        out, space, last = out + 1, 0, int(c) if c < 128 or c >= 192 else last
        chars += int(c < 128 or c >= 192)
        if 0 < kind < 128:
            word, in_word = (word ^ np.uint64(kind)) * PRIME, True
            upper, digits = upper + int(c <= 90 and c >= 65), digits + int(kind == 48)
            while at < stop and LETTERS[html[at]]:  # the rest of the word: most bytes are handled here
                last = int(html[at])
                kind = int(LETTERS[last])
                text[out], word = last, (word ^ np.uint64(kind)) * PRIME
                upper += int(last <= 90 and last >= 65)
                digits += kind == 48
                out, at, chars = out + 1, at + 1, chars + 1
        elif kind:
            word, in_word = (word ^ np.uint64(kind)) * PRIME, True
            if c >= FIRST_MARK:
                mark = _mark(html, at, c)
                commas, stops, last = commas + (mark == 44), stops + (mark > 0 and mark != 44), mark if mark else last
            wide += _part_of_word(html, at, c)
        else:
            commas += c == 44
            stops += c == 33 or c == 46 or c == 58 or c == 59 or c == 63
    if in_word:
        words, place = words + 1, _add_hash(hashes, place, word)
    s[L.OUT], s[L.HASH], s[L.SPACE], s[L.VERBATIM] = out, place, space, verbatim
    if chars or last:
        _count(page, last, chars, words + wide, upper, digits, commas, stops)


@njit(cache=True, borrows=True)
def _begin(page: Scan, out: int, indent: int) -> int:
    """Open a block at `out` and, in <pre>, write its indentation; return the place of its first visible character."""
    page.state[L.OUT] = out
    _open(page)
    for _ in range(min(indent, MAX_INDENT) if page.state[L.IN_PRE] else 0):
        page.text[out] = 32
        out += 1
    return out


@njit(cache=True, borrows=True)
def _count(page: Scan, last: int, chars: int, words: int, upper: int, digits: int, commas: int, stops: int) -> None:
    """Add the counts of the text just written to the open block's counts; set the block's last character."""
    block = page.blocks[page.state[L.BLOCKS]]
    block[L.LAST] = last
    block[L.CHARS] += chars
    block[L.WORDS] += words
    block[L.UPPER] += upper
    block[L.DIGITS] += digits
    block[L.COMMAS] += commas
    block[L.STOPS] += stops
    if page.state[L.IN_LINK]:
        block[L.LINKED_CHARS] += chars
        block[L.LINKED_WORDS] += words


@njit(cache=True, borrows=True)
def _mark(html: NDArray[np.uint8], at: int, first: int) -> int:
    """Return the ASCII code of the comma or final mark (. ! ?) that equals a mark of another script, else 0. `first`: the mark's first
    byte, html[at - 1]."""
    second, third = int(html[at]) if at < len(html) else 0, int(html[at + 1]) if at + 1 < len(html) else 0
    if first == 0xE3 and second == 0x80:  # Chinese and Japanese
        return 44 if third == 0x81 else 46 if third == 0x82 else 0
    if first == 0xEF and second == 0xBC:  # full-width forms of ASCII
        mark = third - 0x81 + 33
        return mark if mark == 33 or mark == 44 or mark == 46 or mark == 63 else 0
    if first == 0xE0 and second == 0xA5:  # danda and double danda, of Devanagari and other scripts of India
        return 46 if third == 0xA4 or third == 0xA5 else 0
    if first == 0xD8:  # Arabic
        return 44 if second == 0x8C else 63 if second == 0x9F else 0
    return 46 if first == 0xDB and second == 0x94 else 0  # Urdu


@njit(cache=True, borrows=True)
def _part_of_word(html: NDArray[np.uint8], at: int, first: int) -> int:
    """Return 1 at about one letter per word in scripts without spaces, else 0: the sum estimates the word count. `first`: html[at - 1]."""
    if 0xE3 <= first <= 0xED:  # most Chinese, Japanese and Korean letters: about two per word
        return at & 1
    if (first != 0xE0 and first != 0xE1) or at >= len(html):
        return 0
    second = int(html[at])  # Thai and Lao, or Burmese and Khmer: about four letters and marks per word, three bytes each
    unspaced = 0xB8 <= second <= 0xBB if first == 0xE0 else 0x80 <= second <= 0x82 or 0x9E <= second <= 0x9F
    return int(unspaced and at & 3 == 0)


@njit(cache=True, borrows=True)
def _in_word(c: int) -> int:
    """Return the value that a byte adds to a word's hash: its entry in `LETTERS`, or the byte itself from 128 on."""
    return c if c >= 128 else int(LETTERS[c])


@njit(cache=True, borrows=True)
def _add_hash(hashes: NDArray[np.uint64], place: int, word: np.uint64) -> int:
    """Store the hash of a word if there is room; return the place of the next hash."""
    if place == len(hashes):
        return place
    hashes[place] = word
    return place + 1


@njit(cache=True, borrows=True)
def formula(page: Scan, start: int, stop: int) -> None:
    """Write the formula html[start:stop], unless it is skipped or directly follows another formula: both then show the same one."""
    s = page.state
    if s[L.SKIP] >= 0 or (s[L.OPEN] and s[L.FORMULA_AT] == s[L.OUT]):
        return
    s[L.SPACE] = 1
    write(page, start, stop)
    s[L.SPACE] = 1
    s[L.FORMULA_AT] = s[L.OUT]


@njit(cache=True, borrows=True)
def annotation(page: Scan, element: int, at: int) -> None:
    """Write the TeX annotation of the formula `element`, if it has one, and skip the rest of the formula."""
    html, s = page.html, page.state
    if at < s[L.PLAIN_STOP]:
        return  # inside a formula that was already searched and has no TeX annotation
    stop = at
    while stop < len(html):
        stop = find(html, stop, 60)
        if stop + 6 < len(html) and html[stop + 1] == 47 and has(html, stop + 2, stop + 6, b"math"):
            break
        if stop + 11 < len(html) and has(html, stop + 1, stop + 11, b"annotation") and html[stop + 11] == 32:
            end = find(html, stop, 62)
            if has(html, stop, end, b"x-tex"):
                formula(page, end + 1, find(html, end + 1, 60))
                s[L.SKIP] = element
                return
        stop += 1
    s[L.PLAIN_STOP] = stop


def text_of(page: Scan, keep: NDArray[np.bool_]) -> str:
    """Return the kept blocks' text, with blank lines between paragraphs, tabs between cells, and numbers or bullets before list items."""
    return texts_of(alone(page), keep)[0].tobytes().decode("utf-8", "replace")  # type: ignore[no-any-return]


@njit(cache=True)
def texts_of(pages: Pages, keep: NDArray[np.bool_]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the pages' texts in one array, and the offsets [pages + 1] of their starts and end. `keep`: bool, by block of all pages."""
    n, starts = len(pages.starts) - 1, pages.starts[:, L.BLOCK]
    out, ends = np.empty(len(pages.text) + (16 + MAX_COLUMNS) * len(keep) + 16, np.uint8), np.zeros(n + 1, np.int64)
    for number in range(n):
        page, own = page_of(pages, number), keep[starts[number] : starts[number + 1]]
        ends[number + 1] = _join(page, own, data_cells(page, own), out, ends[number])
    return out[: ends[n]], ends


@njit(cache=True, borrows=True)
def _join(page: Scan, keep: NDArray[np.bool_], places: tuple[NDArray[np.int64], NDArray[np.int64]], out: NDArray[np.uint8], at: int) -> int:
    """Write a page's text to `out` from `at` on; return its end. `places`: the blocks' cells and columns, from `data_cells`."""
    blocks, elements, (cells, columns) = page.blocks, page.elements, places
    before = -1  # bytes of the previous kept block
    cell = row = column = -1  # of that block
    gap, table = L.TAB, np.int64(0)  # `table`: not 0 if that block is in a table
    for b in range(len(blocks)):
        here = blocks[b, L.GAP]
        if here == L.BLANK or gap == L.BLANK:
            gap = L.BLANK
        elif here == L.LINE:
            gap = L.LINE
        if not keep[b]:
            continue
        size = blocks[b, L.STOP] - blocks[b, L.START]
        own = elements[cells[b], L.PARENT] if cells[b] >= 0 else -1
        data, tabs = columns[b] >= 0 and column >= 0, columns[b]
        if data and own == row:
            tabs = max(1, tabs - column) if cell != cells[b] else 0
            out[at], at = 32, at + (cell == cells[b])
        elif before >= 0 and own >= 0 and own == row and gap == L.TAB and before <= CELL_BYTES and size <= CELL_BYTES:
            tabs = 1
        elif before >= 0:
            apart = (gap == L.BLANK or table != IN_TABLE & elements[blocks[b, L.ELEMENT], L.FLAGS]) and not (
                data and elements[own, L.PARENT] == elements[row, L.PARENT]
            )
            out[at], out[at + 1] = 10, 10
            at += 1 + apart
        for _ in range(tabs):
            out[at] = 9
            at += 1
        at = _item_mark(out, at, blocks[b, L.MARKER])
        for k in range(blocks[b, L.START], blocks[b, L.STOP]):
            out[at] = page.text[k]
            at += 1
        before, gap, cell, row, column = size, L.TAB, cells[b], own, columns[b]
        table = IN_TABLE & elements[blocks[b, L.ELEMENT], L.FLAGS]
    return at


@njit(cache=True, borrows=True)
def _item_mark(out: NDArray[np.uint8], at: int, marker: int) -> int:
    """Write a list item's bullet (`marker` < 0) or number (> 0), or nothing (0); return the end of the mark."""
    if marker < 0:
        for byte in b"\xe2\x80\xa2 ":
            out[at] = byte
            at += 1
    elif marker > 0:
        digits = 1
        while marker >= 10**digits:
            digits += 1
        for k in range(digits):
            out[at + digits - 1 - k] = 48 + marker // 10**k % 10
        at += digits
        out[at], out[at + 1] = 46, 32
        at += 2
    return at
