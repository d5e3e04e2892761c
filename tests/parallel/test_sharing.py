"""Stages in which several processes share prompts, pages and questions: the rows equal one process's bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from puna.flows.engine.preflight import check_stage
from puna.flows.engine.trace import load_stages
from puna.stages.align import sample
from puna.stages.contract import External, execute, rank_jobs
from puna.stages.contract.declaration import REGISTRY
from puna.stages.conversations import asking
from puna.stages.evaluation import benchmark, evaluate
from puna.storage import Artifact, PunaError, Store
from puna.storage.schemas import table_schema
from tests.stages.evaluation.conftest import model, store, task  # noqa: F401 (fixtures)

from .conftest import Run

STAGES = (sample, evaluate, benchmark)  # these modules declare the stages
CONFIGS: dict[str, dict[str, Any]] = {
    "sample": {"answers": 3, "max_tokens": 12, "seed": 4},
    "evaluate": {"answers": {"max_tokens": 12}, "pages": {"max_bytes": 9000, "questions": 6, "prompt_words": 4, "option_words": 3}},
    "benchmark": {"max_tokens": 12, "limit": 5},
}


def inputs(opened: Store, network: Artifact, tasks: External) -> dict[str, dict[str, Any]]:
    verifier = json.dumps({"name": "regex", "pattern": "[a-m]"})
    rows = [
        {"id": f"{n:02}", "task": f"task {n % 2}", "split": "heldout" if n % 3 else "train", "tools": None, "reference": "r",
         "verifier": verifier, "messages": asking(f"what is {n % 11} and cat?")}
        for n in range(33)
    ]  # fmt: skip
    pages = [
        {"id": f"{n:032x}", "url": f"https://x.org/{n}", "fetched_at": datetime(2026, 1, 1, tzinfo=UTC), "source": "web", "title": None,
         "text": " ".join(f"word{n * k % 7}" for k in range(9 + n))}
        for n in range(12)
    ]  # fmt: skip
    prompts, documents = (
        opened.import_table(kind, pa.Table.from_pylist(some, schema=table_schema(kind).schema)) for kind, some in (("prompts", rows), ("documents", pages))
    )
    return {
        "sample": {"models": [network], "prompts": prompts}, "evaluate": {"model": network, "prompts": prompts, "documents": documents},
        "benchmark": {"model": network, "prompts": [prompts], "tasks": [tasks]},
    }  # fmt: skip


def tables(artifact: Artifact) -> dict[str, list[dict[str, Any]]]:
    rows = {name: artifact.read(name).to_pylist() for name in artifact.tables}
    return {name: [{key: value for key, value in row.items() if key != "seconds"} for row in some] for name, some in rows.items()}


def rounded(value: Any) -> Any:
    """Return a JSON value with its numbers rounded to four places, including numbers in JSON strings."""
    if isinstance(value, str) and value.startswith("{"):
        return rounded(json.loads(value))
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return pytest.approx(value, abs=1e-4, rel=1e-4) if isinstance(value, float) else value


@pytest.mark.parametrize("name, layout", [
    *((name, {}) for name in CONFIGS), *((name, {"data": 4, "tensor": 2}) for name in CONFIGS), ("sample", {"data": 4, "pipeline": 2}),
], ids=str)  # fmt: skip
def test_eight_processes_write_the_rows_of_one(
    ranks: Run, name: str, layout: dict[str, int], tmp_path: Path, store: Store, model: Callable[..., Artifact], task: Callable[..., External]  # noqa: F811
) -> None:
    tasks = task([{"q": f"{n} cat?", "o": ["a", "cat", "fish"], "a": n % 3} for n in range(9)], output_type="multiple_choice",
                 doc_to_text="{{q}}", doc_to_choice="{{o}}", doc_to_target="a")  # fmt: skip
    given, stage, config = inputs(store, model(3, groups=2), tasks)[name], REGISTRY[name], CONFIGS[name]
    other = shutil.copytree(store.root, tmp_path / "other")
    one = execute(stage, stage.config(**config), given, store)
    sent = {key: [asdict(item) if isinstance(item, External) else (item.kind, item.key) for item in (value if isinstance(value, list) else [value])]
            for key, value in given.items()}  # fmt: skip
    more = {"serving": {"layout": layout}} if layout else {}
    assert ranks("stage", 8, store=str(other), name=name, config=config | more, inputs=sent) == [one.key] + 7 * [None]
    shared = Store.open(other).find(stage.kind, one.key)
    assert shared is not None and sum(map(len, tables(one).values())) > 30
    metrics = [{k: v for k, v in made.manifest.metrics.items() if "second" not in k} for made in (shared, one)]
    if "tensor" in layout:  # sums over ranks, in another order
        assert rounded([tables(shared), metrics[0]]) == rounded([tables(one), metrics[1]])
    else:
        assert tables(shared) == tables(one) and metrics[0] == metrics[1]


SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"serving": {"weights": "int8"}}, "serving.weights") for name in CONFIGS), ("sample", {"serving": {"window": 32}}, "serving.window"),
    ("sample", {"serving": {"offload": "disk"}}, "serving.offload"), ("sample", {"serving": {"engine": "vllm"}}, "serving.engine"),
    ("sample", {"endpoints": [{"base_url": "http://localhost:1/v1", "model": "other"}]}, "endpoints"),
    ("evaluate", {"answers": {"turns": 2}}, "answers.turns"), ("evaluate", {"answers": {"temperature": 1, "search": {"n": 2}}}, "answers.search"),
    ("grpo", {"turns": 2}, "turns"), ("ppo", {"engine": "vllm"}, "engine"), ("sft", {"engine": "trl"}, "engine"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "problem"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_settings_that_no_test_proves_are_refused_before_any_rank_computes(
    monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, Any], problem: str
) -> None:
    stage = load_stages()[name]
    config = stage.config.model_validate(settings)
    rank_jobs.check(stage, config)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_jobs.misfits(stage, config) == [f"{problem} is untested with several processes: leave it out, or use one process"]
    rank_jobs.check(stage, stage.config())


def test_a_draft_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    stage = REGISTRY["sample"]
    rank_jobs.check(stage, stage.config.model_validate({"serving": {"speculate": 3, "memory": 1}}), ["models"])
    with pytest.raises(PunaError, match="sample: the input draft is untested with several processes"):
        rank_jobs.check(stage, stage.config(), ["models", "draft"])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_layout_that_the_model_cannot_have_is_refused_before_any_rank_computes(
    monkeypatch: pytest.MonkeyPatch, store: Store, model: Callable[..., Artifact], task: Callable[..., External], name: str  # noqa: F811
) -> None:
    network, stage = model(3, groups=2), REGISTRY[name]
    tasks = task([{"q": "a", "o": ["a", "b"], "a": 0}], output_type="multiple_choice", doc_to_text="{{q}}", doc_to_choice="{{o}}", doc_to_target="a")
    given = inputs(store, network, tasks)[name]
    monkeypatch.setenv("WORLD_SIZE", "3")
    config = stage.config.model_validate({"serving": {"layout": {"tensor": 3}}})
    with pytest.raises(PunaError, match=rf"^{name}: .*{network.id}: serving.layout.tensor = 3: num_attention_heads is 2, which it must divide"):
        check_stage(stage, config, given, store)
