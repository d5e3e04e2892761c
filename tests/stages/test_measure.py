"""Costs of a stage in manifests: its own share, including workers, without anything that ran before or beside it."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pydantic import Field

from puna.stages.contract import StageConfig, StageRun, perform, rank_jobs, stage
from puna.stages.contract.measure import CPU_FILE, EVERY_SECONDS, Meter
from puna.stages.executors import PartExecutor, local, parts, ranks
from puna.stages.executors.worker import Answer
from puna.storage import Store

SIZE = 300_000_000


def burn(item: int) -> float:
    """Use a fifth of a second of this process's CPU time; return the time used."""
    started = time.process_time()
    while time.process_time() - started < 0.2:
        pass
    return time.process_time() - started


def hold(item: int) -> int:
    """Hold memory for several measurements of the meter."""
    block = np.ones(SIZE, np.uint8)
    time.sleep(4 * EVERY_SECONDS)
    return int(block[-1])


class CostConfig(StageConfig):
    """A configuration without fields."""


@stage(kind="signals", version="1")
def costly(config: CostConfig, run: StageRun) -> None:
    """Use memory in this process, and CPU time in the workers."""
    hold(0)
    run.metric("used", sum(run.map(burn, range(4))))
    run.write(pa.table({"id": ["a"]}))


@stage(kind="signals", version="1")
def cheap(config: CostConfig, run: StageRun) -> None:
    """Use next to nothing."""
    run.write(pa.table({"id": ["b"]}))


def test_a_stage_is_charged_with_its_workers_and_not_with_the_stage_before(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    with local(2) as executor:
        first = perform(costly, CostConfig(), {}, store, executor=executor).artifact.manifest
        second = perform(cheap, CostConfig(), {}, store, executor=executor).artifact.manifest
    assert first.timings["cpu_seconds"] >= first.metrics["used"] - 0.02  # the kernel counts in hundredths of a second
    assert second.timings["cpu_seconds"] < first.metrics["used"] / 2


@stage(kind="signals", version="1", ranks=True)
def shared(config: CostConfig, run: StageRun) -> None:
    """Run on all ranks."""
    run.write(pa.table({"id": ["c"]}))


def test_a_stage_is_charged_with_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time is the sum over ranks; memory is that of the largest process. A rank reports its own meter's values."""
    reports: list[str] = []

    def gather(own: str) -> list[str]:
        reports.append(own)
        return [own, "[7.5, 1099511627776]", "[2.5, 5]"]

    monkeypatch.setattr(ranks, "count", lambda: 3)
    monkeypatch.setattr(ranks, "together", lambda job: contextlib.nullcontext())
    monkeypatch.setattr(ranks, "mesh", lambda: SimpleNamespace(gather_texts=gather))
    manifest = perform(shared, CostConfig(), {}, Store.open(tmp_path)).artifact.manifest
    assert 10 <= manifest.timings["cpu_seconds"] < 15 and manifest.peak_memory_bytes == 1 << 40
    rank_jobs.do({"stage": "shared", "config": {}, "inputs": {}, "store": str(tmp_path), "project": "default", "scratch": str(tmp_path / "s")})
    cpu_seconds, peak = json.loads(reports[-1])
    assert 0 <= cpu_seconds < 5 and 1 << 20 < peak < 1 << 40


class ResumedConfig(StageConfig):
    saves: bool = Field(description="Save the work of the first attempt")


@stage(kind="signals", version="1")
def continued(config: ResumedConfig, run: StageRun) -> None:
    """Use CPU time and fail in the first attempt, then use next to nothing."""
    mark = run.scratch.parent / "attempted"
    if not mark.exists():
        mark.touch()
        if config.saves:
            (run.scratch / "state").touch()
        raise KeyError(burn(0))
    run.write(pa.table({"id": ["d"]}))


@pytest.mark.parametrize("saves", [True, False])
def test_a_stage_is_charged_with_the_earlier_attempts_that_it_continues(tmp_path: Path, saves: bool) -> None:
    store = Store.open(tmp_path)
    with pytest.raises(KeyError) as error:
        perform(continued, ResumedConfig(saves=saves), {}, store)
    cpu_seconds = perform(continued, ResumedConfig(saves=saves), {}, store).artifact.manifest.timings["cpu_seconds"]
    assert (cpu_seconds >= error.value.args[0] - 0.02) is saves


def test_cpu_seconds_are_on_disk_before_the_end(tmp_path: Path) -> None:
    """A killed process cannot write them."""
    file = tmp_path / CPU_FILE
    file.write_text("1000")
    with Meter(file=file):
        while float(file.read_text()) == 1000:
            burn(0)
        file.write_text("damaged")
    with Meter(file=tmp_path / "no folder" / CPU_FILE) as meter:
        burn(0)
    assert float(file.read_text()) > 1000 and 0 < meter.cpu_seconds < 1000


def test_memory_is_that_of_the_stage_and_not_of_the_one_before(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    first, second = (perform(s, CostConfig(), {}, store).artifact.manifest for s in (costly, cheap))
    assert first.peak_memory_bytes > SIZE
    assert 0 < second.peak_memory_bytes < first.peak_memory_bytes - SIZE / 2


@pytest.mark.parametrize("beside", [True, False])
def test_what_runs_beside_a_stage_is_not_counted(beside: bool) -> None:
    script = f"import sys; block = bytearray(b'x') * {SIZE}; print(flush=True); sys.stdin.read()"

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline()
        return process

    process = start() if beside else None
    with Meter() as quiet:
        process = process or start()
        time.sleep(3 * EVERY_SECONDS)
    process.communicate()
    with Meter() as empty:
        pass
    assert (quiet.peak_bytes - empty.peak_bytes > SIZE * 0.9) is not beside


class Elsewhere(PartExecutor):
    """A stub of a cluster, whose workers are not child processes."""

    below = False
    slots = 1

    def _begin(self, part: parts.Part) -> None:
        self._deliver(part, Answer(pickle.dumps(None), cpu_seconds=5.0, resident_bytes=1 << 40))

    def _close(self) -> None:
        pass


def test_workers_of_a_cluster_say_themselves_what_they_used() -> None:
    with Elsewhere() as cluster:
        cluster.submit(len, ()).result()
        with Meter(cluster) as meter:
            cluster.submit(len, ()).result()
        assert 5 <= meter.cpu_seconds < 10 and meter.peak_bytes == 1 << 40
        with Meter(cluster) as empty:
            pass
        assert empty.cpu_seconds < 5 and empty.peak_bytes < 1 << 40
