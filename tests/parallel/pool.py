"""One pool of gloo ranks for all tests: each rank runs jobs by name, and answers in a line of JSON."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
import traceback
from typing import Any

RANKS = 8
PATIENCE = 120.0
"""Seconds within which a job ends."""


class Pool:
    """Processes that have joined one group. `run` gives a job to the first ones of them."""

    def __init__(self, ranks: int = RANKS) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        command, pipe = [sys.executable, "-m", __name__], subprocess.PIPE
        environments = [os.environ | common | {"RANK": str(rank)} for rank in range(ranks)]
        self.workers = [subprocess.Popen(command, env=own, text=True, bufsize=1, stdin=pipe, stdout=pipe) for own in environments]

    def run(self, job: str, ranks: int, **given: Any) -> list[Any]:
        """Return each rank's result; RuntimeError with the first rank's traceback that has one, or who did not answer in time."""
        members = list(range(ranks))
        for worker in self.workers[:ranks]:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"job": job, "members": members, **given}) + "\n")
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < ranks and time.monotonic() < deadline and not any("error" in a for a in answers.values()):
            waiting = {self.workers[r].stdout: r for r in members if r not in answers}
            for stream in select.select(list(waiting), [], [], 1.0)[0]:
                line = stream.readline()
                answers[waiting[stream]] = json.loads(line) if line else {"error": "the rank ended"}
        failed = {rank: answer["error"] for rank, answer in answers.items() if "error" in answer}
        if failed or len(answers) < ranks:
            self.close()  # the others may wait in an exchange
            raise RuntimeError(f"{job} {given}: " + "\n".join(f"rank {r}: {e}" for r, e in failed.items()) + f"; answered: {sorted(answers)}")
        return [answers[rank]["result"] for rank in members]

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.wait()


def serve() -> None:
    """Run the jobs that come on the standard input until it ends."""
    import torch

    from puna.models.training.parallel.mesh import back_group, group_of, join
    from tests.parallel.cases import JOBS

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    join()
    # Jobs of two or four ranks then make no group, which all ranks would have to make.
    for ranks in ([0, 1], [2, 3], [0, 2], [1, 3], [0, 1, 2, 3]):
        group_of(ranks)
    back_group()
    for line in sys.stdin:
        given = json.loads(line)
        try:
            answer = {"result": JOBS[given.pop("job")](**given)}
        except Exception:  # noqa: BLE001 (the test shows it)
            answer = {"error": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    serve()
