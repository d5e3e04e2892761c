"""rensa's batch pipeline over texts in memory, in its own environment: seconds as JSON.

R-MinHash on the full set of 5-word shingles, and rensa's one-shot LSH, with as many bands and rows as Puna. Shingles are made by the
fastest Python code; the faster of rensa's two input forms counts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from rensa import RMinHash, RMinHashLSH

WORDS, BANDS, ROWS, THRESHOLD = 5, 18, 6, 0.8


def shingles(text: str) -> list[str]:
    """Return the shingles of a text in lower case; a text shorter than a shingle is one shingle."""
    words = text.lower().split()
    return [" ".join(words[i : i + WORDS]) for i in range(max(1, len(words) - WORDS + 1))]


def main() -> None:
    """Read {"texts": [...]} from the given file; print the seconds of the faster form and the number of duplicates."""
    texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["texts"]
    best, flags = float("inf"), []
    for form in ("strings", "bytes") * 2:
        started = time.process_time()
        sets = [shingles(text) for text in texts]
        if form == "strings":
            matrix = RMinHash.digest_matrix_from_token_sets(sets, BANDS * ROWS, 1)
        else:
            matrix = RMinHash.digest_matrix_from_token_byte_sets([[s.encode() for s in one] for one in sets], BANDS * ROWS, 1)
        flags = RMinHashLSH(THRESHOLD, BANDS * ROWS, BANDS).query_duplicate_flags_matrix_one_shot(matrix)
        best = min(best, time.process_time() - started)
    print(json.dumps({"seconds": best, "duplicates": sum(map(bool, flags))}))


if __name__ == "__main__":
    main()
