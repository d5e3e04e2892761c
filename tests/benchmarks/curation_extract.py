"""Extraction of main text: F1 of words and pages per second, compared with trafilatura and Resiliparse on the same pages.

    python tests/benchmarks/curation_extract.py --data FOLDER [--limit N] [--unseen-sites] [--json]

FOLDER (or the environment variable PUNA_EXTRACTION_DATA) is a set of annotated pages in WCXB's layout: `html/ID.html`, and
`ground-truth/ID.json` or `truth.jsonl` with `file_id`, `_internal.page_type.primary`, `ground_truth.main_content`; or both packed, as
`*html.tar.zst` and `*truth.jsonl.zst`. Pages on which the shipped weights were trained (the weights list them) are scored with weights
trained here on the pages of other domains, for one fold of four; that needs lightgbm and minutes. The speed is that of the whole stage on
one thread: decoding, bounds, parsing, scanning, classification, text. trafilatura runs in a separate environment (`peers.py`).

`--unseen-sites`: `f1_unseen_sites` over all pages, each scored with weights trained on the three folds without pages of its domain; the
same for trafilatura on the same pages, by page type; and `lead_unseen_sites`.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg"), str(Path(__file__).parent)]

HELD_OUT = 0  # the fold that is scored if the pages are those of training


def prepare(data: Path | None = None) -> None:
    """Exit with a list of what is missing (pages, lightgbm, the peer's environment) before any measurement."""
    import peers

    _named(data)
    if find_spec("lightgbm") is None:
        sys.exit("extraction: training on three quarters of the pages needs lightgbm; install the extra `training`")
    peers.python("trafilatura")


def figures(data: Path | None = None, limit: int | None = None) -> dict[str, float]:
    """Return extract_f1 and extract_pages_s, the same for the peers (trafilatura_f1, ...), F1 by type (extract_f1_article, ...), and
    extract_pages."""
    import peers
    from resiliparse.extract.html2text import extract_plain_text

    from puna.models.extraction.clean import decode
    from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text

    folder, rows = _rows(data)
    rows, texts = _unseen(folder, rows[:limit])

    def ours(body: bytes) -> str:
        try:
            return page_text(body, "text/html", None, ExtractConfig()).text
        except Unreadable:
            return ""

    def resiliparse(body: bytes) -> str:
        return str(extract_plain_text(decode(body, None, html=True), main_content=True))

    files = [folder / f"{row['file_id']}.html" for row in rows]
    bodies = [file.read_bytes() for file in files]
    seconds, made = _timed(ours, bodies)
    if texts is not None:
        made = [texts.get(row["file_id"], "") for row in rows]
    found = {"extract_pages": float(len(rows)), **_scores("extract", seconds, made, rows)}
    found |= _scores("resiliparse", *_timed(resiliparse, bodies), rows)
    theirs = peers.run("trafilatura", "peer_extract_trafilatura.py", files=[str(file.absolute()) for file in files])
    return found | _scores("trafilatura", theirs["seconds"], theirs["texts"], rows)


def unseen_sites(data: Path | None = None, limit: int | None = None) -> dict[str, float]:
    """Return the F1 of words over all pages, each scored with weights trained without its domain, and trafilatura's F1."""
    import peers

    from tests.benchmarks.train_extraction import FOLDS, unseen_texts

    folder, rows = _rows(data)
    rows = rows[:limit]
    pages = _pages(folder, rows)
    texts = {file: text for fold in range(FOLDS) for file, text in unseen_texts(pages, fold).items()}
    files = [str((folder / f"{row['file_id']}.html").absolute()) for row in rows]
    theirs = peers.run("trafilatura", "peer_extract_trafilatura.py", files=files)
    found = {"unseen_sites_pages": float(len(rows))}
    for name, made in (("f1_unseen_sites", [texts.get(row["file_id"], "") for row in rows]), ("trafilatura_f1_unseen_sites", theirs["texts"])):
        scores = _scores(name, 1.0, made, rows)
        found |= {key.replace(f"{name}_f1", name): value for key, value in scores.items() if not key.endswith("pages_s")}
    return found | {"lead_unseen_sites": found["f1_unseen_sites"] - found["trafilatura_f1_unseen_sites"]}


def _timed(system: Callable[[bytes], str], bodies: list[bytes]) -> tuple[float, list[str]]:
    """Return the CPU seconds for all pages, after a first page that compiles and loads, and the texts."""
    system(bodies[0])
    began = time.process_time()
    made = [system(body) for body in bodies]
    return time.process_time() - began, made


def _scores(name: str, seconds: float, made: list[str], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return pages per second and F1 of one system, over all pages and by type."""
    from tests.benchmarks.train_extraction import word_f1

    scores = [word_f1(text, row["ground_truth"].get("main_content") or "") for text, row in zip(made, rows, strict=True)]
    found = {f"{name}_pages_s": len(rows) / seconds, f"{name}_f1": sum(scores) / len(scores)}
    kinds = [row["_internal"]["page_type"]["primary"] for row in rows]
    for kind in sorted(set(kinds)):
        of_kind = [score for score, other in zip(scores, kinds, strict=True) if other == kind]
        found[f"{name}_f1_{kind}"] = sum(of_kind) / len(of_kind)
    return found


def _named(data: Path | None) -> Path:
    """Return the given folder of annotated pages."""
    named = data or os.environ.get("PUNA_EXTRACTION_DATA")
    if not named:
        sys.exit("extraction: no annotated pages; give --data FOLDER or set PUNA_EXTRACTION_DATA (see curation_extract.py --help)")
    if not Path(named).is_dir():
        sys.exit(f"extraction: {named} is no folder; give --data FOLDER or set PUNA_EXTRACTION_DATA (see curation_extract.py --help)")
    return Path(named)


def _rows(data: Path | None) -> tuple[Path, list[dict[str, Any]]]:
    """Return the folder of pages and the annotations of the pages in it."""
    given = _unpacked(_named(data))
    if not (given / "html").is_dir():
        sys.exit(f"{given}: no annotated pages; give --data FOLDER or set PUNA_EXTRACTION_DATA (see --help)")
    if (given / "truth.jsonl").is_file():
        rows = [json.loads(line) for line in (given / "truth.jsonl").read_text(encoding="utf-8").split("\n") if line.strip()]
    else:
        files = sorted((given / "ground-truth").glob("*.json"))
        rows = [{"file_id": file.stem} | json.loads(file.read_text(encoding="utf-8")) for file in files]
    rows = [row for row in rows if "file_id" in row and (given / "html" / f"{row['file_id']}.html").is_file()]
    if not rows:
        sys.exit(f"{given}: no annotation has a page in html/")
    return given / "html", sorted(rows, key=lambda row: row["file_id"])


def _unpacked(folder: Path) -> Path:
    """Return the folder; if it holds `*html.tar.zst` and `*truth.jsonl.zst`, return a temporary folder with their contents."""
    pages, truth = sorted(folder.glob("*html.tar.zst")), sorted(folder.glob("*truth.jsonl.zst"))
    if not pages or not truth:
        return folder
    import zstandard

    scratch = Path(tempfile.mkdtemp(prefix="puna-extraction-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    (scratch / "html").mkdir()
    with pages[0].open("rb") as file, tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(file), mode="r|") as archive:
        for member in archive:
            content = archive.extractfile(member)
            if content is not None and member.name.endswith(".html"):
                (scratch / "html" / Path(member.name).name).write_bytes(content.read())
    with truth[0].open("rb") as file, (scratch / "truth.jsonl").open("wb") as out:
        zstandard.ZstdDecompressor().copy_stream(file, out)
    return scratch


def _unseen(folder: Path, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str] | None]:
    """Return the rows that may be scored, and their texts if the shipped weights were trained on the pages."""
    from safetensors import safe_open

    from puna.models.extraction.model import WEIGHTS
    from tests.benchmarks.train_extraction import page_digest, unseen_texts

    with safe_open(WEIGHTS, "np") as file:
        seen = set(file.metadata()["trained_on"].split())
    new = [row for row in rows if page_digest((folder / f"{row['file_id']}.html").read_bytes()) not in seen]
    if len(new) >= 0.1 * len(rows):
        return new, None
    print("the weights have seen these pages: training on three quarters of their domains to score the rest", file=sys.stderr)
    texts = unseen_texts(_pages(folder, rows), HELD_OUT)
    return [row for row in rows if row["file_id"] in texts], texts


def _pages(folder: Path, rows: list[dict[str, Any]]) -> Any:
    """Return the annotated pages in the form that training reads."""
    from tests.benchmarks.train_extraction import corpus, read

    with tempfile.TemporaryDirectory() as scratch:
        truth = Path(scratch) / "truth.jsonl"
        truth.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return corpus(read(folder, truth))


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of annotated pages")
    parser.add_argument("--limit", type=int, help="take the first N pages")
    parser.add_argument("--unseen-sites", action="store_true", help="score every page by weights that saw no page of its domain")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    prepare(arguments.data)
    found = unseen_sites(arguments.data, arguments.limit) if arguments.unseen_sites else figures(arguments.data, arguments.limit)
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:.4f}" if value < 2 else f"{name:32} {value:.0f}")


if __name__ == "__main__":
    main()
