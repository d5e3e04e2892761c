"""The scaling law fitted to a ladder's losses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from puna.stages.contract import Evaluation, Figure, SeededConfig, StageRun, stage
from puna.stages.experiments.ladder import PARTS
from puna.stages.training import scaling_laws
from puna.stages.training.intervals import Interval, evaluation_row
from puna.stages.training.scaling_laws import Forecaster, Parabola, Points, Sigmoid
from puna.storage import Artifact, PunaError


class LawConfig(SeededConfig):
    heldout: str = Field("validation", description="Held-out text whose loss is predicted: validation, or the id of a `heldout` artifact")
    draws: int = Field(200, ge=100, le=100_000, description="Number of bootstrap draws for an interval")


@stage(kind="evaluation")
def law(ladders: list[Evaluation], config: LawConfig, run: StageRun) -> None:
    """Find the scaling law of a ladder: loss as a function of parameters and tokens (Hoffmann et al. 2022; Llama 3, section 3.2.1).

    Two surfaces are fitted to all points, and the one with the better fit is used: E + A / N^a + B / D^b, or one where the scarcer of
    parameters and tokens limits the loss (Kaplan et al. 2020). Parameters are those of matrices that a token meets, with its own experts
    only, so that 6 N D estimates the FLOPs; a law has one sparsity. For a budget with at least three shapes, an IsoFLOP parabola gives the
    best number of parameters. The loss of the questions' right options has its own surface; accuracy is a sigmoid of that loss. To test the
    method, known budgets are forecast from the points of lower budgets. Several ladders are fitted together."""
    rows = read_points(ladders, config, run)
    run.write_rows([{**row, "point": number} for number, row in enumerate(rows)], "points")
    forecaster = forecaster_of(rows, config, run)
    lines = scaling_laws.parabolas(forecaster.points)
    table = _surface_rows(forecaster) + _parabola_rows(lines, run)
    for test in forecaster.backtests:
        task = f"known budget {test.flops:.3g} from those up to {test.below:.3g}"
        table += [evaluation_row(task, "predicted loss", test.predicted, 1), evaluation_row(task, "measured loss", test.measured, 1)]
    run.metric("points", len(rows))
    run.metric("seed_noise", forecaster.points.seed_noise())
    _law_figure(forecaster, run)
    _parabola_figure(lines, forecaster, run)
    if asked := with_accuracy(rows):
        table += _task_rows(asked, run)
    run.write_rows(table)


def read_points(artifacts: Sequence[Artifact], config: LawConfig, run: StageRun) -> list[dict[str, Any]]:
    """Return the points of ladders, or of a law, on the held-out text. Raise PunaError if an artifact has no points, or if they are too few
    or from models of different sparsity."""
    for artifact in artifacts:
        if "points" not in artifact.tables:
            raise PunaError(f"{artifact.id} has no table `points`; give an artifact of the stage ladder, not of {artifact.manifest.stage}")
    # The points of an older ladder may lack a column of a newer setting.
    settings = [{name: value for name, value in one.manifest.config.items() if name == "decay_share"} for one in artifacts]
    every = [row | own for own, artifact in zip(settings, artifacts, strict=True) for row in artifact.read("points").to_pylist()]
    rows: list[dict[str, Any]] = [row for row in every if row["heldout"] == config.heldout]
    if len(rows) < scaling_laws.FEWEST:
        raise PunaError(f"{run.stage}: {', '.join(one.id for one in artifacts)}: {len(rows)} points of heldout={config.heldout!r} are too "
                        f"few for a law; held-out texts are {', '.join(sorted({row['heldout'] for row in every}))}")  # fmt: skip
    if len(experts := {_experts(row["shape"]) for row in rows}) > 1:
        raise PunaError(f"{run.stage}: {', '.join(one.id for one in artifacts)}: models with {' and '.join(sorted(experts))} experts per "
                        "token are not on one law; give ladders of one sparsity")  # fmt: skip
    return rows


def _experts(shape: str) -> str:
    moe = json.loads(shape).get("moe") or {"num_experts_per_tok": 1, "num_experts": 1}
    return f"{moe['num_experts_per_tok']} of {moe['num_experts']}"


def points_of(rows: Sequence[dict[str, Any]], value: str = "loss") -> Points:
    n, d, flops, loss = (np.array([row[name] for row in rows], dtype=np.float64) for name in ("parameters", "tokens", "flops", value))
    return Points(n, d, flops, loss, np.array([row["seed"] for row in rows]))


def forecaster_of(rows: Sequence[dict[str, Any]], config: LawConfig, run: StageRun) -> Forecaster:
    return scaling_laws.forecaster(points_of(rows), config.draws, run.generator("bootstrap"))


def _surface_rows(forecaster: Forecaster) -> list[dict[str, Any]]:
    surface, n = forecaster.surface, len(forecaster.points)
    residual = float(np.std(np.log(forecaster.points.loss / surface(forecaster.points.parameters, forecaster.points.tokens)[0])))
    rows = [evaluation_row("surface", "residual of the logarithm", residual, n)]
    for name in surface.__dataclass_fields__:
        low, high = np.quantile(getattr(forecaster.draws, name), [0.025, 0.975])
        rows.append(evaluation_row("surface", name, Interval(float(getattr(surface, name)[0]), float(low), float(high)), n))
    return rows


def _parabola_rows(lines: Sequence[Parabola], run: StageRun) -> list[dict[str, Any]]:
    rows, best = [], [(line.flops, *line.best) for line in lines if line.best]
    for flops, parameters, loss in best:
        task = f"budget {flops:.3g}"
        rows += [evaluation_row(task, "best parameters", parameters, 1), evaluation_row(task, "loss", loss, 1)]
    run.metric("parabolas", len(best))
    if len(best) > 1:
        growth = scaling_laws.fit_power([flops for flops, _, _ in best], [parameters for _, parameters, _ in best])
        run.metric("parameters_exponent", growth.exponent)
        run.metric("tokens_exponent", 1 - growth.exponent)
    return rows


def _law_figure(forecaster: Forecaster, run: StageRun) -> None:
    surface = forecaster.surface
    floor, errors = float(surface.floor[0]), [abs(test.predicted - test.measured) for test in forecaster.backtests]
    note = f"Floor {floor:.3f}, exponents {surface.parameter_exponent[0]:.3f} of parameters and {surface.token_exponent[0]:.3f} of tokens."
    if surface.joint[0] < 1:
        note += " The scarcer of the two limits the loss."
    alone = " No budget has enough points below it to be forecast from them: intervals are the bootstrap's alone."
    note += f" Known budgets are missed by {max(errors):.3f} at most." if errors else alone
    if errors:
        run.metric("backtest_error", max(errors))
    for name in ("floor", "joint", "parameter_exponent", "token_exponent"):
        run.metric(name, float(getattr(surface, name)[0]))
    run.figure("law", loss_figure(forecaster, float(forecaster.points.flops.max()), note))


def loss_figure(forecaster: Forecaster, flops: float, note: str, **further: list[tuple[Any, float]]) -> Figure:
    """Return a figure: losses of small runs, forecasts of known budgets, the law at the best sizes up to `flops`, and series `further`."""
    points, law = forecaster.points, [(budget, loss) for budget, _, loss in _best_sizes(forecaster, flops)]
    forecasts = [(test.flops, test.predicted) for test in forecaster.backtests]
    series: dict[str, list[tuple[Any, float]]] = {
        "law, best sizes": law, "small runs": list(zip(points.flops.tolist(), points.loss.tolist(), strict=True)),
        "known budgets, from those below": forecasts, **further,
    }  # fmt: skip
    return Figure("Loss against compute", x="operations", y="nats per token", kind="scatter", series=series, note=note)


def _best_sizes(forecaster: Forecaster, flops: float) -> list[tuple[float, float, float]]:
    """Return (budget, best number of parameters, loss) according to the law, for budgets up to `flops`."""
    points = forecaster.points
    cost = (points.flops / points.parameters / points.tokens).mean()
    sizes = np.geomspace(points.parameters.min() / 4, points.parameters.max() * 4 * flops / points.flops.max(), 300)
    budgets = np.geomspace(points.flops.min(), flops, 40)
    losses = np.array([forecaster.surface(sizes, budget / cost / sizes)[0] for budget in budgets])
    return list(zip(budgets.tolist(), sizes[losses.argmin(1)].tolist(), losses.min(1).tolist(), strict=True))


def _parabola_figure(lines: Sequence[Parabola], forecaster: Forecaster, run: StageRun) -> None:
    if not lines:
        return
    series: dict[str, list[tuple[Any, float]]] = {}
    for line in lines:
        grid = np.linspace(np.log(line.parameters.min()), np.log(line.parameters.max()), 15)
        series[f"{line.flops:.2g}"] = [(float(np.exp(x)), float(np.polyval(line.coefficients, x))) for x in grid]
    best = [(line.flops, *line.best) for line in lines if line.best]
    series["best"] = [(parameters, loss) for _, parameters, loss in best]
    note = "One line is one budget of operations; its lowest point is the best number of parameters."
    title = "Loss over parameters at equal compute"
    run.figure("parabolas", Figure(title, x="parameters per token", y="nats per token", series=series, note=note))
    sizes = {
        "parabolas": [(flops, parameters) for flops, parameters, _ in best],
        "law": [(flops, parameters) for flops, parameters, _ in _best_sizes(forecaster, lines[-1].flops) if flops > lines[0].flops / 2],
    }
    run.figure("sizes", Figure("Best parameters of a budget", x="operations", y="parameters per token", kind="scatter", series=sizes))


def task_laws(rows: Sequence[dict[str, Any]]) -> tuple[scaling_laws.Surfaces, Sigmoid]:
    """Return the surface of the right options' loss, and the sigmoid that maps this loss to accuracy."""
    points = points_of(rows, "task_loss")
    accuracy = [row["accuracy"] for row in rows]
    surface = scaling_laws.fit_surfaces(points.parameters, points.tokens, points.loss[None])
    return surface, scaling_laws.fit_sigmoid(points.loss, accuracy, 1 / PARTS)


