"""Contamination: questions planted in a model's training data, found through its lineage."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from puna.stages.contract import Documents, Instructions, Mixture, Model, Prompts, StageConfig, StageRun, Tokens, execute, stage
from puna.stages.conversations import asking, dump
from puna.stages.curate.contamination import ContaminationConfig, contamination, trained_on
from puna.stages.training.intervals import evaluation_row
from puna.storage import PunaError, Store
from puna.storage.schemas import table_schema

QUESTIONS = {
    "a1": "A train leaves the old station at nine and meets another one at noon, where do they meet?",
    "a2": "Seven llamas carry four bags of wool each over the pass, how many bags reach the village below?",
    "b1": "Which of the rivers that rise in the high grassland of the Andes flows north into the great lake?",
    "b2": "A baker sells nine loaves in the morning and twice as many after noon, how many does she sell?",
}
CLEAN = "Clean text about llamas in the high grassland of the Andes and of their wool. " * 3


@stage(kind="tokens", version="1")
def packed(documents: Documents, mixture: Mixture | None, config: StageConfig, run: StageRun) -> None:
    """Stand in for the stage that tokenizes documents."""
    (run.folder / "model.json").write_text("{}")


@stage(kind="model", version="1")
def pretrained(tokens: Tokens, config: StageConfig, run: StageRun) -> None:
    """Stand in for pretraining."""
    (run.folder / "config.json").write_text("{}")


@stage(kind="model", version="1")
def tuned(model: Model, instructions: list[Instructions], config: StageConfig, run: StageRun) -> None:
    """Stand in for finetuning."""
    (run.folder / "config.json").write_text("{}")


@stage(kind="evaluation", version="1")
def solved(prompts: Prompts, config: StageConfig, run: StageRun) -> None:
    """Stand in for an evaluation: a1 and b1 solved, half of b2."""
    run.write_rows([evaluation_row("all", "score", 0.5, 4)])
    run.write_rows([{"id": name, "name": "score", "value": {"a1": 1.0, "b1": 1.0, "b2": 0.5}.get(name, 0.0)} for name in QUESTIONS], "scores")


@pytest.fixture
def built(tmp_path, make_documents):
    """Return a model trained on a document with a1 and instructions with b1; a2 and b2 occur only in held-out data."""
    store = Store.open(tmp_path)
    rows = [{"id": name, "task": name[0], "split": "heldout", "messages": asking(text), "tools": None, "reference": "x", "verifier": None} for name, text in QUESTIONS.items()]
    prompts = store.import_table("prompts", pa.Table.from_pylist(rows, schema=table_schema("prompts").schema))
    documents = make_documents(store, [("clean", "web", CLEAN), ("dirty", "web", f"A post. {QUESTIONS['a1'].upper()} Ha."), ("held", "web", QUESTIONS["a2"])])
    split = {"clean": "train", "dirty": "train", "held": "heldout"}
    mixture = store.import_table("mixture", pa.Table.from_pylist([{"id": name, "category": "c", "repeats": 1, "weight": 1.0, "split": side} for name, side in split.items()]))
    turns = [(name, side, [{"role": "user", "content": QUESTIONS[name]}, {"role": "assistant", "content": "So."}]) for name, side in (("b1", "train"), ("b2", "heldout"))]
    told = [{"id": name, "prompt_id": name, "task": "t", "split": side, "messages": dump(messages), "tools": None, "source": "s", "score": None} for name, side, messages in turns]
    instructions = store.import_table("instructions", pa.Table.from_pylist(told, schema=table_schema("instructions").schema))
    tokens = execute(packed, StageConfig(), {"documents": documents, "mixture": mixture}, store)
    model = execute(tuned, StageConfig(), {"model": execute(pretrained, StageConfig(), {"tokens": tokens}, store), "instructions": [instructions]}, store)
    return store, prompts, documents, instructions, model


def test_the_lineage_of_a_model_names_its_texts(built):
    _, _, documents, instructions, model = built
    sources, unknown = trained_on(model)
    assert {source.artifact.key for source in sources} == {documents.key, instructions.key} and unknown == 0


def test_scores_stand_beside_those_of_the_clean_part(built):
    store, prompts, documents, _, model = built
    evaluation = execute(solved, StageConfig(), {"prompts": prompts}, store)
    made = execute(contamination, ContaminationConfig(), {"prompts": [prompts], "model": model, "evaluation": evaluation}, store)
    values = {(row["task"], row["metric"]): row["value"] for row in made.read().to_pylist()}
    assert [values[task, "contaminated"] for task in ("all", "a", "b")] == [0.5, 0.5, 0.5]
    assert values["all", "score"] == pytest.approx(2.5 / 4) and values["all", "score_clean"] == 0.25 and values["all", "score_contaminated"] == 1.0
    assert values["a", "score_clean"] == 0.0 and values["b", "score_clean"] == 0.5
    assert {row["id"] for row in made.read("scores").to_pylist()} == {"a1", "b1"}
    example = next(row for row in made.read("examples").to_pylist() if row["id"] == "a1")
    assert f"in documents {documents.data_digest[:12]}, dirty" in example["detail"] and example["text"].startswith("a train leaves the old station")


def test_texts_may_be_given_without_a_model(built):
    store, prompts, documents, _, _ = built
    made = execute(contamination, ContaminationConfig(), {"prompts": [prompts], "documents": [documents]}, store)
    assert {row["id"] for row in made.read("scores").to_pylist()} == {"a1", "a2"}  # without its mixture every document counts
    assert json.loads(json.dumps(made.manifest.metrics))["sources"] == f"documents {documents.data_digest[:12]}"
    with pytest.raises(PunaError, match="no training text is given; give its training data"):
        execute(contamination, ContaminationConfig(), {"prompts": [prompts]}, store)
