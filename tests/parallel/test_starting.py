"""Processes started together: one is killed, one fails, or something is missing."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
import torch
from pydantic import Field
from typer.testing import CliRunner

from puna.flows.cli.inspect import leads
from puna.flows.cli.main import app
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import join
from puna.stages.contract import StageConfig, StageRun, stage
from puna.stages.contract.rank_jobs import check
from puna.stages.executors import ranks as processes
from puna.stages.pretrain.pretrain import PretrainConfig, pretrain
from puna.storage import PunaError

from .conftest import Run


def test_a_killed_rank_starts_all_again_with_the_same_weights(ranks: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    layout, folder = {"shard": 2}, tmp_path / "killed"
    folder.mkdir()
    unkilled = ranks("trained", 2, layout=layout, folder=str(tmp_path / "whole"), steps=6)[0]
    command = [sys.executable, "-m", "tests.parallel.killed", str(folder), json.dumps({"layout": layout}), json.dumps([[1, "step", 3]])]
    assert processes.start(command, 2) == 0
    assert json.loads((folder / "result.json").read_text()) == unkilled
    assert "ended by SIGKILL: all restart" in capfd.readouterr().err


AGENTS = """
import os, signal, sys, time
from pathlib import Path
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from puna.stages.executors import ranks
port, killed = sys.argv[1], Path(sys.argv[2])
def do(job):
    first = not killed.exists()
    with ranks.together(job if job["stage"] else None):
        ranks.mesh().wait()
        if first and ranks.follows():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60 * first)
def work():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks.join()
    os.write(1, f"start {os.environ['TORCHELASTIC_RESTART_COUNT']} of {os.environ['RANK']}\\n".encode())  # one write: two ranks share the pipe
    if ranks.follows():
        ranks.follow(lambda job: do({"stage": ""}))
    else:
        do({"stage": "sft"})
        ranks.finish()
other = os.fork()
config = LaunchConfig(2, 2, 1, run_id="puna", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", start_method="fork", monitor_interval=0.1)
elastic_launch(config, work)()
if other:
    sys.exit(os.waitpid(other, 0)[1])
"""


def test_two_agents_of_torchrun_that_count_starts_differently_go_on_after_a_kill(tmp_path: Path):
    """The agent of the killed rank counts a restart, and the other one does not."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", AGENTS, port, str(tmp_path / "killed")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as agents:
        try:
            out, _ = agents.communicate(timeout=180)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agents.pid, signal.SIGKILL)
    assert agents.returncode == 0 and sorted(out.splitlines()) == ["start 0 of 0", "start 0 of 0", "start 0 of 1", "start 1 of 1"]


LOST = """
import os, signal, socket, sys, time
from pathlib import Path
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from puna.stages.executors import ranks
ranks.LAST_WORDS = 0.5
folder = Path(sys.argv[1])
def do(job):
    with ranks.together(job if job["stage"] else None):
        ranks.mesh().wait()
        (folder / f"pid of {os.getppid()}").write_text(str(os.getpid()))
        while not ranks.agree((folder / "lost").exists()):
            time.sleep(0.1)
def work():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ranks.join()
    if ranks.follows():
        return ranks.follow(lambda job: do({"stage": ""}))
    do({"stage": "sft"})
    ranks.finish()
    print("ended", flush=True)
def agent(port):
    if (pid := os.fork()):
        return pid
    configs = {"keep_alive_interval": 3, "join_timeout": 100}  # time for a rank to say why it fails
    config = LaunchConfig(2, 2, 1, run_id="puna", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", start_method="fork", monitor_interval=0.1,
                          rdzv_configs=configs)
    try:
        elastic_launch(config, work)()
        os._exit(0)
    finally:
        os._exit(1)
def agents():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    both = [agent(port)]
    while True:  # the first one holds the agents' store
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    both.append(agent(port))
    while not all((folder / f"pid of {pid}").exists() for pid in both):
        time.sleep(0.1)
    return port, *both
def lose(pid):
    worker = int((folder / f"pid of {pid}").read_text())
    for one in (pid, worker):
        os.kill(one, signal.SIGKILL)
    os.waitpid(pid, 0)
port, first, second = agents()
lose(first)
print("alone:", os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]), flush=True)
port, first, second = agents()
lose(second)
(folder / "lost").touch()
third = agent(port)
print("with another:", *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in (first, third)), flush=True)
"""


