"""`url_dedup`: removal of all documents with the same URL except the newest."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pydantic import Field
from xxhash import xxh3_64_intdigest

from puna.stages import urls
from puna.stages.contract import Documents, StageConfig, StageRun, stage
from puna.stages.curate.removal import DECIDED, remove
from puna.storage import Part
from puna.storage.exchange import Partition, partitions

ROW_BYTES = 150  # approximate bytes per row: a URL, an id and a time


class UrlDedupConfig(StageConfig):
    normalize: bool = Field(True, description="Ignore scheme, www, tracking parameters and similar differences between URLs")


@stage(kind="documents", filters="documents")
def url_dedup(documents: Documents, config: UrlDedupConfig, run: StageRun) -> None:
    """Keep the newest document of each URL (Llama 3, section 3.1.1), and among equally new ones the one with the smallest id."""
    shards = documents.parts(columns=["id", "url", "fetched_at"], rows=1 << 17)
    by_address = run.exchange(_addresses, shards, config, by="hash", partitions=partitions(ROW_BYTES * documents.rows()))
    remove(run, documents, _older, by_address.nonempty_parts, method="url", rule="same_url")


def _addresses(part: Part, config: UrlDedupConfig) -> pa.Table:
    table = part.read()
    addresses = table.column("url").to_pylist()
    address = [urls.normalize(url) for url in addresses] if config.normalize else addresses
    hashes = np.array([xxh3_64_intdigest(one.encode("utf-8", "surrogatepass")) for one in address], np.uint64)
    columns = {"id": table["id"], "fetched_at": table["fetched_at"], "address": pa.array(address, pa.string()), "hash": hashes}
    return pa.table(columns)


def _older(addresses: Partition) -> pa.Table:
    rows = addresses.read()
    rows = rows.sort_by([("address", "ascending"), ("fetched_at", "descending"), ("id", "ascending")])
    address, ids, fetched = (rows.column(name).to_pylist() for name in ("address", "id", "fetched_at"))
    results, survivor = [], 0
    for row in range(1, len(ids)):
        if address[row] != address[row - 1]:
            survivor = row
            continue
        detail = f"{address[row]}: {ids[survivor]} was fetched {fetched[survivor]:%Y-%m-%d %H:%M:%S}"
        results.append({"id": ids[row], "kept_id": ids[survivor], "similarity": 1.0, "detail": detail})
    return pa.Table.from_pylist(results, schema=DECIDED)
