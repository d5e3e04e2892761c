"""Run a command of Puna in processes that train together on a Ray cluster.

    python deploy/ray_ranks.py --address auto --processes 8 --gpus 1 run pretrain --recipe one-gpu --store /shared/store

Each process is a task of Ray with its own GPUs; the first one's machine is where all meet. All see the store and Puna's folder at the same
paths. A process that is lost ends all, and all start again from the last state, at most three times.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

RESTARTS = 3
WAIT = 30  # seconds between lines that say that Ray has no room
PR_SET_PDEATHSIG = 1


class Rank:
    """A process of the training."""

    def place(self) -> tuple[str, int]:
        """Return this machine's address and a free port."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), probe.getsockname()[1]

    def run(self, command: list[str], environment: dict[str, str]) -> tuple[int, str]:
        """Run the command; return its status and the last lines of its errors."""
        # Where Ray ends this task, its process must not go on.
        die = partial(ctypes.CDLL(None).prctl, PR_SET_PDEATHSIG, signal.SIGKILL)
        done = subprocess.run(command, env=os.environ | environment, stderr=subprocess.PIPE, text=True, check=False, preexec_fn=die)
        sys.stderr.write(done.stderr)
        return done.returncode, done.stderr[-2000:]


def attempt(command: list[str], processes: int, gpus: float, number: int, cwd: str) -> int | None:
    """Return the status of rank 0, or of the first process that failed; None if a process was killed, or Ray lost one."""
    bundles = [{"CPU": 1.0, **({"GPU": gpus} if gpus else {})}] * processes
    group = ray.util.placement_group(bundles)
    while not group.wait(WAIT):
        print(f"Ray has no room yet for {processes} processes with {gpus:g} GPUs each (--processes, --gpus): waiting", file=sys.stderr)
    paths = os.pathsep.join([f"{cwd}/.pkg", *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"env_vars": {"PYTHONPATH": paths}}
    options: dict[str, Any] = {"placement_group": group, "num_cpus": 1, "num_gpus": gpus, "runtime_env": environment}
    actors = [ray.remote(Rank).options(**options, placement_group_bundle_index=rank).remote() for rank in range(processes)]
    try:
        places = ray.get([actor.place.remote() for actor in actors])
        (host, port), machines = places[0], Counter(machine for machine, _ in places)
        common = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "WORLD_SIZE": str(processes), "TORCHELASTIC_RESTART_COUNT": str(number)}
        # Ray shows each task only its own GPUs: they are number 0 there.
        waiting = []
        for rank, (actor, (machine, _)) in enumerate(zip(actors, places, strict=True)):
            own = {"RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(machines[machine])}
            waiting.append(actor.run.remote(command, common | own))
        first, statuses = waiting[0], []
        while waiting:
            (done,), waiting = ray.wait(waiting)
            status, words = ray.get(done)
            statuses.append(status)
            if status < 0:
                return None
            if status:
                print(words, file=sys.stderr)
                return int(status)
            if done == first and not waiting:
                break
        return max(statuses)
    except RayError as error:
        print(f"Ray lost a process: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return None
    finally:
        for actor in actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default=None, help="auto, or ray://HOST:PORT; default: a Ray of this machine, for a trial")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=1, help="GPUs of each process; 0: none")
    given, words = parser.parse_known_args()
    cwd = str(Path(__file__).parents[1].resolve())
    local = {"num_cpus": given.processes, "include_dashboard": False} if given.address is None else {}
    ray.init(address=given.address, **local)
    command = [sys.executable, "-m", "puna.flows.cli.main", *words]
    for number in range(RESTARTS + 1):
        status = attempt(command, given.processes, given.gpus, number, cwd)
        if status is not None:
            return status
        end = "all start again from the last state" if number < RESTARTS else f"the run ends after {RESTARTS} restarts; start it again"
        print(f"a process was lost: {end}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
