"""Suspects: artifacts made from an artifact later found damaged, by a stage that did not verify its inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.stages.contract import execute, perform
from puna.storage import Artifact, PunaError, Store, catalog, damage, maintenance
from puna.storage import manifest as manifests
from tests.reliability.cases_rot import RotConfig, flip, prepare, rot_keeping, rot_measuring


def of_before(artifact: Artifact) -> None:
    """Replace an artifact's manifest with one from a version of Puna that verified no inputs."""
    file = artifact.folder / "manifest.json"
    data = json.loads(file.read_text())
    del data["inputs_compared"]
    file.write_text(json.dumps(data | {"checksum": manifests._checksum(data)}))


def damaged(artifact: Artifact) -> None:
    flip(artifact.path("documents.parquet"), 900, 2)


class World:
    """Documents, a selection of them, and signals on the selection. `old`: the last two were made without verifying the bytes read."""

    def __init__(self, folder: Path, *old: str) -> None:
        self.store = Store.open(folder)
        self.documents, self.kept = prepare(self.store)
        if "kept" in old:
            of_before(self.kept)
        self.signals = execute(rot_measuring, RotConfig(), {"documents": self.kept}, self.store)
        if "signals" in old:
            of_before(self.signals)

    def run(self, *arguments: str, code: int = 0) -> str:
        result = CliRunner().invoke(app, [*arguments, "--store", self.store.uri])
        assert result.exit_code == code, result.output
        return result.output


def test_what_compared_its_inputs_is_no_suspect_and_what_did_not_is(tmp_path: Path) -> None:
    for name, old, suspects in (("new", (), []), ("old", ("kept",), ["kept", "signals"]), ("last", ("signals",), ["signals"])):
        world = World(tmp_path / name, *old)
        assert world.store.suspects() == {}
        damaged(world.documents)
        damage = [finding.artifact for finding in maintenance.verify(world.store) if finding.damage]
        assert world.documents in damage and world.signals not in damage
        assert set(world.store.suspects()) == {getattr(world, one).key for one in suspects}, name


def test_a_suspect_is_told_everywhere(tmp_path: Path) -> None:
    world = World(tmp_path, "kept")
    damaged(world.documents)
    why = f"it was made from {world.documents.id}, which was found damaged on 2"
    assert f"{world.kept.id} is suspect: {why}" in world.run("verify", code=1)
    assert why in world.run("show", world.kept.id) and f"(suspect: {why}" in world.run("lineage", world.kept.id)
    assert f"it was made from {world.kept.id}, which is suspect" in world.run("show", world.signals.id)
    rows = [json.loads(line) for line in world.run("list", "--json").splitlines()]
    assert {row["key"] for row in rows if row["suspect"]} == {world.kept.key, world.signals.key}
    found = catalog.query(world.store, "select artifact from artifacts where suspect is not null")["artifact"].to_pylist()
    assert set(found) == {world.kept.key, world.signals.key}


def test_a_suspect_is_made_anew_and_the_same_content_clears_what_descends_from_it(tmp_path: Path) -> None:
    world = World(tmp_path, "kept")
    damaged(world.documents)
    with pytest.raises(PunaError, match="is damaged"):
        world.store.check(world.documents, whole=True)
    documents, _ = world.documents, prepare(world.store)
    assert documents.damage() == [] and world.kept.key not in world.store.suspects()
    again = perform(rot_measuring, RotConfig(), {"documents": world.kept}, world.store)
    assert again.reused and world.store.suspects() == {}


def test_other_content_than_before_leaves_what_descends_from_it_suspect(tmp_path: Path) -> None:
    world = World(tmp_path, "kept")
    damaged(world.documents)
    maintenance.verify(world.store)
    damage.set_aside(world.store.files, world.kept.kind, world.kept.key, damaged=False)
    assert world.store.suspects()[world.signals.key].endswith("which was suspect and is gone")


def test_the_damage_of_what_holds_its_rows_makes_a_reader_suspect(tmp_path: Path) -> None:
    world = World(tmp_path, "signals")
    assert [one.key for one in world.kept.manifest.sources] == [world.documents.key]
    damaged(world.documents)
    maintenance.verify(world.store)
    assert set(world.store.suspects()) == {world.signals.key}


def test_a_person_can_trust_a_suspect(tmp_path: Path) -> None:
    world = World(tmp_path, "signals")
    damaged(world.documents)
    world.run("verify", code=1)
    assert "1 artifacts, 0 damaged\n" in world.run("verify", world.signals.id, "--trust")
    assert world.store.suspects() == {}
    assert "--trust: name the one artifact" in str(CliRunner().invoke(app, ["verify", "--trust", "--store", world.store.uri]).exception)


def test_a_run_says_that_it_reads_or_makes_anew_a_suspect(tmp_path: Path) -> None:
    from puna.flows.engine.session import session

    world = World(tmp_path, "kept")
    damaged(world.documents)
    maintenance.verify(world.store)
    damaged(world.documents)  # flipping the same bit restores the file
    with session(world.store, flow="test", workers=1, json=True) as now:
        lines: list[str] = []
        now.console.say = lambda text, **_: lines.append(text)  # type: ignore[method-assign]
        now.perform(rot_measuring, RotConfig(turn=7), {"documents": world.kept}, "measure")
        now.perform(rot_keeping, RotConfig(), {"documents": world.documents}, "keep")
        now.perform(rot_measuring, RotConfig(turn=7), {"documents": world.kept}, "measure")
    told = [line for line in lines if "suspect" in line]
    assert [line.split(": it was")[0] for line in told] == [f"{step}: {world.kept.id} is suspect" for step in ("measure", "keep")]
    assert "used nevertheless" in told[0] and "computed again" in told[1] and world.store.suspects() == {}
    assert [outcome.reused for _, outcome in now.outcomes] == [False, False, True]


def test_verify_names_a_damaged_line_of_the_journal(tmp_path: Path) -> None:
    world = World(tmp_path, "signals")
    damaged(world.documents)
    world.run("verify", code=1)
    journal = tmp_path / "quarantine" / "journal.jsonl"
    assert journal.is_file() and not world.store.lost_aliases()
    journal.write_bytes(journal.read_bytes().replace(b"damaged", b"dameged", 1))
    assert "quarantine/journal.jsonl: line 1 is damaged" in world.run("verify", code=1)
