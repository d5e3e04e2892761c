"""`--input NAME=ARTIFACT`: names the input of a stage or a flow for an artifact."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.flows.engine import launch
from puna.flows.engine.declare import Output, name_of
from puna.flows.engine.inputs import parse_inputs
from puna.flows.engine.launch import stage_inputs
from puna.flows.engine.trace import flow_named, load, trace
from puna.stages.align.reinforcement import ppo
from puna.stages.align.sample import sample
from puna.stages.curate.ingest import ingest
from puna.storage import Artifact, Identity, PunaError, Store
from puna.storage.schemas import table_schema


def model(store: Store, digit: str) -> Artifact:
    with store.work(digit * 64) as work:
        (work.output / "config.json").write_text(f'{{"own": "{digit}"}}')
        (work.output / "tokenizer_config.json").write_text('{"chat_template": "none"}')
        return work.commit("model", digit * 64, Identity(stage="import"))


def test_artifacts_go_where_they_are_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    policy, judge, other = (model(store, digit) for digit in "abc")
    store.set_alias("mine@latest", other)
    found = parse_inputs([f"judges={judge.kind}/{judge.key}", policy.key[:12], "judges=mine@latest"], sample.inputs, store, "sample")
    given = stage_inputs(sample, found.items, found.named)
    assert given["models"] == [policy] and given["judges"] == [judge, other]
    found = parse_inputs([f"judges={judge.key[:8]}", f"reward_model={other.key[:8]}", f"policy={policy.key[:8]}"], ppo.inputs, store, "ppo")
    assert not found.items
    given = stage_inputs(ppo, [], found.named)
    assert stage_inputs(ppo, [policy])["judges"] is None and given["policy"] == policy and given["reward_model"] == [other] and given["judges"] == [judge]
    both = parse_inputs([f"policy={policy.key[:8]}", f"policy={other.key[:8]}"], ppo.inputs, store, "ppo").named
    with pytest.raises(PunaError, match="input 'policy' takes one artifact, 2 were given"):
        ppo.check(stage_inputs(ppo, [], both))


def test_a_wrong_name_is_told_the_inputs(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    found = model(store, "a")
    with pytest.raises(PunaError, match=r"sample has no input 'judge' that takes an artifact; its inputs are models \(model\), prompts \(prompts\), judges \(model\), draft \(model\)"):
        parse_inputs([f"judge={found.key[:8]}"], sample.inputs, store, "sample")
    with pytest.raises(PunaError, match="sample: judges takes no files, so import them first: `puna import model some/folder --as folder`"):
        parse_inputs(["judges=some/folder"], sample.inputs, store, "sample")
    (tmp_path / "page.jsonl").write_text('{"text": "x"}')
    files = parse_inputs([f"wiki={tmp_path}/page.jsonl", f"{tmp_path}/page.jsonl"], ingest.inputs, store, "ingest")
    assert [name_of(item) for item in files.items] == [f"{tmp_path}/page.jsonl"] * 2 and not files.named


def test_a_flow_takes_artifacts_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    policy, base = model(store, "a"), model(store, "b")
    store.set_alias("model@latest", base)
    store.set_alias("mine@latest", policy)
    align, recipe = flow_named("align"), load("demo", flow="align")

    def given(*texts: str) -> list[str]:
        found = launch.checked_inputs(align, recipe, texts, store, quiet=True)["model"]
        assert isinstance(found, Output)
        return [item.id for item in found.items]

    assert given("model=mine@latest") == given(f"model={policy.key[:8]}") == given("mine@latest") == [policy.id]
    assert given() == [base.id]
    with pytest.raises(PunaError, match=r"flow align has no input 'policy' that takes an artifact; its inputs are model \(model\), demonstrations"):
        given("policy=mine@latest")
    with pytest.raises(PunaError, match=r"flow align: input 'judged' takes preferences, but model/a+ is of kind model"):
        given("model=mine@latest", "judged=mine@latest")
    with pytest.raises(PunaError, match=r"flow align: input 'model' takes one artifact, 2 were given"):
        given("model=mine@latest", "model=model@latest")


def test_documents_are_given_a_source_by_name(tmp_path: Path) -> None:
    """The quality classifier needs the source `wikipedia`: before the run, the documents' source names are known."""
    store, curate = Store.open(tmp_path), flow_named("curate")
    schema = table_schema("documents").schema
    row = {"id": f"{1:032x}", "url": "file:///a", "fetched_at": datetime(2024, 1, 1, tzinfo=UTC), "source": "mine", "title": None, "text": "x"}
    first, second = (store.import_table("documents", pa.Table.from_pylist([row | {"text": text}], schema=schema)) for text in "xy")
    recipe = load("demo", ["domains=null"], "curate")

    def steps(*texts: str) -> dict[str, Any]:
        given = launch.checked_inputs(curate, recipe, texts, store, quiet=True)
        return {step.label: step for step in trace(curate, recipe, given).steps}

    found = steps(f"wikipedia={first.key[:8]}", second.key[:8])
    assert found["gather"].config.sources == ("", "wikipedia") and found["gather"].inputs["documents"] == (f"input {second.id}", f"input {first.id}")
    assert "ingest" not in found and found["url_filter"].inputs["documents"] == ("gather",)
    with pytest.raises(PunaError, match=r"no input has such a name \(they are mine\)"):
        steps(first.key[:8])
    recipe = load("clean", flow="curate")
    assert steps(first.key[:8])["url_filter"].inputs["documents"] == (f"input {first.id}",) and "gather" not in steps(first.key[:8])
    with pytest.raises(PunaError, match="flow curate needs pages or documents"):
        trace(curate, recipe, curate.by_kind([]))
