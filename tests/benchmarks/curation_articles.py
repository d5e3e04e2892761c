"""Extraction of articles and news, compared with trafilatura and Resiliparse, on pages from the evaluation sets of other extractors.

    python tests/benchmarks/curation_articles.py --data FOLDER [--json]
    python tests/benchmarks/curation_articles.py --data FOLDER --write OUT
    python tests/benchmarks/curation_articles.py --data FOLDER --clean [--recipe FILE] [--all-types] [--json]

FOLDER holds `web_readability/test-pages.tar.zst` (source.html, expected.html), `web_newspaper/newspaper_goose.tar.zst` (the tests of
newspaper, newspaper4k and goose; only expected texts of at least 100 words count) and `web_trafilatura/pages.tar.zst` with
`evaldata.json.zst` (snippets that a text must or must not contain). Pages are split in two halves by a hash of their site: rules were
written and weights trained on the half `development`, which `--write` exports for training; figures are for the other half, `held_out`.

`f1` is the mean over pages of the F1 of bags of words. `shingles_f1` is the metric of Scrapinghub's article extraction benchmark: bags of
4-grams of words, precision and recall averaged over pages, then the F1 of the two averages. Snippets: F1 over all snippets.

`--clean` runs `puna clean` with its shipped recipe over the development articles of WCXB (`web_wcxb_dev/dev_html.tar.zst`,
`dev_truth.jsonl.zst`). `article_words_kept` is the share of annotated words whose page is among the output documents;
`article_words_written` is the share that occurs in these documents' texts. `dropped` has the share that each rule dropped. `--all-types`
cleans pages of all types (forums, listings, products) and counts for each type the documents (`documents TYPE`), their words (`words
TYPE`), and the words that are not in the annotated text (`junk TYPE`). `--recipe`: a recipe to use instead of `clean`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import re
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg"), str(Path(__file__).parent)]

HALVES = ("development", "held_out")
GRAM = 4  # words of a shingle
MIN_WORDS = 100  # minimum words of an expected text; shorter ones are not whole texts
WORD = re.compile(r"\w+")
DIGITS = re.compile(r"[\W_]*\d*$")


class ArticlePage(NamedTuple):
    """A page. `truth`: its expected text, or None if `wanted` and `unwanted` snippets are given instead."""

    dataset: str
    name: str
    site: str
    body: bytes
    truth: str | None
    wanted: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()

    @property
    def half(self) -> str:
        """Return the half that the page belongs to."""
        return HALVES[hashlib.sha256(self.site.encode()).digest()[1] % 2]


def read(folder: Path) -> list[ArticlePage]:
    """Return all pages of the available sets, ordered by set and name."""
    makers = {"web_readability": _readability, "web_newspaper": _newspaper, "web_trafilatura": _trafilatura}
    pages = [page for name, maker in makers.items() if (folder / name).is_dir() for page in maker(folder / name)]
    return sorted(pages, key=lambda page: (page.dataset, page.name))


def domain(address: str) -> str:
    """Return the last two labels of an address's host."""
    return ".".join((urlsplit(address).hostname or address).split(".")[-2:])


def shingle_scores(text: str, truth: str) -> tuple[float, float]:
    """Return precision and recall of bags of 4-grams of words for one page, as in Scrapinghub's article extraction benchmark."""
    found, wanted = _shingles(text), _shingles(truth)
    right = (found & wanted).total()
    if found == wanted:
        return 1.0, 1.0
    return right / found.total() if found else 0.0, right / wanted.total() if wanted else 0.0


def _shingles(text: str) -> Counter[tuple[str, ...]]:
    words = WORD.findall(text)
    if len(words) < GRAM:
        return Counter([tuple(words)] if words else [])
    return Counter(zip(*(words[k:] for k in range(GRAM)), strict=False))


def figures(pages: list[ArticlePage]) -> dict[str, float]:
    """Return the figures of each set by system (f1, shingles_precision, shingles_recall, shingles_f1 or snippets_...), and each set's
    pages."""
    import peers
    from resiliparse.extract.html2text import extract_plain_text

    from puna.models.extraction.clean import decode
    from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text

    def ours(body: bytes) -> str:
        try:
            return page_text(body, "text/html", None, ExtractConfig()).text
        except Unreadable:
            return ""

    ours(pages[0].body)
    began = time.process_time()
    texts = {"extract": [ours(page.body) for page in pages]}
    found = {"extract_pages_s": len(pages) / (time.process_time() - began)}
    texts["resiliparse"] = [str(extract_plain_text(decode(page.body, None, html=True), main_content=True)) for page in pages]
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"{number}.html" for number in range(len(pages))]
        for file, page in zip(files, pages, strict=True):
            file.write_bytes(page.body)
        theirs = peers.run("trafilatura", "peer_extract_trafilatura.py", files=[str(file) for file in files])
    texts["trafilatura"] = theirs["texts"]
    found["trafilatura_pages_s"] = len(pages) / theirs["seconds"]
    for dataset in sorted({page.dataset for page in pages}):
        chosen = [number for number, page in enumerate(pages) if page.dataset == dataset]
        found[f"{dataset}_pages"] = float(len(chosen))
        for system, made in texts.items():
            scores = _scores([made[number] for number in chosen], [pages[number] for number in chosen])
            found |= {f"{dataset}_{system}_{name}": value for name, value in scores.items()}
    return found


