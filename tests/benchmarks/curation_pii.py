"""Personal data: F1 of spans on labelled sentences, and speed on the sample's texts with one thread.

    python tests/benchmarks/curation_pii.py

The sentences are those of the tests (175, hand-labelled, most without personal data) and, if PUNA_PII names it, a file of
presidio-research's synthetic data set. A span counts as right if its kind and both of its ends are right.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).parent
SENTENCES = HERE.parent / "stages" / "curate" / "pii_sentences.txt"
SPEED_BYTES = 10_000_000
PRESIDIO = {
    "EMAIL_ADDRESS": "email", "PHONE_NUMBER": "phone", "CREDIT_CARD": "card", "IBAN_CODE": "iban", "US_SSN": "ssn", "IP_ADDRESS": "ip_address",
}  # fmt: skip
Labelled = tuple[str, set[tuple[int, int, str]]]


def f1(texts: Iterable[Labelled], kinds: tuple[str, ...]) -> dict[str, float]:
    """Return the F1 of each kind, and of all spans together."""
    from puna.kernels.text.personal import find

    right: Counter[str] = Counter()
    both: Counter[str] = Counter()
    for text, spans in texts:
        got = set(map(tuple, find(text, kinds)))
        for kind in (*kinds, "all"):
            right[kind] += sum(kind in (span[2], "all") for span in got & spans)
            both[kind] += sum(kind in (span[2], "all") for some in (got, spans) for span in some)
    return {kind: 2 * right[kind] / both[kind] for kind in both if both[kind]}


def sentences() -> list[Labelled]:
    """Return the labelled sentences of the tests."""
    import re

    found = []
    for line in SENTENCES.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            text, spans = "", set()
            for piece in re.split(r"(⟦\w+:[^⟧]*⟧)", line.replace("\\n", "\n")):
                kind, _, inside = piece.strip("⟦⟧").partition(":")
                if piece.startswith("⟦"):
                    spans.add((len(text), len(text) + len(inside), kind))
                text += inside if piece.startswith("⟦") else piece
            found.append((text, spans))
    return found


def figures() -> dict[str, float]:
    """Return the F1 of spans by kind, and MB/s."""
    import corpus

    from puna.kernels.text.personal import FINDERS, find

    found = {f"pii_f1_{kind}": value for kind, value in f1(sentences(), tuple(FINDERS)).items()}
    if "PUNA_PII" in os.environ:
        rows = json.loads(Path(os.environ["PUNA_PII"]).read_text(encoding="utf-8"))
        spans = [{(s["start_position"], s["end_position"], PRESIDIO.get(s["entity_type"], "")) for s in row["spans"]} for row in rows]
        known = [(row["full_text"], {s for s in some if s[2]}) for row, some in zip(rows, spans, strict=True)]
        found |= {f"pii_f1_presidio_{kind}": value for kind, value in f1(known, tuple(PRESIDIO.values())).items()}
    texts = corpus.texts(SPEED_BYTES)
    started = time.process_time()
    for text in texts:
        find(text, tuple(FINDERS))
    found["pii_mb_s"] = sum(len(text.encode()) for text in texts) / 1e6 / (time.process_time() - started)
    return found


if __name__ == "__main__":
    sys.path[:0] = [str(HERE.parents[1] / ".pkg"), str(HERE)]
    for name, value in figures().items():
        print(f"{name:<28} {value:,.4g}")
