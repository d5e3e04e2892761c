"""What set-up runs."""

from __future__ import annotations

import runpy
from pathlib import Path


def test_the_loops_that_set_up_compiles_are_called_as_they_are_written() -> None:
    runpy.run_path(str(Path(__file__).parents[2] / "deploy" / "compile.py"), run_name="__main__")
