"""The shipped quality model on labels that it never saw, compared with baselines that need no model.

    python tests/benchmarks/quality.py --data FOLDER [--store FOLDER] [--json] [--write OUT]

FOLDER holds the data sets named in `stages/curate/data/grades.tsv`: `web_wcxb_dev`, `web_readability`, `web_newspaper`, `web_trafilatura`
(in the layout that `curation_articles.py` reads), `text_misc` (JSON lines), and `quality_dclm/majority_data.jsonl`, documents labelled by
people (`text`, `label` 1 or 0) and used for no training. The demo's sample comes from the store (`corpus.py`). `--write` writes the graded
texts for `python -m tests.benchmarks.train_grades`.

AUC is the chance that a good document has the higher score. `quality_auc`: on graded documents (good: 3 or more), each scored by a model
trained without its site; `quality_auc_SET`: within a set; `human_auc`: on people's labels, with the shipped weights. The same for
baselines: `_length` (characters), `_function_words` (share of eight words), `_wikipedia` (the demo's classifier, trained with Wikipedia as
good). `quality_mb_s`: speed on texts of the sample in memory, per CPU second on one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg"), str(Path(__file__).parent)]

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

GRADES = ROOT / "stages/curate/data/grades.tsv"
HUMAN = "quality_dclm/majority_data.jsonl"
FUNCTION_WORDS = frozenset(("the", "of", "and", "to", "in", "a", "is", "that"))
LEAST = 25  # minimum documents of a set, and of each class 4, for a separate figure


class Graded(NamedTuple):
    """A graded document: its set and page, how the page was read, its site and text."""

    dataset: str
    page: str
    reading: str
    grade: int
    site: str
    text: str


def graded(folder: Path) -> list[Graded]:
    """Return the graded documents whose pages are in the folder or the store, in the order of the grades."""
    lines = GRADES.read_text(encoding="utf-8").splitlines()[1:]
    grades = {(dataset, page, reading): int(grade) for dataset, page, reading, grade in (line.split("\t") for line in lines)}
    found = []
    for dataset, page, site, text_of in _pages(folder):
        for reading in ("main", "whole", "text"):
            if (key := (dataset, page, reading)) in grades and (text := text_of(reading).strip()):
                found.append(Graded(*key, grades.pop(key), site, text))
    return sorted(found)


def _pages(folder: Path) -> Iterator[tuple[str, str, str, Callable[[str], str]]]:
    """Yield set, page and site of every available page, and a function that returns its text for a way of reading."""
    import corpus
    import curation_articles
    import curation_extract

    if (wcxb := folder / "web_wcxb_dev").is_dir():
        html, rows = curation_extract._rows(wcxb)
        for row in rows:
            body = (html / f"{row['file_id']}.html").read_bytes()
            yield "wcxb", row["file_id"], curation_articles.domain(row.get("url") or row["file_id"]), _read(body)
    for page in curation_articles.read(folder):
        yield page.dataset, page.name, page.site, _read(page.body)
    for file in sorted((folder / "text_misc").glob("*.jsonl")):
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines()):
            row = json.loads(line)
            text = row.get("text") or row.get("content") or ""
            yield f"misc/{file.stem}", str(number), f"{file.stem}{number % 7}", lambda reading, text=text: text  # type: ignore[misc]
    documents = corpus.extracted().read(columns=["url", "text"])
    for url, text in zip(documents["url"].to_pylist(), documents["text"].to_pylist(), strict=True):
        yield "sample", url, curation_articles.domain(url), lambda reading, text=text: text  # type: ignore[misc]


def _read(body: bytes) -> Callable[[str], str]:
    """Return a function that returns a page's text: its main content, or all of it."""
    from resiliparse.extract.html2text import extract_plain_text

    from puna.models.extraction.clean import decode
    from puna.stages.curate.extract import ExtractConfig, Unreadable, page_text

    def read(reading: str) -> str:
        if reading == "whole":
            return str(extract_plain_text(decode(body, None, html=True), main_content=False))
        try:
            return page_text(body, "text/html", None, ExtractConfig()).text
        except Unreadable:
            return ""

    return read


