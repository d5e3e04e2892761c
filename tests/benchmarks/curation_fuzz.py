"""Mutated inputs for every reader of curation: each input must end as rows, in bounded time, without an exception.

    python tests/benchmarks/curation_fuzz.py [--inputs 10000] [--seed 0] [--json]

Seeds are small pages and archives built here; mutations flip, cut, repeat, insert and splice bytes. Printed per reader: inputs, pages,
rejected rows, the slowest input in CPU seconds, inputs refused with a clear error, exceptions (with the first one), and inputs that gave no
row at all.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".pkg"))

HTML = [
    b"<!doctype html><html><head><meta charset=utf-8><title>A page</title><script>if (a < b) {}</script></head><body class='x y'>"
    b"<nav><a href=/>Home</a></nav><main><h1>A page</h1><p>Some <b>bold</b> text, of two sentences. Here is the second.</p>"
    b"<ul><li>one<li>two</ul><table><tr><td>1<td>2</table><pre>  x = 1\n  y</pre></main><footer>&copy; me</footer></body></html>",
    b"<div><p>A <math alttext='x^2'><mi>x</mi></math><img class=math alt='\\frac12'><svg><path d='m1'/><title>t</title></svg><p>more",
    b"\xff\xfe<\0p\0>\0h\0i\0",
    "<meta charset=shift_jis><p>これは日本語の文章です。もう一つの文。".encode("shift_jis"),
    b"<table><tr><td><b><i>a</b></table><select><option>b</select><template><p>c</template><noscript>d</noscript><textarea>e</textarea>",
]
TOKENS = [
    b"<", b">", b"</", b"<!--", b"-->", b"<script>", b"</script>", b"<p>", b"<b>", b"<table>", b"<svg>", b"<math>", b"<template>", b"&#x110000;",
    b"&amp", b'"', b"'", b"=", b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"<![CDATA[", b"<plaintext>", b"<frameset>", b"</html>", b"<pre>\n",
    b"WARC/1.0\r\n", b"Content-Length: 99999999999\r\n", b"Content-Length: -1\r\n", b"\r\n\r\n", b"\x1f\x8b", b"Content-Encoding: gzip\r\n",
    b"{", b"}", b"null", b"\\ud800", b"1e999",
]  # fmt: skip


def warc() -> bytes:
    """Return a small archive: an info record, responses in several encodings, a resource, a conversion."""
    records = [_record(b"warcinfo", b"application/warc-fields", b"software: none\r\n")]
    for number, body in enumerate(HTML):
        encoded, header = (gzip.compress(body, mtime=0), b"Content-Encoding: gzip\r\n") if number % 2 else (body, b"")
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n" + header + b"\r\n" + encoded
        records.append(_record(b"response", b"application/http; msgtype=response", http))
    records.append(_record(b"resource", b"text/html", HTML[0]))
    records.append(_record(b"conversion", b"text/plain", b"plain text\n"))
    return b"".join(records)


def _record(kind: bytes, media: bytes, body: bytes) -> bytes:
    head = b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Date: 2024-01-01T00:00:00Z\r\nWARC-Target-URI: https://a.example.net/\r\n" % kind
    return head + b"Content-Type: %s\r\nContent-Length: %d\r\n\r\n" % (media, len(body)) + body + b"\r\n\r\n"


def mutated(seeds: list[bytes], generator: np.random.Generator) -> bytes:
    """Return one of the seeds after one to eight mutations."""
    data = bytearray(seeds[generator.integers(len(seeds))])
    for _ in range(generator.integers(1, 9)):
        at = int(generator.integers(len(data) + 1))
        size = int(generator.integers(1, 1 + min(200, max(1, len(data) // 2))))
        match generator.integers(6):
            case 0 if at < len(data):
                data[at] ^= 1 << int(generator.integers(8))
            case 1:
                del data[at : at + size]
            case 2:
                data[at:at] = TOKENS[generator.integers(len(TOKENS))] * int(generator.choice([1, 1, 1, 3, 50, 3000]))
            case 3:
                data[at:at] = generator.integers(0, 256, size, dtype=np.uint8).tobytes()
            case 4:
                data[at:at] = data[max(0, at - size) : at] * int(generator.choice([1, 2, 300]))
            case _:
                other = seeds[generator.integers(len(seeds))]
                cut = int(generator.integers(len(other) + 1))
                data[at:] = other[cut:]
    return bytes(data)


def readers() -> dict[str, tuple[list[bytes], Callable[[bytes], Iterator[bool]]]]:
    """Return each reader's seeds, and the reader: a function that yields for each row whether it is a page."""
    import zstandard

    from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text
    from puna.stages.reading.pages import Page, Rejected
    from puna.stages.reading.readers import Columns, read_table
    from puna.stages.reading.warc import read_warc

    def extractor(media: str) -> Callable[[bytes], Iterator[bool]]:
        config = ExtractConfig()

        def read(data: bytes) -> Iterator[bool]:
            try:
                yield bool(page_text(data, media, None, config).text.strip())
            except Unreadable as why:
                yield not why.rule.startswith("extract_")

        return read

    def archive(data: bytes) -> Iterator[bool]:
        for row in read_warc(io.BytesIO(data), "a.warc", 1 << 20):
            if isinstance(row, Rejected) and row.rule == "failed":  # an error that ends its record
                raise RuntimeError(row.detail)
            yield isinstance(row, Page)

    def lines(data: bytes) -> Iterator[bool]:
        for row in read_table(io.BytesIO(data), "s", "a.jsonl", "json", Columns("text", None, None, None), 1 << 20):
            yield isinstance(row, Page)

    plain = warc()
    return {
        "html": (HTML, extractor("text/html")),
        "text": ([*HTML, b"plain\ntext\n"], extractor("text/plain")),
        "warc": ([plain], archive),
        "warc_gz": ([b"".join(gzip.compress(part, mtime=0) for part in _parts(plain))], archive),
        "warc_zst": ([b"".join(zstandard.ZstdCompressor().compress(part) for part in _parts(plain))], archive),
        "jsonl": ([b'{"text": "one", "url": "https://a.example.net"}\n{"text": "two"}\n'], lines),
    }


