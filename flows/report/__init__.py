"""Reports: self-contained HTML pages about one run, or about the comparison of two runs."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa

from puna.flows.report.page import MAKER, comparison, page
from puna.flows.report.run import Run
from puna.storage import PunaError, Store
from puna.storage.errors import DamagedArtifact
from puna.storage.files import write_bytes

__all__ = ["place", "write", "written_before"]

HEAD_BYTES = 1024  # bytes at the start of a page that contain the digest of the code that wrote it


def write(store: Store, run: str, output: Path | None, compare: str | None = None) -> Path:
    """Write the page about `run` ("latest": the newest), or its comparison with the run `compare`. Return the page's path or, for the
    default place (runs/RUN.html or runs/COMPARE-RUN.html in the store), the path of a local copy. Unfinished runs have a page, too. Raise
    PunaError if there is no such run, an artifact cannot be read, or writing fails."""
    about = Run.open(store, run)
    other = None if compare is None else Run.open(store, compare)
    name = about.log.name
    own = place(name if other is None else f"{other.log.name}-{name}")
    target = output if output is not None else Path(store.uri) / own
    if target.is_dir():
        raise PunaError(f"report {target}: is a folder; give the name of an HTML file")
    try:
        content = (page(about) if other is None else comparison(other, about)).encode("utf-8")
    except (pa.ArrowException, duckdb.Error, FileNotFoundError) as error:
        for artifact in (step.artifact for step in about.steps):
            if damage := artifact.damage(quick=True):
                raise DamagedArtifact.of(artifact.id, damage) from error
        reason = str(error).partition("\n")[0]
        raise PunaError(f"report of run {name}: an artifact cannot be read ({reason}); `puna verify` names the damaged one") from error
    try:
        if output is None:
            store.files.write(own, content)
            return store.files.local(own)
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, content, lasting=False)
    except OSError as error:
        raise PunaError(f"report {target}: cannot be written ({error}); name another file with --output") from error
    return target


def place(name: str) -> str:
    return f"runs/{name}.html"


def written_before(store: Store, run: str) -> Path | None:
    """Return the path of an earlier run's page if the current code wrote it, all runs since then have the same artifacts, and `run`
    computed none; else None."""

    def artifacts(name: str) -> dict[str, str]:  # a dictionary, since the steps of two runs may end in different orders
        return {record.step: record.key for record in store.log(name).made}

    log = store.log(run)
    if not all(record.reused for record in log.made):
        return None
    own, names = artifacts(run), store.runs()
    for name in reversed([name for name in names[: names.index(run)] if f"-{log.flow}-" in name]):
        if artifacts(name) != own:
            return None
        before = place(name)
        if store.files.stat(before) is not None:
            return store.files.local(before) if MAKER.encode() in store.files.read(before, 0, HEAD_BYTES) else None
    return None
