"""External inputs: naming, identity by content, refusal."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from huggingface_hub import HfApi

from puna.stages.contract import External
from puna.stages.contract.external import public
from puna.storage import PunaError


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_folder_of_archives_gives_one_input_per_file(tmp_path: Path) -> None:
    folder = write(tmp_path / "crawl", web__warc__gz="1", code__warc__gz="2")
    assert [(e.name, len(e.files)) for e in External.resolve(str(folder))] == [("code", 1), ("web", 1)]


def test_a_name_joins_all_files_of_a_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "crawl", web__warc__gz="1", code__warc__gz="2")
    (external,) = External.resolve(f"news={folder}")
    assert (external.name, [f.name for f in external.files]) == ("news", ["code.warc.gz", "web.warc.gz"])


def test_html_folders_and_single_files_are_named_after_themselves(tmp_path: Path) -> None:
    folder = write(tmp_path / "site", index__html="<p>", about__html="<p>")
    assert [e.name for e in External.resolve(str(folder))] == ["site"]
    assert [e.name for e in External.resolve(str(folder / "index.html"))] == ["index.html"]


def test_identity_is_content_not_address(tmp_path: Path) -> None:
    first, second = (write(tmp_path / n, a__html="x", b__html="y") for n in ("one", "two"))
    third = write(tmp_path / "three", a__html="x", b__html="z")
    digests = [External.resolve(f"same={folder}")[0].data_digest for folder in (first, second, third)]
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize("place", ["{}/site", "{}/site/File::Spec.html", "memory://site-{}"])
def test_two_colons_are_a_part_of_a_name(tmp_path: Path, place: str) -> None:
    write(tmp_path / "site")
    (tmp_path / "site" / "File::Spec.html").write_text("x")
    MemoryFileSystem().pipe(f"/site-{tmp_path}/File::Spec.html", b"x")
    ((file,),) = (external.files for external in External.resolve(f"s={place.format(tmp_path)}"))
    with file.open() as handle:
        assert handle.read() == b"x"
    assert file.name == "File::Spec.html" and not file.has_changed()
    assert file.local() == (None if "memory" in place else tmp_path / "site" / "File::Spec.html")


def test_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "site", a__html="x")
    (folder / ".lock").write_text("")
    assert [f.name for f in External.resolve(f"s={folder}")[0].files] == ["a.html"]


@pytest.mark.parametrize(("text", "message"), [("missing.warc.gz", "no such file or folder"), ("nosuch://x/y", "input nosuch://x/y")])
def test_what_is_not_there_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PunaError, match=message):
        External.resolve(text if "://" in text else str(tmp_path / text))


@pytest.mark.parametrize("inside", [b"", b"/page.html"])
def test_a_path_that_is_not_utf_8_is_refused(tmp_path: Path, inside: bytes) -> None:
    """No manifest could name such a path."""
    folder = os.fsencode(tmp_path) + b"/pages\xff"
    os.mkdir(folder)
    Path(os.fsdecode(folder + b"/page.html")).write_text("<p>")
    with pytest.raises(PunaError, match=r"input .*pages\\udcff.*: is not UTF-8; rename the file or folder"):
        External.resolve(os.fsdecode(folder + inside))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(PunaError, match="the folder is empty"):
        External.resolve(str(tmp_path / "empty"))


@pytest.mark.parametrize("uri", ["hf://datasets/alone", "hf://alone", "hf://datasets//texts", "hf://datasets/"])
def test_an_address_that_is_no_data_set_is_refused(uri: str) -> None:
    with pytest.raises(PunaError, match="write hf://datasets/OWNER/NAME"):
        External.resolve(uri)


def test_a_data_set_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dataset_info(self: HfApi, repository: str, *, revision: str | None) -> SimpleNamespace:
        asked.append((repository, revision))
        return SimpleNamespace(sha="c0ffee")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    (pinned,) = External.resolve("hf://datasets/someone/texts@v1")
    (named,) = External.resolve("news=hf://datasets/someone/texts/")
    assert asked == [("someone/texts", "v1"), ("someone/texts", None)]
    assert (pinned.name, pinned.uri, named.name) == ("texts", "hf://datasets/someone/texts@c0ffee", "news")
    assert pinned.data_digest == named.data_digest


def test_a_model_of_the_hub_is_known_by_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HfApi, "model_info", lambda self, repository, *, revision: SimpleNamespace(sha=f"{revision}1"))
    (external,) = External.resolve("hf://someone/small@v")
    assert (external.name, external.uri, external.files) == ("small", "hf://someone/small@v1", ())


def test_files_below_a_data_set_are_read_as_files(monkeypatch: pytest.MonkeyPatch) -> None:
    system = MemoryFileSystem()
    system.pipe("/someone/texts/en/a.jsonl", b"{}")
    system.pipe("/someone/texts/fr/b.jsonl", b"[]")
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda uri: (system, uri.removeprefix("hf://datasets")))
    (external,) = External.resolve("hf://datasets/someone/texts/en")
    assert [(file.name, file.bytes) for file in external.files] == [("a.jsonl", 2)]


def test_a_hub_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def dataset_info(*_: object, **__: object) -> None:
        raise httpx.ConnectError("no route\nto the host")

    monkeypatch.setattr(HfApi, "dataset_info", dataset_info)
    with pytest.raises(PunaError, match=r"the hub has no data set someone/texts that can be read \(no route\)"):
        External.resolve("hf://datasets/someone/texts")


SIGNED = "https://{host}/crawl/web.warc.gz?X-Amz-Credential=AKIAEXAMPLE%2Fus&X-Amz-Signature=5ec2e7aa"


class Handler(SimpleHTTPRequestHandler):
    """A handler that serves one file under a signed address, and nothing without the signature."""

    def do_GET(self) -> None:
        if "X-Amz-Signature=5ec2e7aa" not in self.path:
            self.send_error(403)
            return
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(b"pages")

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()


def test_a_signature_opens_a_file_and_is_shown_nowhere(server: str) -> None:
    (external,) = External.resolve(SIGNED.format(host=server).replace("https", "http"))
    assert (external.name, external.uri) == ("web", f"http://{server}/crawl/web.warc.gz")
    (file,) = external.files
    assert (file.name, file.location, file.bytes) == ("web.warc.gz", external.uri, 5)
    with file.open() as handle:
        assert handle.read() == b"pages"
    assert "5ec2e7aa" not in f"{external!r}{file!r}" and "AKIA" not in f"{external!r}"


def test_errors_hold_no_signature(server: str) -> None:
    for uri in (SIGNED.format(host=server).replace("https", "http").replace("=5ec2e7aa", "=f0r6edf0"), "https://me:pa55word@127.0.0.1:1/x.warc?sig=s3cr3t00"):
        with pytest.raises(PunaError) as caught:
            External.resolve(uri)
        said = "".join(traceback.format_exception(caught.value))
        assert not any(secret in said for secret in ("f0r6edf0", "AKIA", "pa55word", "s3cr3t00")), said


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("https://user:pw@host.org:8080/a/b.warc.gz?sig=1#x", "https://host.org:8080/a/b.warc.gz"),
        ("s3://bucket/a?b", "s3://bucket/a"),
        ("zip://a.html::https://host.org/x.zip?sig=1", "zip://a.html::https://host.org/x.zip"),
        ("https://host.org?token=abcd", "https://host.org"),
        ("/a/what?.html", "/a/what?.html"),
        ("file:///a/what?.html", "file:///a/what?.html"),
    ],
)
def test_what_of_an_address_is_shown(uri: str, shown: str) -> None:
    assert public(uri) == shown
