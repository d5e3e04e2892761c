"""A user's own rule (signal and threshold) and stage: one file each, and no other file changes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from puna.stages import plugins
from puna.stages.contract import REGISTRY, SIGNALS, execute, parse
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.rules.groups import RULE_GROUPS
from puna.stages.curate.select import SelectConfig, select
from puna.storage import Artifact, PunaError, Store

RULE = """
    from typing import Annotated

    from pydantic import Field

    from puna.stages.contract import signal
    from puna.stages.curate.rules.groups import Drop, RuleGroup, rule_group

    @signal(unit="per character")
    def one_file_bars(text: str) -> float:
        '''Vertical bars among the characters.'''
        return text.count("|") / len(text)

    @rule_group("one_file")
    class OneFileRules(RuleGroup):
        '''Rules on bars.'''

        max_bars: Annotated[float | None, Drop("one_file_bars", ">")] = Field(0.5, ge=0, description="Maximum share of bars")
    """
STAGE = """
    from pydantic import Field

    from puna.stages.contract import Documents, StageConfig, StageRun, stage

    class OneFileConfig(StageConfig):
        '''Settings of the stage.'''

        suffix: str = Field("!", min_length=1, description="Text to append")

    @stage(kind="documents")
    def one_file_stage(documents: Documents, config: OneFileConfig, run: StageRun) -> None:
        '''Append a suffix to each text.'''
        for part in run.parts(documents):
            for row in part.read().to_pylist():
                run.write_rows([{**row, "text": row["text"] + config.suffix}])
    """


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Return a function that writes a module and loads it as `--module` does; unload it after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(plugins, "_modules", {})
    before = [(entries, dict(entries)) for entries in (SIGNALS, REGISTRY, RULE_GROUPS)]
    names: list[str] = []

    def add(name: str, text: str) -> Path:
        file = tmp_path / f"{name}.py"
        file.write_text(textwrap.dedent(text))
        plugins.add(str(file))
        names.append(name)
        return file

    yield add
    for entries, contents in before:
        entries.clear()
        entries.update(contents)
    for name in names:
        sys.modules.pop(name)


@pytest.fixture
def documents(tmp_path: Path) -> tuple[Store, Artifact]:
    store = Store.open(tmp_path / "store")
    columns = {"id": ["a", "b"], "url": ["https://x.org/a", "https://x.org/b"], "source": ["web", "web"], "title": [None, None],
               "text": ["|||", "|--"], "fetched_at": [0, 0]}  # fmt: skip
    types = {"title": pa.string(), "fetched_at": pa.timestamp("us", tz="UTC")}
    table = pa.table({name: pa.array(values, types.get(name)) for name, values in columns.items()})
    return store, store.import_table("documents", table)


def test_a_signal_and_a_threshold_are_one_file(load: Callable[[str, str], Path], documents: tuple[Store, Artifact]) -> None:
    load("one_file_rule", RULE)
    store, corpus = documents
    measured = execute(heuristics, parse(HeuristicsConfig, {"signals": ["one_file_bars"]}, "heuristics"), {"documents": corpus}, store)
    off = dict.fromkeys(name for name in SelectConfig.model_fields if name not in ("groups", "sql"))
    given = {"documents": corpus, "signals": [measured]}
    chosen = execute(select, parse(SelectConfig, {**off, "groups": {"one_file": {}}}, "select"), given, store)
    assert chosen.read()["id"].to_pylist() == ["b"]
    (gone,) = chosen.read("dropped").to_pylist()
    assert (gone["id"], gone["rule"], gone["value"], gone["threshold"]) == ("a", "one_file.max_bars", 1.0, 0.5)
    strict = parse(SelectConfig, {**off, "groups": {"one_file": {"max_bars": 0.3}}}, "select")
    assert execute(select, strict, given, store).rows() == 0


def test_a_stage_is_one_file(load: Callable[[str, str], Path], documents: tuple[Store, Artifact]) -> None:
    load("one_file_work", STAGE)
    store, corpus = documents
    one_file = REGISTRY["one_file_stage"]
    made = execute(one_file, parse(one_file.config, {"suffix": "?"}, one_file.name), {"documents": corpus}, store)
    assert made.read()["text"].to_pylist() == ["|||?", "|--?"]
    with pytest.raises(PunaError, match="did you mean suffix"):
        parse(one_file.config, {"sufix": "?"}, one_file.name)
