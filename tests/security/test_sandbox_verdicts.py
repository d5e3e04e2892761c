"""A program cannot avoid its verdict through its names, the length of its errors, or child processes that nobody waits for."""

from __future__ import annotations

import signal

import pytest

from puna.stages.verifiers import sandbox
from puna.stages.verifiers.base import Question
from puna.stages.verifiers.python_code import Code
from puna.stages.verifiers.sandbox import Limits, run

QUESTION = Question("q", "t", "", None)
BURN = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        while time.process_time() < 0.03: pass
        os._exit(0)
    try: os.wait()
    except OSError: pass
"""
"""Children that use 1.2 s of CPU time in total, one after the other."""


@pytest.mark.usefixtures("mode")
def test_a_socket_whose_name_is_no_text_does_not_end_the_watch() -> None:
    source = 'import socket, time\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.bind(b"\\0\\xff")\ndef f(x):\n  time.sleep(0.2)\n  return 1\n'
    score = Code(tests=("assert f(1) == 2",)).score(QUESTION, source)
    assert score.value == 0.0 and "0 of 1" in score.detail, score
    assert Code(tests=("assert f(1) == 1",)).score(QUESTION, source).value == 1.0


def test_many_long_errors_of_wide_characters_give_a_verdict(mode: sandbox.Mode) -> None:
    """Escaped to ASCII, 25 errors of 300 emoji take 90 kB, but a verdict may have only 64 kB."""
    made = run('def f(x):\n  raise ValueError("\U0001f600" * 2000)\n', [f"assert f({n}) == 2" for n in range(25)], Limits(), mode)
    assert made.results is not None and not made.refused, made
    assert len(made.results) == 25 and all(made.results) and str(made.results[0]).startswith("ValueError: \U0001f600\U0001f600")


@pytest.mark.parametrize("handler", ["signal.SIG_IGN", "signal.SIG_DFL", "lambda number, frame: None"])
def test_a_program_does_not_choose_what_follows_the_end_of_a_child(mode: sandbox.Mode, handler: str) -> None:
    made = run(f"import signal\nsignal.signal(signal.SIGCHLD, {handler})", ["pass"], Limits(), mode)
    assert made.results is not None and str(made.results[0]).startswith("PermissionError"), made


def test_children_whose_end_is_ignored_count(mode: sandbox.Mode) -> None:
    ignore = "import signal\ntry: signal.signal(signal.SIGCHLD, signal.SIG_IGN)\nexcept OSError: pass\n"
    assert run(ignore + BURN, ["pass"], Limits(seconds=0.3), mode).ended == "time"


def test_children_count_where_this_process_ignores_the_end_of_its_own(mode: sandbox.Mode) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        made = run(BURN, ["pass"], Limits(seconds=0.3), mode)
        short = run("x = 1", ["assert x == 1"], Limits(), mode)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert made.ended == "time" and short.results == [None], (made, short)
