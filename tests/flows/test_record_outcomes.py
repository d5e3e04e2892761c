"""The outcomes of records that were not pages, and the rules that did not judge a document."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from puna.flows.cli.main import app
from puna.flows.report.why import fate
from puna.models.languages.registry import shipped_rows
from puna.stages.contract import External, execute
from puna.stages.curate.extract import ExtractConfig, extract
from puna.stages.curate.heuristics import HeuristicsConfig, heuristics
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.select import SelectConfig, select
from puna.storage import PunaError, Store

LAO = "ມື້ວານນີ້ ການກໍ່ສ້າງຂົວໃໝ່ຂ້າມແມ່ນ້ຳໄດ້ເລີ່ມຕົ້ນຂຶ້ນ. ເຈົ້າເມືອງກ່າວວ່າ ວຽກງານຈະໃຊ້ເວລາສອງປີ ແລະ ການຈະລາຈອນຈະຖືກປ່ຽນເສັ້ນທາງ."
ENGLISH = "Yesterday the construction of a new bridge across the river began. The mayor said that the work will take two years."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("fate")
    rows = {"lo": LAO, "en": ENGLISH, "nothing": " "}
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text, "url": f"https://x.org/{name}"}) + "\n" for name, text in rows.items()))
    store = Store.open(folder / "store")
    pages = execute(ingest, IngestConfig(), {"inputs": External.resolve(str(folder / "rows.jsonl"))}, store)
    documents = execute(extract, ExtractConfig(), {"pages": pages}, store)
    found = execute(language, LanguageConfig(), {"documents": documents}, store)
    measured = execute(heuristics, HeuristicsConfig(), {"documents": documents, "language": found}, store)
    execute(select, SelectConfig(code_reasoning=None), {"documents": documents, "signals": [found, measured]}, store)
    return store


def test_a_record_that_was_no_page_is_known_by_its_address(store: Store) -> None:
    (row,) = fate(store, "https://x.org/nothing")
    assert (row["stage"], row["verb"], row["values"]["rule"]) == ("ingest", "dropped", "empty")
    said = CliRunner().invoke(app, ["why", "https://x.org/nothing", "--store", store.uri])
    assert said.exit_code == 0 and "rule=empty" in said.output
    (dropped,) = [row for made in store.artifacts() if made.manifest.stage == "ingest" for row in made.read("dropped").to_pylist()]
    words = [word for word in dropped["detail"].replace(": ", " ").split() if "/" not in word and not dropped["id"].startswith(word)]
    assert words
    for name in ("https://x.org/noth", "https://x.org/", *words):
        with pytest.raises(PunaError, match="no page or document has this id or URL"):
            fate(store, name)


def test_rules_without_a_basis_in_a_language_are_told(store: Store) -> None:
    rows = {name: fate(store, f"https://x.org/{name}")[-1] for name in ("lo", "en")}
    assert all(row["stage"] == "select" for row in rows.values())
    silent = {name for name, factor in shipped_rows()["lo-Laoo"].factors.items() if factor is None}
    assert {"mean_word_length", "c4_open_sentences"} <= silent
    told = rows["lo"]["abstained"]
    assert "gopher_quality.min_mean_word_length" in told and "c4.min_sentences" in told and "gopher_quality.min_words" not in told
    assert "not judged without a threshold for lo-Laoo: " in rows["lo"]["what"]
    assert "abstained" not in rows["en"]
