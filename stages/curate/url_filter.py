"""`url_filter`: removal of documents from unwanted sites, based on their URLs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Field
from xxhash import xxh64_intdigest

from puna.stages import urls
from puna.stages.contract import Documents, Lists, StageConfig, StageRun, stage
from puna.stages.curate.block_lists import DEPTH, parse
from puna.storage import PunaError
from puna.storage.schemas import table_schema

WORD = re.compile(r"[a-z]+")
NO_LETTERS = re.compile(r"[^a-z-]+")
ENDINGS = ("", "s", "o", "os", "er", "ers", "y", "ing", "ography", "ographic")
SHORT = ("porn", "hentai")  # adult words that are also the beginning of harmless names (Thai first names, Japanese terms)
SUFFIXES = frozenset(("porn", "xxx", "sex", "adult"))  # public suffixes (top-level domains) of adult sites
LISTS = {"adult": "data/adult_domains.txt", "personal": "data/personal_domains.txt", "harmful": "data/harmful_domains.txt"}


class UrlFilterConfig(StageConfig):
    adult: bool = Field(True, description="Drop sites in the list of sexual content")
    personal: bool = Field(True, description="Drop sites in the list of people-search sites and other pages full of personal data")
    harmful: bool = Field(True, description="Drop sites in the list of hate, extremism and gore")
    adult_words: int = Field(3, ge=0, le=10, description="Distinct adult words that drop a URL; one in the host can suffice; 0: off")
    blocked: tuple[str, ...] = Field((), description="Additional domains or domain/path prefixes to drop")
    allowed: tuple[str, ...] = Field((), description="Domains or domain/path prefixes that no rule may drop")


class Rules(NamedTuple):
    """Rules that drop URLs. Two files list domains and path prefixes: sorted `hashes` uint64[n]; `numbers` uint16[n], indices in `rules`.

    `allowed`: domains and prefixes that no rule drops; `listed`: word → rule; `expressions`: (pattern, rule); `words`: see `adult_words`;
    `longest`: length of the longest domain or prefix, in characters."""

    hashes: str
    numbers: str
    rules: list[str]
    allowed: frozenset[str]
    listed: dict[str, str]
    expressions: list[tuple[str, str]]
    words: int
    longest: int


class Verdict(NamedTuple):
    """The rule that drops a URL, with its evidence, value and threshold."""

    rule: str
    detail: str
    value: float | None = None
    threshold: float | None = None


@stage(kind="documents", filters="documents")
def url_filter(documents: Documents, lists: list[Lists] | None, config: UrlFilterConfig, run: StageRun) -> None:
    """Drop documents from unwanted sites (Llama 3, section 3.1.1: adult sites, sites with much personal data, harmful sites).

    `lists`: additional lists, from `block_lists`. A document is dropped if its URL is invalid, is in a listed domain or path, contains
    listed or adult words, or matches a listed expression. Valid URLs without a host, or in `allowed`, are kept. Domains and paths are
    looked up by 64-bit hashes: with 5 million entries, a collision wrongly drops about one URL in 10^12."""
    places: dict[str, str] = {}
    for name, file in LISTS.items():
        if getattr(config, name):
            _add(places, f"url_{name}", _lines(file), file)
    tables = [artifact.read() for artifact in sorted(lists or [], key=lambda artifact: artifact.data_digest)]
    entries = pa.concat_tables(tables).sort_by([("kind", "ascending"), ("entry", "ascending"), ("rule", "ascending")]) if tables else None
    other: dict[str, dict[str, str]] = {"word": {}, "expression": {}}
    for kind, entry, rule in zip(*(entries[name].to_pylist() for name in ("kind", "entry", "rule")), strict=True) if entries else ():
        other.get(kind, places).setdefault(entry, rule)
    _add(places, "url_blocked", config.blocked, "url_filter.blocked", strict=True)
    allowed: dict[str, str] = {}
    _add(allowed, "", config.allowed, "url_filter.allowed", strict=True)
    files = _save(run.scratch, places)
    expressions = sorted(other["expression"].items())
    longest = max(map(len, [*places, *allowed]), default=0)
    rules = Rules(*files, frozenset(allowed), other["word"], expressions, config.adult_words, longest)
    run.filter(_filter, documents, rules, columns=["id", "url"])
    run.metric("listed", len(places) + sum(map(len, other.values())))


def _save(folder: Path, places: dict[str, str]) -> tuple[str, str, list[str]]:
    rules = sorted(set(places.values()))
    number = {rule: at for at, rule in enumerate(rules)}
    hashes = np.array([xxh64_intdigest(place.encode()) for place in places], np.uint64)
    order = np.argsort(hashes, kind="stable")
    files = [str(folder / name) for name in ("hashes.npy", "numbers.npy")]
    np.save(files[0], hashes[order])
    np.save(files[1], np.array([number[rule] for rule in places.values()], np.uint16)[order])
    return files[0], files[1], rules


def _filter(documents: pa.Table, rules: Rules) -> dict[str, Any]:
    verdicts = judge(documents.column("url").to_pylist(), rules)
    ids = documents.column("id").to_pylist()
    dropped = [{"id": identity, **one._asdict()} for identity, one in zip(ids, verdicts, strict=True) if one is not None]
    return {
        "keep": [verdict is None for verdict in verdicts],
        "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema),
    }


def judge(written: list[str], rules: Rules) -> list[Verdict | None]:
    """Return each URL's verdict, or None if no rule drops the URL."""
    addresses = [urls.parse(url) for url in written]
    places = [_places(address, rules.longest) if address is not None and address.host else [] for address in addresses]
    listed = _match_lists(places, rules)
    expressions = [(re.compile(text, re.IGNORECASE), rule) for text, rule in rules.expressions]
    out: list[Verdict | None] = []
    for url, address, own, hit in zip(written, addresses, places, listed, strict=True):
        if address is None:
            out.append(Verdict("url_invalid", f"{url}: not an absolute URL"))
        elif not address.host or not rules.allowed.isdisjoint(own):
            out.append(None)
        elif hit is not None:
            out.append(Verdict(hit[1], f"{url}: {hit[0]} is listed"))
        else:
            results = next(((pattern, rule) for pattern, rule in expressions if pattern.search(url)), None)
            out.append(Verdict(results[1], f"{url}: matches {results[0].pattern}") if results else _wordy(url, address, rules))
    return out


