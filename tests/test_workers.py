"""The distribution of tests over workers, checked on files with empty tests."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FILES = ("parallel/test_layouts.py", "parallel/test_state.py", "models/test_one.py", "models/test_two.py")


def test_a_file_stays_on_one_worker_and_so_do_all_tests_of_ranks(tmp_path: Path) -> None:
    for name in FILES:
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("import time\n\n" + "".join(f"def test_{i}():\n    time.sleep(0.1)\n\n\n" for i in range(6)))
    command = ["-m", "pytest", "-v", "-p", "tests.conftest", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "--import-mode=importlib"]
    done = subprocess.run([sys.executable, *command, str(tmp_path)], cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
    workers: dict[str, set[str]] = {}
    for worker, name in re.findall(r"^\[(gw\d)\] .* PASSED .*?tests/(\w+/\w+\.py)::", done.stdout, re.MULTILINE):
        workers.setdefault(name, set()).add(worker)
    assert sorted(workers) == sorted(FILES), done.stdout + done.stderr
    assert all(len(of_file) == 1 for of_file in workers.values()), workers
    assert workers[FILES[0]] == workers[FILES[1]] and len(set.union(*workers.values())) == 2, workers
