"""Figures of the store: all parts, or the named ones.

    python tests/benchmarks/store.py --json [--part NAME …] [--before CHECKOUT]

`curate` and `demo` run the flows on the sample in `--sample` (`puna demo-pages FOLDER` makes it), in separate processes; `--before`, a
checkout of an earlier commit, is measured too. `driver` generates documents, `sizes` a web from the real pages in `--data`. `minhash` and
`lines` are those of `curation.py`, compared with datatrove. `same` compares executors and S3 (moto, with injected faults). `--scratch`
holds temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / ".pkg"), str(ROOT), str(HERE)]
ASKED = argparse.Namespace()
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def puna(store: str | Path, *words: str, checkout: Path = ROOT, **environment: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Run `puna run`; return its artifacts and its cost (see `store_usage.py`)."""
    command = [sys.executable, str(HERE / "store_usage.py"), "run", *words, "--store", str(store), "--json"]
    # An installed package is not compiled again for each process either.
    given = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command, cwd=checkout, env={**given, "PYTHONPATH": str(checkout / ".pkg"), **environment}, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-3000:]}")
    cost = json.loads(done.stderr.splitlines()[-1])
    if (checkout / "flows").resolve() not in Path(code := cost.pop("code")).resolve().parents:
        # Without an `__init__.py` in `.pkg/puna`, an installed puna would come first; an empty file prevents that.
        sys.exit(f"{checkout} was to be measured, {code} ran: make {checkout}/.pkg/puna/__init__.py")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], cost


def inputs(folder: Path, pattern: str = "*.warc.gz") -> list[str]:
    """Return files as command-line options of a run."""
    files = sorted(folder.glob(pattern))
    if not files:
        sys.exit(f"{folder}: no pages; `puna demo-pages {folder}` makes them")
    return [word for file in files for word in ("--input", str(file))]


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yield a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(dir=ASKED.scratch) as folder:
        yield Path(folder)


# --- the flows on the sample ---------------------------------------------------------------------------


def curate() -> dict[str, Any]:
    """Run the demo's curation: MB of HTML per CPU second of all processes, the driver's share, copies of the text, the second run."""
    from puna.storage import Store

    with scratch() as folder:
        made, cost = puna(folder / "store", "curate", "--recipe", "demo", *inputs(ASKED.sample))
        pages = next(one for one in made if one["kind"] == "pages")["metrics"]["body_bytes"] / 1e6
        again, second = puna(folder / "store", "curate", "--recipe", "demo", *inputs(ASKED.sample))
        if not all(one["reused"] for one in again):
            sys.exit("the second run made something again")
        found = {
            "curate_mb": pages, "curate_mb_s": pages / cpu(cost), "curate_cpu_s": cpu(cost), "curate_seconds": cost["seconds"],
            "curate_driver_cpu_share": cost["driver_cpu_s"] / cpu(cost), "curate_reuse_seconds": second["seconds"],
            "curate_reuse_cpu_s": cpu(second), "text_copies": text_copies(Store.open(folder / "store")),
        }  # fmt: skip
        if ASKED.before:
            _, earlier = puna(folder / "before", "curate", "--recipe", "demo", *inputs(ASKED.sample), checkout=ASKED.before.resolve())
            found |= {"curate_before_cpu_s": cpu(earlier), "curate_vs_before": cpu(earlier) / cpu(cost)}
    return found


def cpu(cost: dict[str, float]) -> float:
    """Return the CPU seconds of all processes."""
    return cost["driver_cpu_s"] + cost["workers_cpu_s"]


def text_copies(store: Any) -> float:
    """Return the bytes of text of all documents artifacts in a store, over those of the last one."""
    found = [a for a in store.artifacts() if a.kind == "documents"]
    final = sum(len(t.encode()) for b in found[-1].batches(columns=["text"]) for t in b["text"].to_pylist())
    own = sum(len(t.encode()) for a in found for shard in a.shards() if shard.rows and shard.stored[0] is not None
              for t in shard.stored[0].read(range(len(shard.stored[0].groups)), ["text"])["text"].to_pylist())  # fmt: skip
    return own / final


