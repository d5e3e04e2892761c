"""Reading pages: every format, and every kind of faulty input."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import lzma
import os
import random
import re
import resource
import zlib
from datetime import UTC, datetime
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
import zstandard
from fastwarc.warc import ArchiveIterator

from puna.stages.contract import External, execute, external
from puna.stages.curate import ingest as stages_ingest
from puna.stages.curate.ingest import IngestConfig, check_inputs, ingest
from puna.stages.reading import warc, warc_frames
from puna.stages.reading.dates import microseconds, moment
from puna.stages.reading.field_detection import sniff
from puna.stages.reading.files import Unpacking
from puna.stages.reading.pages import Page, Rejected
from puna.stages.reading.readers import Columns, read_parquet
from puna.stages.reading.warc import media_type, read_warc
from puna.stages.reading.warc_frames import frames
from puna.storage import PunaError, Store, exchange


def record(body, *, kind="response", url="https://a.example.net/p", date="2024-05-01T10:00:00Z", http="HTTP/1.1 200 OK", **headers):
    headers = {"Content-Type": "text/html; charset=utf-8", **{k.replace("_", "-"): v for k, v in headers.items()}}
    block = body
    outer = "text/plain"
    if kind == "response":
        block = (http + "\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n").encode() + body
        outer = "application/http; msgtype=response"
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{xxhash.xxh128_hexdigest(url.encode())}>\r\nWARC-Date: {date}\r\n"
        f"WARC-Target-URI: {url}\r\nContent-Type: {outer}\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def page(n):
    return record(f"<html><body><p>page {n}</p></body></html>".encode(), url=f"https://a.example.net/{n}")


def read(tmp_path, *uris, config=None, store="store", **how):
    inputs = [external for uri in uris for external in External.resolve(str(uri))]
    return execute(ingest, config or IngestConfig(), {"inputs": inputs}, Store.open(tmp_path / store), **how)


def rules(artifact):
    return sorted(artifact.read("dropped")["rule"].to_pylist())


PACKERS = {
    "warc": b"".join,
    "warc.gz": lambda records: b"".join(gzip.compress(r, mtime=0) for r in records),
    "warc.zst": lambda records: b"".join(zstandard.compress(r) for r in records),
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_warc_in_every_compression(tmp_path, suffix):
    records = [page(0), record(b"x", kind="request"), page(1)]
    (tmp_path / f"crawl.{suffix}").write_bytes(PACKERS[suffix](records))
    made = read(tmp_path, tmp_path / f"crawl.{suffix}")
    rows = made.read().to_pylist()
    assert {r["url"] for r in rows} == {"https://a.example.net/0", "https://a.example.net/1"}
    assert {(r["source"], r["content_type"], r["charset"]) for r in rows} == {("crawl", "text/html", "utf-8")}
    assert rows[0]["fetched_at"] == datetime(2024, 5, 1, 10, tzinfo=UTC)
    assert all(len(r["id"]) == 32 and int(r["id"], 16) >= 0 for r in rows)
    assert rules(made) == ["not_a_response"]


def test_records_that_are_no_pages_say_why(tmp_path):
    packed = gzip.compress(b"<html>" + b"text " * 99 + b"</html>")
    records = [
        page(0),
        record(b"x", url="https://a.example.net/moved", http="HTTP/1.1 301 Moved"),
        record(b"x", url="https://a.example.net/image", Content_Type="image/png"),
        record(b" \n", url="https://a.example.net/empty"),
        record(packed, url="https://a.example.net/gzip", Content_Encoding="gzip"),
        record(packed[:-9], url="https://a.example.net/cut", Content_Encoding="gzip"),
        record(b"<html>plain</html>", url="https://a.example.net/lie", Content_Encoding="gzip"),
        record(b"4\r\n<p>x\r\n0\r\n\r\n", url="https://a.example.net/chunked", Transfer_Encoding="chunked"),
        record(b"<p>x", url="https://a.example.net/lie2", Transfer_Encoding="chunked"),
        record(b"<p>x", url="https://a.example.net/when", date="yesterday"),
        record(b"<!DOCTYPE html><p>x", url="https://a.example.net/sniffed", Content_Type=""),
        record(b"x", kind="revisit"),
        record(b"a text", kind="conversion", url="https://a.example.net/wet"),
        record(b"<p>" + b"x" * 5000, url="https://a.example.net/long"),
        record(packed[:-5], url="https://a.example.net/trailer", Content_Encoding="gzip"),
        record(packed[:3], url="https://a.example.net/stub", Content_Encoding="gzip"),
        record(b"User-agent: *", url="https://a.example.net/robots.txt?x", Content_Type="text/plain"),
        record(b"var x = 1", url="https://a.example.net/x", Content_Type="text/x-javascript; charset=utf-8"),
        record(b"a log", kind="resource", url="metadata://example.net/wget.log"),
    ]
    (tmp_path / "crawl.warc").write_bytes(b"".join(records))
    made = read(tmp_path, tmp_path / "crawl.warc", config=IngestConfig(max_body_bytes=4000))
    got = {r["url"].rsplit("/", 1)[1]: r for r in made.read().to_pylist()}
    assert set(got) == {"0", "gzip", "lie", "chunked", "lie2", "sniffed", "wet", "trailer"}
    assert got["gzip"]["body"] == got["trailer"]["body"] == b"<html>" + b"text " * 99 + b"</html>"
    assert got["chunked"]["body"] == b"<p>x"
    assert got["wet"]["content_type"] == "text/plain"
    assert got["sniffed"]["content_type"] == "text/html"
    assert rules(made) == sorted(
        ["http_status", "content_type", "empty", "undecodable_body", "undecodable_body", "malformed_record", "not_a_response", "body_too_large"]
        + ["not_a_page"] * 3
    )
    status = next(r for r in made.read("dropped").to_pylist() if r["rule"] == "http_status")
    assert status["value"] == 301
    assert "https://a.example.net/moved" in status["detail"]


def test_an_archive_of_metadata_is_refused_by_name(tmp_path):
    told = [record(b'{"Container": {"Filename": "x.warc.gz"}}', kind="metadata", url=f"https://a.example.net/{n}") for n in range(3)]
    (tmp_path / "crawl.warc.wat").write_bytes(b"".join(told))
    with pytest.raises(PunaError, match=r"crawl.warc.wat: no page is kept; files 1, records 3: 3 not_a_response; .* metadata \(WAT\) and requests are not$"):
        read(tmp_path, tmp_path / "crawl.warc.wat")


def test_wherever_a_plain_archive_is_cut_the_good_records_stay_and_the_bad_one_is_counted(tmp_path):
    records = [page(n) for n in range(4)]
    whole = b"".join(records)
    ends = [sum(len(r) - 4 for r in records[:1])]
    ends = [sum(map(len, records[: n + 1])) - 4 for n in range(4)]
    starts = [sum(map(len, records[:n])) for n in range(4)]
    for cut in range(1, len(whole) + 1):
        found = list(read_warc(io.BytesIO(whole[:cut]), "x", 1 << 20))
        good = sum(end <= cut for end in ends)
        bad = int(any(start < cut < end for start, end in zip(starts, ends, strict=True)))
        assert [type(r) for r in found] == [Page] * good + [Rejected] * bad, cut
        if bad:
            assert found[-1].rule == "truncated_record"
            assert f"offset {starts[good]}" in found[-1].detail


@pytest.mark.parametrize("pack", [lambda r: gzip.compress(r, mtime=0), zstandard.compress])
def test_wherever_a_compressed_archive_is_cut(pack):
    members = [pack(page(n)) for n in range(4)]
    whole = b"".join(members)
    starts = [sum(map(len, members[:n])) for n in range(5)]
    for cut in range(1, len(whole) + 1):
        found = list(read_warc(io.BytesIO(whole[:cut]), "x", 1 << 20))
        pages = [r for r in found if isinstance(r, Page)]
        complete = sum(start <= cut for start in starts[1:])
        assert len(pages) in (complete, complete + 1)  # a record may be complete although its member's checksum is truncated
        assert [r.url for r in pages] == [f"https://a.example.net/{n}" for n in range(len(pages))]
        bad = [r for r in found if isinstance(r, Rejected)]
        assert len(bad) == (cut not in starts)
        assert not bad or (bad[0].rule == "truncated_record" and f"offset {starts[complete]}" in bad[0].detail)


def test_damage_in_the_middle_loses_one_record_only():
    members = [gzip.compress(page(n), mtime=0) for n in range(5)]
    generator = random.Random(0)
    for _ in range(400):
        which = generator.randrange(5)
        place = generator.randrange(12, len(members[which]))
        damaged = bytearray(members[which])
        damaged[place] ^= 1 << generator.randrange(8)
        with contextlib.suppress(OSError, EOFError, zlib.error):
            assert gzip.decompress(bytes(damaged)) == page(which)
            continue  # a padding bit of the last byte
        found = list(read_warc(io.BytesIO(b"".join([*members[:which], bytes(damaged), *members[which + 1 :]])), "x", 1 << 20))
        pages = [r.url[-1] for r in found if isinstance(r, Page)]
        if which == 4 and "ends inside" in found[-1].detail:  # as if the file were truncated there: the record may be complete
            pages = pages[:4]
        assert pages == [str(n) for n in range(5) if n != which]
        assert [r.rule for r in found if isinstance(r, Rejected)] == ["truncated_record"]


@pytest.mark.parametrize("chunk", [1, 7, 64, 300, 1000, 20_000])
def test_the_member_behind_a_damaged_one_is_found_wherever_pieces_of_the_file_end(monkeypatch, chunk):
    """A piece may contain so little of a member that nothing can be unpacked from it yet."""
    monkeypatch.setattr(warc_frames, "CHUNK_BYTES", chunk)
    bad = bytearray(gzip.compress(page(0), mtime=0))
    bad[30:60] = bytes(30)
    for before in range(0, 300, 1 if chunk >= 64 else 50):
        data = bytes(bad) + bytes([1]) * before + b"".join(gzip.compress(page(n), mtime=0) for n in (1, 2))
        found = list(read_warc(io.BytesIO(data), "x", 1 << 20))
        assert [r.url[-1] for r in found if isinstance(r, Page)] == ["1", "2"], before
        assert {r.rule for r in found if isinstance(r, Rejected)} == {"truncated_record"}


def test_what_begins_like_members_behind_a_damaged_one_is_copied_once():
    """All following bytes used to be copied for each: a megabyte of such headers took more than a minute."""
    copied = 0

    class Counted(bytes):
        def __getitem__(self, place):
            nonlocal copied
            made = super().__getitem__(place)
            copied += len(made) if isinstance(made, bytes) else 0
            return made

    count = 40_000
    data = Counted(warc_frames.GZIP_MAGIC * count)
    assert warc_frames._next_member(io.BytesIO(), 0, data, 3) == (len(data), b"", 0)
    assert copied <= count * warc_frames.PACKED_BYTES


def test_members_that_run_on_to_the_end_are_looked_behind_a_few_times_only():
    """Each member declares that 65,535 stored bytes follow, more than the file has: for each, the rest of the file would be read again."""
    begun = gzip.compress(b"", mtime=0)[:10] + b"\x00\xff\xff\x00\x00" + page(0)
    reads = []

    class File(io.BytesIO):
        def read(self, size=-1):
            reads.append(size)
            return super().read(size)

    def of(count):
        reads.clear()
        found = list(read_warc(File(begun * count), "x", 1 << 20))
        assert [one.rule for one in found if isinstance(one, Rejected)][:2] == ["truncated_record"] * 2
        return len(reads)

    assert of(80) == of(160)  # with fewer, the end is so near that it is searched once more for each


@pytest.mark.parametrize("length", [b"9000", b"99999999999", b"9" * 5000])
@pytest.mark.parametrize("pack", [lambda r: gzip.compress(r, mtime=0), zstandard.compress])
def test_a_lying_length_loses_its_own_record_only(length, pack):
    lying = re.sub(rb"Content-Length: \d+", b"Content-Length: " + length, page(1), count=1)
    members = [pack(page(0)), pack(lying), *(pack(page(n)) for n in range(2, 8))]
    found = list(read_warc(io.BytesIO(b"".join(members)), "x", 1 << 20))
    assert [r.url[-1] for r in found if isinstance(r, Page)] == ["0", *"234567"]
    assert [r.rule for r in found if isinstance(r, Rejected)] == ["malformed_record" if len(length) > 18 else "truncated_record"]


def test_records_may_cross_members_of_a_fixed_size():
    plain = b"".join(page(n) for n in range(20))
    data = b"".join(gzip.compress(plain[at : at + 97]) for at in range(0, len(plain), 97))
    assert [r.url for r in read_warc(io.BytesIO(data), "x", 1 << 20)] == [f"https://a.example.net/{n}" for n in range(20)]


def test_no_more_of_a_file_or_line_is_unpacked_than_a_page_may_have(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "bomb.html.gz").write_bytes(gzip.compress(b"<p>" + b"x" * 3_000_000))
    (folder / "good.html").write_bytes(b"<p>A page.")
    rows = [b'{"text": "%s"}' % (b"y" * 90_000), b'{"text": "short"}']
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(b"\n".join(rows)))
    made = read(tmp_path, folder, config=IngestConfig(max_body_bytes=2000))
    assert made.rows() == 2 and rules(made) == ["body_too_large", "record_too_large"]


@pytest.mark.parametrize("value", [-9e13, 9e13, "0001-01-01T00:00:00+14:00", datetime(1, 1, 1), datetime(9999, 12, 31), float("nan")])
def test_dates_that_no_table_holds_are_none(value):
    assert moment(value) is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (20240131, "2024-01-31"), ("20240131", "2024-01-31"), (20240131120506, "2024-01-31T12:05:06"), (" 20240131120506", "2024-01-31T12:05:06"),
        ("1700000000", "2023-11-14T22:13:20"), ("1700000000000", "2023-11-14T22:13:20"), (1700000000, "2023-11-14T22:13:20"),
        ("20241301", None), (20240131126000, None),
    ],
)  # fmt: skip
def test_dates_and_times_in_digits_alone(value, expected):
    assert moment(value) == (expected and microseconds(datetime.fromisoformat(expected)))


def test_links_and_special_files_are_refused_by_name(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "p.txt").write_text("a page")
    (folder / "same.txt").symlink_to("p.txt")
    assert [f.name for f in External.resolve(str(folder))[0].files] == ["p.txt", "same.txt"]
    (tmp_path / "secret").write_text("x")
    for make, said in (
        (lambda path: path.symlink_to(tmp_path / "secret"), "is a link to"),
        (lambda path: path.symlink_to(folder), "is a link to"),
        (lambda path: path.symlink_to("nowhere"), "is not a regular file"),
        (os.mkfifo, "is not a regular file"),
    ):
        make(folder / "odd")
        with pytest.raises(PunaError, match=f"odd {said}"):
            External.resolve(str(folder))
        (folder / "odd").unlink()
    open(os.fsencode(folder) + b"/b\xff.txt", "wb").close()
    with pytest.raises(PunaError, match="not UTF-8"):
        External.resolve(str(folder))


def test_what_may_not_be_read_is_named(tmp_path, monkeypatch):
    """Otherwise a folder would be skipped with everything in it."""
    (tmp_path / "in" / "closed").mkdir(parents=True)
    for name in ("a.txt", "closed/b.txt"):
        (tmp_path / "in" / name).write_text("a page")
    scandir, digested = os.scandir, external._digest

    def looked_at(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", looked_at)
        with pytest.raises(PunaError, match=r"closed cannot be read \(Permission denied\)"):
            External.resolve(str(tmp_path / "in"))

    def read_at(address, system):
        if address.endswith("b.txt"):
            raise PermissionError(13, "Permission denied", address)
        return digested(address, system)

    monkeypatch.setattr(external, "_digest", read_at)
    with pytest.raises(PunaError, match=r"a file cannot be read \(.*Permission denied.*b\.txt"):
        External.resolve(str(tmp_path / "in"))


def test_frames_equal_fastwarc_on_a_sound_archive():
    plain = b"".join(page(n) for n in range(20))
    for data in (plain, gzip.compress(plain), b"".join(gzip.compress(page(n)) for n in range(20))):
        mine = [f.data.split(b"\r\n\r\n", 1)[1] for f in frames(io.BytesIO(data), 1 << 20, Unpacking("x", io.BytesIO(data)))]
        assert mine == [r.reader.read() for r in ArchiveIterator(io.BytesIO(data), parse_http=False)]


def test_large_records_garbage_and_missing_lengths_are_passed_over():
    big = record(b"x" * 100_000, url="https://a.example.net/big")
    lengthless = b"WARC/1.0\r\nWARC-Type: response\r\n\r\nbody\r\n\r\n"
    data = page(0) + big + b"garbage\r\n\r\n" + page(1) + lengthless + page(2)
    found = list(read_warc(io.BytesIO(data), "x", 10_000))
    assert [r.url[-1] for r in found if isinstance(r, Page)] == ["0", "1", "2"]
    assert [r.rule for r in found if isinstance(r, Rejected)] == ["record_too_large", "malformed_record", "malformed_record"]


def test_the_record_behind_a_bad_one_is_found_wherever_pieces_of_the_file_end(monkeypatch):
    bad = b"WARC/1.0\r\nWARC-Type: response\r\n\r\n" + b"x" * 60 + b"\r\n"
    for size in range(40, 140):
        monkeypatch.setattr(warc_frames, "CHUNK_BYTES", size)
        wrong, good = read_warc(io.BytesIO(bad + page(1)), "x", 1 << 20)
        assert (wrong.rule, good.url[-1]) == ("malformed_record", "1"), size


def test_small_members_without_end_in_a_record_come_to_an_end():
    head = record(b"y" * 60_000).partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    data = gzip.compress(head) + gzip.compress(b"x") * 40_000 + gzip.compress(page(1))
    cut, good = read_warc(io.BytesIO(data), "x", 1 << 20)
    assert (cut.rule, good.url[-1]) == ("truncated_record", "1") and "member" in cut.detail


def test_a_record_that_announces_two_lengths_is_refused_before_anyone_believes_the_larger():
    twice = page(1).replace(b"\r\n\r\n", b"\r\nContent-Length: 99999999999\r\n\r\n", 1)
    first, wrong, last = read_warc(io.BytesIO(page(0) + twice + page(2)), "x", 1 << 20)
    assert (first.url[-1], wrong.rule, last.url[-1]) == ("0", "malformed_record", "2")


def test_zstd_archives_with_a_dictionary():
    samples = [page(n) for n in range(300)]
    dictionary = zstandard.train_dictionary(4000, samples)
    raw = dictionary.as_bytes()
    packer = zstandard.ZstdCompressor(dict_data=dictionary)
    for payload in (raw, zstandard.compress(raw)):
        head = b"\x5d\x2a\x4d\x18" + len(payload).to_bytes(4, "little") + payload
        found = list(read_warc(io.BytesIO(head + b"".join(packer.compress(r) for r in samples[:3])), "x", 1 << 20))
        assert [r.url[-1] for r in found] == ["0", "1", "2"]
    wrong = b"\x5d\x2a\x4d\x18" + (64).to_bytes(4, "little") + raw[:4] + b"\xff" * 60
    (only,) = read_warc(io.BytesIO(wrong + packer.compress(samples[0])), "x", 1 << 20)
    assert only.rule == "truncated_record" and "the archive's dictionary cannot be read" in only.detail


def test_a_damaged_frame_of_zstd_costs_its_record_alone():
    letters = [bytes(random.Random(n).choices(range(65, 91), k=3000)) for n in range(6)]
    members = [zstandard.compress(record(body, url=f"https://a.example.net/{n}")) for n, body in enumerate(letters)]
    for place in range(4, len(members[2]), 7):
        damaged = bytearray(members[2])
        damaged[place] ^= 0x55
        found = list(read_warc(io.BytesIO(b"".join([*members[:2], bytes(damaged), *members[3:]])), "x", 1 << 20))
        pages = [one.url[-1] for one in found if isinstance(one, Page)]
        assert [number for number in pages if number != "2"] == list("01345"), place
        with contextlib.suppress(zstandard.ZstdError):
            zstandard.decompress(bytes(damaged))
            continue  # other letters
        assert "truncated_record" in [one.rule for one in found if isinstance(one, Rejected)]


def test_many_damaged_frames_of_zstd_come_to_an_end():
    wrong = zstandard.compress(page(0))[:4] + b"\xff" * 8
    found = list(read_warc(io.BytesIO(wrong * 40 + zstandard.compress(page(1))), "x", 1 << 20))
    assert [one.url[-1] for one in found if isinstance(one, Page)] == ["1"] and len(found) > 9


def test_a_frame_of_zstd_is_unpacked_piece_by_piece():
    """20 kB unpack to half a gigabyte, but a record may have at most a megabyte."""
    bomb = zstandard.compress(page(0) + b"0" * (500 << 20), level=1)
    assert len(bomb) < 60_000 and max(len(data) for _, data in warc_frames._zstd_blocks(io.BytesIO(bomb))) < 2 * warc_frames.OUTPUT_BYTES
    found = read_warc(io.BytesIO(bomb), "x", 1 << 20)
    assert isinstance(next(found), Page)
    with pytest.raises(PunaError, match=r"x: its [\d,]+ bytes unpack to"):
        list(found)
    lying = b"\x5d\x2a\x4d\x18\xff\xff\xff\xff" + zstandard.compress(page(0))
    (only,) = read_warc(io.BytesIO(lying), "x", 1 << 20)
    assert isinstance(only, Rejected) and "4294967295 bytes are declared" in only.detail


def test_decompression_is_bounded():
    bomb = gzip.compress(b"0" * 50_000_000)
    data = record(bomb, Content_Encoding="gzip")
    (only,) = read_warc(io.BytesIO(data), "x", 1 << 20)
    assert only.rule == "undecodable_body"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("text/html", ("text/html", None)),
        ('Text/HTML; Charset="ISO-8859-1"', ("text/html", "iso-8859-1")),
        ("text/html;boundary=x; charset=utf-8 ", ("text/html", "utf-8")),
        ("", ("", None)),
    ],
)
def test_media_type(header, expected):
    assert media_type(header) == expected


def test_ids_do_not_depend_on_place_or_order(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    pages = [page(n) for n in range(6)]
    (tmp_path / "one" / "a.warc").write_bytes(b"".join(pages))
    (tmp_path / "two" / "b.warc.gz").write_bytes(gzip.compress(b"".join(reversed(pages[3:]))))
    (tmp_path / "two" / "c.warc").write_bytes(b"".join(pages[:3]))
    first = read(tmp_path, f"web={tmp_path / 'one'}")
    second = read(tmp_path, f"web={tmp_path / 'two'}")
    assert first.data_digest == second.data_digest


def test_repeated_records_are_counted_once(tmp_path):
    (tmp_path / "a.warc").write_bytes(page(0) + page(0) + page(0) + page(1))
    made = read(tmp_path, tmp_path / "a.warc")
    assert made.rows() == 2
    assert rules(made) == ["duplicate_record"] * 2


def test_partitions_and_levels_do_not_matter_and_bound_what_is_sorted_at_once(tmp_path, monkeypatch):
    """A shard's bytes depend neither on the pieces in which it is written nor on the path of its rows."""
    pages = [page(n) for n in [*range(200), 7, 8]]
    (tmp_path / "a.warc").write_bytes(b"".join(pages))
    expected = read(tmp_path, tmp_path / "a.warc", store="one")
    sizes, whole = [], stages_ingest._sort
    monkeypatch.setattr(stages_ingest, "_sort", lambda rows: sizes.append(rows.num_rows) or whole(rows))
    monkeypatch.setattr(exchange, "PARTITION_BYTES", sum(map(len, pages)) // 4)  # archives count fourfold: 32 partitions
    for level in (exchange.LEVEL, 7):
        monkeypatch.setattr(exchange, "LEVEL", level)
        sizes.clear()
        artifact = read(tmp_path, tmp_path / "a.warc", store=f"level-{level}")
        assert (artifact.data_digest, artifact.manifest.files) == (expected.data_digest, expected.manifest.files)
        assert len(sizes) == 32 and sum(sizes) == 202 and max(sizes) < 20
        assert artifact.manifest.metrics == expected.manifest.metrics and artifact.rows("dropped") == 2


def test_a_folder_of_pages(tmp_path):
    folder = tmp_path / "site"
    (folder / "sub").mkdir(parents=True)
    (folder / "index.html").write_text("<p>hello</p>")
    (folder / "sub" / "two words.htm.gz").write_bytes(gzip.compress(b"<p>packed</p>"))
    (folder / "sub" / "code.py").write_text("x = 1\n")
    (folder / "sub" / "notes.txt").write_text("notes")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    (folder / "cut.html.gz").write_bytes(gzip.compress(b"<p>packed</p>" * 99)[:20])
    made = read(tmp_path, folder)
    rows = {r["url"]: (r["content_type"], r["body"]) for r in made.read().to_pylist()}
    assert rows == {
        "file:///site/index.html": ("text/html", b"<p>hello</p>"),
        "file:///site/sub/two%20words.htm.gz": ("text/html", b"<p>packed</p>"),
        "file:///site/sub/code.py": ("text/x-python", b"x = 1\n"),
        "file:///site/sub/notes.txt": ("text/plain", b"notes"),
    }
    assert rules(made) == ["not_a_page", "truncated_record"]


def test_a_file_that_starts_like_html_is_html_whatever_its_name(tmp_path):
    (folder := tmp_path / "site").mkdir()
    html, template = b"\n<!DOCTYPE html><p>words</p>" + b"x" * 2000, b"<!doctype html><?php echo $x ?>"
    for name in ("page.php", "page.md", "page.xml", "page.shtml", "index.html?id=1", "page"):
        (folder / name).write_bytes(html)
    (folder / "t.php").write_bytes(template)
    (folder / "notes.md").write_bytes(b"Write <html> first.")
    made = read(tmp_path, folder)
    types = {r["url"].rpartition("/")[2]: (r["content_type"], r["body"]) for r in made.read().to_pylist()}
    assert types.pop("t.php") == ("text/x-php", template) and types.pop("notes.md")[0] == "text/markdown"
    assert len(types) == 6 and set(types.values()) == {("text/html", html)} and rules(made) == []


def test_parquet(tmp_path):
    table = pa.table({"text": ["one", None, "three"], "url": ["https://a.example.net/1", "x", None], "date": ["2020-01-02", None, "bad"]})
    pq.write_table(table, tmp_path / "t.parquet")
    made = read(tmp_path, tmp_path / "t.parquet")
    assert [(r["url"], r["body"], r["content_type"]) for r in made.read().to_pylist()] == [
        ("https://a.example.net/1", b"one", "text/plain"),
        ("file:///t/t.parquet/2", b"three", "text/plain"),
    ]
    assert rules(made) == ["not_a_page"]  # no text
    # An unrequested column without valid dates costs no document.
    assert {r.as_py() for r in made.read()["fetched_at"]} == {datetime(1970, 1, 1, tzinfo=UTC), datetime(2020, 1, 2, tzinfo=UTC)}
    asked = read(tmp_path, tmp_path / "t.parquet", config=IngestConfig(date_column="date"))
    assert rules(asked) == ["malformed_record", "not_a_page"]  # not a date; no text
    named = read(tmp_path, tmp_path / "t.parquet", config=IngestConfig(url_column="url"))
    assert named.read()["url"].to_pylist() == made.read()["url"].to_pylist()  # a null address costs no document


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_the_first_usual_field_with_a_date_counts_in_each_row(tmp_path, kind):
    fields = [{"fetched_at": None, "date": "2024-05-04"}, {"fetched_at": None, "date": "May 4, 2024", "timestamp": "2024-05-04"}]
    rows = [{"fetched_at": None, "date": None, "timestamp": None} | row | {"text": f"text {n}"} for n, row in enumerate(fields)]
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    else:
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(tmp_path, tmp_path / f"t.{kind}").read()["fetched_at"].to_pylist() == [datetime(2024, 5, 4, tzinfo=UTC)] * 2


@pytest.mark.parametrize(("given", "url"), [
    ("www.example.com/view/1", "https://www.example.com/view/1"), ("//example.co.uk:8080?x=1", "https://example.co.uk:8080?x=1"),
    ("казино.рф", "https://казино.рф"), ("onet.pl/a", "https://onet.pl/a"), ("example.com", "https://example.com"),
    ("src/main.py", "file:///t/t.jsonl/src/main.py"), ("main.py", "file:///t/t.jsonl/main.py"), ("page.html", "file:///t/t.jsonl/page.html"),
    ("v1.2/notes", "file:///t/t.jsonl/v1.2/notes"), ("com", "file:///t/t.jsonl/com"), ("example.com is", "file:///t/t.jsonl/example.com%20is"),
])  # fmt: skip
def test_a_url_without_a_scheme_is_read_as_https(tmp_path, given, url):
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "words", "url": given}))
    assert read(tmp_path, tmp_path / "t.jsonl").read()["url"].to_pylist() == [url]


