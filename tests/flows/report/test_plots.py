"""Axes, curves and the layered graph: properties that hold for any data."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.flows.html.markup import duration, excerpt, join, number, percent, short, size, tag, text
from puna.flows.html.plot import Plot, draw
from puna.flows.html.scale import Axis, is_curve, thin
from puna.flows.report.curate import mark_differences
from puna.flows.report.lineage import GAP, NODE_WIDTH, layout_of
from puna.flows.report.training import smooth_line

NUMBERS = st.floats(-1e9, 1e9, allow_nan=False).map(lambda v: round(v, 6))


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans())
def test_an_axis_holds_its_values_and_its_ticks(values: list[float], zero: bool) -> None:
    axis = Axis.of_numbers(values, 100.0, 20.0, zero=zero)
    assert all(20 - 1e-6 <= axis.at(v) <= 100 + 1e-6 for v in values)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12
    assert all(20 - 1e-6 <= at <= 100 + 1e-6 for at, _ in ticks)
    assert all(a > b for (a, _), (b, _) in pairwise(ticks))
    if zero:
        assert axis.low <= 0 <= axis.high


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0, 1, ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (0, 0.0005, ["0", "0.0001", "0.0002", "0.0003", "0.0004", "0.0005"]),
        (2, 7, ["2", "3", "4", "5", "6", "7"]),
        (0, 1e6, ["0", "200 k", "400 k", "600 k", "800 k", "1.00 M"]),
        (1.0, 2.0, ["1.0", "1.2", "1.4", "1.6", "1.8", "2.0"]),
        (0, 0.00002, ["0", "5.0e-6", "1.0e-5", "1.5e-5", "2.0e-5"]),
    ],
)
def test_ticks_are_round(low: float, high: float, said: list[str]) -> None:
    assert [words for _, words in Axis.of_numbers([low, high], 0, 100).ticks()] == said


def test_what_grows_by_factors_has_a_logarithmic_axis() -> None:
    axis = Axis.of_numbers([1e12, 1e16], 0, 100, "operations")
    assert axis.log and [said for _, said in axis.ticks()] == ["10¹²", "10¹³", "10¹⁴", "10¹⁵", "10¹⁶"]
    assert axis.at(1e14) == pytest.approx(50)
    assert not Axis.of_numbers([1, 1e6], 0, 100, "step").log
    assert not Axis.of_numbers([0, 1e6], 0, 100, "FLOP").log


POINTS = st.lists(st.tuples(st.integers(0, 10**6).map(float), NUMBERS), min_size=1, max_size=3000, unique_by=lambda p: p[0])


@settings(deadline=None, max_examples=30)
@given(POINTS)
def test_thinning_keeps_the_shape(points: list[tuple[float, float]]) -> None:
    points.sort()
    kept = thin(points)
    assert len(kept) <= 243 and set(kept) <= set(points) and kept == sorted(kept)
    assert kept[0] == points[0] and kept[-1] == points[-1]
    for choose in (min, max):
        assert choose(y for _, y in kept) == choose(y for _, y in points)


def test_smoothing_is_a_mean_over_a_window() -> None:
    line = [(float(x), 3.0 * x + 1) for x in range(400)]
    for i, ((x, y), (_, raw)) in enumerate(zip(smooth_line(line), line, strict=True)):
        assert x == line[i][0]
        if i < 390:
            assert y == pytest.approx(raw), "a straight line stays itself where the window is centred"
        else:
            assert y == pytest.approx(sum(v for _, v in line[i - 10 :]) / len(line[i - 10 :]))


def test_samples_of_a_function_are_told_from_measured_points() -> None:
    assert is_curve([(float(x), 0.0) for x in range(20)])
    assert is_curve([(10 ** (x / 7), 0.0) for x in range(25)])
    assert not is_curve([(float(x * x), 0.0) for x in range(1, 30)])
    assert not is_curve([(float(x), 0.0) for x in range(5)])


@pytest.mark.parametrize("kind", ["line", "bar", "scatter"])
@pytest.mark.parametrize("names", [True, False])
def test_a_plot_stays_inside_its_box(kind: str, names: bool) -> None:
    series = {f"</svg>{s}": [(f"<b>{x}" if names else x, math.sin(x) * 10**s) for x in range(12)] for s in range(5)}
    drawn = draw(Plot.of({"title": "<i>", "x": "x", "y": "y", "kind": kind, "series": series, "lines": {"<level>": 2.0}, "note": ""}))
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', drawn)[0])
    for name, bound in (("x", width), ("cx", width), ("x1", width), ("x2", width), ("y", height), ("cy", height), ("y1", height)):
        assert all(-1 <= float(v) <= bound + 1 for v in re.findall(rf' {name}="(-?[\d.]+)"', drawn)), name
    assert "<b>" not in drawn and "<i>" not in drawn and drawn.count("</svg>") == 1


def written(svg: str) -> list[tuple[float, float, str]]:
    """Return the position and text of every value that a plot shows."""
    found = re.findall(r'<text x="([\d.-]+)" y="([\d.-]+)" class="value(?: own)?" text-anchor="start">([^<]*)', svg)
    return [(float(x), float(y), said) for x, y, said in found]


def test_values_beside_bars_do_not_touch() -> None:
    series = {name: [("one", 3.0), ("two", 3.1)] for name in ("model", "ngram", "dictionary")}
    values = sorted(y for _, y, _ in written(str(draw(Plot("bits", "", "bits", series, "bar", lines={"all": 3.05})))))
    assert len(values) == 6 and all(b - a >= 11 for a, b in pairwise(values))


def test_a_long_last_value_fits() -> None:
    (x, _, said), = written(str(draw(Plot("loss", "step", "loss", {"loss": [(1, 0.0014), (2, -0.00312)]}))))
    assert said == "-0.00312" and x + 6.6 * len(said) <= 380


@pytest.mark.parametrize(
    ("values", "said"),
    [([1, 2, 3, 4], ["1", "2", "3", "4"]), ([1, 2], ["1", "2"]), ([1, 1.5, 2], ["1.0", "1.2", "1.4", "1.6", "1.8", "2.0"])],
)
def test_counted_steps_have_whole_ticks(values: list[float], said: list[str]) -> None:
    assert [words for _, words in Axis.tight(values, 0, 100, "step").ticks(6)] == said


def test_values_that_are_missing_are_not_drawn() -> None:
    figure = {"title": "t", "x": "x", "y": "y", "kind": "line", "series": {"a": [[0, 1.0], [1, None], [2, math.nan], [3, 2.0]], "b": []}}
    assert Plot.of(figure).series == {"a": [(0.0, 1.0), (3.0, 2.0)], "b": []}
    assert draw(Plot.of({**figure, "series": {"a": [[1, None]]}})) == ""


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.integers(0, 30), max_size=4), min_size=1, max_size=30))
def test_a_graph_is_drawn_downwards_without_overlaps(inputs: list[set[int]]) -> None:
    edges = {str(i): [str(s) for s in sorted(sources) if s < i] for i, sources in enumerate(inputs)}
    places, routes = layout_of(edges)
    assert set(places) == set(edges)
    assert set(routes) == {(s, t) for t, sources in edges.items() for s in sources}
    rows: dict[int, list[float]] = {}
    for x, layer in places.values():
        assert x >= NODE_WIDTH / 2 - 1e-6 and layer >= 0
        rows.setdefault(layer, []).append(x)
    assert set(rows) == set(range(len(rows)))
    for row in rows.values():
        assert all(b - a >= NODE_WIDTH + GAP - 1e-6 for a, b in pairwise(sorted(row)))
    for (source, target), route in routes.items():
        assert route[0] == places[source] and route[-1] == places[target]
        assert all(b[1] == a[1] + 1 for a, b in pairwise(route))


def test_a_chain_is_drawn_straight() -> None:
    edges = {"a": [], "b": ["a"], "c": ["b"], "d": ["c", "a"]}
    places, _ = layout_of(edges)
    assert [places[n][1] for n in "abcd"] == [0, 1, 2, 3]
    assert places["b"][0] == pytest.approx(places["c"][0], abs=NODE_WIDTH / 10)


def test_differing_words_are_marked() -> None:
    left, right = mark_differences("the llama walks up\nthe hill", "the llama runs up\nthe hill")
    assert left == "the llama<mark> walks</mark> up\nthe hill"
    assert right == "the llama<mark> runs</mark> up\nthe hill"
    left, right = mark_differences("same " * 50 + "<a>", "same " * 50 + "<b>")
    assert left.startswith("… ") and left.endswith("<mark> &lt;a&gt;</mark>") and right.endswith("<mark> &lt;b&gt;</mark>")


def test_markup_escapes_all_but_markup() -> None:
    inside = join(["<", text("&"), None, 1234, [["'"]]])
    assert inside == "&lt;&amp;1,234&#x27;"
    assert (
        tag("a", tag("b", "x"), class_="c", data_key='"', hidden=True, title=None) == '<a class="c" data-key="&quot;" hidden><b>x</b></a>'
    )
    assert text("a\x00b\ud800") == "a�b�"


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (number(1234567), "1,234,567"), (number(0.123456), "0.1235"), (number(12345.6), "12,346"), (number(None), "–"),
        (number(2.0), "2"), (short(9999), "9,999"), (short(12_345), "12.3 k"), (short(999_999), "1.00 M"), (short(999_400), "999 k"),
        (short(4_560_000), "4.56 M"), (short(2.5e12), "2.50 T"),
        (percent(1, 3), "33.3 %"), (percent(0, 3), "0 %"), (percent(3, 3), "100 %"), (percent(1, 10**5), "< 0.1 %"),
        (percent(99_999, 10**5), "> 99.9 %"), (percent(1, 0), "–"), (percent(1, 1000), "0.1 %"),
        (duration(0.04), "< 0.1 s"), (duration(0), "0.0 s"), (duration(59.7), "1 min 0 s"),
        (duration(200), "3 min 20 s"), (duration(7500), "2 h 5 min"),
        (size(999), "999 B"), (size(1500), "1.5 kB"), (size(2.5e9), "2.5 GB"),
        (size(999_600), "1 MB"), (size(12.345e12), "12.3 TB"), (size(1.5e15), "1,500 TB"),
        (excerpt("a\n\n\n\nb"), "a\n\nb"), (excerpt("x" * 50, 10), "x" * 10 + " …"), (excerpt(" " * 100 + "x", 10), "x"),
    ],
)  # fmt: skip
def test_numbers_for_people(said: str, expected: str) -> None:
    assert said == expected
