"""Layered drawing of a directed acyclic graph (Sugiyama, Tagawa and Toda 1981): layers, order, places.

Edges over several layers run through one chain of helper nodes per source, so that an artifact that
many later steps read gives one trunk with branches instead of a bundle.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

SWEEPS = 40
STRAIGHT = 3.0
Node = tuple[str, int]
"""A name and its layer; a helper node has the name of its source and a lower layer than the source itself."""


@dataclass(frozen=True)
class Layout:
    """Places of the nodes (centre x, layer) and, for each edge, the places it runs through."""

    places: Mapping[str, tuple[float, int]]
    edges: Mapping[tuple[str, str], Sequence[tuple[float, int]]]
    width: float
    layers: int


def layered(edges: Mapping[str, Sequence[str]], node_width: float, helper_width: float, gap: float) -> Layout:
    """Lay out a graph. `edges`: for each node its sources; every source is a node too, listed before its targets."""
    layer = _layers(edges)
    chains = {(s, t): [(s, k) for k in range(layer[s], layer[t])] + [(t, layer[t])] for t, sources in edges.items() for s in sources}
    links: dict[Node, set[Node]] = defaultdict(set)
    rows: list[dict[Node, None]] = [{} for _ in range(max(layer.values(), default=-1) + 1)]
    for name in edges:
        rows[layer[name]][name, layer[name]] = None
    for chain in chains.values():
        for a, b in pairwise(chain):
            links[a].add(b)
            links[b].add(a)
            rows[b[1]][b] = None
    order = _ordered([list(row) for row in rows], links)
    width = {node: node_width if layer[node[0]] == node[1] else helper_width for row in order for node in row}
    x = _placed(order, links, width, gap)
    left = min((x[n] - width[n] / 2 for n in x), default=0.0)
    right = max((x[n] + width[n] / 2 for n in x), default=0.0)
    places = {name: (x[name, k] - left, k) for name, k in layer.items()}
    routes = {edge: [(x[node] - left, node[1]) for node in chain] for edge, chain in chains.items()}
    return Layout(places, routes, right - left, len(rows))


def _layers(edges: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return each node's layer: the longest path from a source; nodes with more targets than sources then move near their targets."""
    layer: dict[str, int] = {}
    targets: dict[str, list[str]] = defaultdict(list)
    for name, sources in edges.items():
        layer[name] = max((layer[s] + 1 for s in sources), default=0)
        for source in sources:
            targets[source].append(name)
    for name in reversed(list(edges)):
        if len(targets[name]) > len(edges[name]):
            layer[name] = max(layer[name], min(layer[t] for t in targets[name]) - 1)
    lowest = min(layer.values(), default=0)
    return {name: k - lowest for name, k in layer.items()}


def _ordered(rows: list[list[Node]], links: Mapping[Node, set[Node]]) -> list[list[Node]]:
    """Order within the layers by barycentres, down and up in turn; the order with the fewest crossings wins."""
    best, fewest = [list(row) for row in rows], _crossings(rows, links)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        span = range(1, len(rows)) if down else range(len(rows) - 2, -1, -1)
        for k in span:
            other = {node: i for i, node in enumerate(rows[k - 1 if down else k + 1])}
            old = {node: i for i, node in enumerate(rows[k])}

            def middle(node: Node, other: dict[Node, int] = other, old: dict[Node, int] = old) -> tuple[float, int]:
                near = [other[n] for n in links[node] if n in other]
                return (sum(near) / len(near) if near else float(old[node]), old[node])

            rows[k].sort(key=middle)
        count = _crossings(rows, links)
        if count < fewest:
            best, fewest = [list(row) for row in rows], count
    return best


def _crossings(rows: Sequence[Sequence[Node]], links: Mapping[Node, set[Node]]) -> int:
    count = 0
    for upper, lower in pairwise(rows):
        at = {node: i for i, node in enumerate(lower)}
        spans = [(i, at[n]) for i, node in enumerate(upper) for n in links[node] if n in at]
        count += sum((a - c) * (b - d) < 0 for (a, b), (c, d) in combinations(spans, 2))
    return count


def _placed(order: Sequence[Sequence[Node]], links: Mapping[Node, set[Node]], width: Mapping[Node, float], gap: float) -> dict[Node, float]:
    """Return centres: each layer in turn as near to its neighbours as order and distances allow."""
    x: dict[Node, float] = {}
    for row in order:
        at = 0.0
        for node in row:
            x[node] = at + width[node] / 2
            at += width[node] + gap
    helper = min(width.values(), default=0.0)

    def pull(a: Node, b: Node) -> float:
        """Return an edge's weight; helper nodes of one chain attract each other, so that long edges run straight."""
        return STRAIGHT ** ((width[a] == helper) + (width[b] == helper))

    for sweep in range(SWEEPS):
        for row in order if sweep % 2 == 0 else reversed(order):
            step = 1 if sweep % 2 == 0 else -1
            targets, weights = [], []
            for node in row:
                before = [n for n in links[node] if (node[1] - n[1]) * step > 0]
                near = before if before and sweep < SWEEPS // 2 else list(links[node])
                whole = sum(pull(node, n) for n in near)
                targets.append(sum(pull(node, n) * x[n] for n in near) / whole if near else x[node])
                weights.append(whole if near else 1.0)
            for node, place in zip(row, _spread(row, targets, weights, width, gap), strict=True):
                x[node] = place
    return x


def _spread(row: Sequence[Node], aims: Sequence[float], weights: Sequence[float], width: Mapping[Node, float], gap: float) -> list[float]:
    """Return the places nearest to the wanted ones that keep order and distance (weighted least squares: pool adjacent violators)."""
    offsets = [0.0]
    for a, b in pairwise(row):
        offsets.append(offsets[-1] + (width[a] + width[b]) / 2 + gap)
    blocks: list[tuple[float, float, int]] = []
    for want, weight, offset in zip(aims, weights, offsets, strict=True):
        total, mass, count = weight * (want - offset), weight, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / mass:
            before, heavy, many = blocks.pop()
            total, mass, count = total + before, mass + heavy, count + many
        blocks.append((total, mass, count))
    shifts = [total / mass for total, mass, count in blocks for _ in range(count)]
    return [shift + offset for shift, offset in zip(shifts, offsets, strict=True)]
