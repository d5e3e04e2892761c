"""`puna near`: documents similar to a text, compared with brute force over sets of shingles."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.stages.contract import StageConfig, execute
from puna.stages.curate.minhash.index import resembling
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.stages.curate.minhash_update import minhash_update
from puna.storage import Store
from tests.stages.curate.test_minhash_update import corpus, documents


def runs(text, n=5):
    words = text.split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def expected(text, rows, n=5, least=0.1):
    mine, found = runs(text, n), {}
    for identity, _, _, other in rows:
        theirs = runs(other, n)
        both = len(mine & theirs)
        shares = (both / len(mine | theirs), both / len(mine), both / max(1, len(theirs)))
        if max(shares) >= least:
            found[identity] = shares
    return found


@pytest.fixture(scope="module")
def stood(tmp_path_factory):
    store, rows = Store.open(tmp_path_factory.mktemp("near") / "store"), corpus(3)
    made = documents(store, rows)
    return store, rows, made, execute(minhash_dedup, MinhashDedupConfig(keep_index=True), {"documents": made}, store)


@pytest.mark.parametrize("number", [0, 7, 31])
def test_shares_are_those_of_the_sets(stood, number):
    _, rows, made, indexed = stood
    text = " ".join(rows[number][3].split()[:60])
    found = {row.id: tuple(row[1:]) for row in resembling(text, made)}
    assert found == expected(text, rows) and rows[number][0] in found
    whole = rows[number][3]
    near = {row.id: tuple(row[1:]) for row in resembling(whole, indexed, 0.9)}
    assert near == {k: v for k, v in expected(whole, rows).items() if max(v) >= 0.9}  # removed documents are found too


def test_an_index_of_added_documents_is_read_as_the_first_was_written(tmp_path):
    """In shingles of three words; the default of five would give other keys and shares."""
    store, rows = Store.open(tmp_path / "store"), corpus(4)
    config = MinhashDedupConfig(words=3, keep_index=True)
    first = execute(minhash_dedup, config, {"documents": documents(store, rows[:30])}, store)
    added = execute(minhash_update, StageConfig(), {"documents": documents(store, rows[30:]), "previous": [first]}, store)
    text = rows[40][3]
    found = {row.id: tuple(row[1:]) for row in resembling(text, added, 0.9)}
    assert rows[40][0] in found and found == {k: v for k, v in expected(text, rows[30:], 3).items() if max(v) >= 0.9}


def test_the_command_reads_text_and_pages_and_names_what_is_wrong(stood, tmp_path):
    store, rows, made, indexed = stood

    def run(*words):
        return CliRunner().invoke(app, ["near", *words, "--store", str(store.root)])

    file = tmp_path / "page.html"
    file.write_text(f"<html><body><main><p>{rows[5][3]}</p></main></body></html>")
    best = json.loads(run(str(file), made.id, "--json").stdout)["found"][0]
    assert best["id"] == rows[5][0] and best["similarity"] == 1 and best["url"] == f"https://x.org/{rows[5][0]}"
    (tmp_path / "out").mkdir()
    exported = CliRunner().invoke(app, ["export", indexed.id, str(tmp_path / "out"), "--format", "datasketch", "--store", str(store.root)])
    assert not exported.exit_code, exported.exception
    assert set(pq.read_table(tmp_path / "out" / "signatures.parquet")["id"].to_pylist()) == {row[0] for row in rows} - {"5empty"}
    refused = CliRunner().invoke(app, ["export", made.id, str(tmp_path / "new"), "--format", "datasketch", "--store", str(store.root)])
    assert "keep_index=true" in str(refused.exception) and not (tmp_path / "new").exists()
    inputs = (rows[5][3].encode(), file.read_bytes(), b"\x00\xff" * 2000)
    given = [CliRunner().invoke(app, ["near", "-", made.id, "--json", "--store", str(store.root)], input=what) for what in inputs]
    for told in given[:2]:  # a page is identified by its first tag
        best = json.loads(told.stdout)["found"][0]
        assert best["id"] == rows[5][0] and best["similarity"] == 1
    assert str(given[2].exception) == "-: the file is not text"
    (tmp_path / "other.txt").write_text("nothing like any of these documents is written here at all")
    assert "nothing similar" in run(str(tmp_path / "other.txt")).stdout and indexed.id in run(str(tmp_path / "other.txt")).stdout
    for words, told in ((("none.txt",), "none.txt cannot be read"), ((str(file), "signals/1"), "signals/1")):
        failed = run(*words)
        assert failed.exit_code and told in str(failed.exception)
