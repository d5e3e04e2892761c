"""The run's artifacts as a layered graph, and its steps' times and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import TopologicalSorter
from itertools import chain, pairwise
from statistics import fmean

from puna.flows.html.markup import Content, Html, duration, join, legend, number, short, size, stacked_bar, stored, table, tag
from puna.flows.report.run import Run, Step

NODE_WIDTH, NODE_HEIGHT, PITCH, MARGIN, GAP = 138.0, 38.0, 66.0, 8.0, 16.0
LANE_WIDTH, SWEEPS = 14.0, 24  # width of an edge that passes through a layer; passes that order and place the nodes
LETTERS = 20
Place = tuple[float, int]  # the x of a node's centre, and its layer
Lane = tuple[str, int]  # a node in its layer, or the point at which the node's outgoing edges pass a later layer
FAMILIES = {
    "web": ("pages", "documents"), "signals": ("signals",), "corpus": ("mixture", "tokenizer", "tokens"), "model": ("model",),
    "data": ("prompts", "answers", "preferences", "instructions"), "evaluation": ("evaluation",),
}  # fmt: skip
"""Kinds of artifacts by colour."""


def lineage_view(run: Run) -> Html:
    """Return the graph in a scrollable box; hovering over a node shows the node's id and metrics and highlights its edges."""
    if not run.steps:
        return Html("")
    names, edges, titles = _graph(run)
    places, routes = layout_of(edges)
    across = max(x for x, _ in chain(places.values(), *routes.values()))
    width, height = across + NODE_WIDTH / 2 + 2 * MARGIN, max(layer for _, layer in places.values()) * PITCH + NODE_HEIGHT + 2 * MARGIN
    lines = [_edge(*ends, route) for ends, route in routes.items()]
    nodes = [_node(key, names[key], titles[key], places[key]) for key in edges]
    used = {_family(s) for s in run.steps}
    chips = legend({f"f-{family}": ", ".join(kinds) for family, kinds in FAMILIES.items() if family in used})
    picture = tag(
        "svg", lines, nodes, viewBox=f"0 0 {width:.0f} {height:.0f}", width=f"{width:.0f}", height=f"{height:.0f}", role="img",
        aria_label=f"Lineage of {len(names)} artifacts", id="graph",
    )  # fmt: skip
    return join([chips, tag("div", picture, class_="scroll lineage", tabindex=0)])


def _family(step: Step) -> str:
    return next((family for family, kinds in FAMILIES.items() if step.artifact.kind in kinds), "data")


def _graph(run: Run) -> tuple[dict[str, Step | str], dict[str, list[str]], dict[str, str]]:
    """Return the graph's nodes, their sources, and their tooltips, by key. Sources come before the nodes made from them."""
    names: dict[str, Step | str] = {}
    edges: dict[str, list[str]] = {}
    titles: dict[str, str] = {}
    steps = {s.artifact.key: s for s in run.steps}
    for key, step in steps.items():
        sources: dict[str, None] = {}
        outside = [i for i in step.artifact.manifest.inputs if i.kind == "external"]
        if outside:
            name = f"files of {step.name}"
            names[name] = "1 file" if len(outside) == 1 else f"{len(outside)} files"
            edges[name], titles[name] = [], "\n".join(f"{i.name.partition(':')[2] or i.name}: {i.key}" for i in outside)
            sources[name] = None
        for record in step.artifact.manifest.inputs:
            if record.kind == "external":
                continue
            origin = run.source(step, record)
            source = origin.key if origin is not None else record.key
            if source not in steps and source not in names:
                names[source], edges[source] = f"{record.kind}\nfrom outside this run", []
                titles[source] = f"{record.kind}/{source[:12]}\nmade by {record.stage or 'an import'} outside this run"
            sources[source] = None
        names[key], edges[key], titles[key] = step, list(sources), _title(step)
    return names, {key: edges[key] for key in TopologicalSorter(edges).static_order()}, titles


def _title(step: Step) -> str:
    metrics = [f"{n}: {v if isinstance(v, str) else number(v)}" for n, v in list(step.metrics.items())[:14]]
    rows = [f"{name}: {record.rows:,} rows" for name, record in step.artifact.manifest.tables.items()]
    state = "reused" if step.reused else f"made in {duration(step.seconds)}"
    return "\n".join([step.artifact.id, f"stage {step.stage}, {state}", *rows, *metrics])


def _node(key: str, what: Step | str, title: str, place: Place) -> Html:
    x, layer = place
    left, top = MARGIN + x - NODE_WIDTH / 2, MARGIN + layer * PITCH
    box = tag("rect", x=f"{left:.1f}", y=f"{top:.1f}", width=NODE_WIDTH, height=NODE_HEIGHT, rx=7)
    if isinstance(what, str):
        lines, style = what.split("\n"), "node f-outside"
    else:
        label = what.label if len(what.label) <= LETTERS else what.label[: LETTERS - 1] + "…"
        record = what.artifact.manifest.tables.get(what.artifact.kind)
        count = f"{short(record.rows)} rows" if record is not None and record.rows else what.artifact.kind
        lines = [label, f"{count}{' · reused' if what.reused else ''}"]
        style = f"node f-{_family(what)}{' reused' if what.reused else ''}"
    texts = [
        tag("text", line, x=f"{MARGIN + x:.1f}", y=f"{top + (16 if len(lines) == 2 else 23) + 14 * i:.1f}", class_="small" if i else None)
        for i, line in enumerate(lines)
    ]
    return tag("g", tag("title", title), box, texts, class_=style, data_key=key[:40])


