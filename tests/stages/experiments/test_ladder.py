"""A ladder of small runs, the scaling law through its points, and the model size that it chooses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pydantic import ValidationError
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.report.training import forecasts_view
from puna.models import accounting
from puna.models.config import ModelConfig, ModelShape
from puna.models.training.loop import TrainingDiverged
from puna.models.training.settings import OptimizerSettings
from puna.models.transformer import Transformer
from puna.stages.contract import Facts, execute, identify
from puna.stages.contract.declaration import InputFacts
from puna.stages.experiments import choose_size as chosen_sizes
from puna.stages.experiments import ladder as module
from puna.stages.experiments.choose_size import ChooseSizeConfig, choose_size
from puna.stages.experiments.ladder import LadderConfig, ladder
from puna.stages.experiments.law import LawConfig, law, read_points
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.training.chosen_size import ChosenSize
from puna.stages.training.phase import OPTIMIZER, SHAPE, Phase
from puna.stages.training.proxy_runs import resize
from puna.stages.training.train import divergence_named
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema

MODEL = SHAPE.replace(
    hidden_size=24, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, tie_word_embeddings=False
)
SETTINGS = LadderConfig(
    model=MODEL, widths=(8, 12, 16), tokens_per_parameter=0.5, multiples=(1.0, 2.0), rows=(1,), rates=(0.02,), validation_share=0.05, questions=3,
    compute={"save_seconds": 1e6},
)  # fmt: skip


@pytest.fixture
def given(store, corpus):
    made = corpus([("high", 40 + 7 * (i % 5)) for i in range(60)])
    tokens = execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": made["documents"], "tokenizer": made["tokenizer"]}, store)
    return {"tokens": tokens, "tokenizer": made["tokenizer"]}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEWEST_STEPS", 10)


def test_a_forecast_has_the_ladders_schedule(store, given, few_steps: None) -> None:
    made = execute(ladder, SETTINGS.model_copy(update={"decay_share": 0.5, "questions": 0}), given, store)
    assert {row["decay_share"] for row in made.read("points").to_pylist()} == {0.5}
    run = SimpleNamespace(stage="choose_size")
    # Points of an earlier version lack the share and get it from the ladder's settings; points of an earlier law are ignored.
    table = made.read("points").drop_columns("decay_share")
    old = SimpleNamespace(id="old", tables=("points",), manifest=made.manifest, read=lambda name: table)
    assert {row["decay_share"] for row in read_points([old], LawConfig(), run)} == {0.5}  # type: ignore[list-item, arg-type]
    old.manifest = SimpleNamespace(config={})
    with pytest.raises(PunaError, match="the share of steps in which the learning rate decays; run law again"):
        chosen_sizes._recipe_of(None, read_points([old], LawConfig(), run))  # type: ignore[arg-type, list-item]


def test_a_run_that_is_done_is_not_repeated(store, given, few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = module.train_proxy, []

    def crashing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "train_proxy", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(ladder, SETTINGS, given, store)
    interrupted = execute(ladder, SETTINGS, given, store)
    # Three shapes with two trunks and two decays. The seventh call was interrupted; the two trunks of its shape resume from checkpoints.
    assert len(calls) == 12 + 1 + 1
    monkeypatch.setattr(module, "train_proxy", original)
    whole = execute(ladder, SETTINGS, given, Store.open(store.root.parent / "other"))
    # The points are part of the digest, and contain no measurement of the machine.
    assert interrupted.data_digest == whole.data_digest and table_schema("points").identity


def test_a_decay_is_what_a_run_of_its_own_would_be(store, given, few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first point of a trunk is the same with or without later points, and in this process, as on a GPU."""
    both = execute(ladder, SETTINGS, given, store).read("points").to_pylist()
    original = module.run_trials
    monkeypatch.setattr(module, "run_trials", lambda *arguments, **how: original(*arguments, **{**how, "here": True}))
    one = execute(ladder, SETTINGS.model_copy(update={"multiples": (1.0,)}), given, store).read("points").to_pylist()
    assert [point["loss"] for point in one] == [point["loss"] for point in both[::2]]


