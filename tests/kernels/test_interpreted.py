"""The Triton versions, run by Triton's interpreter on CPU tensors in a separate process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the process that interprets")
def test_triton_kernels_under_the_interpreter():
    pytest.importorskip("triton")
    root = HERE.parents[1]
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root / ".pkg"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
