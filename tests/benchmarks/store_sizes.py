"""Curation by size: CPU seconds per gigabyte of HTML, peak memory and disk; kills in the largest run; equal bytes on clusters of workers.

Each size is one `puna run curate --recipe clean` over a separate web (`store_web.py`), whose files exist only while they are read. In the
largest run, the driver is killed while it reads its inputs, and a worker while it extracts; the run then continues. Each size is
`size_N_gb_…`; `memory_growth` and `seconds_per_gb_growth` compare the largest with the smallest of at least `FROM_GB`: the larger growth of
resident memory of driver and worker, and CPU seconds per gigabyte of all processes, including killed ones. CPU seconds are sampled every
second: unlike wall time, they do not grow with the machine's load. `sizes_same_NAME`: 1 if an executor gives the keys and digests of local
processes. Stores and results stay in the folder, so that an interrupted benchmark continues.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.store_web import Web, served

ROOT = Path(__file__).parents[2]
FROM_GB = 5.0
SAMPLE_SECONDS = 1.0
DISK_SECONDS = 20.0
BUSY_SECONDS = 8  # CPU seconds after which a worker has loaded its code and computes, and may be killed


@dataclass(eq=False)
class Watch:
    """A sampler of CPU seconds, resident memory and disk of a process and all its descendants; `kills`: which to kill, driver or worker."""

    folder: Path
    kills: list[str]
    cpu: dict[tuple[int, float], float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    killed: dict[str, float] = field(default_factory=dict)
    disk: float = 0.0
    _looked: float = 0.0

    def until_end(self, process: subprocess.Popen[bytes]) -> int:
        """Sample until the process ends; return its exit status."""
        driver, started = psutil.Process(process.pid), time.monotonic()
        while (status := process.poll()) is None:
            with contextlib.suppress(psutil.Error):
                workers = [one for one in driver.children(recursive=True) if _is_worker(one)]
                for one in (driver, *driver.children(recursive=True)):
                    self._sample(one, "driver" if one == driver else "worker")
                self._kill(driver, workers, time.monotonic() - started)
            if time.monotonic() > self._looked + DISK_SECONDS:
                self.disk, self._looked = max(self.disk, _bytes(self.folder)), time.monotonic()
            time.sleep(SAMPLE_SECONDS)
        return status

    def _sample(self, one: psutil.Process, role: str) -> None:
        with contextlib.suppress(psutil.Error, OSError, IndexError):
            times = one.cpu_times()
            self.cpu[one.pid, one.create_time()] = times.user + times.system
            peak = int(Path(f"/proc/{one.pid}/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
            self.peaks[role] = max(self.peaks.get(role, 0.0), peak)

    def _kill(self, driver: psutil.Process, workers: list[psutil.Process], seconds: float) -> None:
        """Kill the driver once some of the inputs are read, a worker once the pages are written."""
        if "driver" in self.kills and len(list(self.folder.glob("store/work/**/*.runs"))) >= 3:
            self.kills.remove("driver")
            self.killed["driver"] = seconds
            driver.kill()
        elif "worker" in self.kills and workers and "driver" not in self.kills and any(self.folder.glob("store/objects/pages/*/*")):
            busy = [one for one in workers if sum(one.cpu_times()[:2]) > BUSY_SECONDS]
            if busy:
                self.kills.remove("worker")
                self.killed["worker"] = seconds
                busy[0].kill()


def _is_worker(process: psutil.Process) -> bool:
    return "spawn_main" in " ".join(process.cmdline())


def _bytes(folder: Path) -> float:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(path, name).stat().st_blocks * 512
    return total


def curated(folder: Path, gigabytes: float, data: Path, kills: list[str], *options: str) -> tuple[dict[str, Any], list[Any]]:
    """Curate a web of this size in a store in `folder`; return the costs, and key and digest of every artifact."""
    web = Web.of(data, int(gigabytes * 1e9), folder / "web")
    web.folder.mkdir(parents=True, exist_ok=True)
    watch = Watch(folder, kills)
    started = time.perf_counter()
    with served(web) as addresses, (folder / "log").open("ab") as log:
        inputs = [word for address in addresses for word in ("--input", address)]
        command = [sys.executable, "-m", "puna.flows.cli.main", "run", "curate", "--recipe", "clean", *inputs, *options]
        command += ["--store", str(folder / "store"), "--json"]
        own = os.pathsep.join(filter(None, [str(ROOT / ".pkg"), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": own, "OMP_NUM_THREADS": "1"}
        while True:
            with (folder / "made.jsonl").open("wb") as made:
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=made, stderr=log)
                status = watch.until_end(process)
            if status != -9:
                break
            web.again()
    seconds = time.perf_counter() - started
    if status:
        sys.exit(f"{' '.join(command[:6])}: ended with {status}; see {folder / 'log'}")
    artifacts = [json.loads(line) for line in (folder / "made.jsonl").read_text().splitlines() if line.startswith("{")]
    mb = next(one for one in artifacts if one["kind"] == "pages")["metrics"]["body_bytes"] / 1e6
    cpu = sum(watch.cpu.values())
    cost = {
        "html_mb": mb, "cpu_s": cpu, "mb_s": mb / cpu, "cpu_s_gb": cpu / mb * 1e3, "seconds": seconds, "web_cpu_s": web.seconds,
        "driver_peak_mb": watch.peaks["driver"], "worker_peak_mb": watch.peaks.get("worker", 0.0), "disk_peak_gb": watch.disk / 1e9,
        "pages": artifacts[0]["rows"].get("pages"), "kept": artifacts[-1]["rows"].get("documents"),
        **{f"{name}_killed_at_s": at for name, at in watch.killed.items()},
    }  # fmt: skip
    return cost, [(one["step"], one["key"], one["data_digest"]) for one in artifacts]


def figures(folder: Path, sizes: list[float], data: Path, same_at: float | None) -> dict[str, Any]:
    """Return the figures that the module describes. `same_at`: gigabytes of the web that Dask and Ray also curate, with two workers
    each."""
    results: dict[float, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for gigabytes in sorted(sizes):
        kills = ["driver", "worker"] if gigabytes == max(sizes) > FROM_GB else []
        results[gigabytes], contents = _size(folder / f"{gigabytes:g}", gigabytes, data, kills, "--workers", "2")
        found |= {f"size_{gigabytes:g}_gb_{name}": value for name, value in results[gigabytes].items()}
        for engine in ("dask", "ray") if gigabytes == same_at else ():
            if importlib.util.find_spec(engine):
                _, other = _size(folder / f"{gigabytes:g}-{engine}", gigabytes, data, [], "--workers", "2", "--executor", engine)
                found[f"sizes_same_{engine}"] = int(other == contents)
    large = [size for size in sorted(results) if size >= FROM_GB]
    if len(large) > 1:
        first, last = results[large[0]], results[large[-1]]
        found["memory_growth"] = max(last[name] / first[name] for name in ("driver_peak_mb", "worker_peak_mb")) - 1
        found["seconds_per_gb_growth"] = last["cpu_s_gb"] / first["cpu_s_gb"] - 1
    return found


def _size(folder: Path, gigabytes: float, data: Path, kills: list[str], *options: str) -> tuple[dict[str, Any], list[Any]]:
    """Return the result of one run, from an earlier attempt if that has ended. Its store is removed, its log stays."""
    result = folder / "result.json"
    if not result.exists():
        folder.mkdir(parents=True, exist_ok=True)
        value = curated(folder, gigabytes, data, kills, *options)
        result.write_text(json.dumps(value))
        for name in ("web", "store"):
            shutil.rmtree(folder / name)
    cost, contents = json.loads(result.read_text())
    print(json.dumps({"gigabytes": gigabytes, "options": options, **cost}), file=sys.stderr, flush=True)
    return cost, contents
