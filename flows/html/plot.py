"""Plots, drawn as inline SVG: lines, bars and points with axes, intervals and labels. Colours come from the style sheet."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from puna.flows.html.markup import Content, Html, join, number, tag
from puna.flows.html.scale import Axis, Point, is_curve, thin

WIDTH, HEIGHT = 380, 236
LEFT, RIGHT, TOP, BOTTOM = 48, 14, 26, 40
ENDS = 4  # up to this number of curves, each curve's last value is written at its end, in a margin of at least ROOM
ROOM = 40
VALUE = 11.0  # minimum height of a bar with its value beside it, so that neighbouring values do not touch
COLOURS = 8
MARKED_POINTS = 48
LETTER = 6.6  # mean width of a letter at the plots' font size, in units of the view box


@dataclass(frozen=True)
class Plot:
    """The data of a plot. `series`: name → points (x, y); `kind`: line, bar or scatter; `lines`: name → level of a horizontal line;
    `intervals`: series → (x, low, high); `faint`: names of series in the background."""

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
        """Return the plot of a figure in a manifest; points with a missing or infinite coordinate are left out."""
        series = {str(name): _finite(points) for name, points in figure["series"].items()}
        if any(isinstance(x, str) for points in series.values() for x, _ in points):
            series = {name: [(str(x), y) for x, y in points] for name, points in series.items()}
        lines = {str(k): float(v) for k, v in (figure.get("lines") or {}).items()}
        texts = {k: str(figure.get(k) or "") for k in ("title", "x", "y", "kind", "note")}
        return cls(texts["title"], texts["x"], texts["y"], series, texts["kind"] or "line", texts["note"], lines)

    @property
    def names(self) -> list[str]:
        """Return the words on the x axis, in order of appearance; empty if the axis has numbers."""
        return list(dict.fromkeys(str(x) for points in self.series.values() for x, _ in points if isinstance(x, str)))

    def order(self, name: str) -> int:
        """Return the index of a series' colour: its position in the list of series, in which other faint series do not count."""
        return [n for n in self.series if n not in self.faint or n == name].index(name)

    @property
    def empty(self) -> bool:
        return not any(self.series.values())


def _finite(points: Iterable[Sequence[Any]]) -> list[Point]:
    finite = [(x if isinstance(x, str) else float(x), float(y)) for x, y in points if x is not None and y is not None]
    return [(x, y) for x, y in finite if math.isfinite(y) and (isinstance(x, str) or math.isfinite(x))]


def draw(plot: Plot) -> Html:
    """Return the plot as a `figure` element; empty markup if the plot has no points."""
    if plot.empty:
        return Html("")
    horizontal = plot.kind == "bar" and bool(plot.names)
    picture = _rows(plot) if horizontal else _field(plot)
    legend = None if horizontal and len(plot.series) == 1 else _legend(plot)
    caption = tag("figcaption", tag("strong", plot.title), tag("span", plot.note, class_="note") if plot.note else None)
    return tag("figure", caption, legend, picture, class_="plot")


def grid(plots: Iterable[Plot]) -> Html:
    """Return a grid of plots, filled row by row; plots without points are left out."""
    figures = [draw(plot) for plot in plots if not plot.empty]
    return tag("div", figures, class_="plots") if figures else Html("")


def colour(index: int) -> str:
    return f"--c:var(--s{index % COLOURS + 1})"


def _legend(plot: Plot) -> Html | None:
    names = [n for n in plot.series if n not in plot.faint]
    if len(names) < 2:
        return None
    chips = [tag("li", tag("i", style=colour(i), class_=f"dash{i // COLOURS}"), name) for i, name in enumerate(names)]
    return tag("ul", chips, class_="legend")


def _svg(plot: Plot, height: float, *content: Content) -> Html:
    return tag("svg", *content, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=f"{plot.title}: {plot.y} over {plot.x}")


def _text(x: float, y: float, content: str, class_: str, anchor: str = "middle") -> Html:
    return tag("text", content, x=f"{x:.1f}", y=f"{y:.1f}", class_=class_, text_anchor=anchor)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Html:
    return tag("line", x1=f"{x1:.1f}", y1=f"{y1:.1f}", x2=f"{x2:.1f}", y2=f"{y2:.1f}", class_=class_)


def _clip(words: str, letters: int) -> str:
    return words if len(words) <= letters else words[: max(1, letters - 1)] + "…"


def _field(plot: Plot) -> Html:
    """Return lines, points or upright bars as SVG, with an x axis below and a y axis on the left."""
    values = [y for points in plot.series.values() for _, y in points] + list(plot.lines.values())
    values += [v for spans in plot.intervals.values() for _, low, high in spans for v in (low, high)]
    y = Axis.of_numbers(values, HEIGHT - BOTTOM, TOP, plot.y, zero=plot.kind == "bar")
    names = plot.names
    left, right = LEFT, WIDTH - (_room(plot) if _has_labels(plot) else RIGHT)
    if names:
        x = Axis(-0.5, len(names) - 0.5, left, right, names=tuple(names))
    else:
        places = [float(x) for points in plot.series.values() for x, _ in points]
        if plot.kind == "line":
            x = Axis.tight(places, left, right, plot.x)
        else:
            margin = 10 if plot.kind == "scatter" else _bar_width(places, right - left) / 2
            x = Axis.tight(places, left + margin, right - margin, plot.x)
    marks = [_series(plot, plot.order(name), name, x, y) for name in plot.series]
    return _svg(plot, HEIGHT, _frame(plot, x, y), marks, _levels(plot, y), _ends(plot, x, y) if _has_labels(plot) else None)