def test_hostile_lines_cost_only_themselves(tmp_path):
    lines = ["[" * 200_000, '{"text": "ok", "url": "http://x/\\ud800"}', '{"text": "good", "date": 1700000000000}']
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    made = read(tmp_path, tmp_path / "t.jsonl")
    (row,) = made.read().to_pylist()
    assert (row["body"], row["fetched_at"]) == (b"good", datetime.fromtimestamp(1_700_000_000, UTC))
    assert rules(made) == ["malformed_record"] * 2


def test_a_text_that_all_rows_of_a_parquet_file_share_is_held_once(tmp_path):
    """Two kilobytes that declare twenty gigabytes."""
    long = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0, None] * 2500, pa.int32()), pa.array(["x" * (4 << 20), "a short text"]))
    pq.write_table(pa.table({"text": long}), tmp_path / "bomb.parquet", store_schema=False)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with (tmp_path / "bomb.parquet").open("rb") as file:
        found = list(read_parquet(file, "s", "bomb", Columns("text", None, None, None), 1 << 20))
    assert [getattr(record, "rule", "page") for record in found] == ["body_too_large", "page", "body_too_large", "not_a_page"] * 2500
    assert found[0].value == 4 << 20 and found[1].body == b"a short text"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # in KiB


def test_numbers_that_rows_share_are_no_texts(tmp_path):
    numbers = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), pa.array([7, 9]))
    pq.write_table(pa.table({"text": numbers}), tmp_path / "numbers.parquet")
    with (tmp_path / "numbers.parquet").open("rb") as file:
        found = list(read_parquet(file, "s", "numbers", Columns("text", None, None, None), 1 << 20))
    assert [record.rule for record in found] == ["malformed_record"] * 3


