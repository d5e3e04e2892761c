"""The script that compares layouts on GPUs, run at a small size on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REFUSED = ("prefect", "trl", "duckdb", "pyarrow", "pandas")
"""Packages that a machine with a GPU may lack."""


def test_the_script_of_gpu_layouts_runs_on_a_cpu_without_the_pipeline_s_packages(tmp_path: Path) -> None:
    for name in REFUSED:
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not here')")
    file, only = tmp_path / "rows.json", "^collectives|^(numbers|checkpoint), (data|shard) 2, plain, pretrain"
    command = [sys.executable, "tests/benchmarks/gpu_parallel.py", "--device", "cpu", "--ranks", "2", "--json", str(file), "--only", only]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 7 and all(row["ok"] for row in rows)