def figures(folder: Path, documents: list[Graded]) -> dict[str, float]:
    """Return the figures that the module describes."""
    import pyarrow as pa

    from puna.models.classifiers.grades import GOOD, good_chances, load
    from tests.benchmarks.train_grades import Text, rows_of, unseen_grades

    wikipedia = _wikipedia()
    texts = [document.text for document in documents]
    scores = {
        "": unseen_grades(rows_of(texts), [Text(one.text, one.grade, one.site) for one in documents]),
        **{name: np.array(score(texts)) for name, score in (("_length", _lengths), ("_function_words", _function_words), ("_wikipedia", wikipedia))},
    }
    good = np.array([document.grade >= GOOD for document in documents])
    found = {"quality_documents": float(len(documents)), "quality_good": float(good.mean())}
    found |= {f"quality_auc{name}": auc(score, good) for name, score in scores.items()}
    sets = np.array([document.dataset.split("/")[0] for document in documents])
    for dataset in sorted(set(sets.tolist())):
        here = sets == dataset
        if here.sum() >= LEAST and min(good[here].sum(), (~good[here]).sum()) >= 4:
            found |= {f"quality_auc_{dataset}{name}": auc(score[here], good[here]) for name, score in scores.items()}
    if (file := folder / HUMAN).is_file():
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        labels, texts = np.array([int(row["label"]) > 0 for row in rows]), [str(row["text"]) for row in rows]
        found |= {"human_documents": float(len(rows)), "human_auc": auc(good_chances(pa.chunked_array([texts]), load()), labels)}
        for name, score in (("_length", _lengths), ("_function_words", _function_words), ("_wikipedia", wikipedia)):
            found[f"human_auc{name}"] = auc(np.array(score(texts)), labels)
    return found | {"quality_mb_s": _speed()}


def auc(scores: NDArray[np.float64], good: NDArray[np.bool_]) -> float:
    """Return the chance that a good document has the higher score; ties count half."""
    from puna.stages.curate.classifiers import classifier

    places = np.unique(scores, return_inverse=True)[1]
    return classifier.auc(classifier.score_counts(places / len(scores), good))


def _lengths(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


def _function_words(texts: list[str]) -> list[float]:
    return [sum(word.lower() in FUNCTION_WORDS for word in text.split()) / max(1, len(text.split())) for text in texts]


def _wikipedia() -> Callable[[list[str]], list[float]]:
    """Return the demo's classifier: trained on the sample with Wikipedia's documents as good; each text is scored by the model of the other
    folds."""
    import corpus
    import pyarrow as pa

    from puna.flows.engine.trace import load as recipe
    from puna.stages.contract import execute
    from puna.stages.curate.classifiers.fold_models import load_classifier
    from puna.stages.curate.train_classifier import TrainClassifierConfig, train_classifier

    settings = recipe("demo", [], "curate").one("train_quality", train_classifier, TrainClassifierConfig)
    model = load_classifier(execute(train_classifier, settings, {"documents": corpus.extracted()}, corpus.store()), "quality")

    def score(texts: list[str]) -> list[float]:
        found = model.probabilities([str(n) for n in range(len(texts))], pa.array(texts, pa.large_string()))
        return [float(value) for value in found[:, model.classes.index("good")]]

    return score


def _speed() -> float:
    """Return the MB per CPU second."""
    import corpus

    from puna.models.classifiers.grades import good_chances, load

    texts = corpus.extracted().read(columns=["text"])["text"].combine_chunks()
    best = float("inf")
    for _ in range(4):
        began = time.process_time()
        good_chances(texts, load())
        best = min(best, time.process_time() - began)
    return float(sum(len(text.as_py().encode()) for text in texts)) / best / 1e6


def main() -> None:
    """Measure and print, or write the graded texts for training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("PUNA_QUALITY_DATA"), help="folder of the sets")
    parser.add_argument("--store", type=Path, help="store with (or for) the sample's documents; default: .puna")
    parser.add_argument("--write", type=Path, metavar="OUT", help="write the graded texts for training instead")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.data is None or not Path(arguments.data).is_dir():
        sys.exit("quality: no documents; give --data FOLDER or set PUNA_QUALITY_DATA (see --help)")
    if arguments.store:
        os.environ["PUNA_STORE"] = str(arguments.store)
    documents = graded(Path(arguments.data))
    print(f"{len(documents)} of {len(GRADES.read_text(encoding='utf-8').splitlines()) - 1} graded documents are there", file=sys.stderr)
    if arguments.write:
        rows = [json.dumps({"text": one.text, "grade": one.grade, "site": one.site}) + "\n" for one in documents]
        arguments.write.write_text("".join(rows), encoding="utf-8")
        return
    found = figures(Path(arguments.data), documents)
    print(json.dumps(found) if arguments.json else "\n".join(f"{name:<36} {value:,.4g}" for name, value in found.items()))


if __name__ == "__main__":
    main()
