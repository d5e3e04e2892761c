"""What a phase earns is the difference of two losses on the same documents; each control lacks one phase, on as many tokens."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from puna.flows.engine.trace import flow_named, load, trace
from puna.flows.report import training
from puna.flows.report.run import Run
from puna.stages.contract import execute
from puna.stages.experiments.phase_gains import PhaseGainsConfig, phase_gains
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.bits_per_byte import document_nats
from puna.stages.training.phase import SHAPE, Acceptance, Growth, Phase, control_phases
from puna.stages.training.train import load_model
from puna.storage import PunaError
from tests.benchmarks import pretraining as benchmark
from tests.benchmarks import pretraining_phases as benchmark_phases

SMALL = SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
FLAT = {"learning_rate": 2e-2, "warmup_steps": 0, "shape": "constant"}


@pytest.fixture
def given(store, corpus):
    """Return documents of two categories, some of them held out, and tokens in rows of 64."""
    made = corpus([("high", 100)] * 30 + [("low", 20)] * 30)
    table = made["split"].read()
    split = table.set_column(table.schema.get_field_index("split"), "split", [["heldout" if i % 5 == 0 else "train" for i in range(60)]])
    mixture = store.import_table("mixture", split)
    inputs = {"documents": made["documents"], "mixture": mixture, "tokenizer": made["tokenizer"]}
    return inputs | {"tokens": execute(tokenize, TokenizeConfig(sequence_length=64), inputs, store)}


def trained(store, given, **changes):
    phase = Phase(**{"steps": 20, "rows_per_step": 2, "schedule": FLAT} | changes)
    config = PretrainConfig(model=SMALL, phases=(phase,), validation_share=0.1)
    return execute(pretrain, config, {name: given[name] for name in ("tokens", "tokenizer")}, store)


def compared(store, given, model, mixture=None, **others):
    inputs = {"model": model, "documents": given["documents"], "mixture": mixture or given["mixture"], **others}
    made = execute(phase_gains, PhaseGainsConfig(), inputs, store)
    return {(row["task"], row["metric"]): row for row in made.read().to_pylist()}


def nats(artifact, given, context: int, cut: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the nats and tokens of the held-out documents, or of their beginnings."""
    network, vocabulary = load_model(artifact, "lm")
    heldout = {row["id"] for row in given["mixture"].read().to_pylist() if row["split"] == "heldout"}
    texts = [row["text"] for row in given["documents"].read().to_pylist() if row["id"] in heldout]
    documents = [vocabulary.document(text)[:cut] for text in texts]
    return np.array(document_nats(network, documents, context, 8192)), np.array([len(ids) - 1 for ids in documents])


def test_a_gain_is_the_difference_of_losses_per_token(store, given) -> None:
    model, short = trained(store, given, steps=40), trained(store, given, steps=20, length=16)
    found = compared(store, given, model, short_rows=short)
    own, sizes = nats(model, given, 64)
    other, _ = nats(short, given, 16)  # the control is measured in the context that it was trained in
    assert found["short_rows", "gain"]["value"] == pytest.approx((other.sum() - own.sum()) / sizes.sum(), abs=1e-5)
    assert found["short_rows", "gain"]["low"] > 0  # twice as many steps
    starts, counts = nats(model, given, 64, 16)
    others, _ = nats(short, given, 16, 16)
    assert found["short_rows", "gain_start"]["value"] == pytest.approx((others - starts).sum() / counts.sum(), abs=1e-5)
    beyond = ((other - others) - (own - starts)).sum() / (sizes - counts).sum()
    assert found["short_rows", "gain_beyond"]["value"] == pytest.approx(beyond, abs=1e-5)
    assert found["short_rows", "token_ratio"]["value"] == pytest.approx(0.5, abs=0.05)


def test_a_model_earns_nothing_over_itself(store, given) -> None:
    model = trained(store, given)
    row = compared(store, given, model, constant=model)["constant", "gain"]
    assert row["value"] == row["low"] == row["high"] == 0 and row["n"] == 12