def unsound(kind, sound, wrong):
    """Return an Arrow array of 40 values from bytes, with `wrong` as the value at index 5."""
    values_ = np.array([wrong if at == 5 else sound for at in range(40)], np.int32 if kind == pa.date32() else np.int64)
    return pa.Array.from_buffers(kind, 40, [None, pa.py_buffer(values_)])


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_values_that_python_cannot_hold_cost_their_row_at_most(tmp_path, kind):
    """A bad text costs the row; a bad address or unrequested date costs only itself; a bad value in other columns costs nothing."""
    encoded = pa.array([f"page {n} \xff".encode("latin-1" if n == 5 else "utf-8") for n in range(40)], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 40, encoded.buffers())
    texts = [f"page {n}" for n in range(40)]
    day = 1_700_000_000
    for number, columns in enumerate([
        {"text": broken}, {"text": texts, "url": broken}, {"text": texts, "other": broken},
        {"text": texts, "date": unsound(pa.timestamp("us"), day * 10**6, 2**62)}, {"text": texts, "date": unsound(pa.date32(), 19_000, 2**31 - 1)},
        {"text": texts, "date": unsound(pa.timestamp("us", tz="Mars/Phobos"), day * 10**6, 0)},
        {"text": texts, "date": unsound(pa.timestamp("ns"), day * 10**9, day * 10**9 + 1001)},
    ]):  # fmt: skip
        table, file = pa.table(columns), tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            pq.write_table(table, file)
        else:
            with pa.ipc.new_stream(file, table.schema) as out:
                out.write_table(table)
        sniff(External.resolve(str(file))[0])
        made = read(tmp_path, file, store=f"{number}.store")
        assert rules(made) == (["malformed_record"] if number == 0 else []), number
        rows = {row["body"].decode(): row["fetched_at"] for row in made.read().to_pylist()}
        assert len(rows) == 39 + (number > 0)
    assert rows["page 5"] == datetime.fromtimestamp(day, UTC).replace(microsecond=1) and rows["page 4"] == datetime.fromtimestamp(day, UTC)


