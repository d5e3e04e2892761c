"""Sites dropped by their address."""

from __future__ import annotations

import gzip
import tracemalloc
from datetime import UTC, datetime

import pyarrow as pa
import pytest

from puna.stages.contract import External, execute
from puna.stages.curate.block_lists import BlockListsConfig, block_lists
from puna.stages.curate.url_filter import Rules, UrlFilterConfig, _places, _save, adult_name, judge, url_filter
from puna.stages.urls import names, normalize, parse
from puna.storage import PunaError, Store


def documents(store, addresses):
    when = datetime(2024, 1, 1, tzinfo=UTC)
    rows = [
        {"id": f"{n:03d}", "url": url, "fetched_at": when, "source": "s", "title": None, "text": "x"} for n, url in enumerate(addresses)
    ]
    return store.import_table("documents", pa.Table.from_pylist(rows))


def verdicts(tmp_path, addresses, config=None, lists=None):
    store = Store.open(tmp_path / "store")
    read = [execute(block_lists, BlockListsConfig(), {"inputs": lists}, store)] if lists else None
    given = {"documents": documents(store, addresses), "lists": read}
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


@pytest.mark.parametrize(
    "host",
    [
        "vapor.net", "por.nyu.org", "sussex.cam.ac.uk", "www.pornic.fr", "hotelpornic.fr", "essexcamera.org", "essexcamhs.uk", "siriporn.co.th",
        "ordinarylivesextraordinarystories.com", "secondhandjobs.com", "bostoncreampie.com", "wix-video.net", "sex-education.org", "10.0.0.1",
        "vapornation.com", "soupskirts.com", "landladyboys.org", "analysis.example.org",
    ],
)  # fmt: skip
def test_innocent_hosts_hold_no_adult_word(host):
    """Words are searched within labels, without the public suffix, and count only if ordinary words explain the rest of the label."""
    assert adult_name(host) == ""


@pytest.mark.parametrize(
    ("host", "word"),
    [
        ("freeporn.org", "porn"), ("best-porn69.net", "porn"), ("notpornhub.example.com.au", "porn"), ("teen.pornos.de", "pornos"),
        ("pornoxyz.com", "porno"), ("granny-sex-videos.org", "sexvideos"), ("quiet.xxx", "xxx"), ("asianshemalexyz.com", "shemale"),
    ],
)  # fmt: skip
def test_adult_hosts_are_found_by_their_words(host, word):
    assert adult_name(host) == word


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


