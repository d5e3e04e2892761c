"""Results do not depend on the order of inputs, the size of parts or the number of workers."""

from __future__ import annotations

import gzip
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from puna.stages.contract import External, execute
from puna.stages.curate.extract import ExtractConfig, extract
from puna.stages.curate.ingest import IngestConfig, ingest
from puna.stages.curate.language import LanguageConfig, language
from puna.stages.curate.line_dedup import LineDedupConfig, line_dedup
from puna.stages.curate.minhash_dedup import MinhashDedupConfig, minhash_dedup
from puna.stages.curate.pii import PiiConfig, pii
from puna.stages.curate.url_dedup import UrlDedupConfig, url_dedup
from puna.stages.curate.url_filter import UrlFilterConfig, url_filter
from puna.storage import Store


def write_crawl(folder, order):
    """40 pages in two archives: near-duplicates, repeated lines, personal data, repeated and unwanted addresses."""
    generator = np.random.default_rng(0)
    members = []
    for n in range(40):
        words = [f"word{w}" for w in np.random.default_rng(n // 2).integers(0, 999, 120)]
        if n % 2:
            words[int(generator.integers(120))] = "other"
        host = "pornhub.com" if n == 5 else "site.example.net"
        body = f"<html><title>t{n}</title><main><p>Sign in here</p><p>{' '.join(words)} n{n}@mail.com</p></main></html>".encode()
        http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n" + body
        head = (
            f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2024-01-{n % 28 + 1:02d}T00:00:00Z\r\n"
            f"WARC-Target-URI: https://{host}/{n % 33}\r\n"
            f"Content-Type: application/http; msgtype=response\r\nContent-Length: {len(http)}\r\n\r\n"
        )
        members.append(gzip.compress(head.encode() + http + b"\r\n\r\n", mtime=0))
    members = [members[n] for n in order]
    folder.mkdir()
    (folder / "a.warc.gz").write_bytes(b"".join(members[:13]))
    (folder / "b.warc.gz").write_bytes(b"".join(members[13:]))


def curated(folder, **how):
    """Digests of every table of every stage."""
    store = Store.open(folder / "store")
    made = {"ingest": execute(ingest, IngestConfig(), {"inputs": External.resolve(f"web={folder / 'crawl'}")}, store, **how)}
    made["extract"] = execute(extract, ExtractConfig(), {"pages": made["ingest"]}, store, **how)
    documents = made["extract"]
    for stage, config in (
        (url_filter, UrlFilterConfig()),
        (url_dedup, UrlDedupConfig()),
        (pii, PiiConfig()),
        (minhash_dedup, MinhashDedupConfig()),
        (line_dedup, LineDedupConfig(bucket_documents=12)),
    ):
        documents = made[stage.name] = execute(stage, config, {"documents": documents}, store, **how)
    made["language"] = execute(language, LanguageConfig(), {"documents": documents}, store, **how)
    assert made["url_filter"].rows("dropped") == 1
    assert made["minhash_dedup"].rows("dropped") > 5
    assert made["line_dedup"].rows("removed_lines") > 5
    return {f"{name}.{table}": record.digest for name, a in made.items() for table, record in a.manifest.tables.items()}


@pytest.mark.parametrize("case", ["other order", "small parts", "two processes"])
def test_same_result(tmp_path, case):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    write_crawl(tmp_path / "one" / "crawl", range(40))
    order = np.random.default_rng(1).permutation(40) if case == "other order" else range(40)
    write_crawl(tmp_path / "two" / "crawl", order)
    expected = curated(tmp_path / "one")
    if case == "two processes":
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as executor:
            assert curated(tmp_path / "two", executor=executor, part_rows=7) == expected
    else:
        assert curated(tmp_path / "two", part_rows=3 if case == "small parts" else 1024) == expected
