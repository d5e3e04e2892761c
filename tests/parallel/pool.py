"""One pool of gloo ranks for all tests: each rank runs jobs by name, and answers with a line of JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

RANKS = 8
PATIENCE, STARTING = 120.0, 600.0
"""Maximum seconds of a job, and maximum seconds until all ranks have joined."""


class Pool:
    """Processes that have joined one group. `run` gives a job to the first `ranks` of them."""

    def __init__(self, ranks: int = RANKS) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        own = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        pairs = [socket.socketpair() for _ in range(ranks)]
        theirs = [other.fileno() for _, other in pairs]
        command = [sys.executable, "-m", __name__, *map(str, theirs)]
        self.parent = subprocess.Popen(command, env=os.environ | own, pass_fds=theirs, start_new_session=True, stdin=subprocess.DEVNULL)
        for _, other in pairs:
            other.close()
        self.sockets = [one for one, _ in pairs]
        self.streams = [one.makefile("r") for one in self.sockets]
        deadline = time.monotonic() + STARTING
        for rank, one in enumerate(self.sockets):
            if not (select.select([one], [], [], max(0.0, deadline - time.monotonic()))[0] and self.streams[rank].readline()):
                self.close()
                raise RuntimeError(f"rank {rank} of {ranks} did not join the others within {STARTING:.0f} s")

    def run(self, job: str, ranks: int, **given: Any) -> list[Any]:
        """Return each rank's result; raise RuntimeError with the traceback of the first failing rank, or naming the ranks that did not
        answer in time."""
        members = list(range(ranks))
        for one in self.sockets[:ranks]:
            one.sendall(json.dumps({"job": job, "members": members, **given}).encode() + b"\n")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < ranks and time.monotonic() < deadline and not any("error" in a for a in answers.values()):
            waiting = {self.sockets[r]: r for r in members if r not in answers}
            for one in select.select(list(waiting), [], [], 1.0)[0]:
                line = ""
                with contextlib.suppress(ConnectionResetError):
                    line = self.streams[waiting[one]].readline()
                answers[waiting[one]] = json.loads(line) if line else {"error": "the rank ended"}
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if failed or len(answers) < ranks:
            self.close()  # the others may be waiting in an exchange
            raise RuntimeError(f"{job} {given}: " + "\n".join(f"rank {r}: {e}" for r, e in failed.items()) + f"; answered: {sorted(answers)}")
        return [answers[rank]["result"] for rank in members]

    def close(self) -> None:
        """End the processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.parent.pid, signal.SIGKILL)
        self.parent.wait()
        for one in (*self.streams, *self.sockets):
            one.close()


def serve(sockets: list[socket.socket]) -> None:
    """Fork a rank for each socket, so that the imports run only once; end when one of the ranks ends."""
    gc.disable()  # the imports leave no garbage
    # Modules that the first job of a kind would import in each rank.
    import pandas  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo
    import triton  # noqa: F401

    import puna.models.training.parallel.shard  # noqa: F401
    import tests.parallel.cases
    import tests.parallel.stage_jobs

    torch.set_num_threads(1)
    from puna.models.accounting import peak_flops

    peak_flops("cpu")
    tests.parallel.cases.warm_up()
    gc.freeze()
    gc.enable()
    for rank, own in enumerate(sockets):
        if os.fork() == 0:
            for other in sockets[:rank] + sockets[rank + 1 :]:
                other.close()
            os.environ["RANK"] = str(rank)
            work(own, tests.parallel.cases.JOBS | tests.parallel.stage_jobs.JOBS)
            return
    for own in sockets:
        own.close()
    os.wait()


def work(own: socket.socket, jobs: dict[str, Callable[..., Any]]) -> None:
    """Run the jobs that arrive on a socket until it closes."""
    from puna.models import progress
    from puna.models.training.parallel.mesh import group_of, join, message_group

    progress.BEAT = 0.05
    join()
    # All groups are created here, because all ranks must take part: jobs of two or four ranks then create none.
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [1, 2], [0, 1, 2], [0, 1, 2, 3]):
        for use in ("", "saving"):
            group_of(ranks, use)
    for number in range(4):
        message_group(number)
    own.sendall(b"joined\n")
    for line in own.makefile("r"):
        given = json.loads(line)
        try:
            answer = {"result": jobs[given.pop("job")](**given)}
        except Exception:  # noqa: BLE001 (the test shows it)
            answer = {"error": traceback.format_exc()}
        own.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    serve([socket.socket(fileno=int(number)) for number in sys.argv[1:]])
