"""Each option of pretraining does what it says; the defaults change nothing."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from pydantic import ValidationError

from puna.models import accounting, transformer
from puna.models.training.loop import TrainingDiverged
from puna.models.training.settings import OptimizerSettings
from puna.stages.contract import execute
from puna.stages.experiments.anneal_experiment import AnnealExperimentConfig
from puna.stages.experiments.mix_experiment import MixExperimentConfig
from puna.stages.pretrain.pretrain import PretrainConfig, Watch, _finish, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.token_rows import Packed, Reader
from puna.stages.training.train import divergence_named
from puna.storage import PunaError

from .conftest import sentences

SHAPE = SHAPE.replace(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def given(store, documents):
    docs = documents([sentences(i, 30 + 7 * (i % 11)) for i in range(60)])
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": docs}, store)
    tokens = execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": docs, "tokenizer": vocabulary}, store)
    return {"tokens": tokens, "tokenizer": vocabulary}


def config(optimizer: dict | None = None, compute: dict | None = None, schedule: dict | None = None, **phase) -> PretrainConfig:
    values = {"steps": 24, "rows_per_step": 4, "schedule": {"learning_rate": 1e-2, "warmup_steps": 3} | (schedule or {})} | phase
    return PretrainConfig(
        model=SHAPE, phases=(Phase(**values),), optimizer=optimizer or {}, compute=compute or {}, validate_every=12, checkpoint_every=8,
        validation_share=0.1,
    )  # fmt: skip


def weights(artifact) -> str:
    return artifact.manifest.files["model.safetensors"].sha256


def test_muon_moves_the_matrices_another_way(store, given) -> None:
    plain, muon, slow = (execute(pretrain, config(o), given, store) for o in ({}, {"name": "muon"}, {"name": "muon", "parameters": {"momentum": 0.5}}))
    assert len({weights(made) for made in (plain, muon, slow)}) == 3
    for made in (muon, slow):
        log = made.read("training_log").to_pylist()
        assert log[-1]["loss"] < 0.8 * log[0]["loss"]


def test_a_moving_average_becomes_the_model(store, given) -> None:
    plain, averaged = execute(pretrain, config(), given, store), execute(pretrain, config(schedule={"ema": 0.8}), given, store)
    metrics = averaged.manifest.metrics
    # The same steps were run; the weights after them differ.
    assert metrics["validation_loss_before_averaging"] == plain.manifest.metrics["validation_loss"]
    better = metrics["averaging_gain"] > 0
    assert metrics["averaging_gain"] == metrics["averaging_gain_initial"] != 0 and metrics["averaging_taken_initial"] == better
    gain = metrics["averaging_gain"] if better else 0
    assert metrics["validation_loss_before_averaging"] - metrics["validation_loss"] == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("worse", [True, False])
def test_an_average_that_raises_the_loss_is_not_taken(store, given, monkeypatch: pytest.MonkeyPatch, worse: bool) -> None:
    """The weights equal those of a run without averaging, and the metrics say by how much the average was worse."""
    plain = execute(pretrain, config(), given, store)
    original = Watch.try_average

    def averaged(self, *more):
        self.before += -10 if worse else 10
        original(self, *more)

    monkeypatch.setattr(Watch, "try_average", averaged)
    made = execute(pretrain, config(schedule={"ema": 0.8}), given, store)
    digests = [one.manifest.files["model.safetensors"].sha256 for one in (plain, made)]
    assert (digests[0] == digests[1]) == worse == (made.manifest.metrics["averaging_gain"] < 0)
    assert made.manifest.metrics["averaging_taken_initial"] == (not worse)
    with pytest.raises(ValidationError, match="ema and average are two ways"):
        config(schedule={"ema": 0.8, "anneal_steps": 5, "average": 2})


def test_the_rate_of_several_processes_is_the_sum_of_theirs(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes can compute twice as much: the utilization of a training run is half."""
    monkeypatch.setattr(accounting, "matrix_rate", lambda: 1e9)
    metrics: dict[str, float] = {}
    rows = [{"step": 1, "tokens": 64, "seconds": 2.0, "loss": 1.0, "skipped": 0, "learning_rate": 0.1}]
    watch = SimpleNamespace(log=rows, flops=1e9, after=1.0, before=1.0, gain=0.0, validation=[])
    run = SimpleNamespace(write_rows=lambda *_: None, figure=lambda *_: None, metric=metrics.__setitem__)
    for count in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", str(count))
        _finish(SimpleNamespace(config=SHAPE.complete(300, 64)), watch, run)
        assert metrics["matrix_flops_per_second"] == count * 1e9 and metrics["model_flops_utilization"] == 0.5 / count


