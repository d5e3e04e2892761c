"""dolma's taggers of Gopher's and C4's numbers over texts in memory, in its own environment: seconds and attributes as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from dolma.core.data_types import Document
from dolma.core.taggers import BaseTagger
from dolma.taggers.c4 import FasterC4Tagger
from dolma.taggers.gopher import GopherTagger, GopherTaggerV2

TAGGERS: dict[str, type[BaseTagger]] = {"gopher_v1": GopherTagger, "gopher_v2": GopherTaggerV2, "c4_v2": FasterC4Tagger}


def main() -> None:
    """Read {"texts": [...], "taggers": [...]} from the file given; print {"seconds": {tagger: s}, "attributes": {tagger: [...]}}.

    A document's attributes are {name: [score of each span]}.
    """
    given: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    documents = [Document(source="", id="", text=text) for text in given["texts"]]
    seconds, attributes = {}, {}
    for name in given["taggers"]:
        tagger = TAGGERS[name]()
        tagger.predict(Document(source="", id="", text="Load what is loaded late. " * 30))
        started = time.process_time()
        results = [tagger.predict(document) for document in documents]
        seconds[name] = time.process_time() - started
        attributes[name] = [_scores(result.spans) for result in results]
    print(json.dumps({"seconds": seconds, "attributes": attributes}))


def _scores(spans: list[Any]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for span in spans:
        found.setdefault(span.type, []).append(span.score)
    return found


if __name__ == "__main__":
    main()
