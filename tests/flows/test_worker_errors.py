"""Messages of a run's processes on standard error."""

from __future__ import annotations

import os
import subprocess

import pytest

from puna.flows.engine.console import tee_stderr


def test_every_line_of_this_process_and_its_children_is_told_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    with tee_stderr(told.append):
        os.write(2, b"careful\n")
        subprocess.run(["sh", "-c", "printf 'a worker died\\n\\n12:00 | ERROR | Flow run x - no\\nlast' >&2; echo >&2"], check=True)
    os.write(2, b"after\n")
    assert told == ["careful", "a worker died", "last"]
    assert capfd.readouterr().err == "careful\na worker died\n\n12:00 | ERROR | Flow run x - no\nlast\nafter\n"