def test_categories_count_as_in_the_annealing_data(store, given) -> None:
    """The annealing data are of one category only, so the gain is that of this category's pages."""
    table = given["mixture"].read()
    only = table.set_column(table.schema.get_field_index("weight"), "weight", [[1.0 if c == "high" else 0.0 for c in table["category"].to_pylist()]])
    best = store.import_table("mixture", only)
    model, control = trained(store, given, steps=40), trained(store, given)
    found = compared(store, given, model, natural=control, best=best)
    (own, sizes), (other, _) = nats(model, given, 64), nats(control, given, 64)
    high = sizes > sizes.mean()  # the pages of the category are five times as long
    expected = (other - own)[high].sum() / sizes[high].sum()
    assert found["natural", "gain_best"]["value"] == pytest.approx(expected, abs=1e-5)
    assert found["natural", "gain_best"]["n"] == high.sum() and found["natural", "gain"]["n"] == 12


def test_models_that_cannot_be_compared_are_refused(store, given) -> None:
    model = trained(store, given)
    with pytest.raises(PunaError, match="give at least one of short_rows, natural, constant, fresh"):
        compared(store, given, model)
    other = {"tokenizer": execute(tokenizer, TokenizerConfig(vocab_size=270), {"documents": given["documents"]}, store)}
    other["tokens"] = execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": given["documents"], **other}, store)
    with pytest.raises(PunaError, match="different tokenizers"):
        compared(store, given, model, constant=trained(store, other))


def test_each_control_lacks_one_phase() -> None:
    first = Phase(name="initial", steps=9, schedule=FLAT)
    longer = Phase(
        name="longer", tokens="long", steps=4, rope_theta=80_000.0, accept=Acceptance(), schedule=FLAT, length=128,
        ramp=(Growth(after_tokens=9, rows=3),),
    )  # fmt: skip
    last = Phase(name="anneal", tokens="best", steps=5, schedule=FLAT | {"anneal_steps": 5, "average": 3})
    phases = (first, longer, last)
    controls = control_phases(phases, 64)
    assert set(controls) == {"short_rows", "natural", "constant", "fresh"}
    # The first phase has rows of the first context already.
    assert [phase.length for phase in controls["short_rows"]] == [None, 64, 64] and controls["short_rows"][1].ramp[0].length == 64
    assert controls["short_rows"][1].rope_theta is None and controls["short_rows"][1].accept is None
    assert controls["constant"] == (first, longer, last.replace(schedule=FLAT))
    assert [phase.optimizer for phase in controls["fresh"]] == ["keep", "fresh", "fresh"]
    assert controls["natural"] == phases
    short = longer.replace(length=32, ramp=(Growth(after_tokens=9, rows=3, length=48),))
    assert [part.length for part in control_phases((first, short), 64)["short_rows"][1].ramp] == [48]
    judged = control_phases((first, last.replace(accept=Acceptance())), 64)
    assert all(own[-1].accept is None for own in judged.values()) and set(judged) == {"natural", "constant", "fresh"}
    assert set(control_phases((first, last.replace(optimizer="fresh", accept=Acceptance())), 64)) == {"natural", "constant"}
    # Every control reads as many tokens, in as many steps.
    assert all([phase.steps for phase in own] == [9, 4, 5] and own[1].full_rows == 3 for own in controls.values())
    assert control_phases((first,), 64) == control_phases((last.replace(tokens="initial"),), 64) == {}


def test_controls_leave_the_first_phase_of_a_chosen_size_as_it_is() -> None:
    """The input size sets the first phase; a changed one would be refused."""
    phases = (Phase(), Phase(name="longer", tokens="long", steps=4), Phase(name="anneal", tokens="best", steps=5, schedule=FLAT | {"anneal_steps": 5}))
    for own in control_phases(phases, 64).values():
        assert own[0] == Phase() and PretrainConfig(phases=own).in_vain("size") == []


