"""The whole script of GPU measurements, at its smallest shapes on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_gpu_script_runs_whole_on_a_cpu(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, "tests/benchmarks/gpu.py", "--device", "cpu", "--small", "--json", str(figures)]
    # Without Triton's interpreter, which takes minutes; tests/kernels/interpreted covers the Triton versions.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT / ".pkg"), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert "is left out" not in run.stdout
    measured = json.loads(figures.read_text(encoding="utf-8"))
    assert measured["operators"] and measured["goals"]
    for name in ("plain tokens/s", "checkpointing tokens/s", "generation tokens/s"):
        assert measured["figures"][name] > 0, name
