"""A web of any size made from real pages, served over HTTP as WARC files that exist only while they are read.

A generated page is a real page (`web_*/*.tar.zst` of a folder of annotated pages) in which the words of each run of text of at least eight
words are shuffled. Languages, word frequencies, menus, markup and lengths are those of real pages, and each page's text is distinct. Small
pages are enlarged with other pages' scripts and styles to the usual size of a web page. One page in twenty is a copy at another address,
one in fifty occurs twice at one address.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import re
import tarfile
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from tests.benchmarks.corpus import TEXT

SETS = ("web_wcxb_dev/dev_html", "web_trafilatura/pages", "web_readability/test-pages", "web_newspaper/newspaper_goose", "web_recipes/recipes")
PAGE_BYTES = 150_000
OWN_BYTES = 20_000, 250_000
"""Sizes in bytes of the real pages that are used; smaller ones are stubs, and a few larger ones would be most of the bytes."""
PART_BYTES = 192 << 20  # bytes of HTML per WARC file
RUN_WORDS = 8  # minimum words of a run; shorter runs are menus or labels
FILLER = re.compile(rb"<(script|style)\b(?![^>]*ld\+json)[^>]*>.*?</\1\s*>", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Packed:
    """Compressed bytes as deflate blocks that may follow any others."""

    raw: bytes
    blocks: bytes

    @classmethod
    def of(cls, raw: bytes, level: int = 6) -> Packed:
        packer = zlib.compressobj(level, zlib.DEFLATED, -15)
        return cls(raw, packer.compress(raw) + packer.flush(zlib.Z_FULL_FLUSH))


@dataclass(frozen=True)
class Model:
    """A real page: the HTML before its text, pieces alternating between markup and runs of text, and the HTML after it."""

    head: Packed
    pieces: list[bytes]
    words: Any  # the inner words of all runs, in order
    ends: list[tuple[bytes, int, bytes]]  # for each run: first word, number of inner words, last word
    tail: Packed

    @classmethod
    def of(cls, body: bytes) -> Model | None:
        pieces, ends, words, markup = [], [], [], bytearray()
        for match in TEXT.finditer(body):
            run = [] if match[0].startswith(b"<") else match[0].split()
            if len(run) < RUN_WORDS:
                markup += match[0]
                continue
            pieces.append(bytes(markup))
            ends.append((run[0], len(run) - 2, run[-1]))
            words += run[1:-1]
            markup = bytearray()
        if len(words) < 50:
            return None
        return cls(Packed.of(pieces[0]), pieces[1:], np.array(words, object), ends, Packed.of(bytes(markup)))

    def text(self, seed: int) -> bytes:
        """Return the part between head and tail, with its words shuffled by a seed."""
        words = self.words[np.random.default_rng(seed).permutation(len(self.words))].tolist()
        at, out = 0, []
        for number, (first, inner, last) in enumerate(self.ends):
            if number:
                out.append(self.pieces[number - 1])
            out.append(b" ".join([first, *words[at : at + inner], last]))
            at += inner
        return b"".join(out)


@dataclass(eq=False)
class Web:
    """WARC files with `size` bytes of HTML in total, written to `folder` on request (see the module).

    A file is removed after it was read completely for the second time: `puna` reads inputs once for their digests and once for their pages.
    """

    size: int
    folder: Path
    models: list[Model]
    fillers: list[Packed]
    readings: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    html_bytes: int = 0
    _locks: dict[int, threading.Lock] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Path, size: int, folder: Path) -> Web:
        """Return a web made from the pages below `data`."""
        models, fillers = [], []
        for body in _pages(data):
            fillers += [match[0] for match in FILLER.finditer(body) if 500 < len(match[0]) < 60_000][:6]
            if OWN_BYTES[0] < len(body) < OWN_BYTES[1] and (model := Model.of(body)) is not None:
                models.append(model)
        fillers = random.Random(0).sample(sorted(set(fillers)), 1500)
        return cls(size, folder, models, [Packed.of(one) for one in fillers])

    @property
    def parts(self) -> int:
        return -(-self.size // PART_BYTES)

    def path(self, part: int) -> Path:
        return self.folder / f"web-{part:05d}.warc.gz"

    def again(self) -> None:
        """Reset the counts of readings, because a restarted run computes its inputs' digests again."""
        self.readings.clear()

    def part(self, part: int) -> Path:
        """Return the file of a part; write it if it does not exist."""
        with self._locks.setdefault(part, threading.Lock()):
            if not self.path(part).exists():
                started = time.thread_time()
                partial = self.path(part).with_suffix(".partial")
                with partial.open("wb") as file:
                    for record in self._records(part):
                        file.write(record)
                partial.rename(self.path(part))
                self.seconds += time.thread_time() - started
            self.sizes[part] = self.path(part).stat().st_size
        return self.path(part)

    def read(self, part: int) -> None:
        """Count a complete reading; the second one removes the file."""
        self.readings[part] = self.readings.get(part, 0) + 1
        if self.readings[part] == 2:
            self.path(part).unlink(missing_ok=True)

    def _records(self, part: int) -> Iterator[bytes]:
        chance = random.Random(part)
        left = min(PART_BYTES, self.size - part * PART_BYTES)
        number = 0
        while left > 0:
            which, seed = chance.randrange(len(self.models)), chance.getrandbits(48)
            copies = 2 if chance.random() < 0.05 else 1
            same_address = chance.random() < 0.4  # the share of copies that have the original's address
            body = self._body(which, seed, chance)
            for copy in range(copies):
                address = f"http://site{which}.org/{part}/{number - (copy and same_address)}"
                yield _record(address, number, body)
                number += 1
                left -= sum(len(one.raw) for one in body)

    def _body(self, which: int, seed: int, chance: random.Random) -> list[Packed]:
        model = self.models[which]
        body = [model.head, Packed.of(model.text(seed), 1)]
        missing = int(chance.lognormvariate(-0.25, 0.5) * PAGE_BYTES) - sum(len(one.raw) for one in body) - len(model.tail.raw)
        while missing > 0:
            body.append(self.fillers[chance.randrange(len(self.fillers))])
            missing -= len(body[-1].raw)
        return [*body, model.tail]