def _scores(texts: list[str], pages: list[ArticlePage]) -> dict[str, float]:
    """Return the figures of one system on one set."""
    from tests.benchmarks.train_extraction import word_f1

    if pages[0].truth is None:
        right = sum(snippet in text for text, page in zip(texts, pages, strict=True) for snippet in page.wanted)
        wrong = sum(snippet in text for text, page in zip(texts, pages, strict=True) for snippet in page.unwanted)
        wanted = sum(len(page.wanted) for page in pages)
        return {
            "snippets_precision": right / (right + wrong),
            "snippets_recall": right / wanted,
            "snippets_f1": 2 * right / (right + wrong + wanted),
        }
    pairs = [(text, page.truth or "") for text, page in zip(texts, pages, strict=True)]
    shingles = [shingle_scores(text, truth) for text, truth in pairs]
    precision, recall = (sum(side) / len(shingles) for side in zip(*shingles, strict=True))
    found = {"f1": sum(word_f1(text, truth) for text, truth in pairs) / len(pairs)}
    found |= {"shingles_precision": precision, "shingles_recall": recall}
    return found | {"shingles_f1": 2 * precision * recall / (precision + recall)}


def write(pages: list[ArticlePage], out: Path) -> None:
    """Write pages in the layout that the extractor's training reads: `html/ID.html`, `truth.jsonl`."""
    (out / "html").mkdir(parents=True, exist_ok=True)
    rows = []
    for page in pages:
        name = f"{page.dataset}-{hashlib.sha256(page.name.encode()).hexdigest()[:12]}"
        (out / "html" / f"{name}.html").write_bytes(page.body)
        truth = {"main_content": page.truth, "with": page.wanted, "without": page.unwanted}
        row = {"file_id": name, "url": f"http://{page.site}/", "_internal": {"page_type": {"primary": "article"}}, "ground_truth": truth}
        rows.append(json.dumps(row) + "\n")
    (out / "truth.jsonl").write_text("".join(rows), encoding="utf-8")


