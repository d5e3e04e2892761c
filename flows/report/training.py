"""Training and experiments on the page: the figures that stages wrote and the curves of their training logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from puna.flows.report.markup import Content, Html, details, duration, join, number, part, short, tag
from puna.flows.report.run import Run, Step
from puna.flows.report.svg import Plot, Point, draw, grid

EXPERIMENTS = ("mix_experiment", "scaling_law", "anneal_experiment")
CORPUS_KINDS = ("pages", "documents", "signals", "mixture", "tokenizer", "tokens")
POINTS = 240
SMOOTHED_FROM = 40
PLAIN = ("step", "tokens", "seconds")


def of_curation(step: Step) -> bool:
    """Whether a step's figures are about the corpus."""
    return step.artifact.kind in CORPUS_KINDS and step.stage not in EXPERIMENTS


def figures(step: Step) -> list[Html]:
    """The figures in a step's manifest."""
    return [draw(Plot.of(figure)) for _, figure in sorted(step.artifact.manifest.figures.items())]


def figures_view(steps: Sequence[Step]) -> Html:
    """The figures of several steps, each under its step's name."""
    return join([part(step.label, grid(figures(step))) for step in steps])


def experiments_view(run: Run) -> Html:
    """What the small runs found."""
    found = [step for step in run.steps if step.stage in EXPERIMENTS]
    return join([part(step.label, grid(figures(step)), note=facts(step)) for step in found])


def facts(step: Step) -> Content:
    """A step's metrics as a list of names and numbers."""
    shown: list[Content] = []
    for name, value in step.metrics.items():
        said = value if isinstance(value, str) else number(value)
        shown.append(tag("span", tag("span", name.replace("_", " ")), " ", tag("b", said), class_="fact"))
    return tag("span", shown, class_="facts") if shown else None


def training_view(steps: Sequence[Step]) -> Html:
    """Every training run: its loss first, what else was logged to open."""
    return join([_training(step) for step in steps if step.has("training_log") or step.artifact.manifest.figures])


def _training(step: Step) -> Html:
    drawn = step.artifact.manifest.figures
    plots = [Plot.of(figure) for _, figure in sorted(drawn.items())]
    columns = log_columns(step)
    steps = columns.pop("step", [])
    curves = [curve(name, steps, values) for name, values in columns.items() if name not in PLAIN and _varies(values)]
    if any(plot.y == "loss" and plot.x == "step" for plot in plots):
        # The stage drew its loss itself; the log holds the same numbers at more steps.
        plots = [plot for plot in plots if not (plot.y == "loss" and plot.x == "step" and columns.get("loss"))]
    first = [c for c in curves if c.y == "loss"]
    others = [c for c in curves if c.y != "loss"]
    more = details(f"{len(others)} more logged by step", grid(draw(c) for c in others), class_="more") if others else None
    return part(step.label, grid(draw(p) for p in [*first, *plots]), more, note=[_account(step, columns), facts(step)])


def _account(step: Step, columns: Mapping[str, list[float | None]]) -> Content:
    if not columns:
        return None
    tokens = int(sum(v for v in columns.get("tokens", []) if v is not None))
    count = len(next(iter(columns.values())))
    return f"{step.stage}: {count:,} steps, {short(tokens)} tokens, {duration(step.made_seconds)}. "


def log_columns(step: Step) -> dict[str, list[float | None]]:
    """The training log, column by column; empty when there is none."""
    if not step.has("training_log"):
        return {}
    table = step.artifact.read("training_log")
    return {name: table[name].to_pylist() for name in table.schema.names}


def _varies(values: Sequence[float | None]) -> bool:
    known = {v for v in values if v is not None}
    return len(known) > 1


def curve(name: str, steps: Sequence[float | None], values: Sequence[float | None]) -> Plot:
    """One logged number over the steps; a long noisy one also smoothed, over its own faint self."""
    points: list[Point] = [(float(s), float(v)) for s, v in zip(steps, values, strict=True) if s is not None and v is not None]
    words = name.replace("_", " ")
    if len(points) < SMOOTHED_FROM or name in ("learning_rate", "kl_coefficient"):
        return Plot(words.capitalize(), "step", words, {words: thinned(points)})
    smooth = smoothed(points)
    return Plot(
        words.capitalize(), "step", words, {"each step": thinned(points), words: thinned(smooth)}, faint=frozenset(["each step"])
    )  # fmt: skip


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Mean over a centred window of about a twentieth of the run, smaller at its ends so that it stays centred."""
    half = max(1, len(points) // 40)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    found: list[Point] = []
    for i, (x, _) in enumerate(points):
        reach = min(half, i, len(points) - 1 - i)
        found.append((x, (sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1)))
    return found


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most about `POINTS` points that keep the shape: smallest and largest of each stretch, first and last."""
    if len(points) <= POINTS:
        return list(points)
    stretch = -(-2 * len(points) // POINTS)
    kept: dict[int, None] = {0: None}
    for start in range(0, len(points), stretch):
        span = range(start, min(start + stretch, len(points)))
        ends = min(span, key=lambda i: points[i][1]), max(span, key=lambda i: points[i][1])
        kept.update(dict.fromkeys(sorted(ends)))
    kept[len(points) - 1] = None
    return [points[i] for i in sorted(kept)]


def last_metric(run: Run, stage: str, *names: str) -> tuple[Step, float] | None:
    """The newest value of the first of these metrics that a stage recorded."""
    for step in reversed(run.steps):
        if step.stage == stage:
            for name in names:
                value: Any = step.metrics.get(name)
                if isinstance(value, (int, float)):
                    return step, float(value)
    return None
