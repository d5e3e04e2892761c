"""The time until `puna up` can be used, and the overhead of its monitoring for a run.

    PYTHONPATH=.pkg python tests/benchmarks/product.py --json [--steps 20]
    OMP_NUM_THREADS=1 PYTHONPATH=.pkg python tests/benchmarks/product.py --json --part away

Starts `puna up` on a new store, then again on the same one, and times until the address answers and the forms exist, and a run of reused
steps with and without the server. CPU seconds are reported too, because wall time grows on a loaded machine.

`away`: a training that reports progress after each step, alternately without a server, with a server that accepts connections and never
answers, and with a server that is gone; the median step time and the total time of each.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from puna.flows.engine.session import session
from puna.flows.server.client import Server, read_note
from puna.flows.server.reporter import Reporter
from puna.stages.prompts.prompts import PromptsConfig, prompts
from puna.storage import Store

CONFIG = PromptsConfig(tasks=[{"task": "chain_sum"}], train=5, heldout=2)


def started(store: Store, log: Path) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """Start `puna up` and wait until all forms exist; return the process and the times."""
    began = time.perf_counter()
    with log.open("w") as file:
        words = [sys.executable, "-m", "puna.flows.cli.main", "up", "--port", "0", "--store", str(store.root)]
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    found: dict[str, Any] = {}
    for name, ready in (("address_seconds", lambda: read_note(store.root)), ("forms_seconds", lambda: "are published at" in log.read_text())):
        while not ready():
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        found[name] = round(time.perf_counter() - began, 1)
    both = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
    found["processor_seconds"] = [round(sum(one.cpu_times()[:2]), 1) for one in both]
    found["resident_mb"] = [round(one.memory_info().rss / 1e6) for one in both]
    return process, found


def reused(store: Store, steps: int) -> float:
    """Return the seconds of a run of `steps` steps that are all reused."""
    began = time.perf_counter()
    with session(store, flow="prompts", workers=1, json=True) as now:
        for number in range(steps):
            now.perform(prompts, CONFIG, {}, f"step_{number}")
    return time.perf_counter() - began


def away(store: Store, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the seconds of a training's steps by the state of the server: wall time, and CPU time of this process's threads."""
    import torch

    from puna.models.config import ModelConfig
    from puna.models.training.loop import TrainConfig, Trainer
    from puna.models.training.objectives import LanguageModeling
    from puna.models.training.objectives.base import Targets
    from puna.models.transformer import Transformer

    shape = ModelConfig(vocab_size=2048, hidden_size=128, intermediate_size=352, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=256)
    settings = TrainConfig(steps=1_000_000, schedule={"learning_rate": 1e-4})
    trainer = Trainer(Transformer(shape, seed=0), LanguageModeling(), settings)
    batch = Targets.from_documents(list(torch.randint(0, 2048, (4, 256), generator=torch.Generator().manual_seed(0))))
    silent, gone = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    urls = {"nobody": None, "silent": silent.getsockname()[1], "gone": gone.getsockname()[1]}
    gone.close()
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    number = 0
    for turn in range(rounds * len(urls)):
        name = list(urls)[(turn + turn // len(urls)) % len(urls)]
        server = None if urls[name] is None else Server(f"http://127.0.0.1:{urls[name]}/api")
        reporter = Reporter(store, f"run-{turn}", "training", server)
        reporter.start_step("training", "pretrain", {})
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            number += 1
            clock, processor = time.perf_counter(), time.process_time()
            trainer.step(number, batch, seed=0)
            reporter.progress("pretrain", number, 1e6, "loss 1.0")
            reporter.log(f"step {number}")
            taken[name].append((time.perf_counter() - clock, time.process_time() - processor))
        reporter.end("COMPLETED")
    silent.close()
    return {
        name: {"steps": len(some), "middle": round(statistics.median(s for s, _ in some), 5), "mean": round(statistics.fmean(s for s, _ in some), 5),
               "slowest": round(max(s for s, _ in some), 4), "processor_middle": round(statistics.median(p for _, p in some), 5)}
        for name, some in taken.items()
    }  # fmt: skip


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--part", choices=("start", "away"), default="start")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind of server in `away`")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one turn")
    asked = parser.parse_args()
    if asked.part == "away":
        with tempfile.TemporaryDirectory() as folder:
            found = {"load": os.getloadavg()[0], **away(Store.open(folder), asked.rounds, asked.seconds)}
        print(json.dumps(found) if asked.json else "\n".join(f"{name}: {value}" for name, value in found.items()))
        return
    with tempfile.TemporaryDirectory() as folder:
        store = Store.open(Path(folder) / "store")
        found: dict[str, Any] = {"load": os.getloadavg()[0], "steps": asked.steps}
        with Path(os.devnull).open("w") as quiet:
            sys.stdout, told = quiet, sys.stdout
            reused(store, 1)
            found["run_without_server_seconds"] = round(statistics.median(reused(store, asked.steps) for _ in range(3)), 2)
            for name in ("first", "again"):
                process, found[name] = started(store, Path(folder) / "log")
                if name == "again":
                    found["run_with_server_seconds"] = round(statistics.median(reused(store, asked.steps) for _ in range(3)), 2)
                process.send_signal(signal.SIGINT)
                process.wait()
            sys.stdout = told
    print(json.dumps(found) if asked.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