def test_the_loss_of_an_agent_with_its_ranks_ends_the_others_and_another_agent_takes_its_place(tmp_path: Path):
    """If the agent that holds the agents' store is lost, none continues. If another agent is lost, all continue once an agent replaces it."""
    command = [sys.executable, "-c", LOST, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as agents:
        try:
            out, errors = agents.communicate(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agents.pid, signal.SIGKILL)
    assert out.splitlines() == ["alone: 1", "ended", "with another: 0 0"], errors
    assert "rank 1: PunaError: an exchange with another rank failed: " in errors


FEWER = """
import os, signal, socket, sys, time, json
from pathlib import Path
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.layout import Layout
from puna.models.training.parallel.mesh import join
from tests.parallel.cases import trained
folder, last = Path(sys.argv[1]), []
def work():
    torch.set_num_threads(1)
    join()
    world = int(os.environ["WORLD_SIZE"])
    layout = Layout().repeated(world)
    def at(place, step):
        if world == 2 and step == 2 and last:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
    result = trained(range(world), layout=layout.model_dump(), folder=str(folder), steps=4, at=at)
    (folder / "result.json").write_text(json.dumps({"layout": str(layout), **result}))
def launch(port):
    configs = {"keep_alive_interval": 1, "last_call_timeout": 2, "join_timeout": 100}
    config = LaunchConfig(1, 2, 1, run_id="puna", rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{port}", start_method="fork", monitor_interval=0.1,
                          rdzv_configs=configs)
    elastic_launch(config, work)()
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
if not os.fork():
    while True:  # the first agent holds the agents' store
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                break
        time.sleep(0.1)
    last.append(True)
launch(port)
"""


def test_when_an_agent_is_lost_the_others_go_on_with_fewer_copies_of_the_model(ranks: Run, tmp_path: Path):
    whole = ranks("trained", 2, layout={"data": 2}, folder=str(tmp_path / "whole"), steps=4)[0]
    with subprocess.Popen([sys.executable, "-c", FEWER, str(tmp_path)], start_new_session=True) as agents:
        try:
            agents.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agents.pid, signal.SIGKILL)
    result = json.loads((tmp_path / "result.json").read_text())
    assert agents.returncode == 0 and result["layout"] == "one process"
    assert result["losses"] == pytest.approx(whole["losses"], rel=1e-5)


