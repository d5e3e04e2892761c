"""The flow of the base model: training does not depend on the text of held-out pages; the measurements do."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.flows.engine.declare import Flow, Output, Walk
from puna.flows.engine.recipe import Recipe, Step
from puna.flows.engine.trace import flow_named, load, trace
from puna.flows.experiments import experiments
from puna.flows.pretrain import pretrain
from puna.stages.contract import execute
from puna.stages.pretrain.split import SplitConfig, split
from puna.storage import Artifact, PunaError, Store

WORDS = {
    "high": ["puna", "llama", "grass", "wind", "stone", "river", "cold", "wool"],
    "low": ["coast", "wave", "fish", "net", "salt", "boat", "sand", "warm"],
}
SMALL = [
    "tokenizer.vocab_size=290",
    "mix_experiment.categories=2", "mix_experiment.trials=4", "mix_experiment.phase={name: proxy, steps: 3, rows_per_step: 1, schedule: {warmup_steps: 1}}",
    "mix_experiment.sequence_length=32", "mix_experiment.heldout_tokens=100",
    "mix_experiment.model={hidden_size: 16, intermediate_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1}",
    "tokenize.sequence_length=32", "pretrain.validation_tokens=100", "pretrain.compute={precision: fp32}",
    "ladder.model={hidden_size: 24, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 1, num_key_value_heads: 1}",
    "ladder.widths=[8, 12, 16]", "ladder.questions=0", "ladder.tokens_per_parameter=0.05", "ladder.multiples=[1.0, 2.0]", "ladder.validation_tokens=100",
    "ladder.rows=[1]", "ladder.rates=[0.01]", "ladder.compute={precision: fp32}", "choose_size={flops: 1e+8, hours: null, gpu: null}",
    "evaluate_base.pages={max_bytes: 4000, questions: 0, continuations: 0}",
    "prompts={tasks: [{task: digits}], train: 1, heldout: 1, draws: 50}",
    "evaluate_base.answers={prompts_per_task: 1, max_tokens: 2}", "evaluate_base.serving={window: 16}", "contamination_base={}",
]  # fmt: skip


class Maker(Walk):
    """A walk that runs each step in a separate store, without a session."""

    def __init__(self, recipe: Recipe, store: Store) -> None:
        super().__init__(recipe)
        self.store = store
        self.made: dict[str, Artifact] = {}

    def make(self, step: Step, label: str, config: Any, inputs: dict[str, list[Output]]) -> Output:
        given: dict[str, Any] = {}
        for spec in step.stage.inputs:
            items = [item for output in inputs[spec.name] for item in output.items]
            given[spec.name] = items if spec.many else (items[0] if items else None)
        self.made[label] = execute(step.stage, config, given, self.store)
        return Output(step.stage.kind, (label,), (self.made[label],))

    def publish(self, name: str, output: Output) -> None:
        pass


def curated(store: Store, heldout_words: dict[str, list[str]]) -> tuple[Output, Output]:
    """Return documents of two categories and their types; the documents that will be held out consist of other words."""
    n = 80
    categories = ["high" if i % 2 else "low" for i in range(n)]
    addresses = [f"https://x.org/{i}" for i in range(n)]
    ids = [f"{i:032x}" for i in range(n)]

    def documents_of(texts: list[str]) -> Artifact:
        return store.import_table("documents", pa.table({
            "id": ids, "url": addresses, "fetched_at": [datetime(2026, 1, 1, tzinfo=UTC)] * n, "source": ["web"] * n,
            "title": pa.array([None] * n, pa.string()), "text": texts,
        }))  # fmt: skip

    domains = store.import_table("signals", pa.table({"id": ids, "domain": categories}))
    sides = execute(split, SplitConfig(), {"documents": documents_of([""] * n), "signals": domains}, store).read()["split"].to_pylist()
    texts = []
    for i, category in enumerate(categories):
        words = (heldout_words if sides[i] == "heldout" else WORDS)[category]
        texts.append(" ".join(random.Random(i).choices(words, k=60)))
    documents = documents_of(texts)
    return Output("documents", ("documents",), (documents,)), Output("signals", ("domains",), (domains,))


def test_nothing_trained_depends_on_held_out_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("puna.stages.experiments.ladder.FEWEST_STEPS", 3)
    made: list[dict[str, Artifact]] = []
    other = {category: [word[::-1].upper() * 3 for word in words] for category, words in WORDS.items()}
    for name, words in (("one", WORDS), ("two", other)):
        store = Store.open(tmp_path / name)
        maker = Maker(load("one-gpu", SMALL), store)
        documents, domains = curated(store, words)
        both = Flow("both", lambda documents, domains: pretrain(documents, domains, experiments(documents, domains)), ())
        maker.walk(both, {"documents": documents, "domains": domains})
        made.append(maker.made)
    one, two = made
    measured = {"evaluate_base", "contamination_base"}
    small = {"mix_experiment", "ladder", "law", "choose_size"}
    assert set(one) == {"prompts", "split", "tokenizer", "mix", "tokenize", "pretrain", *measured, *small}
    for name in set(one) - measured:
        assert one[name].data_digest == two[name].data_digest, name
    bits = [steps["evaluate_base"].manifest.metrics["document_bits_per_byte"] for steps in made]
    assert bits[0] != pytest.approx(bits[1], rel=0.01)
    # The model's lineage names its documents, none of which contain the questions.
    found = one["contamination_base"].manifest.metrics
    assert found["sources"].startswith("documents ") and found["contaminated_prompts"] == 0 and found["unknown_sources"] == 0
    # The measured pages are those that the split holds out, and no row of training tokens comes from them.
    sides = {row["id"]: row["split"] for row in one["mix"].read().to_pylist()}
    trained = {id_ for row in one["tokenize"].read()["documents"].to_pylist() for id_ in row}
    assert {sides[id_] for id_ in trained} == {"train"} and "heldout" in sides.values()


def test_without_a_mixture_held_out_documents_stay_held_out() -> None:
    """Without `mix`, each training document of the split is read once."""
    traced = trace(flow_named("pretrain"), load("demo", ["mix=null"], "pretrain"))
    inputs = {one.label: one.inputs for one in traced.steps}
    assert not traced.complaints and "mix" not in inputs
    assert [inputs[label]["mixture"] for label in ("tokenizer", "tokenize", "evaluate_base")] == [("split",)] * 3


@pytest.mark.parametrize("changes", [["split=null", "mix=null"], ["split.heldout_fraction=0"]])
def test_a_run_that_holds_nothing_out_is_refused_if_it_measures_held_out_documents(changes: list[str]) -> None:
    with pytest.raises(PunaError, match="evaluate_base measures documents that split holds out"):
        trace(flow_named("pretrain"), load("demo", changes, "pretrain"))
    traced = trace(flow_named("pretrain"), load("demo", [*changes, "evaluate_base=null"], "pretrain"))
    assert not traced.complaints and "pretrain" in {one.label for one in traced.steps}
