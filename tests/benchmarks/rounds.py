"""Rounds with a planted preference: whether each round's policy is as good as the previous one, on prompts that no gate used.

Six runs of the flow `round`, then the gold reward of every round's policy and of every candidate, on fresh prompts. From the same start:
two runs started at the same moment from the command line, and a run killed with SIGKILL at random moments and restarted until it ends,
which must reach the same aliases and data digests as an undisturbed run.

    python tests/benchmarks/rounds.py --json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / ".pkg")]

import torch  # noqa: E402

from puna.flows.engine import launch  # noqa: E402
from puna.flows.engine.rounds import rounds_of  # noqa: E402
from puna.stages.align.gate import compare  # noqa: E402
from puna.stages.contract import execute, parse  # noqa: E402
from puna.stages.evaluation.evaluate import EvaluateConfig, evaluate  # noqa: E402
from puna.storage import Artifact, Store  # noqa: E402
from tests.flows import planted  # noqa: E402

TRAIN, HELDOUT, FRESH = 600, 150, 200
"""Prompts of each task: for training, for the gate, and for this measurement only."""


class Bench:
    """A store with the start model and the prompt pool, the recipe, and methods that run the flow."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.store = Store.open(folder / "store")
        self.start = planted.start(self.store, seed)
        self.pool = planted.pool(self.store, TRAIN, HELDOUT)
        self.recipe = planted.recipe(folder, seed=seed, evaluate={"answers": {"prompts_per_task": HELDOUT, "temperature": 1.0, "max_tokens": 16}})

    def fire(self) -> str:
        """Run the flow once in this process; return its message."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            launch.run(launch.Request("round", self.recipe, (), (self.start.id, self.pool.id), workers=1, json=True), self.store)
        return self.said()

    def said(self) -> str:
        """Return the message of the newest run."""
        return " | ".join(event["text"] for event in self.store.events(self.store.runs()[-1]) if event.get("event") == "said")

    def fired(self) -> subprocess.Popen[bytes]:
        """Start the flow from the command line, in a separate session."""
        command = [sys.executable, "-m", "puna.flows.cli.main", "run", "round", "--module", "tests.flows.planted", "--recipe", self.recipe,
                   "--input", self.start.id, "--input", self.pool.id, "--workers", "1", "--store", str(self.folder / "store")]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": f"{ROOT / '.pkg'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

    def copied(self, folder: Path) -> Bench:
        """Return a copy of this bench in another folder."""
        shutil.copytree(self.folder, folder)
        other = Bench.__new__(Bench)
        other.folder, other.store, other.start, other.pool = folder, Store.open(folder / "store"), self.start, self.pool
        other.recipe = str(folder / Path(self.recipe).name)
        return other

    def digests(self) -> dict[str, str]:
        """Return the data digests of the artifacts that the aliases point to."""
        return {name: self.store.resolve(key).data_digest for name, key in self.store.aliases().items()}


def scores(store: Store, model: Artifact, prompts: Artifact, seed: int) -> dict[str, float]:
    """Return the gold reward of a model's sampled answer to each fresh prompt."""
    answers = {"prompts_per_task": FRESH, "temperature": 1.0, "max_tokens": 16}
    made = execute(evaluate, parse(EvaluateConfig, {"answers": answers, "seed": seed}, ""), {"model": model, "prompts": prompts}, store)
    return {row["id"]: row["value"] for row in made.read("scores").to_pylist() if row["name"] == "score"}


def six_rounds(bench: Bench, count: int, seed: int) -> dict[str, Any]:
    """Run the flow `count` times; score each policy and candidate on prompts that neither training nor gate used."""
    began = time.perf_counter()
    said = []
    for _ in range(count):
        said.append(bench.fire())
        print(said[-1], file=sys.stderr, flush=True)
    minutes = (time.perf_counter() - began) / 60
    fresh = planted.pool(bench.store, 0, FRESH, first=100_000)
    tasks = {row["id"]: row["task"] for row in fresh.read().to_pylist()}
    policy, rows = bench.start, []
    before = scores(bench.store, policy, fresh, seed)
    start = sum(before.values()) / len(before)
    for one in rounds_of(bench.store, bench.store.alias("policy@latest")):
        after = scores(bench.store, one.candidate, fresh, seed)
        gain = compare(before, after, tasks)[0].gain
        moved = one.verdict == "passed"
        rows.append({"round": one.number, "verdict": one.verdict, "candidate": sum(after.values()) / len(after), "gain": gain.value,
                     "low": gain.low, "high": gain.high})  # fmt: skip
        before = after if moved else before
    taken = [row for row in rows if row["verdict"] == "passed"]
    return {
        "minutes": minutes, "start": start, "rounds": rows, "policies": len({start, *(row["candidate"] for row in taken)}), "said": said,
        "end": sum(before.values()) / len(before),
        # A decrease counts if its whole interval lies below 0.
        "falls_beyond_interval": sum(row["high"] < 0 for row in taken),
        "refused_that_would_have_fallen": sum(row["gain"] < 0 for row in rows if row["verdict"] == "refused"),
    }  # fmt: skip


def at_once(bench: Bench) -> dict[str, Any]:
    """Start two processes at the same moment."""
    running = [bench.fired() for _ in range(2)]
    ends = [process.communicate(timeout=900)[0].decode() for process in running]
    gates = [a for a in bench.store.artifacts() if a.manifest.stage == "gate"]
    return {"rounds": len(gates), "codes": [p.returncode for p in running], "left_to_the_other": sum("working on a round" in e for e in ends)}


def killed(bench: Bench, whole: Bench, seed: int, most: int) -> dict[str, Any]:
    """Kill the run at random moments, at most `most` times, and restart it until it ends: aliases and contents equal an undisturbed
    run's."""
    draw, kills, seconds = random.Random(seed), 0, 0.0
    while True:
        began = time.perf_counter()
        process = bench.fired()
        if kills < most:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=draw.uniform(4, 30))
        else:
            process.communicate(timeout=900)
        if process.poll() is not None:
            if process.returncode:
                raise SystemExit(f"a firing failed after {kills} kills: {bench.said()}")
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        kills += 1
        seconds += time.perf_counter() - began
    gates = [a for a in bench.store.artifacts() if a.manifest.stage == "gate"]
    return {"kills": kills, "killed_after_seconds": seconds, "rounds": len(gates), "same": bench.digests() == whole.digests()}


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where the stores are made (default: a temporary folder)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        first = Bench(Path(name) / "one", given.seed)
        others = [first.copied(Path(name) / other) for other in ("whole", "twice", "killed")]
        found: dict[str, Any] = {"seed": given.seed, "six_rounds": six_rounds(first, given.rounds, given.seed)}
        process = others[0].fired()
        process.communicate(timeout=900)
        found["at_once"] = at_once(others[1])
        found["at_once"]["same"] = others[1].digests() == others[0].digests()
        found["killed"] = killed(others[2], others[0], given.seed, given.kills)
    found["load"] = os.getloadavg()[0]
    print(json.dumps(found) if given.json else json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
