"""Estimates of a step's time, disk, memory and output rows: the most similar earlier run, scaled by the size of the inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from puna.flows.html.markup import stored
from puna.stages.contract import External
from puna.storage import Artifact, Store
from puna.storage.explain import flat

GROWTH = {"seconds": 0.7, "bytes": 0.9, "memory": 0.2, "rows": 1.0}
"""Exponents of the input's size."""
LARGEST = 1e30


@dataclass(frozen=True)
class Size:
    """The size of an artifact or a file. `rows`: of its main table, 0 if it has none."""

    rows: float
    bytes: float

    @classmethod
    def of(cls, item: Artifact | External) -> Size:
        if isinstance(item, External):
            return cls(0, sum(file.bytes for file in item.files))
        return cls(item.rows() if item.kind in item.tables else 0, stored(item))


@dataclass(frozen=True)
class Expected:
    """An estimate for a step: seconds, bytes on disk, peak bytes of memory, output rows."""

    seconds: float
    bytes: float
    memory: float
    rows: float

    @property
    def size(self) -> Size:
        return Size(self.rows, self.bytes)


class Experience:
    """Measurements of earlier runs of every stage in a store."""

    def __init__(self, store: Store) -> None:
        sizes: dict[str, Size] = {}
        self._past: defaultdict[str, list[tuple[Size, dict[str, Any], dict[str, float]]]] = defaultdict(list)
        for artifact in store.artifacts():
            m = artifact.manifest
            own = sizes[artifact.key] = Size.of(artifact)
            if "seconds" in m.timings:
                came = together([sizes[item.key] for item in m.inputs if item.key in sizes])
                gave = {"seconds": m.timings["seconds"], "bytes": own.bytes, "memory": m.peak_memory_bytes, "rows": own.rows}
                self._past[m.stage].append((came, flat(dict(m.config)), gave))

    def expect(self, stage: str, config: Mapping[str, Any], sizes: Sequence[Size]) -> Expected | None:
        """Return the estimate for a stage on inputs of these sizes; None if it never ran in this store.

        The run whose configuration differs in the fewest fields is scaled, the newest of several. The seed does not count.
        """
        past, configuration, now = self._past.get(stage, []), flat(dict(config)), together(sizes)
        if not past:
            return None

        def differing(one: tuple[Size, dict[str, Any], dict[str, float]]) -> int:
            return sum(one[1].get(name) != configuration.get(name) for name in {*one[1], *configuration} - {"seed"})

        before, _, gave = min(reversed(past), key=differing)
        parts = (now.rows, before.rows) if now.rows and before.rows else (now.bytes, before.bytes)
        ratio = parts[0] / parts[1] if parts[1] else 1.0
        seconds, size, memory, rows = (min(gave[name] * ratio**power, LARGEST) for name, power in GROWTH.items())
        return Expected(seconds, size, memory, round(rows))


def together(sizes: Sequence[Size]) -> Size:
    return Size(sum(size.rows for size in sizes), sum(size.bytes for size in sizes))