def test_lists_in_the_layout_of_ut1(tmp_path):
    tree = {
        "adult/domains": "bad.example.net\n203.0.113.77\nwww.other.example.net",
        "adult/urls": "host.example.net/~user/Pics\nhost.example.net/show.php?id=7\n",
        "adult/expressions": r"(^|[/?&])(sexo|porno)\d+([/?&]|$)",
        "adult/usage": "black",
        "warez/domains": "bad.example.net\nwarez.example.net\n",
        "warez/words": "crackz\n",
        "bank/domains": "bank.example.net\n",
        "README": "these are lists",
    }
    for name, text in tree.items():
        (tmp_path / "ut1" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ut1" / name).write_text(text)
    store = Store.open(tmp_path / "store")
    inputs = {"inputs": External.resolve(f"ut1={tmp_path / 'ut1'}")}
    lists = execute(block_lists, BlockListsConfig(categories=("adult", "warez")), inputs, store)
    assert lists.manifest.metrics == {"url_adult": 6, "url_warez": 2}
    expected = {
        "http://a.bad.example.net/": "url_adult",  # on two lists, so the first by name
        "http://203.0.113.77/x": "url_adult",
        "https://other.example.net:8080/": "url_adult",
        "http://host.example.net/~user/pics/1.jpg": "url_adult",
        "http://host.example.net/~user/": "",
        "http://host.example.net/show.php?id=7": "url_adult",
        "http://host.example.net/show.php?id=8": "",
        "http://fine.example.net/porno12/": "url_adult",
        "http://fine.example.net/porno/": "",
        "http://warez.example.net/": "url_warez",
        "http://fine.example.net/get-crackz-here": "url_warez",
        "http://fine.example.net/crackzy": "",
        "http://bank.example.net/": "",
    }
    made = execute(url_filter, UrlFilterConfig(), {"documents": documents(store, list(expected)), "lists": [lists]}, store)
    found = {list(expected)[int(row["id"])]: row["rule"] for row in made.read("dropped").to_pylist()}
    assert found == {url: rule for url, rule in expected.items() if rule}
    with pytest.raises(PunaError, match="no input has the folder 'gambling'"):
        execute(block_lists, BlockListsConfig(categories=("adult", "gambling")), inputs, store)


def test_lines_that_are_no_entry_are_rows(tmp_path):
    deep = "a.example.net" + "/x" * 9
    (tmp_path / "bad.txt").write_text(f"example.org\nco.uk\ncom\ntwo words here\nhttp://\n{deep}\nexample.org:8080/x\n||ads.example.org^\n")
    lists = execute(block_lists, BlockListsConfig(), {"inputs": External.resolve(str(tmp_path / "bad.txt"))}, Store.open(tmp_path / "store"))
    assert lists.read()["entry"].to_pylist() == ["ads.example.org", "example.org"]
    assert {row["id"]: row["rule"] for row in lists.read("dropped").to_pylist()} == {
        "bad.txt/bad.txt:2": "public_suffix", "bad.txt/bad.txt:4": "not_an_address", "bad.txt/bad.txt:5": "not_an_address", "bad.txt/bad.txt:6": "too_deep",
        "bad.txt/bad.txt:7": "has_a_port",
    }  # fmt: skip
    with pytest.raises(PunaError, match=r"url_filter.blocked, line 2: 'co.uk'"):
        verdicts(tmp_path, ["https://a.com/"], UrlFilterConfig(blocked=("a.com", "co.uk")))


def test_lists_of_one_file_name_may_have_bad_lines_of_one_number(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "domains.txt").write_text(f"{name}.org\ntwo words\n")
    inputs = [one for name in ("a", "b") for one in External.resolve(f"{name}={tmp_path / name / 'domains.txt'}")]
    lists = execute(block_lists, BlockListsConfig(), {"inputs": inputs}, Store.open(tmp_path / "store"))
    assert lists.read()["entry"].to_pylist() == ["a.org", "b.org"]
    assert sorted(lists.read("dropped")["id"].to_pylist()) == ["a/domains.txt:2", "b/domains.txt:2"]


@pytest.mark.parametrize(
    ("entry", "url"),
    [
        ("example.com/é", "https://example.com/%C3%A9/1"),
        ("example.com/Straße/<a>", "https://www.example.com/stra%c3%9fe/<a>"),
        ("example.com/a//b/", "https://example.com/a//b/c"),
        ("example.com/p?q=é", "https://example.com/p?q=%C3%A9"),
        ("http://example.com/p?q=Ü", "https://example.com/p?q=%C3%9C"),
        ("example.com/~x", "https://example.com/%7Ex/1"),
        ("example.com/%7ex", "https://example.com/~X/1"),
        ("*.example.com", "https://a.example.com/b"),
        (".example.com", "https://example.com/b"),
        ("https://*.example.com/a", "https://b.example.com/a/c"),
    ],
)
def test_an_entry_matches_however_it_is_written(tmp_path, entry, url):
    assert verdicts(tmp_path, [url], UrlFilterConfig(blocked=(entry,))) == {url: "url_blocked"}
    assert verdicts(tmp_path, [url], UrlFilterConfig(blocked=("example.com",), allowed=(entry,))) == {url: ""}


@pytest.mark.parametrize("entry", ["*.com", "ads*.example.com", "*", "casino", "/casino/", "", "example.com:8080/x", "http://a.org:80"])
def test_an_entry_that_names_no_host_is_refused(tmp_path, entry):
    with pytest.raises(PunaError, match="url_filter.blocked, line 1"):
        verdicts(tmp_path, ["https://a.com/"], UrlFilterConfig(blocked=(entry,)))


def test_names_end_at_the_registrable_domain():
    assert names("a.b.co.uk") == ["a.b.co.uk", "b.co.uk"]
    assert names("www.example.com") == ["www.example.com", "example.com"]
    assert names("me.blogspot.com") == ["me.blogspot.com", "blogspot.com"]
    assert names("10.0.0.1") == ["10.0.0.1"]
    assert names("localhost") == ["localhost"]


def test_a_host_too_long_for_the_dns_is_no_address(tmp_path):
    longest = "a." * 125 + "com"
    assert len(longest) == 253
    expected = {f"http://{longest}/": "", f"http://{longest}./": "", f"http://b{longest}/": "url_invalid", f"http://{'a.' * 20_000}com/": "url_invalid"}
    assert verdicts(tmp_path, list(expected)) == expected
    for url, verdict in expected.items():
        assert (parse(url) is None) == (verdict == "url_invalid") == (normalize(url) == url)


def test_places_longer_than_every_entry_are_not_made(tmp_path):
    entries = {"example.com": "domain", "a.example.com/b": "folder", "example.net/b/c?d=e": "page"}
    longest = max(map(len, entries))
    rules = Rules(*_save(tmp_path, entries), frozenset(), {}, [], 0, longest)
    urls = [
        "https://a.example.net/B/c?d=e", "https://a.a.a.example.com/b/c/d/e", "https://a.example.org/b", "https://a.a.example.com/?b#c", "FTP://A.example.com/b/c/?d=e",
        f"https://{'a.' * 120}example.com/{'b' * 60_000}/c/d/e/f/g/h/i/j",
    ]  # fmt: skip
    tracemalloc.start()
    assert [verdict and verdict.rule for verdict in judge(urls, rules)] == ["page", "folder", None, "domain", "folder", "domain"]
    assert tracemalloc.get_traced_memory()[1] < 8 << 20  # 60 million bytes if all are created
    tracemalloc.stop()
    for url in urls:
        every = _places(parse(url), len(url) + 1)
        assert _places(parse(url), longest) == [place for place in every if len(place) <= longest]
    assert _places(parse("https://b.a.co.uk/C//d/?E"), 99) == [
        "b.a.co.uk", "b.a.co.uk/c", "b.a.co.uk/c/d", "b.a.co.uk/c//d?e", "a.co.uk", "a.co.uk/c", "a.co.uk/c/d", "a.co.uk/c//d?e",
    ]  # fmt: skip