def demo() -> dict[str, Any]:
    """Return the seconds to reuse the whole demo in the store `--demo`, where it ran before with the same code."""
    words = ("pipeline", "--recipe", "demo", *inputs(ASKED.sample))
    puna(ASKED.demo, *words)
    made, cost = puna(ASKED.demo, *words)
    if not all(one["reused"] for one in made):
        sys.exit("the second run made something again")
    return {"reuse_seconds": cost["seconds"], "reuse_cpu_s": cpu(cost), "reused_artifacts": len(made)}


# --- made-up documents ---------------------------------------------------------------------------------


def driver() -> dict[str, Any]:
    """Curate `--documents` short documents (recipe `clean`): the driver's share of CPU time and its peak memory."""
    import store_corpus

    with scratch() as folder:
        size = store_corpus.write(folder / "pages", ASKED.documents, lines=ASKED.lines)
        words = ("curate", "--recipe", "clean", *inputs(folder / "pages", "*.parquet"), "--workers", str(ASKED.workers))
        made, cost = puna(folder / "store", *words, **ONE_THREAD)
        return {
            "driver_documents": ASKED.documents, "driver_text_mb": size / 1e6, "driver_cpu_share": cost["driver_cpu_s"] / cpu(cost),
            "driver_cpu_s": cost["driver_cpu_s"], "driver_peak_mb": cost["driver_peak_mb"], "driver_worker_peak_mb": cost["worker_peak_mb"],
            "driver_all_cpu_s": cpu(cost), "driver_seconds": cost["seconds"], "driver_kept": made[-1]["rows"].get("documents"),
        }  # fmt: skip


def sizes() -> dict[str, Any]:
    """Curate webs of `--gigabytes` made from the real pages in `--data` (see `store_sizes.py`)."""
    import store_sizes

    with contextlib.nullcontext(ASKED.scratch) if ASKED.scratch else scratch() as folder:
        return store_sizes.figures(folder, ASKED.gigabytes, ASKED.data, ASKED.same_at)


def minhash() -> dict[str, Any]:
    """Measure near-duplicate removal as a stage, compared with datatrove's four stages."""
    import curation_minhash
    import peers

    texts = curation_minhash.corpus(curation_minhash.SPEED_BYTES)
    own = curation_minhash.stage_seconds(texts)
    other = peers.run("datatrove", "peer_minhash_datatrove.py", texts=texts)["seconds"]
    return {"minhash_stage_vs_datatrove": other / own, "minhash_stage_seconds": own, "minhash_datatrove_seconds": other}


def lines() -> dict[str, Any]:
    """Measure line deduplication as a stage, and alone."""
    import curation_line_dedup

    return curation_line_dedup.figures()


def connect() -> dict[str, Any]:
    """Return the seconds to open the catalog of a store of `--artifacts`, most of which was opened before."""
    import pyarrow as pa

    from puna.storage import Store, catalog

    with scratch() as folder:
        store = Store.open(folder)
        row = {"task": "t", "split": "train", "messages": "[]", "tools": None, "reference": None, "verifier": None}
        with mock.patch("os.fsync", lambda descriptor: None):  # the artifacts need not survive a power failure
            for number in range(ASKED.artifacts):
                types = {name: pa.array([value], pa.string()) for name, value in row.items()}
                store.import_table("prompts", pa.table({"id": [f"{number}"], **types}))
        started = time.perf_counter()
        catalog.query(store, "select count(*) from artifacts")
        first = time.perf_counter() - started
        started = time.perf_counter()
        count = catalog.query(store, "select count(*) as n from artifacts")["n"][0].as_py()
        seconds = time.perf_counter() - started
    assert count == ASKED.artifacts
    return {"sql_connect_10k_s": seconds, "sql_connect_first_s": first, "sql_artifacts": count}


# --- the same bytes ------------------------------------------------------------------------------------


def same() -> dict[str, Any]:
    """Compare a curation of part of the sample on every executor and on a failing S3: equal keys and digests."""
    import store_same

    return store_same.figures(puna, inputs(ASKED.sample, ASKED.same_files), scratch, ASKED.same_recipe)


