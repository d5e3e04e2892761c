"""Stages that need input rows report an empty input with the stage's name and the input's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from puna.stages.align.data_quality import DataQualityConfig, data_quality
from puna.stages.align.instructions import InstructionsConfig, instructions
from puna.stages.align.preferences import PreferencesConfig, preferences
from puna.stages.align.rejection_sample import RejectionSampleConfig, rejection_sample
from puna.stages.contract import SeededConfig, StageRun, execute, stage
from puna.stages.contract.external import External
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.curate.train_classifier import TrainClassifierConfig, train_classifier
from puna.stages.pretrain.tokenizer import TokenizerConfig, tokenizer
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema


class NoConfig(SeededConfig):
    """The seed of a model."""


@stage(kind="model", version="1")
def no_model(config: NoConfig, run: StageRun) -> None:
    """Write a model that is never loaded."""
    (run.folder / "config.json").write_text("{}")


def empty(store: Store, kind: str) -> Artifact:
    return store.import_table(kind, table_schema(kind).schema.empty_table())


CASES: list[tuple[Any, Any, dict[str, str], str]] = [
    (
        train_classifier, TrainClassifierConfig(), {"documents": "documents"},
        "train_classifier: 0 documents have a label, of no class, but two classes are needed. The documents have the sources none",
    ),
    (tokenizer, TokenizerConfig(), {"documents": "documents"}, "documents/.* has no training documents with text"),
    (instructions, InstructionsConfig(), {"prompts": "prompts"}, "instructions: prompts/.* has no training prompts"),
    (preferences, PreferencesConfig(), {"answers": "answers", "prompts": "prompts"}, "answers/.* has no answers"),
    (
        rejection_sample, RejectionSampleConfig(), {"answers": "answers", "reward_model": "model", "prompts": "prompts"},
        "answers/.* has no answers",
    ),
    (data_quality, DataQualityConfig(), {"instructions": "instructions", "model": "model"}, "data_quality: instructions/.* has no instr"),
]  # fmt: skip


@pytest.mark.parametrize(("stage_", "config", "inputs", "message"), CASES, ids=[case[0].name for case in CASES])
def test_nothing_is_named(tmp_path: Path, stage_: Any, config: Any, inputs: dict[str, str], message: str) -> None:
    store = Store.open(tmp_path)
    given: dict[str, Any] = {}
    for name, kind in inputs.items():
        made = execute(no_model, NoConfig(), {}, store) if kind == "model" else empty(store, kind.strip("[]"))
        given[name] = [made] if kind.startswith("[") else made
    with pytest.raises(PunaError, match=message):
        execute(stage_, config, given, store)


def test_ingest_that_keeps_no_page_says_what_became_of_the_records(tmp_path: Path) -> None:
    file = tmp_path / "web.jsonl"
    file.write_text('{"text": "  "}\n{"text": ""}\n{"text": 7}\n')
    store = Store.open(tmp_path / "store")
    with pytest.raises(PunaError, match="ingest: .*: no page is kept; files 1, records 3: 2 empty, 1 malformed_record"):
        execute(ingest, IngestConfig(), {"inputs": External.resolve(str(file))}, store)
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("")
    with pytest.raises(PunaError, match=r"no page is kept; .*: 1 unreadable_file; 1 \.jsonl \(nothing\.jsonl: the file is empty\)$"):
        execute(ingest, IngestConfig(), {"inputs": External.resolve(str(nothing))}, store)