def _has_labels(plot: Plot) -> bool:
    return plot.kind == "line" and len(plot.series) - len(plot.faint) <= ENDS


def _room(plot: Plot) -> float:
    """Return the width of the margin for the curves' last values."""
    last = [number(points[-1][1], 3) for name, points in plot.series.items() if points and name not in plot.faint]
    return max(ROOM, 8 + LETTER * max(map(len, last), default=0))


def _ends(plot: Plot, x: Axis, y: Axis) -> Html:
    """Draw the last value of each curve beside its end, and move apart labels that would touch."""
    ends = []
    for name, points in plot.series.items():
        if points and name not in plot.faint:
            at, value = max(points, key=lambda p: x.at(p[0]))
            ends.append([y.at(value), x.at(at) + _shift(plot, plot.order(name), x), value, plot.order(name)])
    ends.sort()
    for before, after in itertools.pairwise(ends):
        after[0] = max(after[0], before[0] + 12.5)
    over = max(0.0, ends[-1][0] - (HEIGHT - BOTTOM)) if ends else 0.0
    several = len(ends) > 1
    return join(
        tag("g", _text(a + 7, b + 4 - over, number(value, 3), "value own" if several else "value", "start"), style=colour(int(order)))
        for b, a, value, order in ends
    )


def _shift(plot: Plot, index: int, x: Axis) -> float:
    """Return a series' horizontal offset, which keeps the intervals of several series at one name on the x axis apart."""
    return 9.0 * (index - (len(plot.series) - 1) / 2) if x.names and plot.intervals else 0.0


def _frame(plot: Plot, x: Axis, y: Axis) -> Html:
    end = x.stop if plot.kind == "line" else WIDTH - RIGHT
    parts = [_text(0, 12, plot.y, "label", "start")]
    for at, label in y.ticks():
        parts += [_line(LEFT, at, end, at, "grid"), _text(LEFT - 6, at + 4, label, "tick", "end")]
    base = HEIGHT - BOTTOM
    ticks = x.ticks(6)
    room = int((x.stop - x.start) / max(1, len(ticks)) / LETTER) if x.names else 12
    for at, label in ticks:
        for row, piece in enumerate(_wrap(label, room) if x.names else [label]):
            edge = "end" if not x.names and at > WIDTH - 18 else "middle"
            parts.append(_text(min(at, WIDTH - 1), base + 15 + 12 * row, piece, "tick", edge))
        if not x.names:
            parts.append(_line(at, base, at, base + 4, "axis"))
    parts.append(_line(LEFT, base, end, base, "axis"))
    if not x.names:
        parts.append(_text((x.start + x.stop) / 2, HEIGHT - 6, plot.x, "label"))
    return join(parts)


def _wrap(words: str, room: int) -> list[str]:
    """Return a name broken into at most two lines of `room` letters; the rest is cut off."""
    lines: list[str] = [""]
    for word in words.replace("_", " ").split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return [_clip(line, max(3, room)) for line in lines[:2]]


def _bar_width(places: Sequence[float], span: float) -> float:
    distinct = sorted(set(places))
    if len(distinct) < 2:
        return min(60.0, span)
    gap = min(b - a for a, b in itertools.pairwise(distinct))
    whole = distinct[-1] - distinct[0]
    return max(1.5, span * gap / (whole + gap))


def _series(plot: Plot, index: int, name: str, x: Axis, y: Axis) -> Html:
    points = sorted(plot.series[name], key=lambda p: x.at(p[0]))
    curve = plot.kind == "line" or (plot.kind == "scatter" and len(plot.series) > 1 and is_curve(points))
    points = thin(points) if curve else points
    shift = _shift(plot, index, x)
    placed = [(x.at(px) + shift, y.at(py), px, py) for px, py in points]
    parts: list[Content] = []
    if plot.kind == "bar":
        parts += _upright(plot, index, placed, y)
    else:
        if curve and len(placed) > 1:
            path = " ".join(f"{'L' if i else 'M'}{a:.1f} {b:.1f}" for i, (a, b, _, _) in enumerate(placed))
            parts.append(tag("path", d=path, class_=f"curve dash{index // COLOURS}"))
        for at, low, high in plot.intervals.get(name, ()):
            a, top, bottom = x.at(at) + shift, y.at(high), y.at(low)
            parts.append(_line(a, top, a, bottom, "whisker"))
            parts += [_line(a - 4, end, a + 4, end, "whisker") for end in (top, bottom)]
        if name not in plot.faint:
            parts += _marks(plot, name, placed, curve)
    return tag("g", parts, style=colour(index), class_="series faint" if name in plot.faint else "series")


