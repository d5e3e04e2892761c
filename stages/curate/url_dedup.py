"""`url_dedup`: the newest version of each address."""

from __future__ import annotations

import pyarrow as pa
from pydantic import Field

from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.stages.curate.rows.removal import without, write_removed
from puna.stages.curate.text import urls
from puna.storage import Part


class UrlDedupConfig(StageConfig):
    """What makes two addresses the same."""

    normalize: bool = Field(
        True, description="Compare normalised addresses (scheme, www, tracking parameters, … do not count) instead of the written ones"
    )


@stage(kind="documents", filters="documents")
def url_dedup(documents: Documents, config: UrlDedupConfig, run: StageRun) -> None:
    """Keep the newest version of each address (Llama 3, section 3.1.1); of equally new ones the one with the smallest id."""
    parts = run.parts(documents, columns=["id", "url", "fetched_at"])
    tables = list(run.map(_addresses, parts, config, rows=len(parts)))
    if not tables:
        return
    rows = pa.concat_tables(tables)
    # newest first within an address; documents arrive sorted by id, and the id breaks ties
    rows = rows.sort_by([("address", "ascending"), ("fetched_at", "descending"), ("id", "ascending")])
    address, ids, fetched = (rows.column(name).to_pylist() for name in ("address", "id", "fetched_at"))
    removed, kept = [], 0
    duplicates, dropped = [], []
    for row in range(1, len(ids)):
        if address[row] != address[row - 1]:
            kept = row
            continue
        removed.append(ids[row])
        evidence = {"id": ids[row], "kept_id": ids[kept], "cluster": ids[kept], "method": "url", "similarity": 1.0}
        duplicates.append(evidence)
        detail = f"{address[row]}: {ids[kept]} was fetched {fetched[kept]:%Y-%m-%d %H:%M:%S}"
        dropped.append({"id": ids[row], "rule": "same_url", "value": None, "threshold": None, "detail": detail})
    run.write_rows(duplicates, "duplicates")
    run.write_rows(dropped, "dropped")
    run.transform(without, documents, write_removed(run.scratch, removed))
    run.metric("removed", len(removed))


def _addresses(part: Part, config: UrlDedupConfig) -> pa.Table:
    """Id, time and comparable address of the rows of one part."""
    table = part.read()
    written = table.column("url").to_pylist()
    address = [urls.normalized(url) for url in written] if config.normalize else written
    return table.select(["id", "fetched_at"]).append_column("address", pa.array(address, pa.string()))
