"""Memory outside a program's processes counts against its limit, or cannot be allocated."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from puna.stages.verifiers import sandbox

SPEC = importlib.util.spec_from_file_location("cases_verify", Path(__file__).with_name("cases_verify.py"))
assert SPEC is not None and SPEC.loader is not None
cases = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(cases)


@pytest.mark.parametrize("attack", cases.ATTACKS)
def test_memory_outside_processes_is_counted_or_refused(attack: str, mode: sandbox.Mode) -> None:
    assert not cases.held_over_limit(cases.ATTACKS[attack], mode)


def test_areas_of_addresses_are_counted(mode: sandbox.Mode) -> None:
    assert not cases.held_over_limit(cases.AREAS, mode, 256)


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


@pytest.mark.parametrize("given", ["memory pids", "pids", None])
def test_a_program_lies_in_a_cgroup_of_its_own_where_one_can_be_made(
    given: str | None, mode: sandbox.Mode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With files in place of the kernel's cgroup tree: the written values are checked, and nothing is written if the kernel supports no
    limits."""
    beside = tmp_path / "mount" / "user.slice"
    (beside / "own.scope").mkdir(parents=True)
    (tmp_path / "own").write_text("4:memory:/elsewhere\n0::/user.slice/own.scope\n")
    if given is not None:
        (beside / "cgroup.subtree_control").write_text(f"{given}\n")
    (beside / "cgroup.procs").write_text("")
    monkeypatch.setattr(sandbox, "MOUNT", str(tmp_path / "mount"))
    monkeypatch.setattr(sandbox, "OWN", str(tmp_path / "own"))
    outcome = sandbox.run("x = 1", ["assert x == 1"], sandbox.Limits(memory_mb=200), mode)
    assert outcome.results == [None]
    made = [{file.name: file.read_text() for file in folder.iterdir()} for folder in beside.glob("puna-code-*")]
    # The program and its tests each write 0, which stands for the writing process.
    entered = {"memory.max": str(200 << 20), "memory.swap.max": "0", "cgroup.procs": "00", "cgroup.kill": "1"}
    assert made == ([entered] if given == "memory pids" else [])


def test_the_kernel_tells_that_a_cgroup_had_too_little_memory(tmp_path: Path) -> None:
    group = sandbox.Group(tmp_path)
    assert not group.is_exceeded()
    for count in (0, 2):
        (tmp_path / "memory.events").write_text(f"low 0\nhigh 0\nmax 9\noom 1\noom_kill {count}\noom_group_kill 0\n")
        assert group.is_exceeded() == bool(count)
    group.close()
