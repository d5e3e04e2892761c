"""Documents from several inputs as one table: every row once, with the source name given to its input."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest

from puna.stages.contract import Facts, InputFacts, execute
from puna.stages.curate.gather import GatherConfig, gather
from puna.storage import Artifact, PunaError, Store


def documents(store: Store, *rows: tuple[str, int, str]) -> Artifact:
    """Return documents of the source `web` from (id, day, text)."""
    table = [
        {"id": i, "url": f"https://x.org/{i}", "fetched_at": datetime(2024, 1, day, tzinfo=UTC), "source": "web", "title": None, "text": text}
        for i, day, text in rows
    ]
    return store.import_table("documents", pa.Table.from_pylist(table))


def name(number: int) -> str:
    return f"{number:032x}"


def test_the_newest_of_each_id_is_kept_under_the_name_of_its_input(tmp_path) -> None:
    store = Store.open(tmp_path)
    first = documents(store, (name(1), 1, "old"), (name(2), 2, "alone"), (name(3), 3, "equal, first"))
    second = documents(store, (name(1), 2, "new"), (name(3), 3, "equal, second"))
    third = documents(store, (name(1), 1, "old too"), (name(4), 1, "fourth"))
    made = execute(gather, GatherConfig(sources=("", "news", "wiki")), {"documents": [first, second, third]}, store)
    found = {row["id"]: (row["source"], row["text"]) for row in made.read().to_pylist()}
    assert found == {name(1): ("news", "new"), name(2): ("web", "alone"), name(3): ("web", "equal, first"), name(4): ("wiki", "fourth")}
    dropped = made.read("dropped").to_pylist()
    assert {row["rule"] for row in dropped} == {"same_id"} and len(dropped) == made.manifest.metrics["removed"] == 3
    assert sorted(row["detail"].partition(":")[0] for row in dropped) == [name(1), name(1), name(3)]


def test_the_order_of_inputs_and_their_shards_do_not_count(tmp_path) -> None:
    generator = np.random.default_rng(0)
    store = Store.open(tmp_path)
    rows = [(generator.bytes(16).hex(), int(generator.integers(1, 28)), "x" * int(generator.integers(1, 9000))) for _ in range(900)]
    parts = [documents(store, *rows[at::3]) for at in range(3)]
    one, other = (execute(gather, GatherConfig(), {"documents": given}, store) for given in (parts, parts[::-1]))
    assert one.data_digest == other.data_digest and one.record().cut > 1
    assert one.read(columns=["id", "text"]).to_pylist() == sorted(({"id": i, "text": t} for i, _, t in rows), key=lambda row: row["id"])


def test_a_list_of_names_names_every_input(tmp_path) -> None:
    store = Store.open(tmp_path)
    given = [documents(store, (name(n), 1, "text")) for n in range(2)]
    facts = Facts({"documents": (InputFacts("documents"), InputFacts("documents"))}, None)
    assert gather.unmet(GatherConfig(sources=("a",)), facts) == ["gather: sources names 1 of 2 inputs; name all"]
    assert not gather.unmet(GatherConfig(sources=("a", "b")), facts) and not gather.unmet(GatherConfig(), facts)
    with pytest.raises(PunaError, match="sources names 1 inputs, but there are 2"):
        execute(gather, GatherConfig(sources=("a",)), {"documents": given}, store)
