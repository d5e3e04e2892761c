"""Languages: the share of parallel text and of spoilt copies that curation keeps in each, and the accuracy of language identification.

`PUNA_LANGUAGES_DATA=FOLDER python tests/benchmarks/languages.py --json`. The folder holds NTREX-128's first half (Federmann et al. 2022,
122 languages) and the Universal Declaration of Human Rights as compressed JSON lines. `languages_near_english`: number of NTREX languages
of which at most a tenth less is kept than of English; `gini`: over the languages' shares; `spoilt_kept`: mean over the kinds of spoilt
copies. `lid_sentences`, `lid_documents`: accuracy on 60 sentences, and on up to 20 documents of 15 sentences, of each language;
`lid_groups`: on the same documents, with confusable languages counted as one; `lid_mb_s`: MB of these documents per CPU second. The table
of languages is computed from the same documents (`language_table.py`): if it was made with `--half`, `--rest` evaluates it on the other
documents.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / ".pkg")]

UNSPACED = {"zho", "yue", "jpn", "lao", "khm", "mya", "bod", "dzo"}
SENTENCES, LINE, DOCUMENT, SAMPLE, DOCUMENTS = 30, 3, 15, 60, 20
FIRST_ARTICLES = 13
# Codes of NTREX and UDHR that are not ISO 639 codes of two or three letters.
OTHER_CODES = {
    "aze": "az", "azj": "az", "est": "et", "ekk": "et", "lav": "lv", "lvs": "lv", "mlg": "mg", "plt": "mg", "mon": "mn", "khk": "mn",
    "msa": "ms", "zlm": "ms", "nep": "ne", "npi": "ne", "orm": "om", "gaz": "om", "pus": "ps", "pbu": "ps", "sqi": "sq", "als": "sq",
    "swa": "sw", "swh": "sw", "uzb": "uz", "uzn": "uz", "zho": "zh", "cmn": "zh", "fas": "fa", "pes": "fa", "prs": "fa", "fil": "tl",
    "tgl": "tl", "nob": "no", "arb": "ar", "mey": "ar", "kmr": "ku", "fuc": "ff", "fuf": "ff", "snd": "sd",
}  # fmt: skip


def folder() -> Path:
    """Return the data folder."""
    given = os.environ.get("PUNA_LANGUAGES_DATA")
    if not given or not Path(given).is_dir():
        raise SystemExit("languages: set PUNA_LANGUAGES_DATA to the folder of the parallel texts")
    return Path(given)


def rows(name: str) -> list[dict[str, Any]]:
    """Return the JSON lines of a compressed file."""
    import zstandard

    with zstandard.open(folder() / name, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def ntrex() -> dict[str, list[list[str]]]:
    """Return language → documents → sentences, in the order of the file."""
    found: dict[str, list[list[str]]] = defaultdict(list)
    for row in rows("ntrex_dev.jsonl.zst"):
        found[row["language"]].append(row["sentences"])
    return found


def ntrex_documents() -> list[tuple[str, str]]:
    """Return (language, text) of parallel documents, joined until English has 30 sentences: 3 sentences per line, separated by blank
    lines."""
    texts = ntrex()
    ends, size = [0], 0
    for number, sentences in enumerate(texts["eng"], 1):
        size += len(sentences)
        if size >= SENTENCES:
            ends.append(number)
            size = 0
    out = []
    for name, documents in texts.items():
        blank = "" if name.split("-")[0] in UNSPACED else " "
        for first, last in itertools.pairwise(ends):
            sentences = [sentence for document in documents[first:last] for sentence in document]
            out.append((name, "\n\n".join(blank.join(sentences[at : at + LINE]) for at in range(0, len(sentences), LINE))))
    return out


def udhr_documents() -> list[tuple[str, str, int, str]]:
    """Return (ISO 639-3, BCP 47, half, text): each declaration as two documents."""
    out = []
    for row in rows("udhr.jsonl.zst"):
        # The preamble is the first document.
        for half, articles in enumerate((row["articles"][: FIRST_ARTICLES + 1], row["articles"][FIRST_ARTICLES + 1 :])):
            text = "\n".join(p for article in articles for p in article["p"])
            if text.strip() and len(row["articles"]) >= 30:
                out.append((row["iso6393"], row["bcp47"], half, text))
    return out


def code_of(name: str) -> str:
    """Return the ISO 639 code of a language code of NTREX or UDHR."""
    from puna.models.languages.registry import shipped_names

    name = name.split("-")[0]
    return OTHER_CODES.get(name) or shipped_names().canonical(name)


def identification() -> dict[str, float]:
    """Return the accuracy and speed of language identification."""
    from puna.models.languages.registry import shipped_names
    from puna.models.languages.vote import vote

    sentences, documents = [], []
    for name, found in ntrex().items():
        own = [sentence for document in found for sentence in document]
        blank = "" if name.split("-")[0] in UNSPACED else " "
        documents += [(name, blank.join(own[at : at + DOCUMENT])) for at in range(0, len(own) - DOCUMENT, DOCUMENT)][:DOCUMENTS]
        random.Random(1).shuffle(own)
        sentences += [(name, sentence) for sentence in own[:SAMPLE]]
    vote(documents[0][1])
    figures, known = {}, shipped_names().groups
    for kind, sample in (("sentences", sentences), ("documents", documents)):
        started = time.process_time()
        said = [vote(text).language for _, text in sample]
        seconds = time.process_time() - started
        wanted = [code_of(name) for name, _ in sample]
        figures[f"lid_{kind}"] = sum(a == b for a, b in zip(said, wanted, strict=True)) / len(sample)
    figures["lid_groups"] = sum(known.get(a, a) == known.get(b, b) for a, b in zip(said, wanted, strict=True)) / len(sample)
    figures["lid_mb_s"] = sum(len(text.encode()) for _, text in documents) / seconds / 1e6
    return figures


def figures(show: bool = False, rest: bool = False) -> dict[str, float]:
    """Return all figures; with `rest`, on the documents that `language_table.py --half` did not use."""
    from tests.benchmarks.fairness import Labelled, fairness, twins

    changes = ["select.language={}"]
    good = [Labelled(name, text) for name, text in ntrex_documents()]
    if rest:
        of: dict[str, list[Labelled]] = defaultdict(list)
        for document in good:
            of[document.language].append(document)
        good = [document for found in of.values() for document in found[1::2]]
    spoilt = twins(good[:: 3 if rest else 5])
    found = fairness([*good, *spoilt], changes=changes, reference="eng")
    declared = fairness([Labelled(tag, text) for _, tag, _, text in udhr_documents()], changes=changes, reference="en")
    if show:
        for row in [*found.rows, *declared.rows]:
            if row["kept"] < 0.99 or any(row.get(kind, 0) > 0.1 for kind in ("menu", "misread", "repeats", "salad")):
                print(json.dumps(row, ensure_ascii=False), file=sys.stderr)
    out = {name: value for name, value in found.figures.items() if name != "languages_near_reference"}
    out["languages_near_english"] = found.figures["languages_near_reference"]
    return out | {f"udhr_{name}": declared.figures[name] for name in ("languages", "mean_kept", "languages_at_zero")} | identification()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--show", action="store_true", help="languages that lose documents, on standard error")
    parser.add_argument("--rest", action="store_true", help="judge the documents that a table made by language_table.py --half did not count")
    given = parser.parse_args()
    found = figures(given.show, given.rest)
    if given.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:32} {value:10.4f}")


if __name__ == "__main__":
    main()