def test_a_damaged_part_of_a_parquet_file_costs_its_rows_alone(tmp_path):
    texts = [random.Random(n).randbytes(300).hex() for n in range(40)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "t.parquet", row_group_size=8, compression="snappy", use_dictionary=False)
    meta = pq.ParquetFile(tmp_path / "t.parquet").metadata.row_group(2).column(0)
    damaged = bytearray((tmp_path / "t.parquet").read_bytes())
    damaged[meta.data_page_offset + 40 : meta.data_page_offset + meta.total_compressed_size] = b"\xff" * (meta.total_compressed_size - 40)
    (tmp_path / "t.parquet").write_bytes(damaged)
    made = read(tmp_path, tmp_path / "t.parquet")
    assert {row["body"].decode() for row in made.read().to_pylist()} == {*texts[:16], *texts[24:]}
    (row,) = made.read("dropped").to_pylist()
    assert row["rule"] == "truncated_record" and "t.parquet, rows 16 to 23: the Parquet file is damaged" in row["detail"]


def test_a_column_of_lists_is_no_text(tmp_path):
    pq.write_table(pa.table({"text": [["a", "b"], ["c"]]}), tmp_path / "t.parquet")
    with pytest.raises(PunaError, match="no page is kept.*2 malformed_record"):
        read(tmp_path, tmp_path / "t.parquet")


