"""`puna near`: which documents a text resembles, against sets of word runs by brute force."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from puna.flows.cli import app
from puna.stages.contract import execute
from puna.stages.curate.minhash.near import resembling
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.storage import Store
from tests.stages.curate.test_minhash_update import corpus, documents


def runs(text, n=5):
    words = text.split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def expected(text, rows, least=0.1):
    mine, found = runs(text), {}
    for identity, _, _, other in rows:
        theirs = runs(other)
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


def test_the_command_reads_text_and_pages_and_names_what_is_wrong(stood, tmp_path):
    store, rows, made, indexed = stood

    def run(*words):
        return CliRunner().invoke(app, ["near", *words, "--store", str(store.root)])

    file = tmp_path / "page.html"
    file.write_text(f"<html><body><main><p>{rows[5][3]}</p></main></body></html>")
    best = json.loads(run(str(file), made.id, "--json").stdout)["found"][0]
    assert best["id"] == rows[5][0] and best["similarity"] == 1 and best["url"] == f"https://x.org/{rows[5][0]}"
    (tmp_path / "other.txt").write_text("nothing like any of these documents is written here at all")
    assert "nothing like it" in run(str(tmp_path / "other.txt")).stdout and indexed.id in run(str(tmp_path / "other.txt")).stdout
    for words, told in ((("none.txt",), "none.txt cannot be read"), ((str(file), "signals/1"), "signals/1")):
        failed = run(*words)
        assert failed.exit_code and told in str(failed.exception)