def test_the_recipe_trains_each_control_in_the_same_flow() -> None:
    def inputs(*changes: str) -> dict[str, dict[str, tuple[str, ...]]]:
        return {step.label: dict(step.inputs) for step in trace(flow_named("pretrain"), load("phases", list(changes), "pretrain")).steps}

    steps = inputs()
    names = {"control_short_rows", "control_natural", "control_constant", "control_fresh"}
    alone = steps["pretrain"] | {"tasks": ()}  # only the model's log has scores on tasks
    assert names < set(steps) and steps["control_natural"] == alone | {"best": ("tokenize_natural",)}
    assert all(steps[name] == alone for name in names - {"control_natural"})
    assert steps["tokenize_natural"]["mixture"] == ("mix",) and steps["tokenize_best"]["mixture"] == ("mix_best",)
    gains = steps["phase_gains"]
    assert {gains[name][0] for name in ("short_rows", "natural", "constant", "fresh")} == names
    assert gains["best"] == ("mix_best",) and gains["model"] == ("pretrain",)
    assert not {"phase_gains", *names} & set(inputs("phase_controls=false"))
    natural = inputs("mix_best=null", "anneal_experiment=null")
    assert not {"control_natural", "tokenize_natural"} & set(natural) and "control_constant" in natural
    with pytest.raises(PunaError, match="phase_controls: pretrain.phases has no phase to compare"):
        inputs("pretrain.phases=[{steps: 9}]", "tokenize_long=null", "tokenize_best=null", "mix_best=null", "anneal_experiment=null")


def test_the_report_says_which_phases_earn_nothing() -> None:
    rows = [
        {"task": name, "metric": metric, "value": value, "low": value - 0.01, "high": value + 0.01, "n": 20}
        for name, metric, value in (("short_rows", "gain_beyond", 0.03), ("constant", "gain", 0.004), ("fresh", "gain", -0.02))
    ]
    rows += [{"task": "natural", "metric": "gain", "value": 0.0, "low": 0.0, "high": 0.0, "n": 20}]
    rows += [{"task": name, "metric": "token_ratio", "value": 1.0, "low": None, "high": None, "n": 1} for name, _ in training.GAINS]
    artifact = SimpleNamespace(read=lambda: SimpleNamespace(to_pylist=lambda: rows))
    view = str(training.gains_view(cast(Run, SimpleNamespace(steps=[SimpleNamespace(stage="phase_gains", artifact=artifact)]))))
    cells = [line.rsplit("<td>", 1)[1].split("<")[0] for line in view.split("</tr>") if "<td" in line]
    assert cells == ["earned", "the same run", "earned nothing", "cost"]
    assert not training.gains_view(cast(Run, SimpleNamespace(steps=[])))


def test_the_benchmark_measures_by_default_only_what_takes_minutes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    measured: list[tuple[str, int]] = []
    monkeypatch.setattr(benchmark, "figures", lambda part, given: measured.append((part, given.seeds)) or {})

    def parts(*options: str) -> list[tuple[str, int]]:
        measured.clear()
        monkeypatch.setattr("sys.argv", ["pretraining.py", "--json", *options])
        benchmark.main()
        return list(measured)

    assert parts() == [("phases", 1), ("laws", 1), ("regmix", 1)]
    assert parts("--whole") == [(name, 5) for name in benchmark.parts()] and {"forecast", "smollm2"} < set(benchmark.parts())
    assert parts("--part", "forecast") == [("forecast", 5)] and parts("--seeds", "2")[0] == ("phases", 2)
    phases: list[list[str]] = []
    monkeypatch.setattr(benchmark_phases, "measure", lambda names, *others: phases.append(names) or {})
    for whole in (False, True):
        benchmark_phases.figures(Namespace(whole=whole, first=0, seeds=1))
    assert [set(benchmark_phases.PARTS) - set(names) for names in phases] == [{"needle"}, set()]