def test_spikes_are_skipped_and_many_in_a_row_stop_the_run(store, given) -> None:
    strict = {"spike_window": 8, "spike_limit": 0.01}
    made = execute(pretrain, config({**strict, "max_skipped": 20}, steps=20), given, store)
    skipped = [row["skipped"] for row in made.read("training_log").to_pylist()]
    assert sum(skipped) == made.manifest.metrics["skipped_steps"] > 0 and not any(skipped[:8])
    with pytest.raises(PunaError, match=r"^pretrain, phase initial, diverged: .* 1 steps in a row, up to step \d+ .*: lower the learning rate"):
        execute(pretrain, config({**strict, "max_skipped": 1}), given, store)


def test_divergence_is_one_line_and_other_errors_are_not_touched() -> None:
    with pytest.raises(PunaError, match="^sft diverged: too hot$"), divergence_named("sft"):
        raise TrainingDiverged("too hot")
    with pytest.raises(ZeroDivisionError), divergence_named("sft"):
        raise ZeroDivisionError


def test_checkpointed_layers_give_the_same_model(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = execute(pretrain, config(steps=6), given, store)
    calls, original = [], transformer.checkpoint
    monkeypatch.setattr(transformer, "checkpoint", lambda *a, **k: calls.append(1) or original(*a, **k))
    made = execute(pretrain, config(compute={"activation_checkpointing": True}, steps=6), given, store)
    assert len(calls) >= 6 * SHAPE.num_hidden_layers and weights(made) == weights(plain)


def test_rows_of_a_step_grow_and_none_is_read_twice(store, given) -> None:
    # Rows of 64: three steps of 1 row, three of 2, then steps of 4.
    growth = ({"after_tokens": 3 * 64 - 5, "rows": 2}, {"after_tokens": 9 * 64, "rows": 4})
    phase = config(rows_per_step=1, ramp=growth, steps=10).phases[0]
    packed = Packed.read(given["tokens"])
    reader = phase.reader(packed, np.zeros(len(packed.owners), dtype=bool), 0, 0)
    assert [reader.rows_before(step) for step in range(1, 12)] == [0, 1, 2, 3, 5, 7, 9, 13, 17, 21, 25]
    starts = [start for step in range(1, 11) for start, _ in reader.pieces(step)]
    whole = config(steps=1, rows_per_step=25, schedule={"warmup_steps": 0}).phases[0].reader(packed, np.zeros(len(packed.owners), dtype=bool), 0, 0)
    assert starts == [start for start, _ in whole.pieces(1)] and len(set(starts)) == len(starts)
    made = execute(pretrain, config(rows_per_step=1, ramp=growth, steps=10), given, store)
    tokens = [row["tokens"] for row in made.read("training_log").to_pylist()]
    assert all(t <= 64 for t in tokens[:3]) and all(64 < t <= 128 for t in tokens[3:6]) and all(128 < t <= 256 for t in tokens[6:])
    held = packed.validation(0.1, 40_000)
    assert made.manifest.metrics["epochs_initial"] == pytest.approx(25 / phase.reader(packed, held, 0, 0).epoch_rows)


def test_sequences_grow_over_the_same_tokens(store, given) -> None:
    packed = Packed.read(given["tokens"])
    nothing = np.zeros(len(packed.owners), dtype=bool)
    growth = ({"after_tokens": 512, "rows": 4, "length": 24}, {"after_tokens": 1024, "rows": 4})
    ramped = config(length=8, ramp=growth).phases[0].reader(packed, nothing, 0, 0)
    whole = config().phases[0].reader(packed, nothing, 0, 0)
    for step, longest in ((1, 8), (2, 8), (3, 24), (4, 24), (5, 64)):
        assert max(ramped.lengths(step)) <= longest and sum(ramped.lengths(step)) == sum(whole.lengths(step))
        cut, uncut = ({i for a, b in r.pieces(step) for i in range(a, b)} for r in (ramped, whole))
        assert cut == uncut
    assert ramped.pieces(5) == whole.pieces(5) and max(ramped.lengths(1)) == 8
    made = execute(pretrain, config(length=8, ramp=({"after_tokens": 1280, "rows": 4},)), given, store)
    assert weights(made) != weights(execute(pretrain, config(), given, store))


def test_wrong_options_are_refused() -> None:
    for wrong, message in (
        ({"ramp": ({"after_tokens": 9, "rows": 3},)}, "rows and length must not decrease"),
        ({"ramp": ({"after_tokens": 9, "rows": 5, "length": 8},)}, "rows and length must not decrease"),
        ({"ramp": ({"after_tokens": 9, "rows": 5}, {"after_tokens": 9, "rows": 6})}, "after_tokens must increase"),
        ({"steps": 0, "until": 9, "ramp": ({"after_tokens": 9, "rows": 5},)}, "be less than until"),
        ({"until": 9}, "set only one of the two"),
        ({"steps": 0}, "set only one of the two"),
    ):
        with pytest.raises(ValidationError, match=message):
            config(**wrong)
    with pytest.raises(ValidationError, match="spike_window must be 0 or at least 8"):
        OptimizerSettings(spike_window=3)
    ramped = Phase(rows_per_step=1, ramp=({"after_tokens": 5, "rows": 2},))
    for phase in (ramped, Phase(until=500), Phase(length=8), Phase(tokens="best")):
        for experiment in (MixExperimentConfig, AnnealExperimentConfig):
            with pytest.raises(ValidationError, match="phase.ramp, length and until unset"):
                experiment(phase=phase)


def test_the_mixture_changes_within_a_phase(store, given, documents) -> None:
    other = documents([sentences(i + 500, 40) for i in range(40)])
    fresh, short = (
        execute(tokenize, TokenizeConfig(sequence_length=length), {"documents": other, "tokenizer": given["tokenizer"]}, store)
        for length in (64, 32)
    )
    # Steps of 4 rows of 64: the sixth is the first one after five; the rest of the tokens continue as before.
    ramp = ({"after_tokens": 5 * 256, "rows": 4, "tokens": "fresh"}, {"after_tokens": 8 * 256, "rows": 8})
    phase = config(ramp=ramp, steps=10).phases[0]
    sources = {"initial": Packed.read(given["tokens"]), "fresh": Packed.read(fresh)}
    relay = phase.relay(sources, (), 0, 0, {})
    assert [relay.at(step).packed is sources["fresh"] for step in range(1, 11)] == [False] * 5 + [True] * 5
    assert relay.epoch_rows == relay.at(1).epoch_rows + relay.at(6).epoch_rows and relay.at(1).rows_before(11) == 8 * 4 + 2 * 8
    # Each phase reads the first rows in its own order, and continues with them later: none twice before all others were read.
    back = config(ramp=(ramp[0], ramp[1] | {"tokens": "initial"}), steps=10).phases[0].relay(sources, (), 0, 0, places := {})
    for name, turns, steps, count in (("fresh", relay, (6, 11), 28), ("initial", back, (1, 6, 9, 11), 36), ("fresh", back, (6, 9), 12)):
        pieces = [piece for a, b in zip(steps[::2], steps[1::2], strict=True) for step in range(a, b) for piece in turns.at(step).pieces(step)]
        assert pieces == Reader(sources[name], np.zeros(len(sources[name].owners), dtype=bool), count, 0, 0).pieces(1)
    assert places == {("initial", 1): (0, 36), ("fresh", 1): (0, 12)} and back.epoch_rows == relay.epoch_rows
    made = execute(pretrain, config(ramp=ramp, steps=10), {**given, "fresh": fresh}, store)
    plain = execute(pretrain, config(ramp=ramp[1:], steps=10), given, store)
    losses, same = ([row["loss"] for row in one.read("training_log").to_pylist()] for one in (made, plain))
    assert losses[:5] == same[:5] and not set(losses[5:]) & set(same[5:])
    with pytest.raises(PunaError, match="phase initial reads the tokens fresh, which are not given"):
        execute(pretrain, config(ramp=ramp, steps=10), given, store)
    with pytest.raises(PunaError, match="phase initial reads tokens in rows of 32 and 64"):
        execute(pretrain, config(ramp=ramp, steps=10), {**given, "fresh": short}, store)