def test_the_narrower_shapes_run_with_further_seeds(store, given, few_steps: None) -> None:
    made = execute(ladder, SETTINGS.model_copy(update={"repeats": 2, "questions": 0}), given, store)
    points = made.read("points").to_pylist()
    seeds: dict[int, list[int]] = {}
    for point in points:
        seeds.setdefault(point["parameters"], []).append(point["seed"])
    assert [len(set(seeds[size])) for size in sorted(seeds)] == [3, 1, 1] and [len(seeds[size]) for size in sorted(seeds)] == [6, 2, 2]
    losses = np.log([[point["loss"] for point in points if point["seed"] == seed] for seed in {*seeds[min(seeds)]}])
    noise = np.sqrt(losses.mean(1).var(ddof=1)) * 4.3026527 / 1.9599640  # Student's t with two degrees of freedom
    assert execute(law, LawConfig(draws=100), {"ladders": [made]}, store).manifest.metrics["seed_noise"] == pytest.approx(noise, rel=1e-6)


def test_budgets_that_are_too_small_are_refused_before_any_run(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "run_trials", lambda *_: pytest.fail("a run was begun"))
    with pytest.raises(PunaError, match=r"width 8 \(.*\) on .* tokens has \d+ steps of 1 rows of 64 tokens, below 400"):
        execute(ladder, SETTINGS, given, store)
    with pytest.raises(PunaError, match="more than max_flops=1e\\+06; leave the width out"):
        execute(ladder, SETTINGS.model_copy(update={"max_flops": 1e6}), given, store)
    for wrong, message in (({"widths": (16, 12, 8)}, "must be positive and increase"), ({"widths": (8, 12, 13)}, "cannot be divided")):
        with pytest.raises(ValidationError, match=message):
            LadderConfig(model=MODEL, **wrong)