def test_a_layout_is_repeated_over_the_processes_that_run(monkeypatch: pytest.MonkeyPatch):
    assert Layout(shard=2).repeated(6) == Layout(data=3, shard=2) and Layout(data=2).repeated(2) == Layout(data=2)
    assert Layout(shard=2).repeated(3) == Layout(shard=2) and Layout(shard=2).repeated(1) == Layout(shard=2)
    assert Layout(shard=2, tensor=2).repeated(8).refusal("cpu") is None
    three = Layout(shard=2, pipeline=2, tensor=2)
    assert three.repeated(16) == three and Layout(data=2, shard=2, tensor=2).repeated(16) == Layout(data=4, shard=2, tensor=2)
    with pytest.raises(ValueError, match="no test proves the layout pipeline 2 x data 2 x shard 2 x tensor 2 equal to one process"):
        Layout(data=2, shard=2, pipeline=2, tensor=2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    check(pretrain, PretrainConfig(compute={"layout": {"shard": 2}}))
    with pytest.raises(PunaError, match=r"compute.layout = shard 3 needs 3 processes, or a multiple of that; 4 run: start with --processes 3 or torchrun"):
        check(pretrain, PretrainConfig(compute={"layout": {"shard": 3}}))
    monkeypatch.setenv("WORLD_SIZE", "16")  # twice three axes would be four
    check(pretrain, PretrainConfig(compute={"layout": {"data": 2, "shard": 2, "tensor": 2}}))
    with pytest.raises(PunaError, match=r"compute.layout = pipeline 2 x shard 2 x tensor 2 needs 8 processes; 16 run: start with --processes 8 or torchrun"):
        check(pretrain, PretrainConfig(compute={"layout": {"pipeline": 2, "shard": 2, "tensor": 2}}))


def test_the_status_of_a_failure_is_handed_on_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Rank 0 is busy for longer than the grace period for other ranks' last messages, and still prints and records its own error."""
    monkeypatch.setattr(processes, "LAST_WORDS", 0.1)
    program = f"""
import os, sys, time
from pathlib import Path
rank, failed = int(os.environ["RANK"]), Path({str(tmp_path / "failed")!r})
while rank == 0 and not failed.exists():
    time.sleep(0.01)
time.sleep(rank == 0)
print("rank", rank, file=sys.stderr, flush=True)
failed.touch()
sys.exit(3 - rank)
"""
    assert processes.start([sys.executable, "-c", program], 2) == 3
    assert sorted(capfd.readouterr().err.splitlines()) == ["rank 0", "rank 1"]


STARTING = """
import os, sys, time
from pathlib import Path
from puna.stages.executors import ranks
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "2":
    time.sleep(300)
ranks.join()
"""

WORKING = """
import os, signal, sys, time
from pathlib import Path
from puna.stages.executors import ranks
heard = []
signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
ranks.join()
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
until = time.monotonic() + 300
while not heard and time.monotonic() < until:
    time.sleep(0.05)
time.sleep(1)
sys.exit(7 if heard == [1] else 8)
"""


def stopped(program: str, folder: Path, *numbers: int) -> int:
    """Return the status of three ranks of a program. When each has written its process id, this process gets signals, which it passes on."""

    def send() -> None:
        while not all((folder / str(rank)).exists() for rank in range(3)):
            time.sleep(0.05)
        time.sleep(2)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.2)

    before = signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        threading.Thread(target=send, daemon=True).start()
        return processes.start([sys.executable, "-c", program, str(folder)], 3)
    finally:
        signal.signal(signal.SIGHUP, before)
        for rank in range(3):
            with pytest.raises(ProcessLookupError):
                os.kill(int((folder / str(rank)).read_text()), 0)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stop_before_all_ranks_have_joined_is_one_line(number: int, status: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert stopped(STARTING, tmp_path, number) == status
    assert capfd.readouterr().err == "stopped before all processes had started; start the same command again\n"


def test_a_second_stop_ends_ranks_that_do_not_react(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(processes, "LAST_WORDS", 0.5)
    assert stopped(WORKING, tmp_path, signal.SIGINT, signal.SIGINT) == 130
    assert not capfd.readouterr().err


def test_the_end_of_a_terminal_stops_rank_0_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    assert stopped(WORKING, tmp_path, signal.SIGHUP, signal.SIGHUP) == 7
    assert not capfd.readouterr().err  # the others see no page of C++ frames


LED = """
import os, sys, time
from pathlib import Path
from puna.stages.executors import ranks
ranks.LAST_WORDS = 0.5
ranks.join()
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
ranks.follow(print) if ranks.follows() else time.sleep(300)
"""


def test_ranks_stop_when_their_launcher_is_killed(tmp_path: Path):
    started = f"import sys; from puna.stages.executors import ranks; ranks.start([sys.executable, '-c', {LED!r}, {str(tmp_path)!r}], 2)"
    launcher = subprocess.Popen([sys.executable, "-c", started], stderr=subprocess.DEVNULL, start_new_session=True)
    while not all((tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"):
        assert launcher.poll() is None
        time.sleep(0.05)
    ranks = [psutil.Process(int((tmp_path / rank).read_text())) for rank in "01"]
    launcher.kill()
    launcher.wait()
    assert not psutil.wait_procs(ranks, timeout=60)[1]


class DividedConfig(StageConfig):
    """The layout of a stage that runs in several processes."""

    layout: Layout = Field(Layout(), description="Processes")


@stage(kind="signals", ranks=True, version="1")
def divided(config: DividedConfig, run: StageRun) -> None:
    """Write nothing."""


@stage(kind="signals", version="1")
def undivided(config: DividedConfig, run: StageRun) -> None:
    """Write nothing."""


@pytest.mark.parametrize("name, problem", [
    ("divided", "divided: layout = shard 2 needs 2 processes, or a multiple of that; 3 run: start with --processes 2 or torchrun"),
    ("undivided", "undivided runs in one process, and 3 were started: start one, without --processes, torchrun or srun"),
])  # fmt: skip
def test_a_run_that_does_not_fit_its_processes_is_refused_before_they_start(
    name: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(processes, "start", lambda command, count: 9)
    call = ["run", f"stage:{name}", "--store", str(tmp_path), "--set", "layout.shard=2", "--processes"]
    refused = CliRunner().invoke(app, [*call, "3"])
    assert str(refused.exception).startswith(problem), refused.output
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert name == "undivided" or CliRunner().invoke(app, [*call, "4"]).exit_code == 9


def test_after_the_last_restart_no_other_is_announced(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(processes, "_attempt", lambda command, count, attempt: -signal.SIGKILL)
    assert processes.start(["puna"], 2) == 1
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.endswith("SIGKILL: all restart from the last saved state") for line in lines[:3])
    assert lines[3] == "a process was ended by SIGKILL: the run ends after 3 restarts; start it again"


def test_a_ray_without_room_its_ranks_and_its_last_restart_are_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    class Group:
        room = 0

        def wait(self, seconds: int) -> bool:
            self.room += 1
            return self.room > 1

    ray: Any = ModuleType("ray")
    ray.__path__, ray.init, ray.get, group = [], lambda **more: None, lambda one: one, Group()
    ray.exceptions = ModuleType("ray.exceptions")
    ray.exceptions.RayError = RuntimeError
    ray.util = SimpleNamespace(placement_group=lambda bundles: group, remove_placement_group=lambda group: None)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.exceptions", ray.exceptions)
    spec = importlib.util.spec_from_file_location("ray_ranks", Path(__file__).parents[2] / "deploy" / "ray_ranks.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    started: list[dict[str, str]] = []

    class Actor:
        def __init__(self, number: int) -> None:
            self.place = SimpleNamespace(remote=lambda: (f"machine {number // 2}", 7))
            self.run = SimpleNamespace(remote=lambda command, own: started.append(own) or (0, ""))

    numbers = iter(range(3))
    ray.remote = lambda kind: SimpleNamespace(options=lambda **more: SimpleNamespace(remote=lambda: Actor(next(numbers))))
    ray.wait, ray.kill = lambda waiting: (waiting[:1], waiting[1:]), lambda actor: None
    assert script.attempt(["puna"], 3, 1.0, 0, "/") == 0  # the room is there
    assert [(own["RANK"], own["LOCAL_WORLD_SIZE"], own["MASTER_ADDR"]) for own in started] == [
        ("0", "2", "machine 0"), ("1", "2", "machine 0"), ("2", "1", "machine 0"),
    ]  # fmt: skip
    assert capsys.readouterr().err == "Ray has no room yet for 3 processes with 1 GPUs each (--processes, --gpus): waiting\n"
    monkeypatch.setattr(script, "attempt", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["ray_ranks.py", "--processes", "2", "run", "sft"])
    assert script.main() == 1
    assert [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()] == 3 * ["all start again from the last state"] + [
        "the run ends after 3 restarts; start it again"
    ]


def test_a_number_of_processes_that_does_not_run_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PunaError, match=r"--processes 4: 2 processes run already \(WORLD_SIZE, of torchrun or srun\); leave it out"):
        leads(4)


def test_an_error_of_rank_0_itself_is_not_taken_for_a_lost_exchange(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(processes, "_say", lambda text: None)
    with pytest.raises(torch.OutOfMemoryError, match="^CUDA out of memory"), processes.together({"stage": "sft"}):
        raise torch.OutOfMemoryError("CUDA out of memory")


BROKEN = """
import datetime, sys, time
from puna.models.training.parallel import mesh
from puna.stages.executors import ranks
from puna.storage import PunaError
mesh.TIMEOUT = datetime.timedelta(seconds=3)
ranks.LAST_WORDS = 1.0
ranks.join()
rank = mesh.dist.get_rank()
def fail(job):
    raise ValueError(f"no room for {job['stage']}")
if rank == 1:
    ranks.follow(fail)
if rank == 2:
    time.sleep(60)
try:
    with ranks.together({"stage": "sft"}):
        ranks.mesh().wait()
except PunaError as error:
    print(error, file=sys.stderr)
    sys.exit(4)
"""


def test_the_last_words_of_each_rank_and_the_rank_that_hangs_are_named(capfd: pytest.CaptureFixture[str]):
    assert processes.start([sys.executable, "-c", BROKEN], 3) == 4
    (line,) = [one for one in capfd.readouterr().err.splitlines() if one.startswith("rank 0: ")]
    assert "; rank 1: ValueError: no room for sft; rank 2: no report (a rank without a report hangs, which the others notice after 0:00:03" in line


TOLD = """
import os, sys, time
from puna.flows.engine.console import tee_stderr
from puna.stages.executors import ranks
for torch, slurm in (("WORLD_SIZE", "STEP_NUM_TASKS"), ("RANK", "PROCID"), ("LOCAL_RANK", "LOCALID")):
    os.environ[f"SLURM_{slurm}"] = os.environ.pop(torch)
del os.environ["MASTER_ADDR"]
os.environ.update({f"SLURM_{name}": "1" for name in ("JOB_ID", "STEP_ID", "STEP_TASKS_PER_NODE", "NODEID")}, SLURM_STEP_NODELIST="localhost,m[07-09]")
os.environ.update(ranks.slurm())
ranks.join()
if ranks.follows():
    ranks.LOOK = 1.0
    with tee_stderr(ranks.tell):
        ranks.follow(lambda job: print(f"one\\ntwo of {job['stage']}", file=sys.stderr, flush=True))
else:
    with ranks.together({"stage": "sft"}):
        lines, until = [], time.monotonic() + 60
        while len(lines) < 4 and time.monotonic() < until:
            lines += [line for line in ranks.lines_of_ranks() if line.endswith(("one", "two of sft"))]  # torch warns of what it likes
    ranks.finish()
    print(sorted(lines), flush=True)
    os._exit(0)
"""


def test_lines_of_other_ranks_reach_the_first_one_which_leaves_when_all_have_ended(capfd: pytest.CaptureFixture[str]):
    """Rank 0 holds the store, which the other ranks poll once a second. All know their ranks from the variables of a Slurm step only."""
    assert processes.start([sys.executable, "-c", TOLD], 3) == 0
    lines = [f"rank {rank}: {line}" for rank in (1, 2) for line in ("one", "two of sft")]
    assert capfd.readouterr().out.splitlines()[-1] == str(lines)


ALONE = """
import datetime, sys
from puna.models.training.parallel import mesh
mesh.TIMEOUT = datetime.timedelta(seconds=1)
try:
    mesh.join()
except ConnectionError as error:
    print(error)
"""


@pytest.mark.parametrize("more, problem", [
    ({}, "could not connect to all: rank 1 did not join within 0:00:01: start all 2"),
    ({"WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "nope0"}, "Unable to find address for: nope0; set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface"),
], ids=["rank", "interface"])
def test_a_missing_rank_and_a_missing_interface_are_named(more: dict[str, str], problem: str):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0", **more}
    done = subprocess.run([sys.executable, "-c", ALONE], env=os.environ | own, capture_output=True, text=True, timeout=60)
    assert problem in done.stdout, done


def test_no_line_is_sent_after_the_store_is_gone(monkeypatch: pytest.MonkeyPatch):
    """Torch may log an error's page for each try, and its lines would be sent, too."""
    gone = MagicMock()
    gone.set.side_effect = [None, RuntimeError("Broken pipe"), None]
    monkeypatch.setenv("RANK", "17")
    monkeypatch.setattr("puna.models.training.parallel.mesh._store", gone)
    for line in ("one", "two", "three"):
        processes.tell(line)
    assert [call.args for call in gone.set.call_args_list] == [("line-17-1", "one"), ("line-17-2", "two")]


@pytest.mark.parametrize("name", ["MASTER_PORT", "WORLD_SIZE"])
def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str):
    for one in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
        monkeypatch.setenv(one, "1")
    monkeypatch.delenv(name)
    with pytest.raises(ValueError, match=f"{name} not set, or empty"):
        join()
    monkeypatch.setenv(name, "")
    with pytest.raises(ValueError, match=f"{name} not set, or empty"):
        join()


STEP = {
    "SLURM_STEP_NUM_TASKS": "20", "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "2", "SLURM_STEP_NODELIST": "gpu[07-08,12]-ib,m1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2", "SLURM_PROCID": "17", "SLURM_LOCALID": "1", "SLURM_CPUS_PER_TASK": "6",
}  # fmt: skip


def test_a_task_of_a_slurm_step_is_a_rank(monkeypatch: pytest.MonkeyPatch):
    for name in ("WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "20")  # of the job: its batch script is no task of a step
    assert processes.slurm() == {}
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    port = 10_000 + (31 * 4711 + 2) % 10_000
    assert processes.slurm() == {
        "WORLD_SIZE": "20", "RANK": "17", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu07-ib", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "6",
    }  # fmt: skip
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.7")
    monkeypatch.setenv("MASTER_PORT", "9000")
    monkeypatch.setenv("SLURM_NODEID", "1")
    assert processes.slurm()["LOCAL_WORLD_SIZE"] == "8" and not {"MASTER_ADDR", "MASTER_PORT"} & {*processes.slurm()}
    monkeypatch.delenv("SLURM_STEP_NODELIST")
    with pytest.raises(PunaError, match="one of 20 tasks of a Slurm step, and cannot join the others without SLURM_STEP_NODELIST: start"):
        leads(1)
    monkeypatch.setenv("WORLD_SIZE", "1")  # a run of its own, or torchrun's
    assert processes.slurm() == {} and leads(1)


@pytest.mark.parametrize("name, value, problem", [
    ("WORLD_SIZE", "two", "must be a whole number of at least 1; unset it, or let torchrun or --processes set it"),
    ("WORLD_SIZE", "0", "must be a whole number of at least 1"), ("RANK", "-1", "must be a whole number of at least 0"),
    ("RANK", "2", "the ranks of WORLD_SIZE=2 processes are 0 to 1"), ("MASTER_PORT", "http", "must be a whole number"), ("WORLD_SIZE", "", "must be"), ("LOCAL_RANK", "", "must be"),
])  # fmt: skip
def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str, problem: str):
    for one, own in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", name: value}.items():
        monkeypatch.setenv(one, own)
    with pytest.raises(PunaError, match=f"^{name}={value or '.empty.'}: {problem}"):
        leads(1)


def test_a_port_where_nobody_listens_is_named(monkeypatch: pytest.MonkeyPatch):
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("puna.models.training.parallel.mesh.JOINING", __import__("datetime").timedelta(seconds=1))
    with pytest.raises(PunaError, match="rank 1 of 2 cannot reach rank 0 at 127.0.0.1:9"):
        processes.join()


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.create_server(("", 0)) as busy:
        port = str(busy.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "RANK": "0"}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(PunaError, match=f"rank 0 of 2 cannot listen at 127.0.0.1:{port}: .*EADDRINUSE.*; set MASTER_PORT"):
            processes.join()


def test_a_layout_of_other_processes_is_refused_by_name():
    settings = PretrainConfig(compute={"layout": {"tensor": 2}})
    with pytest.raises(PunaError, match=r"compute.layout = tensor 2 needs 2 processes, or a multiple of that; 1 run: start with --processes 2 or torchrun"):
        check(pretrain, settings)


def test_a_layout_that_no_test_proves_is_refused():
    with pytest.raises(ValueError, match="no test proves the layout pipeline 2 x expert 2"):
        PretrainConfig(compute={"layout": {"pipeline": 2, "expert": 2}})