def _parts(archive: bytes) -> list[bytes]:
    return [b"WARC/1.0" + part for part in archive.split(b"WARC/1.0")[1:]]


def fuzz(name: str, inputs: int, seed: int) -> dict[str, Any]:
    """Return counts of the outcomes of `inputs` mutations for one reader."""
    from puna.storage import PunaError

    seeds, read = readers()[name]
    generator = np.random.default_rng([seed, *name.encode()])
    found: dict[str, Any] = {"inputs": inputs, "pages": 0, "rejected": 0, "slowest": 0.0, "refused": 0, "exceptions": 0, "vanished": 0, "first": None}
    list(read(seeds[0]))  # compiles the reader's loops
    for number in range(inputs):
        data = mutated(seeds, generator)
        began = time.process_time()
        try:
            rows = list(read(data))
        except PunaError:  # the whole file is refused with an error: it lacks the columns that the configuration names
            found["refused"] += 1
            continue
        except Exception as error:  # noqa: BLE001 - what this looks for
            found["exceptions"] += 1
            found["first"] = found["first"] or f"input {number}: {type(error).__name__}: {error}"
            continue
        found["slowest"] = max(found["slowest"], time.process_time() - began)
        found["pages"] += sum(rows)
        found["rejected"] += len(rows) - sum(rows)
        found["vanished"] += bool(not rows and data.strip(b"\r\n \t\0"))
    return found


def figures(inputs: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Return fuzz_exceptions, fuzz_vanished and fuzz_slowest (CPU seconds) over all readers."""
    found = [fuzz(name, inputs, seed) for name in readers()]
    return {
        "fuzz_exceptions": float(sum(one["exceptions"] for one in found)),
        "fuzz_vanished": float(sum(one["vanished"] for one in found)),
        "fuzz_slowest": max(one["slowest"] for one in found),
    }


def main() -> None:
    """Fuzz every reader and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reader", choices=sorted(readers()), action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for name in arguments.reader or readers():
        found = fuzz(name, arguments.inputs, arguments.seed)
        print(json.dumps({name: found}) if arguments.json else f"{name:18} {found}", flush=True)


if __name__ == "__main__":
    main()
