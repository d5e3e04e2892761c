"""A process that waits for its run: what it was told, and code that was edited while it waited."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture
def waiting(tmp_path):
    """A process that has imported `helper` and will be `said`, which tells what it sees; the folder of both."""
    (tmp_path / "helper.py").write_text("import pathlib\nWORD = 'first'\npathlib.Path(__file__).with_name('imported').touch()\n")
    (tmp_path / "said.py").write_text(
        "import os, sys, helper\n"
        "if __name__ == '__main__':\n"
        "    print(helper.WORD, os.environ['PREFECT__RUN'], os.environ['OTHER'], os.getcwd(), os.getpid(), sys.argv, flush=True)\n"
    )
    old = time.time() - 60
    for file in tmp_path.iterdir():
        os.utime(file, (old, old))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "puna.flows.prefect.waiting", "said", "helper"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path, "OTHER": "kept", "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    yield process, tmp_path
    process.kill()
    process.communicate()


def told(folder: Path) -> str:
    """A run in this folder."""
    return json.dumps({"env": {"PREFECT__RUN": "the run's"}, "cwd": str(folder)}) + "\n"


def imported(folder: Path) -> None:
    """Wait until the process has imported its modules."""
    deadline = time.monotonic() + 60
    while not (folder / "imported").exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_becomes_the_run_that_it_is_given(waiting):
    process, folder = waiting
    out, error = process.communicate(told(folder), timeout=60)
    assert (out, error) == (f"first the run's kept {folder} {process.pid} {[str(folder / 'said.py')]}\n", "")


def test_reads_code_again_that_was_edited_while_it_waited(waiting):
    process, folder = waiting
    imported(folder)
    (folder / "helper.py").write_text("WORD = 'second'\n")
    out, error = process.communicate(told(folder), timeout=60)
    assert (out, error) == (f"second the run's kept {folder} {process.pid} {[str(folder / 'said.py')]}\n", "")


def test_ends_in_silence_when_nobody_gives_it_a_run(waiting):
    process, _ = waiting
    assert process.communicate(timeout=60) == ("", "") and process.returncode == 0
