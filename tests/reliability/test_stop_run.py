"""Runs stopped by Ctrl-C: the message is exact, and the command that it names resumes the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULE = Path(__file__).with_name("stages_to_stop.py")


def puna(folder: Path, name: str, workers: int) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run a stage from the command line. Return how the process ended, and the command without the program's path."""
    words = ["run", name, "--module", str(MODULE), "--store", str(folder / "store"), "--workers", str(workers), "--set", f"folder={folder}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".pkg"), "OMP_NUM_THREADS": "1", "PREFECT_API_URL": ""}
    ended = subprocess.run(
        [sys.executable, "-m", "puna.flows.cli.main", *words], env=environment, capture_output=True, text=True, timeout=240,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    return ended, " ".join(["puna", *words])


SAVED = {
    ("stopped_training", 1): r"step 124 of 150 \(\d+ s of work\) is saved",
    ("stopped_trials", 2): r"step 2\d of 200 \(\d+ s of work\), 1 small run are saved",
    ("stopped_parts", 1): r"2 finished parts are saved",
    ("stopped_callback", 1): r"2 finished parts are saved",
    ("stopped_call", 1): r"1 fit is saved",
}


@pytest.mark.parametrize(("name", "workers"), SAVED)
def test_a_stopped_run_says_what_is_saved_and_goes_on_from_there(name: str, workers: int, tmp_path: Path) -> None:
    stopped, command = puna(tmp_path, name, workers)
    assert stopped.returncode == 130, stopped.stderr[-2000:]
    assert re.search(rf"^Stopped\. {name}: {SAVED[name, workers]}\. Go on with: {re.escape(command)}$", stopped.stdout, re.M), stopped.stdout
    assert ("the step in progress is finished and saved" in stopped.stderr) == (name in ("stopped_training", "stopped_call"))
    (tmp_path / "again").touch()
    resumed, _ = puna(tmp_path, name, workers)
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    if name == "stopped_trials":
        # The second small run did only the steps after its saved step.
        assert 150 < int(re.search(r"steps_1 +(\d+)", resumed.stdout)[1]) <= 180