# --- damage --------------------------------------------------------------------------------------------


def flips() -> dict[str, Any]:
    """Count flipped bits in a killed run's files after which the resumed run commits an artifact with different content."""
    import numpy as np
    import store_corpus

    from puna.stages.contract import execute
    from puna.stages.contract import run as module
    from puna.stages.curate.url_filter import UrlFilterConfig, url_filter
    from puna.storage import Store

    generator, wrong, original = np.random.default_rng(0), 0, module.transform_shard
    with scratch() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store = Store.open(folder)
        given = {"documents": store_corpus.made_up(store, 12_000)}
        config = UrlFilterConfig(blocked=("site5.org", "site7.org"))
        expected = execute(url_filter, config, given, store)
        for _ in range(ASKED.flips):
            store.files.remove(expected.place)
            with mock.patch.object(module, "transform_shard", stopped(original, 3)), contextlib.suppress(KeyboardInterrupt):
                execute(url_filter, config, given, store)
            left = sorted(f for f in (Path(folder) / "work").rglob("*") if f.is_file() and "parts" in f.parts)
            flip(left[int(generator.integers(len(left)))], generator)
            made = execute(url_filter, config, given, store)
            wrong += made.manifest.files != expected.manifest.files or bool(made.damage())
    return {"staged_flips_wrong": wrong, "staged_flips": ASKED.flips}


def flip(file: Path, generator: Any) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
    file.write_bytes(bytes(data))


def stopped(original: Callable[[Any], Any], shards: int) -> Callable[[Any], Any]:
    """Return a function that raises an error after `shards` shards."""
    left = iter(range(shards))

    def failing(task: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return original(task)

    return failing


def states() -> dict[str, Any]:
    """Count training states with a flipped bit that are loaded nevertheless."""
    import numpy as np
    import torch

    from puna.models.training.state import load_state, save_state

    generator, loaded, trials = np.random.default_rng(0), 0, min(100, ASKED.flips)
    with scratch() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for trial in range(trials):
            made = save_state(folder / str(trial), 1, {"w": torch.randn(64, 64)}, {"log": []})
            flip(sorted(made.iterdir())[trial % 2], generator)
            loaded += load_state(folder / str(trial)) is not None
    return {"training_state_flips_loaded": loaded, "training_state_flips": trials}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    one.__name__: one for one in (curate, demo, driver, sizes, minhash, lines, connect, same, flips, states)
}


def main() -> None:
    """Run the parts and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="what to measure; may be given more than once; default: everything")
    parser.add_argument("--json", action="store_true", help="one object of named figures")
    for name, default in (("documents", 1_000_000), ("lines", 5), ("artifacts", 10_000), ("flips", 500), ("workers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1, 5, 20, 50])
    parser.add_argument("--same-at", type=float, default=5, help="the size that `sizes` gives to Dask and Ray, too")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="real pages, for `sizes`")
    parser.add_argument("--sample", type=Path, default=Path(".puna/sample"))
    parser.add_argument("--same-files", default="*.warc.gz", help="which files of the sample `same` curates")
    parser.add_argument("--same-recipe", default="demo", help="by which recipe")
    parser.add_argument("--demo", type=Path, default=Path(".puna"), help="a store in which the demo ran")
    parser.add_argument("--before", type=Path, help="a checkout of an earlier state, to be compared with")
    parser.add_argument("--scratch", type=Path, help="where stores are made; default: the system's")
    parser.parse_args(namespace=ASKED)
    for name in ("sample", "demo"):
        setattr(ASKED, name, getattr(ASKED, name).resolve())
    os.environ.setdefault("PUNA_SAMPLE", str(ASKED.sample))
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    for part in ASKED.part or PARTS:
        found |= PARTS[part]()
    found["load_after"] = os.getloadavg()[0]
    if ASKED.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:<32} {value:,.4g}" if isinstance(value, (int, float)) else f"{name:<32} {value}")


if __name__ == "__main__":
    main()
