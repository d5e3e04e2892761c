"""Gains and costs of a selection's rules, from runs with and without the documents that each rule drops."""

from __future__ import annotations

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import execute
from puna.stages.experiments import filter_ablation as module
from puna.stages.experiments.filter_ablation import FilterAblationConfig, filter_ablation
from puna.stages.training.phase import SHAPE, Phase
from puna.stages.training.pools import Mixed, Pools
from puna.stages.training.proxy_runs import Proxy
from puna.stages.training.vocabulary import tokenizer_of
from puna.storage import PunaError
from puna.storage.schemas import table_schema

SETTINGS = FilterAblationConfig(
    model=SHAPE.replace(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1),
    phase=Phase(name="proxy", steps=24, rows_per_step=1, schedule={"learning_rate": 0.03, "warmup_steps": 4}), share=0.5,
    sequence_length=32, heldout_tokens=200, max_readings=1,
)  # fmt: skip


@pytest.fixture
def given(store, corpus):
    """Return documents of one kind, some of which a rule drops without good reason, others of another kind, and a few of a third; another
    rule drops a single document, too little for a run to read and be measured on."""
    made = corpus([("high", 60)] * 50 + [("high", 60)] * 20 + [("low", 60)] * 20 + [("code", 60)] * 3)
    rows = made["documents"].read()
    dropped = [
        {"id": id_, "rule": rule, "value": None, "threshold": None, "detail": None}
        for id_, rule in zip(rows["id"].to_pylist()[50:], ["harsh"] * 20 + ["sound"] * 20 + ["rare"] * 2 + ["single"], strict=True)
    ]
    table = pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)
    selected = store.import_table("documents", rows.slice(0, 50), dropped=table)
    return {"documents": made["documents"], "selected": selected, "tokenizer": made["tokenizer"]}


def test_a_rule_earns_what_the_documents_it_drops_would_cost(store, given) -> None:
    made = execute(filter_ablation, SETTINGS, given, store)
    found = {(row["task"], row["metric"]): row for row in made.read().to_pylist()}
    # Two documents, one of them held out, would be read too often.
    assert ("rare", "earned_bits_per_byte") not in found and found["rare", "readings"]["value"] > 1 and made.manifest.metrics["rules_measured"] == 2
    sound, harsh = (found[rule, "earned_bits_per_byte"] for rule in ("sound", "harsh"))
    assert sound["low"] > 0 and sound["value"] > harsh["high"]
    losses: dict[str, list[float]] = {}
    for trial in made.read("trials").to_pylist():
        losses.setdefault(trial["name"].split()[0], []).append(trial["loss"])
        assert json.loads(trial["parameters"])["share"] == (1 if trial["name"].startswith("kept") else 0.5)
    # Bits per byte are nats per token in another unit, which is the same for all runs.
    unit = found["kept", "bits_per_byte"]["value"] / np.mean(losses["kept"])
    assert 0 < unit < 1 / math.log(2)
    pairs = np.array(losses["sound"]) - losses["kept"]
    assert sound["value"] == pytest.approx(unit * pairs.mean())
    assert sound["value"] - sound["low"] == pytest.approx(4.302653 * unit * pairs.std(ddof=1) / 3**0.5)
    encoded = tokenizer_of(given["tokenizer"]).encode_batch(given["selected"].read()["text"].to_pylist())
    assert found["sound", "tokens"]["n"] == 20 and found["kept", "tokens"]["value"] == pytest.approx(sum(map(len, encoded)), rel=0.05)


def test_the_runs_of_a_pair_read_kept_rows_in_one_order_and_each_pair_in_its_own(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_proxy", lambda model, *_: Proxy(model, 1, 1.0, 1.0))
    original, made = Pools.mix, list[Mixed]()
    monkeypatch.setattr(Pools, "mix", lambda self, *arguments: made.append(original(self, *arguments)) or made[-1])
    execute(filter_ablation, SETTINGS, given, store)
    orders = [[reader.pieces(step) for reader in mixed.readers for step in range(1, 9)] for mixed in made]
    assert orders == orders[:3] * 3 and orders[0] != orders[1] != orders[2] != orders[0]


def test_kept_documents_are_a_group_of_their_own_where_rules_drop_more(store, corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_proxy", lambda model, *_: Proxy(model, 1, 1.0, 1.0))
    made = corpus([("high", 60)] * 15 + [("low", 60)] * 40 + [("code", 60)] * 5)
    rows = made["documents"].read()
    rules = ["harsh"] * 40 + ["sound"] * 5
    dropped = [dict.fromkeys(("value", "threshold", "detail")) | {"id": i, "rule": r} for i, r in zip(rows["id"].to_pylist()[15:], rules, strict=True)]
    table = pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)
    selected = store.import_table("documents", rows.slice(0, 15), dropped=table)
    given = {"documents": made["documents"], "selected": selected, "tokenizer": made["tokenizer"]}
    found = {row["task"]: row["n"] for row in execute(filter_ablation, SETTINGS.replace(rules=1), given, store).read().to_pylist() if row["metric"] == "tokens"}
    assert found == {"kept": 15, "other": 45}


def test_what_is_no_selection_is_refused_before_a_document_is_read(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.stages.experiments.filter_ablation.grouped_documents", lambda *given: pytest.fail("documents are read"))
    for wrong in (given["documents"], store.import_table("documents", given["documents"].read(), dropped=given["selected"].read("dropped").slice(0, 0))):
        with pytest.raises(PunaError, match="keeps or drops almost nothing"):
            execute(filter_ablation, SETTINGS, {**given, "selected": wrong}, store)


def test_nothing_is_trained_where_no_rule_drops_enough(store, given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_proxy", lambda *_: pytest.fail("trained"))
    with pytest.raises(PunaError, match=r"no rule can be measured: .* read [\d.]+ times; see max_readings"):
        execute(filter_ablation, SETTINGS.replace(phase=SETTINGS.phase.replace(steps=24_000)), given, store)
