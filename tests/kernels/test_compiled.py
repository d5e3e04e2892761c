"""Compiled loops and what their caches know."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numba
import numpy as np
import pytest

from puna.kernels import compiled

FILES = {
    "outer": '''
from inner import inner
from constants import OFFSET, PAIR
import puna.kernels.compiled as c

@c.njit()
def outer(x):
    """What it says."""
    total = 0
    for k in range(3):
        total += inner(x) + OFFSET + PAIR[1]
    return total
''',
    "inner": """
from puna.kernels.compiled import njit

@njit()
def inner(x):
    return deepest(x) * 2

@njit(inline="always")
def deepest(x):
    return x + 1

@njit()
def other(x):
    return x - 1
""",
    "constants": "import numpy as np\nOFFSET = 10\nPAIR = np.array([0, 5])\nUNUSED = 7\n",
}
ASK = "import outer; print(outer.outer(1), sum(outer.outer.stats.cache_hits.values()))"


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(): the result of `outer(1)` in a new process, and whether it came from the cache."""
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(compiled.ROOT / ".pkg"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # Python takes an edit of the same length in the same second for none

    def run() -> tuple[int, bool]:
        done = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, capture_output=True, text=True, check=True)
        value, hits = done.stdout.split()
        return int(value), hits == "1"

    assert run() == (3 * (4 + 15), False)
    assert run() == (3 * (4 + 15), True)
    return run


def change(folder: Path, name: str, old: str, new: str) -> None:
    text = (folder / f"{name}.py").read_text()
    assert old in text
    (folder / f"{name}.py").write_text(text.replace(old, new))


def test_a_loop_follows_a_change_of_whatever_it_reaches(ask, tmp_path):
    change(tmp_path, "inner", "x + 1", "x + 3")  # called by what it calls
    assert ask() == (3 * (8 + 15), False)
    change(tmp_path, "constants", "OFFSET = 10", "OFFSET = 20")
    assert ask() == (3 * (8 + 25), False)
    change(tmp_path, "constants", "[0, 5]", "[0, 6]")
    assert ask() == (3 * (8 + 26), False)
    assert ask() == (3 * (8 + 26), True)


def test_a_loop_is_not_compiled_again_for_what_it_does_not_reach(ask, tmp_path):
    expected = (3 * (4 + 15), True)
    change(tmp_path, "inner", "def inner(x):", "# A comment\n\n\ndef inner(x):\n    # and another")
    change(tmp_path, "inner", "@njit()\n# A comment\n\n\n", "# A comment\n\n\n@njit()\n")
    assert ask() == expected
    change(tmp_path, "inner", "x - 1", "x - 2")  # another loop of the file
    assert ask() == expected
    change(tmp_path, "outer", "What it says", "Better words")
    change(tmp_path, "constants", "UNUSED = 7", "UNUSED = 8")
    assert ask() == expected


def test_options_count(ask, tmp_path):
    change(tmp_path, "inner", '@njit(inline="always")', '@njit(error_model="numpy")')
    assert ask() == (3 * (4 + 15), False)


def test_every_loop_is_compiled_by_it():
    rooms = [compiled.ROOT / room for room in ("kernels", "stages", "models")]
    direct = [file for room in rooms for file in room.rglob("*.py") if "from numba import" in file.read_text()]
    assert direct == []


def test_a_loop_that_borrows_its_arrays_makes_none():
    def last(arrays, place):
        return arrays[1][place] + arrays[0][0]

    def made(arrays, place):
        return np.zeros(place)

    arrays = (np.array([1.0]), np.array([2.0, 3.0]))
    before = [sys.getrefcount(one) for one in arrays]
    assert compiled.njit(cache=False, borrows=True)(last)(arrays, 1) == 4.0
    assert [sys.getrefcount(one) for one in arrays] == before
    with pytest.raises(numba.core.errors.NumbaError, match="returning of array"):
        compiled.njit(cache=False, borrows=True)(made)(arrays, 1)


def test_a_loop_compiled_for_a_class_that_is_gone_is_compiled_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(compiled.ROOT / ".pkg"))
    (tmp_path / "loop.py").write_text("from puna.kernels.compiled import njit\n\n@njit()\ndef first(pair):\n    return pair.x\n")
    ask = "import loop, shapes; print(loop.first(shapes.{0}(3, 4)), sum(loop.first.stats.cache_hits.values()))"
    said = []
    for name in ("Pair", "Pair", "Couple", "Couple"):
        (tmp_path / "shapes.py").write_text(f"from typing import NamedTuple\n\nclass {name}(NamedTuple):\n    x: int\n    y: int\n")
        done = subprocess.run([sys.executable, "-B", "-c", ask.format(name)], cwd=tmp_path, capture_output=True, text=True)
        said.append(done.stdout.split() or done.stderr[-300:])
    assert said == [["3", "0"], ["3", "1"], ["3", "0"], ["3", "1"]]
