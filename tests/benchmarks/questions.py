"""The time of the queries of docs/questions.md on a store of a million documents, and whether readers and writers block each other.

    PYTHONPATH=.pkg python tests/benchmarks/questions.py --json                       # 1,000,000 documents
    PYTHONPATH=.pkg python tests/benchmarks/questions.py --part crowd --seconds 300 --json

The store is generated: documents written directly through storage, a filter that keeps nine tenths by reference, a stage that changes a
hundredth, signals, side tables, and the small tables of a whole run. `seconds`: opening the catalog, creating the views and answering the
query, on a new connection for each query; `cpu`: CPU seconds in this process. `file`: the same through `puna.duckdb`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from puna.stages.contract import Documents, StageConfig, StageRun, execute, stage  # noqa: E402
from puna.storage import Artifact, Identity, InputRecord, Store, catalog, database  # noqa: E402

QUESTIONS = re.findall(r"### \d+\. (.*?)\n.*?```sql\n(.*?)```", (ROOT / "docs/questions.md").read_text(encoding="utf-8"), re.DOTALL)


def commit(store: Store, stage: str, kind: str, inputs: list[Artifact], **made: pa.Table) -> Artifact:
    """Return a committed artifact with the given tables."""
    identity = Identity(stage, inputs=[InputRecord(a.kind, a.kind, a.key, a.data_digest, a.manifest.stage) for a in inputs])
    with store.work(identity.key) as work:
        for name, rows in made.items():
            work.add(name, rows, "all")
        return work.commit(kind, identity.key, identity, timings={"seconds": 1.0})


def filled(folder: Path, count: int) -> Store:
    """Return the generated store."""
    from tests.benchmarks.store_corpus import made_up
    from tests.flows.report.conftest import everything

    built = everything(folder)
    store, draw = built.store, np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as elsewhere:  # this artifact belongs to no stage, so it is made outside the store
        documents = made_up(Store.open(elsewhere), count, lines=2).read()
    texts = documents.select(["id", "url", "fetched_at", "source", "text"])
    more = {"content_type": ["text/html"] * count, "charset": pa.nulls(count, pa.string()), "body": texts["text"].cast(pa.binary())}
    pages = texts.drop_columns(["text"])
    for name, values in more.items():
        pages = pages.append_column(name, pa.chunked_array([values]) if isinstance(values, pa.Array) else values if isinstance(values, pa.ChunkedArray) else pa.array(values))
    crawl = commit(store, "ingest", "pages", [], pages=pages)
    extracted = commit(store, "extract", "documents", [crawl], documents=documents)
    ids = texts["id"]
    words = pa.array(draw.integers(1, 500, count))
    numbers = {f"signal_{n}": pa.array(draw.random(count)) for n in range(6)}
    scored = commit(store, "heuristics", "signals", [extracted], signals=pa.table({"id": ids, "words": words, **numbers}))
    language = pa.array(np.array(["en", "de", "fr", "es"])[draw.integers(0, 4, count)])
    spoken = commit(store, "language", "signals", [extracted], signals=pa.table({"id": ids, "language": language, "language_score": pa.array(draw.random(count))}))

    @stage(kind="documents", version="1")
    def select(documents: Documents, config: StageConfig, run: StageRun) -> None:
        """Keep nine of ten documents."""
        run.transform(keep, documents)

    @stage(kind="documents", version="1")
    def pii(documents: Documents, config: StageConfig, run: StageRun) -> None:
        """Change one of a hundred documents."""
        run.transform(change, documents)

    kept = execute(select, StageConfig(), {"documents": extracted}, store)
    changed = execute(pii, StageConfig(), {"documents": kept}, store)
    gone = ids.filter(pc.equal(pc.utf8_slice_codeunits(ids, 0, 1), "0"))
    n = len(gone)
    dropped = pa.table({"id": gone, "rule": pa.array(np.array(["min_words", "language", "blank"])[draw.integers(0, 3, n)]), "value": pa.array(draw.random(n)), "threshold": pa.array(np.full(n, 0.5)), "detail": pa.nulls(n, pa.string())})
    alike = pa.table({"id": gone, "kept_id": ids.take(pa.array(draw.integers(0, count, n))), "method": ["minhash"] * n, "similarity": pa.array(draw.random(n)), "cluster": gone})
    lines = pa.table({"id": gone, "line": pa.array(np.zeros(n, np.int32)), "text": pa.array(np.array(["Share this page", "Read more", "Cookies"])[draw.integers(0, 3, n)]), "rule": ["line_occurrences"] * n, "value": pa.array(np.full(n, 9.0))})
    last = commit(store, "decontaminate", "documents", [changed, scored, spoken], documents=changed.read(), dropped=dropped, duplicates=alike, removed_lines=lines)
    left = last.read(columns=["id"])["id"]
    m = len(left)
    category = pa.array(np.array(["science", "code", "news"])[draw.integers(0, 3, m)])
    mixture = pa.table({"id": left, "category": category, "split": ["train"] * m, "repeats": pa.array(np.ones(m, np.int32)), "weight": pa.array(np.full(m, 1 / 3))})
    commit(store, "mix", "mixture", [last], mixture=mixture)
    store.set_alias("documents@latest", last)
    store.set_alias("policy@latest", built.at["average_2"])
    return store


def keep(rows: pa.Table) -> pa.Table:
    """Return all rows but those whose id begins with 0 (a sixteenth)."""
    return rows.filter(pc.not_equal(pc.utf8_slice_codeunits(rows["id"], 0, 1), "0"))


def change(rows: pa.Table) -> pa.Table:
    """Return the rows with a changed text if the id ends in 00."""
    texts = pc.if_else(pc.ends_with(rows["id"], "00"), pc.binary_join_element_wise(rows["text"], "masked", " "), rows["text"])
    return rows.set_column(rows.schema.get_field_index("text"), "text", texts)


def ask(store: Store) -> list[dict[str, Any]]:
    """Run each query three times; report the median."""
    file, rows = f"{store.uri}/{database.FILE}", []
    with catalog.Catalog(store) as opened:
        address = opened.sql("select url from newest.pages limit 1").fetchall()[0][0]
    for words, asked in QUESTIONS:
        query = asked.replace("https://example.org/a-page", address)
        taken = []
        for _ in range(3):
            wall, cpu = time.perf_counter(), time.process_time()
            with catalog.Catalog(store) as opened:
                count = catalog.run(opened, query).num_rows
            spent, used = time.perf_counter() - wall, time.process_time() - cpu
            wall = time.perf_counter()
            with duckdb.connect(file, read_only=True) as client:
                client.sql(query).fetchall()
            taken.append((spent, used, time.perf_counter() - wall))
        seconds, cpu, other = (statistics.median(column) for column in zip(*taken, strict=True))
        rows.append({"question": words, "rows": count, "seconds": round(seconds, 3), "cpu": round(cpu, 3), "file": round(other, 3)})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def read(uri: str, until: float, pause: float, said: Any) -> None:
    """Open the file, run a query, wait with the file open, query again, close; repeat."""
    asked, errors = 0, []
    while time.time() < until:
        try:
            with duckdb.connect(f"{uri}/{database.FILE}", read_only=True) as client:
                client.sql("select rule, count(*) from dropped group by rule").fetchall()
                time.sleep(pause)
                client.sql("select count(*) from newest.signals").fetchall()
            asked += 1
        except Exception as error:  # noqa: BLE001  what goes wrong is what is measured
            errors.append(str(error)[:200])
    said.put(("reader", asked, errors))


def write(uri: str, number: int, until: float, pause: float, said: Any) -> None:
    """Commit an artifact and update the file; repeat."""
    store, made, errors = Store.existing(uri), 0, []
    while time.time() < until:
        try:
            rows = pa.table({"id": [f"{number:016x}{made:016x}"], "words": [made]})
            commit(store, f"writer-{number}-{made}", "signals", [], signals=rows)
            database.write(store)
            made += 1
            time.sleep(pause)
        except Exception as error:  # noqa: BLE001
            errors.append(str(error)[:200])
    said.put(("writer", made, errors))


def crowd(store: Store, readers: int, writers: int, seconds: float, pause: float) -> dict[str, Any]:
    """Run readers of the file and writers of the store at once; `late`: artifacts missing from the file at the end."""
    database.write(store)
    context = multiprocessing.get_context("fork")
    said, until = context.Queue(), time.time() + seconds
    jobs = [context.Process(target=read, args=(store.uri, until, pause, said)) for _ in range(readers)]
    jobs += [context.Process(target=write, args=(store.uri, number, until, pause, said)) for number in range(writers)]
    for job in jobs:
        job.start()
    found = [said.get() for _ in jobs]
    for job in jobs:
        job.join()
    with duckdb.connect(f"{store.uri}/{database.FILE}", read_only=True) as client:
        (there,) = client.sql("select count(*) from artifacts where stage like 'writer-%'").fetchall()[0]
    made = sum(count for kind, count, _ in found if kind == "writer")
    errors = [error for *_, some in found for error in some]
    return {
        "readers": readers, "writers": writers, "seconds": seconds, "pause": pause, "reads": sum(c for k, c, _ in found if k == "reader"), "commits": made,
        "late": made - there, "errors": len(errors), "lock_errors": sum("lock" in e.lower() for e in errors), "first_errors": errors[:3],
    }  # fmt: skip


def main() -> None:
    """Print one JSON object."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--part", choices=("questions", "crowd"), default="questions")
    arguments.add_argument("--documents", type=int, default=1_000_000)
    arguments.add_argument("--seconds", type=float, default=300.0)
    arguments.add_argument("--readers", type=int, default=100)
    arguments.add_argument("--writers", type=int, default=10)
    arguments.add_argument("--pause", type=float, default=1.0, help="seconds that a reader and a writer think")
    arguments.add_argument("--folder", type=Path, help="where the store is made, or is already")
    arguments.add_argument("--json", action="store_true")
    asked = arguments.parse_args()
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "duckdb": duckdb.__version__, "load": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as folder:
        place = asked.folder or Path(folder)
        if asked.part == "crowd":
            from tests.flows.report.conftest import everything

            found: dict[str, Any] = crowd(everything(place / "crowd").store, asked.readers, asked.writers, asked.seconds, asked.pause)
        else:
            store = Store.existing(place) if (place / "store.json").exists() else filled(place, asked.documents)
            wall = time.process_time()
            database.write(store)
            spent = time.process_time() - wall
            rows = ask(store)
            found = {"documents": asked.documents, "write_cpu": round(spent, 2), "slowest": max(r["seconds"] for r in rows), "under_1_s": sum(r["seconds"] < 1 for r in rows), "questions": rows}
    print(json.dumps(about | found, indent=None if asked.json else 1))


if __name__ == "__main__":
    main()
