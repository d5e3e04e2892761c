"""Sections on training and experiments: the stages' figures and the curves of their logs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from puna.flows.html.markup import Content, Html, details, duration, join, number, part, short, table, tag
from puna.flows.html.plot import Plot, grid
from puna.flows.html.scale import Point
from puna.flows.report.arms import Claim
from puna.flows.report.run import Run, Step
from puna.stages.training.intervals import Interval
from puna.storage.catalog import query

EXPERIMENTS = ("mix_experiment", "ladder", "law", "choose_size", "anneal_experiment", "filter_ablation", "phase_gains")
CORPUS_KINDS = ("pages", "documents", "signals", "mixture", "tokenizer", "tokens")
HEAT = "needle"
SMOOTHED_FROM = 40
PLAIN = ("step", "tokens", "seconds")
GAINS = {
    ("short_rows", "gain_beyond"): "longer context against short rows, on tokens after the first context",
    ("short_rows", "gain_start"): "longer context against short rows, on tokens in the first context",
    ("natural", "gain_best"): "annealing data against the natural mixture, on pages weighted as the annealing data",
    ("natural", "gain"): "annealing data against the natural mixture, on all pages",
    ("constant", "gain"): "annealing against a constant learning rate",
    ("fresh", "gain"): "kept optimizer state against new state in each phase",
}
"""(control, metric) of `phase_gains` → what is compared."""


def of_curation(step: Step) -> bool:
    """True if a step's figures belong to the section on the corpus."""
    return step.artifact.kind in CORPUS_KINDS and step.stage not in EXPERIMENTS


def figures(step: Step, without: str = "") -> list[Plot]:
    """Return the plots of a step's figures, except the heat map and the figure named `without`."""
    return [Plot.of(figure) for name, figure in sorted(step.artifact.manifest.figures.items()) if name not in (without, HEAT)]


def heat_view(steps: Iterable[Step]) -> Html:
    """Return a heat map of accuracy by the needle's depth in the context, with a row per step and series of the step's figure."""
    rows: list[tuple[str, list[tuple[str, float]]]] = []
    for step in steps:
        figure = step.artifact.manifest.figures.get(HEAT)
        rows += [(f"{step.label}: {name}", points) for name, points in figure["series"].items()] if figure else []
    if not rows:
        return Html("")
    heads: list[Content] = ["depth", *(depth for depth, _ in rows[0][1])]
    cells: list[list[Content]] = [
        [name, *(tag("span", f"{share:.2f}", style=f"background:rgb(70 130 180 / {share:.2f});padding:.2em .6em") for _, share in points)]
        for name, points in rows
    ]
    return part("Passages found in long text", table(heads, cells), note="Share of passages, by the share of the text before them.")


def with_titles(step: Step, plots: Sequence[Plot]) -> list[Plot]:
    """Return the plots with the step's label before their titles, unless a title begins with it."""
    own = step.label
    return [p if p.title.lower().startswith(own.lower()) else replace(p, title=f"{own}: {p.title[:1].lower()}{p.title[1:]}") for p in plots]


def figures_view(steps: Iterable[Step], title: str, without: str = "") -> Html:
    """Return the figures of several steps side by side, except figures named `without`."""
    return part(title, grid(plot for step in steps for plot in with_titles(step, figures(step, without))))


def experiments_view(run: Run) -> Html:
    steps = [step for step in run.steps if step.stage in EXPERIMENTS]
    parts = [part(step.label, grid(figures(step)), note=facts(step)) for step in steps]
    return join([*parts, forecasts_view(run)])


def forecasts_view(run: Run) -> Html:
    """Return a table of the store's forecasts with the losses measured later."""
    rows: list[list[Content]] = []
    for one in query(run.store, "select * from forecasts").to_pylist():
        interval = f"{one['predicted']:.3f} ({one['low']:.3f} to {one['high']:.3f})"
        outcome = "not yet" if one["measured"] is None else f"{one['measured']:.3f}, {'inside' if one['inside'] else 'outside'}"
        rows.append([one["forecast"][:12], f"{one['flops']:.2g}", short(one["tokens"]), interval, outcome, (one["model"] or "")[:12]])
    head: list[Content] = ["forecast", "operations", "tokens", "predicted loss (95 %)", "measured", "model"]
    return part("Forecasts and outcomes", table(head, rows, numeric=(1, 2)) if rows else None)


