"""CPU seconds of the first `puna clean` in an environment without compiled loops.

    python tests/benchmarks/first_run.py [--data FOLDER] [--python PYTHON] [--pages N] [--without] [--json]

PYTHON: an interpreter with Puna's wheel installed; by default this interpreter with this checkout. `FOLDER/web_wcxb_dev` (default:
../shared/data) has the pages; one worker cleans the first N (200), in a new folder for each run; the CPU time of all processes counts.
`first_clean_cpu_s`: with an empty folder of compiled loops; `second_clean_cpu_s`: with another store and the same folder of loops.
`first_clean_loops_compiled`: loops that the first run had to compile. `--without`: also `first_clean_cpu_s_without`, compiled for this
processor's own name (NUMBA_CPU_NAME), so that no shipped loop is used: minutes, the cost before loops were shipped.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg"), str(Path(__file__).parent)]


def figures(data: Path, python: Path | None, count: int, without: bool) -> dict[str, float]:
    """Return the figures that the module describes."""
    import curation_articles

    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        with (place / "pages.jsonl").open("w", encoding="utf-8") as out:
            for path, body in islice(curation_articles._files(data / "web_wcxb_dev/dev_html.tar.zst"), count):
                out.write(json.dumps({"url": f"https://page.example/{Path(path).stem}", "html": body.decode("utf-8", "replace")}) + "\n")
        found["first_clean_cpu_s"] = _clean(place, "first", "loops", python)
        found["first_clean_loops_compiled"] = float(sum(1 for _ in (place / "loops").rglob("*.nbc")))
        found["second_clean_cpu_s"] = _clean(place, "second", "loops", python)
        if without:
            from llvmlite.binding import get_host_cpu_name

            found["first_clean_cpu_s_without"] = _clean(place, "without", "none", python, NUMBA_CPU_NAME=get_host_cpu_name())
            same = [(place / f"{name}.jsonl").read_bytes() for name in ("first", "second", "without")]
            found["first_clean_same_bytes"] = float(len(set(same)) == 1)
    return found


def _clean(place: Path, name: str, loops: str, python: Path | None, **more: str) -> float:
    """Return the CPU seconds of a run that cleans the pages in `place` into `NAME.jsonl`, with `loops` as the folder of compiled loops."""
    own = {"NUMBA_CACHE_DIR": str(place / loops), "PUNA_CACHE": str(place / f"{name}-cache"), "OMP_NUM_THREADS": "1", **more}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | own
    if python is None:
        environment["PYTHONPATH"] = str(ROOT / ".pkg")
    command = [str(python or sys.executable), "-m", "puna.flows.cli.main", "clean", "pages.jsonl", "--output", f"{name}.jsonl"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--store", name, "--workers", "1"], cwd=place, env=environment, stdout=sys.stderr, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data", help="folder of the sets")
    parser.add_argument("--python", type=Path, help="interpreter of the environment")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--without", action="store_true", help="measure without the loops that came compiled, too")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (arguments.data / "web_wcxb_dev").is_dir():
        sys.exit(f"first_run: no folder {arguments.data}/web_wcxb_dev; give --data FOLDER (see --help)")
    found = figures(arguments.data, arguments.python, arguments.pages, arguments.without)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:32} {value:.2f}")


if __name__ == "__main__":
    main()