def _edge(source: str, target: str, route: Sequence[Place]) -> Html:
    points = [(MARGIN + x, MARGIN + layer * PITCH) for x, layer in route]
    path = f"M{points[0][0]:.1f} {points[0][1] + NODE_HEIGHT:.1f}"
    for (a, top), (b, bottom) in pairwise(points):
        middle = (top + NODE_HEIGHT + bottom) / 2
        path += f"C{a:.1f} {middle:.1f} {b:.1f} {middle:.1f} {b:.1f} {bottom:.1f}"
        if (b, bottom) != points[-1]:
            path += f"V{bottom + NODE_HEIGHT:.1f}"
    return tag("path", d=path, class_="edge", data_from=source[:40], data_to=target[:40])


def layout_of(edges: Mapping[str, Sequence[str]]) -> tuple[dict[str, Place], dict[tuple[str, str], list[Place]]]:
    """Return each node's place, and the places along each edge. `edges`: node → its sources, which are earlier keys. Long edges cross the
    layers in between in lanes, one per source. Sweeping down and up in turn, each layer is sorted by the mean position of each node's
    neighbours, and nodes are placed as near to these means as the order allows (Sugiyama, Tagawa and Toda 1981)."""
    layer: dict[str, int] = {}
    for name, sources in edges.items():
        layer[name] = max((layer[source] + 1 for source in sources), default=0)
    for name in reversed(list(edges)):  # a node whose first reader comes late is placed just before that reader
        targets = [layer[target] for target, sources in edges.items() if name in sources]
        if targets and len(targets) > len(edges[name]):
            layer[name] = min(targets) - 1
    lowest = min(layer.values())
    layer = {name: k - lowest for name, k in layer.items()}
    rows: list[dict[Lane, None]] = [{(name, k): None for name in edges if layer[name] == k} for k in range(max(layer.values()) + 1)]
    near: dict[Lane, dict[Lane, None]] = {(name, k): {} for name, k in layer.items()}
    routes = {(s, t): [*((s, k) for k in range(layer[s], layer[t])), (t, layer[t])] for t, sources in edges.items() for s in sources}
    for before, after in (pair for route in routes.values() for pair in pairwise(route)):
        rows[after[1]][after] = None
        near.setdefault(after, {})[before] = None
        near[before][after] = None
    wide = {lane: NODE_WIDTH if layer[lane[0]] == lane[1] else LANE_WIDTH for lane in near}
    x = {lane: place * (NODE_WIDTH + GAP) for row in rows for place, lane in enumerate(row)}
    for sweep in range(SWEEPS):
        step = 1 if sweep % 2 == 0 else -1
        for row in rows[::step]:
            # In the first half of the sweeps, only neighbours in the layers already placed count; then all neighbours.
            centres = {lane: [x[n] for n in near[lane] if (lane[1] - n[1]) * step > 0 or sweep >= SWEEPS // 2] for lane in row}
            aims = {lane: fmean(centres[lane] or [x[lane]]) for lane in row}
            order = sorted(row, key=aims.__getitem__)
            at = [aims[order[0]]]
            for left, right in pairwise(order):
                at.append(max(aims[right], at[-1] + (wide[left] + wide[right]) / 2 + GAP))
            shift = 0.8 * fmean(aims.values()) - fmean(at)  # towards the middle, so that the picture stays narrow
            x.update(zip(order, (place + shift for place in at), strict=True))
    edge = min(place - wide[lane] / 2 for lane, place in x.items())
    places = {name: (x[name, k] - edge, k) for name, k in layer.items()}
    return places, {ends: [(x[lane] - edge, lane[1]) for lane in route] for ends, route in routes.items()}


def times_view(run: Run) -> Html:
    """Return a table of each step's time, peak memory and stored bytes. Reused artifacts, hatched, show the cost of their creation."""
    if not run.steps:
        return Html("")
    longest = max(max(s.seconds if not s.reused else s.made_seconds for s in run.steps), 1e-9)
    rows: list[list[Content]] = []
    for step in run.steps:
        seconds = step.made_seconds if step.reused else step.seconds
        bar = stacked_bar([("again" if step.reused else "kept", max(0.4, 100 * seconds / longest))])
        state = tag("span", "reused", class_="tag") if step.reused else None
        memory = step.artifact.manifest.peak_memory_bytes
        cells: list[Content] = [duration(seconds), size(memory) if memory else "–", stored(step.artifact)]
        rows.append([[step.label, " ", state], bar, *cells, tag("code", step.artifact.id)])
    head: list[Content] = ["step", "", "time", "peak memory", "stored", "artifact"]
    chips = {"kept": "made in this run"}
    if any(s.reused for s in run.steps):
        chips["again"] = "reused: the time it took when it was made"
    return join([legend(chips), table(head, rows, numeric=(2, 3, 4))])