def with_accuracy(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points with multiple-choice questions; [] if they are too few for a law."""
    asked = [row for row in rows if row["accuracy"] is not None]
    return asked if len(asked) >= scaling_laws.FEWEST else []


def _task_rows(rows: Sequence[dict[str, Any]], run: StageRun) -> list[dict[str, Any]]:
    surface, sigmoid = task_laws(rows)
    nll, accuracy = np.array([row["task_loss"] for row in rows]), np.array([row["accuracy"] for row in rows])
    error = float(np.sqrt(np.mean((sigmoid(nll) - accuracy) ** 2)))
    grid = np.linspace(nll.min(), nll.max(), 30)
    series: dict[str, list[tuple[Any, float]]] = {
        "small runs": list(zip(nll.tolist(), accuracy.tolist(), strict=True)),
        "sigmoid": list(zip(grid.tolist(), sigmoid(grid).tolist(), strict=True)),
    }
    title, x = "Accuracy from likelihood", "nats per token of the right option"
    run.figure("accuracy", Figure(title, x=x, y="share of questions right", kind="scatter", series=series, note=f"Error {error:.4f}."))
    run.metric("accuracy_error", error)
    numbers = {"slope": sigmoid.slope, "level": sigmoid.level, "error": error, "floor of the likelihood": float(surface.floor[0])}
    return [evaluation_row("accuracy", name, value, len(rows)) for name, value in numbers.items()]