def test_html_columns_and_places_of_rows_without_address(tmp_path):
    table = pa.table({"page": [{"html": b"<p>x</p>"}], "when": pa.array([0], pa.timestamp("s"))})
    pq.write_table(table, tmp_path / "t.parquet")
    made = read(tmp_path, tmp_path / "t.parquet", config=IngestConfig(html_column="page.html", date_column="when"))
    (row,) = made.read().to_pylist()
    assert (row["content_type"], row["url"], row["body"]) == ("text/html", "file:///t/t.parquet/0", b"<p>x</p>")


def test_files_that_cannot_be_read_cost_only_themselves(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(pa.table({"text": ["one", "two"]}), folder / "good.parquet")
    data = (folder / "good.parquet").read_bytes()
    files = {"cut.parquet": data[: len(data) // 2], "magic.parquet": b"XXXX" + data[4:-4] + b"XXXX", "empty.parquet": b"", "twice.csv": b"a,a\n1,2\n"}
    files |= {"none.jsonl": b"", "none.warc.gz": b""}
    files |= {"old.arc": b"filedesc://x 0.0.0.0 2008 text/plain 76\n1 0 X\n", "cut.csv.gz": gzip.compress(b"text\nx\n" * 99)[:12]}
    for name, body in files.items():
        (folder / name).write_bytes(body)
    pq.write_table(pa.table({"content": ["x"]}), folder / "none.parquet")
    check_inputs(External.resolve(str(folder)), IngestConfig())
    made = read(tmp_path, folder)
    dropped = {row["detail"].partition(":")[0]: (row["rule"], row["detail"]) for row in made.read("dropped").to_pylist()}
    assert made.rows() == 2 and dropped.keys() == {*files, "none.parquet"} and {rule for rule, _ in dropped.values()} == {"unreadable_file"}
    assert "it has content. Name another one with ingest.text_column" in dropped["none.parquet"][1]
    metrics = made.manifest.metrics
    assert (metrics["dropped_unreadable_file"], metrics["files_without_page"]) == (9, 9)
    assert metrics["files_without_page_are"].startswith("4 .parquet (cut.parquet: not a readable Parquet file")


def test_files_that_are_compressed_but_not_named_so_are_read(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name, body in {"a.html": gzip.compress(b"<p>one</p>"), "b.txt": gzip.compress(b"two"), "c.md": zstandard.compress(b"three")}.items():
        (folder / name).write_bytes(body)
    (folder / "cut.html").write_bytes(gzip.compress(bytes(range(256)) * 9)[:100])
    (folder / "large.html").write_bytes(gzip.compress(b"x" * 5000))
    made = read(tmp_path, folder, config=IngestConfig(max_body_bytes=2000))
    assert sorted(made.read()["body"].to_pylist()) == [b"<p>one</p>", b"three", b"two"]
    assert rules(made) == ["body_too_large", "truncated_record"]


def test_a_parquet_file_without_the_column_is_refused_if_it_is_the_only_one(tmp_path):
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(PunaError, match=r"t\.parquet: no column 'text'; it has content.*ingest\.text_column"):
        read(tmp_path, tmp_path / "t.parquet")
    with pytest.raises(PunaError, match="ingest.url_column"):
        read(tmp_path, tmp_path / "t.parquet", config=IngestConfig(text_column="content", url_column="address"))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(PunaError, match=r"bad\.parquet: not a readable Parquet file"):
        read(tmp_path, tmp_path / "bad.parquet")
    with pytest.raises(PunaError, match="no such file"):
        read(tmp_path, tmp_path / "missing.parquet")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "jsonl.xz"])
def test_jsonl(tmp_path, suffix):
    import lzma

    lines = [
        json.dumps({"text": "one", "url": "https://a.example.net/1", "timestamp": "2021-03-04T05:06:07Z"}),
        "",
        "{broken",
        json.dumps(["a", "list"]),
        json.dumps({"text": 7}),
        json.dumps({"text": "half a pair \ud800"}),
        json.dumps({"text": "two", "id": 3}),
    ]
    data = "\n".join(lines).encode()
    packed = {"jsonl": bytes, "jsonl.gz": gzip.compress, "jsonl.zst": zstandard.compress, "jsonl.xz": lzma.compress}[suffix](data)
    (tmp_path / f"t.{suffix}").write_bytes(packed)
    made = read(tmp_path, f"t={tmp_path / f't.{suffix}'}")
    assert {(r["url"], r["body"]) for r in made.read().to_pylist()} == {
        ("https://a.example.net/1", b"one"),
        (f"file:///t/t.{suffix}/6", b"two"),
    }
    assert rules(made) == [*["malformed_record"] * 3, "not_a_page"]


@pytest.mark.parametrize("ending", ["gz", "xz", "zst"])
def test_a_truncated_archive_of_lines_keeps_what_comes_before(tmp_path, ending):
    lines = [json.dumps({"text": f"page {n} {random.Random(n).random()}", "url": f"https://x.org/{n}"}).encode() + b"\n" for n in range(3000)]
    whole = b"".join(lines)
    packed = {"gz": gzip.compress, "xz": lzma.compress, "zst": partial(zstandard.compress, level=1)}[ending](whole)[:-2000]
    # What a decompressor can return from the given bytes.
    machine = {"gz": partial(zlib.decompressobj, 31), "xz": lzma.LZMADecompressor, "zst": zstandard.ZstdDecompressor().decompressobj}[ending]()
    readable = machine.decompress(packed).count(b"\n")
    file = tmp_path / f"rows.jsonl.{ending}"
    file.write_bytes(packed)
    made = execute(ingest, IngestConfig(), {"inputs": External.resolve(str(file))}, Store.open(tmp_path / "store"))
    assert 1500 < readable == made.rows() < 3000 and rules(made) == ["truncated_record"]


def test_a_truncated_jsonl_keeps_its_good_lines(tmp_path):
    data = b"".join(json.dumps({"text": f"line {n}"}).encode() + b"\n" for n in range(50))
    (tmp_path / "t.jsonl").write_bytes(data[:-8])
    made = read(tmp_path, tmp_path / "t.jsonl")
    assert (made.rows(), rules(made)) == (49, ["truncated_record"])
    # Incompressible text, so that there are many blocks before the truncated one.
    data = b"".join(json.dumps({"text": random.Random(n).randbytes(30_000).hex()}).encode() + b"\n" for n in range(50))
    (tmp_path / "u.jsonl.gz").write_bytes(gzip.compress(data)[:-20])
    made = read(tmp_path, tmp_path / "u.jsonl.gz")
    assert 10 <= made.rows() <= 49
    assert rules(made) == ["truncated_record"]
    assert "u.jsonl.gz, row" in made.read("dropped")["detail"][0].as_py()


def test_jsonl_that_cannot_be_right_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n{"body": "y"}\n')
    with pytest.raises(PunaError, match=r"2 not_a_page; a row is .*ingest\.text_column.*; 1 \.jsonl \(a\.jsonl, row 1: no text in a field 'text'; it has body\)"):
        read(tmp_path, tmp_path / "a.jsonl")
    (tmp_path / "b.csv").write_text("body,url\nx,https://x.org\n")
    with pytest.raises(PunaError, match=r"b\.csv, row 1: no text in a field 'text'; it has body, url"):
        read(tmp_path, tmp_path / "b.csv")


@pytest.mark.parametrize(("ending", "before", "delimiter"), [("csv", "", ","), ("csv", "\ufeff", ";"), ("tsv", "", "\t"), ("csv", "", "\t"), ("csv", "", "|")])
def test_a_table_of_text(tmp_path, ending, before, delimiter):
    """Cells may contain the delimiter, quotes and line breaks; a malformed record is dropped with its position."""
    texts = ["a, b; c\td|e", 'says "so"', "two\nlines", "last"]
    cells = [f'"{text.replace(chr(34), chr(34) * 2)}"{delimiter}https://x.org/{n}' for n, text in enumerate(texts)]
    (tmp_path / f"t.{ending}").write_text(before + f"text{delimiter}url\n" + "\n".join([*cells, "one cell"]) + "\n")
    made = read(tmp_path, tmp_path / f"t.{ending}")
    found = {row["url"]: row["body"].decode() for row in made.read().to_pylist()}
    assert found == {f"https://x.org/{n}": text for n, text in enumerate(texts)}
    (dropped,) = made.read("dropped").to_pylist()
    assert dropped["rule"] == "malformed_record" and dropped["detail"].endswith("row 5: has 1 cells, but the header line has 2")


@pytest.mark.parametrize(("ending", "delimiter"), [("csv", ","), ("tsv", "\t")])
def test_rows_behind_a_quote_that_is_not_closed_are_told(tmp_path, ending, delimiter):
    rows = [f"{n}{delimiter}page number {n}" for n in range(30)]
    rows[5], rows[20] = f'5{delimiter}"An open quote', f'20{delimiter}He said "yes" to it'
    (tmp_path / f"t.{ending}").write_text(f"id{delimiter}text\n" + "\n".join(rows) + "\n")
    made = read(tmp_path, tmp_path / f"t.{ending}")
    (dropped,) = made.read("dropped").to_pylist()
    assert made.rows() == 14 and "row 6: cannot be read" in dropped["detail"]
    assert dropped["detail"].endswith("; 16 lines from line 7 on are passed over: a quote is not closed")


def test_fields_of_an_input_that_is_not_there_are_refused(tmp_path):
    (tmp_path / "t.jsonl").write_text('{"text": "x"}\n')
    with pytest.raises(PunaError, match="ingest.inputs names 'news', but the inputs are named t"):
        read(tmp_path, tmp_path / "t.jsonl", config=IngestConfig(inputs={"news": {"text": "body"}}))


def test_one_array_of_json(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "x"}, 3, {"text": "y"}]')
    made = read(tmp_path, tmp_path / "a.json")
    assert sorted(row["url"] for row in made.read().to_pylist()) == ["file:///a/a.json/0", "file:///a/a.json/2"] and rules(made) == ["not_a_page"]


@pytest.mark.parametrize("ending", ["json", "jsonl", "json.gz"])
@pytest.mark.parametrize("text", [
    '\ufeff\n\n{\n  "text": "x",\n  "more": {\n    "a": [1]\n  }\n}\n{"text": "y"} {"text": "z"}\n',
    '\n [\n{"text": "x"},\n{\n"text": "y"},\n{"text": "z"}\n]\n',
    '{"text": "x"}\n\n{"text": "y"}\n{"text": "z"}', '[{"text": "x"}]\n[\n  {"text": "y"},\n  {"text": "z"}\n]', '{"text": "x"},\n{"text": "y"},\n{"text": "z"}',
])  # fmt: skip
def test_json_is_read_however_it_is_laid_out(tmp_path, ending, text):
    data = text.encode()
    (tmp_path / f"t.{ending}").write_bytes(gzip.compress(data) if ending.endswith("gz") else data)
    made = read(tmp_path, tmp_path / f"t.{ending}")
    assert sorted(made.read()["body"].to_pylist()) == [b"x", b"y", b"z"] and rules(made) == []
    assert len(set(made.read()["url"].to_pylist())) == 3


def test_a_broken_document_of_json_is_one_fault_with_its_place(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    lines = ["{", *[f'  "field{n}": {n},' for n in range(50)], '  "text" "x"', *[f'  "more{n}": {n},' for n in range(50)], '  "end": 1', "}"]
    (folder / "broken.json").write_text("\n".join(lines))
    (folder / "cut.json").write_text("\n".join(lines[:20]))
    (folder / "long.json").write_text(json.dumps({"text": "word " * 2000}, indent=1))
    (folder / "good.json").write_text('[\n{"text": "a"},\n{"text" 7},\n{"text": "b"}\n]')
    made = read(tmp_path, folder, config=IngestConfig(max_body_bytes=1024))
    assert sorted(made.read()["body"].to_pylist()) == [b"a", b"b"]
    assert {row["rule"]: row["detail"] for row in made.read("dropped").to_pylist() if "good" not in row["detail"]} == {
        "malformed_record": "broken.json, row 1: is not JSON: Expecting ':' delimiter, at line 52, column 10; the rest of the file is not read",
        "truncated_record": "cut.json, row 1: is not JSON: Expecting property name enclosed in double quotes, at line 20, column 17; the rest of the file is not read",
        "record_too_large": "long.json, row 1: is longer than 6144 bytes; the rest of the file is not read",
    }
    (fault,) = [row["detail"] for row in made.read("dropped").to_pylist() if "good" in row["detail"]]
    assert fault == "good.json, row 2: is not JSON: Expecting ':' delimiter, at line 3, column 9"


def test_files_without_a_page_are_told_apart(tmp_path):
    """Every record is a page or a dropped row; files without any page are counted by file extension, with a reason."""
    folder = tmp_path / "in"
    (folder / "meta").mkdir(parents=True)
    for n in range(7):
        (folder / "meta" / f"package{n}.json").write_text(json.dumps({"name": f"p{n}", "version": "1.0"}, indent=2))
    for name, body in {"a.png": b"\x89PNG", "style.css": b"a {}", "poetry.lock": b"x"}.items():
        (folder / name).write_bytes(body)
    (folder / "rows.jsonl").write_text('{"text": "a page"}\n{"name": "none"}\n')
    (folder / "wrong.json").write_text("{")
    (folder / "ids.json").write_text('[1, [{"text": "nested"}], "x"]')
    made = read(tmp_path, folder)
    metrics = made.manifest.metrics
    assert made.rows() == 1 and rules(made) == ["content_type", *["not_a_page"] * 13, "truncated_record"]
    assert metrics["files"] == 13 and metrics["files_without_page"] == 11
    assert metrics["files_without_page_are"].startswith(
        "8 .json (ids.json, row 1: is a int, not an object with fields | meta/package0.json, row 1: no text in a field 'text'"
    )
    assert re.search(r"\| meta/package1\.json[^|]*\| …\); 1 \.css \(style\.css: text/css", metrics["files_without_page_are"])


def test_saved_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"text": [f"text {n}" for n in range(10)], "url": [f"https://a.example.net/{n}" for n in range(10)]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"), num_shards=2)
    made = read(tmp_path, tmp_path / "saved")
    assert sorted(made.read()["body"].to_pylist()) == sorted(t.encode() for t in rows["text"])
    assert rules(made) == []


def test_streaming_data_sets(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    for shard in range(2):
        lines = [json.dumps({"text": f"text {shard} {n}"}) for n in range(5)]
        (tmp_path / f"part-{shard}.jsonl").write_text("\n".join(lines))
    load = datasets.load_dataset
    files = [str(tmp_path / f"part-{shard}.jsonl") for shard in range(2)]

    def local(name, subset, **how):
        assert (name, subset, how["revision"]) == ("someone/texts", None, "v1")
        how.pop("revision")
        return load("json", data_files=files, cache_dir=str(tmp_path / "cache"), **how)

    monkeypatch.setattr(datasets, "load_dataset", local)
    external = External("texts", "hf://datasets/someone/texts@v1", (), "0" * 64)
    made = execute(ingest, IngestConfig(), {"inputs": [external]}, Store.open(tmp_path / "store"))
    assert made.rows() == 10
    assert "file:///texts/train/1/4" in made.read()["url"].to_pylist()


def test_files_of_unknown_name_are_read_by_their_first_bytes(tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "one").write_bytes(gzip.compress(page(1)))
    (folder / "two").write_bytes(page(2))
    pq.write_table(pa.table({"text": ["three"]}), folder / "three")
    made = read(tmp_path, folder)
    assert made.rows() == 3


@pytest.mark.parametrize("name", ["old.arc", "old.arc.gz", "old"])
def test_an_arc_archive_is_refused_as_such(tmp_path, name):
    data = b"filedesc://old.arc 0.0.0.0 20080101000000 text/plain 76\n1 0 Alexa Internet\nURL IP-address Archive-date Content-type Archive-length\n"
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(PunaError, match=f"{name}: ARC archives are not supported; convert it to WARC"):
        read(tmp_path, tmp_path / name)


def test_random_bytes_never_break_the_reader():
    generator = random.Random(1)
    for size in (0, 1, 5, 100, 5000):
        for head in (b"", b"WARC/1.0\r\n", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\x5d\x2a\x4d\x18\x04\x00\x00\x00"):
            data = head + generator.randbytes(size)
            for found in read_warc(io.BytesIO(data), "x", 1 << 20):
                assert isinstance(found, Rejected)


def test_mutated_records_never_break_the_reader():
    generator = random.Random(2)
    whole = b"".join(page(n) for n in range(3))
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        for found in read_warc(io.BytesIO(bytes(data)), "x", 1 << 20):
            assert isinstance(found, Page | Rejected)
            if isinstance(found, Page):
                found.url.encode()


def chunks(body, size, beside=b""):
    """Return a body in chunked encoding."""
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x%s\r\n%s\r\n" % (len(piece), beside, piece) for piece in [*pieces, b""])


TEXT = b"<p>" + b" ".join(b"%d apples" % n for n in range(300)) + b"</p>"
BARE = zlib.compressobj(wbits=-15)
DEFLATED = BARE.compress(TEXT) + BARE.flush()
SENT = {
    "deflate": (zlib.compress(TEXT), "deflate", ""),
    "deflate, no header": (DEFLATED, "deflate", ""),
    "deflate, decoded": (b"a text", "deflate", ""),
    "gzip in members": (gzip.compress(TEXT[:99]) + gzip.compress(TEXT[99:]), "gzip", ""),
    "gzip in empty members": (gzip.compress(b"") * 200_000 + gzip.compress(TEXT), "gzip", ""),
    "gzip, something behind it": (gzip.compress(TEXT) + b"<!-- 12 ms -->", "x-gzip", ""),
    "gzip twice": (gzip.compress(gzip.compress(TEXT)), "gzip, gzip", ""),
    "zstd in frames": (zstandard.compress(TEXT[:99]) + zstandard.compress(TEXT[99:]), "zstd", ""),
    "no encoding": (TEXT, "utf-8", ""),
    "chunks": (chunks(TEXT, 100), "", "chunked"),
    "chunks, something beside their sizes": (chunks(TEXT, 100, b";name=x"), "", "Chunked"),
    "chunks, trailer": (chunks(TEXT, 999)[:-2] + b"Expires: 0\r\n\r\n", "", "chunked"),
    "chunks of gzip": (chunks(gzip.compress(TEXT), 30), "gzip", "chunked"),
    "gzip by the server on the way": (chunks(gzip.compress(TEXT), 30), "", "gzip, chunked"),
    "chunks, joined": (TEXT, "", "chunked"),
    "chunks, joined, which begins like one": (b"ace\nof spades", "", "chunked"),
}


@pytest.mark.parametrize("how", SENT)
def test_bodies_are_read_as_they_were_sent(how):
    sent, encoding, transfer = SENT[how]
    (only,) = read_warc(io.BytesIO(record(sent, Content_Encoding=encoding, Transfer_Encoding=transfer)), "x", 8 << 20)
    assert isinstance(only, Page) and only.body == (TEXT if len(sent) > 20 else sent)


def test_of_a_body_in_chunks_that_is_cut_off_stays_what_came():
    whole = chunks(TEXT, 100)
    for cut in range(len(whole)):
        (only,) = read_warc(io.BytesIO(record(whole[:cut], Transfer_Encoding="chunked")), "x", 1 << 20)
        assert isinstance(only, Page)
        came = sum(min(100, max(0, cut - at * 106 - 4)) for at in range(len(TEXT) // 100)) + max(0, min(len(TEXT) % 100, cut - len(TEXT) // 100 * 106 - 4))
        # A truncated first chunk may also be plain text.
        assert only.body == (TEXT[:came] if cut >= 106 else whole[:cut])


@pytest.mark.parametrize("seed", range(4))
def test_deflate_that_is_damaged_or_cut_off_is_no_text(seed):
    random = np.random.default_rng(seed)
    for _ in range(50):
        cut = int(random.integers(64, len(DEFLATED)))
        (only,) = read_warc(io.BytesIO(record(DEFLATED[:cut], Content_Encoding="deflate")), "x", 1 << 20)
        assert isinstance(only, Rejected) and only.rule == "undecodable_body" and "truncated deflate body" in only.detail
    damaged = DEFLATED[:40] + random.bytes(400)
    with pytest.raises(zlib.error):
        zlib.decompressobj(-15).decompress(damaged)
    (only,) = read_warc(io.BytesIO(record(damaged, Content_Encoding="deflate")), "x", 1 << 20)
    assert isinstance(only, Rejected) and only.rule == "undecodable_body" and "damaged deflate body" in only.detail


@pytest.mark.parametrize("text", ["a text", "Größe\tund\r\nMaß " * 99, "\x1b[1mbold\x1b[0m"])
@pytest.mark.parametrize("code", ["utf-8", "latin-1", "utf-16"])
def test_text_that_was_decoded_is_no_damaged_deflate(text, code):
    (only,) = read_warc(io.BytesIO(record(text.encode(code), Content_Encoding="deflate")), "x", 1 << 20)
    assert isinstance(only, Page) and only.body == text.encode(code)


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)])
def test_a_packed_body_that_is_cut_off_is_none(encoding, pack):
    whole = pack(TEXT)
    for cut in range(4, len(whole)):
        (only,) = read_warc(io.BytesIO(record(whole[:cut], Content_Encoding=encoding)), "x", 1 << 20)
        if encoding == "gzip" and cut >= len(whole) - 8:  # everything but checksum and length is present
            assert isinstance(only, Page) and only.body == TEXT
        else:
            assert isinstance(only, Rejected) and only.rule == "undecodable_body" and f"truncated {encoding} body" in only.detail


@pytest.mark.parametrize("line_end", ["\r\n", "\n"])
@pytest.mark.parametrize("status", ["HTTP/1.1 200 OK", "HTTP/2 200", "http/1.0 200", "ICY 200 OK"])
def test_headers_as_servers_write_them(status, line_end):
    head = line_end.join([status, "content-type: text/html;", "  charset=utf-8", "Content-Type: text/plain", "", ""])
    block = head.encode() + b"<p>\r\n\r\ntext</p>"
    start = "WARC/1.0\r\nWARC-Type: response\r\nWARC-Date: 2024-05-01T10:00:00Z\r\nWARC-Target-URI: http://x.org/\r\n"
    start += f"Content-Type: application/http\r\nContent-Length: {len(block)}\r\n\r\n"
    (only,) = read_warc(io.BytesIO(start.encode() + block + b"\r\n\r\n"), "x", 1 << 20)
    assert isinstance(only, Page) and (only.content_type, only.charset, only.body) == ("text/html", "utf-8", b"<p>\r\n\r\ntext</p>")


def test_files_of_packed_pages(tmp_path):
    """Each page is complete or missing; for gzip, only the final checksum may be missing."""
    packed = gzip.compress(TEXT)
    files = {
        "members.html.gz": gzip.compress(TEXT[:50]) + gzip.compress(TEXT[50:]), "no_checksum.html.gz": packed[:-8], "cut.html.gz": packed[:-9],
        "wrong.html.gz": packed[:-6] + b"\0\0" + packed[-4:], "frames.html.zst": zstandard.compress(TEXT[:50]) + zstandard.compress(TEXT[50:]),
        "cut.html.zst": zstandard.compress(TEXT)[:-9],
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    for name, data in files.items():
        (tmp_path / "in" / name).write_bytes(data)
    made = read(tmp_path, tmp_path / "in")
    assert {row["url"].rsplit("/", 1)[1]: row["body"] for row in made.read().to_pylist()} == dict.fromkeys(
        ("members.html.gz", "no_checksum.html.gz", "frames.html.zst"), TEXT
    )
    assert {row["detail"].split(":")[0]: row["rule"] for row in made.read("dropped").to_pylist()} == dict.fromkeys(
        ("cut.html.gz", "wrong.html.gz", "cut.html.zst"), "truncated_record"
    )


def test_bodies_do_not_pass_through_the_driver(tmp_path, monkeypatch):
    """Also with repeated pages, and with several chunks."""
    from puna.stages.contract import StageRun
    from puna.stages.curate import ingest as module

    lines = [json.dumps({"text": f"page {n % 40}" * 30, "url": f"https://a.example.net/{n % 40}"}) for n in range(60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    whole = read(tmp_path / "one", tmp_path / "rows.jsonl")
    monkeypatch.setattr(module, "CHUNK_BYTES", 3000)
    written = []
    original = StageRun.write
    monkeypatch.setattr(StageRun, "write", lambda self, table, name=None: written.append(name) or original(self, table, name))
    made = read(tmp_path / "two", tmp_path / "rows.jsonl")
    assert written == []
    assert made.data_digest == whole.data_digest and made.rows() == 40 and made.rows("dropped") == 20
    assert made.manifest.metrics == whole.manifest.metrics
    assert made.manifest.metrics["body_bytes"] == sum(len(body) for body in made.read()["body"].to_pylist())


def test_a_record_whose_reading_raises_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = warc.decode

    def decoded(body: bytes, encodings: str, limit: int) -> bytes:
        if b"second" in body:
            raise IndexError("index out of range")
        return decode(body, encodings, limit)

    monkeypatch.setattr(warc, "decode", decoded)
    first, second, third = read_warc(io.BytesIO(record(b"first") + record(b"second") + record(b"third")), "x", 1_000_000)
    assert isinstance(first, Page) and isinstance(third, Page) and (first.body, third.body) == (b"first", b"third")
    assert isinstance(second, Rejected) and second.rule == "failed" and second.detail.endswith("IndexError: index out of range")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_body_that_unpacks_without_end_is_refused(encoding: str) -> None:
    """A few bytes unpack to a million letters; the Brotli body was packed by its reference program."""
    text = b"a" * 1_000_000
    packed = {"gzip": gzip.compress(text), "deflate": zlib.compress(text), "br": bytes.fromhex("5b3f428f5f222c1e0b04f2731e00")}[encoding]
    whole = record(packed, Content_Encoding=encoding)
    (page,) = read_warc(io.BytesIO(whole), "x", 1_000_000)
    assert isinstance(page, Page) and page.body == text
    (refused,) = read_warc(io.BytesIO(whole), "x", 999_999)
    assert isinstance(refused, Rejected) and refused.rule == "undecodable_body"
    assert f"the {encoding} body decompresses to more than 999999 bytes" in refused.detail