# --- the sets --------------------------------------------------------------------------------------------


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files in a packed set."""
    import zstandard

    with archive.open("rb") as file, tarfile.open(fileobj=zstandard.ZstdDecompressor().stream_reader(file), mode="r|") as members:
        for member in members:
            content = members.extractfile(member)
            if content is not None:
                yield member.name, content.read()


def _unpacked(file: Path) -> bytes:
    import zstandard

    with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(file.read_bytes())) as reader:
        return bytes(reader.read())


def _readability(folder: Path) -> Iterator[ArticlePage]:
    from resiliparse.extract.html2text import extract_plain_text

    pages: dict[str, dict[str, bytes]] = {}
    for path, content in _files(folder / "test-pages.tar.zst"):
        pages.setdefault(Path(path).parent.name, {})[Path(path).name] = content
    for name, files in pages.items():
        if {"source.html", "expected.html"} <= files.keys():
            expected = files["expected.html"].decode("utf-8", "replace")
            truth = extract_plain_text(expected, main_content=False, list_bullets=False, alt_texts=False)
            yield ArticlePage("readability", name, DIGITS.sub("", name), files["source.html"], truth)


def _newspaper(folder: Path) -> Iterator[ArticlePage]:
    pages: dict[str, dict[str, bytes]] = {}
    for path, content in _files(folder / "newspaper_goose.tar.zst"):
        if Path(path).parent.name in ("html", "text", "txt", "content"):
            pages.setdefault(f"{Path(path).parts[-5]}/{Path(path).stem}", {})[Path(path).suffix] = content
    for name, files in pages.items():
        if ".html" not in files:
            continue
        truth = files.get(".txt", b"").decode("utf-8", "replace")
        if name.startswith("tgoose/") and ".json" in files:
            truth = (json.loads(files[".json"])["expected"] or {}).get("cleaned_text") or ""
        if len(WORD.findall(truth)) >= MIN_WORDS:
            dataset = "goose" if name.startswith("tgoose/") else "newspaper"
            site = DIGITS.sub("", Path(name).name.removeprefix("test_")).split(".")[0]
            yield ArticlePage(dataset, name, site, files[".html"], truth)


def _trafilatura(folder: Path) -> Iterator[ArticlePage]:
    bodies = {Path(path).name: content for path, content in _files(folder / "pages.tar.zst")}
    for address, known in json.loads(_unpacked(folder / "evaldata.json.zst")).items():
        if known["file"] in bodies:
            yield ArticlePage(
                "trafilatura", known["file"], domain(address), bodies[known["file"]], None, tuple(known["with"]), tuple(known["without"])
            )


def clean_articles(folder: Path, recipe: str, all_types: bool) -> dict[str, float]:
    """Return the shares of the annotated words of WCXB's development articles that `puna clean` keeps, and drops by rule.

    `all_types`: also clean pages of other types, and count by type the documents, their words and their junk words.
    """
    from puna.flows.cli.clean import clean
    from puna.storage import Store

    archive = folder / "web_wcxb_dev"
    rows = [json.loads(line) for line in _unpacked(archive / "dev_truth.jsonl.zst").splitlines()]
    rows = [row for row in rows if "file_id" in row and row["ground_truth"].get("main_content")]
    types = {f"https://page.example/{row['file_id']}": row["_internal"]["page_type"]["primary"] for row in rows}
    every = {f"https://page.example/{row['file_id']}": Counter(WORD.findall(row["ground_truth"]["main_content"])) for row in rows}
    truth = {url: words for url, words in every.items() if types[url] == "article"}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with (place / "pages.jsonl").open("w", encoding="utf-8") as out:
            for path, body in _files(archive / "dev_html.tar.zst"):
                url = f"https://page.example/{Path(path).stem}"
                if url in (every if all_types else truth):
                    out.write(json.dumps({"url": url, "html": body.decode("utf-8", "replace")}) + "\n")
        store = Store.open(place / "store")
        with contextlib.redirect_stdout(sys.stderr):
            made = clean([str(place / "pages.jsonl")], place / "out", store, recipe=recipe, say=lambda _: None, quiet=True)
        texts = {row["url"]: Counter(WORD.findall(row["text"])) for row in map(json.loads, made.documents.open(encoding="utf-8"))}
        gone = [json.loads(line) for line in made.dropped.open(encoding="utf-8")]
    total = sum(words.total() for words in truth.values())
    kept = sum(words.total() for url, words in truth.items() if url in texts)
    written = sum((words & texts[url]).total() for url, words in truth.items() if url in texts)
    found = {"articles": len(truth), "article_words_kept": kept / total, "article_words_written": written / total}
    for row in gone:
        name = f"dropped {row['step']}.{row['rule']}"
        found[name] = found.get(name, 0.0) + truth.get(row["url"], Counter()).total() / total
    for url, words in texts.items() if all_types else ():
        counts = {"documents": 1, "words": words.total(), "junk": (words - every[url]).total()}
        for name, count in counts.items():
            found[f"{name} {types[url]}"] = found.get(f"{name} {types[url]}", 0.0) + count
    return found


def main() -> None:
    """Measure and print, or write the development half for training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("PUNA_ARTICLES_DATA"), help="folder of the sets")
    parser.add_argument("--write", type=Path, metavar="OUT", help="write the half `development` for training instead")
    parser.add_argument("--clean", action="store_true", help="measure what `puna clean` keeps of annotated development articles")
    parser.add_argument("--recipe", default="clean", help="recipe of `puna clean`, a name or a YAML file")
    parser.add_argument("--all-types", action="store_true", help="clean pages of all types, and count by type what is junk")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.clean:
        if arguments.data is None or not (Path(arguments.data) / "web_wcxb_dev").is_dir():
            sys.exit("articles: no web_wcxb_dev; give --data FOLDER or set PUNA_ARTICLES_DATA (see --help)")
        _print(clean_articles(Path(arguments.data), arguments.recipe, arguments.all_types), arguments.json)
        return
    if arguments.data is None or not read(Path(arguments.data)):
        sys.exit("articles: no annotated pages; give --data FOLDER or set PUNA_ARTICLES_DATA (see --help)")
    if arguments.write is not None:
        write([page for page in read(Path(arguments.data)) if page.half == "development"], arguments.write)
        return
    found = figures([page for page in read(Path(arguments.data)) if page.half == "held_out"])
    _print(found, arguments.json)


def _print(found: dict[str, float], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:44} {value:.4f}" if value < 2 else f"{name:44} {value:.0f}")


if __name__ == "__main__":
    main()
