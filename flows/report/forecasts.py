"""Forecasts of a store, each beside the loss that was measured later."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from puna.storage import Artifact, Store

SAME = 0.1
"""Difference in the logarithm of operations and of tokens below which a run is the one that was forecast."""


@dataclass(frozen=True)
class Forecast:
    """A forecast: loss in nats per token with its interval, its size, and model and loss of the run that followed, if any."""

    id: str
    predicted: float
    low: float
    high: float
    flops: float
    tokens: float
    model: str = ""
    measured: float | None = None

    @property
    def inside(self) -> bool | None:
        """True if the measured loss lies in the interval; None where nothing was measured."""
        return None if self.measured is None else self.low <= self.measured <= self.high


def forecasts(store: Store) -> list[Forecast]:
    """Return all forecasts, oldest first; one is repeated for every run of its size on its ladder's tokens."""
    artifacts = store.artifacts()
    models = [(artifact, read) for artifact in artifacts if artifact.manifest.stage == "pretrain" and (read := _tokens(artifact))]
    found: list[Forecast] = []
    for artifact in artifacts:
        if artifact.manifest.stage != "choose_size":
            continue
        metrics = artifact.manifest.metrics
        low, high = float(metrics["predicted_loss_low"]), float(metrics["predicted_loss_high"])
        own = Forecast(artifact.id, float(metrics["predicted_loss"]), low, high, float(metrics["flops"]), float(metrics["tokens"]))
        sources = set(_ladder_tokens(artifact, store))
        runs = [model for model, read in models if read in sources and _same(model, own.flops, own.tokens)]
        found += [replace(own, model=model.id, measured=float(model.manifest.metrics["validation_loss"])) for model in runs] or [own]
    return found


def _tokens(artifact: Artifact) -> str:
    """Return the digest of the tokens that a training read first."""
    return next((record.data_digest for record in artifact.manifest.inputs if record.kind == "tokens"), "")


def _ladder_tokens(forecast: Artifact, store: Store) -> Iterator[str]:
    for record in forecast.manifest.inputs:
        law = store.find(record.kind, record.key)
        for rung in law.manifest.inputs if law else ():
            ladder = store.find(rung.kind, rung.key)
            if ladder:
                yield _tokens(ladder)


def _same(model: Artifact, flops: float, tokens: float) -> bool:
    numbers = model.manifest.metrics
    return all(abs(math.log(float(numbers[name]) / value)) < SAME for name, value in (("flops", flops), ("trained_tokens", tokens)))
