"""A program of several processes: trains with its state in a folder; in the first attempt rank 1 is killed after a step."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from puna.models.training.parallel.mesh import join
from tests.parallel.cases import trained

if __name__ == "__main__":
    torch.set_num_threads(1)
    join()
    folder, layout, die = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
    result = trained([0, 1], layout, folder, steps=6, die=0 if again else die)
    if os.environ["RANK"] == "0":
        Path(folder, "result.json").write_text(json.dumps(result))