def _places(address: urls.Address, longest: int) -> list[str]:
    """Return the list entries, up to `longest` characters, that would match a URL: host, parent domains, folders, page with query."""
    path = urls.escapes(address.path).lower()
    folders = [part for part in path.split("/") if part][:DEPTH]
    ends = ["".join(f"/{folder}" for folder in folders[:depth]) for depth in range(len(folders) + 1)]
    if address.query:
        ends.append(f"{path.rstrip('/')}?{urls.escapes(address.query).lower()}")
    return [name + end for name in urls.names(address.host) for end in ends if len(name) + len(end) <= longest]


def _match_lists(places: list[list[str]], rules: Rules) -> list[tuple[str, str] | None]:
    hashes, numbers = np.load(rules.hashes, mmap_mode="r"), np.load(rules.numbers, mmap_mode="r")
    flat = [place for own in places for place in own]
    out: list[tuple[str, str] | None] = [None] * len(places)
    if not len(hashes) or not flat:
        return out
    digests = np.array([xxh64_intdigest(place.encode()) for place in flat], np.uint64)
    at = np.minimum(np.searchsorted(hashes, digests), len(hashes) - 1)
    owner = np.repeat(np.arange(len(places)), [len(own) for own in places])
    for hit in np.flatnonzero(hashes[at] == digests)[::-1].tolist():  # backwards, so that the first match wins
        out[owner[hit]] = (flat[hit], rules.rules[numbers[at[hit]]])
    return out


def _wordy(url: str, address: urls.Address, rules: Rules) -> Verdict | None:
    """Return the verdict on a URL that contains a listed word or adult words, else None."""
    if not rules.listed and not rules.words:
        return None
    results = set(WORD.findall(f"{address.host}{address.path} {address.query}".lower()))
    if not rules.listed.keys().isdisjoint(results):
        word = min(results & rules.listed.keys())
        return Verdict(rules.listed[word], f"{url}: the word {word!r} is listed")
    if rules.words:
        if not address.host.endswith((".edu", ".gov")) and (word := adult_name(address.host)):
            return Verdict("url_adult_words", f"{url}: the host contains {word!r}")
        if len(seen := results & _vocabulary().whole) >= rules.words:
            return Verdict("url_adult_words", f"{url}: {', '.join(sorted(seen))}", float(len(seen)), float(rules.words))
    return None


