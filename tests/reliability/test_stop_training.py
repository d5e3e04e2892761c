"""Killed or stopped training runs: what they save, and that they end with the same bits after resuming."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from puna.models.config import ModelConfig
from puna.models.training import objectives as o
from puna.models.training import state
from puna.models.training.loop import TrainConfig, train, weights_digest
from puna.models.transformer import Transformer

ROOT = Path(__file__).parents[2]
SHAPE = ModelConfig(vocab_size=19, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
STEPS, KILLED = 12, 7


def run(folder: Path | None, kill: int | None = None, save_seconds: float = 10.0) -> str:
    """Train a small model; with `kill`, send this process that signal after step 7. Return a digest of the weights."""

    def batches(step: int) -> list[o.Targets]:
        return [o.Targets.from_documents(np.random.default_rng([7, step]).integers(0, 19, (3, 11)).tolist())]

    def on_step(row: dict[str, float]) -> None:
        if kill is not None and row["step"] == KILLED:
            os.kill(os.getpid(), kill)

    model = Transformer(SHAPE, "lm", seed=0)
    config = TrainConfig(steps=STEPS, schedule={"learning_rate": 0.01, "ema": 0.9}, compute={"save_seconds": save_seconds})
    train(model, o.LanguageModeling(), batches, config, seed=3, checkpoint_dir=folder, on_step=on_step)
    return weights_digest(model)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_training_keeps_its_state_and_ends_with_the_same_bits(sent: signal.Signals, tmp_path: Path) -> None:
    # A tiny interval simulates steps that each take longer than the interval.
    code = "import sys; from pathlib import Path; import test_stop_training as t; t.state.SAVE_SHARE = float('inf'); "
    code += "t.run(Path(sys.argv[1]), int(sys.argv[2]), 1e-9 if int(sys.argv[2]) == 9 else 1e6)"
    paths = os.pathsep.join((str(ROOT / ".pkg"), str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(int(sent))], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    # At Ctrl-C Python ends a command with status 1 or by the signal itself, depending on how it was started.
    assert ended.returncode in ((1, -sent) if sent == signal.SIGINT else (-sent,)), ended.stderr[-2000:]
    record = state.load_record(tmp_path)
    # SIGKILL also interrupts a write of the state; the state before it is complete.
    assert record is not None and (0 < record["step"] < KILLED if sent == signal.SIGKILL else record["step"] == KILLED)
    assert run(tmp_path) == run(None)
