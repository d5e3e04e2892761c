"""Bits that flip before a read: queries, pages, reports and models never answer from damaged bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from puna.flows.cli.load_engine import load_engine
from puna.flows.cli.main import app
from puna.flows.report.run import Run
from puna.flows.web import artifact as pages
from puna.flows.web import documents as searching
from puna.flows.web import questions
from puna.flows.web.bounded import Asker
from puna.flows.web.frame import Site
from puna.models.serving import ServingSettings
from puna.stages.contract import execute
from puna.storage import Artifact, PunaError, Store, catalog, damage, runs
from puna.storage.errors import DamagedArtifact
from tests.flows.test_needs import imported
from tests.reliability.cases_rot import RotConfig, flip, prepare, rot_measuring


class World:
    def __init__(self, folder: Path) -> None:
        self.store = Store.open(folder)
        self.documents, self.kept = prepare(self.store)
        self.signals = execute(rot_measuring, RotConfig(), {"documents": self.kept}, self.store)
        self.store.record("run", runs.event("started", flow="test"))
        for artifact in (self.documents, self.kept, self.signals):
            self.store.record("run", runs.Made(artifact.kind, "rot", artifact.kind, artifact.key, False, 1.0).event())
        self.readers = self.store.reading()
        self.site = Site(self.readers, None, Asker(self.readers, urls=False))

    def query(self) -> None:
        catalog.query(self.store, "select count(distinct text) from newest.documents")

    def ask(self) -> None:
        questions.answer(Store.existing(self.store.uri), "select sum(rot_characters) from signals")

    def rows(self) -> None:
        pages.artifact_page(self.site, "signals", self.signals.key, None, 0)

    def search(self) -> None:
        searching.search(self.site, "abc", self.kept.id)

    def report(self) -> None:
        Run.open(self.store, "run").steps[-1].artifact.read()


READERS: list[tuple[Callable[[World], None], str, str]] = [
    (World.query, "kept", "documents.order.parquet"), (World.query, "documents", "documents.parquet"),
    (World.ask, "signals", "signals.parquet"), (World.rows, "signals", "signals.parquet"),
    (World.search, "documents", "documents.parquet"), (World.search, "kept", "dropped.parquet"), (World.report, "signals", "signals.parquet"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "file"), READERS, ids=[f"{read.__name__}-{file}" for read, _, file in READERS])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.97])
def test_a_reader_names_the_damaged_artifact_and_sets_it_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[World], None], name: str, file: str, share: float
) -> None:
    monkeypatch.setattr(damage, "FRESH_SECONDS", 0.0)
    world = World(tmp_path)
    read(world)
    one: Artifact = getattr(world, name)
    path = one.path(file)
    flip(path, int(share * path.stat().st_size), 4)
    with pytest.raises(DamagedArtifact, match=rf"artifact {one.id} is damaged: {file} has a wrong checksum\. It was moved to .*/quarantine/"):
        read(world)
    assert world.store.find(one.kind, one.key) is None


def test_a_file_is_compared_once_in_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, compared = World(tmp_path), []
    whole = damage._whole
    monkeypatch.setattr(damage, "_whole", lambda files, name: compared.append(name) or whole(files, name))
    for _ in range(3):
        world.query()
    assert len(compared) == len(set(compared)) > 0
    now = damage.time.monotonic() + damage.FRESH_SECONDS
    monkeypatch.setattr(damage.time, "monotonic", lambda: now)
    world.query()
    assert len(compared) == 2 * len(set(compared))


def test_what_is_too_large_to_be_compared_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path)
    monkeypatch.setattr(catalog, "MOST_COMPARED", world.signals.path("signals.parquet").stat().st_size - 1)
    result = CliRunner().invoke(app, ["sql", "select count(*) from signals", "--store", world.store.uri])
    assert result.exit_code == 0 and f"{catalog.MOST_COMPARED + 1:,} bytes were not compared with their checksums" in result.output


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_model_is_not_loaded(tmp_path: Path, file: str) -> None:
    store = Store.open(tmp_path / "store")
    one = imported("llama3", tmp_path / "model", store)
    assert load_engine(one.id, lambda: Store.existing(store.uri), ServingSettings()).model is not None
    path = one.path(file)
    flip(path, path.stat().st_size // 2, 5)
    with pytest.raises(DamagedArtifact, match=rf"{one.id} is damaged: {file} has a wrong checksum\. It was moved"):
        load_engine(one.id, lambda: Store.existing(store.uri), ServingSettings())


def test_a_number_of_a_manifest_is_not_shown_wrong(tmp_path: Path) -> None:
    world = World(tmp_path)
    file = world.signals.folder / "manifest.json"
    flip(file, file.read_bytes().index(b'"seconds": ') + 11, 0)
    for read in (world.rows, lambda: Artifact("signals", world.signals.key, world.store.files).manifest):
        with pytest.raises(PunaError, match="manifest.json: not a readable manifest"):
            read()
    assert world.signals.key not in {one["key"] for one in world.store.entries()}
