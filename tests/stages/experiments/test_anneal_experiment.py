"""Annealing tells a data set that helps from one that does not."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.experiments import anneal_experiment as module
from puna.stages.experiments.anneal_experiment import AnnealExperimentConfig, anneal_experiment
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.stages.pretrain.tokenize import TokenizeConfig, tokenize
from puna.stages.training.phase import SHAPE, Phase
from puna.storage import PunaError
from puna.storage.schemas import table_schema

SETTINGS = AnnealExperimentConfig(
    phase=Phase(name="anneal", steps=12, rows_per_step=4, schedule={"learning_rate": 5e-3, "warmup_steps": 2, "shape": "linear"}),
    repeats=2,
    heldout_tokens=400,
    validation_share=0.1,
)


@pytest.fixture
def given(store, corpus):
    """A model of one category's text, and candidates of another."""
    both = corpus([("high", 60)] * 40 + [("low", 60)] * 12)
    texts = both["documents"].read()
    old = store.import_table("documents", texts.slice(0, 40))
    new = store.import_table("documents", texts.slice(40))
    tokens = execute(tokenize, TokenizeConfig(sequence_length=32), {"documents": old, "tokenizer": both["tokenizer"]}, store)
    shape = SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    config = PretrainConfig(
        model=shape, phases=(Phase(steps=30, rows_per_step=4, schedule={"learning_rate": 2e-2, "warmup_steps": 3}),), validation_share=0.1
    )
    model = execute(pretrain, config, {"tokens": tokens, "tokenizer": both["tokenizer"]}, store)
    return {"model": model, "tokens": tokens, "documents": new}


def test_gain_where_the_candidates_help(store, given) -> None:
    made = execute(anneal_experiment, SETTINGS, given, store)
    found = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    # Text like the candidates' is learned from them only; the default text has a little less room.
    assert found["candidate", "gain"]["low"] > 0.2
    assert found["default", "gain"]["value"] < 0.2
    trials = made.read("trials").to_pylist()
    assert [t["name"] for t in trials] == ["default"] * 2 + ["candidate"] * 2
    losses = np.array([json.loads(t["parameters"])["losses"]["candidate"] for t in trials])
    assert found["candidate", "default_loss"]["value"] == pytest.approx(losses[:2].mean())
    assert found["candidate", "candidate_loss"]["value"] == pytest.approx(losses[2:].mean())
    assert found["candidate", "gain"]["value"] == pytest.approx((losses[:2] - losses[2:]).mean())
    assert losses[0] != losses[1]  # other rows


def test_answers_of_held_out_prompts_are_scored(store, given) -> None:
    from puna.stages.prompts.prompts import PromptsConfig, Task, prompts

    asked = execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=5, heldout=5), {}, store)
    rows = asked.read().to_pylist()
    odd = {**rows[0], "id": "odd", "split": "heldout", "messages": json.dumps([{"content": "no role"}])}
    mixed = store.import_table("prompts", pa.Table.from_pylist([odd, *rows], schema=table_schema("prompts").schema))
    made = execute(anneal_experiment, SETTINGS, {**given, "prompts": mixed}, store)
    (dropped,) = made.read("dropped").to_pylist()
    assert (dropped["id"], dropped["rule"]) == ("odd", "chat_template")
    with pytest.raises(PunaError, match="anneal_experiment: row odd: .*bad_rows=drop"):
        execute(anneal_experiment, SETTINGS.replace(bad_rows="refuse"), {**given, "prompts": mixed}, store)
    assert ("gcd", "gain") in {(row["task"], row["metric"]) for row in made.read().to_pylist()}
    none = execute(prompts, PromptsConfig(tasks=(Task(task="gcd"),), train=5, heldout=0), {}, store)
    with pytest.raises(PunaError, match="no held-out prompts"):
        execute(anneal_experiment, SETTINGS, {**given, "prompts": none}, store)


def test_trials_are_not_repeated_after_a_crash(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = module._anneal, []

    def crashing(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(module, "_anneal", crashing)
    with pytest.raises(KeyboardInterrupt):
        execute(anneal_experiment, SETTINGS, given, store)
    execute(anneal_experiment, SETTINGS, given, store)
    assert len(calls) == 5


def test_what_is_held_out_on_one_side_is_not_read_on_the_other(store, given, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that are among the default documents already: neither loss may be of documents that were read."""
    both = {**given, "documents": corpus([("high", 60)] * 40)["documents"]}
    original, read, measured = module.Reader, [], []

    def spying(packed, excluded, *rest):
        read.append({packed.ids[owner] for owner in packed.owners[~excluded]})
        return original(packed, excluded, *rest)

    def measuring(model, pieces, size):
        measured.append([tuple(piece) for piece in pieces])
        return 1.0

    monkeypatch.setattr(module, "Reader", spying)
    monkeypatch.setattr(module, "mean_loss", measuring)
    execute(anneal_experiment, SETTINGS.model_copy(update={"repeats": 2}), both, store)
    packed = module.Packed.read(given["tokens"])
    owners: dict[tuple[int, ...], set[str]] = {}
    for index, owner in enumerate(packed.owners):
        owners.setdefault(tuple(packed.piece(index)), set()).add(packed.ids[owner])
    aside = set().union(*(owners[piece] for piece in measured[1]))
    assert aside and not aside & (read[0] | read[1])
    # Document by document, the candidates' held-out ones are those that neither side reads.
    assert len(read[0]) < len(packed.ids) - len(aside) and not read[1] - set(packed.ids)
    assert read[0] >= read[1]
