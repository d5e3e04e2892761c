"""datatrove's four heuristic filters over texts in memory, in its own environment: seconds and reasons as JSON."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.filters import C4QualityFilter, FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter


def main() -> None:
    """Read {"texts": [...]} from the file given; print what was found."""
    warnings.simplefilter("ignore", RuntimeWarning)  # a mean of no words
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["texts"]
    filters = {
        "gopher_repetition": GopherRepetitionFilter(), "gopher_quality": GopherQualityFilter(), "c4": C4QualityFilter(),
        "fineweb": FineWebQualityFilter(),
    }  # fmt: skip
    for one in filters.values():
        one.filter(Document(text="Load the tokeniser. " * 30, id="x"))
    reasons: dict[str, list[str | None]] = {name: [] for name in filters}
    started = time.process_time()
    for text in texts:
        # One document after another, so that the four share datatrove's cache of split texts.
        for name, one in filters.items():
            result = one.filter(Document(text=text, id="x"))
            reasons[name].append(result[1] if isinstance(result, tuple) else None)
    print(json.dumps({"seconds": time.process_time() - started, "reasons": reasons}))


if __name__ == "__main__":
    main()
