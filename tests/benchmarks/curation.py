"""Curation compared with other toolkits on the same documents: equality of decisions, and speed on one core.

    PUNA_EXTRACTION_DATA=FOLDER python tests/benchmarks/curation.py [--part heuristics …] [--store FOLDER] [--json]

Each part is a module `curation_PART.py` beside this file with `figures() -> dict[str, float]`. Without --part, the parts that have peers or
goals are run; fuzz, memory, sizes and update take minutes and are run only if named. Speeds are by process CPU time. Peers run in separate
environments (`peers.py`); the documents are the demo's sample (`corpus.py`); extraction is scored on annotated pages
(`curation_extract.py`). Missing data and packages are reported before any measurement.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Set before numpy is imported, because speeds are per core.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
PARTS = tuple(sorted(file.stem.removeprefix("curation_") for file in HERE.glob("curation_*.py")))
LONG = ("fuzz", "memory", "sizes", "update")


def main() -> None:
    """Run the parts and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be given more than once")
    parser.add_argument("--store", type=Path, help="store with (or for) the sample's documents; default: .puna")
    parser.add_argument("--json", action="store_true", help="one object of named figures")
    arguments = parser.parse_args()
    if arguments.store:
        os.environ["PUNA_STORE"] = str(arguments.store)
    sys.path[:0] = [str(ROOT / ".pkg"), str(HERE)]
    parts = [importlib.import_module(f"curation_{part}") for part in arguments.part or (p for p in PARTS if p not in LONG)]
    for part in parts:
        if hasattr(part, "prepare"):
            part.prepare()
    found: dict[str, float] = {}
    for part in parts:
        print(f"{part.__name__} …", file=sys.stderr, flush=True)
        found |= part.figures()
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<28} {value:,.4g}")


if __name__ == "__main__":
    main()
