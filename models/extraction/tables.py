"""Data tables in a page's text: each row on one line, each cell in its column, also with `colspan` and `rowspan`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from puna.kernels.cpu.numba_cache import njit
from puna.models.extraction import layout as L
from puna.models.extraction.layout import Scan
from puna.models.extraction.tags import NUMBER

CELL_BYTES = 200  # maximum bytes of a data cell: longer cells belong to layout tables and get lines of their own
MAX_COLUMNS = 63  # bits of a mask; cells beyond share the last column
MAX_GROUPS = 1000  # maximum groups of rows with a `rowspan` on one page; further groups ignore `rowspan`
T_TABLE, T_TR, T_TD, T_TH = (NUMBER[name] for name in ["table", "tr", "td", "th"])
IN_CELL = L.BIT["td"] | L.BIT["th"]


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
    two kept cells. If a row has one kept cell, only the cell's first block has a column, so that the cell's lines stay apart.
    """
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
