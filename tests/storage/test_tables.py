"""Merging parts: sorted parts are put one after another, others are sorted, and the bytes do not tell which it was."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from puna.storage import PunaError, schemas, tables
from puna.storage.schemas import table_schema

LETTERS = ["\x00", "a", "b", "\x7f", "é", "ÿ", "Ā", "\ud7ff", "\ue000", "\uffff", "𐀀", "😀"]  # by code point, as by UTF-8 byte


def rows(name: str, generator: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Rows of a table in order of the key, which is one column or two."""
    ids = sorted({"".join(generator.choice(LETTERS, generator.integers(1, 6))) for _ in range(count)})
    if name == "signals":
        return [{"id": i, "words": n, "language": "en" if n % 3 else None} for n, i in enumerate(ids)]
    return [{"id": i, "rule": rule, "value": float(n) if n % 5 else None} for n, i in enumerate(ids) for rule in ("a", "b")[: 1 + n % 2]]


def merged(name: str, pieces: list[list[dict[str, Any]]], folder: Path) -> bytes:
    """The bytes of the table that is merged of parts of these rows; the parts of signals differ in their columns."""
    folder.mkdir()
    files = []
    for number, piece in enumerate(pieces):
        schema = table_schema(name).schema_for(["id", "words", "language"] if name == "signals" else [])
        part = pa.Table.from_pylist(piece, schema=schema)
        if name == "signals" and piece and part["language"].null_count == len(piece):
            part = part.drop_columns(["language"])
        files.append(folder / f"{number}.parquet")
        pq.write_table(part, files[-1])
    assert tables.merge(name, files, folder / "merged.parquet")[0] == sum(map(len, pieces))
    return (folder / "merged.parquet").read_bytes()


@pytest.mark.parametrize("name", ["signals", "dropped"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bytes_do_not_depend_on_the_parts(tmp_path, monkeypatch, name, seed):
    generator = np.random.default_rng(seed)
    monkeypatch.setitem(schemas.TABLES, name, dataclasses.replace(table_schema(name), group_rows=50))
    whole = rows(name, generator, 300)
    shuffled = [whole[n] for n in generator.permutation(len(whole))]
    expected = merged(name, [shuffled[::2], shuffled[1::2]], tmp_path / "sorted")
    assert pq.read_table(tmp_path / "sorted" / "merged.parquet").select(list(whole[0])).to_pylist() == whole
    cuts = [0, *sorted(generator.integers(0, len(whole), 9).tolist()), len(whole)]
    pieces = [whole[a:b] for a, b in pairwise(cuts)]
    monkeypatch.setattr(tables.duckdb, "connect", lambda **_: pytest.fail("sorted parts need no sorting"))
    assert merged(name, [pieces[n] for n in generator.permutation(len(pieces))], tmp_path / "in_order") == expected


@pytest.mark.parametrize("pieces", [["ab", "bc"], ["aab"], ["b", "ab"], ["ab", "ab"], ["ac", "cab"]])
def test_two_rows_with_one_key_are_refused_wherever_they_are(tmp_path, pieces):
    made = [[{"id": i, "words": 1, "language": "en"} for i in piece] for piece in pieces]
    key = "a" if pieces in (["aab"], ["ab", "ab"], ["ac", "cab"]) else "b"
    with pytest.raises(PunaError, match=f"two rows have the key {{'id': '{key}'}}"):
        merged("signals", made, tmp_path / "parts")


@pytest.mark.parametrize("pieces", [["ac", "b"], ["ba"], ["c", "ab", ""], ["", ""]])
def test_parts_that_overlap_or_are_not_sorted_or_empty(tmp_path, pieces):
    merged("signals", [[{"id": i, "words": 1, "language": "en"} for i in piece] for piece in pieces], tmp_path / "parts")
    assert pq.read_table(tmp_path / "parts" / "merged.parquet")["id"].to_pylist() == sorted("".join(pieces))


@pytest.mark.parametrize("few", [0, 1000])
@given(
    came=st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), max_size=3),
    went=st.lists(st.lists(st.sampled_from("abcdef"), max_size=6), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_ids_that_are_missing_or_too_many(few: int, came: list[list[str]], went: list[list[str]]) -> None:
    """Both ways of counting, against Python's."""
    counts = Counter("".join("".join(ids) for ids in came))
    counts.subtract("".join("".join(ids) for ids in went))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "FEW", few)
        files: list[list[Path]] = [[], []]
        for side, lists in enumerate((came, went)):
            for number, ids in enumerate(lists):
                files[side].append(Path(folder) / f"{side}-{number}.parquet")
                pq.write_table(pa.table({"id": pa.array(ids, pa.string())}), files[side][-1])
        assert tables.imbalance(*files, Path(folder)) == sorted((i, n) for i, n in counts.items() if n)[:3]
