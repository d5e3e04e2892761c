"""The data of a plot, from a manifest's figure or made for the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from puna.flows.html.scale import Point


@dataclass(frozen=True)
class Plot:
    """The data of a plot. `series`: points by name; `lines`: named levels; `intervals`: (x, low, high) by series; `faint`: series in the
    background.
    """

    title: str
    x: str
    y: str
    series: Mapping[str, Sequence[Point]]
    kind: str = "line"
    note: str = ""
    lines: Mapping[str, float] = field(default_factory=dict)
    intervals: Mapping[str, Sequence[tuple[float | str, float, float]]] = field(default_factory=dict)
    faint: frozenset[str] = frozenset()

    @classmethod
    def of(cls, figure: Mapping[str, Any]) -> Plot:
        """Return the plot of a figure in a manifest; points without a finite value are left out."""
        series = {str(name): _finite(points) for name, points in figure["series"].items()}
        if any(isinstance(x, str) for points in series.values() for x, _ in points):
            series = {name: [(str(x), y) for x, y in points] for name, points in series.items()}
        lines = {str(k): float(v) for k, v in (figure.get("lines") or {}).items()}
        texts = {k: str(figure.get(k) or "") for k in ("title", "x", "y", "kind", "note")}
        return cls(texts["title"], texts["x"], texts["y"], series, texts["kind"] or "line", texts["note"], lines)

    @property
    def names(self) -> list[str]:
        """Return the words on the x axis, in order of appearance; empty when it has numbers."""
        return list(dict.fromkeys(str(x) for points in self.series.values() for x, _ in points if isinstance(x, str)))

    def order(self, name: str) -> int:
        """Return the index of a series among the series with their own colours."""
        return [n for n in self.series if n not in self.faint or n == name].index(name)

    @property
    def empty(self) -> bool:
        return not any(self.series.values())


def _finite(points: Iterable[Sequence[Any]]) -> list[Point]:
    finite = [(x if isinstance(x, str) else float(x), float(y)) for x, y in points if x is not None and y is not None]
    return [(x, y) for x, y in finite if math.isfinite(y) and (isinstance(x, str) or math.isfinite(x))]
