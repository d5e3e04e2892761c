"""Puna's source files with modification times from other clocks: those of archives or file servers."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from puna.stages.identity import sources


def test_a_source_file_from_the_future_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "late.py"
    file.write_text("x = 1\n")
    os.utime(file, (time.time() + 10**6,) * 2)
    monkeypatch.setattr(sources, "_start_time", lambda: time.time() + 1)  # a process that starts after the file was written
    assert sources._read([file]) == {str(file): sources.digest(file)}


@pytest.mark.parametrize("own_time", [0, -(10**6), 10**6])
def test_a_source_file_written_after_the_start_is_edited_whatever_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_time: int
) -> None:
    started = time.time() - 1
    file = tmp_path / "edited.py"
    file.write_text("x = 1\n")
    os.utime(file, (time.time() + own_time,) * 2)
    monkeypatch.setattr(sources, "_start_time", lambda: started)
    assert sources._read([file]) == {str(file): "edited"}


def test_a_file_server_whose_clock_is_ahead_stops_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ahead.py").write_text("x = 1\n")
    file = tmp_path / "ahead.py"
    monkeypatch.setattr(sources, "_start_time", lambda: time.time() - 1)
    monkeypatch.setattr(Path, "stat", lambda self, **how: SimpleNamespace(st_ctime=time.time() + 60, st_mtime=time.time() + 60))
    assert sources._read([file]) == {str(file): sources.digest(file)}
