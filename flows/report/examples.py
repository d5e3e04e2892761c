"""Three examples of many rows, by a number: smallest, middle and largest, found without holding all rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

SAMPLED = 500
PLACES = ("closest to the threshold", "in the middle", "farthest from it")
Row = dict[str, Any]


class Among:
    """Rows of a table, taken in the order of their ids.

    The middle is that of the first `SAMPLED` rows: ids are hashes, so that these are as good as drawn.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._numbered = True
        self._first: list[pa.Table] = []
        self._numbers: list[float] = []
        self._least: tuple[float, Row] | None = None
        self._most: tuple[float, Row] | None = None

    def add(self, rows: pa.Table, numbers: NDArray[np.float64]) -> None:
        """Take more rows, each with its number (NaN: none)."""
        if not len(rows):
            return
        room = SAMPLED - len(self._numbers)
        if room > 0:
            self._first.append(rows.slice(0, room))
            self._numbers += numbers[:room].tolist()
        self.rows += len(rows)
        self._numbered = self._numbered and not np.isnan(numbers).any()
        if self._numbered:
            low, high = int(numbers.argmin()), len(numbers) - 1 - int(numbers[::-1].argmax())
            if self._least is None or numbers[low] < self._least[0]:
                self._least = (float(numbers[low]), _row(rows, low))
            if self._most is None or numbers[high] >= self._most[0]:
                self._most = (float(numbers[high]), _row(rows, high))

    def selection(self) -> list[tuple[str, Row]]:
        """Return up to three rows, each with its rank; without ranks, the first ones, where numbers do not tell them apart."""
        first = pa.concat_tables(self._first)
        if not self._numbered or self._least is None or self._most is None or self._least[0] == self._most[0]:
            return [("", row) for row in first.slice(0, 3).to_pylist()]
        ends = [(PLACES[0], self._least[1]), (PLACES[2], self._most[1])]
        if self.rows > 2:
            order = sorted(range(len(first)), key=lambda at: self._numbers[at])
            ends.insert(1, (PLACES[1], _row(first, order[len(order) // 2])))
        return ends


def _row(rows: pa.Table, at: int) -> Row:
    row: Row = rows.slice(at, 1).to_pylist()[0]
    return row
