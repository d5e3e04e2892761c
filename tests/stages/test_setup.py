"""The commands of the set-up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from puna.flows.engine.session import COMPILES
from puna.kernels.cpu import numba_cache

COMPILED = """
import json, runpy, sys
runpy.run_path(sys.argv[1], run_name="__main__")
from puna.models.extraction.model import _scores, kept_blocks
from puna.models.classifiers.fasttext import _descend, _score
from puna.models.classifiers.grades import _grade
from puna.stages.curate.signals.measure import _measure
from puna.kernels.text.technical import _count
print(json.dumps({loop.py_func.__qualname__: len(loop.signatures) for loop in (_scores, kept_blocks, _descend, _score, _grade, _measure, _count)}))
"""


def test_set_up_compiles_the_loops_of_extraction_signals_classifiers_and_quality() -> None:
    """A run after the set-up prints no message about compiling."""
    file = Path(__file__).parents[2] / "deploy" / "compile.py"

    def marks() -> list[Path]:
        return list(numba_cache.folder(numba_cache.ROOT).glob("*.compiled"))

    for mark in marks():
        mark.unlink()
    own = os.environ | {"NUMBA_CPU_NAME": numba_cache.processor()}  # without the shipped loops, in case a wheel was built
    done = subprocess.run([sys.executable, "-c", COMPILED, file], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(found.values()), found
    assert {mark.name.partition("-")[0] for mark in marks()} == set(COMPILES)