def _marks(plot: Plot, name: str, placed: list[tuple[float, float, float | str, float]], curve: bool) -> list[Html]:
    """Return circles with tooltips. They are visible at every point if there are few, else at the last point only; some of the other points
    then get invisible circles, for their tooltips."""
    few = not curve or len(placed) <= 16
    every = 1 if few else max(1, len(placed) // MARKED_POINTS)
    spans = {at: (low, high) for at, low, high in plot.intervals.get(name, ())}
    marks = []
    for i, (a, b, px, py) in enumerate(placed):
        last = i == len(placed) - 1
        if i % every and not last:
            continue
        where = px if isinstance(px, str) else f"{plot.x} {number(px)}"
        span = f" (95 %: {number(spans[px][0], 3)} to {number(spans[px][1], 3)})" if px in spans else ""
        title = tag("title", f"{name}, {where}: {number(py)}{span}")
        visible = few or last
        marks.append(tag("circle", title, cx=f"{a:.1f}", cy=f"{b:.1f}", r=3.5 if visible else 6, class_="dot" if visible else "hover"))
    return marks


def _upright(plot: Plot, index: int, placed: list[tuple[float, float, float | str, float]], y: Axis) -> list[Html]:
    whole = _bar_width([float(x) for points in plot.series.values() for x, _ in points], WIDTH - RIGHT - LEFT) * 0.9
    width = whole / len(plot.series)
    base = y.at(0)
    lines = [f"{plot.x} {px if isinstance(px, str) else number(px)}: {number(py)}" for _, _, px, py in placed]
    left = index * width - whole / 2
    return [_rect(a + left, min(b, base), width, abs(base - b), words) for (a, b, _, _), words in zip(placed, lines, strict=True)]


def _rect(x: float, y: float, width: float, height: float, title: str) -> Html:
    size = {"x": f"{x:.1f}", "y": f"{y:.1f}", "width": f"{width:.1f}", "height": f"{height:.1f}"}
    return tag("rect", tag("title", title), **size, class_="block")


def _levels(plot: Plot, y: Axis) -> Html:
    """Draw named horizontal lines, and move apart labels that would touch."""
    parts: list[Html] = []
    before = math.inf
    for name, value in sorted(plot.lines.items(), key=lambda item: item[1]):
        at = y.at(value)
        before = min(at - 5, before - 13)
        caption = _clip(f"{name} {number(value, 3)}", 52)
        parts += [_line(LEFT, at, WIDTH - RIGHT, at, "named"), _text(LEFT + 6, before, caption, "levelname", "start")]
    return join(parts)


def _rows(plot: Plot) -> Html:
    """Draw bars by name, one row each (one thin row per series), with the value at the bar's end."""
    names = plot.names
    left = min(176.0, 12 + max(map(len, names)) * LETTER)
    values = [v for points in plot.series.values() for _, v in points] + list(plot.lines.values())
    x = Axis.of_numbers(values, left, WIDTH - 52, zero=True)
    thick = 18.0 if len(plot.series) == 1 else max(VALUE, 26.0 / len(plot.series))
    pitch = thick * len(plot.series) + 8
    height = 22 + pitch * len(names) + (16 if plot.lines else 0)
    parts: list[Content] = [_text(0, 12, plot.y, "label", "start")]
    for row, name in enumerate(names):
        middle = 24 + row * pitch + (pitch - 8) / 2
        label = _clip(name.replace("_", " "), int((left - 8) / LETTER))
        parts.append(tag("text", tag("title", name), label, x=f"{left - 8:.1f}", y=f"{middle + 4:.1f}", class_="tick", text_anchor="end"))
    rows: list[Content] = []
    for index, (name, points) in enumerate(plot.series.items()):
        bars: list[Content] = []
        for place, value in points:
            top = 24 + names.index(str(place)) * pitch + index * thick
            a, b = sorted((x.at(0), x.at(value)))
            bars.append(_rect(a, top, max(b - a, 0.8), thick - 1, f"{place}, {name}: {number(value)}"))
            rows += _value(b, top, thick, number(value, 3), bool(plot.lines))
        parts.append(tag("g", bars, style=colour(index), class_="series"))
    for name, value in plot.lines.items():
        at = x.at(value)
        parts += [_line(at, 20, at, height - 14, "named"), _text(at, height - 2, f"{name} {number(value, 3)}", "levelname")]
    return _svg(plot, height, parts, rows)


def _value(x: float, top: float, thick: float, label: str, clear: bool) -> list[Content]:
    """Draw the value of a bar that ends at `x`; `clear`: on a background of its own, so that no line crosses it."""
    size = {"x": f"{x + 2:.1f}", "y": f"{top:.1f}", "width": f"{6 + LETTER * len(label):.1f}", "height": f"{thick:.1f}"}
    ground = tag("rect", **size, class_="behind") if clear else None
    return [ground, _text(x + 5, top + thick / 2 + 3.6, label, "value", "start")]
