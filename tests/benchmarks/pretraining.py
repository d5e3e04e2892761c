"""Pretraining: forecasts, scaling laws, mixtures, and the claims of its other parts.

    OMP_NUM_THREADS=1 python tests/benchmarks/pretraining.py --part forecast --seeds 2 --json
    python tests/benchmarks/pretraining.py --part laws --part regmix --json

A part is a file beside this one, `pretraining_PART.py`, with a function `figures(arguments)`; it returns the part's figures by name, or the
reason for skipping the part under `skipped`. The parts forecast, laws and regmix share pretraining_forecast.py. Times are CPU seconds of
one process.

The part mixed, of pages with formulas or code in twelve languages, is in pretraining_kinds.py.

Without `--part` and `--whole`, only what takes minutes on two cores is measured: the parts of `SHORT`, with one seed each, and of the phases
all but the needle. `--whole` measures every part, with five seeds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg")]
OWN = {"laws": "pretraining_forecast", "regmix": "pretraining_forecast", "mixed": "pretraining_kinds"}
"""Parts that are functions of another part's file."""
SHORT = ("phases", "laws", "regmix")
"""Parts that take minutes on two cores with one seed."""


def parts() -> list[str]:
    """Return the names of all parts, from the files beside this one."""
    files = sorted(file.stem.removeprefix("pretraining_") for file in Path(__file__).parent.glob("pretraining_*.py"))
    return [*files, *OWN]


def figures(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a part's figures."""
    module = importlib.import_module(f"tests.benchmarks.{OWN.get(part, f'pretraining_{part}')}")
    function = getattr(module, part if part in OWN else "figures")
    measured: dict[str, Any] = function(arguments)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=parts(), help="parts to measure; by default the short ones, or with --whole all")
    parser.add_argument("--seeds", type=int, help="seeds of the parts that train; by default 1, or 5 with --whole or --part")
    parser.add_argument("--first", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--folder", type=Path, help="store of the part forecast, which finds again there what it has done")
    parser.add_argument("--draw", type=int, default=0, help="first seed of the planted laws")
    parser.add_argument("--whole", action="store_true", help="also measure what takes longer than minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    arguments.seeds = arguments.seeds or (5 if arguments.whole or arguments.part else 1)
    for part in arguments.part or (parts() if arguments.whole else SHORT):
        measured = figures(part, arguments)
        if "skipped" in measured:
            print(f"{part}: skipped, {measured['skipped']}", file=sys.stderr)
        found |= {name: value for name, value in measured.items() if name != "skipped"}
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:32} {value:.4g}" if isinstance(value, float) else f"{name:32} {value}")


if __name__ == "__main__":
    main()
