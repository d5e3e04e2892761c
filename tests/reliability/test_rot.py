"""A bit that flips on a local disk while the file's size and modification time stay the same."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.stages.contract import execute, perform
from puna.storage import PunaError, Store, parts
from tests.reliability.cases_rot import RotConfig, flip, prepare, rot, rot_keeping, rot_measuring


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_leads_to_a_wrong_result_or_a_raw_error(tmp_path: Path, seed: int) -> None:
    found = rot(tmp_path / "store", 30, seed)
    assert (found.committed_wrong, found.raw_errors) == (0, 0) and found.named >= 20


def test_a_damaged_input_is_set_aside_and_made_anew_by_the_next_run(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    documents, kept = prepare(store)
    flip(kept.path("dropped.parquet"), 40, 3)
    with pytest.raises(PunaError, match=rf"{kept.id} is damaged: dropped.parquet has a wrong checksum\. It was moved to .*quarantine.*Run again"):
        execute(rot_measuring, RotConfig(), {"documents": kept}, store)
    again = perform(rot_keeping, RotConfig(), {"documents": documents}, store)
    assert not again.reused and again.artifact.data_digest == kept.data_digest
    assert execute(rot_measuring, RotConfig(), {"documents": again.artifact}, store).rows() == again.artifact.rows()


def test_a_damaged_artifact_is_not_exported(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store")
    documents, _ = prepare(store)
    flip(documents.path("documents.parquet"), 900, 2)
    arguments = ["export", documents.id, str(tmp_path / "out"), "--store", store.uri]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, PunaError) and f"{documents.id} is damaged: documents.parquet" in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_only_the_artifact_whose_own_file_is_damaged_is_set_aside(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    documents, kept = prepare(store)
    flip(documents.path("documents.parquet"), 500, 1)
    with pytest.raises(PunaError, match=f"it refers to rows of {documents.id}: documents.parquet has a wrong checksum"):
        execute(rot_measuring, RotConfig(), {"documents": kept}, store)
    assert store.find(documents.kind, documents.key) is None and store.find(kept.kind, kept.key) is not None


def test_what_a_process_keeps_of_a_damaged_file_goes_with_it(tmp_path: Path) -> None:
    """The regenerated file has the same checksum; cached footers, orders and partly read row groups of the damaged file stay unused."""
    store = Store.open(tmp_path)
    documents, kept = prepare(store)
    expected = kept.read(columns=["id", "url", "source"])
    order = kept.path("documents.order.parquet")
    parts._order.cache_clear()
    for position in range(4, order.stat().st_size):
        flip(order, position, 0)
        try:
            if not kept.read(columns=["id", "url", "source"]).equals(expected):
                break
        except (OSError, IndexError, AssertionError, pa.ArrowException):
            pass
        flip(order, position, 0)
        parts._order.cache_clear()
    assert kept.damage() == ["documents.order.parquet has a wrong checksum"]
    with pytest.raises(PunaError, match="is damaged"):
        store.check(kept, whole=True)
    again = execute(rot_keeping, RotConfig(), {"documents": documents}, store)
    assert again.damage() == [] and again.read(columns=["id", "url", "source"]).equals(expected)


def test_an_order_with_empty_places_is_no_order(tmp_path: Path) -> None:
    """An order with empty places is invalid: numpy would turn them into numbers of other rows, with a warning."""
    store = Store.open(tmp_path)
    _, kept = prepare(store)
    order = kept.path("documents.order.parquet")
    rows = pq.read_table(order).to_pydict()
    order.chmod(0o644)
    pq.write_table(pa.table({name: pa.array([None, *column[1:]], pa.int64()) for name, column in rows.items()}), order)
    with pytest.raises(pa.ArrowInvalid, match=r"documents\.order\.parquet: is damaged"):
        kept.read()


def test_a_flip_in_the_mark_of_a_store_is_no_other_layout(tmp_path: Path) -> None:
    store, mark = Store.open(tmp_path), tmp_path / "store.json"
    prepare(store)
    for place in range(8 * mark.stat().st_size):
        flip(mark, place // 8, place % 8)
        with pytest.raises(PunaError, match=r"store\.json: is damaged .*remove the file and run again"):
            Store.open(tmp_path)
        flip(mark, place // 8, place % 8)
    mark.unlink()
    assert len(Store.open(tmp_path).entries()) == 2