def gains_view(run: Run) -> Html:
    """Return a table of the gain of each phase over its control, with a verdict; empty without `phase_gains`."""
    steps = [step for step in run.steps if step.stage == "phase_gains"]
    found = {(row["task"], row["metric"]): row for step in steps for row in step.artifact.read().to_pylist()}
    rows: list[list[Content]] = []
    for row, compared in ((found[name], compared) for name, compared in GAINS.items() if name in found):
        ratio, gain = found[row["task"], "token_ratio"]["value"], Interval(row["value"], row["low"], row["high"])
        verdict = "the same run" if gain == (0, 0, 0) else Claim(compared, row["task"], row["metric"], gain, ratio).verdict
        rows.append([compared, f"{gain.value:.4f} ({gain.low:.4f} to {gain.high:.4f})", number(row["n"]), f"{ratio:.2f}", verdict])
    head: list[Content] = ["phase", "nats per token (95 %)", "pages", "control's tokens / the model's", "verdict"]
    note = "Loss of a control run minus the model's, on the same held-out pages. The interval does not include variation between seeds."
    return part("What each phase earns", table(head, rows, numeric=(2, 3)) if rows else None, note=note)


def facts(step: Step) -> Content:
    lines: list[Content] = []
    for name, value in step.metrics.items():
        text = value if isinstance(value, str) else number(value) if abs(value) < 1e7 else short(value)
        lines.append(tag("span", tag("span", name.replace("_", " ")), " ", tag("b", text), class_="fact"))
    return tag("span", lines, class_="facts") if lines else None


def training_view(steps: Sequence[Step], title: str) -> Html:
    """Return the loss plots of all training runs side by side, then collapsed plots of the other logged columns, and the metrics."""
    first: list[Plot] = []
    more = []
    for step in steps:
        columns: dict[str, list[float | None]] = step.artifact.read("training_log").to_pydict() if step.has("training_log") else {}
        plots, others = _plots(step, columns)
        first += with_titles(step, plots)
        account, metrics = None, facts(step)
        if columns:
            tokens = int(sum(value for value in columns["tokens"] if value is not None))
            account = f"{len(columns['step']):,} steps of {step.stage}, {short(tokens)} tokens, {duration(step.made_seconds)}. "
        if account or metrics:
            inside = [tag("p", account, metrics, class_="note"), grid(others)]
            heading = f"{len(others)} more curves" if others else "metrics"
            head = [tag("b", step.label), " ", tag("span", heading, class_="note")]
            more.append(details(head, inside, open_=len(steps) == 1, class_="more"))
    return part(title, grid(first), more)


def _plots(step: Step, columns: Mapping[str, list[float | None]]) -> tuple[list[Plot], list[Plot]]:
    """Return a training run's loss plot and figures, then plots of its other logged numbers. `columns`: its log, by column."""
    plots = figures(step)
    steps = columns.get("step", [])
    curves = [curve(name, steps, values) for name, values in columns.items() if name not in PLAIN and len(set(values) - {None}) > 1]
    # The log's curve replaces a figure of the loss by step, which shows the same data. Other figures of the loss stay.
    plots = [plot for plot in plots if not (plot.x == "step" and plot.y == "loss" and "loss" in columns)]
    drawn_by_stage = any("loss" in plot.title.lower() for plot in plots)
    first = [c for c in curves if c.y == "loss" and not drawn_by_stage]
    return [*first, *plots], [c for c in curves if c not in first]


def curve(name: str, steps: Sequence[float | None], values: Sequence[float | None]) -> Plot:
    """Return a plot of one logged number over the steps. A long series, except the learning rate, is a smooth line over faint points."""
    points: list[Point] = [(float(s), float(v)) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    words = name.replace("_", " ")
    if len(points) < SMOOTHED_FROM or name == "learning_rate":
        return Plot(words.capitalize(), "step", words, {words: points})
    smooth = smooth_line(points)
    return Plot(words.capitalize(), "step", words, {"each step": points, words: smooth}, faint=frozenset(["each step"]))


def smooth_line(points: Sequence[Point]) -> list[Point]:
    """Return the moving average over about a twentieth of the run: centred, shorter at the steep start, one-sided at the noisy end."""
    half = max(1, len(points) // 40)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    means: list[Point] = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i)
        stop = min(len(points), i + reach + 1)
        means.append((x, (sums[stop] - sums[i - reach]) / (stop - i + reach)))
    return means