def test_rows_and_rate_are_tuned_at_two_scales(store, given, few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses with a known optimum: rate .02 at the small scale and .05 at the large one, two rows at both."""
    best, tried = {8: 0.02, 12: 0.05}, set[tuple[int, ...]]()

    def trials(run: Any, make: Any, jobs: Any, *shared: Any, here: bool) -> Any:
        for name, rung, _ in jobs:
            if name.startswith("tuning-0"):
                tried.add((rung.rows, *rung.steps))
            width = rung.shape.hidden_size
            loss = 3 + np.log(rung.rate / best.get(width, rung.rate)) ** 2 + (rung.rows - 2) ** 2
            point = {
                "shape": rung.shape.model_dump_json(), "parameters": accounting.matrix_parameters(rung.shape), "tokens": 1, "steps": 1, "flops": 1.0,
                "rows": rung.rows, "learning_rate": rung.rate, "seed": 0, "losses": {"validation": float(loss)},
                "heldout_tokens": {"validation": 1}, "decay_share": 0.25, "task_loss": None, "accuracy": None,
            }  # fmt: skip
            yield {"name": name, "points": [point]}

    monkeypatch.setattr(module, "run_trials", trials)
    config = SETTINGS.model_copy(update={"rows": (1, 2), "rates": (0.01, 0.03, 0.1), "multiples": (1.0, 3.0, 9.0, 27.0)})
    points = execute(ladder, config, given, store).read("points").to_pylist()
    # The middle multiple is 3: 1.5 tokens per parameter. Within 1.5e8 FLOPs only multiple 1 fits at the second scale.
    small = points[0]["parameters"]
    assert tried == {(1, round(1.5 * small / 64)), (2, round(1.5 * small / 128))}
    tried.clear()
    execute(ladder, config.model_copy(update={"max_flops": 1.5e8}), given, store)
    assert tried == {(1, round(0.5 * small / 64)), (2, round(0.5 * small / 128))}
    assert [point["rows"] for point in points] == [2, 2, 2]
    # A parabola in the logarithm finds the best rate between those tried; a third shape lies on the power law through the two.
    assert points[0]["learning_rate"] == pytest.approx(0.02) and points[1]["learning_rate"] == pytest.approx(0.05)
    sizes = np.log([point["parameters"] for point in points])
    slope = np.log(2.5) / (sizes[1] - sizes[0])
    assert points[2]["learning_rate"] == pytest.approx(0.05 * np.exp(slope * (sizes[2] - sizes[1])))


def test_a_rate_that_diverges_is_a_lost_try(store, given, few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.train_proxy

    def training(model: Any, name: str, batches: Any, lengths: Any, settings: Any, *more: Any) -> Any:
        with divergence_named(name):
            if settings.schedule.learning_rate > 0.3:
                raise TrainingDiverged("too hot")
        return original(model, name, batches, lengths, settings, *more)

    monkeypatch.setattr(module, "train_proxy", training)
    config = SETTINGS.model_copy(update={"rates": (0.02, 0.4), "multiples": (1.0,), "questions": 0})
    made = execute(ladder, config, given, store)
    assert [point["learning_rate"] for point in made.read("points").to_pylist()] == pytest.approx([0.02] * 3)
    tries = [row["metric"] for row in made.read().to_pylist() if row["task"] == "tuning"]
    assert made.manifest.metrics["diverged_tries"] == len(tries) == 2 and all("rate 0.02" in name for name in tries)
    # The parabola through three losses needs all of them.
    assert module._lowest((1.0, 2.0, 4.0), (3.0, 1.0, np.inf)) == 2.0
    with pytest.raises(PunaError, match=r"ladder: training diverges at each of rates=\(0.4, 0.5\); give lower rates"):
        execute(ladder, config.model_copy(update={"rates": (0.4, 0.5)}), given, store)
    with pytest.raises(PunaError, match="a model of width 16 at rate 0.4 diverged: too hot"):
        execute(ladder, config.model_copy(update={"rates": (0.4,)}), given, store)


def test_the_ladder_trains_with_the_z_loss_of_the_run(store, given, few_steps: None, monkeypatch: pytest.MonkeyPatch) -> None:
    original, used = module.train_proxy, set[float]()

    def training(*arguments: Any) -> Any:
        used.add(arguments[8])
        return original(*arguments)

    monkeypatch.setattr(module, "train_proxy", training)
    config = SETTINGS.model_copy(update={"multiples": (1.0,), "questions": 0, "rates": (0.02,), "rows": (2,)})
    losses = [
        [point["loss"] for point in execute(ladder, config.model_copy(update={"z_loss": weight}), given, store).read("points").to_pylist()]
        for weight in (0.0, 0.5)
    ]  # fmt: skip
    assert used == {0.0, 0.5} and all(plain != other for plain, other in zip(*losses, strict=True))


def test_shapes_are_resized_in_proportion() -> None:
    target = SHAPE.replace(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2)
    assert resize(target, 192).model_dump(exclude={"head_dim"}) == target.model_dump(exclude={"head_dim"})
    half = resize(target, 96)
    assert (half.intermediate_size, half.num_hidden_layers, half.num_attention_heads, half.num_key_value_heads) == (256, 2, 3, 1)
    assert half.initializer_range == pytest.approx(target.initializer_range * 2**0.5)
    assert resize(target, 384).num_hidden_layers == 8
    for width in (32, 48, 64, 80, 96, 128):
        config = resize(target, width).complete(1000, 64)
        assert config.num_attention_heads * config.head_dim == width


def planted(store: Store, largest: ModelShape = SHAPE, above: float | None = None, asked: int = 25) -> Artifact:
    """Return a ladder whose points lie on a known surface. With `above`, a second text set, poems, has losses higher by this much. `asked`:
    number of points with questions."""
    rows = []
    for width in (32, 40, 48, 56, 64):
        shape = resize(largest, width).complete(1024, 256)
        n = accounting.matrix_parameters(shape)
        for multiple in (0.25, 0.5, 1.0, 2.0, 4.0):
            d = round(20 * n * multiple)
            loss = 1.7 + 20 / n**0.35 + 30 / d**0.3
            rows.append({
                "point": len(rows), "heldout": "validation", "heldout_tokens": 500, "shape": shape.model_dump_json(), "parameters": n, "tokens": d,
                "flops": accounting.training_flops(shape, [256]) / 256 * d, "loss": loss, "task_loss": loss / 2,
                "accuracy": 0.25 + 0.75 / (1 + float(np.exp(3 * loss / 2 - 5))), "seed": 0, "rows": 2, "learning_rate": 0.04 * (n / 1e5) ** -0.5,
                "steps": 1000, "optimizer": OPTIMIZER.model_dump_json(), "decay_share": 0.1,
            })  # fmt: skip
    for row in rows[asked:]:
        row |= {"task_loss": None, "accuracy": None}
    if above is not None:
        rows += [{**row, "heldout": "poems", "heldout_tokens": 300, "loss": row["loss"] + above} for row in rows]
    table = pa.Table.from_pylist(rows, schema=table_schema("points").schema)
    return store.import_table("evaluation", pa.Table.from_pylist([], schema=table_schema("evaluation").schema), points=table)


def test_ladders_of_different_sparsity_are_not_one_law(store) -> None:
    sparse = SHAPE.replace(moe={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64})
    assert execute(law, LawConfig(draws=100), {"ladders": [planted(store, sparse)]}, store).manifest.metrics["backtest_error"] < 0.1
    with pytest.raises(PunaError, match="models with 1 of 1 and 2 of 8 experts per token are not on one law"):
        execute(law, LawConfig(draws=100), {"ladders": [planted(store), planted(store, sparse)]}, store)


def test_law_and_size_of_planted_points(store) -> None:
    surface = execute(law, LawConfig(draws=100), {"ladders": [planted(store)]}, store)
    found = {(row["task"], row["metric"]): row["value"] for row in surface.read().to_pylist()}
    assert found["surface", "floor"] == pytest.approx(1.7, abs=0.05) and found["accuracy", "slope"] == pytest.approx(3.0, rel=0.05)
    metrics = surface.manifest.metrics
    assert metrics["backtest_error"] < 0.01 and set(surface.manifest.figures) == {"law", "parabolas", "sizes", "accuracy"}
    # The optimal number of parameters grows as C^(b / (a + b)).
    assert metrics["parameters_exponent"] == pytest.approx(0.3 / 0.65, abs=0.1)
    for budget, parameters in surface.manifest.figures["sizes"]["series"]["law"]:
        # The minimum of 20 / N^.35 + 30 / D^.3 with 6 N D = C; the FLOPs per token are slightly more than 6 N.
        assert parameters == pytest.approx((0.35 * 20 / (0.3 * 30)) ** (1 / 0.65) * (budget / 6) ** (0.3 / 0.65), rel=0.15)
    flops = 1e14
    chosen = execute(choose_size, ChooseSizeConfig(flops=flops, draws=100), {"law": surface}, store)
    numbers = chosen.manifest.metrics
    n, d = numbers["parameters"], numbers["tokens"]
    assert numbers["predicted_loss"] == pytest.approx(1.7 + 20 / n**0.35 + 30 / d**0.3, rel=0.01)
    assert chosen.manifest.metrics["flops"] == pytest.approx(flops)
    drawn = chosen.manifest.figures["forecast"]["series"]
    assert [loss for _, loss in drawn["forecast"]] == [numbers[f"predicted_loss{end}"] for end in ("", "_low", "_high")]
    assert drawn["law, best sizes"][-1] == pytest.approx([flops, numbers["predicted_loss"]], rel=0.01)
    forecast = {row["metric"]: row["value"] for row in chosen.read().to_pylist()}
    assert forecast["accuracy"] == pytest.approx(0.25 + 0.75 / (1 + np.exp(1.5 * numbers["predicted_loss"] - 5)), abs=0.01)
    size = ChosenSize.read(chosen)
    assert size.phase.schedule.learning_rate == pytest.approx(0.04 * (n / 1e5) ** -0.5, rel=0.01) and size.optimizer == OPTIMIZER
    assert size.phase.schedule.anneal_steps == 0.1 and size.phase.schedule.shape == "constant"
    # A given size is forecast unchanged; GPU hours are accepted as a budget, too.
    same = execute(choose_size, ChooseSizeConfig(model=SHAPE, tokens=10**7, draws=100), {"law": surface}, store).manifest.metrics
    assert same["parameters"] == accounting.matrix_parameters(SHAPE.complete(1024, 256)) and same["tokens"] == 1e7
    hours = [ChooseSizeConfig(hours=h, gpu="H100", draws=100) for h in (0.001, 0.002)]
    less, more = (execute(choose_size, config, {"law": surface}, store).manifest.metrics for config in hours)
    assert more["predicted_loss"] < less["predicted_loss"] and more["flops"] > 1.5 * less["flops"]


def test_a_few_points_with_questions_give_no_law_of_accuracy(store) -> None:
    """Ladders with and without questions are fitted together."""
    surface = execute(law, LawConfig(draws=100), {"ladders": [planted(store, asked=4)]}, store)
    chosen = execute(choose_size, ChooseSizeConfig(flops=1e14, draws=100), {"law": surface}, store)
    for made in (surface, chosen):
        assert not {"accuracy"} & {row[name] for row in made.read().to_pylist() for name in ("task", "metric")}


def test_the_key_of_a_chosen_size_covers_its_optimizer(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings name AdamW, but the size was measured, and is trained, with Muon."""
    monkeypatch.setattr(sys.modules[__name__], "OPTIMIZER", OptimizerSettings(name="muon"))
    surface = execute(law, LawConfig(draws=100), {"ladders": [planted(store)]}, store)
    chosen = execute(choose_size, ChooseSizeConfig(flops=1e14, draws=100), {"law": surface}, store)
    keys = [identify(pretrain, PretrainConfig(), given | size).code for size in ({}, {"size": chosen})]
    assert [any("optimizers.muon." in name for name in symbols) for symbols in keys] == [False, True]


def test_a_law_of_experts_counts_those_that_a_token_meets(store) -> None:
    """2 of 8 experts are active: the matrices of 2, a router, and an output layer count; the chosen model has 8 resized experts."""
    mixed = SHAPE.replace(moe={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64})
    surface = execute(law, LawConfig(draws=100), {"ladders": [planted(store, mixed)]}, store)
    row = max(surface.read("points").to_pylist(), key=lambda row: row["parameters"])
    # A third of 192 wide: 2 layers, 2 heads of 32 on one of keys and values, experts of 24.
    attention, experts, router = 2 * 64 * 64 + 2 * 64 * 32, 2 * 3 * 64 * 24, 8 * 64
    assert row["parameters"] == 2 * (attention + experts + router) + 1024 * 64
    made = execute(choose_size, ChooseSizeConfig(flops=1e13, draws=100), {"law": surface}, store)
    chosen, numbers = ChosenSize.read(made).model, made.manifest.metrics
    total = sum(weight.numel() for weight in Transformer(chosen.complete(1024, 256), seed=0).parameters())
    assert numbers["shape"].endswith("2 of 8 experts per token") and total == numbers["total_parameters"] > 1.5 * numbers["parameters"]
    assert chosen.moe is not None and chosen.moe.num_experts == 8 and chosen.hidden_size > 64
    assert chosen.moe.moe_intermediate_size == pytest.approx(chosen.hidden_size / 3, abs=8)


@pytest.mark.parametrize("times", [0.5, 4.0, 1000.0])
def test_a_size_grows_no_faster_than_any_published_law(times: float) -> None:
    """The ladder's best size near its largest budget has 800 parameters; the smaller budget does not count."""
    rows = [{"flops": 1e10, "parameters": 1000, "loss": 4.0}, {"flops": 9e9, "parameters": 800, "loss": 3.9}, {"flops": 1e9, "parameters": 9, "loss": 1.0}]
    growth = times * 1e10 / 9e9
    low, high = sorted(800 * growth**exponent for exponent in (0.3, 0.7))

    class Sized:
        flops = times * 1e10

        def __init__(self, parameters: float) -> None:
            self.parameters = parameters

    sizes = [Sized(n) for n in (low / 1.6, low / 1.4, 800 * growth**0.5, high * 1.4, high * 1.6)]
    assert chosen_sizes._growing(sizes, rows) == sizes[1:4]  # type: ignore[arg-type]
    with pytest.raises(PunaError, match="no shape of the ladder's family fits the budget"):
        chosen_sizes._growing([Sized(high * 9)], rows)  # type: ignore[list-item]


def test_wrong_budgets_are_refused(store) -> None:
    for wrong, message in (
        ({}, "give exactly one of flops, hours and tokens, not none"), ({"flops": 1e9, "hours": 1}, "not flops and hours"),
        ({"tokens": 100}, "tokens needs a model"), ({"flops": 1e9, "gpu": "H100"}, "gpu applies to hours"),
    ):  # fmt: skip
        with pytest.raises(ValidationError, match=message):
            ChooseSizeConfig(**wrong)
    with pytest.raises(PunaError, match=r"0 points of heldout='poems'.* held-out texts are validation"):
        execute(law, LawConfig(heldout="poems"), {"ladders": [planted(store)]}, store)


def test_a_forecast_is_of_one_text_set(store) -> None:
    """The losses of two text sets in one ladder follow two laws: each forecast is as narrow as from a ladder with only this set."""
    both, budget = planted(store, above=1.0), {"flops": 1e14, "draws": 100}
    alone = execute(choose_size, ChooseSizeConfig(**budget), {"law": planted(store)}, store)
    same, poems = (execute(choose_size, ChooseSizeConfig(**budget, heldout=name), {"law": both}, store) for name in ("validation", "poems"))
    columns = ("predicted_loss", "predicted_loss_low", "predicted_loss_high")
    assert [same.manifest.metrics[name] for name in columns] == [alone.manifest.metrics[name] for name in columns]
    assert poems.manifest.metrics["predicted_loss"] == pytest.approx(same.manifest.metrics["predicted_loss"] + 1, abs=0.03)
    # An outcome is a loss on the same number of validation tokens; no outcome is on the poems.
    stored = [{row["metric"]: row["value"] for row in made.read().to_pylist()}["validation_tokens"] for made in (same, poems)]
    assert stored == [500, 0] and poems.manifest.config["heldout"] == "poems"
    surface = execute(law, LawConfig(draws=100, heldout="poems"), {"ladders": [both]}, store)
    with pytest.raises(PunaError, match="choose_size: evaluation/.*: 0 points of heldout='validation' .* held-out texts are poems"):
        execute(choose_size, ChooseSizeConfig(**budget), {"law": surface}, store)
    store.set_alias("law@latest", surface)
    said = CliRunner().invoke(app, ["predict", "--flops", "1e14", "--json", "--store", str(store.root)])
    assert json.loads(said.stdout)["predicted_loss"] == pytest.approx(poems.manifest.metrics["predicted_loss"], abs=0.03)


def test_from_a_ladder_to_a_forecast_and_its_outcome(store, given, few_steps: None) -> None:
    """From the command line: a forecast is stored, and a pretraining run of its size on the ladder's tokens is its outcome."""
    rungs = execute(ladder, SETTINGS, given, store)
    points = rungs.read("points").to_pylist()
    shapes = [ModelConfig.model_validate_json(point["shape"]) for point in points]
    assert [shape.hidden_size for shape in shapes] == [8, 8, 12, 12, 16, 16]
    for point, shape, multiple in zip(points, shapes, (0.5, 1) * 3, strict=True):
        assert point["parameters"] == accounting.matrix_parameters(shape)
        assert point["steps"] == round(multiple * point["parameters"] / 64) and point["rows"] == 1
        assert point["tokens"] == pytest.approx(multiple * point["parameters"], rel=0.15)
        assert 0 <= point["accuracy"] <= 1 and point["task_loss"] > 0
    surface = execute(law, LawConfig(draws=100), {"ladders": [rungs]}, store)
    store.set_alias("law@latest", surface)
    runner, place = CliRunner(), ["--store", str(store.root)]
    said = runner.invoke(app, ["predict", "--flops", "1e9", *place])
    assert said.exit_code == 0 and "nats per token" in said.stdout, said.output
    forecast = json.loads(runner.invoke(app, ["predict", "--flops", "1e9", "--json", *place]).stdout)
    assert forecast["predicted_loss_low"] <= forecast["predicted_loss"] <= forecast["predicted_loss_high"]
    assert forecast["flops"] == pytest.approx(1e9)

    def outcomes() -> list[dict[str, Any]]:
        return [json.loads(line) for line in runner.invoke(app, ["predict", "--outcomes", "--json", *place]).stdout.splitlines()]

    size = store.resolve(forecast["id"])
    assert store.alias(f"forecast@{size.key[:16]}") == size  # so that `gc` keeps it
    assert [(row["forecast"], row["model"], row["measured"], row["inside"]) for row in outcomes()] == [(size.key, None, None, None)]
    recipe = yaml.safe_load(Path(forecast["recipe"]).read_text())["pretrain"]
    config = PretrainConfig(**recipe, validation_share=0.05)
    assert config.phases[0].until == round(forecast["tokens"]) and config.phases[0].schedule.learning_rate == 0.02
    assert accounting.matrix_parameters(config.model.complete(shapes[0].vocab_size, 64)) == forecast["parameters"]
    # The run has the ladder's settings, even those in which pretrain's default model differs from a plain one.
    assert config.model.tie_word_embeddings == MODEL.tie_word_embeddings and SHAPE.tie_word_embeddings != MODEL.tie_word_embeddings
    made = execute(pretrain, config, given, store)
    (after,) = outcomes()
    loss = made.manifest.metrics["validation_loss"]
    assert (after["model"], after["measured"]) == (made.key, loss) and after["inside"] == (after["low"] <= loss <= after["high"])
    # Used as an input it is the same training run; the loss after a later phase is not the forecast one.
    further = PretrainConfig(phases=(Phase(), Phase(name="more", steps=3 * config.phases[0].with_steps(64).steps)), validation_share=0.05)
    longer = execute(pretrain, further, {**given, "size": size}, store).manifest.metrics
    assert longer["measured_loss"] == loss != longer["validation_loss"] and longer["predicted_loss"] == after["predicted"]
    assert [row["measured"] for row in outcomes()] == [loss, loss]
    assert forecasts_view(SimpleNamespace(store=store)).count(f"{loss:.3f}, {'in' if after['inside'] else 'out'}side") == 2  # type: ignore[arg-type]
    # A control run that lacks only a later phase has the same first phase, so it is no second outcome.
    execute(pretrain, further.replace(phases=(Phase(),)), {**given, "size": size}, store)
    assert [row["measured"] for row in outcomes()] == [loss, loss]
    # With other documents held out, the loss is no outcome, and the run and the views say so.
    fewer = execute(pretrain, PretrainConfig(validation_share=0.05, validation_tokens=100), {**given, "size": size}, store)
    numbers = fewer.manifest.metrics
    assert not {"measured_loss", "predicted_loss"} & set(numbers) and numbers["validation_tokens"] < longer["validation_tokens"]
    assert numbers["outcome"].startswith(f"none: {size.id} has no forecast for these {numbers['validation_tokens']} held-out tokens")
    assert {row["model"]: row["measured"] for row in outcomes()}[fewer.key] is None
    assert "not yet" in forecasts_view(SimpleNamespace(store=store))  # type: ignore[arg-type]
    refused = runner.invoke(app, ["predict", "--outcomes", "--flops", "1e9", *place])
    assert isinstance(refused.exception, PunaError) and "leave --flops" in str(refused.exception)
    for budget in ([], ["--flops", "1e9", "--hours", "1"]):
        refused = runner.invoke(app, ["predict", *budget, *place])
        assert str(refused.exception) == "predict: give exactly one budget, --flops or --hours"
    refused = runner.invoke(app, ["predict", "--flops", "-1", *place])
    assert str(refused.exception) == "predict.flops: Input should be greater than 0 (got -1.0)"
    lacking = runner.invoke(app, ["predict", "--flops", "1e9", "--law", "none@latest", *place])
    assert "none@latest: " in str(lacking.exception) and "`puna run ladder`, then `puna run law" in str(lacking.exception)


def test_a_chosen_size_leaves_nothing_else_to_set(store, given) -> None:
    facts = Facts({"size": (InputFacts("evaluation"),)}, 10**9)
    assert pretrain.needs(PretrainConfig(phases=(Phase(name="first"),)), facts) == []
    wrong = PretrainConfig(model=MODEL, optimizer={"name": "muon"}, phases=(Phase(steps=5),))
    assert [line.partition(":")[0] for line in pretrain.needs(wrong, facts)] == ["model", "optimizer", "phases.0, but for its name,"]
    (both,) = pretrain.needs(PretrainConfig(), Facts({**facts.inputs, "model": (InputFacts("model"),)}, 10**9))
    assert "give only one of the two" in both
    size = execute(choose_size, ChooseSizeConfig(flops=1e12, draws=100), {"law": execute(law, LawConfig(draws=100), {"ladders": [planted(store)]}, store)}, store)
    with pytest.raises(PunaError, match="has rows of 64 tokens, but the size was chosen for 256"):
        execute(pretrain, PretrainConfig(), {**given, "size": size}, store)
    with pytest.raises(PunaError, match="contains no size; give an artifact of the stage choose_size, not of import"):
        execute(pretrain, PretrainConfig(), {**given, "size": planted(store)}, store)
