"""The training loop: schedules, skipped steps, bit-exact resumption."""

from __future__ import annotations

import errno
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from puna.models.accounting import bf16_pays
from puna.models.config import ModelConfig
from puna.models.generation.pages import generation_room
from puna.models.training import objectives as o
from puna.models.training.loop import TrainConfig, Trainer, TrainingDiverged, train, weights_digest
from puna.models.training.optimizers import base
from puna.models.training.settings import ComputeSettings
from puna.models.training.state import load_state, save_state
from puna.models.training.trainer import TIMED, no_decay_names
from puna.models.transformer import Transformer

from .nested import nested

CONFIG = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True)


def model(seed: int = 0) -> Transformer:
    return Transformer(CONFIG, "lm", seed=seed)


def batches(step: int) -> list[o.Targets]:
    rng = np.random.default_rng([7, step])
    return [o.Targets.from_documents(rng.integers(0, 19, (3, 11)).tolist()) for _ in range(2)]


@pytest.mark.parametrize("name", ["adamw", "muon", "galore"])
def test_state_in_files_gives_the_same_bits(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "SMALL", 2)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    digests = []
    for place in ("memory", "file"):
        config = TrainConfig(steps=4, **nested(learning_rate=0.01), optimizer={"name": name, "state_in": place, "parameters": {"rank": 4} if name == "galore" else {}})
        made = model()
        with Trainer(made, o.LanguageModeling(), config) as trainer:
            for step in range(1, 5):
                trainer.step(step, batches(step), 1)
            mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
            assert len(mapped) >= len(trainer.weights) if place == "file" else not mapped
        digests.append(weights_digest(made))
    assert digests[0] == digests[1] and not list(tmp_path.iterdir())


def test_a_full_disk_refuses_state_in_files(monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(base, "SMALL", 2)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ValueError, match="has no room for .* of an optimizer's state .*set TMPDIR"):
        Trainer(model(), o.LanguageModeling(), TrainConfig(steps=1, optimizer={"state_in": "file"}))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_state_in_files_of_a_model_on_a_gpu():
    config = TrainConfig(steps=4, optimizer={"state_in": "file"}, compute={"precision": "fp32"})
    made = model().cuda()
    with Trainer(made, o.LanguageModeling(), config) as trainer:
        trainer.step(1, batches(1), 1)
        assert {value.device.type for state in trainer.optimizers[0].state.values() for value in state.values()} == {"cpu"}
        assert {weight.device.type for weight in trainer.weights.values()} == {"cuda"}


# ---- schedules ----------------------------------------------------------------------------------------


def rates(**settings: object) -> list[float]:
    config = TrainConfig(**nested(learning_rate=1.0, **settings))
    return [config.rate(step) for step in range(1, config.steps + 1)]


def test_schedules_by_hand():
    # Warm-up 1/2, 1; then a decay that would reach its end at step 6: 3/4, 1/2, 1/4 of the way.
    assert rates(steps=5, warmup_steps=2, schedule="linear") == pytest.approx([0.5, 1, 0.75, 0.5, 0.25])
    cosine = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    assert rates(steps=5, warmup_steps=2, schedule="cosine") == pytest.approx([0.5, 1, *cosine])
    assert rates(steps=5, warmup_steps=2, schedule="cosine", final_ratio=0.1)[3] == pytest.approx(0.55)
    # A run that ends before the curve is its beginning: the first three of five steps; annealing starts from there.
    assert rates(steps=3, warmup_steps=2, schedule="cosine", decay_steps=5) == pytest.approx([0.5, 1, cosine[0]])
    assert rates(steps=4, warmup_steps=2, schedule="cosine", decay_steps=5, anneal_steps=1) == pytest.approx([0.5, 1, cosine[0], cosine[0] / 2])
    assert rates(steps=3, schedule="constant") == [1, 1, 1]
    # Decay over the last three steps: 1 - sqrt(k / 4)
    wsd = [1 - math.sqrt(k / 4) for k in (1, 2, 3)]
    assert rates(steps=6, warmup_steps=1, schedule="wsd", decay_steps=3) == pytest.approx([1, 1, 1, *wsd])


