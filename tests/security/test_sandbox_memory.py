"""Memory outside a program's processes counts against its limit, or cannot be had."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from puna.stages.verifiers import sandbox
from puna.storage import PunaError

SPEC = importlib.util.spec_from_file_location("cases_verify", Path(__file__).with_name("cases_verify.py"))
assert SPEC is not None and SPEC.loader is not None
cases = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cases)


@pytest.fixture(scope="module")
def mode() -> sandbox.Mode:
    """The best way to run programs here, if it has namespaces."""
    try:
        return sandbox.mode("namespaces")
    except PunaError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("attack", cases.ATTACKS)
def test_memory_outside_processes_is_counted_or_refused(attack: str, mode: sandbox.Mode) -> None:
    assert not cases.held_over_limit(cases.ATTACKS[attack], mode)


def test_ordinary_programs_still_run(mode: sandbox.Mode) -> None:
    program = (
        "import asyncio, threading, subprocess, os, mmap\n"
        "async def one(): return 1\n"
        "done = []\nthread = threading.Thread(target=done.append, args=(1,))\nthread.start()\nthread.join()\n"
        "with open('file', 'wb') as file: file.write(b'text')\n"
        "with open('file', 'rb') as file: mapped = bytes(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))\n"
        "child = os.fork()\nif child == 0: os._exit(3)\nstatus = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
    )
    tests = ["assert asyncio.run(one()) == 1", "assert done == [1]", "assert mapped == b'text'", "assert status == 3"]
    outcome = sandbox.run(program, tests, sandbox.Limits(), mode)
    assert outcome.results == [None] * 4, outcome
