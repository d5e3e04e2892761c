"""Interrupted loops over iterations and rows: the next attempt resumes from the saved state, and ends with the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from puna.models.training import resumable_loop
from puna.models.training.state import load_record

ROOT = Path(__file__).parents[2]
ITEMS = [(3, 0), (1, 1), (0, 2), (4, 3), (2, 4), (5, 5)]


class Stopped:
    """An item-by-item computation that Ctrl-C stops once, at item `at`."""

    def __init__(self, at: int | None) -> None:
        self.at, self.calls = at, 0

    def __call__(self, item: tuple[int, int]) -> np.ndarray:
        self.calls += 1
        if item[1] == self.at:
            os.kill(os.getpid(), signal.SIGINT)
        return np.random.default_rng(item[1]).random((item[0], 3), np.float32)


@pytest.mark.parametrize(("at", "again"), [(0, 5), (3, 2), (5, 0)])
def test_rows_go_on_after_the_last_saved_item(at: int, again: int, tmp_path: Path) -> None:
    whole = resumable_loop.rows_of(Stopped(None), ITEMS)
    assert whole.shape == (15, 3)
    with pytest.raises(KeyboardInterrupt):
        resumable_loop.rows_of(Stopped(at), ITEMS, tmp_path, "batch")
    record = load_record(tmp_path)
    assert (record["done"], record["of"], record["unit"]) == (at + 1, len(ITEMS), "batch")
    rest = Stopped(None)
    assert np.array_equal(resumable_loop.rows_of(rest, ITEMS, tmp_path, "batch"), whole)
    assert rest.calls == again


def test_rows_are_saved_by_time_and_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable_loop, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr("puna.models.training.state.SAVE_SHARE", float("inf"))

    def failing(item: tuple[int, int]) -> np.ndarray:
        if item[1] == 4:
            raise RuntimeError("power cut")
        return Stopped(None)(item)

    with pytest.raises(RuntimeError, match="power cut"):
        resumable_loop.rows_of(failing, ITEMS, tmp_path)
    assert load_record(tmp_path)["done"] == 4 and (tmp_path / resumable_loop.ROWS).stat().st_size == 8 * 3 * 4
    with (tmp_path / resumable_loop.ROWS).open("ab") as file:
        file.write(b"written after the last checkpoint")
    assert np.array_equal(resumable_loop.rows_of(Stopped(None), ITEMS, tmp_path), resumable_loop.rows_of(Stopped(None), ITEMS))


def test_damaged_rows_are_computed_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        resumable_loop.rows_of(Stopped(3), ITEMS, tmp_path)
    data = bytearray((tmp_path / resumable_loop.ROWS).read_bytes())
    data[17] ^= 4
    (tmp_path / resumable_loop.ROWS).write_bytes(data)
    again = Stopped(None)
    with pytest.warns(UserWarning, match="the saved rows are damaged"):
        rows = resumable_loop.rows_of(again, ITEMS, tmp_path)
    assert np.array_equal(rows, resumable_loop.rows_of(Stopped(None), ITEMS)) and again.calls == len(ITEMS)


def halve(folder: Path | None, stop: int | None = None, start: float = 1.0) -> tuple[np.ndarray, int]:
    """Halve a number until it is below 1e-3. Return it, and the number of steps done in this call."""
    value, steps = np.array([start]), 0

    def step() -> bool:
        nonlocal steps
        steps += 1
        value[:] /= 2
        if steps == stop:
            os.kill(os.getpid(), signal.SIGINT)
        return bool(value[0] < 1e-3)

    take: Callable = lambda arrays: np.copyto(value, arrays["value"])  # noqa: E731
    resumable_loop.iterate(step, 50, lambda: {"value": value}, take, folder, {"start": start})
    return value, steps


def test_iterations_go_on_from_the_saved_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, steps = halve(None)
    assert whole[0] == 2.0**-10 and steps == 10
    with pytest.raises(KeyboardInterrupt):
        halve(tmp_path, stop=4)
    with pytest.raises(ValueError, match="start was 1.0, now it is 2.0"):
        halve(tmp_path, start=2.0)
    monkeypatch.setattr(resumable_loop, "REPEATED_SECONDS", 0.0)
    assert halve(tmp_path) == (whole, 6)
    assert halve(tmp_path) == (whole, 0), "its end is saved, too"


@pytest.mark.parametrize("loop", ["rows", "iterations"])
def test_a_killed_loop_goes_on_from_its_last_save(loop: str, tmp_path: Path) -> None:
    """Kill -9 in the middle of the fourth item or step, with a save after each: three are kept, and the rest gives the same bits."""
    words = ("import sys, pathlib, signal, test_resumable_loop as t; from puna.models.training import resumable_loop, state",
             "resumable_loop.SAVE_SECONDS, state.SAVE_SHARE = 0.0, float('inf')", "signal.SIGINT = signal.SIGKILL", "folder = pathlib.Path(sys.argv[1])",
             "resumable_loop.rows_of(t.Stopped(3), t.ITEMS, folder)" if loop == "rows" else "t.halve(folder, stop=4)")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / ".pkg"), str(Path(__file__).parent))), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", "\n".join(words), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert load_record(tmp_path)["done"] == 3
    if loop == "rows":
        rest = Stopped(None)
        assert np.array_equal(resumable_loop.rows_of(rest, ITEMS, tmp_path), resumable_loop.rows_of(Stopped(None), ITEMS)) and rest.calls == 3
    else:
        assert halve(tmp_path) == (halve(None)[0], 7)