def _pages(data: Path) -> Iterator[bytes]:
    for name in SETS:
        stream = zstandard.ZstdDecompressor().stream_reader((data / f"{name}.tar.zst").open("rb"))
        with tarfile.open(fileobj=stream, mode="r|") as archive:
            for member in archive:
                if member.isfile() and member.name.endswith("html") and "expected" not in member.name:
                    yield archive.extractfile(member).read()  # type: ignore[union-attr]


def _record(address: str, number: int, body: list[Packed]) -> bytes:
    """Return a response record as one gzip member."""
    size = sum(len(one.raw) for one in body)
    http = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: {size}\r\n\r\n"
    name = hashlib.md5(f"{address} {number}".encode()).hexdigest()
    date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_700_000_000 + number))
    head = (
        f"WARC/1.1\r\nWARC-Type: response\r\nWARC-Record-ID: <urn:uuid:{name[:8]}-{name[8:12]}-{name[12:16]}-{name[16:20]}-{name[20:]}>\r\n"
        f"WARC-Date: {date}\r\nWARC-Target-URI: {address}\r\nContent-Type: application/http; msgtype=response\r\n"
        f"Content-Length: {len(http) + size}\r\n\r\n{http}"
    )
    checksum, total = 0, 0
    whole = [Packed.of(head.encode(), 1), *body, Packed.of(b"\r\n\r\n", 1)]
    for one in whole:
        checksum, total = zlib.crc32(one.raw, checksum), total + len(one.raw)
    gzip = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
    return b"".join([gzip, *(one.blocks for one in whole), b"\x03\0", checksum.to_bytes(4, "little"), total.to_bytes(4, "little")])


@contextlib.contextmanager
def served(web: Web) -> Iterator[list[str]]:
    """Serve a web on this machine; yield the addresses of its files."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._head(200, self._size())

        def do_GET(self) -> None:
            size, span = self._size(), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if span is None:  # a client that only checks whether the file exists
                self.close_connection = True
                self._head(200, size)
                return
            low, high = int(span[1]), min(int(span[2] or size), size - 1)
            with web.part(self._part()).open("rb") as file:
                file.seek(low)
                data = file.read(high + 1 - low)
            with contextlib.suppress(ConnectionError):  # a reader may have been killed
                self._head(206, len(data), ("Content-Range", f"bytes {low}-{high}/{size}"))
                self.wfile.write(data)
            if high == size - 1:
                web.read(self._part())

        def _part(self) -> int:
            return int(re.findall(r"\d+", self.path)[-1])

        def _size(self) -> int:
            # The size of a removed part is known, so a size request does not write the part again.
            return web.sizes.get(self._part()) or web.part(self._part()).stat().st_size

        def _head(self, status: int, size: int, *more: tuple[str, str]) -> None:
            self.send_response(status)
            for name, value in (("Content-Length", str(size)), ("Accept-Ranges", "bytes"), ("ETag", f'"{self._part()}"'), *more):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield [f"http://127.0.0.1:{server.server_address[1]}/{web.path(part).name}" for part in range(web.parts)]
    finally:
        server.shutdown()
