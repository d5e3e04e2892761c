"""`url_filter`: documents of unwanted sites, by their address alone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Documents, External, StageConfig, StageRun, stage
from puna.stages.curate import readers, urls
from puna.storage import PunaError
from puna.storage.schemas import table_schema

WORD = re.compile(r"[a-z]+")
LISTS = {"adult": "data/adult_domains.txt", "personal": "data/personal_domains.txt", "harmful": "data/harmful_domains.txt"}


class UrlFilterConfig(StageConfig):
    """Which lists and rules apply."""

    adult: bool = Field(True, description="Drop sites of the list of sexual content")
    personal: bool = Field(True, description="Drop sites of the list of people-search and other pages full of personal data")
    harmful: bool = Field(True, description="Drop sites of the list of hate, extremism and gore")
    adult_words: int = Field(
        3, ge=0, le=10, description="Drop an address with so many different words of the adult vocabulary (0: never), words"
    )
    blocked: tuple[str, ...] = Field((), description="Further domains, or domain/path prefixes, to drop")
    allowed: tuple[str, ...] = Field((), description="Domains, or domain/path prefixes, that no rule drops")


class Rules(NamedTuple):
    """Domain (or domain/path) → rule that drops it, what is always kept, and the vocabulary of addresses."""

    blocked: dict[str, str]
    allowed: frozenset[str]
    words: int


@stage(kind="documents", filters="documents")
def url_filter(documents: Documents, lists: list[External] | None, config: UrlFilterConfig, run: StageRun) -> None:
    """Drop documents of unwanted sites (Llama 3, section 3.1.1: adult sites, sites with much personal data, harmful sites).

    Each file of `lists` is a further list of domains, or domain/path prefixes, one a line (`#` begins a comment, the
    address column of a hosts file is skipped). Every name below a listed domain is dropped, by the rule `url_` + list's name.
    """
    blocked: dict[str, str] = {}
    for name, file in LISTS.items():
        if getattr(config, name):
            _add(blocked, f"url_{name}", _lines(file), file)
    # An entry of several lists belongs to the first by name, whatever the order they are given in.
    for external in sorted(lists or [], key=lambda external: (external.name, external.data_digest)):
        for listed in external.files:
            with listed.open() as handle, readers.unpacked(handle, listed.name) as content:
                _add(blocked, f"url_{external.name}", content.read().decode("utf-8", "replace").splitlines(), listed.address)
    _add(blocked, "url_blocked", config.blocked, "url_filter.blocked")
    allowed: dict[str, str] = {}
    _add(allowed, "", config.allowed, "url_filter.allowed")
    run.transform(_filter, documents, Rules(blocked, frozenset(allowed), config.adult_words))
    run.metric("listed", len(blocked))


def _filter(documents: pa.Table, rules: Rules) -> dict[str, pa.Table]:
    """Kept documents and dropped rows of a part."""
    keep: list[bool] = []
    dropped: list[dict[str, Any]] = []
    for identity, url in zip(documents.column("id").to_pylist(), documents.column("url").to_pylist(), strict=True):
        found = judge(url, rules)
        keep.append(found is None)
        if found is not None:
            rule, detail, value, threshold = found
            dropped.append({"id": identity, "rule": rule, "value": value, "threshold": threshold, "detail": detail})
    kept = documents.filter(pa.array(keep, pa.bool_()))
    return {"documents": kept, "dropped": pa.Table.from_pylist(dropped, schema=table_schema("dropped").schema)}


def judge(url: str, rules: Rules) -> tuple[str, str, float | None, float | None] | None:
    """The rule that drops `url`, with what it saw, its value and threshold; None when it is kept."""
    address = urls.parse(url)
    if address is None:
        return "url_invalid", f"{url}: no absolute address", None, None
    if not address.host:
        return None
    places = [place for name in urls.names(address.host) for place in (name, *_prefixes(name, address.path))]
    if not rules.allowed.isdisjoint(places):
        return None
    for place in places:
        if place in rules.blocked:
            return rules.blocked[place], f"{url}: {place} is listed", None, None
    if rules.words:
        inside, whole, harmless = _vocabulary()
        host = "".join(WORD.findall(harmless.sub("", address.host)))
        strong = next((word for word in inside if word in host), None)
        if strong is not None and not address.host.endswith((".edu", ".gov")):
            return "url_adult_words", f"{url}: the host holds {strong!r}", None, None
        found = set(WORD.findall(f"{address.host}{address.path} {address.query}".lower())) & whole
        if len(found) >= rules.words:
            return "url_adult_words", f"{url}: {', '.join(sorted(found))}", float(len(found)), float(rules.words)
    return None


def _prefixes(name: str, path: str) -> list[str]:
    """`name/a`, `name/a/b`, … for the folders of a path."""
    parts = [part for part in path.split("/") if part]
    return ["/".join([name, *parts[: i + 1]]) for i in range(min(len(parts), 4))]


def _add(blocked: dict[str, str], rule: str, lines: Iterable[str], where: str) -> None:
    """Put the entries of a list into `blocked`; an entry keeps the first list that names it."""
    for number, line in enumerate(lines, 1):
        entry = line.partition("#")[0].strip().lower()
        if not entry:
            continue
        columns = entry.split()
        entry = columns[-1] if len(columns) == 2 and columns[0] in ("0.0.0.0", "127.0.0.1", "::", "::1") else entry
        address = urls.parse(entry if "://" in entry else f"https://{entry}")
        if address is None or not address.host or " " in entry:
            raise PunaError(f"{where}, line {number}: {line!r} is no domain and no domain/path")
        host = address.host.removeprefix("www.")
        if urls.public_suffix(host) and address.path in ("", "/"):
            if "." not in host:  # localhost and the like in hosts files
                continue
            raise PunaError(f"{where}, line {number}: {host} is a public suffix; it would drop every site below it")
        blocked.setdefault(host + address.path.rstrip("/"), rule)


def _lines(name: str) -> list[str]:
    return (Path(__file__).parent / name).read_text(encoding="utf-8").splitlines()


@lru_cache(maxsize=1)
def _vocabulary() -> tuple[tuple[str, ...], frozenset[str], re.Pattern[str]]:
    """Words that suffice inside a host, words that count as whole words, and names that only look like the former."""
    entries = [line.strip() for line in _lines("data/adult_words.txt") if line.strip() and not line.startswith("#")]
    inside = tuple(entry[1:] for entry in entries if entry.startswith("!"))
    harmless = "|".join(re.escape(entry[1:]) for entry in entries if entry.startswith("-"))
    return inside, frozenset(entry.lstrip("!") for entry in entries if not entry.startswith("-")), re.compile(harmless)
