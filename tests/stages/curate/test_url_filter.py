"""Sites dropped by their address."""

from __future__ import annotations

import gzip
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from puna.stages.contract import External, execute
from puna.stages.curate.url_filter import UrlFilterConfig, url_filter
from puna.stages.curate.urls import names
from puna.storage import PunaError, Store


def documents(store, addresses):
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {"id": f"{n:03d}", "url": url, "fetched_at": when, "source": "s", "title": None, "text": "x"} for n, url in enumerate(addresses)
    ]
    return store.import_table("documents", pa.Table.from_pylist(rows))


def verdicts(tmp_path, addresses, config=None, lists=None):
    store = Store.open(tmp_path / "store")
    given = {"documents": documents(store, addresses), "lists": lists}
    made = execute(url_filter, config or UrlFilterConfig(), given, store)
    found = dict.fromkeys(addresses, "")
    for row in made.read("dropped").to_pylist():
        found[addresses[int(row["id"])]] = row["rule"]
    assert made.rows() == list(found.values()).count("")
    return found


def test_lists_words_and_what_only_looks_like_them(tmp_path):
    expected = {
        "https://www.pornhub.com/view": "url_adult",
        "http://de.xhamster.com:8080/": "url_adult",
        "https://spokeo.com/John-Doe": "url_personal",
        "https://www.stormfront.org/forum": "url_harmful",
        "https://best-hentai-videos.example.net/": "url_adult_words",
        "https://blog.example.net/hot-nude-xxx-orgy": "url_adult_words",
        "not an address": "url_invalid",
        "https://www.essex.ac.uk/news": "",
        "https://www.scunthorpe.gov.uk/": "",
        "https://www.pornic.fr/tourisme": "",
        "https://en.wikipedia.org/wiki/Human_sexuality": "",
        "https://health.example.org/sex-education": "",
        "https://notpornhub.example.com.au/": "url_adult_words",
        "file:///folder/page.html": "",
    }
    assert verdicts(tmp_path, list(expected)) == expected


def test_rules_can_be_switched_off_and_exceptions_made(tmp_path):
    addresses = ["https://pornhub.com/a", "https://spokeo.com/a", "https://a.example.net/secret/page", "https://a.example.net/open"]
    config = UrlFilterConfig(adult=False, adult_words=0, allowed=("spokeo.com",), blocked=("a.example.net/secret",))
    assert list(verdicts(tmp_path, addresses, config).values()) == ["", "", "url_blocked", ""]


def test_further_lists_are_inputs(tmp_path):
    (tmp_path / "gambling.txt").write_text(
        "# sites\ncasino.example.org  # the first\nhttps://www.bets.example.co.uk/\nshop.example/slots\n"
    )
    (tmp_path / "hosts.gz").write_bytes(gzip.compress(b"127.0.0.1 localhost\n0.0.0.0 ads.example.com\n"))
    lists = [*External.resolve(str(tmp_path / "gambling.txt")), *External.resolve(f"ads={tmp_path / 'hosts.gz'}")]
    expected = {
        "https://casino.example.org/": "gambling.txt",
        "https://deep.below.casino.example.org/x": "gambling.txt",
        "https://example.org/": "",
        "https://bets.example.co.uk/x": "gambling.txt",
        "https://shop.example/slots/one": "gambling.txt",
        "https://shop.example/slotsandmore": "",
        "https://ads.example.com/": "ads",
        "https://localhost/": "",
    }
    found = verdicts(tmp_path, list(expected), lists=lists)
    assert found == {url: f"url_{name}" if name else "" for url, name in expected.items()}


@pytest.mark.parametrize("line", ["co.uk", "com", "two words here", "http://"])
def test_an_entry_that_is_no_site_is_refused_by_name(tmp_path, line):
    (tmp_path / "bad.txt").write_text(f"example.org\n{line}\n")
    if line == "com":  # names without a dot stand in hosts files; they match no site
        assert verdicts(tmp_path, ["https://a.com/"], lists=External.resolve(str(tmp_path / "bad.txt"))) == {"https://a.com/": ""}
        return
    with pytest.raises(PunaError, match=r"bad\.txt, line 2"):
        verdicts(tmp_path, ["https://a.com/"], lists=External.resolve(str(tmp_path / "bad.txt")))


def test_names_end_at_the_registrable_domain():
    assert names("a.b.co.uk") == ["a.b.co.uk", "b.co.uk"]
    assert names("www.example.com") == ["www.example.com", "example.com"]
    assert names("me.blogspot.com") == ["me.blogspot.com", "blogspot.com"]
    assert names("10.0.0.1") == ["10.0.0.1"]
    assert names("localhost") == ["localhost"]