def _add(places: dict[str, str], rule: str, lines: Sequence[str], where: str, strict: bool = False) -> None:
    entries, bad = parse(lines)
    bad = bad or [(number, "no_domain", line) for number, line in enumerate(lines, 1) if strict and not parse([line])[0]]
    if bad:
        number, fault, text = bad[0]
        raise PunaError(f"{where}, line {number}: {text!r} is not a domain, or a domain/path, below a public suffix ({fault})")
    for _, entry in entries:
        places.setdefault(entry, rule)


def _lines(name: str) -> list[str]:
    return (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()


class Vocabulary(NamedTuple):
    """Words in URLs. `adult`: stems with endings, for words inside a host; `whole`: adult words that must stand alone; `ordinary`: harmless
    words. `stems`, `early`: patterns that find adult stems; `longest`: length of the longest word."""

    stems: re.Pattern[str]
    early: re.Pattern[str]
    adult: frozenset[str]
    whole: frozenset[str]
    ordinary: frozenset[str]
    longest: int


@lru_cache(maxsize=1)
def _vocabulary() -> Vocabulary:
    entries = [line.strip() for line in _lines("data/adult_words.txt") if line.strip() and not line.startswith("#")]
    stems = [entry[1:] for entry in entries if entry.startswith("!")]
    adult = frozenset(stem + ending for stem in stems for ending in ENDINGS)
    ordinary = frozenset(word for line in _lines("data/address_words.txt") if not line.startswith("#") for word in line.split())
    whole = frozenset(entry.lstrip("!") for entry in entries)
    early = [stem for stem in stems if stem not in SHORT] + [SHORT[0] + "o"]
    longest = max(map(len, adult | ordinary))
    return Vocabulary(re.compile("|".join(stems)), re.compile("|".join(early)), adult, whole, ordinary, longest)


def adult_name(host: str) -> str:
    """Return the adult public suffix of a host, or an adult word in it; empty if there is neither.

    Labels are split at hyphens and digits. A piece is adult if it and the next piece together form an adult word; if one adult word and
    ordinary words cover it, in fewer words than ordinary words alone; or if ordinary words cover all letters before a long adult stem."""
    words = _vocabulary()
    domain, _, suffix = urls.names(host)[-1].partition(".")
    if suffix in SUFFIXES:
        return suffix
    name = host.removesuffix(f".{suffix}") if suffix and domain else host
    for label in NO_LETTERS.split(name):
        pieces = label.split("-")
        if pair := next((a + b for a, b in pairwise(pieces) if a + b in words.adult), ""):
            return pair
        for piece in pieces:
            if words.stems.search(piece) and (word := _adult_word(piece, words)):
                return word
    return ""


def _adult_word(piece: str, words: Vocabulary) -> str:
    """Return the adult word in a piece of a host name; empty if the piece splits better into ordinary words, or cannot be split."""
    # For each position: the fewest ordinary words that cover the letters before it; and the fewest with one adult word, and that word.
    plain: list[int | None] = [0] + [None] * len(piece)
    adult: list[tuple[int, str] | None] = [None] * (len(piece) + 1)
    for stop in range(1, len(piece) + 1):
        for start in range(max(0, stop - words.longest), stop):
            word, before, held = piece[start:stop], plain[start], adult[start]
            ways: list[tuple[int, str]] = []
            if word in words.ordinary and (stop - start > 1 or not start):
                if before is not None:
                    plain[stop] = min(before + 1, plain[stop] or before + 1)
                if held is not None:
                    ways.append((held[0] + 1, held[1]))
            elif word in words.adult and before is not None:
                ways.append((before + 1, word))
            if (best := adult[stop]) is not None:
                ways.append(best)
            adult[stop] = min(ways, default=None)
    alone, held = plain[-1], adult[-1]
    if alone is not None and (held is None or alone <= held[0]):
        return ""
    if held is not None:
        return held[1]
    return next((match[0] for match in words.early.finditer(piece) if plain[match.start()] is not None), "")
