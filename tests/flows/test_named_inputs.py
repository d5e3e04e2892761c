"""`--input NAME=ARTIFACT`: the input of a stage or a flow that an artifact is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from puna.flows import running
from puna.flows.inputs import by_name
from puna.flows.program import Output
from puna.flows.running import given_to
from puna.flows.trace import flow_named, load
from puna.stages.align.ppo import ppo
from puna.stages.align.sample import sample
from puna.stages.curate.ingest import ingest
from puna.storage import Artifact, Identity, PunaError, Store


def model(store: Store, digit: str) -> Artifact:
    with store.work(digit * 64) as work:
        (work.output / "config.json").write_text(f'{{"own": "{digit}"}}')
        (work.output / "tokenizer_config.json").write_text('{"chat_template": "none"}')
        return work.commit("model", digit * 64, Identity(stage="import"))


def test_artifacts_go_where_they_are_named(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    policy, judge, other = (model(store, digit) for digit in "abc")
    store.set_alias("mine@latest", other)
    free, named = by_name([f"judges={judge.kind}/{judge.key}", policy.key[:12], "judges=mine@latest"], sample.inputs, store, "sample")
    given = given_to(sample, [store.resolve(text) for text in free], named)
    assert given["models"] == [policy] and given["judges"] == [judge, other]
    free, named = by_name([f"judges={judge.key[:8]}", f"reward_model={other.key[:8]}", f"policy={policy.key[:8]}"], ppo.inputs, store, "ppo")
    assert not free
    given = given_to(ppo, [], named)
    assert ppo.by_kind([policy])["judges"] is None and given["policy"] == [policy] and given["reward_model"] == [other] and given["judges"] == [judge]
    both = by_name([f"policy={policy.key[:8]}", f"policy={other.key[:8]}"], ppo.inputs, store, "ppo")[1]
    with pytest.raises(PunaError, match="input 'policy' takes one artifact, 2 were given"):
        ppo.check(given_to(ppo, [], both))


def test_a_wrong_name_is_told_the_inputs(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    found = model(store, "a")
    with pytest.raises(PunaError, match=r"sample has no input 'judge' that takes an artifact; there are models \(model\), prompts \(prompts\), judges \(model\)"):
        by_name([f"judge={found.key[:8]}"], sample.inputs, store, "sample")
    with pytest.raises(PunaError, match="sample: judges takes no files, so import them first: `puna import model some/folder --as folder`"):
        by_name(["judges=some/folder"], sample.inputs, store, "sample")
    assert by_name(["wiki=some/folder", "page.jsonl"], ingest.inputs, store, "ingest") == (["wiki=some/folder", "page.jsonl"], {})


def test_a_flow_takes_artifacts_by_the_names_of_its_inputs(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    policy, base = model(store, "a"), model(store, "b")
    store.set_alias("model@latest", base)
    store.set_alias("mine@latest", policy)
    align, recipe = flow_named("align"), load("demo", flow="align")

    def given(*texts: str) -> list[str]:
        found = running.checked_inputs(align, recipe, texts, store, quiet=True)["model"]
        assert isinstance(found, Output)
        return [item.id for item in found.items]

    assert given("model=mine@latest") == given(f"model={policy.key[:8]}") == given("mine@latest") == [policy.id]
    assert given() == [base.id]
    with pytest.raises(PunaError, match=r"flow align has no input 'policy' that takes an artifact; there are model \(model\), demonstrations"):
        given("policy=mine@latest")
    with pytest.raises(PunaError, match=r"flow align: input 'judged' takes preferences, but model/a+ is of kind model"):
        given("model=mine@latest", "judged=mine@latest")
    with pytest.raises(PunaError, match=r"flow align: input 'model' takes one artifact, 2 were given"):
        given("model=mine@latest", "model=model@latest")
