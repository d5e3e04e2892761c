"""Mutated pages, archives and rows: every input ends as rows; `tests/benchmarks/curation_fuzz.py` runs many more."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path

import numpy as np
import pytest

from puna.models.extraction import parse
from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text
from puna.stages.reading.pages import Page
from puna.stages.reading.warc import read_warc

_spec = importlib.util.spec_from_file_location("curation_fuzz", Path(__file__).parents[2] / "benchmarks" / "curation_fuzz.py")
fuzzing = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzzing)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("reader", ["html", "text", "warc", "warc_gz", "warc_zst", "jsonl"])
def test_no_input_breaks_a_reader_or_vanishes(reader, seed):
    found = fuzzing.fuzz(reader, 150, seed)
    assert (found["exceptions"], found["vanished"], found["first"]) == (0, 0, None)
    assert found["pages"] > 0  # mutations leave most pages readable
    assert found["rejected"] > 0 or reader in ("html", "text")


def test_damage_in_a_body_leaves_the_other_records_alone():
    archive = fuzzing.warc()
    whole = [row for row in read_warc(io.BytesIO(archive), "a.warc", 1 << 20) if isinstance(row, Page)]
    generator = np.random.default_rng(0)
    spot = archive.index(b"Some <b>bold</b>")
    for _ in range(50):
        data = bytearray(archive)
        data[spot : spot + 16] = generator.integers(0, 256, 16, dtype=np.uint8).tobytes()
        found = [row for row in read_warc(io.BytesIO(bytes(data)), "a.warc", 1 << 20) if isinstance(row, Page)]
        assert len(found) == len(whole)
        assert [row.body for row in found[1:]] == [row.body for row in whole[1:]]


def test_beginnings_of_records_cost_themselves_alone():
    archive = fuzzing.warc()
    whole = [row.body for row in read_warc(io.BytesIO(archive), "a.warc", 1 << 20) if isinstance(row, Page)]
    found = list(read_warc(io.BytesIO(b"WARC/1.0\r\n" * 40 + archive), "a.warc", 1 << 20))
    assert [row.body for row in found if isinstance(row, Page)] == whole
    assert len(found) - len(list(read_warc(io.BytesIO(archive), "a.warc", 1 << 20))) == 40


@pytest.mark.parametrize(
    "bomb",
    [
        "".join(f"<font size={n}>" for n in range(900)).join(["<p>", "<p>x" * 200_000]),
        "<b><div>" * 100_000 + "</b>",
        "<i><b></i>x" * 90_000,
        "<nobr>x<div>" * 90_000,
        "<a " + " ".join(f"x{n}" for n in range(140_000)) + ">",
        ("<p " + " ".join(f"x{n}" for n in range(4_000)) + ">x") * 100,
        "<template>" * 100_000,
        "<table><tr><td>" * 60_000,
        "<p>x" * 500_000,
        "<svg><p>" + "<g/>" * 200_000,
    ],
    ids=["fonts", "bold", "italics", "nobr", "attributes", "attributes of many", "templates", "tables", "paragraphs", "drawings"],
)
def test_pages_built_to_hang_a_parser_are_named(bomb, monkeypatch):
    monkeypatch.setattr(parse, "SECONDS", 0.5)
    with pytest.raises(Unreadable) as why:
        page_text(bomb.encode(), "text/html", None, ExtractConfig())
    assert why.value.rule in ("extract_too_deep", "extract_too_many_elements", "extract_too_costly", "extract_too_many_blocks")
    assert why.value.rule == "extract_too_costly" or why.value.value > why.value.threshold
