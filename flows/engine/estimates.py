"""Estimates of a step's time, disk, memory and output rows, from the manifests of earlier runs.

Each is a power law in the input rows (and bytes of models) and in the numeric settings that differ between the runs. It is fitted by
Bayesian linear regression on logarithms (Bishop 2006, section 3.3): a prior decides what the runs do not show, so that one run already
gives an estimate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from puna.flows.html.markup import stored
from puna.stages.contract import External
from puna.storage import Artifact, Store

NEWEST = 30
"""Earlier runs of a stage that are looked at."""
NOISE = 0.1
"""Standard deviation of the logarithm of a measurement of the same work."""
FIELD = (0.0, 0.5)
"""Mean and standard deviation of the exponent of a number of the configuration."""
SIZES: Mapping[str, tuple[float, float]] = {"seconds": (0.7, 0.3), "bytes": (0.9, 0.3), "memory": (0.2, 0.2), "rows": (1.0, 0.2)}
"""The same of the exponent of what comes in, for each thing that is expected."""
LARGEST = 80.0
"""Logarithm of the largest estimate."""
FREE = 10.0
"""Standard deviation of the constant: nothing is expected of it."""


@dataclass(frozen=True)
class Size:
    """The size of an artifact or a file. `rows`: of its main table, 0 where it has none."""

    rows: float
    bytes: float

    @classmethod
    def of(cls, item: Artifact | External) -> Size:
        if isinstance(item, External):
            return cls(0, sum(file.bytes for file in item.files))
        return cls(item.rows() if item.kind in item.tables else 0, stored(item))


@dataclass(frozen=True)
class Expected:
    """An estimate for a step: seconds, bytes on disk, peak bytes of memory, output rows. `runs`: earlier runs that it rests on."""

    seconds: float
    bytes: float
    memory: float
    rows: float
    runs: int

    @property
    def size(self) -> Size:
        return Size(self.rows, self.bytes)


@dataclass(frozen=True)
class _Past:
    came: Size
    numbers: Mapping[str, float]
    words: Mapping[str, Any]
    gave: Mapping[str, float]


class Experience:
    """Measurements of earlier runs of every stage in a store."""

    def __init__(self, store: Store) -> None:
        sizes: dict[str, Size] = {}
        self._past: defaultdict[str, list[_Past]] = defaultdict(list)
        for artifact in store.artifacts():
            m = artifact.manifest
            own = sizes[artifact.key] = Size.of(artifact)
            if "seconds" not in m.timings:
                continue
            input_size = together([sizes[item.key] for item in m.inputs if item.key in sizes])
            gave = {"seconds": m.timings["seconds"], "bytes": own.bytes, "memory": m.peak_memory_bytes, "rows": own.rows}
            self._past[m.stage].append(_Past(input_size, *_parted(m.config), gave))

    def expect(self, stage: str, config: Mapping[str, Any], sizes: Sequence[Size]) -> Expected | None:
        """Return the estimate for a stage on inputs of these sizes; None if it never ran in this store."""
        past = self._past.get(stage, [])
        if not past:
            return None
        numbers, words = _parted(config)
        differing = [sum(one.words.get(name) != words.get(name) for name in {*one.words, *words}) for one in past]
        past = [one for one, count in zip(past, differing, strict=True) if count == min(differing)][-NEWEST:]
        now = _Past(together(sizes), numbers, words, {})
        varied = sorted(name for name in numbers if len({one.numbers.get(name) for one in (*past, now)} - {None}) > 1)
        rows = np.array([_features(one, varied, now) for one in (*past, now)])
        features, wanted_features = rows[:-1], rows[-1]
        estimates = {name: _estimate(features, [one.gave[name] for one in past], wanted_features, prior) for name, prior in SIZES.items()}
        return Expected(estimates["seconds"], estimates["bytes"], estimates["memory"], round(estimates["rows"]), len(past))


def together(sizes: Sequence[Size]) -> Size:
    return Size(sum(size.rows for size in sizes), sum(size.bytes for size in sizes))


def _parted(config: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the numbers above 0 of a configuration, and all the rest of it; without its seed."""
    fields = {name: value for name, value in _leaves(config).items() if name != "seed"}
    numbers = {name: float(v) for name, v in fields.items() if isinstance(v, int | float) and not isinstance(v, bool) and v > 0}
    return numbers, {name: value for name, value in fields.items() if name not in numbers}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested groups and lists by their paths."""
    inside = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inside is None:
        return {path: value}
    return {name: leaf for key, item in inside for name, leaf in _leaves(item, f"{path}.{key}" if path else str(key)).items()}


def _features(one: _Past, varied: Sequence[str], now: _Past) -> list[float]:
    """Return 1, the log of the input size, and the logs of the varied numbers; a number that an earlier run lacks counts as today's."""
    rows_or_bytes = one.came.rows or now.came.rows if now.came.rows else one.came.bytes or now.came.bytes
    return [1.0, math.log1p(rows_or_bytes), *(math.log(one.numbers.get(name, now.numbers[name])) for name in varied)]


def _estimate(features: Any, measured: Sequence[float], point: Any, prior: tuple[float, float]) -> float:
    """Return the expected size: the posterior mean, whose exponents are drawn to their priors as far as the measurements do not tell.

    A regression on logarithms may go below 0, or past every number: the estimate stays between.
    """
    fields = features.shape[1] - 2
    mean = np.array([0.0, prior[0], *[FIELD[0]] * fields])
    precision = np.diag(np.array([FREE, prior[1], *[FIELD[1]] * fields]) ** -2.0)
    noise = NOISE**-2.0
    logarithms = np.log1p(np.maximum(measured, 0.0))
    exponents = np.linalg.solve(precision + noise * features.T @ features, precision @ mean + noise * features.T @ logarithms)
    return math.expm1(min(max(float(point @ exponents), 0.0), LARGEST))
