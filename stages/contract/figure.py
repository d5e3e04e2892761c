"""Plots as data, drawn by the report and the web pages."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Figure:
    """A plot: named series of (x, y) points; x may be a category's name in a bar plot."""

    title: str
    x: str
    y: str
    series: dict[str, list[tuple[Any, float]]]
    kind: Literal["line", "bar", "scatter"] = "line"
    note: str = ""
    lines: dict[str, float] = field(default_factory=dict)
    """Named horizontal lines, for example a baseline."""

    def to_json(self) -> dict[str, Any]:
        """Return the figure as a JSON value."""
        return asdict(self)