def test_annealing_starts_from_the_schedule_and_goes_to_zero():
    assert rates(steps=6, schedule="constant", anneal_steps=3) == pytest.approx([1, 1, 1, 0.75, 0.5, 0.25])
    linear = rates(steps=9, schedule="linear", anneal_steps=4)
    assert linear[:5] == pytest.approx([1, 8 / 9, 7 / 9, 6 / 9, 5 / 9])
    assert linear[5:] == pytest.approx([5 / 9 * k / 5 for k in (4, 3, 2, 1)])


@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    st.integers(2, 40),
    st.integers(0, 10),
    st.integers(0, 10),
)
@settings(max_examples=80, deadline=None)
def test_a_rate_rises_to_the_peak_and_never_again(schedule: str, length: int, warmup: int, anneal: int):
    extra = {"decay_steps": 1} if schedule == "wsd" else {}
    got = rates(
        steps=length + warmup + anneal, warmup_steps=warmup, schedule=schedule, anneal_steps=anneal, **extra
    )
    top = max(warmup, 1) - 1
    assert max(got) == got[top] == 1.0
    assert got[: top + 1] == sorted(got[: top + 1])
    assert all(a >= b - 1e-12 for a, b in zip(got[top:], got[top + 1 :], strict=False))
    assert min(got) > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": 0},
        {"learning_rate": 0.0},
        {"schedule": "step"},
        {"decay_steps": 3},
        {"decay_steps": 0.5},
        {"schedule": "linear", "decay_steps": 20},
        {"schedule": "wsd"},
        {"average": 2},
        {"anneal_steps": 11},
        {"schedule": "constant", "final_ratio": 0.1},
        {"max_grad_norm": 0.0},
    ],
)
def test_a_wrong_configuration_is_refused(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(set(wrong) - {"final_ratio"})).split("_")[0]):
        TrainConfig(**nested(**{"steps": 10, "learning_rate": 1.0, **wrong}))


# ---- the loop -----------------------------------------------------------------------------------------


