"""Stages in which several processes share prompts, pages and questions: the rows equal one process's bit by bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from puna.models.serving import ServingSettings
from puna.stages.align import sample
from puna.stages.contract import External, execute
from puna.stages.contract.declaration import REGISTRY
from puna.stages.conversations import asking
from puna.stages.evaluation import benchmark, evaluate
from puna.stages.training.serving import check_shared
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


def test_what_no_test_proves_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = SimpleNamespace(stage="sample")
    assert check_shared(ServingSettings(speculate=3), False, run) and not check_shared(ServingSettings(weights="int8"), False, run)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert check_shared(ServingSettings(), False, run)
    for serving, drafted in ((ServingSettings(weights="int8"), False), (ServingSettings(window=32), False), (ServingSettings(), True)):
        with pytest.raises(PunaError, match=r"sample: several processes are not supported \(untested\) with a draft"):
            check_shared(serving, drafted, run)
