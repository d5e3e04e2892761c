"""A program of several processes that does a job with its state in a folder; ranks are killed at given points of given attempts."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from puna.models.training.parallel.mesh import join
from tests.parallel.cases import rolled, trained

if __name__ == "__main__":
    torch.set_num_threads(1)
    join()
    folder, given, deaths = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    attempt, rank, members = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"], list(range(int(os.environ["WORLD_SIZE"])))

    def at(place: str, number: int) -> None:
        if [int(rank), place, number] == (deaths[attempt] if attempt < len(deaths) else None):
            os.kill(os.getpid(), signal.SIGKILL)

    result = rolled(members, folder=folder, at=at, **given) if "generate" in given else trained(members, folder=folder, steps=4, at=at, **given)
    if rank == "0":
        Path(folder, "result.json").write_text(json.dumps(result))