def test_a_step_is_adamw_by_hand():
    made, config = model(), TrainConfig(steps=1, schedule={"learning_rate": 0.01}, optimizer={"weight_decay": 0.1, "max_grad_norm": 0.05})
    reference = model()
    loss, _ = o.LanguageModeling()(reference, batches(1)[0])
    loss.backward()
    rows = train(made, o.LanguageModeling(), lambda step: batches(step)[0], config, seed=0)
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in reference.parameters()))
    assert rows[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert rows[0]["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    assert rows[0]["tokens"] == 33
    skip = no_decay_names(reference)
    for (name, p), q in zip(reference.named_parameters(), made.parameters(), strict=True):
        g = p.grad * 0.05 / norm
        decay = 0.0 if name in skip else 0.01 * 0.1
        # Adam's first step: both moments are corrected to g and g^2.
        expected = p.detach() * (1 - decay) - 0.01 * g / (g.abs() + 1e-8)
        torch.testing.assert_close(q.detach(), expected, atol=2e-6, rtol=1e-4)


def test_no_decay_on_norms_and_embeddings():
    assert no_decay_names(model()) == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        *(f"model.layers.{i}.{n}_layernorm.weight" for i in (0, 1) for n in ("input", "post_attention")),
    }


def test_accumulation_does_not_change_the_step():
    def whole(step: int) -> o.Targets:
        documents = [d for part in batches(step) for d in part.forest.tokens.view(3, 11).tolist()]
        return o.Targets.from_documents(documents)

    config = TrainConfig(steps=3, schedule={"learning_rate": 1e-3})
    one, two = model(), model()
    rows = (
        train(one, o.LanguageModeling(), whole, config, 0),
        train(two, o.LanguageModeling(), batches, config, 0),
    )
    for a, b in zip(*rows, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert a["tokens"] == b["tokens"] == 66


def test_a_plain_function_is_an_objective_but_cannot_be_split():
    def objective(made: Transformer, batch: o.Targets) -> tuple[torch.Tensor, dict]:
        loss = -o.base.target_logprobs(made, batch).mean()
        return loss, {"double": 2 * loss.detach()}

    config = TrainConfig(steps=1, schedule={"learning_rate": 1e-3})
    row = train(model(), objective, lambda step: batches(step)[0], config, 0)[0]
    assert row["double"] == pytest.approx(2 * row["loss"])
    with pytest.raises(TypeError, match="totals"):
        train(model(), objective, batches, config, 0)


class Poisoned(o.LanguageModeling):
    """An objective that returns NaN at the given calls."""

    def __init__(self, at: set[int]) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def loss(self, made, batch, totals):
        self.calls += 1
        loss, metrics = super().loss(made, batch, totals)
        return (loss * math.nan, metrics) if self.calls in self.at else (loss, metrics)


def test_a_step_that_is_not_finite_changes_nothing():
    def single(step: int) -> o.Targets:
        return batches(step)[0]

    made, digests = model(), []
    rows = train(
        made,
        Poisoned({2, 3}),
        single,
        TrainConfig(steps=5, schedule={"learning_rate": 1e-2}, optimizer={"max_skipped": 3}),
        0,
        on_step=lambda row: digests.append(weights_digest(made)),
    )
    assert [row["skipped"] for row in rows] == [0, 1, 1, 0, 0]
    assert digests[0] == digests[1] == digests[2] != digests[3]
    assert math.isnan(rows[1]["loss"]) and math.isfinite(rows[4]["loss"])
    with pytest.raises(TrainingDiverged, match="3 steps in a row, up to step 4"):
        train(
            model(), Poisoned({2, 3, 4}), single, TrainConfig(steps=9, schedule={"learning_rate": 1e-2}, optimizer={"max_skipped": 3}), 0
        )


def test_annealing_ends_with_the_averaged_weights():
    config = TrainConfig(steps=10, schedule={"learning_rate": 1e-2, "anneal_steps": 5, "average": 2})
    assert config.averaged_steps() == {8, 10}
    made, kept = model(), {}

    def keep(row: dict) -> None:
        kept[row["step"]] = [p.detach().clone() for p in made.parameters()]

    train(made, o.LanguageModeling(), batches, config, 0, on_step=keep)
    for p, a, b in zip(made.parameters(), kept[8], kept[10], strict=True):
        torch.testing.assert_close(p.detach(), (a + b) / 2, atol=1e-7, rtol=1e-6)


class Dropping(o.LanguageModeling):
    """An objective that uses torch's default generator, as an adapter's dropout does."""

    def loss(self, made, batch, totals):
        loss, metrics = super().loss(made, batch, totals)
        return loss * torch.rand(()), metrics


class Noting(o.LanguageModeling):
    """An objective that notes whether the model is in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.modes: list[bool] = []

    def loss(self, made, batch, totals):
        self.modes += [part.training for part in made.modules()]
        return super().loss(made, batch, totals)


def test_a_model_is_in_training_mode_only_during_steps():
    made, objective, modes = model().eval(), Noting(), list[bool]()

    def note(step: int) -> list[o.Targets]:
        modes.extend(part.training for part in made.modules())
        return batches(step)

    train(made, objective, note, TrainConfig(steps=2, **nested(learning_rate=0.01)), 0, sampled=True)
    note(3)
    assert all(objective.modes) and not any(modes)


class Stop(Exception):
    pass


RESUMED = TrainConfig(steps=9, schedule={"learning_rate": 1e-2, "warmup_steps": 2, "anneal_steps": 4, "average": 3})


def test_bf16_keeps_fp32_weights(tmp_path: Path):
    config = {"steps": 4, "learning_rate": 1e-2, "anneal_steps": 2, "average": 2}
    full, half, resumed = model(), model(), model()
    expected = train(full, o.LanguageModeling(), batches, TrainConfig(**nested(**config)), 0)
    kinds = set()

    def note(row: dict) -> None:
        kinds.update(p.dtype for p in half.parameters())

    bf16 = TrainConfig(**nested(precision="bf16", **config))
    log = train(half, o.LanguageModeling(), batches, bf16, 0, on_step=note)
    assert kinds == {torch.bfloat16}
    assert {row["precision_bits"] for row in log} == {16} and {row["precision_bits"] for row in expected} == {32}
    for row, other in zip(log, expected, strict=True):
        # bf16 has 8 bits: half a percent.
        assert row["loss"] == pytest.approx(other["loss"], rel=5e-3)
    for p, q in zip(half.parameters(), full.parameters(), strict=True):
        assert p.dtype == torch.float32
        assert p.ndim == 1 or not torch.equal(p, p.bfloat16().float())
        assert (p - q).abs().max() < 0.05

    def stop(row: dict) -> None:
        if row["step"] == 3:
            raise Stop

    crashed = model()
    with pytest.raises(Stop):
        train(crashed, o.LanguageModeling(), batches, bf16, 0, tmp_path, 1, stop)
    assert {p.dtype for p in crashed.parameters()} == {torch.float32}
    train(resumed, o.LanguageModeling(), batches, bf16, 0, tmp_path)
    assert weights_digest(resumed) == weights_digest(half)


def test_a_training_goes_on_in_the_precision_that_it_was_begun_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    settings = {"steps": 4, "learning_rate": 1e-2}
    whole, parted = model(), model()
    train(whole, o.LanguageModeling(), batches, TrainConfig(**nested(precision="bf16", **settings)), 0)

    def stop(row: dict) -> None:
        if row["step"] == 2:
            raise Stop

    # As if the machine were busy when the second process starts.
    fastest = TrainConfig(**nested(precision="fastest", **settings))
    monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: True)
    with pytest.raises(Stop):
        train(model(), o.LanguageModeling(), batches, fastest, 0, tmp_path, 1, stop)
    monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: False)
    log = train(parted, o.LanguageModeling(), batches, fastest, 0, tmp_path)
    assert [row["precision_bits"] for row in log] == [16] * 4
    assert weights_digest(parted) == weights_digest(whole)


def test_precision_follows_the_device_and_where_asked_what_pays(monkeypatch: pytest.MonkeyPatch):
    def on(precision: str) -> list[str]:
        return [ComputeSettings(precision=precision).precision_on(device) for device in ("cuda", "cpu")]

    assert (on("auto"), on("fp32"), on("bf16")) == (["bf16", "fp32"], ["fp32"] * 2, ["bf16"] * 2)
    for pays, expected in ((True, "bf16"), (False, "fp32")):
        monkeypatch.setattr("puna.models.accounting.matrix_rate", lambda *given, pays=pays: 2.0 if (torch.bfloat16 in given) == pays else 1.0)
        bf16_pays.cache_clear()
        assert on("fastest") == ["bf16", expected]
    bf16_pays.cache_clear()


def test_generation_takes_half_of_what_a_gpu_has_free(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("mem_get_info", (30, 80)), ("memory_reserved", 24), ("memory_allocated", 14)):
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert generation_room(torch.device("cuda"), None, None, None) == (256, 8192, (30 + 24 - 14) // 2)
    assert generation_room(torch.device("cuda"), 3, None, 7) == (3, 8192, 7)
    assert generation_room(torch.device("cpu"), None, 5, None) == (64, 5, 1 << 30)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("stop_after", range(1, 10))
def test_resuming_ends_with_the_same_bits(tmp_path: Path, stop_after: int, every: int):
    def stop(row: dict) -> None:
        if row["step"] == stop_after:
            raise Stop

    whole = model()
    torch.manual_seed(1)
    expected = train(whole, Dropping(), batches, RESUMED, seed=3)
    with pytest.raises(Stop):
        train(model(), Dropping(), batches, RESUMED, 3, tmp_path, every, on_step=stop)
    resumed, steps = model(), []
    torch.manual_seed(2)
    log = train(
        resumed, Dropping(), batches, RESUMED, 3, tmp_path, every, lambda row: steps.append(row["step"])
    )
    assert weights_digest(resumed) == weights_digest(whole)
    assert steps == list(range(steps[0], 10)) if steps else stop_after == 9
    timeless = [
        [{k: v for k, v in row.items() if k not in TIMED} for row in rows] for rows in (log, expected)
    ]
    assert timeless[0] == timeless[1]


def test_kill_nine_during_a_write_and_resume(tmp_path: Path):
    """Of the states of steps 2 and 4, the second never reaches the disk; step 6 is computed meanwhile."""
    script = textwrap.dedent(
        """
        import sys, threading
        from pathlib import Path
        sys.path.insert(0, sys.argv[2])
        from puna.models.training import state
        from tests.models.test_training import Dropping, RESUMED, batches, model, train
        flush, last = state.flush, threading.Event()
        def stuck(path):
            if "step-000000004" in str(path):
                last.wait()
            flush(path)
        state.flush = stuck
        train(model(), Dropping(), batches, RESUMED, 3, Path(sys.argv[1]), 2, lambda row: print(row["step"], flush=True))
        """
    )
    here = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path), here],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "6":
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    whole, resumed, steps = model(), model(), []
    train(whole, Dropping(), batches, RESUMED, 3)
    train(resumed, Dropping(), batches, RESUMED, 3, tmp_path, 1, lambda row: steps.append(row["step"]))
    assert steps[0] == 3
    assert weights_digest(resumed) == weights_digest(whole)


def test_a_foreign_checkpoint_is_refused(tmp_path: Path):
    config = TrainConfig(steps=2, schedule={"learning_rate": 1e-3})
    train(model(), o.LanguageModeling(), batches, config, 0, tmp_path)
    with pytest.raises(ValueError, match="seed was 0"):
        train(model(), o.LanguageModeling(), batches, config, 1, tmp_path)
    with pytest.raises(ValueError, match="initial was"):
        train(model(seed=5), o.LanguageModeling(), batches, config, 0, tmp_path)


def test_only_what_needs_a_gradient_is_trained_and_kept(tmp_path: Path):
    made = model()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("mlp" in name)
    before = {name: p.detach().clone() for name, p in made.named_parameters()}
    train(made, o.LanguageModeling(), batches, TrainConfig(steps=2, schedule={"learning_rate": 1e-2}), 0, tmp_path)
    for name, parameter in made.named_parameters():
        assert torch.equal(parameter, before[name]) != ("mlp" in name)
    found = load_state(tmp_path)
    assert found is not None and all("mlp" in name for name in found[0])
    made.requires_grad_(False)
    with pytest.raises(ValueError, match="gradient"):
        Trainer(made, o.LanguageModeling(), TrainConfig(steps=2, schedule={"learning_rate": 1e-2}))


def test_a_half_written_checkpoint_does_not_count(tmp_path: Path):
    save_state(tmp_path, 3, {"a": torch.ones(2)}, {"x": 1})
    (tmp_path / ".step-000000004.99").mkdir()
    found = load_state(tmp_path)
    assert found is not None and found[1] == {"step": 3, "x": 1} and found[0]["a"].tolist() == [1, 1]
    save_state(tmp_path, 5, {"a": torch.zeros(2)}, {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000005"]


def test_the_mode_of_the_model_is_put_back():
    made = nn.Sequential(nn.Linear(2, 1))
    made.eval()

    def objective(m: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict]:
        assert m.training
        return m(batch).square().mean(), {}

    train(made, objective, lambda step: torch.ones(3, 2), TrainConfig(steps=1, schedule={"learning_rate": 0.1}), 0)
    assert not made.training
