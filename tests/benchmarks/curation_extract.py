"""Extraction of main text: F1 of words and pages a second, beside trafilatura and Resiliparse on the same pages.

    python tests/benchmarks/curation_extract.py --data FOLDER [--limit N] [--unseen-sites] [--json]

FOLDER (or the environment's PUNA_EXTRACTION_DATA) is a set of annotated pages as WCXB has
them: `html/ID.html`, and `ground-truth/ID.json` or `truth.jsonl` with `file_id`, `_internal.page_type.primary`,
`ground_truth.main_content`; or the two packed, `*html.tar.zst` and `*truth.jsonl.zst`. Pages that
the weights were trained on (they carry a list of them) are scored by weights trained here on the pages of other
domains, one fold of four; that needs lightgbm and minutes. The speed is of the whole stage on one thread: decoding, bounds,
parsing, reading, judging, text. trafilatura runs in an environment of its own (`peers.py`).

`--unseen-sites`: `f1_unseen_sites` over all pages, each scored by weights trained on the three folds that hold no page of its domain; the
same of trafilatura on the same pages, of each page type, and `lead_unseen_sites`.
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

HELD_OUT = 0  # the fold that is scored where the pages are those of training


def prepare(data: Path | None = None) -> None:
    """Exit with what is missing, before anything is measured: the pages, lightgbm, the peer's environment."""
    import peers

    _named(data)
    if find_spec("lightgbm") is None:
        sys.exit("extraction: training on three quarters of the pages needs lightgbm; install the extra `training`")
    peers.python("trafilatura")


def figures(data: Path | None = None, limit: int | None = None) -> dict[str, float]:
    """extract_f1 and extract_pages_s, the same of the peers (trafilatura_f1, ...), F1 by type (extract_f1_article, ...),
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
    """Return F1 of words over all pages, each by weights that saw no page of its domain, and trafilatura's."""
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
    """CPU seconds for all pages, after one that compiles and loads, and the texts."""
    system(bodies[0])
    began = time.process_time()
    made = [system(body) for body in bodies]
    return time.process_time() - began, made


def _scores(name: str, seconds: float, made: list[str], rows: list[dict[str, Any]]) -> dict[str, float]:
    """Pages a second and F1 of one system, over all pages and by type."""
    from tests.benchmarks.train_extraction import word_f1

    scores = [word_f1(text, row["ground_truth"].get("main_content") or "") for text, row in zip(made, rows, strict=True)]
    found = {f"{name}_pages_s": len(rows) / seconds, f"{name}_f1": sum(scores) / len(scores)}
    kinds = [row["_internal"]["page_type"]["primary"] for row in rows]
    for kind in sorted(set(kinds)):
        of_kind = [score for score, other in zip(scores, kinds, strict=True) if other == kind]
        found[f"{name}_f1_{kind}"] = sum(of_kind) / len(of_kind)
    return found


def _named(data: Path | None) -> Path:
    """The folder of annotated pages that was named."""
    named = data or os.environ.get("PUNA_EXTRACTION_DATA")
    if not named:
        sys.exit("extraction: no annotated pages; give --data FOLDER or set PUNA_EXTRACTION_DATA (see curation_extract.py --help)")
    if not Path(named).is_dir():
        sys.exit(f"extraction: {named} is no folder; give --data FOLDER or set PUNA_EXTRACTION_DATA (see curation_extract.py --help)")
    return Path(named)


def _rows(data: Path | None) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of pages and the annotations of those that are there."""
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
    """The folder; where it holds `*html.tar.zst` and `*truth.jsonl.zst`, a folder for this run with what is in them."""
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
    """The rows that can be scored honestly; with their texts where the weights that come with the code have seen the pages."""
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
    """Return the annotated pages as training reads them."""
    from tests.benchmarks.train_extraction import corpus, read

    with tempfile.TemporaryDirectory() as scratch:
        truth = Path(scratch) / "truth.jsonl"
        truth.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        return corpus(read(folder, truth))


def main() -> None:
    """Measure and print."""
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
