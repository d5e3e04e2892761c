"""Pretraining learns, survives a crash bit by bit, and refuses inputs that do not fit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from puna.models import accounting
from puna.models.formats.checkpoint import load
from puna.models.tokens.tokenizer import Tokenizer
from puna.stages.contract import execute
from puna.stages.experiments.ladder import LadderConfig, ladder
from puna.stages.pretrain import pretrain as module
from puna.stages.pretrain.pretrain import MOMENTS as FILE
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.token_rows import Packed, Reader, mean_loss
from puna.storage import PunaError

from .conftest import sentences

SHAPE = SHAPE.replace(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


def config(**changes) -> PretrainConfig:
    phase = Phase(steps=60, rows_per_step=4, schedule={"learning_rate": 1e-2, "warmup_steps": 5, "shape": "cosine", "anneal_steps": 20, "average": 4})
    values = {"model": SHAPE, "phases": (phase,), "validate_every": 20, "checkpoint_every": 7, "validation_share": 0.1}
    return PretrainConfig(**(values | changes))


@pytest.fixture
def given(store, documents):
    docs = documents([sentences(i, 30 + 7 * (i % 11)) for i in range(60)])
    vocabulary = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": docs}, store)
    tokens = execute(tokenize, TokenizeConfig(sequence_length=64), {"documents": docs, "tokenizer": vocabulary}, store)
    return {"tokens": tokens, "tokenizer": vocabulary}


def test_learns_and_tells_the_truth_about_it(store, given) -> None:
    settings = config()
    made = execute(pretrain, settings, given, store)
    metrics = made.manifest.metrics
    # Each word is one of two: at best ln 2 per word, and nothing for further tokens of a word.
    assert metrics["validation_loss"] < 0.5 * math.log(300)
    # The average becomes the model only if it is better.
    gain = metrics["averaging_gain"]
    assert gain and metrics["validation_loss_before_averaging"] - metrics["validation_loss"] == pytest.approx(max(gain, 0.0), abs=1e-12)
    model = load(made.path())
    assert metrics["parameters"] == accounting.parameters(model.config).total == sum(p.numel() for p in model.parameters())
    packed = Packed.read(given["tokens"])
    held = packed.validation(settings.validation_share, settings.validation_tokens)
    assert metrics["validation_loss"] == pytest.approx(mean_loss(model, packed.validation_pieces(held)), rel=1e-5)
    log = made.read("training_log").to_pylist()
    assert [row["step"] for row in log] == list(range(1, 61)) and log[-1]["learning_rate"] < 1e-3
    assert [row["step"] for row in log if row["validation_loss"] is not None] == [20, 40, 60]
    assert log[59]["validation_loss"] == metrics["validation_loss_before_averaging"]
    assert metrics["trained_tokens"] == sum(row["tokens"] for row in log)
    # 6 N per token, plus attention, which is little at 64 tokens.
    assert metrics["flops"] == pytest.approx(6 * accounting.matrix_parameters(model.config) * metrics["trained_tokens"], rel=0.15)
    assert 0 < metrics["model_flops_utilization"] < 1.5
    assert Tokenizer.load(made.path()).encode("puna") == Tokenizer.load(given["tokenizer"].path()).encode("puna")
    assert json.loads(made.path("config.json").read_text())["max_position_embeddings"] == 64
    assert set(made.manifest.figures) == {"loss", "learning_rate"}


def test_resumes_bit_by_bit(tmp_path: Path, store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    """On resumption the machine is so busy that bf16 is not faster."""
    monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: True)
    settings = config(compute={"precision": "fastest"}, phases=(config().phases[0], Phase(name="long", steps=9, rows_per_step=1, join_rows=2, schedule={"warmup_steps": 2})))
    whole = execute(pretrain, settings, given, store)
    expected = whole.path("model.safetensors").read_bytes()
    from puna.storage import Store

    other = Store.open(tmp_path / "other")
    for artifact in given.values():
        target = other.root / artifact.folder.relative_to(store.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        import shutil

        shutil.copytree(artifact.folder, target)
    original, calls = Reader.later, []

    def crashing(self, step, micro_batch_tokens):
        calls.append(step)
        # Twice in the first phase; in the first step of the second, with the first one's moments; and after the second one's own
        # checkpoint.
        if len(calls) in (25, 60, 72, 80):
            raise KeyboardInterrupt
        return original(self, step, micro_batch_tokens)

    monkeypatch.setattr(Reader, "later", crashing)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            execute(pretrain, settings, given, other)
        monkeypatch.setattr("puna.models.accounting.bf16_pays", lambda: False)
    made = execute(pretrain, settings, given, other)
    assert len(calls) < 69 + 4 * 8
    assert made.path(FILE).read_bytes() == whole.path(FILE).read_bytes()
    assert made.path("model.safetensors").read_bytes() == expected and made.data_digest == whole.data_digest
    for name in ("validation_loss", "validation_loss_before_averaging", "flops", "trained_tokens"):
        assert made.manifest.metrics[name] == whole.manifest.metrics[name]
    columns = ["step", "loss", "validation_loss", "phase"]
    assert made.read("training_log", columns).equals(whole.read("training_log", columns))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_that_a_crash_left_unmeasured_is_measured(
    precision: str, tmp_path: Path, store, given, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed before the loss after step 20 is known: the step is not saved without it, and is repeated."""
    phase = Phase(steps=30, rows_per_step=4, schedule={"learning_rate": 1e-2, "warmup_steps": 5})
    settings = config(phases=(phase,), checkpoint_every=20, validate_every=20, compute={"precision": precision})
    original, calls = module.Watch.loss, []

    def crashing(self, model):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        return original(self, model)

    monkeypatch.setattr(module.Watch, "loss", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(pretrain, settings, given, store)
    resumed = execute(pretrain, settings, given, store).read("training_log", ["step", "loss", "validation_loss"]).to_pylist()
    assert [row["step"] for row in resumed if row["validation_loss"] is not None] == [20, 30]
    from puna.storage import Store

    whole = execute(pretrain, settings, given, Store.open(tmp_path / "other")).read("training_log", ["step", "loss", "validation_loss"])
    assert resumed == whole.to_pylist()


def test_a_long_context_phase_lengthens_the_context(store, given) -> None:
    phases = (config().phases[0], Phase(name="long", steps=5, rows_per_step=1, join_rows=4, rope_theta=50_000.0, schedule={"warmup_steps": 1}))
    made = execute(pretrain, config(phases=phases), given, store)
    saved = load(made.path()).config
    assert saved.max_position_embeddings == 256 and saved.rope_theta == 50_000.0
    log = made.read("training_log").to_pylist()
    assert len(log) == 65 and {row["phase"] for row in log} == {0.0, 1.0} and max(row["tokens"] for row in log[60:]) > 64


def test_passes_do_not_change_the_training(store, given) -> None:
    short = config(phases=(Phase(steps=3, rows_per_step=4, schedule={"warmup_steps": 0}),))
    one = load(execute(pretrain, short, given, store).path())
    many = load(execute(pretrain, short.replace(compute={"micro_batch_tokens": 70}), given, store).path())
    for (name, a), (_, b) in zip(one.named_parameters(), many.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=2e-3), name  # Adam's first steps amplify the rounding of tiny gradients
    assert np.mean([float((a - b).detach().abs().mean()) for a, b in zip(one.parameters(), many.parameters(), strict=True)]) < 1e-5


def test_wrong_settings_are_refused_by_name() -> None:
    for wrong, message in (
        ({"steps": 5, "warmup_steps": 5}, "warmup_steps must lie in"),
        ({"shape": "wsd"}, "decay_steps belongs"),
        ({"average": 3, "anneal_steps": 2}, "average must lie in"),
        ({"steps": 10, "warmup_steps": 6, "anneal_steps": 6}, "annealing overlap"),
        ({"shape": "constant", "final_ratio": 0.5}, "has no final_ratio"),
    ):
        with pytest.raises(ValidationError, match=message):
            Phase(**{name: value for name, value in wrong.items() if name == "steps"}, schedule={n: v for n, v in wrong.items() if n != "steps"})
    with pytest.raises(ValidationError, match="a multiple of num_key_value_heads 3"):
        SHAPE.replace(num_key_value_heads=3, num_attention_heads=4)
    with pytest.raises(ValidationError, match="multiple of num_attention_heads 5"):
        SHAPE.replace(num_attention_heads=5, num_key_value_heads=1)


def test_every_phase_the_form_accepts_is_one_the_loop_accepts() -> None:
    for phase in (Phase(), Phase(schedule={"shape": "wsd", "decay_steps": 100}), Phase(schedule={"shape": "constant"}), Phase(steps=1, schedule={"warmup_steps": 0})):
        assert phase.train_config(config().optimizer, config().compute).steps == phase.steps


def test_tokens_of_another_tokenizer_are_refused(store, given, documents) -> None:
    smaller = execute(tokenizer, TokenizerConfig(vocab_size=270), {"documents": documents([sentences(0, 50)])}, store)
    with pytest.raises(PunaError, match="was made by tokenizer/"):
        execute(pretrain, config(), {**given, "tokenizer": smaller}, store)
    # Rows that no stage made do not name their tokenizer.
    imported = store.import_table("tokens", given["tokens"].read())
    with pytest.raises(PunaError, match="has 270 tokens"):
        execute(pretrain, config(), {"tokens": imported, "tokenizer": smaller}, store)


def test_tokens_of_a_tokenizer_of_the_same_size_are_refused(store, documents, given) -> None:
    """With equally many tokens every id has a meaning, but a different one."""
    other = execute(tokenizer, TokenizerConfig(vocab_size=300), {"documents": documents([sentences(i, 50)[::-1] for i in range(30)])}, store)
    wrong = {"tokens": given["tokens"], "tokenizer": other}
    message = f"{given['tokens'].id} was made by {given['tokenizer'].id}, not by the tokenizer of {other.id}"
    with pytest.raises(PunaError, match=message):
        execute(pretrain, config(), wrong, store)
    with pytest.raises(PunaError, match=message):
        execute(ladder, LadderConfig(model=SHAPE, widths=(8, 12, 16)), wrong, store)
