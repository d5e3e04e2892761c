"""Compiled loops and what their caches know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from puna.kernels import compiled

CALLER = "from numba import njit\nfrom inner import inner\n\n@njit(cache=True)\ndef outer():\n    return inner()\n"
INNER = "from numba import njit\n\n@njit(cache=True)\ndef inner():\n    return {0}\n"
ASK = "import sys, numba; numba.config.CACHE_DIR = sys.argv[1]; import outer; print(outer.outer())"


def write(root: Path, value: int) -> None:
    (root / "kernels").mkdir(exist_ok=True)
    (root / "kernels" / "outer.py").write_text(CALLER)
    (root / "kernels" / "inner.py").write_text(INNER.format(value))


def ask(root: Path, folder: Path) -> int:
    done = subprocess.run([sys.executable, "-c", ASK, str(folder)], cwd=root / "kernels", capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_loop_follows_an_edit_of_one_that_it_calls(tmp_path: Path) -> None:
    write(tmp_path, 1)
    first = compiled.folder(tmp_path)
    assert ask(tmp_path, first) == 1
    (tmp_path / "kernels" / "plain.py").write_text("x = 1\n")
    assert compiled.folder(tmp_path) == first
    write(tmp_path, 2)
    assert ask(tmp_path, compiled.folder(tmp_path)) == 2
    assert ask(tmp_path, first) == 1, "numba alone has learned to see this: the folders by state are no longer needed"


def test_every_loop_is_compiled_by_it() -> None:
    rooms = [compiled.ROOT / room for room in compiled.ROOMS]
    direct = [file for room in rooms for file in room.rglob("*.py") if "from numba import" in file.read_text()]
    assert [file.name for file in direct] == ["compiled.py"]
