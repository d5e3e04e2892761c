"""trafilatura over pages in a folder, in its own environment: seconds and texts as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import trafilatura


def main() -> None:
    """Read {"files": [...]} from the given file; print the text of each page, "" if there is none."""
    files = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["files"]
    bodies = [Path(file).read_bytes() for file in files]
    trafilatura.extract(bodies[0])
    started = time.process_time()
    texts = [trafilatura.extract(body) or "" for body in bodies]
    print(json.dumps({"seconds": time.process_time() - started, "texts": texts}))


if __name__ == "__main__":
    main()
