"""The sandbox confines programs as it should."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.python_code import Code, program
from puna.stages.verifiers.sandbox import Limits, Outcome, run
from puna.stages.verifiers.sandbox_inside import FIRST_USER

QUESTION = Question("q", "t", "", None)
LIMITS = Limits(seconds=1.0, memory_mb=256, processes=16)


def tried(mode: sandbox.Mode, source: str) -> Outcome:
    return run(source, ["pass"], LIMITS, mode)


def test_tests_pass_and_fail(mode: sandbox.Mode) -> None:
    made = run("import math\nx = math.pi", ["assert x > 3", "assert x > 4", "y"], LIMITS, mode)
    assert made.results is not None and made.results[0] is None
    assert made.results[1:] == ["AssertionError:  (test_1.py, line 1)", "NameError: name 'y' is not defined (test_2.py, line 1)"]


@pytest.mark.parametrize(
    "source",
    [
        "import socket\ns = socket.socket()\ns.settimeout(1)\ns.connect(('1.1.1.1', 80))",
        "open('/etc/shadow').read()", "open('/etc/passwd').read()", f"open({__file__!r}).read()", "open('/proc/1/environ').read(); open('/escape', 'w')",
        "open('/tmp/puna-escape', 'w').write('x')", "open('/usr/lib/puna-escape', 'w').write('x')", "import numpy",
        "x = bytearray(10**10)", "open('a', 'wb').write(b'x' * 2**27)", "def f(): f()\nf()", "import os\nos.setuid(0)",
    ],
)  # fmt: skip
def test_what_is_forbidden_raises(mode: sandbox.Mode, source: str) -> None:
    made = tried(mode, source)
    assert made.results is not None and made.results[0] is not None and not made.ended, made


@pytest.mark.parametrize(
    "source",
    [
        "while True: pass", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass", "while True: print('x' * 1000)", "import os\nos._exit(0)",
        "import os\nfor _ in range(2): os.fork()\nx = bytearray(200 * 2**20)\nfor i in range(0, len(x), 4096): x[i] = 1\nimport time\ntime.sleep(9)",
        "import ctypes\nctypes.string_at(0)", "import os\nfor handle in range(3, 64):\n  try: os.write(handle, b'{\"results\": [null]}\\n')\n  except OSError: pass\nos._exit(0)",
    ],
)  # fmt: skip
def test_what_does_not_end_well_passes_nothing(mode: sandbox.Mode, source: str) -> None:
    made = tried(mode, source)
    assert made.results is None and not made.refused and len(made.output) <= sandbox.OUTPUT_BYTES, made


@pytest.mark.parametrize(
    ("source", "seconds", "ended"),
    [
        ("import time\ntime.sleep(1.2)", 1.0, ""), ("while True: pass", 0.3, "time"), ("import time\ntime.sleep(60)", 0.1, "time by the clock"),
        ("import os, time\nfor _ in range(3):\n  if os.fork() == 0:\n    while True: pass\ntime.sleep(60)", 0.6, "time"),
        ("import os, time\nfor _ in range(9):\n  if os.fork() == 0:\n    while time.process_time() < 0.2: pass\n    os._exit(0)\n  os.wait()\ntime.sleep(60)", 1.0, "time"),
    ],
)  # fmt: skip
def test_computing_of_all_processes_counts_and_waiting_does_not(mode: sandbox.Mode, source: str, seconds: float, ended: str) -> None:
    made = run(source, ["pass"], Limits(seconds=seconds, memory_mb=256, processes=16), mode)
    assert (made.ended, made.results) == (ended, None if ended else [None])


def test_nothing_outlives_the_run(mode: sandbox.Mode) -> None:
    """A grandchild in a separate session would live for a minute; programs of other tests end before that."""
    mark = f"survivor{os.getpid()}{mode}"
    source = f"import os, time\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0:\n    {mark} = time.sleep(60)\n  os._exit(0)\ntime.sleep(0.3)"
    assert tried(mode, source).results == [None]
    time.sleep(0.1)
    left, deadline = _of_sandboxes(), time.monotonic() + 25
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= _of_sandboxes()
    assert not left


def _of_sandboxes() -> set[str]:
    """Return the user processes that belong to sandboxes."""
    users = {p.name: line.split()[1] for p in Path("/proc").glob("[0-9]*") for line in _lines(p / "status") if line.startswith("Uid:")}
    return {process for process, user in users.items() if int(user) >= FIRST_USER}


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


@pytest.mark.usefixtures("mode")
def test_humaneval_and_mbpp_shapes() -> None:
    """Problems in the layouts of HumanEval (a prompt that the answer continues, `check`) and MBPP (assertions, a fenced answer)."""
    prefix = "def add(a, b):\n    \"\"\"The sum.\"\"\"\n"
    test = "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\ncheck(add)"
    for body, value in (("    return a + b\n", 1.0), ("    return a - b\n", 0.0), ("    return None\n", 0.0), ("    retrun\n", 0.0)):
        assert Code(prefix=prefix, tests=(test,)).score(QUESTION, body).value == value
    answer = "Like this:\n```python\ndef f(n):\n    return n * 2\n```\nOutput:\n```\n4\n```"
    assert program(answer) == "def f(n):\n    return n * 2\n"
    # A block that is left open is read; beside a closed block of Python it is taken to be cut off.
    assert program("```python\ndef f(n):\n    return n * 2") == "def f(n):\n    return n * 2\n"
    assert program("```bash\nls\n```\n```python\ndef f(n):\n    return n") == "def f(n):\n    return n\n"
    assert program("```\nf = abs\n```\nDone:\n```\n") == "f = abs\n" and program(f"{answer}\n```py\nprint(f(") == program(answer)
    found = Code(tests=("assert f(1) == 2", "assert f(2) == 5"), partial=True).score(QUESTION, answer)
    assert found.value == 0.5 and found.detail == "1 of 2 tests passed; AssertionError:  (test_1.py, line 1)"


